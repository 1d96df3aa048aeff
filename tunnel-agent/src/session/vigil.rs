//! What is thought of the server, when to look again, and when a retired session has nothing left to do; pure.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::transport::liveness::{Liveness, LivenessLimits, State};
use tunnel_proto::transport::{Health, TransportKind};

/// Watches one ready session.
#[derive(Debug)]
pub(super) struct Vigil {
    liveness: Liveness,
    state: State,
    /// Whether requests were open at the last look.
    busy: bool,
    next: Instant,
    retired: Retired,
}

/// Whether another session has taken over.
#[derive(Debug, Clone, Copy)]
enum Retired {
    No,
    /// Streams are open, or the path is not known to carry anything.
    Busy,
    /// It leaves then, unless a late stream comes.
    Idle(Instant),
}

/// What a look gave.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    /// What became of the session.
    pub(super) turn: Turn,
    /// Whether to send a probe.
    pub(super) probe: bool,
    /// Whether this end, without the server's word, has stopped hearing from it.
    pub(super) own_doubt: bool,
    /// For how long nothing was heard.
    pub(super) silence: Duration,
}

/// What became of the session since the last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Nothing.
    Same,
    /// The server is suspect.
    Suspect,
    /// The server is live again.
    Live,
    /// It was silent for too long: to be closed.
    Dead,
    /// It has retired and its last stream has ended: to be closed.
    Done,
}

impl Vigil {
    /// Of a session that is live and was read at `now`.
    pub(super) fn new(
        limits: LivenessLimits,
        transport: TransportKind,
        health: Health,
        now: Instant,
    ) -> Self {
        Self {
            liveness: Liveness::new(limits, transport, health.into(), now),
            state: State::Live,
            busy: false,
            next: now,
            retired: Retired::No,
        }
    }

    /// When to look.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// A stream was accepted: when it is the first, its time of waiting begins.
    pub(super) fn stream(&mut self, now: Instant) {
        if !self.busy {
            self.next = now;
        }
    }

    /// What the server says of this end.
    pub(super) fn peer_doubts(&mut self, doubts: bool, now: Instant) {
        self.liveness.peer_doubts(doubts);
        self.next = now;
    }

    /// Another session takes the new streams.
    pub(super) fn retire(&mut self, now: Instant) {
        self.retired = Retired::Busy;
        self.next = now;
    }

    /// Whether [`Vigil::retire`] was called.
    pub(super) fn is_retired(&self) -> bool {
        !matches!(self.retired, Retired::No)
    }

    /// Takes a reading.
    pub(super) fn look(&mut self, health: Health, now: Instant) -> Seen {
        let verdict = self.liveness.look(health.into(), now);
        self.busy = health.streams > 0;
        self.next = now + verdict.look_again;
        let before = std::mem::replace(&mut self.state, verdict.state);
        let turn = match (before, verdict.state) {
            (_, State::Dead) => Turn::Dead,
            (State::Live | State::Dead, State::Suspect) => Turn::Suspect,
            (State::Suspect | State::Dead, State::Live) => Turn::Live,
            (State::Suspect, State::Suspect) => Turn::Same,
            (State::Live, State::Live) if self.may_leave(health, now) => Turn::Done,
            (State::Live, State::Live) => Turn::Same,
        };
        if turn == Turn::Suspect {
            // What the server opened meanwhile may still come through.
            self.stay();
        }
        Seen {
            turn,
            probe: verdict.probe,
            own_doubt: verdict.own_doubt,
            silence: verdict.silence,
        }
    }

    /// Of a live session.
    fn may_leave(&mut self, health: Health, now: Instant) -> bool {
        match self.retired {
            Retired::No => return false,
            Retired::Busy | Retired::Idle(_) if self.busy => self.stay(),
            Retired::Busy => self.retired = Retired::Idle(now + health.rtt + LINGER),
            Retired::Idle(until) if until <= now => return true,
            Retired::Idle(_) => {}
        }
        if let Retired::Idle(until) = self.retired {
            self.next = self.next.min(until);
        }
        false
    }

    fn stay(&mut self) {
        if self.is_retired() {
            self.retired = Retired::Busy;
        }
    }
}

