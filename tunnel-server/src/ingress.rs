//! The doors: local sockets that feed the tunnel. Accept loops only accept; one task per connection does the rest.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug, info_span};
use tunnel_proto::identity::{CallerError, caller_name, common_name};
use tunnel_proto::process::accept::Accepting;
use tunnel_proto::process::places::{Place, Places, Reached};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::config::Limit;
use crate::ingress::client_auth::{Borrowers, DoorTls};
use crate::ingress::target_tls::Targets;
use crate::metrics::Metrics;
use crate::policy::LivePolicy;
use crate::routing::pod_lookup::PodFinder;
use crate::routing::registry::Registry;
use crate::routing::routes::Routes;

pub mod access_log;
pub mod caller_stream;
pub mod client_auth;
pub mod connect;
pub mod error;
pub mod http;
pub mod peer;
pub mod service;
pub mod target_tls;

use crate::ingress::caller_stream::{CallerSocket, DoorSocket, Fate, Hangup};
use crate::routing::decision::Scheme;
use connect::Gate;
use peer::{CallerName, Peer};
use service::Service;

/// What all doors share.
#[derive(Debug, Clone)]
pub struct Doors {
    /// Names and addresses.
    pub routes: Routes,
    /// Connected agents.
    pub registry: Arc<Registry>,
    /// Allowed ports.
    pub policy: LivePolicy,
    /// In a cluster: which node a pod runs on, for callers with delegation.
    pub pods: Option<PodFinder>,
    /// TLS towards https targets.
    pub targets: Arc<Targets>,
    /// Callers that may borrow the server's identity towards targets.
    pub borrowers: Borrowers,
    /// Limits.
    pub limits: DoorLimits,
    /// Places for callers' connections, for their whole life.
    pub callers: Arc<Places>,
    /// Further places, for callers that verify with a client certificate or come over a Unix socket: others cannot take them.
    pub verified_callers: Arc<Places>,
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
    /// `http`, `https`, `proxy` or `connect`, for logs.
    pub name: &'static str,
    /// Towards callers and targets alike.
    pub scheme: Scheme,
    /// The target's port when Host names none.
    pub implied_port: Option<Port>,
    /// Present on https doors, and on CONNECT doors that know callers by their certificates.
    pub tls: Option<Arc<DoorTls>>,
    /// Present exactly on CONNECT doors, where a request names what it is for and not a node in its Host.
    pub connect: Option<Gate>,
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
    peer: Peer,
    name: CallerName,
    fate: Arc<Fate>,
    hangup: Hangup,
    /// The connection's place among all callers.
    permit: Arc<Place>,
    /// The caller may borrow the server's identity.
    borrows: bool,
    /// The name that the caller's TLS asked for, where it says the node of requests: for callers with delegation.
    server_name: Option<NodeName>,
    /// Its certificate is none of a caller's.
    refused: Option<CallerError>,
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
                Mode::Http(door) => {
                    let caller = (peer.into(), CallerName::Unnamed);
                    Box::pin(doors.serve(door.clone(), tcp.into(), caller))
                }
                Mode::Service(service) => {
                    let service = service.clone();
                    Box::pin(async move {
                        let Some(permit) = doors.admit(peer.into()) else {
                            return;
                        };
                        // A service's connection carries a stream for its whole life.
                        let _in_use = permit.in_use();
                        service::serve(doors, service, tcp, peer).await;
                    })
                }
            };
            self.shutdown
                .spawn_work(work.instrument(info_span!("conn", %peer)));
        }
    }

    /// The same on a Unix socket, for an HTTP door without TLS; `guard` goes when no more are accepted.
    pub fn start_unix(
        self: &Arc<Self>,
        listener: UnixListener,
        door: Arc<Door>,
        guard: impl Send + 'static,
    ) {
        let doors = self.clone();
        self.shutdown.spawn_listener(async move {
            let _guard = guard;
            let mut accepting = Accepting::new(listener, door.name);
            loop {
                let socket = tokio::select! {
                    biased;
                    () = doors.shutdown.drain().cancelled() => return,
                    socket = accepting.next() => socket,
                };
                let name = socket.peer_cred().map(|user| CallerName::Uid(user.uid()));
                let caller = (Peer::Unix, name.unwrap_or_default());
                let serving = doors.clone().serve(door.clone(), socket.into(), caller);
                let peer = Peer::Unix;
                doors
                    .shutdown
                    .spawn_work(Box::pin(serving).instrument(info_span!("conn", %peer)));
            }
        });
    }

    /// Takes a place for a caller's connection. Without one the connection is dropped, which refuses it.
    fn admit(&self, peer: Peer) -> Option<Arc<Place>> {
        self.admitted(self.callers.enter(peer.source()))
    }

    /// Takes a place for a caller that may verify. Returns whether it is one of those for callers that do.
    fn admit_verifiable(&self, peer: Peer) -> Option<(Arc<Place>, bool)> {
        let entered = self.callers.enter(peer.source());
        let is_reserved = entered.is_err();
        let entered = entered.or_else(|_full| self.verified_callers.enter(peer.source()));
        self.admitted(entered).map(|permit| (permit, is_reserved))
    }

    fn admitted(&self, entered: Result<Place, Reached>) -> Option<Arc<Place>> {
        let reached = match &entered {
            Ok(place) => place.reached(),
            Err(reached) => Some(*reached),
        };
        match reached {
            Some(Reached::PerSource) => self.metrics.limit(Limit::CallersPerSource),
            Some(Reached::Total) => self.metrics.limit(Limit::CallersTotal),
            None => {}
        }
        if entered.is_err() {
            self.metrics.refused_caller();
        }
        entered.ok().map(Arc::new)
    }

    async fn serve(
        self: Arc<Self>,
        door: Arc<Door>,
        socket: CallerSocket,
        (peer, name): (Peer, CallerName),
    ) {
        let admitted = match peer {
            Peer::Tcp(_) if door.tls.is_none() => self.admit(peer).map(|permit| (permit, false)),
            Peer::Tcp(_) | Peer::Unix => self.admit_verifiable(peer),
        };
        let Some((permit, is_reserved)) = admitted else {
            return;
        };
        // The host knows who may open a Unix socket.
        let must_verify = is_reserved && peer != Peer::Unix;
        let deadline = Instant::now() + self.limits.handshake;
        let tls = tokio::select! {
            biased;
            () = permit.evicted() => return self.metrics.evicted_caller(),
            tls = timeout_at(deadline, tls_of(&door, &socket)) => tls,
        };
        let Ok(tls) = tls else {
            return debug!("caller sent nothing in time");
        };
        let fate = Arc::new(Fate::default());
        let socket = DoorSocket::new(socket, fate.clone());
        let hangup = socket.hangup();
        let mut line = Line {
            peer,
            name,
            fate,
            hangup,
            permit,
            borrows: false,
            server_name: None,
            refused: None,
        };
        let Some(tls) = tls else {
            if must_verify {
                return self.metrics.refused_caller();
            }
            let _not_for_eviction = is_reserved.then(|| line.permit.in_use());
            return http::serve(self, door, socket, line).await;
        };
        let handshake = TlsAcceptor::from(tls.config()).accept(socket);
        let shaken = tokio::select! {
            biased;
            () = line.permit.evicted() => return self.metrics.evicted_caller(),
            shaken = timeout_at(deadline, handshake) => shaken,
        };
        match shaken {
            Ok(Ok(stream)) => {
                let chain = stream.get_ref().1.peer_certificates();
                line.borrows = self.borrowers.admit(chain);
                if line.borrows {
                    let name = stream.get_ref().1.server_name();
                    line.server_name = name.and_then(|name| name.parse().ok());
                }
                if let Some(leaf) = chain.and_then(<[_]>::first) {
                    let name = common_name(leaf).unwrap_or_default();
                    line.name = CallerName::Certificate(name.into());
                    line.refused = caller_name(leaf).err();
                }
                let is_verified = chain.is_some() && line.refused.is_none();
                if must_verify && !is_verified {
                    return self.metrics.refused_caller();
                }
                // Others that have not verified yet take no reserved place from it.
                let _not_for_eviction = is_reserved.then(|| line.permit.in_use());
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

/// First byte of a TLS handshake (RFC 8446, section 5.1), which no request begins with.
const TLS_HANDSHAKE: u8 = 22;

/// The TLS that a caller gets. Where callers may also come without, its first byte tells.
async fn tls_of(door: &Door, socket: &CallerSocket) -> Option<Arc<DoorTls>> {
    let tls = door.tls.clone()?;
    match (&door.connect, socket) {
        (Some(gate), CallerSocket::Tcp(socket)) if gate.also_plain => {
            let mut first = [0];
            let peeked = socket.peek(&mut first).await;
            (peeked.is_ok() && first == [TLS_HANDSHAKE]).then_some(tls)
        }
        _ => Some(tls),
    }
}
