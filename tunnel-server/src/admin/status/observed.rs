//! What is known of nodes at one moment, as values. Lists select and count by these, so that texts are
//! made only of the nodes that are shown.

use std::borrow::Cow;
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tunnel_proto::transport::SessionStats;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::node_row::NodeRow;

use super::{
    CloseStatus, GoneServer, HistoryStatus, ListedNode, NodeSources, NodeStatus, NodeSummary,
    VersionSkew,
};
use crate::admin::traffic::{NodeTraffic, TrafficFigures};
use crate::routing::peers::{Peers, ShownHolder};
use crate::routing::registry::{AgentSession, Registry};
use crate::routing::routes::{NodeLabels, RouteNode, RouteSource, RouteTable};
use tunnel_store::data_dir::rfc3339;
use tunnel_store::known_nodes::{KnownNode, NodeMap};

/// The nodes that exist at one moment.
#[derive(Debug)]
pub(crate) struct NodeView<'a> {
    sources: &'a NodeSources,
    known: NodeMap,
    routes: Arc<RouteTable>,
    has_replicas: bool,
    now: SystemTime,
}

/// A node. What its sessions are is as of the moment at which it was looked up.
#[derive(Debug)]
pub(crate) struct ObservedNode<'v> {
    view: &'v NodeView<'v>,
    pub(crate) name: &'v NodeName,
    known: Option<&'v KnownNode>,
    cluster: Option<&'v RouteNode>,
    holder: Holder,
}

/// The server that carries requests to a node.
#[derive(Debug)]
enum Holder {
    Nobody,
    This(OwnSessions),
    /// Another server, with what it has sent of the node and when.
    Other(ReplicaId, Option<(Arc<NodeRow>, SystemTime)>),
    /// Nobody, and the server that held the node last is gone since then.
    Gone(ReplicaId, SystemTime),
}

/// The sessions of a node with this server.
#[derive(Debug)]
struct OwnSessions {
    active: Arc<AgentSession>,
    /// That of the active session.
    stats: SessionStats,
    /// Streams of all sessions.
    streams: u64,
    /// The last sign of life in any of them.
    last_seen: SystemTime,
}

impl NodeSources {
    /// Returns the nodes that exist now.
    pub(crate) fn view(&self) -> NodeView<'_> {
        NodeView::new(self)
    }

    /// Returns what `each` makes of all nodes, in batches ordered by name. The memory of a batch does not
    /// depend on the number of nodes.
    pub(crate) fn batches<T, F>(&self, each: F) -> NodeBatches<F>
    where
        F: FnMut(&ObservedNode<'_>) -> Option<T>,
    {
        NodeBatches {
            sources: self.clone(),
            after: Some(Bound::Unbounded),
            each,
        }
    }

    /// Returns the status of a node, or `None` if no node has the name.
    pub fn of_node(&self, name: &NodeName) -> Option<NodeStatus> {
        self.view().node(name).map(|node| node.status())
    }
}

/// All nodes in batches, each as of the moment at which it is made. Nodes that come and go meanwhile
/// neither repeat nor hide others.
#[derive(Debug)]
pub(crate) struct NodeBatches<F> {
    sources: NodeSources,
    /// Where the next batch begins. `None` after the last one.
    after: Option<Bound<NodeName>>,
    each: F,
}

impl<T, F: FnMut(&ObservedNode<'_>) -> Option<T>> Iterator for NodeBatches<F> {
    type Item = Vec<T>;

    fn next(&mut self) -> Option<Vec<T>> {
        let after = self.after.take()?;
        let view = self.sources.view();
        let held = view.listed_after(after.as_ref(), PART_NODES);
        let (mut batch, mut last) = (Vec::new(), None);
        for node in view.nodes_after(after.as_ref(), &held).take(PART_NODES) {
            batch.extend((self.each)(&node));
            last = Some(node.name);
        }
        self.after = Some(Bound::Excluded(last?.clone()));
        Some(batch)
    }
}

impl<'a> NodeView<'a> {
    fn new(sources: &'a NodeSources) -> Self {
        Self {
            sources,
            known: sources.nodes.snapshot(),
            routes: sources.routes.load(),
            has_replicas: sources.has_replicas(),
            now: SystemTime::now(),
        }
    }

