//! Thins log lines about repeated failures: the first line of each kind, and one line every 30 s.

use std::time::Duration;

use tokio::time::Instant;

/// Selects the failures to log: the first of each kind, and one every 30 s. Kinds are logged again
/// after 30 s without a failure. `K` is the kind of a failure. A success is no reason to, since
/// successes and failures may alternate.
#[derive(Debug)]
pub struct LogThrottle<K> {
    logged: Vec<K>,
    last_failure: Option<Instant>,
    last: Option<Instant>,
    suppressed: u32,
}

impl<K> Default for LogThrottle<K> {
    fn default() -> Self {
        Self {
            logged: Vec::new(),
            last_failure: None,
            last: None,
            suppressed: 0,
        }
    }
}

impl<K: PartialEq> LogThrottle<K> {
    /// Returns how many failures were suppressed since the last line, or `None` to suppress this
    /// one.
    pub fn failed(&mut self, kind: K, now: Instant) -> Option<u32> {
        let last_failure = self.last_failure.replace(now);
        if last_failure.is_some_and(|last| now.duration_since(last) >= REPEAT_INTERVAL) {
            self.logged.clear();
        }
        let is_new = !self.logged.contains(&kind) && self.logged.len() < KINDS_MAX;
        let is_time = self
            .last
            .is_none_or(|last| now.duration_since(last) >= REPEAT_INTERVAL);
        if !is_new && !is_time {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        if is_new {
            self.logged.push(kind);
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Time between two lines with the same content.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of kinds that get a line of their own in one outage, since a peer may invent
/// kinds.
const KINDS_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failures_get_one_line_in_30_s_and_new_ones_their_own() {
        let mut throttle = LogThrottle::default();
        let start = Instant::now();
        let mut at = |seconds, kind| throttle.failed(kind, start + Duration::from_secs(seconds));
        assert_eq!(at(0, "refused"), Some(0));
        assert_eq!(at(1, "refused"), None);
        assert_eq!(at(29, "refused"), None);
        assert_eq!(at(29, "name in use"), Some(2));
        assert_eq!(at(30, "refused"), None);
        assert_eq!(at(58, "name in use"), None);
        assert_eq!(at(59, "refused"), Some(2));
        let lines = (60..660).filter(|second| at(*second, "refused").is_some());
        assert_eq!(lines.count(), 20);
    }

    #[test]
    fn kind_is_logged_again_after_30_s_without_a_failure() {
        let mut throttle = LogThrottle::default();
        let start = Instant::now();
        let mut at = |seconds, kind| throttle.failed(kind, start + Duration::from_secs(seconds));
        assert_eq!(at(0, "refused"), Some(0));
        assert_eq!(at(1, "name in use"), Some(0));
        assert_eq!(at(30, "name in use"), None);
        assert_eq!(at(61, "refused"), Some(1));
        assert_eq!(at(62, "name in use"), Some(0));
        assert_eq!(at(63, "name in use"), None);
    }

    #[test]
    fn invented_kinds_do_not_make_more_lines_for_ever() {
        let mut throttle = LogThrottle::default();
        let now = Instant::now();
        let lines = (1000..2000).filter(|kind| throttle.failed(*kind, now).is_some());
        assert_eq!(lines.count(), KINDS_MAX);
    }
}
