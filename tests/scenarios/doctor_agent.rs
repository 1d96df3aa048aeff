//! The verb `doctor` of the agent: a healthy pair has no finding, and each fault on the path to the
//! server has the finding of its cause.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tunnel_agent::config::{Config, TokenSource};
use tunnel_agent::doctor::{DoctorOptions, examine};
use tunnel_doctor::Report;
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT, server_address};
use tunnel_tests::eventually::eventually;
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::targets::Exporter;

const NODE: &str = "worker-1";
/// Time limit of the checks. A step that gets no answer takes a fifth of it.
const LIMIT: Duration = Duration::from_secs(15);

#[tokio::test(flavor = "multi_thread")]
async fn healthy_pair_has_no_finding_and_a_closed_port_has_one() -> Result<()> {
    let (env, _agent, config) = pair().await?;
    let node: NodeName = NODE.parse()?;
    let exporter = Exporter::start(NODE).await?;
    let open = Port::new(exporter.addr().port()).context("no port")?;
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let closed = Port::new(closed).context("no port")?;
    eventually("the agent to be healthy", WAIT_TIMEOUT, async || {
        let report = doctor(&config, &["D19", "D20"], &[open]).await;
        ensure!(report.exit_code() == 0, "{report:?}");
        ensure!(report.capacity.contains("512 streams"), "{report:?}");
        ensure!(
            ids(&report).is_empty() && report.skipped.is_empty(),
            "{report:?}"
        );
        anyhow::Ok(())
    })
    .await;

    let sessions = || env.registry().of_node(&node);
    let before = sessions();
    let report = doctor(&config, &["D19"], &[open, closed]).await;
    ensure!(
        ids(&report) == ["D19.ports"] && report.exit_code() == 2,
        "{report:?}"
    );
    let after = sessions();
    let is_same = before
        .iter()
        .zip(&after)
        .all(|(old, new)| Arc::ptr_eq(old, new));
    ensure!(
        before.len() == after.len() && is_same,
        "the session of the agent was replaced"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn link_that_drops_udp_is_a_warning_that_names_udp() -> Result<()> {
    let (env, _agent, config) = pair().await?;
    let link = Link::start(env.bound().agents, 7)?;
    link.set(TrafficClass::UDP, Impairment::black_hole());
    let report = doctor(&towards(&config, link.addr()), &["D19"], &[]).await;
    ensure!(
        ids(&report) == ["D19.udp"] && report.exit_code() == 1,
        "{report:?}"
    );
    let fix = report.findings.first().map(|finding| finding.fix.as_str());
    ensure!(fix.is_some_and(|fix| fix.contains("UDP 10262")), "{fix:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_stopped_is_an_error_over_tcp() -> Result<()> {
    let (mut env, _agent, config) = pair().await?;
    env.stop_server().await?;
    let report = doctor(&config, &["D19"], &[]).await;
    ensure!(
        ids(&report) == ["D19.tcp"] && report.exit_code() == 2,
        "{report:?}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_another_ca_and_port_of_callers_have_different_ids() -> Result<()> {
    let (env, _agent, config) = pair().await?;
    let other = TestEnv::start().await?;
    let agents = other.bound().agents;
    let report = doctor(&towards(&config, agents), &["D19"], &[]).await;
    ensure!(
        ids(&report) == ["D19.tls"] && report.exit_code() == 2,
        "{report:?}"
    );

    let mut enrolling = other.agent_config("worker-2")?;
    enrolling.token = Some(TokenSource::Inline(env.token("worker-2", &[])?));
    let report = doctor(&enrolling, &["D19"], &[]).await;
    ensure!(ids(&report) == ["D19.tls"], "{report:?}");
    let what = report.findings.first().map(|finding| finding.what.as_str());
    ensure!(
        what.is_some_and(|what| what.contains("the token pins another CA")),
        "{what:?}"
    );
    ensure!(
        !enrolling.data_dir.exists(),
        "the command made the data directory"
    );

    let https = env.bound().https.context("no HTTPS listener")?;
    let report = doctor(&towards(&config, https), &["D19"], &[]).await;
    ensure!(ids(&report) == ["D19.alpn"], "{report:?}");
    Ok(())
}

/// Starts a server and an agent, and returns the settings of the agent.
async fn pair() -> Result<(TestEnv, Agent, Config)> {
    let env = TestEnv::start().await?;
    let mut config = env.agent_config_with(NODE, |settings| {
        settings.meta_listen = Some("127.0.0.1:0".into());
    })?;
    let agent = Agent::start(config.clone()).await?;
    env.connected(NODE).await;
    config.meta_listen = agent.meta();
    Ok((env, agent, config))
}

/// Returns the settings with another server.
fn towards(config: &Config, server: SocketAddr) -> Config {
    Config {
        servers: vec![server_address(server)],
        ..config.clone()
    }
}

async fn doctor(config: &Config, only: &[&str], ports: &[Port]) -> Report {
    let options = DoctorOptions {
        port: ports.to_vec(),
        only: only.iter().map(|id| (*id).to_owned()).collect(),
        timeout: LIMIT,
        ..DoctorOptions::default()
    };
    Box::pin(examine(config, &options)).await
}

fn ids(report: &Report) -> Vec<&'static str> {
    report.findings.iter().map(|finding| finding.id).collect()
}
