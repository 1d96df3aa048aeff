//! The relay between a stream of the tunnel and a socket of this host, as egress and ingress need
//! it.

use tunnel_proto::egress::TargetSocket;
use tunnel_proto::relay::{RelayEnd, RelaySide, Socket, relay};
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::ResetCode;

use crate::metrics::StreamEnd;

/// The totals and the end of a relay, for the access log.
pub(crate) struct SocketRelay {
    pub(crate) end: StreamEnd,
    pub(crate) from_tunnel: u64,
    pub(crate) to_tunnel: u64,
    pub(crate) detail: String,
}

/// Relays until both sides have ended or one was cut. Both ends see a cut as a reset. `socket_cut`
/// is the end if the socket was cut. Dropping the future resets both.
pub(crate) async fn relay_socket(
    mut stream: Stream,
    mut socket: TargetSocket,
    socket_cut: StreamEnd,
) -> SocketRelay {
    let relayed = relay(&mut stream, &mut Socket(&mut socket)).await;
    let (end, detail) = match relayed.end {
        RelayEnd::Clean => {
            socket.finish();
            (StreamEnd::Ok, String::new())
        }
        RelayEnd::ReaderClosed(_) => {
            socket.finish();
            (StreamEnd::ReaderClosed, String::new())
        }
        // The socket is dropped and resets here, the stream below.
        RelayEnd::Cut(RelaySide::Left, error) => (StreamEnd::CutByPeer, error.to_string()),
        RelayEnd::Cut(RelaySide::Right, error) => {
            stream.reset(ResetCode::PeerCut);
            (socket_cut, error.to_string())
        }
    };
    SocketRelay {
        end,
        from_tunnel: relayed.left_to_right,
        to_tunnel: relayed.right_to_left,
        detail,
    }
}

/// Returns `None` for an empty field, so that the log omits it.
pub(crate) fn non_empty(text: &str) -> Option<&str> {
    (!text.is_empty()).then_some(text)
}
