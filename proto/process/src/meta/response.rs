//! Responses of the listeners for operators.

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;

/// A response whose body is in memory.
pub type FullResponse = Response<Full<Bytes>>;

/// Returns a plain text response.
pub fn text(status: StatusCode, body: impl Into<Bytes>) -> FullResponse {
    response(status, "text/plain; charset=utf-8", body)
}

/// Returns a JSON response, or 500 if `value` has no JSON form.
pub fn json(status: StatusCode, value: &impl Serialize) -> FullResponse {
    match serde_json::to_vec(value) {
        Ok(mut body) => {
            body.push(b'\n');
            response(status, "application/json", body)
        }
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

pub(super) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> FullResponse {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let content_type = http::HeaderValue::from_static(content_type);
    response
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, content_type);
    response
}
