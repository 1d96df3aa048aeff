//! A server that is killed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, sleep, timeout};
use tunnel_tests::checks::ensure_refused;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::scaled;
use tunnel_tests::process::{Listener, ScratchDir, Signal};

use super::{CONNECT, Servers, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn node_with_one_session_is_refused_at_once_until_its_agent_has_moved() -> Result<()> {
    let mut servers = Servers::start(2, &[]).await?;
    let scratch = ScratchDir::new()?;
    // The agent notices the loss of a QUIC session by its keep-alive.
    let file = scratch.file("agent.yaml", "limits:\n  keepAlive: 1s\n")?;
    let file = file.to_string_lossy();
    let second = servers.servers[1].address(Listener::Agents).to_string();
    let arguments = ["--server", &second, "--transport", "quic", "--config", &file];
    let _agent = servers.agent_with(0, &arguments).await?;
    servers.get_ok(1).await?;
    servers.servers[0].process().signal(Signal::Kill)?;
    servers.servers[0].process().end(CONNECT).await?;
    wait_for(
        &servers.servers[1],
        "tunnel_server_peers{state=\"connected\"}",
        0,
    )
    .await;
    let page = RawRequest::get(&servers.host(), "/metrics");
    let deadline = Instant::now() + scaled(CONNECT);
    let mut refused = 0;
    loop {
        let reply = timeout(scaled(AT_ONCE), request(servers.http(1), &page)).await;
        let reply = reply.context("no answer at once")??;
        if reply.status == 200 {
            break;
        }
        ensure_refused(&reply, 503, "no_agent")?;
        refused += 1;
        ensure!(Instant::now() < deadline, "the agent does not move");
        sleep(PAUSE).await;
    }
    ensure!(refused > 0, "the agent moved before the first request");
    Ok(())
}

/// Far below `limits.openTimeout`, 10 s: no server holds the node.
const AT_ONCE: Duration = Duration::from_secs(2);
/// Time between two requests.
const PAUSE: Duration = Duration::from_millis(20);
