//! The end of a stream, for tasks that do not read it because they wait for a reader themselves.

use std::sync::Arc;
use std::task::{Context, Poll};

use crate::transport::ReadMonitor;

/// What a transport knows of the cut of a stream.
pub trait CutSignal: Send + Sync + std::fmt::Debug {
    /// Returns whether the peer has cut the stream or the session was lost, even if bytes before that
    /// are unread.
    fn is_cut(&self) -> bool;
}

/// Observes whether a stream was cut, or must end because its reader is stalled.
#[derive(Debug, Clone)]
pub struct StreamWatch {
    pub(super) cut: Arc<dyn CutSignal>,
    pub(super) read_monitor: Arc<ReadMonitor>,
}

impl StreamWatch {
    /// Creates an observer of a socket, which holds no memory that others wait for.
    pub fn of_socket(cut: Arc<dyn CutSignal>) -> Self {
        Self {
            cut,
            read_monitor: Arc::default(),
        }
    }

    /// Returns whether the peer has cut the stream or the session was lost, even if bytes before that
    /// are unread.
    pub fn is_cut(&self) -> bool {
        self.cut.is_cut()
    }

    /// Returns whether the stream must end because its reader is stalled.
    pub fn is_stalled(&self) -> bool {
        self.read_monitor.must_end()
    }

    /// Polls for the time when what is written to the stream waits, because its source holds the most
    /// of what the peer is short of. One task at a time can wait.
    pub fn poll_held(&self, cx: &Context<'_>) -> Poll<()> {
        self.read_monitor.poll_held(cx)
    }

    /// Lets what is written to the stream wait, as [`Self::poll_held`] says. For tests.
    #[cfg(any(test, feature = "test-util"))]
    pub fn hold(&self) {
        self.read_monitor.hold();
    }

    /// Makes the stream one that must end, as [`Self::poll_stalled`] says. For tests.
    #[cfg(any(test, feature = "test-util"))]
    pub fn end_stalled(&self) {
        self.read_monitor.end_stalled();
    }

    /// Returns whether a new stream of the same source would be refused, because the source holds the
    /// most of what this end or the peer is short of.
    pub fn is_source_refused(&self) -> bool {
        self.read_monitor.is_source_refused()
    }

    /// Polls for the time when the stream must end because its reader is stalled. One task at a time
    /// can wait.
    pub fn poll_stalled(&self, cx: &Context<'_>) -> Poll<()> {
        self.read_monitor.poll_stalled(cx)
    }
}
