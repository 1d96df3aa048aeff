//! F02: one of three servers is killed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, Layout, NodeClient, RequestOutcome, Run, Runs, Stack, TransportMode,
};

#[tokio::test(flavor = "multi_thread")]
async fn f02_killed_server_takes_no_node_away_for_long() -> Result<()> {
    let mut runs = Runs::processes(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "two sessions", |run| killed(run, 2));
        runs.start(transport_mode, "one session", |run| killed(run, 1));
    }
    runs.finish().await
}

/// Kills a server that has a session, with streams and requests at the others.
async fn killed(run: Run, sessions: usize) -> Result<()> {
    let mut stack = Stack::up_with(run, Layout::three(sessions)).await?;
    let victim = *stack.replicas.holders().await?.first().context("none")?;
    let survivors: Vec<_> = (0..stack.node_clients.len())
        .filter(|number| *number != victim)
        .collect();
    let mut pipes = Vec::new();
    for number in &survivors {
        pipes.push(stack.node_clients[*number].talk().await?);
    }
    stack.replicas.kill(victim).await?;
    let killed = Instant::now();
    let recovery = recovery(run, sessions);
    let clients = survivors.iter().map(|number| &stack.node_clients[*number]);
    let serving_on = clients.clone().map(|client| serving(client, killed));
    for served in join_all(serving_on).await {
        let what = "new requests served for good after the kill";
        run.within(what, recovery, served)?;
    }
    for client in clients {
        let answers = client
            .requester
            .ask_during(EVERY, scaled(LIMIT), sleep(STEADY));
        for answer in answers.await? {
            let outcome = answer.outcome;
            ensure!(outcome == RequestOutcome::Served, "later: {outcome}");
        }
        client.ensure_equal(run)?;
    }
    for pipe in pipes {
        let ends = pipe.finish(scaled(FINISH)).await;
        run.equal_or_reset("stream at another server", &ends)?;
    }
    stack.replicas.restart(victim).await?;
    let restarted = Instant::now();
    let served = serving(&stack.node_clients[victim], restarted).await;
    let bound = run.clocks.connect_bound(Duration::from_secs(10));
    run.within(
        "served by the killed server after its restart",
        bound,
        served,
    )
}

async fn serving(client: &NodeClient, since: Instant) -> Result<Duration, Duration> {
    client.requester.serving_on(since, scaled(GIVE_UP)).await
}

/// Returns the bound for new requests at the other servers. An agent without a second session must
/// notice the loss first: over TCP at once, over QUIC by silence.
fn recovery(run: Run, sessions: usize) -> Duration {
    let is_silent = run.transport_mode == TransportMode::Quic && sessions == 1;
    run.clocks
        .connect_bound(if is_silent { SILENCE } else { MOVE })
}

const MOVE: Duration = Duration::from_secs(3);
/// The time until an idle agent suspects its server, and that of a move.
const SILENCE: Duration = Duration::from_secs(18);
const EVERY: Duration = Duration::from_millis(50);
const LIMIT: Duration = Duration::from_secs(5);
const STEADY: Duration = Duration::from_secs(2);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(60);
/// Time limit for the end of a stream that was cut, or that goes on.
const FINISH: Duration = Duration::from_secs(40);