    fn registry(&self) -> Option<&Registry> {
        let sessions = self.sources.sessions.as_ref();
        sessions.map(|sessions| &*sessions.registry)
    }

    fn peers(&self) -> Option<&Peers> {
        let sessions = self.sources.sessions.as_ref();
        sessions.map(|sessions| &*sessions.peers)
    }

    /// Returns a node, or `None` if none has the name.
    pub(crate) fn node<'v>(&'v self, name: &'v NodeName) -> Option<ObservedNode<'v>> {
        let known = self.known.get(name);
        let cluster = self.routes.node(RouteSource::Cluster, name);
        let node = self.observe(name, known, cluster);
        Some(node).filter(ObservedNode::exists)
    }

    /// Calls `each` with every node, in order.
    pub(crate) fn for_each(&self, mut each: impl FnMut(&ObservedNode<'_>)) {
        let held = self.listed_after(Bound::Unbounded, usize::MAX);
        for node in self.nodes_after(Bound::Unbounded, &held) {
            each(&node);
        }
    }

    pub(crate) fn listed_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<NodeName> {
        let held = self.peers().map(|peers| peers.listed_after(after, limit));
        held.unwrap_or_default()
    }

    /// Returns the nodes whose names are after `after`, in order. `held` are those of them that other
    /// servers hold. Looks up no name in what is in order already.
    pub(crate) fn nodes_after<'v>(
        &'v self,
        after: Bound<&'v NodeName>,
        held: &'v [NodeName],
    ) -> impl Iterator<Item = ObservedNode<'v>> {
        let mut known = self.known.range((after, Bound::Unbounded)).peekable();
        let mut of_cluster = self.routes.after(RouteSource::Cluster, after).peekable();
        let mut held = held.iter().peekable();
        let nodes = std::iter::from_fn(move || {
            let next_known = known.peek().copied().map(|(name, _known)| name);
            let next_of_cluster = of_cluster.peek().copied().map(|node| &node.name);
            let next = next_known.into_iter().chain(next_of_cluster);
            let name = next.chain(held.peek().copied()).min()?;
            let known = known.next_if(|(other, _known)| *other == name);
            let cluster = of_cluster.next_if(|node| node.name == *name);
            let _held = held.next_if(|other| *other == name);
            Some(self.observe(name, known.map(|(_name, known)| known), cluster))
        });
        nodes.filter(ObservedNode::exists)
    }

    fn observe<'v>(
        &'v self,
        name: &'v NodeName,
        known: Option<&'v KnownNode>,
        cluster: Option<&'v Arc<RouteNode>>,
    ) -> ObservedNode<'v> {
        ObservedNode {
            view: self,
            name,
            known,
            cluster: cluster.map(Arc::as_ref),
            holder: self.holder(name),
        }
    }

    /// Returns this server if it can route to the node, or else another one, or else this one if it
    /// has any session.
    fn holder(&self, name: &NodeName) -> Holder {
        let sessions = self.registry().map(|registry| registry.of_node(name));
        let sessions = sessions.unwrap_or_default();
        let active = sessions.iter().position(|session| session.is_routable());
        let mut gone = None;
        if active.is_none()
            && let Some(peers) = self.peers()
        {
            match peers.shown_holder(name) {
                Some(ShownHolder::Here(other)) => {
                    let row = peers.rows.row(&other, name);
                    return Holder::Other(other, row);
                }
                Some(ShownHolder::Gone(server, since)) => gone = Some((server, since)),
                None => {}
            }
        }
        if let Some(own) = OwnSessions::new(sessions, active.unwrap_or(0), self.now) {
            return Holder::This(own);
        }
        // This server has seen the agent since, so that the state is known.
        let is_later = |since| self.closed(name).is_some_and(|closed| closed > since);
        match gone.filter(|(_, since)| !is_later(*since)) {
            Some((server, since)) => Holder::Gone(server, since),
            None => Holder::Nobody,
        }
    }

    /// Returns the last sign of life in the last session with this server that has ended.
    fn closed(&self, name: &NodeName) -> Option<SystemTime> {
        self.registry()?.last_seen(name)
    }
}

