//! The last requests of each node and the number of its failed ones, for the console. Memory is
//! bounded: the nodes whose last request is the oldest lose their requests first.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tunnel_process::telemetry::non_empty;
use tunnel_proto::stream_record::{RecordedPeer, StreamRecord};
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_proto::wire::node_row::{FAILING_MAX, FailingRequests};

use crate::outcome::Outcome;

/// Longest text of a caller in a record, and of any kind in a recent request, in bytes.
const FIELD_MAX_BYTES: usize = 256;

/// Number of requests that are stored for one node.
pub const REQUESTS_PER_NODE: usize = 20;

/// A request or stream that has ended. Each text has at most 256 bytes, so a request is at most
/// about 1 KiB, and those of one node about 20 KiB.
#[derive(Debug, Clone)]
pub struct RecentRequest {
    /// Time of the end.
    pub at: SystemTime,
    pub listener: &'static str,
    /// The other end of the caller's connection, or the server that forwarded the stream.
    pub peer: Option<RecordedPeer>,
    /// Identity that the caller has proved, or empty.
    pub caller: Box<str>,
    /// Method and path, or the name of the TCP service, or the target of a forwarded stream.
    pub request: Box<str>,
    pub port: Option<Port>,
    pub status: Option<u16>,
    pub outcome: Outcome,
    /// Reason of a failure, or empty.
    pub error: Box<str>,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub elapsed: Duration,
}

impl RecentRequest {
    fn of<E: Copy + Into<Outcome>>(record: &StreamRecord<E>) -> Self {
        let request = non_empty(&record.request).unwrap_or(&record.target);
        Self {
            at: SystemTime::now(),
            listener: record.listener.unwrap_or_default(),
            peer: record.peer.clone(),
            caller: beginning(&record.caller).into(),
            request: beginning(request).into(),
            port: record.port,
            status: record.status,
            outcome: record.end.into(),
            error: beginning(&record.detail).into(),
            bytes_in: record.bytes_in,
            bytes_out: record.bytes_out,
            elapsed: record.began.elapsed(),
        }
    }

    fn text_bytes(&self) -> usize {
        self.caller.len() + self.request.len() + self.error.len()
    }
}

