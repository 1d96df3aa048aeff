//! The messages of the wire format. Accepted messages survive a round trip.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use bytes::BytesMut;
use tunnel_proto::wire::code::{CloseCode, EnrollCode, RefusalCode, ResetCode};
use tunnel_proto::wire::control::{ControlMessage, Hello, Member, Message as _, Welcome};
use tunnel_proto::wire::cut::{CUT_MESSAGE_MAX, CutAnnouncement};
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest, RenewalProof};
use tunnel_proto::wire::frame::{
    self, CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX, FrameError, PEER_MESSAGE_MAX, STREAM_MESSAGE_MAX,
};
use tunnel_proto::wire::header::{AuditId, StreamHeader, StreamKind, StreamReply, Target};
use tunnel_proto::wire::name::{InstanceId, Port, SessionId};
use tunnel_proto::wire::node_certificate::{CertificatesPart, NodeCertificate};
use tunnel_proto::wire::node_row::{FailingRequests, NodeRow, NodeRows, ServerReport};
use tunnel_proto::wire::order::{NodeOrder, Order};
use tunnel_proto::wire::peer::{
    Alive, Ask, HeldNode, Holds, PeerHello, PeerMessage, StateDigest, StatePart,
};

fn control_messages() -> Result<Vec<ControlMessage>> {
    Ok(vec![
        ControlMessage::Hello(Box::new(Hello {
            versions: (1, 2),
            capabilities: vec!["renew".into()],
            node_name: "worker-1".parse()?,
            instance: InstanceId::new([7; 16]),
            software: "0.1.0".into(),
            node_ip: "192.0.2.1".into(),
            labels: [("site".into(), "north".into())].into(),
        })),
        ControlMessage::Welcome(Welcome {
            version: 1,
            session: SessionId(9),
            capabilities: vec!["renew".into()],
            streams_per_agent: 256,
            target_dial_timeout: Duration::from_secs(5),
            replica_id: "server-0".parse()?,
            members: vec![Member {
                id: "server-1".parse()?,
                addresses: vec!["b:2".into()],
                is_leaving: true,
                zone: Some("eu-1a".parse()?),
            }],
        }),
        ControlMessage::NotAdmitted(CloseCode::NameInUse, "live".into()),
        ControlMessage::Drain {
            deadline: Duration::from_secs(30),
            move_within: Duration::from_secs(10),
        },
        ControlMessage::Withdraw,
        ControlMessage::Bye("stopping".into()),
        ControlMessage::Suspect(true),
        ControlMessage::Receiving,
        ControlMessage::Renew(vec![0x30; 64]),
        ControlMessage::DiagRequest,
        ControlMessage::DiagReply("{\"log\": []}".into()),
        ControlMessage::RenewSoon(Duration::from_secs(600)),
        ControlMessage::Lost(vec![SessionId(9), SessionId(u64::MAX)]),
        ControlMessage::Renewed(EnrollReply::Refused(EnrollCode::Revoked, "no".into())),
        ControlMessage::Renewed(EnrollReply::Issued {
            chain: vec![vec![1; 40], vec![2; 40]],
            roots: vec![vec![3; 40]],
        }),
    ])
}

/// Returns the content of the frame that `encode` appends.
fn content(
    limit: usize,
    encode: impl FnOnce(&mut BytesMut) -> Result<(), FrameError>,
) -> Result<Vec<u8>> {
    let mut framed = BytesMut::new();
    encode(&mut framed)?;
    let taken = frame::take(&mut framed, limit)?;
    Ok(taken.context("a whole frame")?.to_vec())
}

pub(super) fn framed() -> Result<Vec<Vec<u8>>> {
    let mut corpus = Vec::new();
    for message in control_messages()? {
        let mut framed = BytesMut::new();
        message.encode(&mut framed)?;
        corpus.push(framed.to_vec());
    }
    corpus.push(corpus.concat());
    corpus.push(vec![0xff; 12]);
    Ok(corpus)
}

/// Takes frames from input that arrives in pieces, as from a network.
pub(super) fn check_frames(input: &[u8]) -> Result<()> {
    let mut buffer = BytesMut::new();
    let mut taken = 0;
    for piece in input.chunks(1 + input.len() / 3) {
        buffer.extend_from_slice(piece);
        loop {
            match frame::take(&mut buffer, ENROLL_MESSAGE_MAX) {
                Ok(Some(frame)) => {
                    ensure!(frame.len() <= ENROLL_MESSAGE_MAX, "{} bytes", frame.len());
                    taken += frame.len();
                }
                Ok(None) => {
                    let missing = frame::bytes_needed(&buffer, ENROLL_MESSAGE_MAX)?;
                    ensure!(
                        (1..=ENROLL_MESSAGE_MAX + 5).contains(&missing),
                        "{missing} bytes are missing"
                    );
                    break;
                }
                Err(_refused) => return Ok(()),
            }
        }
    }
    ensure!(taken + buffer.len() <= input.len(), "more than the input");
    let capacity = buffer.capacity();
    ensure!(
        capacity <= 2 * input.len() + 64,
        "an announced length reserves {capacity} bytes"
    );
    Ok(())
}

