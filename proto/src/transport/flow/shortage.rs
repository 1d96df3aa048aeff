//! A session whose window stalled streams hold, and which cannot get a larger one, is *short*.
//!
//! Credit belongs to a connection, so the next byte of any stream uses it, and only the sender can
//! choose the stream. The end that is short therefore reports it to its peer, and then grants a
//! little more credit, the *reserve*. At the peer, the sources that hold the most wait with their
//! streams, and get no new ones, for as long as the reports continue. So the reserve is left to the
//! others, whose small requests pass again and again. When the reserve is used up, because of
//! streams that had not stalled before, it grows, as far as memory permits.
//!
//! The peer reports in turn that it has refused a stream, or that a write waits for the end of the
//! shortage. So streams wait at the end that is short, too, and a reader that has been stalled for long ends there (`flow/stalled.rs`).
//!
//! ```text
//! receiver:  stalled streams hold all --> reports --> 100 ms later: reserve --> ... --> has room
//! sender:                                 sources that hold the most wait             they go on
//!                                         new streams and writes of theirs: report
//! ```

use std::collections::HashSet;
use std::sync::Weak;
use std::sync::atomic::Ordering;

use super::monitor::StreamUsage;
use super::shortage_state::REPORT_SAMPLES;
use super::sources::SourceTotals;
use super::{BufferPool, FlowState, SHORT_SHARE, SPARE_MIN, SessionFlow};

/// Credit that is added at once: a quarter of a first window.
const RESERVE_STEP: u64 = 64 << 10;
/// Samples after the first report in which the peer finds the sources that must wait: 100 ms.
const SAMPLES_TO_HOLD: u32 = 2;
/// Samples for which a session is short after its window was exhausted the last time: 1 s.
const SHORT_SAMPLES: u32 = 20;
/// Samples for which a report of the peer is valid: three reports.
const REPORT_VALID_SAMPLES: u32 = 3 * REPORT_SAMPLES;
/// Fraction of the pool that a source holds at least if it gets no new streams in any session.
const HEAVY_SHARE: u64 = 8;
/// The reserve of one session may be this fraction of what is free in the pool.
const RESERVE_SHARE: u64 = 2;

impl SessionFlow {
    /// Records the peer's report that it is short.
    pub(in crate::transport) fn set_peer_short(&self) {
        let state = &mut *self.lock();
        let before = std::mem::replace(&mut state.shortage.peer_samples_left, REPORT_VALID_SAMPLES);
        // Later, each sample does so.
        if before == 0 {
            self.hold_writers(state);
        }
    }

    /// Records the peer's report that a stream waits there, because this end is short.
    pub(in crate::transport) fn set_peer_waits(&self) {
        let state = &mut *self.lock();
        if state.shortage.is_short() {
            self.record_waiting(state);
        }
    }

    /// Reports a shortage of this end, and grants the reserve.
    pub(super) fn sample_shortage(&self, state: &mut FlowState) {
        if state.stalled.streams == 0 {
            state.shortage.samples_left = 0;
        } else if self.is_exhausted(state) {
            state.shortage.samples_left = SHORT_SAMPLES;
        }
        if !state.shortage.is_short() {
            // The credit stays, as a part of the window.
            (state.shortage.age, state.shortage.reserve) = (0, 0);
            return;
        }
        let age = state.shortage.age;
        state.shortage.samples_left -= 1;
        state.shortage.age = age.wrapping_add(1);
        if age.is_multiple_of(REPORT_SAMPLES) {
            self.transport.report_shortage();
        }
        // The peer must know of the shortage first.
        if age < SAMPLES_TO_HOLD {
            return;
        }
        let reads = self.reads.load(Ordering::Relaxed);
        let has_read = std::mem::replace(&mut state.shortage.reads, reads) != reads;
        let has_finished = std::mem::take(&mut state.shortage.has_finished_streams);
        let times_blocked = self.transport.times_blocked();
        if state.is_reserve_used_up(times_blocked) && self.can_extend_reserve(state) {
            if self.raise(state, RESERVE_STEP) {
                state.shortage.reserve += RESERVE_STEP;
                // The peer reports once that it is blocked. Until the reserve grows, it still is.
                state.shortage.times_blocked = times_blocked.unwrap_or_default();
            }
        } else if has_finished || (has_read && state.shortage.reserve > 0) {
            // quinn announces credit after an eighth of the window has been read, or when the window
            // grows. The reserve is smaller, as may be what a finished stream leaves.
            self.raise(state, 1);
        }
    }

