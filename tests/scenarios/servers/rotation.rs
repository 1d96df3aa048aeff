//! The CA of standalone servers: `ca rotate` asks all that know each other, and the agents to renew.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{ScratchDir, Server, ServerSetup};

use super::{CONNECT, Servers};
use crate::credentials::ca_rotation::{STAGES, rotation_status};

#[tokio::test(flavor = "multi_thread")]
async fn ca_rotate_waits_for_servers_that_have_another_ca_or_are_not_connected() -> Result<()> {
    let mut servers = Servers::start(2, &[]).await?;
    let rotate = servers.servers[0].verb(&["ca", "rotate"])?;
    rotate.run().await?.ok()?;
    let second = servers.servers.pop().context("two servers")?;
    let first = &servers.servers[0];
    refuses(first, "do not follow this stage: s1;").await;
    second.into_process().kill().await?;
    refuses(first, "not connected to this one: s1;").await;
    let force = first.verb(&["ca", "rotate", "--next", "--force"])?;
    let text = force.run().await?.ok()?;
    ensure_contains(&text, &["stage: issuing"])
}

/// Agents do not wait for half of their certificate's life. In the long run the rotation ends.
#[tokio::test(flavor = "multi_thread")]
async fn connected_agents_are_asked_to_renew_in_each_stage() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let config = scratch.file("limits.yaml", "limits: { certificateLife: 4m }\n")?;
    let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
    let server = setup
        .args(&["--config", &config.to_string_lossy()])
        .start()
        .await?;
    let files = scratch.path().join("agent");
    let agent = server.agent_setup("worker-1", &files).await?.start()?;
    server.wait_until_connected(&["worker-1"]).await;
    let count = Gear::current().pick(1, STAGES.len());
    for (number, (verb, stage)) in STAGES.into_iter().take(count).enumerate() {
        let printed = server.verb(verb)?.run().await?.ok()?;
        ensure_contains(&printed, &[stage])?;
        if stage == "stage: none" {
            break;
        }
        eventually("the agent has renewed", ASKED, async || {
            let status = rotation_status(&server).await?;
            ensure_contains(&status, &["1 renewed since then, 0 pending"])
        })
        .await;
        let lines = agent.log().lines();
        let asked = lines
            .iter()
            .filter(|line| line.contains("asks for a renewal"));
        let asked = asked.count();
        ensure!(asked == number + 1, "{asked} in stage {number}");
    }
    server.wait_until_connected(&["worker-1"]).await;
    Ok(())
}

/// Waits until the next stage is refused for this reason.
async fn refuses(server: &Server, reason: &str) {
    eventually(reason, CONNECT, async || {
        let next = server.verb(&["ca", "rotate", "--next"])?;
        let refused = next.run().await?;
        ensure!(!refused.status.success(), "not refused: {refused}");
        ensure_contains(&refused.err, &[reason, "--force"])
    })
    .await;
}

/// A stage begins 3 s after its command, the server looks for pending agents every 30 s, and they renew
/// within 12 s.
const ASKED: Duration = Duration::from_secs(60);
