//! Metrics of the server. Labels are enums and never contain text of callers or peers. The metrics of
//! each node are in `admin/node_metrics.rs`.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tunnel_process::file_watch::ReloadOutcome;
pub use tunnel_process::metrics::GaugeGuard;
use tunnel_process::metrics::{
    StaticLabel, count, register_process_metrics, set_gauge, unix_seconds, with_series,
};
use tunnel_proto::stream_record::StreamEnd;
use tunnel_proto::transport::{BufferPool, PoolGauges, TransportKind};
use tunnel_proto::wire::code::{CloseCode, EnrollCode, RefusalCode};

use crate::config::Limit;
use crate::failure_code::failure_codes;
use crate::outcome::Outcome;
use tunnel_routing::policy::rules::Verdict;

/// The result label of a handshake that timed out.
pub(crate) const TIMEOUT: &str = "timeout";

/// Upper bounds of the buckets for opening a stream, in seconds: from one local round trip to the
/// open timeout.
const OPEN_SECONDS: [f64; 10] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0,
];

/// Upper bounds of the buckets for round-trip times, in seconds: from one local network to a
/// satellite link under load.
const RTT_SECONDS: [f64; 10] = [0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5];

/// Results of a password check.
const PASSWORD_RESULTS: [&str; 4] = ["right", "wrong", "missing", "waiting"];

/// Results of reloading certificate files.
const RELOAD_RESULTS: [&str; 3] = ["changed", "failed", "recovered"];

/// Result of a connection that a load balancer began with a header of the PROXY protocol.
pub const PROXY_PROTOCOL: &str = "proxy_protocol";

/// Results of the handshake and admission of an agent: those of a connection that has not presented
/// a credential, and the close codes of refused sessions.
const HANDSHAKE_RESULTS: [&str; 17] = [
    "ok",
    TIMEOUT,
    "evicted",
    "handshake_failed",
    "no_identity",
    "unknown_protocol",
    PROXY_PROTOCOL,
    "overloaded",
    "draining",
    "protocol",
    "version",
    "name_not_in_credential",
    "name_in_use",
    "handshake_timeout",
    "credential_revoked",
    "credential_untrusted",
    "too_many_sessions",
];

/// Results of an enrollment next to the codes of its refusal.
const ENROLLMENT_RESULTS: [&str; 5] = ["issued", "cut", TIMEOUT, "evicted", "handshake_failed"];

