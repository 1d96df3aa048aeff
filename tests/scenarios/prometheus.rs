//! A real Prometheus in the cloud scrapes real node_exporters at edges that have the same address.

use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_agent::config::Config as AgentConfig;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::TestEnv;
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Edge, NODES, Namespace, Topology};
use tunnel_tests::process::{Fleet, Listener, Process, Program, ScratchDir};
use tunnel_tests::prometheus::query_path;
use tunnel_tests::tools::{Tool, or_skip, require};

use crate::namespaces::get;

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_scrapes_both_edges_by_plain_targets_and_by_the_relabel_rule() -> Result<()> {
    let Some((sites, scratch, _exporters)) = exporters()? else {
        return Ok(());
    };
    let fleet = Fleet::start(&sites, &ports_of_targets("9100")).await?;
    let prometheus = prometheus(sites.cloud(), &scratch, SCRAPES)?;

    eventually("four targets to be up", SCRAPE_TIMEOUT, async || {
        let targets = active_targets(sites.cloud()).await?;
        let up = |job: &str, instance: &str| {
            targets.iter().any(|target| {
                let labels = &target["labels"];
                labels["job"] == job && labels["instance"] == instance && target["health"] == "up"
            })
        };
        let expected =
            ["plain", "guide"].map(|job| NODES.map(|node| (job, format!("{node}:9100"))));
        let mut expected = expected.iter().flatten();
        let are_up = expected.all(|(job, instance)| up(job, instance)) && targets.len() == 4;
        ensure!(are_up, "{targets:#?}; {prometheus}; {fleet:?}");
        Ok(())
    })
    .await;

    // Each sample that was scraped under a node's name comes from that node.
    for (node, job) in NODES
        .into_iter()
        .flat_map(|node| [(node, "plain"), (node, "guide")])
    {
        let query = format!("culvert_site{{instance=\"{node}:9100\",job=\"{job}\"}}");
        eventually("the sample of the right node", SCRAPE_TIMEOUT, async || {
            let found = query_prometheus(sites.cloud(), &query).await?;
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
        let (_, tunnelled) = get(sites.cloud(), at_cloud, &host, "/metrics").await?;
        let (_, local) = get(edge.node(), exporter(), &host, "/metrics").await?;
        let is_equal = stable_part(&tunnelled) == stable_part(&local);
        ensure!(is_equal, "{host}: body differs");
        ensure!(tunnelled.len() > PAGE_BYTES, "{host}: too short");
    }
    Ok(())
}

/// DNS-14: scrapes with the rules of the guide's ServiceMonitors and with our rule, which does not
/// change targets without the label.
#[tokio::test(flavor = "multi_thread")]
async fn dns_14_the_rules_of_the_guide_scrape_by_hostname_and_ours_spares_other_targets()
-> Result<()> {
    let Some((sites, scratch, _exporters)) = exporters()? else {
        return Ok(());
    };
    // A node_exporter in place of the kubelet. The rule under test does not depend on the target's
    // answer.
    let kubelet = Program::tool(Tool::NodeExporter)?
        .arg("--web.listen-address=192.168.33.221:9101")
        .arg("--collector.disable-defaults");
    let _kubelet = kubelet.inside(Some(sites.edges()[0].node())).start()?;
    let fleet = Fleet::start(&sites, &ports_of_targets("9100, 9101")).await?;
    let prometheus = prometheus(sites.cloud(), &scratch, MONITORS)?;
    let expected = [
        // The guide's rule removes the address of a target without the label. The target is up only
        // because Prometheus then dials its own host.
        ("guide-without-label", ":9090"),
        ("kubelet", "worker-1:9101"),
        ("node-exporter", "worker-1:9100"),
        ("node-exporter", "worker-2:9100"),
        ("ours", "127.0.0.1:9090"),
        ("ours", "worker-1:9100"),
    ];
    eventually("the targets of the guide", SCRAPE_TIMEOUT, async || {
        let targets = active_targets(sites.cloud()).await?;
        let label = |target: &Value, name: &str| target["labels"][name].as_str().map(str::to_owned);
        let mut found = Vec::new();
        for target in &targets {
            ensure!(target["health"] == "up", "{targets:#?}; {prometheus}");
            let (job, instance) = (label(target, "job"), label(target, "instance"));
            found.push((job.unwrap_or_default(), instance.unwrap_or_default()));
        }
        found.sort_unstable();
        let is_right = found.iter().map(|(job, at)| (&**job, &**at)).eq(expected);
        ensure!(is_right, "{targets:#?}; {prometheus}; {fleet:?}");
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn promtool_accepts_the_metrics_of_both_processes() -> Result<()> {
    if or_skip(require(&[Tool::Promtool])).is_none() {
        return Ok(());
    }
    let scratch = ScratchDir::new()?;
    let env = TestEnv::start().await?;
    let any_port = |config: &mut AgentConfig| config.meta_listen = "127.0.0.1:0".parse().ok();
    let agent = env.agent_with("worker-1", any_port).await?;
    let metas = [
        ("server", env.meta()),
        ("agent", agent.meta().context("no meta port")?),
    ];
    for (process, meta) in metas {
        let get = RawRequest::get("meta", "/metrics");
        let reply = request(meta, &get).await?;
        let content_type = reply.header("content-type").unwrap_or_default();
        let is_text = content_type.starts_with("text/plain; version=0.0.4");
        ensure!(is_text, "{process}: {content_type}");
        let page = scratch.file(&format!("{process}.prom"), &reply.body)?;
        let checked = Tool::Promtool
            .command()?
            .args(["check", "metrics"])
            .stdin(File::open(page)?)
            .output()?;
        let findings = String::from_utf8_lossy(&checked.stderr);
        ensure!(checked.status.success(), "{process}: {findings}");

        let accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5,*/*;q=0.1";
        let reply = request(meta, &get.header("Accept", accept)).await?;
        let content_type = reply.header("content-type").unwrap_or_default();
        let is_open_metrics = content_type.starts_with("application/openmetrics-text");
        ensure!(
            is_open_metrics && reply.text().ends_with("# EOF\n"),
            "{process}: {content_type}"
        );
    }
    Ok(())
}

/// Both nodes have the same address, and no rule changes the targets.
#[tokio::test(flavor = "multi_thread")]
async fn prometheus_finds_both_edges_by_the_discovery_of_the_server() -> Result<()> {
    let Some((sites, scratch, _exporters)) = exporters()? else {
        return Ok(());
    };
    let fleet = Fleet::start(&sites, &ports_of_targets("9100")).await?;
    let meta = fleet.server().address(Listener::Meta).to_string();
    let scrapes = DISCOVERED.replace("META", &meta);
    let prometheus = prometheus(sites.cloud(), &scratch, &scrapes)?;
    eventually("both edges to be up", SCRAPE_TIMEOUT, async || {
        let targets = active_targets(sites.cloud()).await?;
        let is_up = |node: &str| {
            targets.iter().any(|target| {
                let discovered = &target["discoveredLabels"];
                target["health"] == "up"
                    && target["labels"]["instance"] == format!("{node}:9100")
                    && discovered["__meta_kubernetes_node_name"] == node
                    && discovered["__meta_tunnel_edge"] == "true"
            })
        };
        let are_up = NODES.into_iter().all(is_up) && targets.len() == NODES.len();
        ensure!(are_up, "{targets:#?}; {prometheus}; {fleet:?}");
        Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn discovery_refuses_other_ports_and_unknown_parameters() -> Result<()> {
    let env = TestEnv::start().await?;
    let meta = env.meta();
    let get = async |query: &str| {
        let path = format!("/sd/prometheus{query}");
        request(meta, &RawRequest::get("meta", &path)).await
    };
    let reply = get("?port=9100").await?;
    ensure!(reply.status == 200 && reply.text() == "[]\n", "{reply:?}");
    let content_type = reply.header("content-type");
    ensure!(content_type == Some("application/json"), "{reply:?}");
    for (query, status, reason) in [
        ("", 400, "port is missing"),
        ("?port=80", 403, "port 80 is not allowed"),
        ("?port=9100&job=a", 400, "unknown parameter"),
        ("?port=9100&scheme=ftp", 400, "use http or https"),
    ] {
        let reply = get(query).await?;
        let is_right = reply.status == status && reply.text().contains(reason);
        ensure!(is_right, "{query}: {reply:?}");
    }
    let _agent = env.agent("worker-1").await?;
    let first = get("?port=9100&connected=true").await?.text();
    ensure!(first.contains("\"worker-1:9100\""), "{first}");
    let again = get("?port=9100&connected=true").await?.text();
    ensure!(first == again, "{first} then {again}");
    Ok(())
}

/// Starts a node_exporter at each edge, or skips the test.
fn exporters() -> Result<Option<(Topology, ScratchDir, Vec<Process>)>> {
    let tools = require(&[Tool::Prometheus, Tool::NodeExporter, Tool::Curl]);
    let Some(sites) = or_skip(tools.and_then(|()| Topology::new())) else {
        return Ok(None);
    };
    let scratch = ScratchDir::new()?;
    let edges = sites.edges().iter();
    let exporters = edges.map(|edge| node_exporter(edge, scratch.path()));
    let exporters = exporters.collect::<Result<Vec<_>>>()?;
    Ok(Some((sites, scratch, exporters)))
}

/// Returns the arguments of a server that also listens on these ports of targets.
pub(super) fn ports_of_targets(ports: &str) -> [&str; 5] {
    let listen = "--proxy-port-listen";
    let unauthenticated = "--allow-unauthenticated";
    [
        "--http-proxy-ports",
        ports,
        listen,
        "0.0.0.0",
        unauthenticated,
    ]
}

/// Returns the page without the lines that contain the duration of the collection.
fn stable_part(page: &str) -> Vec<&str> {
    page.lines()
        .filter(|line| !line.starts_with("node_scrape_collector_duration_seconds{"))
        .collect()
}

/// Starts a node_exporter whose page names its node and does not change. Only collectors without
/// measurements are enabled.
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

/// Starts a Prometheus inside `namespace` with the scrape configuration `scrapes`.
pub(super) fn prometheus(
    namespace: &Namespace,
    scratch: &ScratchDir,
    scrapes: &str,
) -> Result<Process> {
    let configuration = scratch.file("prometheus.yml", scrapes)?;
    let program = Program::tool(Tool::Prometheus)?
        .arg(format!("--config.file={}", configuration.display()))
        .arg(format!(
            "--storage.tsdb.path={}",
            scratch.path().join("data").display()
        ))
        .arg(format!("--web.listen-address={API}"));
    program.inside(Some(namespace)).start()
}

/// Returns the active targets of the Prometheus inside `namespace`.
pub(super) async fn active_targets(namespace: &Namespace) -> Result<Vec<Value>> {
    let answer = ask_prometheus(namespace, "/api/v1/targets?state=active").await?;
    let targets = answer["data"]["activeTargets"].as_array();
    Ok(targets.context("no targets")?.clone())
}

/// Returns the answer of the Prometheus inside `namespace` to a PromQL query.
pub(super) async fn query_prometheus(namespace: &Namespace, query: &str) -> Result<Value> {
    ask_prometheus(namespace, &query_path(query)).await
}

async fn ask_prometheus(namespace: &Namespace, path: &str) -> Result<Value> {
    let (_, body) = get(namespace, API.parse()?, API, path).await?;
    serde_json::from_str(&body).with_context(|| format!("Prometheus answered {body}"))
}

fn exporter() -> SocketAddr {
    SocketAddr::new(EDGE_ADDRESS.into(), 9100)
}

/// Plain targets, and targets by address as service discovery finds them, with the rule of the
/// guide. Both nodes have the same address.
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

/// Targets of the server's own discovery. `META` is the address of its meta port.
const DISCOVERED: &str = r#"
global: { scrape_interval: 1s, scrape_timeout: 1s }
scrape_configs:
  - job_name: discovered
    http_sd_configs: [{ url: "http://META/sd/prometheus?port=9100", refresh_interval: 1s }]
"#;

/// Targets by address with the labels of discovery, as the guide's ServiceMonitors find them, and
/// one target without the label, Prometheus.
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

/// Address of Prometheus in its namespace.
const API: &str = "127.0.0.1:9090";

/// Time limit for the start of Prometheus and a few scrapes.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(30);

/// Size of the page, larger than one read or one packet.
const PAGE_BYTES: usize = 300_000;
