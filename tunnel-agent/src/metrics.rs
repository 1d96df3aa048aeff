//! Metrics of the agent. Labels are enums, never text from a peer.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tunnel_proto::process::metrics::StaticLabel;
use tunnel_proto::process::panics::PanicCollector;
use tunnel_proto::process::telemetry::DroppedLines;
use tunnel_proto::transport::TransportKind;
use tunnel_proto::wire::code::RefusalCode;

use crate::config::Limit;

/// The agent's metrics. Clones share their values.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics {
    sessions: Family<TransportLabels, Gauge>,
    suspects: Gauge,
    promotions: Counter,
    fallbacks: Counter,
    streams_open: Gauge,
    streams: Family<StreamLabels, Counter>,
    stream_bytes: Family<DirectionLabels, Counter>,
    dials: Family<DialLabels, Counter>,
    connect_attempts: Family<ConnectLabels, Counter>,
    certificate_not_after: Gauge,
    certificate_unsaved: Gauge,
    certificate_files_unusable: Gauge,
    renewals: Family<RenewalLabels, Counter>,
    limits: Family<LimitLabels, Counter>,
}

impl Metrics {
    /// Creates the metrics and the registry that exposes them.
    pub(crate) fn register() -> (Self, Registry) {
        let metrics = Self::default();
        let mut registry = Registry::with_prefix("tunnel_agent");
        registry.register(
            "session_connected",
            "Sessions to servers that are ready, by transport",
            metrics.sessions.clone(),
        );
        registry.register(
            "sessions_suspect",
            "Ready sessions whose server is silent, or reports that this agent is silent",
            metrics.suspects.clone(),
        );
        registry.register(
            "promotions",
            "Number of upgrades from h2 to QUIC",
            metrics.promotions.clone(),
        );
        registry.register(
            "fallbacks",
            "Number of fallbacks from QUIC to h2",
            metrics.fallbacks.clone(),
        );
        registry.register(
            "streams_open",
            "Streams that are being served",
            metrics.streams_open.clone(),
        );
        registry.register(
            "streams",
            "Streams that ended, by result",
            metrics.streams.clone(),
        );
        registry.register(
            "stream_bytes",
            "Bytes relayed to and from targets",
            metrics.stream_bytes.clone(),
        );
        registry.register(
            "dials",
            "Attempts to connect to an address of a target, by result",
            metrics.dials.clone(),
        );
        registry.register(
            "connect_attempts",
            "Session dials, by transport and result",
            metrics.connect_attempts.clone(),
        );
        registry.register(
            "certificate_not_after_seconds",
            "When the agent's certificate ends, in seconds since 1970",
            metrics.certificate_not_after.clone(),
        );
        registry.register(
            "certificate_unsaved",
            "1 while the certificate in use could not be written to the data directory",
            metrics.certificate_unsaved.clone(),
        );
        registry.register(
            "certificate_files_unusable",
            "1 while --cert-file, --key-file or --ca-file cannot be used and the last good ones stay in use",
            metrics.certificate_files_unusable.clone(),
        );
        registry.register(
            "renewals",
            "Certificate renewals requested on sessions, by result",
            metrics.renewals.clone(),
        );
        registry.register(
            "limits_reached",
            "Number of times a configured limit was reached, by limit",
            metrics.limits.clone(),
        );
        for &limit in Limit::ALL {
            // Exposed from the start, so that a first increase is visible.
            drop(metrics.limits.get_or_create(&LimitLabels { limit }));
        }
        registry.register_collector(Box::new(PanicCollector));
        registry.register_collector(Box::new(DroppedLines));
        (metrics, registry)
    }

    /// Counts that a limit was reached.
    pub(crate) fn limit(&self, limit: Limit) {
        self.limits.get_or_create(&LimitLabels { limit }).inc();
    }

