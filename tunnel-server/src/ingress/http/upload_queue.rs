//! The bytes of a request body that were taken from the caller and that the connection to the target
//! has not taken. hyper has one limit for what it queues and for the head of the answer, which must be
//! far larger.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tunnel_proto::transport::PoolPermit;

/// Bytes of a body for which the connection to the target waits before it takes more from the caller.
/// The last piece, of as many bytes at most, may exceed the limit.
const QUEUE_BYTES: u64 = 64 << 10;
/// The same while the pool has no memory for a queue.
const SMALL_QUEUE_BYTES: u64 = 16 << 10;

/// The queue of one connection to a target. What it holds of a body that flows is little. The memory
/// for more is reserved from the pool, until the queue is empty.
#[derive(Debug)]
pub(crate) struct UploadQueue {
    /// Bytes that were taken from the body, since those that were written before.
    taken: AtomicU64,
    /// Bytes that were written, heads and framing included.
    written: AtomicU64,
    /// Whether the last write waits for the target.
    is_blocked: AtomicBool,
    body: AtomicWaker,
    memory: Mutex<PoolPermit>,
    has_memory: AtomicBool,
}

impl UploadQueue {
    /// Creates the queue of a connection. `memory` is a permit for no bytes.
    pub(super) fn new(memory: PoolPermit) -> Self {
        Self {
            taken: AtomicU64::new(0),
            written: AtomicU64::new(0),
            is_blocked: AtomicBool::new(false),
            body: AtomicWaker::new(),
            memory: Mutex::new(memory),
            has_memory: AtomicBool::new(false),
        }
    }

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
        if self.queued() >= SMALL_QUEUE_BYTES {
            self.reserve();
        }
    }

    /// Records that the queue is empty. Heads and framing are in what was written, but not in what was
    /// taken.
    pub(super) fn record_flush(&self) {
        self.taken.store(self.written(), Ordering::Release);
    }

    /// Returns the number of bytes that the connection has taken.
    pub(super) fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    /// Records the result of a write to the connection.
    pub(super) fn record_write<E>(&self, written: &Poll<Result<usize, E>>) {
        self.is_blocked
            .store(written.is_pending(), Ordering::Relaxed);
        if let Poll::Ready(Ok(count)) = written {
            self.written.fetch_add(*count as u64, Ordering::AcqRel);
            if self.has_memory.load(Ordering::Acquire) && self.queued() == 0 {
                self.has_memory.store(false, Ordering::Release);
                self.memory.lock().release();
            }
            self.body.wake();
        }
    }

    /// Returns whether hyper holds bytes that the connection does not take, because the target reads
    /// slowly.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Ordering::Relaxed)
    }

    fn has_room(&self) -> bool {
        match self.queued() {
            0..SMALL_QUEUE_BYTES => true,
            SMALL_QUEUE_BYTES..QUEUE_BYTES => self.reserve(),
            _ => false,
        }
    }

    /// Reserves the memory of a whole queue, unless others have most of the pool. Returns whether it is
    /// reserved.
    fn reserve(&self) -> bool {
        if !self.has_memory.load(Ordering::Acquire) {
            let is_reserved = self.memory.lock().grow_while_half_is_free(2 * QUEUE_BYTES);
            self.has_memory.store(is_reserved, Ordering::Release);
        }
        self.has_memory.load(Ordering::Acquire)
    }

    fn queued(&self) -> u64 {
        let taken = self.taken.load(Ordering::Acquire);
        taken.saturating_sub(self.written())
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tunnel_proto::transport::BufferPool;

    use super::*;

    #[test]
    fn body_waits_while_the_queue_is_full() {
        let pool = BufferPool::new(1 << 20);
        let queue = UploadQueue::new(pool.permit());
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
            assert_eq!(pool.reserved(), 128 << 10);
            written((1 << 16) + 99);
            assert_eq!(pool.reserved(), 0);
        }
    }

    #[test]
    fn body_has_a_small_queue_while_the_pool_is_full() {
        let pool = BufferPool::new(1 << 20);
        let mut others = pool.permit();
        assert!(others.grow((512 << 10) + 1));
        let queue = UploadQueue::new(pool.permit());
        let cx = Context::from_waker(Waker::noop());
        queue.begin();
        queue.take((16 << 10) - 1);
        assert!(queue.poll_room(&cx).is_ready());
        queue.take(1);
        assert!(queue.poll_room(&cx).is_pending());
        queue.record_write(&Poll::Ready(Ok::<_, ()>(1)));
        assert!(queue.poll_room(&cx).is_ready());
        assert_eq!(pool.reserved(), (512 << 10) + 1);
        // A piece that is larger than the queue is counted when there is memory.
        drop(others);
        queue.take(64 << 10);
        assert_eq!(pool.reserved(), 128 << 10);
        // What was written in addition makes no room.
        queue.record_write(&Poll::Ready(Ok::<_, ()>(1 << 20)));
        queue.record_flush();
        queue.take(64 << 10);
        assert!(queue.poll_room(&cx).is_pending());
    }
}
