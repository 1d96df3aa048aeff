//! DNS-9: many nodes cause few writes, and no write if nothing has changed.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tunnel_tests::apiserver::Cut;
use tunnel_tests::cluster::{Cluster, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Server;

use super::{ClusterEnv, GUIDE_IP, fetch_text};

const NODES: usize = 5000;

/// Starts a cluster of thousands of nodes and a server, and waits until the server has written all
/// records.
async fn filled() -> Result<(ClusterEnv, Server)> {
    let cluster_env = ClusterEnv::fake().await?;
    cluster_env.guide().await?;
    for number in 0..NODES {
        let node = edge(&format!("edge-{number:05}"));
        let node = node.object().clone();
        cluster_env.fake_api()?.put("nodes", None, node)?;
    }
    let server = cluster_env.server("a").await?;
    let patience = Duration::from_secs(20);
    wait_for_lines(&cluster_env, patience, NODES + 2).await;
    Ok((cluster_env, server))
}

/// Waits until there are as many records as `expected`.
async fn wait_for_lines(cluster_env: &ClusterEnv, patience: Duration, expected: usize) {
    eventually("all records", patience, async || {
        let lines = cluster_env.objects().records().await?.lines().count();
        ensure!(lines == expected, "{lines} lines");
        Ok(())
    })
    .await;
}

/// Updates the status of 200 nodes, like heartbeats of their kubelets.
async fn heartbeats(cluster_env: &ClusterEnv, round: u32) -> Result<()> {
    for number in 0..200 {
        let path = format!("/api/v1/nodes/edge-{number:05}/status");
        let beat = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "message": round.to_string() }] } });
        cluster_env.admin().merge(&path, &beat).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes ten minutes; make test-all runs it"]
async fn dns_9_ten_minutes_of_heartbeats_are_without_a_write() -> Result<()> {
    let (cluster_env, _server) = filled().await?;
    let version = async || -> Result<Value> {
        let map = cluster_env.objects().records_map().await?;
        Ok(map["metadata"]["resourceVersion"].clone())
    };
    let before = (version().await?, writes(&cluster_env, "configmaps")?);
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < Duration::from_secs(600) {
        heartbeats(&cluster_env, round).await?;
        round += 1;
        sleep(Duration::from_secs(5)).await;
    }
    let after = (version().await?, writes(&cluster_env, "configmaps")?);
    ensure!(before == after, "before {before:?}, after {after:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn dns_9_thousands_of_nodes_are_one_write_and_nothing_changed_is_none() -> Result<()> {
    let (cluster_env, server) = filled().await?;
    // The manifests ship the ConfigMap empty, so that Pods can mount it. The server then fills it
    // once.
    let fake_api = cluster_env.fake_api()?;
    let filled = fake_api.history("configmaps", Some("kube-system"), "yurt-tunnel-nodes");
    let texts = filled
        .iter()
        .filter_map(|(_, map)| map.as_ref()?["data"]["tunnel-nodes"].as_str());
    let texts = texts.filter(|text| !text.is_empty()).count();
    let first = writes(&cluster_env, "configmaps")?;
    // One further write stores the CA certificates for agents.
    ensure!(
        texts == 1 && first <= 3,
        "{first} writes for the first records"
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
        let node = edge(&format!("more-{number}"));
        cluster_env.objects().add(&node).await?;
    }
    let patience = Duration::from_secs(10);
    wait_for_lines(&cluster_env, patience, NODES + 102).await;
    let after_burst = writes(&cluster_env, "configmaps")?;
    // While nodes keep arriving, the server collects changes for one second at most.
    ensure!(
        (3..=9).contains(&after_burst),
        "{after_burst} writes after a burst"
    );

    // Heartbeats and repeated full lists change nothing.
    let map = cluster_env.objects().records_map().await?;
    for round in 0..3 {
        heartbeats(&cluster_env, round).await?;
        fake_api.compact();
        fake_api.cut_watches(Cut::Ended);
    }
    cluster_env.objects().add(&edge("last")).await?;
    let patience = Duration::from_secs(40);
    wait_for_lines(&cluster_env, patience, NODES + 103).await;
    let more = writes(&cluster_env, "configmaps")? - after_burst;
    ensure!(more == 1, "{more} writes, of which one was due");
    ensure!(
        map["metadata"]["uid"] == cluster_env.objects().records_map().await?["metadata"]["uid"],
        "another map"
    );
    let service = cluster_env.objects().service().await?;
    ensure!(
        service["spec"]["clusterIP"] == GUIDE_IP && writes(&cluster_env, "services")? == 0,
        "the Service was written"
    );
    Ok(())
}

/// Returns the number of the server's writes to objects of a kind.
fn writes(cluster_env: &ClusterEnv, plural: &str) -> Result<usize> {
    let user = Cluster::server_user();
    let requests = cluster_env.fake_api()?.requests();
    Ok(requests
        .iter()
        .filter(|seen| seen.user == user && seen.is_write() && seen.resource == plural)
        .count())
}
