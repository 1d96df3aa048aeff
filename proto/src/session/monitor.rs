//! Liveness of the peer, time of the next check, log lines that are due, and the end of a retired
//! session. Pure.

use std::time::Duration;

use tokio::time::Instant;

use super::liveness::{Liveness, LivenessCheck, LivenessLimits, LivenessState, SuspectLogThrottle};
use super::receive_reports::ReceiveReports;
use crate::transport::{SessionStats, TransportKind};

/// The monitor of a ready session: decides when the peer is suspect or dead, and when a retired
/// session may close. The caller acts on the result of each check.
#[derive(Debug)]
pub struct SessionMonitor {
    liveness: Liveness,
    state: LivenessState,
    /// Whether requests were open at the last check.
    busy: bool,
    next: Instant,
    retired: Retired,
    log: SuspectLogThrottle,
    /// QUIC acknowledges data, and needs no reports.
    receive_reports: Option<ReceiveReports>,
}

/// Whether another session has taken over.
#[derive(Debug, Clone, Copy)]
enum Retired {
    No,
    /// Streams are open, or the path may be dead.
    Busy,
    /// The session closes at this time, unless a late stream arrives.
    Idle(Instant),
}

/// The result of a check.
#[derive(Debug, Clone, Copy)]
pub struct Observation {
    /// Transition of the session.
    pub transition: Transition,
    /// State and silence of the peer. If `probe` is set, the caller must send a probe.
    pub check: LivenessCheck,
    /// Whether the caller should log the state. The state may be unchanged, because changes of a
    /// session that flaps are logged every 30 s.
    pub is_log_due: bool,
    /// Whether the caller must report to the peer that its data arrives.
    pub is_receive_report_due: bool,
}

/// The transition of the session since the last check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// The state of the peer has not changed.
    Unchanged,
    /// The peer is suspect.
    Suspect,
    /// The peer is live again.
    Live,
    /// The peer was silent for too long. The session must be closed.
    Dead,
    /// The session has retired and its last stream has ended. The session must be closed.
    Finished,
}

impl SessionMonitor {
    /// Creates the monitor of a session that was live at `now`.
    pub fn new(
        limits: LivenessLimits,
        transport: TransportKind,
        stats: SessionStats,
        now: Instant,
    ) -> Self {
        Self {
            liveness: Liveness::new(limits, transport, stats, now),
            state: LivenessState::Live,
            busy: false,
            next: now,
            retired: Retired::No,
            log: SuspectLogThrottle::default(),
            receive_reports: (transport == TransportKind::H2)
                .then(|| ReceiveReports::new(&limits, &stats, now)),
        }
    }

    /// Returns the time of the next check.
    pub fn next_check(&self) -> Instant {
        self.next
    }

    /// Records a stream that either end has opened. The first one starts the busy timer.
    pub fn stream(&mut self, now: Instant) {
        if !self.busy {
            self.next = now;
        }
    }

    /// Records whether the peer suspects this end.
    pub fn peer_suspects(&mut self, is_suspect: bool, now: Instant) {
        self.liveness.peer_suspects(is_suspect);
        self.next = now;
    }

    /// Records a report of the peer that data of this end arrives.
    pub fn peer_receives(&mut self) {
        self.liveness.peer_receives();
    }

    /// Records that another session takes the new streams.
    pub fn retire(&mut self, now: Instant) {
        self.retired = Retired::Busy;
        self.next = now;
    }

    /// Returns whether [`SessionMonitor::retire`] was called.
    pub fn is_retired(&self) -> bool {
        !matches!(self.retired, Retired::No)
    }

    /// Checks the session, whose `stats` were taken at `now`.
    pub fn check(&mut self, stats: SessionStats, now: Instant) -> Observation {
        let check = self.liveness.check(stats, now);
        self.busy = stats.streams > 0;
        self.next = now + check.next_check;
        let before = std::mem::replace(&mut self.state, check.state);
        let transition = match (before, check.state) {
            (_, LivenessState::Dead) => Transition::Dead,
            (LivenessState::Live | LivenessState::Dead, LivenessState::Suspect) => {
                Transition::Suspect
            }
            (LivenessState::Suspect | LivenessState::Dead, LivenessState::Live) => Transition::Live,
            (LivenessState::Suspect, LivenessState::Suspect) => Transition::Unchanged,
            (LivenessState::Live, LivenessState::Live) if self.can_close(stats, now) => {
                Transition::Finished
            }
            (LivenessState::Live, LivenessState::Live) => Transition::Unchanged,
        };
        if transition == Transition::Suspect {
            // Streams that the peer opened in the meantime may still arrive.
            self.reset_idle();
        }
        let is_suspect = check.state != LivenessState::Live;
        let is_log_due = self.log.is_due(is_suspect, now);
        if let Some(due_at) = self.log.due_at(is_suspect) {
            self.next = self.next.min(due_at);
        }
        let receive_reports = self.receive_reports.as_mut();
        let is_receive_report_due =
            receive_reports.is_some_and(|reports| reports.is_due(&stats, now));
        Observation {
            transition,
            check,
            is_log_due,
            is_receive_report_due,
        }
    }

