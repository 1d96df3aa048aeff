//! What a run measures.

use std::collections::BTreeMap;
use std::time::Duration;

use tunnel_proto::wire::name::NodeName;
use tunnel_routing::directory::Directory;

use super::model::ScaleOptions;

/// The result of a case. Times count from its event.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaleReport {
    /// Sessions that agents opened after the event.
    pub moves: usize,
    pub dials: usize,
    /// Dials that a server refused because of `limits.preAuthTotal`.
    pub refused: usize,
    /// Fewest sessions of a server at the end.
    pub sessions_min: usize,
    pub sessions_max: usize,
    /// Announcements a second, those of all connections together, from the event to the last.
    pub announcements_mean: f64,
    pub announcements_peak: usize,
    pub bytes_mean: f64,
    pub bytes_peak: usize,
    /// Time until callers at every server reach all nodes; `None` if they do not.
    pub reachable_after: Option<Duration>,
    /// Nodes that callers at some server did not reach for a while.
    pub unreachable_nodes: usize,
    /// Longest time for which callers at one server did not reach one node.
    pub unreachable_longest: Duration,
    /// Nodes whose agents had no session with a server that runs for a while.
    pub lost_nodes: usize,
    /// Longest time for which an agent had no such session.
    pub lost_longest: Duration,
    /// Time until each agent has all of its sessions; `None` if some have not.
    pub complete_after: Option<Duration>,
    /// Agents without all of their sessions at the end.
    pub incomplete_nodes: usize,
    /// Time of the last session that was opened. Later ones only lead to replicas that agents
    /// prefer.
    pub last_move_after: Duration,
    /// Estimated bytes for each entry of a directory: a node at one other server.
    pub entry_bytes: f64,
    /// Writes to the API server. No code that is simulated has a client for it.
    pub api_writes: usize,
}

/// Counters since the event of a case.
#[derive(Debug, Default)]
pub(super) struct Measures {
    since: Duration,
    pub(super) moves: usize,
    pub(super) dials: usize,
    pub(super) refused: usize,
    last_move_at: Duration,
    traffic: BTreeMap<u64, Traffic>,
    /// Number of pairs of a server and a node that callers there do not reach.
    unreachable_pairs: usize,
    was_unreachable: Vec<bool>,
    unreachable_longest: Duration,
    reachable_at: Duration,
    /// For each node: since when its agent has no session.
    lost_since: Vec<Option<Duration>>,
    was_lost: Vec<bool>,
    lost_longest: Duration,
    is_incomplete: Vec<bool>,
    incomplete: usize,
    complete_at: Duration,
}

#[derive(Debug, Default, Clone, Copy)]
struct Traffic {
    messages: usize,
    bytes: usize,
}

impl Measures {
    /// Creates counters for agents without sessions.
    pub(super) fn new(options: &ScaleOptions) -> Self {
        Self {
            was_unreachable: vec![false; options.nodes],
            lost_since: vec![Some(Duration::ZERO); options.nodes],
            was_lost: vec![false; options.nodes],
            is_incomplete: vec![true; options.nodes],
            incomplete: options.nodes,
            ..Self::default()
        }
    }

    /// Counts from now on. States last.
    pub(super) fn restart(&mut self, now: Duration) {
        let nodes = self.was_unreachable.len();
        *self = Self {
            since: now,
            last_move_at: now,
            reachable_at: now,
            complete_at: now,
            was_unreachable: vec![false; nodes],
            lost_since: std::mem::take(&mut self.lost_since),
            was_lost: vec![false; nodes],
            unreachable_pairs: self.unreachable_pairs,
            is_incomplete: std::mem::take(&mut self.is_incomplete),
            incomplete: self.incomplete,
            ..Self::default()
        };
    }

    pub(super) fn record_move(&mut self, now: Duration) {
        self.moves += 1;
        self.last_move_at = now;
    }

    /// Counts a message that is sent to a number of servers.
    pub(super) fn record_message(&mut self, bytes: usize, receivers: usize, now: Duration) {
        let second = now.saturating_sub(self.since).as_secs();
        let traffic = self.traffic.entry(second).or_default();
        traffic.messages += receivers;
        traffic.bytes += bytes * receivers;
    }

    /// Records whether callers at a server reach a node. `unreachable` is the state of both.
    pub(super) fn record_reachability(
        &mut self,
        unreachable: &mut Option<Duration>,
        node: usize,
        is_reachable: bool,
        now: Duration,
    ) {
        match *unreachable {
            None if !is_reachable => {
                *unreachable = Some(now);
                self.unreachable_pairs += 1;
            }
            Some(since) if is_reachable => {
                *unreachable = None;
                self.end_unreachable(since, node, now);
            }
            None | Some(_) => {}
        }
    }

