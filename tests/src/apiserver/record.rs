//! The requests that came in.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedRequest {
    /// When its head had been read.
    pub at: Instant,
    /// Who sent it.
    pub user: String,
    /// The API's verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`.
    pub verb: String,
    /// The HTTP method.
    pub method: String,
    /// The plural name of the kind, empty for questions about the API itself.
    pub resource: String,
    /// The namespace, empty outside any.
    pub namespace: String,
    /// The object's name, empty for collections.
    pub name: String,
    /// Path and query.
    pub path: String,
    /// Its `User-Agent`.
    pub user_agent: String,
    /// Its `Content-Type`.
    pub content_type: String,
    /// The status of the answer; 0 while there is none.
    pub status: u16,
}

impl RecordedRequest {
    /// Whether it was to change an object.
    pub fn is_write(&self) -> bool {
        ["create", "update", "patch", "delete", "deletecollection"].contains(&self.verb.as_str())
    }
}

/// All requests so far. Clones share them.
#[derive(Debug, Default, Clone)]
pub(super) struct RequestLog(Arc<Mutex<Vec<RecordedRequest>>>);

impl RequestLog {
    fn lock(&self) -> MutexGuard<'_, Vec<RecordedRequest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request and returns its number.
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
