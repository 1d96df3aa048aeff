//! Case 9: memory of idle processes, agents and streams.

use std::time::Duration;

use anyhow::{Context, Result};
use tunnel_tests::process::{Listener, Process};

use super::growth::{self, Costs};
use crate::bench::BenchRun;
use crate::components::{self, agents::ALL_READY};
use crate::load;
use crate::machine::{anonymous_kib, context_switches, cpu_seconds, resident_kib};
use crate::metric::{
    AGENT_ANONYMOUS, AGENT_MEMORY, AGENT_SIZE, AGENT_WAKEUPS, AGENTS_100, AGENTS_1000,
    AGENTS_10000, GIVEN_BACK, HANDSHAKE_CPU, IDLE_10000, Metric, SERVER_ANONYMOUS, SERVER_MEMORY,
    SERVER_WAKEUPS, STREAM_AGENT, STREAM_SERVER,
};
use crate::systems::{Culvert, H2, QUIC, Shape};
use crate::target::Bound::AtMost;
use crate::target::Of::Itself;
use crate::target::Target;

pub(super) const TARGETS: &[Target] = &[
    Target::new(H2, &SERVER_ANONYMOUS, Itself, AtMost(3.0)),
    Target::new(H2, &AGENT_ANONYMOUS, Itself, AtMost(2.0)),
    Target::new(H2, &SERVER_WAKEUPS, Itself, AtMost(1.0)),
    Target::new(H2, &AGENT_WAKEUPS, Itself, AtMost(1.0)),
    Target::new(H2, &AGENTS_1000, Itself, AtMost(20.0)),
    Target::new(H2, &IDLE_10000, Itself, AtMost(0.06)),
    Target::new(H2, &STREAM_SERVER, Itself, AtMost(8.0)),
    Target::new(H2, &STREAM_AGENT, Itself, AtMost(8.0)),
    Target::new(H2, &GIVEN_BACK, Itself, AtMost(1.2)),
    Target::new(QUIC, &SERVER_ANONYMOUS, Itself, AtMost(3.0)),
    Target::new(QUIC, &AGENT_ANONYMOUS, Itself, AtMost(2.0)),
    Target::new(QUIC, &SERVER_WAKEUPS, Itself, AtMost(1.0)),
    Target::new(QUIC, &AGENT_WAKEUPS, Itself, AtMost(1.0)),
    Target::new(QUIC, &AGENTS_1000, Itself, AtMost(30.0)),
    Target::new(QUIC, &IDLE_10000, Itself, AtMost(0.06)),
    Target::new(QUIC, &STREAM_SERVER, Itself, AtMost(8.0)),
    Target::new(QUIC, &STREAM_AGENT, Itself, AtMost(8.0)),
    Target::new(QUIC, &GIVEN_BACK, Itself, AtMost(1.2)),
    Target::new(H2, &AGENT_SIZE, Itself, AtMost(8.0)),
];

const STREAMS: usize = 1000;
const LIMITS: [&str; 1] = ["streamsPerAgent: 2048"];
/// Few callers, so that 20,000 open files are enough for 10,000 agents over TCP.
const FEW_CALLERS: [&str; 1] = ["callersTotal: 256"];
/// Time after which processes, agents and streams are idle once they have started.
const SETTLE_TIME: Duration = Duration::from_secs(1);
const GIVE_BACK: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(10);
/// Time limit for all agents to connect: 10,000 handshakes on two busy processors.
const ALL_CONNECT: Duration = Duration::from_secs(90);

pub(super) async fn run(bench: &mut BenchRun) -> Result<()> {
    for (name, transport) in [(H2, "h2"), (QUIC, "quic")] {
        streams(bench, name, transport).await?;
        let mut sizes = vec![
            Size {
                count: 10,
                // With 10 agents, one page more or less changes the figure by a tenth.
                memory: None,
                costs: Some(growth::BESIDE_10),
            },
            Size {
                count: 100,
                memory: Some(&AGENTS_100),
                costs: None,
            },
            Size {
                count: 1000,
                memory: Some(&AGENTS_1000),
                costs: Some(growth::BESIDE_1000),
            },
        ];
        if bench.options.full {
            sizes.push(Size {
                count: 10_000,
                memory: Some(&AGENTS_10000),
                costs: Some(growth::BESIDE_10000),
            });
        }
        for size in sizes {
            if let Err(error) = agents(bench, name, transport, size).await {
                bench.record_error(name, &error);
            }
        }
    }
    let agent = tunnel_tests::tools::bin_dir().context("folder of the binaries")?;
    let size = std::fs::metadata(agent.join("tunnel-agent"))?.len();
    #[expect(clippy::cast_precision_loss, reason = "megabytes for people")]
    bench.record(H2, &AGENT_SIZE, size as f64 / 1e6, 0.0);
    Ok(())
}

