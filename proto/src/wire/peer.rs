//! Typed messages between servers.

use std::time::SystemTime;

use bytes::BytesMut;
use prost::Message as _;

use super::control::{Message, decode_replica, decode_zone, encode_zone, sanitize_addresses};
use super::fields::{decode_node, decode_time, since_epoch};
pub use super::frame::PEER_MESSAGE_MAX;
use super::frame::{self, FrameError};
use super::name::{InstanceId, NodeName, ReplicaId, ZoneName};
use super::node_certificate::{self, CertificatesPart};
use super::node_row::{self, NodeRows};
use super::order::{NodeOrder, Order};
use super::pb;

/// A message of the control stream between two servers, sent after its header and reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerMessage {
    /// Either end: the first message.
    Hello(PeerHello),
    /// Accepting end: the nodes that it holds.
    Holds(Holds),
    /// Accepting end: the server is stopping.
    Leaving,
    /// Dialing end: asks whether the session of another process of a node is alive.
    Ask(Ask),
    /// Accepting end: answers [`PeerMessage::Ask`].
    Alive(Alive),
    /// Either end: what the sender knows. The receiver fetches what differs.
    StateDigest(StateDigest),
    /// Either end: asks for the orders about nodes.
    StateFetch,
    /// Either end: a part of the answer to [`PeerMessage::StateFetch`].
    StatePart(StatePart),
    /// Dialing end: asks for rows of nodes. Accepting end: sends them.
    NodeRows(NodeRows),
    /// Dialing end: asks for the certificates of the agents that the receiver knows, by a number.
    CertificatesFetch(u64),
    /// Accepting end: a part of the answer to [`PeerMessage::CertificatesFetch`].
    CertificatesPart(CertificatesPart),
    /// A message of a later version, which is ignored. It is encoded as an empty message.
    Unknown,
}

/// The first message of each end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerHello {
    /// The name of the sending server. Must equal the name in its certificate.
    pub replica: ReplicaId,
    /// A random number of the sending process.
    pub epoch: u64,
    /// The lowest and highest supported protocol version.
    pub versions: (u32, u32),
    /// The addresses for agents, as `HOST:PORT`.
    pub addresses: Vec<String>,
    /// The zone that the operator gave the sending server.
    pub zone: Option<ZoneName>,
}

/// The nodes with a session at the sender, or a change of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Holds {
    /// Whether this message begins a new list.
    pub is_full: bool,
    /// Nodes that the sender holds.
    pub added: Vec<HeldNode>,
    /// Nodes that the sender no longer holds.
    pub removed: Vec<NodeName>,
    /// Whether the next message continues the new list. Until the last message of the list, nodes
    /// of the previous list count.
    pub has_more: bool,
}

/// A node with a session at a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldNode {
    /// The node that the agent serves.
    pub node: NodeName,
    /// Identifies the agent's process.
    pub instance: InstanceId,
    /// Admission of the oldest session of this process.
    pub since: SystemTime,
}

/// A question about the agent of a node that the asked server holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ask {
    /// The number of the question.
    pub id: u64,
    /// The node that the agent serves.
    pub node: NodeName,
    /// The asking server's process of the node.
    pub instance: InstanceId,
    /// Whether the asking server has admitted that process, so that the two admissions crossed.
    pub is_admitted: bool,
}

/// The answer to [`Ask`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alive {
    /// The number of the question.
    pub id: u64,
    /// Whether another process of the node has a live session, which keeps the name.
    pub is_alive: bool,
}

/// SHA-256 over the key that signs and the trusted certificates.
pub type CaDigest = [u8; 32];

/// Digests of what all servers of an installation agree on, as one server knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StateDigest {
    /// Counts the changes of the sender's orders about nodes.
    pub version: u64,
    /// SHA-256 over the orders.
    pub orders: [u8; 32],
    /// The CA of the sender.
    pub ca: CaDigest,
    /// The sender's wall clock when it sent the message, in milliseconds.
    pub clock: Option<SystemTime>,
    /// SHA-256 over the settings of the sender that are equal on all servers.
    pub configuration: Option<[u8; 32]>,
}

/// A part of the orders about nodes that a server knows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StatePart {
    /// Some of the orders, no node twice.
    pub orders: Vec<NodeOrder>,
    /// Whether the next message continues the answer.
    pub has_more: bool,
}

impl Message for PeerMessage {
    const SIZE_MAX: usize = PEER_MESSAGE_MAX;
    // A list of 250,000 nodes with long names has 2,400 messages.
    const PER_SECOND: u32 = 5_000;

