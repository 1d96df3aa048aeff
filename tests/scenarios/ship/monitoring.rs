//! The alerts and the dashboard use metrics that exist, the panels have values in a real
//! Prometheus, and the links of the alerts lead to sections of the guides.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{ClientTls, Endpoint, RawRequest, request};
use tunnel_tests::cluster::{Cluster, Kind, edge};
use tunnel_tests::dns::{Behavior, DnsClient, FakeResolver, RecordType};
use tunnel_tests::eventually::eventually;
use tunnel_tests::guides::page;
use tunnel_tests::manifests::{find, items, render, repository};
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{
    AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup, Signal, next_loopback,
};
use tunnel_tests::prometheus::{Prometheus, RULES, alerts, shortened_rules};
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::{Tool, or_skip, require};

use crate::cluster::kustomizers;

#[test]
fn promtool_accepts_the_alerts_and_their_tests_pass() -> Result<()> {
    if or_skip(require(&[Tool::Promtool])).is_none() {
        return Ok(());
    }
    for (verb, file) in [("check", RULES), ("test", RULES_TEST)] {
        let file = repository().join(file);
        let mut promtool = Tool::Promtool.command()?;
        let output = promtool.args([verb, "rules"]).arg(file).output()?;
        let out = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{verb}: {out}{errors}");
    }
    Ok(())
}

#[test]
fn each_alert_has_a_test_and_a_section_that_says_what_to_do() -> Result<()> {
    let tests = page(RULES_TEST)?;
    let alerts = alerts()?;
    ensure!(alerts.len() == 11, "{} alerts", alerts.len());
    for alert in alerts {
        let name = alert["alert"].as_str().context("no name")?;
        let link = alert["annotations"]["runbook_url"].as_str();
        let link = link.with_context(|| format!("{name}: no link"))?;
        let (path, anchor) = link.split_once('#').context("no anchor")?;
        ensure!(anchors(&page(path)?).contains(anchor), "{name}: {link}");
        let is_tested = tests.contains(&format!("alertname: {name}\n"));
        ensure!(is_tested, "{name}: no test");
    }
    Ok(())
}

#[test]
fn dashboard_takes_its_data_source_from_a_variable() -> Result<()> {
    let dashboard = dashboard()?;
    let mut ids = BTreeSet::new();
    let mut rows = Vec::new();
    for panel in items(&dashboard["panels"]) {
        let id = panel["id"].as_u64().context("no id")?;
        ensure!(ids.insert(id), "two panels have the id {id}");
        if panel["type"] == "row" {
            rows.push(panel["title"].as_str().unwrap_or_default());
        } else {
            ensure!(panel["datasource"]["uid"] == DATA_SOURCE, "{panel}");
            ensure!(items(&panel["targets"]).count() > 0, "{panel}");
        }
        for target in items(&panel["targets"]) {
            ensure!(target["datasource"].is_null(), "{panel}");
            let query = target["expr"].as_str().context("no query")?;
            ensure!(query.contains("{job=~\"$job\""), "{query}");
        }
    }
    let expected = [
        "Sessions",
        "RTT",
        "Throughput",
        "Refusals",
        "Limits",
        "Certificates",
        "Servers",
        "DNS",
    ];
    ensure!(rows == expected, "{rows:?}");
    let variables = items(&dashboard["templating"]["list"]);
    let variables: Vec<_> = variables.map(|variable| &variable["name"]).collect();
    ensure!(variables == ["datasource", "job"], "{variables:?}");
    Ok(())
}

