//! The output of a process so far.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::sync::watch;

use crate::audit_events::AuditEvents;

/// The lines that a process has written to its standard output and error, in the order they were
/// read.
///
/// Clones are handles to one log.
#[derive(Debug, Clone)]
pub struct Log {
    lines: Arc<Mutex<LogLines>>,
    written: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct LogLines {
    buffered: VecDeque<String>,
    dropped: usize,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self {
            lines: Arc::default(),
            written: watch::Sender::new(0),
        }
    }

    /// Returns the buffered lines; of a long log only the last ones.
    pub fn lines(&self) -> Vec<String> {
        self.lock().buffered.iter().cloned().collect()
    }

    pub fn contains(&self, text: &str) -> bool {
        self.lock().buffered.iter().any(|line| line.contains(text))
    }

    /// Waits for a line for which `look` returns a value, starting with the first line.
    /// Cancel-safe.
    pub async fn find<T>(&self, mut look: impl FnMut(&str) -> Option<T>) -> T {
        let mut written = self.written.subscribe();
        let mut scanned = 0;
        loop {
            written.mark_unchanged();
            if let Some(found) = self.find_from(&mut scanned, &mut look) {
                return found;
            }
            if written.changed().await.is_err() {
                // Unreachable while `self` holds the sender.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Adds each line of `source` until its end, or passes it to `audit` if it is an audit event.
    pub(crate) async fn fill_from(self, source: impl AsyncRead + Unpin, audit: AuditEvents) {
        let mut source = BufReader::new(source);
        let mut line = Vec::new();
        while source
            .read_until(b'\n', &mut line)
            .await
            .is_ok_and(|n| n > 0)
        {
            let text = String::from_utf8_lossy(&line);
            if !audit.take(text.trim_end()) {
                self.push(text.trim_end().to_owned());
            }
            line.clear();
        }
    }

    fn push(&self, line: String) {
        let mut lines = self.lock();
        lines.buffered.push_back(line);
        if lines.buffered.len() > BUFFERED_LINES {
            lines.buffered.pop_front();
            lines.dropped += 1;
        }
        drop(lines);
        self.written.send_modify(|written| *written += 1);
    }

    fn find_from<T>(
        &self,
        scanned: &mut usize,
        look: &mut impl FnMut(&str) -> Option<T>,
    ) -> Option<T> {
        let lines = self.lock();
        let skipped = scanned.saturating_sub(lines.dropped);
        *scanned = lines.dropped + lines.buffered.len();
        lines
            .buffered
            .iter()
            .skip(skipped)
            .find_map(|line| look(line))
    }

    fn lock(&self) -> MutexGuard<'_, LogLines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Log {
    /// Formats the last lines, indented, for the message of a failed test.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.lock();
        let shown = lines.buffered.len().min(SHOWN_LINES);
        for line in lines.buffered.iter().skip(lines.buffered.len() - shown) {
            write!(f, "\n    {line}")?;
        }
        Ok(())
    }
}

/// Limit of the buffer, since a demo may run for days.
const BUFFERED_LINES: usize = 20_000;

const SHOWN_LINES: usize = 40;
