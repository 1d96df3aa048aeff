//! F18, F19: certificates whose life is shorter than the test.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::wire::code::CloseCode;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::load::Load;
use tunnel_tests::targets::Exporter;

use super::super::scripted::ScriptedAgent;
use super::{ends, metric, metric_reaches, short_lives, wait_until_after};
use crate::dns::report_figure;

/// Runs load for three lives of a certificate, of a minute each in the full gear. No request fails,
/// no stream is cut, and no session ends.
#[tokio::test(flavor = "multi_thread")]
async fn f18_three_lives_of_short_certificates_under_load_cut_nothing() -> Result<()> {
    let life = Duration::from_secs(Gear::current().pick(8, 60));
    let env = short_lives(life.as_secs()).await?;
    let exporter = Exporter::start("worker-1").await?;
    let agents = [
        env.agent_with("worker-1", |_| {}).await?,
        env.agent_with("worker-2", |config| {
            config.transport = tunnel_agent::config::TransportChoice::H2;
        })
        .await?,
    ];
    let port = exporter.addr().port();
    let hosts = ["worker-1", "worker-2"].map(|node| format!("{node}:{port}"));
    let began = Instant::now();
    let file = env.path().join("agent-worker-1").join("agent.crt");
    let (first, first_listed) = (ends(&file)?, listed_end(&env).await?);
    let load = Load::start(env.http(), &hosts, 2).await?;
    sleep(life * 3 + life / 4).await;
    let outcome = load.end().await?;
    outcome.check()?;
    let renewed = metric(&env, "tunnel_server_renewals_total{result=\"issued\"}").await?;
    let lost = metric(&env, "tunnel_server_session_ends_total").await?;
    report_figure(&format!(
        "certificates of {life:?}: {:?} under load, {} requests answered, {} failed, {} streams held, {renewed} renewals",
        began.elapsed(),
        outcome.answered,
        outcome.failures.len(),
        outcome.open_streams,
    ));
    // Each of the two agents renews at 40 to 60 % of each life.
    ensure!(renewed >= 8.0, "{renewed} renewals");
    ensure!(lost == 0.0, "{lost} sessions ended");
    ensure!(ends(&file)? > first + life * 2, "the file was not replaced");
    let listed = listed_end(&env).await?;
    ensure!(listed > first_listed, "{listed}, as {first_listed}");
    for agent in agents {
        agent.stop().await?;
    }
    Ok(())
}

/// Returns the end of the first node's certificate from the node list, as text that sorts by time.
async fn listed_end(env: &TestEnv) -> Result<String> {
    let shown = request(env.meta(), &RawRequest::get("meta", "/nodes")).await?;
    let listed: Vec<serde_json::Value> = serde_json::from_str(&shown.text())?;
    Ok(listed[0]["certificateNotAfter"].to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn f18_session_whose_certificate_ends_unrenewed_is_ended_in_time() -> Result<()> {
    let env = short_lives(6).await?;
    // The scripted agent never requests another certificate, like an older version.
    let agent = ScriptedAgent::connect(&env, "worker-1").await?;
    let began = Instant::now();
    let reason = timeout(scaled(Duration::from_secs(20)), agent.closed()).await?;
    ensure!(reason.code == CloseCode::CredentialExpired, "{reason:?}");
    let after = began.elapsed();
    ensure!(after >= Duration::from_secs(2), "ended {after:?} too soon");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f18_agent_that_slept_beyond_the_end_comes_back_by_itself() -> Result<()> {
    let env = short_lives(6).await?;
    let exporter = Exporter::start("worker-1").await?;
    let agent = env.agent("worker-1").await?;
    agent.stop().await?;
    let file = env.path().join("agent-worker-1").join("agent.crt");
    let ended = ends(&file)?;
    wait_until_after(ended).await;
    // Without a token, the agent renews the expired certificate with its key.
    let began = Instant::now();
    let _agent = env
        .agent_with("worker-1", |config| config.token = None)
        .await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
    ensure!(reply.status == 200, "{}", reply.text());
    ensure!(began.elapsed() < scaled(Duration::from_secs(30)));
    ensure!(ends(&file)? > ended);
    let issued = "tunnel_server_enrollments_total{result=\"issued\"}";
    metric_reaches(&env, issued, 2.0, Duration::from_secs(5)).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn f18_running_agent_renews_after_an_outage_that_outlasted_its_certificate() -> Result<()> {
    let mut env = short_lives(6).await?;
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let file = env.path().join("agent-worker-1").join("agent.crt");
    let bound = env.bound().clone();
    env.stop_server().await?;
    let ended = ends(&file)?;
    wait_until_after(ended + Duration::from_secs(1)).await;
    env.start_server_at(bound.agents).await?;
    let host = format!("worker-1:{}", exporter.addr().port());
    let back = Duration::from_secs(30);
    eventually("requests are answered again", back, async || {
        let reply = request(env.http(), &RawRequest::get(&host, "/metrics")).await?;
        ensure!(reply.status == 200, "{}", reply.text());
        Ok(())
    })
    .await;
    eventually("the new certificate is stored", back, async || {
        ensure!(ends(&file)? > ended);
        Ok(())
    })
    .await;
    Ok(())
}
