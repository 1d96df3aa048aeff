//! One TCP connection on port 10262: a session over HTTP/2 or an enrollment, depending on the
//! protocols in its ClientHello.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::StartHandshake;
use tracing::{debug, warn};
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::tls::{self, CertificateAlert};
use tunnel_proto::transport::{HandshakeError, SessionSettings, h2};
use tunnel_proto::wire::enroll::{RENEW_EXPORT_BYTES, RENEW_LABEL};
use tunnel_proto::wire::{ALPN_ENROLL, ALPN_SESSION_TCP};

use super::half_open::{HalfOpenConn, HandshakeResult, PreAuthError, rejection_code};
use crate::failure_code::NOT_TLS;
use crate::metrics::PROXY_PROTOCOL;
use crate::session::failures::FailedNode;
use tunnel_ca::enrollment::{Enrollment, EnrollmentEnd};

/// The fatal alert `no_application_protocol` (RFC 8446, section 6; RFC 7301, section 3.2) as a
/// plaintext record. Nothing is encrypted before ServerHello. Without ALPN in the ClientHello,
/// rustls would continue.
const NO_APPLICATION_PROTOCOL: [u8; 7] = [21, 3, 3, 0, 2, 2, 120];

#[derive(Debug)]
pub struct TcpHandler {
    /// TLS configuration of sessions. Requires the agent's certificate.
    pub session_tls: Arc<ServerConfig>,
    /// Flow control windows and timers of sessions.
    pub settings: SessionSettings,
    /// TLS configuration of enrollments. Requests no client certificate.
    pub enroll_tls: Arc<ServerConfig>,
    pub enrollment: Enrollment,
}

impl TcpHandler {
    /// Serves one connection until it ends.
    pub(super) async fn serve(&self, socket: TcpStream, peer: SocketAddr, half_open: HalfOpenConn) {
        // Boxed, because the futures of a handshake and of an enrollment are large and sessions
        // live long.
        let handshake = Box::pin(self.dispatch(socket, peer, &half_open)).await;
        if let Some(outcome) = handshake {
            half_open.admit(outcome).await;
        }
    }

    /// Returns the result of a session's handshake, or `None` if the connection was not for a
    /// session and has ended.
    async fn dispatch(
        &self,
        socket: TcpStream,
        peer: SocketAddr,
        half_open: &HalfOpenConn,
    ) -> Option<Result<HandshakeResult, PreAuthError>> {
        let metrics = &half_open.sessions.metrics;
        match half_open.with_deadline(first_bytes(&socket)).await {
            Ok(Ok(FirstBytes::Other)) => {}
            Ok(Ok(FirstBytes::ProxyProtocol)) => {
                metrics.handshake(PROXY_PROTOCOL);
                half_open.record(PROXY_PROTOCOL, "connection begins with PROXY protocol");
                static HEADERS: LogRateLimit =
                    LogRateLimit::new("PROXY protocol on the agents' port");
                if HEADERS.admit() {
                    warn!(
                        %peer,
                        "connection on the agents' port begins with PROXY protocol, which this server does not read; disable it at \
                         the load balancer"
                    );
                }
                return None;
            }
            Ok(Ok(FirstBytes::None) | Err(_)) => {
                debug!("connection ended before its first byte");
                return None;
            }
            Err(error) => {
                half_open.early(error);
                return None;
            }
        }
        let socket = h2::ReadAhead::new(socket);
        let hello = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), socket);
        let start = match half_open.with_deadline(hello).await {
            Ok(Ok(start)) => start,
            Ok(Err(error)) => {
                debug!(%error, "connection did not begin with a ClientHello");
                metrics.handshake("handshake_failed");
                half_open.record(NOT_TLS, error.to_string());
                return None;
            }
            Err(error) => {
                half_open.early(error);
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
                    Ok(Ok(end)) => {
                        record_enrollment(half_open, &end);
                        end.label()
                    }
                    Ok(Err(error)) => {
                        debug!(%error, "enrollment connection failed");
                        let alert = CertificateAlert::of(&error);
                        let code = alert.map_or("handshake_failed", rejection_code);
                        half_open.record(code, format!("enrollment: {}", tls::text(&error)));
                        "handshake_failed"
                    }
                    Err(error) => {
                        if error == PreAuthError::Timeout {
                            half_open.record(error.label(), format!("enrollment: {error}"));
                        }
                        error.label()
                    }
                };
                metrics.enrollment(result);
            }
            AlpnOffer::Unsupported => {
                metrics.handshake("unknown_protocol");
                half_open.record(
                    "unknown_protocol",
                    "TLS without the protocols of an agent (ALPN)",
                );
                debug!("ALPN of the connection is neither a session nor enrollment alone");
                let _best_effort = half_open.with_deadline(refuse(start.io)).await;
            }
        }
        None
    }

    async fn accept_session(&self, start: StartHandshake<h2::ReadAhead>) -> HandshakeResult {
        let stream = start
            .into_stream(self.session_tls.clone())
            .await
            .map_err(|error| {
                let text = tls::text(&error);
                match CertificateAlert::of(&error) {
                    Some(alert) => HandshakeError::Certificate(alert, text),
                    None => HandshakeError::Transport(text),
                }
            })?;
        h2::accept(stream, &self.settings).await
    }

    async fn enroll(
        &self,
        start: StartHandshake<h2::ReadAhead>,
        peer: SocketAddr,
    ) -> io::Result<EnrollmentEnd> {
        let stream = start.into_stream(self.enroll_tls.clone()).await?;
        let exported = stream
            .get_ref()
            .1
            .export_keying_material([0; RENEW_EXPORT_BYTES], RENEW_LABEL, None)
            .map_err(io::Error::other)?;
        Ok(self.enrollment.serve(stream, peer, exported).await)
    }
}

