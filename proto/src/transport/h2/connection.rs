//! The connection of h2 in either role.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::{PingPong, RecvStream};
use tokio::io::{AsyncRead, AsyncWrite};

use super::io::ConnIo;

/// Either role of h2. The server's end of a session is h2's client, because it opens most streams.
pub(super) enum Connection<S> {
    Client(h2::client::Connection<ConnIo<S>, Bytes>),
    Server(h2::server::Connection<ConnIo<S>, Bytes>),
}

pub(super) type Accepted = (http::Request<RecvStream>, h2::server::SendResponse<Bytes>);

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Polls the connection. Returns a request of the peer, or the end of the connection.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Accepted>, h2::Error>> {
        match self {
            Self::Client(client) => Pin::new(client).poll(cx).map_ok(|()| None),
            Self::Server(server) => server.poll_accept(cx).map(Option::transpose),
        }
    }

    pub(super) fn set_window(&mut self, bytes: u64) {
        let bytes = window_size(bytes);
        match self {
            Self::Client(client) => client.set_target_window_size(bytes),
            Self::Server(server) => server.set_target_window_size(bytes),
        }
    }

    /// Sets the window of all streams, also of open ones.
    ///
    /// # Errors
    /// Until the peer has acknowledged the settings before.
    pub(super) fn set_stream_window(&mut self, bytes: u32) -> Result<(), h2::Error> {
        match self {
            Self::Client(client) => client.set_initial_window_size(bytes),
            Self::Server(server) => server.set_initial_window_size(bytes),
        }
    }

    pub(super) fn ping_pong(&mut self) -> Option<PingPong> {
        match self {
            Self::Client(client) => client.ping_pong(),
            Self::Server(server) => server.ping_pong(),
        }
    }
}

/// The largest window of h2 (RFC 9113, section 6.9.1).
pub(super) const WINDOW_SIZE_MAX: u32 = (1 << 31) - 1;

pub(super) fn window_size(bytes: u64) -> u32 {
    u32::try_from(bytes)
        .unwrap_or(WINDOW_SIZE_MAX)
        .min(WINDOW_SIZE_MAX)
}
