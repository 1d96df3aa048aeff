//! The streams of a session: their readers, and what they leave unread; and their writers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

use super::write_monitor::{WriteMonitor, WriterUsage};

/// A reader that reads nothing for this many samples (100 ms) is stalled.
const SAMPLES_TO_STALL: u32 = 2;
/// A stalled reader counts as stalled until it has read for this many samples. Otherwise a slow
/// reader would make the window oscillate.
const SAMPLES_TO_RECOVER: u32 = 20;
/// A stream that must end counts as ended for this many samples (1 s), so that no other one is chosen
/// in its place. A stream that has not ended by then still holds its bytes, and counts again.
const SAMPLES_OF_END: u32 = 20;

/// The session of a stream, as its monitor sees it.
pub(super) trait StreamOwner: Send + Sync + std::fmt::Debug {
    /// Counts bytes that a stream's reader has read.
    fn count_read(&self, bytes: u64);
    /// Counts bytes that a stream's writer has written.
    fn count_written(&self, bytes: u64);
    /// Sets the source of a stream that the peer has opened.
    fn set_source(&self, source: u64, activity: &StreamActivity);
    /// Returns whether a new stream of a source would be refused, because the source holds the most of
    /// what is short.
    fn refuses(&self, source: u64) -> bool;
    /// Records that a stream can hold no more bytes.
    fn finish_stream(&self);
}

/// The monitor of a stream: it counts what the stream's reader reads and its writer writes. Its end is
/// the end of the stream's part in flow control.
#[derive(Debug)]
pub struct ReadMonitor {
    session: Option<Arc<dyn StreamOwner>>,
    activity: Arc<StreamActivity>,
}

/// The activity of a stream's reader, and of its writer. It is shared with the samples, and with wakers
/// that are dropped under locks of a transport, so its end has no effect.
#[derive(Debug)]
pub(super) struct StreamActivity {
    /// Counts reads that returned data. The value only has to differ between two samples.
    reads: AtomicU32,
    /// Set while the reader waits for bytes and none have arrived, so the reader is not stalled.
    /// Cleared when a reader is woken, even if it does not read (because its own writer is
    /// blocked).
    is_waiting: AtomicBool,
    reader: AtomicWaker,
    /// Number of bytes received and not read, if the transport reports it.
    unread: AtomicU64,
    /// Set when the stream can hold no more unread bytes.
    is_finished: AtomicBool,
    /// Set when the stream is no longer written, either.
    is_ended: AtomicBool,
    /// Who caused the stream: streams of one source have the same number. 0 is unknown.
    source: AtomicU64,
    /// Set when the stream must end because its reader is stalled.
    must_end: AtomicBool,
    /// Woken when `must_end` is set.
    watcher: AtomicWaker,
    writer: WriteMonitor,
}

/// The transport does not report the number of unread bytes.
const UNREAD_UNKNOWN: u64 = u64::MAX;

impl Default for ReadMonitor {
    /// Creates the monitor of a stream that is always read.
    fn default() -> Self {
        Self::of_session(None)
    }
}

impl ReadMonitor {
    pub(super) fn of_session(session: Option<Arc<dyn StreamOwner>>) -> Self {
        let is_excluded = session.is_none();
        let activity = StreamActivity {
            reads: AtomicU32::new(0),
            // No reader is expected before the first read: the target is being dialed, or the reply
            // is pending.
            is_waiting: AtomicBool::new(true),
            reader: AtomicWaker::new(),
            unread: AtomicU64::new(UNREAD_UNKNOWN),
            is_finished: AtomicBool::new(is_excluded),
            is_ended: AtomicBool::new(is_excluded),
            source: AtomicU64::new(0),
            must_end: AtomicBool::new(false),
            watcher: AtomicWaker::new(),
            writer: WriteMonitor::default(),
        };
        Self {
            session,
            activity: Arc::new(activity),
        }
    }

    /// Registers the reader before a read. Returns the waker that the transport must wake instead
    /// of the reader's.
    pub(in crate::transport) fn begin_read(&self, cx: &Context<'_>) -> Waker {
        self.activity.reader.register(cx.waker());
        self.activity.is_waiting.store(true, Ordering::Release);
        Waker::from(self.activity.clone())
    }

    /// Registers the reader again, and returns whether the waker of its last read has not been woken
    /// since. A wakeup meanwhile wakes the reader.
    pub(in crate::transport) fn register_again(&self, cx: &Context<'_>) -> bool {
        self.activity.reader.register(cx.waker());
        self.activity.is_waiting.load(Ordering::Acquire)
    }

