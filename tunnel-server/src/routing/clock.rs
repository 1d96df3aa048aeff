//! Clocks of other hosts, as this server last read them. The wall clock of this host decides what is
//! valid, so a difference is a condition. Differences are judged, never used: no time of another host
//! replaces this host's.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

/// The last reading of the clock of another host.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClockReading {
    theirs: SystemTime,
    read: Instant,
}

impl ClockReading {
    /// Creates a reading of a clock that shows `theirs` now.
    pub(crate) fn new(theirs: SystemTime) -> Self {
        Self {
            theirs,
            read: Instant::now(),
        }
    }

    /// Returns the time since the other clock was read.
    pub(crate) fn age(self, now: Instant) -> Duration {
        now.saturating_duration_since(self.read)
    }

    /// Returns what the other clock shows at `now`, or `None` if that is not a time.
    pub(crate) fn time(self, now: Instant) -> Option<SystemTime> {
        let since = now.saturating_duration_since(self.read);
        self.theirs.checked_add(since)
    }

    /// Returns the seconds by which a clock that shows `own` at `now` is ahead of the other one.
    pub(crate) fn seconds_ahead(self, own: SystemTime, now: Instant) -> i64 {
        let Some(theirs) = self.time(now) else {
            return i64::MIN;
        };
        let seconds = |apart: Duration| i64::try_from(apart.as_secs()).unwrap_or(i64::MAX);
        match own.duration_since(theirs) {
            Ok(ahead) => seconds(ahead),
            Err(behind) => -seconds(behind.duration()),
        }
    }
}

/// Returns what an operator should fix if this server's clock is too far ahead of the clock of
/// `whose`, or behind it.
pub(crate) fn difference(whose: &str, seconds_ahead: i64) -> Option<String> {
    if !is_apart(seconds_ahead) {
        return None;
    }
    let apart = Duration::from_secs(seconds_ahead.unsigned_abs());
    let apart = humantime::format_duration(apart);
    let direction = if seconds_ahead > 0 {
        "ahead of"
    } else {
        "behind"
    };
    Some(format!(
        "the clock of this server is {apart} {direction} that of {whose}; synchronize both clocks"
    ))
}

/// Returns whether clocks that are this many seconds apart are a condition.
pub(crate) fn is_apart(seconds_ahead: i64) -> bool {
    seconds_ahead.unsigned_abs() > APART_MAX.as_secs()
}

/// Largest difference between two clocks that is no condition. Certificates are backdated by ten
/// times as much.
const APART_MAX: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn clock_that_is_read_goes_on_by_the_monotonic_clock() {
        let epoch = SystemTime::UNIX_EPOCH;
        let at = |seconds| epoch + Duration::from_secs(seconds);
        let reading = ClockReading::new(at(1000));
        let later = Instant::now() + Duration::from_secs(500);
        for (own, ahead) in [(1500, 0), (1590, 90), (1410, -90), (0, -1500)] {
            assert_eq!(reading.seconds_ahead(at(own), later), ahead);
        }
        // A clock that is set right is no difference, without another reading.
        assert_eq!(reading.seconds_ahead(at(1600), later), 100);
        assert_eq!(reading.seconds_ahead(at(1500), later), 0);
    }

    #[test]
    fn difference_names_the_clock_the_direction_and_the_amount() {
        assert_eq!(difference("server b", 30), None);
        assert_eq!(difference("server b", -30), None);
        let text = |ahead| difference("server b", ahead).unwrap();
        assert!(text(31).contains("is 31s ahead of that of server b"));
        assert!(text(-90).contains("is 1m 30s behind that of server b"));
        assert!(text(40 * 86_400).contains("days"), "{}", text(40 * 86_400));
    }
}
