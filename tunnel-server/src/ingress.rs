//! The doors: local sockets that feed the tunnel. Accept loops only accept; one task per connection does the rest.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, info_span};
use tunnel_proto::process::accept::Accepting;
use tunnel_proto::process::places::{Place, Places};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::name::Port;

use crate::callers::{Borrowers, DoorTls};
use crate::config::Limit;
use crate::metrics::Metrics;
use crate::pods::PodFinder;
use crate::policy::LivePolicy;
use crate::registry::Registry;
use crate::routes::Routes;
use crate::targets::Targets;

pub mod answer;
pub mod body;
mod course;
mod fields;
mod http;
pub mod record;
pub mod service;
pub mod socket;
pub mod target;
mod upstream;

use service::Service;
use socket::{DoorSocket, Fate, Hangup};
use target::Scheme;

/// What all doors share.
#[derive(Debug)]
pub struct Doors {
    /// Names and addresses.
    pub routes: Routes,
    /// Connected agents.
    pub registry: Arc<Registry>,
    /// Allowed ports.
    pub policy: LivePolicy,
    /// In a cluster: which node a pod runs on.
    pub pods: Option<PodFinder>,
    /// TLS towards https targets.
    pub targets: Arc<Targets>,
    /// Callers that may borrow the server's identity towards targets.
    pub borrowers: Borrowers,
    /// Limits.
    pub limits: DoorLimits,
    /// Places for callers that have sent no whole request head yet.
    pub strangers: Arc<Places>,
    /// Counters.
    pub metrics: Metrics,
    /// Stopping.
    pub shutdown: Shutdown,
    /// Owns the tasks that drive connections to targets; each also ends with its handle.
    pub drivers: TaskTracker,
}

/// Limits of the doors.
#[derive(Debug, Clone, Copy)]
pub struct DoorLimits {
    /// TLS handshake of a caller.
    pub handshake: Duration,
    /// Time for a request head.
    pub request_head_time: Duration,
    /// Size of a request head.
    pub request_head_bytes: usize,
    /// A connection without a request.
    pub idle: Duration,
    /// Opening a stream, up to the agent's reply.
    pub open: Duration,
}

/// One HTTP listener.
#[derive(Debug)]
pub struct Door {
    /// `http`, `https` or `proxy`, for logs.
    pub name: &'static str,
    /// Towards callers and targets alike.
    pub scheme: Scheme,
    /// The target's port when Host names none.
    pub implied_port: Option<Port>,
    /// Present exactly on https doors.
    pub tls: Option<Arc<DoorTls>>,
}

/// What a listener does with its connections.
#[derive(Debug, Clone)]
pub enum Mode {
    /// HTTP, routed per request.
    Http(Arc<Door>),
    /// Bytes to one target.
    Service(Arc<Service>),
}

impl Mode {
    /// For logs.
    fn name(&self) -> &'static str {
        match self {
            Self::Http(door) => door.name,
            Self::Service(_) => "service",
        }
    }
}

/// A caller's connection, below TLS.
#[derive(Debug)]
struct Line {
    peer: SocketAddr,
    fate: Arc<Fate>,
    hangup: Hangup,
    /// Kept up to the first request head.
    place: Place,
    /// The caller may borrow the server's identity.
    borrows: bool,
}

impl Doors {
    /// Accepts on a listener until the drain begins. Connections count as work, so a drain waits for them.
    pub fn start(self: &Arc<Self>, listener: TcpListener, mode: Mode) {
        let doors = self.clone();
        self.shutdown
            .spawn_listener(async move { doors.accept(listener, mode).await });
    }

    async fn accept(self: Arc<Self>, listener: TcpListener, mode: Mode) {
        let mut accepting = Accepting::new(listener, mode.name());
        loop {
            let (tcp, peer) = tokio::select! {
                biased;
                () = self.shutdown.drain().cancelled() => return,
                accepted = accepting.next() => accepted,
            };
            let doors = self.clone();
            let work: std::pin::Pin<Box<dyn Future<Output = ()> + Send>> = match &mode {
                Mode::Http(door) => Box::pin(doors.serve(door.clone(), tcp, peer)),
                Mode::Service(service) => {
                    Box::pin(service::serve(doors, service.clone(), tcp, peer))
                }
            };
            self.shutdown
                .spawn_work(work.instrument(info_span!("conn", %peer)));
        }
    }

    async fn serve(self: Arc<Self>, door: Arc<Door>, tcp: TcpStream, peer: SocketAddr) {
        let entered = self.strangers.enter(peer.ip());
        // One source may have all places of callers.
        if entered
            .as_ref()
            .map_or(true, |place| place.reached().is_some())
        {
            self.metrics.limit(Limit::PreAuthTotal);
        }
        let Ok(place) = entered else {
            return self.metrics.evicted_caller();
        };
        let fate = Arc::new(Fate::default());
        let socket = DoorSocket::new(tcp, fate.clone());
        let hangup = socket.hangup();
        let mut line = Line {
            peer,
            fate,
            hangup,
            place,
            borrows: false,
        };
        let Some(tls) = door.tls.clone() else {
            return http::serve(self, door, socket, line).await;
        };
        let handshake = TlsAcceptor::from(tls.config()).accept(socket);
        let shaken = tokio::select! {
            biased;
            () = line.place.evicted() => return self.metrics.evicted_caller(),
            shaken = tokio::time::timeout(self.limits.handshake, handshake) => shaken,
        };
        match shaken {
            Ok(Ok(stream)) => {
                let chain = stream.get_ref().1.peer_certificates();
                line.borrows = self.borrowers.admit(chain);
                http::serve(self, door, stream, line).await;
            }
            Ok(Err(error)) => debug!(%error, "TLS handshake of a caller failed"),
            Err(_elapsed) => {
                self.metrics.limit(Limit::HandshakeTimeout);
                debug!(
                    "TLS handshake of a caller did not finish in time (limits.handshakeTimeout)"
                );
            }
        }
    }
}
