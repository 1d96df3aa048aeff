//! The status of nodes, for `/nodes` and the command `nodes`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tunnel_process::name_list::NAMES_SHOWN_MAX;
use tunnel_proto::wire::name::NodeName;

use crate::routing::peers::Peers;
use crate::routing::registry::{LastClose, Registry, SessionHistory};
use crate::routing::routes::{NodeLabels, Routes};
use crate::session::failures::Failures;
use tunnel_ca::revocation::Revocations;
use tunnel_store::data_dir::rfc3339;
use tunnel_store::known_nodes::{EnrollmentKind, KnownNodes, NodeMap};

mod node_state;
mod observed;
mod sort;
mod summary;
mod totals;
mod version_skew;

pub use node_state::NodeState;
pub(crate) use observed::ObservedNode;
pub(crate) use sort::SortKey;
pub use sort::{ListOrder, NodeSort};
pub(crate) use summary::{ListedNode, NodeSummary};
pub use totals::NodeTotals;
pub use version_skew::VersionSkew;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeStatus {
    pub node: String,
    /// Whether an agent is connected for the node, to this server or to another one.
    pub connected: bool,
    /// Whether the node is reached through the tunnel. In a cluster these are the Nodes with the
    /// label of `--edge-label`, and the nodes that have or had an agent.
    #[serde(rename = "edge")]
    pub is_edge: bool,
    /// Whether the node has been named to this server, as by a token, and no agent of it has enrolled
    /// or connected so far. Edge nodes of a cluster are never pending.
    #[serde(rename = "pending")]
    pub is_pending: bool,
    /// Name of the server that carries requests to the node, if there are several servers. If it is
    /// another one, the fields up to the bytes are those that it has sent to this server. It sends them
    /// to a server with a console, up to 10 s late; without one they are empty.
    #[serde(rename = "server")]
    pub replica: Option<String>,
    /// Zone of that server, if it is known.
    pub zone: Option<String>,
    /// The server that held the node last, if that is gone and no other server has seen the agent since:
    /// whether it is connected is unknown.
    pub gone_server: Option<GoneServer>,
    /// Transport of the active session. The fields up to the certificate's expiry describe that
    /// session too.
    pub transport: Option<String>,
    /// `live`, or `suspect` while the agent does not respond. Requests to a suspect agent are
    /// refused until it answers, unless another server holds the node.
    pub state: Option<String>,
    /// Source address of the agent's session.
    pub address: Option<String>,
    /// Version of the agent's software.
    pub version: Option<String>,
    /// Time at which the session was admitted, RFC 3339.
    pub connected_since: Option<String>,
    /// Time of the agent's last sign of life at this server, RFC 3339. Empty if another server
    /// carries requests to the node. After a restart of the server it is up to ten minutes too
    /// early. If the server that held the node last is gone, the time at which that was lost.
    pub last_seen: Option<String>,
    /// How the last session with this server ended, or why the last one was refused. Empty if that
    /// was before the start of the server.
    pub last_close: Option<CloseStatus>,
    /// The sessions of the node with this server since its start, if it has seen one.
    pub history: Option<HistoryStatus>,
    /// Time at which the node was revoked, RFC 3339. Empty if it is not revoked.
    pub revoked_at: Option<String>,
    /// How the agent enrolled last, or that it connected last with its kubelet's certificate, if this server
    /// knows.
    pub enrollment: Option<EnrollmentKind>,
    /// How the version of the agent differs from the version of this server.
    pub version_skew: Option<VersionSkew>,
    /// Smoothed round-trip time, in milliseconds.
    pub rtt_millis: Option<u64>,
    /// Number of open streams over all sessions of the node with this server, without control
    /// streams.
    pub streams: u64,
    /// Payload bytes received from the agent in this session.
    pub bytes_in: u64,
    /// Payload bytes sent to the agent in this session.
    pub bytes_out: u64,
    /// Expiry of the agent's certificate, RFC 3339.
    pub certificate_not_after: Option<String>,
    /// Addresses that an operator or the cluster assigned to the node. Routing uses only these.
    pub addresses: Vec<IpAddr>,
    /// Address that the agent reports as its own when its session begins. Routing does not use it.
    pub claimed_address: Option<String>,
    /// Addresses of the node that other nodes have too, each with the names of at most 10
    /// nodes that have it.
    pub address_conflicts: BTreeMap<IpAddr, Vec<String>>,
    /// The labels of `--node-label` that the Node object has, and those of the join token. The Node
    /// object takes precedence.
    pub labels: NodeLabels,
    /// Labels that the agent gives its node with `--label`. Shown, and accepted by `nodes --selector`,
    /// where the others take precedence; nothing else depends on them.
    pub claimed_labels: NodeLabels,
}

/// Another server that does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GoneServer {
    pub name: String,
    /// Time at which the connection to it was lost, RFC 3339.
    pub since: String,
}

/// What a server has seen of a node's sessions since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryStatus {
    /// Time with a session, in seconds.
    pub connected_seconds: u64,
    /// Number of times that the node came back after it had no session.
    pub reconnects: u64,
    /// Number of ended sessions by the code of their close, as in docs/reference/codes.md.
    pub ends: BTreeMap<String, u64>,
}

