//! The query of the list of nodes: which nodes, in which order, and which page. Pure.

use std::fmt;

use form_urlencoded::Serializer;

use crate::admin::status::{ListOrder, NodeSort, NodeState};
use crate::admin::verbs::LabelSelector;

/// The part of the list of nodes that a caller asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodesQuery {
    /// Text that the names contain, in lower case; empty for all.
    pub(super) search: String,
    pub(super) label: Option<Labels>,
    pub(super) state: Option<StateFilter>,
    pub(super) version: Option<String>,
    pub(super) transport: Option<String>,
    pub(super) server: Option<String>,
    pub(super) order: ListOrder,
    /// Number of the page, from 1; 0 if the caller names none.
    pub(super) page: usize,
}

/// A label selector as the caller wrote it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Labels {
    pub(super) text: String,
    pub(super) selector: LabelSelector,
}

/// Which states are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StateFilter {
    One(NodeState),
    /// Edge nodes in any state but `live`.
    NotLive,
    /// Nodes with failed requests in the last hour.
    Errors,
}

/// The reason why a query is refused. Texts of the caller are not repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum QueryError {
    #[error(
        "unknown parameter; use search, label, state, version, transport, server, sort and page"
    )]
    Parameter,
    #[error("page is not a number from 1")]
    Page,
    #[error("a parameter is longer than 253 bytes")]
    Length,
    #[error("label is no selector, as in site=oslo,!test")]
    Label,
    #[error(
        "state is none of live, suspect, away, unknown, enrolled, revoked, pending, connected, not-edge, not-live and errors"
    )]
    State,
    #[error(
        "sort is none of state, name, transport, rtt, streams, traffic, errors, seen, server and version, or one of them after a -"
    )]
    Sort,
}

impl NodesQuery {
    /// Parses the query of a request target. A search text with the operators of a label selector is
    /// one.
    ///
    /// # Errors
    /// Returns a [`QueryError`] for the first parameter that is not valid.
    pub(super) fn parse(query: &str) -> Result<Self, QueryError> {
        let mut parsed = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            let value = value.trim();
            if value.len() > TEXT_MAX_BYTES {
                return Err(QueryError::Length);
            }
            let text = (!value.is_empty()).then(|| value.to_owned());
            match &*name {
                "search" => {
                    let labels = value.contains('=').then(|| Labels::parse(value));
                    match labels.flatten() {
                        Some(labels) => parsed.label = Some(labels),
                        None => parsed.search = value.to_lowercase(),
                    }
                }
                "label" if value.is_empty() => {}
                "label" => parsed.label = Some(Labels::parse(value).ok_or(QueryError::Label)?),
                "state" if value.is_empty() => {}
                "state" => parsed.state = Some(StateFilter::parse(value).ok_or(QueryError::State)?),
                "version" => parsed.version = text,
                "transport" => parsed.transport = text,
                "server" => parsed.server = text,
                "sort" => parsed.order = ListOrder::parse(value).ok_or(QueryError::Sort)?,
                "page" => {
                    let number = value.parse::<usize>().ok().filter(|number| *number > 0);
                    parsed.page = number.ok_or(QueryError::Page)?;
                }
                _ => return Err(QueryError::Parameter),
            }
        }
        Ok(parsed)
    }

    /// Returns the parameters that do not have their defaults.
    fn parameters(&self) -> Vec<(&'static str, String)> {
        let search = Some(&self.search).filter(|text| !text.is_empty());
        let order = Some(self.order).filter(|order| *order != ListOrder::default());
        let page = Some(self.page).filter(|page| *page > 1);
        let parameters = [
            ("search", search.cloned()),
            (
                "label",
                self.label.as_ref().map(|labels| labels.text.clone()),
            ),
            ("state", self.state.map(|state| state.label().to_owned())),
            ("version", self.version.clone()),
            ("transport", self.transport.clone()),
            ("server", self.server.clone()),
            ("sort", order.map(|order| order.to_string())),
            ("page", page.map(|page| page.to_string())),
        ];
        let parameters = parameters.into_iter();
        parameters
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }

    /// Returns the parameters that stay when somebody searches for another text.
    pub(super) fn beside_search(&self) -> Vec<(&'static str, String)> {
        let mut parameters = self.parameters();
        parameters.retain(|(name, _)| !["search", "label", "page"].contains(name));
        parameters
    }

    /// Returns the request target of the first page of the changed query.
    pub(super) fn link(&self, change: impl FnOnce(&mut Self)) -> String {
        let mut changed = self.clone();
        changed.page = 0;
        change(&mut changed);
        changed.to_string()
    }

    /// Selects all nodes of the search.
    pub(super) fn select_all(&mut self) {
        (self.state, self.version) = (None, None);
        (self.transport, self.server) = (None, None);
    }

    /// Returns the target of the list in another order. The current order is reversed.
    pub(super) fn sorted_by(&self, sort: NodeSort) -> String {
        self.link(|query| {
            let is_reversed = query.order.sort == sort && !query.order.is_reversed;
            query.order = ListOrder { sort, is_reversed };
        })
    }
}

