//! Growth of the send window, and the memory that is reserved for it.

use std::sync::atomic::Ordering;

use super::send_window::{SEND_BASE_WINDOW, SEND_WINDOW_MAX, memory};
use super::{FREE_SHARE, FlowState, SessionFlow};

/// The window grows to this multiple of the congestion window, which itself doubles with each round
/// trip at first.
const CONGESTION_WINDOWS: u64 = 4;
/// Least value of that multiple.
const SEND_WINDOW_MIN: u64 = 1 << 20;
/// Samples over which written bytes are summed: 1 s.
const EPOCH_SAMPLES: u32 = 20;

impl SessionFlow {
    pub(super) fn count_sent(&self, bytes: u64) {
        let writes = self.writes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if writes >= self.send_at.load(Ordering::Relaxed) {
            self.grow_send_window(&mut self.lock());
        }
    }

    /// Doubles the window if half of it was written within a second, as far as the path needs it and
    /// memory permits.
    fn grow_send_window(&self, state: &mut FlowState) {
        let writes = self.writes.load(Ordering::Relaxed);
        let send_at = state.send.grow_at();
        if writes < send_at {
            return self.send_at.store(send_at, Ordering::Relaxed);
        }
        let window = state.send.bytes;
        let Some(congestion_window) = self.transport.congestion_window() else {
            return self.send_at.store(u64::MAX, Ordering::Relaxed);
        };
        let max = congestion_window
            .saturating_mul(CONGESTION_WINDOWS)
            .clamp(SEND_WINDOW_MIN, SEND_WINDOW_MAX);
        let wider = (window * 2).min(max);
        let more = memory(wider).saturating_sub(state.send.reserved);
        let share = (self.pool.free() / FREE_SHARE).saturating_sub(state.send.reserved);
        if wider > window && more <= share && self.pool.try_reserve(more) {
            state.send.reserved += more;
            self.set_send_window(state, wider);
        }
        let next = state.send.grow_at().max(writes + window / 2);
        self.send_at.store(next, Ordering::Relaxed);
    }

    /// Makes the window smaller while less than a quarter of it is written in a second, and at once
    /// when no stream is left.
    pub(super) fn sample_send_window(&self, state: &mut FlowState) {
        state.send.samples += 1;
        if state.send.samples < EPOCH_SAMPLES && !state.streams.is_empty() {
            return;
        }
        let writes = self.writes.load(Ordering::Relaxed);
        let written = writes.saturating_sub(state.send.epoch_writes);
        (state.send.samples, state.send.epoch_writes) = (0, writes);
        let window = state.send.bytes;
        let smaller = if state.streams.is_empty() {
            SEND_BASE_WINDOW
        } else if written < window / 4 {
            (window - window / 8).max(SEND_BASE_WINDOW)
        } else {
            window
        };
        if smaller < window {
            self.set_send_window(state, smaller);
            self.pool.release(state.send.reserved - memory(smaller));
            state.send.reserved = memory(smaller);
        }
        if self.send_at.load(Ordering::Relaxed) != u64::MAX {
            self.send_at.store(state.send.grow_at(), Ordering::Relaxed);
        }
    }

    fn set_send_window(&self, state: &mut FlowState, bytes: u64) {
        state.send.bytes = bytes;
        self.transport.set_send_window(bytes);
    }
}
