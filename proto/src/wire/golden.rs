//! Captures of wire version 1 as its first release sends it. A change that fails the tests of this
//! module breaks released peers. Fuzz targets begin with the captures.

#![expect(clippy::unwrap_used, reason = "the values are valid")]

use std::time::{Duration, SystemTime};

use super::code::{CloseCode, EnrollCode, RefusalCode, ResetCode};
use super::control::{ControlMessage, Hello, Member, Welcome};
use super::cut::CutAnnouncement;
use super::enroll::{EnrollReply, EnrollRequest, RenewalProof, decode_hex};
use super::header::{AuditId, StreamHeader, StreamKind, StreamReply, Target};
use super::name::{InstanceId, Port, SessionId};
use super::node_certificate::{CertificatesPart, NodeCertificate};
use super::node_row::{FailingRequests, NodeRow, NodeRows, ServerReport};
use super::order::{NodeOrder, Order};
use super::peer::{Alive, Ask, HeldNode, Holds, PeerHello, PeerMessage, StateDigest, StatePart};

#[cfg(test)]
mod tests;

/// Returns the bytes of a capture, which begin with their length.
pub fn bytes(capture: &str) -> Vec<u8> {
    decode_hex(&capture.replace(' ', "")).unwrap()
}

/// Returns headers of streams, of each kind and with each field.
pub fn header_captures() -> Vec<(String, StreamHeader)> {
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
    let mut captures = Vec::new();
    for (length, traced_length, capture, kind) in [
        ("06", "3f", "0a0408011001", control),
        ("07", "40", "12050801188a50", node.clone()),
        ("07", "40", "12050802188c47", loopback),
        ("11", "4a", "120f0803120864622e6c6f63616c18b82a", host),
        ("0d", "46", "220b0a09617069736572766572", cloud),
        ("0c", "45", "2a0a0a017712050801188a50", forward.clone()),
        ("0e", "47", "2a0c0a017712050801188a501801", verified),
        ("02", "3b", "3200", StreamKind::Enroll),
    ] {
        let mut traced = StreamHeader::new(kind.clone());
        traced.trace_parent = TRACE.to_owned();
        captures.push((format!("{length}{capture}"), StreamHeader::new(kind)));
        captures.push((format!("{traced_length}{capture}{TRACE_FIELD}"), traced));
    }
    let with_source = StreamHeader {
        source: 0x0102_0304_0506_0708,
        ..StreamHeader::new(StreamKind::Enroll)
    };
    captures.push(("0b320051 0807060504030201".to_owned(), with_source));
    let header = |kind| StreamHeader {
        audit_id: Some(AuditId::new([0x11; 16])),
        caller: "user1".to_owned(),
        operation: "exec".to_owned(),
        ..StreamHeader::new(kind)
    };
    let fields = "2204 65786563 2a05 7573657231 5a10 11111111111111111111111111111111";
    captures.extend([
        (format!("26 1212 0801 188a50 {fields}"), header(node)),
        (
            format!("2b 2a17 0a0177 1212 0801 188a50 {fields}"),
            header(forward),
        ),
    ]);
    captures
}

/// Returns replies to the headers of streams.
pub fn reply_captures() -> Vec<(&'static str, StreamReply)> {
    let accepted = |dialed: &str| StreamReply::Accepted {
        dialed: dialed.to_owned(),
    };
    vec![
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
    ]
}

/// Returns messages between servers, of each kind and with each field.
pub fn peer_captures() -> Vec<(&'static str, PeerMessage)> {
    let held_node = HeldNode {
        node: "w".parse().unwrap(),
        instance: InstanceId::new([7; 16]),
        since: SystemTime::UNIX_EPOCH + Duration::from_millis(300),
    };
    vec![
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
            "4d524b 1001 1a35 0a0177 1001 1a0471756963 20ac02 2801 3002 3803 4004 4805 5006 5a0176 6209312e322e332e343a35 68ac02 70ad02 7a0200ff 80011f 220177 2a0d 0801 1002 1803 2004 2805 320173",
            PeerMessage::NodeRows(NodeRows {
                is_full: true,
                rows: vec![NodeRow {
                    node: held_node.node.clone(),
                    is_suspect: true,
                    transport: "quic".to_owned(),
                    rtt_millis: 300,
                    streams: 1,
                    bytes: [2, 3],
                    bytes_per_second: [4, 5],
                    errors_last_hour: 6,
                    version: "v".to_owned(),
                    address: Some("1.2.3.4:5".parse().unwrap()),
                    since: SystemTime::UNIX_EPOCH + Duration::from_millis(300),
                    certificate_not_after: SystemTime::UNIX_EPOCH + Duration::from_millis(301),
                    trend: vec![0, 255],
                    silent_seconds: 31,
                }],
                removed: vec![held_node.node.clone()],
                report: Some(ServerReport {
                    sessions: 1,
                    requests: 2,
                    errors: 3,
                    bytes: [4, 5],
                    linked: vec!["s".parse().unwrap()],
                    failing: Vec::new(),
                }),
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
    ]
}

/// Returns messages between server and agent, of each kind and with each field.
pub fn control_captures() -> Vec<(&'static str, ControlMessage)> {
    vec![
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
    ]
}

/// Returns cuts of streams.
pub fn cut_captures() -> Vec<(&'static str, CutAnnouncement)> {
    let cut = |stream, offset, code| CutAnnouncement {
        stream,
        offset,
        code,
    };
    vec![
        ("00", cut(0, 0, ResetCode::Dropped)),
        ("0808051083a20c1801", cut(5, 200_963, ResetCode::PeerCut)),
        (
            "18 08ffffffffffffffffff01 10ffffffffffffffffff01 1805",
            cut(u64::MAX, u64::MAX, ResetCode::ReaderStalled),
        ),
    ]
}

/// Returns requests of agents for a certificate.
pub fn enroll_request_captures() -> Vec<(&'static str, EnrollRequest)> {
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
    vec![
        (
            "1c12053003020100 1a08776f726b65722d31 22023001 2a020708 308308",
            renewal,
        ),
        (
            "290a166162636465663031323334352e613561352e31313131 12053003020100 1a08776f726b65722d31",
            request,
        ),
    ]
}

/// Returns replies to requests for a certificate.
pub fn enroll_reply_captures() -> Vec<(&'static str, EnrollReply)> {
    let issued = EnrollReply::Issued {
        chain: vec![vec![0x30, 1], vec![0x30, 2]],
        roots: vec![vec![0x30, 3]],
    };
    let refused = EnrollReply::Refused(EnrollCode::TokenUsed, "used".to_owned());
    vec![
        ("0c1a0230011a02300222023003", issued),
        ("080804120475736564", refused),
    ]
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

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TRACE_FIELD: &str = "1a3730302d34626639326633353737623334646136613363653932396430653065343733362d303066303637616130626139303262372d3031";
const DIGEST: &str = "483a46 0805 1220 1111111111111111111111111111111111111111111111111111111111111111 1a20 2222222222222222222222222222222222222222222222222222222222222222";
/// A digest with a clock.
const DIGEST_WITH_CLOCK: &str = "4b3a49 0805 1220 1111111111111111111111111111111111111111111111111111111111111111 1a20 2222222222222222222222222222222222222222222222222222222222222222 20ac02";
/// A digest with the hash of a configuration.
const DIGEST_WITH_CONFIGURATION: &str = "6a3a68 0805 1220 1111111111111111111111111111111111111111111111111111111111111111 1a20 2222222222222222222222222222222222222222222222222222222222222222 2a20 3333333333333333333333333333333333333333333333333333333333333333";