pub(super) fn controls() -> Result<Vec<Vec<u8>>> {
    let messages = control_messages()?;
    let contents = messages
        .iter()
        .map(|message| content(CONTROL_MESSAGE_MAX, |out| message.encode(out)));
    contents.collect()
}

pub(super) fn check_control(input: &[u8]) -> Result<()> {
    let Ok(message) = ControlMessage::decode(input) else {
        return Ok(());
    };
    let again = content(CONTROL_MESSAGE_MAX, |out| message.encode(out))?;
    ensure!(ControlMessage::decode(&again)? == message, "{message:?}");
    Ok(())
}

pub(super) fn peers() -> Result<Vec<Vec<u8>>> {
    let node = "worker-1".parse()?;
    let instance = InstanceId::new([7; 16]);
    let held_node = HeldNode {
        node,
        instance,
        since: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
    };
    let messages = [
        PeerMessage::Hello(PeerHello {
            replica: "server-0".parse()?,
            epoch: 7,
            versions: (1, 1),
            addresses: vec!["192.0.2.1:10262".into()],
            zone: Some("eu-1a".parse()?),
        }),
        PeerMessage::Holds(Holds {
            is_full: true,
            added: vec![held_node.clone(), held_node.clone()],
            removed: vec![held_node.node.clone()],
            has_more: true,
        }),
        PeerMessage::Leaving,
        PeerMessage::Ask(Ask {
            id: 3,
            node: held_node.node.clone(),
            instance,
            is_admitted: true,
        }),
        PeerMessage::Alive(Alive {
            id: 3,
            is_alive: true,
        }),
        PeerMessage::StateDigest(StateDigest {
            version: 7,
            orders: [1; 32],
            ca: [2; 32],
            clock: Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1)),
            configuration: Some([3; 32]),
        }),
        PeerMessage::StateFetch,
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
        PeerMessage::CertificatesFetch(3),
        PeerMessage::CertificatesPart(CertificatesPart {
            id: 3,
            nodes: vec![NodeCertificate {
                node: held_node.node.clone(),
                issued: Some(held_node.since),
                not_after: Some(held_node.since),
                is_kubelet: true,
                is_connected: true,
                is_gone: true,
            }],
            has_more: true,
        }),
        PeerMessage::NodeRows(NodeRows {
            is_wanted: true,
            is_full: true,
            rows: vec![NodeRow {
                node: held_node.node.clone(),
                is_suspect: true,
                transport: "quic".into(),
                rtt_millis: 300,
                streams: 1,
                bytes: [2, 3],
                bytes_per_second: [4, 5],
                errors_last_hour: 6,
                version: "culvert/0.1.0".into(),
                address: Some("192.0.2.7:40000".parse()?),
                since: held_node.since,
                certificate_not_after: held_node.since,
                trend: vec![0, 255],
                silent_seconds: 31,
            }],
            removed: vec![held_node.node.clone()],
            report: Some(ServerReport {
                sessions: 1,
                requests: 2,
                errors: 3,
                bytes: [4, 5],
                linked: vec!["server-0".parse()?],
                failing: vec![FailingRequests {
                    node: held_node.node.clone(),
                    code: "no_agent".into(),
                    port: 9100,
                    count: 7,
                    first: held_node.since,
                    last: held_node.since,
                    detail: "away".into(),
                }],
            }),
        }),
    ];
    let contents = messages
        .iter()
        .map(|message| content(PEER_MESSAGE_MAX, |out| message.encode(out)));
    contents.collect()
}

pub(super) fn check_peer(input: &[u8]) -> Result<()> {
    let Ok(message) = PeerMessage::decode(input) else {
        return Ok(());
    };
    let again = content(PEER_MESSAGE_MAX, |out| message.encode(out))?;
    ensure!(PeerMessage::decode(&again)? == message, "{message:?}");
    Ok(())
}

