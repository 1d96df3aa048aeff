//! A process that is killed and started again soon serves requests again.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tunnel_tests::eventually::scaled;
use tunnel_tests::process::{ScratchDir, Signal};

use super::Stack;

#[tokio::test(flavor = "multi_thread")]
async fn killed_agent_serves_again_when_it_is_back() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    for _ in 0..3 {
        stack.agent.kill().await?;
        stack.agent = stack.agent_setup.start()?;
        stack
            .wait_for_traffic("traffic after the agent's restart", Duration::from_secs(2))
            .await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_agent_notices_that_the_server_was_restarted() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    kill_and_restart_server(&mut stack, Duration::from_secs(5)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_agent_with_short_keep_alive_notices_sooner() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("agent.yaml", "limits:\n  keepAlive: 1s\n")?;
    let file = file.to_string_lossy();
    let mut stack = Stack::start(&[], &["--config", &file]).await?;
    for _ in 0..3 {
        kill_and_restart_server(&mut stack, Duration::from_secs(1)).await?;
    }
    Ok(())
}

async fn kill_and_restart_server(stack: &mut Stack, keep_alive: Duration) -> Result<()> {
    let listed = stack.server.nodes().await?;
    let is_quic = listed.iter().any(|node| node["transport"] == "quic");
    ensure!(is_quic, "no QUIC session: {listed:?}");
    let bound = keep_alive.mul_f64(1.2) + Duration::from_secs(1);
    let killed = Instant::now();
    let setup = stack.server.setup_for_restart();
    stack.server.process().signal(Signal::Kill)?;
    stack.server.process().end(Duration::from_secs(5)).await?;
    stack.server = setup.start().await?;
    stack
        .wait_for_traffic("traffic after the server's restart", bound)
        .await;
    let outage = killed.elapsed();
    ensure!(outage <= scaled(bound), "{outage:?} after the kill");
    Ok(())
}
