//! Port 10262: takes QUIC sessions and TCP enrolments; every handshake runs in a task of its own, under a deadline.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_rustls::LazyConfigAcceptor;
use tracing::{Instrument, debug, info_span, warn};
use tunnel_proto::process::meta::ACCEPT_PAUSE;
use tunnel_proto::transport::quic::QuicAcceptor;
use tunnel_proto::transport::{Acceptor as _, Handshake, HandshakeError};
use tunnel_proto::wire::ALPN_ENROLL;

use crate::enroll::Enrollment;
use crate::session::Sessions;

/// Accepts agents on UDP and enrolments on TCP.
#[derive(Debug)]
pub struct Acceptor {
    /// QUIC sessions.
    pub quic: Arc<QuicAcceptor>,
    /// Enrolments.
    pub tcp: TcpListener,
    /// TLS of enrolments.
    pub enroll_tls: Arc<ServerConfig>,
    /// What an enrolment needs.
    pub enrollment: Enrollment,
    /// What a session needs.
    pub sessions: Sessions,
    /// Time for a handshake, and for a whole enrolment.
    pub handshake_limit: Duration,
    /// Connections without a valid credential yet, at most.
    pub pre_auth: Arc<Semaphore>,
}

impl Acceptor {
    /// Accepts until the drain begins.
    pub fn start(self) {
        let shutdown = self.sessions.shutdown.clone();
        let acceptor = Arc::new(self);
        let quic = acceptor.clone();
        shutdown.spawn_service(async move { quic.accept_quic().await });
        shutdown.spawn_service(async move { acceptor.accept_tcp().await });
    }

    async fn accept_quic(&self) {
        let drain = self.sessions.shutdown.drain();
        loop {
            let accepted = tokio::select! {
                biased;
                () = drain.cancelled() => return,
                accepted = self.quic.accept() => accepted,
            };
            let Some((peer, handshake)) = accepted else {
                return;
            };
            let Ok(permit) = self.pre_auth.clone().try_acquire_owned() else {
                // Dropping the handshake refuses the connection.
                self.sessions.metrics.handshake("overloaded");
                continue;
            };
            let (sessions, limit) = (self.sessions.clone(), self.handshake_limit);
            let span = info_span!("session", %peer);
            self.sessions.shutdown.spawn_service(
                async move { finish_quic(handshake, sessions, limit, permit).await }
                    .instrument(span),
            );
        }
    }

    async fn accept_tcp(&self) {
        let drain = self.sessions.shutdown.drain();
        loop {
            let accepted = tokio::select! {
                biased;
                () = drain.cancelled() => return,
                accepted = self.tcp.accept() => accepted,
            };
            let (socket, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(%error, listener = "agents", "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = self.pre_auth.clone().try_acquire_owned() else {
                self.sessions.metrics.enrollment("overloaded");
                continue;
            };
            let (tls, enrollment, limit) = (
                self.enroll_tls.clone(),
                self.enrollment.clone(),
                self.handshake_limit,
            );
            let metrics = self.sessions.metrics.clone();
            let work = async move {
                let served =
                    tokio::time::timeout(limit, serve_tcp(socket, peer, tls, &enrollment)).await;
                drop(permit);
                let result = match served {
                    Ok(Ok(result)) => result,
                    Ok(Err(error)) => {
                        debug!(%peer, %error, "connection for enrolment failed");
                        "handshake_failed"
                    }
                    Err(_elapsed) => "timeout",
                };
                metrics.enrollment(result);
            };
            self.sessions
                .shutdown
                .spawn_service(work.instrument(info_span!("enroll", %peer)));
        }
    }
}

async fn finish_quic(
    handshake: Handshake,
    sessions: Sessions,
    limit: Duration,
    permit: OwnedSemaphorePermit,
) {
    match tokio::time::timeout(limit, handshake).await {
        Ok(Ok(session)) => {
            drop(permit);
            sessions.serve(session).await;
        }
        Ok(Err(error)) => {
            sessions.metrics.handshake(handshake_label(&error));
            warn!(%error, "handshake with an agent failed");
        }
        Err(_elapsed) => {
            sessions.metrics.handshake("timeout");
            debug!("handshake with an agent did not finish in time");
        }
    }
}

fn handshake_label(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Timeout => "timeout",
        HandshakeError::Transport(_) => "handshake_failed",
        HandshakeError::Identity(_) => "no_identity",
        HandshakeError::Local(_) => "local",
    }
}

/// Only the enrolment ALPN is served, so a peer that offers another or none fails in the handshake.
async fn serve_tcp(
    socket: TcpStream,
    peer: SocketAddr,
    tls: Arc<ServerConfig>,
    enrollment: &Enrollment,
) -> io::Result<&'static str> {
    socket.set_nodelay(true)?;
    let start = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), socket).await?;
    let offered = start
        .client_hello()
        .alpn()
        .is_some_and(|mut ids| ids.any(|id| id == ALPN_ENROLL));
    if !offered {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "peer does not offer the enrolment protocol",
        ));
    }
    let stream = start.into_stream(tls).await?;
    Ok(enrollment.serve(stream, peer).await)
}
