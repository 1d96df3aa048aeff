//! Nodes that other servers have given up in favor of an agent process at this server. What such a
//! server announced before that may arrive later, and must not close the newcomer.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::peer::HeldNode;

/// The last entry of each node that a server has given up.
#[derive(Debug, Default)]
pub(super) struct Yields(HashMap<(NodeName, ReplicaId), YieldedNode>);

#[derive(Debug)]
struct YieldedNode {
    held_node: HeldNode,
    at: Instant,
}

impl Yields {
    /// Records that a server gave up the node of this entry at `now`.
    pub(super) fn insert(&mut self, replica: &ReplicaId, held_node: HeldNode, now: Instant) {
        self.0
            .retain(|_, yielded| now.saturating_duration_since(yielded.at) < REMEMBERED);
        if self.0.len() < YIELDS_MAX {
            let key = (held_node.node.clone(), replica.clone());
            let yielded = YieldedNode { held_node, at: now };
            self.0.insert(key, yielded);
        }
    }

    /// Returns whether a server announced this entry before it gave up the node. An admission of
    /// the same agent process after that is later than the one in the entry that was given up.
    pub(super) fn contains(&self, replica: &ReplicaId, held_node: &HeldNode) -> bool {
        let key = (held_node.node.clone(), replica.clone());
        self.0.get(&key).is_some_and(|yielded| {
            let last = &yielded.held_node;
            held_node.instance == last.instance && held_node.since <= last.since
        })
    }
}

/// Longer than a server announces a node that it has given up: 1 s, and the time to send a list.
const REMEMBERED: Duration = Duration::from_secs(10);
/// Maximum number of nodes that were given up within [`REMEMBERED`]. Without its entry, a newcomer
/// is closed by an older announcement and dials again.
const YIELDS_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use tunnel_proto::wire::name::InstanceId;

    use super::*;

    #[test]
    fn entry_counts_as_given_up_up_to_its_admission_and_is_forgotten() {
        let replica: ReplicaId = "b".parse().unwrap();
        let entry = |node: &str, instance: u8, millis: u64| HeldNode {
            node: node.parse().unwrap(),
            instance: InstanceId::new([instance; 16]),
            since: UNIX_EPOCH + Duration::from_millis(millis),
        };
        let (mut yields, start) = (Yields::default(), Instant::now());
        yields.insert(&replica, entry("x", 1, 5), start);
        assert!(yields.contains(&replica, &entry("x", 1, 5)));
        assert!(!yields.contains(&replica, &entry("x", 1, 6)));
        assert!(!yields.contains(&replica, &entry("x", 2, 5)));
        assert!(!yields.contains(&"c".parse().unwrap(), &entry("x", 1, 5)));
        yields.insert(&replica, entry("y", 1, 5), start + REMEMBERED);
        assert!(!yields.contains(&replica, &entry("x", 1, 5)));
        for number in 0..2 * YIELDS_MAX {
            let entry = entry(&format!("n{number}"), 1, 5);
            yields.insert(&replica, entry, start + REMEMBERED);
        }
        assert_eq!(yields.0.len(), YIELDS_MAX);
    }
}
