//! The monitor of a connection to another server: whether the server answers.

use std::time::Duration;

use tokio::time::{Instant, Interval, MissedTickBehavior, interval};

/// Watches whether anything arrives on a connection. Idle servers exchange PING and its answer, so
/// a connection without any arrival is dead, however busy it is.
#[derive(Debug)]
pub(super) struct LinkMonitor {
    received: u64,
    last_arrival: Instant,
    last_check: Instant,
}

/// What to do after a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkCheck {
    Live,
    /// The caller must send a probe.
    Probe,
    /// A probe has no answer. The caller must send another one.
    Suspect,
    /// The caller must close the session.
    Dead,
}

impl LinkMonitor {
    pub(super) fn new(received: u64, now: Instant) -> Self {
        Self {
            received,
            last_arrival: now,
            last_check: now,
        }
    }

    /// Checks the number of received units at `now`. Call it at each tick of [`check_interval`].
    pub(super) fn check(&mut self, received: u64, now: Instant) -> LinkCheck {
        let since_check = now.saturating_duration_since(self.last_check);
        self.last_check = now;
        // A stopped process (SIGSTOP, a suspended machine) receives nothing in the meantime.
        if received != self.received || since_check > PAUSE {
            self.received = received;
            self.last_arrival = now;
            return LinkCheck::Live;
        }
        let silence = now.saturating_duration_since(self.last_arrival);
        if silence >= DEAD_AFTER {
            LinkCheck::Dead
        } else if silence >= SUSPECT_AFTER {
            LinkCheck::Suspect
        } else if silence >= PROBE_AFTER {
            LinkCheck::Probe
        } else {
            LinkCheck::Live
        }
    }
}

/// Returns the ticks at which a connection is checked.
pub(super) fn check_interval() -> Interval {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Interval of the checks of a connection. An idle connection wakes each end less than once a
/// second: for the check, and for a probe or its answer at every second check.
const CHECK_INTERVAL: Duration = Duration::from_millis(2500);
/// Time between two checks that indicates a stopped process.
const PAUSE: Duration = Duration::from_millis(5500);
/// Silence after which a probe is sent at each check. Silence begins at the first check after the
/// last arrival, so the limits are exceeded by up to [`CHECK_INTERVAL`].
const PROBE_AFTER: Duration = CHECK_INTERVAL;
/// Silence after which new streams prefer other servers: one probe has had no answer for the time
/// between two checks.
const SUSPECT_AFTER: Duration = Duration::from_secs(5);
/// Silence after which the connection is closed: three probes have no answer.
const DEAD_AFTER: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_connection_is_probed_and_dies_unless_something_arrives() {
        let start = Instant::now();
        let mut monitor = LinkMonitor::new(0, start);
        // Something has arrived before the third and before the sixth check.
        let mut checks = Vec::new();
        for (number, received) in (1..).zip([0, 0, 1, 1, 1, 2, 2, 2, 2, 2]) {
            let check = monitor.check(received, start + CHECK_INTERVAL * number);
            if check != LinkCheck::Live {
                checks.push((number, check));
            }
        }
        let expected = [
            (1, LinkCheck::Probe),
            (2, LinkCheck::Suspect),
            (4, LinkCheck::Probe),
            (5, LinkCheck::Suspect),
            (7, LinkCheck::Probe),
            (8, LinkCheck::Suspect),
            (9, LinkCheck::Suspect),
            (10, LinkCheck::Dead),
        ];
        assert_eq!(checks, expected);
    }

    #[test]
    fn pause_of_the_process_is_no_silence() {
        let start = Instant::now();
        let mut monitor = LinkMonitor::new(7, start);
        let later = start + Duration::from_secs(60);
        assert_eq!(monitor.check(7, later), LinkCheck::Live);
        let after = later + Duration::from_secs(1);
        assert_eq!(monitor.check(7, after), LinkCheck::Live);
    }
}
