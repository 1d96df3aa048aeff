//! Waiting for something that is measured, and reading what the programs tell of themselves.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::time::{Instant, sleep, timeout};

use crate::client::{RawRequest, request};

/// How long after `since` the check was first true; `Err` with the time waited when it was not up to `give_up`.
pub(super) async fn until<Fut: Future<Output = bool>>(
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

/// The sum of a metric over all its labels, as the meta port shows it; 0 when it is not there.
///
/// # Errors
/// The port does not answer.
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

/// What `/nodes` of the server's meta port tells of a node.
///
/// # Errors
/// The port does not answer, or does not know the node.
pub(super) async fn node_status(meta: SocketAddr, node: &str) -> Result<Value> {
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

/// What is measured in seconds is seen to a hundredth.
const PAUSE: Duration = Duration::from_millis(10);

/// For a process that runs.
const META_LIMIT: Duration = Duration::from_secs(5);
