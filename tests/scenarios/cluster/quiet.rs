//! DNS-9: many nodes, few writes, and none when nothing changed.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use tunnel_tests::cluster::{Cluster, Kind, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::Server;

use super::{GUIDE_IP, Lab, told};

const NODES: usize = 5000;

/// A cluster of thousands of nodes, and a server that has written their records.
async fn filled() -> Result<(Lab, Server)> {
    let lab = Lab::start(Kind::StandIn).await?.context("a stand-in")?;
    lab.guide().await?;
    for number in 0..NODES {
        let node = edge(&format!("edge-{number:05}"));
        lab.cluster
            .stand_in()?
            .put("nodes", None, node.object().clone())?;
    }
    let server = lab.server("a").await?;
    eventually("all records", Duration::from_secs(20), async || {
        let records = lab.objects().records().await?;
        ensure!(
            records.lines().count() == NODES + 2,
            "{} lines",
            records.lines().count()
        );
        Ok(())
    })
    .await;
    Ok((lab, server))
}

/// Kubelets say that they live.
async fn heartbeats(lab: &Lab, round: u32) -> Result<()> {
    for number in 0..200 {
        let path = format!("/api/v1/nodes/edge-{number:05}/status");
        let beat = json!({ "status": { "conditions": [{ "type": "Ready", "status": "True", "message": round.to_string() }] } });
        lab.cluster.admin().merge(&path, &beat).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "ten minutes; make soak"]
async fn dns_9_ten_minutes_of_heartbeats_are_without_a_write() -> Result<()> {
    let (lab, _server) = filled().await?;
    let before = (lab.objects().records_map().await?, writes(&lab)?);
    let began = Instant::now();
    let mut round = 0;
    while began.elapsed() < Duration::from_secs(600) {
        heartbeats(&lab, round).await?;
        round += 1;
        sleep(Duration::from_secs(5)).await;
    }
    let after = (lab.objects().records_map().await?, writes(&lab)?);
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
    let (lab, server) = filled().await?;
    // Shipped empty for those who mount it, then filled once.
    let filled =
        lab.cluster
            .stand_in()?
            .history("configmaps", Some("kube-system"), "yurt-tunnel-nodes");
    let filled = filled.iter().filter(|(_, map)| {
        let text = map
            .as_ref()
            .and_then(|map| map["data"]["tunnel-nodes"].as_str());
        text.is_some_and(|text| !text.is_empty())
    });
    ensure!(
        // One more is the CA's certificates for agents.
        filled.count() == 1 && writes(&lab)? <= 3,
        "{} writes for the first records",
        writes(&lab)?
    );
    let map = lab.objects().records_map().await?;
    let bytes = map["data"]["tunnel-nodes"].as_str().map_or(0, str::len);
    let metrics = told(&server, "/metrics").await?;
    ensure!(
        metrics.contains(&format!("tunnel_server_kubernetes_records_bytes {bytes}")),
        "the size is not told"
    );

    // A burst.
    for number in 0..100 {
        lab.objects().add(&edge(&format!("more-{number}"))).await?;
    }
    eventually("the burst", Duration::from_secs(10), async || {
        let records = lab.objects().records().await?;
        ensure!(
            records.lines().count() == NODES + 102,
            "{} lines",
            records.lines().count()
        );
        Ok(())
    })
    .await;
    let after_burst = writes(&lab)?;
    // Gathered for a second at most while nodes keep coming.
    ensure!(
        (3..=9).contains(&after_burst),
        "{after_burst} writes after a burst"
    );

    // Kubelets say that they live, the whole list comes anew: nothing differs.
    let map = lab.objects().records_map().await?;
    for round in 0..3 {
        heartbeats(&lab, round).await?;
        lab.cluster.stand_in()?.compact();
        lab.cluster
            .stand_in()?
            .cut_watches(tunnel_tests::apiserver::Cut::Ended);
    }
    lab.objects().add(&edge("last")).await?;
    eventually("the last node", Duration::from_secs(40), async || {
        let records = lab.objects().records().await?;
        ensure!(
            records.contains("\tlast\n") || records.ends_with("\tlast"),
            "not yet"
        );
        Ok(())
    })
    .await;
    ensure!(
        writes(&lab)? == after_burst + 1,
        "{} writes, of which one was due",
        writes(&lab)? - after_burst
    );
    ensure!(
        map["metadata"]["uid"] == lab.objects().records_map().await?["metadata"]["uid"],
        "another map"
    );
    let service = lab.objects().service().await?;
    ensure!(
        service["spec"]["clusterIP"] == GUIDE_IP && service_writes(&lab)? == 0,
        "the Service was written"
    );
    Ok(())
}

fn writes(lab: &Lab) -> Result<usize> {
    written(lab, "configmaps")
}

fn service_writes(lab: &Lab) -> Result<usize> {
    written(lab, "services")
}

fn written(lab: &Lab, plural: &str) -> Result<usize> {
    let user = Cluster::server_user();
    let requests = lab.cluster.stand_in()?.requests();
    Ok(requests
        .iter()
        .filter(|seen| seen.user == user && seen.is_write() && seen.resource == plural)
        .count())
}
