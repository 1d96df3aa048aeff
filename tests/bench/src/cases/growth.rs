//! Part of case 9: the cost of work for server and agent while many other agents are connected.

use std::time::Duration;

use anyhow::{Context, Result};

use crate::bench::{BenchRun, GIB};
use crate::load::{self, SMALL};
use crate::machine::CpuMonitor;
use crate::metric::{
    BULK_BESIDE_10, BULK_BESIDE_1000, BULK_BESIDE_10000, CONNECTION_BESIDE_10,
    CONNECTION_BESIDE_1000, CONNECTION_BESIDE_10000, IDLE_10, IDLE_1000, IDLE_10000, Metric,
    REQUEST_BESIDE_10, REQUEST_BESIDE_1000, REQUEST_BESIDE_10000,
};
use crate::systems::Culvert;

/// Metrics of the work next to a certain number of other agents.
#[derive(Debug, Clone, Copy)]
pub(super) struct Costs {
    bulk: &'static Metric,
    request: &'static Metric,
    connection: &'static Metric,
    idle: &'static Metric,
}

pub(super) const BESIDE_10: Costs = Costs {
    bulk: &BULK_BESIDE_10,
    request: &REQUEST_BESIDE_10,
    connection: &CONNECTION_BESIDE_10,
    idle: &IDLE_10,
};
pub(super) const BESIDE_1000: Costs = Costs {
    bulk: &BULK_BESIDE_1000,
    request: &REQUEST_BESIDE_1000,
    connection: &CONNECTION_BESIDE_1000,
    idle: &IDLE_1000,
};
pub(super) const BESIDE_10000: Costs = Costs {
    bulk: &BULK_BESIDE_10000,
    request: &REQUEST_BESIDE_10000,
    connection: &CONNECTION_BESIDE_10000,
    idle: &IDLE_10000,
};

const BYTES: u64 = 1 << 30;
const CALLERS: usize = 64;
const CONNECTING: usize = 16;
/// Two keep-alive intervals of the other agents. The work of their start is done by then.
const SETTLE: Duration = Duration::from_secs(10);
/// Time over which the cost of the idle agents is measured.
const IDLE: Duration = Duration::from_secs(10);

/// Measures bulk, requests and new connections through the one agent that has targets. Records the
/// CPU time of server and agent without the share that the other agents cost while nothing else
/// happens.
#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub(super) async fn beside(
    bench: &mut BenchRun,
    name: &'static str,
    stack: &mut Culvert,
    costs: Costs,
) -> Result<()> {
    let server = stack.server_process().context("no server")?;
    let agent = stack.agent_process().context("no agent")?;
    let endpoint = stack.endpoint();
    let (bytes, length) = (bench.bytes(BYTES), bench.length(1.0));
    tokio::time::sleep(SETTLE).await;
    let watch = CpuMonitor::begin(&[server, agent]);
    tokio::time::sleep(IDLE).await;
    let idle = watch.end();
    bench.record(name, costs.idle, idle.cpu(Some(server)) / idle.wall, 0.0);
    let upkeep = (idle.cpu(Some(server)) + idle.cpu(Some(agent))) / idle.wall;
    let watch = CpuMonitor::begin(&[server, agent]);
    let spent = |watch: CpuMonitor| {
        let usage = watch.end();
        usage.cpu(Some(server)) + usage.cpu(Some(agent)) - upkeep * usage.wall
    };
    load::down(&endpoint, bytes).await?;
    let bulk = spent(watch) * GIB / bytes as f64;
    let watch = CpuMonitor::begin(&[server, agent]);
    let asked = load::closed(&endpoint, CALLERS, SMALL, length).await;
    let request = spent(watch) * 1e6 / asked.times.len().max(1) as f64;
    let watch = CpuMonitor::begin(&[server, agent]);
    let connected = load::churn(&endpoint, CONNECTING, SMALL, length).await;
    let connection = spent(watch) * 1e6 / connected.times.len().max(1) as f64;
    bench.record(name, costs.bulk, bulk, 0.0);
    bench.record(name, costs.request, request, 0.0);
    bench.record(name, costs.connection, connection, 0.0);
    anyhow::ensure!(
        asked.failed + connected.failed == 0,
        "{} requests next to many agents failed",
        asked.failed + connected.failed
    );
    Ok(())
}
