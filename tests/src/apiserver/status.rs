//! The Status answers of the API, with the reasons and codes of the real API server.

use serde_json::{Value, json};

use super::kinds::Kind;

/// The reason why a request failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    pub code: u16,
    /// Reason that clients evaluate.
    pub reason: &'static str,
    pub message: String,
    /// Value of `Retry-After` in seconds.
    pub retry_after: Option<u64>,
    details: Value,
}

impl Status {
    /// Creates a failure without details.
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            reason,
            message: message.into(),
            retry_after: None,
            details: Value::Null,
        }
    }

    fn about(self, kind: &Kind, name: &str) -> Self {
        let mut details = json!({ "name": name, "kind": kind.plural });
        if !kind.group.is_empty() {
            details["group"] = kind.group.into();
        }
        Self { details, ..self }
    }

    pub(super) fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} not found", kind.qualified());
        Self::new(404, "NotFound", message).about(kind, name)
    }

    pub(super) fn no_such_path() -> Self {
        Self::new(
            404,
            "NotFound",
            "the server could not find the requested resource",
        )
    }

    pub(super) fn already_exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} {name:?} already exists", kind.qualified());
        Self::new(409, "AlreadyExists", message).about(kind, name)
    }

    pub(super) fn conflict(kind: &Kind, name: &str) -> Self {
        let message = format!(
            "Operation cannot be fulfilled on {} {name:?}: the object has been modified; please apply your changes to the \
             latest version and try again",
            kind.qualified()
        );
        Self::new(409, "Conflict", message).about(kind, name)
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(super) fn method_not_allowed() -> Self {
        Self::new(
            405,
            "MethodNotAllowed",
            "the server does not allow this method on the requested resource",
        )
    }

    pub(super) fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// Returns the failure for a compacted revision.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(
            410,
            "Expired",
            format!("too old resource version: {asked} ({oldest})"),
        )
    }

    /// Returns the failure that asks the client to retry later, as the API's priority and fairness
    /// does.
    pub fn too_many_requests(seconds: u64) -> Self {
        let message = "too many requests, please try again later";
        let mut status = Self::new(429, "TooManyRequests", message);
        status.retry_after = Some(seconds);
        status
    }

    pub fn object(&self) -> Value {
        let mut object = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if !self.details.is_null() || self.retry_after.is_some() {
            let mut details = if self.details.is_null() {
                json!({})
            } else {
                self.details.clone()
            };
            if let Some(seconds) = self.retry_after {
                details["retryAfterSeconds"] = seconds.into();
            }
            object["details"] = details;
        }
        object
    }
}
