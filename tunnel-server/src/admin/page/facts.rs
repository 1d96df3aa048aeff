//! The documents that the console shows, as HTML or as JSON. All functions are pure.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde::Serialize;

use super::survey::{NeedingNode, NodeCounts};
use super::visible::VisibleText;
use crate::admin::failures::FailureStatus;
use crate::admin::status::{NodeState, NodeStatus, NodeTotals};
use crate::admin::traffic::{MinutePoint, MinuteRing, NodePoint, NodeTraffic};
use crate::ingress::recent_requests::RecentRequest;
use crate::routing::peers::{PeerState, PeerStatus};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::node_row::FailingRequests;
use tunnel_store::data_dir::rfc3339;

/// What one page shows.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Document {
    Overview(Box<OverviewDocument>),
    Nodes(Box<NodesDocument>),
    Node(Box<NodeDocument>),
    Servers(ServersDocument),
    Conditions(ConditionsDocument),
}

/// The installation at a glance.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct OverviewDocument {
    /// Raised when a field is removed or changes its meaning.
    pub(super) schema_version: u32,
    pub(super) totals: TotalFacts,
    pub(super) counts: NodeCounts,
    pub(super) history: HistoryFacts,
    pub(super) servers: ServersDocument,
    pub(super) conditions: ConditionsDocument,
    /// The first nodes, the worst one first.
    pub(super) nodes: Vec<NodeFacts>,
}

/// A page of the list of nodes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodesDocument {
    pub(super) schema_version: u32,
    /// The request target of this page.
    pub(super) query: String,
    /// Number of nodes that match the query, on all pages.
    pub(super) matching: usize,
    pub(super) page: usize,
    pub(super) pages: usize,
    pub(super) nodes: Vec<NodeFacts>,
    pub(super) counts: NodeCounts,
    /// Totals of all nodes, whatever the query.
    pub(super) totals: TotalFacts,
}

/// Totals of all nodes, with the streams of the sessions.
#[derive(Debug, Serialize)]
pub(super) struct TotalFacts {
    #[serde(flatten)]
    pub(super) nodes: NodeTotals,
    pub(super) streams: u64,
}

/// The history of the sessions with this server and of its requests.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct HistoryFacts {
    /// The last minute that is over.
    pub(super) last_minute: Option<MinutePoint>,
    /// The last 60 minutes, and the 96 quarters of an hour of the last day. The last entry is the
    /// current one; `null` is one in which nothing was observed.
    pub(super) hour: SeriesFacts,
    pub(super) day: SeriesFacts,
}

/// What happened in each minute, on average over the minutes of an entry.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SeriesFacts {
    pub(super) sessions: Vec<Option<u64>>,
    pub(super) requests: Vec<Option<u64>>,
    pub(super) errors: Vec<Option<u64>>,
    pub(super) bytes: Vec<Option<u64>>,
}

impl HistoryFacts {
    pub(super) fn new(minutes: &MinuteRing) -> Self {
        Self {
            last_minute: minutes.last_minute().copied(),
            hour: SeriesFacts::new(minutes, 60, 1),
            day: SeriesFacts::new(minutes, 96, 15),
        }
    }
}

impl SeriesFacts {
    fn new(minutes: &MinuteRing, count: usize, each: u64) -> Self {
        Self {
            sessions: minutes.means(count, each, |point| point.sessions),
            requests: minutes.means(count, each, |point| point.requests),
            errors: minutes.means(count, each, |point| point.errors),
            bytes: minutes.means(count, each, |point| point.bytes_in + point.bytes_out),
        }
    }
}

/// One node with its history and its last requests.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeDocument {
    pub(super) schema_version: u32,
    pub(super) node: NodeFacts,
    /// The last 96 quarters of an hour, the current one last. Empty without a session or request in
    /// the last day.
    pub(super) history: Vec<QuarterFacts>,
    /// The last requests, the last one first.
    pub(super) requests: Vec<RequestFacts>,
}

/// A quarter of an hour of a node, to three digits.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct QuarterFacts {
    pub(super) bytes: u64,
    pub(super) requests: u64,
    pub(super) errors: u64,
    /// Percentage of the time with a session that answers; empty if nothing was observed.
    pub(super) up_percent: Option<u8>,
    /// Seconds of the quarter since the first observation and up to now.
    pub(super) seconds: u16,
}

