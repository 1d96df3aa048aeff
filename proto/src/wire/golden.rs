//! Captures of wire version 1 as its first release sends it. A change that fails these tests breaks
//! released peers.

use std::fmt::Debug;
use std::time::{Duration, SystemTime};

use bytes::BytesMut;

use super::close::{SessionClose, SessionMessage};
use super::code::{CloseCode, EnrollCode, RefusalCode, ResetCode};
use super::control::{ControlMessage, Hello, Member, Message as _, Welcome};
use super::cut::{CUT_MESSAGE_MAX, CutAnnouncement};
use super::enroll::{EnrollReply, EnrollRequest, RenewalProof, decode_hex, hex};
use super::frame::{
    self, CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX, FrameError, PEER_MESSAGE_MAX, STREAM_MESSAGE_MAX,
};
use super::header::{AuditId, StreamHeader, StreamKind, StreamReply, Target};
use super::name::{InstanceId, Port, SessionId};
use super::node_certificate::{CertificatesPart, NodeCertificate};
use super::node_row::{FailingRequests, NodeRows, ServerReport};
use super::order::{NodeOrder, Order};
use super::peer::{Alive, Ask, HeldNode, Holds, PeerHello, PeerMessage, StateDigest, StatePart};
use super::{
    ALPN_ENROLL, ALPN_SESSION, ALPN_SESSION_TCP, PORT_AGENTS, VERSION_MAX, VERSION_MIN,
    negotiate_version,
};

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE_FIELD: &str = "1a3730302d34626639326633353737623334646136613363653932396430653065343733362d303066303637616130626139303262372d3031";
const DIGEST: &str = "483a46 0805 1220 1111111111111111111111111111111111111111111111111111111111111111 1a20 2222222222222222222222222222222222222222222222222222222222222222";
/// A digest with a clock.
const DIGEST_WITH_CLOCK: &str = "4b3a49 0805 1220 1111111111111111111111111111111111111111111111111111111111111111 1a20 2222222222222222222222222222222222222222222222222222222222222222 20ac02";
/// A digest with the hash of a configuration.
const DIGEST_WITH_CONFIGURATION: &str = "6a3a68 0805 1220 1111111111111111111111111111111111111111111111111111111111111111 1a20 2222222222222222222222222222222222222222222222222222222222222222 2a20 3333333333333333333333333333333333333333333333333333333333333333";
/// Fields that no message has: a varint, 64 bits, bytes and 32 bits (numbers 100 to 103).
const UNKNOWN_FIELDS: &str = "a0062a a9060102030405060708 b206026869 bd0601020304";

#[test]
fn stream_headers_are_as_captured() {
    let control = StreamKind::Control {
        version_min: 1,
        version_max: 1,
    };
    let port = |number| Port::new(number).unwrap();
    let node = StreamKind::Target(Target::Node(port(10250)));
    let loopback = StreamKind::Target(Target::Loopback(port(9100)));
    let host = StreamKind::Target(Target::Host("db.local".into(), port(5432)));
    let forward = StreamKind::Forward {
        node: "w".parse().unwrap(),
        target: Target::Node(port(10250)),
        is_verified: false,
    };
    let verified = StreamKind::Forward {
        node: "w".parse().unwrap(),
        target: Target::Node(port(10250)),
        is_verified: true,
    };
    let cloud = StreamKind::Cloud("apiserver".parse().unwrap());
    for (length, traced_length, capture, kind) in [
        ("06", "3f", "0a0408011001", control),
        ("07", "40", "12050801188a50", node),
        ("07", "40", "12050802188c47", loopback),
        ("11", "4a", "120f0803120864622e6c6f63616c18b82a", host),
        ("0d", "46", "220b0a09617069736572766572", cloud),
        ("0c", "45", "2a0a0a017712050801188a50", forward),
        ("0e", "47", "2a0c0a017712050801188a501801", verified),
        ("02", "3b", "3200", StreamKind::Enroll),
    ] {
        let mut traced = StreamHeader::new(kind.clone());
        traced.trace_parent = TRACE.to_owned();
        let plain_capture = format!("{length}{capture}");
        let traced_capture = format!("{traced_length}{capture}{TRACE_FIELD}");
        check(
            &[
                (plain_capture.as_str(), StreamHeader::new(kind)),
                (traced_capture.as_str(), traced),
            ],
            (STREAM_MESSAGE_MAX, Inside::Message),
            |header, out| header.encode(out).unwrap(),
            StreamHeader::decode,
        );
    }
}

