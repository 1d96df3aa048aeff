//! Readers that are stalled for long, which end when others wait for what they hold.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::monitor::{StreamActivity, StreamUsage};
use super::sources::SourceTotals;
use super::{BufferPool, FlowState, SessionFlow};

/// Samples without a read after which a stream may end: 10 s.
const SAMPLES_TO_END: u32 = 200;

impl BufferPool {
    /// Ends at most one stalled stream of each session whose window is exhausted, and one of the
    /// source that holds the most if the pool is full.
    pub(super) fn end_stalled(&self, sessions: &[Weak<SessionFlow>]) {
        let refused = self.refused.load(Ordering::Relaxed);
        if refused > 0 {
            self.refused.store(refused - 1, Ordering::Relaxed);
        }
        let mut stalled = Vec::new();
        for session in sessions.iter().filter_map(Weak::upgrade) {
            let state = session.lock();
            if !state.is_stalled_for_long() {
                continue;
            }
            if session.is_exhausted(&state) && state.is_waited_for() {
                state.end_stalled();
            } else {
                drop(state);
                stalled.push(session);
            }
        }
        if refused > 0 && self.is_full() {
            end_heaviest(&stalled);
        }
    }
}

/// Ends the stream that has been stalled for the longest time, of the source that holds the most in
/// all sessions.
fn end_heaviest(sessions: &[Arc<SessionFlow>]) {
    let mut totals = SourceTotals::default();
    for session in sessions {
        for usage in session.lock().stalled_for_long() {
            totals.add(usage.source(), session.memory(usage.unread));
        }
    }
    let heaviest = sessions
        .iter()
        .filter_map(|session| session.lock().heaviest(&totals))
        .max_by_key(|(held, _)| *held);
    if let Some((_, activity)) = heaviest {
        activity.end_stalled();
    }
}

impl FlowState {
    /// Returns whether another stream waits for the window.
    fn is_waited_for(&self) -> bool {
        self.refused > 0 || self.streams.iter().any(|usage| usage.is_waiting)
    }

    fn stalled_for_long(&self) -> impl Iterator<Item = &StreamUsage> {
        self.streams
            .iter()
            .filter(|usage| usage.unread > 0 && usage.idle_samples >= SAMPLES_TO_END)
    }

    fn is_stalled_for_long(&self) -> bool {
        self.stalled_for_long().next().is_some()
    }

    /// Ends the stream that has been stalled for the longest time, of the source that holds the
    /// most in this session.
    fn end_stalled(&self) {
        let mut totals = SourceTotals::default();
        for usage in self.stalled_for_long() {
            totals.add(usage.source(), usage.unread);
        }
        if let Some((_, activity)) = self.heaviest(&totals) {
            activity.end_stalled();
        }
    }

    /// Returns the stream that has been stalled for the longest time, of the source that holds the
    /// most, with what it holds and the samples since the last read.
    fn heaviest(&self, totals: &SourceTotals) -> Option<((u64, u32), Arc<StreamActivity>)> {
        self.stalled_for_long()
            .filter_map(|usage| {
                let held = (totals.of(usage.source()), usage.idle_samples);
                Some((held, usage.activity()?.clone()))
            })
            .max_by_key(|(held, _)| *held)
    }
}
