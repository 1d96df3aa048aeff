//! Audit events: the record of a stream in the form of an Event of `audit.k8s.io/v1`. What an Event has
//! no field for is an annotation `culvert.io/...`.

use std::borrow::Cow;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use http::header::USER_AGENT;
use http::{HeaderValue, Method, Request};
use tokio::time::Instant;
use tunnel_process::conn_limiter::source;
use tunnel_process::telemetry::{
    AuditGuard, AuditSettings, LeftOutEvents, RefusedSource, audit_log, start_audit,
};

pub use self::event::ANONYMOUS;
use self::event::{Stage, with_event};
use self::open_streams::OpenStreams;
pub(crate) use self::open_streams::{OpenStreamGuard, SharedRecord};

use crate::stream_record::{AuditedHead, EndCode, RecordedPeer, StreamRecord};
use crate::wire::header::one_line;

mod event;
mod open_streams;

/// Returns what an event has of the head of a request, if there is an audit log: credentials in the
/// URL are left out, and the query but for the parameters that the settings list.
pub fn head<B>(request: &Request<B>) -> Option<AuditedHead> {
    let audit_log = audit_log()?;
    let uri = request.uri();
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    let query = audit_log.query(uri.query().unwrap_or_default());
    let user_agent = request.headers().get(USER_AGENT);
    let user_agent = user_agent.map_or(&[][..], HeaderValue::as_bytes);
    let user_agent = String::from_utf8_lossy(user_agent);
    Some(AuditedHead::new(
        verb(request.method()),
        [host, uri.path(), &query],
        &user_agent,
    ))
}

/// Returns the verb of Kubernetes for a method, or the method in lower case.
fn verb(method: &Method) -> Cow<'static, str> {
    match method.as_str() {
        "GET" | "HEAD" => "get".into(),
        "POST" => "create".into(),
        "PUT" => "update".into(),
        other => one_line(other).to_ascii_lowercase().into(),
    }
}

/// Starts the audit log of this process, which is `server` or `agent`, unless it is off.
///
/// # Errors
/// When its output cannot be opened, or it was started before.
pub fn start(settings: &AuditSettings, reporter: &'static str) -> io::Result<AuditGuard> {
    start_audit(settings, move |audit_log, is_last| {
        OPEN.write_due(Instant::now(), is_last, &mut |event| audit_log.push(event));
        for left_out in audit_log.take_left_out(is_last) {
            let record = left_out_record(&left_out);
            let stage = Stage::ResponseComplete;
            with_event(&record, reporter, stage, |event| audit_log.push(event));
        }
    })
}

/// The open streams of this process.
static OPEN: OpenStreams = OpenStreams::new();

/// Records that the response of a stream, which was accepted at `began`, has begun: if the stream is open
/// for more than a minute, it has an event meanwhile. Returns `None` if there is no audit log.
pub(crate) fn started<E>(record: &Arc<SharedRecord<E>>, began: Instant) -> Option<OpenStreamGuard>
where
    E: EndCode + Send + 'static,
{
    audit_log()?;
    Some(OPEN.insert(began, record.clone()))
}

/// Writes the event of a stream that has ended, if there is an audit log. A stream that did not say
/// what it wants has none. One that reached no target counts for its source, if nobody has verified the
/// caller, or the caller is an agent.
pub(crate) fn ended<E: EndCode>(
    record: &StreamRecord<E>,
    reporter: &'static str,
    has_reached_target: bool,
) {
    let Some(audit_log) = audit_log().filter(|_| !record.is_unread) else {
        return;
    };
    let limited = refused_source(record).filter(|_| !has_reached_target);
    if limited.is_none_or(|source| audit_log.admits_refused(source)) {
        let stage = Stage::ResponseComplete;
        with_event(record, reporter, stage, |event| audit_log.push(event));
    }
}

/// Returns the source of a stream whose caller nobody has verified, or is an agent.
fn refused_source<E>(record: &StreamRecord<E>) -> Option<RefusedSource> {
    if record.is_claimed {
        let is_unverified = record.caller.is_empty() || record.caller == ANONYMOUS;
        return is_unverified.then_some(RefusedSource::OtherEnd);
    }
    if record.caller.starts_with(AGENT) {
        return Some(RefusedSource::Agent(record.caller.as_str().into()));
    }
    match &record.peer {
        Some(RecordedPeer::Tcp(address)) if record.caller.is_empty() => {
            Some(RefusedSource::Address(source(address.ip())))
        }
        // Only users of this host connect over a Unix socket.
        Some(RecordedPeer::Tcp(_) | RecordedPeer::Unix | RecordedPeer::Server(_)) | None => None,
    }
}

/// The end in an event that counts others.
#[derive(Debug, Clone, Copy)]
struct LeftOut;

impl EndCode for LeftOut {
    fn label(self) -> &'static str {
        "events_left_out"
    }
}

/// Returns the record whose event says how many events of a source were left out.
fn left_out_record(left_out: &LeftOutEvents) -> StreamRecord<LeftOut> {
    let mut record = StreamRecord::start(Instant::now(), LeftOut);
    let LeftOutEvents { source, events } = left_out;
    let address = source.parse::<IpAddr>();
    record.peer = address.ok().map(|ip| RecordedPeer::Tcp((ip, 0).into()));
    if source.starts_with(AGENT) {
        record.caller.clone_from(source);
    }
    record.detail =
        format!("{events} events of requests of {source} that reached no target were left out");
    record.head = Some(AuditedHead::new("summary".into(), [""; 3], ""));
    record
}

/// Begins the name of a caller that is an agent.
const AGENT: &str = "agent:";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream_record::StreamEnd;

    #[test]
    fn refused_streams_of_an_agent_have_a_budget_and_those_of_other_verified_callers_have_none() {
        let mut record = StreamRecord::start(Instant::now(), StreamEnd::Ok);
        record.peer = Some(RecordedPeer::Tcp(([192, 0, 2, 1], 443).into()));
        for (caller, expected) in [
            ("", Some("192.0.2.1")),
            ("agent:cam-1", Some("agent:cam-1")),
            ("user:ops", None),
            ("certificate:agent:cam-1", None),
        ] {
            caller.clone_into(&mut record.caller);
            let source = refused_source(&record).map(|source| source.to_string());
            assert_eq!(source.as_deref(), expected, "{caller}");
        }
        // The other end says who calls.
        record.is_claimed = true;
        for (caller, has_budget) in [("", true), (ANONYMOUS, true), ("user:ops", false)] {
            caller.clone_into(&mut record.caller);
            let expected = has_budget.then_some(RefusedSource::OtherEnd);
            assert_eq!(refused_source(&record), expected, "{caller}");
        }
        let left_out = LeftOutEvents {
            source: "agent:cam-1".to_owned(),
            events: 7,
        };
        let record = left_out_record(&left_out);
        with_event(&record, "server", Stage::ResponseComplete, |event| {
            let event: serde_json::Value = serde_json::from_slice(event).unwrap();
            assert_eq!(event["verb"], "summary");
            assert_eq!(event["user"]["username"], "agent:cam-1");
            assert!(event.get("sourceIPs").is_none());
        });
    }

    #[test]
    fn verb_of_a_method_is_that_of_kubernetes() {
        for (method, expected) in [
            (Method::GET, "get"),
            (Method::HEAD, "get"),
            (Method::POST, "create"),
            (Method::PUT, "update"),
            (Method::DELETE, "delete"),
            (Method::CONNECT, "connect"),
        ] {
            assert_eq!(verb(&method), expected);
        }
    }
}
