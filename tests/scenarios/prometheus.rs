//! A real Prometheus in the cloud scrapes real node_exporters at edges that have the same address.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use tunnel_tests::demo::get;
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Edge, NODES, Namespace, Topology};
use tunnel_tests::process::{Fleet, Process, Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip, require};

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_scrapes_both_edges_by_plain_targets_and_by_the_relabel_rule() -> Result<()> {
    let tools = require(&[Tool::Prometheus, Tool::NodeExporter]);
    let Some(sites) = or_skip(tools.and_then(|()| Topology::new())) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let mut exporters = Vec::new();
    for edge in sites.edges() {
        exporters.push(node_exporter(edge, scratch.path())?);
    }
    let extra_port = ["--proxy-port-listen", "0.0.0.0", "--allow-unauthenticated"];
    let arguments = [&["--http-proxy-ports", "9100"][..], &extra_port].concat();
    let fleet = Fleet::start(&sites, &arguments).await?;
    let prometheus = prometheus(sites.cloud(), &scratch, SCRAPES, API)?;

    eventually("four targets to be up", SCRAPE_TIMEOUT, async || {
        let targets = active_targets(&sites).await?;
        let up = |job: &str, instance: &str| {
            targets.iter().any(|target| {
                let labels = &target["labels"];
                labels["job"] == job && labels["instance"] == instance && target["health"] == "up"
            })
        };
        let expected =
            ["plain", "guide"].map(|job| NODES.map(|node| (job, format!("{node}:9100"))));
        if expected
            .iter()
            .flatten()
            .all(|(job, instance)| up(job, instance))
            && targets.len() == 4
        {
            return Ok(());
        }
        bail!("targets: {targets:#?}; {prometheus}; {fleet:?}")
    })
    .await;

    // What was scraped under a node's name came from that node.
    for (node, job) in NODES
        .into_iter()
        .flat_map(|node| [(node, "plain"), (node, "guide")])
    {
        let query = format!("culvert_site{{instance=\"{node}:9100\",job=\"{job}\"}}");
        eventually("the sample of the right node", SCRAPE_TIMEOUT, async || {
            let found = query_prometheus(&sites, &query).await?;
            let results = found["data"]["result"].as_array().context("no result")?;
            let names: Vec<_> = results
                .iter()
                .map(|sample| &sample["metric"]["name"])
                .collect();
            ensure!(names == [node], "{query} found {found}");
            Ok(())
        })
        .await;
    }

    for edge in sites.edges() {
        let host = format!("{}:9100", edge.node_name());
        let at_cloud = SocketAddr::new(CLOUD_ADDRESS.into(), 9100);
        let (_, tunnelled) = get(Some(sites.cloud()), at_cloud, &host, "/metrics").await?;
        let (_, local) = get(Some(edge.node()), exporter(), &host, "/metrics").await?;
        ensure!(
            stable_part(&tunnelled) == stable_part(&local),
            "{host}: body differs"
        );
        ensure!(
            tunnelled.len() > PAGE_BYTES,
            "{host}: only {} bytes",
            tunnelled.len()
        );
    }
    Ok(())
}

/// DNS-14: the rules of the guide's ServiceMonitors, and ours, which leaves targets without the label alone.
#[tokio::test(flavor = "multi_thread")]
async fn dns_14_the_rules_of_the_guide_scrape_by_hostname_and_ours_spares_other_targets()
-> Result<()> {
    let tools = require(&[Tool::Prometheus, Tool::NodeExporter]);
    let Some(sites) = or_skip(tools.and_then(|()| Topology::new())) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let mut exporters = Vec::new();
    for edge in sites.edges() {
        exporters.push(node_exporter(edge, scratch.path())?);
    }
    // In the kubelet's place: what answers is not what its rule is about.
    let kubelet = Program::tool(Tool::NodeExporter)?
        .arg("--web.listen-address=192.168.33.221:9101")
        .arg("--collector.disable-defaults");
    let _kubelet = kubelet.inside(Some(sites.edges()[0].node())).start()?;
    let arguments = [
        "--http-proxy-ports",
        "9100, 9101",
        "--proxy-port-listen",
        "0.0.0.0",
        "--allow-unauthenticated",
    ];
    let fleet = Fleet::start(&sites, &arguments).await?;
    let prometheus = prometheus(sites.cloud(), &scratch, MONITORS, API)?;
    eventually(
        "the targets of the guide and the spared one",
        SCRAPE_TIMEOUT,
        async || {
            let targets = active_targets(&sites).await?;
            let mut found: Vec<_> = targets
                .iter()
                .map(|target| {
                    (
                        target["labels"]["job"].as_str(),
                        target["labels"]["instance"].as_str(),
                        target["health"] == "up",
                    )
                })
                .map(|(job, instance, up)| {
                    (job.unwrap_or_default(), instance.unwrap_or_default(), up)
                })
                .collect();
            found.sort_unstable();
            let expected = [
                // The guide's own rule loses its address; that something answers is because Prometheus dials this host then.
                ("guide-without-label", ":9090", true),
                ("kubelet", "worker-1:9101", true),
                ("node-exporter", "worker-1:9100", true),
                ("node-exporter", "worker-2:9100", true),
                ("ours", "127.0.0.1:9090", true),
                ("ours", "worker-1:9100", true),
            ];
            ensure!(
                found == expected,
                "targets: {targets:#?}; {prometheus}; {fleet:?}"
            );
            Ok(())
        },
    )
    .await;
    Ok(())
}

