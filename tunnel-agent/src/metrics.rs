//! Metrics of the agent. Labels are enums, never text from a peer.

use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::registry::Registry;
pub(crate) use tunnel_proto::process::metrics::GaugeGuard;
use tunnel_proto::process::metrics::StaticLabel;
use tunnel_proto::process::panics::PanicCollector;
use tunnel_proto::process::telemetry::DroppedLines;
use tunnel_proto::transport::{ByteCount, TransportKind};

use crate::config::Limit;

mod credentials;
mod labels;
mod limits;
mod sessions;
mod streams;

use credentials::CredentialMetrics;
use labels::{
    ConnectLabels, DialLabels, Direction, DirectionLabels, LimitLabels, RenewalLabels,
    StreamLabels, TransportLabels,
};
pub(crate) use labels::{ConnectResult, DialResult, StreamEnd};
use limits::LimitMetrics;
use sessions::SessionMetrics;
use streams::StreamMetrics;

/// The agent's metrics. Clones share their values.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics {
    sessions: SessionMetrics,
    streams: StreamMetrics,
    credentials: CredentialMetrics,
    limits: LimitMetrics,
}

impl Metrics {
    /// Creates the metrics and the registry that exposes them.
    pub(crate) fn register() -> (Self, Registry) {
        let mut registry = Registry::with_prefix("tunnel_agent");
        let metrics = Self {
            sessions: SessionMetrics::register(&mut registry),
            streams: StreamMetrics::register(&mut registry),
            credentials: CredentialMetrics::register(&mut registry),
            limits: LimitMetrics::register(&mut registry),
        };
        registry.register_collector(Box::new(PanicCollector));
        registry.register_collector(Box::new(DroppedLines));
        (metrics, registry)
    }

    /// Counts that a limit was reached.
    pub(crate) fn limit(&self, limit: Limit) {
        let reached = &self.limits.reached;
        reached.get_or_create(&LimitLabels { limit }).inc();
    }

    /// Counts a ready session until the guard is dropped.
    pub(crate) fn session(&self, transport: TransportKind) -> GaugeGuard {
        let transport = StaticLabel(transport.label());
        let sessions = &self.sessions.connected;
        GaugeGuard::new(&sessions.get_or_create(&TransportLabels { transport }))
    }

    /// Counts a suspect session until the guard is dropped.
    pub(crate) fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(&self.sessions.suspect)
    }

    /// Counts an upgrade from h2 to QUIC.
    pub(crate) fn promotion(&self) {
        self.sessions.promotions.inc();
    }

    /// Counts a fallback from QUIC to h2.
    pub(crate) fn fallback(&self) {
        self.sessions.fallbacks.inc();
    }

    /// Counts an open stream until the guard is dropped.
    pub(crate) fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.streams.open)
    }

    /// Counts a stream that ended.
    pub(crate) fn stream_ended(&self, result: StreamEnd) {
        let ended = &self.streams.ended;
        let result = StaticLabel(result.label());
        ended.get_or_create(&StreamLabels { result }).inc();
    }

    /// Returns the counters of the bytes from targets and to targets, which the caller advances
    /// while bytes move.
    pub(crate) fn bytes(&self) -> ByteCount {
        let bytes = &self.streams.bytes;
        let counter = |direction| bytes.get_or_create_owned(&DirectionLabels { direction });
        ByteCount::new(counter(Direction::FromTarget), counter(Direction::ToTarget))
    }

    /// Counts an attempt to connect to an address of a target.
    pub(crate) fn dialed(&self, result: DialResult) {
        let dials = &self.streams.dials;
        dials.get_or_create(&DialLabels { result }).inc();
    }

    /// Counts a dialed session.
    pub(crate) fn connect_attempt(&self, transport: TransportKind, result: ConnectResult) {
        let transport = StaticLabel(transport.label());
        let attempts = &self.sessions.connect_attempts;
        attempts
            .get_or_create(&ConnectLabels { transport, result })
            .inc();
    }

    /// Returns the number of dialed sessions with a result.
    #[cfg(test)]
    pub(crate) fn connect_attempts(&self, transport: TransportKind, result: ConnectResult) -> u64 {
        let transport = StaticLabel(transport.label());
        let attempts = &self.sessions.connect_attempts;
        attempts
            .get_or_create(&ConnectLabels { transport, result })
            .get()
    }

    /// Returns how often a limit was reached.
    #[cfg(test)]
    pub(crate) fn reached(&self, limit: Limit) -> u64 {
        let reached = &self.limits.reached;
        reached.get_or_create(&LimitLabels { limit }).get()
    }

    /// Returns the number of fallbacks to h2 and of upgrades to QUIC.
    #[cfg(test)]
    pub(crate) fn transport_changes(&self) -> (u64, u64) {
        (
            self.sessions.fallbacks.get(),
            self.sessions.promotions.get(),
        )
    }

    /// Counts a renewal: `issued`, or the reason of the failure.
    pub(crate) fn renewal(&self, result: &'static str) {
        let result = StaticLabel(result);
        let renewals = &self.credentials.renewals;
        renewals.get_or_create(&RenewalLabels { result }).inc();
    }

    /// Records whether the certificate in use is missing on disk.
    pub(crate) fn unsaved(&self, unsaved: bool) {
        self.credentials.unsaved.set(unsaved.into());
    }

    /// Records whether the operator's files are unusable.
    pub(crate) fn files_unusable(&self, unusable: bool) {
        self.credentials.files_unusable.set(unusable.into());
    }

    /// Records the expiry of the agent's certificate.
    pub(crate) fn certificate(&self, not_after: SystemTime) {
        let seconds = not_after
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
        self.credentials.not_after.set(seconds);
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::code::RefusalCode;

    use super::*;

    #[test]
    fn names_and_labels_are_as_documented() {
        let (metrics, registry) = Metrics::register();
        let session = metrics.session(TransportKind::Quic);
        metrics.stream_ended(StreamEnd::Refused(RefusalCode::Policy));
        metrics.bytes().add_sent(5);
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
