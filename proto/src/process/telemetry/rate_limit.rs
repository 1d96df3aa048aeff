//! Rate limits for log lines that others can cause at will: a few lines a minute are written, and
//! one line reports how many more there were.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::dropped::DROPPED;

/// Lines of one kind that are written in one [`WINDOW`].
const LINES_PER_WINDOW: u32 = 10;
/// Length of a window. A window begins with the first line of a kind.
const WINDOW: Duration = Duration::from_secs(60);

/// Limits whose window is open and used up. Their counts are reported when the window ends. The
/// number of entries is bounded by the number of statics in the code.
static EXHAUSTED: Mutex<Vec<&'static LogRateLimit>> = Mutex::new(Vec::new());

/// A limit of ten log lines of one kind per minute. When the minute is over, one WARN line reports
/// how many more there were, if [`start`](super::start) was called. Use it for lines that a peer
/// can cause without a credential, or as often as it likes.
#[derive(Debug)]
pub struct LogRateLimit {
    kind: &'static str,
    window: Mutex<Window>,
}

#[derive(Debug)]
struct Window {
    started: Option<Instant>,
    lines: u32,
    /// Number of suppressed lines that are not reported yet.
    suppressed: u64,
    is_listed: bool,
}

impl LogRateLimit {
    /// Creates a limit. `kind` names the lines in the report of suppressed lines.
    #[must_use]
    pub const fn new(kind: &'static str) -> Self {
        Self {
            kind,
            window: Mutex::new(Window {
                started: None,
                lines: 0,
                suppressed: 0,
                is_listed: false,
            }),
        }
    }

    /// Returns whether a line may be written. If not, the line is counted.
    #[must_use]
    pub fn admit(&'static self) -> bool {
        let (is_admitted, is_new) = {
            let mut window = self.window.lock();
            let is_admitted = window.admit(Instant::now());
            // Register the limit before the line is logged, because the line wakes the thread that
            // reports.
            let is_new =
                window.lines == LINES_PER_WINDOW && !std::mem::replace(&mut window.is_listed, true);
            (is_admitted, is_new)
        };
        if is_new {
            EXHAUSTED.lock().push(self);
        }
        if !is_admitted {
            DROPPED.add_limited();
        }
        is_admitted
    }
}

impl Window {
    fn admit(&mut self, now: Instant) -> bool {
        if self.is_over(now) {
            self.started = Some(now);
            self.lines = 0;
        }
        if self.lines < LINES_PER_WINDOW {
            self.lines += 1;
            return true;
        }
        self.suppressed += 1;
        false
    }

    fn is_over(&self, now: Instant) -> bool {
        self.started
            .is_none_or(|started| now.saturating_duration_since(started) >= WINDOW)
    }

    /// Returns the number of suppressed lines if the window is over.
    fn take(&mut self, now: Instant, is_last: bool) -> Option<u64> {
        if !is_last && !self.is_over(now) {
            return None;
        }
        self.is_listed = false;
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Logs how many lines of each kind were suppressed in windows that are over; with `is_last`, in
/// every window. Returns whether a window is still open.
pub(super) fn report(is_last: bool) -> bool {
    let now = Instant::now();
    let mut ended = Vec::new();
    let is_open = {
        let mut exhausted = EXHAUSTED.lock();
        exhausted.retain(|limit| match limit.window.lock().take(now, is_last) {
            Some(suppressed) => {
                ended.push((limit.kind, suppressed));
                false
            }
            None => true,
        });
        !exhausted.is_empty()
    };
    for (kind, suppressed) in ended.into_iter().filter(|(_, suppressed)| *suppressed > 0) {
        warn!(kind, suppressed, "{kind}: and {suppressed} more");
    }
    is_open
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_a_minute_are_admitted_and_the_rest_is_counted() {
        let (mut window, start) = (LogRateLimit::new("x").window.into_inner(), Instant::now());
        let at = |second| start + Duration::from_secs(second);
        let admitted = (0..1000).filter(|_| window.admit(at(0)));
        assert_eq!(admitted.count(), 10);
        assert_eq!(window.take(at(59), false), None, "the minute is not over");
        assert_eq!(window.take(at(60), false), Some(990));
        assert_eq!(window.take(at(60), false), Some(0), "once");
        let admitted = (0..120).filter(|second| window.admit(at(60 + second)));
        assert_eq!(admitted.count(), 20);
        // The end of the process waits for none.
        assert_eq!(window.take(at(61), true), Some(100));
    }

    #[test]
    fn limit_is_listed_before_its_first_line_is_left_out_and_only_once() {
        static LIMIT: LogRateLimit = LogRateLimit::new("of a test");
        let listed = || {
            let exhausted = EXHAUSTED.lock();
            let of_test = exhausted.iter().filter(|limit| limit.kind == LIMIT.kind);
            of_test.count()
        };
        for _ in 0..LINES_PER_WINDOW - 1 {
            assert!(LIMIT.admit());
        }
        assert_eq!(listed(), 0);
        assert!(LIMIT.admit());
        assert_eq!(listed(), 1);
        assert!(!LIMIT.admit());
        assert_eq!(listed(), 1);
    }
}
