//! Sessions of agents whose CA was removed from the server's `--agent-ca`.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::client::{Exchange, RawRequest, request};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::targets::Exporter;

use super::credential_files::Files;

#[tokio::test(flavor = "multi_thread")]
async fn f20_sessions_of_a_ca_that_was_taken_out_end_within_10_s() -> Result<()> {
    let files = Files::new()?;
    let env = files.env().await?;
    let exporter = Exporter::start("worker-1").await?;
    let port = exporter.addr().port();
    let mut agents = Vec::new();
    let mut follows = Vec::new();
    for (node, transport) in [
        ("worker-1", "quic"),
        ("worker-2", "h2"),
        ("worker-3", "quic"),
    ] {
        agents.push(files.agent_over(&env, node, transport).await?);
        let follow = RawRequest::get(&format!("{node}:{port}"), "/follow?interval_ms=20");
        let mut follow = Exchange::start(env.http(), &follow).await?;
        ensure!(follow.line().await.is_some(), "{node} does not follow");
        follows.push(follow);
    }
    let next = TestCa::new("next")?;
    let both = format!("{}{}", files.ca.pem(), next.pem());
    replace(&files.path("server-ca.pem"), both.as_bytes())?;
    // worker-3's process opens a session with a certificate of the new CA. The first session stays,
    // with its stream.
    let first = env.registry().of_node(&"worker-3".parse()?);
    let own = next.issue(&Leaf::agent("worker-3"))?;
    own.write(files.scratch.path(), "worker-3")?;
    eventually("worker-3 has another session", WAIT_TIMEOUT, async || {
        let sessions = env.registry().of_node(&"worker-3".parse()?);
        let counts = (sessions.len(), first.len());
        ensure!(counts == (2, 1), "{counts:?}");
        Ok(())
    })
    .await;
    replace(&files.path("server-ca.pem"), next.pem().as_bytes())?;
    env.reload();
    let began = Instant::now();
    for node in ["worker-1", "worker-2"] {
        eventually(&format!("{node} is gone"), WAIT_TIMEOUT, async || {
            let sessions = env.registry().of_node(&node.parse()?);
            ensure!(sessions.is_empty(), "{} left", sessions.len());
            anyhow::Ok(())
        })
        .await;
    }
    ensure!(began.elapsed() < scaled(Duration::from_secs(10)));
    let mut stays = follows.pop().unwrap();
    for mut cut in follows {
        while cut.line().await.is_some() {}
        ensure!(!cut.ended().is_some_and(|end| end.is_clean()), "{cut:?}");
    }
    for _ in 0..10 {
        ensure!(stays.line().await.is_some(), "{:?}", stays.ended());
    }
    let get = RawRequest::get(&format!("worker-1:{port}"), "/metrics");
    let reply = request(env.http(), &get).await?;
    assert_eq!(reply.status, 503, "{}", reply.text());
    Ok(())
}
