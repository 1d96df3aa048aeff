//! The access record: one line and one count for each request or stream of a caller, written when it ends. Heads that cannot be
//! parsed are all counted, and a sample of them has lines.

use std::sync::Arc;

use tokio::time::Instant;
use tracing::info;
use tunnel_proto::process::telemetry::{ACCESS, LogRateLimit};
use tunnel_proto::transport::ByteCount;
use tunnel_proto::wire::header::one_line;
use tunnel_proto::wire::name::SessionId;

use super::peer::{CallerAddr, CallerIdentity};
use crate::ingress::error::{Outcome, ProxyError};
use crate::metrics::{GaugeGuard, Metrics};

/// Longest text of a caller in a record, bytes.
const FIELD_MAX_BYTES: usize = 256;

/// A request or stream that is under way. Dropping it writes the record.
#[derive(Debug)]
pub struct AccessLog {
    listener: &'static str,
    peer: CallerAddr,
    caller: String,
    began: Instant,
    /// Method and path, or the service's name.
    subject: String,
    destination: String,
    session: Option<SessionId>,
    status: Option<u16>,
    outcome: Outcome,
    error: String,
    bytes: Arc<ByteCount>,
    /// What the stream had carried before this request: bytes received and sent.
    before: (u64, u64),
    metrics: Metrics,
    open: Option<GaugeGuard>,
    lines: Option<&'static LogRateLimit>,
}

impl AccessLog {
    /// Begins a record; until told otherwise its outcome is "caller gone".
    #[must_use]
    pub fn start(
        listener: &'static str,
        peer: impl Into<CallerAddr>,
        subject: &str,
        metrics: &Metrics,
    ) -> Self {
        let mut subject = one_line(subject);
        let mut end = subject.len().min(FIELD_MAX_BYTES);
        while !subject.is_char_boundary(end) {
            end -= 1;
        }
        subject.truncate(end);
        Self {
            listener,
            peer: peer.into(),
            caller: String::new(),
            began: Instant::now(),
            subject,
            destination: String::new(),
            session: None,
            status: None,
            outcome: Outcome::CallerGone,
            error: String::new(),
            bytes: Arc::default(),
            before: (0, 0),
            metrics: metrics.clone(),
            open: None,
            lines: None,
        }
    }

    /// Who asks, as far as that was proved.
    pub fn caller(&mut self, caller: &CallerIdentity) {
        self.caller = one_line(&caller.to_string());
    }

    /// A connection of the server's own that carries it.
    pub fn dialed(&mut self, bytes: Arc<ByteCount>) {
        self.bytes = bytes;
        self.open = Some(self.metrics.dialed());
    }

    /// Where it goes.
    pub fn destination(&mut self, destination: &impl ToString) {
        self.destination = destination.to_string();
    }

    /// A new stream that carries it; `elapsed` is what opening took.
    pub fn opened(
        &mut self,
        session: SessionId,
        bytes: Arc<ByteCount>,
        elapsed: std::time::Duration,
    ) {
        self.carried(Some(session), bytes);
        self.metrics.opened(elapsed);
    }

    /// The stream that carries it, which may have carried other requests before.
    pub fn carried(&mut self, session: Option<SessionId>, bytes: Arc<ByteCount>) {
        self.session = session;
        self.before = bytes.read();
        self.bytes = bytes;
        self.open = Some(self.metrics.stream());
    }

    /// The status that the caller was told.
    pub fn status(&mut self, status: http::StatusCode) {
        self.status = Some(status.as_u16());
    }

    /// How it ended.
    pub fn set_outcome(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Its line is one of many that are alike, of which only some are written.
    pub fn rate_limit(&mut self, lines: &'static LogRateLimit) {
        self.lines = Some(lines);
    }

    /// It failed before an answer of the target.
    pub fn fail(&mut self, failure: &ProxyError) {
        self.outcome = failure.outcome;
        self.error.clone_from(&failure.text);
        if let Some(limit) = failure.limit {
            self.metrics.limit(limit);
        }
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        let (received, sent) = self.bytes.read();
        let received = received.saturating_sub(self.before.0);
        let sent = sent.saturating_sub(self.before.1);
        self.metrics.ended(self.outcome, received, sent);
        if self.lines.is_some_and(|lines| !lines.admit()) {
            return;
        }
        info!(
            target: ACCESS,
            listener = self.listener,
            peer = %self.peer,
            caller = non_empty(&self.caller),
            request = self.subject,
            target = non_empty(&self.destination),
            session = self.session.map(|session| session.0),
            status = self.status,
            code = %self.outcome,
            error = non_empty(&self.error),
            bytes_in = received,
            bytes_out = sent,
            elapsed = ?self.began.elapsed(),
            "access"
        );
    }
}

/// A field that is left out when there is nothing to say.
fn non_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}