/// Returns the longest beginning of `text` with at most 256 bytes.
pub fn beginning(text: &str) -> &str {
    let mut end = text.len().min(FIELD_MAX_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Limits of the memory of [`RecentRequests`].
#[derive(Debug, Clone, Copy)]
pub struct RecentRequestLimits {
    /// Bytes of the requests of all nodes.
    pub bytes: usize,
    /// Nodes whose failed requests are counted. An entry without requests is about 300 bytes.
    pub nodes: usize,
}

impl Default for RecentRequestLimits {
    /// Returns the limits of a server: 32 MiB, which is 20 requests of usual size for each of 5,000
    /// nodes, and the counts of 65,536 nodes, another 20 MB.
    fn default() -> Self {
        Self {
            bytes: 32 << 20,
            nodes: 1 << 16,
        }
    }
}

/// The last requests of each node, and its failed requests by code.
#[derive(Debug)]
pub struct RecentRequests {
    limits: RecentRequestLimits,
    entries: Mutex<Entries>,
    failing: Mutex<HashMap<(NodeName, Outcome), FailingRequests>>,
}

impl RecentRequests {
    /// Creates a store that stays within `limits`.
    pub fn new(limits: RecentRequestLimits) -> Self {
        Self {
            limits,
            entries: Mutex::default(),
            failing: Mutex::default(),
        }
    }

    /// Records a request that has ended, if it is one for a node.
    pub fn record<E: Copy + Into<Outcome>>(&self, record: &StreamRecord<E>) {
        if let Some(node) = &record.node {
            self.store(node, RecentRequest::of(record));
        }
    }

    /// Records a request for a node.
    pub fn store(&self, node: &NodeName, request: RecentRequest) {
        if request.outcome.is_failure() {
            self.add_failing(node, &request);
        }
        let mut entries = self.entries.lock();
        entries.count(node, request.outcome, self.limits.nodes);
        entries.record(node, request);
        entries.evict(self.limits);
    }

    /// Adds a failed request to the others of its node and code. After an hour without one, it is the first.
    fn add_failing(&self, node: &NodeName, request: &RecentRequest) {
        let mut failing = self.failing.lock();
        let key = (node.clone(), request.outcome);
        if failing.len() >= FAILING_STORED && !failing.contains_key(&key) {
            let oldest = failing.iter().min_by_key(|(_, failing)| failing.last);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                failing.remove(&oldest);
            }
        }
        let entry = failing.entry(key).or_insert_with(|| FailingRequests {
            node: node.clone(),
            code: request.outcome.label().to_owned(),
            port: 0,
            count: 0,
            first: request.at,
            last: request.at,
            detail: String::new(),
        });
        if request.at.duration_since(entry.last).unwrap_or_default() > FAILING_FOR {
            (entry.first, entry.count) = (request.at, 0);
        }
        entry.count += 1;
        entry.last = request.at;
        entry.port = request.port.map_or(0, |port| port.get());
        entry.detail = request.error.to_string();
    }

    /// Returns the requests that failed in the last hour by node and code, the last one first.
    pub fn failing(&self, now: SystemTime) -> Vec<FailingRequests> {
        let failing = self.failing.lock();
        let is_recent = |failing: &&FailingRequests| {
            now.duration_since(failing.last).unwrap_or_default() <= FAILING_FOR
        };
        let mut recent: Vec<_> = failing.values().filter(is_recent).collect();
        recent.sort_by(|one, other| (other.last, &one.node).cmp(&(one.last, &other.node)));
        recent.into_iter().take(FAILING_MAX).cloned().collect()
    }

    /// Returns the requests of each node, and the failed ones of these, since the last call.
    pub fn take_counts(&self) -> HashMap<NodeName, (u32, u32)> {
        std::mem::take(&mut self.entries.lock().counts)
    }

    /// Returns the stored requests of a node, the last one first.
    pub fn of_node(&self, node: &NodeName) -> Vec<RecentRequest> {
        let entries = self.entries.lock();
        let requests = entries.by_node.get(node).map(|entry| &entry.requests);
        requests.into_iter().flatten().rev().cloned().collect()
    }

    /// Returns the codes of a node's failed requests with their numbers.
    pub fn errors(&self, node: &NodeName) -> Vec<(Outcome, u64)> {
        let entries = self.entries.lock();
        let Some(entry) = entries.by_node.get(node) else {
            return Vec::new();
        };
        let counts = Outcome::ALL.into_iter().zip(entry.errors);
        counts.filter(|(_, count)| *count > 0).collect()
    }
}

/// The entries of all nodes, and their order by the last request.
#[derive(Debug, Default)]
struct Entries {
    by_node: HashMap<NodeName, Entry>,
    /// All nodes, by the number of their last request.
    by_age: BTreeMap<u64, NodeName>,
    /// The nodes with stored requests, by the number of their last request.
    with_requests: BTreeMap<u64, NodeName>,
    /// Number of the last request.
    last: u64,
    /// Bytes of all stored requests.
    bytes: usize,
    /// Requests and failed ones since they were last taken.
    counts: HashMap<NodeName, (u32, u32)>,
}

#[derive(Debug, Default)]
struct Entry {
    /// Number of the node's last request.
    last: u64,
    requests: VecDeque<RecentRequest>,
    text_bytes: usize,
    /// Number of failed requests by outcome.
    errors: [u64; Outcome::ALL.len()],
}

impl Entry {
    /// Returns the bytes of the stored requests, unused capacity included.
    fn bytes(&self) -> usize {
        self.requests.capacity() * size_of::<RecentRequest>() + self.text_bytes
    }

    fn push(&mut self, request: RecentRequest) {
        if request.outcome != Outcome::Ok
            && let Some(count) = self.errors.get_mut(request.outcome as usize)
        {
            *count += 1;
        }
        if self.requests.len() == REQUESTS_PER_NODE
            && let Some(oldest) = self.requests.pop_front()
        {
            self.text_bytes -= oldest.text_bytes();
        }
        self.text_bytes += request.text_bytes();
        self.requests.push_back(request);
    }
}

impl Entries {
    fn count(&mut self, node: &NodeName, outcome: Outcome, nodes_max: usize) {
        if self.counts.len() < nodes_max || self.counts.contains_key(node) {
            let (requests, failed) = self.counts.entry(node.clone()).or_default();
            *requests = requests.saturating_add(1);
            *failed = failed.saturating_add(outcome.is_failure().into());
        }
    }

    fn record(&mut self, node: &NodeName, request: RecentRequest) {
        self.last += 1;
        let entry = self.by_node.entry(node.clone()).or_default();
        self.by_age.remove(&entry.last);
        self.with_requests.remove(&entry.last);
        entry.last = self.last;
        self.bytes -= entry.bytes();
        entry.push(request);
        self.bytes += entry.bytes();
        self.by_age.insert(self.last, node.clone());
        self.with_requests.insert(self.last, node.clone());
    }

    /// Drops the requests of the nodes whose last request is the oldest, and then their counts,
    /// until both limits hold.
    fn evict(&mut self, limits: RecentRequestLimits) {
        while self.bytes > limits.bytes
            && let Some((_, node)) = self.with_requests.pop_first()
        {
            if let Some(entry) = self.by_node.get_mut(&node) {
                self.bytes -= entry.bytes();
                entry.requests = VecDeque::new();
                entry.text_bytes = 0;
            }
        }
        while self.by_node.len() > limits.nodes
            && let Some((last, node)) = self.by_age.pop_first()
        {
            self.with_requests.remove(&last);
            if let Some(entry) = self.by_node.remove(&node) {
                self.bytes -= entry.bytes();
            }
        }
    }
}

/// Pairs of node and code whose failed requests are stored, about 200 KiB.
const FAILING_STORED: usize = 256;
/// Time after the last failed request for which its node and code are listed.
const FAILING_FOR: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use tokio::time::Instant;
    use tunnel_proto::stream_record::StreamEnd;
    use tunnel_proto::wire::code::RefusalCode;
    use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};

    use super::*;

    impl RecentRequest {
        pub(crate) fn example(outcome: Outcome) -> Self {
            Self {
                at: SystemTime::UNIX_EPOCH,
                listener: "http",
                peer: Some(RecordedPeer::Unix),
                caller: "".into(),
                request: "".into(),
                port: None,
                status: None,
                outcome,
                error: "".into(),
                bytes_in: 0,
                bytes_out: 0,
                elapsed: Duration::ZERO,
            }
        }
    }

    fn request(path: &str, outcome: Outcome) -> RecentRequest {
        RecentRequest {
            request: path.into(),
            ..RecentRequest::example(outcome)
        }
    }

    fn node(number: usize) -> NodeName {
        format!("worker-{number}").parse().unwrap()
    }

    fn paths(store: &RecentRequests, node: &NodeName) -> Vec<String> {
        let requests = store.of_node(node).into_iter();
        requests.map(|request| request.request.into()).collect()
    }

    #[test]
    fn last_twenty_requests_are_stored_and_all_failed_ones_counted() {
        let store = RecentRequests::new(RecentRequestLimits::default());
        for number in 0..30 {
            let outcome = if number < 3 {
                Outcome::NoAgent
            } else {
                Outcome::Ok
            };
            store.store(&node(1), request(&format!("GET /{number}"), outcome));
        }
        let paths = paths(&store, &node(1));
        assert_eq!(paths.len(), REQUESTS_PER_NODE);
        assert_eq!(paths.first().map(String::as_str), Some("GET /29"));
        assert_eq!(paths.last().map(String::as_str), Some("GET /10"));
        assert_eq!(store.errors(&node(1)), [(Outcome::NoAgent, 3)]);
        assert!(store.errors(&node(2)).is_empty());
    }

    #[test]
    fn stream_that_another_server_forwarded_is_a_request_of_its_node() {
        let store = RecentRequests::new(RecentRequestLimits::default());
        let mut record = StreamRecord::start(Instant::now(), StreamEnd::ServerStopping);
        record.peer = Some(RecordedPeer::Server("server-2".parse().unwrap()));
        record.asked(&StreamHeader::new(StreamKind::Forward {
            node: node(1),
            target: Target::Node(Port::new(9100).unwrap()),
            is_verified: true,
        }));
        record.fail(StreamEnd::Refused(RefusalCode::Policy), "no");
        store.record(&record);
        let [request] = &store.of_node(&node(1))[..] else {
            panic!("one request");
        };
        assert_eq!(
            (&request.peer, &*request.request, &*request.error),
            (&record.peer, "node:9100", "no")
        );
        assert_eq!(request.outcome, Outcome::RefusedByPolicy);
    }

    #[test]
    fn failed_requests_are_listed_by_node_and_code_for_an_hour() {
        let store = RecentRequests::new(RecentRequestLimits::default());
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let fail = |number, outcome, seconds, error: &str| {
            let request = RecentRequest {
                at: at(seconds),
                port: Port::new(9100),
                error: error.into(),
                ..RecentRequest::example(outcome)
            };
            store.store(&node(number), request);
        };
        fail(1, Outcome::Ok, 1, "");
        fail(1, Outcome::CallerGone, 1, "");
        fail(1, Outcome::TargetRefused, 10, "first");
        fail(1, Outcome::TargetRefused, 20, "second");
        fail(2, Outcome::RefusedByPolicy, 15, "no rule");
        let shown = |now| -> Vec<_> {
            let failing = store.failing(at(now)).into_iter();
            failing
                .map(|failing| {
                    let since = (failing.first, failing.last);
                    (
                        failing.node,
                        failing.code,
                        failing.count,
                        since,
                        failing.detail,
                    )
                })
                .collect()
        };
        let refused = (
            node(1),
            "target_refused".to_owned(),
            2,
            (at(10), at(20)),
            "second".to_owned(),
        );
        let by_policy = (
            node(2),
            "refused_by_policy".to_owned(),
            1,
            (at(15), at(15)),
            "no rule".to_owned(),
        );
        assert_eq!(shown(30), [refused.clone(), by_policy]);
        assert_eq!(shown(3618), [refused], "an hour after the last one");
        fail(1, Outcome::TargetRefused, 9_000, "later");
        assert_eq!(
            (shown(9_000)[0].2, shown(9_000)[0].3),
            (1, (at(9_000), at(9_000)))
        );
        for number in 0..1000 {
            fail(number, Outcome::NoAgent, 9_000 + number as u64, "");
        }
        assert_eq!(store.failing.lock().len(), FAILING_STORED);
        let last = shown(10_000);
        assert_eq!((last.len(), &last[0].0), (FAILING_MAX, &node(999)));
    }

    #[test]
    fn nodes_without_a_request_for_the_longest_time_lose_theirs_first() {
        let limits = RecentRequestLimits {
            bytes: 10_000,
            nodes: 10,
        };
        let store = RecentRequests::new(limits);
        let text = "x".repeat(4_000);
        store.store(&node(1), request(&text, Outcome::Cut));
        store.store(&node(2), request(&text, Outcome::Cut));
        store.store(&node(1), request("again", Outcome::Cut));
        store.store(&node(3), request(&text, Outcome::Cut));
        assert!(paths(&store, &node(2)).is_empty());
        assert_eq!(store.errors(&node(2)), [(Outcome::Cut, 1)]);
        assert_eq!(paths(&store, &node(3)).len(), 1);
        for number in 4..100 {
            store.store(&node(number), request(&text, Outcome::Cut));
            let entries = store.entries.lock();
            assert!(entries.bytes <= limits.bytes && entries.by_node.len() <= limits.nodes);
            assert_eq!(entries.by_age.len(), entries.by_node.len());
        }
        assert!(store.errors(&node(1)).is_empty());
        assert_eq!(paths(&store, &node(99)).len(), 1);
    }
}