    /// Returns whether a live session has retired and may close.
    fn can_close(&mut self, stats: SessionStats, now: Instant) -> bool {
        match self.retired {
            Retired::No => return false,
            Retired::Busy | Retired::Idle(_) if self.busy => self.reset_idle(),
            Retired::Busy => self.retired = Retired::Idle(now + stats.rtt + LINGER),
            Retired::Idle(until) if until <= now => return true,
            Retired::Idle(_) => {}
        }
        if let Retired::Idle(until) = self.retired {
            self.next = self.next.min(until);
        }
        false
    }

    fn reset_idle(&mut self) {
        if self.is_retired() {
            self.retired = Retired::Busy;
        }
    }
}

/// Time in addition to one round trip that a retired session without streams waits for streams that
/// the peer opened before it read Withdraw. No task waits for this end, so a slow peer gets some
/// extra time.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::liveness::tests::stats;

    struct Fixture {
        monitor: SessionMonitor,
        stats: SessionStats,
        start: Instant,
        now: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            let (stats, now) = (stats(), Instant::now());
            let limits = LivenessLimits::default();
            Self {
                monitor: SessionMonitor::new(limits, TransportKind::Quic, stats, now),
                stats,
                start: now,
                now,
            }
        }

        /// Checks at the requested times until a transition, for at most a minute, and returns the
        /// transition and its time.
        fn run(&mut self, hears: bool) -> (Transition, Duration) {
            let end = self.now + Duration::from_secs(70);
            while self.now < end {
                self.now = self.now.max(self.monitor.next_check());
                if hears {
                    self.stats.received_at = self.now;
                }
                let observation = self.monitor.check(self.stats, self.now);
                if observation.check.probe && hears {
                    self.stats.acknowledged += 1;
                }
                if observation.transition != Transition::Unchanged {
                    return (observation.transition, self.now - self.start);
                }
            }
            (Transition::Unchanged, self.now - self.start)
        }
    }

    #[test]
    fn transitions_are_reported_once() {
        let mut fixture = Fixture::new();
        let (transition, at) = fixture.run(false);
        assert_eq!(transition, Transition::Suspect);
        assert_eq!(at.as_secs_f64().round(), 15.0);
        assert_eq!(fixture.run(true).0, Transition::Live);
        assert_eq!(fixture.run(true).0, Transition::Unchanged);
        assert_eq!(fixture.run(false).0, Transition::Suspect);
        assert_eq!(fixture.run(false).0, Transition::Dead);
    }

    #[test]
    fn first_stream_is_sampled_at_once_and_others_are_not() {
        let mut fixture = Fixture::new();
        fixture.monitor.check(fixture.stats, fixture.now);
        let soon = fixture.now + Duration::from_millis(10);
        fixture.monitor.stream(soon);
        assert_eq!(fixture.monitor.next_check(), soon);
        fixture.stats.streams = 1;
        fixture.monitor.check(fixture.stats, soon);
        let next = fixture.monitor.next_check();
        fixture.monitor.stream(soon);
        assert_eq!(fixture.monitor.next_check(), next);
    }

    #[test]
    fn retired_session_closes_after_a_while_without_streams() {
        let mut fixture = Fixture::new();
        fixture.stats.streams = 1;
        fixture.monitor.retire(fixture.now);
        assert_eq!(fixture.run(true).0, Transition::Unchanged);
        fixture.stats.streams = 0;
        let ended = fixture.now - fixture.start;
        let (transition, at) = fixture.run(true);
        assert_eq!(transition, Transition::Finished);
        let linger = at - ended;
        assert!((1100..=1400).contains(&linger.as_millis()), "{linger:?}");
    }

    #[test]
    fn late_stream_keeps_a_retired_session() {
        let mut fixture = Fixture::new();
        fixture.monitor.retire(fixture.now);
        fixture.monitor.check(fixture.stats, fixture.now);
        fixture.now += Duration::from_millis(900);
        fixture.monitor.stream(fixture.now);
        fixture.stats.streams = 1;
        assert_eq!(fixture.run(true).0, Transition::Unchanged);
        fixture.stats.streams = 0;
        assert_eq!(fixture.run(true).0, Transition::Finished);
    }

    #[test]
    fn retired_session_that_was_in_doubt_waits_again() {
        let mut fixture = Fixture::new();
        fixture.monitor.retire(fixture.now);
        fixture.monitor.check(fixture.stats, fixture.now);
        for (doubts, transition) in [(true, Transition::Suspect), (false, Transition::Live)] {
            fixture.now += Duration::from_secs(1);
            fixture.monitor.peer_suspects(doubts, fixture.now);
            assert_eq!(fixture.run(true).0, transition);
        }
        let live = fixture.now - fixture.start;
        let (transition, at) = fixture.run(true);
        assert_eq!(transition, Transition::Finished);
        assert!(at - live >= LINGER + fixture.stats.rtt, "{:?}", at - live);
    }

    #[test]
    fn retired_session_that_is_suspect_stays_until_it_is_live_or_dead() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.run(false).0, Transition::Suspect);
        fixture.monitor.retire(fixture.now);
        let (transition, at) = fixture.run(false);
        assert_eq!(transition, Transition::Dead);
        assert_eq!(at.as_secs_f64().round(), 60.0);

        let mut fixture = Fixture::new();
        assert_eq!(fixture.run(false).0, Transition::Suspect);
        fixture.monitor.retire(fixture.now);
        assert_eq!(fixture.run(true).0, Transition::Live);
        assert_eq!(fixture.run(true).0, Transition::Finished);
    }
}