impl From<SessionHistory> for HistoryStatus {
    fn from(history: SessionHistory) -> Self {
        let ends = history.ends.into_iter();
        Self {
            connected_seconds: history.connected.as_secs(),
            reconnects: history.connects.saturating_sub(1),
            ends: ends.map(|(code, count)| (code.to_owned(), count)).collect(),
        }
    }
}

/// The end of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CloseStatus {
    /// Time of the end, RFC 3339.
    pub at: String,
    /// The end that closed the session: `this end`, `the peer` or `the network`.
    pub by: String,
    /// Name of the close code.
    pub code: String,
    /// Reason for people, at most 200 characters. The agent may have chosen it.
    pub reason: String,
}

impl From<LastClose> for CloseStatus {
    fn from(close: LastClose) -> Self {
        Self {
            at: rfc3339(close.at),
            by: close.by.to_string(),
            code: close.code.to_string(),
            reason: close.reason,
        }
    }
}

/// What the status of nodes is read from. Clones share it.
#[derive(Debug, Clone)]
pub struct NodeSources {
    pub nodes: Arc<KnownNodes>,
    /// The nodes of the cluster, and the addresses that nodes share.
    pub routes: Routes,
    pub revocations: Arc<Revocations>,
    /// `None` where no server runs.
    pub sessions: Option<SessionSources>,
}

/// What only a running server has.
#[derive(Debug, Clone)]
pub struct SessionSources {
    pub registry: Arc<Registry>,
    pub peers: Arc<Peers>,
    pub failures: Arc<Failures>,
}

impl NodeSources {
    /// Creates the sources of a data directory with which no server runs.
    pub fn of_files(nodes: KnownNodes, revocations: Revocations) -> Self {
        let routes = Routes::default();
        routes.follow_known(nodes.snapshot(), &mut NodeMap::default());
        Self {
            nodes: Arc::new(nodes),
            routes,
            revocations: Arc::new(revocations),
            sessions: None,
        }
    }

    /// Returns whether there are several servers, so that nodes have the name of one.
    pub fn has_replicas(&self) -> bool {
        let sessions = self.sessions.as_ref();
        sessions.is_some_and(|sessions| sessions.peers.expected() > 0)
    }

    /// Returns those of the addresses that several nodes have, with the first of these.
    fn conflicts(&self, addresses: &[IpAddr]) -> BTreeMap<IpAddr, Vec<String>> {
        let table = self.routes.load();
        let owners = addresses
            .iter()
            .map(|address| (*address, table.owners(*address, NAMES_SHOWN_MAX)));
        let shared = owners.filter(|(_, owners)| owners.len() > 1);
        let named = shared.map(|(address, owners)| {
            let names = owners.iter().map(NodeName::to_string);
            (address, names.collect())
        });
        named.collect()
    }
}

impl NodeStatus {
    /// Returns whether the node needs an agent and has none.
    pub fn is_away(&self) -> bool {
        self.is_edge && !self.connected
    }

