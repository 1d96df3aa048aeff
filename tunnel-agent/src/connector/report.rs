//! Log lines of the connector: one line per change, and one every 30 s for repeated events.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{debug, error, info, warn};
use tunnel_proto::process::telemetry::LogRateLimit;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;

use super::session_task::ConnectError;
use super::transport_policy::{SessionTransport, TransportChange};
use crate::error::causes;
use crate::session::SessionSummary;

/// Writes the log lines. Remembers which failures of an outage were logged. The clones of the
/// connectors of a set share this memory.
#[derive(Debug, Clone)]
pub(super) struct ConnectionLog {
    agent: NodeName,
    throttle: Arc<Mutex<LogThrottle>>,
}

impl ConnectionLog {
    pub(super) fn new(agent: NodeName) -> Self {
        Self {
            agent,
            throttle: Arc::default(),
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
                replica = summary.replica.as_ref().map(tracing::field::display),
                code = %summary.reason.code,
                error = %summary.reason,
                "server closed the session and refuses this agent; fix the reported cause"
            );
            return;
        }
        warn!(
            node = %self.agent,
            transport = %transport.transport(),
            replica = summary.replica.as_ref().map(tracing::field::display),
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
            replica = summary.replica.as_ref().map(tracing::field::display),
            code = %summary.reason.code,
            error = %summary.reason,
            ready_for = summary.ready_for.as_secs_f64(),
            "session ended"
        );
    }

    /// Logs an attempt that gave no ready session.
    pub(super) fn failed(
        &self,
        failures: &[(SessionTransport, ConnectError)],
        code: Option<CloseCode>,
        retry_in: Duration,
        now: Instant,
    ) {
        let agent = &self.agent;
        let error = failure_text(failures);
        let Some(suppressed) = self.throttle.lock().failed(code, now) else {
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
            None => warn!(node = %agent, error, retry_in = retry_in.as_secs_f64(), suppressed, "cannot connect"),
        }
    }

    /// Logs a dial that failed while another session serves.
    pub(super) fn probe_failed(&self, failures: &[(SessionTransport, ConnectError)]) {
        for (transport, error) in failures {
            let (transport, error) = (transport.transport(), causes(error));
            debug!(node = %self.agent, %transport, error, "probe for another session failed");
        }
    }

    /// Logs that no dial reached a replica without a session of this agent.
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

    /// Logs that a session with a server of an older version retires.
    pub(super) fn replaced(&self) {
        info!(
            node = %self.agent,
            "another session of this agent is with a server of an older version, which serves one; \
             retiring this session"
        );
    }

    /// Logs that no dial with newer credentials reached the replica of a session, nor a free one.
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

    pub(super) fn panicked(&self, transport: SessionTransport, panic: &dyn Error) {
        error!(node = %self.agent, transport = %transport.transport(), error = %panic, "session task panicked");
    }
}

/// Returns why an attempt gave no ready session.
pub(super) fn failure_text(failures: &[(SessionTransport, ConnectError)]) -> String {
    failures
        .iter()
        .map(|(transport, error)| format!("{}: {}", transport.transport(), causes(error)))
        .collect::<Vec<_>>()
        .join("; ")
}

/// Selects the failures to log: the first with each code, and one every 30 s. Codes are logged again
/// after 30 s without a failure. A ready session is no reason to, since sessions may be lost again
/// and again, and other connectors may fail all the time.
#[derive(Debug, Default)]
struct LogThrottle {
    logged_codes: Vec<Option<CloseCode>>,
    last_failure: Option<Instant>,
    last: Option<Instant>,
    suppressed: u32,
}

impl LogThrottle {
    /// Returns how many failures were suppressed since the last line, or `None` to suppress this
    /// one.
    fn failed(&mut self, code: Option<CloseCode>, now: Instant) -> Option<u32> {
        let last_failure = self.last_failure.replace(now);
        if last_failure.is_some_and(|last| now.duration_since(last) >= REPEAT_INTERVAL) {
            self.logged_codes.clear();
        }
        let is_new =
            !self.logged_codes.contains(&code) && self.logged_codes.len() < LOGGED_CODES_MAX;
        let is_time = self
            .last
            .is_none_or(|last| now.duration_since(last) >= REPEAT_INTERVAL);
        if !is_new && !is_time {
            self.suppressed = self.suppressed.saturating_add(1);
            return None;
        }
        if is_new {
            self.logged_codes.push(code);
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Time between two lines with the same content.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum number of codes that get a line of their own in one outage, since a peer may invent
/// codes.
const LOGGED_CODES_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failures_get_one_line_in_30_s_and_new_ones_their_own() {
        let mut throttle = LogThrottle::default();
        let start = Instant::now();
        let mut at = |seconds, code| throttle.failed(code, start + Duration::from_secs(seconds));
        assert_eq!(at(0, None), Some(0));
        assert_eq!(at(1, None), None);
        assert_eq!(at(29, None), None);
        assert_eq!(at(29, Some(CloseCode::NameInUse)), Some(2));
        assert_eq!(at(30, None), None);
        assert_eq!(at(58, Some(CloseCode::NameInUse)), None);
        assert_eq!(at(59, None), Some(2));
        let lines = (60..660).filter(|second| at(*second, None).is_some());
        assert_eq!(lines.count(), 20);
    }

    #[test]
    fn code_is_logged_again_after_30_s_without_a_failure() {
        let mut throttle = LogThrottle::default();
        let start = Instant::now();
        let mut at = |seconds, code| throttle.failed(code, start + Duration::from_secs(seconds));
        let in_use = Some(CloseCode::NameInUse);
        assert_eq!(at(0, None), Some(0));
        assert_eq!(at(1, in_use), Some(0));
        assert_eq!(at(30, in_use), None);
        assert_eq!(at(61, None), Some(1));
        assert_eq!(at(62, in_use), Some(0));
        assert_eq!(at(63, in_use), None);
    }

    #[test]
    fn invented_codes_do_not_make_more_lines_for_ever() {
        let mut throttle = LogThrottle::default();
        let now = Instant::now();
        let codes = (1000..2000).map(|number| Some(CloseCode::from_number(number)));
        let lines = codes.filter(|code| throttle.failed(*code, now).is_some());
        assert_eq!(lines.count(), LOGGED_CODES_MAX);
    }
}
