//! What a session knows of a shortage, see `flow/shortage.rs`.

use std::collections::HashSet;

/// What a session knows of its own shortage, and of its peer's.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// Samples for which this end is short. 0: it is not.
    pub(super) samples_left: u32,
    /// Samples since this end became short.
    pub(super) age: u32,
    /// Credit that was added because of the shortage.
    pub(super) reserve: u64,
    /// How often the peer had used all of its credit when the reserve last grew.
    pub(super) times_blocked: u64,
    /// Bytes that had been read at the last sample.
    pub(super) reads: u64,
    /// Set when a stream has finished since the last sample. The peer may not know of its credit.
    pub(super) has_finished_streams: bool,
    /// Samples for which the peer is short.
    pub(super) peer_samples_left: u32,
    /// The sources that may not open streams while the peer is short.
    pub(super) held_sources: HashSet<u64>,
    pub(super) has_held_streams: bool,
    /// Samples until the next report that a stream waits.
    pub(super) waiting_report_samples: u32,
}

impl Shortage {
    pub(super) fn is_short(&self) -> bool {
        self.samples_left > 0
    }

    /// Returns whether to report now that a stream waits for memory of the peer.
    pub(super) fn begin_waiting_report(&mut self) -> bool {
        let is_due = self.peer_samples_left > 0 && self.waiting_report_samples == 0;
        if is_due {
            self.waiting_report_samples = REPORT_SAMPLES;
        }
        is_due
    }

    /// Returns whether the streams of a source wait because the peer is short.
    pub(super) fn is_held(&self, source: u64) -> bool {
        self.held_sources.contains(&source)
    }
}

/// Samples between two reports: 200 ms.
pub(super) const REPORT_SAMPLES: u32 = 4;