    /// Records that a read returned data, or that the reader is expected to read.
    pub(in crate::transport) fn end_read(&self) {
        self.activity.is_waiting.store(false, Ordering::Release);
        self.activity.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the number of bytes that a read returned. Bytes of streams that are not requests do
    /// not count: messages of the control stream need no larger window, however many there are.
    pub(in crate::transport) fn count_read(&self, bytes: usize) {
        if let Some(session) = &self.session
            && !self.activity.is_finished.load(Ordering::Relaxed)
        {
            session.count_read(bytes as u64);
        }
    }

    /// Records the outcome of a write: the number of bytes that the transport took, if any.
    pub(in crate::transport) fn end_write(&self, taken: Option<usize>) {
        let Some(bytes) = taken else {
            return self.activity.writer.set_pending();
        };
        self.activity.writer.count_written(bytes as u64);
        if let Some(session) = &self.session {
            session.count_written(bytes as u64);
        }
    }

    /// Waits until the stream's source may write. One task at a time can wait.
    pub(in crate::transport) fn poll_writable(&self, cx: &Context<'_>) -> Poll<()> {
        self.activity.writer.poll_writable(cx)
    }

    /// Waits until the transport may send what was written. One task at a time can wait, and is also
    /// woken when it must wait.
    pub(in crate::transport) fn poll_sendable(&self, cx: &Context<'_>) -> Poll<()> {
        self.activity.writer.poll_sendable(cx)
    }

    pub(in crate::transport) fn set_unread(&self, bytes: usize) {
        self.activity.unread.store(bytes as u64, Ordering::Relaxed);
    }

    /// Records that nothing is left to read, or that it is discarded.
    pub(in crate::transport) fn finish(&self) {
        if !self.activity.is_finished.swap(true, Ordering::Relaxed)
            && let Some(session) = &self.session
        {
            session.finish_stream();
        }
    }

    /// Excludes a stream that is no request, or that has ended, from flow control.
    pub(in crate::transport) fn exclude(&self) {
        self.finish();
        self.activity.is_ended.store(true, Ordering::Relaxed);
    }

    /// Sets the number that the streams of one source have in common.
    pub(in crate::transport) fn set_source(&self, source: u64) {
        match &self.session {
            Some(session) => session.set_source(source, &self.activity),
            None => self.activity.set_source(source, false),
        }
    }

    pub(super) fn activity(&self) -> &Arc<StreamActivity> {
        &self.activity
    }

    /// Waits until what is written must wait, because the stream's source holds the most at the peer.
    /// One task at a time can wait.
    pub(in crate::transport) fn poll_held(&self, cx: &Context<'_>) -> Poll<()> {
        self.activity.writer.poll_held(cx)
    }

    /// Lets what is written wait, as [`Self::poll_held`] says. For tests of other layers.
    #[cfg(any(test, feature = "test-util"))]
    pub(in crate::transport) fn hold(&self) {
        self.activity.writer.set_held(true);
    }

    /// Makes the stream one that must end, as [`Self::poll_stalled`] says. For tests of other layers.
    #[cfg(any(test, feature = "test-util"))]
    pub(in crate::transport) fn end_stalled(&self) {
        self.activity.end_stalled();
    }

    /// Returns whether a new stream of the same source would be refused.
    pub(in crate::transport) fn is_source_refused(&self) -> bool {
        let source = self.activity.source.load(Ordering::Relaxed);
        (self.session.as_ref()).is_some_and(|session| session.refuses(source))
    }

    /// Returns whether the stream must end because its reader is stalled.
    pub(in crate::transport) fn must_end(&self) -> bool {
        self.activity.must_end.load(Ordering::Acquire)
    }

    /// Waits until the stream must end because its reader is stalled. One task at a time can wait.
    pub(in crate::transport) fn poll_stalled(&self, cx: &Context<'_>) -> Poll<()> {
        self.activity.watcher.register(cx.waker());
        if self.must_end() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }
}

impl Drop for ReadMonitor {
    fn drop(&mut self) {
        self.exclude();
    }
}

impl StreamActivity {
    /// Sets the source, and whether the stream's writer must wait.
    pub(super) fn set_source(&self, source: u64, is_held: bool) {
        self.source.store(source, Ordering::Relaxed);
        self.writer.set_held(is_held);
    }

