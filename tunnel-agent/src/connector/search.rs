//! When to dial again after a dial has reached a server that another connector holds. Pure.

use std::time::Duration;

/// The search for a server that no other connector of the set holds. A load balancer decides which
/// server a dial reaches.
#[derive(Debug, Default)]
pub struct ReplicaSearch {
    tries: u32,
    is_over: bool,
}

impl ReplicaSearch {
    /// Returns the wait before the next dial, or `None` after three dials for each of the `members`,
    /// and at least ten. `random` is from 0 to 1.
    pub fn next(&mut self, members: usize, random: f64) -> Option<Duration> {
        let factor = 2_u32.checked_pow(self.tries).unwrap_or(u32::MAX);
        self.tries = self.tries.saturating_add(1);
        let tries_max = members.saturating_mul(TRIES_PER_MEMBER).max(TRIES_MIN);
        self.is_over = usize::try_from(self.tries).is_ok_and(|tries| tries >= tries_max);
        let wait = WAIT_MIN.saturating_mul(factor).min(WAIT_MAX);
        (!self.is_over).then(|| wait.mul_f64(1.0 + random * JITTER))
    }

    /// Returns whether [`ReplicaSearch::next`] has returned `None`.
    pub fn is_over(&self) -> bool {
        self.is_over
    }
}

/// Dials for each known server.
const TRIES_PER_MEMBER: usize = 3;
/// Fewest dials. Of the agents behind a load balancer that chooses one of two servers at random,
/// one in 1024 goes on with one session until the members change.
const TRIES_MIN: usize = 10;
/// First wait after a dial that reached a server of another connector. The wait doubles.
const WAIT_MIN: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Largest fraction by which the waits are extended.
const JITTER: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_minute_and_end_after_three_dials_for_each_member() {
        let mut search = ReplicaSearch::default();
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60] {
            let wait = search.next(4, 0.0);
            assert_eq!(wait, Some(Duration::from_secs(seconds)));
            assert!(!search.is_over());
        }
        assert_eq!(search.next(4, 0.0), None);
        assert!(search.is_over());
        let mut search = ReplicaSearch::default();
        let dials = std::iter::from_fn(|| search.next(2, 0.0)).count() + 1;
        assert_eq!(dials, TRIES_MIN);
        let late = ReplicaSearch::default().next(1, 1.0);
        assert_eq!(late, Some(Duration::from_millis(1100)));
    }
}
