//! Connections to targets that carry the bytes of a caller.

use tokio::io::{AsyncRead, AsyncWrite};
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::relay::{PollCut, RelayEnd, Socket, relay};
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::ResetCode;

use super::http::upstream::TargetIo;

/// An open connection to a target.
#[derive(Debug)]
pub(super) enum Tunnel {
    /// A stream through an agent that has connected to the target.
    Agent(Stream),
    /// A stream through an agent that has not replied yet.
    Pending {
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
    pub(super) async fn relay<C>(&mut self, caller: &mut C) -> RelayEnd
    where
        C: AsyncRead + AsyncWrite + PollCut + Unpin,
    {
        let caller = &mut Socket(caller);
        match self {
            Self::Agent(stream) | Self::Pending { stream, .. } => relay(caller, stream).await.end,
            Self::Direct(socket) => relay(caller, &mut Socket(socket)).await.end,
            Self::Upgraded(target) => relay(caller, &mut Socket(&mut **target)).await.end,
        }
    }

    /// Cuts the connection. The target gets the bytes that were written before, unless it
    /// `is_stalled`.
    pub(super) async fn cut_behind(self, is_stalled: bool) {
        match self {
            // Stays behind the bytes. Without it, a half that was shut down would just not be read.
            Self::Agent(mut stream) | Self::Pending { mut stream, .. } => {
                stream.cut_behind(ResetCode::PeerCut);
            }
            Self::Upgraded(target) => target.cut_behind(),
            Self::Direct(socket) if !is_stalled => socket.abort().await,
            Self::Direct(_) => {}
        }
    }

    /// Marks the connection as complete. Other connections than those that the server dialed are
    /// complete when both of their halves have ended.
    pub(super) fn finish(&mut self) {
        match self {
            Self::Agent(_) | Self::Pending { .. } | Self::Upgraded(_) => {}
            Self::Direct(socket) => socket.finish(),
        }
    }

    /// Returns the name of the connection for logs.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Agent(_) | Self::Direct(_) => "tunnel",
            Self::Pending { .. } => "service stream",
            Self::Upgraded(_) => "upgraded stream",
        }
    }
}
