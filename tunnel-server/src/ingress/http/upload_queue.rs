//! The bytes of a request body that were taken from the caller and that the connection to the target
//! has not taken. hyper has one limit for what it queues and for the head of the answer, which must be
//! far larger.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;

use crate::config::UPLOAD_QUEUE_BYTES;

/// The queue of one connection to a target.
#[derive(Debug, Default)]
pub(crate) struct UploadQueue {
    /// Bytes that were taken from the body, since those that were written before.
    taken: AtomicU64,
    /// Bytes that were written, heads and framing included.
    written: AtomicU64,
    /// Whether the last write waits for the target.
    is_blocked: AtomicBool,
    body: AtomicWaker,
}

impl UploadQueue {
    /// Begins a request. What was written before it does not make room for its body.
    pub(super) fn begin(&self) {
        let written = self.written.load(Ordering::Relaxed);
        self.taken.store(written, Ordering::Relaxed);
    }

    /// Waits until a body may add to the queue.
    pub(super) fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        if self.has_room() {
            return Poll::Ready(());
        }
        self.body.register(cx.waker());
        // A write may have happened in between.
        if self.has_room() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    }

    /// Records bytes of the body.
    pub(super) fn take(&self, bytes: usize) {
        self.taken.fetch_add(bytes as u64, Ordering::AcqRel);
    }

    /// Records the result of a write to the connection.
    pub(super) fn record_write<E>(&self, written: &Poll<Result<usize, E>>) {
        self.is_blocked
            .store(written.is_pending(), Ordering::Relaxed);
        if let Poll::Ready(Ok(count)) = written {
            self.written.fetch_add(*count as u64, Ordering::AcqRel);
            self.body.wake();
        }
    }

    /// Returns whether hyper holds bytes that the connection does not take, because the target reads
    /// slowly.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::Relaxed)
    }

    fn has_room(&self) -> bool {
        let taken = self.taken.load(Ordering::Acquire);
        taken.saturating_sub(self.written.load(Ordering::Acquire)) < UPLOAD_QUEUE_BYTES as u64
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn body_waits_while_the_queue_is_full() {
        let queue = UploadQueue::default();
        let cx = Context::from_waker(Waker::noop());
        let written = |count| queue.record_write(&Poll::Ready(Ok::<_, ()>(count)));
        for _request in 0..3 {
            queue.begin();
            // The head.
            written(100);
            assert!(queue.poll_room(&cx).is_ready());
            queue.take(100);
            queue.take(1 << 16);
            assert!(queue.poll_room(&cx).is_pending());
            queue.record_write(&Poll::<Result<usize, ()>>::Pending);
            assert!(queue.is_blocked() && queue.poll_room(&cx).is_pending());
            written(1);
            assert!(!queue.is_blocked() && queue.poll_room(&cx).is_ready());
            written((1 << 16) - 1);
        }
    }
}
