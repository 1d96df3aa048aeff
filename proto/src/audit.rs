//! Audit events: the record of a stream in the form of an Event of `audit.k8s.io/v1`. What an Event has
//! no field for is an annotation `culvert.io/...`.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use http::header::USER_AGENT;
use http::{HeaderValue, Request};
use humantime::format_rfc3339_micros;
use parking_lot::Mutex;
use serde::ser::{Serialize, SerializeMap, Serializer};
use tokio::time::Instant;
use tunnel_process::conn_limiter::source;
use tunnel_process::telemetry::{
    AuditGuard, AuditSettings, LeftOutEvents, RefusedSource, audit_log, non_empty, start_audit,
};

use crate::stream_record::{AuditedHead, EndCode, RecordedPeer, StreamRecord};
use crate::wire::header::one_line;

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

type StartedEvent = Box<dyn Fn() -> String + Send>;

impl OpenStreams {
    fn insert(&self, due: Instant, event: StartedEvent) -> (Instant, u64) {
        let mut open = self.0.lock();
        let last = open.range((due, 0)..=(due, u64::MAX)).next_back();
        let key = (due, last.map_or(0, |((_, number), _)| number + 1));
        open.insert(key, event);
        key
    }

    /// Removes a stream that has an event by now. Returns the event.
    fn take_due(&self, now: Instant) -> Option<String> {
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
fn left_out_event(left_out: &LeftOutEvents, reporter: &'static str) -> String {
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

/// The stage of a stream at its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    ResponseStarted,
    ResponseComplete,
}

/// Returns an event as one JSON object. `reporter` is `server` or `agent`.
fn event<E: EndCode>(record: &StreamRecord<E>, reporter: &'static str, stage: Stage) -> String {
    let event = Event {
        record,
        reporter,
        stage,
        now: SystemTime::now(),
    };
    // Writing to memory cannot fail.
    serde_json::to_string(&event).unwrap_or_default()
}

struct Event<'a, E> {
    record: &'a StreamRecord<E>,
    reporter: &'static str,
    stage: Stage,
    now: SystemTime,
}

impl<E: EndCode> Serialize for Event<'_, E> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let record = self.record;
        let head = record.head.as_deref();
        let mut event = serializer.serialize_map(None)?;
        event.serialize_entry("kind", "Event")?;
        event.serialize_entry("apiVersion", "audit.k8s.io/v1")?;
        event.serialize_entry("level", "Metadata")?;
        event.serialize_entry("auditID", &Text(record.audit_id))?;
        let stage = match self.stage {
            Stage::ResponseStarted => "ResponseStarted",
            Stage::ResponseComplete => "ResponseComplete",
        };
        event.serialize_entry("stage", stage)?;
        let uri = head.map_or("", |head| &*head.uri);
        event.serialize_entry("requestURI", uri)?;
        event.serialize_entry("verb", &verb(record))?;
        let is_anonymous = record.caller.is_empty() && !record.is_claimed;
        let caller = if is_anonymous {
            ANONYMOUS
        } else {
            &record.caller
        };
        event.serialize_entry("user", &User(caller))?;
        if let Some(RecordedPeer::Tcp(address)) = &record.peer {
            event.serialize_entry("sourceIPs", &[address.ip().to_canonical()] as &[IpAddr])?;
        }
        if let Some(agent) = head.and_then(|head| non_empty(&head.user_agent)) {
            event.serialize_entry("userAgent", agent)?;
        }
        if record.direction.is_none()
            && let Some(node) = &record.node
        {
            event.serialize_entry(
                "objectRef",
                &Fields(&[
                    ("resource", Some(&"nodes")),
                    ("name", Some(&node.as_str())),
                    ("apiVersion", Some(&"v1")),
                    ("subresource", Some(&"proxy")),
                ]),
            )?;
        }
        event.serialize_entry("responseStatus", &ResponseStatus(self))?;
        let received = Text(format_rfc3339_micros(record.received_at));
        event.serialize_entry("requestReceivedTimestamp", &received)?;
        let now = Text(format_rfc3339_micros(self.now));
        event.serialize_entry("stageTimestamp", &now)?;
        event.serialize_entry("annotations", &Annotations(self))?;
        event.end()
    }
}

/// Returns the verb of Kubernetes for a request. A caller that runs something on a node creates, whatever
/// the method is.
fn verb<E>(record: &StreamRecord<E>) -> String {
    if let Some("exec" | "attach" | "portforward" | "run") = record.operation.as_deref() {
        return "create".to_owned();
    }
    let verb = match record.head.as_deref().map(|head| &*head.method) {
        None => "connect",
        Some("GET" | "HEAD") => "get",
        Some("POST") => "create",
        Some("PUT") => "update",
        Some(other) => return other.to_ascii_lowercase(),
    };
    verb.to_owned()
}

/// A value that is serialized as its text.
struct Text<T>(T);

impl<T: Display> Serialize for Text<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// An object with those fields that have a value. All values are strings.
struct Fields<'a>(&'a [(&'static str, Option<&'a dyn Display>)]);

