//! How many datagrams may wait for connections that are slower than their peers.
//!
//! quinn queues the datagrams of a connection for its task without a bound. A peer can make them dear to process (frames of one
//! byte by the hundred), handshake done or not, and would fill the memory with those that wait.
//!
//! The length of such a queue cannot be read. Counted is what is queued while the task runs, and from then on until a run
//! empties the queue, less what each run takes. A run is long for such datagrams, so that its first one counts already.
//!
//! Connections report to the endpoint through a queue without a bound, too: a datagram of RETIRE_CONNECTION_ID frames makes
//! 575 reports, and the endpoint takes 128 of them in a run. While it has not emptied that queue, each connection runs once.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};

/// What a datagram costs, at most: 1472 bytes, which it may be alone to pin, and quinn's event.
const DATAGRAM_COST: usize = 2048;
/// Datagrams that may wait for a connection: about what the system keeps for the socket. One stream's window is less.
const WAITING_DATAGRAMS_MAX: usize = super::UDP_BUFFER_BYTES / DATAGRAM_COST;

/// When a connection's task last ran, in changes of [`EndpointEvents`].
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct LastRun {
    at: u64,
    /// Its waker is with [`EndpointEvents`].
    is_waiting: bool,
}

/// The queue of reports from connections to their endpoint.
#[derive(Debug, Default)]
pub(super) struct EndpointEvents {
    /// Counts the times that the endpoint fell behind or caught up: odd while it is behind.
    changes: AtomicU64,
    /// Connections that wait until the endpoint has caught up.
    waiting: Mutex<Vec<Waker>>,
}

impl EndpointEvents {
    /// The endpoint has run, and has emptied its queue or not.
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

    /// Whether a connection may run. If not, its task is woken when the endpoint has caught up.
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
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_behind(changes: u64) -> bool {
    changes % 2 == 1
}

/// The connections of an endpoint by their peers' addresses, and which of them are behind.
///
/// What comes from an address of no connection (a new peer's handshake, a peer that has moved) is limited as a whole, and only
/// while a connection is behind: it may be one's that sends from many addresses.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// How many run or are behind. Nothing is counted while none does.
    busy: AtomicUsize,
    peers: Mutex<PeerTable>,
}

/// The queue of one connection, as far as it is known.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueState {
    #[default]
    Idle,
    /// The task runs, and had emptied the queue before.
    Running,
    /// The last run has not emptied it. With the round from which on unknown peers wait for it.
    Behind(u64),
}

/// What a run of a connection's task has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunOutcome {
    Emptied,
    /// The queue is not empty yet.
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

/// Peers whose address belongs to no connection, in rounds: one is over when all connections have caught up that were behind as it began. What was queued
/// before it is gone then; others that have come to be behind since are the next round's.
#[derive(Debug, Default)]
struct UnknownPeers {
    waiting: usize,
    /// Some were dropped in this round. Connections that are behind get nothing until they have caught up, so that it ends.
    full: bool,
    round: u64,
    behind: usize,
    behind_next: usize,
}

impl Backlog {
    /// Whether so many datagrams from there may be queued; else they are to be dropped, as a full socket does.
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

    /// A connection's peer is now at `to`; `None` before it is known, and after the connection has ended.
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
            // What waits goes with it: moving to and fro is no way around.
            usage.waiting += waiting;
        }
    }

    /// The task of the connection of this peer begins to run.
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

    /// It has run, and has emptied its queue, or has taken so many datagrams.
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
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// How many datagrams are admitted, of more than may wait.
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
        assert!(
            endpoint_events.try_admit(&mut one, &cx) && endpoint_events.try_admit(&mut one, &cx)
        );
        endpoint_events.endpoint_run_finished(false);
        endpoint_events.endpoint_run_finished(false);
        assert!(endpoint_events.try_admit(&mut one, &cx), "once");
        assert!(!endpoint_events.try_admit(&mut one, &cx), "twice");
        assert!(
            !endpoint_events.try_admit(&mut one, &cx),
            "woken by a datagram"
        );
        assert_eq!(endpoint_events.lock().len(), 1, "queued once");
        assert!(
            endpoint_events.try_admit(&mut other, &cx),
            "another connection"
        );
        assert!(!flag.0.load(Ordering::Relaxed));
        endpoint_events.endpoint_run_finished(true);
        assert!(flag.0.load(Ordering::Relaxed), "woken");
        assert!(
            endpoint_events.try_admit(&mut one, &cx) && endpoint_events.try_admit(&mut one, &cx)
        );
        endpoint_events.endpoint_run_finished(false);
        assert!(
            endpoint_events.try_admit(&mut one, &cx),
            "once more, behind again"
        );
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

    /// Datagrams that are dear to process make a run long: more would come during the first one than may wait.
    #[test]
    fn what_comes_during_the_first_run_counts() {
        let backlog = Backlog::default();
        let mut one = Connection::of(&backlog, 1);
        one.begins();
        assert_eq!(admitted(&backlog, |_| 1), WAITING_DATAGRAMS_MAX);
        one.runs(false);
        assert_eq!(admitted(&backlog, |_| 1), 0);
    }

    /// Bulk that is taken as fast as it comes is never dropped, however long the task does not quite empty its queue.
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

    /// One receive of the system's has as many as 64.
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
        assert_eq!(
            admitted(&backlog, |number| 100 + number),
            WAITING_DATAGRAMS_MAX
        );
        assert_eq!(admitted(&backlog, |number| 200 + number), 0);
    }

    /// Others that catch up say nothing of the one that is behind, and those that fall behind later do not keep new peers away.
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

    /// Before it has sent anything, a connection's peer is an unknown one.
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

    /// Two connections of one address share what may wait there.
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
