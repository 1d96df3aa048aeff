//! The dialing end of a connection between servers: dials each other server until it is connected,
//! stores what that server announces, and sends it questions.

use std::collections::HashMap;
use std::future::pending;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls_pki_types::ServerName;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, debug, info, info_span, warn};
use tunnel_process::backoff::Backoff;
use tunnel_process::telemetry::LogThrottle;
use tunnel_proto::dial::dial_host;
use tunnel_proto::tcp::configure_session;
use tunnel_proto::transport::{Session, h2};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::PeerMessage;
use tunnel_proto::wire::{REPLICAS_MAX, VERSION_MAX, VERSION_MIN};

use super::PeerAddress;
use super::certificates::CertificateFetches;
use super::endpoint::PeerEndpoint;
use super::exchange::Exchange;
use super::link::{Control, Link, LinkError, PendingAsk, exchange_hello, outbox, run_out};
use super::monitor::{LinkCheck, LinkMonitor, check_interval};
use super::questions::Questions;

/// Dials each server of the membership, apart from this one, whose zone the membership may have.
pub(super) async fn dial_all(
    endpoint: Arc<PeerEndpoint>,
    mut membership: watch::Receiver<Arc<[PeerAddress]>>,
) {
    let own = endpoint.peers.own();
    let mut dialed: HashMap<ReplicaId, watch::Sender<Option<PeerAddress>>> = HashMap::new();
    let task_ended = Arc::new(Notify::new());
    let mut is_final = false;
    loop {
        let members = membership.borrow_and_update().clone();
        dialed.retain(|id, address| {
            if members.iter().all(|peer| peer.id != *id) {
                set_address(address, None);
            }
            !address.is_closed()
        });
        if let Some(listed) = members.iter().find(|peer| peer.id == *own) {
            endpoint.peers.set_listed_zone(listed.zone.clone());
        }
        let others = members.iter().filter(|peer| peer.id != *own);
        for peer in others.take(REPLICAS_MAX) {
            if let Some(address) = dialed.get(&peer.id) {
                set_address(address, Some(peer));
                continue;
            }
            let (sender, address) = watch::channel(Some(peer.clone()));
            dialed.insert(peer.id.clone(), sender);
            let task = Arc::new(PeerTask {
                endpoint: endpoint.clone(),
                id: peer.id.clone(),
                failures: Mutex::default(),
            });
            let task_ended = task_ended.clone();
            let work = async move {
                task.run(address).await;
                task_ended.notify_one();
            };
            let span = info_span!("peer", peer = %peer.id);
            endpoint.shutdown.spawn_service(work.instrument(span));
        }
        tokio::select! {
            biased;
            () = endpoint.peers.closing.cancelled() => return,
            changed = membership.changed(), if !is_final => is_final = changed.is_err(),
            // The server may be expected again since its task has decided to end.
            () = task_ended.notified() => {}
        }
    }
}

fn set_address(address: &watch::Sender<Option<PeerAddress>>, expected: Option<&PeerAddress>) {
    address.send_if_modified(|current| {
        let is_changed = current.as_ref() != expected;
        if is_changed {
            *current = expected.cloned();
        }
        is_changed
    });
}

/// The task that dials one server.
struct PeerTask {
    endpoint: Arc<PeerEndpoint>,
    id: ReplicaId,
    failures: Mutex<LogThrottle<String>>,
}

/// A connection that is ready.
struct Established {
    session: Arc<dyn Session>,
    control: Control,
}

/// A connection over which this server opens streams. A task of its own runs it to its end.
struct LinkHandle {
    /// The address that was dialed.
    address: String,
    began: Instant,
    /// Canceled when the connection takes no more streams. It ends after the open ones.
    retire: CancellationToken,
    /// Canceled when the connection has ended.
    ended: CancellationToken,
}

/// What the task of a server does next.
#[derive(Debug, PartialEq, Eq)]
enum Action<'a> {
    /// Keep the connection: its address is expected, or the server was removed a moment ago and may
    /// be added again.
    Keep,
    /// Dial, also while there is a connection to another address.
    Dial(&'a PeerAddress),
    End,
}