/// Formats the query as a request target, without the parameters that have their defaults.
impl fmt::Display for NodesQuery {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let query = Serializer::new(String::new())
            .extend_pairs(self.parameters())
            .finish();
        let separator = if query.is_empty() { "" } else { "?" };
        write!(formatter, "/nodes{separator}{query}")
    }
}

impl Labels {
    fn parse(text: &str) -> Option<Self> {
        let selector = text.parse().ok()?;
        let text = text.to_owned();
        Some(Self { text, selector })
    }
}

impl StateFilter {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "not-live" => Some(Self::NotLive),
            "errors" => Some(Self::Errors),
            text => text.parse::<NodeState>().ok().map(Self::One),
        }
    }

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::One(state) => state.label(),
            Self::NotLive => "not-live",
            Self::Errors => "errors",
        }
    }
}

/// Maximum length of a parameter: that of a node's name (RFC 1035, section 2.3.4).
const TEXT_MAX_BYTES: usize = 253;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_parsed_and_formatted_and_others_refused() {
        for (query, formatted) in [
            ("", "/nodes"),
            ("search=&label=&state=&version=&page=1", "/nodes"),
            ("search=Worker%2D1+&page=3", "/nodes?search=worker-1&page=3"),
            ("search=%3Cb%3E", "/nodes?search=%3Cb%3E"),
            ("search=site%3Doslo", "/nodes?label=site%3Doslo"),
            ("search=%3Cb+a%3D1%3E", "/nodes?search=%3Cb+a%3D1%3E"),
            (
                "label=site%3Doslo%2C!test&sort=state",
                "/nodes?label=site%3Doslo%2C%21test",
            ),
            (
                "state=not-live&sort=-rtt",
                "/nodes?state=not-live&sort=-rtt",
            ),
            (
                "server=b&transport=h2&version=1%2F2",
                "/nodes?version=1%2F2&transport=h2&server=b",
            ),
        ] {
            let parsed = NodesQuery::parse(query).unwrap();
            assert_eq!(parsed.to_string(), formatted, "{query}");
            let again = NodesQuery::parse(formatted.split_once('?').map_or("", |(_, query)| query));
            assert_eq!(again.unwrap().to_string(), formatted);
        }
        for (query, error) in [
            ("page=0", QueryError::Page),
            ("page=x", QueryError::Page),
            ("job=a", QueryError::Parameter),
            ("state=none", QueryError::State),
            ("sort=size", QueryError::Sort),
            ("label=%3D", QueryError::Label),
            (&format!("search={}", "a".repeat(254)), QueryError::Length),
        ] {
            assert_eq!(NodesQuery::parse(query), Err(error), "{query}");
        }
        for state in NodeState::ALL {
            let query = format!("state={}", state.label());
            let parsed = NodesQuery::parse(&query).unwrap();
            assert_eq!(parsed.state, Some(StateFilter::One(state)));
        }
    }

    #[test]
    fn links_change_one_parameter_and_begin_at_the_first_page() {
        let query = NodesQuery::parse("search=a&sort=rtt&page=7").unwrap();
        assert_eq!(query.sorted_by(NodeSort::Rtt), "/nodes?search=a&sort=-rtt");
        assert_eq!(query.sorted_by(NodeSort::Name), "/nodes?search=a&sort=name");
        assert_eq!(query.link(|query| query.search.clear()), "/nodes?sort=rtt");
        assert_eq!(query.beside_search(), [("sort", "rtt".to_owned())]);
    }
}
