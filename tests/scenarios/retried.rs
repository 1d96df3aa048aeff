//! A session ends while requests wait for their answers, and the node has another session.

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::control::ControlMessage;
use tunnel_tests::checks::ensure_refused;
use tunnel_tests::client::{Exchange, RawRequest, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::scaled;

use super::scripted::ScriptedAgent;

const HOST: &str = "worker-1:9100";
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";
/// Requests that wait when the session ends.
const WAITING: usize = 20;

/// Accepts the next request over a session and reads its head.
async fn receive(agent: &ScriptedAgent) -> Result<(Stream, String)> {
    let mut stream = agent.next_stream().await?;
    stream.accept("").await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    Ok((stream, String::from_utf8(head)?))
}

async fn serve(agent: &ScriptedAgent) -> Result<String> {
    let (mut stream, head) = receive(agent).await?;
    stream.write_all(ANSWER).await?;
    // A server that has the whole answer may have dropped the stream.
    let _stopped = stream.shutdown().await;
    Ok(head)
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_gets_are_answered_over_the_other_session() -> Result<()> {
    let env = TestEnv::start().await?;
    let dying = ScriptedAgent::connect(&env, "worker-1").await?;
    let mut callers = tokio::task::JoinSet::new();
    let mut waiting = Vec::new();
    for _ in 0..WAITING {
        let endpoint = env.http();
        callers.spawn(async move { request(endpoint, &RawRequest::get(HOST, "/metrics")).await });
        waiting.push(receive(&dying).await?);
    }
    let other = ScriptedAgent::connect(&env, "worker-1").await?;
    dying.close().await;
    for _ in 0..WAITING {
        let head = timeout(scaled(WAIT_TIMEOUT), serve(&other))
            .await
            .context("GET")??;
        ensure!(head.starts_with("GET /metrics "), "{head}");
    }
    while let Some(reply) = callers.join_next().await {
        let reply = reply??;
        ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    }
    let retried = env.metric("tunnel_server_requests_retried_total").await?;
    ensure!(retried == WAITING as u64, "{retried}");
    drop(waiting);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn post_and_exec_are_not_repeated() -> Result<()> {
    let env = TestEnv::start().await?;
    let exec = "/exec/a/b/c?command=reboot";
    let requests = [
        RawRequest::new("POST", "/run", HOST)
            .header("Connection", "close")
            .body("x"),
        RawRequest::new("POST", "/run", HOST).header("Connection", "close"),
        RawRequest::new("GET", exec, HOST)
            .header("Connection", "Upgrade")
            .header("Upgrade", "SPDY/3.1"),
    ];
    let mut dying = ScriptedAgent::connect(&env, "worker-1").await?;
    for sent in requests {
        let caller = Exchange::start(env.http(), &sent);
        let lost = async {
            let (_stream, head) = receive(&dying).await?;
            let other = ScriptedAgent::connect(&env, "worker-1").await?;
            dying.close().await;
            anyhow::Ok((other, head))
        };
        let (reply, lost) = tokio::join!(caller, lost);
        let (other, head) = lost?;
        ensure_refused(&reply?.into_reply().await, 502, "agent_lost").context(head)?;
        // The next stream of the other session is this request, so that none came before it.
        let page = RawRequest::get(HOST, "/after");
        let (reply, head) = tokio::join!(request(env.http(), &page), serve(&other));
        let head = head?;
        ensure!(head.starts_with("GET /after "), "{head}");
        ensure!(reply?.status == 200, "{head}");
        dying = other;
    }
    let retried = env.metric("tunnel_server_requests_retried_total").await?;
    ensure!(retried == 0, "{retried}");
    Ok(())
}

/// The session lives on, so that its end cannot be the reason.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_get_is_answered_over_the_other_session_of_a_suspect_agent() -> Result<()> {
    let env = TestEnv::start().await?;
    let mut silent = ScriptedAgent::connect(&env, "worker-1").await?;
    let page = RawRequest::get(HOST, "/metrics");
    let moves = async {
        let (_stream, _head) = receive(&silent).await?;
        let other = ScriptedAgent::connect(&env, "worker-1").await?;
        silent.send(&ControlMessage::Suspect(true)).await?;
        let head = timeout(scaled(WAIT_TIMEOUT), serve(&other))
            .await
            .context("GET")??;
        ensure!(head.starts_with("GET /metrics "), "{head}");
        anyhow::Ok(other)
    };
    let (reply, other) = tokio::join!(request(env.http(), &page), moves);
    let _other = other?;
    let reply = reply?;
    ensure!(reply.status == 200, "{}: {}", reply.status, reply.text());
    let retried = env.metric("tunnel_server_requests_retried_total").await?;
    ensure!(retried == 1, "{retried}");
    Ok(())
}
