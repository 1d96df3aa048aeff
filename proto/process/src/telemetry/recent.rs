//! The last lines of the log, in memory, for the verb `diag`.

use std::collections::VecDeque;

use parking_lot::Mutex;

/// Maximum number of lines. Half an hour of a busy server at level info.
const LINES_MAX: usize = 500;
/// Maximum size of all lines, as text. Lines at level debug are longer than others, and a refused
/// head may be part of one.
const BYTES_MAX: usize = 128 * 1024;

/// A process has one log, so it has one list of recent lines.
pub(super) static RECENT: RecentLines = RecentLines::new();

/// The last lines of a log. Empty until it is enabled.
#[derive(Debug)]
pub(super) struct RecentLines(Mutex<LineQueue>);

#[derive(Debug)]
struct LineQueue {
    is_enabled: bool,
    lines: VecDeque<String>,
    bytes: usize,
}

/// Retains the last lines of the log in memory from here on: at most 500 lines and 128 KiB, without
/// the access log, whose lines name callers and would evict all others.
pub fn enable_recent_lines() {
    RECENT.enable();
}

/// Returns the lines that are retained, oldest first, also those that the output did not accept.
pub fn recent_lines() -> Vec<String> {
    RECENT.read()
}

impl RecentLines {
    const fn new() -> Self {
        Self(Mutex::new(LineQueue {
            is_enabled: false,
            lines: VecDeque::new(),
            bytes: 0,
        }))
    }

    fn enable(&self) {
        self.0.lock().is_enabled = true;
    }

    fn read(&self) -> Vec<String> {
        self.0.lock().lines.iter().cloned().collect()
    }

    /// Adds a complete line and evicts the oldest lines.
    pub(super) fn push(&self, line: &[u8]) {
        let mut queue = self.0.lock();
        if !queue.is_enabled {
            return;
        }
        let line = String::from_utf8_lossy(line).trim_end().to_owned();
        queue.bytes += line.len();
        queue.lines.push_back(line);
        while queue.lines.len() > LINES_MAX || queue.bytes > BYTES_MAX {
            let Some(evicted) = queue.lines.pop_front() else {
                return;
            };
            queue.bytes -= evicted.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_lines_are_retained_within_both_bounds() {
        let recent = RecentLines::new();
        recent.push(b"before\n");
        assert!(recent.read().is_empty(), "not enabled");
        recent.enable();
        for number in 0..LINES_MAX + 7 {
            recent.push(format!("line {number}\n").as_bytes());
        }
        let lines = recent.read();
        assert_eq!(lines.len(), LINES_MAX);
        assert_eq!(lines.first().map(String::as_str), Some("line 7"));
        let long = "x".repeat(BYTES_MAX / 4);
        for _ in 0..6 {
            recent.push(long.as_bytes());
        }
        assert_eq!(recent.read(), [long.as_str(); 4]);
        recent.push("x".repeat(BYTES_MAX + 1).as_bytes());
        assert!(recent.read().is_empty(), "a line longer than the bound");
        recent.push(b"after\n");
        assert_eq!(recent.read(), ["after"]);
    }
}
