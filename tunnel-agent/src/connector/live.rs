//! The readiness of the process: it is ready while any connector has a live session, or is a standby.

use std::sync::Arc;

use parking_lot::Mutex;
use tunnel_proto::process::meta::{Readiness, ReadinessBlock};

/// The number of connectors with a live session, which blocks readiness while it is 0.
#[derive(Debug)]
pub(super) struct LiveSessions {
    readiness: Readiness,
    state: Mutex<LiveState>,
}

#[derive(Debug)]
struct LiveState {
    count: usize,
    block: Option<ReadinessBlock>,
}

impl LiveSessions {
    /// Creates the count without a session. `block` is released with the first one.
    pub(super) fn new(readiness: Readiness, block: Option<ReadinessBlock>) -> Arc<Self> {
        let state = Mutex::new(LiveState { count: 0, block });
        Arc::new(Self { readiness, state })
    }

    /// Returns whether there is a live session.
    pub(super) fn is_any(&self) -> bool {
        self.state.lock().count > 0
    }

    /// Counts a connector's live session until the guard is dropped.
    pub(super) fn add(self: &Arc<Self>) -> LiveSession {
        let mut state = self.state.lock();
        state.count += 1;
        state.block = None;
        LiveSession(self.clone())
    }
}

/// A guard that counts a live session, see [`LiveSessions::add`].
#[derive(Debug)]
pub(super) struct LiveSession(Arc<LiveSessions>);

impl Drop for LiveSession {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.count = state.count.saturating_sub(1);
        if state.count == 0 {
            state.block = Some(self.0.readiness.block(SESSION));
        }
    }
}

/// Name of the readiness block that a ready session removes.
pub(crate) const SESSION: &str = "session";