/// Decides what to do about a server that is `expected` there, or nowhere, and connected at the
/// address `linked`, or not at all.
fn next_action<'a>(expected: Option<&'a PeerAddress>, linked: Option<&str>) -> Action<'a> {
    match (expected, linked) {
        (None, None) => Action::End,
        (None, Some(_)) => Action::Keep,
        (Some(peer), Some(address)) if peer.address == address => Action::Keep,
        (Some(peer), _) => Action::Dial(peer),
    }
}

impl PeerTask {
    /// Dials the server and keeps the connection. Ends when the server is no longer expected and
    /// the connection has ended, or [`REMOVAL_GRACE`] after the removal.
    async fn run(self: Arc<Self>, mut address: watch::Receiver<Option<PeerAddress>>) {
        let peers = &self.endpoint.peers;
        let mut backoff = BACKOFF;
        let mut dial_at = Instant::now();
        let mut link: Option<LinkHandle> = None;
        // Time at which the list of a lost connection is dropped.
        let mut expires_at = None;
        loop {
            let expected = address.borrow_and_update().clone();
            if let Some(peer) = &expected {
                peers.expect(peer);
            }
            let linked = link.as_ref().map(|link| link.address.as_str());
            let dialed = match next_action(expected.as_ref(), linked) {
                Action::Keep => None,
                Action::Dial(peer) => Some(peer),
                Action::End => break,
            };
            let removed_at = expected.is_none().then(|| Instant::now() + REMOVAL_GRACE);
            tokio::select! {
                biased;
                () = peers.closing.cancelled() => break,
                changed = address.changed() => match changed {
                    Ok(()) => dial_at = Instant::now(),
                    Err(_closed) => break,
                },
                () = ended(link.as_ref()) => {
                    if link.take().is_some_and(|lost| lost.began.elapsed() >= BACKOFF_MAX) {
                        backoff.restart();
                    }
                    dial_at = Instant::now() + backoff.next(rand::random());
                    expires_at = Some(Instant::now() + self.endpoint.list_linger);
                }
                () = reached(expires_at) => {
                    expires_at = None;
                    peers.expire(&self.id);
                }
                () = reached(removed_at) => break,
                established = Box::pin(self.dial(dialed, dial_at)) => match (established, dialed) {
                    (Some(established), Some(peer)) => {
                        expires_at = None;
                        let newer = self.start_link(established, peer.address.clone());
                        if let Some(older) = link.replace(newer) {
                            older.retire.cancel();
                        }
                    }
                    _ => dial_at = Instant::now() + backoff.next(rand::random()),
                },
            }
        }
        if let Some(link) = link {
            link.retire.cancel();
        }
        peers.remove(&self.id);
    }

    /// Dials once, at `at`. Never completes without an address. Returns `None` on failure.
    async fn dial(&self, peer: Option<&PeerAddress>, at: Instant) -> Option<Established> {
        let Some(peer) = peer else {
            return pending().await;
        };
        sleep_until(at).await;
        let connecting = Box::pin(self.connect(peer));
        let error = match timeout(self.endpoint.handshake_timeout, connecting).await {
            Ok(Ok(established)) => return Some(established),
            Ok(Err(error)) => error,
            Err(_elapsed) => LinkError::Timeout,
        };
        let error = error.to_string();
        match (self.failures.lock()).failed(error.clone(), Instant::now()) {
            Some(suppressed) => {
                warn!(peer = %self.id, address = peer.address, %error, suppressed, "cannot connect to another server; retrying");
            }
            None => {
                debug!(peer = %self.id, address = peer.address, %error, "cannot connect to another server");
            }
        }
        None
    }