#[test]
fn source_of_a_stream_is_as_captured() {
    let header = StreamHeader {
        source: 0x0102_0304_0506_0708,
        ..StreamHeader::new(StreamKind::Enroll)
    };
    check(
        &[("0b320051 0807060504030201", header)],
        (STREAM_MESSAGE_MAX, Inside::Message),
        |header, out| header.encode(out).unwrap(),
        StreamHeader::decode,
    );
}

#[test]
fn audit_id_operation_and_caller_of_a_stream_are_as_captured() {
    let id = Some(AuditId::new([0x11; 16]));
    let target = Target::Node(Port::new(10250).unwrap());
    let header = |kind, caller: &str| StreamHeader {
        audit_id: id,
        caller: caller.to_owned(),
        operation: "exec".to_owned(),
        ..StreamHeader::new(kind)
    };
    let forward = StreamKind::Forward {
        node: "w".parse().unwrap(),
        target: target.clone(),
        is_verified: false,
    };
    let field = "5a10 11111111111111111111111111111111";
    check(
        &[
            (
                format!("26 1212 0801 188a50 2204 65786563 2a05 7573657231 {field}").as_str(),
                header(StreamKind::Target(target), "user1"),
            ),
            (
                format!("2b 2a17 0a0177 1212 0801 188a50 2204 65786563 2a05 7573657231 {field}")
                    .as_str(),
                header(forward, "user1"),
            ),
        ],
        (STREAM_MESSAGE_MAX, Inside::Message),
        |header, out| header.encode(out).unwrap(),
        StreamHeader::decode,
    );
}

#[test]
fn stream_replies_are_as_captured() {
    let accepted = |dialed: &str| StreamReply::Accepted {
        dialed: dialed.to_owned(),
    };
    check(
        &[
            ("00", accepted("")),
            (
                "101a0e3132372e302e302e313a39313030",
                accepted("127.0.0.1:9100"),
            ),
            (
                "06080212026e6f",
                StreamReply::refused(RefusalCode::Policy, "no"),
            ),
            (
                "0308ac02",
                StreamReply::refused(RefusalCode::Unknown(300), ""),
            ),
            (
                "06080a12026e6f",
                StreamReply::refused(RefusalCode::AgentSuspect, "no"),
            ),
        ],
        (STREAM_MESSAGE_MAX, Inside::Value),
        |reply, out| reply.encode(out).unwrap(),
        StreamReply::decode,
    );
}

fn members() -> Vec<Member> {
    let member = |id: &str, addresses: &[&str], is_leaving| Member {
        id: id.parse().unwrap(),
        addresses: addresses.iter().map(ToString::to_string).collect(),
        is_leaving,
        zone: is_leaving.then(|| "z".parse().unwrap()),
    };
    vec![member("s", &[":1262"], false), member("t", &[], true)]
}

