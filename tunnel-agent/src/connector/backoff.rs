//! When to try again: a pure state machine over events, the time and a random number.
//!
//! ```text
//! start --failed--> outage: at once, then 0..its age (0.1 to 2 s) for 2 minutes, then 0..4 s, 0..8 s, ... 0..30 s
//!                     | a server's refusal: 0..2 s  | name in use, too many sessions: 60 s, ... 10 min  | needs a person: 30 s
//!                     +--ready for 10 s--> start
//! ```
//!
//! The wait between two dials is at most the age of the outage, or 0.1 s. A wave of agents is
//! therefore spread over the time that it has been waiting. The cap after a refusal is 2 s from the
//! start: that server is running, and needs time.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_process::backoff;
use tunnel_proto::wire::code::CloseCode;

/// The outcome of an attempt to keep a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReconnectEvent {
    /// The session never became Ready. Contains the close code if the server sent one.
    Failed(Option<CloseCode>),
    /// The session was Ready, and has ended or is silent.
    Lost {
        /// Time from Ready to the end or to the suspicion.
        ready_for: Duration,
        /// Close code of the session; [`CloseCode::Dead`] for silence.
        code: CloseCode,
    },
}

impl ReconnectEvent {
    fn code(self) -> Option<CloseCode> {
        match self {
            Self::Failed(code) => code,
            Self::Lost { code, .. } => Some(code),
        }
    }
}

/// The history that determines the next attempt.
#[derive(Debug)]
pub struct Backoff {
    outage_since: Option<Instant>,
    last_immediate: Option<Instant>,
    late: backoff::Backoff,
    name_in_use: backoff::Backoff,
}

impl Backoff {
    /// Creates a backoff without any attempts.
    pub fn new() -> Self {
        Self {
            outage_since: None,
            last_immediate: None,
            late: backoff::Backoff::new(LATE_CAP_MIN, LATE_CAP_MAX, 0.0..=1.0),
            name_in_use: backoff::Backoff::new(
                NAME_IN_USE_MIN,
                NAME_IN_USE_MAX,
                1.0..=1.0 + JITTER,
            ),
        }
    }

    /// Forgets the outage, so that the waits begin with the shortest ones.
    pub fn restart(&mut self) {
        *self = Self {
            last_immediate: self.last_immediate,
            ..Self::new()
        };
    }

