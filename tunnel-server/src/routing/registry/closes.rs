//! The last close of each node's sessions, for operators: why a node is away, and since when. Pure.
//! The number of nodes and the length of each reason are bounded, because agents choose both.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

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

/// What this process has seen of a node's sessions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionHistory {
    /// Time with a session, up to the end of the last one.
    pub connected: Duration,
    /// Number of times that the node came without having a session.
    pub connects: u64,
    /// Number of ended sessions by the code of their close.
    pub ends: BTreeMap<&'static str, u64>,
}

/// The last close and the history of each node, for at most `limit` nodes. A node beyond the limit
/// evicts the node that changed first.
#[derive(Debug)]
pub(super) struct Closes {
    limit: usize,
    nodes: HashMap<NodeName, NumberedEntry>,
    /// Nodes by the number of their last change.
    by_number: BTreeMap<u64, NodeName>,
    next_number: u64,
}

#[derive(Debug, Default)]
struct NumberedEntry {
    number: u64,
    close: Option<LastClose>,
    history: SessionHistory,
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

    /// Records the end of a session.
    pub(super) fn record(&mut self, node: &NodeName, close: LastClose) {
        self.change(node, |entry| {
            *entry.history.ends.entry(close.code.label()).or_default() += 1;
            entry.close = Some(close);
        });
    }

    /// Records why an agent was not admitted.
    pub(super) fn record_refusal(&mut self, node: &NodeName, close: LastClose) {
        self.change(node, |entry| entry.close = Some(close));
    }

    /// Records that a node without a session has one.
    pub(super) fn record_connect(&mut self, node: &NodeName) {
        self.change(node, |entry| entry.history.connects += 1);
    }

    /// Records that a node has lost its last session after this time.
    pub(super) fn record_connected(&mut self, node: &NodeName, time: Duration) {
        self.change(node, |entry| entry.history.connected += time);
    }

    /// Changes the entry of a node, and evicts the oldest entry beyond the limit.
    fn change(&mut self, node: &NodeName, change: impl FnOnce(&mut NumberedEntry)) {
        let number = self.next_number;
        self.next_number += 1;
        match self.nodes.get_mut(node) {
            Some(entry) => {
                self.by_number.remove(&entry.number);
                entry.number = number;
                change(entry);
            }
            None => {
                let mut entry = NumberedEntry {
                    number,
                    ..NumberedEntry::default()
                };
                change(&mut entry);
                self.nodes.insert(node.clone(), entry);
            }
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
        self.nodes.get(node)?.close.as_ref()
    }

    pub(super) fn history(&self, node: &NodeName) -> Option<&SessionHistory> {
        self.nodes.get(node).map(|entry| &entry.history)
    }

    /// Returns the nodes whose last session was from each of these addresses, in order.
    pub(super) fn nodes_at(&self, addresses: &HashSet<IpAddr>) -> HashMap<IpAddr, Vec<NodeName>> {
        let mut found: HashMap<IpAddr, Vec<NodeName>> = HashMap::new();
        for (node, entry) in &self.nodes {
            let close = entry.close.as_ref();
            let address = close.map(|close| close.remote.ip().to_canonical());
            if let Some(address) = address.filter(|address| addresses.contains(address)) {
                found.entry(address).or_default().push(node.clone());
            }
        }
        found.values_mut().for_each(|names| names.sort());
        found
    }
}

/// Number of nodes of which the registry remembers the last close and the history. With the longest
/// names and reasons they take about 30 MB, with usual ones about 8 MB.
pub(super) const CLOSES_MAX: usize = 20_000;
/// Number of characters of a reason that are stored.
const REASON_MAX: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: usize) -> NodeName {
        format!("worker-{number}").parse().unwrap()
    }

    fn close(seconds: u64, reason: &str) -> LastClose {
        let reason = CloseReason::peer(CloseCode::Normal, reason);
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
    fn history_counts_times_and_ends_and_a_refusal_is_none() {
        let mut closes = Closes::new(2);
        for _ in 0..2 {
            closes.record_connect(&name(1));
            closes.record_connected(&name(1), Duration::from_secs(7));
            closes.record(&name(1), close(1, ""));
        }
        closes.record_refusal(&name(1), close(2, "refused"));
        let expected = SessionHistory {
            connected: Duration::from_secs(14),
            connects: 2,
            ends: [("normal", 2)].into(),
        };
        assert_eq!(closes.history(&name(1)), Some(&expected));
        assert_eq!(closes.of_node(&name(1)), Some(&close(2, "refused")));
        assert_eq!(closes.history(&name(2)), None);
        let address = "192.0.2.1".parse().unwrap();
        let from = closes.nodes_at(&[address].into());
        assert_eq!(from, [(address, vec![name(1)])].into());
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