    fn encode(&self, out: &mut BytesMut) -> Result<(), FrameError> {
        use pb::peer_message::Kind;
        let kind = match self {
            Self::Hello(hello) => Some(Kind::Hello(pb::PeerHello {
                replica_id: hello.replica.to_string(),
                epoch: hello.epoch,
                version_min: hello.versions.0,
                version_max: hello.versions.1,
                addresses: hello.addresses.clone(),
                zone: encode_zone(hello.zone.as_ref()),
            })),
            Self::Holds(holds) => Some(Kind::Holds(pb::Holds {
                full: holds.is_full,
                added: holds.added.iter().map(encode_held).collect(),
                removed: holds.removed.iter().map(ToString::to_string).collect(),
                more: holds.has_more,
            })),
            Self::Leaving => Some(Kind::Leaving(pb::Leaving {})),
            Self::Ask(ask) => Some(Kind::Ask(pb::Ask {
                id: ask.id,
                node: ask.node.to_string(),
                instance_id: ask.instance.as_bytes().to_vec(),
                admitted: ask.is_admitted,
            })),
            Self::Alive(alive) => Some(Kind::Alive(pb::Alive {
                id: alive.id,
                alive: alive.is_alive,
            })),
            Self::StateDigest(digest) => Some(Kind::StateDigest(pb::StateDigest {
                version: digest.version,
                orders: digest.orders.to_vec(),
                ca: digest.ca.to_vec(),
                clock_millis: digest.clock.map_or(0, since_epoch),
                configuration: digest
                    .configuration
                    .map(|hash| hash.to_vec())
                    .unwrap_or_default(),
            })),
            Self::StateFetch => Some(Kind::StateFetch(pb::StateFetch {})),
            Self::StatePart(part) => Some(Kind::StatePart(pb::StatePart {
                orders: part.orders.iter().map(encode_order).collect(),
                more: part.has_more,
            })),
            Self::NodeRows(rows) => Some(Kind::NodeRows(node_row::encode(rows))),
            Self::CertificatesFetch(id) => {
                Some(Kind::CertificatesFetch(pb::CertificatesFetch { id: *id }))
            }
            Self::CertificatesPart(part) => {
                Some(Kind::CertificatesPart(node_certificate::encode(part)))
            }
            Self::Unknown => None,
        };
        frame::encode(&pb::PeerMessage { kind }, Self::SIZE_MAX, out)
    }

    fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        use pb::peer_message::Kind;
        let Some(kind) = pb::PeerMessage::decode(frame)?.kind else {
            return Ok(Self::Unknown);
        };
        Ok(match kind {
            Kind::Hello(hello) => Self::Hello(PeerHello {
                replica: decode_replica(&hello.replica_id)?,
                epoch: hello.epoch,
                versions: (hello.version_min, hello.version_max),
                addresses: sanitize_addresses(hello.addresses),
                zone: decode_zone(&hello.zone)?,
            }),
            Kind::Holds(holds) => Self::Holds(Holds {
                is_full: holds.full,
                added: holds
                    .added
                    .into_iter()
                    .map(decode_held)
                    .collect::<Result<_, _>>()?,
                removed: holds
                    .removed
                    .iter()
                    .map(|node| decode_node(node))
                    .collect::<Result<_, _>>()?,
                has_more: holds.more,
            }),
            Kind::Leaving(pb::Leaving {}) => Self::Leaving,
            Kind::Ask(ask) => Self::Ask(Ask {
                id: ask.id,
                node: decode_node(&ask.node)?,
                instance: decode_instance(ask.instance_id)?,
                is_admitted: ask.admitted,
            }),
            Kind::Alive(alive) => Self::Alive(Alive {
                id: alive.id,
                is_alive: alive.alive,
            }),
            Kind::StateDigest(digest) => Self::StateDigest(StateDigest {
                version: digest.version,
                orders: decode_digest(digest.orders)?,
                ca: decode_digest(digest.ca)?,
                clock: match digest.clock_millis {
                    0 => None,
                    millis => Some(decode_time(millis)?),
                },
                configuration: match digest.configuration.as_slice() {
                    [] => None,
                    _ => Some(decode_digest(digest.configuration)?),
                },
            }),
            Kind::StateFetch(pb::StateFetch {}) => Self::StateFetch,
            Kind::StatePart(part) => Self::StatePart(StatePart {
                orders: part
                    .orders
                    .into_iter()
                    .map(decode_order)
                    .collect::<Result<_, _>>()?,
                has_more: part.more,
            }),
            Kind::NodeRows(rows) => Self::NodeRows(node_row::decode(rows)?),
            Kind::CertificatesFetch(fetch) => Self::CertificatesFetch(fetch.id),
            Kind::CertificatesPart(part) => Self::CertificatesPart(node_certificate::decode(part)?),
        })
    }
}

