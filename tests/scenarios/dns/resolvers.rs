//! Real clients that find the DNS through a `resolv.conf`, in a network namespace where the DNS
//! listens on port 53.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::fakes::{edge_sites, resolver};
use tunnel_tests::netns::{CLOUD_ADDRESS, NODES, Namespace, Topology};
use tunnel_tests::process::{Fleet, Process, Program, ScratchDir, ServerSetup};
use tunnel_tests::tools::{Tool, or_skip, require};

use super::forwarding::ensure_left;
use super::report_figure;
use crate::namespaces::curl;
use crate::prometheus::{active_targets, ports_of_targets, prometheus};

/// The guide's search list followed by the host's domain, in the form that the kubelet writes for a
/// pod with dnsPolicy None.
const SEARCH: &str =
    "search kube-system.svc.cluster.local svc.cluster.local cluster.local corp.example";

struct Site {
    _exporters: Vec<Process>,
    _fleet: Fleet,
    upstream: Process,
    clients: Clients,
    sites: Topology,
    _scratch: ScratchDir,
}

/// Two clients in the cloud's network, each with its own `resolv.conf`.
struct Clients {
    plain: Namespace,
    searching: Namespace,
}

async fn set_up(behavior: &str) -> Result<Option<Site>> {
    let tools = require(&[Tool::Dig, Tool::Curl, Tool::Prometheus]);
    let Some(sites) = or_skip(tools.and_then(|()| Topology::new())) else {
        return Ok(None);
    };
    let scratch = ScratchDir::new()?;
    let server = format!("nameserver {CLOUD_ADDRESS}\n");
    let plain = format!("{server}options ndots:0\n");
    let searching = format!("{server}{SEARCH}\noptions ndots:5\n");
    let client = |name: &str, resolv_conf: &str| {
        let cloud = sites.cloud();
        cloud.with_resolver(name, scratch.path(), resolv_conf)
    };
    let clients = client("plain", &plain).and_then(|plain| {
        let searching = client("searching", &searching)?;
        Ok(Clients { plain, searching })
    });
    let Some(clients) = or_skip(clients) else {
        return Ok(None);
    };
    let exporters = edge_sites(&sites).await?;
    let upstream = resolver(Some(sites.cloud()), UPSTREAM.parse()?, behavior).await?;
    let (listen, answer) = (format!("{CLOUD_ADDRESS}:53"), CLOUD_ADDRESS.to_string());
    let own = ["--dns-listen", &listen, "--dns-answer", &answer];
    let dns = [&own[..], &["--dns-upstream", UPSTREAM]].concat();
    let arguments = [&dns[..], &ports_of_targets("9100")].concat();
    let fleet = Fleet::start(&sites, &arguments).await?;
    Ok(Some(Site {
        _exporters: exporters,
        _fleet: fleet,
        upstream,
        clients,
        sites,
        _scratch: scratch,
    }))
}

/// Returns the names that were forwarded to the other resolver, from its log.
fn asked(upstream: &Process) -> Vec<String> {
    let lines = upstream.log().lines();
    lines
        .iter()
        .filter_map(|line| line.strip_prefix("asked "))
        .map(str::to_owned)
        .collect()
}