impl Serialize for Fields<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_map(None)?;
        for (name, value) in self.0 {
            if let Some(value) = value {
                fields.serialize_entry(name, &Text(value))?;
            }
        }
        fields.end()
    }
}

/// The user of an event. An unknown one is empty.
struct User<'a>(&'a str);

impl Serialize for User<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut user = serializer.serialize_map(None)?;
        match self.0 {
            "" => {}
            ANONYMOUS => {
                user.serialize_entry("username", "system:anonymous")?;
                user.serialize_entry("groups", &["system:unauthenticated"])?;
            }
            caller => user.serialize_entry("username", caller)?,
        }
        user.end()
    }
}

/// Begins the name of a caller that is an agent.
const AGENT: &str = "agent:";
/// The caller that has not proved an identity. An empty caller is an unknown one.
pub const ANONYMOUS: &str = "anonymous";

struct ResponseStatus<'a, E>(&'a Event<'a, E>);

impl<E: EndCode> Serialize for ResponseStatus<'_, E> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let record = self.0.record;
        let mut status = serializer.serialize_map(None)?;
        status.serialize_entry("metadata", &Fields(&[]))?;
        if self.0.stage == Stage::ResponseComplete {
            let code = record.end.label();
            if code == "ok" {
                status.serialize_entry("status", "Success")?;
            } else {
                status.serialize_entry("status", "Failure")?;
                // The advice that follows is for the log.
                let cause = record.detail.split("; ").next().unwrap_or_default();
                if !cause.is_empty() {
                    status.serialize_entry("message", &one_line(cause))?;
                }
                status.serialize_entry("reason", code)?;
            }
        }
        if let Some(code) = record.status {
            status.serialize_entry("code", &code)?;
        }
        status.end()
    }
}

fn shown<T: Display>(value: &Option<T>) -> Option<&dyn Display> {
    value.as_ref().map(|value| value as &dyn Display)
}

/// The facts that an Event has no field for.
struct Annotations<'a, E>(&'a Event<'a, E>);

