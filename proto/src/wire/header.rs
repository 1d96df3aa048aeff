//! Typed stream header and reply: the request of the opener and the answer of the accepting end.

use std::borrow::Cow;
use std::fmt;

use bytes::BytesMut;
use prost::Message;

use super::code::RefusalCode;
use super::frame::{self, FrameError, STREAM_MESSAGE_MAX};
use super::name::{CloudTarget, NodeName, Port};
use super::pb;

/// Maximum length of a reply's detail, in bytes. Longer ones are truncated at a character boundary.
const DETAIL_MAX: usize = 512;
/// Maximum length of a `traceparent` that is forwarded, in bytes (W3C Trace Context has 55
/// characters in version 00).
pub const TRACE_PARENT_MAX: usize = 64;
/// Maximum length of a target's host, in bytes: a DNS name or an IPv6 address with a zone.
const HOST_MAX: usize = 253;

/// The first message on a stream, sent by its opener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamHeader {
    /// The kind of the stream.
    pub kind: StreamKind,
    /// W3C `traceparent` for the other end's logs. At most 64 bytes; empty if there is none.
    pub trace_parent: String,
    /// A number that the streams of one source (a caller) have in common, or 0 if it is unknown. It
    /// is random, and says nothing about the caller.
    pub source: u64,
    /// What the audit events of the stream have in common at all ends.
    pub audit_id: Option<AuditId>,
    /// The caller's identity for records, as the opener says; empty if it is unknown. One printable
    /// line of at most 512 bytes. Only headers of [`StreamKind::Target`] and [`StreamKind::Forward`]
    /// carry it.
    pub caller: String,
    /// What the caller wants to do at the target, in the same form and for the same kinds.
    pub operation: String,
}

/// A random number that the audit events of one stream have in common. Displayed as a UUID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AuditId([u8; 16]);

impl AuditId {
    /// Returns the identifier with these random bytes.
    pub fn new(random: [u8; 16]) -> Self {
        Self(random)
    }
}

impl fmt::Display for AuditId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Each request has an audit event, so the text is written at once, without a branch for each digit.
        let digit = |value: u8| value + if value < 10 { b'0' } else { b'a' - 10 };
        let digits = self.0.map(|byte| [digit(byte >> 4), digit(byte & 15)]);
        let mut text = [b'-'; 36];
        let places = text.iter_mut().enumerate();
        let places = places.filter(|(at, _)| !matches!(at, 8 | 13 | 18 | 23));
        for ((_, place), digit) in places.zip(digits.as_flattened()) {
            *place = *digit;
        }
        formatter.write_str(str::from_utf8(&text).map_err(|_not_ascii| fmt::Error)?)
    }
}

/// The kind of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamKind {
    /// The session's control stream, with the opener's version range.
    Control {
        /// The lowest supported protocol version.
        version_min: u32,
        /// The highest supported protocol version.
        version_max: u32,
    },
    /// A byte stream to a TCP port.
    Target(Target),
    /// From an agent: a byte stream to a target of the cloud.
    Cloud(CloudTarget),
    /// Between servers: a byte stream to a TCP port of a node whose agent the accepting server
    /// holds.
    Forward {
        /// The node that the agent serves.
        node: NodeName,
        /// The port, as the node's agent sees it.
        target: Target,
        /// Whether the caller has presented a certificate.
        is_verified: bool,
    },
    /// Between servers: an enrollment with a join token of the accepting server.
    Enroll,
}

/// A TCP port as seen from the end that accepts the stream. The server chooses the class. The agent
/// resolves the class to an address and applies its own dial policy to that address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Target {
    /// A port of the agent's node address.
    Node(Port),
    /// A port of the loopback of the agent's host.
    Loopback(Port),
    /// A port of another host, by name or address.
    Host(Box<str>, Port),
}

impl Target {
    /// Returns the port of the target.
    pub fn port(&self) -> Port {
        match self {
            Self::Node(port) | Self::Loopback(port) | Self::Host(_, port) => *port,
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(port) => write!(formatter, "node:{port}"),
            Self::Loopback(port) => write!(formatter, "loopback:{port}"),
            Self::Host(host, port) => write!(formatter, "{host}:{port}"),
        }
    }
}

impl StreamHeader {
    /// Returns a header with nothing but its kind.
    pub fn new(kind: StreamKind) -> Self {
        Self {
            kind,
            trace_parent: String::new(),
            source: 0,
            audit_id: None,
            caller: String::new(),
            operation: String::new(),
        }
    }

