//! The dialing end of a connection between servers: dials each other server until it is connected,
//! stores what that server announces, and sends it questions and revocations.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use rustls_pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tracing::{Instrument as _, debug, info, info_span, warn};
use tunnel_proto::session::control::{PeerReader, PeerWriter};
use tunnel_proto::tcp::configure_session;
use tunnel_proto::transport::{Session, h2};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::{PEER_MESSAGE_MAX, PeerMessage, RevokedNode};
use tunnel_proto::wire::{REPLICAS_MAX, VERSION_MAX, VERSION_MIN};

use super::backoff::{BACKOFF_MAX, Backoff};
use super::endpoint::PeerEndpoint;
use super::link::{
    Control, Link, LinkCheck, LinkError, LinkMonitor, PendingAsk, WarnInterval, check_interval,
    exchange_hello, outbox,
};
use super::questions::Questions;
use super::{PeerAddress, RevokedNodes};

/// Dials each server of the membership, apart from this one.
pub(super) async fn dial_all(
    endpoint: Arc<PeerEndpoint>,
    mut membership: watch::Receiver<Arc<[PeerAddress]>>,
) {
    // Dropping a sender ends the task of that server after its connection.
    let mut dialed: HashMap<ReplicaId, watch::Sender<PeerAddress>> = HashMap::new();
    let mut generation = 0;
    loop {
        let members = membership.borrow_and_update().clone();
        dialed.retain(|id, _| members.iter().any(|peer| peer.id == *id));
        let others = members
            .iter()
            .filter(|peer| peer.id != *endpoint.peers.own());
        for peer in others.take(REPLICAS_MAX) {
            if let Some(current) = dialed.get(&peer.id) {
                current.send_if_modified(|current| {
                    let is_changed = current != peer;
                    if is_changed {
                        current.clone_from(peer);
                    }
                    is_changed
                });
                continue;
            }
            generation += 1;
            let (sender, address) = watch::channel(peer.clone());
            dialed.insert(peer.id.clone(), sender);
            let task = PeerTask {
                endpoint: endpoint.clone(),
                id: peer.id.clone(),
                generation,
                warnings: WarnInterval::default(),
            };
            let span = info_span!("peer", name = %peer.id);
            (endpoint.shutdown).spawn_service(task.run(address).instrument(span));
        }
        if membership.changed().await.is_err() {
            // The list never changes, and the senders must stay.
            return pending().await;
        }
    }
}

/// The task that dials one server.
struct PeerTask {
    endpoint: Arc<PeerEndpoint>,
    id: ReplicaId,
    generation: u64,
    warnings: WarnInterval,
}

/// A connection that is ready.
struct Established {
    session: Arc<dyn Session>,
    control: Control,
}

impl PeerTask {
    /// Dials the server and keeps the connection, until the sender of the address is dropped and
    /// the connection has ended.
    async fn run(self, mut address: watch::Receiver<PeerAddress>) {
        let peers = &self.endpoint.peers;
        let mut backoff = Backoff::default();
        let mut wait = Duration::ZERO;
        loop {
            let established = {
                let mut dialing = pin!(async {
                    sleep(wait).await;
                    self.dial(&mut address, &mut backoff).await
                });
                match timeout(self.endpoint.list_linger, &mut dialing).await {
                    Ok(established) => established,
                    Err(_elapsed) => {
                        peers.expire(&self.id);
                        dialing.await
                    }
                }
            };
            let Some(established) = established else {
                break;
            };
            let began = Instant::now();
            Box::pin(self.keep(established)).await;
            if peers.closing.is_cancelled() {
                break;
            }
            if began.elapsed() >= BACKOFF_MAX {
                backoff = Backoff::default();
            }
            wait = backoff.next_delay(rand::random());
        }
        peers.remove(&self.id, self.generation);
    }

    /// Dials until there is a connection. Returns `None` if the server is no longer expected.
    async fn dial(
        &self,
        address: &mut watch::Receiver<PeerAddress>,
        backoff: &mut Backoff,
    ) -> Option<Established> {
        loop {
            if address.has_changed().is_err() {
                return None;
            }
            let peer = address.borrow_and_update().clone();
            self.endpoint.peers.expect(&peer, self.generation);
            let connecting = Box::pin(self.connect(&peer));
            let error = match timeout(self.endpoint.handshake_limit, connecting).await {
                Ok(Ok(established)) => return Some(established),
                Ok(Err(error)) => error,
                Err(_elapsed) => LinkError::Timeout,
            };
            if self.warnings.is_due() {
                warn!(peer = %self.id, address = peer.address, %error, "cannot connect to another server; retrying");
            } else {
                debug!(peer = %self.id, address = peer.address, %error, "cannot connect to another server");
            }
            tokio::select! {
                () = sleep(backoff.next_delay(rand::random())) => {}
                // The next round dials a new address at once, or ends.
                _ = address.changed() => {}
            }
        }
    }

    async fn connect(&self, peer: &PeerAddress) -> Result<Established, LinkError> {
        let endpoint = &self.endpoint;
        let socket = TcpStream::connect(peer.address.as_str()).await;
        let socket = socket.map_err(LinkError::Connect)?;
        if let Err(error) = configure_session(&socket) {
            debug!(%error, "cannot set a socket option");
        }
        let name = ServerName::try_from(SERVER_NAME);
        let name = name.map_err(|error| LinkError::Tls(io::Error::other(error)))?;
        let tls = TlsConnector::from(endpoint.tls.client.clone());
        let stream = tls.connect(name, h2::ReadAhead::new(socket)).await;
        let stream = stream.map_err(LinkError::Tls)?;
        let session = h2::connect_peer(stream, &endpoint.settings).await?;
        match self.greet(&session).await {
            Ok(control) => Ok(Established { session, control }),
            Err(error) => {
                session.close(error.code(), &error.to_string()).await;
                Err(error)
            }
        }
    }