#[test]
fn messages_between_servers_are_as_captured() {
    let held_node = HeldNode {
        node: "w".parse().unwrap(),
        instance: InstanceId::new([7; 16]),
        since: SystemTime::UNIX_EPOCH + Duration::from_millis(300),
    };
    check(
        &[
            (
                "1c0a1a 0a0173 110807060504030201 1801 2001 2a053a31323632 32017a",
                PeerMessage::Hello(PeerHello {
                    replica: "s".parse().unwrap(),
                    epoch: 0x0102_0304_0506_0708,
                    versions: (1, 1),
                    addresses: vec![":1262".to_owned()],
                    zone: Some("z".parse().unwrap()),
                }),
            ),
            (
                "1e121c 0801 1218 0a0177 121007070707070707070707070707070707 18ac02",
                PeerMessage::Holds(Holds {
                    is_full: true,
                    added: vec![held_node.clone()],
                    ..Holds::default()
                }),
            ),
            (
                "06120408012001",
                PeerMessage::Holds(Holds {
                    is_full: true,
                    has_more: true,
                    ..Holds::default()
                }),
            ),
            (
                "0512031a0177",
                PeerMessage::Holds(Holds {
                    removed: vec![held_node.node.clone()],
                    ..Holds::default()
                }),
            ),
            ("021a00", PeerMessage::Leaving),
            (
                "192217 0803 120177 1a1007070707070707070707070707070707",
                PeerMessage::Ask(Ask {
                    id: 3,
                    node: held_node.node.clone(),
                    instance: held_node.instance,
                    is_admitted: false,
                }),
            ),
            (
                "1b2219 0803 120177 1a1007070707070707070707070707070707 2001",
                PeerMessage::Ask(Ask {
                    id: 3,
                    node: held_node.node.clone(),
                    instance: held_node.instance,
                    is_admitted: true,
                }),
            ),
            (
                "062a0408031001",
                PeerMessage::Alive(Alive {
                    id: 3,
                    is_alive: true,
                }),
            ),
            (
                DIGEST,
                PeerMessage::StateDigest(StateDigest {
                    version: 5,
                    orders: [0x11; 32],
                    ca: [0x22; 32],
                    clock: None,
                    configuration: None,
                }),
            ),
            (
                DIGEST_WITH_CLOCK,
                PeerMessage::StateDigest(StateDigest {
                    version: 5,
                    orders: [0x11; 32],
                    ca: [0x22; 32],
                    clock: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(300)),
                    configuration: None,
                }),
            ),
            (
                DIGEST_WITH_CONFIGURATION,
                PeerMessage::StateDigest(StateDigest {
                    version: 5,
                    orders: [0x11; 32],
                    ca: [0x22; 32],
                    clock: None,
                    configuration: Some([0x33; 32]),
                }),
            ),
            ("024200", PeerMessage::StateFetch),
            ("045a020803", PeerMessage::CertificatesFetch(3)),
            (
                "17 6215 0803 120f 0a0177 10ac02 18ad02 2001 2801 3001 1801",
                PeerMessage::CertificatesPart(CertificatesPart {
                    id: 3,
                    nodes: vec![NodeCertificate {
                        node: held_node.node.clone(),
                        issued: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(300)),
                        not_after: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(301)),
                        is_kubelet: true,
                        is_connected: true,
                        is_gone: true,
                    }],
                    has_more: true,
                }),
            ),
            (
                "0452020801",
                PeerMessage::NodeRows(NodeRows {
                    is_wanted: true,
                    ..NodeRows::default()
                }),
            ),
            (
                "1952172a153a130a01771201631801200228ac0230ad023a0161",
                PeerMessage::NodeRows(NodeRows {
                    report: Some(ServerReport {
                        failing: vec![FailingRequests {
                            node: held_node.node.clone(),
                            code: "c".to_owned(),
                            port: 1,
                            count: 2,
                            first: SystemTime::UNIX_EPOCH + Duration::from_millis(300),
                            last: SystemTime::UNIX_EPOCH + Duration::from_millis(301),
                            detail: "a".to_owned(),
                        }],
                        ..ServerReport::default()
                    }),
                    ..NodeRows::default()
                }),
            ),
            (
                "164a14 0a10 0a0177 10ac02 1801 2005 2802 3004 3806 1001",
                PeerMessage::StatePart(StatePart {
                    orders: vec![NodeOrder {
                        node: held_node.node.clone(),
                        order: Order {
                            counter: 300,
                            is_revoked: true,
                            at: 5,
                            generation: 2,
                            reissued_at: 4,
                            ends_at: 6,
                        },
                    }],
                    has_more: true,
                }),
            ),
        ],
        (PEER_MESSAGE_MAX, Inside::Message),
        |message, out| message.encode(out).unwrap(),
        PeerMessage::decode,
    );
}

