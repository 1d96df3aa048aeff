//! What the connector tells people: one line for each change, and for what repeats itself one every 30 s.

use std::error::Error;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, error, info, warn};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::NodeName;

use super::ladder::{Change, Rung};
use super::lane::ConnectError;
use crate::session::Held;

/// Writes the lines; knows which failures of an outage were told.
#[derive(Debug)]
pub(super) struct Report {
    agent: NodeName,
    repeats: Repeats,
}

impl Report {
    pub(super) fn new(agent: NodeName) -> Self {
        Self {
            agent,
            repeats: Repeats::default(),
        }
    }

    /// The session that took new streams has ended; without `retry_in` another one is being dialled already.
    pub(super) fn lost(&self, rung: Rung, held: &Held, retry_in: Option<Duration>) {
        if !held.reason.code.is_retryable() {
            error!(
                agent = %self.agent,
                transport = %rung.transport(),
                code = %held.reason.code,
                error = %held.reason,
                "server ended the session and refuses this agent; somebody has to act"
            );
            return;
        }
        warn!(
            agent = %self.agent,
            transport = %rung.transport(),
            code = %held.reason.code,
            error = %held.reason,
            ready_for = ?held.ready_for,
            retry_in = retry_in.map(tracing::field::debug),
            "session lost"
        );
    }

    /// A session has ended as it should: it had retired, or the agent stops.
    pub(super) fn ended(&self, rung: Rung, held: &Held) {
        info!(
            agent = %self.agent,
            transport = %rung.transport(),
            code = %held.reason.code,
            error = %held.reason,
            ready_for = ?held.ready_for,
            "session ended"
        );
    }

    /// An attempt gave no ready session.
    pub(super) fn failed(
        &mut self,
        failures: &[(Rung, ConnectError)],
        code: Option<CloseCode>,
        retry_in: Duration,
        now: Instant,
    ) {
        let agent = &self.agent;
        let error = failures
            .iter()
            .map(|(rung, error)| format!("{}: {}", rung.transport(), causes(error)))
            .collect::<Vec<_>>()
            .join("; ");
        let Some(left_out) = self.repeats.failed(code, now) else {
            debug!(%agent, error, ?retry_in, "cannot connect");
            return;
        };
        match code {
            Some(code) if !code.is_retryable() => {
                error!(%agent, %code, error, ?retry_in, left_out, "server refuses this agent; somebody has to act");
            }
            Some(code) => {
                warn!(%agent, %code, error, ?retry_in, left_out, "cannot hold a session");
            }
            None => warn!(%agent, error, ?retry_in, left_out, "cannot connect"),
        }
    }

    /// QUIC gave no answer while a session over h2 is there.
    pub(super) fn probe_failed(&self, failures: &[(Rung, ConnectError)]) {
        for (rung, error) in failures {
            let (transport, error) = (rung.transport(), causes(error));
            debug!(agent = %self.agent, %transport, error, "no way up yet");
        }
    }

    /// A session takes new streams, and what that changes.
    pub(super) fn ready(&mut self, change: Change) {
        self.over();
        let agent = &self.agent;
        match change {
            Change::None => {}
            Change::Fallback => {
                warn!(%agent, "QUIC gave no answer; h2 carries the session until QUIC does");
            }
            Change::Promotion => info!(%agent, "QUIC carries the session again"),
        }
    }

    /// There is a session that takes new streams.
    pub(super) fn over(&mut self) {
        self.repeats = Repeats::default();
    }

    /// The task of a session panicked.
    pub(super) fn broken(&self, rung: Rung, panic: &dyn Error) {
        error!(agent = %self.agent, transport = %rung.transport(), error = %panic, "task of a session broke");
    }
}

/// An error with its causes in one line.
pub(crate) fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        next = cause.source();
    }
    text
}

/// Which failures of one outage are worth a line: the first with each code, and one every 30 s.
#[derive(Debug, Default)]
struct Repeats {
    told: Vec<Option<CloseCode>>,
    last: Option<Instant>,
    left_out: u32,
}

impl Repeats {
    /// How many were left out since the last line, or `None` to leave this one out.
    fn failed(&mut self, code: Option<CloseCode>, now: Instant) -> Option<u32> {
        let is_new = !self.told.contains(&code) && self.told.len() < CODES_MOST;
        let is_time = self
            .last
            .is_none_or(|last| now.duration_since(last) >= REPEAT_AFTER);
        if !is_new && !is_time {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        if is_new {
            self.told.push(code);
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Time between two lines that say the same.
const REPEAT_AFTER: Duration = Duration::from_secs(30);
/// Codes that get a line of their own in one outage; a peer may invent them.
const CODES_MOST: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_failures_get_one_line_in_30_s_and_new_ones_their_own() {
        let mut repeats = Repeats::default();
        let start = Instant::now();
        let mut at = |seconds, code| repeats.failed(code, start + Duration::from_secs(seconds));
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
    fn invented_codes_do_not_make_more_lines_for_ever() {
        let mut repeats = Repeats::default();
        let now = Instant::now();
        let codes = (1000..2000).map(|number| Some(CloseCode::from_number(number)));
        let lines = codes.filter(|code| repeats.failed(*code, now).is_some());
        assert_eq!(lines.count(), CODES_MOST);
    }
}
