//! Buffers for copying data. Each thread pools a few, so that a copy needs no allocation and an
//! idle connection has no buffer.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Size of a buffer. A larger one gains little: this is four TLS records, or the amount that a busy
/// socket returns from one read.
pub(crate) const BUFFER_BYTES: usize = 64 * 1024;
/// Buffers that a thread pools. One serves all of its connections in turn. More are in use only if
/// a reader is slow.
const BUFFERS_PER_THREAD: usize = 4;

thread_local! {
    static POOL: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of [`BUFFER_BYTES`] with unspecified content. Dropping it returns it to the thread's
/// pool.
#[derive(Debug)]
pub(crate) struct Buffer(Box<[u8]>);

impl Buffer {
    /// Takes a buffer from the pool, or allocates one.
    pub(crate) fn take() -> Self {
        // Access fails only while the thread ends.
        let pooled = POOL.try_with(|pool| pool.borrow_mut().pop()).ok().flatten();
        Self(pooled.unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        let _thread_exits = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < BUFFERS_PER_THREAD {
                pool.push(buffer);
            }
        });
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_that_was_dropped_is_used_again() {
        let mut first = Buffer::take();
        first[0] = 7;
        let address = first.as_ptr();
        drop(first);
        let reused = Buffer::take();
        assert_eq!((reused.as_ptr(), reused[0]), (address, 7));
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
