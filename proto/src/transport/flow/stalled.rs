//! Readers that are stalled for long, which end when others wait for what they hold.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::monitor::StreamUsage;
use super::{BASE_WINDOW, BufferPool, FlowState, SessionFlow};

/// Samples without a read after which a stream may end: 10 s.
const SAMPLES_TO_END: u32 = 200;

impl BufferPool {
    /// Ends at most one stalled stream of each session whose window is exhausted, or one of the
    /// session that holds the most if the pool is.
    pub(super) fn end_stalled(&self, sessions: &[Weak<SessionFlow>]) {
        let refused = self.refused.load(Ordering::Relaxed);
        if refused > 0 {
            self.refused.store(refused - 1, Ordering::Relaxed);
        }
        let mut largest: Option<(u64, Arc<SessionFlow>)> = None;
        for session in sessions.iter().filter_map(Weak::upgrade) {
            let state = session.lock();
            if !state.is_stalled_for_long() {
                continue;
            }
            if session.is_exhausted(&state) && state.is_waited_for() {
                state.end_stalled();
                continue;
            }
            let held = session.memory(state.stalled.bytes);
            let is_full = self.free() < session.memory(BASE_WINDOW);
            drop(state);
            let is_larger = largest.as_ref().is_none_or(|(most, _)| held > *most);
            if refused > 0 && is_full && is_larger {
                largest = Some((held, session));
            }
        }
        if let Some((_, session)) = largest {
            session.lock().end_stalled();
        }
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
    /// most.
    fn end_stalled(&self) {
        let mut sources = HashMap::<u64, u64>::new();
        for usage in self.stalled_for_long() {
            *sources.entry(usage.source()).or_default() += usage.unread;
        }
        let longest = self.stalled_for_long().max_by_key(|usage| {
            let held = sources.get(&usage.source()).copied();
            (held, usage.idle_samples)
        });
        if let Some(read_monitor) = longest.and_then(StreamUsage::read_monitor) {
            read_monitor.end_stalled();
        }
    }
}
