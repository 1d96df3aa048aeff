//! The embedded DNS server: limits, metrics and forwarding around the pure decision in `answer.rs`.
//!
//! hickory's own server is not used. That server accepts any number of TCP connections, and answers
//! malformed messages before a limit or a counter sees them. This module uses hickory's messages
//! and its client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_proto::op::ResponseCode;
use parking_lot::{Mutex, RwLock};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::debug;
use tunnel_process::metrics::{count, with_series};

use super::answer::{self, AnswerContext, ClientQuery, Decision, QueryOutcome, Transport};
use super::host_resolvers::HostResolvers;
use super::limiter::{Limiter, SourcePermit};
use super::loop_detection::LoopDetector;
use super::{DnsLimits, Names, Records, upstream};

/// State that both transports share.
#[derive(Debug)]
pub(super) struct Server {
    /// The names with the resolvers that are in use.
    pub(super) names: RwLock<Arc<Names>>,
    /// The resolvers of this host, if other names are forwarded to them.
    pub(super) host_resolvers: Option<Mutex<HostResolvers>>,
    pub(super) records: Records,
    pub(super) limits: DnsLimits,
    pub(super) limiter: Limiter,
    pub(super) forwards: Arc<Semaphore>,
    pub(super) loop_detection: LoopDetector,
    pub(super) metrics: DnsMetrics,
}

#[derive(Debug)]
pub(super) enum QueryAction {
    Ignore,
    Reply(Vec<u8>),
    Forward(Box<Forward>),
}

/// A query for another resolver.
#[derive(Debug)]
pub(super) struct Forward {
    client_query: ClientQuery,
    resolvers: Vec<SocketAddr>,
    _permits: (OwnedSemaphorePermit, SourcePermit),
}

impl Server {
    pub(super) fn names(&self) -> Arc<Names> {
        self.names.read().clone()
    }

    /// Reads the resolvers of this host again. Returns `true` if other ones are in use. Blocks the
    /// thread.
    pub(super) fn update_host_resolvers(&self) -> bool {
        let Some(host_resolvers) = &self.host_resolvers else {
            return false;
        };
        let mut host_resolvers = host_resolvers.lock();
        let is_other = host_resolvers.update();
        if is_other {
            let names = Names {
                default_resolvers: host_resolvers.used().to_vec(),
                ..Names::clone(&self.names())
            };
            *self.names.write() = Arc::new(names);
        }
        is_other
    }

    /// Returns what an operator should fix about the resolvers.
    pub(super) fn conditions(&self) -> Vec<String> {
        let host_resolvers = self.host_resolvers.as_ref();
        let of_host = host_resolvers.and_then(|resolvers| resolvers.lock().condition().cloned());
        let mut lines = self.loop_detection.conditions();
        lines.extend(of_host);
        lines
    }

    /// Decides how to handle one message and counts it. Forwarded queries are counted when they
    /// end.
    pub(super) fn handle_query(
        &self,
        message: &[u8],
        client: SocketAddr,
        transport: Transport,
    ) -> QueryAction {
        let count = |outcome| self.metrics.query(transport, outcome);
        // Port 0 is never a valid source port, so an answer would go to a forged source.
        if client.port() == 0 || !self.limiter.admit_query(client.ip()) {
            count(QueryOutcome::Limited);
            return QueryAction::Ignore;
        }
        let records = self.records.known();
        let names = self.names();
        let context = AnswerContext {
            records: records.as_deref(),
            names: &names,
        };
        let (client_query, resolvers) = match answer::decide(message, transport, &context) {
            Decision::Ignore(outcome) => {
                count(outcome);
                return QueryAction::Ignore;
            }
            Decision::Reply(bytes, outcome) => {
                let is_error_reply =
                    matches!(outcome, QueryOutcome::Malformed | QueryOutcome::Refused);
                if is_error_reply && !self.limiter.can_send_error(client.ip()) {
                    count(QueryOutcome::Limited);
                    return QueryAction::Ignore;
                }
                count(outcome);
                return QueryAction::Reply(bytes);
            }
            Decision::Forward(client_query, resolvers) => (*client_query, resolvers),
        };
        debug!(%client, query = %client_query.query, "forwarding a DNS query");
        if self.loop_detection.is_own_probe(&client_query.query.name) {
            count(QueryOutcome::Loop);
            return QueryAction::Reply(client_query.failed(ResponseCode::NXDomain));
        }
        let Some(permits) = self.acquire_forward_permits(client) else {
            count(QueryOutcome::Busy);
            return QueryAction::Reply(client_query.failed(ResponseCode::ServFail));
        };
        QueryAction::Forward(Box::new(Forward {
            resolvers: self.loop_detection.without_loops(resolvers),
            client_query,
            _permits: permits,
        }))
    }

