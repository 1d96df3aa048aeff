//! SIGTERM loses no data. A second signal ends the process at once.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;
use tunnel_tests::client::Exchange;
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::rounds;
use tunnel_tests::process::{Listener, Process, Signal};
use tunnel_tests::targets::Sha256;

use super::{CONNECT, Stack};

#[tokio::test(flavor = "multi_thread")]
async fn answer_that_ends_as_the_agent_is_stopped_is_whole() -> Result<()> {
    in_parallel(|mut stack, rounds| async move {
        for round in rounds {
            let exchange = one_mebibyte(&stack).await?;
            read_while_ending(exchange, round, &stack.agent).await?;
            ends_well(&mut stack.agent).await?;
            stack.agent = stack.agent_setup.start()?;
            stack
                .wait_for_traffic("traffic after the agent's restart", CONNECT)
                .await;
        }
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_that_ends_as_the_server_is_stopped_is_whole() -> Result<()> {
    in_parallel(|mut stack, rounds| async move {
        for round in rounds {
            let exchange = one_mebibyte(&stack).await?;
            let setup = stack.server.setup_for_restart();
            read_while_ending(exchange, round, stack.server.process()).await?;
            ends_well(stack.server.process()).await?;
            stack.server = setup.start().await?;
            stack
                .wait_for_traffic("traffic after the server's restart", CONNECT)
                .await;
        }
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn second_signal_ends_the_agent_at_once() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    let _following = follow(&stack).await?;
    let agent = &mut stack.agent;
    agent.signal(Signal::Term)?;
    let early = agent.end(Duration::from_millis(500)).await;
    ensure!(
        early.is_err(),
        "the agent did not wait for the open stream: {early:?}"
    );
    agent.signal(Signal::Term)?;
    agent.end(AT_ONCE).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_timeout_bounds_the_end() -> Result<()> {
    let short = ["--drain-timeout", "1s"];
    let mut stack = Stack::start(&short, &short).await?;
    let _following = follow(&stack).await?;
    stack.agent.signal(Signal::Term)?;
    stack.agent.end(AT_ONCE + Duration::from_secs(1)).await?;
    Ok(())
}

/// Runs all rounds, divided among several stacks that run in parallel.
async fn in_parallel<F, Fut>(run: F) -> Result<()>
where
    F: Fn(Stack, Range<usize>) -> Fut + Copy + Send + 'static,
    Fut: Future<Output = Result<()>> + Send,
{
    let share = rounds() / STACKS;
    let mut runs = JoinSet::new();
    for number in 0..STACKS {
        runs.spawn(async move {
            let stack = Stack::start(&[], &[]).await?;
            run(stack, number * share..(number + 1) * share).await
        });
    }
    while let Some(run) = runs.join_next().await {
        run??;
    }
    Ok(())
}

async fn one_mebibyte(stack: &Stack) -> Result<Exchange> {
    let endpoint = stack.server.address(Listener::Http);
    Exchange::start(endpoint, &stack.get(&format!("/size/{BYTES}"))).await
}

/// Reads the answer and sends SIGTERM to `process` meanwhile. In even rounds the signal follows the
/// answer's head. In odd rounds the signal comes later with each round.
async fn read_while_ending(mut exchange: Exchange, round: usize, process: &Process) -> Result<()> {
    let expected = exchange.header("x-sha256").context("no digest")?.to_owned();
    let moment = if round.is_multiple_of(2) {
        0
    } else {
        BYTES * round as u64 / rounds() as u64
    };
    let mut signaled = false;
    let mut digest = Sha256::new();
    loop {
        if !signaled && digest.bytes() >= moment {
            process.signal(Signal::Term)?;
            signaled = true;
        }
        let Some(data) = exchange.data().await else {
            break;
        };
        digest.update(&data);
    }
    let ended = exchange.ended().context("not ended")?;
    ensure!(
        ended.is_clean(),
        "round {round}: {ended:?} after {} bytes; {process}",
        digest.bytes()
    );
    ensure!(
        digest.bytes() == BYTES,
        "round {round}: {} bytes",
        digest.bytes()
    );
    ensure!(
        digest.finish() == expected,
        "round {round}: the digest differs"
    );
    ensure!(signaled, "the answer ended before the signal");
    Ok(())
}

async fn ends_well(process: &mut Process) -> Result<()> {
    let status = process.end(DRAIN).await?;
    ensure!(status.success(), "{status}; {process}");
    Ok(())
}

/// Starts an endless answer.
async fn follow(stack: &Stack) -> Result<Exchange> {
    let endpoint = stack.server.address(Listener::Http);
    let exchange = Exchange::start(endpoint, &stack.get("/follow")).await?;
    eventually("a follower", CONNECT, async || {
        (stack.exporter.followers() == 1).then_some(())
    })
    .await;
    Ok(exchange)
}

const BYTES: u64 = 1024 * 1024;

/// Number of parallel stacks. Together they keep the processor busy, so that the signals arrive at
/// different moments of the answer.
const STACKS: usize = 5;

/// Well below the drain timeout of 30 s, because the answer is the only open stream.
const DRAIN: Duration = Duration::from_secs(10);

const AT_ONCE: Duration = Duration::from_secs(1);
