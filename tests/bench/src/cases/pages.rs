//! Case 15: the pages of the meta port that have an entry for each node.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_store::data_dir::DataDir;
use tunnel_store::known_nodes::KnownNodes;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, ScratchDir, ServerSetup};

use crate::bench::BenchRun;
use crate::components::agents::node_name;
use crate::metric::{DISCOVERY_OF_5000, METRICS_OF_10000, Metric};
use crate::systems::H2;
use crate::target::Bound::AtMost;
use crate::target::Of::Itself;
use crate::target::Target;

pub(super) const TARGETS: &[Target] = &[
    Target::new(H2, &METRICS_OF_10000, Itself, AtMost(200.0)),
    Target::new(H2, &DISCOVERY_OF_5000, Itself, AtMost(100.0)),
];

/// A page with an entry for each node.
struct Page {
    metric: &'static Metric,
    path: &'static str,
    nodes: usize,
    /// Text that each entry has once.
    entry: &'static str,
}

const PAGES: [Page; 2] = [
    Page {
        metric: &METRICS_OF_10000,
        path: "/metrics",
        nodes: 10_000,
        entry: "tunnel_server_node_last_seen_timestamp_seconds{",
    },
    Page {
        metric: &DISCOVERY_OF_5000,
        path: "/sd/prometheus?port=9100",
        nodes: 5_000,
        entry: "__meta_kubernetes_node_name",
    },
];

/// Requests of one round, of which the median counts.
const REQUESTS: usize = 9;
/// Validity of the nodes' certificates.
const VALIDITY: Duration = Duration::from_secs(30 * 24 * 3600);

/// Measures the time from the request to the last byte of each page, at a server that knows the
/// nodes and has no agent.
pub(super) async fn run(bench: &mut BenchRun) -> Result<()> {
    for page in PAGES {
        match page.median().await {
            Ok(took) => bench.record(H2, page.metric, took.as_secs_f64() * 1e3, 0.0),
            Err(error) => bench.record_error(H2, &error),
        }
    }
    Ok(())
}

impl Page {
    async fn median(&self) -> Result<Duration> {
        let scratch = ScratchDir::new()?;
        let data = scratch.path().join("server");
        record_nodes(&DataDir::open(&data)?, self.nodes)?;
        let setup = ServerSetup::on_loopback(&data)
            .args(&["--metrics-per-node", "on", "--http-proxy-ports", "9100"])
            .args(&["--proxy-port-listen", "off"]);
        let server = setup.start().await?;
        let meta = server.address(Listener::Meta);
        let mut times = Vec::with_capacity(REQUESTS);
        for _ in 0..REQUESTS {
            let began = Instant::now();
            let text = meta_page(meta, self.path).await?;
            times.push(began.elapsed());
            let entries = text.matches(self.entry).count();
            ensure!(entries == self.nodes, "{}: {entries} entries", self.path);
        }
        times.sort();
        times.get(REQUESTS / 2).copied().context("no request")
    }
}

/// Writes nodes that were connected before the server starts.
fn record_nodes(dir: &DataDir, count: usize) -> Result<()> {
    let nodes = KnownNodes::open(dir)?;
    let not_after = SystemTime::now() + VALIDITY;
    for number in 0..count {
        nodes.record_connection(&node_name(number).parse()?, SystemTime::now(), not_after);
    }
    Ok(nodes.save()?)
}
