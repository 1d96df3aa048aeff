//! Connections to targets that carry the bytes of a caller.

use tunnel_proto::transport::Stream;

use super::connect::dial::DirectSocket;

/// An open connection to a target.
#[derive(Debug)]
pub(super) enum Tunnel {
    /// A stream through an agent.
    Agent(Stream),
    /// A socket that the server dialed.
    Direct(DirectSocket),
}

impl Tunnel {
    /// Marks the connection as complete. A stream is finished when both of its halves have ended.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Agent(_) => {}
            Self::Direct(socket) => socket.finish(),
        }
    }
}
