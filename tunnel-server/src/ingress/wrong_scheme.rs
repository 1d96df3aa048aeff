//! The answer to plain HTTP on a port that speaks HTTPS.

use tokio::io::AsyncWriteExt;
use tracing::debug;

use super::access_log::AccessLog;
use super::caller_stream::CallerStream;
use super::error::ProxyError;
use super::outcome::Outcome;
use super::peer::CallerAddr;
use crate::metrics::Metrics;

/// Answers 400 without reading the request, and ends the connection.
pub(super) async fn refuse_http(
    mut stream: CallerStream,
    listener: &'static str,
    peer: CallerAddr,
    metrics: &Metrics,
) {
    let failure = ProxyError::new(Outcome::BadRequest, TEXT);
    let mut access_log = AccessLog::start(listener, peer, "plain HTTP", metrics);
    access_log.unreadable();
    access_log.status(failure.outcome.status());
    access_log.fail(&failure);
    let answer = answer(&failure);
    let answered = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    };
    if let Err(error) = answered.await {
        debug!(%error, "cannot answer plain HTTP on a port that speaks HTTPS");
    }
}

fn answer(failure: &ProxyError) -> String {
    let (code, text) = (failure.outcome, &failure.text);
    let length = text.len() + 1;
    format!(
        "HTTP/1.1 400 Bad Request\r\nX-Tunnel-Error: {code}\r\n\
         Content-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{text}\n"
    )
}

const TEXT: &str =
    "this port speaks HTTPS; use https:// here, or send plain HTTP to the HTTP listener";
