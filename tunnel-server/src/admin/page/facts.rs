//! The documents that the status page shows, as HTML or as JSON. All functions are pure.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Serialize;

use super::request::NodesQuery;
use super::throughput::Throughput;
use super::visible::VisibleText;
use crate::admin::failures::FailureStatus;
use crate::admin::status::{NodeStatus, NodeTotals};
use crate::ingress::recent_requests::RecentRequest;
use crate::routing::peers::{PeerState, PeerStatus};
use tunnel_store::data_dir::rfc3339;

/// What one page shows.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Document {
    Nodes(NodesDocument),
    Node(Box<NodeDocument>),
    Servers(ServersDocument),
    Conditions(ConditionsDocument),
}

/// A page of the list of nodes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodesDocument {
    /// Raised when a field is removed or changes its meaning.
    pub(super) schema_version: u32,
    pub(super) search: String,
    /// Number of nodes that match the search, on all pages.
    pub(super) matching: usize,
    pub(super) page: usize,
    pub(super) pages: usize,
    pub(super) nodes: Vec<NodeFacts>,
    /// Totals of all nodes, whatever the search.
    pub(super) totals: TotalFacts,
}

/// Totals of all nodes, with the streams and the throughput of the sessions with this server.
#[derive(Debug, Serialize)]
pub(super) struct TotalFacts {
    #[serde(flatten)]
    pub(super) nodes: NodeTotals,
    pub(super) streams: u64,
    pub(super) throughput: Throughput,
}

/// One node with its last requests.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeDocument {
    pub(super) schema_version: u32,
    pub(super) node: NodeFacts,
    /// The last requests, the last one first.
    pub(super) requests: Vec<RequestFacts>,
}

/// The status of a node, and what only the status page has. The fields of the status are those of
/// `/nodes`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeFacts {
    #[serde(flatten)]
    pub(super) status: NodeStatus,
    /// Throughput of the node's sessions with this server; empty without one.
    pub(super) throughput: Option<Throughput>,
    /// Failed requests at this server by code.
    pub(super) errors: BTreeMap<&'static str, u64>,
}

/// A request or stream that has ended.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RequestFacts {
    /// Time of the end, RFC 3339.
    pub(super) at: String,
    pub(super) listener: &'static str,
    pub(super) peer: VisibleText,
    pub(super) caller: VisibleText,
    pub(super) request: VisibleText,
    pub(super) port: Option<u16>,
    pub(super) status: Option<u16>,
    pub(super) code: &'static str,
    pub(super) error: VisibleText,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    pub(super) elapsed_seconds: f64,
}

impl From<RecentRequest> for RequestFacts {
    fn from(request: RecentRequest) -> Self {
        Self {
            at: rfc3339(request.at),
            listener: request.listener,
            peer: VisibleText::new(request.peer),
            caller: VisibleText::new(request.caller),
            request: VisibleText::new(request.request),
            port: request.port.map(|port| port.get()),
            status: request.status,
            code: request.outcome.label(),
            error: VisibleText::new(request.error),
            bytes_in: request.bytes_in,
            bytes_out: request.bytes_out,
            elapsed_seconds: request.elapsed.as_secs_f64(),
        }
    }
}

/// The other servers of the installation.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServersDocument {
    pub(super) schema_version: u32,
    /// Name of this server.
    pub(super) own: String,
    pub(super) servers: Vec<ServerFacts>,
}

#[derive(Debug, Serialize)]
pub(super) struct ServerFacts {
    pub(super) name: VisibleText,
    /// `HOST:PORT` that this server dials.
    pub(super) address: VisibleText,
    /// `connected`, `connecting` or `leaving`.
    pub(super) state: &'static str,
    /// The zone of the server, if it is known.
    pub(super) zone: Option<VisibleText>,
    /// Number of nodes that the server holds.
    pub(super) nodes: usize,
    /// Time of the last change between connected and not connected, RFC 3339.
    pub(super) since: String,
}

impl From<PeerStatus> for ServerFacts {
    fn from(peer: PeerStatus) -> Self {
        Self {
            name: VisibleText::new(peer.id.as_str()),
            address: VisibleText::new(peer.address),
            state: match peer.state {
                PeerState::Connected => "connected",
                PeerState::Connecting => "connecting",
                PeerState::Leaving => "leaving",
            },
            zone: peer.zone.map(|zone| VisibleText::new(zone.as_str())),
            nodes: peer.nodes,
            since: rfc3339(peer.since),
        }
    }
}

