//! Numbers of nodes by their status.

use std::fmt;

use serde::Serialize;

use super::NodeStatus;

/// Numbers of listed nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTotals {
    nodes: usize,
    /// Nodes with an agent, suspect ones included.
    connected: usize,
    suspect: usize,
    /// Nodes that need an agent and have none. Nodes of the cluster that are not edge nodes need none.
    away: usize,
    /// Nodes that are away and revoked.
    revoked: usize,
}

impl NodeTotals {
    /// Counts a node by its status.
    pub fn add(&mut self, node: &NodeStatus) {
        let is_suspect = node.state.as_deref() == Some("suspect");
        self.nodes += 1;
        self.connected += usize::from(node.connected);
        self.suspect += usize::from(is_suspect);
        self.away += usize::from(node.is_away());
        self.revoked += usize::from(node.is_revoked());
    }
}

impl fmt::Display for NodeTotals {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "total: {}; connected: {} (suspect: {}); away: {} (revoked: {})",
            self.nodes, self.connected, self.suspect, self.away, self.revoked
        )
    }
}
