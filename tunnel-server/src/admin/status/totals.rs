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
    away: usize,
    /// Nodes that are away and revoked.
    revoked: usize,
}

impl NodeTotals {
    #[must_use]
    pub fn of(nodes: &[NodeStatus]) -> Self {
        let count = |is_counted: fn(&NodeStatus) -> bool| {
            nodes.iter().filter(|node| is_counted(node)).count()
        };
        Self {
            nodes: nodes.len(),
            connected: count(|node| node.connected),
            suspect: count(|node| node.state.as_deref() == Some("suspect")),
            away: count(|node| !node.connected),
            revoked: count(NodeStatus::is_revoked),
        }
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
