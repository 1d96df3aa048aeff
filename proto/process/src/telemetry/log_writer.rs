//! The log output: a bounded queue, and one thread that writes. Logging a line never waits for the
//! output.
//!
//! Each request logs an access log line. These lines wait for a short time and are written in
//! batches. Any other line is written at once, after the lines that are queued. When the queue is
//! full, lines are dropped and counted, access log lines first.
//!
//! While requests go on, time wakes the thread and no line does: a system call for each line would
//! be a large part of what a request costs.

use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::dropped::{DropCounters, DroppedCounts};

/// Time that an access log line waits for others, at most. Readers of a log do not notice the delay,
/// and any number of requests is 20 writes a second. A process that is killed loses these lines.
const BATCH_DELAY: Duration = Duration::from_millis(50);
/// Capacity that a queue retains between two writes, at least. The memory of a burst is released.
const RETAINED_BYTES: usize = 128 * 1024;
/// Time between attempts on a failed output, and between checks of rate limit windows.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before the next attempt on a non-blocking output that is full.
const WOULD_BLOCK_DELAY: Duration = Duration::from_millis(10);
/// Time that a task that panicked waits until its line is written. A subsequent abort would lose
/// the line.
const PANIC_WAIT: Duration = Duration::from_millis(100);
/// Time that the end of the process waits for a blocked output.
pub(super) const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// The `target` of access log events.
pub const ACCESS: &str = "access";

/// The kind of a line. The kind decides which lines are dropped first when the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LineKind {
    Access,
    /// An audit event, alone in its output.
    Audit,
    /// Any line of no other kind.
    Other,
    Panic,
    /// The notice that reports the number of dropped lines. The writer thread logs it, and never a
    /// second one before the first is written.
    Notice,
}

impl LineKind {
    /// Returns the number of queued bytes above which a line of this kind is dropped.
    fn queue_limit(self) -> usize {
        match self {
            Self::Access => 256 * 1024,
            Self::Audit => 4 * 1024 * 1024,
            Self::Other => 448 * 1024,
            Self::Panic => 512 * 1024,
            Self::Notice => usize::MAX,
        }
    }

    /// Returns the number of queued bytes from which on a line of this kind is written without further
    /// delay. The queue must not fill while the output could accept the lines, and each write takes the
    /// processor from a thread that serves requests.
    fn batch_bytes(self) -> usize {
        match self {
            Self::Access => 64 * 1024,
            Self::Audit => 256 * 1024,
            Self::Other | Self::Panic | Self::Notice => 0,
        }
    }
}

/// The queue of lines for the output `W`, in order.
#[derive(Debug)]
pub(super) struct BatchWriter<W> {
    /// The writer thread holds this lock while it writes.
    out: Mutex<LineOutput<W>>,
    queue: Mutex<Queue>,
    /// Wakes the writer thread.
    changed: Condvar,
    /// Wakes threads that wait for the writer thread.
    progress: Condvar,
    dropped: &'static DropCounters,
    /// The error of the last write, if it failed.
    error: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct Queue {
    lines: Batch,
    /// Whether the queued lines are written without further delay.
    is_due: bool,
    /// Whether the writer thread waits for a line to wake it.
    is_parked: bool,
    /// Whether the last batch had several lines, so that the thread waits for time and not for a
    /// line.
    is_steady: bool,
    /// `queued` counts all lines that were ever queued. `done` counts those that were written or
    /// dropped.
    queued: u64,
    done: u64,
    /// Set when a panic waited until its timeout. No other panic waits before the output has
    /// accepted something.
    stalled: bool,
    closed: bool,
    /// Set when the writer thread has ended. The thread that logs a line writes the line itself.
    finished: bool,
}

/// Complete lines, and the end offset of each.
#[derive(Debug, Default)]
struct Batch {
    bytes: Vec<u8>,
    lines: Vec<(usize, LineKind)>,
}

#[derive(Debug)]
struct LineOutput<W> {
    out: W,
    /// Set when the output failed inside a line. The next line must not continue that line.
    is_mid_line: bool,
}

impl Queue {
    /// Queues a line. Returns whether the writer thread must be woken.
    fn push(&mut self, line: &[u8], kind: LineKind) -> bool {
        self.lines.push(line, kind);
        self.queued += 1;
        let is_due = self.lines.bytes.len() >= kind.batch_bytes();
        let becomes_due = is_due && !std::mem::replace(&mut self.is_due, true);
        std::mem::take(&mut self.is_parked) || becomes_due
    }
}

impl Batch {
    fn push(&mut self, line: &[u8], kind: LineKind) {
        self.bytes.extend_from_slice(line);
        self.lines.push((self.bytes.len(), kind));
    }

