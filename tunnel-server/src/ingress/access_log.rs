//! The access log: one line and one count for each request or stream of a caller, written when the
//! request or stream ends. What reached neither a node nor another target has a budget of lines for
//! each source, and only a sample of the heads that cannot be parsed is logged.

use std::fmt::{self, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;
use tunnel_process::conn_limiter::source;
use tunnel_process::shutdown::Shutdown;
use tunnel_process::telemetry::{ACCESS, StreamLines, StreamStage, non_empty};
use tunnel_proto::stream_record::{StreamEnd, StreamRecord};
use tunnel_proto::transport::ByteCount;
use tunnel_proto::wire::header::{StreamKind, one_line};
use tunnel_proto::wire::name::{NodeName, Port, ReplicaId};

use super::peer::{CallerAddr, CallerIdentity};
use crate::ingress::caller_stream::ResponseGuard;
use crate::ingress::error::{ProxyError, refusal_outcome};
use crate::ingress::outcome::Outcome;
use crate::ingress::recent_requests::{RecentRequest, RecentRequests};
use crate::metrics::{GaugeGuard, Metrics};
use crate::routing::OpenStream;
use crate::routing::attempts::ResendCause;
use crate::routing::via::Via;
use tunnel_routing::destination::Destination;

/// Longest text of a caller in an access log line, and of any kind in a recent request, in bytes.
const FIELD_MAX_BYTES: usize = 256;

/// A caller can send heads that cannot be parsed, or plain HTTP instead of TLS, faster than a disk
/// accepts lines, and all these lines are alike.
static LINES: StreamLines<IpAddr> = StreamLines::new(
    "requests that cannot be read",
    "access log lines of requests that reached no node",
);

/// Capacity for the text of a destination, in bytes.
const DESTINATION_CAPACITY: usize = 64;

/// The access log entry of a request or stream in progress. Dropping the entry writes the line.
#[derive(Debug)]
pub struct AccessLog {
    listener: &'static str,
    peer: CallerAddr,
    caller: String,
    began: Instant,
    /// Method and path, or the name of the TCP service.
    subject: String,
    destination: String,
    /// The node and the port that the caller asks for, as soon as they are known.
    node: Option<NodeName>,
    port: Option<Port>,
    via: Option<Via>,
    status: Option<u16>,
    outcome: Outcome,
    error: String,
    bytes: ByteCount,
    /// Bytes received and sent on the stream before this request.
    before: (u64, u64),
    metrics: Metrics,
    open: Option<GaugeGuard>,
    /// The request was sent once more because its session was lost.
    is_retried: bool,
    is_unreadable: bool,
    /// A stream or a dialed connection carries the request.
    has_reached_target: bool,
    recent: Option<Arc<RecentRequests>>,
    /// Canceled when this server ends what its drain has left.
    drained: CancellationToken,
}

impl AccessLog {
    /// Starts an entry with the outcome [`Outcome::CallerGone`].
    pub fn start(
        listener: &'static str,
        peer: impl Into<CallerAddr>,
        subject: &str,
        metrics: &Metrics,
    ) -> Self {
        let mut subject = one_line(subject);
        subject.truncate(field_length(&subject));
        Self {
            listener,
            peer: peer.into(),
            caller: String::new(),
            began: Instant::now(),
            subject,
            destination: String::new(),
            node: None,
            port: None,
            via: None,
            status: None,
            outcome: Outcome::CallerGone,
            error: String::new(),
            bytes: ByteCount::default(),
            before: (0, 0),
            metrics: metrics.clone(),
            open: None,
            is_retried: false,
            is_unreadable: false,
            has_reached_target: false,
            recent: None,
            drained: CancellationToken::new(),
        }
    }

    /// Makes a cut that happens when a drain has reached its deadline one of the drain:
    /// [`Outcome::Draining`].
    pub fn ends_with(&mut self, shutdown: &Shutdown) {
        self.drained = shutdown.drained().clone();
    }

    /// Records the caller's identity, as far as the caller has proved it.
    pub fn caller(&mut self, caller: &CallerIdentity) {
        self.caller = one_line(&caller.to_string());
    }

    /// Records that a connection which the server dialed carries the request.
    pub fn dialed(&mut self, bytes: ByteCount) {
        self.has_reached_target = true;
        self.bytes = bytes;
        self.open = Some(self.metrics.dialed());
    }

    /// Records the node and the port that the caller asks for, also of a request that is refused.
    pub fn requested(&mut self, node: &NodeName, port: Port) {
        self.node = Some(node.clone());
        self.port = Some(port);
    }

    /// Records the node and the target of a request.
    pub fn destination(&mut self, destination: &Destination) {
        self.requested(&destination.node, destination.target.port());
        self.target(destination);
    }

    /// Records a target that the server dials itself.
    pub fn direct(&mut self, target_label: &str, port: Port) {
        self.port = Some(port);
        self.target(&format_args!("direct {target_label}"));
    }

    fn target(&mut self, target: &impl fmt::Display) {
        // With space for most texts, since each part of a destination is written separately.
        let mut text = String::with_capacity(DESTINATION_CAPACITY);
        let _never_fails = write!(text, "{target}");
        self.destination = text;
    }

    /// Records that a new stream carries the request.
    pub fn opened(&mut self, opened: &OpenStream) {
        self.carried(Some(opened.via.clone()), opened.stream.bytes());
        self.metrics.opened(opened.elapsed);
        let is_retried = opened.resent == Some(ResendCause::SessionLost);
        if is_retried && !std::mem::replace(&mut self.is_retried, true) {
            self.metrics.retried();
        }
    }

    /// Records the stream that carries the request. The stream may have carried earlier requests.
    pub fn carried(&mut self, via: Option<Via>, bytes: ByteCount) {
        self.has_reached_target = true;
        self.via = via;
        self.before = bytes.read();
        self.bytes = bytes;
        self.open = Some(self.metrics.stream());
    }

    pub fn status(&mut self, status: http::StatusCode) {
        self.status = Some(status.as_u16());
    }

    /// Records how the request or stream ended.
    pub fn set_outcome(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Records that the request cannot be read. Only a sample of such entries has a line.
    pub fn unreadable(&mut self) {
        self.is_unreadable = true;
    }

    /// Records the entry in `recent` as well when it ends, if it is one of a node.
    pub fn record_in(&mut self, recent: Option<Arc<RecentRequests>>) {
        self.recent = recent;
    }

    /// Records a failure that occurred before the target responded.
    pub fn fail(&mut self, failure: &ProxyError) {
        self.outcome = failure.outcome;
        self.error.clone_from(&failure.text);
        if let Some(limit) = failure.limit {
            self.metrics.limit(limit);
        }
    }

    /// Returns how far the request came. A caller cannot cause requests that reach a target faster
    /// than the target answers, but refusals cost it nothing.
    fn stage(&self) -> StreamStage {
        if self.is_unreadable {
            StreamStage::Unknown
        } else if self.has_reached_target {
            StreamStage::Opened {
                is_ok: self.outcome == Outcome::Ok,
            }
        } else {
            StreamStage::Refused
        }
    }

    fn record_recent(&self, received: u64, sent: u64) {
        let (Some(recent), Some(node)) = (&self.recent, &self.node) else {
            return;
        };
        let request = RecentRequest {
            at: SystemTime::now(),
            listener: self.listener,
            peer: self.peer,
            caller: field(&self.caller),
            request: field(&self.subject),
            port: self.port,
            status: self.status,
            outcome: self.outcome,
            error: field(&self.error),
            bytes_in: received,
            bytes_out: sent,
            elapsed: self.began.elapsed(),
        };
        recent.record(node, request);
    }
}

/// A response or byte stream in progress: the access log entry, and the caller's connection that
/// the response completes or resets.
#[derive(Debug)]
pub struct ExchangeGuard {
    /// Resets the caller's connection unless finished.
    pub response_guard: ResponseGuard,
    /// The access log entry, written when dropped.
    pub access_log: AccessLog,
}

impl ExchangeGuard {
    /// Marks the exchange as complete.
    pub fn finish(mut self) {
        self.access_log.set_outcome(Outcome::Ok);
        self.response_guard.finish();
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        if self.outcome == Outcome::Cut && self.drained.is_cancelled() {
            self.outcome = Outcome::Draining;
            "this server stops, and --drain-timeout is over".clone_into(&mut self.error);
        }
        let (received, sent) = self.bytes.read();
        let received = received.saturating_sub(self.before.0);
        let sent = sent.saturating_sub(self.before.1);
        self.metrics.ended(self.outcome, received, sent);
        self.record_recent(received, sent);
        let (code, source) = (self.outcome.label(), source(self.peer.source()));
        let Some(form) = LINES.admit(self.stage(), code, source) else {
            return;
        };
        info!(
            target: ACCESS,
            listener = self.listener,
            peer = %self.peer,
            caller = non_empty(&self.caller),
            request = self.subject,
            node = self.node.as_ref().map(NodeName::as_str),
            port = self.port.map(Port::get),
            target = non_empty(&self.destination),
            session = self.via.as_ref().and_then(Via::session_number),
            via = self.via.as_ref().and_then(Via::replica).map(tracing::field::display),
            status = self.status,
            code,
            retried = self.is_retried.then_some(true),
            error = non_empty(form.of_error(&self.error)),
            bytes_in = received,
            bytes_out = sent,
            elapsed = self.began.elapsed().as_secs_f64(),
            "access"
        );
    }
}

/// Records a stream to a node that `replica` has forwarded from `remote`: a line, and a recent request
/// of the node.
pub fn record_forwarded(
    record: &StreamRecord,
    replica: &ReplicaId,
    remote: SocketAddr,
    recent: Option<&RecentRequests>,
) {
    let Some(StreamKind::Forward { node, target, .. }) = &record.kind else {
        return;
    };
    if let Some(recent) = recent {
        let request = RecentRequest {
            at: SystemTime::now(),
            listener: "peers",
            peer: remote.into(),
            caller: field(&format!("server:{replica}")),
            request: field(&target.to_string()),
            port: Some(target.port()),
            status: None,
            outcome: record.end.into(),
            error: field(&record.detail),
            bytes_in: record.bytes_in,
            bytes_out: record.bytes_out,
            elapsed: record.began.elapsed(),
        };
        recent.record(node, request);
    }
    record.log(&FORWARDED_LINES, record.end.stage(), replica.clone());
}

/// Another server can forward streams that are refused faster than a disk accepts lines.
static FORWARDED_LINES: StreamLines<ReplicaId> = StreamLines::new(
    "forwarded streams without a header",
    "access log lines of refused streams of another server",
);

impl From<StreamEnd> for Outcome {
    fn from(end: StreamEnd) -> Self {
        match end {
            StreamEnd::Ok | StreamEnd::ReaderClosed => Self::Ok,
            StreamEnd::CutByPeer | StreamEnd::CutByCaller => Self::CallerGone,
            StreamEnd::CutByTarget | StreamEnd::AgentStopping => Self::Cut,
            StreamEnd::ReaderStalled => Self::ReaderStalled,
            StreamEnd::NoSession => Self::NoAgent,
            StreamEnd::NoReply => Self::AgentTimeout,
            StreamEnd::NoHeader => Self::BadRequest,
            StreamEnd::Refused(code) => refusal_outcome(code),
        }
    }
}

/// Returns the length of the longest beginning of `text` that is a field.
fn field_length(text: &str) -> usize {
    let mut end = text.len().min(FIELD_MAX_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    end
}

fn field(text: &str) -> Box<str> {
    text.get(..field_length(text)).unwrap_or_default().into()
}