/// The conditions that an operator should fix, and the components that block readiness.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ConditionsDocument {
    pub(super) schema_version: u32,
    /// Components that block readiness; the server is ready without any.
    pub(super) blocking: Vec<&'static str>,
    pub(super) conditions: Vec<ConditionFacts>,
    /// What failed at agents, the last one first.
    pub(super) failures: Vec<FailureFacts>,
}

/// Failures of agents. The fields are those of `nodes --failed -o json`.
#[derive(Debug, Serialize)]
#[serde(transparent)]
pub(super) struct FailureFacts(pub(super) FailureStatus);

impl FailureFacts {
    pub(super) fn code(&self) -> VisibleText {
        VisibleText::new(self.0.code.as_str())
    }

    /// Returns the name of the node, or the nodes whose last session was from the address.
    pub(super) fn node(&self) -> VisibleText {
        let perhaps = self.0.nodes_from_address.join(", ");
        match &self.0.node {
            Some(node) if self.0.is_verified => VisibleText::new(node.as_str()),
            Some(node) => VisibleText::new(format!("{node} (claimed)")),
            None if perhaps.is_empty() => VisibleText::or_dash(None),
            None => VisibleText::new(format!("perhaps {perhaps}")),
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.0.count
    }

    pub(super) fn first(&self) -> VisibleText {
        VisibleText::new(self.0.first.as_str())
    }

    pub(super) fn last(&self) -> VisibleText {
        VisibleText::new(self.0.last.as_str())
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.is_over
    }

    pub(super) fn address(&self) -> VisibleText {
        VisibleText::new(self.0.address.as_str())
    }

    pub(super) fn detail(&self) -> VisibleText {
        VisibleText::new(self.0.detail.as_str())
    }

    pub(super) fn remedy(&self) -> VisibleText {
        VisibleText::new(self.0.remedy.as_str())
    }
}

#[derive(Debug, Serialize)]
pub(super) struct ConditionFacts {
    pub(super) component: &'static str,
    pub(super) text: VisibleText,
}

/// The part of the list that a page shows.
#[derive(Debug)]
pub(super) struct NodesPage<'a> {
    pub(super) matching: usize,
    pub(super) page: usize,
    pub(super) pages: usize,
    pub(super) nodes: Vec<Cow<'a, NodeStatus>>,
}

/// Returns the nodes of the page that the query selects. A page beyond the last one is the last
/// one. Holds the nodes of one page at a time.
pub(super) fn nodes_page<'a>(
    nodes: impl Iterator<Item = Cow<'a, NodeStatus>>,
    query: &NodesQuery,
) -> NodesPage<'a> {
    let wanted = query.page.max(1);
    let mut page = NodesPage {
        matching: 0,
        page: 1,
        pages: 1,
        nodes: Vec::new(),
    };
    for node in nodes.filter(|node| node.node.to_lowercase().contains(&query.search)) {
        page.pages = page.matching / NODES_PER_PAGE + 1;
        let is_first = page.matching.is_multiple_of(NODES_PER_PAGE);
        page.matching += 1;
        if page.pages <= wanted {
            if is_first {
                page.nodes.clear();
                page.page = page.pages;
            }
            page.nodes.push(node);
        }
    }
    page
}

const NODES_PER_PAGE: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_200_nodes_and_the_search_selects_by_name() {
        let named = |number: usize| NodeStatus {
            node: format!("worker-{number:05}"),
            ..NodeStatus::default()
        };
        let nodes: Vec<NodeStatus> = (0..1_001).map(named).collect();
        let page = |search: &str, page| {
            let search = search.to_owned();
            let all = nodes.iter().map(Cow::Borrowed);
            let page = nodes_page(all, &NodesQuery { search, page });
            let first = page.nodes.first().map(|node| node.node.clone());
            (
                page.page,
                page.pages,
                page.matching,
                page.nodes.len(),
                first,
            )
        };
        let first = |name: &str| Some(name.to_owned());
        assert_eq!(page("", 0), (1, 6, 1_001, 200, first("worker-00000")));
        assert_eq!(page("", 2), (2, 6, 1_001, 200, first("worker-00200")));
        assert_eq!(page("", 99), (6, 6, 1_001, 1, first("worker-01000")));
        assert_eq!(page("-0100", 1), (1, 1, 1, 1, first("worker-01000")));
        assert_eq!(page("absent", 1), (1, 1, 0, 0, None));
    }
}
