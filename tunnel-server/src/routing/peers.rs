//! The other servers of this installation: the connections to them, what they hold, and the streams
//! that are forwarded over them.
//!
//! Every server dials every other one, so there are two connections between two servers. The
//! server that accepts a connection announces on it what it holds, and the server that dials opens
//! streams over it. `peers/dial.rs` has the dialing end, `peers/serve.rs` the accepting end, and
//! `peers/link.rs` what both share. A stream that another server forwarded is served from the
//! [`Registry`](super::registry::Registry) alone, so no stream passes more than two servers.

use std::collections::BTreeMap;
use std::future::pending;
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;
use tunnel_proto::transport::SessionError;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::{NodeName, ReplicaId, ZoneName};

use crate::routing::forwarded::ForwardedCount;
use crate::routing::registry::{NotOpened, OpenError, Opened, StreamRequest};
use crate::routing::via::Via;

mod accept;
mod address;
mod agreed;
mod announce;
mod certificates;
mod connections;
mod dial;
mod endpoint;
mod enroll;
mod exchange;
mod forward;
mod forward_policy;
mod link;
mod members;
mod metrics;
mod monitor;
mod owner;
mod questions;
mod rows;
mod serve;
mod start;
mod state;
mod yields;

pub use address::PeerAddress;
use address::PeerZone;
use agreed::{AgreedState, AnnouncedState};
pub use endpoint::{KnownCertificates, OnEnroll, OnOrders, OnStream, PeerEndpoint, PeerTls};
pub use forward_policy::ForwardPolicy;
pub use link::FetchError;
use link::Link;
pub use members::LeftOut;
use members::listed_addresses;
use metrics::{ForwardDirection, ForwardResult};
pub use metrics::{PeerMetrics, PeerState};
use rows::RowExchange;
use tunnel_routing::directory::{Announcement, Directory, LinkState};
use yields::{CONTESTS_MAX, NamesUsedTwice, Yields};

/// The other servers of this installation. Exists on a server without others, too.
#[derive(Debug)]
pub struct Peers {
    own: ReplicaId,
    /// Start of this process, in milliseconds since the Unix epoch.
    epoch: u64,
    limits: PeerLimits,
    metrics: PeerMetrics,
    state: Mutex<State>,
    members: watch::Sender<Arc<[Member]>>,
    /// What `members` leaves out.
    left_out: Mutex<LeftOut>,
    /// Counts the changes of the directory.
    directory_changes: watch::Sender<u64>,
    is_leaving: watch::Sender<bool>,
    /// What the other servers learn of what all agree on.
    agreed: watch::Sender<AgreedState>,
    /// Canceled when all connections must close.
    closing: CancellationToken,
    /// Counts the connections, in both directions.
    connections: TaskTracker,
    /// Permits of sessions that are compared with those of other servers.
    contests: Arc<Semaphore>,
    /// Rows of nodes, for the console.
    pub(crate) rows: RowExchange,
}

/// Limits of the connections to other servers.
#[derive(Debug, Clone, Copy)]
pub struct PeerLimits {
    /// Streams over one connection at once.
    pub streams: usize,
    /// Nodes of one server that are remembered.
    pub directory_nodes: usize,
    /// Bytes of `limits.bufferPool`, for the errors.
    pub buffer_pool: u64,
}

/// Another server that holds a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ShownHolder {
    Here(ReplicaId),
    /// The server held the node last, and is gone since then.
    Gone(ReplicaId, SystemTime),
}

/// Another server, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStatus {
    pub id: ReplicaId,
    /// `HOST:PORT` that this server dials.
    pub address: String,
    pub state: PeerState,
    /// The server is connected and has not answered for a few seconds.
    pub is_suspect: bool,
    /// The zone of the server, if it is known.
    pub zone: Option<ZoneName>,
    /// Number of nodes that the server holds.
    pub nodes: usize,
    /// Time of the last change between connected and not connected.
    pub since: SystemTime,
}

impl PeerStatus {
    /// Returns whether the server is connected and answers.
    pub fn answers(&self) -> bool {
        self.state != PeerState::Connecting && !self.is_suspect
    }
}

