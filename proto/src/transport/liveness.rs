//! Whether the peer of a session is still there: two clocks, three states; pure.
//!
//! ```text
//! live --silent for suspectAfter, or the peer says so--> suspect --silent for deadAfter--> dead
//!   ^------------- heard and acknowledged again ------------+
//! ```
//! Clock (a) runs while nothing authenticated is received, clock (b) since the oldest probe that nothing acknowledged; the
//! worse decides. A one-way partition shows on one clock only, at one end only, hence the word on the control stream.

use std::time::Duration;

use tokio::time::Instant;

use super::TransportKind;

/// How long each step takes; the contract's figures by [`LivenessLimits::default`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LivenessLimits {
    /// An idle session is asked for a sign of life this often, by the end that `probes_idle`.
    pub keep_alive: Duration,
    /// Suspect after this long without a sign of life while requests wait.
    pub suspect_busy: Duration,
    /// Suspect after this long without a sign of life otherwise.
    pub suspect_idle: Duration,
    /// Dead after this long.
    pub dead_after: Duration,
    /// Whether this end probes when nothing waits (the server does; the agent's keep-alive does it for the agent).
    pub probes_idle: bool,
}

impl Default for LivenessLimits {
    fn default() -> Self {
        Self {
            keep_alive: Duration::from_secs(5),
            suspect_busy: Duration::from_secs(5),
            suspect_idle: Duration::from_secs(15),
            dead_after: Duration::from_secs(60),
            probes_idle: false,
        }
    }
}

/// A reading of the session at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// As [`Health::heard`](super::Health::heard).
    pub heard: u64,
    /// As [`Health::acknowledged`](super::Health::acknowledged).
    pub acknowledged: u64,
    /// Whether requests wait: at least one stream is open.
    pub waiting: bool,
}

impl From<super::Health> for Reading {
    fn from(health: super::Health) -> Self {
        Self {
            heard: health.heard,
            acknowledged: health.acknowledged,
            waiting: health.streams > 0,
        }
    }
}

/// What is thought of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It answers.
    Live,
    /// It has been silent: no new streams, the open ones stay.
    Suspect,
    /// It has been silent for too long: the session is to be closed.
    Dead,
}

/// What follows from a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The state now.
    pub state: State,
    /// Whether this end's own clocks, without the peer's word, make it suspect: what the peer should be told.
    pub own_doubt: bool,
    /// Whether a probe is to be sent now.
    pub probe: bool,
    /// The longer of the two silences.
    pub silence: Duration,
    /// When to look again, at the latest; a stream that opens calls for a look at once.
    pub look_again: Duration,
}

/// The two clocks of one session.
#[derive(Debug, Clone)]
pub struct Liveness {
    limits: LivenessLimits,
    answer_busy: Duration,
    heard: (u64, Instant),
    acknowledged: u64,
    /// The oldest probe that nothing has acknowledged.
    asked: Option<Instant>,
    last_probe: Instant,
    waiting_since: Option<Instant>,
    looked: Instant,
    peer_doubts: bool,
    /// The last verdict's `own_doubt`.
    doubts: bool,
}

impl Liveness {
    /// A session of which `reading` was just taken.
    #[must_use]
    pub fn new(
        limits: LivenessLimits,
        transport: TransportKind,
        reading: Reading,
        now: Instant,
    ) -> Self {
        let answer_busy = match transport {
            // A PING queues behind bulk.
            TransportKind::H2 => limits.suspect_idle,
            TransportKind::Quic | TransportKind::Memory => limits.suspect_busy,
        };
        Self {
            limits,
            answer_busy,
            heard: (reading.heard, now),
            acknowledged: reading.acknowledged,
            asked: None,
            last_probe: now,
            waiting_since: None,
            looked: now,
            peer_doubts: false,
            doubts: false,
        }
    }

    /// Whether a silence is too long also for a session on which nothing waits.
    #[must_use]
    pub fn is_suspect_idle(&self, silence: Duration) -> bool {
        reached(silence, self.limits.suspect_idle)
    }

