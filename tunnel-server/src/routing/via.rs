//! The connection that carries a stream from a listener to a node.

use tunnel_proto::wire::name::{ReplicaId, SessionId};

/// What carries a stream to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Via {
    /// A session between this server and the node's agent.
    Local(SessionId),
    /// Another server, which has a session with the node's agent.
    Replica(ReplicaId),
}

impl Via {
    /// Returns the server that forwards the stream.
    pub fn replica(&self) -> Option<&ReplicaId> {
        match self {
            Self::Local(_) => None,
            Self::Replica(replica) => Some(replica),
        }
    }
}
