//! The record of a request or stream of a caller, which ends with it. What reached neither a node nor
//! another target has a budget of lines in the access log for each source, and only a sample of the
//! heads that cannot be parsed is logged.

use std::fmt::{self, Write as _};
use std::net::IpAddr;
use std::sync::Arc;

use http::{Request, StatusCode};
use tokio::time::Instant;
use tunnel_process::conn_limiter::source;
use tunnel_process::shutdown::{DrainExpired, Shutdown};
use tunnel_process::telemetry::{LineForm, StreamLines, StreamStage, non_empty};
use tunnel_proto::audit::{self, ANONYMOUS};
use tunnel_proto::open_record::{OpenRecord, RecordSinks};
use tunnel_proto::stream_record::{StreamEnd, StreamRecord};
use tunnel_proto::transport::ByteCount;
use tunnel_proto::wire::header::{AuditId, StreamHeader, one_line};
use tunnel_proto::wire::name::{NodeName, Port, ReplicaId};

use super::caller_addr::{CallerAddr, CallerIdentity};
use crate::ingress::caller_stream::ResponseGuard;
use crate::ingress::error::{ProxyError, refusal_outcome};
use crate::ingress::recent_requests::{RecentRequests, beginning};
use crate::metrics::{GaugeGuard, Metrics};
use crate::outcome::Outcome;
use crate::routing::OpenStream;
use crate::routing::attempts::ResendCause;
use crate::routing::via::Via;
use crate::running::RunningGuard;
use tunnel_routing::destination::Destination;
use tunnel_routing::operation::Operation;

/// A caller can send heads that cannot be parsed, or plain HTTP instead of TLS, faster than a disk
/// accepts lines, and all these lines are alike.
static LINES: StreamLines<IpAddr> = StreamLines::new(
    "requests that cannot be read",
    "access log lines of requests that reached no node",
);

/// Capacity for the text of a destination, in bytes.
const DESTINATION_CAPACITY: usize = 64;

/// The record of a request or stream in progress. Dropping it ends the record.
#[derive(Debug)]
pub struct RequestRecord(OpenRecord<IngressSinks, Outcome>);

/// What the record of a caller needs to end.
#[derive(Debug)]
struct IngressSinks {
    source: IpAddr,
    metrics: Metrics,
    open: Option<GaugeGuard>,
    /// A stream or a dialed connection carries the request.
    has_reached_target: bool,
    /// The agent refused the stream, or the target has received nothing of the request.
    is_refused: bool,
    recent: Option<Arc<RecentRequests>>,
    /// The access, once it is allowed.
    running: Option<RunningGuard>,
    /// Set when this server ends what its drain has left. `None` for a record that no drain ends.
    drain_expired: Option<DrainExpired>,
}

impl RecordSinks<Outcome> for IngressSinks {
    const DROPPED: Outcome = Outcome::CallerGone;
    const REPORTER: &'static str = "server";

    fn has_reached_target(&self, _record: &StreamRecord<Outcome>) -> bool {
        self.has_reached_target && !self.is_refused
    }

    fn end(&self, record: &mut StreamRecord<Outcome>) -> Option<LineForm> {
        let drain_expired = self.drain_expired.as_ref();
        if record.end == Outcome::Cut && drain_expired.is_some_and(DrainExpired::is_set) {
            let detail = "this server stops, and --drain-timeout is over";
            record.fail(Outcome::Draining, detail);
        }
        let refused = self.running.as_ref().and_then(RunningGuard::refused);
        if let Some(refused) = refused.filter(|_| record.end.is_unfinished()) {
            record.fail(Outcome::RefusedByPolicy, &*refused.reason);
            record.rule.clone_from(&refused.rule);
        }
        self.metrics
            .ended(record.end, record.bytes_in, record.bytes_out);
        if let Some(recent) = &self.recent {
            recent.record(record);
        }
        // A caller cannot cause requests that reach a target faster than the target answers, but
        // refusals cost it nothing.
        let stage = if record.is_unread {
            StreamStage::Unknown
        } else if self.has_reached_target {
            StreamStage::Opened {
                is_ok: record.end == Outcome::Ok,
            }
        } else {
            StreamStage::Refused
        };
        LINES.admit(stage, record.end.label(), self.source)
    }
}