    fn can_extend_reserve(&self, state: &FlowState) -> bool {
        let after = state.shortage.reserve + RESERVE_STEP;
        self.memory(after) <= self.pool.free() / RESERVE_SHARE
    }

    /// Returns whether a new stream can use the reserve, now or soon.
    pub(super) fn has_reserve(&self, state: &FlowState) -> bool {
        state.shortage.reserve > 0 || self.can_extend_reserve(state)
    }

    /// Lets the streams of the sources that hold the most at the peer wait while the peer is short.
    pub(super) fn hold_writers(&self, state: &mut FlowState) {
        let is_short = state.shortage.peer_samples_left > 0;
        if !is_short && !state.shortage.has_held_streams {
            state.shortage.held_sources.clear();
            return;
        }
        let mut totals = SourceTotals::default();
        if is_short {
            for usage in state.streams.iter().filter(|usage| usage.can_be_held()) {
                if let Some(bytes) = usage.writer.blocked_bytes(state.stream_window) {
                    totals.add(usage.source(), bytes);
                }
            }
        }
        let heavy = totals.heavy(0);
        state.shortage.has_held_streams = false;
        for usage in &state.streams {
            let is_held = heavy.contains(&usage.source()) && usage.can_be_held();
            usage.set_held(is_held);
            state.shortage.has_held_streams |= is_held;
        }
        state.shortage.held_sources = heavy;
    }

    pub(super) fn sample_peer_shortage(&self, state: &mut FlowState) {
        let samples_left = &mut state.shortage.peer_samples_left;
        *samples_left = samples_left.saturating_sub(1);
        let samples = &mut state.shortage.waiting_report_samples;
        *samples = samples.saturating_sub(1);
        self.hold_writers(state);
        // A request over a connection that was opened before waits like a new stream. Over a hop, its
        // server cannot refuse it.
        let is_waiting = state.shortage.has_held_streams
            && state.streams.iter().any(StreamUsage::has_held_write);
        if is_waiting && state.shortage.begin_waiting_report() {
            self.transport.report_waiting();
        }
    }
}

impl FlowState {
    /// Returns whether the peer has used up its credit, the reserve included.
    fn is_reserve_used_up(&self, times_blocked: Option<u64>) -> bool {
        let is_used_up = match times_blocked {
            Some(blocked) => blocked != self.shortage.times_blocked,
            // What is unread is known exactly.
            None => self.credit.total().saturating_sub(self.stalled.bytes) < SPARE_MIN,
        };
        is_used_up || self.shortage.reserve == 0
    }

    /// Returns the sources that hold most of the session's window, as of the last sample.
    pub(super) fn heavy_sources(&mut self) -> &HashSet<u64> {
        let streams = &self.streams;
        self.heavy_sources.get_or_insert_with(|| {
            let mut totals = SourceTotals::default();
            for usage in streams.iter().filter(|usage| usage.unread > 0) {
                totals.add(usage.source(), usage.unread);
            }
            totals.heavy(0)
        })
    }

    /// Adds what each source holds of `memory`, which all stalled streams hold together.
    fn add_stalled(&self, totals: &mut SourceTotals, memory: u64) {
        let stalled = u128::from(self.stalled.bytes).max(1);
        for usage in self.streams.iter().filter(|usage| usage.unread > 0) {
            let share = u128::from(memory) * u128::from(usage.unread) / stalled;
            totals.add(usage.source(), u64::try_from(share).unwrap_or(u64::MAX));
        }
    }
}

impl BufferPool {
    /// Finds the sources that hold the most if little is free. They get no new streams in any
    /// session.
    pub(super) fn find_heavy_sources(&self, sessions: &[Weak<SessionFlow>]) {
        let mut totals = SourceTotals::default();
        if self.free() < self.limit() / SHORT_SHARE {
            for session in sessions.iter().filter_map(Weak::upgrade) {
                let state = session.lock();
                // The bytes of stalled streams may be an upper bound.
                let memory = session.memory(state.stalled.bytes).min(state.reserved);
                state.add_stalled(&mut totals, memory);
            }
        }
        *self.heavy_sources.lock() = totals.heavy(self.limit() / HEAVY_SHARE);
    }
}
