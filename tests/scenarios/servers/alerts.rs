//! The alerts of `deploy/monitoring` in a real Prometheus: each fires with its fault and ends after
//! it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::ca::{Leaf, TestCa, replace};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::guides::page;
use tunnel_tests::manifests::items;
use tunnel_tests::process::{Listener, Process, Program, ScratchDir, next_loopback};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::{NODE, Servers, follow};

#[tokio::test(flavor = "multi_thread")]
async fn node_without_an_agent_and_sessions_over_h2_are_alerts() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let servers = Servers::start(2, &[]).await?;
    let prometheus = Prometheus::start(&servers)?;
    let setup = servers.agent(0).await?;
    let agent = setup.clone().args(&["--transport", "h2"]).start()?;
    prometheus.wait_for(&["CulvertFallback"]).await;
    // The end of a process ends its TCP connections at once.
    agent.kill().await?;
    prometheus.wait_for(&["CulvertNodeGone"]).await;
    let _agent = setup.start()?;
    prometheus.wait_for(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn server_that_has_lost_all_others_is_an_alert() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let mut servers = Servers::start(2, &[]).await?;
    let prometheus = Prometheus::start(&servers)?;
    let other = servers.servers.pop().context("two servers")?;
    let setup = other.setup_for_restart();
    other.into_process().kill().await?;
    let lost = ["CulvertPeerLost", "CulvertServerAlone"];
    prometheus.wait_for(&lost).await;
    servers.servers.push(setup.start().await?);
    prometheus.wait_for(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_files_that_expire_or_are_unusable_are_alerts() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let ca = TestCa::new("ours")?;
    // Valid for a day.
    let mut leaf = Leaf::target(NODE);
    let (certificate, key) = ca.issue(&leaf)?.write(scratch.path(), "https")?;
    let config = scratch.file("server.yaml", "limits:\n  reloadEvery: 100ms\n")?;
    let files = [&config, &certificate, &key].map(|file| file.to_string_lossy());
    let [config_file, certificate_file, key_file] = &files;
    let arguments: [&str; 6] = [
        "--config",
        config_file,
        "--https-cert-file",
        certificate_file,
        "--https-key-file",
        key_file,
    ];
    let servers = Servers::start(1, &arguments).await?;
    let prometheus = Prometheus::start(&servers)?;
    prometheus.wait_for(&["CulvertCertificateExpires"]).await;
    replace(&certificate, b"no certificate")?;
    let both = ["CulvertCertificateExpires", "CulvertCondition"];
    prometheus.wait_for(&both).await;
    leaf.until += Duration::from_secs(30 * 86400);
    ca.issue(&leaf)?.write(scratch.path(), "https")?;
    prometheus.wait_for(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn limit_that_is_reached_is_an_alert() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let config = scratch.file("server.yaml", "limits:\n  peerStreams: 1\n")?;
    let config = config.to_string_lossy();
    let servers = Servers::start(2, &["--config", &config]).await?;
    let _agent = servers.agent_at(0).await?;
    let mut followed = follow(&servers, 1).await?;
    let prometheus = Prometheus::start(&servers)?;
    // An increase is visible after the first scrape only, so the requests go on until the alert.
    eventually("the alert", ALERT, async || {
        let get = RawRequest::get(&servers.host(), "/metrics");
        let reply = request(servers.http(1), &get).await?;
        ensure!(reply.status == 503, "{}", reply.status);
        prometheus.check(&["CulvertLimitReached"]).await
    })
    .await;
    servers.kubelet.end_follows();
    followed.finish().await?;
    prometheus.wait_for(&[]).await;
    Ok(())
}

/// A Prometheus that scrapes servers and evaluates the alerts.
struct Prometheus {
    process: Process,
    api: SocketAddr,
    _scratch: ScratchDir,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes the meta ports of the servers.
    fn start(servers: &Servers) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let rules = page("deploy/monitoring/rules.yaml")?;
        scratch.file("rules.yaml", shortened(&rules))?;
        let servers = servers.servers.iter();
        let targets: Vec<_> = servers
            .map(|server| format!("\"{}\"", server.address(Listener::Meta)))
            .collect();
        let configuration = CONFIGURATION.replace("TARGETS", &targets.join(", "));
        let configuration = scratch.file("prometheus.yml", configuration)?;
        let data = scratch.path().join("data");
        let api = SocketAddr::from((next_loopback(), PORT));
        let program = Program::tool(Tool::Prometheus)?
            .arg(format!("--config.file={}", configuration.display()))
            .arg(format!("--storage.tsdb.path={}", data.display()))
            .arg(format!("--web.listen-address={api}"));
        Ok(Self {
            process: program.start()?,
            api,
            _scratch: scratch,
        })
    }

    /// Waits until exactly these alerts fire, in alphabetical order.
    async fn wait_for(&self, alerts: &[&str]) {
        let what = format!("alerts {alerts:?}");
        eventually(&what, ALERT, async || self.check(alerts).await).await;
    }

    /// Fails unless exactly these alerts fire, in alphabetical order.
    async fn check(&self, alerts: &[&str]) -> Result<()> {
        let get = RawRequest::get("prometheus", "/api/v1/alerts");
        let reply = request(self.api, &get).await?;
        let answer: Value = serde_json::from_str(&reply.text()).context("no JSON")?;
        ensure!(answer["status"] == "success", "{answer}");
        let firing = items(&answer["data"]["alerts"]).filter(|alert| alert["state"] == "firing");
        let firing: BTreeSet<_> = firing
            .filter_map(|alert| alert["labels"]["alertname"].as_str())
            .collect();
        ensure!(firing.iter().eq(alerts), "{answer}; {}", self.process);
        Ok(())
    }
}

/// Returns the rules with one second in place of the time that an alert waits, and with a short
/// window for limits.
fn shortened(rules: &str) -> String {
    let lines = rules.lines().map(|line| match line.split_once("for: ") {
        Some((indent, _minutes)) if indent.trim().is_empty() => format!("{indent}for: 1s"),
        _ => line.to_owned(),
    });
    let lines: Vec<_> = lines.collect();
    lines.join("\n").replace("[10m]", "[10s]")
}

/// Configuration of Prometheus. `TARGETS` are the meta ports.
const CONFIGURATION: &str = "
global: { scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s }
rule_files: [rules.yaml]
scrape_configs:
  - job_name: tunnel-server
    static_configs: [{ targets: [TARGETS] }]
";

/// Port of Prometheus on a loopback address of its own, below those that Linux assigns.
const PORT: u16 = 21290;

/// Time limit for a fault to be scraped and evaluated, and for the window of limits.
const ALERT: Duration = Duration::from_secs(45);
