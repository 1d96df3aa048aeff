//! Throttling of password guesses. All functions are pure. Each wrong password counts for its pair
//! of source and user name. After [`FREE_FAILURES`] failures a pair must wait, and each further
//! failure doubles the wait.
//!
//! - During a wait no password of the pair is checked, not even a right one. Otherwise guesses
//!   would continue at full speed, and the accepted guess would reveal the password. A caller that
//!   shares its source and name with an attacker therefore waits as well. Other names of the source
//!   do not wait. Requests on a connection that has already shown the same password are not checked
//!   here.
//! - A right password does not reset the count. Otherwise each request of a caller with the right
//!   password would give its neighbors new guesses of the same name.
//! - A source with [`NAMES_MAX`] failed names waits as a whole after every further failure, because
//!   names cost an attacker nothing. A name that succeeded from this source within [`FORGET_AFTER`]
//!   is still checked, so that callers behind the same NAT can continue. A name that is new for
//!   this source must wait.
//! - Unknown names count like known ones, so that a response does not reveal which names exist.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

/// SHA-256 of a user name. A digest has a fixed size, while callers can send names of any length.
pub(super) type NameDigest = [u8; 32];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptResult {
    Accepted,
    /// The password is wrong. The failure was counted.
    Wrong,
    /// The password was not checked. The next attempt is possible after this time.
    Throttled(Duration),
}

#[derive(Debug, Default)]
pub(super) struct PasswordThrottle {
    sources: HashMap<IpAddr, SourceAttempts>,
}

#[derive(Debug)]
struct SourceAttempts {
    names: HashMap<NameDigest, NameAttempts>,
    /// Failures of names beyond [`NAMES_MAX`].
    others: Failures,
    last: Instant,
}

#[derive(Debug, Default)]
struct NameAttempts {
    failures: Failures,
    succeeded: Option<Instant>,
}

#[derive(Debug, Default)]
struct Failures {
    count: u32,
    last: Option<Instant>,
    until: Option<Instant>,
}

impl PasswordThrottle {
    /// Checks an attempt at `now`. Calls `is_right` unless the attempt is throttled.
    pub(super) fn check(
        &mut self,
        source: IpAddr,
        name: NameDigest,
        now: Instant,
        is_right: impl FnOnce() -> bool,
    ) -> AttemptResult {
        if let Some(left) = self.wait(source, &name, now) {
            return AttemptResult::Throttled(left);
        }
        let is_right = is_right();
        let source_attempts = self.source_attempts(source, now);
        if is_right {
            source_attempts.names.entry(name).or_default().succeeded = Some(now);
            return AttemptResult::Accepted;
        }
        source_attempts.fail(name, now);
        AttemptResult::Wrong
    }

    fn wait(&self, source: IpAddr, name: &NameDigest, now: Instant) -> Option<Duration> {
        let source_attempts = self.sources.get(&source)?;
        let name_attempts = source_attempts.names.get(name);
        let own = name_attempts.and_then(|name_attempts| name_attempts.failures.until);
        let succeeded = name_attempts.and_then(|name_attempts| name_attempts.succeeded);
        let everyone = source_attempts.others.until;
        let everyone = everyone.filter(|_| !is_recent(succeeded, now));
        let until = own.max(everyone)?;
        until
            .checked_duration_since(now)
            .filter(|left| !left.is_zero())
    }

    /// Returns the entry of a source. If the table is full, the entry without attempts for the
    /// longest time is removed first.
    fn source_attempts(&mut self, source: IpAddr, now: Instant) -> &mut SourceAttempts {
        if self.sources.len() >= SOURCES_MAX && !self.sources.contains_key(&source) {
            let oldest = self.sources.iter().min_by_key(|(_, entry)| entry.last);
            if let Some(oldest) = oldest.map(|(source, _)| *source) {
                self.sources.remove(&oldest);
            }
        }
        let entry = self
            .sources
            .entry(source)
            .or_insert_with(|| SourceAttempts {
                names: HashMap::new(),
                others: Failures::default(),
                last: now,
            });
        entry.last = now;
        entry
    }
}

