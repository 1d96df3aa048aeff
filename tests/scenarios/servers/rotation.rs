//! The CA of standalone servers that know each other: `ca rotate` asks all of them.

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Server;

use super::{CONNECT, Servers};

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