    /// What the peer last said of this end.
    pub fn peer_doubts(&mut self, doubts: bool) {
        self.peer_doubts = doubts;
    }

    /// Takes a reading. When it says `probe`, the caller sends one.
    pub fn look(&mut self, reading: Reading, now: Instant) -> Verdict {
        let before = self.forgive_a_pause(now);
        if reading.heard != self.heard.0 {
            // Some time since the last look: the earliest counts, so that no bound is passed.
            self.heard = (reading.heard, before);
        }
        if reading.acknowledged != self.acknowledged {
            self.acknowledged = reading.acknowledged;
            self.asked = None;
        }
        self.waiting_since = match (reading.waiting, self.waiting_since) {
            (false, _) => None,
            (true, None) => Some(now),
            (true, since) => since,
        };
        let unheard = now.saturating_duration_since(self.heard.1);
        let unanswered = self
            .asked
            .map_or(Duration::ZERO, |asked| now.saturating_duration_since(asked));
        let silence = unheard.max(unanswered);
        let limits = &self.limits;
        let too_long = reached(silence, limits.suspect_idle)
            || self.waiting_since.is_some_and(|since| {
                let waited = now.saturating_duration_since(since);
                reached(unheard.min(waited), limits.suspect_busy)
                    || reached(unanswered.min(waited), self.answer_busy)
            });
        // Only a sign of life ends a doubt: requests that give up are none.
        let own_doubt = too_long || (self.doubts && reached(silence, limits.suspect_busy));
        self.doubts = own_doubt;
        let state = if reached(silence, limits.dead_after) {
            State::Dead
        } else if own_doubt || self.peer_doubts {
            State::Suspect
        } else {
            State::Live
        };
        let probe = self.probe_is_due(reading.waiting, silence, now);
        if probe {
            self.last_probe = now;
            self.asked.get_or_insert(now);
        }
        Verdict {
            state,
            own_doubt,
            probe,
            silence,
            look_again: self
                .look_again(reading.waiting || state != State::Live)
                .min(self.next_bound(silence))
                .min(self.next_probe(now))
                .max(LOOKS_APART),
        }
    }

    fn probe_is_due(&self, waiting: bool, silence: Duration, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.last_probe);
        let doubt = self.probe_every();
        (waiting && silence >= doubt && since >= doubt)
            || (self.limits.probes_idle && since >= self.limits.keep_alive)
            || (silence > self.limits.keep_alive * 2 && since >= doubt)
    }

    /// 2 s by default.
    fn probe_every(&self) -> Duration {
        PROBE_EVERY.min(self.limits.suspect_busy * 2 / 5)
    }

    fn look_again(&self, closely: bool) -> Duration {
        if closely {
            self.limits.suspect_busy / 20
        } else {
            (self.limits.keep_alive / 5).min(self.limits.suspect_idle / 15)
        }
    }

    /// Until the next of the bounds that this silence would pass.
    fn next_bound(&self, silence: Duration) -> Duration {
        let limits = &self.limits;
        [limits.suspect_busy, limits.suspect_idle, limits.dead_after]
            .into_iter()
            .filter_map(|bound| (bound - early(bound)).checked_sub(silence))
            .find(|left| !left.is_zero())
            .unwrap_or(limits.dead_after)
    }

    /// Until an idle session is asked again.
    fn next_probe(&self, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.last_probe);
        match self.limits.keep_alive.checked_sub(since) {
            Some(left) if self.limits.probes_idle => left,
            Some(_) | None => self.limits.keep_alive,
        }
    }

    /// When it was looked last. A process that was stopped (SIGSTOP, a suspended machine) has not listened meanwhile: that time does not count.
    fn forgive_a_pause(&mut self, now: Instant) -> Instant {
        let gap = now.saturating_duration_since(self.looked);
        let expected = self.look_again(false).max(self.look_again(true));
        if gap > expected * PAUSE_FACTOR {
            let forgiven = gap - expected;
            self.heard.1 += forgiven;
            self.last_probe += forgiven;
            self.asked = self.asked.map(|asked| asked + forgiven);
            self.waiting_since = self.waiting_since.map(|since| since + forgiven);
            self.looked += forgiven;
        }
        std::mem::replace(&mut self.looked, now)
    }
}

