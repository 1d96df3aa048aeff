//! A process that is killed and started again soon serves requests again.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Program, ScratchDir, Signal};

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
async fn idle_agent_with_short_keep_alive_notices_sooner() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let file = scratch.file("agent.yaml", "limits:\n  keepAlive: 1s\n")?;
    let file = file.to_string_lossy();
    let mut stack = Stack::start(&[], &["--config", &file]).await?;
    let bound = Duration::from_secs(1).mul_f64(1.2) + Duration::from_secs(1);
    for _ in 0..3 {
        let listed = stack.server.nodes().await?;
        let is_quic = listed.iter().any(|node| node["transport"] == "quic");
        ensure!(is_quic, "no QUIC session: {listed:?}");
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
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn status_of_the_agent_names_its_sessions_and_why_there_is_none() -> Result<()> {
    let mut stack = Stack::start(&[], &[]).await?;
    let opened = |line: &str| Listener::Meta.opened(line);
    let meta = stack.agent.wait_for_line("meta port", LONG, opened).await?;
    let meta = meta.to_string();
    let status = || {
        let verb = Program::ours("tunnel-agent")?;
        anyhow::Ok(verb.args(["status", "--meta-listen", &meta]))
    };
    let printed = status()?.run().await?.ok()?;
    ensure!(
        printed.starts_with("connected to ") && printed.contains(" over quic for "),
        "{printed}"
    );
    let printed = status()?.args(["-o", "json"]).run().await?.ok()?;
    let document: serde_json::Value = serde_json::from_str(&printed)?;
    ensure!(document["schemaVersion"] == 1, "{printed}");
    ensure!(document["sessions"][0]["transport"] == "quic", "{printed}");

    stack.server.process().signal(Signal::Kill)?;
    eventually("no session", LONG, async || {
        let finished = status()?.run().await?;
        finished.ensure_failed(1, &["agent has no session"])?;
        ensure!(finished.out.starts_with("not connected to "), "{finished}");
        ensure!(!finished.out.contains(": connecting;"), "{finished}");
        Ok(())
    })
    .await;
    stack.agent.kill().await?;
    let finished = status()?.run().await?;
    finished.ensure_failed(1, &["no answer from the agent at", &meta])
}

const LONG: Duration = Duration::from_secs(30);
