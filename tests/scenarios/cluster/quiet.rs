//! DNS-9: many nodes cause few writes, and no write if nothing has changed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tunnel_tests::cluster::{Cluster, Kind, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Server;

use super::{ClusterEnv, GUIDE_IP, fetch_text};

const NODES: usize = 5000;

/// Starts a cluster of thousands of nodes and a server, and waits until the server has written all
/// records.
async fn filled() -> Result<(ClusterEnv, Server)> {
    let cluster_env = ClusterEnv::start(Kind::FakeApiServer)
        .await?
        .context("a stand-in")?;
    cluster_env.guide().await?;
    for number in 0..NODES {
        let node = edge(&format!("edge-{number:05}"));
        cluster_env
            .cluster
            .fake_api()?
            .put("nodes", None, node.object().clone())?;
    }
    let server = cluster_env.server("a").await?;
    eventually("all records", Duration::from_secs(20), async || {
        let records = cluster_env.objects().records().await?;
        ensure!(
            records.lines().count() == NODES + 2,
            "{} lines",
            records.lines().count()
        );
        Ok(())
    })
    .await;
    Ok((cluster_env, server))
}

/// Updates the status of 200 nodes, like heartbeats of their kubelets.
async fn heartbeats(cluster_env: &ClusterEnv, round: u32) -> Result<()> {
    for number in 0..200 {
        let path = format!("/api/v1/nodes/edge-{number:05}/status");
        let beat = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "message": round.to_string() }] } });
        cluster_env.cluster.admin().merge(&path, &beat).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes ten minutes; make test-all runs it"]
async fn dns_9_ten_minutes_of_heartbeats_are_without_a_write() -> Result<()> {
    let (cluster_env, _server) = filled().await?;
    let before = (
        cluster_env.objects().records_map().await?,
        writes(&cluster_env)?,
    );
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < Duration::from_secs(600) {
        heartbeats(&cluster_env, round).await?;
        round += 1;
        sleep(Duration::from_secs(5)).await;
    }
    let after = (
        cluster_env.objects().records_map().await?,
        writes(&cluster_env)?,
    );
    let version = |map: &Value| map["metadata"]["resourceVersion"].clone();
    ensure!(
        version(&before.0) == version(&after.0) && before.1 == after.1,
        "{} writes in ten minutes",
        after.1 - before.1
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn dns_9_thousands_of_nodes_are_one_write_and_nothing_changed_is_none() -> Result<()> {
    let (cluster_env, server) = filled().await?;
    // The manifests ship the ConfigMap empty, so that Pods can mount it. The server then fills it
    // once.
    let filled = cluster_env.cluster.fake_api()?.history(
        "configmaps",
        Some("kube-system"),
        "yurt-tunnel-nodes",
    );
    let filled = filled.iter().filter(|(_, map)| {
        let text = map
            .as_ref()
            .and_then(|map| map["data"]["tunnel-nodes"].as_str());
        text.is_some_and(|text| !text.is_empty())
    });
    ensure!(
        // One further write stores the CA certificates for agents.
        filled.count() == 1 && writes(&cluster_env)? <= 3,
        "{} writes for the first records",
        writes(&cluster_env)?
    );
    let map = cluster_env.objects().records_map().await?;
    let bytes = map["data"]["tunnel-nodes"].as_str().map_or(0, str::len);
    let metrics = fetch_text(&server, "/metrics").await?;
    ensure!(
        metrics.contains(&format!("tunnel_server_kubernetes_records_bytes {bytes}")),
        "no metric reports the size"
    );

    // Many nodes arrive in a burst.
    for number in 0..100 {
        cluster_env
            .objects()
            .add(&edge(&format!("more-{number}")))
            .await?;
    }
    eventually("the burst", Duration::from_secs(10), async || {
        let records = cluster_env.objects().records().await?;
        ensure!(
            records.lines().count() == NODES + 102,
            "{} lines",
            records.lines().count()
        );
        Ok(())
    })
    .await;
    let after_burst = writes(&cluster_env)?;
    // While nodes keep arriving, the server collects changes for one second at most.
    ensure!(
        (3..=9).contains(&after_burst),
        "{after_burst} writes after a burst"
    );

    // Heartbeats and repeated full lists change nothing.
    let map = cluster_env.objects().records_map().await?;
    for round in 0..3 {
        heartbeats(&cluster_env, round).await?;
        cluster_env.cluster.fake_api()?.compact();
        cluster_env
            .cluster
            .fake_api()?
            .cut_watches(tunnel_tests::apiserver::Cut::Ended);
    }
    cluster_env.objects().add(&edge("last")).await?;
    eventually("the last node", Duration::from_secs(40), async || {
        let records = cluster_env.objects().records().await?;
        ensure!(
            records.contains("\tlast\n") || records.ends_with("\tlast"),
            "not yet"
        );
        Ok(())
    })
    .await;
    ensure!(
        writes(&cluster_env)? == after_burst + 1,
        "{} writes, of which one was due",
        writes(&cluster_env)? - after_burst
    );
    ensure!(
        map["metadata"]["uid"] == cluster_env.objects().records_map().await?["metadata"]["uid"],
        "another map"
    );
    let service = cluster_env.objects().service().await?;
    ensure!(
        service["spec"]["clusterIP"] == GUIDE_IP && service_writes(&cluster_env)? == 0,
        "the Service was written"
    );
    Ok(())
}

fn writes(cluster_env: &ClusterEnv) -> Result<usize> {
    written(cluster_env, "configmaps")
}

fn service_writes(cluster_env: &ClusterEnv) -> Result<usize> {
    written(cluster_env, "services")
}

fn written(cluster_env: &ClusterEnv, plural: &str) -> Result<usize> {
    let user = Cluster::server_user();
    let requests = cluster_env.cluster.fake_api()?.requests();
    Ok(requests
        .iter()
        .filter(|seen| seen.user == user && seen.is_write() && seen.resource == plural)
        .count())
}
