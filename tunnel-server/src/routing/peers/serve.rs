//! The accepting end of a connection between servers: admits other servers, announces what this
//! server holds, answers questions, and serves forwarded streams from the registry alone and
//! forwarded enrollments from this server's own join tokens.

use std::pin::pin;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, timeout};
use tracing::{Instrument as _, debug, info, info_span, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::conn_limiter::{ConnLimiter, ConnLimits, ConnPermit};
use tunnel_proto::transport::{IncomingStream, Session};
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::{Alive, Ask, PeerMessage};

use super::accept::{Accepted, accept};
use super::announce::{HeldNodes, announce};
use super::certificates;
use super::connections::{ReadyConnections, ReadyPermit};
use super::dial::dead;
use super::endpoint::PeerEndpoint;
use super::exchange::Exchange;
use super::forward::PeerStream;
use super::link::{Control, LinkError, VIOLATIONS, outbox, run_out};
use super::monitor::{LinkCheck, LinkMonitor, check_interval};

/// The listener for other servers, port 10269.
pub(super) struct PeerListener {
    endpoint: Arc<PeerEndpoint>,
    announced: watch::Receiver<HeldNodes>,
    connections: ReadyConnections,
    /// Permits of connections that are not authenticated yet.
    half_open: Arc<ConnLimiter>,
}

impl PeerListener {
    pub(super) fn new(
        endpoint: Arc<PeerEndpoint>,
        announced: watch::Receiver<HeldNodes>,
    ) -> Arc<Self> {
        Arc::new(Self {
            endpoint,
            announced,
            connections: ReadyConnections::default(),
            half_open: ConnLimiter::new(HALF_OPEN),
        })
    }

    pub(super) async fn run(self: Arc<Self>, mut listener: RetryingListener<TcpListener>) {
        loop {
            let (socket, address) = listener.accept().await;
            let Ok(permit) = self.half_open.acquire(address.ip()) else {
                debug!(peer = %address, "too many unauthenticated connections to the listener for other servers");
                continue;
            };
            let accepting = self.clone();
            let work = async move { accepting.serve(socket, permit).await };
            let work = work.instrument(info_span!("conn", peer = %address));
            self.endpoint.shutdown.spawn_service(work);
        }
    }

    /// Serves one connection until it ends. `permit` is released when the other server is
    /// authenticated.
    async fn serve(&self, socket: TcpStream, permit: ConnPermit) {
        let accepting = Box::pin(accept(&self.endpoint, socket));
        let accepting = timeout(self.endpoint.handshake_timeout, accepting);
        let accepted = tokio::select! {
            biased;
            () = permit.evicted() => {
                return debug!("unauthenticated connection evicted in favor of a newer one");
            }
            accepted = accepting => accepted,
        };
        drop(permit);
        let accepted = match accepted {
            Ok(Ok(accepted)) => accepted,
            Ok(Err(error)) if error.is_violation() => {
                return self.endpoint.peers.warn_violation(&"unknown", &error);
            }
            Ok(Err(error)) => return debug!(%error, "connection of another server not accepted"),
            Err(_elapsed) => return debug!("handshake of another server did not finish in time"),
        };
        let Some(permit) = self.connections.acquire(&accepted.replica) else {
            if VIOLATIONS.admit() {
                warn!(peer = %accepted.replica, "too many connections of another server");
            }
            let (code, detail) = (
                CloseCode::TooManySessions,
                "too many connections of this server",
            );
            return accepted.session.close(code, detail).await;
        };
        Box::pin(self.run_accepted(accepted, permit)).await;
    }

    /// Runs a connection to its end. The next connection of the same server replaces it: it ends
    /// after its streams, or when there is another one.
    async fn run_accepted(&self, accepted: Accepted, permit: ReadyPermit<'_>) {
        let Accepted {
            session,
            replica,
            control,
        } = accepted;
        info!(
            peer = %replica, remote = %session.stats().remote, epoch = control.hello.epoch,
            "another server connected"
        );
        let peers = &self.endpoint.peers;
        peers.record_connection(&replica);
        let _open = peers.connections.token();
        let running = self.run_connection(&session, &replica, control);
        let retired = async {
            permit.newer(1).await;
            tokio::select! {
                () = run_out(session.as_ref()) => {}
                () = permit.newer(2) => {}
            }
        };
        let ended = tokio::select! {
            ended = running => ended,
            () = retired => {
                let detail = "replaced by a newer connection".to_owned();
                Err(LinkError::Refused(CloseCode::Superseded, detail))
            }
            () = peers.closing.cancelled() => Err(LinkError::stopping()),
        };
        match ended {
            Ok(()) => debug!(peer = %replica, "another server closed its connection"),
            Err(error) => {
                if error.is_violation() {
                    peers.warn_violation(&replica, &error);
                } else {
                    info!(peer = %replica, %error, "connection of another server ended");
                }
                session.close(error.code(), &error.to_string()).await;
            }
        }
    }

    async fn run_connection(
        &self,
        session: &Arc<dyn Session>,
        replica: &ReplicaId,
        control: Control,
    ) -> Result<(), LinkError> {
        let peers = &self.endpoint.peers;
        let Control {
            mut reader, writer, ..
        } = control;
        let (outbox, sending) = outbox(writer);
        let mut sending = pin!(sending);
        let is_leaving = peers.is_leaving.subscribe();
        let announcing = announce(self.announced.clone(), is_leaving, outbox.clone());
        let mut announcing = pin!(announcing);
        let (mut exchange, exchanging) = Exchange::begin(peers, replica, outbox.clone());
        let mut exchanging = pin!(exchanging);
        let rows_asked = Arc::<Notify>::default();
        let mut sending_rows = pin!(peers.rows.send(rows_asked.clone(), outbox.clone()));
        let mut closed = pin!(session.closed());
        let mut monitor = LinkMonitor::new(session.stats().received, Instant::now());
        let mut ticks = check_interval();
        let streams = peers.limits.streams.min(Semaphore::MAX_PERMITS);
        let streams = Arc::new(Semaphore::new(streams));
        let enrollments = Arc::new(Semaphore::new(ENROLLMENTS_MAX));
        let probes = Arc::new(Semaphore::new(PROBES_MAX));
        let fetches = Arc::new(Semaphore::new(FETCHES_MAX));
        loop {
            tokio::select! {
                biased;
                reason = &mut closed => return Err(LinkError::Session(reason.into())),
                now = ticks.tick() => match monitor.check(session.stats().received, now) {
                    LinkCheck::Live => {}
                    LinkCheck::Probe | LinkCheck::Suspect => session.probe(),
                    LinkCheck::Dead => return Err(dead()),
                },
                received = reader.receive() => match received? {
                    Some(PeerMessage::Ask(ask)) => self.answer(replica, ask, &probes, &outbox),
                    Some(PeerMessage::CertificatesFetch(id)) => {
                        self.send_certificates(id, &fetches, &outbox);
                    }
                    Some(PeerMessage::NodeRows(rows)) if rows.is_wanted => rows_asked.notify_one(),
                    Some(message) => self.handle(replica, message, &mut exchange)?,
                    None => return Ok(()),
                },
                incoming = session.accept() => {
                    let incoming = incoming?;
                    let permit = streams.clone().try_acquire_owned().ok();
                    let has_room = session.has_room();
                    self.spawn_stream(incoming, replica, permit, has_room, &enrollments);
                }
                sent = &mut sending => return sent.map_err(LinkError::Control),
                never = &mut announcing => match never {},
                never = &mut exchanging => match never {},
                never = &mut sending_rows => match never {},
            }
        }
    }

    fn handle(
        &self,
        replica: &ReplicaId,
        message: PeerMessage,
        exchange: &mut Exchange,
    ) -> Result<(), LinkError> {
        match message {
            PeerMessage::StateDigest(digest) => exchange.digest(&digest),
            PeerMessage::StateFetch => exchange.asked(),
            PeerMessage::StatePart(part) => {
                (self.endpoint.on_orders)(replica, exchange.receive(part)?);
            }
            PeerMessage::Hello(_) => return Err(LinkError::protocol("a second PeerHello")),
            PeerMessage::Holds(_)
            | PeerMessage::Leaving
            | PeerMessage::Ask(_)
            | PeerMessage::Alive(_)
            | PeerMessage::NodeRows(_)
            | PeerMessage::CertificatesFetch(_)
            | PeerMessage::CertificatesPart(_)
            | PeerMessage::Unknown => {
                debug!(peer = %replica, "unexpected message of another server");
            }
        }
        Ok(())
    }

    /// Answers a question in a task of its own, because a probe takes up to a second. Without an answer
    /// the other server asks again.
    fn answer(
        &self,
        replica: &ReplicaId,
        ask: Ask,
        probes: &Arc<Semaphore>,
        outbox: &mpsc::Sender<PeerMessage>,
    ) {
        let Ok(permit) = probes.clone().try_acquire_owned() else {
            return debug!(node = %ask.node, "too many questions of another server");
        };
        let (endpoint, outbox) = (self.endpoint.clone(), outbox.clone());
        let replica = replica.clone();
        self.endpoint.shutdown.spawn_service(async move {
            if let Some(is_alive) = endpoint.keeps_name(&replica, &ask).await {
                let id = ask.id;
                let alive = PeerMessage::Alive(Alive { id, is_alive });
                let _connection_is_gone = outbox.send(alive).await;
            }
            drop(permit);
        });
    }

    /// Answers which certificates the agents have that this server knows. Without an answer the other
    /// server takes them for unknown.
    fn send_certificates(
        &self,
        id: u64,
        fetches: &Arc<Semaphore>,
        outbox: &mpsc::Sender<PeerMessage>,
    ) {
        let Ok(permit) = fetches.clone().try_acquire_owned() else {
            return debug!("too many questions of another server about certificates");
        };
        let (endpoint, outbox) = (self.endpoint.clone(), outbox.clone());
        self.endpoint.shutdown.spawn_service(async move {
            let known = tokio::task::spawn_blocking(move || (endpoint.known_certificates)());
            if let Ok(nodes) = known.await {
                certificates::answer(id, nodes, &outbox).await;
            }
            drop(permit);
        });
    }

    /// Serves a forwarded stream as work that a drain waits for. `permit` is `None` above the limit
    /// of streams, and `has_room` says whether there is memory for the stream.
    fn spawn_stream(
        &self,
        incoming: IncomingStream,
        replica: &ReplicaId,
        permit: Option<OwnedSemaphorePermit>,
        has_room: bool,
        enrollments: &Arc<Semaphore>,
    ) {
        let (endpoint, replica) = (self.endpoint.clone(), replica.clone());
        let enrollments = enrollments.clone();
        let span = info_span!("stream", peer = %replica);
        let serving = async move {
            let stream = PeerStream {
                endpoint: &endpoint,
                replica,
                has_permit: permit.is_some(),
                has_room,
            };
            stream.serve(incoming, &enrollments).await;
            drop(permit);
        };
        self.endpoint.shutdown.spawn_work(serving.instrument(span));
    }
}

/// Connections at once whose other end is not authenticated yet. All other servers may dial from one
/// address at the same time, and a flood from one address evicts its own connections.
const HALF_OPEN: ConnLimits = ConnLimits {
    per_source: REPLICAS_MAX,
    total: 2 * REPLICAS_MAX,
};
/// Enrollments of one server at once. Each of them may sign a certificate.
const ENROLLMENTS_MAX: usize = 64;
/// Questions of one server about certificates that are answered at once. Each of them passes over all
/// known nodes.
const FETCHES_MAX: usize = 2;
/// Questions of one server that are answered at once.
const PROBES_MAX: usize = 1024;
