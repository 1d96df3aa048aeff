//! The embedded DNS in a cluster: names follow the Nodes, and are answered before the API server is
//! available.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tunnel_tests::apiserver::Presence;
use tunnel_tests::cluster::{cloud, edge};
use tunnel_tests::dns::DnsClient;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Server, stored_text};

use super::{ClusterEnv, FIRST, GUIDE_IP, GUIDE_RECORDS};
use crate::dns::report_figure;

on_both!(p12_names_follow_node_events_within_a_second);

const DNS: [&str; 4] = ["--dns-listen", "127.0.0.1:0", "--dns-upstream", "off"];

async fn p12_names_follow_node_events_within_a_second(cluster_env: ClusterEnv) -> Result<()> {
    cluster_env.guide().await?;
    let mut server = cluster_env.setup("a")?.args(&DNS).start().await?;
    let client = DnsClient::new(dns_address(&mut server).await?);
    let tunnel: IpAddr = GUIDE_IP.parse()?;
    answers(&client, "worker-1", &[tunnel], FIRST).await;
    answers(&client, "master-1", &["192.168.33.220".parse()?], FIRST).await;
    let mut delays = Vec::new();
    for number in 0..NODES {
        let (name, own) = (format!("late-{number}"), format!("192.168.34.{number}"));
        cluster_env.objects().add(&edge(&name)).await?;
        delays.push(time(&client, &name, &[tunnel]).await?);
        cluster_env.objects().remove(&name).await?;
        delays.push(time(&client, &name, &[]).await?);
        cluster_env.objects().add(&cloud(&name, &own)).await?;
        delays.push(time(&client, &name, &[own.parse()?]).await?);
    }
    delays.sort_unstable();
    // `p99` is the third longest of 150 delays.
    let p99 = delays[delays.len() * 99 / 100 - 1];
    report_figure(&format!("P12: p99 {p99:?} of {} Node events", delays.len()));
    ensure!(p99 < scaled(Duration::from_secs(1)), "p99 {p99:?}");
    Ok(())
}

/// Tests the first half of P4b: after a cold start, the server answers names while the API server
/// is unavailable.
#[tokio::test(flavor = "multi_thread")]
async fn p4b_names_are_answered_from_disk_while_the_api_server_is_away() -> Result<()> {
    let cluster_env = ClusterEnv::fake().await?;
    cluster_env.guide().await?;
    let mut server = cluster_env.setup("a")?.args(&DNS).start().await?;
    cluster_env.wait_for_records(FIRST, GUIDE_RECORDS).await;
    let before = DnsClient::new(dns_address(&mut server).await?);
    answers(&before, "worker-1", &[GUIDE_IP.parse()?], FIRST).await;
    // The store has the last observed Nodes, too, from which it answers as well.
    let data_dir = cluster_env.scratch.path().join("a");
    eventually("the records and the CA are on disk", FIRST, async || {
        let stored = stored_text(&data_dir)?;
        ensure!(stored.contains("master-1") && stored.contains("\"isWhole\":true"));
        anyhow::Ok(())
    })
    .await;
    server.into_process().kill().await?;

    cluster_env.fake_api()?.be(Presence::Silent).await?;
    let began = Instant::now();
    let mut server = cluster_env.setup("a")?.args(&DNS).start().await?;
    let after = DnsClient::new(dns_address(&mut server).await?);
    for (name, address) in [("worker-1", GUIDE_IP), ("master-1", "192.168.33.220")] {
        let found = after.addresses(name).await?;
        ensure!(found == [address.parse::<IpAddr>()?], "{name}: {found:?}");
    }
    let took = began.elapsed();
    ensure!(
        took < scaled(Duration::from_secs(1)),
        "{took:?} after the start"
    );
    Ok(())
}

/// Returns the time until a name is answered with exactly these addresses.
async fn time(client: &DnsClient, name: &str, expected: &[IpAddr]) -> Result<Duration> {
    let began = Instant::now();
    while client.addresses(name).await? != expected {
        ensure!(
            began.elapsed() < scaled(FIRST),
            "{name} is not {expected:?}"
        );
    }
    Ok(began.elapsed())
}

async fn answers(client: &DnsClient, name: &str, expected: &[IpAddr], patience: Duration) {
    eventually(name, patience, async || {
        let found = client.addresses(name).await?;
        ensure!(found == expected, "{found:?}");
        anyhow::Ok(())
    })
    .await;
}

async fn dns_address(server: &mut Server) -> Result<SocketAddr> {
    let process = server.process();
    let line = process.wait_for_line("DNS", FIRST, |line| Listener::Dns.opened(line));
    line.await.context("DNS listener")
}

const NODES: u32 = 50;