#[test]
fn kustomize_puts_the_dashboard_into_a_config_map() -> Result<()> {
    let Some(kubectls) = or_skip(kustomizers()) else {
        return Ok(());
    };
    let dashboard = page(DASHBOARD)?;
    for kubectl in kubectls {
        let objects = render(&kubectl, &repository().join("deploy/monitoring"))?;
        ensure!(objects.len() == 1, "{objects:?}");
        let map = find(&objects, "ConfigMap", "culvert-dashboard")?;
        let content = map["data"]["culvert.json"].as_str();
        ensure!(content == Some(dashboard.as_str()), "{map}");
        ensure!(map["metadata"]["labels"]["grafana_dashboard"] == "1");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn alerts_and_panels_use_series_of_a_server_and_an_agent() -> Result<()> {
    let pair = Pair::start().await?;
    let (alerts, dashboard) = (alerts()?, dashboard()?);
    // The series of round-trip times and of writes come after some time.
    eventually("the series", SERIES, async || {
        let pages = pair.pages().await?;
        let series: Vec<_> = pages.lines().filter_map(Series::parse).collect();
        for alert in &alerts {
            let query = alert["expr"].as_str().context("no query")?;
            let texts = alert["annotations"].to_string();
            check_query(query, &names_between(&texts, "$labels.", " "), &series)?;
        }
        for panel in items(&dashboard["panels"]) {
            for target in items(&panel["targets"]) {
                let query = target["expr"].as_str().context("no query")?;
                let legend = target["legendFormat"].as_str().unwrap_or_default();
                check_query(query, &names_between(legend, "{{", "}}"), &series)
                    .with_context(|| panel["title"].to_string())?;
            }
        }
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_panel_has_values_in_prometheus_after_requests_and_a_reconnect() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let mut pair = Pair::start().await?;
    let prometheus = Prometheus::start(&pair.targets(), &page(RULES)?)?;
    eventually("both scrapes", SERIES, async || {
        let up = prometheus.query("up == 1").await?;
        ensure!(up.len() == 2, "{up:?}; {}", prometheus.process());
        Ok(())
    })
    .await;
    pair.reconnect().await?;
    let dashboard = dashboard()?;
    let titles = items(&dashboard["panels"]).filter_map(|panel| panel["title"].as_str());
    let titles: Vec<_> = titles.collect();
    let mut rising = RISING.iter();
    ensure!(rising.all(|title| titles.contains(title)), "{titles:?}");
    eventually("a value of each query", SERIES, async || {
        pair.send_requests().await?;
        for panel in items(&dashboard["panels"]) {
            let title = panel["title"].as_str().unwrap_or_default();
            for target in items(&panel["targets"]) {
                let query = target["expr"].as_str().context("no query")?;
                // Grafana's value for all jobs, and a range since the start of this Prometheus.
                let query = query.replace("$job", ".+");
                let query = query.replace("$__rate_interval", "5m");
                let series = prometheus.query(&query).await?;
                let values = series.iter().map(|series| &series["value"][1]);
                let mut values = values.filter_map(|value| value.as_str()?.parse::<f64>().ok());
                let is_shown =
                    |value: f64| value > 0.0 || !(RISING.contains(&title) || value.is_nan());
                ensure!(values.any(is_shown), "{title}: {query}: {series:?}");
            }
        }
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

/// The scenario of all alerts has the other conditions: files of certificates.
#[tokio::test(flavor = "multi_thread")]
async fn condition_of_the_cluster_is_an_alert_until_it_is_fixed() -> Result<()> {
    if or_skip(require(&[Tool::Prometheus])).is_none() {
        return Ok(());
    }
    let pair = Pair::start().await?;
    let prometheus = Prometheus::start(&pair.targets(), &shortened_rules()?)?;
    wait_for_condition(&prometheus, true).await;
    let add_address = |service: &mut Value| service["spec"]["clusterIP"] = "10.106.217.16".into();
    pair.cluster.objects().create_service(add_address).await?;
    wait_for_condition(&prometheus, false).await;
    Ok(())
}

/// Waits until the server's alert of a condition fires, or until it does not.
async fn wait_for_condition(prometheus: &Prometheus, expected: bool) {
    let alert = ("CulvertCondition".to_owned(), SERVER.to_owned());
    eventually("the alert or its end", SERIES, async || {
        let firing = prometheus.firing().await?;
        let is_right = firing.contains(&alert) == expected;
        ensure!(is_right, "{firing:?} fire; {}", prometheus.process());
        Ok(())
    })
    .await;
}

/// Fails unless each selector of a query has a series. `shown` are labels of the result that a text
/// shows.
fn check_query(query: &str, shown: &[&str], series: &[Series<'_>]) -> Result<()> {
    let mut labels = BTreeSet::from(TARGET_LABELS);
    for selector in selectors(query) {
        let of_metric = series.iter().filter(|series| series.name == selector.name);
        let of_metric: Vec<_> = of_metric.collect();
        ensure!(!of_metric.is_empty(), "no series of {}", selector.name);
        labels.extend(of_metric.iter().flat_map(|series| series.labels.keys()));
        for matcher in selector.matchers.split(',').map(str::trim) {
            let (label, value) = matcher.split_once('=').unwrap_or_default();
            let label = label.trim_end_matches('!');
            if label.is_empty() || TARGET_LABELS.contains(&label) {
                continue;
            }
            // An alternative of a regular expression is a value, too.
            for value in value.trim_matches(['~', '"']).split('|') {
                let mut values = of_metric.iter().map(|series| series.labels.get(label));
                let is_known = values.any(|known| known == Some(&value));
                ensure!(is_known, "{}: no {label}={value}", selector.name);
            }
        }
    }
    let grouping = ["by (", "ignoring (", "on ("].map(|begin| names_between(query, begin, ")"));
    for label in grouping.iter().flatten().chain(shown) {
        ensure!(labels.contains(label), "{query}: no label {label}");
    }
    Ok(())
}

/// A metric of a query, with the text of its matchers.
struct Selector<'a> {
    name: &'a str,
    matchers: &'a str,
}

/// Returns the metrics of a query. All metrics begin with `tunnel_` or `process_`.
fn selectors(query: &str) -> Vec<Selector<'_>> {
    let is_name = |next: char| next.is_ascii_alphanumeric() || next == '_';
    let mut found = Vec::new();
    let mut remainder = query;
    while let Some(start) = remainder.find(is_name) {
        let from_name = &remainder[start..];
        let end = from_name.find(|next| !is_name(next));
        let (name, after) = from_name.split_at(end.unwrap_or(from_name.len()));
        remainder = after;
        if name.starts_with("tunnel_") || name.starts_with("process_") {
            let braces = after
                .strip_prefix('{')
                .and_then(|text| text.split_once('}'));
            let (matchers, after) = braces.unwrap_or(("", after));
            remainder = after;
            found.push(Selector { name, matchers });
        }
    }
    found
}

/// Returns the names in each list between `begin` and `end`.
fn names_between<'a>(text: &'a str, begin: &str, end: &str) -> Vec<&'a str> {
    let lists = text.split(begin).skip(1);
    let lists = lists.filter_map(|list| Some(list.split_once(end)?.0));
    let names = lists.flat_map(|list| list.split(','));
    // Templates end a name with braces.
    names
        .map(|name| name.trim().trim_end_matches('}'))
        .collect()
}

/// A series of a page of metrics, without its value.
struct Series<'a> {
    name: &'a str,
    labels: BTreeMap<&'a str, &'a str>,
}

impl<'a> Series<'a> {
    /// Parses a line of a page. Returns `None` for comments.
    fn parse(line: &'a str) -> Option<Self> {
        if line.starts_with('#') {
            return None;
        }
        let (name, labels) = match line.split_once('{') {
            Some((name, braces)) => (name, braces.rsplit_once('}')?.0),
            None => (line.split_once(' ')?.0, ""),
        };
        let labels = labels.split("\",").filter_map(|label| {
            let (label, value) = label.split_once("=\"")?;
            Some((label, value.trim_end_matches('"')))
        });
        let labels = labels.collect();
        Some(Self { name, labels })
    }
}

/// Returns the anchors of the headings of a page.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    let anchors = headings.map(|heading| {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        heading.replace(' ', "-")
    });
    anchors.collect()
}

