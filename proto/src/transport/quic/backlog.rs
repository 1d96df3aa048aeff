//! Limits on the datagrams that wait for connections that are slower than their peers.
//!
//! quinn queues the datagrams of a connection for the connection's task without a limit. A peer can
//! send datagrams that are expensive to process (hundreds of one-byte frames), before or after the
//! handshake. The waiting datagrams would exhaust the memory.
//!
//! The length of such a queue cannot be read. The backlog counts the datagrams that are queued
//! while the task runs, and after that until a run empties the queue, minus those that each run
//! takes. A run with expensive datagrams is long, so the count includes its first run.
//!
//! Connections also report to the endpoint through a queue without a limit. A datagram of
//! RETIRE_CONNECTION_ID frames makes 575 reports, and the endpoint takes 128 of them in a run.
//! While the endpoint has not emptied that queue, each connection runs only once.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Waker};

use parking_lot::{Mutex, MutexGuard};

use super::socket::UDP_BUFFER_BYTES;

/// Maximum cost of a waiting datagram, in bytes: 1472 bytes, which the datagram alone may keep
/// allocated, and quinn's event.
const DATAGRAM_COST: usize = 2048;
/// Datagrams that may wait for a connection: about as many as the system buffers for the socket.
/// One stream's window is smaller.
const WAITING_DATAGRAMS_MAX: usize = UDP_BUFFER_BYTES / DATAGRAM_COST;

/// The time of the last run of a connection's task, counted in changes of [`EndpointEvents`].
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct LastRun {
    at: u64,
    /// Whether [`EndpointEvents`] has the task's waker.
    is_waiting: bool,
}

impl LastRun {
    /// Returns whether the task waits for the endpoint.
    pub(super) fn is_waiting(self) -> bool {
        self.is_waiting
    }
}

/// The queue of reports from connections to their endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointEvents {
    /// Counts how often the endpoint fell behind or caught up. The value is odd while the endpoint
    /// is behind.
    changes: AtomicU64,
    /// Connections that wait until the endpoint has caught up.
    waiting: Mutex<Vec<Waker>>,
}

impl EndpointEvents {
    /// Records that the endpoint has run, and whether the run emptied its queue.
    pub(super) fn endpoint_run_finished(&self, emptied: bool) {
        let was_behind = is_behind(self.changes.load(Ordering::Acquire));
        if was_behind != emptied {
            return;
        }
        let mut waiting = self.lock();
        self.changes.fetch_add(1, Ordering::AcqRel);
        let woken = std::mem::take(&mut *waiting);
        drop(waiting);
        for connection in woken {
            connection.wake();
        }
    }

    /// Returns whether a connection may run. If not, its task is woken when the endpoint has caught
    /// up.
    pub(super) fn try_admit(&self, last: &mut LastRun, cx: &Context<'_>) -> bool {
        let ran = last.at;
        let is_waiting = |changes| is_behind(changes) && changes == ran;
        let mut changes = self.changes.load(Ordering::Acquire);
        if is_waiting(changes) {
            let mut waiting = self.lock();
            changes = self.changes.load(Ordering::Acquire);
            if is_waiting(changes) {
                if !last.is_waiting {
                    waiting.push(cx.waker().clone());
                    last.is_waiting = true;
                }
                return false;
            }
        }
        *last = LastRun {
            at: changes,
            is_waiting: false,
        };
        true
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.waiting.lock()
    }
}

fn is_behind(changes: u64) -> bool {
    changes % 2 == 1
}

/// The connections of an endpoint by their peers' addresses, and which of them are behind.
///
/// Datagrams from an address without a connection (a new peer's handshake, or a peer that has
/// moved) share one limit, which applies only while a connection is behind. They may belong to such
/// a connection whose peer sends from many addresses.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// Number of connections that run or are behind. While it is zero, nothing is counted.
    busy: AtomicUsize,
    peers: Mutex<PeerTable>,
}

/// The known state of one connection's queue.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueState {
    #[default]
    Idle,
    /// The task runs. The queue was empty before.
    Running,
    /// The last run did not empty the queue. The value is the round of unknown peers that waits for
    /// this connection.
    Behind(u64),
}

/// The result of a run of a connection's task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunOutcome {
    Emptied,
    /// The run took this many datagrams and did not empty the queue.
    Processed(usize),
}