/// The page without the line that tells how long collecting it took.
fn stable_part(page: &str) -> Vec<&str> {
    page.lines()
        .filter(|line| !line.starts_with("node_scrape_collector_duration_seconds{"))
        .collect()
}

/// node_exporter with a page that names its node and does not change: only collectors without measurements.
fn node_exporter(edge: &Edge, scratch: &Path) -> Result<Process> {
    let node = edge.node_name();
    let folder = scratch.join(node);
    std::fs::create_dir(&folder)?;
    let mut page = format!("culvert_site{{name=\"{node}\"}} 1\n");
    for line in 0.. {
        if page.len() > PAGE_BYTES {
            break;
        }
        page.push_str(&format!("culvert_filler{{line=\"{line}\"}} {line}\n"));
    }
    std::fs::write(folder.join("site.prom"), page)?;
    let program = Program::tool(Tool::NodeExporter)?
        .arg(format!("--web.listen-address={}", exporter()))
        .args([
            "--web.disable-exporter-metrics",
            "--collector.disable-defaults",
        ])
        .args(["--collector.uname", "--collector.textfile"])
        .arg(format!(
            "--collector.textfile.directory={}",
            folder.display()
        ));
    program.inside(Some(edge.node())).start()
}

/// A Prometheus inside `namespace` that scrapes what `scrapes` says, with its API on `api`.
pub(super) fn prometheus(
    namespace: &Namespace,
    scratch: &ScratchDir,
    scrapes: &str,
    api: &str,
) -> Result<Process> {
    let configuration = scratch.file("prometheus.yml", scrapes)?;
    let program = Program::tool(Tool::Prometheus)?
        .arg(format!("--config.file={}", configuration.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            scratch.path().join("data").display()
        ))
        .arg(format!("--web.listen-address={api}"));
    program.inside(Some(namespace)).start()
}

async fn active_targets(sites: &Topology) -> Result<Vec<Value>> {
    let answer = ask_prometheus(sites, "/api/v1/targets?state=active").await?;
    Ok(answer["data"]["activeTargets"]
        .as_array()
        .context("no targets")?
        .clone())
}

async fn query_prometheus(sites: &Topology, query: &str) -> Result<Value> {
    let encoded: String = query.bytes().map(|byte| format!("%{byte:02X}")).collect();
    ask_prometheus(sites, &format!("/api/v1/query?query={encoded}")).await
}

async fn ask_prometheus(sites: &Topology, path: &str) -> Result<Value> {
    let (_, body) = get(Some(sites.cloud()), API.parse()?, API, path).await?;
    serde_json::from_str(&body).with_context(|| format!("Prometheus answered {body}"))
}

fn exporter() -> SocketAddr {
    SocketAddr::new(EDGE_ADDRESS.into(), 9100)
}

/// Plain targets, and targets as service discovery finds them (by address, which is the same for both) with the rule of
/// the guide.
const SCRAPES: &str = r#"
global: { scrape_interval: 1s, scrape_timeout: 1s }
scrape_configs:
  - job_name: plain
    static_configs: [{ targets: ["worker-1:9100", "worker-2:9100"] }]
  - job_name: guide
    static_configs:
      - { targets: ["192.168.33.221:9100"], labels: { __meta_kubernetes_pod_node_name: worker-1 } }
      - { targets: ["192.168.33.221:9100"], labels: { __meta_kubernetes_pod_node_name: worker-2 } }
    relabel_configs:
      - source_labels: [__meta_kubernetes_pod_node_name, __address__]
        regex: (.+);.*:(.*)
        replacement: $1:$2
        target_label: __address__
"#;

/// Targets as the guide's ServiceMonitors find them, by address with the labels of discovery; and one without the label:
/// Prometheus itself.
const MONITORS: &str = r#"
global: { scrape_interval: 1s, scrape_timeout: 1s }
scrape_configs:
  - job_name: kubelet
    static_configs:
      - { targets: ["192.168.33.221:9101"], labels: { __meta_kubernetes_endpoint_address_target_name: worker-1 } }
    relabel_configs:
      - source_labels: [__meta_kubernetes_endpoint_address_target_name, __address__]
        regex: (.*);.*:(.*)
        replacement: $1:$2
        target_label: __address__
  - job_name: node-exporter
    static_configs:
      - { targets: ["192.168.33.221:9100"], labels: { __meta_kubernetes_pod_node_name: worker-1 } }
      - { targets: ["192.168.33.221:9100"], labels: { __meta_kubernetes_pod_node_name: worker-2 } }
    relabel_configs: &guide
      - source_labels: [__meta_kubernetes_pod_node_name, __address__]
        regex: (.*);.*:(.*)
        replacement: $1:$2
        target_label: __address__
  - job_name: guide-without-label
    static_configs: [{ targets: ["127.0.0.1:9090"] }]
    relabel_configs: *guide
  - job_name: ours
    static_configs:
      - { targets: ["192.168.33.221:9100"], labels: { __meta_kubernetes_pod_node_name: worker-1 } }
      - { targets: ["127.0.0.1:9090"] }
    relabel_configs:
      - source_labels: [__meta_kubernetes_pod_node_name, __address__]
        regex: (.+);.*:(.*)
        replacement: $1:$2
        target_label: __address__
"#;

/// Prometheus itself, inside the cloud's namespace.
const API: &str = "127.0.0.1:9090";

/// Start of Prometheus and a few scrapes.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(30);

/// Larger than what one read or one packet carries.
const PAGE_BYTES: usize = 300_000;
