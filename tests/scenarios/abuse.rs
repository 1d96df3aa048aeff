//! Hostile peers, callers and neighbours on the path: what each of them gets, and that others notice nothing.

mod addresses;
mod churn;
mod floods;
mod framing;
mod injected;
mod logs;
mod streams;

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_tests::client::{Endpoint, RawRequest, request};
use tunnel_tests::stats::percentile;

/// Tells a figure that was measured on the way.
#[expect(clippy::print_stderr, reason = "shown with the test's output")]
pub(crate) fn report_figure(figure: &str) {
    eprintln!("{figure}");
}

/// Asks `count` times for the target's metrics; each must be answered. The 99th percentile of the times.
async fn scrape(endpoint: &Endpoint, host: &str, count: usize) -> Result<Duration> {
    let mut took = Vec::with_capacity(count);
    for _ in 0..count {
        let began = Instant::now();
        let reply = request(endpoint.clone(), &RawRequest::get(host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
        took.push(began.elapsed());
    }
    took.sort_unstable();
    Ok(percentile(&took, 0.99))
}