async fn dig(namespace: &Namespace, words: &[&str]) -> Result<String> {
    Program::tool(Tool::Dig)?
        .args(words.iter().copied())
        .inside(Some(namespace))
        .run()
        .await?
        .ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn dig_curl_and_prometheus_find_nodes_by_resolv_conf() -> Result<()> {
    let Some(site) = set_up("answers").await? else {
        return Ok(());
    };
    let plain = &site.clients.plain;
    let own = CLOUD_ADDRESS.to_string();
    let short = dig(plain, &["+short", "worker-1"]).await?;
    ensure!(short.trim() == own, "{short}");
    let full = dig(plain, &["worker-1"]).await?;
    ensure!(full.contains(";; flags: qr aa rd ra;"), "P30: {full}");
    ensure!(!full.contains("WARNING"), "P30: {full}");
    ensure!(full.contains("worker-1.\t\t5\tIN\tA\t10.77.0.1"), "{full}");
    let tcp = dig(plain, &["+tcp", "+short", "worker-2"]).await?;
    ensure!(tcp.trim() == own, "{tcp}");
    for (words, expected) in [
        (&["AAAA", "worker-1"][..], "status: NOERROR"),
        (&["worker-9"], "status: NXDOMAIN"),
        (&["example.com"], "10.1.0.0"),
        (&["-x", "10.77.0.1"], "status: NOERROR"),
        (&["AXFR", "cluster.local"], "Transfer failed"),
        (&["CH", "TXT", "version.bind"], "status: REFUSED"),
    ] {
        let stdout = dig(plain, words).await?;
        ensure!(stdout.contains(expected), "{words:?}: {stdout}");
    }
    ensure!(!dig(plain, &["-x", "10.77.0.1"]).await?.contains("worker-"));

    // DNS-12: curl reaches the listeners by the node's name alone.
    for namespace in [plain, &site.clients.searching] {
        for node in NODES {
            let curl = curl()?.arg(format!("http://{node}:9100/metrics"));
            let page = curl.inside(Some(namespace)).run().await?.ok()?;
            ensure!(page.contains(&format!("node=\"{node}\"")), "{page}");
        }
    }
    prometheus_scrapes_by_name(&site).await
}

/// The host of the server in the guide, whose first resolver is the server.
#[tokio::test(flavor = "multi_thread")]
async fn host_that_asks_its_own_server_starts_again_and_follows_its_resolvers() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let hosts = scratch.file("hosts", "127.0.0.1 localhost\n")?;
    let [own, first, second] = [1, 2, 3].map(|number| Ipv4Addr::new(127, 0, 0, number));
    let resolv_conf = |other: Ipv4Addr| format!("nameserver {own}\nnameserver {other}\n");
    let network = require(&[Tool::Dig]).and_then(|()| Namespace::new("network", &hosts));
    let host = network
        .and_then(|network| network.with_resolver("host", scratch.path(), &resolv_conf(first)));
    let Some(host) = or_skip(host) else {
        return Ok(());
    };
    let _first = resolver(Some(&host), (first, 53).into(), "answers").await?;
    let later = resolver(Some(&host), (second, 53).into(), "answers").await?;
    let setup = ServerSetup::new(&scratch.path().join("server"), Some(&host));
    let setup = setup.args(&["--dns-listen", &format!("{own}:53")]);
    for _start in 0..2 {
        let server = setup.start().await?;
        let answer = dig(&host, &["+short", "example.com"]).await?;
        ensure!(answer.contains("10.1.0.0"), "{answer}");
        let log = server.log().lines();
        let left_out = |line: &String| line.contains("because it is this server");
        ensure!(log.iter().any(left_out), "{log:?}");
        server.into_process().stop(STOP).await?;
    }
    let _server = setup.start().await?;
    std::fs::write(scratch.path().join("host.resolv.conf"), resolv_conf(second))?;
    eventually("the other resolver is asked", SCRAPE_TIMEOUT, async || {
        dig(&host, &["+short", "later.example.com"]).await?;
        let asked = asked(&later);
        ensure!(
            asked.iter().any(|name| name.starts_with("later")),
            "{asked:?}"
        );
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

async fn prometheus_scrapes_by_name(site: &Site) -> Result<()> {
    let scratch = ScratchDir::new()?;
    let prometheus = prometheus(&site.clients.searching, &scratch, SCRAPES)?;
    eventually("both nodes up in Prometheus", SCRAPE_TIMEOUT, async || {
        let targets = active_targets(site.sites.cloud()).await?;
        let up = targets.iter().filter(|target| target["health"] == "up");
        ensure!(up.count() == 2, "{targets:#?}; {prometheus}");
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn p13_curl_finds_a_node_beside_a_black_hole_and_no_single_label_leaves() -> Result<()> {
    let Some(site) = set_up("silent").await? else {
        return Ok(());
    };
    let mut times = Vec::new();
    for (namespace, limit) in [
        (&site.clients.plain, Duration::from_millis(50)),
        (&site.clients.searching, Duration::from_secs(2)),
    ] {
        let curl = curl()?
            .args(["-o", "/dev/null", "-w", "%{time_namelookup}"])
            .arg("http://worker-1:9100/metrics");
        let stdout = curl.inside(Some(namespace)).run().await?.ok()?;
        let lookup = Duration::from_secs_f64(stdout.trim().parse()?);
        ensure!(lookup < scaled(limit), "{}: {lookup:?}", namespace.name());
        times.push(lookup);
    }
    report_figure(&format!("P13: curl's lookup, ndots 0 and 5: {times:?}"));
    // For a misspelled name the client tries every suffix, and curl reports that the name does not
    // exist.
    for namespace in [&site.clients.plain, &site.clients.searching] {
        let curl = curl()?.arg("http://worker-9:9100/");
        let failed = curl.inside(Some(namespace)).run().await?;
        ensure!(failed.code() == Some(6), "{failed}");
    }
    ensure_left(&asked(&site.upstream), "worker-9.corp.example")
}

const UPSTREAM: &str = "127.0.0.9:5300";
const SCRAPES: &str = r#"
global: { scrape_interval: 1s, scrape_timeout: 1s }
scrape_configs:
  - job_name: nodes
    static_configs: [{ targets: ["worker-1:9100", "worker-2:9100"] }]
"#;
/// Time limit for the start of Prometheus and a few scrapes.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for the stop of a server without work.
const STOP: Duration = Duration::from_secs(20);