tunnel_process::metrics! {
    /// The metrics of agents, sessions and nodes, of callers with their requests and streams, of the
    /// certificates that the server uses, and of the configured limits.
    struct Families {
        agents: Family<TransportLabel, Gauge> = "agents", "Connected agent sessions",
            with_series([TransportKind::Quic, TransportKind::H2].map(|transport| TransportLabel {
                transport: StaticLabel(transport.label()),
            }));
        sessions_suspect: Gauge = "sessions_suspect",
            "Agent sessions that are suspect; suspect sessions get no new streams";
        agent_rtt_seconds: Histogram = "agent_rtt_seconds",
            "Round-trip times of agent sessions that are not suspect, observed every 10 s",
            Histogram::new(RTT_SECONDS);
        session_ends: Family<CodeLabel, Counter> = "session_ends",
            "Closed agent sessions by close code",
            with_series(CloseCode::labels().map(|code| CodeLabel { code: StaticLabel(code) }));
        agent_failures: Family<CodeLabel, Counter> = "agent_failures",
            "Failures of agents as `nodes --failed` lists them, by code",
            with_series(failure_codes().map(|code| CodeLabel { code: StaticLabel(code) }));
        handshakes: Family<ResultLabel, Counter> = "handshakes",
            "Handshakes and admissions of agents by result",
            with_series(result_labels(HANDSHAKE_RESULTS));
        enrollments: Family<ResultLabel, Counter> = "enrollments",
            "Enrollment requests by result",
            with_series(result_labels(ENROLLMENT_RESULTS.into_iter().chain(EnrollCode::labels())));
        renewals: Family<ResultLabel, Counter> = "renewals",
            "Certificate renewal requests on live sessions, by result",
            with_series(result_labels(["issued"].into_iter().chain(EnrollCode::labels())));
        known_nodes: Gauge = "known_nodes",
            "Nodes that may be addressed, without those that only another server knows";
        address_conflicts: Gauge = "address_conflicts", "Addresses shared by several nodes";

        streams_open: Gauge = "streams_open", "Streams open to agents";
        direct_open: Gauge = "connect_direct_open",
            "Open connections that the server dialed directly for callers of the CONNECT listeners";
        streams: Family<OutcomeLabel, Counter> = "streams",
            "Finished requests and streams of callers by result",
            with_series(Outcome::ALL.map(|result| OutcomeLabel { result }));
        cloud_streams_open: Gauge = "cloud_streams_open",
            "Streams of agents to targets of the cloud that are open";
        cloud_streams: Family<ResultLabel, Counter> = "cloud_streams",
            "Streams of agents to targets of the cloud that ended, by result",
            with_series(result_labels(StreamEnd::labels(&CLOUD_STREAM_ENDS)));
        requests_retried: Counter = "requests_retried",
            "Requests that were sent once more, over another session, because their session was lost";
        stream_bytes: Family<DirectionLabel, Counter> = "stream_bytes",
            "Payload bytes of ended streams; in is from agents, out is to agents",
            with_series(["in", "out"].map(|direction| DirectionLabel {
                direction: StaticLabel(direction),
            }));
        open_seconds: Histogram = "open_duration_seconds",
            "Time to open a stream at the server's end", Histogram::new(OPEN_SECONDS);
        callers_evicted: Counter = "callers_evicted",
            "Idle caller connections that were evicted in favor of newer ones \
             (limits.callersTotal, limits.callersPerSource)";
        callers_refused: Counter = "callers_refused",
            "Caller connections that were refused because no idle connection could be evicted \
             (limits.callersTotal, limits.callersPerSource)";
        passwords: Family<ResultLabel, Counter> = "connect_passwords",
            "Requests at the CONNECT listener by result of the password check; waiting: refused \
             before the check",
            with_series(result_labels(PASSWORD_RESULTS));

        certificate_not_after: Gauge<f64, AtomicU64> = "certificate_not_after_timestamp_seconds",
            "Unix time at which the server's own certificate expires";
        credential_reloads: Family<ReloadLabel, Counter> = "credential_reloads",
            "Number of reloads of certificate files, by result";
        credential_files_unusable: Family<FilesLabel, Gauge> = "credential_files_unusable",
            "1 while certificate files are unusable and the previous ones stay in use";
        credential_not_after: Family<FilesLabel, Gauge<f64, AtomicU64>>
            = "credential_not_after_timestamp_seconds",
            "Unix time at which a configured certificate expires";

        dry_run_differences: Family<DecisionLabel, Counter> = "dry_run_differences",
            "Decisions that the rules of dryRun would make otherwise, by what they decide",
            with_series(Verdict::ALL.map(|verdict| DecisionLabel { decision: StaticLabel(verdict.label()) }));

        limits_reached: Family<LimitLabel, Counter> = "limits_reached",
            "Number of times a configured limit was reached, by limit",
            with_series(Limit::ALL.iter().map(|&limit| LimitLabel { limit }));
    }
}

tunnel_process::label_sets! {
    TransportLabel { transport: StaticLabel }
    CodeLabel { code: StaticLabel }
    OutcomeLabel { result: Outcome }
    DirectionLabel { direction: StaticLabel }
    ResultLabel { result: StaticLabel }
    ReloadLabel { files: StaticLabel, result: StaticLabel }
    FilesLabel { files: StaticLabel }
    LimitLabel { limit: Limit }
    DecisionLabel { decision: StaticLabel }
}

/// All metrics of the server. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    families: Arc<Families>,
    request_series: Arc<RequestSeries>,
}

/// The series that each request updates. Finding a series in its family takes a lock and hashes the
/// labels, so each series is looked up once.
#[derive(Debug, Default)]
struct RequestSeries {
    ended: [OnceLock<Counter>; Outcome::ALL.len()],
    received: OnceLock<Counter>,
    sent: OnceLock<Counter>,
}

impl Metrics {
    /// Registers all metrics under `tunnel_server_`, and those of the process. The buffer pool's
    /// gauges are read at each scrape.
    pub fn new(root: &mut Registry, pool: Arc<BufferPool>) -> Self {
        let registry = register_process_metrics(root, "tunnel_server", PoolGauges(pool));
        Self {
            families: Arc::new(Families::register(registry)),
            request_series: Arc::default(),
        }
    }

    /// Counts a connected agent until the guard is dropped.
    pub fn agent(&self, transport: &'static str) -> GaugeGuard {
        let transport = StaticLabel(transport);
        let agents = &self.families.agents;
        GaugeGuard::new(&agents.get_or_create(&TransportLabel { transport }))
    }