    async fn connect(&self, peer: &PeerAddress) -> Result<Established, LinkError> {
        let endpoint = &self.endpoint;
        let deadline = Instant::now() + endpoint.handshake_timeout;
        let socket = dial_host(&peer.address, deadline).await;
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
        match self.handshake(&session).await {
            Ok(control) => Ok(Established { session, control }),
            Err(error) => {
                session.close(error.code(), &error.to_string()).await;
                Err(error)
            }
        }
    }

    /// Checks the name of the other server, and exchanges the first messages.
    async fn handshake(&self, session: &Arc<dyn Session>) -> Result<Control, LinkError> {
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
        let stream = session.open(&header, endpoint.handshake_timeout).await?;
        exchange_hello(stream, endpoint.peers.hello(), &self.id).await
    }

    /// Opens new streams over this connection, and spawns the task that runs it.
    fn start_link(self: &Arc<Self>, established: Established, address: String) -> LinkHandle {
        let peers = &self.endpoint.peers;
        let Established { session, control } = established;
        let (link, asks) = Link::new(self.id.clone(), session, peers.limits.streams);
        info!(
            peer = %self.id, remote = %link.session.stats().remote, epoch = control.hello.epoch,
            "connected to another server"
        );
        peers.link_up(&link, &control.hello);
        let handle = LinkHandle {
            address,
            began: Instant::now(),
            retire: CancellationToken::new(),
            ended: CancellationToken::new(),
        };
        let guards = (handle.ended.clone().drop_guard(), peers.connections.token());
        let (task, retire) = (self.clone(), handle.retire.clone());
        let work = async move {
            Box::pin(task.keep(&link, control, asks, retire)).await;
            drop(guards);
        };
        (self.endpoint.shutdown).spawn_service(work.in_current_span());
        handle
    }

    /// Runs a connection to its end.
    async fn keep(
        &self,
        link: &Arc<Link>,
        control: Control,
        asks: mpsc::Receiver<PendingAsk>,
        retire: CancellationToken,
    ) {
        let (peers, session) = (&self.endpoint.peers, &link.session);
        let retired = async {
            retire.cancelled().await;
            run_out(session.as_ref()).await;
        };
        let ended = tokio::select! {
            ended = self.run_link(link, control, asks) => ended,
            () = retired => {
                let detail = "replaced by a newer connection, or server is not expected".to_owned();
                Err(LinkError::Refused(CloseCode::Superseded, detail))
            }
            () = peers.closing.cancelled() => Err(LinkError::stopping()),
        };
        peers.link_down(link);
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
        link: &Arc<Link>,
        control: Control,
        mut asks: mpsc::Receiver<PendingAsk>,
    ) -> Result<(), LinkError> {
        let (peers, session) = (&self.endpoint.peers, &link.session);
        let Control {
            mut reader, writer, ..
        } = control;
        let (outbox, sending) = outbox(writer);
        let mut sending = pin!(sending);
        let mut closed = pin!(session.closed());
        let (mut exchange, announcing) = Exchange::begin(peers, &self.id, outbox.clone());
        let mut announcing = pin!(announcing);
        let mut asking = pin!(peers.rows.ask(outbox.clone()));
        let mut monitor = LinkMonitor::new(session.stats().received, Instant::now());
        let mut ticks = check_interval();
        let mut questions = Questions::default();
        let mut fetches = CertificateFetches::new(peers.limits.directory_nodes);
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
                    Some(PeerMessage::CertificatesPart(part)) => fetches.receive(part),
                    Some(message) => self.handle(link, message, &mut questions, &mut exchange)?,
                    None => return Ok(()),
                },
                Some(ask) = asks.recv() => {
                    let message = match ask {
                        PendingAsk::Holds { question, answer } => questions.add(question, answer),
                        PendingAsk::Certificates(answer) => fetches.add(answer),
                    };
                    // With a full queue the question stays without an answer.
                    let _is_full = outbox.try_send(message);
                }
                sent = &mut sending => return sent.map_err(LinkError::Control),
                never = &mut announcing => match never {},
                never = &mut asking => match never {},
            }
        }
    }

    fn handle(
        &self,
        link: &Arc<Link>,
        message: PeerMessage,
        questions: &mut Questions,
        exchange: &mut Exchange,
    ) -> Result<(), LinkError> {
        let peers = &self.endpoint.peers;
        match message {
            // The newer connection may be to another process, whose list counts.
            PeerMessage::Holds(_) | PeerMessage::Leaving | PeerMessage::NodeRows(_)
                if !peers.is_current(link) => {}
            PeerMessage::NodeRows(rows) => peers.rows.apply(&self.id, rows),
            PeerMessage::Holds(holds) => {
                // A session is registered before it is compared with the directory. An entry is in
                // the directory before it is compared with the registry, so that one of the two
                // comparisons finds both.
                let added = holds.added.clone();
                peers.apply(&self.id, holds);
                self.endpoint.compare_announced(&self.id, &added);
            }
            PeerMessage::Leaving => {
                if peers.peer_leaves(&self.id) {
                    info!(peer = %self.id, "another server stops soon");
                }
            }
            PeerMessage::Alive(alive) => questions.answer(&alive),
            PeerMessage::Hello(_) => return Err(LinkError::protocol("a second PeerHello")),
            PeerMessage::StateDigest(digest) => exchange.digest(&digest),
            PeerMessage::StateFetch => exchange.asked(),
            PeerMessage::StatePart(part) => {
                (self.endpoint.on_orders)(&self.id, exchange.receive(part)?);
            }
            PeerMessage::Ask(_)
            | PeerMessage::CertificatesFetch(_)
            | PeerMessage::CertificatesPart(_)
            | PeerMessage::Unknown => {
                debug!(peer = %self.id, "unexpected message of another server");
            }
        }
        Ok(())
    }
}

