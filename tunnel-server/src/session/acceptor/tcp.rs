//! One TCP connection of 10262: a session over HTTP/2 or an enrollment, by the protocols that its ClientHello offers.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::StartHandshake;
use tracing::debug;
use tunnel_proto::tcp;
use tunnel_proto::transport::{HandshakeError, SessionSettings, h2};
use tunnel_proto::wire::enroll::{RENEW_EXPORT_BYTES, RENEW_LABEL};
use tunnel_proto::wire::{ALPN_ENROLL, ALPN_SESSION_TCP};

use super::{HalfOpenConn, HandshakeResult, PreAuthError};
use crate::ca::enrollment::Enrollment;

/// A fatal alert, `no_application_protocol` (RFC 8446, section 6; RFC 7301, section 3.2), as a plaintext record: before
/// ServerHello nothing is encrypted, and without ALPN in the ClientHello rustls would go on.
const NO_APPLICATION_PROTOCOL: [u8; 7] = [21, 3, 3, 0, 2, 2, 120];

/// What TCP connections of agents need.
#[derive(Debug)]
pub struct TcpHandler {
    /// TLS of sessions: requires the agent's certificate.
    pub session_tls: Arc<ServerConfig>,
    /// Windows and timers of sessions.
    pub settings: SessionSettings,
    /// TLS of enrollments: no client certificate.
    pub enroll_tls: Arc<ServerConfig>,
    /// What an enrollment needs.
    pub enrollment: Enrollment,
}

impl TcpHandler {
    /// Serves one connection to its end.
    pub(super) async fn serve(&self, socket: TcpStream, peer: SocketAddr, half_open: HalfOpenConn) {
        // In boxes of their own: the futures of a handshake and of an enrollment are large, and sessions live long.
        let handshake = Box::pin(self.dispatch(socket, peer, &half_open)).await;
        if let Some(outcome) = handshake {
            half_open.admit(outcome).await;
        }
    }

    /// The end of a session's handshake, or `None` when the connection was for something else and is done.
    async fn dispatch(
        &self,
        socket: TcpStream,
        peer: SocketAddr,
        half_open: &HalfOpenConn,
    ) -> Option<Result<HandshakeResult, PreAuthError>> {
        if let Err(error) = tcp::configure_session(&socket) {
            debug!(%error, "cannot set a socket option");
        }
        let metrics = &half_open.sessions.metrics;
        let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), socket);
        let start = match half_open.with_deadline(hello).await {
            Ok(Ok(start)) => start,
            Ok(Err(error)) => {
                debug!(%error, "connection did not begin with a ClientHello");
                metrics.handshake("handshake_failed");
                return None;
            }
            Err(error) => {
                metrics.handshake(error.label());
                return None;
            }
        };
        let offered = start.client_hello().alpn();
        match AlpnOffer::of(offered.into_iter().flatten()) {
            AlpnOffer::Session => {
                let handshake = Box::pin(self.accept_session(start));
                return Some(half_open.with_deadline(handshake).await);
            }
            AlpnOffer::Enrollment => {
                let result = match half_open
                    .with_deadline(Box::pin(self.enroll(start, peer)))
                    .await
                {
                    Ok(Ok(result)) => result,
                    Ok(Err(error)) => {
                        debug!(%error, "enrollment connection failed");
                        "handshake_failed"
                    }
                    Err(error) => error.label(),
                };
                metrics.enrollment(result);
            }
            AlpnOffer::Unsupported => {
                metrics.handshake("unknown_protocol");
                debug!("ALPN of the connection is neither a session nor enrollment alone");
                let _best_effort = half_open.with_deadline(refuse(start.io)).await;
            }
        }
        None
    }

    async fn accept_session(&self, start: StartHandshake<TcpStream>) -> HandshakeResult {
        let stream = start
            .into_stream(self.session_tls.clone())
            .await
            .map_err(|error| HandshakeError::Transport(error.to_string()))?;
        h2::accept(stream, &self.settings).await
    }

    async fn enroll(
        &self,
        start: StartHandshake<TcpStream>,
        peer: SocketAddr,
    ) -> io::Result<&'static str> {
        let stream = start.into_stream(self.enroll_tls.clone()).await?;
        let exported = stream
            .get_ref()
            .1
            .export_keying_material([0; RENEW_EXPORT_BYTES], RENEW_LABEL, None)
            .map_err(io::Error::other)?;
        Ok(self.enrollment.serve(stream, peer, exported).await)
    }
}

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AlpnOffer {
    Session,
    Enrollment,
    Unsupported,
}

impl AlpnOffer {
    /// Enrollment's id must be the only one on its connection: nobody may be talked out of showing a certificate.
    fn of<'a>(ids: impl Iterator<Item = &'a [u8]>) -> Self {
        let ids: Vec<_> = ids.collect();
        match ids.contains(&ALPN_ENROLL) {
            true if ids.len() == 1 => Self::Enrollment,
            false if ids.contains(&ALPN_SESSION_TCP) => Self::Session,
            true | false => Self::Unsupported,
        }
    }
}

async fn refuse(mut socket: TcpStream) -> io::Result<()> {
    socket.write_all(&NO_APPLICATION_PROTOCOL).await?;
    socket.shutdown().await
}

#[cfg(test)]
mod tests;