    /// Counts a suspect session until the guard is dropped.
    pub fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(&self.families.sessions_suspect)
    }

    /// Records the current round-trip time of a session.
    pub fn agent_rtt(&self, rtt: Duration) {
        self.families.agent_rtt_seconds.observe(rtt.as_secs_f64());
    }

    pub fn session_ended(&self, code: CloseCode) {
        let code = StaticLabel(code.label());
        count(&self.families.session_ends, &CodeLabel { code });
    }

    /// Counts an open stream until the guard is dropped.
    pub fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.families.streams_open)
    }

    /// Counts a connection that the server itself dialed until the guard is dropped.
    pub fn dialed(&self) -> GaugeGuard {
        GaugeGuard::new(&self.families.direct_open)
    }

    /// Counts a finished stream or request, and the bytes received from and sent to the agent.
    pub fn ended(&self, outcome: Outcome, received: u64, sent: u64) {
        let series = &self.request_series;
        let ended = || {
            let streams = &self.families.streams;
            streams.get_or_create_owned(&OutcomeLabel { result: outcome })
        };
        match series.ended.get(outcome as usize) {
            Some(counter) => counter.get_or_init(ended).inc(),
            None => ended().inc(),
        };
        for (counter, direction, bytes) in [
            (&series.received, "in", received),
            (&series.sent, "out", sent),
        ] {
            let direction = StaticLabel(direction);
            let bytes_of = &self.families.stream_bytes;
            counter
                .get_or_init(|| bytes_of.get_or_create_owned(&DirectionLabel { direction }))
                .inc_by(bytes);
        }
    }

    /// Returns the number of finished requests and streams, and of those that failed.
    pub fn requests(&self) -> [u64; 2] {
        let ended = self.request_series.ended.iter().zip(Outcome::ALL);
        ended.fold([0, 0], |[all, failed], (series, outcome)| {
            let count = series.get().map_or(0, Counter::get);
            let failures = if outcome.is_failure() { count } else { 0 };
            [all + count, failed + failures]
        })
    }

    /// Counts an open stream to a target of the cloud until the guard is dropped.
    pub fn cloud_stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.families.cloud_streams_open)
    }

    pub fn cloud_stream_ended(&self, result: StreamEnd) {
        count_result(&self.families.cloud_streams, result.label());
    }

    /// Counts a request that was sent once more over another session.
    pub fn retried(&self) {
        self.families.requests_retried.inc();
    }

    /// Records the time that opening a stream took.
    pub fn opened(&self, elapsed: Duration) {
        self.families.open_seconds.observe(elapsed.as_secs_f64());
    }

    /// Counts an event in which a limit was reached.
    pub fn limit(&self, limit: Limit) {
        count(&self.families.limits_reached, &LimitLabel { limit });
    }

    /// Counts a decision of a dry run that differs from that of the rules in force.
    pub fn dry_run_difference(&self, verdict: Verdict) {
        let decision = StaticLabel(verdict.label());
        let labels = DecisionLabel { decision };
        count(&self.families.dry_run_differences, &labels);
    }

    /// Counts a finished handshake or admission by result: `ok` or the name of the failure.
    pub fn handshake(&self, result: &'static str) {
        self.count_timeout(result);
        count_result(&self.families.handshakes, result);
    }

    /// Counts timeouts on the agents' port. One limit applies to all of them.
    fn count_timeout(&self, result: &'static str) {
        if result == TIMEOUT || result == CloseCode::HandshakeTimeout.label() {
            self.limit(Limit::HandshakeTimeout);
        }
    }

    /// Counts a caller whose idle connection was closed for a newer one.
    pub fn evicted_caller(&self) {
        self.families.callers_evicted.inc();
    }

    /// Counts a caller whose connection was refused because no permit was available.
    pub fn refused_caller(&self) {
        self.families.callers_refused.inc();
    }

    /// Counts a renewal by result: `issued` or the name of the refusal.
    pub fn renewal(&self, result: &'static str) {
        count_result(&self.families.renewals, result);
    }

    /// Counts a request by the result of its password check: `right`, `wrong`, `missing` or
    /// `waiting`.
    pub fn password(&self, result: &'static str) {
        count_result(&self.families.passwords, result);
    }

    /// Creates the series of certificate files that are reloaded when they change.
    pub fn watched(&self, files: &'static str) {
        let files = StaticLabel(files);
        for result in RELOAD_RESULTS.map(StaticLabel) {
            let reloads = &self.families.credential_reloads;
            drop(reloads.get_or_create(&ReloadLabel { files, result }));
        }
        let unusable = &self.families.credential_files_unusable;
        drop(unusable.get_or_create(&FilesLabel { files }));
    }

    /// Records the result of reloading certificate files.
    pub fn reloaded(&self, files: &'static str, reload: ReloadOutcome<'_>) {
        let [changed, failed, recovered] = RELOAD_RESULTS;
        let result = StaticLabel(match reload {
            ReloadOutcome::Unchanged | ReloadOutcome::StillFailed => return,
            ReloadOutcome::Changed => changed,
            ReloadOutcome::Failed(_) => failed,
            ReloadOutcome::Recovered => recovered,
        });
        let is_unusable = reload.is_unusable() == Some(true);
        let files = StaticLabel(files);
        let labels = ReloadLabel { files, result };
        count(&self.families.credential_reloads, &labels);
        let unusable = &self.families.credential_files_unusable;
        unusable
            .get_or_create(&FilesLabel { files })
            .set(is_unusable.into());
    }

    /// Counts a failure of an agent by its code.
    pub fn agent_failure(&self, code: &'static str) {
        let code = StaticLabel(code);
        count(&self.families.agent_failures, &CodeLabel { code });
    }

    /// Counts an enrollment by result: `ok` or the name of the failure.
    pub fn enrollment(&self, result: &'static str) {
        self.count_timeout(result);
        count_result(&self.families.enrollments, result);
    }

    /// Records the size of the route table.
    pub fn routes(&self, nodes: usize, conflicts: usize) {
        set_gauge(&self.families.known_nodes, nodes);
        set_gauge(&self.families.address_conflicts, conflicts);
    }

    /// Records the expiry of the server's own certificate.
    pub fn certificate(&self, not_after: SystemTime) {
        let not_after = unix_seconds(not_after);
        self.families.certificate_not_after.set(not_after);
    }

    /// Records the expiry of another certificate that the server was given.
    pub fn credential(&self, files: &'static str, not_after: SystemTime) {
        let labels = FilesLabel {
            files: StaticLabel(files),
        };
        let credentials = &self.families.credential_not_after;
        credentials
            .get_or_create(&labels)
            .set(unix_seconds(not_after));
    }
}

