//! Typed messages of the control stream.

use std::time::Duration;

use bytes::BytesMut;
use prost::Message as _;

use super::code::CloseCode;
use super::enroll::EnrollReply;
use super::frame::{self, CONTROL_MESSAGE_MAX, FrameError};
use super::header::one_line;
use super::label::{self, Labels};
use super::name::{InstanceId, NodeName, ReplicaId, SessionId, ZoneName};
use super::{REPLICAS_MAX, pb};

/// Maximum number of entries that are decoded from a repeated field.
const REPEATED_FIELD_MAX: usize = 64;
/// Maximum number of addresses of a server that are decoded.
const ADDRESSES_MAX: usize = 8;

/// Maximum size of the document of a [`ControlMessage::DiagReply`]. Leaves room for the frame.
pub const DIAG_DOCUMENT_MAX: usize = CONTROL_MESSAGE_MAX - 1024;

/// The capability in Welcome of a server that answers `Renew`.
pub const CAPABILITY_RENEW: &str = "renew";
/// The capability in Welcome of a server that has targets of the cloud for this agent.
pub const CAPABILITY_CLOUD: &str = "cloud";

/// The capability in Hello of an agent that answers [`ControlMessage::DiagRequest`].
pub const CAPABILITY_DIAG: &str = "diag";
/// The capability in Hello of an agent that handles [`ControlMessage::RenewSoon`].
pub const CAPABILITY_RENEW_SOON: &str = "renew-soon";

/// A message of a control stream.
pub trait Message: Sized {
    /// Maximum size of a message, in bytes.
    const SIZE_MAX: usize;
    /// Messages that a peer may send in one second.
    const PER_SECOND: u32;
    /// Appends the framed message.
    ///
    /// # Errors
    /// [`FrameError::TooLarge`] above [`Message::SIZE_MAX`].
    fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError>;
    /// Decodes the content of one frame.
    ///
    /// # Errors
    /// [`FrameError::Malformed`] or [`FrameError::Invalid`].
    fn decode(frame: &[u8]) -> Result<Self, FrameError>;
}

/// A message of the control stream, sent after its header and reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlMessage {
    /// Agent: introduces the agent with its name, versions and capabilities.
    Hello(Box<Hello>),
    /// Server: admits the session.
    Welcome(Welcome),
    /// Server: rejects the session. Sent instead of Welcome.
    NotAdmitted(CloseCode, String),
    /// Server: asks the agent to complete its open streams and to connect elsewhere.
    Drain {
        /// Time for the open streams.
        deadline: Duration,
        /// The agent dials another server at a random moment within this time. Zero without another
        /// server.
        move_within: Duration,
    },
    /// Agent: asks the server to open no more streams.
    Withdraw,
    /// Either end: closes the session on purpose.
    Bye(String),
    /// Either end: reports whether the sender has stopped receiving from its peer. The peer cannot
    /// detect a partition of one direction.
    Suspect(bool),
    /// Either end, over h2: data of the peer has arrived since the last report. Sent while much data
    /// arrives, because a PING of the peer waits behind its data.
    Receiving,
    /// Agent: requests another certificate for the key of this PKCS#10 request (DER). Sent only to
    /// a server with [`CAPABILITY_RENEW`].
    Renew(Vec<u8>),
    /// Server: answers the request [`ControlMessage::Renew`].
    Renewed(EnrollReply),
    /// Server: replaces the members in Welcome.
    Members(Vec<Member>),
    /// Agent: names other sessions of this agent process with this server that have ended at the
    /// agent. Their connections are lost, so that the server would learn it late.
    Lost(Vec<SessionId>),
    /// Server: asks for facts about the agent. Sent only to an agent with [`CAPABILITY_DIAG`].
    DiagRequest,
    /// Agent: answers [`ControlMessage::DiagRequest`] with a JSON document of at most
    /// [`DIAG_DOCUMENT_MAX`] bytes, whose texts are the agent's.
    DiagReply(String),
    /// Server: asks the agent to renew its certificate at a random moment within this time, since the CA
    /// is being replaced. Sent only to an agent with [`CAPABILITY_RENEW_SOON`].
    RenewSoon(Duration),
    /// A message of a later version, which is ignored. It is encoded as an empty message.
    Unknown,
}