impl<E: EndCode> Serialize for Annotations<'_, E> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Event {
            record,
            reporter,
            stage,
            now: _,
        } = self.0;
        let is_complete = *stage == Stage::ResponseComplete;
        let end = is_complete.then(|| record.end.label());
        let bytes = is_complete.then_some((record.bytes_in, record.bytes_out));
        let (bytes_in, bytes_out) = (bytes.map(|bytes| bytes.0), bytes.map(|bytes| bytes.1));
        let server = match &record.peer {
            Some(RecordedPeer::Server(replica)) => Some(replica.as_str()),
            Some(RecordedPeer::Tcp(_) | RecordedPeer::Unix) | None => None,
        };
        let claimed_by = record.is_claimed.then(|| server.unwrap_or("server"));
        let service = record
            .head
            .is_none()
            .then(|| non_empty(&record.request))
            .flatten();
        let session = record.session.map(|session| session.0);
        let reused = record.stream.filter(|stream| *stream != record.audit_id);
        let (target, dialed) = (non_empty(&record.target), non_empty(&record.dialed));
        let trace_parent = non_empty(&record.trace_parent);
        let node = record.direction.and(record.node.as_ref());
        let retried = record.is_retried.then_some(true);
        Fields(&[
            ("culvert.io/reporter", Some(reporter)),
            ("culvert.io/listener", shown(&record.listener)),
            ("culvert.io/operation", shown(&record.operation)),
            ("culvert.io/rule", shown(&record.rule)),
            ("culvert.io/dry-run", shown(&record.dry_run)),
            ("culvert.io/user-claimed-by", shown(&claimed_by)),
            ("culvert.io/service", shown(&service)),
            ("culvert.io/node", shown(&node)),
            ("culvert.io/port", shown(&record.port)),
            ("culvert.io/target", shown(&target)),
            ("culvert.io/dialed", shown(&dialed)),
            ("culvert.io/session", shown(&session)),
            ("culvert.io/hop-from", shown(&server)),
            ("culvert.io/hop-to", shown(&record.via)),
            ("culvert.io/stream", shown(&reused)),
            ("culvert.io/retried", shown(&retried)),
            ("culvert.io/trace-parent", shown(&trace_parent)),
            ("culvert.io/end", shown(&end)),
            ("culvert.io/bytes-in", shown(&bytes_in)),
            ("culvert.io/bytes-out", shown(&bytes_out)),
        ])
        .serialize(serializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream_record::StreamEnd;
    use crate::wire::code::RefusalCode;
    use crate::wire::header::{AuditId, StreamHeader, StreamKind, Target};
    use crate::wire::name::Port;

    fn record(kind: StreamKind) -> StreamRecord {
        let mut record = StreamRecord::start(Instant::now(), StreamEnd::Ok);
        record.received_at = SystemTime::UNIX_EPOCH + Duration::from_micros(1_500_000);
        record.asked(&StreamHeader {
            audit_id: Some(AuditId::new([0x11; 16])),
            caller: "certificate:prometheus".to_owned(),
            ..StreamHeader::new(kind)
        });
        record
    }

    /// Returns an event without the time of its stage.
    fn shown(record: &StreamRecord, stage: Stage) -> serde_json::Value {
        let mut event: serde_json::Value =
            serde_json::from_str(&event(record, "agent", stage)).unwrap();
        let now = event.as_object_mut().unwrap().remove("stageTimestamp");
        assert!(now.unwrap().as_str().unwrap().ends_with('Z'));
        event
    }

    #[test]
    fn event_of_a_forwarded_stream_has_the_form_of_kubernetes() {
        let mut record = record(StreamKind::Forward {
            node: "worker-1".parse().unwrap(),
            target: Target::Node(Port::new(10250).unwrap()),
            is_verified: true,
        });
        record.peer = Some(RecordedPeer::Server("s1".parse().unwrap()));
        record.listener = Some("peers");
        record.fail(StreamEnd::Refused(RefusalCode::Policy), "no\n\u{202e}");
        let expected = serde_json::json!({
            "kind": "Event",
            "apiVersion": "audit.k8s.io/v1",
            "level": "Metadata",
            "auditID": "11111111-1111-1111-1111-111111111111",
            "stage": "ResponseComplete",
            "requestURI": "",
            "verb": "connect",
            "user": {"username": "certificate:prometheus"},
            "objectRef": {
                "resource": "nodes", "name": "worker-1", "apiVersion": "v1", "subresource": "proxy",
            },
            "responseStatus": {
                "metadata": {}, "status": "Failure", "message": "no  ", "reason": "refused_by_policy",
            },
            "requestReceivedTimestamp": "1970-01-01T00:00:01.500000Z",
            "annotations": {
                "culvert.io/reporter": "agent",
                "culvert.io/listener": "peers",
                "culvert.io/user-claimed-by": "s1",
                "culvert.io/port": "10250",
                "culvert.io/target": "node:10250",
                "culvert.io/hop-from": "s1",
                "culvert.io/end": "refused_by_policy",
                "culvert.io/bytes-in": "0",
                "culvert.io/bytes-out": "0",
            },
        });
        assert_eq!(shown(&record, Stage::ResponseComplete), expected);
        let started = shown(&record, Stage::ResponseStarted);
        assert_eq!(
            started["responseStatus"],
            serde_json::json!({"metadata": {}})
        );
        assert!(started["annotations"].get("culvert.io/end").is_none());
    }

    #[test]
    fn verb_is_that_of_kubernetes_and_running_something_is_create() {
        let mut record = record(StreamKind::Enroll);
        for (method, operation, expected) in [
            ("GET", None, "get"),
            ("HEAD", None, "get"),
            ("POST", None, "create"),
            ("PUT", None, "update"),
            ("DELETE", None, "delete"),
            ("CONNECT", None, "connect"),
            ("GET", Some("exec"), "create"),
            ("GET", Some("portforward"), "create"),
            ("GET", Some("containerlogs"), "get"),
        ] {
            record.head = Some(Box::new(AuditedHead {
                method: method.into(),
                uri: "/".into(),
                user_agent: "".into(),
            }));
            record.operation = operation.map(Into::into);
            assert_eq!(verb(&record), expected, "{method} {operation:?}");
        }
    }

    #[test]
    fn unknown_caller_is_not_an_anonymous_one() {
        let mut record = record(StreamKind::Enroll);
        for (caller, is_claimed, expected) in [
            ("", true, serde_json::json!({})),
            (
                ANONYMOUS,
                true,
                serde_json::json!({
                    "username": "system:anonymous", "groups": ["system:unauthenticated"],
                }),
            ),
            (
                "user:ops",
                false,
                serde_json::json!({"username": "user:ops"}),
            ),
        ] {
            caller.clone_into(&mut record.caller);
            record.is_claimed = is_claimed;
            assert_eq!(shown(&record, Stage::ResponseStarted)["user"], expected);
        }
        record.caller.clear();
        let user = &shown(&record, Stage::ResponseStarted)["user"];
        assert_eq!(user["username"], "system:anonymous");
    }

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
        let event: serde_json::Value = serde_json::from_str(&event).unwrap();
        assert_eq!(event["user"]["username"], "agent:cam-1");
        assert!(event.get("sourceIPs").is_none());
    }

    #[test]
    fn stream_that_is_open_for_a_minute_has_one_event_meanwhile() {
        let (open, start) = (OpenStreams(Mutex::default()), Instant::now());
        let due = start + STARTED_AFTER;
        let insert = |name: &'static str| open.insert(due, Box::new(move || name.to_owned()));
        let (_first, second) = (insert("first"), insert("second"));
        assert_eq!(open.take_due(start + Duration::from_secs(59)), None);
        open.0.lock().remove(&second);
        assert_eq!(open.take_due(due).as_deref(), Some("first"));
        assert_eq!(open.take_due(due), None);
    }
}