/// Beyond one round trip: how long a retired session without streams waits for those that the server opened before it
/// read Withdraw. Nobody waits for its end, so a server that is short of time is given some.
const LINGER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    struct Watch {
        vigil: Vigil,
        health: Health,
        start: Instant,
        now: Instant,
    }

    impl Watch {
        fn new() -> Self {
            let now = Instant::now();
            let health = Health {
                heard: 0,
                acknowledged: 0,
                rtt: Duration::from_millis(100),
                remote: SocketAddr::from(([192, 0, 2, 1], 1)),
                streams: 0,
                bytes_in: 0,
                bytes_out: 0,
            };
            let limits = LivenessLimits::default();
            Self {
                vigil: Vigil::new(limits, TransportKind::Quic, health, now),
                health,
                start: now,
                now,
            }
        }

        /// Looks as told until something happens, for at most a minute, and says when that was.
        fn run(&mut self, hears: bool) -> (Turn, Duration) {
            let end = self.now + Duration::from_secs(70);
            while self.now < end {
                self.now = self.now.max(self.vigil.next());
                self.health.heard += u64::from(hears);
                let seen = self.vigil.look(self.health, self.now);
                if seen.probe && hears {
                    self.health.acknowledged += 1;
                }
                if seen.turn != Turn::Same {
                    return (seen.turn, self.now - self.start);
                }
            }
            (Turn::Same, self.now - self.start)
        }
    }

    #[test]
    fn turns_are_told_once() {
        let mut watch = Watch::new();
        let (turn, at) = watch.run(false);
        assert_eq!((turn, at.as_secs_f64().round()), (Turn::Suspect, 15.0));
        assert_eq!(watch.run(true).0, Turn::Live);
        assert_eq!(watch.run(true).0, Turn::Same);
        assert_eq!(watch.run(false).0, Turn::Suspect);
        assert_eq!(watch.run(false).0, Turn::Dead);
    }

    #[test]
    fn first_stream_is_looked_at_at_once_and_others_are_not() {
        let mut watch = Watch::new();
        watch.vigil.look(watch.health, watch.now);
        let soon = watch.now + Duration::from_millis(10);
        watch.vigil.stream(soon);
        assert_eq!(watch.vigil.next(), soon);
        watch.health.streams = 1;
        watch.vigil.look(watch.health, soon);
        let next = watch.vigil.next();
        watch.vigil.stream(soon);
        assert_eq!(watch.vigil.next(), next);
    }

    #[test]
    fn retired_session_leaves_when_it_was_without_streams_for_a_while() {
        let mut watch = Watch::new();
        watch.health.streams = 1;
        watch.vigil.retire(watch.now);
        assert_eq!(watch.run(true).0, Turn::Same);
        watch.health.streams = 0;
        let ended = watch.now - watch.start;
        let (turn, at) = watch.run(true);
        assert_eq!(turn, Turn::Done);
        let linger = at - ended;
        assert!((1100..=1400).contains(&linger.as_millis()), "{linger:?}");
    }

    #[test]
    fn late_stream_keeps_a_retired_session() {
        let mut watch = Watch::new();
        watch.vigil.retire(watch.now);
        watch.vigil.look(watch.health, watch.now);
        watch.now += Duration::from_millis(900);
        watch.vigil.stream(watch.now);
        watch.health.streams = 1;
        assert_eq!(watch.run(true).0, Turn::Same);
        watch.health.streams = 0;
        assert_eq!(watch.run(true).0, Turn::Done);
    }

    #[test]
    fn retired_session_that_was_in_doubt_waits_anew() {
        let mut watch = Watch::new();
        watch.vigil.retire(watch.now);
        watch.vigil.look(watch.health, watch.now);
        for (doubts, turn) in [(true, Turn::Suspect), (false, Turn::Live)] {
            watch.now += Duration::from_secs(1);
            watch.vigil.peer_doubts(doubts, watch.now);
            assert_eq!(watch.run(true).0, turn);
        }
        let live = watch.now - watch.start;
        let (turn, at) = watch.run(true);
        assert_eq!(turn, Turn::Done);
        assert!(at - live >= LINGER + watch.health.rtt, "{:?}", at - live);
    }

    #[test]
    fn retired_session_that_is_suspect_stays_until_it_is_live_or_dead() {
        let mut watch = Watch::new();
        assert_eq!(watch.run(false).0, Turn::Suspect);
        watch.vigil.retire(watch.now);
        let (turn, at) = watch.run(false);
        assert_eq!((turn, at.as_secs_f64().round()), (Turn::Dead, 60.0));

        let mut watch = Watch::new();
        assert_eq!(watch.run(false).0, Turn::Suspect);
        watch.vigil.retire(watch.now);
        assert_eq!(watch.run(true).0, Turn::Live);
        assert_eq!(watch.run(true).0, Turn::Done);
    }
}