impl RequestRecord {
    /// Starts a record with the outcome [`Outcome::CallerGone`].
    pub fn start(
        listener: &'static str,
        addr: impl Into<CallerAddr>,
        subject: impl Into<String>,
        metrics: &Metrics,
    ) -> Self {
        let addr = addr.into();
        let sinks = IngressSinks {
            source: source(addr.source()),
            metrics: metrics.clone(),
            open: None,
            has_reached_target: false,
            is_refused: false,
            recent: None,
            running: None,
            drain_expired: None,
        };
        let open = OpenRecord::start(Instant::now(), sinks);
        let subject: String = subject.into();
        let mut request = one_line(subject);
        request.truncate(beginning(&request).len());
        let mut record = open.lock();
        record.listener = Some(listener);
        record.peer = Some(addr.into());
        record.request = request;
        drop(record);
        Self(open)
    }

    /// Makes a cut that happens when a drain has reached its deadline one of the drain:
    /// [`Outcome::Draining`].
    pub fn ends_with(&mut self, shutdown: &Shutdown) {
        self.0.sinks.drain_expired = Some(shutdown.drain_expired().clone());
    }

    /// Records the caller's identity, as far as the caller has proved it.
    pub fn caller(&mut self, caller: &CallerIdentity) {
        self.0.lock().caller = one_line(caller.to_string());
    }

    /// Records the head of an HTTP request for the audit log.
    pub fn head<B>(&mut self, request: &Request<B>) {
        self.0.lock().head = audit::head(request);
    }

    /// Records what the caller asked to do, and the rule that decided.
    pub fn decided(&mut self, operation: Operation, rule: Option<&Arc<str>>) {
        let mut record = self.0.lock();
        record.operation = Some(operation.label().into());
        record.rule = rule.cloned();
    }

    /// Records what the rules of a dry run decide otherwise.
    pub fn dry_run(&mut self, decided: Option<Box<str>>) {
        self.0.lock().dry_run = decided;
    }

    /// Records that the access has begun.
    pub fn running(&mut self, access: RunningGuard) {
        self.0.sinks.running = Some(access);
    }

    /// Sets what the records of other ends have in common with this one.
    pub fn identify(&self, header: &mut StreamHeader) {
        let record = self.0.lock();
        header.audit_id = Some(record.audit_id);
        header.caller = non_empty(&record.caller).unwrap_or(ANONYMOUS).to_owned();
        let operation = record.operation.as_deref().unwrap_or_default();
        operation.clone_into(&mut header.operation);
    }

    /// Returns what the audit events of the request have in common at all ends.
    pub fn audit_id(&self) -> AuditId {
        self.0.lock().audit_id
    }

    /// Records that the tunnel of a TCP service is open.
    pub fn started(&mut self) {
        self.0.started();
    }

    /// Records that a connection which the server dialed carries the request.
    pub fn dialed(&mut self, bytes: ByteCount) {
        self.0.carried(bytes);
        self.0.sinks.has_reached_target = true;
        self.0.sinks.open = Some(self.0.sinks.metrics.dialed());
    }

    /// Records the node and the port that the caller asks for, also of a request that is refused.
    pub fn requested(&mut self, node: &NodeName, port: Port) {
        let mut record = self.0.lock();
        record.node = Some(node.clone());
        record.port = Some(port);
    }

    /// Records the node and the target of a request.
    pub fn destination(&mut self, destination: &Destination) {
        self.requested(&destination.node, destination.target.port());
        self.target(destination);
    }

    /// Records a target that the server dials itself.
    pub fn direct(&mut self, target_label: &str, port: Port) {
        self.0.lock().port = Some(port);
        self.target(&format_args!("direct {target_label}"));
    }

    fn target(&mut self, target: &impl fmt::Display) {
        // With space for most texts, since each part of a destination is written separately.
        let mut text = String::with_capacity(DESTINATION_CAPACITY);
        let _never_fails = write!(text, "{target}");
        self.0.lock().target = text;
    }

    /// Records that a new stream carries the request.
    pub fn opened(&mut self, opened: &OpenStream) {
        self.carried(Some(opened.via.clone()), opened.stream.bytes(), None);
        self.0.sinks.metrics.opened(opened.elapsed);
        let is_retried = opened.resent == Some(ResendCause::SessionLost);
        if is_retried && !std::mem::replace(&mut self.0.lock().is_retried, true) {
            self.0.sinks.metrics.retried();
        }
    }

    /// Records the stream of an earlier request, which carries this one.
    pub fn reused(&mut self, via: Option<Via>, bytes: ByteCount, audit_id: Option<AuditId>) {
        self.carried(via, bytes, audit_id);
    }