    fn acquire_forward_permits(
        &self,
        client: SocketAddr,
    ) -> Option<(OwnedSemaphorePermit, SourcePermit)> {
        let free = self.forwards.available_permits();
        let source_permit = self.limiter.forward(client.ip(), free)?;
        let permit = self.forwards.clone().try_acquire_owned().ok()?;
        Some((permit, source_permit))
    }

    /// Returns the answer of another resolver, or SERVFAIL when the budget is exhausted.
    ///
    /// Cancel-safe: dropping the future stops all work.
    pub(super) async fn forward(&self, forward: Forward) -> Vec<u8> {
        let Forward {
            client_query,
            resolvers,
            ..
        } = forward;
        let began = Instant::now();
        let (question, transport) = (client_query.forwarded(), client_query.transport());
        let budget = self.limits.forward_budget;
        let Some(answer) = upstream::resolve(&resolvers, &question, transport, budget).await else {
            self.metrics.query(transport, QueryOutcome::UpstreamFailed);
            return client_query.failed(ResponseCode::ServFail);
        };
        self.metrics.forwarded(began.elapsed());
        self.metrics.query(transport, QueryOutcome::Forwarded);
        client_query.relayed(answer)
    }

    /// Counts a connection. Returns `None` if the client has too many.
    pub(super) fn admit_connection(&self, client: SocketAddr) -> Option<SourcePermit> {
        let connection_permit = self.limiter.admit_connection(client.ip());
        if connection_permit.is_none() {
            self.metrics.query(Transport::Tcp, QueryOutcome::Limited);
        }
        connection_permit
    }
}

tunnel_process::metrics! {
    struct Families {
        queries: Family<QueryLabels, Counter> = "queries",
            "DNS queries by outcome: limited by limits.dnsPerSource, busy by limits.dnsForwards, \
             upstream_failed by limits.dnsForwardBudget",
            with_series(query_labels());
        forward_seconds: Histogram = "forward_duration_seconds",
            "Time until another resolver answered", Histogram::new(FORWARD_SECONDS);
        connections_waited: Counter = "connections_waited",
            "TCP connections that waited because limits.dnsConnections was reached";
    }
}

tunnel_process::label_sets! {
    QueryLabels { transport: Transport, outcome: QueryOutcome }
}

/// Metrics of the embedded DNS server. Clones share them.
#[derive(Debug, Clone)]
pub struct DnsMetrics(Families);

impl DnsMetrics {
    /// Registers the metrics under `tunnel_server_dns_`. The number of records is read at scrape
    /// time.
    pub fn new(root: &mut Registry, records: Records) -> Self {
        let registry = root.sub_registry_with_prefix("tunnel_server_dns");
        let families = Families::register(registry);
        registry.register_collector(Box::new(RecordsGauge(records)));
        Self(families)
    }

    pub fn query(&self, transport: Transport, outcome: QueryOutcome) {
        let labels = QueryLabels { transport, outcome };
        count(&self.0.queries, &labels);
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

/// Returns the labels of every outcome over both transports.
fn query_labels() -> impl Iterator<Item = QueryLabels> {
    let transports = Transport::ALL.iter();
    transports.flat_map(|&transport| {
        let outcomes = QueryOutcome::ALL.iter();
        outcomes.map(move |&outcome| QueryLabels { transport, outcome })
    })
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
