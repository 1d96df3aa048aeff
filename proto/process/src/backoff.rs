//! The waits between attempts, pure.

use std::ops::RangeInclusive;
use std::time::Duration;

/// The waits between attempts: from a first one, doubled up to a longest one, each times a random
/// factor.
#[derive(Debug, Clone)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    factors: RangeInclusive<f64>,
    doublings: u32,
}

impl Backoff {
    /// Creates a backoff. `factors` has the least and the greatest factor: `0.0..=1.0` is full
    /// jitter.
    pub const fn new(first: Duration, longest: Duration, factors: RangeInclusive<f64>) -> Self {
        Self {
            first,
            longest,
            factors,
            doublings: 0,
        }
    }

    /// Returns the next wait. `random` is from 0 to 1.
    pub fn next(&mut self, random: f64) -> Duration {
        self.next_within(self.longest, random)
    }

    /// Returns the next wait, which is at most `longest` this time.
    pub fn next_within(&mut self, longest: Duration, random: f64) -> Duration {
        let factor = 2_u32.saturating_pow(self.doublings);
        self.doublings = self.doublings.saturating_add(1);
        let (least, greatest) = (self.factors.start(), self.factors.end());
        self.first
            .saturating_mul(factor)
            .min(longest)
            .mul_f64(least + (greatest - least) * random)
    }

    /// Begins again with the first wait.
    pub fn restart(&mut self) {
        self.doublings = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_the_longest_one_within_their_factors() {
        let [first, longest] = [200, 5000].map(Duration::from_millis);
        let mut backoff = Backoff::new(first, longest, 0.75..=1.0);
        let waits: Vec<_> = (0..50).map(|_| backoff.next(1.0).as_millis()).collect();
        assert_eq!(waits[..6], [200, 400, 800, 1600, 3200, 5000]);
        assert!(waits[5..].iter().all(|wait| *wait == 5000));
        backoff.restart();
        assert_eq!(backoff.next(0.0).as_millis(), 150);
        assert_eq!(backoff.next(0.0).as_millis(), 300);
        assert_eq!(backoff.next_within(first, 0.5).as_millis(), 175);
        assert_eq!(backoff.next(1.0).as_millis(), 1600);
    }

    #[test]
    fn full_jitter_is_from_nothing_to_the_whole_wait() {
        let minutes = |count: u64| Duration::from_secs(count * 60);
        let mut backoff = Backoff::new(minutes(1), minutes(10), 0.0..=1.0);
        for wait in [1, 2, 4, 8, 10, 10] {
            assert_eq!(backoff.next(1.0), minutes(wait));
        }
        assert_eq!(backoff.next(0.5), minutes(5));
        backoff.restart();
        assert_eq!(backoff.next(0.0), Duration::ZERO);
        assert_eq!(backoff.next(1.0), minutes(2));
    }
}
