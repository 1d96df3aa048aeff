//! Connections to targets that carry the bytes of a caller.

use tokio::io::{AsyncRead, AsyncWrite};
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::relay::{CutSide, PollCut, RelayEnd, Socket, relay};
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::ResetCode;

use super::http::upstream::TargetIo;

/// An open connection to a target.
#[derive(Debug)]
pub(super) enum Tunnel {
    /// A stream through an agent. Unless it is accepted, the agent has not replied yet.
    Agent {
        stream: Stream,
        /// The node and the target, for the error if the agent refuses.
        target_label: String,
    },
    /// A socket that the server dialed.
    Direct(TargetSocket),
    /// An HTTP connection after a 101.
    Upgraded(Box<TargetIo>),
}

impl Tunnel {
    /// Relays bytes in both directions. Half-closes are forwarded.
    pub(super) async fn relay<C>(&mut self, caller_stream: &mut C) -> RelayEnd
    where
        C: AsyncRead + AsyncWrite + PollCut + Unpin,
    {
        let caller = &mut Socket(caller_stream);
        match self {
            Self::Agent { stream, .. } => relay(caller, stream).await.end,
            Self::Direct(socket) => relay(caller, &mut Socket(socket)).await.end,
            Self::Upgraded(target) => relay(caller, &mut Socket(&mut **target)).await.end,
        }
    }

    /// Marks the connection as complete. Other connections than those that the server dialed are
    /// complete when both of their halves have ended.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Agent { .. } | Self::Upgraded(_) => {}
            Self::Direct(socket) => socket.finish(),
        }
    }

    /// Returns the name of the connection for logs.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Agent { .. } | Self::Direct(_) => "tunnel",
            Self::Upgraded(_) => "upgraded stream",
        }
    }
}

impl CutSide for Tunnel {
    async fn cut_for_peer(self, code: ResetCode, takes_none: bool) {
        match self {
            Self::Agent { stream, .. } => stream.cut_for_peer(code, takes_none).await,
            Self::Upgraded(target) => target.cut_behind(),
            Self::Direct(socket) => socket.cut_for_peer(code, takes_none).await,
        }
    }
}
