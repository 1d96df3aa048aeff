//! A server that stops while callers of it, and of another server, reach a node over it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, timeout};
use tunnel_tests::checks::{ensure_reset, ensure_status};
use tunnel_tests::client::{Exchange, KeepAliveClient, RawRequest};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::Signal;

use super::{AGENTS, CONNECT, Servers, follow, wait_for};

#[tokio::test(flavor = "multi_thread")]
async fn only_session_moves_without_a_failed_request_and_forwarded_streams_go_on() -> Result<()> {
    let delay = scaled(DELAY);
    let setting = format!("{}ms", delay.as_millis());
    let arguments = ["--drain-delay", &setting, "--drain-timeout", "8s"];
    let mut servers = Servers::start(2, &arguments).await?;
    let _agent = servers.agent_at(0).await?;
    let mut followed = follow(&servers, 1).await?;
    let mut kept_alive = KeepAliveClient::connect(servers.http(0)).await?;
    let page = RawRequest::new("GET", "/metrics", &servers.host());
    ensure_status(&kept_alive.request(&page).await?, 200)?;
    servers.servers[0].process().signal(Signal::Term)?;
    let stopping = Instant::now();
    // A caller that keeps its connection is asked to close it.
    loop {
        let reply = kept_alive.request(&page).await?;
        ensure_status(&reply, 200)?;
        let connection = reply.header("connection");
        if connection.is_some_and(|value| value.eq_ignore_ascii_case("close")) {
            break;
        }
        ensure!(stopping.elapsed() < delay, "not asked to close");
    }
    let mut has_moved = false;
    while !has_moved || stopping.elapsed() < 2 * delay {
        if stopping.elapsed() < delay / 2 {
            servers.get_ok(0).await?;
        }
        servers.get_ok(1).await?;
        has_moved = servers.servers[1].metric(AGENTS).await? == 1;
        ensure!(stopping.elapsed() < scaled(CONNECT), "no move");
    }
    // The stream over the server that stops goes on until its own end.
    ensure!(servers.kubelet.emit("last") == 1);
    let line = timeout(scaled(CONNECT), followed.line()).await?;
    ensure!(line.as_deref() == Some("last"), "{line:?}");
    servers.kubelet.end_follows();
    let ended = followed.into_reply().await.ended;
    ensure!(ended.is_clean(), "{ended:?}");
    let status = servers.servers[0].process().end(CONNECT).await?;
    ensure!(status.success(), "{status}");
    servers.get_ok(1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarded_stream_that_outlives_the_drain_is_reset_and_logged() -> Result<()> {
    let mut servers = Servers::start(2, &["--drain-timeout", "1s"]).await?;
    let _agent = servers.agent_at(0).await?;
    let followed = follow(&servers, 1).await?;
    servers.servers[0].process().signal(Signal::Term)?;
    let reply = timeout(scaled(CONNECT), followed.into_reply()).await;
    ensure_reset(&reply.context("the stream goes on")?.ended)?;
    servers.servers[0].process().end(CONNECT).await?;
    let log = servers.servers[0].log();
    ensure!(log.contains("drain timeout is over"), "{log}");
    // The entry of the access log has the reason.
    eventually("the access log", CONNECT, async || {
        let lines = servers.servers[1].log().lines();
        let mut entries = lines.iter().filter(|line| line.contains("/follow"));
        let entry = entries.next().context("no entry")?;
        ensure!(entry.contains("\"via\":\"s0\""), "{entry}");
        ensure!(!entry.contains("\"code\":\"ok\""), "{entry}");
        Ok(())
    })
    .await;
    wait_for(&servers.servers[1], AGENTS, 1).await;
    servers.get_ok(1).await
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_an_agent_that_cannot_move_end_alike_at_the_deadline() -> Result<()> {
    // An agent can dial the server that it was started with, and no other one.
    let timeout_of_drain = Duration::from_secs(2);
    let arguments = ["--drain-timeout", "2s", "--advertise", "127.0.0.1:9"];
    let mut servers = Servers::start(2, &arguments).await?;
    let _agent = servers.agent_at(0).await?;
    let mut followed = Vec::new();
    for server in 0..2 {
        let page = RawRequest::get(&servers.host(), "/follow");
        followed.push(Exchange::start(servers.http(server), &page).await?);
        eventually("the follower", CONNECT, async || {
            ensure!(servers.kubelet.followers() == server + 1);
            Ok(())
        })
        .await;
    }
    let stopping = Instant::now();
    servers.servers[0].process().signal(Signal::Term)?;
    for exchange in followed {
        let reply = timeout(scaled(CONNECT), exchange.into_reply()).await;
        ensure_reset(&reply.context("the stream goes on")?.ended)?;
        ensure!(stopping.elapsed() >= timeout_of_drain, "too early");
    }
    servers.servers[0].process().end(CONNECT).await?;
    let log = servers.servers[0].log();
    ensure!(log.contains("drain timeout is over"), "{log}");
    // The server that stops says why; the other one names the server.
    let reasons = ["\"code\":\"draining\"", "\"code\":\"cut\""];
    for (server, reason) in servers.servers.iter().zip(reasons) {
        eventually("the access log", CONNECT, async || {
            let lines = server.log().lines();
            let entry = lines.iter().find(|line| line.contains("/follow"));
            let entry = entry.context("no entry")?;
            ensure!(entry.contains(reason), "{entry}");
            Ok(())
        })
        .await;
    }
    Ok(())
}

/// The drain delay of the first test.
const DELAY: Duration = Duration::from_secs(1);
