//! Edges that have the same address, behind NAT, in separate network namespaces.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::fakes::edge_sites;
use tunnel_tests::netns::{EDGE_ADDRESS, NODES, Namespace, Topology};
use tunnel_tests::process::{Fleet, Listener, Program, ScratchDir};
use tunnel_tests::tools::{Skip, Tool, or_skip, require};

#[tokio::test(flavor = "multi_thread")]
async fn edges_with_one_address_are_distinguished_by_name() -> Result<()> {
    let Some(sites) = or_skip(topology()) else {
        return Ok(());
    };
    let _exporters = edge_sites(&sites).await?;
    let mut fleet = Fleet::start(&sites, &["--http-proxy-ports", "9100"]).await?;
    let cloud = sites.cloud();
    let endpoint = fleet.server().address(Listener::Http);

    // The requests to both edges run at the same time, so that a mix-up can occur.
    let [first, second] = NODES.map(|node| tally(cloud, endpoint, node));
    let (first, second) = tokio::join!(first, second);
    for (answers, node) in [first?, second?].into_iter().zip(NODES) {
        let expected = Tally::from([(format!("200 # node {node}"), REQUESTS)]);
        ensure!(answers == expected, "{node}: {answers:?}");
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
    ensure!(head.starts_with("HTTP/1.1 200"), "{head}");
    ensure_contains(&body, &["node=\"worker-1\""])
}

#[tokio::test(flavor = "multi_thread")]
async fn edges_cannot_be_dialed_from_the_cloud() -> Result<()> {
    let Some(sites) = or_skip(topology()) else {
        return Ok(());
    };
    let _exporters = edge_sites(&sites).await?;

    let direct = dial(sites.cloud()).await?;
    ensure!(direct == NOT_CONNECTED, "the cloud: {direct:?}");
    for (site, edge) in (1..).zip(sites.edges()) {
        let near = dial(edge.router()).await?;
        ensure!(near == Some(0), "router of site {site}: {near:?}");
        let route = format!("{EDGE_ADDRESS}/32 via 10.77.{site}.2");
        sites.cloud().script(&format!("$IP route add {route}"))?;
        let routed = dial(sites.cloud()).await?;
        ensure!(routed == TIMED_OUT, "through site {site}: {routed:?}");
        sites.cloud().script(&format!("$IP route del {route}"))?;
    }
    Ok(())
}

async fn by_address_is_ambiguous(sites: &Topology, endpoint: SocketAddr) -> Result<()> {
    let host = exporter().to_string();
    let (head, body) = get(sites.cloud(), endpoint, &host, "/metrics").await?;
    ensure!(head.starts_with("HTTP/1.1 400"), "{head}");
    ensure!(has_code(&head, "ambiguous_address"), "{head}");
    ensure_contains(&body, &NODES)
}

async fn nodes_shows_the_shared_address(fleet: &Fleet) -> Result<()> {
    let address = EDGE_ADDRESS.to_string();
    let listed = fleet.server().nodes().await?;
    for node in NODES {
        let row = listed.iter().find(|row| row["node"] == node);
        let row = row.context("a node is not listed")?;
        let shared = &row["addressConflicts"][&address];
        ensure!(*shared == serde_json::json!(NODES), "{row}");
    }
    let table = fleet.server().verb(&["nodes"])?.run().await?.ok()?;
    let row = table.lines().find(|row| row.starts_with(&address));
    let row = row.context("the address is not under the table")?;
    ensure!(NODES.iter().all(|node| row.contains(node)), "{table}");
    Ok(())
}

/// Requests `path` with `Host: host` from `address` inside `namespace`. Returns head and body of
/// the answer.
pub(super) async fn get(
    namespace: &Namespace,
    address: SocketAddr,
    host: &str,
    path: &str,
) -> Result<(String, String)> {
    let curl = curl()?
        .args(["-i", "-H", &format!("Host: {host}")])
        .arg(format!("http://{address}{path}"));
    let printed = curl.inside(Some(namespace)).run().await?.ok()?;
    let (head, body) = printed
        .split_once("\r\n\r\n")
        .context("no end of the head")?;
    Ok((head.to_owned(), body.to_owned()))
}

/// Number of answers of each kind, by status and first line of the body: `200 # node worker-1`.
type Tally = BTreeMap<String, u64>;

/// Requests the metrics of `node` [`REQUESTS`] times from `endpoint`, on eight keep-alive
/// connections.
async fn tally(namespace: &Namespace, endpoint: SocketAddr, node: &str) -> Result<Tally> {
    let scratch = ScratchDir::new()?;
    let curl = curl()?
        .args(["--parallel", "--parallel-max", "8"])
        .args(["-H", &format!("Host: {node}:9100")])
        .args(["-w", "%{http_code} %{filename_effective}\n", "-o"])
        .arg(scratch.path().join("#1"))
        .arg(format!("http://{endpoint}/metrics?[1-{REQUESTS}]"));
    let written = curl.inside(Some(namespace)).run().await?.ok()?;
    let mut tally = Tally::new();
    for line in written.lines() {
        let (status, file) = line.split_once(' ').context("no status")?;
        let body = std::fs::read_to_string(file)?;
        let kind = format!("{status} {}", body.lines().next().unwrap_or_default());
        *tally.entry(kind).or_default() += 1;
    }
    Ok(tally)
}

/// Requests metrics from the address of both edges without the tunnel. Returns curl's exit code.
async fn dial(namespace: &Namespace) -> Result<Option<i32>> {
    let curl = curl()?
        .args(["--connect-timeout", "1"])
        .arg(format!("http://{}/metrics", exporter()));
    Ok(curl.inside(Some(namespace)).run().await?.code())
}

/// Returns curl without progress output, without proxies and with a time limit.
pub(super) fn curl() -> Result<Program, Skip> {
    let curl = Program::tool(Tool::Curl)?;
    Ok(curl.args(["-sS", "--noproxy", "*", "--max-time", "10"]))
}

fn topology() -> Result<Topology, Skip> {
    require(&[Tool::Curl])?;
    Topology::new()
}

fn has_code(head: &str, code: &str) -> bool {
    let field = format!("x-tunnel-error: {code}");
    head.lines().any(|line| line.eq_ignore_ascii_case(&field))
}

fn exporter() -> SocketAddr {
    SocketAddr::new(EDGE_ADDRESS.into(), 9100)
}

/// Exit codes of curl without a route and without an answer.
const NOT_CONNECTED: Option<i32> = Some(7);
const TIMED_OUT: Option<i32> = Some(28);

/// Number of requests to each edge.
const REQUESTS: u64 = 1000;