fn dashboard() -> Result<Value> {
    serde_json::from_str(&page(DASHBOARD)?).context(DASHBOARD)
}

/// An agent, and its server in a cluster. The server has certificate files, DNS and a condition, so
/// that all series exist.
struct Pair {
    agent: Process,
    agent_setup: AgentSetup,
    agent_meta: SocketAddr,
    server: Server,
    dns: DnsClient,
    caller: Issued,
    exporter: Exporter,
    _resolver: FakeResolver,
    cluster: Cluster,
    _scratch: ScratchDir,
}

impl Pair {
    async fn start() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let cluster = Cluster::start(Kind::FakeApiServer).await?;
        let cluster = cluster.context("no fake API server")?;
        cluster.objects().add(&edge(NODE)).await?;
        let resolver = FakeResolver::start(Behavior::Answers(1)).await?;
        let exporter = Exporter::start(NODE).await?;
        let ca = TestCa::new("ours")?;
        let client_ca = scratch.file("client-ca.crt", ca.pem())?;
        let (certificate, key) = ca
            .issue(&Leaf::target(NODE))?
            .write(scratch.path(), "https")?;
        let caller = ca.issue(&Leaf::caller("apiserver"))?;
        let (client, client_key) = caller.write(scratch.path(), "client")?;
        let data = scratch.path().join("server");
        // The Service of the listeners is missing, which is a condition.
        let setup = ServerSetup::in_cluster(&data, &cluster.server_kubeconfig()?)
            .args(&["--namespace", "kube-system", "--dns-listen", "127.0.0.1:0"])
            .args(&["--dns-upstream", &resolver.address().to_string()])
            .args(&["--http-proxy-ports", &exporter.addr().port().to_string()])
            .args(&["--proxy-port-listen", "off"])
            .args(&["--https-cert-file", &certificate.to_string_lossy()])
            .args(&["--https-key-file", &key.to_string_lossy()])
            .args(&["--client-ca", &client_ca.to_string_lossy()])
            .args(&["--target-cert-file", &client.to_string_lossy()])
            .args(&["--target-key-file", &client_key.to_string_lossy()])
            .args(&["--delegation-allowed-callers", "apiserver"]);
        let mut server = setup.start().await?;
        let opened = |line: &str| Listener::Dns.opened(line);
        let dns = server
            .process()
            .wait_for_line("DNS", SERIES, opened)
            .await?;
        let (token, address) = (server.token(NODE, None).await?, next_loopback());
        let agents = server.address(Listener::Agents);
        let folder = scratch.path().join("agent");
        let agent_setup = AgentSetup::on_address(NODE, agents, &folder, address);
        let agent_setup = agent_setup.args(&["--token", &token]);
        let agent = agent_setup.start()?;
        server.wait_until_connected(&[NODE]).await;
        Ok(Self {
            agent,
            agent_setup,
            agent_meta: Listener::Meta.on(address),
            server,
            dns: DnsClient::new(dns),
            caller,
            exporter,
            _resolver: resolver,
            cluster,
            _scratch: scratch,
        })
    }

    /// Returns the meta ports with the names of their jobs.
    fn targets(&self) -> [(&'static str, SocketAddr); 2] {
        let server = self.server.address(Listener::Meta);
        [(SERVER, server), ("tunnel-agent", self.agent_meta)]
    }

    /// Ends the agent and starts it again.
    async fn reconnect(&mut self) -> Result<()> {
        self.agent.signal(Signal::Term)?;
        self.agent.end(SERIES).await?;
        self.agent = self.agent_setup.start()?;
        self.server.wait_until_connected(&[NODE]).await;
        Ok(())
    }

    /// Sends a query of another name, and requests that are served, fail at the agent and are
    /// refused.
    async fn send_requests(&self) -> Result<()> {
        self.dns.ask("example.com", RecordType::A).await?;
        let host = format!("{NODE}:{}", self.exporter.addr().port());
        self.server.get_ok(&host, "/metrics").await?;
        let tls = ClientTls::insecure(NODE, Some(self.caller.presented()?))?;
        let https = Endpoint::tls(self.server.address(Listener::Https), tls);
        let unserved = RawRequest::get(&format!("{NODE}:10250"), "/healthz");
        let reply = request(https, &unserved).await?;
        ensure!(reply.status == 502, "{}: {}", reply.status, reply.text());
        let unknown = RawRequest::get("worker-2:9100", "/metrics");
        let reply = request(self.server.address(Listener::Http), &unknown).await?;
        ensure!(reply.status == 400, "{}: {}", reply.status, reply.text());
        Ok(())
    }

    /// Returns the metrics of both processes.
    async fn pages(&self) -> Result<String> {
        let server = meta_page(self.server.address(Listener::Meta), "/metrics").await?;
        Ok(server + &meta_page(self.agent_meta, "/metrics").await?)
    }
}

const RULES_TEST: &str = "deploy/monitoring/rules_test.yaml";
const DASHBOARD: &str = "deploy/monitoring/dashboard.json";
const DATA_SOURCE: &str = "${datasource}";
const NODE: &str = "worker-1";
const SERVER: &str = "tunnel-server";

/// Panels whose values are above zero after the requests and the reconnect.
const RISING: [&str; 11] = [
    "Agent sessions by server",
    "Bytes at the agents",
    "Bytes of callers' streams",
    "Closed sessions by code",
    "Conditions",
    "Failed dials to targets",
    "Failed requests by code",
    "Failed streams at the agents",
    "Queries by outcome",
    "Requests and streams of callers",
    "Time to open a stream",
];

/// Labels that Prometheus and its operator add.
const TARGET_LABELS: [&str; 3] = ["instance", "job", "namespace"];

/// Time limit for a start, for the first writes to the cluster, and for the round-trip times.
const SERIES: Duration = Duration::from_secs(30);