/// The first message of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The lowest and highest supported protocol version.
    pub versions: (u32, u32),
    /// Optional capabilities by name. Unknown ones are ignored.
    pub capabilities: Vec<String>,
    /// The node name. Must equal the name in the certificate.
    pub node_name: NodeName,
    /// The id of the agent's process.
    pub instance: InstanceId,
    /// The version of the agent's software, for people.
    pub software: String,
    /// The address that the agent detected for its node. The server displays it and never uses it
    /// for routing.
    pub node_ip: String,
    /// Labels that the agent gives its node, for people. No rule depends on them.
    pub labels: Labels,
}

/// The server's answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Welcome {
    /// The negotiated protocol version.
    pub version: u32,
    /// The id of the session at this server.
    pub session: SessionId,
    /// The capabilities of the server.
    pub capabilities: Vec<String>,
    /// Maximum number of streams that the server may have open at once.
    pub streams_per_agent: u32,
    /// Time limit for the agent to dial a target.
    pub target_dial_timeout: Duration,
    /// The name of this server.
    pub replica_id: ReplicaId,
    /// All servers, this one included.
    pub members: Vec<Member>,
}

/// A server of the installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The name of the server.
    pub id: ReplicaId,
    /// The addresses for agents, as `HOST:PORT`.
    pub addresses: Vec<String>,
    /// Whether the server is stopping, or will be soon.
    pub is_leaving: bool,
    /// The zone of the server; `None` if it is unknown, which means neither the zone of another
    /// server nor a different one.
    pub zone: Option<ZoneName>,
}

impl Message for ControlMessage {
    const SIZE_MAX: usize = CONTROL_MESSAGE_MAX;
    // A session needs only a few messages, apart from Suspect messages on a path that flaps. More
    // messages have no purpose and only cost resources.
    const PER_SECOND: u32 = 50;

    fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        use pb::control_message::Kind;
        let kind = match self {
            Self::Hello(hello) => Some(Kind::Hello(pb::Hello {
                version_min: hello.versions.0,
                version_max: hello.versions.1,
                capabilities: hello.capabilities.clone(),
                node_name: hello.node_name.to_string(),
                instance_id: hello.instance.as_bytes().to_vec(),
                software: hello.software.clone(),
                node_ip: hello.node_ip.clone(),
                labels: label::encode(&hello.labels),
            })),
            Self::Welcome(welcome) => Some(Kind::Welcome(pb::Welcome {
                version: welcome.version,
                session_id: welcome.session.0,
                capabilities: welcome.capabilities.clone(),
                streams_per_agent: welcome.streams_per_agent,
                target_dial_timeout_millis: millis(welcome.target_dial_timeout),
                replica_id: welcome.replica_id.to_string(),
                members: encode_members(&welcome.members),
            })),
            Self::NotAdmitted(code, detail) => Some(Kind::NotAdmitted(pb::NotAdmitted {
                code: code.number(),
                detail: detail.clone(),
            })),
            Self::Drain {
                deadline,
                move_within,
            } => Some(Kind::Drain(pb::Drain {
                deadline_millis: millis(*deadline),
                move_within_millis: millis(*move_within),
            })),
            Self::Withdraw => Some(Kind::Withdraw(pb::Withdraw {})),
            Self::Bye(reason) => Some(Kind::Bye(pb::Bye {
                reason: reason.clone(),
            })),
            Self::Suspect(silent) => Some(Kind::Suspect(pb::Suspect { silent: *silent })),
            Self::Receiving => Some(Kind::Receiving(pb::Receiving {})),
            Self::Renew(csr) => Some(Kind::Renew(pb::Renew { csr: csr.clone() })),
            Self::Renewed(reply) => Some(Kind::Renewed(reply.to_message())),
            Self::Members(members) => Some(Kind::Members(pb::Members {
                members: encode_members(members),
            })),
            Self::Lost(sessions) => Some(Kind::Lost(pb::Lost {
                session_ids: sessions.iter().map(|session| session.0).collect(),
            })),
            Self::DiagRequest => Some(Kind::DiagRequest(pb::DiagRequest {})),
            Self::DiagReply(document) => Some(Kind::DiagReply(pb::DiagReply {
                document: document.clone(),
            })),
            Self::RenewSoon(within) => Some(Kind::RenewSoon(pb::RenewSoon {
                within_millis: millis(*within),
            })),
            Self::Unknown => None,
        };
        frame::encode(&pb::ControlMessage { kind }, Self::SIZE_MAX, out)
    }

    fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        use pb::control_message::Kind;
        let Some(kind) = pb::ControlMessage::decode(frame)?.kind else {
            return Ok(Self::Unknown);
        };
        Ok(match kind {
            Kind::Hello(hello) => {
                let instance: [u8; 16] = hello
                    .instance_id
                    .try_into()
                    .map_err(|_length| FrameError::Invalid("instance id"))?;
                Self::Hello(Box::new(Hello {
                    versions: (hello.version_min, hello.version_max),
                    capabilities: sanitize_lines(hello.capabilities),
                    node_name: hello
                        .node_name
                        .parse()
                        .map_err(|_syntax| FrameError::Invalid("node name"))?,
                    instance: InstanceId::new(instance),
                    software: one_line(&hello.software),
                    node_ip: one_line(&hello.node_ip),
                    labels: label::decode(&hello.labels)?,
                }))
            }
            Kind::Welcome(welcome) => Self::Welcome(Welcome {
                version: welcome.version,
                session: SessionId(welcome.session_id),
                capabilities: sanitize_lines(welcome.capabilities),
                streams_per_agent: welcome.streams_per_agent,
                target_dial_timeout: Duration::from_millis(welcome.target_dial_timeout_millis),
                replica_id: decode_replica(&welcome.replica_id)?,
                members: decode_members(welcome.members)?,
            }),
            Kind::NotAdmitted(refusal) => Self::NotAdmitted(
                CloseCode::from_number(refusal.code),
                one_line(&refusal.detail),
            ),
            Kind::Drain(drain) => Self::Drain {
                deadline: Duration::from_millis(drain.deadline_millis),
                move_within: Duration::from_millis(drain.move_within_millis),
            },
            Kind::Withdraw(pb::Withdraw {}) => Self::Withdraw,
            Kind::Bye(bye) => Self::Bye(one_line(&bye.reason)),
            Kind::Suspect(pb::Suspect { silent }) => Self::Suspect(silent),
            Kind::Receiving(pb::Receiving {}) => Self::Receiving,
            Kind::Renew(pb::Renew { csr }) => Self::Renew(csr),
            Kind::Renewed(reply) => Self::Renewed(EnrollReply::from_message(reply)),
            Kind::Members(members) => Self::Members(decode_members(members.members)?),
            Kind::DiagRequest(pb::DiagRequest {}) => Self::DiagRequest,
            Kind::DiagReply(reply) => Self::DiagReply(reply.document),
            Kind::RenewSoon(soon) => Self::RenewSoon(Duration::from_millis(soon.within_millis)),
            Kind::Lost(lost) => {
                let sessions = lost.session_ids.into_iter().take(REPEATED_FIELD_MAX);
                Self::Lost(sessions.map(SessionId).collect())
            }
        })
    }
}