fn result_labels(
    results: impl IntoIterator<Item = &'static str>,
) -> impl Iterator<Item = ResultLabel> {
    results.into_iter().map(|result| ResultLabel {
        result: StaticLabel(result),
    })
}

fn count_result(results: &Family<ResultLabel, Counter>, result: &'static str) {
    let result = StaticLabel(result);
    count(results, &ResultLabel { result });
}

/// Ends that only a stream to a target of the cloud has.
const CLOUD_STREAM_ENDS: [StreamEnd; 5] = [
    StreamEnd::CutByTarget,
    StreamEnd::ServerStopping,
    StreamEnd::NoHeader,
    StreamEnd::OpenerGone,
    StreamEnd::Refused(RefusalCode::UnknownTarget),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_and_results_before_they_occur() {
        let mut root = Registry::default();
        let metrics = Metrics::new(&mut root, BufferPool::new(1 << 20));
        let _agent = metrics.agent(TransportKind::H2.label());
        let suspect = metrics.suspect();
        drop(metrics.suspect());
        metrics.session_ended(CloseCode::Dead);
        metrics.watched("agent_ca");
        let not_after = SystemTime::UNIX_EPOCH + Duration::from_secs(9);
        metrics.certificate(not_after);
        metrics.credential("https_certificate", not_after);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &root).unwrap();
        for line in [
            "tunnel_server_agents{transport=\"h2\"} 1",
            "tunnel_server_agents{transport=\"quic\"} 0",
            "tunnel_server_sessions_suspect 1",
            "tunnel_server_session_ends_total{code=\"dead\"} 1",
            "tunnel_server_buffer_bytes 0",
            "tunnel_server_buffer_limit_bytes 1048576",
            "tunnel_server_enrollments_total{result=\"bad_token\"} 0",
            "tunnel_server_handshakes_total{result=\"version\"} 0",
            "tunnel_server_renewals_total{result=\"rate_limited\"} 0",
            "tunnel_server_session_ends_total{code=\"normal\"} 0",
            "tunnel_server_stream_bytes_total{direction=\"in\"} 0",
            "tunnel_server_streams_total{result=\"no_agent\"} 0",
            "tunnel_server_credential_reloads_total{files=\"agent_ca\",result=\"failed\"} 0",
            "tunnel_server_certificate_not_after_timestamp_seconds 9.0",
            "tunnel_server_credential_not_after_timestamp_seconds{files=\"https_certificate\"} 9.0",
        ] {
            assert!(text.lines().any(|shown| shown == line), "{line}:\n{text}");
        }
        drop(suspect);
    }
}
