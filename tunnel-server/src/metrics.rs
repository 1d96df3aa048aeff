//! Metrics of the server. Labels are enums and never contain text of callers or peers.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tunnel_proto::process::file_watch::ReloadOutcome;
pub use tunnel_proto::process::metrics::GaugeGuard;
use tunnel_proto::process::metrics::StaticLabel;
use tunnel_proto::process::panics::PanicCollector;
use tunnel_proto::process::telemetry::DroppedLines;
use tunnel_proto::transport::BufferPool;
use tunnel_proto::wire::code::CloseCode;

use crate::config::Limit;
use crate::ingress::outcome::Outcome;

mod agents;
mod callers;
mod credentials;
mod labels;
mod limits;

use agents::AgentMetrics;
use callers::CallerMetrics;
use credentials::CredentialMetrics;
use labels::{
    CodeLabel, DirectionLabel, FilesLabel, LimitLabel, OutcomeLabel, ReloadLabel, ResultLabel,
    TransportLabel,
};
use limits::{LimitMetrics, PoolGauges};

/// The result label of a handshake that timed out.
pub(crate) const TIMEOUT: &str = "timeout";

/// All metrics of the server. Clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    agents: AgentMetrics,
    callers: CallerMetrics,
    credentials: CredentialMetrics,
    limits: LimitMetrics,
}

impl Metrics {
    /// Registers all metrics under `tunnel_server_`. The buffer pool's gauges are read at each
    /// scrape.
    #[must_use]
    pub fn new(root: &mut Registry, pool: Arc<BufferPool>) -> Self {
        let registry = root.sub_registry_with_prefix("tunnel_server");
        registry.register_collector(Box::new(PoolGauges(pool)));
        registry.register_collector(Box::new(PanicCollector));
        registry.register_collector(Box::new(DroppedLines));
        Self {
            agents: AgentMetrics::register(registry),
            callers: CallerMetrics::register(registry),
            credentials: CredentialMetrics::register(registry),
            limits: LimitMetrics::register(registry),
        }
    }

    /// Counts a connected agent until the guard is dropped.
    #[must_use]
    pub fn agent(&self, transport: &'static str) -> GaugeGuard {
        let transport = StaticLabel(transport);
        let agents = &self.agents.connected;
        GaugeGuard::new(&agents.get_or_create(&TransportLabel { transport }))
    }

    /// Counts a suspect session until the guard is dropped.
    #[must_use]
    pub fn suspect(&self) -> GaugeGuard {
        GaugeGuard::new(&self.agents.suspect)
    }

    /// Counts the end of an admitted session.
    pub fn session_ended(&self, code: CloseCode) {
        let code = StaticLabel(code.label());
        let ends = &self.agents.session_ends;
        ends.get_or_create(&CodeLabel { code }).inc();
    }

    /// Counts an open stream until the guard is dropped.
    #[must_use]
    pub fn stream(&self) -> GaugeGuard {
        GaugeGuard::new(&self.callers.streams_open)
    }

    /// Counts a connection that the server itself dialed until the guard is dropped.
    #[must_use]
    pub fn dialed(&self) -> GaugeGuard {
        GaugeGuard::new(&self.callers.direct_open)
    }

    /// Counts a finished stream or request, and the bytes received from and sent to the agent.
    pub fn ended(&self, outcome: Outcome, received: u64, sent: u64) {
        let streams = &self.callers.streams;
        streams
            .get_or_create(&OutcomeLabel { result: outcome })
            .inc();
        for (direction, bytes) in [("in", received), ("out", sent)] {
            let direction = StaticLabel(direction);
            let counter = &self.callers.bytes;
            counter
                .get_or_create(&DirectionLabel { direction })
                .inc_by(bytes);
        }
    }

    /// Records the time that opening a stream took.
    pub fn opened(&self, elapsed: Duration) {
        self.callers.open_seconds.observe(elapsed.as_secs_f64());
    }

    /// Counts an event in which a limit was reached.
    pub fn limit(&self, limit: Limit) {
        let reached = &self.limits.reached;
        reached.get_or_create(&LimitLabel { limit }).inc();
    }

    /// Counts a finished handshake or admission by result: `ok` or the name of the failure.
    pub fn handshake(&self, result: &'static str) {
        self.count_timeout(result);
        count(&self.agents.handshakes, result);
    }

    /// Counts timeouts on the agents' port. One limit applies to all of them.
    fn count_timeout(&self, result: &'static str) {
        if result == TIMEOUT || result == CloseCode::HandshakeTimeout.label() {
            self.limit(Limit::HandshakeTimeout);
        }
    }

    /// Counts a caller whose idle connection was closed for a newer one.
    pub fn evicted_caller(&self) {
        self.callers.evicted.inc();
    }

    /// Counts a caller whose connection was refused because no permit was available.
    pub fn refused_caller(&self) {
        self.callers.refused.inc();
    }

    /// Counts a renewal by result: `issued` or the name of the refusal.
    pub fn renewal(&self, result: &'static str) {
        count(&self.agents.renewals, result);
    }

    /// Counts a request by the result of its password check: `right`, `wrong`, `missing` or
    /// `waiting`.
    pub fn password(&self, result: &'static str) {
        count(&self.callers.passwords, result);
    }

    /// Records the result of reloading certificate files.
    pub fn reloaded(&self, files: &'static str, reload: ReloadOutcome) {
        let result = StaticLabel(match reload {
            ReloadOutcome::Changed => "changed",
            ReloadOutcome::Failed => "failed",
            ReloadOutcome::Recovered => "recovered",
        });
        let failed = reload == ReloadOutcome::Failed;
        let files = StaticLabel(files);
        let (reloads, unusable) = (&self.credentials.reloads, &self.credentials.unusable);
        reloads.get_or_create(&ReloadLabel { files, result }).inc();
        unusable
            .get_or_create(&FilesLabel { files })
            .set(failed.into());
    }

    /// Counts an enrollment by result: `ok` or the name of the failure.
    pub fn enrollment(&self, result: &'static str) {
        self.count_timeout(result);
        count(&self.agents.enrollments, result);
    }

    /// Records the size of the route table.
    pub fn routes(&self, nodes: usize, conflicts: usize) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.agents.known_nodes.set(number(nodes));
        self.agents.address_conflicts.set(number(conflicts));
    }

    /// Records the expiry of the server's own certificate.
    pub fn certificate(&self, not_after: SystemTime) {
        self.credentials.own_not_after.set(unix_seconds(not_after));
    }

    /// Records the expiry of another certificate that the server was given.
    pub fn credential(&self, files: &'static str, not_after: SystemTime) {
        let files = StaticLabel(files);
        let credentials = &self.credentials.not_after;
        credentials
            .get_or_create(&FilesLabel { files })
            .set(unix_seconds(not_after));
    }
}

fn count(results: &Family<ResultLabel, Counter>, result: &'static str) {
    let result = StaticLabel(result);
    results.get_or_create(&ResultLabel { result }).inc();
}

fn unix_seconds(time: SystemTime) -> f64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since_epoch.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use tunnel_proto::transport::TransportKind;

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