#[test]
fn control_messages_are_as_captured() {
    check(
        &[
            (
                "440a42 08011001 1a0178 1a0179 2208776f726b65722d31 2a1007070707070707070707070707070707 3205302e312e30 3a0e3139322e3136382e33332e323231 4203613d62",
                hello((1, 1)),
            ),
            (
                "181216 0801 10bcb5e2b3c5c604 1a0178 20d00f 308827 3a0173",
                ControlMessage::Welcome(Welcome {
                    version: 1,
                    session: SessionId(0x1234_5678_9abc),
                    capabilities: vec!["x".to_owned()],
                    streams_per_agent: 2000,
                    target_dial_timeout: Duration::from_secs(5),
                    replica_id: "s".parse().unwrap(),
                    members: Vec::new(),
                }),
            ),
            (
                "221220 0801 1007 30e807 3a0173 420a0a017312053a31323632 42080a0174180122017a",
                ControlMessage::Welcome(Welcome {
                    version: 1,
                    session: SessionId(7),
                    capabilities: Vec::new(),
                    streams_per_agent: 0,
                    target_dial_timeout: Duration::from_secs(1),
                    replica_id: "s".parse().unwrap(),
                    members: members(),
                }),
            ),
            (
                "185216 0a0a0a017312053a31323632 0a080a0174180122017a",
                ControlMessage::Members(members()),
            ),
            (
                "0a3208080512046c697665",
                ControlMessage::NotAdmitted(CloseCode::NameInUse, "live".to_owned()),
            ),
            (
                "061a0408b0ea01",
                ControlMessage::Drain {
                    deadline: Duration::from_secs(30),
                    move_within: Duration::ZERO,
                },
            ),
            (
                "091a0708b0ea0110904e",
                ControlMessage::Drain {
                    deadline: Duration::from_secs(30),
                    move_within: Duration::from_secs(10),
                },
            ),
            ("022200", ControlMessage::Withdraw),
            (
                "0c2a0a0a0873746f7070696e67",
                ControlMessage::Bye("stopping".to_owned()),
            ),
            ("043a020801", ControlMessage::Suspect(true)),
            ("023a00", ControlMessage::Suspect(false)),
            ("027a00", ControlMessage::Receiving),
            ("0642040a023000", ControlMessage::Renew(vec![0x30, 0])),
            ("025a00", ControlMessage::DiagRequest),
            ("0662040a027b7d", ControlMessage::DiagReply("{}".to_owned())),
            (
                "0682010308b817",
                ControlMessage::RenewSoon(Duration::from_secs(3)),
            ),
            (
                "0772050a0307ac02",
                ControlMessage::Lost(vec![SessionId(7), SessionId(300)]),
            ),
            (
                "0e4a0c1a0230011a02300222023003",
                ControlMessage::Renewed(EnrollReply::Issued {
                    chain: vec![vec![0x30, 1], vec![0x30, 2]],
                    roots: vec![vec![0x30, 3]],
                }),
            ),
            (
                "084a06080812026e6f",
                ControlMessage::Renewed(EnrollReply::Refused(EnrollCode::Revoked, "no".to_owned())),
            ),
        ],
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
    let cut = |stream, offset, code| CutAnnouncement {
        stream,
        offset,
        code,
    };
    check(
        &[
            ("00", cut(0, 0, ResetCode::Dropped)),
            ("0808051083a20c1801", cut(5, 200_963, ResetCode::PeerCut)),
        ],
        (CUT_MESSAGE_MAX, Inside::Value),
        |cut, out| cut.encode(out).unwrap(),
        CutAnnouncement::decode,
    );
}

#[test]
fn enrollment_is_as_captured() {
    let request = EnrollRequest {
        token: "abcdef012345.a5a5.1111".to_owned().into(),
        csr: vec![0x30, 0x03, 0x02, 0x01, 0x00],
        node_name: "worker-1".parse().unwrap(),
        proof: None,
        is_known: false,
    };
    let renewal = EnrollRequest {
        token: String::new().into(),
        csr: request.csr.clone(),
        node_name: request.node_name.clone(),
        proof: Some(RenewalProof {
            chain: vec![vec![0x30, 1]],
            signature: vec![7, 8],
            scheme: 0x0403,
        }),
        is_known: false,
    };
    check(
        &[
            (
                "1c12053003020100 1a08776f726b65722d31 22023001 2a020708 308308",
                renewal,
            ),
            (
                "290a166162636465663031323334352e613561352e31313131 12053003020100 1a08776f726b65722d31",
                request,
            ),
        ],
        (ENROLL_MESSAGE_MAX, Inside::Value),
        |request, out| request.encode(out).unwrap(),
        EnrollRequest::decode,
    );
    let issued = EnrollReply::Issued {
        chain: vec![vec![0x30, 1], vec![0x30, 2]],
        roots: vec![vec![0x30, 3]],
    };
    let refused = EnrollReply::Refused(EnrollCode::TokenUsed, "used".to_owned());
    check(
        &[
            ("0c1a0230011a02300222023003", issued),
            ("080804120475736564", refused),
        ],
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

fn hello(versions: (u32, u32)) -> ControlMessage {
    ControlMessage::Hello(Box::new(Hello {
        versions,
        capabilities: vec!["x".to_owned(), "y".to_owned()],
        node_name: "worker-1".parse().unwrap(),
        instance: InstanceId::new([7; 16]),
        software: "0.1.0".to_owned(),
        node_ip: "192.168.33.221".to_owned(),
        labels: [("a".into(), "b".into())].into(),
    }))
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
    captures: &[(&str, T)],
    (limit, inside): (usize, Inside),
    encode: impl Fn(&T, &mut BytesMut),
    decode: impl Fn(&[u8]) -> Result<T, FrameError>,
) {
    for (capture, value) in captures {
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

fn bytes(text: &str) -> Vec<u8> {
    decode_hex(&text.replace(' ', "")).unwrap()
}