impl OwnSessions {
    /// Returns `None` without a session.
    fn new(mut all: Vec<Arc<AgentSession>>, active: usize, now: SystemTime) -> Option<Self> {
        if active >= all.len() {
            return None;
        }
        let active = all.swap_remove(active);
        let stats = active.session.stats();
        let (mut streams, mut received_at) = (stats.streams as u64, stats.received_at);
        for other in all {
            let stats = other.session.stats();
            streams += stats.streams as u64;
            received_at = received_at.max(stats.received_at);
        }
        Some(Self {
            active,
            stats,
            streams,
            last_seen: now.checked_sub(received_at.elapsed()).unwrap_or(now),
        })
    }
}

impl ObservedNode<'_> {
    /// Returns the figures of its traffic with the server that carries requests to it.
    pub(crate) fn figures(&self, figures: &TrafficFigures<'_>) -> Option<NodeTraffic> {
        match &self.holder {
            Holder::Other(_, row) => {
                let (row, _received) = row.as_ref()?;
                Some(NodeTraffic::figures_of_row(row))
            }
            Holder::This(_) | Holder::Nobody | Holder::Gone(..) => figures.of_own(self.name),
        }
    }

    /// Returns whether any source has the node. Another server may have lost it meanwhile.
    fn exists(&self) -> bool {
        let is_listed = self.known.is_some() || self.cluster.is_some();
        is_listed || matches!(self.holder, Holder::Other(..) | Holder::Gone(..))
    }

    /// Returns all that is known of the node, as text.
    pub(crate) fn status(&self) -> NodeStatus {
        let summary = self.summary();
        let certificate = self.known.and_then(|node| node.certificate_not_after);
        let registry = self.view.registry();
        let addresses = self.addresses();
        let mut status = NodeStatus {
            node: summary.name.to_owned(),
            connected: summary.is_connected,
            is_edge: summary.is_edge,
            is_pending: summary.is_pending,
            replica: summary.replica.map(str::to_owned),
            zone: self.zone(),
            transport: summary.transport.map(str::to_owned),
            state: summary
                .is_suspect
                .map(|is_suspect| if is_suspect { "suspect" } else { "live" }.to_owned()),
            version: summary.version.map(str::to_owned),
            version_skew: summary.version.and_then(VersionSkew::of_agent),
            last_seen: summary.last_seen.map(rfc3339),
            last_close: registry
                .and_then(|registry| registry.last_close(self.name))
                .map(CloseStatus::from),
            history: registry
                .and_then(|registry| registry.history(self.name))
                .map(HistoryStatus::from),
            revoked_at: self.revoked_at().map(rfc3339),
            enrollment: summary.enrollment,
            rtt_millis: summary.rtt_millis,
            streams: summary.streams,
            certificate_not_after: certificate.map(rfc3339),
            address_conflicts: self.view.sources.conflicts(&addresses),
            addresses,
            labels: self.labels().into_owned(),
            claimed_labels: self.claimed_labels().cloned().unwrap_or_default(),
            ..NodeStatus::default()
        };
        match &self.holder {
            Holder::This(OwnSessions { active, stats, .. }) => {
                status.address = Some(stats.remote.to_string());
                status.connected_since = Some(rfc3339(active.since));
                [status.bytes_in, status.bytes_out] = [stats.bytes_in, stats.bytes_out];
                // A certificate renewed on a session is newer than the one of its handshake.
                let begun_with = active.session.peer().not_after;
                let latest = certificate.map_or(begun_with, |at| at.max(begun_with));
                status.certificate_not_after = Some(rfc3339(latest));
                let claimed = active.claimed_address.clone();
                status.claimed_address = Some(claimed).filter(|text| !text.is_empty());
            }
            Holder::Other(_, Some((row, _received))) => {
                status.address = row.address.map(|address| address.to_string());
                status.connected_since = Some(rfc3339(row.since));
                [status.bytes_in, status.bytes_out] = row.bytes;
                status.certificate_not_after = Some(rfc3339(row.certificate_not_after));
            }
            Holder::Gone(server, since) => {
                status.gone_server = Some(GoneServer {
                    name: server.to_string(),
                    since: rfc3339(*since),
                });
            }
            Holder::Other(_, None) | Holder::Nobody => {}
        }
        status
    }

    /// Returns the name of the server that carries requests to the node, if there are several servers.
    fn replica(&self) -> Option<&ReplicaId> {
        match &self.holder {
            Holder::Other(replica, _row) => Some(replica),
            Holder::This(_) if self.view.has_replicas => self.view.peers().map(Peers::own),
            Holder::This(_) | Holder::Nobody | Holder::Gone(..) => None,
        }
    }

    fn zone(&self) -> Option<String> {
        let zone = self.view.peers()?.zone_of(self.replica()?);
        zone.map(|zone| zone.to_string())
    }

    fn revoked_at(&self) -> Option<SystemTime> {
        self.view.sources.revocations.revoked_at(self.name)
    }

    /// Returns the addresses that an operator assigned, and then those of the Node object.
    fn addresses(&self) -> Vec<IpAddr> {
        let assigned = self.known.into_iter().flat_map(|node| &node.addresses);
        let observed = self.cluster.into_iter().flat_map(|node| &node.addresses);
        let mut addresses = Vec::new();
        for address in assigned.chain(observed) {
            if !addresses.contains(address) {
                addresses.push(*address);
            }
        }
        addresses
    }
}

