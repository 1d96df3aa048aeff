//! The *active window* is what streams that do not stall share. It follows what they read.

/// Window of streams that are not read yet, in addition to the base window. quinn sends up to
/// 240 kB before the first acknowledgement, and TCP much less.
pub(super) const ACTIVE_WINDOW_MIN: u64 = 256 << 10;
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

    /// Makes the window at least `bytes` large for the first stream.
    pub(super) fn begin(&mut self, bytes: u64) {
        self.bytes = self.bytes.max(bytes.min(self.max));
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
