//! Answers that are no object: the Status of the API, with the reasons and codes of the real one.

use serde_json::{Value, json};

use super::kinds::Kind;

/// Why a request failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// The HTTP status.
    pub code: u16,
    /// The word that clients look at.
    pub reason: &'static str,
    /// For people.
    pub message: String,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<u64>,
    details: Value,
}

impl Status {
    /// A failure without details.
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

    pub(super) fn invalid(kind: &Kind, name: &str, problem: &str) -> Self {
        let message = format!("{} {name:?} is invalid: {problem}", kind.kind);
        Self::new(422, "Invalid", message).about(kind, name)
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

    /// The revision that was asked for is no longer kept.
    pub(super) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(
            410,
            "Expired",
            format!("too old resource version: {asked} ({oldest})"),
        )
    }

    /// A list's next part is of a revision that is no longer kept.
    pub(super) fn continue_expired() -> Self {
        Self::new(
            410,
            "Expired",
            "The provided continue parameter is too old to display a consistent list result. You must start a new list \
             without the continue parameter.",
        )
    }

    /// Asks the client to come back later, as the API's fairness does.
    pub fn too_many_requests(seconds: u64) -> Self {
        let message = "too many requests, please try again later";
        let mut status = Self::new(429, "TooManyRequests", message);
        status.retry_after = Some(seconds);
        status
    }

    /// As the API answers it.
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