/// Waits until a connection has ended.
async fn ended(link: Option<&LinkHandle>) {
    match link {
        Some(link) => link.ended.cancelled().await,
        None => pending().await,
    }
}

/// Waits until a time.
async fn reached(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

/// Returns the error of a connection that was silent for too long.
pub(super) fn dead() -> LinkError {
    LinkError::Refused(CloseCode::Dead, "no sign of life for 10 s".to_owned())
}

/// The server name that this end sends. Verification uses the chain and the role, not this name.
const SERVER_NAME: &str = "tunnel-server.culvert";
/// Time for which the connection of a server that was removed takes new streams. In most cases the
/// server is added again by then, or stops.
const REMOVAL_GRACE: Duration = Duration::from_secs(30);
/// First time between two attempts.
const BACKOFF_MIN: Duration = Duration::from_millis(200);
/// Longest time between two attempts. A connection that lasted this long ends the series.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
const BACKOFF: Backoff = Backoff::new(BACKOFF_MIN, BACKOFF_MAX, 0.75..=1.0);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_are_two_tenths_of_a_second_to_five_seconds_apart() {
        for (random, waits) in [
            (1.0, [200, 400, 800, 1600, 3200, 5000, 5000]),
            (0.0, [150, 300, 600, 1200, 2400, 3750, 3750]),
        ] {
            let mut backoff = BACKOFF;
            for wait in waits {
                assert_eq!(backoff.next(random), Duration::from_millis(wait));
            }
        }
    }

    #[test]
    fn connection_is_kept_while_its_server_has_the_same_address_or_was_removed() {
        let peer = |address: &str| PeerAddress {
            id: "b".parse().unwrap(),
            address: address.to_owned(),
            zone: None,
        };
        let (first, second) = (peer("192.0.2.1:10269"), peer("192.0.2.2:10269"));
        let linked = Some(first.address.as_str());
        for (expected, linked, action) in [
            (Some(&first), None, Action::Dial(&first)),
            (Some(&first), linked, Action::Keep),
            (Some(&second), linked, Action::Dial(&second)),
            (None, linked, Action::Keep),
            (None, None, Action::End),
        ] {
            assert_eq!(
                next_action(expected, linked),
                action,
                "{expected:?} {linked:?}"
            );
        }
    }
}