    /// Returns the other server that forwards the stream of the request.
    pub fn via(&self) -> Option<ReplicaId> {
        self.0.lock().via.clone()
    }

    /// Records what carries the request, and which other request has opened it, if one has.
    fn carried(&mut self, via: Option<Via>, bytes: ByteCount, opened_by: Option<AuditId>) {
        {
            let mut record = self.0.lock();
            record.stream = opened_by;
            (record.session, record.via) = match via {
                Some(Via::Local(session)) => (Some(session), None),
                Some(Via::Replica(replica)) => (None, Some(replica)),
                None => (None, None),
            };
        }
        self.0.carried(bytes);
        self.0.sinks.has_reached_target = true;
        self.0.sinks.open = Some(self.0.sinks.metrics.stream());
    }

    /// Records the status of the response, which begins.
    pub fn status(&mut self, status: StatusCode) {
        self.0.lock().status = Some(status.as_u16());
        self.0.started();
    }

    /// Records how the request or stream ended.
    pub fn set_outcome(&mut self, outcome: Outcome) {
        self.0.lock().end = outcome;
    }

    /// Records that the request cannot be read. Only a sample of such records has a line, and none an
    /// audit event.
    pub fn unreadable(&mut self) {
        self.0.lock().is_unread = true;
    }

    /// Records the request in `recent` as well when it ends, if it is one of a node.
    pub fn record_in(&mut self, recent: Option<Arc<RecentRequests>>) {
        self.0.sinks.recent = recent;
    }

    /// Records a failure that occurred before the target responded.
    pub fn fail(&mut self, failure: &ProxyError) {
        self.0.lock().fail(failure.outcome, failure.text.as_str());
        // Any other failure may be one of a request that the target has executed.
        self.0.sinks.is_refused =
            failure.refusal.is_some() || failure.outcome == Outcome::TargetTls;
        if let Some(limit) = failure.limit {
            self.0.sinks.metrics.limit(limit);
        }
    }
}

/// A response or byte stream in progress: its record, and the caller's connection that the
/// response completes or resets.
#[derive(Debug)]
pub struct ExchangeGuard {
    /// Resets the caller's connection unless finished.
    pub response_guard: ResponseGuard,
    /// The record, which ends when dropped.
    pub record: RequestRecord,
}

impl ExchangeGuard {
    /// Marks the exchange as complete.
    pub fn finish(mut self) {
        self.record.set_outcome(Outcome::Ok);
        self.response_guard.finish();
    }

    /// Marks the caller's connection as cut and ends the record, as a drop does. What of the connection
    /// is shut down or dropped after this call is a reset for the caller, and before it a clean end.
    pub fn abort(self) {
        drop(self);
    }
}

impl From<StreamEnd> for Outcome {
    fn from(end: StreamEnd) -> Self {
        match end {
            StreamEnd::Ok | StreamEnd::ReaderClosed => Self::Ok,
            StreamEnd::CutByPeer | StreamEnd::CutByCaller | StreamEnd::OpenerGone => {
                Self::CallerGone
            }
            StreamEnd::CutByTarget | StreamEnd::AgentStopping => Self::Cut,
            StreamEnd::ServerStopping => Self::Draining,
            StreamEnd::ReaderStalled => Self::ReaderStalled,
            StreamEnd::NoSession => Self::NoAgent,
            StreamEnd::NoReply => Self::AgentTimeout,
            StreamEnd::NoHeader => Self::BadRequest,
            StreamEnd::Refused(code) => refusal_outcome(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tunnel_proto::wire::name::SessionId;

    use super::*;
    use crate::ingress::http::tests::fixture::Fixture;
    use crate::routing::registry::CallerKey;
    use crate::testing::{self, node};

    #[tokio::test]
    async fn record_of_a_request_that_moves_to_a_stream_of_its_own_names_no_other_request() {
        let (fixture, _agent) = Fixture::with_agent();
        let addr: SocketAddr = "192.0.2.1:5".parse().unwrap();
        let mut record = RequestRecord::start("http", addr, "GET /", &fixture.ingress.metrics);
        let earlier = Some(AuditId::new([1; 16]));
        let via = Some(Via::Local(SessionId(1)));
        record.reused(via, ByteCount::default(), earlier);
        assert_eq!(record.0.lock().stream, earlier);
        let caller = CallerKey::Certificate("prometheus".into());
        let opened = testing::open(&fixture.registry, &node(), &caller).await;
        record.opened(&opened.unwrap());
        assert_eq!(record.0.lock().stream, None);
    }
}