impl From<(NodePoint, u16)> for QuarterFacts {
    fn from((point, seconds): (NodePoint, u16)) -> Self {
        Self {
            seconds,
            bytes: point.bytes(),
            requests: point.requests(),
            errors: point.errors(),
            up_percent: point.up_percent(),
        }
    }
}

/// The status of a node, and what only the console has. The fields of the status are those of
/// `/nodes`.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeFacts {
    #[serde(flatten)]
    pub(super) status: NodeStatus,
    /// Empty without a session or request in the last day.
    pub(super) traffic: Option<NodeTraffic>,
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
            peer: VisibleText::new(
                request
                    .peer
                    .map_or_else(String::new, |peer| peer.to_string()),
            ),
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

/// The servers of the installation, as this one sees them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServersDocument {
    pub(super) schema_version: u32,
    /// Name of this server.
    pub(super) own: String,
    /// All servers, this one first.
    pub(super) servers: Vec<ServerFacts>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServerFacts {
    pub(super) name: VisibleText,
    /// `HOST:PORT` that this server dials; empty for this server.
    pub(super) address: VisibleText,
    /// `this`, `connected`, `suspect`, `connecting` or `leaving`.
    pub(super) state: &'static str,
    /// The zone of the server, if it is known.
    pub(super) zone: Option<VisibleText>,
    /// Number of nodes that the server holds.
    pub(super) nodes: usize,
    /// Time of the last change between connected and not connected, RFC 3339; empty for this server.
    pub(super) since: Option<String>,
    /// The servers that it has dialed, if it has said.
    pub(super) linked: Option<Vec<String>>,
}

impl From<PeerStatus> for ServerFacts {
    fn from(peer: PeerStatus) -> Self {
        Self {
            name: VisibleText::new(peer.id.as_str()),
            address: VisibleText::new(peer.address),
            state: match peer.state {
                PeerState::Connected if peer.is_suspect => "suspect",
                PeerState::Connected => "connected",
                PeerState::Connecting => "connecting",
                PeerState::Leaving => "leaving",
            },
            zone: peer.zone.map(|zone| VisibleText::new(zone.as_str())),
            nodes: peer.nodes,
            since: Some(rfc3339(peer.since)),
            linked: None,
        }
    }
}

/// What an operator should fix.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ConditionsDocument {
    pub(super) schema_version: u32,
    /// Components that block readiness; the server is ready without any.
    pub(super) blocking: Vec<&'static str>,
    pub(super) conditions: Vec<ConditionFacts>,
    /// The states that are faults and that nodes have, the worst one first.
    pub(super) needing: Vec<NeedingState>,
    /// What failed at agents, the last one first: the entries of `nodes --failed -o json`.
    pub(super) failures: Vec<FailureStatus>,
    /// Requests that failed in the last hour, by server, node and code, the last one first.
    pub(super) failing: Vec<FailingFacts>,
}

impl ConditionsDocument {
    /// Returns the failures that go on and that not everybody who connects can cause.
    pub(super) fn current_failures(&self, now: SystemTime) -> impl Iterator<Item = &FailureStatus> {
        let failures = self.failures.iter();
        failures.filter(move |failure| failure.is_current(now) && !failure.is_noise)
    }

    /// Returns the conditions without those that repeat failures or the servers that do not answer.
    pub(super) fn other_conditions(&self) -> impl Iterator<Item = &ConditionFacts> {
        let mut conditions = self.conditions.iter();
        let has_server = conditions.any(|condition| condition.component == SERVER);
        let conditions = self.conditions.iter();
        conditions.filter(move |condition| match condition.component {
            AGENTS => false,
            PEERS => !has_server,
            _ => true,
        })
    }

    /// Returns the number of entries that need somebody.
    pub(super) fn needs(&self, now: SystemTime) -> usize {
        let conditions = self.blocking.len() + self.other_conditions().count();
        let nodes: usize = self.needing.iter().map(|state| state.count).sum();
        conditions + nodes + self.current_failures(now).count()
    }
}

