//! F03, F04: one of three servers stops by SIGTERM, or all of them restart in turn.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::future::{join_all, try_join_all};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    CallerOptions, Callers, Clocks, Layout, Load, Loads, NODE, Pipe, RequestOutcome, Run, Runs,
    Stack, TransportMode,
};
use tunnel_tests::process::{Listener, Signal};
use tunnel_tests::targets::Exporter;

#[tokio::test(flavor = "multi_thread")]
async fn f03_server_that_stops_ends_no_stream_and_fails_no_request() -> Result<()> {
    let mut runs = Runs::processes(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "SIGTERM", terminated);
        runs.start(transport_mode, "SIGTERM twice", terminated_twice);
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f04_restart_of_all_servers_in_turn_fails_no_request() -> Result<()> {
    let mut runs = Runs::processes(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2] {
        runs.start(transport_mode, "rolling restart", rolled);
    }
    runs.finish().await
}

/// Stops a server that has a session and half of the streams.
async fn terminated(run: Run) -> Result<()> {
    let mut stack = Stack::up_with(run, Layout::three(2)).await?;
    let (victim, pipes) = open(&stack, run.clocks.pick(200, 40)).await?;
    stack.replicas.servers[victim]
        .process()
        .signal(Signal::Term)?;
    let hold = run.clocks.pick(HOLD, HOLD_SHORT);
    let others = (0..stack.node_clients.len()).filter(|number| *number != victim);
    let asking = others.map(|number| {
        let requester = stack.node_clients[number].requester.clone();
        async move {
            let asked = requester.ask_during(EVERY, scaled(LIMIT), sleep(hold));
            asked.await
        }
    });
    let mut requests = 0;
    for answers in try_join_all(asking).await? {
        requests += answers.len();
        for answer in answers {
            let outcome = answer.outcome;
            ensure!(outcome == RequestOutcome::Served, "{outcome}");
            let took = answer.took;
            ensure!(took <= scaled(ELSEWHERE), "answered after {took:?}");
        }
    }
    run.report(format_args!(
        "{requests} requests at the other servers, all served"
    ));
    let finishing = pipes.into_iter().map(|pipe| pipe.finish(scaled(FINISH)));
    let ends = join_all(finishing).await;
    let ends: Vec<_> = ends.into_iter().flatten().collect();
    run.equal("streams during the stop", &ends)?;
    let finished = Instant::now();
    let status = stack.replicas.servers[victim].process().end(END).await?;
    ensure!(status.success(), "{status}");
    let bound = Duration::from_secs(1);
    run.within("end after the last stream", bound, Ok(finished.elapsed()))?;
    let mut sessions = 0;
    for number in (0..stack.node_clients.len()).filter(|number| *number != victim) {
        sessions += stack.replicas.sessions(number).await?;
    }
    ensure!(sessions == 2, "{sessions} sessions with the other servers");
    for node_client in &stack.node_clients {
        node_client.ensure_equal(run)?;
    }
    Ok(())
}

/// Sends the signal twice while streams are open.
async fn terminated_twice(run: Run) -> Result<()> {
    let mut stack = Stack::up_with(run, Layout::three(2)).await?;
    let (victim, pipes) = open(&stack, 8).await?;
    let process = stack.replicas.servers[victim].process();
    process.signal(Signal::Term)?;
    sleep(BETWEEN).await;
    process.signal(Signal::Term)?;
    let signaled = Instant::now();
    process.end(END).await?;
    let bound = Duration::from_millis(500);
    run.within("end after the second signal", bound, Ok(signaled.elapsed()))?;
    for pipe in pipes {
        let ends = pipe.finish(scaled(FINISH)).await;
        run.equal_or_reset("stream: bytes equal, or the reset reported", &ends)?;
    }
    Ok(())
}

/// Opens streams at all servers, half of them at one that has a session, which is returned.
async fn open(stack: &Stack, streams: usize) -> Result<(usize, Vec<Pipe>)> {
    let victim = *stack.replicas.holders().await?.first().context("none")?;
    let others: Vec<_> = (0..stack.node_clients.len())
        .filter(|number| *number != victim)
        .collect();
    let mut pipes = Vec::new();
    for (number, other) in (0..streams).zip(others.iter().cycle()) {
        let server = if number.is_multiple_of(2) {
            victim
        } else {
            *other
        };
        let paced = Loads::both(Load::Paced);
        pipes.push(stack.node_clients[server].pipe(paced).await?);
    }
    Ok((victim, pipes))
}

/// Restarts each server on its own ports. Callers leave it during its drain delay, and come back
/// when it serves.
async fn rolled(run: Run) -> Result<()> {
    let mut stack = Stack::up_with(run, Layout::three(2)).await?;
    let exporter = Exporter::start(NODE).await?;
    let host = format!("{NODE}:{}", exporter.addr().port());
    let http = |stack: &Stack, without: Option<usize>| {
        let servers = stack.replicas.servers.iter().enumerate();
        let others = servers.filter(|(number, _)| Some(*number) != without);
        let listeners = others.map(|(_, server)| server.address(Listener::Http));
        listeners.collect::<Vec<_>>()
    };
    let endpoints = watch::Sender::new(http(&stack, None));
    let options = CallerOptions {
        callers: 8,
        pause: Duration::from_millis(80),
        limit: scaled(LIMIT),
        seed: run.seed,
    };
    let callers = Callers::start(&endpoints, &[host], options);
    let dialed = stack.agent_metric(ATTEMPTS).await?;
    for server in 0..stack.replicas.servers.len() {
        let pipe = stack.node_clients[server].talk().await?;
        let process = stack.replicas.servers[server].process();
        process.signal(Signal::Term)?;
        sleep(run.limits.pick(LAG, LAG_SHORT)).await;
        endpoints.send_replace(http(&stack, Some(server)));
        let process = stack.replicas.servers[server].process();
        let status = process.end(STOP).await?;
        ensure!(status.success(), "{status}");
        let log = stack.replicas.servers[server].log();
        ensure!(log.contains("drain timeout is over"), "{log}");
        let ends = pipe.finish(scaled(FINISH)).await;
        run.equal_or_reset("stream that outlived the drain", &ends)?;
        stack.replicas.restart(server).await?;
        let restarted = Instant::now();
        let requester = &stack.node_clients[server].requester;
        let served = requester.serving_on(restarted, scaled(END)).await;
        let bound = run.clocks.connect_bound(Duration::from_secs(10));
        run.within("served after the restart", bound, served)?;
        endpoints.send_replace(http(&stack, None));
        stack.replicas.wait_for_sessions(2).await?;
    }
    callers.end(100).await?.ensure_served()?;
    // One dial for each session that a restart takes, and one back to the preferred server.
    let dialed = stack.agent_metric(ATTEMPTS).await? - dialed;
    run.report(format_args!("{dialed} dials of the agent, bound {DIALS}"));
    ensure!(dialed <= DIALS, "{dialed} dials");
    Ok(())
}

const ATTEMPTS: &str = "tunnel_agent_connect_attempts_total";
/// Two dials for each restart, and those that find a server that has not started.
const DIALS: u64 = 12;
/// Longer than agents have to move (10 s) and to connect (2 s), shorter than the drain.
const HOLD: Duration = Duration::from_secs(13);
const HOLD_SHORT: Duration = Duration::from_secs(7);
/// Time for the network to lead callers elsewhere, shorter than the drain delay.
const LAG: Duration = Duration::from_secs(3);
const LAG_SHORT: Duration = Duration::from_millis(600);
const EVERY: Duration = Duration::from_millis(50);
const LIMIT: Duration = Duration::from_secs(5);
/// Longest time of a request that goes elsewhere.
const ELSEWHERE: Duration = Duration::from_secs(1);
const BETWEEN: Duration = Duration::from_millis(300);
const END: Duration = Duration::from_secs(15);
/// Longer than drain delay and drain timeout.
const STOP: Duration = Duration::from_secs(45);
const FINISH: Duration = Duration::from_secs(40);
