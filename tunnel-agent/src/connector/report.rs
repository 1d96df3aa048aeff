//! Log lines of the connector: one line per change, and one every 30 s for repeated events.

use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, error, info, warn};
use tunnel_process::errors::causes;
use tunnel_process::telemetry::{LogRateLimit, LogThrottle};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;

use super::session_task::ConnectError;
use super::transport_policy::{SessionTransport, TransportChange};
use crate::session::SessionSummary;

/// Writes the log lines. Remembers which failures of an outage were logged.
#[derive(Debug)]
pub(super) struct ConnectionLog {
    agent: NodeName,
    throttle: LogThrottle<Option<CloseCode>>,
}

impl ConnectionLog {
    pub(super) fn new(agent: NodeName) -> Self {
        Self {
            agent,
            throttle: LogThrottle::default(),
        }
    }

    /// Logs the end of the session that took new streams. Without `retry_in` another session is
    /// already being dialed.
    pub(super) fn lost(
        &self,
        transport: SessionTransport,
        summary: &SessionSummary,
        retry_in: Option<Duration>,
    ) {
        if !summary.reason.code.is_retryable() {
            error!(
                node = %self.agent,
                transport = %transport.transport(),
                replica = %summary.replica,
                code = %summary.reason.code,
                error = %summary.reason,
                "server closed the session and refuses this agent; fix the reported cause"
            );
            return;
        }
        warn!(
            node = %self.agent,
            transport = %transport.transport(),
            replica = %summary.replica,
            code = %summary.reason.code,
            error = %summary.reason,
            ready_for = summary.ready_for.as_secs_f64(),
            retry_in = retry_in.as_ref().map(Duration::as_secs_f64),
            "session lost"
        );
    }

    /// Logs the regular end of a session: the session had retired, or the agent stops.
    pub(super) fn ended(&self, transport: SessionTransport, summary: &SessionSummary) {
        info!(
            node = %self.agent,
            transport = %transport.transport(),
            replica = %summary.replica,
            code = %summary.reason.code,
            error = %summary.reason,
            ready_for = summary.ready_for.as_secs_f64(),
            "session ended"
        );
    }

    /// Logs an attempt that gave no ready session.
    pub(super) fn failed(
        &mut self,
        failures: &[(SessionTransport, ConnectError)],
        code: Option<CloseCode>,
        retry_in: Duration,
        now: Instant,
    ) {
        let agent = &self.agent;
        let error = failure_text(failures);
        let Some(suppressed) = self.throttle.failed(code, now) else {
            debug!(node = %agent, error, retry_in = retry_in.as_secs_f64(), "cannot connect");
            return;
        };
        match code {
            Some(code) if !code.is_retryable() => {
                error!(node = %agent, %code, error, retry_in = retry_in.as_secs_f64(), suppressed, "server refuses this agent; fix the reported cause");
            }
            Some(code) => {
                warn!(node = %agent, %code, error, retry_in = retry_in.as_secs_f64(), suppressed, "cannot keep a session");
            }
            None => {
                warn!(node = %agent, error, retry_in = retry_in.as_secs_f64(), suppressed, "cannot connect")
            }
        }
    }

    /// Logs a dial that a server refused for the agent from which this one takes over.
    pub(super) fn standby(
        &self,
        failures: &[(SessionTransport, ConnectError)],
        retry_in: Duration,
    ) {
        let error = failure_text(failures);
        debug!(node = %self.agent, error, retry_in = retry_in.as_secs_f64(), "another agent of this node has the name");
    }

    /// Logs a dial that failed while another session serves.
    pub(super) fn probe_failed(&self, failures: &[(SessionTransport, ConnectError)]) {
        for (transport, error) in failures {
            let (transport, error) = (transport.transport(), causes(error));
            debug!(node = %self.agent, %transport, error, "probe for another session failed");
        }
    }

    /// Logs that no dial reached a server without a session of this agent.
    pub(super) fn search_over(&self, members: usize) {
        warn!(
            node = %self.agent,
            replicas = members,
            "each server that answers already has a session of this agent; going on with fewer \
             sessions until the servers change"
        );
    }

    /// Logs reported addresses that are not dialed, each with the reason.
    pub(super) fn refused_addresses(&self, refused: &[String]) {
        static REFUSED: LogRateLimit = LogRateLimit::new("reported addresses that are not dialed");
        if let Some(error) = refused.first()
            && REFUSED.admit()
        {
            let (agent, count) = (&self.agent, refused.len());
            warn!(node = %agent, error, count, "server reports addresses that are not dialed");
        }
    }

    /// Logs that no dial with newer credentials reached the server of a session, nor a free one.
    pub(super) fn refresh_over(&self, members: usize) {
        warn!(
            node = %self.agent,
            replicas = members,
            "each dial with the new certificate reached a server that has another session of this \
             agent; the session goes on with the certificate that it began with"
        );
    }

    /// Logs that a session takes new streams, and the change of transport.
    pub(super) fn ready(&self, change: TransportChange) {
        let agent = &self.agent;
        match change {
            TransportChange::None => {}
            TransportChange::Fallback => {
                warn!(node = %agent, "no answer over QUIC; falling back to h2");
            }
            TransportChange::Upgrade => info!(node = %agent, "session upgraded to QUIC"),
        }
    }
}

/// Returns why an attempt gave no ready session.
pub(super) fn failure_text(failures: &[(SessionTransport, ConnectError)]) -> String {
    failures
        .iter()
        .map(|(transport, error)| {
            let advice = error.advice(*transport);
            format!("{}: {}{advice}", transport.transport(), causes(error))
        })
        .collect::<Vec<_>>()
        .join("; ")
}
