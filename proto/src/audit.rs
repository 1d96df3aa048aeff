//! Audit events: the record of a stream in the form of an Event of `audit.k8s.io/v1`. What an Event has
//! no field for is an annotation `culvert.io/...`.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use http::header::USER_AGENT;
use http::{HeaderValue, Request};
use parking_lot::Mutex;
use tokio::time::Instant;
use tunnel_process::conn_limiter::source;
use tunnel_process::telemetry::{
    AuditGuard, AuditSettings, LeftOutEvents, RefusedSource, audit_log, start_audit,
};

pub use self::event::ANONYMOUS;
use self::event::{Stage, event};

use crate::stream_record::{AuditedHead, EndCode, RecordedPeer, StreamRecord};
use crate::wire::header::one_line;

mod event;

/// Returns what an event has of the head of a request, if there is an audit log: credentials in the
/// URL are left out, and the query but for the parameters that the settings list.
pub fn head<B>(request: &Request<B>) -> Option<Box<AuditedHead>> {
    let audit_log = audit_log()?;
    let uri = request.uri();
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    let query = audit_log.query(uri.query().unwrap_or_default());
    let user_agent = request.headers().get(USER_AGENT);
    let user_agent = user_agent.map_or(&[][..], HeaderValue::as_bytes);
    Some(Box::new(AuditedHead {
        method: one_line(request.method().as_str()).into(),
        uri: one_line([host, uri.path(), &query].concat()).into(),
        user_agent: one_line(String::from_utf8_lossy(user_agent)).into(),
    }))
}

/// Starts the audit log of this process, which is `server` or `agent`, unless it is off.
///
/// # Errors
/// When its output cannot be opened, or it was started before.
pub fn start(settings: &AuditSettings, reporter: &'static str) -> io::Result<AuditGuard> {
    start_audit(settings, move |audit_log, is_last| {
        while let Some(event) = OPEN.take_due(Instant::now()) {
            audit_log.push(&event);
        }
        for left_out in audit_log.take_left_out(is_last) {
            audit_log.push(&left_out_event(&left_out, reporter));
        }
    })
}

/// Time after which an open stream has an event.
const STARTED_AFTER: Duration = Duration::from_secs(60);

/// The open streams of this process.
static OPEN: OpenStreams = OpenStreams(Mutex::new(BTreeMap::new()));

/// Streams whose response has begun, by the time at which they have an event and by a number. Each
/// has a function that returns the event.
struct OpenStreams(Mutex<BTreeMap<(Instant, u64), StartedEvent>>);

type StartedEvent = Box<dyn Fn() -> Vec<u8> + Send>;

impl OpenStreams {
    fn insert(&self, due: Instant, event: StartedEvent) -> (Instant, u64) {
        let mut open = self.0.lock();
        let last = open.range((due, 0)..=(due, u64::MAX)).next_back();
        let key = (due, last.map_or(0, |((_, number), _)| number + 1));
        open.insert(key, event);
        key
    }

    /// Removes a stream that has an event by now. Returns the event.
    fn take_due(&self, now: Instant) -> Option<Vec<u8>> {
        let event = {
            let mut open = self.0.lock();
            let first = open.first_entry().filter(|first| first.key().0 <= now)?;
            first.remove()
        };
        Some(event())
    }
}

/// An open stream, until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenStreamGuard((Instant, u64));

impl Drop for OpenStreamGuard {
    fn drop(&mut self) {
        OPEN.0.lock().remove(&self.0);
    }
}

/// Records that the response of a stream has begun: if the stream is open for more than a minute, it
/// has an event meanwhile. Returns `None` if there is no audit log.
pub(crate) fn started<E>(
    record: &StreamRecord<E>,
    reporter: &'static str,
) -> Option<OpenStreamGuard>
where
    E: EndCode + Send + 'static,
{
    audit_log()?;
    let record = record.clone();
    let due = record.began + STARTED_AFTER;
    let event = Box::new(move || event(&record, reporter, Stage::ResponseStarted));
    Some(OpenStreamGuard(OPEN.insert(due, event)))
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
        audit_log.push(&event(record, reporter, Stage::ResponseComplete));
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

/// Returns the event that says how many events of a source were left out.
fn left_out_event(left_out: &LeftOutEvents, reporter: &'static str) -> Vec<u8> {
    let mut record = StreamRecord::start(Instant::now(), LeftOut);
    let LeftOutEvents { source, events } = left_out;
    let address = source.parse::<IpAddr>();
    record.peer = address.ok().map(|ip| RecordedPeer::Tcp((ip, 0).into()));
    if source.starts_with(AGENT) {
        record.caller.clone_from(source);
    }
    record.detail =
        format!("{events} events of requests of {source} that reached no target were left out");
    record.head = Some(Box::new(AuditedHead {
        method: "summary".into(),
        uri: "".into(),
        user_agent: "".into(),
    }));
    event(&record, reporter, Stage::ResponseComplete)
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
        let left_out = LeftOutEvents {
            source: "agent:cam-1".to_owned(),
            events: 7,
        };
        let event = left_out_event(&left_out, "server");
        let event: serde_json::Value = serde_json::from_slice(&event).unwrap();
        assert_eq!(event["user"]["username"], "agent:cam-1");
        assert!(event.get("sourceIPs").is_none());
    }

    #[test]
    fn stream_that_is_open_for_a_minute_has_one_event_meanwhile() {
        let (open, start) = (OpenStreams(Mutex::default()), Instant::now());
        let due = start + STARTED_AFTER;
        let insert = |name: &'static str| open.insert(due, Box::new(move || name.into()));
        let (_first, second) = (insert("first"), insert("second"));
        assert_eq!(open.take_due(start + Duration::from_secs(59)), None);
        open.0.lock().remove(&second);
        assert_eq!(open.take_due(due).as_deref(), Some(&b"first"[..]));
        assert_eq!(open.take_due(due), None);
    }
}
