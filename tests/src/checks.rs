//! Checks that many scenarios make. Their messages show what was found.

use anyhow::{Result, ensure};

use crate::client::{BodyEnd, Endpoint, HttpReply, RawRequest, request};

/// Requests a page that must be answered with 200.
pub async fn get_ok(endpoint: impl Into<Endpoint>, host: &str, path: &str) -> Result<HttpReply> {
    let reply = request(endpoint, &RawRequest::get(host, path)).await?;
    ensure_status(&reply, 200)?;
    Ok(reply)
}

/// Fails unless the answer has this status.
pub fn ensure_status(reply: &HttpReply, status: u16) -> Result<()> {
    ensure!(reply.status == status, "{}: {}", reply.status, reply.text());
    Ok(())
}

/// Fails unless the server itself answered with this status and code.
pub fn ensure_refused(reply: &HttpReply, status: u16, code: &str) -> Result<()> {
    ensure_status(reply, status)?;
    let found = reply.header("x-tunnel-error");
    ensure!(found == Some(code), "{found:?}: {}", reply.text());
    Ok(())
}

/// Fails unless an answer or a stream ended in a reset.
pub fn ensure_reset(ended: &BodyEnd) -> Result<()> {
    ensure!(matches!(ended, BodyEnd::Reset(_)), "{ended:?}");
    Ok(())
}

/// Fails unless the text contains each of the parts.
pub fn ensure_contains(text: &str, parts: &[&str]) -> Result<()> {
    for part in parts {
        ensure!(text.contains(part), "{part:?} is missing in {text}");
    }
    Ok(())
}
