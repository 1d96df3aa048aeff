use std::fmt::Debug;

use bytes::BytesMut;

use super::*;
use crate::wire::close::{SessionClose, SessionMessage};
use crate::wire::control::Message as _;
use crate::wire::cut::CUT_MESSAGE_MAX;
use crate::wire::enroll::hex;
use crate::wire::frame::{
    self, CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX, FrameError, PEER_MESSAGE_MAX, STREAM_MESSAGE_MAX,
};
use crate::wire::{
    ALPN_ENROLL, ALPN_SESSION, ALPN_SESSION_TCP, PORT_AGENTS, VERSION_MAX, VERSION_MIN,
    negotiate_version,
};

/// Fields that no message has: a varint, 64 bits, bytes and 32 bits (numbers 100 to 103).
const UNKNOWN_FIELDS: &str = "a0062a a9060102030405060708 b206026869 bd0601020304";

#[test]
fn stream_headers_are_as_captured() {
    check(
        &header_captures(),
        (STREAM_MESSAGE_MAX, Inside::Message),
        |header, out| header.encode(out).unwrap(),
        StreamHeader::decode,
    );
}

#[test]
fn stream_replies_are_as_captured() {
    check(
        &reply_captures(),
        (STREAM_MESSAGE_MAX, Inside::Value),
        |reply, out| reply.encode(out).unwrap(),
        StreamReply::decode,
    );
}

#[test]
fn messages_between_servers_are_as_captured() {
    check(
        &peer_captures(),
        (PEER_MESSAGE_MAX, Inside::Message),
        |message, out| message.encode(out).unwrap(),
        PeerMessage::decode,
    );
}

#[test]
fn control_messages_are_as_captured() {
    check(
        &control_captures(),
        (CONTROL_MESSAGE_MAX, Inside::Message),
        |message, out| message.encode(out).unwrap(),
        ControlMessage::decode,
    );
}

#[test]
fn close_of_a_session_is_as_captured() {
    let close = |code, reason: &str| {
        SessionMessage::Close(SessionClose {
            code,
            reason: reason.to_owned(),
        })
    };
    check(
        &[
            ("021801", SessionMessage::Short),
            ("022001", SessionMessage::Waiting),
            ("00", close(CloseCode::Normal, "")),
            (
                "0e0801120a676f696e672061776179",
                close(CloseCode::Draining, "going away"),
            ),
            (
                "0a08a01f12056c61746572",
                close(CloseCode::Unknown(4000), "later"),
            ),
        ],
        (STREAM_MESSAGE_MAX, Inside::Value),
        |message, out| message.encode(out),
        |content| {
            let mut framed = BytesMut::new();
            frame::encode_length_prefix(content.len() as u64, &mut framed);
            framed.extend_from_slice(content);
            Ok(SessionMessage::take(&mut framed).unwrap())
        },
    );
}

#[test]
fn cut_of_a_stream_is_as_captured() {
    check(
        &cut_captures(),
        (CUT_MESSAGE_MAX, Inside::Value),
        |cut, out| cut.encode(out).unwrap(),
        CutAnnouncement::decode,
    );
}

#[test]
fn enrollment_is_as_captured() {
    check(
        &enroll_request_captures(),
        (ENROLL_MESSAGE_MAX, Inside::Value),
        |request, out| request.encode(out).unwrap(),
        EnrollRequest::decode,
    );
    check(
        &enroll_reply_captures(),
        (ENROLL_MESSAGE_MAX, Inside::Value),
        |reply, out| reply.encode(out).unwrap(),
        EnrollReply::decode,
    );
}

#[test]
fn numbers_are_as_released() {
    let refusals = [
        RefusalCode::Unknown(0),
        RefusalCode::BadHeader,
        RefusalCode::Policy,
        RefusalCode::TargetRefused,
        RefusalCode::TargetTimeout,
        RefusalCode::TooManyStreams,
        RefusalCode::Draining,
        RefusalCode::Internal,
        RefusalCode::NotHere,
        RefusalCode::UnknownTarget,
        RefusalCode::AgentSuspect,
        RefusalCode::AgentLost,
        RefusalCode::AgentTimeout,
        RefusalCode::Unknown(13),
    ];
    let released: Vec<_> = (0..=13).map(RefusalCode::from_number).collect();
    assert_eq!(released, refusals);
    let resets = [
        ResetCode::Dropped,
        ResetCode::PeerCut,
        ResetCode::Protocol,
        ResetCode::Refused,
        ResetCode::SessionLost,
        ResetCode::ReaderStalled,
        ResetCode::AgentStopping,
        ResetCode::Unknown(7),
    ];
    let released: Vec<_> = (0..=7).map(ResetCode::from_number).collect();
    assert_eq!(released, resets);
    let closes = [
        CloseCode::Normal,
        CloseCode::Draining,
        CloseCode::Protocol,
        CloseCode::Version,
        CloseCode::NameNotInCredential,
        CloseCode::NameInUse,
        CloseCode::Superseded,
        CloseCode::HandshakeTimeout,
        CloseCode::Dead,
        CloseCode::CredentialRevoked,
        CloseCode::Overloaded,
        CloseCode::CredentialExpired,
        CloseCode::TooManySessions,
        CloseCode::CredentialUntrusted,
        CloseCode::Unknown(14),
    ];
    let released: Vec<_> = (0..=14).map(CloseCode::from_number).collect();
    assert_eq!(released, closes);
    let enrollments = [
        EnrollCode::Unknown(0),
        EnrollCode::BadRequest,
        EnrollCode::BadToken,
        EnrollCode::TokenExpired,
        EnrollCode::TokenUsed,
        EnrollCode::WrongNode,
        EnrollCode::RateLimited,
        EnrollCode::Unavailable,
        EnrollCode::Revoked,
        EnrollCode::CertificateEnded,
        EnrollCode::ClockWrong,
        EnrollCode::NotOffered,
        EnrollCode::BadProof,
        EnrollCode::Pending,
        EnrollCode::Unknown(14),
    ];
    let released: Vec<_> = (0..=14).map(EnrollCode::from_number).collect();
    assert_eq!(released, enrollments);
    for number in 0..64 {
        assert_eq!(RefusalCode::from_number(number).number(), number);
        assert_eq!(ResetCode::from_number(number).number(), number);
        assert_eq!(CloseCode::from_number(number).number(), number);
        assert_eq!(EnrollCode::from_number(number).number(), number);
    }
    assert_eq!(CloseCode::from_number(4000).label(), "unknown");
}

