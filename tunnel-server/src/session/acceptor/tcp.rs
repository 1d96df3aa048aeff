//! One TCP connection of 10262: a session over HTTP/2 or an enrolment, by the protocols that its ClientHello offers.

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

use super::{GivenUp, Shaken, Stranger};
use crate::ca::enrollment::Enrollment;

/// A fatal alert, `no_application_protocol` (RFC 8446, section 6; RFC 7301, section 3.2), as a plaintext record: before
/// ServerHello nothing is encrypted, and without ALPN in the ClientHello rustls would go on.
const NO_APPLICATION_PROTOCOL: [u8; 7] = [21, 3, 3, 0, 2, 2, 120];

/// What TCP connections of agents need.
#[derive(Debug)]
pub struct TcpEntry {
    /// TLS of sessions: requires the agent's certificate.
    pub session_tls: Arc<ServerConfig>,
    /// Windows and timers of sessions.
    pub settings: SessionSettings,
    /// TLS of enrolments: no client certificate.
    pub enroll_tls: Arc<ServerConfig>,
    /// What an enrolment needs.
    pub enrollment: Enrollment,
}

impl TcpEntry {
    /// Serves one connection to its end.
    pub(super) async fn serve(&self, socket: TcpStream, peer: SocketAddr, stranger: Stranger) {
        // In boxes of their own: the futures of a handshake and of an enrolment are large, and sessions live long.
        let met = Box::pin(self.meet(socket, peer, &stranger)).await;
        if let Some(shaken) = met {
            stranger.admit(shaken).await;
        }
    }

    /// The end of a session's handshake, or `None` when the connection was for something else and is done.
    async fn meet(
        &self,
        socket: TcpStream,
        peer: SocketAddr,
        stranger: &Stranger,
    ) -> Option<Result<Shaken, GivenUp>> {
        if let Err(error) = tcp::prepare_tunnel(&socket) {
            debug!(%error, "socket option refused");
        }
        let metrics = &stranger.sessions.metrics;
        let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), socket);
        let start = match stranger.in_time(hello).await {
            Ok(Ok(start)) => start,
            Ok(Err(error)) => {
                debug!(%error, "connection began with no ClientHello");
                metrics.handshake("handshake_failed");
                return None;
            }
            Err(given_up) => {
                metrics.handshake(given_up.label());
                return None;
            }
        };
        let offered = start.client_hello().alpn();
        match Offer::of(offered.into_iter().flatten()) {
            Offer::Session => {
                let handshake = Box::pin(self.begin_session(start));
                return Some(stranger.in_time(handshake).await);
            }
            Offer::Enrollment => {
                let result = match stranger.in_time(Box::pin(self.enroll(start, peer))).await {
                    Ok(Ok(result)) => result,
                    Ok(Err(error)) => {
                        debug!(%error, "connection for enrolment failed");
                        "handshake_failed"
                    }
                    Err(given_up) => given_up.label(),
                };
                metrics.enrollment(result);
            }
            Offer::Unsuitable => {
                metrics.handshake("unknown_protocol");
                debug!("connection offers neither enrolment alone nor a session");
                let _best_effort = stranger.in_time(refuse(start.io)).await;
            }
        }
        None
    }

    async fn begin_session(&self, start: StartHandshake<TcpStream>) -> Shaken {
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
enum Offer {
    Session,
    Enrollment,
    Unsuitable,
}

impl Offer {
    /// Enrolment's id must be the only one on its connection: nobody may be talked out of showing a certificate.
    fn of<'a>(ids: impl Iterator<Item = &'a [u8]>) -> Self {
        let ids: Vec<_> = ids.collect();
        match ids.contains(&ALPN_ENROLL) {
            true if ids.len() == 1 => Self::Enrollment,
            false if ids.contains(&ALPN_SESSION_TCP) => Self::Session,
            true | false => Self::Unsuitable,
        }
    }
}

async fn refuse(mut socket: TcpStream) -> io::Result<()> {
    socket.write_all(&NO_APPLICATION_PROTOCOL).await?;
    socket.shutdown().await
}

#[cfg(test)]
mod tests;
