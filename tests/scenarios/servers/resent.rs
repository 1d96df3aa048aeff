//! The server that passes requests on to an agent is killed while they wait. The agent has a session
//! with another server.

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;
use tunnel_tests::checks::ensure_refused;
use tunnel_tests::client::{HttpReply, RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Peering, Signal};
use tunnel_tests::targets::Exporter;

use super::{AGENTS, CONNECT, NODE, Servers, wait_for, wait_for_route};

const SERVERS: usize = 3;
/// Requests that wait when the server is killed.
const WAITING: usize = 5;

#[tokio::test(flavor = "multi_thread")]
async fn waiting_gets_are_sent_once_more_over_another_server_and_posts_are_not() -> Result<()> {
    let mut servers = Servers::start(SERVERS, &[]).await?;
    let exporter = Exporter::start(NODE).await?;
    let host = format!("{NODE}:{}", exporter.addr().port());
    let _agent = servers.agent(0).await?.start()?;
    let without = server_without_session(&servers).await?;
    wait_for_route(servers.http(without).into()).await;
    servers.get_ok(without).await?;
    let carrier = carrier_of(&servers, without).await?;

    let mut gets = JoinSet::new();
    for _ in 0..WAITING {
        let (endpoint, page) = (servers.http(without), RawRequest::get(&host, "/slow-head"));
        gets.spawn(async move { request(endpoint, &page).await });
    }
    let endpoint = servers.http(without);
    let post = RawRequest::new("POST", "/slow-head", &host)
        .header("Connection", "close")
        .body("x");
    let mut posts = JoinSet::new();
    posts.spawn(async move { request(endpoint, &post).await });
    eventually("waiting requests", CONNECT, async || {
        let waiting = exporter.waiting();
        ensure!(waiting == WAITING + 1, "{waiting}");
        Ok(())
    })
    .await;
    servers.servers[carrier].process().signal(Signal::Kill)?;

    let refused = next(&mut posts).await?;
    ensure_refused(&refused, 502, "agent_lost")?;
    let retried = "tunnel_server_requests_retried_total";
    wait_for(&servers.servers[without], retried, WAITING as u64).await;
    // The first requests may still wait at the target.
    eventually("repeated requests", CONNECT, async || {
        let received = exporter.traffic().requests();
        ensure!(received == 2 * WAITING as u64 + 1, "{received}");
        Ok(())
    })
    .await;
    exporter.release();
    for _ in 0..WAITING {
        let reply = next(&mut gets).await?;
        ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    }
    Ok(())
}

async fn next(replies: &mut JoinSet<Result<HttpReply>>) -> Result<HttpReply> {
    replies.join_next().await.context("no request")??
}

/// Waits until all servers but one have a session of the agent, and that one knows each of the
/// sessions. Returns that one.
async fn server_without_session(servers: &Servers) -> Result<usize> {
    let find = async || {
        let mut without = Vec::new();
        for (number, server) in servers.servers.iter().enumerate() {
            if server.metric(AGENTS).await? == 0 {
                without.push(number);
            }
        }
        anyhow::Ok(without)
    };
    eventually("two sessions", CONNECT, async || {
        let without = find().await?;
        ensure!(without.len() == 1, "{without:?}");
        Ok(())
    })
    .await;
    let without = *find().await?.first().context("no server without")?;
    eventually("the node at both servers", CONNECT, async || {
        let known = servers.servers[without].known_sessions().await?;
        ensure!(known == 2, "{known}");
        Ok(())
    })
    .await;
    Ok(without)
}

/// Returns the server that passes on the requests of another one.
async fn carrier_of(servers: &Servers, caller: usize) -> Result<usize> {
    let carrier = || {
        let log = servers.servers[caller].log();
        let via = |number: &usize| log.contains(&format!("\"via\":\"{}\"", Peering::name(*number)));
        (0..SERVERS).find(via)
    };
    eventually("the access log", CONNECT, async || {
        ensure!(carrier().is_some());
        Ok(())
    })
    .await;
    carrier().context("no carrier")
}