impl ListedNode for ObservedNode<'_> {
    fn summary(&self) -> NodeSummary<'_> {
        let is_cloud = self.known.is_none() && self.cluster.is_some_and(|node| !node.is_edge);
        let is_connected = !matches!(self.holder, Holder::Nobody | Holder::Gone(..));
        let summary = NodeSummary {
            name: self.name.as_str(),
            is_connected,
            is_edge: is_connected || !is_cloud,
            replica: self.replica().map(ReplicaId::as_str),
            enrollment: self.known.and_then(|node| node.enrollment),
            ..NodeSummary::default()
        };
        match &self.holder {
            Holder::Nobody | Holder::Gone(..) => {
                let gone = match &self.holder {
                    Holder::Gone(_, since) => Some(*since),
                    _ => None,
                };
                let seen = self.view.closed(self.name).max(gone);
                let is_unused = self.known.is_some_and(KnownNode::is_pending);
                NodeSummary {
                    is_revoked: self.revoked_at().is_some(),
                    is_pending: is_unused && self.cluster.is_none() && seen.is_none(),
                    is_server_gone: gone.is_some(),
                    last_seen: seen.max(self.known.and_then(|node| node.last_seen)),
                    ..summary
                }
            }
            Holder::This(own) => NodeSummary {
                is_suspect: Some(own.active.suspect_reason().is_some()),
                transport: Some(own.active.session.transport().label()),
                version: Some(&own.active.software),
                last_seen: Some(own.last_seen),
                rtt_millis: u64::try_from(own.stats.rtt.as_millis()).ok(),
                streams: own.streams,
                ..summary
            },
            Holder::Other(_, None) => summary,
            Holder::Other(_, Some((row, received))) => {
                let silence = Duration::from_secs(row.silent_seconds.into());
                NodeSummary {
                    is_suspect: Some(row.is_suspect),
                    transport: Some(&row.transport),
                    version: Some(&row.version),
                    last_seen: Some(received.checked_sub(silence).unwrap_or(*received)),
                    rtt_millis: Some(row.rtt_millis.into()),
                    streams: row.streams.into(),
                    ..summary
                }
            }
        }
    }

    /// Those of the Node object take precedence.
    fn labels(&self) -> Cow<'_, NodeLabels> {
        let of_token = self.known.map(|node| &node.labels);
        let of_object = self.cluster.map(|node| &node.labels);
        match (of_token, of_object) {
            (Some(of_token), Some(of_object)) if !of_token.is_empty() => {
                let mut labels = of_token.clone();
                labels.extend(of_object.clone());
                Cow::Owned(labels)
            }
            (_, Some(labels)) | (Some(labels), None) => Cow::Borrowed(labels),
            (None, None) => Cow::default(),
        }
    }

    fn claimed_labels(&self) -> Option<&NodeLabels> {
        match &self.holder {
            Holder::This(own) => Some(&own.active.claimed_labels),
            Holder::Other(..) | Holder::Nobody | Holder::Gone(..) => None,
        }
    }
}

/// Nodes of a batch: about 200 KB, in a few milliseconds.
const PART_NODES: usize = 200;
