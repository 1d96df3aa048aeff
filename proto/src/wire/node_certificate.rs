//! What servers know of the certificates of agents, for the rotation of the CA.

use std::time::{Duration, SystemTime};

use super::fields::decode_node;
use super::frame::FrameError;
use super::name::NodeName;
use super::pb;

/// What a server knows of the certificate of a node's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCertificate {
    /// The node that the agent serves.
    pub node: NodeName,
    /// Issue time of the certificate that the agent presented last, if it is known.
    pub issued: Option<SystemTime>,
    /// End of the agent's certificate, if it has one.
    pub not_after: Option<SystemTime>,
    /// Whether the agent uses the certificate of its kubelet.
    pub is_kubelet: bool,
    /// Whether the node has a session at the server that knows this.
    pub is_connected: bool,
    /// Whether the node had a session at a server that is gone, and has none at one that is known.
    pub is_gone: bool,
}

/// A part of what a server knows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CertificatesPart {
    /// The number of the question.
    pub id: u64,
    /// Some of the nodes, none twice.
    pub nodes: Vec<NodeCertificate>,
    /// Whether the next message continues the answer.
    pub has_more: bool,
}

impl NodeCertificate {
    /// Creates the entry of a node of which nothing is known.
    pub fn unknown(node: NodeName) -> Self {
        Self {
            node,
            issued: None,
            not_after: None,
            is_kubelet: false,
            is_connected: false,
            is_gone: false,
        }
    }

    /// Returns the number of bytes that the node adds to a message, at most.
    pub fn size_max(&self) -> usize {
        self.node.as_str().len() + FIELDS_MAX
    }
}

pub(super) fn encode(part: &CertificatesPart) -> pb::CertificatesPart {
    let encode_node = |node: &NodeCertificate| pb::NodeCertificate {
        node: node.node.to_string(),
        issued: seconds(node.issued),
        not_after: seconds(node.not_after),
        kubelet: node.is_kubelet,
        connected: node.is_connected,
        gone: node.is_gone,
    };
    pb::CertificatesPart {
        id: part.id,
        nodes: part.nodes.iter().map(encode_node).collect(),
        more: part.has_more,
    }
}

pub(super) fn decode(part: pb::CertificatesPart) -> Result<CertificatesPart, FrameError> {
    let decode_node = |node: pb::NodeCertificate| {
        Ok(NodeCertificate {
            node: decode_node(&node.node)?,
            issued: time(node.issued),
            not_after: time(node.not_after),
            is_kubelet: node.kubelet,
            is_connected: node.connected,
            is_gone: node.gone,
        })
    };
    Ok(CertificatesPart {
        id: part.id,
        nodes: (part.nodes.into_iter().map(decode_node)).collect::<Result<_, FrameError>>()?,
        has_more: part.more,
    })
}

fn seconds(time: Option<SystemTime>) -> u64 {
    let since_epoch = time.map(|time| time.duration_since(SystemTime::UNIX_EPOCH));
    since_epoch.map_or(0, |since| since.unwrap_or_default().as_secs())
}

/// Returns a time up to the year 9999.
fn time(seconds: u64) -> Option<SystemTime> {
    let seconds = seconds.min(SECONDS_MAX);
    (seconds > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// End of the year 9999, the last time that RFC 3339 has.
const SECONDS_MAX: u64 = 253_402_300_799;
/// Upper bound for the encoded size of a node without its name: two times, three flags, and the heads of
/// all fields.
const FIELDS_MAX: usize = 40;

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::super::control::Message as _;
    use super::super::frame::{self, PEER_MESSAGE_MAX};
    use super::super::peer::PeerMessage;
    use super::*;

    #[test]
    fn node_is_no_larger_than_announced_and_times_are_bounded() {
        let labels = [
            "a".repeat(63),
            "b".repeat(63),
            "c".repeat(63),
            "d".repeat(61),
        ];
        let last = SystemTime::UNIX_EPOCH + Duration::from_secs(SECONDS_MAX);
        let node = NodeCertificate {
            node: labels.join(".").parse().unwrap(),
            issued: Some(last),
            not_after: Some(last),
            is_kubelet: true,
            is_connected: true,
            is_gone: true,
        };
        let part = CertificatesPart {
            nodes: vec![node.clone()],
            ..CertificatesPart::default()
        };
        let mut framed = BytesMut::new();
        let message = PeerMessage::CertificatesPart(part.clone());
        message.encode(&mut framed).unwrap();
        assert!(framed.len() <= node.size_max(), "{}", framed.len());
        let content = frame::take(&mut framed, PEER_MESSAGE_MAX).unwrap().unwrap();
        assert_eq!(PeerMessage::decode(&content).unwrap(), message);
        let mut hostile = encode(&part);
        (hostile.nodes[0].issued, hostile.nodes[0].not_after) = (u64::MAX, u64::MAX);
        assert_eq!(decode(hostile).unwrap(), part);
        let mut hostile = encode(&part);
        hostile.nodes[0].node = "a b".into();
        assert!(decode(hostile).is_err());
    }
}
