//! The form of an audit event: one line with one JSON object. Each request has one, so its fields are
//! written once, straight into the line.

use std::cell::Cell;
use std::fmt::Display;
use std::io::Write as _;
use std::net::IpAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use humantime::format_rfc3339_seconds;
use itoa::Integer;
use tunnel_process::telemetry::{append_json_text, non_empty};

use crate::stream_record::{AuditedHead, EndCode, RecordedPeer, StreamRecord};
use crate::wire::header::one_line;
use crate::wire::name::{NodeName, Port, ReplicaId};

/// The caller that has not proved an identity. An empty caller is an unknown one.
pub const ANONYMOUS: &str = "anonymous";

/// The stage of a stream at its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    ResponseStarted,
    ResponseComplete,
}

/// Passes an event as a line to `push`. `reporter` is `server` or `agent`.
pub(super) fn with_event<E: EndCode>(
    record: &StreamRecord<E>,
    reporter: &'static str,
    stage: Stage,
    push: impl FnOnce(&[u8]),
) {
    // Without a line of its own, a thread that ends makes a new one.
    let mut line = LINE.try_with(Cell::take).unwrap_or_default();
    line.event(record, reporter, stage);
    push(&line.json);
    line.json.clear();
    line.json.shrink_to(RETAINED);
    let _thread_ends = LINE.try_with(|of_thread| of_thread.set(line));
}

/// Returns the verb of Kubernetes for a request, or a method without one. A caller that runs something on
/// a node creates, whatever the method is.
fn verb<E>(record: &StreamRecord<E>) -> &str {
    match record.operation.as_deref() {
        Some("exec" | "attach" | "portforward" | "run") => "create",
        _ => record.head.as_ref().map_or("connect", |head| &*head.verb),
    }
}

thread_local! {
    /// The memory of a line, so that an event allocates nothing.
    static LINE: Cell<EventLine> = const { Cell::new(EventLine::new()) };
}

/// The line of an event so far.
#[derive(Default)]
struct EventLine {
    json: Vec<u8>,
    /// The last second since 1970 that was written, and how it was.
    second: u64,
    second_text: Vec<u8>,
}

impl EventLine {
    const fn new() -> Self {
        Self {
            json: Vec::new(),
            second: 0,
            second_text: Vec::new(),
        }
    }