    /// Returns the wait after `event`, in whole milliseconds. `random` is from 0 to 1.
    pub fn next(&mut self, event: ReconnectEvent, now: Instant, random: f64) -> Duration {
        let wait = self.wait(event, now, random);
        Duration::from_millis(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX))
    }

    fn wait(&mut self, event: ReconnectEvent, now: Instant, random: f64) -> Duration {
        let lost = match event {
            ReconnectEvent::Lost { ready_for, .. } => {
                if ready_for >= STABLE_AFTER {
                    self.restart();
                }
                true
            }
            ReconnectEvent::Failed(_) => false,
        };
        let first = self.outage_since.is_none();
        let since = *self.outage_since.get_or_insert(now);
        match event.code() {
            Some(CloseCode::NameInUse | CloseCode::TooManySessions) => {
                return self.name_in_use.next(random);
            }
            Some(code) if !code.is_retryable() => {
                return PERMANENT_REFUSAL_WAIT.mul_f64(1.0 + random * JITTER);
            }
            Some(_) | None => {}
        }
        // A server that admits and closes at once must not be dialed in a tight loop.
        let may_retry_now = self
            .last_immediate
            .is_none_or(|last| now.duration_since(last) >= IMMEDIATE_RETRY_INTERVAL);
        if (first || lost) && may_retry_now {
            self.last_immediate = Some(now);
            return Duration::ZERO;
        }
        let age = now.duration_since(since);
        if age >= EARLY_FOR {
            return self.late.next(random);
        }
        let cap = match event {
            ReconnectEvent::Failed(None) | ReconnectEvent::Lost { .. } => {
                age.clamp(EARLY_CAP_MIN, EARLY_CAP_MAX)
            }
            // A server that refuses is running and needs time.
            ReconnectEvent::Failed(Some(_)) => EARLY_CAP_MAX,
        };
        cap.mul_f64(random)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the wait after the server of a session has asked its agents to move within
/// `move_within`, in addition to that of [`Backoff::next`]. A server without others sets no
/// time. `random` is from 0 to 1.
pub fn drain_wait(move_within: Duration, random: f64) -> Duration {
    let spread = if move_within.is_zero() {
        DRAIN_SPREAD
    } else {
        move_within.min(MOVE_WITHIN_MAX)
    };
    spread.mul_f64(random)
}

/// Returns the pause between two dials that clients of the cloud make due; `random` is from 0 to 1.
pub fn wanted_pause(random: f64) -> Duration {
    WANTED_PAUSE.mul_f64(1.0 + random * JITTER)
}

/// Shortest pause between two dials that clients of the cloud make due. A dial asks again after 1
/// and 3 s and ends after 5, so that a path that is back is found within about 2 s.
const WANTED_PAUSE: Duration = Duration::from_secs(2);
/// Time over which the first dials of further connectors are spread, since all agents learn of a
/// new server in the same moment.
pub const START_SPREAD: Duration = Duration::from_secs(2);
/// Time over which agents move to a server that they prefer. Nothing depends on the move.
pub const MOVE_SPREAD: Duration = Duration::from_secs(60);
/// Time over which the dials of agents that had given up are spread after a change of the members.
pub const RESUME_SPREAD: Duration = Duration::from_secs(2);
/// Interval of the search for a server that has an address of its own.
pub const ADDRESSED_INTERVAL: Duration = Duration::from_secs(60);
/// Time over which the dials of all agents of a stopping server are spread if the server sets none,
/// since they are notified in the same moment. Requests wait for the slowest of them.
const DRAIN_SPREAD: Duration = Duration::from_millis(500);
/// Upper bound for the time that a stopping server sets.
const MOVE_WITHIN_MAX: Duration = Duration::from_secs(60);
/// A session that was Ready for this long ends the outage.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Minimum time between two immediate retries. The value is less than the shortest sensible
/// keep-alive (1 s, less 20 %), since an agent notices a server that restarted twice no sooner.
const IMMEDIATE_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Cap of the full jitter at the beginning of an outage. A server restart takes some 50 ms.
const EARLY_CAP_MIN: Duration = Duration::from_millis(100);
/// Cap of the full jitter for the rest of the early phase. A restarted server is found soon, and
/// 10,000 agents are spread.
const EARLY_CAP_MAX: Duration = Duration::from_secs(2);
const EARLY_FOR: Duration = Duration::from_secs(120);
/// First cap of the jitter after the early phase. The cap doubles.
const LATE_CAP_MIN: Duration = Duration::from_secs(4);
/// Largest cap of the jitter.
const LATE_CAP_MAX: Duration = Duration::from_secs(30);
/// First wait after "name in use" or "too many sessions".
const NAME_IN_USE_MIN: Duration = Duration::from_secs(60);
/// Longest wait after "name in use" or "too many sessions".
const NAME_IN_USE_MAX: Duration = Duration::from_secs(600);
/// Wait after a refusal that an operator must resolve.
const PERMANENT_REFUSAL_WAIT: Duration = Duration::from_secs(30);
/// Largest fraction by which the two fixed waits are extended, so that a site's agents do not
/// synchronize.
const JITTER: f64 = 0.1;

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const FAILED: ReconnectEvent = ReconnectEvent::Failed(None);

    fn lost_after(seconds: u64) -> ReconnectEvent {
        ReconnectEvent::Lost {
            ready_for: Duration::from_secs(seconds),
            code: CloseCode::Dead,
        }
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    fn millis(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    #[test]
    fn first_retry_is_at_once_then_jitter_up_to_the_outages_age() {
        let (mut backoff, start) = (Backoff::new(), Instant::now());
        assert_eq!(backoff.next(FAILED, start, 0.9), Duration::ZERO);
        assert_eq!(backoff.next(FAILED, start, 0.0), Duration::ZERO);
        let caps = [(0, 100), (99, 100), (300, 300), (1999, 1999), (2500, 2000)];
        for (age, cap) in caps.map(|(age, cap)| (millis(age), millis(cap))) {
            assert_eq!(backoff.next(FAILED, start + age, 1.0), cap);
            let half = u64::try_from(cap.as_millis() / 2).unwrap();
            assert_eq!(backoff.next(FAILED, start + age, 0.5), millis(half));
        }
        assert_eq!(backoff.next(FAILED, start + seconds(119), 1.0), seconds(2));
    }

    /// For any random values, callers wait at most twice as long as the outage, or 0.1 s longer.
    #[test]
    fn server_that_is_back_is_found_soon_by_few_dials() {
        const AGENTS: u32 = 1000;
        let mut random = SmallRng::seed_from_u64(7);
        for (away, most) in [(50, 4.0), (500, 8.0), (1500, 10.0), (5000, 14.0)] {
            let away = millis(away);
            let mut dials = 0;
            for _ in 0..AGENTS {
                let start = Instant::now();
                let (mut backoff, mut now) = (Backoff::new(), start);
                let mut event = lost_after(60);
                loop {
                    now += backoff.next(event, now, random.random());
                    if now - start >= away {
                        break;
                    }
                    dials += 1;
                    event = FAILED;
                }
                let late = now - start - away;
                assert!(late <= away.clamp(millis(100), seconds(2)), "{late:?}");
            }
            let mean = f64::from(dials) / f64::from(AGENTS);
            assert!(mean <= most, "{mean} dials while away for {away:?}");
        }
    }

    #[test]
    fn server_that_admits_and_closes_at_once_is_soon_dialed_every_second() {
        let mut random = SmallRng::seed_from_u64(7);
        let start = Instant::now();
        let (mut backoff, mut now, mut dials) = (Backoff::new(), start, 0);
        while now - start < seconds(60) {
            now += millis(20) + backoff.next(lost_after(0), now, random.random());
            dials += 1;
        }
        assert!(dials < 120, "{dials} dials in a minute");
    }

    #[test]
    fn server_that_refuses_is_asked_less_often() {
        let (mut backoff, start) = (Backoff::new(), Instant::now());
        let refused = ReconnectEvent::Failed(Some(CloseCode::Overloaded));
        assert_eq!(backoff.next(refused, start, 1.0), Duration::ZERO);
        assert_eq!(backoff.next(refused, start, 1.0), seconds(2));
        assert_eq!(backoff.next(FAILED, start, 1.0), millis(100));
    }

    #[test]
    fn cap_doubles_to_thirty_seconds_after_two_minutes() {
        let (mut backoff, start) = (Backoff::new(), Instant::now());
        backoff.next(FAILED, start, 0.0);
        let late = start + seconds(120);
        for cap in [4, 8, 16, 30, 30, 30] {
            assert_eq!(backoff.next(FAILED, late, 1.0), seconds(cap));
        }
        assert_eq!(backoff.next(FAILED, late, 0.5), seconds(15));
    }

    #[test]
    fn session_that_was_ready_for_a_while_ends_the_outage() {
        let (mut backoff, start) = (Backoff::new(), Instant::now());
        backoff.next(FAILED, start, 0.0);
        backoff.next(FAILED, start + seconds(500), 1.0);
        let later = start + seconds(1000);
        assert_eq!(backoff.next(lost_after(10), later, 1.0), Duration::ZERO);
        assert_eq!(backoff.next(FAILED, later, 1.0), millis(100));
        assert_eq!(backoff.next(FAILED, later + seconds(5), 1.0), seconds(2));
    }

    #[test]
    fn lost_session_is_dialed_at_once_but_not_in_a_tight_loop() {
        let (mut backoff, start) = (Backoff::new(), Instant::now());
        assert_eq!(backoff.next(lost_after(1), start, 1.0), Duration::ZERO);
        let again = start + Duration::from_millis(50);
        assert_eq!(backoff.next(lost_after(0), again, 1.0), millis(100));
        let later = backoff.next(lost_after(1), start + seconds(1), 1.0);
        assert_eq!(later, Duration::ZERO);
    }

    #[test]
    fn short_sessions_do_not_end_the_outage() {
        let (mut backoff, start) = (Backoff::new(), Instant::now());
        backoff.next(FAILED, start, 0.0);
        let late = start + seconds(121);
        assert_eq!(backoff.next(lost_after(9), late, 1.0), Duration::ZERO);
        assert_eq!(backoff.next(FAILED, late, 1.0), seconds(4));
    }

    #[test]
    fn name_in_use_and_too_many_sessions_wait_a_minute_doubling_to_ten() {
        for code in [CloseCode::NameInUse, CloseCode::TooManySessions] {
            let (mut backoff, now) = (Backoff::new(), Instant::now());
            let event = ReconnectEvent::Failed(Some(code));
            for wait in [60, 120, 240, 480, 600, 600] {
                assert_eq!(backoff.next(event, now, 0.0), seconds(wait));
            }
            assert_eq!(backoff.next(event, now, 1.0), seconds(660));
            backoff.next(lost_after(10), now, 0.0);
            assert_eq!(backoff.next(event, now, 0.0), seconds(60));
        }
    }

    #[test]
    fn agents_of_a_stopping_server_move_within_its_time() {
        let cases = [(0, 500), (3000, 3000), (600_000, 60_000)];
        for (move_within, last) in cases.map(|(one, other)| (millis(one), millis(other))) {
            assert_eq!(drain_wait(move_within, 0.0), Duration::ZERO);
            assert_eq!(drain_wait(move_within, 1.0), last);
        }
    }

    #[test]
    fn what_needs_a_person_is_retried_slowly() {
        for code in [
            CloseCode::Version,
            CloseCode::NameNotInCredential,
            CloseCode::CredentialRevoked,
        ] {
            let (mut backoff, now) = (Backoff::new(), Instant::now());
            let event = ReconnectEvent::Failed(Some(code));
            assert_eq!(backoff.next(event, now, 0.0), seconds(30));
            assert_eq!(backoff.next(event, now, 0.0), seconds(30));
        }
    }
}