#[derive(Debug, Default)]
struct PeerTable {
    known: HashMap<SocketAddr, PeerUsage>,
    unknown: UnknownPeers,
}

#[derive(Debug, Default)]
struct PeerUsage {
    connections: usize,
    busy: usize,
    behind: usize,
    waiting: usize,
}

/// Peers whose address belongs to no connection, in rounds. A round is over when all connections
/// that were behind at its start have caught up. By then, the datagrams queued before the round are
/// processed. Connections that have fallen behind since the start belong to the next round.
#[derive(Debug, Default)]
struct UnknownPeers {
    waiting: usize,
    /// Set when datagrams were dropped in this round. Connections that are behind then receive
    /// nothing until they have caught up, so that the round ends.
    full: bool,
    round: u64,
    behind: usize,
    behind_next: usize,
}

impl Backlog {
    /// Returns whether `datagrams` datagrams from this address may be queued. If not, the caller
    /// drops them, as a full socket does.
    pub(super) fn try_admit(&self, from: SocketAddr, datagrams: usize) -> bool {
        if self.busy.load(Ordering::Relaxed) == 0 {
            return true;
        }
        let PeerTable { known, unknown } = &mut *self.lock();
        match known.get_mut(&from) {
            Some(usage) if usage.busy == 0 => true,
            Some(usage) if usage.behind > 0 && unknown.full => false,
            Some(usage) => admit(&mut usage.waiting, datagrams),
            None if unknown.behind == 0 => true,
            None => {
                let admitted = admit(&mut unknown.waiting, datagrams);
                unknown.full |= !admitted;
                admitted
            }
        }
    }

    /// Records a new peer address of a connection. `from` is `None` before the first address is
    /// known, and `to` is `None` after the connection has ended.
    pub(super) fn migrate(
        &self,
        from: Option<SocketAddr>,
        to: Option<SocketAddr>,
        queue: QueueState,
    ) {
        let mut peers = self.lock();
        let (busy, behind) = (
            usize::from(queue != QueueState::Idle),
            usize::from(matches!(queue, QueueState::Behind(_))),
        );
        let mut waiting = 0;
        if let Some(from) = from
            && let Some(usage) = peers.known.get_mut(&from)
        {
            waiting = usage.waiting;
            usage.connections -= 1;
            usage.busy -= busy;
            usage.behind -= behind;
            if usage.connections == 0 {
                peers.known.remove(&from);
            }
        }
        if let Some(to) = to {
            let usage = peers.known.entry(to).or_default();
            usage.connections += 1;
            usage.busy += busy;
            usage.behind += behind;
            // The waiting datagrams move with the connection, so moving back and forth does not
            // evade the limit.
            usage.waiting += waiting;
        }
    }

    /// Records that the task of this peer's connection begins a run.
    pub(super) fn runs(&self, peer: Option<SocketAddr>, queue: QueueState) -> QueueState {
        if queue != QueueState::Idle {
            return queue;
        }
        self.busy.fetch_add(1, Ordering::Relaxed);
        if let Some(usage) = self.lock().usage(peer) {
            usage.busy += 1;
        }
        QueueState::Running
    }

