//! Numbers of nodes by their state.

use std::fmt;

use serde::Serialize;

use super::NodeState;

/// Numbers of listed nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeTotals {
    nodes: usize,
    /// Nodes with an agent, suspect ones included.
    connected: usize,
    suspect: usize,
    /// Nodes that had or have enrolled an agent and have none. Nodes of the cluster that are not edge
    /// nodes need none.
    away: usize,
    /// Nodes that are away and whose state is unknown, because the server that held them last is gone.
    unknown: usize,
    /// Nodes that are away and revoked.
    revoked: usize,
    /// Nodes that have been named, as by a token, and never had an agent.
    pending: usize,
}

impl NodeTotals {
    /// Counts a node by its state.
    pub fn add(&mut self, state: NodeState) {
        self.nodes += 1;
        match state {
            NodeState::Suspect => {
                self.connected += 1;
                self.suspect += 1;
            }
            NodeState::Connected | NodeState::Live => self.connected += 1,
            NodeState::Away | NodeState::Enrolled => self.away += 1,
            NodeState::Unknown => {
                self.away += 1;
                self.unknown += 1;
            }
            NodeState::Revoked => {
                self.away += 1;
                self.revoked += 1;
            }
            NodeState::Pending => self.pending += 1,
            NodeState::NotEdge => {}
        }
    }
}

impl fmt::Display for NodeTotals {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "total: {}; connected: {} (suspect: {}); away: {} (revoked: {}); pending: {}",
            self.nodes, self.connected, self.suspect, self.away, self.revoked, self.pending
        )?;
        // A server without others never has such nodes.
        match self.unknown {
            0 => Ok(()),
            unknown => write!(formatter, "; unknown: {unknown}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_state_is_counted_once_and_suspect_revoked_and_unknown_nodes_twice() {
        let mut totals = NodeTotals::default();
        for state in NodeState::ALL {
            totals.add(state);
        }
        assert_eq!(
            totals.to_string(),
            "total: 9; connected: 3 (suspect: 1); away: 4 (revoked: 1); pending: 1; unknown: 1"
        );
    }
}