/// Whether `bound` is reached, seen a little early so that what follows is done in time.
fn reached(silence: Duration, bound: Duration) -> bool {
    silence >= bound - early(bound)
}

/// A fiftieth, at most 250 ms.
fn early(bound: Duration) -> Duration {
    (bound / 50).min(EARLY_MOST)
}

/// Which changes between live and suspect are logged: the first at once, then at most one in 30 s, and always the
/// one that lasts. A bad link may flap for hours, and a peer may say that it does.
#[derive(Debug, Default)]
pub struct SuspicionLog {
    suspect: bool,
    at: Option<Instant>,
}

impl SuspicionLog {
    /// Whether this state, which may not have changed, is to be logged.
    #[must_use]
    pub fn is_due(&mut self, suspect: bool, now: Instant) -> bool {
        let too_soon = self
            .at
            .is_some_and(|at| now.saturating_duration_since(at) < LOG_EVERY);
        let due = suspect != self.suspect && !too_soon;
        if due {
            *self = Self {
                suspect,
                at: Some(now),
            };
        }
        due
    }
}

/// Time between two lines about one session's state.
const LOG_EVERY: Duration = Duration::from_secs(30);
/// See [`early`].
const EARLY_MOST: Duration = Duration::from_millis(250);
/// Between probes while a request waits and one clock is above this.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// However near a bound is.
const LOOKS_APART: Duration = Duration::from_millis(10);
/// Looks that come this many times later than planned tell of a stopped process.
const PAUSE_FACTOR: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    struct Clock {
        liveness: Liveness,
        start: Instant,
        now: Instant,
        reading: Reading,
        answers: bool,
        sends: bool,
        beat: u64,
        probes: u32,
    }

    impl Clock {
        fn new(probes_idle: bool, transport: TransportKind) -> Self {
            let now = Instant::now();
            let reading = Reading {
                heard: 0,
                acknowledged: 0,
                waiting: false,
            };
            let limits = LivenessLimits {
                probes_idle,
                ..LivenessLimits::default()
            };
            Self {
                liveness: Liveness::new(limits, transport, reading, now),
                start: now,
                now,
                reading,
                answers: true,
                sends: true,
                beat: 5,
                probes: 0,
            }
        }

        /// Looks as often as told until `seconds` have passed; the peer acknowledges probes and sends a sign of life
        /// every `beat` seconds as long as it does.
        fn run(&mut self, seconds: u64) -> Verdict {
            let end = self.now + Duration::from_secs(seconds);
            loop {
                let verdict = self.liveness.look(self.reading, self.now);
                if verdict.probe {
                    self.probes += 1;
                    if self.answers {
                        self.reading.acknowledged += 1;
                        self.reading.heard += 1;
                    }
                }
                if self.now >= end {
                    return verdict;
                }
                let before = self.now;
                self.now = (self.now + verdict.look_again).min(end);
                let beat = |at: Instant| at.duration_since(self.start).as_secs() / self.beat;
                if self.sends && beat(self.now) > beat(before) {
                    self.reading.heard += 1;
                }
            }
        }

        fn first(&mut self, state: State, most: u64) -> u64 {
            (1..=most)
                .find(|_| self.run(1).state == state)
                .unwrap_or(u64::MAX)
        }
    }

    #[test]
    fn peer_that_answers_stays_live_busy_or_idle() {
        for transport in [TransportKind::Quic, TransportKind::H2] {
            for (probes_idle, waiting) in
                [(true, false), (true, true), (false, false), (false, true)]
            {
                let mut clock = Clock::new(probes_idle, transport);
                clock.reading.waiting = waiting;
                for _ in 0..200 {
                    assert_eq!(clock.run(1).state, State::Live);
                }
            }
        }
    }

    #[test]
    fn silent_peer_is_suspect_at_five_or_fifteen_seconds_and_dead_at_sixty() {
        for (waiting, bound) in [(true, 5..=6), (false, 15..=16)] {
            let mut clock = Clock::new(true, TransportKind::Quic);
            clock.run(5);
            (clock.sends, clock.answers, clock.reading.waiting) = (false, false, waiting);
            let suspect = clock.first(State::Suspect, 60);
            assert!(bound.contains(&suspect), "{suspect}");
            let dead = suspect + clock.first(State::Dead, 60);
            assert!((59..=61).contains(&dead), "{dead}");
        }
    }

    #[test]
    fn request_on_a_quiet_session_has_five_seconds_from_its_own_start() {
        let mut clock = Clock::new(false, TransportKind::Quic);
        (clock.sends, clock.answers) = (false, false);
        clock.run(4);
        clock.reading.waiting = true;
        assert_eq!(clock.run(4).state, State::Live);
        assert_eq!(clock.run(2).state, State::Suspect);
    }

    #[test]
    fn peer_that_is_heard_but_acknowledges_nothing_is_suspect() {
        for (transport, bound) in [(TransportKind::Quic, 5..=12), (TransportKind::H2, 15..=22)] {
            let mut clock = Clock::new(true, transport);
            (clock.answers, clock.beat, clock.reading.waiting) = (false, 4, true);
            let suspect = clock.first(State::Suspect, 60);
            assert!(bound.contains(&suspect), "{transport}: {suspect}");
        }
    }

    #[test]
    fn requests_that_give_up_do_not_end_a_doubt() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        (clock.sends, clock.answers, clock.reading.waiting) = (false, false, true);
        assert_eq!(clock.run(6).state, State::Suspect);
        clock.reading.waiting = false;
        for _ in 0..40 {
            assert_eq!(clock.run(1).state, State::Suspect);
        }
        (clock.sends, clock.answers) = (true, true);
        clock.run(5);
        assert_eq!(clock.run(1).state, State::Live);
    }

    #[test]
    fn suspect_peer_that_is_heard_again_is_live() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        (clock.sends, clock.answers) = (false, false);
        assert_eq!(clock.run(30).state, State::Suspect);
        (clock.sends, clock.answers) = (true, true);
        clock.run(5);
        assert_eq!(clock.run(1).state, State::Live);
    }

    #[test]
    fn word_of_the_peer_counts_until_it_takes_it_back() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.liveness.peer_doubts(true);
        let verdict = clock.run(1);
        assert_eq!((verdict.state, verdict.own_doubt), (State::Suspect, false));
        clock.liveness.peer_doubts(false);
        assert_eq!(clock.run(1).state, State::Live);
    }

    #[test]
    fn probes_come_every_two_seconds_while_a_request_waits_in_silence_and_every_five_when_idle() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        (clock.sends, clock.answers, clock.reading.waiting) = (false, false, true);
        clock.run(20);
        assert!((8..=10).contains(&clock.probes), "{}", clock.probes);
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.run(50);
        assert!((9..=10).contains(&clock.probes), "{}", clock.probes);
        let mut agent = Clock::new(false, TransportKind::Quic);
        agent.run(50);
        assert_eq!(agent.probes, 0, "the agent's keep-alive does it");
    }

    #[test]
    fn time_in_which_this_process_was_stopped_does_not_count() {
        let mut clock = Clock::new(true, TransportKind::Quic);
        clock.reading.waiting = true;
        clock.run(4);
        clock.now += Duration::from_secs(100);
        let verdict = clock.liveness.look(clock.reading, clock.now);
        assert_eq!(verdict.state, State::Live);
    }

    #[test]
    fn changes_are_logged_at_once_then_every_thirty_seconds_and_the_last_one_always() {
        let (mut log, start) = (SuspicionLog::default(), Instant::now());
        let mut due = |suspect, second| log.is_due(suspect, start + Duration::from_secs(second));
        assert!(!due(false, 0));
        assert!(due(true, 1));
        for second in 2..31 {
            assert!(!due(second % 2 == 0, second), "{second}");
        }
        assert!(!due(true, 31), "that is what was logged last");
        assert!(due(false, 32));
        assert!(!due(true, 33));
        assert!(due(true, 62), "it stayed");
        assert!(!due(true, 100));
    }
}