impl SourceAttempts {
    fn fail(&mut self, name: NameDigest, now: Instant) {
        self.names
            .retain(|_, name_attempts| name_attempts.is_recent(now));
        let failed = self
            .names
            .values()
            .filter(|name_attempts| name_attempts.has_failed());
        let is_full = failed.count() >= NAMES_MAX;
        if is_full && !self.names.contains_key(&name) {
            self.others.add(1, now);
        } else {
            let name_attempts = self.names.entry(name).or_default();
            name_attempts.failures.add(FREE_FAILURES, now);
        }
    }
}

impl NameAttempts {
    fn has_failed(&self) -> bool {
        self.failures.count > 0
    }

    fn is_recent(&self, now: Instant) -> bool {
        is_recent(self.failures.last, now) || is_recent(self.succeeded, now)
    }
}

impl Failures {
    /// Counts a failure. The wait begins with the failure of number `first`.
    fn add(&mut self, first: u32, now: Instant) {
        if !is_recent(self.last, now) {
            self.count = 0;
        }
        self.count = self.count.saturating_add(1);
        self.last = Some(now);
        if let Some(doublings) = self.count.checked_sub(first) {
            let factor = 1_u32.checked_shl(doublings).unwrap_or(u32::MAX);
            self.until = Some(now + FIRST_DELAY.saturating_mul(factor).min(DELAY_MAX));
        }
    }
}

fn is_recent(at: Option<Instant>, now: Instant) -> bool {
    at.is_some_and(|at| now.saturating_duration_since(at) < FORGET_AFTER)
}

