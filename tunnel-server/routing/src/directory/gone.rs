//! The nodes of servers that are gone and that no other server holds: nobody knows their state, and lists
//! show them until somebody does. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::SystemTime;

use tunnel_proto::wire::name::{NodeName, ReplicaId};

/// The nodes that servers held last before they were gone.
#[derive(Debug, Default)]
pub(super) struct GoneNodes {
    servers: BTreeMap<ReplicaId, OfServer>,
    /// Nodes of servers that are back without them or no longer expected. No list shows them, but a
    /// rotation of the CA waits for them: nobody has seen their certificates.
    unresolved: BTreeSet<NodeName>,
}

#[derive(Debug, Default)]
struct OfServer {
    /// Time of the loss of the connection. `None` while the server is about to leave.
    since: Option<SystemTime>,
    nodes: BTreeSet<NodeName>,
}

impl GoneNodes {
    /// Stores the last holder of a node unless there are `max` nodes of that server.
    pub(super) fn add(&mut self, replica: &ReplicaId, node: NodeName, max: usize) {
        let of_server = self.servers.entry(replica.clone()).or_default();
        if of_server.nodes.len() < max {
            of_server.nodes.insert(node);
        }
    }

    /// Begins to show the nodes of a server that has had no connection since then.
    pub(super) fn begin(&mut self, replica: &ReplicaId, since: SystemTime) {
        if let Some(of_server) = self.servers.get_mut(replica) {
            of_server.since.get_or_insert(since);
        }
    }

    /// Forgets a node, of which a server knows the state.
    pub(super) fn forget(&mut self, node: &NodeName) {
        for of_server in self.servers.values_mut() {
            of_server.nodes.remove(node);
        }
        self.unresolved.remove(node);
    }

    /// Forgets who held the nodes of a server, which is back or no longer expected. At most `max` nodes
    /// stay unresolved.
    pub(super) fn forget_replica(&mut self, replica: &ReplicaId, max: usize) {
        let nodes = self.servers.remove(replica).unwrap_or_default().nodes;
        let room = max.saturating_sub(self.unresolved.len());
        self.unresolved.extend(nodes.into_iter().take(room));
    }

    /// Returns the first `limit` nodes after `after` of servers that are gone or no longer expected, in
    /// order.
    pub(super) fn unresolved_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<&NodeName> {
        let shown = self.shown().map(|(_, _, nodes)| nodes);
        let all = shown.chain([&self.unresolved]);
        let mut nodes: Vec<_> = all
            .flat_map(|nodes| nodes.range((after, Bound::Unbounded)).take(limit))
            .collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes.truncate(limit);
        nodes
    }

    /// Returns the server that held a node last, and since when that is gone.
    pub(super) fn of_node(&self, node: &NodeName) -> Option<(&ReplicaId, SystemTime)> {
        self.shown()
            .find(|(_, _, nodes)| nodes.contains(node))
            .map(|(replica, since, _)| (replica, since))
    }

    /// Returns the nodes whose names are after `after`: those of each server in order.
    pub(super) fn after(&self, after: Bound<&NodeName>) -> impl Iterator<Item = &NodeName> {
        let shown = self.shown();
        shown.flat_map(move |(_, _, nodes)| nodes.range((after, Bound::Unbounded)))
    }

    fn shown(&self) -> impl Iterator<Item = (&ReplicaId, SystemTime, &BTreeSet<NodeName>)> {
        let servers = self.servers.iter();
        servers
            .filter_map(|(replica, of_server)| Some((replica, of_server.since?, &of_server.nodes)))
    }
}
