//! F34, F35: a process is suspended, like a hanging machine: one of three servers, or one of the two
//! processes of a tunnel.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::{join_all, try_join_all};
use tokio::time::{Instant, sleep_until};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, Layout, RequestOutcome, Run, Runs, Stack, TransportMode, until,
};
use tunnel_tests::process::Signal;

#[tokio::test(flavor = "multi_thread")]
async fn f35_process_that_stands_still_is_suspect_and_goes_on_without_a_double_delivery()
-> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        for (case, who) in [
            ("agent stopped", Who::Agent),
            ("server stopped", Who::Server),
        ] {
            runs.start(transport_mode, case, |run| stopped(run, who));
        }
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f34_server_that_stands_still_gives_its_nodes_to_the_others() -> Result<()> {
    let mut runs = Runs::processes(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "one session", |run| frozen(run, 1));
        runs.start(transport_mode, "two sessions", |run| frozen(run, 2));
    }
    runs.finish().await
}

/// Sends SIGSTOP to a server that has a session, and SIGCONT. The server then takes itself for the
/// holder of a node that has moved.
async fn frozen(run: Run, sessions: usize) -> Result<()> {
    let mut stack = Stack::up_with(run, Layout::three(sessions)).await?;
    let frozen = *stack.replicas.holders().await?.first().context("none")?;
    let process = stack.replicas.servers[frozen].process();
    process.signal(Signal::Stop)?;
    let began = Instant::now();
    let continues = began + FROZEN;
    let others = (0..stack.node_clients.len()).filter(|number| *number != frozen);
    let others: Vec<_> = others.map(|number| &stack.node_clients[number]).collect();
    let asking = others.iter().map(|client| {
        let requester = &client.requester;
        requester.ask_during(ASK_WHILE_FROZEN, scaled(ANSWER), sleep_until(continues))
    });
    let serving = others.iter().map(|client| {
        let requester = &client.requester;
        requester.serving_on(began, scaled(GIVE_UP))
    });
    let (answers, served) = tokio::join!(try_join_all(asking), join_all(serving));
    for answer in answers?.concat() {
        let is_explicit = match &answer.outcome {
            RequestOutcome::Served | RequestOutcome::Refused(502..=504, _) => true,
            RequestOutcome::Refused(..)
            | RequestOutcome::Cut(_)
            | RequestOutcome::Silence
            | RequestOutcome::Truncated(_)
            | RequestOutcome::Unequal(_) => false,
        };
        ensure!(is_explicit, "in the meantime: {}", answer.outcome);
    }
    for served in served {
        let what = "new requests at the others served for good";
        run.within(what, OTHERS_NOTICE, served)?;
    }
    sleep_until(continues).await;
    stack.replicas.servers[frozen]
        .process()
        .signal(Signal::Cont)?;
    let continued = Instant::now();
    let clients = stack.node_clients.iter();
    let serving = clients.map(|client| {
        let requester = &client.requester;
        requester.serving_on(continued, scaled(GIVE_UP))
    });
    for served in join_all(serving).await {
        let bound = Duration::from_secs(5);
        run.within("served at every server after it goes on", bound, served)?;
    }
    stack.replicas.wait_for_sessions(sessions as u64).await?;
    for node_client in &stack.node_clients {
        node_client.ensure_equal(run)?;
    }
    Ok(())
}

/// The process that is suspended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Agent,
    Server,
}

/// Sends SIGSTOP during a stream, and SIGCONT.
async fn stopped(run: Run, who: Who) -> Result<()> {
    let clocks = run.clocks;
    let mut stack = Stack::up(run).await?;
    let pipe = stack.node_clients[0].talk().await?;
    let began = Instant::now();
    signal(&mut stack, who, Signal::Stop)?;
    let continues = began + clocks.time(STOPPED);
    let suspected = until(began, continues - began, async || match who {
        Who::Agent => stack.state().await.is_ok_and(|state| state == "suspect"),
        Who::Server => {
            let count = stack.agent_metric("tunnel_agent_sessions_suspect").await;
            count.is_ok_and(|count| count > 0)
        }
    });
    let suspected = suspected.await;
    let bound = clocks.bound(Duration::from_secs(5));
    run.within("the other end suspects it", bound, suspected)?;
    if who == Who::Agent {
        let every = clocks.time(ASK_EVERY);
        let requester = &stack.node_clients[0].requester;
        requester.ensure_refused(run, continues, every).await?;
    }
    sleep_until(continues).await;
    signal(&mut stack, who, Signal::Cont)?;
    let continued = Instant::now();
    pipe.mark();
    let requester = &stack.node_clients[0].requester;
    let serving = requester.serving_on(continued, scaled(GIVE_UP));
    let (served, resumed) = tokio::join!(serving, pipe.resumed(scaled(GIVE_UP)));
    let bound = clocks.connect_bound(Duration::from_secs(3));
    let what = "new requests served for good after it goes on";
    run.within(what, bound, served)?;
    let bound = clocks.bound(Duration::from_secs(35));
    run.within("streams go on after it does", bound, resumed)?;
    // Additional or different bytes would mean that data was delivered twice.
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal("stream's bytes equal, none twice", &ends)?;
    let node_client = &stack.node_clients[0];
    node_client.requester.served().await?;
    node_client.ensure_equal(run)
}

fn signal(stack: &mut Stack, who: Who, signal: Signal) -> Result<()> {
    match who {
        Who::Agent => stack.agent.signal(signal),
        Who::Server => stack.replicas.servers[0].process().signal(signal),
    }
}

/// Servers check each other with timers that no setting changes, so this is not shorter with short
/// timers.
const FROZEN: Duration = Duration::from_secs(30);
/// A server closes a connection to a silent one after at most 12.5 s. By then the agent has moved.
const OTHERS_NOTICE: Duration = Duration::from_secs(20);
const ASK_WHILE_FROZEN: Duration = Duration::from_millis(500);
/// Longer than `limits.openTimeout`.
const ANSWER: Duration = Duration::from_secs(15);
const STOPPED: Duration = Duration::from_secs(20);
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(45);
/// Time limit for the rest of a stream, which may still wait for a retransmission.
const FINISH: Duration = Duration::from_secs(40);