fn encode_members(members: &[Member]) -> Vec<pb::Member> {
    let members = members.iter().map(|member| pb::Member {
        id: member.id.to_string(),
        addresses: member.addresses.clone(),
        leaving: member.is_leaving,
        zone: encode_zone(member.zone.as_ref()),
    });
    members.collect()
}

fn decode_members(members: Vec<pb::Member>) -> Result<Vec<Member>, FrameError> {
    let members = members.into_iter().take(REPLICAS_MAX).map(|member| {
        Ok(Member {
            id: decode_replica(&member.id)?,
            addresses: sanitize_addresses(member.addresses),
            is_leaving: member.leaving,
            zone: decode_zone(&member.zone)?,
        })
    });
    members.collect()
}

pub(super) fn encode_zone(zone: Option<&ZoneName>) -> String {
    zone.map_or_else(String::new, ToString::to_string)
}

pub(super) fn decode_zone(zone: &str) -> Result<Option<ZoneName>, FrameError> {
    match zone {
        "" => Ok(None),
        zone => zone
            .parse()
            .map(Some)
            .map_err(|_syntax| FrameError::Invalid("zone")),
    }
}

pub(super) fn decode_replica(id: &str) -> Result<ReplicaId, FrameError> {
    id.parse()
        .map_err(|_syntax| FrameError::Invalid("replica name"))
}

/// Returns the addresses of a server, of which there are a few.
pub(super) fn sanitize_addresses(mut addresses: Vec<String>) -> Vec<String> {
    addresses.truncate(ADDRESSES_MAX);
    sanitize_lines(addresses)
}

