//! Growth of the stream window.
//!
//! On a transport that measures its path, the stream window grows while few streams are open. It
//! returns to its initial size when all streams together could hold half of what the session's
//! streams of that size may hold, or when the pool is short.

use std::sync::atomic::Ordering;

use super::{FlowState, SPARE_WINDOWS, SessionFlow};

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
        let stream_window = self.settings.stream_window;
        let state = &mut *self.lock();
        let wider = (state.stream_window * 2).min(stream_window.max);
        if wider == state.stream_window
            || bytes_per_rtt.saturating_mul(WINDOW_ROUND_TRIPS) <= state.stream_window
        {
            return;
        }
        let is_bounded = state.open * wider <= stream_window.total / GROWTH_DIVISOR;
        if is_bounded && !self.is_short(state, wider) {
            self.set_stream_window(state, wider);
        }
    }

    /// Returns to the initial stream window if the streams could hold too much.
    pub(super) fn narrow(&self, state: &mut FlowState) {
        let stream_window = self.settings.stream_window;
        if state.stream_window == stream_window.initial {
            return;
        }
        let held_max = state.open * state.stream_window;
        let is_bounded = held_max <= stream_window.total / (GROWTH_DIVISOR / 2);
        if !is_bounded || self.is_short(state, state.stream_window / 2) {
            self.set_stream_window(state, stream_window.initial);
        }
    }

    /// Returns whether the session can have no `bytes` in addition to what stalled streams hold.
    fn is_short(&self, state: &FlowState, bytes: u64) -> bool {
        state.spare().saturating_add(self.growth_max(state)) < bytes
    }

    fn set_stream_window(&self, state: &mut FlowState, bytes: u64) {
        let exposure_before = state.largest_window;
        state.largest_window = exposure_before.max(bytes);
        let exposure = state.exposure(state.credit.total(), state.open);
        if !self.reserve(state, exposure) {
            state.largest_window = exposure_before;
            return;
        }
        state.stream_window = bytes;
        state.active.set_max(SPARE_WINDOWS * bytes);
        self.grow_at
            .store(state.active.grow_at(), Ordering::Relaxed);
        self.update_windows(state);
    }
}
