//! Large answers arrive whole while the memory of both processes stays flat. Scrapes have no
//! pauses.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tunnel_tests::client::{BodyEnd, Exchange, KeepAliveClient, RawRequest};
use tunnel_tests::eventually::scaled;
use tunnel_tests::gear::Gear;
use tunnel_tests::targets::repeated_block;

use super::Stack;
use super::memory::kib;
use crate::abuse::report_figure;

tests_of! {
    fn large_answer_arrives_whole_with_flat_memory_over_quic() = large_answer("quic");
    fn large_answer_arrives_whole_with_flat_memory_over_h2() = large_answer("h2");
}

async fn large_answer(transport: &str) -> Result<()> {
    let mut stack = Stack::start(&[], &["--transport", transport]).await?;
    let [server, agent] = [stack.server.process().id(), stack.agent.id()];
    let [server, agent] = [server.context("server")?, agent.context("agent")?];
    // The first answer grows the windows and buffers to their final size.
    read_answer(&stack, 128 << 20).await?;
    let before = [
        ("server", server, kib(server, "VmHWM:")?),
        ("agent", agent, kib(agent, "VmHWM:")?),
    ];
    let bytes = bulk_bytes();
    let began = Instant::now();
    read_answer(&stack, bytes).await?;
    let rate = bytes as f64 / began.elapsed().as_secs_f64() / f64::from(1 << 20);
    for (name, id, before) in before {
        let after = kib(id, "VmHWM:")?;
        let text = format!(
            "{bytes} bytes over {transport}: {rate:.0} MiB/s, {name} peaks at {before} KiB, then {after} KiB"
        );
        report_figure(&text);
        ensure!(after < before + GROWTH_KIB, "{text}");
    }
    Ok(())
}

/// Reads `n` bytes and compares each of them with the expected one.
async fn read_answer(stack: &Stack, n: u64) -> Result<()> {
    let get = stack.get(&format!("/repeated/{n}"));
    let mut answer = Exchange::start(stack.http(), &get).await?;
    let block = repeated_block();
    let twice = block.repeat(2);
    let mut read = 0_u64;
    while let Some(data) = answer.data().await {
        let at = usize::try_from(read % block.len() as u64)?;
        let expected = twice.get(at..at + data.len());
        ensure!(expected == Some(&*data), "wrong bytes at {read}");
        read += data.len() as u64;
    }
    ensure!(read == n, "{read} of {n} bytes");
    ensure!(answer.ended() == Some(&BodyEnd::CleanLength));
    Ok(())
}

/// Returns the size of the large answer. The published figure is that of the full gear.
fn bulk_bytes() -> u64 {
    Gear::current().pick(1_u64, 10) << 30
}

/// Allowed growth of the peak memory: far below the size of the answer, and above the memory that
/// an allocator retains.
const GROWTH_KIB: u64 = 16 << 10;

/// Scrapes 1 MiB repeatedly on one connection, over each transport. A scrape takes less than 30 ms,
/// which excludes the pause of a delayed acknowledgement (40 ms).
#[tokio::test(flavor = "multi_thread")]
async fn scrapes_of_1_mib_have_no_pauses() -> Result<()> {
    for transport in ["quic", "h2"] {
        let stack = Stack::start(&[], &["--transport", transport]).await?;
        let scrape = RawRequest::new("GET", &format!("/repeated/{}", 1 << 20), &stack.host());
        let before = stack.exporter.traffic().accepted();
        let mut caller = KeepAliveClient::connect(stack.http()).await?;
        caller.request(&scrape).await?;
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let began = Instant::now();
            for _ in 0..10 {
                let reply = caller.request(&scrape).await?;
                ensure!(reply.body.len() == 1 << 20);
            }
            best = best.min(began.elapsed() / 10);
        }
        report_figure(&format!("1 MiB over {transport} takes {best:?}"));
        ensure!(best < scaled(Duration::from_millis(30)));
        let connections = stack.exporter.traffic().accepted() - before;
        // The server reuses a target connection only if it is idle when the next request arrives.
        // Most are.
        let line = format!("51 scrapes over {transport} took {connections} connections");
        report_figure(&line);
        ensure!(connections <= 25, "{line}");
    }
    Ok(())
}