#[test]
fn names_of_the_protocols_are_as_released() {
    assert_eq!((VERSION_MIN, VERSION_MAX), (1, 1));
    assert_eq!(ALPN_SESSION, b"culvert/1");
    assert_eq!(ALPN_SESSION_TCP, b"h2");
    assert_eq!(ALPN_ENROLL, b"culvert-enroll/1");
    assert_eq!(PORT_AGENTS, 10262);
}

#[test]
fn control_message_of_a_later_version_is_unknown_and_no_error() {
    // Field 17 with a message in it, alone and after fields with unknown numbers, and an empty
    // message.
    for later in ["8a01020801", "a0062a8a01020801", "a0062a", ""] {
        let decoded = ControlMessage::decode(&bytes(later));
        assert_eq!(decoded, Ok(ControlMessage::Unknown), "{later}");
    }
}

#[test]
fn stream_of_a_later_kind_or_class_is_refused() {
    let kind = FrameError::Invalid("stream without a kind");
    let class = FrameError::Invalid("target class");
    for (later, error) in [
        ("7a020801", kind),
        // Class 4 and class 0, port 80.
        ("120408041850", class),
        ("12021850", FrameError::Invalid("target class")),
    ] {
        assert_eq!(StreamHeader::decode(&bytes(later)), Err(error), "{later}");
    }
}

#[test]
fn versions_are_agreed_on_both_ways_as_the_messages_carry_them() {
    for (range, agreed) in [
        ((1, 1), Some(1)),
        ((1, 9), Some(1)),
        ((2, 9), None),
        ((0, 0), None),
        ((0, 1), Some(1)),
        ((9, 1), None),
    ] {
        // The server's header of the control stream, and the agent's reply.
        let header = StreamHeader::new(StreamKind::Control {
            version_min: range.0,
            version_max: range.1,
        });
        let mut framed = BytesMut::new();
        header.encode(&mut framed).unwrap();
        let StreamKind::Control {
            version_min: min,
            version_max: max,
        } = StreamHeader::decode(&framed[1..]).unwrap().kind
        else {
            panic!("not a control stream")
        };
        assert_eq!(negotiate_version(min, max), agreed, "{range:?}");

        let mut framed = BytesMut::new();
        hello(range).encode(&mut framed).unwrap();
        let ControlMessage::Hello(hello) = ControlMessage::decode(&framed[1..]).unwrap() else {
            panic!("not a hello")
        };
        let (min, max) = hello.versions;
        assert_eq!(negotiate_version(min, max), agreed, "{range:?}");
    }
}

/// The content of the first field of a message.
#[derive(Clone, Copy)]
enum Inside {
    /// An embedded message below 128 bytes.
    Message,
    Value,
}

/// Checks that each value encodes to its capture (after its length), and that the capture decodes
/// to the value. Repeats the decoding with fields of a later version in the message and in the
/// embedded message.
fn check<T: PartialEq + Debug>(
    captures: &[(impl AsRef<str>, T)],
    (limit, inside): (usize, Inside),
    encode: impl Fn(&T, &mut BytesMut),
    decode: impl Fn(&[u8]) -> Result<T, FrameError>,
) {
    for (capture, value) in captures {
        let capture = capture.as_ref();
        let mut sent = BytesMut::new();
        encode(value, &mut sent);
        assert_eq!(hex(&sent), capture.replace(' ', ""), "{value:?}");
        let mut framed = BytesMut::from(&bytes(capture)[..]);
        let content = frame::take(&mut framed, limit).unwrap().unwrap();
        assert!(framed.is_empty());
        assert_eq!(decode(&content).as_ref(), Ok(value));
        let unknown = bytes(UNKNOWN_FIELDS);
        for later in [[&content[..], &unknown], [&unknown, &content[..]]] {
            assert_eq!(decode(&later.concat()).as_ref(), Ok(value));
        }
        if let Inside::Message = inside {
            // The number of the field has a second byte from 16 on.
            let tag = 1 + content.iter().take_while(|byte| **byte >= 0x80).count();
            let (length, rest) = (usize::from(content[tag]), &content[tag + 1..]);
            let (message, rest) = rest.split_at(length);
            let mut later = BytesMut::from(&content[..tag]);
            frame::encode_length_prefix((length + unknown.len()) as u64, &mut later);
            later.extend_from_slice(&[message, &unknown, rest].concat());
            assert_eq!(decode(&later).as_ref(), Ok(value));
        }
    }
}
