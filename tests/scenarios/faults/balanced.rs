//! F33: a load balancer leads an agent to any of three servers, or to one that stops.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::sleep;
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    AgentPaths, Clocks, Layout, RequestOutcome, Run, Runs, Stack, TransportMode,
};
use tunnel_tests::process::{Listener, Signal};
use tunnel_tests::stats::percentile;

#[tokio::test(flavor = "multi_thread")]
async fn f33_node_is_reached_over_one_hop_wherever_its_agent_is() -> Result<()> {
    let mut runs = Runs::processes(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "any server", anywhere);
        runs.start(transport_mode, "server that stops", stopping);
    }
    runs.finish().await
}

fn layout() -> Layout {
    Layout::three(1).with_paths(AgentPaths::Shared)
}

/// Compares requests at the server with the session with those at the others.
async fn anywhere(run: Run) -> Result<()> {
    let stack = Stack::up_with(run, layout()).await?;
    let holders = stack.replicas.holders().await?;
    ensure!(holders.len() == 1, "servers with a session: {holders:?}");
    let mut direct = Duration::ZERO;
    let mut forwarded = Vec::new();
    for (number, node_client) in stack.node_clients.iter().enumerate() {
        let mut took = Vec::new();
        for _ in 0..REQUESTS {
            let answer = node_client.requester.ask(scaled(LIMIT)).await;
            let outcome = answer.outcome;
            ensure!(outcome == RequestOutcome::Served, "{outcome}");
            took.push(answer.took);
        }
        took.sort_unstable();
        let median = percentile(&took, 0.5);
        if holders.contains(&number) {
            direct = median;
        } else {
            forwarded.push(median);
        }
        node_client.ensure_equal(run)?;
    }
    for median in forwarded {
        let extra = median.saturating_sub(direct);
        run.within("time that a hop costs", HOP, Ok(extra))?;
    }
    Ok(())
}

/// Stops the server with the session, while the load balancer leads to it for some time.
async fn stopping(run: Run) -> Result<()> {
    let mut stack = Stack::up_with(run, layout()).await?;
    let victim = *stack.replicas.holders().await?.first().context("none")?;
    let next = (victim + 1) % stack.node_clients.len();
    stack.replicas.servers[victim]
        .process()
        .signal(Signal::Term)?;
    let requester = stack.node_clients[next].requester.clone();
    let agents = stack.replicas.servers[next].address(Listener::Agents);
    let lead = async {
        sleep(run.limits.pick(LAG, LAG_SHORT)).await;
        stack.replicas.links[0].lead_to(Some(agents));
        sleep(AFTERWARDS).await;
    };
    for answer in requester.ask_during(EVERY, scaled(LIMIT), lead).await? {
        let outcome = answer.outcome;
        ensure!(
            outcome == RequestOutcome::Served,
            "in the meantime: {outcome}"
        );
    }
    let process = stack.replicas.servers[victim].process();
    process.end(STOP).await?;
    requester.served().await?;
    stack.node_clients[next].ensure_equal(run)
}

const REQUESTS: usize = 50;
const LIMIT: Duration = Duration::from_secs(15);
const HOP: Duration = Duration::from_millis(100);
/// Time until the load balancer leads elsewhere.
const LAG: Duration = Duration::from_secs(3);
const LAG_SHORT: Duration = Duration::from_millis(600);
const AFTERWARDS: Duration = Duration::from_secs(3);
const EVERY: Duration = Duration::from_millis(100);
/// Longer than drain delay and drain timeout.
const STOP: Duration = Duration::from_secs(45);
