//! The seam between the listeners and the connections to nodes.

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
