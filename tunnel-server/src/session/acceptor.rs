//! Port 10262: takes connections on UDP and TCP; every handshake runs in a task of its own, under a deadline.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, debug, error, info_span, warn};
use tunnel_proto::process::accept::Accepting;
use tunnel_proto::process::telemetry::LineLimit;
use tunnel_proto::transport::quic::QuicAcceptor;
use tunnel_proto::transport::{Acceptor as _, HandshakeError, Session};

use crate::config::Limit;
use crate::metrics::TIMEOUT;
use crate::session::Sessions;
use tunnel_proto::process::places::{Place, Places, Reached};

mod tcp;

pub use tcp::TcpEntry;

/// Accepts agents.
#[derive(Debug)]
pub struct Acceptor {
    /// UDP.
    pub quic: Arc<QuicAcceptor>,
    /// What TCP connections need.
    pub tcp_entry: Arc<TcpEntry>,
    /// What a session needs.
    pub sessions: Arc<Sessions>,
    /// Time for a handshake, and for a whole enrolment.
    pub handshake_limit: Duration,
    /// Places for connections without a valid credential yet.
    pub pre_auth: Arc<Places>,
    /// Places for TCP connections, for their whole life: each takes a descriptor, and others need some, too.
    pub over_tcp: Arc<Semaphore>,
}

impl Acceptor {
    /// Accepts on UDP and on this TCP listener until the drain begins. From then on new connections are refused, so that an
    /// agent that was sent away looks for another server at once: the TCP listener is closed, and over QUIC, whose socket
    /// the open sessions need, each is answered with CONNECTION_REFUSED.
    pub fn start(self, tcp: TcpListener) {
        let tcp = Accepting::new(tcp, "agents");
        let shutdown = self.sessions.shutdown.clone();
        let acceptor = Arc::new(self);
        let quic = acceptor.clone();
        shutdown.spawn_listener(async move { quic.accept_quic().await });
        shutdown.spawn_listener(async move { acceptor.accept_tcp(tcp).await });
    }

    async fn accept_quic(&self) {
        let drain = self.sessions.shutdown.drain();
        loop {
            let Some((peer, handshake)) = self.quic.accept().await else {
                if !drain.is_cancelled() {
                    error!(
                        "the QUIC endpoint has ended; agents go on over TCP until the server is started anew"
                    );
                }
                return;
            };
            if drain.is_cancelled() {
                // Dropped, which refuses it.
                drop(handshake);
                continue;
            }
            let Some(stranger) = self.stranger(peer) else {
                continue;
            };
            let work = async move {
                let shaken = stranger.in_time(handshake).await;
                stranger.admit(shaken).await;
            };
            let work = work.instrument(info_span!("conn", %peer));
            self.sessions.shutdown.spawn_service(work);
        }
    }

    async fn accept_tcp(&self, mut tcp: Accepting<TcpListener>) {
        let drain = self.sessions.shutdown.drain();
        loop {
            let (socket, peer) = tokio::select! {
                biased;
                () = drain.cancelled() => return,
                accepted = tcp.next() => accepted,
            };
            let Ok(permit) = self.over_tcp.clone().try_acquire_owned() else {
                self.sessions.metrics.handshake("overloaded");
                debug!(%peer, "no descriptor is left for another agent over TCP; raise the limit of open files");
                continue;
            };
            let Some(stranger) = self.stranger(peer) else {
                continue;
            };
            let entry = self.tcp_entry.clone();
            let work = async move {
                entry.serve(socket, peer, stranger).await;
                drop(permit);
            };
            let work = work.instrument(info_span!("conn", %peer));
            self.sessions.shutdown.spawn_service(work);
        }
    }

    /// A new connection, with a place of its own. Without one it is dropped, which refuses it.
    fn stranger(&self, peer: SocketAddr) -> Option<Stranger> {
        let entered = self.pre_auth.enter(peer.ip());
        let metrics = &self.sessions.metrics;
        let reached = match &entered {
            Ok(place) => place.reached(),
            Err(reached) => Some(*reached),
        };
        match reached {
            Some(Reached::PerSource) => metrics.limit(Limit::PreAuthPerSource),
            Some(Reached::Total) => metrics.limit(Limit::PreAuthTotal),
            None => {}
        }
        let Ok(place) = entered else {
            metrics.handshake("overloaded");
            return None;
        };
        Some(Stranger {
            sessions: self.sessions.clone(),
            deadline: Instant::now() + self.handshake_limit,
            place,
        })
    }
}

/// A connection that has shown no credential yet.
#[derive(Debug)]
struct Stranger {
    sessions: Arc<Sessions>,
    deadline: Instant,
    place: Place,
}

/// Why a connection was given up before it showed a credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum GivenUp {
    #[error("handshake did not finish in time (limits.handshakeTimeout)")]
    Timeout,
    #[error(
        "place was needed for a newer connection (limits.preAuthPerSource, limits.preAuthTotal)"
    )]
    Evicted,
}

impl GivenUp {
    /// For metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Timeout => TIMEOUT,
            Self::Evicted => "evicted",
        }
    }
}

impl Stranger {
    /// Work under the deadline, for as long as the place lasts.
    async fn in_time<T>(&self, work: impl Future<Output = T>) -> Result<T, GivenUp> {
        tokio::select! {
            biased;
            () = self.place.evicted() => Err(GivenUp::Evicted),
            done = timeout_at(self.deadline, work) => done.map_err(|_elapsed| GivenUp::Timeout),
        }
    }

    /// Serves the session that the handshake gave, to its end.
    async fn admit(self, shaken: Result<Shaken, GivenUp>) {
        let metrics = &self.sessions.metrics;
        match shaken {
            Ok(Ok(session)) => {
                drop(self.place);
                self.sessions.serve(session).await;
            }
            Ok(Err(error)) => {
                metrics.handshake(handshake_label(&error));
                match error {
                    HandshakeError::Timeout => debug!(%error, "handshake with an agent failed"),
                    HandshakeError::Transport(_)
                    | HandshakeError::Verdict(..)
                    | HandshakeError::Identity(_)
                    | HandshakeError::Local(_)
                    | HandshakeError::Refused
                    | HandshakeError::Connect(_) => {
                        static FAILED: LineLimit = LineLimit::new("handshakes with agents failed");
                        if FAILED.admit() {
                            warn!(%error, "handshake with an agent failed");
                        }
                    }
                }
            }
            Err(given_up) => {
                metrics.handshake(given_up.label());
                debug!(%given_up, "handshake with an agent failed");
            }
        }
    }
}

/// The end of a handshake.
type Shaken = Result<Arc<dyn Session>, HandshakeError>;

fn handshake_label(error: &HandshakeError) -> &'static str {
    match error {
        HandshakeError::Timeout => TIMEOUT,
        HandshakeError::Transport(_) => "handshake_failed",
        HandshakeError::Identity(_) => "no_identity",
        // A dialler's.
        HandshakeError::Local(_)
        | HandshakeError::Connect(_)
        | HandshakeError::Refused
        | HandshakeError::Verdict(..) => "local",
    }
}
