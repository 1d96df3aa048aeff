//! Memory that is reserved from the pool for data that no session carries.

use std::sync::Arc;

use super::BufferPool;

/// A part of the pool. Dropping the permit releases it.
#[derive(Debug)]
pub struct PoolPermit {
    pool: Arc<BufferPool>,
    bytes: u64,
}

impl BufferPool {
    /// Returns a permit for no bytes, which can grow.
    pub fn permit(self: &Arc<Self>) -> PoolPermit {
        PoolPermit {
            pool: self.clone(),
            bytes: 0,
        }
    }
}

impl PoolPermit {
    /// Reserves memory until the permit has `bytes`. Returns whether it has; if the pool is too
    /// full, the permit stays as it is.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let is_reserved = more == 0 || self.pool.try_reserve(more);
        if is_reserved {
            self.bytes += more;
        }
        is_reserved
    }
}

impl PoolPermit {
    /// Like [`PoolPermit::grow`], but leaves half of the pool to others.
    pub fn grow_while_half_is_free(&mut self, bytes: u64) -> bool {
        self.pool.free() >= self.pool.limit() / 2 && self.grow(bytes)
    }

    /// Returns all memory to the pool.
    pub fn release(&mut self) {
        self.pool.release(std::mem::take(&mut self.bytes));
    }
}

impl Drop for PoolPermit {
    fn drop(&mut self) {
        self.release();
    }
}