    fn clear(&mut self) {
        let last = self.lines.last();
        let retained = last.map_or(0, |(_, kind)| 2 * kind.batch_bytes());
        let retained = retained.max(RETAINED_BYTES);
        self.bytes.clear();
        self.bytes.shrink_to(retained);
        self.lines.clear();
        self.lines.shrink_to(retained / 64);
    }
}

impl<W: Write + Send + 'static> BatchWriter<W> {
    pub(super) fn new(out: W, dropped: &'static DropCounters) -> Arc<Self> {
        Arc::new(Self {
            out: Mutex::new(LineOutput {
                out,
                is_mid_line: false,
            }),
            queue: Mutex::default(),
            changed: Condvar::new(),
            progress: Condvar::new(),
            dropped,
            error: Mutex::default(),
        })
    }

    /// Returns the error of the last write, if it failed.
    pub(super) fn error(&self) -> Option<String> {
        self.error.lock().clone()
    }

    /// Queues a complete line, or drops and counts it. Only a panic waits, for a limited time,
    /// until its line is written.
    pub(super) fn push(&self, line: &[u8], kind: LineKind) {
        let mut queue = self.queue.lock();
        if queue.finished {
            drop(queue);
            return self.write_unqueued(line, kind);
        }
        let waiting = queue.lines.bytes.len();
        if waiting + line.len() > kind.queue_limit() {
            drop(queue);
            return self.count_dropped(kind);
        }
        if queue.push(line, kind) {
            self.changed.notify_one();
        }
        if kind == LineKind::Panic && !queue.stalled {
            let last = queue.queued;
            self.progress
                .wait_while_for(&mut queue, |queue| queue.done < last, PANIC_WAIT);
            queue.stalled |= queue.done < last;
        }
    }

    /// Writes a line after the writer thread has ended. Drops the line if another thread holds the
    /// output.
    fn write_unqueued(&self, line: &[u8], kind: LineKind) {
        let Some(mut out) = self.out.try_lock() else {
            return self.count_dropped(kind);
        };
        let mut batch = Batch::default();
        batch.push(line, kind);
        out.write(&batch, |kind| self.count_dropped(kind));
    }

    fn count_dropped(&self, kind: LineKind) {
        match kind {
            LineKind::Access => self.dropped.add_access(),
            LineKind::Audit | LineKind::Other | LineKind::Panic => self.dropped.add_other(),
            // The next notice includes the counts of this one.
            LineKind::Notice => {}
        }
    }

    /// Waits until there is something to write, or, with `is_due`, at most [`RETRY_INTERVAL`].
    /// While requests go on, waits for time alone. Returns false when the queue is closed.
    fn wait(&self, is_due: bool) -> bool {
        let mut queue = self.queue.lock();
        if !queue.is_steady && queue.lines.bytes.is_empty() {
            queue.is_parked = true;
            let is_idle = |queue: &mut Queue| queue.is_parked && !queue.closed;
            if is_due {
                self.changed
                    .wait_while_for(&mut queue, is_idle, RETRY_INTERVAL);
            } else {
                self.changed.wait_while(&mut queue, is_idle);
            }
            queue.is_parked = false;
        }
        if queue.is_steady || !queue.lines.bytes.is_empty() {
            let is_batching = |queue: &mut Queue| !queue.is_due && !queue.closed;
            self.changed
                .wait_while_for(&mut queue, is_batching, BATCH_DELAY);
        }
        queue.is_steady = queue.lines.lines.len() > 1;
        !queue.closed
    }

    /// Writes all queued lines. `batch` is a reusable buffer.
    fn flush(&self, batch: &mut Batch) -> WriteOutcome {
        {
            let mut queue = self.queue.lock();
            std::mem::swap(&mut queue.lines, batch);
            queue.is_due = false;
        }
        if batch.lines.is_empty() {
            return WriteOutcome::default();
        }
        let written = self
            .out
            .lock()
            .write(batch, |kind| self.count_dropped(kind));
        self.error.lock().clone_from(&written.error);
        let mut queue = self.queue.lock();
        queue.done += batch.lines.len() as u64;
        queue.stalled &= !written.some;
        drop(queue);
        self.progress.notify_all();
        batch.clear();
        written
    }
}

/// The result of writing a batch.
#[derive(Debug, Clone, Default)]
struct WriteOutcome {
    /// Whether the output accepted a part of the batch.
    some: bool,
    /// The error of the output at the last line.
    error: Option<String>,
    /// Whether the output failed at the notice.
    notice_dropped: bool,
}

