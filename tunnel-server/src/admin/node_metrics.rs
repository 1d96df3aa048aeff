//! Metrics of each node: whether it has an agent, when it was last seen, and its round-trip time.
//! Each scrape reads the state of the server, so a node that is forgotten leaves no series.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::wire::name::NodeName;

use crate::config::PerNodeMetrics;
use crate::metrics::Metrics;
use crate::routing::peers::Peers;
use crate::routing::registry::{AgentSession, Registry};
use crate::routing::routes::{RouteSource, Routes};
use tunnel_store::known_nodes::KnownNodes;

/// The collector of the metrics of each node.
#[derive(Debug)]
pub(crate) struct NodeMetrics {
    pub(crate) nodes: Arc<KnownNodes>,
    pub(crate) routes: Routes,
    pub(crate) registry: Arc<Registry>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) mode: PerNodeMetrics,
}

/// The observed state of one node.
#[derive(Debug)]
struct NodeSample {
    node: NodeName,
    is_connected: bool,
    last_seen: Option<SystemTime>,
    rtt: Option<Duration>,
}

impl NodeMetrics {
    /// Returns the state of the known nodes that have had an agent, the edge nodes of the cluster and the nodes that other
    /// servers hold. Empty if there are more nodes than the mode allows.
    fn samples(&self, now: SystemTime) -> Vec<NodeSample> {
        let known = self.nodes.snapshot();
        if !self.mode.allows(known.len()) {
            return Vec::new();
        }
        let held_nodes = self.peers.held_nodes().into_iter();
        let held_nodes: BTreeSet<NodeName> = held_nodes.map(|(node, _replica)| node).collect();
        let routes = self.routes.load();
        let edges = routes.of(RouteSource::Cluster).filter(|node| node.is_edge);
        let expected = known.iter().filter(|(name, node)| {
            !node.is_pending()
                || self.registry.has(name)
                || self.registry.last_close(name).is_some()
        });
        let names: BTreeSet<&NodeName> = expected
            .map(|(name, _node)| name)
            .chain(edges.map(|node| &node.name))
            .chain(&held_nodes)
            .collect();
        if !self.mode.allows(names.len()) {
            return Vec::new();
        }
        let sample = |name: &NodeName| {
            let persisted = known.get(name).and_then(|node| node.last_seen);
            self.sample(name, held_nodes.contains(name), persisted, now)
        };
        names.into_iter().map(sample).collect()
    }

    /// Returns the state of a node. `is_held` means that another server holds the node. `persisted`
    /// is the time at which the node was last seen according to the data directory.
    fn sample(
        &self,
        node: &NodeName,
        is_held: bool,
        persisted: Option<SystemTime>,
        now: SystemTime,
    ) -> NodeSample {
        let sessions = self.registry.of_node(node);
        let active = sessions.iter().find(|session| session.is_routable());
        let active = active.or_else(|| sessions.first());
        let last_seen = match active {
            Some(_) => sessions.iter().map(|session| session.last_seen(now)).max(),
            None if is_held => None,
            None => {
                let last_close = self.registry.last_close(node);
                last_close.map(|close| close.last_seen).max(persisted)
            }
        };
        NodeSample {
            node: node.clone(),
            is_connected: is_held || active.is_some(),
            last_seen,
            rtt: active.and_then(|session| measured_rtt(session)),
        }
    }
}

impl Collector for NodeMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        encode_samples(encoder, &self.samples(SystemTime::now()))
    }
}

fn encode_samples(mut encoder: DescriptorEncoder<'_>, samples: &[NodeSample]) -> fmt::Result {
    encode_family(
        &mut encoder,
        "node_connected",
        "1 if an agent is connected for the node, to this server or to another one",
        samples
            .iter()
            .map(|sample| (sample, Some(u64::from(sample.is_connected)))),
    )?;
    encode_family(
        &mut encoder,
        "node_last_seen_timestamp_seconds",
        "Unix time of the last sign of life of the node's agent at this server",
        samples.iter().map(|sample| {
            let since_epoch = sample.last_seen.map(|at| at.duration_since(UNIX_EPOCH));
            let seconds = since_epoch.map(|since| since.unwrap_or_default().as_secs_f64());
            (sample, seconds)
        }),
    )?;
    encode_family(
        &mut encoder,
        "node_rtt_seconds",
        "Smoothed round-trip time of the node's active session with this server",
        samples.iter().map(|sample| {
            let seconds = sample.rtt.map(|rtt| rtt.as_secs_f64());
            (sample, seconds)
        }),
    )
}

/// Encodes a gauge with the label `node`. Nodes without a value have no series, and a gauge without
/// series is left out.
fn encode_family<'a, N: EncodeGaugeValue>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (&'a NodeSample, Option<N>)>,
) -> fmt::Result {
    let mut values = values
        .filter_map(|(sample, value)| Some((sample, value?)))
        .peekable();
    if values.peek().is_none() {
        return Ok(());
    }
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (sample, value) in values {
        let labels = [("node", sample.node.as_str())];
        ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// The metrics of one node, for the reference.
#[cfg(feature = "test-util")]
#[derive(Debug)]
pub struct ExampleNodeMetrics(pub NodeName);

#[cfg(feature = "test-util")]
impl Collector for ExampleNodeMetrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let sample = NodeSample {
            node: self.0.clone(),
            is_connected: true,
            last_seen: Some(UNIX_EPOCH),
            rtt: Some(Duration::ZERO),
        };
        encode_samples(encoder, &[sample])
    }
}

