//! 20,000 records under load.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_tests::dns::{Load, LoadedServer};
use tunnel_tests::process::ScratchDir;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_records_are_answered_at_five_thousand_queries_a_second() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let names = 20_000;
    let server = LoadedServer::start(&scratch, names).await?;
    let load = Load {
        server: server.address,
        names,
        per_second: 5000,
        duration: Duration::from_secs(2),
    };
    let found = load.run().await?;
    let summary = format!(
        "{} asked, {} lost, {} wrong",
        found.asked, found.lost, found.wrong
    );
    ensure!(found.asked >= 9_000, "{summary}");
    ensure!(found.wrong == 0, "{summary}");
    // On a busy machine a full buffer may drop a datagram.
    ensure!(found.lost * 100 <= found.asked, "{summary}");
    Ok(())
}
