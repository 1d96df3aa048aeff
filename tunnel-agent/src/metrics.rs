//! Metrics of the agent. Labels are enums, never text from a peer.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
pub(crate) use tunnel_process::metrics::GaugeGuard;
use tunnel_process::metrics::{
    StaticLabel, count, register_process_metrics, set_gauge, with_series,
};
use tunnel_proto::stream_record::StreamEnd;
use tunnel_proto::transport::{BufferPool, ByteCount, PoolGauges, TransportKind};
use tunnel_proto::wire::code::{EnrollCode, RefusalCode};

use crate::config::Limit;

tunnel_process::metrics! {
    /// The metrics of sessions and of the dials for them, of streams and of the dials to their
    /// targets, of the agent's certificate, and of the configured limits.
    struct Families {
        sessions: Family<StateLabels, Gauge> = "sessions",
            "Servers that the agent holds or wants a session with, by state of the session",
            with_series(SessionState::ALL.iter().map(|&state| StateLabels { state }));
        sessions_connected: Family<TransportLabels, Gauge> = "sessions_connected",
            "Sessions to servers that are ready, by transport",
            with_series(TRANSPORTS.map(|transport| TransportLabels {
                transport: StaticLabel(transport.label()),
            }));
        sessions_suspect: Gauge = "sessions_suspect",
            "Ready sessions whose server is silent, or reports that this agent is silent";
        upgrades: Counter = "upgrades", "Number of upgrades from h2 to QUIC";
        fallbacks: Counter = "fallbacks", "Number of fallbacks from QUIC to h2";
        connect_attempts: Family<ConnectLabels, Counter> = "connect_attempts",
            "Session dials, by transport and result", with_series(connect_labels());

        streams_open: Gauge = "streams_open", "Streams that are being served";
        streams: Family<StreamLabels, Counter> = "streams", "Streams that ended, by result",
            with_series(stream_labels(&STREAM_ENDS));
        stream_bytes: Family<DirectionLabels, Counter> = "stream_bytes",
            "Bytes relayed to and from targets",
            with_series(Direction::ALL.iter().map(|&direction| DirectionLabels { direction }));
        cloud_streams_open: Gauge = "cloud_streams_open",
            "Connections to listeners for targets of the cloud that are being served";
        cloud_streams: Family<StreamLabels, Counter> = "cloud_streams",
            "Connections to listeners for targets of the cloud that ended, by result",
            with_series(stream_labels(&CLOUD_STREAM_ENDS));
        dials: Family<DialLabels, Counter> = "dials",
            "Attempts to connect to an address of a target, by result",
            with_series(DialResult::ALL.iter().map(|&result| DialLabels { result }));

        not_after: Gauge = "certificate_not_after_timestamp_seconds",
            "Unix time at which the agent's certificate expires";
        unsaved: Gauge = "certificate_unsaved",
            "1 while the certificate in use could not be written to the data directory";
        files_unusable: Gauge = "certificate_files_unusable",
            "1 while --cert-file, --key-file or --ca-file cannot be used and the last good ones \
             stay in use";
        renewals: Family<RenewalLabels, Counter> = "renewals",
            "Certificate renewals requested on sessions, by result",
            with_series(renewal_results().map(|result| RenewalLabels {
                result: StaticLabel(result),
            }));

        limits_reached: Family<LimitLabels, Counter> = "limits_reached",
            "Number of times a configured limit was reached, by limit",
            with_series(Limit::ALL.iter().map(|&limit| LimitLabels { limit }));
    }
}

tunnel_process::label_sets! {
    StateLabels { state: SessionState }
    TransportLabels { transport: StaticLabel }
    ConnectLabels { transport: StaticLabel, result: ConnectResult }
    StreamLabels { result: StaticLabel }
    DirectionLabels { direction: Direction }
    DialLabels { result: DialResult }
    RenewalLabels { result: StaticLabel }
    LimitLabels { limit: Limit }
}

/// Returns a registry with the metrics of an agent, for the reference.
#[cfg(feature = "test-util")]
pub fn example_metrics() -> Registry {
    Metrics::register(BufferPool::new(1)).1
}

/// The agent's metrics. Clones share their values.
#[derive(Debug, Clone, Default)]
pub(crate) struct Metrics(Families);

impl Metrics {
    /// Creates the metrics and the registry that exposes them.
    pub(crate) fn register(pool: Arc<BufferPool>) -> (Self, Registry) {
        let mut root = Registry::default();
        let registry = register_process_metrics(&mut root, "tunnel_agent", PoolGauges(pool));
        (Self(Families::register(registry)), root)
    }

    pub(crate) fn limit(&self, limit: Limit) {
        count(&self.0.limits_reached, &LimitLabels { limit });
    }

    /// Sets the number of wanted sessions in a state.
    pub(crate) fn set_sessions(&self, state: SessionState, sessions: usize) {
        let gauge = self.0.sessions.get_or_create(&StateLabels { state });
        set_gauge(&gauge, sessions);
    }