/// The nodes in a state that is a fault.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NeedingState {
    pub(super) state: &'static str,
    pub(super) count: usize,
    /// Those of them that were live last, the last one first.
    pub(super) nodes: Vec<NeedingFacts>,
}

/// A node whose state is a fault.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NeedingFacts {
    pub(super) node: VisibleText,
    pub(super) state: &'static str,
    /// Time of its last sign of life, RFC 3339, if there was one.
    pub(super) since: Option<String>,
    pub(super) text: VisibleText,
    /// The server that held it last, if that is gone.
    pub(super) server: Option<VisibleText>,
}

impl NeedingFacts {
    /// `status` is that of the node, if it still exists.
    pub(super) fn new(state: NodeState, needing: NeedingNode, status: Option<&NodeStatus>) -> Self {
        let close = status.and_then(|status| status.last_close.as_ref());
        let gone = status.and_then(|status| status.gone_server.as_ref());
        let ended = close.map(|close| {
            let reason = if close.reason.is_empty() {
                String::new()
            } else {
                format!(" ({})", close.reason)
            };
            format!("; last close: {} by {}{reason}", close.code, close.by)
        });
        let text = match (state, gone) {
            (NodeState::Suspect, _) => "the agent does not answer".to_owned(),
            (NodeState::Enrolled, _) => "has enrolled and never connected".to_owned(),
            (_, Some(server)) => format!("server {} held it and is gone", server.name),
            (_, None) => format!("no agent is connected{}", ended.unwrap_or_default()),
        };
        Self {
            node: VisibleText::new(needing.node),
            state: state.label(),
            since: needing.since.map(rfc3339),
            text: VisibleText::new(text),
            server: gone.map(|server| VisibleText::new(server.name.as_str())),
        }
    }
}

/// Requests for a node that failed at a server with one code.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FailingFacts {
    /// The server that answered.
    pub(super) server: VisibleText,
    pub(super) node: VisibleText,
    pub(super) code: VisibleText,
    /// Port of the last one; 0 if it has none.
    pub(super) port: u16,
    pub(super) count: u64,
    /// Times of the first and the last one, RFC 3339.
    pub(super) first: String,
    pub(super) last: String,
    /// Reason of the last one.
    pub(super) detail: VisibleText,
}

impl FailingFacts {
    pub(super) fn new(server: &ReplicaId, failing: FailingRequests) -> Self {
        Self {
            server: VisibleText::new(server.as_str()),
            node: VisibleText::new(failing.node.as_str()),
            code: VisibleText::new(failing.code),
            port: failing.port,
            count: failing.count,
            first: rfc3339(failing.first),
            last: rfc3339(failing.last),
            detail: VisibleText::new(failing.detail),
        }
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ConditionFacts {
    pub(super) component: &'static str,
    pub(super) text: VisibleText,
    /// Time of its begin, RFC 3339, if that is known.
    pub(super) since: Option<String>,
    /// The command that shows more, or helps.
    pub(super) command: &'static str,
    /// The server on whose host it runs, if that is another one.
    pub(super) host: Option<VisibleText>,
}

impl ConditionFacts {
    pub(super) fn new(component: &'static str, text: String) -> Self {
        Self {
            component,
            since: None,
            command: command_for(component),
            host: None,
            text: VisibleText::new(text),
        }
    }
}

/// Returns the command that shows or fixes a condition. It has no word of the condition's text, which
/// may have words of a peer.
fn command_for(component: &str) -> &'static str {
    match component {
        "clock" => "timedatectl",
        "ca" | "ca certificates" => "tunnel-server ca rotate --status",
        "unsaved orders" | "revocations" => "tunnel-server nodes revocations",
        "tokens" => "tunnel-server token list",
        "node list" | "node names" | "node claims" => "kubectl get nodes -o wide",
        _ => "tunnel-server doctor",
    }
}

/// Component of the conditions that are made of failures.
const AGENTS: &str = "agents";
/// Component of the condition that names the servers without a connection to this one.
const PEERS: &str = "peers";
/// Command that shows whether a server runs.
pub(super) const SERVER_STATE: &str = "systemctl status tunnel-server";
/// Component of the conditions of other servers.
pub(super) const SERVER: &str = "server";