    /// Checks the name of the other server, and exchanges the first messages.
    async fn greet(&self, session: &Arc<dyn Session>) -> Result<Control, LinkError> {
        let endpoint = &self.endpoint;
        let replica = session.peer().replica();
        if replica != Some(&self.id) {
            let claimed = replica.map_or("no server", ReplicaId::as_str);
            let detail = format!("certificate is for {claimed}, not for {}", self.id);
            return Err(LinkError::Refused(CloseCode::NameNotInCredential, detail));
        }
        let header = StreamHeader::new(StreamKind::Control {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
        });
        let stream = session.open(&header, endpoint.handshake_limit).await?;
        exchange_hello(stream, endpoint.peers.hello(), &self.id).await
    }

    /// Runs a connection to its end.
    async fn keep(&self, established: Established) {
        let (peers, session) = (&self.endpoint.peers, established.session);
        let Control {
            reader,
            writer,
            hello,
        } = established.control;
        let (link, asks) = Link::new(self.id.clone(), session.clone(), peers.limits.streams);
        info!(peer = %self.id, remote = %session.stats().remote, epoch = hello.epoch, "connected to another server");
        let _open = peers.connections.token();
        peers.link_up(&link, hello);
        let ended = tokio::select! {
            ended = self.run_link(&link, reader, writer, asks) => ended,
            () = peers.closing.cancelled() => Err(LinkError::stopping()),
        };
        peers.link_down(&link);
        match ended {
            Ok(()) => info!(peer = %self.id, "another server closed the connection"),
            Err(error) => {
                if error.is_violation() {
                    peers.warn_violation(&self.id, &error);
                } else {
                    info!(peer = %self.id, %error, "connection to another server ended");
                }
                session.close(error.code(), &error.to_string()).await;
            }
        }
    }

    async fn run_link(
        &self,
        link: &Link,
        mut reader: PeerReader,
        writer: PeerWriter,
        mut asks: mpsc::Receiver<PendingAsk>,
    ) -> Result<(), LinkError> {
        let (peers, session) = (&self.endpoint.peers, &link.session);
        let (outbox, sending) = outbox(writer);
        let mut sending = pin!(sending);
        let mut closed = pin!(session.closed());
        let mut revoking = pin!(send_revoked(peers.revoked.subscribe(), outbox.clone()));
        let mut monitor = LinkMonitor::new(session.stats().received, Instant::now());
        let mut ticks = check_interval();
        let mut questions = Questions::default();
        loop {
            tokio::select! {
                biased;
                reason = &mut closed => return Err(LinkError::Session(reason.into())),
                now = ticks.tick() => {
                    let check = monitor.check(session.stats().received, now);
                    link.record_check(check);
                    match check {
                        LinkCheck::Live => {}
                        LinkCheck::Probe | LinkCheck::Suspect => session.probe(),
                        LinkCheck::Dead => return Err(dead()),
                    }
                }
                received = reader.receive() => match received? {
                    Some(message) => self.handle(message, &mut questions)?,
                    None => return Ok(()),
                },
                Some(ask) = asks.recv() => {
                    // With a full queue the question stays without an answer.
                    let _is_full = outbox.try_send(questions.add(ask));
                }
                sent = &mut sending => return sent.map_err(LinkError::Control),
                never = &mut revoking => match never {},
            }
        }
    }

    fn handle(&self, message: PeerMessage, questions: &mut Questions) -> Result<(), LinkError> {
        let peers = &self.endpoint.peers;
        match message {
            PeerMessage::Holds(holds) => {
                self.endpoint.resolve_crossed(&self.id, &holds.added);
                peers.apply(&self.id, holds);
            }
            PeerMessage::Leaving => {
                info!(peer = %self.id, "another server stops soon");
                peers.peer_leaves(&self.id);
            }
            PeerMessage::Alive(alive) => questions.answer(&alive),
            PeerMessage::Hello(_) => return Err(LinkError::protocol("a second PeerHello")),
            PeerMessage::Ask(_) | PeerMessage::Revoked(_) | PeerMessage::Unknown => {
                debug!(peer = %self.id, "unexpected message of another server");
            }
        }
        Ok(())
    }
}

/// Returns the error of a connection that was silent for too long.
pub(super) fn dead() -> LinkError {
    LinkError::Refused(CloseCode::Dead, "no sign of life for 10 s".to_owned())
}

/// Sends all revocations to the queue of a connection, and then each later one.
async fn send_revoked(
    mut revoked: watch::Receiver<Arc<RevokedNodes>>,
    outbox: mpsc::Sender<PeerMessage>,
) -> Infallible {
    let mut sent: Arc<RevokedNodes> = Arc::default();
    loop {
        let current = revoked.borrow_and_update().clone();
        let unsent = current
            .iter()
            .filter(|(node, at)| sent.get(*node) != Some(*at));
        let unsent: Vec<_> = unsent
            .map(|(node, at)| RevokedNode {
                node: node.clone(),
                at: *at,
            })
            .collect();
        for nodes in unsent.chunks(REVOKED_PER_MESSAGE) {
            if (outbox.send(PeerMessage::Revoked(nodes.to_vec())).await).is_err() {
                return pending().await;
            }
        }
        sent = current;
        if revoked.changed().await.is_err() {
            return pending().await;
        }
    }
}

/// The server name that this end sends. Verification uses the chain and the role, not this name.
const SERVER_NAME: &str = "tunnel-server.culvert";
/// Revocations in one message, with the longest names and 32 bytes for the time and lengths.
const REVOKED_PER_MESSAGE: usize = PEER_MESSAGE_MAX / (253 + 32);
