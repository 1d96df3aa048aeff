//! Waits for measured events, and reads metrics and status of the binaries.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::client::{RawRequest, request};

/// Returns the time after `since` at which the check was first true, or `Err` with the waited time
/// if it was not true within `give_up`.
pub async fn until<Fut: Future<Output = bool>>(
    since: Instant,
    give_up: Duration,
    mut check: impl FnMut() -> Fut,
) -> Result<Duration, Duration> {
    loop {
        if check().await {
            return Ok(since.elapsed());
        }
        if since.elapsed() >= give_up {
            return Err(since.elapsed());
        }
        sleep(PAUSE).await;
    }
}

/// Returns the sum of a metric over all its labels from the meta port; 0 if the metric is absent.
pub(super) async fn metric(meta: SocketAddr, name: &str) -> Result<f64> {
    let text = meta_page(meta, "/metrics").await?;
    Ok(text
        .lines()
        .filter(|line| {
            let rest = line.strip_prefix(name);
            rest.is_some_and(|rest| rest.starts_with(['{', ' ']))
        })
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum())
}

/// Returns a node's entry in `/nodes` of the server's meta port.
///
/// # Errors
/// Returns an error if the port does not answer, or does not know the node.
pub async fn node_status(meta: SocketAddr, node: &str) -> Result<Value> {
    let list = meta_page(meta, "/nodes").await?;
    let list: Vec<Value> = serde_json::from_str(&list).context("/nodes")?;
    let mut list = list.into_iter();
    list.find(|entry| entry["node"] == node)
        .with_context(|| format!("/nodes does not list {node}"))
}

async fn meta_page(meta: SocketAddr, path: &str) -> Result<String> {
    let get = RawRequest::get("meta", path);
    let reply = timeout(META_LIMIT, request(meta, &get)).await;
    let reply = reply.context("the meta port does not answer")??;
    ensure!(reply.status == 200, "{path}: {}", reply.status);
    Ok(reply.text())
}

/// Times in seconds are measured to a hundredth.
const PAUSE: Duration = Duration::from_millis(10);

/// Time limit for a running process.
const META_LIMIT: Duration = Duration::from_secs(5);
