//! The log of received requests.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedRequest {
    /// Time at which its head had been read.
    pub at: Instant,
    pub user: String,
    /// API verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: String,
    pub method: String,
    /// Plural name of the kind, empty for discovery requests.
    pub resource: String,
    /// Subresource, empty for the object itself.
    pub subresource: String,
    /// Namespace, empty for cluster-scoped requests.
    pub namespace: String,
    /// Name of the object, empty for collections.
    pub name: String,
    pub path: String,
    pub user_agent: String,
    pub content_type: String,
    /// Status of the answer; 0 while there is none.
    pub status: u16,
}

impl RecordedRequest {
    /// Returns whether the request changes an object.
    pub fn is_write(&self) -> bool {
        ["create", "update", "patch", "delete"].contains(&self.verb.as_str())
    }
}

/// All requests so far. Clones share them.
#[derive(Debug, Default, Clone)]
pub(super) struct RequestLog(Arc<Mutex<Vec<RecordedRequest>>>);

impl RequestLog {
    fn lock(&self) -> MutexGuard<'_, Vec<RecordedRequest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a request and returns its number.
    pub(super) fn push(&self, recorded: RecordedRequest) -> usize {
        let mut all = self.lock();
        all.push(recorded);
        all.len() - 1
    }

    pub(super) fn answered(&self, number: usize, status: u16) {
        if let Some(recorded) = self.lock().get_mut(number) {
            recorded.status = status;
        }
    }

    pub(super) fn all(&self) -> Vec<RecordedRequest> {
        self.lock().clone()
    }
}