/// Records an enrollment that failed for operators.
fn record_enrollment(half_open: &HalfOpenConn, end: &EnrollmentEnd) {
    let (node, detail) = match end {
        EnrollmentEnd::Issued => return,
        EnrollmentEnd::Refused { node, detail, .. } => (node, detail.as_str()),
        // `tunnel-agent doctor` sends no request.
        EnrollmentEnd::Cut { node: None, .. } => return,
        EnrollmentEnd::Cut { node, detail } => (node, *detail),
    };
    let node = node
        .clone()
        .map_or(FailedNode::Unknown, FailedNode::Claimed);
    let detail = format!("enrollment: {detail}");
    let sessions = &half_open.sessions;
    sessions.record_failure(end.label(), node, half_open.peer, detail);
}

/// What a connection begins with.
enum FirstBytes {
    /// Nothing: the other end has closed it. Health checks and `doctor` do.
    None,
    /// A header of the PROXY protocol in version 1 or 2. A load balancer writes it at once.
    ProxyProtocol,
    Other,
}

/// Waits for the first bytes of a connection, which stay unread, or for its end.
async fn first_bytes(socket: &TcpStream) -> io::Result<FirstBytes> {
    let mut bytes = [0; PROXY_V2.len()];
    let count = socket.peek(&mut bytes).await?;
    let bytes = &bytes[..count];
    Ok(match bytes {
        [] => FirstBytes::None,
        _ if bytes.starts_with(PROXY_V1) || bytes.starts_with(PROXY_V2) => {
            FirstBytes::ProxyProtocol
        }
        _ => FirstBytes::Other,
    })
}

/// Begin of a header of the PROXY protocol, version 1.
const PROXY_V1: &[u8] = b"PROXY ";
/// Signature of a header of the PROXY protocol, version 2.
const PROXY_V2: &[u8] = b"\r\n\r\n\0\r\nQUIT\n";

/// The purpose of a connection, according to its ALPN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AlpnOffer {
    Session,
    Enrollment,
    Unsupported,
}

impl AlpnOffer {
    /// Classifies the protocol ids of a ClientHello. The id of enrollment must be the only one, so
    /// that an attacker cannot persuade an agent to omit its certificate.
    fn of<'a>(ids: impl Iterator<Item = &'a [u8]>) -> Self {
        let ids: Vec<_> = ids.collect();
        match ids.contains(&ALPN_ENROLL) {
            true if ids.len() == 1 => Self::Enrollment,
            false if ids.contains(&ALPN_SESSION_TCP) => Self::Session,
            true | false => Self::Unsupported,
        }
    }
}

async fn refuse(mut socket: impl AsyncWrite + Unpin) -> io::Result<()> {
    socket.write_all(&NO_APPLICATION_PROTOCOL).await?;
    socket.shutdown().await
}

#[cfg(test)]
mod tests;
