//! A server that is killed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::time::timeout;
use tunnel_tests::checks::ensure_refused;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Server, Signal};

use super::{CONNECT, Servers, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn node_with_one_session_is_refused_at_once_until_its_agent_has_moved() -> Result<()> {
    let mut servers = Servers::start(2, &[]).await?;
    let second = servers.servers[1].address(Listener::Agents).to_string();
    let arguments = ["--server", &second, "--transport", "h2"];
    let agent = servers.agent_with(0, &arguments).await?;
    servers.get_ok(1).await?;
    // The agent cannot move before the first request.
    agent.signal(Signal::Stop)?;
    servers.servers[0].process().signal(Signal::Kill)?;
    servers.servers[0].process().end(CONNECT).await?;
    let connected = "tunnel_server_peers{state=\"connected\"}";
    wait_for(&servers.servers[1], connected, 0).await;
    let page = RawRequest::get(&servers.host(), "/metrics");
    let reply = timeout(scaled(AT_ONCE), request(servers.http(1), &page)).await;
    let reply = reply.context("no answer at once")??;
    ensure_refused(&reply, 503, "no_agent")?;
    agent.signal(Signal::Cont)?;
    eventually("an answer over the second server", CONNECT, async || {
        servers.get_ok(1).await
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_a_killed_server_until_it_is_back() -> Result<()> {
    let mut servers = Servers::start(2, &[]).await?;
    wait_for_findings(&servers.servers[0], &[]).await;
    let setup = servers.servers[1].setup_for_restart();
    servers.servers[1].process().signal(Signal::Kill)?;
    wait_for_findings(&servers.servers[0], &["D17"]).await;
    servers.servers[1] = setup.start().await?;
    wait_for_findings(&servers.servers[0], &[]).await;
    Ok(())
}

/// Waits until `doctor` has exactly the findings with these ids. D18 is the host's.
async fn wait_for_findings(server: &Server, expected: &[&str]) {
    let meta = server.address(Listener::Meta).to_string();
    let doctor = [
        "doctor",
        "-o",
        "json",
        "--kubernetes",
        "off",
        "--only",
        "D09,D17",
        "--meta-listen",
        &meta,
    ];
    eventually("the findings", REPORTED, async || {
        let printed = server.verb(&doctor)?.run().await?;
        let document: Value = serde_json::from_str(&printed.out)?;
        let findings = document["findings"].as_array().context("no findings")?;
        let ids: Vec<&Value> = findings.iter().map(|finding| &finding["id"]).collect();
        ensure!(ids == expected, "{document:#}");
        Ok(())
    })
    .await;
}

/// Far below `limits.openTimeout`, 10 s: no connected server holds the node.
const AT_ONCE: Duration = Duration::from_secs(2);
/// The server reports another one 30 s after the connection was lost.
const REPORTED: Duration = Duration::from_secs(45);
