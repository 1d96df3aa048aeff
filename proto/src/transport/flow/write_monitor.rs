//! The writers of streams: what they have sent, whether the transport takes more, and whether they
//! must wait because their source holds the most at the peer.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;

/// A writer that the transport takes nothing from for this many samples (50 ms) is blocked.
const SAMPLES_TO_BLOCK: u32 = 1;

/// The activity of a stream's writer.
#[derive(Debug, Default)]
pub(super) struct WriteMonitor {
    written: AtomicU64,
    /// Whether the transport took nothing of the last write.
    is_pending: AtomicBool,
    /// Whether the writer must wait.
    is_held: AtomicBool,
    /// Whether it waits with something to write.
    is_writing: AtomicBool,
    writer: AtomicWaker,
    /// The task of the transport that sends what the writer has written.
    sender: AtomicWaker,
    /// A task that waits until the writer must wait.
    observer: AtomicWaker,
}

impl WriteMonitor {
    /// Records that the transport took `bytes`.
    pub(super) fn count_written(&self, bytes: u64) {
        self.is_pending.store(false, Ordering::Relaxed);
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Records that the transport took nothing.
    pub(super) fn set_pending(&self) {
        self.is_pending.store(true, Ordering::Relaxed);
    }

    /// Waits until the writer may write. One task at a time can wait.
    pub(super) fn poll_writable(&self, cx: &Context<'_>) -> Poll<()> {
        let released = poll_released(&self.is_held, &self.writer, cx);
        if released.is_pending() {
            self.is_writing.store(true, Ordering::Relaxed);
        }
        released
    }

    /// Waits until the transport may send what was written. One task at a time can wait. A task that
    /// has asked is also woken when it must wait.
    pub(super) fn poll_sendable(&self, cx: &Context<'_>) -> Poll<()> {
        self.sender.register(cx.waker());
        poll_released(&self.is_held, &self.sender, cx)
    }

    /// Waits until the writer must wait. One task at a time can wait.
    pub(super) fn poll_held(&self, cx: &Context<'_>) -> Poll<()> {
        self.observer.register(cx.waker());
        if self.is_held() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    fn is_held(&self) -> bool {
        self.is_held.load(Ordering::Acquire)
    }

    /// Returns whether a write waits for nothing else than its release: the transport has taken all that
    /// was written before.
    pub(super) fn has_held_write(&self) -> bool {
        let is_blocked = self.is_pending.load(Ordering::Relaxed);
        self.is_held() && self.is_writing.load(Ordering::Relaxed) && !is_blocked
    }

    pub(super) fn set_held(&self, is_held: bool) {
        if !is_held {
            self.is_writing.store(false, Ordering::Relaxed);
        }
        if self.is_held.swap(is_held, Ordering::AcqRel) != is_held {
            self.writer.wake();
            self.sender.wake();
            self.observer.wake();
        }
    }
}

fn poll_released(is_held: &AtomicBool, waker: &AtomicWaker, cx: &Context<'_>) -> Poll<()> {
    if !is_held.load(Ordering::Acquire) {
        return Poll::Ready(());
    }
    waker.register(cx.waker());
    if is_held.load(Ordering::Acquire) {
        Poll::Pending
    } else {
        Poll::Ready(())
    }
}

/// A writer, as the samples see it.
#[derive(Debug, Default)]
pub(super) struct WriterUsage {
    written: u64,
    blocked_samples: u32,
}

impl WriterUsage {
    pub(super) fn sample(&mut self, monitor: &WriteMonitor) {
        let written = monitor.written.load(Ordering::Relaxed);
        let is_pending = monitor.is_pending.load(Ordering::Relaxed);
        self.blocked_samples = if is_pending && written == self.written {
            self.blocked_samples.saturating_add(1)
        } else {
            0
        };
        self.written = written;
    }

    /// Returns the bytes that the peer has not read at most, if the writer is blocked.
    pub(super) fn blocked_bytes(&self, stream_window: u64) -> Option<u64> {
        let is_blocked = self.blocked_samples >= SAMPLES_TO_BLOCK;
        is_blocked.then(|| self.written.clamp(1, stream_window))
    }
}
