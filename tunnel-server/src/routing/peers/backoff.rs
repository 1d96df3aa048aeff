//! The time between two attempts to connect to another server.

use std::time::Duration;

/// Time between two attempts: from 0.2 s, doubled up to 5 s, with jitter.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    attempts: u32,
}

impl Backoff {
    /// Returns the time until the next attempt. `jitter` is from 0 to 1.
    pub(super) fn next_delay(&mut self, jitter: f64) -> Duration {
        let doubled = BACKOFF_MIN.saturating_mul(1 << self.attempts.min(8));
        self.attempts = self.attempts.saturating_add(1);
        doubled.min(BACKOFF_MAX).mul_f64(0.75 + jitter / 4.0)
    }
}

const BACKOFF_MIN: Duration = Duration::from_millis(200);
/// Longest time between two attempts.
pub(super) const BACKOFF_MAX: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_two_tenths_of_a_second_to_five_seconds_apart() {
        let mut backoff = Backoff::default();
        let delays: Vec<_> = (0..50)
            .map(|_| backoff.next_delay(1.0).as_millis())
            .collect();
        assert_eq!(delays[..6], [200, 400, 800, 1600, 3200, 5000]);
        assert!(delays[5..].iter().all(|delay| *delay == 5000));
        assert_eq!(Backoff::default().next_delay(0.0).as_millis(), 150);
    }
}