impl HeldNode {
    /// Returns the number of bytes that the node adds to a [`Holds`] message, at most.
    pub fn size_max(&self) -> usize {
        self.node.as_str().len() + FIELDS_MAX
    }
}

/// Maximum size of a [`HeldNode`] without its name: the instance, the time, and the heads of all
/// fields.
const FIELDS_MAX: usize = 48;

fn encode_held(held_node: &HeldNode) -> pb::HeldNode {
    pb::HeldNode {
        node: held_node.node.to_string(),
        instance_id: held_node.instance.as_bytes().to_vec(),
        since_millis: since_epoch(held_node.since),
    }
}

fn decode_held(held_node: pb::HeldNode) -> Result<HeldNode, FrameError> {
    Ok(HeldNode {
        node: decode_node(&held_node.node)?,
        instance: decode_instance(held_node.instance_id)?,
        since: decode_time(held_node.since_millis)?,
    })
}

fn encode_order(NodeOrder { node, order }: &NodeOrder) -> pb::NodeOrder {
    pb::NodeOrder {
        node: node.to_string(),
        counter: order.counter,
        revoked: order.is_revoked,
        at: order.at,
        generation: order.generation,
        reissued_at: order.reissued_at,
        ends_at: order.ends_at,
    }
}

fn decode_order(order: pb::NodeOrder) -> Result<NodeOrder, FrameError> {
    Ok(NodeOrder {
        node: decode_node(&order.node)?,
        order: Order {
            counter: order.counter,
            is_revoked: order.revoked,
            at: order.at,
            generation: order.generation,
            reissued_at: order.reissued_at,
            ends_at: order.ends_at,
        },
    })
}

fn decode_instance(instance: Vec<u8>) -> Result<InstanceId, FrameError> {
    let instance = instance.try_into();
    instance
        .map(InstanceId::new)
        .map_err(|_length| FrameError::Invalid("instance id"))
}

fn decode_digest(digest: Vec<u8>) -> Result<[u8; 32], FrameError> {
    let digest = digest.try_into();
    digest.map_err(|_length| FrameError::Invalid("digest"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn decode(kind: pb::peer_message::Kind) -> Result<PeerMessage, FrameError> {
        PeerMessage::decode(&pb::PeerMessage { kind: Some(kind) }.encode_to_vec())
    }

    #[test]
    fn names_and_instances_that_are_none_are_refused() {
        use pb::peer_message::Kind;
        let held_node = |node: &str, instance: &[u8], since_millis| {
            let held_node = pb::HeldNode {
                node: node.into(),
                instance_id: instance.to_vec(),
                since_millis,
            };
            decode(Kind::Holds(pb::Holds {
                added: vec![held_node],
                ..pb::Holds::default()
            }))
        };
        assert!(held_node("edge-1", &[7; 16], 1).is_ok());
        assert!(held_node("edge 1", &[7; 16], 1).is_err());
        assert!(held_node("edge-1", &[7; 15], 1).is_err());
        let removed = vec!["10.0.0.1:80".to_owned()];
        assert!(
            decode(Kind::Holds(pb::Holds {
                removed,
                ..pb::Holds::default()
            }))
            .is_err()
        );
        for (replica_id, zone, is_valid) in [
            ("server-1", "", true),
            ("server-1", "eu-1_a.b", true),
            ("-", "", false),
            ("server-1", "-", false),
            ("server-1", &"z".repeat(64), false),
        ] {
            let hello = pb::PeerHello {
                replica_id: replica_id.into(),
                zone: zone.into(),
                ..pb::PeerHello::default()
            };
            assert_eq!(decode(Kind::Hello(hello)).is_ok(), is_valid, "{zone}");
        }
    }

    #[test]
    fn held_node_is_no_larger_than_announced() {
        let name = [
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(61),
        ]
        .join(".");
        let held_node = HeldNode {
            node: name.parse().unwrap(),
            instance: InstanceId::new([7; 16]),
            since: SystemTime::UNIX_EPOCH + Duration::from_millis(u64::MAX >> 12),
        };
        let message = PeerMessage::Holds(Holds {
            added: vec![held_node.clone()],
            ..Holds::default()
        });
        let mut framed = BytesMut::new();
        message.encode(&mut framed).unwrap();
        assert!(framed.len() <= held_node.size_max(), "{}", framed.len());
        let content = frame::take(&mut framed, PEER_MESSAGE_MAX).unwrap().unwrap();
        assert_eq!(PeerMessage::decode(&content).unwrap(), message);
    }
}
