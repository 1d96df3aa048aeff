//! The pages of a meta port, and the metrics on them.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::timeout;

use crate::client::{RawRequest, request};
use crate::eventually::scaled;

/// Returns a page of the meta port. Any other status than 200 is an error.
pub async fn meta_page(meta: SocketAddr, path: &str) -> Result<String> {
    let get = RawRequest::get("meta", path);
    let reply = timeout(scaled(META_LIMIT), request(meta, &get)).await;
    let reply = reply.context("the meta port does not answer")??;
    ensure!(reply.status == 200, "{path}: {}", reply.status);
    Ok(reply.text())
}

/// Returns a metric from the meta port, see [`value`]; 0 if the metric is absent.
pub async fn metric(meta: SocketAddr, series: &str) -> Result<u64> {
    let page = meta_page(meta, "/metrics").await?;
    Ok(value(&page, series).unwrap_or(0))
}

/// Returns the sum of a metric on a page over all labels, which may be no whole number.
pub fn sum(page: &str, name: &str) -> f64 {
    let found = page.lines().filter_map(|line| line.strip_prefix(name));
    let found = found.filter(|rest| rest.starts_with(['{', ' ']));
    found
        .filter_map(|rest| rest.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

/// Returns the value of a metric on a page. `series` is a name without labels, for the sum over all
/// of them, or a name with all its labels.
pub fn value(page: &str, series: &str) -> Option<u64> {
    let found = page.lines().filter_map(|line| line.strip_prefix(series));
    let mut found = found.filter(|rest| rest.starts_with(['{', ' '])).peekable();
    found.peek()?;
    found
        .map(|rest| rest.rsplit(' ').next()?.parse::<u64>().ok())
        .sum()
}

/// Time limit for a running process.
const META_LIMIT: Duration = Duration::from_secs(5);
