//! Metrics of the server. Labels are enums and never contain text of callers or peers.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tunnel_proto::process::file_watch::ReloadOutcome;
use tunnel_proto::process::metrics::StaticLabel;
use tunnel_proto::process::panics::PanicCollector;
use tunnel_proto::process::telemetry::DroppedLines;
use tunnel_proto::transport::{BufferPool, TransportKind};
use tunnel_proto::wire::code::CloseCode;

use crate::config::Limit;
use crate::ingress::error::Outcome;

/// Upper bounds of the buckets for opening a stream, in seconds: from one local round trip to the
/// open timeout.
const OPEN_SECONDS: [f64; 10] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];

/// The result label of a handshake that timed out.
pub(crate) const TIMEOUT: &str = "timeout";

/// All metrics of the server. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    agents: Family<TransportLabel, Gauge>,
    sessions_suspect: Gauge,
    session_ends: Family<CodeLabel, Counter>,
    streams_open: Gauge,
    direct_open: Gauge,
    streams: Family<OutcomeLabel, Counter>,
    bytes: Family<DirectionLabel, Counter>,
    open_seconds: Histogram,
    certificate_not_after: Gauge<f64, AtomicU64>,
    address_conflicts: Gauge,
    known_nodes: Gauge,
    handshakes: Family<ResultLabel, Counter>,
    enrollments: Family<ResultLabel, Counter>,
    evicted_callers: Counter,
    refused_callers: Counter,
    limits: Family<LimitLabel, Counter>,
    renewals: Family<ResultLabel, Counter>,
    basic_auth: Family<ResultLabel, Counter>,
    reloads: Family<ReloadLabel, Counter>,
    reload_failed: Family<FilesLabel, Gauge>,
    credential_ends: Family<FilesLabel, Gauge<f64, AtomicU64>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabel {
    transport: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    result: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadLabel {
    files: StaticLabel,
    result: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FilesLabel {
    files: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabel {
    limit: Limit,
}

impl Metrics {
    /// Registers all metrics under `tunnel_server_`. The buffer pool's gauges are read at each
    /// scrape.
    #[must_use]
    pub fn new(root: &mut Registry, pool: Arc<BufferPool>) -> Self {
        let metrics = Self {
            agents: Family::default(),
            sessions_suspect: Gauge::default(),
            session_ends: Family::default(),
            streams_open: Gauge::default(),
            direct_open: Gauge::default(),
            streams: Family::default(),
            bytes: Family::default(),
            open_seconds: Histogram::new(OPEN_SECONDS),
            certificate_not_after: Gauge::default(),
            address_conflicts: Gauge::default(),
            known_nodes: Gauge::default(),
            handshakes: Family::default(),
            enrollments: Family::default(),
            evicted_callers: Counter::default(),
            refused_callers: Counter::default(),
            limits: Family::default(),
            renewals: Family::default(),
            basic_auth: Family::default(),
            reloads: Family::default(),
            reload_failed: Family::default(),
            credential_ends: Family::default(),
        };
        let registry = root.sub_registry_with_prefix("tunnel_server");
        registry.register("agents", "Connected agent sessions", metrics.agents.clone());
        for transport in [TransportKind::Quic, TransportKind::H2] {
            metrics.agent_gauge(transport.label()).set(0);
        }
        registry.register(
            "sessions_suspect",
            "Agent sessions that are suspect; suspect sessions get no new streams",
            metrics.sessions_suspect.clone(),
        );
        registry.register(
            "session_ends",
            "Closed agent sessions by close code",
            metrics.session_ends.clone(),
        );
        registry.register_collector(Box::new(PoolGauges(pool)));
        registry.register_collector(Box::new(PanicCollector));
        registry.register_collector(Box::new(DroppedLines));
        registry.register(
            "streams_open",
            "Streams open to agents",
            metrics.streams_open.clone(),
        );
        registry.register(
            "connect_direct_open",
            "Open connections that the server dialed directly for callers of the CONNECT listeners",
            metrics.direct_open.clone(),
        );
        registry.register(
            "streams",
            "Finished requests and streams of callers by result",
            metrics.streams.clone(),
        );
        registry.register(
            "stream_bytes",
            "Payload bytes of ended streams; in is from agents, out is to agents",
            metrics.bytes.clone(),
        );
        registry.register(
            "open_duration_seconds",
            "Time to open a stream at the server's end",
            metrics.open_seconds.clone(),
        );
        registry.register(
            "certificate_not_after_seconds",
            "Unix time at which the server's own certificate expires",
            metrics.certificate_not_after.clone(),
        );
        registry.register(
            "address_conflicts",
            "Addresses shared by several nodes",
            metrics.address_conflicts.clone(),
        );
        registry.register(
            "known_nodes",
            "Nodes that may be addressed",
            metrics.known_nodes.clone(),
        );
        registry.register(
            "handshakes",
            "Handshakes and admissions of agents by result",
            metrics.handshakes.clone(),
        );
        registry.register(
            "enrollments",
            "Enrollment requests by result",
            metrics.enrollments.clone(),
        );
        registry.register(
            "callers_evicted",
            "Idle caller connections that were evicted in favor of newer ones (limits.callersTotal, limits.callersPerSource)",
            metrics.evicted_callers.clone(),
        );
        registry.register(
            "callers_refused",
            "Caller connections that were refused because no idle connection could be evicted (limits.callersTotal, limits.callersPerSource)",
            metrics.refused_callers.clone(),
        );
        registry.register(
            "limits_reached",
            "Number of times a configured limit was reached, by limit",
            metrics.limits.clone(),
        );
        for &limit in Limit::ALL {
            // Create every series at start, so that the first increase is visible.
            drop(metrics.limits.get_or_create(&LimitLabel { limit }));
        }
        registry.register(
            "renewals",
            "Certificate renewal requests on live sessions, by result",
            metrics.renewals.clone(),
        );
        registry.register(
            "connect_passwords",
            "Requests at the CONNECT listener by result of the password check; waiting: refused before the check",
            metrics.basic_auth.clone(),
        );
        for result in ["right", "wrong", "missing", "waiting"] {
            let label = ResultLabel {
                result: StaticLabel(result),
            };
            drop(metrics.basic_auth.get_or_create(&label));
        }
        registry.register(
            "credential_reloads",
            "Number of reloads of certificate files, by result",
            metrics.reloads.clone(),
        );
        registry.register(
            "credential_files_unusable",
            "1 while certificate files are unusable and the previous ones stay in use",
            metrics.reload_failed.clone(),
        );
        registry.register(
            "credential_not_after_seconds",
            "Unix time at which a configured certificate expires",
            metrics.credential_ends.clone(),
        );
        metrics
    }

    /// Counts a connected agent until the guard is dropped.
    #[must_use]
    pub fn agent(&self, transport: &'static str) -> GaugeGuard {
        GaugeGuard::new(self.agent_gauge(transport))
    }

    fn agent_gauge(&self, transport: &'static str) -> Gauge {
        let label = TransportLabel {
            transport: StaticLabel(transport),
        };
        self.agents.get_or_create(&label).clone()
    }

    /// Counts a suspect session until the guard is dropped.
    #[must_use]
    pub fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(self.sessions_suspect.clone())
    }

    /// Counts the end of an admitted session.
    pub fn session_ended(&self, code: CloseCode) {
        let label = CodeLabel {
            code: StaticLabel(code.label()),
        };
        self.session_ends.get_or_create(&label).inc();
    }

    /// Counts an open stream until the guard is dropped.
    #[must_use]
    pub fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(self.streams_open.clone())
    }

    /// Counts a connection that the server itself dialed until the guard is dropped.
    #[must_use]
    pub fn dialed(&self) -> GaugeGuard {
        GaugeGuard::new(self.direct_open.clone())
    }

    /// Counts a finished stream or request, and the bytes received from and sent to the agent.
    pub fn ended(&self, outcome: Outcome, received: u64, sent: u64) {
        self.streams
            .get_or_create(&OutcomeLabel { result: outcome })
            .inc();
        self.bytes
            .get_or_create(&DirectionLabel {
                direction: StaticLabel("in"),
            })
            .inc_by(received);
        self.bytes
            .get_or_create(&DirectionLabel {
                direction: StaticLabel("out"),
            })
            .inc_by(sent);
    }

    /// Records the time that opening a stream took.
    pub fn opened(&self, elapsed: Duration) {
        self.open_seconds.observe(elapsed.as_secs_f64());
    }

    /// Counts an event in which a limit was reached.
    pub fn limit(&self, limit: Limit) {
        self.limits.get_or_create(&LimitLabel { limit }).inc();
    }

    /// Counts a finished handshake or admission by result: `ok` or the name of the failure.
    pub fn handshake(&self, result: &'static str) {
        self.count_timeout(result);
        self.handshakes
            .get_or_create(&ResultLabel {
                result: StaticLabel(result),
            })
            .inc();
    }

    /// Counts timeouts on the agents' port. One limit applies to all of them.
    fn count_timeout(&self, result: &'static str) {
        if result == TIMEOUT || result == CloseCode::HandshakeTimeout.label() {
            self.limit(Limit::HandshakeTimeout);
        }
    }

    /// Counts a caller whose idle connection was closed for a newer one.
    pub fn evicted_caller(&self) {
        self.evicted_callers.inc();
    }

    /// Counts a caller whose connection was refused because no permit was available.
    pub fn refused_caller(&self) {
        self.refused_callers.inc();
    }

    /// Counts a renewal by result: `issued` or the name of the refusal.
    pub fn renewal(&self, result: &'static str) {
        self.renewals
            .get_or_create(&ResultLabel {
                result: StaticLabel(result),
            })
            .inc();
    }

    /// Counts a request by the result of its password check: `right`, `wrong`, `missing` or
    /// `waiting`.
    pub fn password(&self, result: &'static str) {
        self.basic_auth
            .get_or_create(&ResultLabel {
                result: StaticLabel(result),
            })
            .inc();
    }

    /// Records the result of reloading certificate files.
    pub fn reloaded(&self, files: &'static str, reload: ReloadOutcome) {
        let result = match reload {
            ReloadOutcome::Changed => "changed",
            ReloadOutcome::Failed => "failed",
            ReloadOutcome::Recovered => "recovered",
        };
        let failed = reload == ReloadOutcome::Failed;
        let files = StaticLabel(files);
        let result = StaticLabel(result);
        self.reloads
            .get_or_create(&ReloadLabel { files, result })
            .inc();
        self.reload_failed
            .get_or_create(&FilesLabel { files })
            .set(failed.into());
    }

    /// Counts an enrollment by result: `ok` or the name of the failure.
    pub fn enrollment(&self, result: &'static str) {
        self.count_timeout(result);
        self.enrollments
            .get_or_create(&ResultLabel {
                result: StaticLabel(result),
            })
            .inc();
    }

    /// Records the size of the route table.
    pub fn routes(&self, nodes: usize, conflicts: usize) {
        self.known_nodes
            .set(i64::try_from(nodes).unwrap_or(i64::MAX));
        self.address_conflicts
            .set(i64::try_from(conflicts).unwrap_or(i64::MAX));
    }

    /// Records the expiry of the server's own certificate.
    pub fn certificate(&self, not_after: std::time::SystemTime) {
        let since_epoch = not_after
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        self.certificate_not_after.set(since_epoch.as_secs_f64());
    }

    /// Records the expiry of another certificate that the server was given.
    pub fn credential(&self, files: &'static str, not_after: std::time::SystemTime) {
        let since_epoch = not_after
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let label = FilesLabel {
            files: StaticLabel(files),
        };
        self.credential_ends
            .get_or_create(&label)
            .set(since_epoch.as_secs_f64());
    }
}

/// A guard that increments a gauge until it is dropped.
#[derive(Debug)]
pub struct GaugeGuard(Gauge);

impl GaugeGuard {
    fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Gauges for the bytes that stalled readers hold and may hold.
#[derive(Debug)]
struct PoolGauges(Arc<BufferPool>);

impl Collector for PoolGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut encode_gauge = |name, help, bytes: u64| {
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)
        };
        encode_gauge(
            "buffer_bytes",
            "Bytes that stalled readers hold, as charged to limits.bufferPool",
            self.0.charged(),
        )?;
        encode_gauge("buffer_limit_bytes", "limits.bufferPool", self.0.limit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_suspects_ends_and_the_pool_are_shown() {
        let mut root = Registry::default();
        let metrics = Metrics::new(&mut root, BufferPool::new(1 << 20));
        let _agent = metrics.agent(TransportKind::H2.label());
        let suspect = metrics.suspect();
        drop(metrics.suspect());
        metrics.session_ended(CloseCode::Dead);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &root).unwrap();
        for line in [
            "tunnel_server_agents{transport=\"h2\"} 1",
            "tunnel_server_agents{transport=\"quic\"} 0",
            "tunnel_server_sessions_suspect 1",
            "tunnel_server_session_ends_total{code=\"dead\"} 1",
            "tunnel_server_buffer_bytes 0",
            "tunnel_server_buffer_limit_bytes 1048576",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}:\n{text}");
        }
        drop(suspect);
    }
}
