//! The form of an audit event: one line with one JSON object. Each request has one, so its fields are
//! written once, straight into the line.

use std::fmt::Display;
use std::io::Write as _;
use std::time::SystemTime;

use humantime::format_rfc3339_micros;
use tunnel_process::telemetry::{append_json_text, non_empty};

use crate::stream_record::{EndCode, RecordedPeer, StreamRecord};
use crate::wire::header::one_line;

/// The caller that has not proved an identity. An empty caller is an unknown one.
pub const ANONYMOUS: &str = "anonymous";

/// The stage of a stream at its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    ResponseStarted,
    ResponseComplete,
}

/// Returns an event as a line. `reporter` is `server` or `agent`.
pub(super) fn event<E: EndCode>(
    record: &StreamRecord<E>,
    reporter: &'static str,
    stage: Stage,
) -> Vec<u8> {
    let head = record.head.as_deref();
    let mut line = EventLine(Vec::with_capacity(CAPACITY));
    line.raw(r#"{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":"Metadata","auditID":"#);
    line.plain(record.audit_id);
    line.raw(match stage {
        Stage::ResponseStarted => r#","stage":"ResponseStarted","requestURI":"#,
        Stage::ResponseComplete => r#","stage":"ResponseComplete","requestURI":"#,
    });
    line.text(head.map_or("", |head| &*head.uri));
    line.raw(r#","verb":"#);
    match verb(record) {
        Ok(verb) => line.text(verb),
        Err(method) => line.text(&method.to_ascii_lowercase()),
    }
    line.user(record);
    if let Some(RecordedPeer::Tcp(address)) = &record.peer {
        line.raw(r#","sourceIPs":["#);
        line.plain(address.ip().to_canonical());
        line.raw("]");
    }
    if let Some(agent) = head.and_then(|head| non_empty(&head.user_agent)) {
        line.raw(r#","userAgent":"#);
        line.text(agent);
    }
    if record.direction.is_none()
        && let Some(node) = &record.node
    {
        line.raw(r#","objectRef":{"resource":"nodes","name":"#);
        line.text(node.as_str());
        line.raw(r#","apiVersion":"v1","subresource":"proxy"}"#);
    }
    line.response_status(record, stage);
    line.raw(r#","requestReceivedTimestamp":"#);
    line.plain(format_rfc3339_micros(record.received_at));
    line.raw(r#","stageTimestamp":"#);
    line.plain(format_rfc3339_micros(SystemTime::now()));
    line.annotations(record, reporter, stage);
    line.raw("}\n");
    line.0
}

/// Returns the verb of Kubernetes for a request, or a method without one. A caller that runs something on
/// a node creates, whatever the method is.
fn verb<E>(record: &StreamRecord<E>) -> Result<&'static str, &str> {
    if let Some("exec" | "attach" | "portforward" | "run") = record.operation.as_deref() {
        return Ok("create");
    }
    match record.head.as_deref().map(|head| &*head.method) {
        None => Ok("connect"),
        Some("GET" | "HEAD") => Ok("get"),
        Some("POST") => Ok("create"),
        Some("PUT") => Ok("update"),
        Some(other) => Err(other),
    }
}

/// The line of an event so far.
struct EventLine(Vec<u8>);

impl EventLine {
    /// Appends a piece of JSON.
    fn raw(&mut self, json: &str) {
        self.0.extend_from_slice(json.as_bytes());
    }

    fn text(&mut self, text: &str) {
        append_json_text(&mut self.0, text);
    }

    /// Appends a string whose characters are digits, letters and punctuation that JSON does not escape.
    fn plain(&mut self, value: impl Display) {
        // Writing to memory cannot fail.
        write!(self.0, "\"{value}\"").ok();
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
            // Writing to memory cannot fail.
            write!(self.0, r#","code":{code}"#).ok();
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
        self.raw(r#","annotations":{"culvert.io/reporter":"#);
        self.text(reporter);
        self.annotation(r#","culvert.io/listener":"#, record.listener);
        self.annotation(r#","culvert.io/operation":"#, record.operation.as_deref());
        self.annotation(r#","culvert.io/rule":"#, record.rule.as_deref());
        self.annotation(r#","culvert.io/dry-run":"#, record.dry_run.as_deref());
        self.annotation(r#","culvert.io/user-claimed-by":"#, claimed_by);
        self.annotation(r#","culvert.io/service":"#, service);
        self.annotation(r#","culvert.io/node":"#, node.map(|node| node.as_str()));
        self.plain_annotation(r#","culvert.io/port":"#, record.port);
        self.annotation(r#","culvert.io/target":"#, non_empty(&record.target));
        self.annotation(r#","culvert.io/dialed":"#, non_empty(&record.dialed));
        self.plain_annotation(r#","culvert.io/session":"#, session);
        self.annotation(r#","culvert.io/hop-from":"#, server);
        let via = record.via.as_ref().map(|replica| replica.as_str());
        self.annotation(r#","culvert.io/hop-to":"#, via);
        self.plain_annotation(r#","culvert.io/stream":"#, reused);
        let retried = record.is_retried.then_some("true");
        self.annotation(r#","culvert.io/retried":"#, retried);
        let trace_parent = non_empty(&record.trace_parent);
        self.annotation(r#","culvert.io/trace-parent":"#, trace_parent);
        if stage == Stage::ResponseComplete {
            self.annotation(r#","culvert.io/end":"#, Some(record.end.label()));
            self.plain_annotation(r#","culvert.io/bytes-in":"#, Some(record.bytes_in));
            self.plain_annotation(r#","culvert.io/bytes-out":"#, Some(record.bytes_out));
        }
        self.raw("}");
    }

    fn annotation(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            self.raw(name);
            self.text(value);
        }
    }

    /// Appends an annotation like [`EventLine::plain`].
    fn plain_annotation(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.raw(name);
            self.plain(value);
        }
    }
}

/// Most events are shorter, in bytes.
const CAPACITY: usize = 1536;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;
    use tunnel_process::telemetry::is_hidden;

    use super::*;
    use crate::stream_record::{AuditedHead, StreamEnd};
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
            serde_json::from_slice(&event(record, "agent", stage)).unwrap();
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
            let event = shown(&record, Stage::ResponseStarted);
            assert_eq!(event["verb"], expected, "{method} {operation:?}");
        }
    }

    #[test]
    fn texts_of_others_stay_texts_in_one_visible_line() {
        let evil = "\"},\\\n\u{7f}\u{9b}\u{202e}\u{e0041}é";
        let mut record = record(StreamKind::Enroll);
        record.head = Some(Box::new(AuditedHead {
            method: evil.into(),
            uri: evil.into(),
            user_agent: evil.into(),
        }));
        for text in [&mut record.caller, &mut record.target, &mut record.dialed] {
            evil.clone_into(text);
        }
        let line = String::from_utf8(event(&record, "agent", Stage::ResponseStarted)).unwrap();
        let hidden = line
            .trim_end_matches('\n')
            .chars()
            .find(|letter| is_hidden(*letter));
        assert_eq!(hidden, None, "{line}");
        let event = shown(&record, Stage::ResponseStarted);
        for text in [
            &event["verb"],
            &event["requestURI"],
            &event["userAgent"],
            &event["user"]["username"],
            &event["annotations"]["culvert.io/target"],
            &event["annotations"]["culvert.io/dialed"],
        ] {
            assert_eq!(text, evil);
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
