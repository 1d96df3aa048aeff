//! Waits for measured events, and reads the status of nodes.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;
use tokio::time::{Instant, sleep};

use crate::eventually::scaled;
use crate::metrics::meta_page;

/// The time until an event, or the time that was waited in vain.
pub type Measured = Result<Duration, Duration>;

/// Returns the time after `since` at which the check was first true, or `Err` with the waited time
/// if it was not true within `give_up`.
pub async fn until<Fut: Future<Output = bool>>(
    since: Instant,
    give_up: Duration,
    mut check: impl FnMut() -> Fut,
) -> Measured {
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

/// Waits until the check is true. `what` describes the failure.
pub(super) async fn ensure_soon<Fut: Future<Output = bool>>(
    what: &str,
    limit: Duration,
    check: impl FnMut() -> Fut,
) -> Result<()> {
    let reached = until(Instant::now(), scaled(limit), check).await;
    reached
        .map(drop)
        .map_err(|waited| anyhow!("{what} after {waited:?}"))
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

/// Times in seconds are measured to a hundredth.
const PAUSE: Duration = Duration::from_millis(10);