pub(super) fn enrollments() -> Result<Vec<Vec<u8>>> {
    let proof = RenewalProof {
        chain: vec![vec![1; 60], vec![2; 60]],
        signature: vec![3; 70],
        scheme: 0x0403,
    };
    let mut corpus = Vec::new();
    for proof in [None, Some(proof)] {
        let request = EnrollRequest {
            token: "abcdef012345.a5.11".to_owned().into(),
            csr: vec![0x30; 120],
            node_name: "worker-1".parse()?,
            proof,
            is_known: false,
        };
        corpus.push(content(ENROLL_MESSAGE_MAX, |out| request.encode(out))?);
    }
    for reply in [
        EnrollReply::Refused(EnrollCode::TokenUsed, "used".into()),
        EnrollReply::Issued {
            chain: vec![vec![1; 60]],
            roots: vec![vec![2; 60]],
        },
    ] {
        corpus.push(content(ENROLL_MESSAGE_MAX, |out| reply.encode(out))?);
    }
    Ok(corpus)
}

pub(super) fn check_enrollment(input: &[u8]) -> Result<()> {
    if let Ok(request) = EnrollRequest::decode(input) {
        let proof = request.proof.as_ref();
        let chain: usize = proof.map_or(0, |proof| proof.chain.iter().map(Vec::len).sum());
        let bytes = request.token.len() + request.csr.len() + chain;
        ensure!(bytes <= input.len(), "{bytes} bytes");
        let again = content(ENROLL_MESSAGE_MAX, |out| request.encode(out))?;
        ensure!(EnrollRequest::decode(&again)? == request, "another request");
    }
    if let Ok(reply) = EnrollReply::decode(input) {
        let again = content(ENROLL_MESSAGE_MAX, |out| reply.encode(out))?;
        ensure!(EnrollReply::decode(&again)? == reply, "{reply:?}");
    }
    Ok(())
}

pub(super) fn streams() -> Result<Vec<Vec<u8>>> {
    let port = Port::new(9100).context("a port")?;
    let mut corpus = Vec::new();
    for kind in [
        StreamKind::Control {
            version_min: 1,
            version_max: 2,
        },
        StreamKind::Target(Target::Node(port)),
        StreamKind::Target(Target::Loopback(port)),
        StreamKind::Target(Target::Host("fd00::1%eth0".into(), port)),
        StreamKind::Cloud("apiserver".parse()?),
    ] {
        let header = StreamHeader {
            kind,
            trace_parent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
            source: 0x0102_0304_0506_0708,
            audit_id: Some(AuditId::new([7; 16])),
            caller: "certificate:prometheus".into(),
            operation: "metrics".into(),
        };
        corpus.push(content(STREAM_MESSAGE_MAX, |out| header.encode(out))?);
    }
    for reply in [
        StreamReply::Accepted {
            dialed: "192.0.2.1:9100".into(),
        },
        StreamReply::refused(RefusalCode::from_number(1), "refused\r\nby policy"),
    ] {
        corpus.push(content(STREAM_MESSAGE_MAX, |out| reply.encode(out))?);
    }
    Ok(corpus)
}

pub(super) fn check_stream(input: &[u8]) -> Result<()> {
    if let Ok(header) = StreamHeader::decode(input) {
        let again = content(STREAM_MESSAGE_MAX, |out| header.encode(out))?;
        ensure!(StreamHeader::decode(&again)? == header, "{header:?}");
    }
    if let Ok(reply) = StreamReply::decode(input) {
        let again = content(STREAM_MESSAGE_MAX, |out| reply.encode(out))?;
        ensure!(StreamReply::decode(&again)? == reply, "{reply:?}");
        let text = match &reply {
            StreamReply::Accepted { dialed } => dialed,
            StreamReply::Refused(refusal) => &refusal.detail,
        };
        ensure!(!text.chars().any(char::is_control), "{text:?} forges lines");
    }
    Ok(())
}

/// Framed, as they arrive alone on a stream of their own.
pub(super) fn cuts() -> Result<Vec<Vec<u8>>> {
    let cuts = [
        (5, 200_963, ResetCode::PeerCut),
        (u64::MAX, u64::MAX, ResetCode::ReaderStalled),
    ];
    let framed = cuts.map(|(stream, offset, code)| {
        let mut framed = BytesMut::new();
        CutAnnouncement {
            stream,
            offset,
            code,
        }
        .encode(&mut framed)?;
        anyhow::Ok(framed.to_vec())
    });
    framed.into_iter().collect()
}

pub(super) fn check_cut(input: &[u8]) -> Result<()> {
    let mut framed = BytesMut::from(input);
    let Ok(Some(content)) = frame::take(&mut framed, CUT_MESSAGE_MAX) else {
        return Ok(());
    };
    let Ok(cut) = CutAnnouncement::decode(&content) else {
        return Ok(());
    };
    let mut again = BytesMut::new();
    cut.encode(&mut again)?;
    let content = frame::take(&mut again, CUT_MESSAGE_MAX)?.context("a whole frame")?;
    ensure!(CutAnnouncement::decode(&content)? == cut, "{cut:?}");
    Ok(())
}
