//! Rate limits for log lines that others can cause at will: a few lines are written, and one line
//! reports how many more there were. [`LogRateLimit`] limits the lines of one place in the code,
//! [`SourceBudget`](super::SourceBudget) those that one source causes.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

use super::dropped::DROPPED;

/// The quota of a [`LogRateLimit`].
const QUOTA: Quota = Quota {
    lines: 10,
    length: Duration::from_secs(60),
};

/// Limits with a window that is open and used up. Their counts are reported when the window ends.
/// The number of entries is bounded by the number of statics in the code.
static USED_UP: Mutex<Vec<&'static dyn Suppressing>> = Mutex::new(Vec::new());

/// A limit that suppresses lines.
pub(super) trait Suppressing: fmt::Debug + Sync {
    /// Returns the suppressed lines of windows that are over; with `is_last`, of every window.
    fn take(&self, now: Instant, is_last: bool) -> (Vec<Suppressed>, WindowState);
}

/// Whether a limit has to be asked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WindowState {
    Open,
    Over,
}

/// Lines that were not written.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Suppressed {
    pub(super) kind: &'static str,
    /// What caused the lines, if it is known.
    pub(super) source: Option<String>,
    pub(super) lines: u64,
}

/// Registers a limit whose window is used up. Call this before the last line of the window is
/// logged, because that line wakes the thread that reports.
pub(super) fn list(limit: &'static dyn Suppressing) {
    USED_UP.lock().push(limit);
}

/// A limit of ten log lines of one kind per minute. When the minute is over, one WARN line reports
/// how many more there were, if [`start`](super::start) was called. Use it for lines that a peer
/// can cause without a credential, or as often as it likes.
#[derive(Debug)]
pub struct LogRateLimit {
    kind: &'static str,
    state: Mutex<LimitState>,
}

#[derive(Debug)]
struct LimitState {
    window: Window,
    is_listed: bool,
}

impl LogRateLimit {
    /// Creates a limit. `kind` names the lines in the report of suppressed lines.
    pub const fn new(kind: &'static str) -> Self {
        Self {
            kind,
            state: Mutex::new(LimitState {
                window: Window::new(QUOTA),
                is_listed: false,
            }),
        }
    }

    /// Returns whether a line may be written. If not, the line is counted.
    pub fn admit(&'static self) -> bool {
        let (is_admitted, is_new) = {
            let mut state = self.state.lock();
            let is_admitted = state.window.admit(Instant::now());
            let is_new =
                state.window.is_used_up() && !std::mem::replace(&mut state.is_listed, true);
            (is_admitted, is_new)
        };
        if is_new {
            list(self);
        }
        if !is_admitted {
            DROPPED.add_limited();
        }
        is_admitted
    }
}

impl Suppressing for LogRateLimit {
    fn take(&self, now: Instant, is_last: bool) -> (Vec<Suppressed>, WindowState) {
        let mut state = self.state.lock();
        let Some(lines) = state.window.take(now, is_last) else {
            return (Vec::new(), WindowState::Open);
        };
        state.is_listed = false;
        let suppressed = Suppressed {
            kind: self.kind,
            source: None,
            lines,
        };
        (vec![suppressed], WindowState::Over)
    }
}

/// The lines that are written in one window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Quota {
    pub(super) lines: u32,
    /// Length of a window. A window begins with a line.
    pub(super) length: Duration,
}

/// The lines of one window.
#[derive(Debug)]
pub(super) struct Window {
    quota: Quota,
    started: Option<Instant>,
    lines: u32,
    /// Number of suppressed lines that are not reported yet.
    suppressed: u64,
}

impl Window {
    pub(super) const fn new(quota: Quota) -> Self {
        Self {
            quota,
            started: None,
            lines: 0,
            suppressed: 0,
        }
    }

    pub(super) fn admit(&mut self, now: Instant) -> bool {
        if self.is_over(now) {
            self.started = Some(now);
            self.lines = 0;
        }
        if self.lines < self.quota.lines {
            self.lines += 1;
            return true;
        }
        self.suppress(1);
        false
    }

    /// Counts lines that another limit suppressed.
    pub(super) fn suppress(&mut self, lines: u64) {
        self.suppressed = self.suppressed.saturating_add(lines);
    }

    pub(super) fn suppressed(&self) -> u64 {
        self.suppressed
    }

    pub(super) fn is_used_up(&self) -> bool {
        self.lines >= self.quota.lines
    }

    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.started
            .is_none_or(|started| now.saturating_duration_since(started) >= self.quota.length)
    }

    /// Returns the number of suppressed lines if the window is over.
    pub(super) fn take(&mut self, now: Instant, is_last: bool) -> Option<u64> {
        let is_due = is_last || self.is_over(now);
        is_due.then(|| std::mem::take(&mut self.suppressed))
    }
}

impl Suppressed {
    /// Logs how many lines were not written.
    pub(super) fn report(&self) {
        let (kind, suppressed) = (self.kind, self.lines);
        match &self.source {
            Some(source) => warn!(kind, source, suppressed, "{kind}: and {suppressed} more"),
            None => warn!(kind, suppressed, "{kind}: and {suppressed} more"),
        }
    }
}

/// Logs how many lines of each kind were suppressed in windows that are over; with `is_last`, in
/// every window. Returns whether a window is still open.
pub(super) fn report(is_last: bool) -> bool {
    let now = Instant::now();
    let mut ended = Vec::new();
    let is_open = {
        let mut used_up = USED_UP.lock();
        used_up.retain(|limit| {
            let (suppressed, state) = limit.take(now, is_last);
            ended.extend(suppressed);
            state == WindowState::Open
        });
        !used_up.is_empty()
    };
    for suppressed in ended.iter().filter(|ended| ended.lines > 0) {
        suppressed.report();
    }
    is_open
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_a_minute_are_admitted_and_the_rest_is_counted() {
        let (mut window, start) = (Window::new(QUOTA), Instant::now());
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
            let used_up = USED_UP.lock();
            let of_test = used_up
                .iter()
                .filter(|limit| std::ptr::addr_eq(**limit, &raw const LIMIT));
            of_test.count()
        };
        for _ in 0..QUOTA.lines - 1 {
            assert!(LIMIT.admit());
        }
        assert_eq!(listed(), 0);
        assert!(LIMIT.admit());
        assert_eq!(listed(), 1);
        assert!(!LIMIT.admit());
        assert_eq!(listed(), 1);
    }
}