    pub(super) fn end_stalled(&self) {
        self.must_end.store(true, Ordering::Release);
        self.watcher.wake();
    }
}

impl Wake for StreamActivity {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_waiting.store(false, Ordering::Release);
        self.reader.wake();
    }
}

/// A stream of a session, as the samples see it.
#[derive(Debug)]
pub(super) struct StreamUsage {
    activity: Arc<StreamActivity>,
    reads: u32,
    pub(super) idle_samples: u32,
    active_samples: u32,
    /// Bytes that the stream holds while it is stalled.
    pub(super) unread: u64,
    pub(super) is_waiting: bool,
    /// Set while nobody reads what arrives.
    pub(super) is_unread: bool,
    /// Samples since the stream was chosen to end.
    end_samples: u32,
    pub(super) writer: WriterUsage,
}

impl StreamUsage {
    pub(super) fn new(activity: &Arc<StreamActivity>) -> Self {
        Self {
            activity: activity.clone(),
            reads: 0,
            idle_samples: 0,
            active_samples: SAMPLES_TO_RECOVER,
            unread: 0,
            is_waiting: false,
            is_unread: false,
            end_samples: 0,
            writer: WriterUsage::default(),
        }
    }

    /// Returns whether the stream is still read or written. If not, it is no longer sampled, so its
    /// writer must not wait.
    pub(super) fn is_open_or_release(&self) -> bool {
        let is_open = !self.activity.is_ended.load(Ordering::Relaxed);
        if !is_open {
            self.set_held(false);
        }
        is_open
    }

    fn must_end(&self) -> bool {
        self.activity.must_end.load(Ordering::Acquire)
    }

    /// Sets whether the stream's writer must wait.
    pub(super) fn set_held(&self, is_held: bool) {
        self.activity.writer.set_held(is_held);
    }

    /// Returns whether a write waits for nothing else than the end of the peer's shortage.
    pub(super) fn has_held_write(&self) -> bool {
        self.activity.writer.has_held_write()
    }

    /// Returns the activity while the stream has not been chosen to end.
    pub(super) fn activity(&self) -> Option<&Arc<StreamActivity>> {
        (!self.must_end()).then_some(&self.activity)
    }

    pub(super) fn source(&self) -> u64 {
        match self.activity.source.load(Ordering::Relaxed) {
            // Each such stream is a source of its own.
            0 => Arc::as_ptr(&self.activity) as u64,
            source => source,
        }
    }

    /// Returns whether the stream's writer may have to wait. Answers to complete requests never do, so
    /// a source that ends its half first can use the reserve of others. Nor do streams that must end.
    pub(super) fn can_be_held(&self) -> bool {
        !self.activity.is_finished.load(Ordering::Relaxed) && !self.must_end()
    }

    /// Samples the reader. Returns the bytes that the stream holds if it is stalled.
    pub(super) fn sample(&mut self, stream_window: u64) -> Option<u64> {
        let activity = self.activity.clone();
        (self.unread, self.is_waiting, self.is_unread) = (0, false, false);
        self.writer.sample(&activity.writer);
        if self.must_end() {
            self.end_samples = self.end_samples.saturating_add(1);
        }
        let is_ending = (1..=SAMPLES_OF_END).contains(&self.end_samples);
        if activity.is_finished.load(Ordering::Relaxed) || is_ending {
            return None;
        }
        let reads = activity.reads.load(Ordering::Relaxed);
        let unread = activity.unread.load(Ordering::Relaxed);
        self.is_waiting = activity.is_waiting.load(Ordering::Acquire);
        if reads == 0 {
            // The target is being dialed. What has arrived waits for it.
            self.is_unread = true;
            self.unread = if unread == UNREAD_UNKNOWN { 0 } else { unread };
            return (self.unread > 0).then_some(self.unread);
        }
        self.is_unread = !self.is_waiting && reads == self.reads;
        if !self.is_unread {
            (self.reads, self.idle_samples) = (reads, 0);
            self.active_samples = self.active_samples.saturating_add(1);
        } else {
            self.idle_samples = self.idle_samples.saturating_add(1);
            if self.idle_samples >= SAMPLES_TO_STALL {
                self.active_samples = 0;
            }
        }
        if self.active_samples >= SAMPLES_TO_RECOVER {
            return None;
        }
        self.unread = match unread {
            UNREAD_UNKNOWN => stream_window,
            // More than the window if the window was larger before.
            unread => unread,
        };
        Some(self.unread)
    }
}
