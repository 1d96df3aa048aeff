//! The answer to plain HTTP on a port that speaks HTTPS.

use tokio::io::AsyncWriteExt;
use tracing::debug;

use super::caller_addr::CallerAddr;
use super::caller_stream::CallerStream;
use super::error::ProxyError;
use super::request_record::RequestRecord;
use crate::metrics::Metrics;
use crate::outcome::Outcome;

/// Answers 400 without reading the request, and ends the connection.
pub(super) async fn refuse_http(
    mut stream: CallerStream,
    listener: &'static str,
    addr: CallerAddr,
    metrics: &Metrics,
) {
    let failure = ProxyError::new(Outcome::BadRequest, TEXT);
    let mut record = RequestRecord::start(listener, addr, "plain HTTP", metrics);
    record.unreadable();
    record.status(failure.outcome.status());
    record.fail(&failure);
    let answer = failure.last_answer();
    let answered = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    };
    if let Err(error) = answered.await {
        debug!(%error, "cannot answer plain HTTP on a port that speaks HTTPS");
    }
}

const TEXT: &str =
    "this port speaks HTTPS; use https:// here, or send plain HTTP to the HTTP listener";
