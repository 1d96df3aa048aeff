//! Counts of streams and their bytes.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use prometheus_client::metrics::counter::Counter;

/// The totals of one session's streams.
#[derive(Debug, Default)]
pub struct Traffic {
    pub(super) bytes_in: AtomicU64,
    pub(super) bytes_out: AtomicU64,
    pub(super) streams: AtomicUsize,
}

impl Traffic {
    /// Returns the stream bytes received and sent, and the number of open streams.
    pub fn read(&self) -> (u64, u64, usize) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (
            load(&self.bytes_in),
            load(&self.bytes_out),
            self.streams.load(Ordering::Relaxed),
        )
    }
}

/// The payload bytes of one stream, without its header and reply, or of a connection. Clones share
/// their values.
#[derive(Debug, Clone, Default)]
pub struct ByteCount {
    received: Counter,
    sent: Counter,
}

impl ByteCount {
    /// Creates a byte count that advances these counters, which may belong to a metric.
    pub fn new(received: Counter, sent: Counter) -> Self {
        Self { received, sent }
    }

    /// Returns the bytes received from the peer and sent to it so far.
    pub fn read(&self) -> (u64, u64) {
        (self.received.get(), self.sent.get())
    }

    /// Adds bytes received from the peer, for connections that are not streams of a session.
    pub fn add_received(&self, bytes: usize) {
        self.received.inc_by(bytes as u64);
    }

    /// Adds bytes sent to the peer.
    pub fn add_sent(&self, bytes: usize) {
        self.sent.inc_by(bytes as u64);
    }
}
