//! Hostile peers, callers and neighbors on the path. The tests check the result of each attack, and
//! that others are served meanwhile.

mod addresses;
mod churn;
mod floods;
mod framing;
mod injected;
mod logs;
mod streams;

use std::time::Duration;

use anyhow::Result;
use tokio::time::Instant;
use tunnel_tests::checks::get_ok;
use tunnel_tests::client::Endpoint;
use tunnel_tests::stats::percentile;

/// Prints a measured figure to the test's output.
#[expect(clippy::print_stderr, reason = "shown with the test's output")]
pub(crate) fn report_figure(figure: &str) {
    eprintln!("{figure}");
}

/// Requests the target's metrics `count` times and expects 200 each time. Returns the 99th
/// percentile of the durations.
async fn scrape(endpoint: &Endpoint, host: &str, count: usize) -> Result<Duration> {
    let mut took = Vec::with_capacity(count);
    for _ in 0..count {
        let began = Instant::now();
        get_ok(endpoint.clone(), host, "/metrics").await?;
        took.push(began.elapsed());
    }
    took.sort_unstable();
    Ok(percentile(&took, 0.99))
}
