//! Edges that have the same address, behind NAT, in separate network namespaces.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use tunnel_tests::demo::{Tally, dial, get, site, tally};
use tunnel_tests::netns::{EDGE_ADDRESS, NODES, Topology};
use tunnel_tests::process::{Fleet, Listener, Process};
use tunnel_tests::tools::or_skip;

#[tokio::test(flavor = "multi_thread")]
async fn edges_with_one_address_are_distinguished_by_name() -> Result<()> {
    let Some(sites) = or_skip(Topology::new()) else {
        return Ok(());
    };
    let _exporters = exporters(&sites).await?;
    let mut fleet = Fleet::start(&sites, &["--http-proxy-ports", "9100"]).await?;
    let cloud = Some(sites.cloud());
    let endpoint = fleet.server().address(Listener::Http);

    // The requests to both edges run at the same time, so that a mix-up can occur.
    let by_name = NODES.map(|node| async move {
        tally(
            cloud,
            endpoint,
            &format!("{node}:9100"),
            "/metrics",
            REQUESTS,
        )
        .await
    });
    let [first, second] = by_name;
    let (first, second) = tokio::join!(first, second);
    for (answers, node) in [first?, second?].into_iter().zip(NODES) {
        let expected = Tally::from([(format!("200 # node {node}"), REQUESTS)]);
        ensure!(
            answers == expected,
            "answers to requests for {node}: {answers:?}"
        );
    }

    by_address_is_ambiguous(&sites, endpoint).await?;
    nodes_shows_the_shared_address(&fleet).await?;

    fleet.stop_agent(1).await?;
    by_address_is_ambiguous(&sites, endpoint).await?;
    nodes_shows_the_shared_address(&fleet).await?;
    let (head, _) = get(cloud, endpoint, "worker-2:9100", "/metrics").await?;
    ensure!(head.starts_with("HTTP/1.1 503"), "{head}");
    ensure!(has_code(&head, "no_agent"), "{head}");
    let (head, body) = get(cloud, endpoint, "worker-1:9100", "/metrics").await?;
    ensure!(
        head.starts_with("HTTP/1.1 200") && body.contains("node=\"worker-1\""),
        "{head}\n{body}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn edges_cannot_be_dialed_from_the_cloud() -> Result<()> {
    let Some(sites) = or_skip(Topology::new()) else {
        return Ok(());
    };
    let _exporters = exporters(&sites).await?;
    let exporter = exporter();

    let direct = dial(Some(sites.cloud()), exporter).await?;
    ensure!(direct.is_err(), "the cloud reached {exporter}");
    for (site, edge) in (1..).zip(sites.edges()) {
        let near = dial(Some(edge.router()), exporter).await?;
        ensure!(
            near.is_ok(),
            "the router of {} does not reach it: {near:?}",
            edge.node_name()
        );
        let route = format!("{EDGE_ADDRESS}/32 via 10.77.{site}.2");
        sites.cloud().script(&format!("$IP route add {route}"))?;
        let routed = dial(Some(sites.cloud()), exporter).await?;
        ensure!(
            routed.is_err(),
            "the cloud reached {} through its router",
            edge.node_name()
        );
        sites.cloud().script(&format!("$IP route del {route}"))?;
    }
    Ok(())
}

async fn by_address_is_ambiguous(sites: &Topology, endpoint: SocketAddr) -> Result<()> {
    let (head, body) = get(
        Some(sites.cloud()),
        endpoint,
        &exporter().to_string(),
        "/metrics",
    )
    .await?;
    ensure!(head.starts_with("HTTP/1.1 400"), "{head}");
    ensure!(has_code(&head, "ambiguous_address"), "{head}");
    ensure!(
        NODES.iter().all(|node| body.contains(node)),
        "not both named: {body}"
    );
    Ok(())
}

async fn nodes_shows_the_shared_address(fleet: &Fleet) -> Result<()> {
    let address = EDGE_ADDRESS.to_string();
    let listed = fleet.server().nodes().await?;
    for node in NODES {
        let row = listed
            .iter()
            .find(|row| row["node"] == node)
            .context("a node is not listed")?;
        ensure!(
            row["addressConflicts"][&address] == serde_json::json!(NODES),
            "{row}"
        );
    }
    let table = fleet.server().verb(&["nodes"])?.run().await?.ok()?;
    for node in NODES {
        let row = table
            .lines()
            .find(|row| row.contains(node))
            .context("a node is not in the table")?;
        ensure!(row.contains(&address), "{table}");
    }
    Ok(())
}

fn has_code(head: &str, code: &str) -> bool {
    let field = format!("x-tunnel-error: {code}");
    head.lines().any(|line| line.eq_ignore_ascii_case(&field))
}

async fn exporters(sites: &Topology) -> Result<Vec<Process>> {
    let mut started = Vec::new();
    for edge in sites.edges() {
        started.push(site(edge.node_name(), Some(exporter()), None, Some(edge.node())).await?);
    }
    Ok(started)
}

fn exporter() -> SocketAddr {
    SocketAddr::new(EDGE_ADDRESS.into(), 9100)
}

/// Number of requests to each edge.
const REQUESTS: u64 = 1000;
