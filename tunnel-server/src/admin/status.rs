//! The status of nodes, for `/nodes` and the command `nodes`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tunnel_process::name_list::NAMES_SHOWN_MAX;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::node_row::NodeRow;

use crate::routing::peers::Peers;
use crate::routing::registry::{AgentSession, LastClose, Registry, SessionHistory};
use crate::routing::routes::{NodeLabels, RouteNode, RouteSource, Routes};
use crate::session::failures::Failures;
use tunnel_ca::revocation::Revocations;
use tunnel_store::data_dir::rfc3339;
use tunnel_store::known_nodes::{EnrollmentKind, KnownNode, KnownNodes, NodeMap};

mod node_state;
mod sort;
mod totals;
mod version_skew;

pub use node_state::NodeState;
pub(crate) use sort::SortKey;
pub use sort::{ListOrder, NodeSort};
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
    /// early.
    pub last_seen: Option<String>,
    /// How the last session with this server ended, or why the last one was refused. Empty if that
    /// was before the start of the server.
    pub last_close: Option<CloseStatus>,
    /// The sessions of the node with this server since its start, if it has seen one.
    pub history: Option<HistoryStatus>,
    /// Time at which the node was revoked, RFC 3339. Empty if it is not revoked.
    pub revoked_at: Option<String>,
    /// How the agent enrolled last, if this server knows.
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

    /// Returns the names of the first `limit` nodes after `after`, in order: the known nodes, those
    /// of the cluster, and those that other servers hold. The cost is in proportion to `limit`.
    pub fn names_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<NodeName> {
        let mut names: BTreeSet<NodeName> =
            self.nodes.names_after(after, limit).into_iter().collect();
        names.extend(
            self.routes
                .load()
                .names_after(RouteSource::Cluster, after, limit),
        );
        if let Some(sessions) = &self.sessions {
            names.extend(sessions.peers.held_after(after, limit));
        }
        names.into_iter().take(limit).collect()
    }

    /// Returns the status of all nodes in batches, ordered by name. The memory of a batch does not depend
    /// on the number of nodes.
    pub fn batches(&self) -> NodeBatches {
        NodeBatches {
            sources: self.clone(),
            after: Some(Bound::Unbounded),
        }
    }

    /// Returns the status of a node, or `None` if no node has the name.
    pub fn of_node(&self, name: &NodeName) -> Option<NodeStatus> {
        let known = self.nodes.get(name);
        let routes = self.routes.load();
        let cluster = routes.node(RouteSource::Cluster, name);
        let peers = self.sessions.as_ref().map(|sessions| &sessions.peers);
        let holder = peers.and_then(|peers| peers.shown_holder(name));
        if known.is_none() && cluster.is_none() && holder.is_none() {
            return None;
        }
        let registry = self.sessions.as_ref().map(|sessions| &sessions.registry);
        let last_close = registry.and_then(|registry| registry.last_close(name));
        let last_seen = last_close.as_ref().map(|close| close.last_seen);
        let certificate = known.as_ref().and_then(|node| node.certificate_not_after);
        let addresses = addresses(known.as_ref(), cluster.map(Arc::as_ref));
        let mut status = NodeStatus {
            node: name.to_string(),
            last_seen: last_seen
                .max(known.as_ref().and_then(|node| node.last_seen))
                .map(rfc3339),
            last_close: last_close.map(CloseStatus::from),
            history: registry
                .and_then(|registry| registry.history(name))
                .map(HistoryStatus::from),
            revoked_at: self.revocations.revoked_at(name).map(rfc3339),
            enrollment: known.as_ref().and_then(|node| node.enrollment),
            certificate_not_after: certificate.map(rfc3339),
            address_conflicts: self.conflicts(&addresses),
            addresses,
            labels: labels(known.as_ref(), cluster.map(Arc::as_ref)),
            ..NodeStatus::default()
        };
        let sessions = registry.map_or_else(Vec::new, |registry| registry.of_node(name));
        match peers.zip(holder) {
            Some((peers, holder)) if !sessions.iter().any(|session| session.is_routable()) => {
                status.connected = true;
                status.last_seen = None;
                status.set_replica(peers, &holder);
                if let Some((row, received)) = peers.rows.row(&holder, name) {
                    status.set_row(&row, received);
                }
            }
            Some(_) | None => {
                status.set_sessions(&sessions, certificate);
                if let Some(peers) = peers.filter(|_| status.connected && self.has_replicas()) {
                    status.set_replica(peers, peers.own());
                }
            }
        }
        let is_cloud = known.is_none() && cluster.as_ref().is_some_and(|node| !node.is_edge);
        status.is_edge = status.connected || !is_cloud;
        let is_pending = known.as_ref().is_some_and(KnownNode::is_pending);
        let was_closed = status.last_close.is_some();
        status.is_pending = is_pending && cluster.is_none() && !status.connected && !was_closed;
        Some(status)
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

/// The status of all nodes in batches, each as of the moment at which it is made. Nodes that come and go
/// meanwhile neither repeat nor hide others.
#[derive(Debug)]
pub struct NodeBatches {
    sources: NodeSources,
    /// Where the next batch begins. `None` after the last one.
    after: Option<Bound<NodeName>>,
}

impl Iterator for NodeBatches {
    type Item = Vec<NodeStatus>;

    fn next(&mut self) -> Option<Vec<NodeStatus>> {
        let after = self.after.take()?;
        let names = self.sources.names_after(after.as_ref(), PART_NODES);
        let last = names.last()?;
        self.after = Some(Bound::Excluded(last.clone()));
        let status = names.iter().filter_map(|name| self.sources.of_node(name));
        Some(status.collect())
    }
}

/// Returns the addresses that an operator assigned, and then those of the Node object.
fn labels(known: Option<&KnownNode>, cluster: Option<&RouteNode>) -> NodeLabels {
    let mut labels = known.map(|node| node.labels.clone()).unwrap_or_default();
    let of_object = cluster.map(|node| node.labels.clone());
    labels.extend(of_object.unwrap_or_default());
    labels
}

fn addresses(known: Option<&KnownNode>, cluster: Option<&RouteNode>) -> Vec<IpAddr> {
    let assigned = known.into_iter().flat_map(|node| &node.addresses);
    let observed = cluster.into_iter().flat_map(|node| &node.addresses);
    let mut addresses = Vec::new();
    for address in assigned.chain(observed) {
        if !addresses.contains(address) {
            addresses.push(*address);
        }
    }
    addresses
}

impl NodeStatus {
    /// Returns the labels by which operators select the node.
    pub fn selectable_labels(&self) -> NodeLabels {
        let mut labels = self.claimed_labels.clone();
        labels.extend(self.labels.clone());
        labels
    }

    /// Returns whether the node needs an agent and has none.
    pub fn is_away(&self) -> bool {
        self.is_edge && !self.connected
    }

    /// Returns whether the node is away and revoked.
    pub fn is_revoked(&self) -> bool {
        !self.connected && self.revoked_at.is_some()
    }

    /// Sets the server that carries requests to the node, and its zone.
    fn set_replica(&mut self, peers: &Peers, replica: &ReplicaId) {
        self.replica = Some(replica.to_string());
        self.zone = peers.zone_of(replica).map(|zone| zone.to_string());
    }

    /// Sets the fields that describe the session of the node with another server.
    fn set_row(&mut self, row: &NodeRow, received: SystemTime) {
        let silence = Duration::from_secs(row.silent_seconds.into());
        let last_seen = received.checked_sub(silence).unwrap_or(received);
        self.transport = Some(row.transport.clone());
        self.state = Some(if row.is_suspect { "suspect" } else { "live" }.to_owned());
        self.address = row.address.map(|address| address.to_string());
        self.version = Some(row.version.clone());
        self.version_skew = VersionSkew::of_agent(&row.version);
        self.connected_since = Some(rfc3339(row.since));
        self.last_seen = Some(rfc3339(last_seen));
        self.rtt_millis = Some(row.rtt_millis.into());
        self.streams = row.streams.into();
        [self.bytes_in, self.bytes_out] = row.bytes;
        self.certificate_not_after = Some(rfc3339(row.certificate_not_after));
    }

    /// Sets the fields that describe the sessions of the node. `certificate` is the expiry of the
    /// last known certificate.
    fn set_sessions(&mut self, sessions: &[Arc<AgentSession>], certificate: Option<SystemTime>) {
        let active = sessions.iter().find(|session| session.is_routable());
        let Some(agent) = active.or_else(|| sessions.first()) else {
            return;
        };
        let (stats, now) = (agent.session.stats(), SystemTime::now());
        self.connected = true;
        let last_seen = sessions.iter().map(|session| session.last_seen(now)).max();
        self.last_seen = last_seen.map(rfc3339);
        self.transport = Some(agent.session.transport().to_string());
        let state = agent.suspect_reason().map_or("live", |_| "suspect");
        self.state = Some(state.to_owned());
        self.address = Some(stats.remote.to_string());
        self.version = Some(agent.software.clone());
        self.version_skew = VersionSkew::of_agent(&agent.software);
        self.connected_since = Some(rfc3339(agent.since));
        self.rtt_millis = u64::try_from(stats.rtt.as_millis()).ok();
        let streams = sessions
            .iter()
            .map(|agent| agent.session.stats().streams as u64);
        self.streams = streams.sum();
        self.bytes_in = stats.bytes_in;
        self.bytes_out = stats.bytes_out;
        // A certificate renewed on a session is newer than the one of its handshake.
        let begun_with = agent.session.peer().not_after;
        let latest = certificate.map_or(begun_with, |at| at.max(begun_with));
        self.certificate_not_after = Some(rfc3339(latest));
        self.claimed_labels.clone_from(&agent.claimed_labels);
        self.claimed_address = Some(agent.claimed_address.clone()).filter(|text| !text.is_empty());
    }
}

/// Nodes of a batch: about 200 KB, in a few milliseconds.
const PART_NODES: usize = 200;

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::code::CloseCode;
    use tunnel_proto::wire::name::InstanceId;
    use tunnel_proto::wire::peer::{HeldNode, Holds};

    use super::*;
    use crate::routing::peers::PeerAddress;
    use crate::routing::registry::SuspectReason;
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
        shown[1..].iter().for_each(|node| totals.add(node));
        let totals = totals.to_string();
        assert!(totals.contains("away: 1 "), "{totals}");
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
        let sessions = &bench.sessions;
        let routes = Routes::default();
        let nodes = &sessions.nodes;
        routes.follow_known(nodes.snapshot(), &mut NodeMap::default());
        routes.set(RouteSource::Cluster, cluster.to_vec());
        let sources = NodeSources {
            nodes: sessions.nodes.clone(),
            routes,
            revocations: sessions.revocations.clone(),
            sessions: Some(SessionSources {
                registry: sessions.registry.clone(),
                peers: sessions.peers.clone(),
                failures: sessions.failures.clone(),
            }),
        };
        sources.batches().flatten().collect()
    }
}
