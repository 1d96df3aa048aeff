//! Growth of the stream window.
//!
//! On a transport that measures its path, the stream window grows while few streams are open. It
//! returns to its initial size when all streams together could hold half of what the session's
//! streams of that size may hold, or when stalled streams hold much of the pool. So growth does not
//! raise the bound on memory.

use std::sync::atomic::Ordering;

use super::{PEER_SHARE_DIVISOR, SessionFlow};

/// A stream window grows while it is smaller than this many times the bytes of a round trip. h2
/// announces credit only after a third of the window has been read, and data behind a lost segment
/// waits for one or two more round trips.
const WINDOW_ROUND_TRIPS: u64 = 4;
/// Streams may use this fraction of the session's bound when their window grows, and twice as much
/// before it shrinks.
const GROWTH_DIVISOR: u64 = 4;

impl SessionFlow {
    /// Doubles the stream window if it is small for a path on which `bytes_per_rtt` bytes arrive in
    /// one round trip, and memory permits.
    pub(in crate::transport) fn widen(&self, bytes_per_rtt: u64) {
        let window = self.window.load(Ordering::Relaxed);
        let wider = (window * 2).min(self.stream_window.max);
        if wider == window || bytes_per_rtt.saturating_mul(WINDOW_ROUND_TRIPS) <= window {
            return;
        }
        let streams = self.monitors.lock().len() as u64;
        let is_bounded = streams * wider <= self.stream_window.total / GROWTH_DIVISOR;
        if is_bounded && self.has_spare_memory(GROWTH_DIVISOR) {
            self.set_stream_window(wider);
        }
    }

    /// Returns to the initial stream window if `streams` streams could hold too much.
    pub(super) fn narrow(&self, streams: u64) {
        let window = self.window.load(Ordering::Relaxed);
        if window == self.stream_window.initial {
            return;
        }
        let divisor = GROWTH_DIVISOR / 2;
        let is_bounded = streams * window <= self.stream_window.total / divisor;
        if !is_bounded || !self.has_spare_memory(divisor) {
            self.set_stream_window(self.stream_window.initial);
        }
    }

    /// Returns whether the streams cannot hold more than their bound, even if the peer has not yet
    /// acknowledged a smaller window.
    pub(super) fn has_room_for_granted_windows(&self) -> bool {
        let granted = self.granted.load(Ordering::Relaxed);
        granted <= self.stream_window.initial
            || self.monitors.lock().len() as u64 * granted <= self.stream_window.total
    }

    /// Returns whether stalled streams hold at most the pool, and the peer's share of it, divided
    /// by `divisor`.
    fn has_spare_memory(&self, divisor: u64) -> bool {
        let charged = self.charged.load(Ordering::Relaxed);
        self.pool.charged() <= self.pool.limit / divisor
            && charged <= self.pool.limit / PEER_SHARE_DIVISOR / divisor
    }

    fn set_stream_window(&self, bytes: u64) {
        self.window.store(bytes, Ordering::Relaxed);
        self.granted.fetch_max(bytes, Ordering::Relaxed);
        self.update_windows();
    }

    /// Records that the peer uses stream windows of `bytes`.
    pub(in crate::transport) fn stream_window_acknowledged(&self, bytes: u64) {
        if bytes == self.window.load(Ordering::Relaxed) {
            self.granted.store(bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::transport::flow::{BufferPool, ReceiveWindows, StreamWindow};

    const WINDOW: u32 = 1000;

    /// Returns a session of at most 16 streams whose window grows to 4000 bytes.
    fn growing_session() -> (
        Arc<BufferPool>,
        Arc<SessionFlow>,
        Arc<Mutex<ReceiveWindows>>,
    ) {
        let pool = BufferPool::new(1 << 20);
        let windows = Arc::new(Mutex::new(ReceiveWindows {
            stream: 1000,
            connection: 8000,
        }));
        let observed = windows.clone();
        let flow = pool.session(StreamWindow::growing(WINDOW, 4000, 16), move |windows| {
            *observed.lock() = windows;
        });
        (pool, flow, windows)
    }

    #[tokio::test]
    async fn stream_window_grows_to_four_round_trips_while_few_streams_are_open() {
        let (_pool, flow, windows) = growing_session();
        let mut monitors = vec![flow.read_monitor()];
        let widened = |bytes_per_rtt| {
            flow.widen(bytes_per_rtt);
            windows.lock().stream
        };
        assert_eq!(widened(250), 1000, "the window is large enough");
        assert_eq!(widened(251), 2000);
        assert_eq!(widened(500), 2000);
        assert_eq!(widened(501), 4000);
        assert_eq!(widened(u64::MAX), 4000, "the maximum");
        assert_eq!(windows.lock().connection, 8 * 4000);
        monitors.push(flow.read_monitor());
        assert_eq!(windows.lock().stream, 4000, "half of the bound");
        monitors.push(flow.read_monitor());
        let narrow = ReceiveWindows {
            stream: 1000,
            connection: 8000,
        };
        assert_eq!(*windows.lock(), narrow, "three streams could hold 12000");
        monitors.truncate(2);
        flow.sample();
        assert_eq!(widened(1000), 2000);
        assert_eq!(widened(1000), 2000, "more would be half of the bound");
    }

    #[tokio::test]
    async fn peer_that_does_not_acknowledge_a_smaller_window_gets_no_streams_beyond_the_bound() {
        let (_pool, flow, _windows) = growing_session();
        flow.widen(u64::MAX);
        flow.widen(u64::MAX);
        let _monitors: Vec<_> = (0..5).map(|_| flow.read_monitor()).collect();
        assert!(!flow.has_room(), "five streams could hold 20000 of 16000");
        flow.stream_window_acknowledged(4000);
        assert!(!flow.has_room(), "the peer acknowledged the larger window");
        flow.stream_window_acknowledged(1000);
        assert!(flow.has_room());
    }

    #[tokio::test]
    async fn stalled_streams_are_charged_exactly_and_end_the_growth() {
        let (pool, flow, windows) = growing_session();
        let stalled = flow.read_monitor();
        flow.widen(u64::MAX);
        flow.widen(u64::MAX);
        stalled.end_read();
        stalled.set_unread(4000);
        for _ in 0..3 {
            flow.sample();
        }
        assert_eq!(pool.charged(), 4000);
        assert_eq!(windows.lock().connection, 4000 + 8 * 4000);
        // Half of the peer's share of the pool.
        let half = (1 << 20) / 4 / 2;
        stalled.set_unread(half);
        flow.sample();
        assert_eq!(windows.lock().stream, 4000);
        stalled.set_unread(half + 1);
        flow.sample();
        let narrow = ReceiveWindows {
            stream: 1000,
            connection: half as u64 + 1 + 8 * 1000,
        };
        assert_eq!(*windows.lock(), narrow);
        flow.widen(u64::MAX);
        assert_eq!(windows.lock().stream, 1000);
    }
}