    /// Returns the number of wanted sessions in a state.
    #[cfg(test)]
    pub(crate) fn sessions(&self, state: SessionState) -> i64 {
        self.0.sessions.get_or_create(&StateLabels { state }).get()
    }

    /// Counts a ready session until the guard is dropped.
    pub(crate) fn session(&self, transport: TransportKind) -> GaugeGuard {
        let transport = StaticLabel(transport.label());
        let sessions = &self.0.sessions_connected;
        GaugeGuard::new(&sessions.get_or_create(&TransportLabels { transport }))
    }

    /// Counts a suspect session until the guard is dropped.
    pub(crate) fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.sessions_suspect)
    }

    /// Counts an upgrade from h2 to QUIC.
    pub(crate) fn upgrade(&self) {
        self.0.upgrades.inc();
    }

    pub(crate) fn fallback(&self) {
        self.0.fallbacks.inc();
    }

    /// Counts an open stream until the guard is dropped.
    pub(crate) fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.streams_open)
    }

    pub(crate) fn stream_ended(&self, result: StreamEnd) {
        let result = StaticLabel(result.label());
        count(&self.0.streams, &StreamLabels { result });
    }

    /// Counts an open connection to a target of the cloud until the guard is dropped.
    pub(crate) fn cloud_stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.0.cloud_streams_open)
    }

    pub(crate) fn cloud_stream_ended(&self, result: StreamEnd) {
        let result = StaticLabel(result.label());
        count(&self.0.cloud_streams, &StreamLabels { result });
    }

    /// Returns the number of open connections to targets of the cloud, and of those that ended with
    /// a result.
    #[cfg(test)]
    pub(crate) fn cloud_streams(&self, result: StreamEnd) -> (i64, u64) {
        let result = StaticLabel(result.label());
        let ended = self.0.cloud_streams.get_or_create(&StreamLabels { result });
        (self.0.cloud_streams_open.get(), ended.get())
    }

    /// Returns the counters of the bytes from targets and to targets, which the caller advances
    /// while bytes move.
    pub(crate) fn bytes(&self) -> ByteCount {
        let bytes = &self.0.stream_bytes;
        let counter = |direction| bytes.get_or_create_owned(&DirectionLabels { direction });
        ByteCount::new(counter(Direction::FromTarget), counter(Direction::ToTarget))
    }

    /// Counts an attempt to connect to an address of a target.
    pub(crate) fn dialed(&self, result: DialResult) {
        count(&self.0.dials, &DialLabels { result });
    }

    pub(crate) fn connect_attempt(&self, transport: TransportKind, result: ConnectResult) {
        let transport = StaticLabel(transport.label());
        let labels = ConnectLabels { transport, result };
        count(&self.0.connect_attempts, &labels);
    }

    /// Returns the number of dialed sessions with a result.
    #[cfg(test)]
    pub(crate) fn connect_attempts(&self, transport: TransportKind, result: ConnectResult) -> u64 {
        let transport = StaticLabel(transport.label());
        let attempts = &self.0.connect_attempts;
        attempts
            .get_or_create(&ConnectLabels { transport, result })
            .get()
    }

    /// Returns how often a limit was reached.
    #[cfg(test)]
    pub(crate) fn reached(&self, limit: Limit) -> u64 {
        let reached = &self.0.limits_reached;
        reached.get_or_create(&LimitLabels { limit }).get()
    }

    /// Returns the number of fallbacks to h2 and of upgrades to QUIC.
    #[cfg(test)]
    pub(crate) fn transport_changes(&self) -> (u64, u64) {
        (self.0.fallbacks.get(), self.0.upgrades.get())
    }

    /// Counts a renewal: `issued`, or the reason of the failure.
    pub(crate) fn renewal(&self, result: &'static str) {
        let result = StaticLabel(result);
        count(&self.0.renewals, &RenewalLabels { result });
    }

    /// Records whether the certificate in use is missing on disk.
    pub(crate) fn unsaved(&self, unsaved: bool) {
        self.0.unsaved.set(unsaved.into());
    }

    pub(crate) fn files_unusable(&self, unusable: bool) {
        self.0.files_unusable.set(unusable.into());
    }

    /// Records the expiry of the agent's certificate.
    pub(crate) fn certificate(&self, not_after: SystemTime) {
        let since_epoch = not_after.duration_since(UNIX_EPOCH).unwrap_or_default();
        set_gauge(&self.0.not_after, since_epoch.as_secs());
    }
}

/// Returns the labels of every result over both transports.
fn connect_labels() -> impl Iterator<Item = ConnectLabels> {
    TRANSPORTS.into_iter().flat_map(|transport| {
        let transport = StaticLabel(transport.label());
        let results = ConnectResult::ALL.iter();
        results.map(move |&result| ConnectLabels { transport, result })
    })
}

/// Returns the results of renewals: those that the agent decides, and the codes of refusals.
fn renewal_results() -> impl Iterator<Item = &'static str> {
    let decided = ["issued", "unusable", "returned", "unasked"];
    decided.into_iter().chain(EnrollCode::labels())
}