    /// Counts a ready session until the guard is dropped.
    pub(crate) fn session(&self, transport: TransportKind) -> GaugeGuard {
        GaugeGuard::new(&self.sessions.get_or_create_owned(&TransportLabels {
            transport: TransportLabel(transport),
        }))
    }

    /// Counts a suspect session until the guard is dropped.
    pub(crate) fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(&self.suspects)
    }

    /// Counts an upgrade from h2 to QUIC.
    pub(crate) fn promotion(&self) {
        self.promotions.inc();
    }

    /// Counts a fallback from QUIC to h2.
    pub(crate) fn fallback(&self) {
        self.fallbacks.inc();
    }

    /// Counts an open stream until the guard is dropped.
    pub(crate) fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.streams_open)
    }

    /// Counts a stream that ended.
    pub(crate) fn stream_ended(&self, result: StreamEnd) {
        self.streams.get_or_create(&StreamLabels { result }).inc();
    }

    /// Returns the counter of a direction, which the caller advances while bytes move.
    pub(crate) fn bytes(&self, direction: Direction) -> Counter {
        self.stream_bytes
            .get_or_create_owned(&DirectionLabels { direction })
    }

    /// Counts an attempt to connect to an address of a target.
    pub(crate) fn dialed(&self, result: DialResult) {
        self.dials.get_or_create(&DialLabels { result }).inc();
    }

    /// Counts a dialed session.
    pub(crate) fn connect_attempt(&self, transport: TransportKind, result: ConnectResult) {
        let transport = TransportLabel(transport);
        self.connect_attempts
            .get_or_create(&ConnectLabels { transport, result })
            .inc();
    }

    /// Returns the number of dialed sessions with a result.
    #[cfg(test)]
    pub(crate) fn connect_attempts(&self, transport: TransportKind, result: ConnectResult) -> u64 {
        let transport = TransportLabel(transport);
        self.connect_attempts
            .get_or_create(&ConnectLabels { transport, result })
            .get()
    }

    /// Returns how often a limit was reached.
    #[cfg(test)]
    pub(crate) fn reached(&self, limit: Limit) -> u64 {
        self.limits.get_or_create(&LimitLabels { limit }).get()
    }

    /// Returns the number of fallbacks to h2 and of upgrades to QUIC.
    #[cfg(test)]
    pub(crate) fn transport_changes(&self) -> (u64, u64) {
        (self.fallbacks.get(), self.promotions.get())
    }

    /// Counts a renewal: `issued`, or the reason of the failure.
    pub(crate) fn renewal(&self, result: &'static str) {
        let result = StaticLabel(result);
        self.renewals.get_or_create(&RenewalLabels { result }).inc();
    }

    /// Records whether the certificate in use is missing on disk.
    pub(crate) fn unsaved(&self, unsaved: bool) {
        self.certificate_unsaved.set(unsaved.into());
    }

    /// Records whether the operator's files are unusable.
    pub(crate) fn files_unusable(&self, unusable: bool) {
        self.certificate_files_unusable.set(unusable.into());
    }

    /// Records the expiry of the agent's certificate.
    pub(crate) fn certificate(&self, not_after: SystemTime) {
        let seconds = not_after
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        self.certificate_not_after
            .set(i64::try_from(seconds).unwrap_or(i64::MAX));
    }
}

/// Guard that increments a gauge and decrements it on drop.
#[derive(Debug)]
pub(crate) struct GaugeGuard(Gauge);

impl GaugeGuard {
    fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// The end of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum StreamEnd {
    /// Both sides ended cleanly.
    Ok,
    /// One side stopped reading before all data was delivered.
    ReaderClosed,
    /// The tunnel's side was cut.
    CutByPeer,
    /// The target's side was cut.
    CutByTarget,
    /// The header did not arrive, or violated the protocol.
    NoHeader,
    /// The stream was refused with a reply.
    Refused(RefusalCode),
}

