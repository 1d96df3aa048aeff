//! F31: many agents connect at once, and again when two of three servers are lost.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures_util::future::try_join_all;
use tokio::time::Instant;
use tunnel_agent::config::{Config, RawConfig};
use tunnel_tests::env::Agent;
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, Layout, ProcessUsage, Replicas, Requester, Run, Runs, TransportMode,
};
use tunnel_tests::gear::Gear;
use tunnel_tests::process::Listener;
use tunnel_tests::targets::Exporter;

#[tokio::test(flavor = "multi_thread")]
async fn f31_herd_is_served_by_three_servers_and_by_the_last_one() -> Result<()> {
    let mut runs = Runs::throughput(Clocks::of_gear())?;
    runs.start(TransportMode::Quic, "herd", |run| herd(run, "quic"));
    runs.start(TransportMode::H2, "herd", |run| herd(run, "h2"));
    runs.finish().await
}

/// Starts all agents at once, then kills two servers at once.
async fn herd(run: Run, transport: &'static str) -> Result<()> {
    let exporter = Exporter::start("herd").await?;
    let port = exporter.addr().port();
    let layout = Layout::three(2);
    let mut replicas = Replicas::start(run, layout, &node(0), &[port; 3]).await?;
    let mut configs = Vec::new();
    for number in 0..Gear::current().pick(30, 300) {
        configs.push(config(&replicas, number, transport).await?);
    }
    let count = configs.len();
    let started = Instant::now();
    let agents = try_join_all(configs.into_iter().map(Agent::start)).await?;
    for server in 0..replicas.servers.len() {
        let served = all_served(&replicas, server, count, port, started).await;
        run.within("all nodes served at a server", START, served)?;
    }
    for server in [0, 1] {
        replicas.kill(server).await?;
    }
    let killed = Instant::now();
    let served = all_served(&replicas, 2, count, port, killed).await;
    run.within("all nodes served by the last server", LOSS, served)?;
    let server = &mut replicas.servers[2];
    ensure!(!server.log().contains("panicked"), "{}", server.log());
    if let Some(id) = server.process().id() {
        let memory = ProcessUsage::sample_min(id).await?.memory_kib;
        run.report(format_args!("{count} agents: {memory} KiB"));
        ensure!(memory <= MEMORY_KIB, "{memory} KiB");
    }
    drop(agents);
    Ok(())
}

async fn config(replicas: &Replicas, number: usize, transport: &str) -> Result<Config> {
    let node = node(number);
    let token = replicas.servers[0].token(&node, None).await?;
    let links = replicas.links.iter().map(|link| link.addr().to_string());
    let settings = RawConfig {
        server: links.collect(),
        node_ip: Some("127.0.0.1".into()),
        data_dir: Some(replicas.folder(&format!("agent-{node}"))),
        node_name: Some(node),
        token: Some(token.as_str().into()),
        transport: Some(transport.into()),
        meta_listen: Some("off".into()),
        ..RawConfig::default()
    };
    Ok(Config::check(settings)?)
}

/// Returns the time after `since` until a server has served each node.
async fn all_served(
    replicas: &Replicas,
    server: usize,
    count: usize,
    port: u16,
    since: Instant,
) -> Result<Duration, Duration> {
    let http = replicas.servers[server].address(Listener::Http);
    for number in 0..count {
        let requester = Requester::new(http, format!("{}:{port}", node(number)), 1);
        let left = scaled(LOSS).saturating_sub(since.elapsed());
        requester.serving(Instant::now(), left).await?;
    }
    Ok(since.elapsed())
}

fn node(number: usize) -> String {
    format!("worker-{number}")
}

const START: Duration = Duration::from_secs(30);
const LOSS: Duration = Duration::from_secs(60);
const MEMORY_KIB: u64 = 256 * 1024;
