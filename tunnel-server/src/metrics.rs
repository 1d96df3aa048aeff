//! What the server counts. Labels are enums; nothing of a caller's or peer's text becomes one.

pub(crate) mod limit;

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabelSet, EncodeLabelValue, EncodeMetric, LabelValueEncoder,
};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tunnel_proto::process::panics::Panics;
use tunnel_proto::process::reload::Reload;
use tunnel_proto::process::telemetry::DroppedLines;
use tunnel_proto::transport::{BufferPool, TransportKind};
use tunnel_proto::wire::code::CloseCode;

use crate::config::Limit;
use crate::ingress::error::Outcome;

/// Upper bounds for opening a stream, seconds: from one local round trip to the open timeout.
const OPEN_SECONDS: [f64; 10] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];

/// The result of a handshake that took too long.
pub(crate) const TIMEOUT: &str = "timeout";

/// All metrics of the server; clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    agents: Family<TransportLabel, Gauge>,
    sessions_suspect: Gauge,
    session_ends: Family<CodeLabel, Counter>,
    streams_open: Gauge,
    dialled_open: Gauge,
    streams: Family<ResultLabel, Counter>,
    bytes: Family<DirectionLabel, Counter>,
    open_seconds: Histogram,
    certificate_not_after: Gauge<f64, AtomicU64>,
    address_conflicts: Gauge,
    known_nodes: Gauge,
    handshakes: Family<HandshakeLabel, Counter>,
    enrollments: Family<HandshakeLabel, Counter>,
    evicted_callers: Counter,
    refused_callers: Counter,
    limits: Family<LimitLabel, Counter>,
    renewals: Family<HandshakeLabel, Counter>,
    passwords: Family<HandshakeLabel, Counter>,
    reloads: Family<ReloadLabel, Counter>,
    reload_failed: Family<FilesLabel, Gauge>,
    credential_ends: Family<FilesLabel, Gauge<f64, AtomicU64>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabel {
    transport: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CodeLabel {
    code: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabel {
    direction: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HandshakeLabel {
    result: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReloadLabel {
    files: Word,
    result: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FilesLabel {
    files: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabel {
    limit: Word,
}

/// A word of the program's own text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Word(pub(crate) &'static str);

impl From<Limit> for LimitLabel {
    fn from(limit: Limit) -> Self {
        Self {
            limit: Word(limit.name()),
        }
    }
}

impl EncodeLabelValue for Word {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.0.encode(encoder)
    }
}

impl Metrics {
    /// Registers all metrics under `tunnel_server_`; the pool's are read when they are asked for.
    #[must_use]
    pub fn new(root: &mut Registry, pool: Arc<BufferPool>) -> Self {
        let metrics = Self {
            agents: Family::default(),
            sessions_suspect: Gauge::default(),
            session_ends: Family::default(),
            streams_open: Gauge::default(),
            dialled_open: Gauge::default(),
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
            passwords: Family::default(),
            reloads: Family::default(),
            reload_failed: Family::default(),
            credential_ends: Family::default(),
        };
        let registry = root.sub_registry_with_prefix("tunnel_server");
        registry.register("agents", "Connected agent sessions", metrics.agents.clone());
        for transport in [TransportKind::Quic, TransportKind::H2] {
            metrics.agents_of(transport.label()).set(0);
        }
        registry.register(
            "sessions_suspect",
            "Sessions of agents that may be gone; they get no new streams",
            metrics.sessions_suspect.clone(),
        );
        registry.register(
            "session_ends",
            "Ended sessions of agents by the code of their close",
            metrics.session_ends.clone(),
        );
        registry.register_collector(Box::new(PoolGauges(pool)));
        registry.register_collector(Box::new(Panics));
        registry.register_collector(Box::new(DroppedLines));
        registry.register(
            "streams_open",
            "Streams open to agents",
            metrics.streams_open.clone(),
        );
        registry.register(
            "connect_direct_open",
            "Connections that the server dialled itself for callers of the CONNECT doors",
            metrics.dialled_open.clone(),
        );
        registry.register(
            "streams",
            "Requests and streams of callers by how they ended",
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
            "Unix time at which the server's own certificate ends",
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
            "Enrolment requests by result",
            metrics.enrollments.clone(),
        );
        registry.register(
            "callers_evicted",
            "Idle connections of callers that were closed for newer ones (limits.callersTotal, limits.callersPerSource)",
            metrics.evicted_callers.clone(),
        );
        registry.register(
            "callers_refused",
            "Connections of callers that were refused, since no idle one could be closed for them (limits.callersTotal, limits.callersPerSource)",
            metrics.refused_callers.clone(),
        );
        registry.register(
            "limits_reached",
            "Times that an entry of limits: made the server wait no longer, refuse, push out or doubt somebody",
            metrics.limits.clone(),
        );
        for limit in Limit::ALL {
            // Shown from the start, so that a first increase is seen.
            drop(metrics.limits.get_or_create(&limit.into()));
        }
        registry.register(
            "renewals",
            "Certificates that agents asked for on live sessions, by result",
            metrics.renewals.clone(),
        );
        registry.register(
            "connect_passwords",
            "Requests at the CONNECT listener by what became of their password; waiting ones were refused unread",
            metrics.passwords.clone(),
        );
        for result in ["right", "wrong", "missing", "waiting"] {
            let label = HandshakeLabel {
                result: Word(result),
            };
            drop(metrics.passwords.get_or_create(&label));
        }
        registry.register(
            "credential_reloads",
            "Times that certificate files were found changed or unusable",
            metrics.reloads.clone(),
        );
        registry.register(
            "credential_files_unusable",
            "1 while certificate files cannot be used and the last good ones stay in use",
            metrics.reload_failed.clone(),
        );
        registry.register(
            "credential_not_after_seconds",
            "Unix time at which a certificate ends that the server was given beside its own",
            metrics.credential_ends.clone(),
        );
        metrics
    }

    /// Counts a connected agent until the guard goes.
    #[must_use]
    pub fn agent(&self, transport: &'static str) -> GaugeGuard {
        GaugeGuard::new(self.agents_of(transport))
    }

    fn agents_of(&self, transport: &'static str) -> Gauge {
        let label = TransportLabel {
            transport: Word(transport),
        };
        self.agents.get_or_create(&label).clone()
    }

    /// Counts a suspect session until the guard goes.
    #[must_use]
    pub fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(self.sessions_suspect.clone())
    }

    /// Counts the end of an admitted session.
    pub fn session_ended(&self, code: CloseCode) {
        let label = CodeLabel {
            code: Word(code.label()),
        };
        self.session_ends.get_or_create(&label).inc();
    }

    /// Counts an open stream until the guard goes.
    #[must_use]
    pub fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(self.streams_open.clone())
    }

    /// Counts a connection of the server's own until the guard goes.
    #[must_use]
    pub fn dialled(&self) -> GaugeGuard {
        GaugeGuard::new(self.dialled_open.clone())
    }

    /// Counts an ended stream or request with the bytes from and to the agent.
    pub fn ended(&self, outcome: Outcome, received: u64, sent: u64) {
        self.streams
            .get_or_create(&ResultLabel { result: outcome })
            .inc();
        self.bytes
            .get_or_create(&DirectionLabel {
                direction: Word("in"),
            })
            .inc_by(received);
        self.bytes
            .get_or_create(&DirectionLabel {
                direction: Word("out"),
            })
            .inc_by(sent);
    }

    /// Notes how long opening a stream took.
    pub fn opened(&self, elapsed: Duration) {
        self.open_seconds.observe(elapsed.as_secs_f64());
    }

    /// Counts that a limit was reached.
    pub fn limit(&self, limit: Limit) {
        self.limits.get_or_create(&limit.into()).inc();
    }

    /// Counts the end of a handshake or admission: `ok` or the name of the failure.
    pub fn handshake(&self, result: &'static str) {
        self.count_timeout(result);
        self.handshakes
            .get_or_create(&HandshakeLabel {
                result: Word(result),
            })
            .inc();
    }

    /// Whatever timed out on the agents' port did so by one limit.
    fn count_timeout(&self, result: &'static str) {
        if result == TIMEOUT || result == CloseCode::HandshakeTimeout.label() {
            self.limit(Limit::HandshakeTimeout);
        }
    }

    /// Counts a caller whose idle connection was closed for a newer one.
    pub fn evicted_caller(&self) {
        self.evicted_callers.inc();
    }

    /// Counts a caller whose connection was refused for lack of a place.
    pub fn refused_caller(&self) {
        self.refused_callers.inc();
    }

    /// Counts a renewal: `issued` or the name of the refusal.
    pub fn renewal(&self, result: &'static str) {
        self.renewals
            .get_or_create(&HandshakeLabel {
                result: Word(result),
            })
            .inc();
    }

    /// Counts a request with or without a password: `right`, `wrong`, `missing` or `waiting`.
    pub fn password(&self, result: &'static str) {
        self.passwords
            .get_or_create(&HandshakeLabel {
                result: Word(result),
            })
            .inc();
    }

    /// Notes what came of reading certificate files again.
    pub fn reloaded(&self, files: &'static str, reload: Reload) {
        let result = match reload {
            Reload::Changed => "changed",
            Reload::Failed => "failed",
            Reload::Recovered => "recovered",
        };
        let failed = reload == Reload::Failed;
        let files = Word(files);
        let result = Word(result);
        self.reloads
            .get_or_create(&ReloadLabel { files, result })
            .inc();
        self.reload_failed
            .get_or_create(&FilesLabel { files })
            .set(failed.into());
    }

    /// Counts an enrolment: `ok` or the name of the failure.
    pub fn enrollment(&self, result: &'static str) {
        self.count_timeout(result);
        self.enrollments
            .get_or_create(&HandshakeLabel {
                result: Word(result),
            })
            .inc();
    }

    /// Notes the size of the route table.
    pub fn routes(&self, nodes: usize, conflicts: usize) {
        self.known_nodes
            .set(i64::try_from(nodes).unwrap_or(i64::MAX));
        self.address_conflicts
            .set(i64::try_from(conflicts).unwrap_or(i64::MAX));
    }

    /// Notes when the server's own certificate ends.
    pub fn certificate(&self, not_after: std::time::SystemTime) {
        let since_epoch = not_after
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        self.certificate_not_after.set(since_epoch.as_secs_f64());
    }

    /// Notes when a certificate ends that the server was given beside its own.
    pub fn credential(&self, files: &'static str, not_after: std::time::SystemTime) {
        let since_epoch = not_after
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        let label = FilesLabel { files: Word(files) };
        self.credential_ends
            .get_or_create(&label)
            .set(since_epoch.as_secs_f64());
    }
}

/// Holds a gauge one higher.
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

/// What stalled readers hold, and may hold.
#[derive(Debug)]
struct PoolGauges(Arc<BufferPool>);

impl Collector for PoolGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let mut put = |name, help, bytes: u64| {
            let gauge = ConstGauge::new(i64::try_from(bytes).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)
        };
        put(
            "buffer_bytes",
            "Bytes that stalled readers hold, as charged to limits.bufferPool",
            self.0.charged(),
        )?;
        put("buffer_limit_bytes", "limits.bufferPool", self.0.limit())
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