/// Observes the round-trip time of each session every 10 s at least.
pub(crate) fn observe_rtts(registry: Arc<Registry>, metrics: Metrics, shutdown: &Shutdown) {
    shutdown.spawn_service(async move {
        loop {
            let sessions = registry.all();
            for rtt in sessions.iter().filter_map(|session| measured_rtt(session)) {
                metrics.agent_rtt(rtt);
            }
            drop(sessions);
            sleep_coalesced(RTT_INTERVAL).await;
        }
    });
}

/// Returns the round-trip time of a session, if the transport has measured it. That of a suspect
/// session is out of date.
fn measured_rtt(session: &AgentSession) -> Option<Duration> {
    let is_live = session.suspect_reason().is_none();
    let rtt = is_live.then(|| session.session.stats().rtt);
    rtt.filter(|rtt| !rtt.is_zero())
}

/// Interval at which round-trip times are observed, as often as most scrapers ask.
const RTT_INTERVAL: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry as MetricsRegistry;
    use tunnel_proto::wire::code::CloseCode;
    use tunnel_store::known_nodes::EnrollmentKind;

    use super::*;
    use crate::testing::{Bench, eventually, node};

    const RTT: Duration = Duration::from_millis(250);

    fn page(bench: &Bench, mode: PerNodeMetrics) -> String {
        let sessions = &bench.sessions;
        let mut registry = MetricsRegistry::default();
        registry.register_collector(Box::new(NodeMetrics {
            nodes: sessions.nodes.clone(),
            routes: Routes::default(),
            registry: sessions.registry.clone(),
            peers: sessions.peers.clone(),
            mode,
        }));
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        page
    }

    fn series(page: &str, name: &str) -> usize {
        let prefix = format!("{name}{{");
        let lines = page.lines().filter(|line| line.starts_with(&prefix));
        lines.count()
    }

    /// Makes nodes known that have enrolled and were never connected.
    fn know(bench: &Bench, names: impl IntoIterator<Item = String>) {
        for name in names {
            let name = name.parse().unwrap();
            let nodes = &bench.sessions.nodes;
            nodes.record_enrollment(&name, EnrollmentKind::JoinToken);
        }
    }

    fn edges(count: usize) -> impl Iterator<Item = String> {
        (0..count).map(|number| format!("edge-{number:05}"))
    }

    #[tokio::test(start_paused = true)]
    async fn node_has_its_series_while_it_is_known() {
        let (bench, agent) = Bench::with_agent().await;
        let nodes = &bench.sessions.nodes;
        eventually("known", || nodes.knows(&node())).await;
        let shown = || page(&bench, PerNodeMetrics::Auto);
        assert!(shown().contains("node_connected{node=\"worker-1\"} 1\n"));
        assert!(!shown().contains("node_rtt_seconds"), "not measured");
        agent.near.script().rtt = RTT;
        assert!(shown().contains("node_rtt_seconds{node=\"worker-1\"} 0.25\n"));
        agent.far.close(CloseCode::Normal, "").await;
        let registry = &bench.sessions.registry;
        eventually("away", || registry.last_close(&node()).is_some()).await;
        assert!(shown().contains("node_connected{node=\"worker-1\"} 0\n"));
        assert_eq!(series(&shown(), "node_last_seen_timestamp_seconds"), 1);
        assert!(!shown().contains("node_rtt_seconds"));
        assert!(nodes.forget(&node()));
        assert_eq!(shown(), "# EOF\n");
    }

    #[tokio::test(start_paused = true)]
    async fn page_of_ten_thousand_nodes_has_one_series_for_each_value() {
        let (bench, agent) = Bench::with_agent().await;
        agent.near.script().rtt = RTT;
        know(&bench, edges(10_000));
        let nodes = &bench.sessions.nodes;
        eventually("known", || nodes.knows(&node())).await;
        let page = page(&bench, PerNodeMetrics::On);
        assert_eq!(series(&page, "node_connected"), 10_001);
        // Nodes that were never connected have no other series.
        assert_eq!(series(&page, "node_last_seen_timestamp_seconds"), 1);
        assert_eq!(series(&page, "node_rtt_seconds"), 1);
        assert_eq!(page.matches("# TYPE").count(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn large_fleets_have_no_series_of_nodes_unless_they_are_switched_on() {
        let bench = Bench::new();
        know(&bench, edges(2_000));
        let count = |mode| series(&page(&bench, mode), "node_connected");
        assert_eq!(count(PerNodeMetrics::Auto), 2_000);
        assert_eq!(count(PerNodeMetrics::Off), 0);
        know(&bench, [node().to_string()]);
        assert_eq!(count(PerNodeMetrics::Auto), 0);
        assert_eq!(count(PerNodeMetrics::On), 2_001);
    }

    #[tokio::test(start_paused = true)]
    async fn round_trip_times_of_live_sessions_are_observed() {
        let (bench, agent) = Bench::with_agent().await;
        agent.near.script().rtt = RTT;
        let sessions = &bench.sessions;
        let count = || bench.metric("tunnel_server_agent_rtt_seconds_count");
        assert_eq!(count(), Some(0));
        observe_rtts(
            sessions.registry.clone(),
            sessions.metrics.clone(),
            &sessions.shutdown,
        );
        eventually("observed", || count() == Some(1)).await;
    }
}
