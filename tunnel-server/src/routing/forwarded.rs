//! A stream that another server forwards, counted once by its result.

use prometheus_client::metrics::counter::Counter;
use tunnel_routing::directory::Announcement;

/// The count of a forwarded stream whose answer is not known yet. When dropped, the stream counts as
/// opened.
#[derive(Debug)]
pub struct ForwardedCount {
    /// What the server that carries the stream had announced about the node.
    announcement: Announcement,
    result: Counter,
    not_here: Counter,
}

impl ForwardedCount {
    /// Creates the value for a stream that counts in `opened`, or else in `not_here`.
    pub fn new(announcement: Announcement, opened: Counter, not_here: Counter) -> Self {
        Self {
            announcement,
            result: opened,
            not_here,
        }
    }

    /// Counts the stream as refused by a server without a session of the node. Returns what the
    /// server had announced.
    pub fn refused_not_here(mut self) -> Announcement {
        self.result = self.not_here.clone();
        self.announcement
    }
}

impl Drop for ForwardedCount {
    fn drop(&mut self) {
        self.result.inc();
    }
}
