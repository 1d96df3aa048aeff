//! The send window: what a session may have sent without an acknowledgement.
//!
//! A transport that keeps sent data until it is acknowledged needs memory for a peer that
//! acknowledges late, or does not. The window begins small, and doubles while half of it is written
//! within a second, up to a multiple of the congestion window. What is above the first window is
//! reserved from the pool, and released when less is written.

/// The send window of a session that sends little. Its memory is not part of the pool.
pub(in crate::transport) const SEND_BASE_WINDOW: u64 = 64 << 10;
/// Maximum of the send window, quinn's default.
pub(super) const SEND_WINDOW_MAX: u64 = 10 << 20;
/// Memory of sent bytes, in percent of their number: buffers that are filled in part.
const SEND_MEMORY_PERCENT: u64 = 150;

/// The send window of a session, and what it has reserved for it.
#[derive(Debug)]
pub(super) struct SendWindow {
    pub(super) bytes: u64,
    pub(super) reserved: u64,
    pub(super) samples: u32,
    /// Bytes that had been written when the current second began.
    pub(super) epoch_writes: u64,
}

impl SendWindow {
    pub(super) fn new() -> Self {
        Self {
            bytes: SEND_BASE_WINDOW,
            reserved: 0,
            samples: 0,
            epoch_writes: 0,
        }
    }

    /// Returns the number of written bytes at which the window grows.
    pub(super) fn grow_at(&self) -> u64 {
        self.epoch_writes.saturating_add(self.bytes / 2)
    }
}

/// Returns the memory that is reserved for a window.
pub(super) fn memory(window: u64) -> u64 {
    window.saturating_sub(SEND_BASE_WINDOW) * SEND_MEMORY_PERCENT / 100
}