    /// Records the end of a run and its outcome.
    pub(super) fn ran(
        &self,
        peer: Option<SocketAddr>,
        queue: QueueState,
        run: RunOutcome,
    ) -> QueueState {
        let peers = &mut *self.lock();
        let usage = peers.usage(peer);
        match (queue, run) {
            (QueueState::Idle, _) => QueueState::Idle,
            (QueueState::Running, RunOutcome::Processed(_)) => {
                if let Some(usage) = usage {
                    usage.behind += 1;
                }
                QueueState::Behind(peers.unknown.fall_behind())
            }
            (QueueState::Behind(_), RunOutcome::Processed(datagrams)) => {
                if let Some(usage) = usage {
                    usage.waiting = usage.waiting.saturating_sub(datagrams);
                }
                queue
            }
            (QueueState::Running | QueueState::Behind(_), RunOutcome::Emptied) => {
                let behind = matches!(queue, QueueState::Behind(_));
                if let Some(usage) = usage {
                    usage.busy -= 1;
                    usage.behind -= usize::from(behind);
                    if usage.busy == 0 {
                        usage.waiting = 0;
                    }
                }
                if let QueueState::Behind(round) = queue {
                    peers.unknown.catch_up(round);
                }
                self.busy.fetch_sub(1, Ordering::Relaxed);
                QueueState::Idle
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, PeerTable> {
        self.peers.lock()
    }
}

impl PeerTable {
    fn usage(&mut self, peer: Option<SocketAddr>) -> Option<&mut PeerUsage> {
        peer.and_then(|peer| self.known.get_mut(&peer))
    }
}

impl UnknownPeers {
    fn fall_behind(&mut self) -> u64 {
        if self.behind == 0 {
            self.behind = 1;
            self.round
        } else {
            self.behind_next += 1;
            self.round + 1
        }
    }

    fn catch_up(&mut self, round: u64) {
        if round > self.round {
            self.behind_next -= 1;
            return;
        }
        self.behind -= 1;
        if self.behind == 0 {
            *self = Self {
                round: self.round + 1,
                behind: self.behind_next,
                ..Self::default()
            };
        }
    }
}

fn admit(waiting: &mut usize, datagrams: usize) -> bool {
    let admitted = *waiting + datagrams <= WAITING_DATAGRAMS_MAX;
    if admitted {
        *waiting += datagrams;
    }
    admitted
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;

    use super::*;

    const ALL: usize = 10_000;
    const TAKEN: usize = 128;

    fn address(port: u16) -> SocketAddr {
        ([192, 0, 2, 1], port).into()
    }

    /// Offers more datagrams than may wait, and returns how many are admitted.
    fn admitted(backlog: &Backlog, port: impl Fn(u16) -> u16) -> usize {
        let datagrams = (0..10_000).filter(|&number| backlog.try_admit(address(port(number)), 1));
        datagrams.count()
    }

    /// A connection, as its task reports it.
    struct Connection<'a> {
        backlog: &'a Backlog,
        peer: Option<SocketAddr>,
        queue: QueueState,
    }

    impl<'a> Connection<'a> {
        fn of(backlog: &'a Backlog, port: u16) -> Self {
            let peer = Some(address(port));
            backlog.migrate(None, peer, QueueState::Idle);
            Self {
                backlog,
                peer,
                queue: QueueState::Idle,
            }
        }

        fn begins(&mut self) {
            self.queue = self.backlog.runs(self.peer, self.queue);
        }

        fn runs(&mut self, emptied: bool) {
            self.begins();
            let run = if emptied {
                RunOutcome::Emptied
            } else {
                RunOutcome::Processed(TAKEN)
            };
            self.queue = self.backlog.ran(self.peer, self.queue, run);
        }

        fn moves(&mut self, port: u16) {
            let to = Some(address(port));
            self.backlog.migrate(self.peer, to, self.queue);
            self.peer = to;
        }
    }

    #[test]
    fn each_connection_runs_once_while_the_endpoint_is_behind() {
        let (endpoint_events, flag) = (EndpointEvents::default(), Arc::new(Flag::default()));
        let waker = Waker::from(flag.clone());
        let cx = Context::from_waker(&waker);
        let (mut one, mut other) = (LastRun::default(), LastRun::default());
        let admits = |last_run: &mut LastRun| endpoint_events.try_admit(last_run, &cx);
        assert!(admits(&mut one) && admits(&mut one));
        endpoint_events.endpoint_run_finished(false);
        endpoint_events.endpoint_run_finished(false);
        assert!(admits(&mut one), "once");
        assert!(!admits(&mut one), "twice");
        assert!(!admits(&mut one), "woken by a datagram");
        assert_eq!(endpoint_events.lock().len(), 1, "queued once");
        assert!(admits(&mut other), "another connection");
        assert!(!flag.0.load(Ordering::Relaxed));
        endpoint_events.endpoint_run_finished(true);
        assert!(flag.0.load(Ordering::Relaxed), "woken");
        assert!(admits(&mut one) && admits(&mut one));
        endpoint_events.endpoint_run_finished(false);
        assert!(admits(&mut one), "once more, behind again");
    }

    #[derive(Default)]
    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_peers_of_connections_that_are_behind_are_limited() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        let _other = Connection::of(&backlog, 2);
        assert_eq!(admitted(&backlog, |_| 1), ALL);
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), WAITING_DATAGRAMS_MAX);
        assert_eq!(admitted(&backlog, |_| 1), 0);
        assert_eq!(admitted(&backlog, |_| 2), ALL, "another's");
        one.runs(true);
        assert_eq!(admitted(&backlog, |_| 1), ALL, "caught up");
    }

    /// Datagrams that are expensive to process make a run long. More than the limit could arrive
    /// during the first run.
    #[test]
    fn what_comes_during_the_first_run_counts() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        one.begins();
        assert_eq!(admitted(&backlog, |_| 1), WAITING_DATAGRAMS_MAX);
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), 0);
    }

    /// Bulk data that is processed as fast as it arrives is never dropped, even if the task never
    /// quite empties its queue.
    #[test]
    fn what_a_run_has_taken_waits_no_more() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        for _ in 0..100 {
            one.runs(false);
            assert!((0..TAKEN).all(|_| backlog.try_admit(address(1), 1)));
        }
        assert!(admitted(&backlog, |_| 1) < WAITING_DATAGRAMS_MAX);
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), TAKEN);
    }

    /// One receive call of the system returns up to 64 datagrams.
    #[test]
    fn each_datagram_of_a_batch_counts() {
        let backlog = Backlog::default();
        Connection::of(&backlog, 1).runs(false);
        let batches = (0..1000).filter(|_| backlog.try_admit(address(1), 64));
        assert_eq!(batches.count(), WAITING_DATAGRAMS_MAX / 64);
    }

    #[test]
    fn sending_from_many_addresses_is_no_way_around() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        assert_eq!(admitted(&backlog, |number| 100 + number), ALL);
        one.runs(false);
        let crowd = admitted(&backlog, |number| 100 + number);
        assert_eq!(crowd, WAITING_DATAGRAMS_MAX);
        assert_eq!(admitted(&backlog, |number| 200 + number), 0);
    }

    /// Connections that catch up do not affect the one that is behind. Connections that fall behind
    /// later do not block new peers.
    #[test]
    fn unknown_peers_wait_for_the_connections_that_were_behind_before_them() {
        let backlog = Backlog::default();
        let unknown = || admitted(&backlog, |number| 100 + number);
        let mut one = Connection::of(&backlog, 1);
        let mut other = Connection::of(&backlog, 2);
        one.runs(false);
        assert_eq!(unknown(), WAITING_DATAGRAMS_MAX);
        other.runs(false);
        other.runs(true);
        assert_eq!(unknown(), 0, "another has caught up");
        assert_eq!(admitted(&backlog, |_| 1), 0, "it is to catch up first");
        other.runs(false);
        one.runs(true);
        assert_eq!(unknown(), WAITING_DATAGRAMS_MAX, "it has");
        other.runs(true);
        assert_eq!(unknown(), ALL, "none is behind");
    }

    /// Before a connection has sent anything, its peer is unknown.
    #[test]
    fn a_connection_that_has_not_sent_yet_is_limited_too() {
        let backlog = Backlog::default();
        let mut one = Connection {
            backlog: &backlog,
            peer: None,
            queue: QueueState::Idle,
        };
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), WAITING_DATAGRAMS_MAX);
        one.moves(1);
        one.runs(true);
        assert_eq!(admitted(&backlog, |_| 1), ALL);
        one.moves(2);
        backlog.migrate(one.peer, None, one.queue);
        assert!(backlog.lock().known.is_empty(), "nothing stays of it");
        assert_eq!(backlog.busy.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn moving_to_and_fro_is_no_way_around() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), WAITING_DATAGRAMS_MAX);
        one.moves(2);
        assert_eq!(admitted(&backlog, |_| 2), 0);
        one.moves(1);
        assert_eq!(admitted(&backlog, |_| 1), 0);
    }

    /// Two connections of one address share its limit.
    #[test]
    fn a_second_connection_of_the_address_is_no_way_around() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        let mut other = Connection::of(&backlog, 1);
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), WAITING_DATAGRAMS_MAX);
        other.runs(true);
        assert_eq!(admitted(&backlog, |_| 1), 0, "the other has caught up");
        backlog.migrate(other.peer, None, other.queue);
        assert_eq!(admitted(&backlog, |_| 1), 0, "the one that is behind stays");
    }
}
