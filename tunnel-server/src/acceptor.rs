//! Port 10262: takes connections on UDP and TCP; every handshake runs in a task of its own, under a deadline.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, debug, info_span, warn};
use tunnel_proto::process::meta::ACCEPT_PAUSE;
use tunnel_proto::transport::quic::QuicAcceptor;
use tunnel_proto::transport::{Acceptor as _, HandshakeError, Session};

use crate::session::Sessions;

mod tcp;

pub use tcp::TcpEntry;

/// Accepts agents.
#[derive(Debug)]
pub struct Acceptor {
    /// UDP.
    pub quic: Arc<QuicAcceptor>,
    /// TCP.
    pub tcp: TcpListener,
    /// What TCP connections need.
    pub tcp_entry: TcpEntry,
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
            // Without a permit the handshake is dropped, which refuses the connection.
            if let Some(stranger) = self.stranger() {
                let work = async move {
                    let shaken = stranger.in_time(handshake).await;
                    stranger.admit(shaken).await;
                };
                let work = work.instrument(info_span!("conn", %peer));
                self.sessions.shutdown.spawn_service(work);
            }
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
            match accepted {
                Ok((socket, peer)) => {
                    if let Some(stranger) = self.stranger() {
                        let entry = self.tcp_entry.clone();
                        let work = async move { entry.serve(socket, peer, stranger).await };
                        let work = work.instrument(info_span!("conn", %peer));
                        self.sessions.shutdown.spawn_service(work);
                    }
                }
                Err(error) => {
                    warn!(%error, listener = "agents", "cannot accept connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// A place for a new connection, unless all are taken.
    fn stranger(&self) -> Option<Stranger> {
        let Ok(permit) = self.pre_auth.clone().try_acquire_owned() else {
            self.sessions.metrics.handshake("overloaded");
            return None;
        };
        Some(Stranger {
            sessions: self.sessions.clone(),
            deadline: Instant::now() + self.handshake_limit,
            permit,
        })
    }
}

/// A connection that has shown no credential yet.
#[derive(Debug)]
struct Stranger {
    sessions: Sessions,
    deadline: Instant,
    permit: OwnedSemaphorePermit,
}

impl Stranger {
    /// A handshake under the deadline.
    async fn in_time(
        &self,
        handshake: impl Future<Output = Result<Arc<dyn Session>, HandshakeError>> + Send,
    ) -> Result<Arc<dyn Session>, HandshakeError> {
        let shaken = timeout_at(self.deadline, handshake).await;
        shaken.unwrap_or(Err(HandshakeError::Timeout))
    }

    /// Serves the session that the handshake gave, to its end.
    async fn admit(self, shaken: Result<Arc<dyn Session>, HandshakeError>) {
        match shaken {
            Ok(session) => {
                drop(self.permit);
                self.sessions.serve(session).await;
            }
            Err(error) => {
                self.sessions.metrics.handshake(handshake_label(&error));
                match error {
                    HandshakeError::Timeout => debug!(%error, "handshake with an agent failed"),
                    HandshakeError::Transport(_)
                    | HandshakeError::Identity(_)
                    | HandshakeError::Local(_)
                    | HandshakeError::Connect(_) => {
                        warn!(%error, "handshake with an agent failed");
                    }
                }
            }
        }
    }
}

fn handshake_label(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Timeout => "timeout",
        HandshakeError::Transport(_) => "handshake_failed",
        HandshakeError::Identity(_) => "no_identity",
        // The second is a dialler's.
        HandshakeError::Local(_) | HandshakeError::Connect(_) => "local",
    }
}