    fn event<E: EndCode>(
        &mut self,
        record: &StreamRecord<E>,
        reporter: &'static str,
        stage: Stage,
    ) {
        let head = record.head.as_ref();
        self.raw(
            r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":""#,
        );
        self.plain(record.audit_id);
        self.raw(match stage {
            Stage::ResponseStarted => r#"","stage":"ResponseStarted","requestURI":"#,
            Stage::ResponseComplete => r#"","stage":"ResponseComplete","requestURI":"#,
        });
        self.text(head.map_or("", AuditedHead::uri));
        self.raw(r#","verb":"#);
        self.text(verb(record));
        self.user(record);
        if let Some(RecordedPeer::Tcp(address)) = &record.peer {
            self.raw(r#","sourceIPs":[""#);
            self.address(address.ip().to_canonical());
            self.raw("\"]");
        }
        if let Some(agent) = head.and_then(|head| non_empty(head.user_agent())) {
            self.raw(r#","userAgent":"#);
            self.text(agent);
        }
        if record.direction.is_none()
            && let Some(node) = &record.node
        {
            self.raw(r#","objectRef":{"resource":"nodes","name":"#);
            self.text(node.as_str());
            self.raw(r#","apiVersion":"v1","subresource":"proxy"}"#);
        }
        self.response_status(record, stage);
        self.raw(r#","requestReceivedTimestamp":""#);
        self.time(record.received_at);
        self.raw(r#"","stageTimestamp":""#);
        self.time(SystemTime::now());
        self.annotations(record, reporter, stage);
        self.raw("}}\n");
    }

    /// Appends a piece of JSON.
    fn raw(&mut self, json: &str) {
        self.json.extend_from_slice(json.as_bytes());
    }

    fn text(&mut self, text: &str) {
        append_json_text(&mut self.json, text);
    }

    fn plain(&mut self, value: impl Display) {
        // Writing to memory cannot fail.
        write!(self.json, "{value}").unwrap_or_default();
    }

    fn number(&mut self, number: impl Integer) {
        let mut digits = itoa::Buffer::new();
        self.raw(digits.format(number));
    }

    fn address(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(address) => {
                for (index, part) in address.octets().into_iter().enumerate() {
                    if index > 0 {
                        self.raw(".");
                    }
                    self.number(part);
                }
            }
            IpAddr::V6(address) => self.plain(address),
        }
    }

    /// Appends a time with microseconds, in the form of RFC 3339.
    fn time(&mut self, time: SystemTime) {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        if self.second_text.is_empty() || since.as_secs() != self.second {
            self.second = since.as_secs();
            self.second_text.clear();
            let second = UNIX_EPOCH + Duration::from_secs(self.second);
            // Writing to memory cannot fail.
            write!(self.second_text, "{}", format_rfc3339_seconds(second)).unwrap_or_default();
            // The fraction follows before the last letter, a Z.
            self.second_text.pop();
        }
        self.json.extend_from_slice(&self.second_text);
        // The leading digit is cut off, those of the fraction are always six.
        let mut digits = itoa::Buffer::new();
        let fraction = digits.format(1_000_000 + since.subsec_micros());
        self.raw(".");
        self.raw(fraction.get(1..).unwrap_or_default());
        self.raw("Z");
    }

    /// Appends the user of an event. An unknown one is empty.
    fn user<E>(&mut self, record: &StreamRecord<E>) {
        match record.caller.as_str() {
            "" if record.is_claimed => self.raw(r#","user":{}"#),
            "" | ANONYMOUS => self.raw(
                r#","user":{"username":"system:anonymous","groups":["system:unauthenticated"]}"#,
            ),
            caller => {
                self.raw(r#","user":{"username":"#);
                self.text(caller);
                self.raw("}");
            }
        }
    }

    fn response_status<E: EndCode>(&mut self, record: &StreamRecord<E>, stage: Stage) {
        self.raw(r#","responseStatus":{"metadata":{}"#);
        match (stage, record.end.label()) {
            (Stage::ResponseStarted, _) => {}
            (Stage::ResponseComplete, "ok") => self.raw(r#","status":"Success""#),
            (Stage::ResponseComplete, code) => {
                self.raw(r#","status":"Failure""#);
                // The advice that follows is for the log.
                let cause = record.detail.split("; ").next().unwrap_or_default();
                if !cause.is_empty() {
                    self.raw(r#","message":"#);
                    self.text(&one_line(cause));
                }
                self.raw(r#","reason":"#);
                self.text(code);
            }
        }
        if let Some(code) = record.status {
            self.raw(r#","code":"#);
            self.number(code);
        }
        self.raw("}");
    }

    /// Appends the facts that an Event has no field for.
    fn annotations<E: EndCode>(
        &mut self,
        record: &StreamRecord<E>,
        reporter: &'static str,
        stage: Stage,
    ) {
        let server = match &record.peer {
            Some(RecordedPeer::Server(replica)) => Some(replica.as_str()),
            Some(RecordedPeer::Tcp(_) | RecordedPeer::Unix) | None => None,
        };
        let claimed_by = record.is_claimed.then(|| server.unwrap_or("server"));
        let service = non_empty(&record.request).filter(|_| record.head.is_none());
        let node = record.direction.and(record.node.as_ref());
        let session = record.session.map(|session| session.0);
        let reused = record.stream.filter(|stream| *stream != record.audit_id);
        self.raw(r#"","annotations":{"culvert.io/reporter":"#);
        self.text(reporter);
        self.annotation(r#","culvert.io/listener":"#, record.listener);
        self.annotation(r#","culvert.io/operation":"#, record.operation.as_deref());
        self.annotation(r#","culvert.io/rule":"#, record.rule.as_deref());
        self.annotation(r#","culvert.io/dry-run":"#, record.dry_run.as_deref());
        self.annotation(r#","culvert.io/user-claimed-by":"#, claimed_by);
        self.annotation(r#","culvert.io/service":"#, service);
        self.annotation(r#","culvert.io/node":"#, node.map(NodeName::as_str));
        self.count(r#","culvert.io/port":""#, record.port.map(Port::get));
        self.annotation(r#","culvert.io/target":"#, non_empty(&record.target));
        self.annotation(r#","culvert.io/dialed":"#, non_empty(&record.dialed));
        self.count(r#","culvert.io/session":""#, session);
        self.annotation(r#","culvert.io/hop-from":"#, server);
        let via = record.via.as_ref().map(ReplicaId::as_str);
        self.annotation(r#","culvert.io/hop-to":"#, via);
        if let Some(stream) = reused {
            self.raw(r#","culvert.io/stream":""#);
            self.plain(stream);
            self.raw("\"");
        }
        let retried = record.is_retried.then_some("true");
        self.annotation(r#","culvert.io/retried":"#, retried);
        let trace_parent = non_empty(&record.trace_parent);
        self.annotation(r#","culvert.io/trace-parent":"#, trace_parent);
        if stage == Stage::ResponseComplete {
            self.annotation(r#","culvert.io/end":"#, Some(record.end.label()));
            self.count(r#","culvert.io/bytes-in":""#, Some(record.bytes_in));
            self.count(r#","culvert.io/bytes-out":""#, Some(record.bytes_out));
        }
    }

    fn annotation(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.raw(name);
            self.text(value);
        }
    }

    /// Appends an annotation that is a number, whose name ends with the quote of its value.
    fn count(&mut self, name: &str, value: Option<impl Integer>) {
        if let Some(value) = value {
            self.raw(name);
            self.number(value);
            self.raw("\"");
        }
    }
}

/// Bytes of the memory of a line that are retained. Nearly all events are shorter.
const RETAINED: usize = 2048;

#[cfg(test)]
mod tests {
    use humantime::format_rfc3339_micros;
    use tokio::time::Instant;
    use tunnel_process::telemetry::is_hidden;

    use super::*;
    use crate::stream_record::StreamEnd;
    use crate::wire::code::RefusalCode;
    use crate::wire::header::{AuditId, StreamHeader, StreamKind, Target};

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

    fn line(record: &StreamRecord, stage: Stage) -> String {
        let mut line = String::new();
        with_event(record, "agent", stage, |event| {
            line.push_str(str::from_utf8(event).unwrap());
        });
        line
    }

    /// Returns an event without the time of its stage.
    fn shown(record: &StreamRecord, stage: Stage) -> serde_json::Value {
        let mut event: serde_json::Value = serde_json::from_str(&line(record, stage)).unwrap();
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
    fn whatever_runs_something_is_create() {
        let mut record = record(StreamKind::Enroll);
        for (head, operation, expected) in [
            (true, None, "delete"),
            (true, Some("exec"), "create"),
            (true, Some("portforward"), "create"),
            (true, Some("run"), "create"),
            (true, Some("containerlogs"), "delete"),
            (false, None, "connect"),
            (false, Some("attach"), "create"),
        ] {
            record.head = head.then(|| AuditedHead::new("delete".into(), ["", "/", ""], ""));
            record.operation = operation.map(Into::into);
            let event = shown(&record, Stage::ResponseStarted);
            assert_eq!(event["verb"], expected, "{head} {operation:?}");
        }
    }

    #[test]
    fn times_have_microseconds_whatever_was_written_before() {
        let mut line = EventLine::new();
        for micros in [0, 999_999, 1_000_000, 1_000_001, 59_999_999, 999_999] {
            let time = UNIX_EPOCH + Duration::from_micros(micros);
            line.json.clear();
            line.time(time + Duration::from_nanos(999));
            let expected = format_rfc3339_micros(time).to_string();
            assert_eq!(str::from_utf8(&line.json).unwrap(), expected);
        }
    }

    #[test]
    fn address_is_that_of_the_connection() {
        let mut record = record(StreamKind::Enroll);
        for (address, expected) in [
            ("192.0.2.10:1", "192.0.2.10"),
            ("[::ffff:10.0.255.1]:1", "10.0.255.1"),
            ("[2001:db8::1]:1", "2001:db8::1"),
        ] {
            record.peer = Some(RecordedPeer::Tcp(address.parse().unwrap()));
            let event = shown(&record, Stage::ResponseComplete);
            assert_eq!(event["sourceIPs"], serde_json::json!([expected]));
        }
    }

    #[test]
    fn texts_of_others_stay_texts_in_one_visible_line() {
        let evil = "\"},\\\n\u{7f}\u{9b}\u{202e}\u{e0041}é";
        let mut record = record(StreamKind::Enroll);
        // What is no line becomes one before.
        record.head = Some(AuditedHead::new(evil.into(), ["", evil, ""], evil));
        for text in [&mut record.caller, &mut record.target, &mut record.dialed] {
            evil.clone_into(text);
        }
        let line = line(&record, Stage::ResponseStarted);
        let hidden = line
            .trim_end_matches('\n')
            .chars()
            .find(|letter| is_hidden(*letter));
        assert_eq!(hidden, None, "{line}");
        let event = shown(&record, Stage::ResponseStarted);
        for text in [
            &event["verb"],
            &event["user"]["username"],
            &event["annotations"]["culvert.io/target"],
            &event["annotations"]["culvert.io/dialed"],
        ] {
            assert_eq!(text, evil);
        }
        for text in [&event["requestURI"], &event["userAgent"]] {
            assert_eq!(text, &one_line(evil));
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
}