impl<W: Write> LineOutput<W> {
    /// Writes a batch. Calls `count_dropped` for each line at which the output fails, and continues
    /// with the next line.
    fn write(&mut self, batch: &Batch, count_dropped: impl Fn(LineKind)) -> WriteOutcome {
        let (mut from, mut result) = (0, WriteOutcome::default());
        while let Some(rest) = batch.bytes.get(from..).filter(|rest| !rest.is_empty()) {
            if self.is_mid_line && write_all(&mut self.out, b"\n").is_ok() {
                self.is_mid_line = false;
            }
            let Err((count, error)) = write_all(&mut self.out, rest) else {
                (result.some, result.error) = (true, None);
                break;
            };
            (result.some, result.error) = (result.some || count > 0, Some(error.to_string()));
            from += count;
            let failed = batch.lines.partition_point(|(end, _)| *end <= from);
            let before = failed.checked_sub(1).and_then(|last| batch.lines.get(last));
            self.is_mid_line |= from > before.map_or(0, |(end, _)| *end);
            let Some((end, kind)) = batch.lines.get(failed) else {
                break;
            };
            result.notice_dropped |= *kind == LineKind::Notice;
            count_dropped(*kind);
            from = *end;
        }
        let _unbuffered = self.out.flush();
        result
    }
}

/// The writer thread. Dropping the handle writes the last lines. After that, the thread that logs a
/// line writes the line itself. A blocked output is abandoned after [`FLUSH_TIMEOUT`].
#[derive(Debug)]
pub(super) struct Flusher<W: Write + Send + 'static> {
    writer: Arc<BatchWriter<W>>,
    thread: Option<JoinHandle<()>>,
}

/// Logs events of the logging itself between writes.
pub(super) trait LogReporter: Send + 'static {
    /// Logs how many lines were dropped, as [`LineKind::Notice`].
    fn dropped(&mut self, dropped: DroppedCounts);
    /// Logs what is due, or everything with `is_last`. Returns whether something will be due later.
    fn report_due(&mut self, is_last: bool) -> bool;
}

impl<W: Write + Send + 'static> Flusher<W> {
    /// Starts the writer thread.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub(super) fn start(
        writer: Arc<BatchWriter<W>>,
        reporter: impl LogReporter,
    ) -> io::Result<Self> {
        let of_thread = writer.clone();
        let thread = std::thread::Builder::new()
            .name("log".to_owned())
            .spawn(move || run(&of_thread, reporter))?;
        Ok(Self {
            writer,
            thread: Some(thread),
        })
    }
}

/// A guard that marks the writer thread as ended when dropped, also after a panic. From then on,
/// the threads that log lines write them.
struct FinishGuard<'a, W: Write + Send + 'static>(&'a BatchWriter<W>);

impl<W: Write + Send + 'static> Drop for FinishGuard<'_, W> {
    fn drop(&mut self) {
        let lines = {
            let mut queue = self.0.queue.lock();
            queue.finished = true;
            std::mem::take(&mut queue.lines)
        };
        for (_, kind) in lines.lines {
            self.0.count_dropped(kind);
        }
        self.0.progress.notify_all();
    }
}

fn run<W: Write + Send + 'static>(writer: &BatchWriter<W>, mut reporter: impl LogReporter) {
    let _guard = FinishGuard(writer);
    let mut batch = Batch::default();
    let mut reported = DroppedCounts::default();
    let mut is_due = reporter.report_due(false);
    loop {
        let is_open = writer.wait(is_due);
        let is_failing = writer.flush(&mut batch).error.is_some();
        is_due = reporter.report_due(!is_open);
        let snapshot = writer.dropped.snapshot();
        let dropped = snapshot.since(reported);
        // While lines fail, the notice would fail, too. Without other lines, the notice tests the
        // output again.
        let should_report = !dropped.is_empty() && !is_failing;
        if should_report {
            reporter.dropped(dropped);
        }
        let written = writer.flush(&mut batch);
        if should_report && !written.notice_dropped {
            reported = snapshot;
        }
        is_due |= writer.dropped.snapshot() != reported;
        let mut queue = writer.queue.lock();
        if !is_open && queue.lines.bytes.is_empty() {
            queue.finished = true;
            return;
        }
    }
}

impl<W: Write + Send + 'static> Drop for Flusher<W> {
    fn drop(&mut self) {
        let mut queue = self.writer.queue.lock();
        queue.closed = true;
        self.writer.changed.notify_one();
        self.writer
            .progress
            .wait_while_for(&mut queue, |queue| !queue.finished, FLUSH_TIMEOUT);
        let finished = queue.finished;
        drop(queue);
        if let Some(thread) = self.thread.take().filter(|_| finished) {
            let _panicked = thread.join();
        }
    }
}

/// Writes all of `data`. If the output fails, returns how many bytes were written, and the error.
fn write_all(out: &mut impl Write, data: &[u8]) -> Result<(), (usize, io::Error)> {
    let mut written = 0;
    while let Some(rest) = data.get(written..).filter(|rest| !rest.is_empty()) {
        match out.write(rest) {
            Ok(0) => return Err((written, io::ErrorKind::WriteZero.into())),
            Ok(count) => written += count,
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => std::thread::park_timeout(WOULD_BLOCK_DELAY),
                _ => return Err((written, error)),
            },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
