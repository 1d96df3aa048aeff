//! Case 10: the start of an agent, and how long callers wait after a restart of the server.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tunnel_tests::process::{Process, ServerSetup};

use super::memory::simulate;
use crate::bench::BenchRun;
use crate::components::agents::ALL_READY;
use crate::load::probe;
use crate::metric::{AFTER_KILL, AFTER_TERM, ALL_BACK, Metric, START};
use crate::systems::{Culvert, H2, QUIC, Shape};
use crate::target::Bound::AtMost;
use crate::target::Of::Itself;
use crate::target::Target;

pub(super) const TARGETS: &[Target] = &[
    Target::new(H2, &START, Itself, AtMost(20.0)),
    Target::new(H2, &AFTER_TERM, Itself, AtMost(200.0)),
    Target::new(H2, &AFTER_KILL, Itself, AtMost(500.0)),
    Target::new(H2, &ALL_BACK, Itself, AtMost(5000.0)),
    Target::new(QUIC, &START, Itself, AtMost(20.0)),
    Target::new(QUIC, &AFTER_TERM, Itself, AtMost(200.0)),
    Target::new(QUIC, &AFTER_KILL, Itself, AtMost(500.0)),
    Target::new(QUIC, &ALL_BACK, Itself, AtMost(5000.0)),
];

const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
const ALL_TIMEOUT: Duration = Duration::from_secs(90);
/// Time limit for a drain without streams.
const STOP: Duration = Duration::from_secs(10);
const AGENTS: usize = 1000;
/// Time after which a session counts as steady, has no data in flight, and sends only keep-alives.
const SETTLE: Duration = Duration::from_secs(11);

pub(super) async fn run(bench: &mut BenchRun) -> Result<()> {
    for (name, transport) in [(H2, "h2"), (QUIC, "quic")] {
        let shape = Shape {
            transport,
            ..Shape::default()
        };
        let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
        let done = one_agent(bench, name, &mut stack).await;
        if let Err(error) = done {
            bench.record_error(name, &error);
        }
    }
    // One round is enough for the thousand agents, because they take longer.
    if bench.round == 0 {
        for (name, transport) in [(H2, "h2"), (QUIC, "quic")] {
            if let Err(error) = a_thousand(bench, name, transport).await {
                bench.record_error(name, &error);
            }
        }
    }
    Ok(())
}

async fn one_agent(bench: &mut BenchRun, name: &'static str, stack: &mut Culvert) -> Result<()> {
    let endpoint = stack.endpoint();
    probe(&endpoint, WAIT_TIMEOUT).await?;
    let agent = stack.agent.take().context("no agent")?;
    agent.stop(STOP).await?;
    // The time begins when the process starts, as an operator sees it.
    stack.agent = Some(stack.agent_setup.start()?);
    let took = probe(&endpoint, WAIT_TIMEOUT).await?;
    record(bench, name, &START, took);
    restart(bench, name, stack, &AFTER_TERM).await?;
    tokio::time::sleep(SETTLE).await;
    restart(bench, name, stack, &AFTER_KILL).await
}

/// Restarts the server. Records the time from the start of the new server, after the old one has
/// exited, to the first reply.
async fn restart(
    bench: &mut BenchRun,
    name: &'static str,
    stack: &mut Culvert,
    metric: &'static Metric,
) -> Result<()> {
    let (setup, old) = take_server(stack)?;
    if *metric == AFTER_TERM {
        old.stop(STOP).await?;
    } else {
        old.kill().await?;
    }
    let endpoint = stack.endpoint();
    let (server, took) = tokio::join!(setup.start(), probe(&endpoint, WAIT_TIMEOUT));
    stack.server = Some(server?);
    record(bench, name, metric, took?);
    Ok(())
}

fn take_server(stack: &mut Culvert) -> Result<(ServerSetup, Process)> {
    let server = stack.server.take().context("no server")?;
    Ok((server.setup_for_restart(), server.into_process()))
}

async fn a_thousand(bench: &mut BenchRun, name: &'static str, transport: &str) -> Result<()> {
    let shape = Shape {
        transport,
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let mut simulator = simulate(&stack, transport, AGENTS).await?;
    tokio::time::sleep(SETTLE).await;
    let (setup, old) = take_server(&mut stack)?;
    old.kill().await?;
    let began = Instant::now();
    let server = setup.start().await?;
    let again = format!("{ALL_READY}2");
    let all = |line: &str| (line == again).then_some(());
    simulator
        .wait_for_line("all agents again", ALL_TIMEOUT, all)
        .await?;
    record(bench, name, &ALL_BACK, began.elapsed());
    stack.server = Some(server);
    Ok(())
}

/// Records a duration. The share of other processes is not known, because the kernel counts CPU
/// time in steps of 10 ms and the measured duration is about 20 ms.
fn record(bench: &mut BenchRun, name: &str, metric: &'static Metric, took: Duration) {
    bench.record(name, metric, took.as_secs_f64() * 1e3, 0.0);
}
