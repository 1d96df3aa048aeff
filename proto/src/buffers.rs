//! Buffers for reading sockets. Each thread pools a few, so that a read needs no allocation and an
//! idle connection has no buffer.

use std::cell::RefCell;

use bytes::BytesMut;

/// Size of a buffer. With the head of an h2 frame (9 bytes), the bytes of a full buffer are exactly
/// four TLS records. A larger one gains little: a busy socket returns about so much from one read.
pub(crate) const BUFFER_BYTES: usize = 64 * 1024 - 9;
/// Buffers that a thread pools. One serves all of its connections in turn. More are in use only if
/// a reader is slow.
const BUFFERS_PER_THREAD: usize = 4;

thread_local! {
    static POOL: RefCell<Vec<BytesMut>> = const { RefCell::new(Vec::new()) };
}

/// An empty buffer for [`BUFFER_BYTES`]. Dropping it returns it to the thread's pool.
#[derive(Debug)]
pub(crate) struct Buffer(pub(crate) BytesMut);

impl Buffer {
    /// Takes a buffer from the pool, or allocates one.
    pub(crate) fn take() -> Self {
        let pooled = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            // A stream may still send bytes of a buffer that was handed over.
            let free = pool
                .iter_mut()
                .rposition(|buffer| buffer.try_reclaim(BUFFER_BYTES))?;
            Some(pool.swap_remove(free))
        });
        // Access fails only while the thread ends.
        let pooled = pooled.ok().flatten();
        Self(pooled.unwrap_or_else(|| BytesMut::with_capacity(BUFFER_BYTES)))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.0);
        buffer.clear();
        let _thread_exits = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < BUFFERS_PER_THREAD {
                pool.push(buffer);
                return;
            }
            // A stalled stream may keep a buffer that was handed over in use for long.
            let in_use = pool
                .iter_mut()
                .find_map(|pooled| (!pooled.try_reclaim(BUFFER_BYTES)).then_some(pooled));
            if let Some(in_use) = in_use {
                *in_use = buffer;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use bytes::Buf as _;

    use super::*;

    #[test]
    fn buffer_that_was_dropped_is_used_again() {
        let mut first = Buffer::take();
        first.0.extend_from_slice(b"sent");
        let address = first.0.as_ptr();
        first.0.advance(1);
        drop(first);
        let reused = Buffer::take();
        assert_eq!((reused.0.as_ptr(), reused.0.len()), (address, 0));
    }

    #[test]
    fn buffer_that_was_handed_over_is_used_again_when_its_bytes_are_dropped() {
        let mut first = Buffer::take();
        first.0.resize(BUFFER_BYTES / 2, 7);
        let piece = first.0.split().freeze();
        drop(first);
        let other = Buffer::take();
        assert_ne!(other.0.as_ptr(), piece.as_ptr());
        assert_eq!(piece, vec![7; BUFFER_BYTES / 2]);
        let address = piece.as_ptr();
        drop(piece);
        let reused = Buffer::take();
        assert_eq!(reused.0.as_ptr(), address);
        assert_eq!(reused.0.capacity(), BUFFER_BYTES);
    }

    #[test]
    fn free_buffer_takes_the_place_of_one_that_a_stream_holds() {
        let hand_over = || {
            let mut buffer = Buffer::take();
            buffer.0.resize(BUFFER_BYTES / 2, 7);
            buffer.0.split().freeze()
        };
        let _held: Vec<_> = (0..BUFFERS_PER_THREAD).map(|_| hand_over()).collect();
        let free = Buffer::take();
        let address = free.0.as_ptr();
        drop(free);
        POOL.with(|pool| {
            let pool = pool.borrow();
            assert_eq!(pool.len(), BUFFERS_PER_THREAD);
            assert!(pool.iter().any(|pooled| pooled.as_ptr() == address));
        });
    }

    #[test]
    fn thread_keeps_a_few() {
        let buffers: Vec<_> = (0..3 * BUFFERS_PER_THREAD)
            .map(|_| Buffer::take())
            .collect();
        drop(buffers);
        POOL.with(|pool| assert_eq!(pool.borrow().len(), BUFFERS_PER_THREAD));
    }
}
