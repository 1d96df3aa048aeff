//! The connection that carries a stream from a listener to a node.

use tunnel_proto::wire::name::SessionId;

/// What carries a stream to a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Via {
    /// A session between this server and the node's agent.
    Local(SessionId),
}

impl Via {
    #[must_use]
    pub fn session_number(&self) -> u64 {
        match self {
            Self::Local(session) => session.0,
        }
    }
}
