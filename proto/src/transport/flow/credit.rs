//! The credit of a peer: the bytes that it may have sent and that this end has not read.

/// What a peer may send. Both transports work alike: reading a byte returns its credit to the peer,
/// unless the window was lowered, because credit cannot be withdrawn. Then bytes that are read
/// reduce the excess first.
///
/// Bytes of discarded streams reduce the excess of the transport, too, but are not known here. So
/// the credit is an upper bound.
#[derive(Debug)]
pub(super) struct Credit {
    /// The window that was set at the transport.
    window: u64,
    /// Credit above the window, of larger windows before.
    excess: u64,
    /// Bytes that had been read when the excess was last reduced.
    reads: u64,
    /// Set until the next sample after the window was lowered while streams are read. Until then a
    /// read may be under way whose credit was returned before.
    is_read_under_way: bool,
}

impl Credit {
    pub(super) fn new(window: u64) -> Self {
        Self {
            window,
            excess: 0,
            reads: 0,
            is_read_under_way: false,
        }
    }

    pub(super) fn window(&self) -> u64 {
        self.window
    }

    /// Returns what larger windows have left.
    pub(super) fn excess(&self) -> u64 {
        self.excess
    }

    /// Returns the bytes that the peer may have unread at most.
    pub(super) fn total(&self) -> u64 {
        self.window.saturating_add(self.excess)
    }

    pub(super) fn raise(&mut self, bytes: u64) {
        self.window = self.window.saturating_add(bytes);
    }

    /// Lowers the window. `has_readers` says whether a stream is read at the same time.
    pub(super) fn lower(&mut self, window: u64, has_readers: bool) {
        self.excess = self
            .excess
            .saturating_add(self.window.saturating_sub(window));
        self.window = window;
        self.is_read_under_way = has_readers;
    }

    /// Reduces the excess by what was read since the last sample. `reads` is the number of bytes
    /// that were read so far.
    pub(super) fn begin_sample(&mut self, reads: u64) {
        let read = reads.saturating_sub(self.reads);
        self.reads = reads;
        if !std::mem::take(&mut self.is_read_under_way) {
            self.excess = self.excess.saturating_sub(read);
        }
    }
}