/// Wrong passwords of a pair before its first wait, because people mistype.
const FREE_FAILURES: u32 = 5;
/// First wait of a pair.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Longest wait, which allows one guess per minute.
const DELAY_MAX: Duration = Duration::from_secs(60);
/// Time after which the last failure or success is forgotten. Longer than the longest wait, so that
/// an attacker that waits does not start again with the first wait.
const FORGET_AFTER: Duration = Duration::from_secs(600);
/// Failed names of one source before the source waits as a whole. No site has this many callers
/// with a wrong password.
const NAMES_MAX: usize = 16;
/// Largest number of sources in the table. Each takes at most about 2 KiB.
const SOURCES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const SITE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));

    fn name(number: usize) -> NameDigest {
        let mut name = [0; 32];
        name[..8].copy_from_slice(&number.to_be_bytes());
        name
    }

    /// Attempts from [`SITE`] at given times. Times are in seconds since the start.
    struct Fixture {
        throttle: PasswordThrottle,
        start: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                throttle: PasswordThrottle::default(),
                start: Instant::now(),
            }
        }

        /// Makes five wrong attempts.
        fn guess(&mut self, who: usize, at: f64) {
            for _ in 0..5 {
                assert_eq!(self.ask(who, at, false), AttemptResult::Wrong);
            }
        }

        fn ask(&mut self, who: usize, at: f64, is_right: bool) -> AttemptResult {
            let now = self.start + Duration::from_secs_f64(at);
            self.throttle.check(SITE, name(who), now, || is_right)
        }
    }

    #[test]
    fn waits_begin_with_the_fifth_wrong_password_and_double_to_a_minute() {
        let mut fixture = Fixture::new();
        fixture.guess(1, 0.0);
        let mut at = 0.0;
        let half = AttemptResult::Throttled(Duration::from_millis(500));
        for wait in [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0] {
            let early = fixture.ask(1, at + wait - 0.5, true);
            assert_eq!(early, half, "{wait}");
            at += wait;
            assert_eq!(fixture.ask(1, at, false), AttemptResult::Wrong, "{wait}");
        }
        // After hundreds of doublings the wait is still one minute.
        for _ in 0..300 {
            at += 60.0;
            assert_eq!(fixture.ask(1, at, false), AttemptResult::Wrong);
        }
        let minute = Duration::from_secs(60);
        assert_eq!(fixture.ask(1, at, true), AttemptResult::Throttled(minute));
        at += 60.0;
        assert_eq!(fixture.ask(1, at, true), AttemptResult::Accepted);
        // A right password does not reset the count.
        assert_eq!(fixture.ask(1, at, false), AttemptResult::Wrong);
        assert_eq!(fixture.ask(1, at, true), AttemptResult::Throttled(minute));
        // The count is reset with time.
        at += 600.0;
        fixture.guess(1, at);
        let second = Duration::from_secs(1);
        assert_eq!(fixture.ask(1, at, true), AttemptResult::Throttled(second));
    }

    #[test]
    fn guesses_of_an_hour_are_counted_on_two_hands_and_sixty() {
        let mut fixture = Fixture::new();
        // 100 attempts per second, in place of thousands.
        let guesses = (0..360_000).map(|tick| fixture.ask(1, f64::from(tick) / 100.0, false));
        let judged = guesses.filter(|result| *result == AttemptResult::Wrong);
        let judged = judged.count();
        assert!((60..75).contains(&judged), "{judged} guesses an hour");
    }

    #[test]
    fn other_names_and_other_sources_do_not_wait() {
        let mut fixture = Fixture::new();
        for _ in 0..6 {
            fixture.ask(1, 0.0, false);
        }
        let named = fixture.ask(1, 0.5, true);
        assert!(matches!(named, AttemptResult::Throttled(_)));
        assert_eq!(fixture.ask(2, 0.5, true), AttemptResult::Accepted);
        let elsewhere = "192.0.2.2".parse().unwrap();
        let now = fixture.start;
        let result = fixture.throttle.check(elsewhere, name(1), now, || true);
        assert_eq!(result, AttemptResult::Accepted);
    }

    #[test]
    fn source_with_many_names_waits_as_a_whole_and_names_that_succeeded_there_pass() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.ask(1000, 0.0, true), AttemptResult::Accepted);
        for who in 0..NAMES_MAX {
            assert_eq!(fixture.ask(who, 1.0, false), AttemptResult::Wrong);
        }
        // The source does not wait yet.
        assert_eq!(fixture.ask(2000, 1.0, true), AttemptResult::Accepted);
        assert_eq!(fixture.ask(500, 1.0, false), AttemptResult::Wrong);
        let second = AttemptResult::Throttled(Duration::from_secs(1));
        for who in [500, 501, 0] {
            assert_eq!(fixture.ask(who, 1.0, true), second, "{who}");
        }
        for who in [1000, 2000] {
            let result = fixture.ask(who, 1.5, true);
            assert_eq!(result, AttemptResult::Accepted, "{who}");
        }
        assert_eq!(fixture.ask(501, 2.0, false), AttemptResult::Wrong);
        let doubled = AttemptResult::Throttled(Duration::from_secs(2));
        assert_eq!(fixture.ask(502, 2.0, true), doubled);
        // Guesses of the name that is still checked have their own wait.
        for _ in 0..5 {
            fixture.ask(1000, 2.0, false);
        }
        let known = fixture.ask(1000, 2.5, true);
        assert!(matches!(known, AttemptResult::Throttled(_)));
    }

    #[test]
    fn table_is_bounded_and_loses_the_source_that_was_silent_for_longest() {
        let mut fixture = Fixture::new();
        for who in 0..10_000 {
            fixture.ask(who, 0.0, false);
            fixture.ask(who, f64::from(u32::try_from(who).unwrap()) * 61.0, false);
        }
        assert!(fixture.throttle.sources[&SITE].names.len() <= NAMES_MAX);
        let now = fixture.start + Duration::from_secs(1_000_000);
        for number in 0..2 * u32::try_from(SOURCES_MAX).unwrap() {
            let source = IpAddr::from((0x0a00_0000 + number).to_be_bytes());
            let now = now + Duration::from_millis(number.into());
            fixture.throttle.check(source, name(1), now, || false);
        }
        assert_eq!(fixture.throttle.sources.len(), SOURCES_MAX);
        assert!(!fixture.throttle.sources.contains_key(&SITE));
    }
}