    /// Returns whether the node is away and revoked.
    pub fn is_revoked(&self) -> bool {
        !self.connected && self.revoked_at.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use tunnel_proto::wire::code::CloseCode;
    use tunnel_proto::wire::name::InstanceId;
    use tunnel_proto::wire::peer::{HeldNode, Holds};

    use super::*;
    use crate::routing::peers::PeerAddress;
    use crate::routing::registry::SuspectReason;
    use crate::routing::routes::{RouteNode, RouteSource};
    use crate::testing::{Bench, eventually, node};
    use tunnel_ca::revocation::OrderAction;

    #[tokio::test(start_paused = true)]
    async fn active_session_is_shown_with_its_state_and_the_streams_of_all() {
        let bench = Bench::new();
        let registry = &bench.sessions.registry;
        let shown = || list_of(&bench, &[]).remove(0);
        let _old = bench.agent(1).await;
        let _on_the_old = bench.open().await.unwrap();
        let alone = shown();
        assert_eq!(alone.state.as_deref(), Some("live"));
        assert_eq!((alone.streams, alone.rtt_millis), (1, Some(0)));
        let _new = bench.agent(1).await;
        let _on_the_new = bench.open().await.unwrap();
        assert_eq!(shown().streams, 2);
        let sessions = registry.of_node(&node());
        sessions[0].set_suspect_reason(Some(SuspectReason::PeerHearsNothing));
        assert_eq!(
            shown().state.as_deref(),
            Some("live"),
            "the older one takes over"
        );
        sessions[1].set_suspect_reason(Some(SuspectReason::PeerHearsNothing));
        assert_eq!(shown().state.as_deref(), Some("suspect"));
    }

    #[tokio::test]
    async fn nodes_of_the_cluster_are_listed_with_their_addresses_and_conflicts() {
        let bench = Bench::new();
        let address = |last: u8| IpAddr::from([10, 0, 0, last]);
        bench.sessions.nodes.record(&node(), &[address(1)]);
        let of_cluster = |name: &str, addresses: &[IpAddr]| RouteNode {
            labels: [("zone".into(), name.into())].into(),
            ..RouteNode::edge(name.parse().unwrap(), addresses.to_vec())
        };
        let cluster = [
            of_cluster("worker-1", &[address(1), address(2)]),
            of_cluster("worker-2", &[address(2)]),
            RouteNode {
                is_edge: false,
                ..of_cluster("worker-3", &[])
            },
        ];
        let shown = list_of(&bench, &cluster);
        let names: Vec<_> = shown.iter().map(|node| node.node.as_str()).collect();
        assert_eq!(names, ["worker-1", "worker-2", "worker-3"]);
        let edges: Vec<_> = shown.iter().map(|node| node.is_edge).collect();
        assert_eq!(edges, [true, true, false]);
        assert!(shown[1].is_away() && !shown[2].is_away());
        let mut totals = NodeTotals::default();
        for node in &shown {
            totals.add(NodeState::of(node));
        }
        assert_eq!(
            totals.to_string(),
            "total: 3; connected: 0 (suspect: 0); away: 2 (revoked: 0); pending: 0"
        );
        assert_eq!(shown[1].labels, [("zone".into(), "worker-2".into())].into());
        assert_eq!(shown[0].addresses, [address(1), address(2)]);
        let both = vec!["worker-1".to_owned(), "worker-2".to_owned()];
        assert_eq!(
            shown[0].address_conflicts,
            [(address(2), both.clone())].into()
        );
        assert_eq!(shown[1].address_conflicts, [(address(2), both)].into());
    }

    #[tokio::test(start_paused = true)]
    async fn node_of_another_server_is_shown_with_that_server_unless_this_one_routes_to_it() {
        let bench = Bench::new();
        let (peers, registry) = (&bench.sessions.peers, &bench.sessions.registry);
        let shown = || list_of(&bench, &[]).remove(0);
        let _agent = bench.agent(1).await;
        assert_eq!(shown().replica, None, "there is one server");
        let other = PeerAddress {
            id: "server-2".parse().unwrap(),
            address: "192.0.2.2:10269".into(),
            zone: None,
        };
        peers.expect(&other);
        let held_node = HeldNode {
            node: node(),
            instance: InstanceId::new([1; 16]),
            since: SystemTime::UNIX_EPOCH,
        };
        let holds = Holds {
            is_full: true,
            added: vec![held_node],
            ..Holds::default()
        };
        peers.apply(&other.id, holds);
        peers.set_zone(Some("a".parse().unwrap()));
        assert_eq!(shown().replica.as_deref(), Some("server-1"));
        assert_eq!(shown().zone.as_deref(), Some("a"));
        assert!(shown().connected && shown().transport.is_some());
        let sessions = registry.of_node(&node());
        sessions[0].set_suspect_reason(Some(SuspectReason::PeerHearsNothing));
        assert_eq!(shown().replica.as_deref(), Some("server-2"));
        assert!(shown().connected && shown().transport.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn node_that_is_away_is_shown_with_the_end_of_its_last_session() {
        let bench = Bench::new();
        let (nodes, registry) = (&bench.sessions.nodes, &bench.sessions.registry);
        let shown = || list_of(&bench, &[]).remove(0);
        let agent = bench.agent(1).await;
        eventually("known", || nodes.knows(&node())).await;
        assert!(shown().last_seen.is_some() && shown().last_close.is_none());
        agent.far.close(CloseCode::Draining, "stopping").await;
        eventually("closed", || registry.last_close(&node()).is_some()).await;
        let away = shown();
        assert!(!away.connected && away.last_seen.is_some());
        let close = away.last_close.unwrap();
        let ended = (
            close.by.as_str(),
            close.code.as_str(),
            close.reason.as_str(),
        );
        assert_eq!(ended, ("the peer", "draining", "stopping"));
        let (_admitted, _answer) = bench.connect_agent(2, 4096).await;
        let close = shown().last_close.unwrap();
        assert_eq!(close.code, "draining", "an admission changes nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn node_is_shown_as_revoked_until_the_end_of_its_revocation() {
        let bench = Bench::new();
        let revocations = &bench.sessions.revocations;
        bench.sessions.nodes.record(&node(), &[]);
        let shown = || list_of(&bench, &[]).remove(0);
        assert_eq!(shown().revoked_at, None);
        let now = SystemTime::now();
        revocations.order(OrderAction::Revoke, &[node()], now);
        assert_eq!(shown().revoked_at, Some(rfc3339(now)));
        revocations.order(OrderAction::Reissue, &[node()], now);
        revocations.order(OrderAction::Unrevoke, &[node()], now);
        assert_eq!(shown().revoked_at, None);
    }

    fn list_of(bench: &Bench, cluster: &[RouteNode]) -> Vec<NodeStatus> {
        let sources = bench.node_sources();
        sources.routes.set(RouteSource::Cluster, cluster.to_vec());
        let batches = sources.batches(|node| Some(node.status()));
        batches.flatten().collect()
    }
}