#[derive(Debug)]
struct State {
    directory: Directory,
    /// Addresses of this server that agents dial, bounded.
    addresses: Vec<String>,
    /// Number of addresses of this server that `addresses` leaves out.
    addresses_left_out: usize,
    /// Zone of this server.
    zone: PeerZone,
    peers: BTreeMap<ReplicaId, Peer>,
    yields: Yields,
    used_twice: NamesUsedTwice,
    /// Time of the last connection with each server, in either direction, if it was recent.
    connected_at: BTreeMap<ReplicaId, Instant>,
    /// Time of the last change of the connections that this server dials.
    links_changed_at: Option<Instant>,
    /// The connected servers, with what they announced of their CAs.
    announced: BTreeMap<ReplicaId, AnnouncedState>,
}

impl State {
    fn link(&self, replica: &ReplicaId) -> Option<&Arc<Link>> {
        self.peers.get(replica)?.link.as_ref()
    }
}

/// Another server that this server dials.
#[derive(Debug)]
struct Peer {
    address: String,
    link: Option<Arc<Link>>,
    /// Addresses that agents dial, as of the last connection, bounded.
    addresses: Vec<String>,
    zone: PeerZone,
    is_leaving: bool,
    /// Whether agents can dial the server: it is connected, or was until a moment ago.
    is_member: bool,
    since: SystemTime,
}

impl Peer {
    fn state(&self) -> PeerState {
        match (&self.link, self.is_leaving) {
            (Some(_), true) => PeerState::Leaving,
            (Some(_), false) => PeerState::Connected,
            (None, _) => PeerState::Connecting,
        }
    }
}

/// A server to ask for a stream to a node.
#[derive(Debug)]
struct Candidate {
    link: Arc<Link>,
    /// What the server had announced about the node by then.
    announcement: Announcement,
}

