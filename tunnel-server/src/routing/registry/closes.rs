//! The last close of each node's sessions, for operators: why a node is away, and since when. Pure.
//! The number of nodes and the length of each reason are bounded, because agents choose both.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::SystemTime;

use tunnel_proto::transport::{CloseReason, ClosedBy};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;

/// The end of the session of a node that closed last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastClose {
    /// Time at which the server noticed the close.
    pub at: SystemTime,
    /// Address of the agent.
    pub remote: SocketAddr,
    /// Time of the agent's last sign of life in the session.
    pub last_seen: SystemTime,
    pub by: ClosedBy,
    pub code: CloseCode,
    /// Reason for people, which the agent may have chosen. At most 200 characters.
    pub reason: String,
}

impl LastClose {
    /// Creates the entry of a session that ended for this reason.
    pub fn new(
        reason: &CloseReason,
        remote: SocketAddr,
        last_seen: SystemTime,
        at: SystemTime,
    ) -> Self {
        Self {
            at,
            remote,
            last_seen,
            by: reason.by,
            code: reason.code,
            reason: reason.reason.chars().take(REASON_MAX).collect(),
        }
    }
}

/// The last close of each node, for at most `limit` nodes. A node beyond the limit evicts the node
/// whose last close is the oldest.
#[derive(Debug)]
pub(super) struct Closes {
    limit: usize,
    nodes: HashMap<NodeName, NumberedClose>,
    /// Nodes by the number of their last close.
    by_number: BTreeMap<u64, NodeName>,
    next_number: u64,
}

#[derive(Debug)]
struct NumberedClose {
    number: u64,
    close: LastClose,
}

impl Closes {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            nodes: HashMap::new(),
            by_number: BTreeMap::new(),
            next_number: 0,
        }
    }

    /// Records the close of a session, and evicts the oldest entry beyond the limit.
    pub(super) fn record(&mut self, node: &NodeName, close: LastClose) {
        let number = self.next_number;
        self.next_number += 1;
        let entry = NumberedClose { number, close };
        if let Some(previous) = self.nodes.insert(node.clone(), entry) {
            self.by_number.remove(&previous.number);
        }
        self.by_number.insert(number, node.clone());
        while self.nodes.len() > self.limit {
            let Some((_, oldest)) = self.by_number.pop_first() else {
                return;
            };
            self.nodes.remove(&oldest);
        }
    }

    pub(super) fn of_node(&self, node: &NodeName) -> Option<&LastClose> {
        self.nodes.get(node).map(|entry| &entry.close)
    }

    /// Returns the nodes whose last session was from each of these addresses, in order.
    pub(super) fn from_addresses(
        &self,
        addresses: &HashSet<IpAddr>,
    ) -> HashMap<IpAddr, Vec<NodeName>> {
        let mut found: HashMap<IpAddr, Vec<NodeName>> = HashMap::new();
        for (node, entry) in &self.nodes {
            let address = entry.close.remote.ip().to_canonical();
            if addresses.contains(&address) {
                found.entry(address).or_default().push(node.clone());
            }
        }
        found.values_mut().for_each(|names| names.sort());
        found
    }
}

/// Number of nodes of which the registry remembers the last close. With the longest names and
/// reasons they take about 20 MB, with usual ones about 5 MB.
pub(super) const CLOSES_MAX: usize = 20_000;
/// Number of characters of a reason that are stored.
const REASON_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn name(number: usize) -> NodeName {
        format!("worker-{number}").parse().unwrap()
    }

    fn close(seconds: u64, reason: &str) -> LastClose {
        let reason = CloseReason {
            by: ClosedBy::Peer,
            code: CloseCode::Normal,
            reason: reason.to_owned(),
        };
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        LastClose::new(&reason, "192.0.2.1:5".parse().unwrap(), at, at)
    }

    #[test]
    fn newest_close_of_a_node_counts() {
        let mut closes = Closes::new(2);
        closes.record(&name(1), close(1, "first"));
        closes.record(&name(1), close(2, "second"));
        assert_eq!(closes.of_node(&name(1)), Some(&close(2, "second")));
        assert_eq!(closes.of_node(&name(2)), None);
        assert_eq!(closes.by_number.len(), 1);
    }

    #[test]
    fn oldest_close_is_evicted_and_one_node_evicts_no_other() {
        let mut closes = Closes::new(3);
        for number in 1..=3 {
            closes.record(&name(number), close(1, ""));
        }
        // A node that flaps takes one entry.
        for _ in 0..100 {
            closes.record(&name(1), close(2, ""));
        }
        closes.record(&name(4), close(3, ""));
        let remaining = (1..=4).filter(|number| closes.of_node(&name(*number)).is_some());
        assert_eq!(remaining.collect::<Vec<_>>(), [1, 3, 4]);
    }

    #[test]
    fn ten_thousand_hostile_closes_take_bounded_memory() {
        let mut closes = Closes::new(100);
        for number in 0..10_000 {
            closes.record(&name(number), close(1, &"ä".repeat(5_000)));
        }
        assert_eq!((closes.nodes.len(), closes.by_number.len()), (100, 100));
        let newest = closes.of_node(&name(9_999)).unwrap();
        assert_eq!(newest.reason.chars().count(), REASON_MAX);
        assert!(closes.of_node(&name(9_899)).is_none());
    }
}