fn stream_labels(ends: &[StreamEnd]) -> impl Iterator<Item = StreamLabels> {
    StreamEnd::labels(ends).map(|label| StreamLabels {
        result: StaticLabel(label),
    })
}

/// Ends that only a stream that the agent serves has. The other codes of refusals are those of servers.
const STREAM_ENDS: [StreamEnd; 4] = [
    StreamEnd::CutByTarget,
    StreamEnd::AgentStopping,
    StreamEnd::NoHeader,
    StreamEnd::OpenerGone,
];

/// Ends that only a connection to a target of the cloud has.
const CLOUD_STREAM_ENDS: [StreamEnd; 5] = [
    StreamEnd::CutByCaller,
    StreamEnd::AgentStopping,
    StreamEnd::NoSession,
    StreamEnd::NoReply,
    StreamEnd::Refused(RefusalCode::UnknownTarget),
];

tunnel_process::label_values! {
    /// The state of the session that takes new streams from one server.
    pub(crate) enum SessionState {
        Connected = "connected",
        /// There is no session yet, or not any more.
        Connecting = "connecting",
        /// The server is silent, or reports that this agent is silent.
        Suspect = "suspect",
    }
}

tunnel_process::label_values! {
    enum Direction {
        ToTarget = "to_target",
        FromTarget = "from_target",
    }
}

tunnel_process::label_values! {
    /// The result of an attempt to connect to an address of a target.
    pub(crate) enum DialResult {
        Connected = "connected",
        /// The target refused or was unreachable.
        Refused = "refused",
        /// The target did not answer in time.
        Timeout = "timeout",
        /// This host could not try.
        Failed = "failed",
    }
}

tunnel_process::label_values! {
    pub(crate) enum ConnectResult {
        Ready = "ready",
        /// No answer arrived in time.
        NoAnswer = "no_answer",
        /// There was no connection or no handshake.
        Failed = "failed",
        /// The server refused the session.
        NotAdmitted = "not_admitted",
        /// Another session was ready first.
        Abandoned = "abandoned",
        /// Another session of this agent is with the server.
        Duplicate = "duplicate",
    }
}

/// Transports over which the agent dials sessions.
const TRANSPORTS: [TransportKind; 2] = [TransportKind::Quic, TransportKind::H2];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels_are_as_documented() {
        let (metrics, registry) = Metrics::register(BufferPool::new(1));
        let session = metrics.session(TransportKind::Quic);
        metrics.set_sessions(SessionState::Connected, 1);
        metrics.stream_ended(StreamEnd::Refused(RefusalCode::Policy));
        metrics.bytes().add_sent(5);
        metrics.dialed(DialResult::Connected);
        metrics.connect_attempt(TransportKind::Quic, ConnectResult::NoAnswer);
        metrics.connect_attempt(TransportKind::H2, ConnectResult::Ready);
        metrics.fallback();
        metrics.upgrade();
        let suspect = metrics.suspect();
        metrics.certificate(UNIX_EPOCH + std::time::Duration::from_secs(9));
        drop(metrics.stream());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "tunnel_agent_sessions{state=\"connected\"} 1",
            "tunnel_agent_sessions{state=\"suspect\"} 0",
            "tunnel_agent_sessions_connected{transport=\"quic\"} 1",
            "tunnel_agent_streams_open 0",
            "tunnel_agent_streams_total{result=\"refused_by_policy\"} 1",
            "tunnel_agent_stream_bytes_total{direction=\"to_target\"} 5",
            "tunnel_agent_dials_total{result=\"connected\"} 1",
            "tunnel_agent_connect_attempts_total{transport=\"quic\",result=\"no_answer\"} 1",
            "tunnel_agent_connect_attempts_total{transport=\"h2\",result=\"ready\"} 1",
            "tunnel_agent_fallbacks_total 1",
            "tunnel_agent_upgrades_total 1",
            "tunnel_agent_sessions_suspect 1",
            "tunnel_agent_certificate_not_after_timestamp_seconds 9",
            "tunnel_agent_log_lines_dropped_total{kind=\"access\"} 0",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} not in\n{text}");
        }
        drop((session, suspect));
    }

    #[test]
    fn results_are_shown_before_they_occur() {
        let (_metrics, registry) = Metrics::register(BufferPool::new(1));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for series in [
            "tunnel_agent_buffer_bytes",
            "tunnel_agent_cloud_streams_total{result=\"unknown_target\"}",
            "tunnel_agent_connect_attempts_total{transport=\"h2\",result=\"not_admitted\"}",
            "tunnel_agent_dials_total{result=\"timeout\"}",
            "tunnel_agent_renewals_total{result=\"returned\"}",
            "tunnel_agent_renewals_total{result=\"bad_proof\"}",
            "tunnel_agent_sessions_connected{transport=\"h2\"}",
            "tunnel_agent_stream_bytes_total{direction=\"from_target\"}",
            "tunnel_agent_streams_total{result=\"ok\"}",
            "tunnel_agent_streams_total{result=\"refused_by_policy\"}",
        ] {
            assert!(text.contains(&format!("{series} 0\n")), "{series}:\n{text}");
        }
    }
}
