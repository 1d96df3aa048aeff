//! S22, T10: agents that accept streams and never finish their reply.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::io::AsyncWriteExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tunnel_tests::checks::{ensure_contains, ensure_status};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::{TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::Exporter;

use super::super::scripted::ScriptedAgent;
use super::scrape;

const AGENTS: usize = 4;
const STREAMS: usize = 64;
const OPEN: Duration = Duration::from_secs(1);

/// Sends the length prefix of a reply on each stream, and nothing more.
async fn begins_each_reply(agent: ScriptedAgent) {
    let mut open_conns = Vec::new();
    while let Ok(mut stream) = agent.next_stream().await {
        let _cut = stream.write_all(&[20]).await;
        open_conns.push(stream);
    }
}

/// S22 from the agents' side: hostile agents send one byte of each reply and then nothing. Every
/// caller receives 504 at `openTimeout`, and the streams are released.
#[tokio::test(flavor = "multi_thread")]
async fn s22_replies_of_one_byte_are_given_up_at_the_open_timeout() -> Result<()> {
    let env = TestEnv::start_with(|settings| {
        settings.limits = TestEnv::limits("{ openTimeout: 1s, streamsPerAgent: 128 }");
    })
    .await?;
    let exporter = Exporter::start("good").await?;
    let _good = env.agent("good").await?;
    let mut hostile = Vec::new();
    for number in 0..AGENTS {
        let node = format!("worker-{number}");
        let agent = ScriptedAgent::connect(&env, &node).await?;
        env.connected(&node).await;
        hostile.push(begins_each_reply(agent));
    }
    tokio::select! {
        _ended = futures_util::future::join_all(hostile) => anyhow::bail!("the hostile agents were cut"),
        served = callers_are_answered(&env, &exporter) => served,
    }
}

async fn callers_are_answered(env: &TestEnv, exporter: &Exporter) -> Result<()> {
    let mut callers = JoinSet::new();
    let began = Instant::now();
    for number in 0..AGENTS {
        for _ in 0..STREAMS {
            let endpoint = env.http();
            let get = RawRequest::get(&format!("worker-{number}:9100"), "/metrics");
            callers.spawn(async move {
                let answer = timeout(scaled(WAIT_TIMEOUT), request(endpoint, &get)).await;
                (answer, began.elapsed())
            });
        }
    }
    let host = format!("good:{}", exporter.addr().port());
    scrape(&env.http(), &host, 20).await?;
    while let Some(done) = callers.join_next().await {
        let (answer, took) = done?;
        let answer = answer??;
        ensure_status(&answer, 504)?;
        ensure_contains(&answer.text(), &["limits.openTimeout"])?;
        ensure!(took >= OPEN, "{took:?}");
    }
    eventually("no stream is left", WAIT_TIMEOUT, async || {
        ensure!(env.metric("tunnel_server_streams_open").await? == 0);
        let reached = "tunnel_server_limits_reached_total{limit=\"openTimeout\"}";
        ensure!(env.metric(reached).await? == u64::try_from(AGENTS * STREAMS)?);
        Ok(())
    })
    .await;
    Ok(())
}
