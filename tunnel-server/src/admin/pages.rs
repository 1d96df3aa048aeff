//! Lists of the admin socket in pages, so that neither end holds the fleet. A page ends at a number
//! of entries or of bytes, and a token leads to the next one: the name of the last entry. Lists are
//! ordered by name, so nodes that come and go meanwhile neither repeat nor hide others.

use std::io;
use std::ops::Bound;

use serde::{Deserialize, Serialize};
use tunnel_process::query::{RepeatedParameter, parameters, set_once};
use tunnel_proto::wire::name::{NameError, NodeName};

use super::RevocationInfo;
use super::status::{NodeSources, NodeStatus, ObservedNode};
use tunnel_ca::revocation::Revocations;

/// Which page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageQuery {
    /// The last entry of the previous page.
    pub after: Option<NodeName>,
    /// Largest number of entries.
    pub limit: usize,
}

/// Reason why a request for a page is refused. Texts of the caller are not repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    #[error("parameter limit is not a number above 0")]
    Limit,
    #[error("parameter continue is not a token of a list; begin again without it")]
    Continue,
    #[error(transparent)]
    Repeated(#[from] RepeatedParameter),
    #[error("unknown parameter; use limit and continue")]
    Unknown,
}

impl Default for PageQuery {
    fn default() -> Self {
        Self {
            after: None,
            limit: PAGE_DEFAULT,
        }
    }
}

impl PageQuery {
    /// Parses the query of a request target. A limit above 1,000 is 1,000. No valid value contains a
    /// character that has to be percent-encoded, so nothing is decoded.
    ///
    /// # Errors
    /// Returns a [`PageError`] for the first parameter that is not valid.
    pub fn parse(query: &str) -> Result<Self, PageError> {
        let (mut limit, mut after) = (None, None);
        for (name, value) in parameters(query) {
            match name {
                "limit" => {
                    let number = value.parse::<u64>().ok().filter(|number| *number > 0);
                    let number = number.ok_or(PageError::Limit)?;
                    let number = usize::try_from(number).unwrap_or(usize::MAX);
                    set_once(&mut limit, number, "limit")?;
                }
                "continue" => {
                    let name = value.parse::<NodeName>();
                    let name = name.map_err(|_invalid| PageError::Continue)?;
                    set_once(&mut after, name, "continue")?;
                }
                _ => return Err(PageError::Unknown),
            }
        }
        Ok(Self {
            after,
            limit: limit.unwrap_or(PAGE_DEFAULT).min(PAGE_MAX),
        })
    }

    /// Returns the request target of a page of `list`.
    pub fn target(&self, list: &str) -> String {
        let token = self.after.iter().map(|name| format!("&continue={name}"));
        format!("/{list}?limit={}{}", self.limit, token.collect::<String>())
    }

    /// Goes to the page behind the one with `token`, and returns whether there is one.
    ///
    /// # Errors
    /// Returns a [`NameError`] if the token is none of a server.
    pub fn advance(&mut self, token: Option<&str>) -> Result<bool, NameError> {
        self.after = token.map(str::parse).transpose()?;
        Ok(self.after.is_some())
    }

    fn bound(&self) -> Bound<&NodeName> {
        (self.after.as_ref()).map_or(Bound::Unbounded, Bound::Excluded)
    }
}

/// Names of nodes, for a list of these nodes only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedNodes {
    pub nodes: Vec<String>,
}

/// A page of the nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodesPage {
    pub nodes: Vec<NodeStatus>,
    /// Whether there are several servers, so that nodes have the name of one.
    pub has_replicas: bool,
    /// Token of the next page; absent on the last one.
    pub r#continue: Option<String>,
}

/// A page of the revocations in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationsPage {
    pub revocations: Vec<RevocationInfo>,
    /// Token of the next page; absent on the last one.
    pub r#continue: Option<String>,
}

impl NodeSources {
    /// Returns a page of all nodes.
    pub fn page(&self, query: &PageQuery) -> NodesPage {
        let limit = query.limit.min(PAGE_MAX);
        let view = self.view();
        // One more than the page has says whether there is another page.
        let held = view.listed_after(query.bound(), limit + 1);
        let nodes = view.nodes_after(query.bound(), &held);
        self.page_from(nodes.map(|node| (node.name, Some(node))), limit)
    }

    /// Returns a page of the nodes that exist among `names`, in their order.
    pub fn page_of(&self, names: &[NodeName], limit: usize) -> NodesPage {
        let view = self.view();
        self.page_from(names.iter().map(|name| (name, view.node(name))), limit)
    }

    /// Returns the first page of `nodes`. The token is the last name of it, with a node or without.
    fn page_from<'v>(
        &self,
        nodes: impl Iterator<Item = (&'v NodeName, Option<ObservedNode<'v>>)>,
        limit: usize,
    ) -> NodesPage {
        let mut page = NodesPage {
            has_replicas: self.has_replicas(),
            ..NodesPage::default()
        };
        let (mut bytes, mut last) = (0, None);
        for (name, node) in nodes {
            if page.nodes.len() >= limit || bytes >= PAGE_MAX_BYTES {
                page.r#continue = last.map(NodeName::to_string);
                break;
            }
            last = Some(name);
            if let Some(node) = node {
                let status = node.status();
                bytes += encoded_bytes(&status);
                page.nodes.push(status);
            }
        }
        page
    }
}

/// Returns a page of the revocations in force.
pub fn revocations_page(revocations: &Revocations, query: &PageQuery) -> RevocationsPage {
    let limit = query.limit.min(PAGE_MAX);
    let mut in_force = revocations.in_force_after(query.bound(), limit + 1);
    let has_more = in_force.len() > limit;
    in_force.truncate(limit);
    let last = in_force.last().filter(|_| has_more);
    RevocationsPage {
        r#continue: last.map(|revocation| revocation.node.to_string()),
        revocations: in_force.into_iter().map(RevocationInfo::from).collect(),
    }
}

/// Returns the size of a value as JSON.
fn encoded_bytes(value: &impl Serialize) -> usize {
    struct Counter(usize);
    impl io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter(0);
    // What cannot be encoded is not in the answer.
    let _counted = serde_json::to_writer(&mut counter, value);
    counter.0
}

/// Number of entries of a page without `limit`. Their making takes milliseconds.
const PAGE_DEFAULT: usize = 500;
/// Largest number of entries of a page, and of names in a request.
pub(crate) const PAGE_MAX: usize = 1000;
/// Size at which a page of nodes ends. The last node may exceed it.
const PAGE_MAX_BYTES: usize = 1024 * 1024;

#[cfg(test)]
mod tests;
