//! Memory for request heads that are larger than what each caller's connection counts for. It is
//! reserved from the buffer pool before it is used, so that callers cannot use more than the pool
//! has, however many they are.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tunnel_process::conn_limiter::source;
use tunnel_proto::transport::{BufferPool, PoolPermit};

/// Divisor for the part of the pool that all large heads together may reserve. The other part is
/// left to sessions.
const POOL_SHARE: u64 = 2;
/// Divisor for the part of the pool that the heads from one source may reserve.
const SOURCE_SHARE: u64 = 4;

/// The memory of large heads, in total and of each source.
#[derive(Debug)]
pub struct HeadMemory {
    pool: Arc<BufferPool>,
    reserved: Mutex<Reserved>,
}

#[derive(Debug, Default)]
struct Reserved {
    all: u64,
    sources: HashMap<IpAddr, u64>,
}

impl HeadMemory {
    /// Creates the memory as a share of a pool.
    pub fn new(pool: Arc<BufferPool>) -> Arc<Self> {
        Arc::new(Self {
            pool,
            reserved: Mutex::default(),
        })
    }

    /// Returns a permit for a head of a caller from this address. It has no memory yet.
    pub(crate) fn permit(self: &Arc<Self>, address: IpAddr) -> HeadPermit {
        HeadPermit {
            memory: self.clone(),
            source: source(address),
            bytes: 0,
            permit: self.pool.permit(),
        }
    }

    /// Returns a permit for what is no head. It has no memory yet.
    pub(crate) fn pool_permit(&self) -> PoolPermit {
        self.pool.permit()
    }

    /// Returns the size of the pool, in bytes.
    pub(crate) fn pool_bytes(&self) -> u64 {
        self.pool.limit()
    }

    /// Returns the bytes that all heads have reserved.
    #[cfg(test)]
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.lock().all
    }
}

/// The memory of one head. Dropping the permit releases it.
#[derive(Debug)]
pub(crate) struct HeadPermit {
    memory: Arc<HeadMemory>,
    source: IpAddr,
    bytes: u64,
    permit: PoolPermit,
}

impl HeadPermit {
    /// Reserves memory until the permit has `bytes`. Returns whether it has.
    pub(crate) fn grow(&mut self, bytes: u64) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let limit = self.memory.pool.limit();
        let mut reserved = self.memory.reserved.lock();
        let of_source = reserved.sources.get(&self.source).copied();
        let (all, own) = (reserved.all + more, of_source.unwrap_or_default() + more);
        let fits = all <= limit / POOL_SHARE && own <= limit / SOURCE_SHARE;
        if more == 0 || (fits && self.permit.grow(bytes)) {
            reserved.all = all;
            reserved.sources.insert(self.source, own);
            self.bytes += more;
            true
        } else {
            false
        }
    }
}

impl Drop for HeadPermit {
    fn drop(&mut self) {
        let mut reserved = self.memory.reserved.lock();
        reserved.all -= self.bytes;
        let left = reserved.sources.get(&self.source).copied();
        match left.unwrap_or_default() - self.bytes {
            0 => reserved.sources.remove(&self.source),
            left => reserved.sources.insert(self.source, left),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_leave_half_of_the_pool_and_one_source_leaves_half_of_that() {
        let pool = BufferPool::new(1000);
        let memory = HeadMemory::new(pool.clone());
        let permit = |address: &str| memory.permit(address.parse().unwrap());
        let (mut first, mut second) = (permit("192.0.2.1"), permit("192.0.2.1"));
        assert!(first.grow(200) && first.grow(100) && second.grow(50));
        assert!(!second.grow(51), "the share of the source");
        let mut other = permit("2001:db8::1");
        assert!(other.grow(250) && !other.grow(251));
        let mut third = permit("192.0.2.3");
        assert!(!third.grow(1), "the share of all heads");
        assert_eq!((pool.reserved(), memory.reserved()), (500, 500));
        drop(first);
        assert!(third.grow(200) && !third.grow(201));
        let mut session = pool.permit();
        assert!(session.grow(500) && !session.grow(501));
        drop((second, other, session));
        assert!(third.grow(250));
        drop(third);
        assert_eq!((pool.reserved(), memory.reserved()), (0, 0));
        assert!(memory.reserved.lock().sources.is_empty());
    }

    #[test]
    fn full_pool_has_no_memory_for_heads() {
        let pool = BufferPool::new(1000);
        let mut session = pool.permit();
        assert!(session.grow(950));
        let memory = HeadMemory::new(pool.clone());
        let mut head = memory.permit("192.0.2.1".parse().unwrap());
        assert!(head.grow(50) && !head.grow(51));
        drop(session);
        assert!(head.grow(250));
    }
}