impl StreamEnd {
    /// Returns the label for logs and metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ReaderClosed => "reader_left",
            Self::CutByPeer => "cut_by_peer",
            Self::CutByTarget => "cut_by_target",
            Self::NoHeader => "no_header",
            Self::Refused(code) => code.label(),
        }
    }
}

/// The direction of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    /// From the tunnel to a target.
    ToTarget,
    /// From a target to the tunnel.
    FromTarget,
}

impl Direction {
    fn label(self) -> &'static str {
        match self {
            Self::ToTarget => "to_target",
            Self::FromTarget => "from_target",
        }
    }
}

/// The result of an attempt to connect to an address of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DialResult {
    Connected,
    /// The target refused or was unreachable.
    Refused,
    /// The target did not answer in time.
    Timeout,
    /// This host could not try.
    Failed,
}

impl DialResult {
    fn label(self) -> &'static str {
        match self {
            Self::Connected => "connected",
            Self::Refused => "refused",
            Self::Timeout => "timeout",
            Self::Failed => "failed",
        }
    }
}

/// The result of a dialed session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ConnectResult {
    /// The session became ready.
    Ready,
    /// No answer arrived in time.
    NoAnswer,
    /// There was no connection or no handshake.
    Failed,
    /// The server refused the session.
    NotAdmitted,
    /// Another session was ready first.
    Abandoned,
}

impl ConnectResult {
    fn label(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::NoAnswer => "no_answer",
            Self::Failed => "failed",
            Self::NotAdmitted => "not_admitted",
            Self::Abandoned => "abandoned",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TransportLabel(TransportKind);

impl TransportLabel {
    fn label(self) -> &'static str {
        self.0.label()
    }
}

/// Implements label values for enums by their labels.
macro_rules! label_values {
    ($($name:ty),+) => { $(
        impl EncodeLabelValue for $name {
            fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
                self.label().encode(encoder)
            }
        }
    )+ };
}

label_values!(
    StreamEnd,
    Direction,
    DialResult,
    ConnectResult,
    TransportLabel
);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RenewalLabels {
    result: StaticLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabels {
    limit: Limit,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransportLabels {
    transport: TransportLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StreamLabels {
    result: StreamEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabels {
    direction: Direction,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DialLabels {
    result: DialResult,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectLabels {
    transport: TransportLabel,
    result: ConnectResult,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_as_documented() {
        let (metrics, registry) = Metrics::register();
        let session = metrics.session(TransportKind::Quic);
        metrics.stream_ended(StreamEnd::Refused(RefusalCode::Policy));
        metrics.bytes(Direction::ToTarget).inc_by(5);
        metrics.dialed(DialResult::Connected);
        metrics.connect_attempt(TransportKind::Quic, ConnectResult::NoAnswer);
        metrics.connect_attempt(TransportKind::H2, ConnectResult::Ready);
        metrics.fallback();
        metrics.promotion();
        let suspect = metrics.suspect();
        metrics.certificate(UNIX_EPOCH + std::time::Duration::from_secs(9));
        drop(metrics.stream());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "tunnel_agent_session_connected{transport=\"quic\"} 1",
            "tunnel_agent_streams_open 0",
            "tunnel_agent_streams_total{result=\"refused_by_policy\"} 1",
            "tunnel_agent_stream_bytes_total{direction=\"to_target\"} 5",
            "tunnel_agent_dials_total{result=\"connected\"} 1",
            "tunnel_agent_connect_attempts_total{transport=\"quic\",result=\"no_answer\"} 1",
            "tunnel_agent_connect_attempts_total{transport=\"h2\",result=\"ready\"} 1",
            "tunnel_agent_fallbacks_total 1",
            "tunnel_agent_promotions_total 1",
            "tunnel_agent_sessions_suspect 1",
            "tunnel_agent_certificate_not_after_seconds 9",
            "tunnel_agent_log_lines_dropped_total{kind=\"access\"} 0",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} not in\n{text}");
        }
        drop((session, suspect));
    }
}
