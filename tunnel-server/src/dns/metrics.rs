//! Metrics of the embedded DNS server.

use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::Records;
use super::answer::{QueryOutcome, Transport};

tunnel_proto::metrics! {
    /// The metrics of queries.
    struct Families {
        queries: Family<QueryLabels, Counter> = "queries",
            "DNS queries by outcome: limited by limits.dnsPerSource, busy by limits.dnsForwards, \
             upstream_failed by limits.dnsForwardBudget";
        forward_seconds: Histogram = "forward_duration_seconds",
            "Time until another resolver answered", Histogram::new(FORWARD_SECONDS);
        connections_waited: Counter = "connections_waited",
            "TCP connections that waited because limits.dnsConnections was reached";
    }
}

tunnel_proto::label_sets! {
    QueryLabels { transport: Transport, outcome: QueryOutcome }
}

/// Metrics of the embedded DNS server. Clones share them.
#[derive(Debug, Clone)]
pub struct DnsMetrics(Families);

impl DnsMetrics {
    /// Registers the metrics under `tunnel_server_dns_`. The number of records is read at scrape
    /// time.
    #[must_use]
    pub fn new(root: &mut Registry, records: Records) -> Self {
        let registry = root.sub_registry_with_prefix("tunnel_server_dns");
        let families = Families::register(registry);
        registry.register_collector(Box::new(RecordsGauge(records)));
        Self(families)
    }

    /// Counts a query by its transport and outcome.
    pub fn query(&self, transport: Transport, outcome: QueryOutcome) {
        let labels = QueryLabels { transport, outcome };
        self.0.queries.get_or_create(&labels).inc();
    }

    /// Counts a new connection that waits for a permit.
    pub fn connection_waited(&self) {
        self.0.connections_waited.inc();
    }

    /// Records how long a forwarded query took.
    pub fn forwarded(&self, elapsed: Duration) {
        self.0.forward_seconds.observe(elapsed.as_secs_f64());
    }
}

#[derive(Debug)]
struct RecordsGauge(Records);

impl Collector for RecordsGauge {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let names = i64::try_from(self.0.load().len()).unwrap_or(i64::MAX);
        let gauge = ConstGauge::new(names);
        let help = "Names that are answered with an address";
        let metric = encoder.encode_descriptor("records", help, None, gauge.metric_type())?;
        gauge.encode(metric)
    }
}

/// Upper bounds in seconds, from a resolver next to the server to the forwarding budget.
const FORWARD_SECONDS: [f64; 8] = [0.0005, 0.001, 0.0025, 0.01, 0.025, 0.05, 0.1, 0.4];