    /// Appends the framed header.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] above [`STREAM_MESSAGE_MAX`].
    pub fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        let kind = match &self.kind {
            StreamKind::Control {
                version_min,
                version_max,
            } => pb::stream_header::Kind::Control(pb::ControlStream {
                version_min: *version_min,
                version_max: *version_max,
            }),
            StreamKind::Target(target) => {
                pb::stream_header::Kind::Target(self.encode_target(target))
            }
            StreamKind::Cloud(name) => pb::stream_header::Kind::Cloud(pb::CloudStream {
                name: name.to_string(),
            }),
            StreamKind::Forward {
                node,
                target,
                is_verified,
            } => pb::stream_header::Kind::Forward(pb::ForwardStream {
                node: node.to_string(),
                target: Some(self.encode_target(target)),
                is_verified: *is_verified,
            }),
            StreamKind::Enroll => pb::stream_header::Kind::Enroll(pb::EnrollStream {}),
        };
        let message = pb::StreamHeader {
            kind: Some(kind),
            trace_parent: self.trace_parent.clone(),
            source: self.source,
            audit_id: self.audit_id.map_or_else(Vec::new, |id| id.0.to_vec()),
        };
        frame::encode(&message, STREAM_MESSAGE_MAX, out)
    }

    /// Decodes the content of one frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] or [`FrameError::Invalid`].
    pub fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        let message = pb::StreamHeader::decode(frame)?;
        if message.trace_parent.len() > TRACE_PARENT_MAX
            || !message.trace_parent.bytes().all(|b| b.is_ascii_graphic())
        {
            return Err(FrameError::Invalid("trace context"));
        }
        let audit_id = match &*message.audit_id {
            [] => None,
            id => Some(AuditId(
                id.try_into()
                    .map_err(|_length| FrameError::Invalid("audit id"))?,
            )),
        };
        let (mut caller, mut operation) = (String::new(), String::new());
        let kind = match message
            .kind
            .ok_or(FrameError::Invalid("stream without a kind"))?
        {
            pb::stream_header::Kind::Control(control) => StreamKind::Control {
                version_min: control.version_min,
                version_max: control.version_max,
            },
            pb::stream_header::Kind::Target(target) => {
                (caller, operation) = (one_line(&target.caller), one_line(&target.operation));
                StreamKind::Target(decode_target(target)?)
            }
            pb::stream_header::Kind::Cloud(cloud) => StreamKind::Cloud(
                cloud
                    .name
                    .parse()
                    .map_err(|_syntax| FrameError::Invalid("name of a cloud target"))?,
            ),
            pb::stream_header::Kind::Forward(forward) => {
                let target = forward.target.ok_or(FrameError::Invalid("target"))?;
                (caller, operation) = (one_line(&target.caller), one_line(&target.operation));
                StreamKind::Forward {
                    node: forward
                        .node
                        .parse()
                        .map_err(|_syntax| FrameError::Invalid("node name"))?,
                    target: decode_target(target)?,
                    is_verified: forward.is_verified,
                }
            }
            pb::stream_header::Kind::Enroll(pb::EnrollStream {}) => StreamKind::Enroll,
        };
        Ok(Self {
            kind,
            trace_parent: message.trace_parent,
            source: message.source,
            audit_id,
            caller,
            operation,
        })
    }

    fn encode_target(&self, target: &Target) -> pb::TargetStream {
        let (class, host) = match target {
            Target::Node(_) => (pb::TargetClass::Node, ""),
            Target::Loopback(_) => (pb::TargetClass::Loopback, ""),
            Target::Host(host, _) => (pb::TargetClass::Host, &**host),
        };
        pb::TargetStream {
            class: class.into(),
            host: host.to_owned(),
            port: target.port().get().into(),
            caller: self.caller.clone(),
            operation: self.operation.clone(),
        }
    }
}

fn decode_target(target: pb::TargetStream) -> Result<Target, FrameError> {
    let port = u16::try_from(target.port)
        .ok()
        .and_then(Port::new)
        .ok_or(FrameError::Invalid("port"))?;
    match pb::TargetClass::try_from(target.class) {
        Ok(pb::TargetClass::Node) => Ok(Target::Node(port)),
        Ok(pb::TargetClass::Loopback) => Ok(Target::Loopback(port)),
        Ok(pb::TargetClass::Host) => {
            let printable = target.host.bytes().all(|byte| byte.is_ascii_graphic());
            if target.host.is_empty() || target.host.len() > HOST_MAX || !printable {
                return Err(FrameError::Invalid("host"));
            }
            Ok(Target::Host(target.host.into(), port))
        }
        Ok(pb::TargetClass::Unspecified) | Err(_) => Err(FrameError::Invalid("target class")),
    }
}

