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

/// Returns a metric from the meta port, see [`value`]; 0 if the page has no such series yet.
///
/// # Errors
/// Returns an error if the reference does not list the metric.
pub async fn metric(meta: SocketAddr, series: &str) -> Result<u64> {
    let name = series.split('{').next().unwrap_or_default();
    let is_listed = REFERENCE.iter().any(|page| page.contains(name));
    ensure!(is_listed, "{name} is no metric");
    let page = meta_page(meta, "/metrics").await?;
    Ok(value(&page, series)?.unwrap_or(0))
}

/// Returns the value of a metric on a page. `series` is a name without labels, for the sum over all
/// of them, or a name with all its labels.
///
/// # Errors
/// Returns an error if a value is no natural number.
pub fn value(page: &str, series: &str) -> Result<Option<u64>> {
    let mut sum: Option<u64> = None;
    let found = page.lines().filter_map(|line| line.strip_prefix(series));
    for rest in found.filter(|rest| rest.starts_with(['{', ' '])) {
        let (_, number) = rest.rsplit_once(' ').unwrap_or_default();
        let number: u64 = number.parse().with_context(|| format!("{series}{rest}"))?;
        sum = Some(sum.unwrap_or(0) + number);
    }
    Ok(sum)
}

/// Pages that list the metrics.
const REFERENCE: [&str; 3] = [
    include_str!("../../docs/reference/monitoring.md"),
    include_str!("../../docs/reference/dns.md"),
    include_str!("../../docs/reference/kubernetes.md"),
];
/// Time limit for a running process.
const META_LIMIT: Duration = Duration::from_secs(5);
