//! The reference has every metric that a process exports.

use anyhow::{Result, ensure};
use tunnel_tests::guides::page;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::Listener;

use super::{CONNECT, Stack};

#[tokio::test(flavor = "multi_thread")]
async fn every_exported_metric_is_in_the_reference() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    let opened = |line: &str| Listener::Meta.opened(line);
    let agent = stack.agent.wait_for_line("meta port", CONNECT, opened);
    let agent = agent.await?;
    let reference = page("docs/reference/metrics.md")?;
    for meta in [stack.server.address(Listener::Meta), agent] {
        let text = meta_page(meta, "/metrics").await?;
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        for name in types.filter_map(|line| line.split(' ').next()) {
            let name = format!("| `{}", name.trim_end_matches("_total"));
            let is_listed = ["` |", "_total` |"]
                .iter()
                .any(|end| reference.contains(&format!("{name}{end}")));
            ensure!(is_listed, "{name} is not in the reference");
        }
    }
    Ok(())
}
