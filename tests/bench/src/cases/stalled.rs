//! Case 8: readers that never read, and their effect on other requests through the same agent.

use std::time::Duration;

use anyhow::{Context, Result};
use tunnel_tests::stats::percentile;

use crate::bench::BenchRun;
use crate::load;
use crate::machine::{CpuMonitor, resident_kib};
use crate::metric::{
    FAILED, Metric, STALLED_1, STALLED_8, STALLED_64, STALLED_512, STALLED_MEMORY,
};
use crate::systems::{Culvert, H2, H2_HOP, QUIC, QUIC_HOP, Shape};
use crate::target::Bound::AtMost;
use crate::target::Of::Itself;
use crate::target::Target;

pub(super) const TARGETS: &[Target] = &[
    Target::new(H2, &FAILED, Itself, AtMost(0.0)),
    Target::new(H2, &STALLED_1, Itself, AtMost(1.3)),
    Target::new(H2, &STALLED_8, Itself, AtMost(1.3)),
    Target::new(H2, &STALLED_64, Itself, AtMost(1.3)),
    Target::new(H2, &STALLED_512, Itself, AtMost(1.3)),
    // The buffer pools of server and agent, 512 MiB and 128 MiB, and the memory of both without
    // readers.
    Target::new(H2, &STALLED_MEMORY, Itself, AtMost(680.0)),
    Target::new(QUIC, &FAILED, Itself, AtMost(0.0)),
    Target::new(QUIC, &STALLED_1, Itself, AtMost(1.3)),
    Target::new(QUIC, &STALLED_8, Itself, AtMost(1.3)),
    Target::new(QUIC, &STALLED_64, Itself, AtMost(1.3)),
    Target::new(QUIC, &STALLED_512, Itself, AtMost(1.3)),
    Target::new(QUIC, &STALLED_MEMORY, Itself, AtMost(680.0)),
    Target::new(H2_HOP, &FAILED, Itself, AtMost(0.0)),
    Target::new(H2_HOP, &STALLED_1, Itself, AtMost(1.3)),
    Target::new(H2_HOP, &STALLED_8, Itself, AtMost(1.3)),
    Target::new(H2_HOP, &STALLED_64, Itself, AtMost(1.3)),
    Target::new(H2_HOP, &STALLED_512, Itself, AtMost(1.3)),
    // One more server, with a buffer pool of its own.
    Target::new(H2_HOP, &STALLED_MEMORY, Itself, AtMost(1220.0)),
    Target::new(QUIC_HOP, &FAILED, Itself, AtMost(0.0)),
    Target::new(QUIC_HOP, &STALLED_1, Itself, AtMost(1.3)),
    Target::new(QUIC_HOP, &STALLED_8, Itself, AtMost(1.3)),
    Target::new(QUIC_HOP, &STALLED_64, Itself, AtMost(1.3)),
    Target::new(QUIC_HOP, &STALLED_512, Itself, AtMost(1.3)),
    Target::new(QUIC_HOP, &STALLED_MEMORY, Itself, AtMost(1220.0)),
];

const RATE: u32 = 200;
/// Limits for 512 readers. The window of each stream is smaller, because all readers share the
/// buffer pool.
const LIMITS: [&str; 2] = ["streamWindow: 256KiB", "streamsPerAgent: 2048"];
/// When the agent sends no byte for this long, all readers are stalled and their buffers are full.
/// Before that, each group of eight readers that uses up the connection's window causes a pause of
/// about 100 ms.
const STILL: Duration = Duration::from_millis(400);
const FILL: Duration = Duration::from_secs(30);

pub(super) async fn run(bench: &mut BenchRun) -> Result<()> {
    let systems = [
        (H2, "h2", false),
        (QUIC, "quic", false),
        (H2_HOP, "h2", true),
        (QUIC_HOP, "quic", true),
    ];
    for (name, transport, has_hop) in systems {
        let few: [(usize, &'static Metric); 3] =
            [(1, &STALLED_1), (8, &STALLED_8), (64, &STALLED_64)];
        let shape = Shape {
            transport,
            has_hop,
            ..Shape::default()
        };
        beside(bench, name, shape, &few).await?;
        if bench.options.full {
            let shape = Shape {
                limits: &LIMITS,
                ..shape
            };
            beside(bench, name, shape, &[(512, &STALLED_512)]).await?;
        }
    }
    Ok(())
}

async fn beside(
    bench: &mut BenchRun,
    name: &'static str,
    shape: Shape<'_>,
    readers: &[(usize, &'static Metric)],
) -> Result<()> {
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let server = stack.server_process().context("no server")?;
    let agent = stack.agent_process().context("no agent")?;
    let hop = stack.hop_process();
    let endpoint = stack.hop_endpoint().unwrap_or_else(|| stack.endpoint());
    let length = bench.length(2.0);
    for &(count, metric) in readers {
        let mut processes = bench.systems.processes();
        processes.extend([server, agent].into_iter().chain(hop));
        let watch = CpuMonitor::begin(&processes);
        let without = load::open(&endpoint, RATE, length, true).await?;
        let stalled = match load::stall(&endpoint, count).await {
            Ok(stalled) => stalled,
            Err(error) => {
                bench.record_error(name, &error);
                continue;
            }
        };
        full(&stack).await?;
        let with = load::open(&endpoint, RATE, length, true).await?;
        let memory = [server, agent].into_iter().chain(hop).map(resident_kib);
        let memory = memory.sum::<f64>() / 1024.0;
        drop(stalled);
        let foreign = watch.end().foreign;
        let p99 = |asked: &load::LoadResult| percentile(&asked.times, 0.99).as_secs_f64();
        bench.record(name, metric, p99(&with) / p99(&without), foreign);
        #[expect(clippy::cast_precision_loss, reason = "a count for people")]
        bench.record(
            name,
            &FAILED,
            (without.failed + with.failed) as f64,
            foreign,
        );
        let most = if bench.options.full { 512 } else { 64 };
        if count == most {
            bench.record(name, &STALLED_MEMORY, memory, foreign);
        }
    }
    Ok(())
}

/// Waits until the server receives no more bytes from the agent.
async fn full(stack: &Culvert) -> Result<()> {
    let began = std::time::Instant::now();
    let mut before = None;
    while began.elapsed() < FILL {
        let nodes = stack.server()?.nodes().await?;
        let received = nodes.first().and_then(|node| node["bytesIn"].as_u64());
        if received == before {
            return Ok(());
        }
        before = received;
        tokio::time::sleep(STILL).await;
    }
    anyhow::bail!("the readers' streams are not full yet")
}