/// Measures server and agent with one agent: idle, with idle streams, and after the streams.
async fn streams(bench: &mut BenchRun, name: &'static str, transport: &str) -> Result<()> {
    let shape = Shape {
        transport,
        limits: &LIMITS,
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let server = stack.server_process().context("no server")?;
    let agent = stack.agent_process().context("no agent")?;
    tokio::time::sleep(SETTLE_TIME).await;
    let before = (resident_kib(server), resident_kib(agent));
    bench.record(name, &SERVER_MEMORY, before.0 / 1024.0, 0.0);
    bench.record(name, &AGENT_MEMORY, before.1 / 1024.0, 0.0);
    bench.record(name, &SERVER_ANONYMOUS, anonymous_kib(server) / 1024.0, 0.0);
    bench.record(name, &AGENT_ANONYMOUS, anonymous_kib(agent) / 1024.0, 0.0);
    let switches = (context_switches(server), context_switches(agent));
    tokio::time::sleep(IDLE).await;
    let rate = |process: u32, earlier: f64| {
        let switches = context_switches(process) - earlier;
        switches / IDLE.as_secs_f64()
    };
    bench.record(name, &SERVER_WAKEUPS, rate(server, switches.0), 0.0);
    bench.record(name, &AGENT_WAKEUPS, rate(agent, switches.1), 0.0);
    let idle_callers = load::hold(&stack.endpoint(), STREAMS).await?;
    tokio::time::sleep(SETTLE_TIME).await;
    let with = (resident_kib(server), resident_kib(agent));
    #[expect(clippy::cast_precision_loss, reason = "a thousand")]
    let each = |with: f64, before: f64| (with - before) / STREAMS as f64;
    bench.record(name, &STREAM_SERVER, each(with.0, before.0), 0.0);
    bench.record(name, &STREAM_AGENT, each(with.1, before.1), 0.0);
    drop(idle_callers);
    tokio::time::sleep(GIVE_BACK).await;
    let after = resident_kib(server) + resident_kib(agent);
    bench.record(name, &GIVEN_BACK, after / (before.0 + before.1), 0.0);
    Ok(())
}

/// A number of agents, and the metrics that are recorded with them.
#[derive(Debug, Clone, Copy)]
struct Size {
    count: usize,
    /// Metric for the memory of the server per agent; `None` records nothing.
    memory: Option<&'static Metric>,
    costs: Option<Costs>,
}

/// Measures a server with many idle agents.
#[expect(clippy::cast_precision_loss, reason = "some thousands")]
async fn agents(
    bench: &mut BenchRun,
    name: &'static str,
    transport: &str,
    Size {
        count,
        memory,
        costs,
    }: Size,
) -> Result<()> {
    let shape = Shape {
        transport,
        server_limits: &FEW_CALLERS,
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let server = stack.server_process().context("no server")?;
    tokio::time::sleep(SETTLE_TIME).await;
    let (before, cpu) = (anonymous_kib(server), cpu_seconds(server));
    let _simulator = simulate(&stack, transport, count).await?;
    tokio::time::sleep(SETTLE_TIME).await;
    let each = (anonymous_kib(server) - before) / count as f64;
    if let Some(metric) = memory {
        bench.record(name, metric, each, 0.0);
    }
    if count == 1000 {
        let handshakes = (cpu_seconds(server) - cpu) * 1e3 / count as f64;
        bench.record(name, &HANDSHAKE_CPU, handshakes, 0.0);
    }
    if let Some(costs) = costs {
        growth::beside(bench, name, &mut stack, costs).await?;
    }
    Ok(())
}

/// Starts `count` agents in one process of their own and waits until all are ready.
pub(super) async fn simulate(stack: &Culvert, transport: &str, count: usize) -> Result<Process> {
    let server = stack.server()?.address(Listener::Agents).to_string();
    let data = stack.data.to_string_lossy().into_owned();
    let count = count.to_string();
    let to_args = ["agents", transport, &data, &count, "--server", &server].map(str::to_owned);
    let (mut simulator, _) = components::start(&to_args).await?;
    let all = |line: &str| line.starts_with(ALL_READY).then_some(());
    simulator
        .wait_for_line("all agents", ALL_CONNECT, all)
        .await?;
    Ok(simulator)
}