fn sanitize_lines(texts: Vec<String>) -> Vec<String> {
    let texts = texts.into_iter().take(REPEATED_FIELD_MAX);
    texts.map(one_line).collect()
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_with_a_bad_name_or_instance_is_refused() {
        let decode = |name: &str, instance: &[u8]| {
            let hello = pb::Hello {
                node_name: name.into(),
                instance_id: instance.to_vec(),
                ..pb::Hello::default()
            };
            let kind = Some(pb::control_message::Kind::Hello(hello));
            ControlMessage::decode(&pb::ControlMessage { kind }.encode_to_vec())
        };
        assert!(decode("worker-1", &[0; 16]).is_ok());
        assert!(decode("worker 1", &[0; 16]).is_err());
        assert!(decode("worker-1", &[0; 15]).is_err());
    }

    #[test]
    fn welcome_of_a_server_without_a_name_is_refused() {
        let decode = |name: &str| {
            let welcome = pb::Welcome {
                replica_id: name.into(),
                ..pb::Welcome::default()
            };
            let kind = Some(pb::control_message::Kind::Welcome(welcome));
            ControlMessage::decode(&pb::ControlMessage { kind }.encode_to_vec())
        };
        assert!(decode("server-1").is_ok());
        assert!(decode("").is_err());
        assert!(decode("server 1").is_err());
    }

    #[test]
    fn labels_of_a_hello_are_bounded_and_those_of_kubernetes() {
        let decode = |labels: Vec<String>| {
            let hello = pb::Hello {
                node_name: "worker-1".into(),
                instance_id: vec![0; 16],
                labels,
                ..pb::Hello::default()
            };
            let kind = Some(pb::control_message::Kind::Hello(hello));
            ControlMessage::decode(&pb::ControlMessage { kind }.encode_to_vec())
        };
        let many = |count: usize| (0..count).map(|number| format!("k{number}=v")).collect();
        let Ok(ControlMessage::Hello(hello)) = decode(many(16)) else {
            panic!("refused");
        };
        assert_eq!(hello.labels.len(), 16);
        assert!(decode(many(17)).is_err());
        for bad in ["a", "=b", "a b=c", "a=\n", "a=b=c"] {
            assert!(decode(vec![bad.into()]).is_err(), "{bad:?}");
        }
        let long = format!("a={}", "v".repeat(64));
        assert!(decode(vec![long]).is_err());
    }

    #[test]
    fn members_and_their_addresses_are_bounded() {
        let member = |number: u32| pb::Member {
            id: format!("server-{number}"),
            addresses: (1..=20).map(|port| format!("192.0.2.1:{port}")).collect(),
            leaving: false,
            zone: "z".repeat(63),
        };
        let members = pb::Members {
            members: (0..100).map(member).collect(),
        };
        let kind = Some(pb::control_message::Kind::Members(members));
        let decoded = ControlMessage::decode(&pb::ControlMessage { kind }.encode_to_vec());
        let Ok(ControlMessage::Members(members)) = &decoded else {
            panic!("{decoded:?}");
        };
        assert_eq!(members.len(), REPLICAS_MAX);
        let mut members = members.iter();
        assert!(members.all(|member| member.addresses.len() == ADDRESSES_MAX));
    }

    #[test]
    fn zone_of_a_member_is_unknown_or_a_label_value() {
        let decode = |zone: &str| {
            let member = pb::Member {
                id: "server-1".into(),
                zone: zone.into(),
                ..pb::Member::default()
            };
            let members = pb::Members {
                members: vec![member],
            };
            let kind = Some(pb::control_message::Kind::Members(members));
            let decoded = ControlMessage::decode(&pb::ControlMessage { kind }.encode_to_vec());
            match decoded {
                Ok(ControlMessage::Members(mut members)) => Ok(members.remove(0).zone),
                other => Err(format!("{other:?}")),
            }
        };
        assert_eq!(decode(""), Ok(None));
        assert_eq!(decode("a"), Ok(Some("a".parse().unwrap())));
        for zone in [" ", "a b", "a\n", &"z".repeat(64)] {
            assert!(decode(zone).is_err(), "{zone:?}");
        }
    }

    #[test]
    fn lost_sessions_are_bounded() {
        let lost = pb::Lost {
            session_ids: (0..1000).collect(),
        };
        let kind = Some(pb::control_message::Kind::Lost(lost));
        let decoded = ControlMessage::decode(&pb::ControlMessage { kind }.encode_to_vec());
        let Ok(ControlMessage::Lost(sessions)) = &decoded else {
            panic!("{decoded:?}");
        };
        assert_eq!(sessions.len(), REPEATED_FIELD_MAX);
    }
}