    fn end_unreachable(&mut self, since: Duration, node: usize, now: Duration) {
        self.unreachable_pairs -= 1;
        let lasted = now.saturating_sub(since.max(self.since));
        if !lasted.is_zero() {
            self.was_unreachable[node] = true;
            self.unreachable_longest = self.unreachable_longest.max(lasted);
            self.reachable_at = now;
        }
    }

    pub(super) fn record_session(&mut self, agent: usize, has_session: bool, now: Duration) {
        let lost_since = &mut self.lost_since[agent];
        match *lost_since {
            None if !has_session => *lost_since = Some(now),
            Some(since) if has_session => {
                *lost_since = None;
                let lasted = now.saturating_sub(since.max(self.since));
                self.was_lost[agent] |= !lasted.is_zero();
                self.lost_longest = self.lost_longest.max(lasted);
            }
            None | Some(_) => {}
        }
    }

    /// Records whether an agent has all of its sessions.
    pub(super) fn record_completeness(&mut self, agent: usize, is_complete: bool, now: Duration) {
        let was_incomplete = std::mem::replace(&mut self.is_incomplete[agent], !is_complete);
        if was_incomplete && is_complete {
            self.incomplete -= 1;
            self.complete_at = now;
        } else if !was_incomplete && !is_complete {
            self.incomplete += 1;
        }
    }

    /// Returns the report of the servers with these numbers of sessions, at the end of a run.
    pub(super) fn report(&self, sessions: &[usize], entry_bytes: f64) -> ScaleReport {
        let after = |at: Duration| at.saturating_sub(self.since);
        let last_second = self
            .traffic
            .last_key_value()
            .map_or(0, |(second, _)| *second);
        let traffic = || self.traffic.values();
        let mean = |total: usize| total as f64 / (last_second + 1) as f64;
        ScaleReport {
            moves: self.moves,
            dials: self.dials,
            refused: self.refused,
            sessions_min: sessions.iter().copied().min().unwrap_or(0),
            sessions_max: sessions.iter().copied().max().unwrap_or(0),
            announcements_mean: mean(traffic().map(|one| one.messages).sum()),
            announcements_peak: traffic().map(|one| one.messages).max().unwrap_or(0),
            bytes_mean: mean(traffic().map(|one| one.bytes).sum()),
            bytes_peak: traffic().map(|one| one.bytes).max().unwrap_or(0),
            reachable_after: (self.unreachable_pairs == 0).then(|| after(self.reachable_at)),
            unreachable_nodes: self.was_unreachable.iter().filter(|was| **was).count(),
            unreachable_longest: self.unreachable_longest,
            lost_nodes: self.was_lost.iter().filter(|was| **was).count(),
            lost_longest: self.lost_longest,
            complete_after: (self.incomplete == 0).then(|| after(self.complete_at)),
            incomplete_nodes: self.incomplete,
            last_move_after: after(self.last_move_at),
            entry_bytes,
            api_writes: 0,
        }
    }
}

/// Returns the estimated bytes for each entry of a directory: a table of names and holders at a
/// power of two of slots, the text of each name, and an allocation for the holders of a node that
/// has two. The names of a simulation are shared by its servers; those of a server are its own.
pub(super) fn entry_bytes(directory: &Directory) -> f64 {
    let (mut entries, mut names) = (0, 0);
    for (node, _replica) in directory.iter() {
        entries += 1;
        names += node.as_str().len();
    }
    if entries == 0 {
        return 0.0;
    }
    let nodes = directory.nodes();
    let slots = (nodes * 8 / 7).next_power_of_two();
    let slot = size_of::<NodeName>() + HOLDERS_BYTES + 1;
    let holders = (entries - nodes) * (2 * HOLDER_BYTES + ALLOCATION_BYTES);
    let texts = names * nodes / entries + nodes * (COUNTS_BYTES + ALLOCATION_BYTES);
    (slots * slot + holders + texts) as f64 / entries as f64
}

/// Size of a holder in the directory: an instance, a time, a list and an index.
const HOLDER_BYTES: usize = 30;
/// Size of the holders of a node in the table: one holder, or the pointer to several.
const HOLDERS_BYTES: usize = 32;
/// The two reference counts of a shared text.
const COUNTS_BYTES: usize = 16;
/// What an allocator adds to a small allocation, on average.
const ALLOCATION_BYTES: usize = 16;