/// The first message from the end that accepts a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamReply {
    /// The target is connected.
    Accepted {
        /// The address that the accepting end dialed, for logs. Empty if there is none.
        dialed: String,
    },
    /// The stream is refused and ends after this message.
    Refused(Refusal),
}

/// A refusal with its code and detail.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("refused ({code}): {detail}")]
pub struct Refusal {
    /// The reason for programs.
    pub code: RefusalCode,
    /// A one-line reason for people.
    pub detail: String,
}

impl StreamReply {
    /// Returns a refusal. The detail is truncated to one line of 512 bytes.
    pub fn refused(code: RefusalCode, detail: &str) -> Self {
        Self::Refused(Refusal {
            code,
            detail: one_line(detail),
        })
    }

    /// Appends the framed reply.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] above [`STREAM_MESSAGE_MAX`].
    pub fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        let message = match self {
            Self::Accepted { dialed } => pb::StreamReply {
                dialed: dialed.clone(),
                ..pb::StreamReply::default()
            },
            Self::Refused(refusal) => pb::StreamReply {
                code: refusal.code.number(),
                detail: refusal.detail.clone(),
                ..pb::StreamReply::default()
            },
        };
        frame::encode(&message, STREAM_MESSAGE_MAX, out)
    }

    /// Decodes the content of one frame. Text for people is made printable, because it is written
    /// to logs and responses.
    ///
    /// # Errors
    /// [`FrameError::Malformed`].
    pub fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        let message = pb::StreamReply::decode(frame)?;
        Ok(match message.code {
            0 => Self::Accepted {
                dialed: one_line(&message.dialed),
            },
            code => Self::refused(RefusalCode::from_number(code), &message.detail),
        })
    }
}

/// Returns whether [`one_line`] leaves a text as it is, except for some texts with other characters than
/// those of ASCII.
pub fn is_one_line(text: &str) -> bool {
    // Without a branch for each of them, the compiler compares many characters at once.
    let is_printable = |all, byte| all & (b' '..=b'~').contains(&byte);
    text.len() <= DETAIL_MAX && text.bytes().fold(true, is_printable)
}

/// Returns one printable line of at most 512 bytes. Control characters become spaces, so that a
/// peer's text cannot forge log lines or header fields.
pub fn one_line<'a>(text: impl Into<Cow<'a, str>>) -> String {
    let text = text.into();
    // Nearly all texts need no change.
    if is_one_line(&text) {
        return text.into_owned();
    }
    let mut line = String::with_capacity(text.len().min(DETAIL_MAX));
    for character in text.chars() {
        if line.len() + character.len_utf8() > DETAIL_MAX {
            break;
        }
        let hidden = matches!(character, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
        line.push(if character.is_control() || hidden {
            ' '
        } else {
            character
        });
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_without_meaning_are_refused() {
        let target = |class, host: &str, port| {
            let target = pb::TargetStream {
                class,
                host: host.into(),
                port,
                ..pb::TargetStream::default()
            };
            let kind = Some(pb::stream_header::Kind::Target(target));
            let header = pb::StreamHeader {
                kind,
                ..pb::StreamHeader::default()
            };
            StreamHeader::decode(&header.encode_to_vec())
        };
        assert!(target(1, "", 80).is_ok());
        assert!(target(0, "", 80).is_err());
        assert!(target(9, "", 80).is_err());
        assert!(target(1, "", 0).is_err());
        assert!(target(1, "", 65536).is_err());
        assert!(target(3, "", 80).is_err());
        assert!(target(3, "a b", 80).is_err());
        assert!(StreamHeader::decode(&[]).is_err());
        assert!(StreamHeader::decode(&[0xff, 0xff]).is_err());
        for length in [1, 15, 17] {
            let header = pb::StreamHeader {
                kind: Some(pb::stream_header::Kind::Enroll(pb::EnrollStream {})),
                audit_id: vec![7; length],
                ..pb::StreamHeader::default()
            };
            assert!(
                StreamHeader::decode(&header.encode_to_vec()).is_err(),
                "{length}"
            );
        }
    }

    #[test]
    fn audit_id_is_shown_as_a_uuid() {
        let id = AuditId::new(std::array::from_fn(|index| u8::try_from(index).unwrap()));
        assert_eq!(id.to_string(), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn details_are_one_printable_line() {
        let long = "ä".repeat(600);
        let StreamReply::Refused(refusal) = StreamReply::refused(
            RefusalCode::Policy,
            &format!("a\r\nb\u{1b}[31m\u{202e}{long}"),
        ) else {
            panic!("not a refusal")
        };
        assert!(refusal.detail.starts_with("a  b [31m ä"));
        assert!(refusal.detail.len() <= DETAIL_MAX);
    }
}
