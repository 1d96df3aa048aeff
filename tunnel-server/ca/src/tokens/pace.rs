//! The pace at which tokens are looked up for agents without credentials. Each lookup costs a request
//! to the API server, and the id of a token can be guessed by anybody. A source whose tokens are
//! unknown waits, then is refused; others go on.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

/// The recent lookups of all sources. Pure.
#[derive(Debug, Default)]
pub(super) struct LookupPace {
    /// Sources with recent failures: an IPv4 address, or an IPv6 /64.
    sources: HashMap<IpAddr, Bucket>,
    /// When sources that owe nothing were last removed.
    swept: Option<Instant>,
    all: Bucket,
}

/// Lookups that are owed to a limit, and that time pays back.
#[derive(Debug, Default, Clone, Copy)]
struct Bucket {
    owed: f64,
    since: Option<Instant>,
}

impl LookupPace {
    /// Returns how long a source has to wait before its next lookup, or `None` if it is refused: it
    /// has failed too often, or all sources together look up too much, and this one has failed.
    pub(super) fn admit(&mut self, source: IpAddr, now: Instant) -> Option<Duration> {
        let failed = self.sources.get_mut(&source);
        let failed = failed.map_or(0.0, |bucket| bucket.paid(now, FAILURES_PER_SECOND));
        let over = failed - FAILURES_FREE;
        let wait = Duration::try_from_secs_f64(over / FAILURES_PER_SECOND).unwrap_or_default();
        let all = self.all.paid(now, LOOKUPS_PER_SECOND);
        let share = if failed >= 1.0 { 0.5 } else { 1.0 };
        if wait > WAIT_MAX || all >= LOOKUPS_PER_SECOND * share {
            return None;
        }
        self.all.owed += 1.0;
        if !wait.is_zero() {
            // Those that wait are one after the other.
            self.count(source, now);
        }
        Some(wait)
    }

    /// Counts a lookup that found no token, or one with another secret. That of a source that `waited`
    /// was counted by [`LookupPace::admit`].
    pub(super) fn failed(&mut self, source: IpAddr, waited: Duration, now: Instant) {
        if waited.is_zero() {
            self.count(source, now);
        }
    }

    fn count(&mut self, source: IpAddr, now: Instant) {
        if self.sources.len() >= SOURCES_MAX && !self.sources.contains_key(&source) {
            let since = |swept| now.saturating_duration_since(swept);
            if self.swept.is_none_or(|swept| since(swept) >= SWEEP_PAUSE) {
                self.swept = Some(now);
                self.sources
                    .retain(|_, bucket| bucket.paid(now, FAILURES_PER_SECOND) > 0.0);
            }
            if self.sources.len() >= SOURCES_MAX {
                return;
            }
        }
        let bucket = self.sources.entry(source).or_default();
        bucket.paid(now, FAILURES_PER_SECOND);
        bucket.owed += 1.0;
    }
}

impl Bucket {
    /// Pays back what the time since the last call pays. Returns the rest.
    fn paid(&mut self, now: Instant, per_second: f64) -> f64 {
        let since = self.since.replace(now);
        let passed = since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.owed = (self.owed - passed.as_secs_f64() * per_second).max(0.0);
        self.owed
    }
}

/// Failed lookups of a source that cost it nothing: a site with many agents of a wrong token.
const FAILURES_FREE: f64 = 20.0;
/// Failed lookups of a source in a second after that.
const FAILURES_PER_SECOND: f64 = 1.0;
/// Longest wait. The whole connection has 5 s.
const WAIT_MAX: Duration = Duration::from_secs(3);
/// Lookups of all sources in a second. Half of them are for sources without failures.
const LOOKUPS_PER_SECOND: f64 = 200.0;
/// Time between two searches for sources that owe nothing.
const SWEEP_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of sources whose failures are counted, of about 64 bytes each.
const SOURCES_MAX: usize = 16_384;

#[cfg(test)]
mod tests {
    use super::*;

    fn source(number: u32) -> IpAddr {
        IpAddr::from(number.to_be_bytes())
    }

    /// Looks up unknown tokens as fast as the pace permits, and returns how many in this time.
    fn flood(pace: &mut LookupPace, sources: u32, start: Instant, millis: u64) -> usize {
        let mut looked_up = 0;
        for at in 0..millis {
            let now = start + Duration::from_millis(at);
            for number in 0..sources {
                if pace.admit(source(number), now) == Some(Duration::ZERO) {
                    pace.failed(source(number), Duration::ZERO, now);
                    looked_up += 1;
                }
            }
        }
        looked_up
    }

    #[test]
    fn source_with_unknown_tokens_waits_and_is_refused_and_others_go_on() {
        let (mut pace, start) = (LookupPace::default(), Instant::now());
        assert!(flood(&mut pace, 1, start, 1000) <= 22);
        let now = start + Duration::from_secs(1);
        let waits: Vec<_> = (0..10).filter_map(|_| pace.admit(source(0), now)).collect();
        assert!((1..=4).contains(&waits.len()), "{waits:?}");
        assert!(waits.is_sorted() && *waits.last().unwrap() <= WAIT_MAX);
        assert_eq!(pace.admit(source(0), now), None);
        assert_eq!(pace.admit(source(1), now), Some(Duration::ZERO));
        // Time pays.
        let later = now + Duration::from_secs(60);
        assert_eq!(pace.admit(source(0), later), Some(Duration::ZERO));
    }

    #[test]
    fn source_that_waits_fails_once_a_second() {
        let (mut pace, start) = (LookupPace::default(), Instant::now());
        flood(&mut pace, 1, start, 1000);
        let (mut now, mut looked_up) = (start + Duration::from_secs(1), 0);
        let end = now + Duration::from_secs(60);
        while now < end {
            match pace.admit(source(0), now) {
                Some(wait) => {
                    now += wait;
                    pace.failed(source(0), wait, now);
                    looked_up += 1;
                }
                None => now += Duration::from_millis(100),
            }
        }
        assert!((58..=64).contains(&looked_up), "{looked_up}");
    }

    #[test]
    fn all_sources_together_are_bounded_and_those_that_failed_are_refused_first() {
        let (mut pace, start) = (LookupPace::default(), Instant::now());
        let looked_up = flood(&mut pace, 150, start, 2000);
        // Those of three seconds.
        assert!(looked_up <= 600, "{looked_up}");
        let now = start + Duration::from_secs(2);
        assert_eq!(pace.admit(source(3), now), None, "it has failed");
        assert_eq!(pace.admit(source(9999), now), Some(Duration::ZERO));
    }

    #[test]
    fn joins_with_good_tokens_from_one_address_do_not_wait() {
        let (mut pace, start) = (LookupPace::default(), Instant::now());
        for number in 0..2000 {
            let now = start + Duration::from_millis(10 * number);
            assert_eq!(pace.admit(source(0), now), Some(Duration::ZERO), "{number}");
        }
    }

    #[test]
    fn counted_sources_are_bounded() {
        let (mut pace, start) = (LookupPace::default(), Instant::now());
        for number in (0..).take(2 * SOURCES_MAX) {
            pace.failed(source(number), Duration::ZERO, start);
        }
        assert_eq!(pace.sources.len(), SOURCES_MAX);
        let later = start + Duration::from_secs(60);
        pace.failed(source(u32::MAX), Duration::ZERO, later);
        assert_eq!(pace.sources.len(), 1);
    }
}
