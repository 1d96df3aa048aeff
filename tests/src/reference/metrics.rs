//! The page of all metrics, from registries that have a series of each.

use std::collections::BTreeMap;
use std::time::UNIX_EPOCH;

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;
use tunnel_dns::{DnsMetrics, Records};
use tunnel_proto::transport::BufferPool;
use tunnel_server::admin::ExampleNodeMetrics;
use tunnel_server::metrics::Metrics;
use tunnel_server::routing::peers::PeerMetrics;

use super::put;

/// A metric without its name.
#[derive(Debug, Default)]
struct Description {
    kind: String,
    labels: Vec<String>,
    help: String,
}

pub(super) fn page() -> String {
    let mut page = HEAD.to_owned();
    for (program, registry) in [
        ("tunnel-server", server()),
        ("tunnel-agent", tunnel_agent::example_metrics()),
    ] {
        put(&mut page, format_args!("\n## {program}\n\n{COLUMNS}"));
        for (name, metric) in descriptions(&registry) {
            let labels = metric.labels.join(", ");
            let (kind, help) = (metric.kind, metric.help.trim_end_matches('.'));
            let help = help.replace('|', "\\|");
            put(
                &mut page,
                format_args!("| `{name}` | {kind} | {labels} | {help} |\n"),
            );
        }
    }
    page
}

/// Returns the registry of a server in a cluster, as `App::start` fills it.
fn server() -> Registry {
    let mut root = Registry::default();
    let metrics = Metrics::new(&mut root, BufferPool::new(1));
    metrics.watched("https");
    metrics.credential("https", UNIX_EPOCH);
    let _registered = PeerMetrics::new(&mut root);
    let _registered = DnsMetrics::new(&mut root, Records::default());
    tunnel_server::cluster::register_example_metrics(&mut root);
    if let Ok(node) = "worker-1".parse() {
        root.sub_registry_with_prefix("tunnel_server")
            .register_collector(Box::new(ExampleNodeMetrics(node)));
    }
    root
}

/// Returns the metrics of a registry, sorted by the names that queries use.
fn descriptions(registry: &Registry) -> BTreeMap<String, Description> {
    let mut page = String::new();
    // Writing to a String cannot fail.
    let _infallible = text::encode(&mut page, registry);
    let mut metrics = BTreeMap::new();
    let (mut name, mut metric) = (String::new(), Description::default());
    for line in page.lines() {
        if let Some((next, help)) = comment(line, "# HELP ") {
            metrics.insert(
                std::mem::replace(&mut name, next),
                std::mem::take(&mut metric),
            );
            metric.help = help;
        } else if let Some((_, kind)) = comment(line, "# TYPE ") {
            if kind == "counter" {
                name.push_str("_total");
            }
            metric.kind = kind;
        } else if let Some((_, series)) = line.split_once('{') {
            metric.labels = labels(series);
        }
    }
    metrics.insert(name, metric);
    metrics.remove("");
    metrics
}

/// Returns the name and the text of a line about a metric.
fn comment(line: &str, prefix: &str) -> Option<(String, String)> {
    let (name, text) = line.strip_prefix(prefix)?.split_once(' ')?;
    Some((name.to_owned(), text.to_owned()))
}

/// Returns the names of the labels of a series. The bound of a histogram's bucket is no label of
/// the metric.
fn labels(series: &str) -> Vec<String> {
    let names = series.split('"').step_by(2);
    names
        .filter_map(|name| name.trim_start_matches(',').strip_suffix('='))
        .filter(|name| *name != "le")
        .map(|name| format!("`{name}`"))
        .collect()
}

const HEAD: &str = "\
# Metrics

Generated from the code by `make docs`; do not edit. [Monitoring](monitoring.md) explains them. A histogram has the series
`_bucket`, `_sum` and `_count`.
";
const COLUMNS: &str = "| metric | type | labels | |\n|---|---|---|---|\n";