impl Peers {
    /// Creates the state of a server that has no connections yet. [`PeerEndpoint::start`] dials the
    /// others.
    pub fn new(own: ReplicaId, limits: PeerLimits, metrics: PeerMetrics) -> Arc<Self> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let epoch = since_epoch.unwrap_or_default().as_millis();
        let peers = Self {
            own,
            epoch: u64::try_from(epoch).unwrap_or(u64::MAX),
            limits,
            metrics,
            state: Mutex::new(State {
                directory: Directory::new(limits.directory_nodes),
                addresses: Vec::new(),
                addresses_left_out: 0,
                zone: PeerZone::default(),
                peers: BTreeMap::new(),
                yields: Yields::default(),
                used_twice: NamesUsedTwice::default(),
                connected_at: BTreeMap::new(),
                links_changed_at: None,
                announced: BTreeMap::new(),
            }),
            members: watch::Sender::new(Arc::default()),
            left_out: Mutex::default(),
            directory_changes: watch::Sender::new(0),
            is_leaving: watch::Sender::new(false),
            agreed: watch::Sender::new(AgreedState::default()),
            closing: CancellationToken::new(),
            connections: TaskTracker::new(),
            contests: Arc::new(Semaphore::new(CONTESTS_MAX)),
            rows: RowExchange::new(limits.directory_nodes),
        };
        peers.advertise(Vec::new());
        Arc::new(peers)
    }

    /// Creates the state of a server without others.
    pub fn alone(own: ReplicaId, addresses: Vec<String>) -> Arc<Self> {
        let limits = PeerLimits {
            streams: 1,
            directory_nodes: 1,
            buffer_pool: 1,
        };
        let peers = Self::new(own, limits, PeerMetrics::default());
        peers.advertise(addresses);
        peers
    }

    /// Sets the addresses of this server that agents dial.
    pub fn advertise(&self, addresses: Vec<String>) {
        let mut state = self.state.lock();
        state.addresses = listed_addresses(&addresses);
        state.addresses_left_out = addresses.len() - state.addresses.len();
        self.publish(&state);
    }

    /// Sets the zone that the operator gave this server.
    pub fn set_zone(&self, zone: Option<ZoneName>) {
        let mut state = self.state.lock();
        state.zone.configured = zone;
        self.publish(&state);
    }

    /// Sets the zone that the cluster lists for this server.
    fn set_listed_zone(&self, zone: Option<ZoneName>) {
        let mut state = self.state.lock();
        if state.zone.listed != zone {
            state.zone.listed = zone;
            self.publish(&state);
        }
    }

    /// Returns the zone of a server, which may be this one, if it is known.
    pub fn zone_of(&self, replica: &ReplicaId) -> Option<ZoneName> {
        let state = self.state.lock();
        let zone = if *replica == self.own {
            Some(&state.zone)
        } else {
            state.peers.get(replica).map(|peer| &peer.zone)
        };
        zone.and_then(PeerZone::known).cloned()
    }

    /// Returns the name of this server.
    pub fn own(&self) -> &ReplicaId {
        &self.own
    }

    /// Opens a stream over the first server that holds the node and is not in `except`. `header` is
    /// that of a forwarded stream to the node. Returns without waiting for a reply. `left` is the time
    /// for this server and the next one, should this one not open the stream.
    ///
    /// Cancel-safe: if the future is dropped early, the stream is reset.
    ///
    /// # Errors
    /// Returns a [`NotOpened`]: `NoAgent` if no connected server holds the node.
    pub(super) async fn open(
        &self,
        request: &StreamRequest<'_>,
        header: &StreamHeader,
        except: &[Via],
        left: Duration,
    ) -> Result<Opened, NotOpened> {
        let candidates = self.candidates(request.node, except)?;
        let share = left / u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
        let mut usable = candidates.into_iter().filter_map(|candidate| {
            let permit = candidate.link.permit()?;
            Some((candidate, permit))
        });
        let Some((Candidate { link, announcement }, permit)) = usable.next() else {
            return Err(self.too_many_streams().into());
        };
        let via = Via::Replica(link.replica.clone());
        let error = match timeout(share, link.session.open(header, request.limit)).await {
            Ok(Ok(mut stream)) => {
                stream.attach(permit);
                let counter = |result| self.metrics.counter(ForwardDirection::Out, result);
                let (ok, not_here) = (ForwardResult::Ok, ForwardResult::NotHere);
                let forwarded = ForwardedCount::new(announcement, counter(ok), counter(not_here));
                return Ok(Opened {
                    stream,
                    via,
                    forwarded: Some(forwarded),
                });
            }
            Ok(Err(SessionError::NoRoom)) => OpenError::BufferPoolFull(self.limits.buffer_pool),
            Ok(Err(error)) => OpenError::Lost(error),
            Err(_elapsed) => OpenError::Timeout,
        };
        debug!(node = %request.node, peer = %link.replica, %error, "cannot forward a stream");
        self.count(ForwardDirection::Out, ForwardResult::Failed);
        Err(NotOpened {
            via: Some(via),
            error,
        })
    }

    /// Returns whether the connection to a server is suspect or has ended.
    pub(super) fn is_suspect(&self, replica: &ReplicaId) -> bool {
        let state = self.state.lock();
        let link = state.link(replica);
        link.is_none_or(|link| link.state() == LinkState::Suspect)
    }

    /// Waits until the connection to a server is suspect. Never ends without a connection.
    ///
    /// Cancel-safe.
    pub(super) async fn suspected(&self, replica: &ReplicaId) {
        let link = self.state.lock().link(replica).cloned();
        match link {
            Some(link) => link.suspected().await,
            None => pending().await,
        }
    }

    /// Returns the server that a new stream to a node tries first.
    pub fn preferred(&self, node: &NodeName) -> Option<ReplicaId> {
        let state = self.state.lock();
        let link = |replica: &ReplicaId| state.link(replica).map(|link| link.state());
        let candidates = state.directory.candidates(node, link);
        candidates.into_iter().next()
    }

    /// Returns whether at most a quarter of the streams over the connection to a server are open.
    pub fn has_spare(&self, replica: &ReplicaId) -> bool {
        let state = self.state.lock();
        state.link(replica).is_some_and(|link| link.has_spare())
    }

    /// Returns the servers to ask for a stream to a node, at least one.
    fn candidates(&self, node: &NodeName, except: &[Via]) -> Result<Vec<Candidate>, OpenError> {
        let state = self.state.lock();
        let link = |replica: &ReplicaId| {
            let is_excepted = except.iter().any(|via| via.replica() == Some(replica));
            state.link(replica).filter(|_| !is_excepted)
        };
        let with_permit = |replica: &ReplicaId| {
            let link = link(replica).filter(|link| link.has_permit())?;
            Some(link.state())
        };
        let replicas = state.directory.candidates(node, with_permit);
        let candidate = |replica: &ReplicaId| {
            Some(Candidate {
                link: link(replica)?.clone(),
                announcement: state.directory.announcement(node, replica)?,
            })
        };
        let candidates: Vec<_> = replicas.iter().filter_map(candidate).collect();
        if !candidates.is_empty() {
            return Ok(candidates);
        }
        let with_link = |replica: &ReplicaId| link(replica).map(|link| link.state());
        if state.directory.candidates(node, with_link).is_empty() {
            return Err(OpenError::NoAgent);
        }
        Err(self.too_many_streams())
    }

    fn too_many_streams(&self) -> OpenError {
        self.count(ForwardDirection::Out, ForwardResult::TooManyStreams);
        OpenError::PeerStreams(self.limits.streams)
    }

    fn count(&self, direction: ForwardDirection, result: ForwardResult) {
        self.metrics.forwarded(direction, result);
    }

    /// Returns whether another server holds a node.
    pub fn holds(&self, node: &NodeName) -> bool {
        self.state.lock().directory.holds(node)
    }

    /// Returns every node that another server holds, once for each of these servers.
    pub fn held_nodes(&self) -> Vec<(NodeName, ReplicaId)> {
        let state = self.state.lock();
        let entries = state.directory.iter();
        entries
            .map(|(node, replica)| (node.clone(), replica.clone()))
            .collect()
    }

    /// Returns the first `limit` nodes that another server holds, or held before it was gone, and whose
    /// names are after `after`, in order.
    pub fn listed_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<NodeName> {
        let state = self.state.lock();
        let held = state.directory.nodes_after(after).take(limit);
        let mut nodes: Vec<NodeName> = held.cloned().collect();
        let of_others = nodes.len();
        nodes.extend(state.directory.gone_after(after).cloned());
        if nodes.len() > of_others {
            nodes.sort();
            nodes.dedup();
            nodes.truncate(limit);
        }
        nodes
    }

    /// Returns the server that lists show for a node without a session that this server can use.
    pub fn shown_holder(&self, node: &NodeName) -> Option<ShownHolder> {
        let state = self.state.lock();
        let holders = state.directory.holders(node);
        if let Some(replica) = holders.into_iter().next() {
            return Some(ShownHolder::Here(replica));
        }
        let (replica, since) = state.directory.gone_holder(node)?;
        Some(ShownHolder::Gone(replica.clone(), since))
    }

    /// Returns a receiver that is notified whenever the result of [`Peers::held_nodes`] may have changed.
    pub fn held_changed(&self) -> watch::Receiver<u64> {
        self.directory_changes.subscribe()
    }

    /// Records that a server answered that it has no session of a node. A server that has announced
    /// the node again since `announcement` is still asked.
    pub fn not_here(&self, node: &NodeName, replica: &ReplicaId, announcement: Announcement) {
        debug!(%node, peer = %replica, "server does not hold the node");
        let mut state = self.state.lock();
        state.directory.forget(node, replica, announcement);
        self.directory_changed(&state);
    }

    /// Returns the servers that agents may dial, this server first. Another server is in the list
    /// while it is connected, and for 5 s after that.
    pub fn members(&self) -> watch::Receiver<Arc<[Member]>> {
        self.members.subscribe()
    }

    /// Returns what the list of [`Peers::members`] leaves out, since it is bounded.
    pub fn left_out(&self) -> LeftOut {
        *self.left_out.lock()
    }

    /// Announces to all servers and agents that this server stops.
    pub fn leave(&self) {
        let was_leaving = self.is_leaving.send_replace(true);
        if !was_leaving {
            let state = self.state.lock();
            self.publish(&state);
        }
    }

    /// Closes all connections, each after the other server has received what was sent. A connection
    /// that becomes ready later is closed at once.
    pub async fn close(&self) {
        self.closing.cancel();
        self.connections.close();
        self.connections.wait().await;
    }

    /// Returns the other servers that this server dials, ordered by name.
    pub fn status(&self) -> Vec<PeerStatus> {
        let state = self.state.lock();
        let peers = state.peers.iter();
        peers
            .map(|(id, peer)| PeerStatus {
                id: id.clone(),
                address: peer.address.clone(),
                state: peer.state(),
                is_suspect: (peer.link.as_ref())
                    .is_some_and(|link| link.state() == LinkState::Suspect),
                zone: peer.zone.known().cloned(),
                nodes: state.directory.nodes_of(id),
                since: peer.since,
            })
            .collect()
    }

    /// Returns the servers that this server has dialed and that answer.
    pub(crate) fn linked(&self) -> Vec<ReplicaId> {
        let servers = self.status().into_iter();
        let linked = servers.filter(PeerStatus::answers);
        linked.map(|server| server.id).collect()
    }

    /// Returns the number of servers that this server dials.
    pub fn expected(&self) -> usize {
        self.state.lock().peers.len()
    }

    /// Returns the number of servers that this server has dialed.
    pub fn connected(&self) -> usize {
        let state = self.state.lock();
        let linked = state.peers.values().filter(|peer| peer.link.is_some());
        linked.count()
    }
}

#[cfg(test)]
mod tests;
