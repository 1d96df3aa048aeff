//! Growth of the windows.
//!
//! The *active window* is what streams that do not stall share. It follows what they read.
//!
//! On a transport that measures its path, the stream window grows while few streams are open. It
//! returns to its initial size when all streams together could hold half of what the session's
//! streams of that size may hold, or when the pool is short.

use std::sync::atomic::Ordering;

use super::{ACTIVE_WINDOW_MIN, FlowState, SPARE_WINDOWS, SessionFlow};

/// A stream window grows while it is smaller than this many times the bytes of a round trip. h2
/// announces credit only after a third of the window has been read, and data behind a lost segment
/// waits for one or two more round trips.
const WINDOW_ROUND_TRIPS: u64 = 4;
/// Streams may use this fraction of the session's bound when their window grows, and twice as much
/// before it shrinks.
const GROWTH_DIVISOR: u64 = 4;
/// Samples over which reads are summed: 1 s.
const EPOCH_SAMPLES: u32 = 20;

/// The window of streams that do not stall. It doubles when half of it was read within a second,
/// and becomes smaller slowly when less than a quarter is. It keeps its size while there are no
/// streams, because the sender's congestion window does so, too.
#[derive(Debug)]
pub(super) struct ActiveWindow {
    bytes: u64,
    max: u64,
    samples: u32,
    /// Bytes that had been read when the current second began.
    epoch_reads: u64,
}

impl ActiveWindow {
    pub(super) fn new(max: u64) -> Self {
        Self {
            bytes: ACTIVE_WINDOW_MIN,
            max: max.max(ACTIVE_WINDOW_MIN),
            samples: 0,
            epoch_reads: 0,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of read bytes at which the window grows.
    pub(super) fn grow_at(&self) -> u64 {
        if self.bytes >= self.max {
            return u64::MAX;
        }
        self.epoch_reads.saturating_add(self.bytes / 2)
    }

    /// Sets the size up to which the window grows.
    pub(super) fn set_max(&mut self, max: u64) {
        self.max = max.max(ACTIVE_WINDOW_MIN);
        self.bytes = self.bytes.min(self.max);
    }

    /// Doubles the window if it is small for what was read.
    pub(super) fn grow(&mut self, reads: u64) {
        while reads >= self.grow_at() {
            self.bytes = (self.bytes * 2).min(self.max);
        }
    }

    /// Doubles the window, because the peer has used all of it.
    pub(super) fn double(&mut self) {
        self.bytes = (self.bytes * 2).min(self.max);
    }

    /// Records a sample. Returns whether a second has passed, so that the window may be smaller.
    pub(super) fn sample(&mut self, reads: u64) -> bool {
        self.samples += 1;
        let is_over = self.samples >= EPOCH_SAMPLES;
        if is_over {
            let read = reads.saturating_sub(self.epoch_reads);
            if read < self.bytes / 4 {
                self.bytes = (self.bytes - self.bytes / 8).max(ACTIVE_WINDOW_MIN);
            }
            (self.samples, self.epoch_reads) = (0, reads);
        }
        is_over
    }
}

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
