//! Measures the embedded DNS under load: `cargo run --release -p tunnel-bench --bin dns [SECONDS]`,
//! with a release build of the server in the same directory. The load is 20,000 records and 5,000
//! queries per second, for 30 seconds by default.

use std::io::Write;
use std::time::Duration;

use anyhow::{Context, Result};
use tunnel_tests::dns::{Load, LoadedServer};
use tunnel_tests::process::ScratchDir;
use tunnel_tests::stats::percentile;

const NAMES: u32 = 20_000;
const PER_SECOND: u32 = 5000;
const SECONDS: u64 = 30;

#[tokio::main]
async fn main() -> Result<()> {
    let seconds = match std::env::args().nth(1) {
        Some(text) => text.parse().context("seconds")?,
        None => SECONDS,
    };
    let scratch = ScratchDir::new()?;
    let server = LoadedServer::start(&scratch, NAMES).await?;
    let load = Load {
        server: server.address,
        names: NAMES,
        per_second: PER_SECOND,
        duration: Duration::from_secs(seconds),
    };
    let found = load.run().await?;
    let micros = |share| percentile(&found.delays, share).as_micros();
    writeln!(
        std::io::stdout(),
        "{NAMES} records, {PER_SECOND} queries/s for {seconds} s: {} asked, {} lost, {} wrong; p50 {} us, p99 {} us, \
         p99.9 {} us, longest {} us",
        found.asked,
        found.lost,
        found.wrong,
        micros(0.5),
        micros(0.99),
        micros(0.999),
        micros(1.0),
    )?;
    Ok(())
}
