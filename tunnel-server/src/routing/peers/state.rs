//! Changes of what is known of the other servers: their connections, what they hold, and whether
//! they stop.

use std::sync::Arc;
use std::time::SystemTime;

use tokio::time::Instant;
use tracing::{debug, warn};
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::{Holds, PeerHello};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN};

use super::link::{Link, VIOLATIONS};
use super::members::{bound_members, listed_addresses};
use super::{Peer, PeerAddress, PeerZone, Peers, State};

impl Peers {
    /// Returns this server's first message on a connection.
    pub(super) fn hello(&self) -> PeerHello {
        let state = self.state.lock();
        PeerHello {
            replica: self.own.clone(),
            epoch: self.epoch,
            versions: (VERSION_MIN, VERSION_MAX),
            addresses: state.addresses.clone(),
            zone: state.zone.configured.clone(),
        }
    }

    /// Adds a server that this server dials, or updates its address and zone.
    pub(crate) fn expect(&self, peer: &PeerAddress) {
        let mut state = self.state.lock();
        let known = state.peers.entry(peer.id.clone());
        let known = known.or_insert_with(|| Peer {
            address: String::new(),
            link: None,
            addresses: Vec::new(),
            zone: PeerZone::default(),
            is_leaving: false,
            is_member: false,
            since: SystemTime::now(),
        });
        known.address.clone_from(&peer.address);
        known.zone.listed.clone_from(&peer.zone);
        self.publish(&state);
    }

    /// Removes a server that this server no longer dials.
    pub(super) fn remove(&self, replica: &ReplicaId) {
        self.rows.forget(replica);
        let mut state = self.state.lock();
        state.peers.remove(replica);
        state.directory.remove_replica(replica);
        state.links_changed_at = Some(Instant::now());
        self.directory_changed(&state);
        self.publish(&state);
    }

    /// Records a connection, which replaces an older one.
    pub(super) fn link_up(&self, link: &Arc<Link>, hello: &PeerHello) {
        self.record_connection(&link.replica);
        self.state.lock().links_changed_at = Some(Instant::now());
        self.with_peer(&link.replica, |peer| {
            peer.link = Some(link.clone());
            peer.addresses = listed_addresses(&hello.addresses);
            peer.zone.configured.clone_from(&hello.zone);
            peer.is_leaving = false;
            peer.is_member = true;
            peer.since = SystemTime::now();
        });
    }

    /// Records the loss of a connection. What the server held stays in the directory until
    /// [`Peers::expire`].
    pub(super) fn link_down(&self, link: &Arc<Link>) {
        self.state.lock().links_changed_at = Some(Instant::now());
        self.with_peer(&link.replica, |peer| {
            if (peer.link.as_ref()).is_some_and(|current| Arc::ptr_eq(current, link)) {
                peer.link = None;
                peer.since = SystemTime::now();
            }
        });
    }

    /// Returns whether new streams are opened over this connection.
    pub(super) fn is_current(&self, link: &Arc<Link>) -> bool {
        let state = self.state.lock();
        let current = state.link(&link.replica);
        current.is_some_and(|current| Arc::ptr_eq(current, link))
    }

    /// Removes what a server held that has had no connection for a while.
    pub(super) fn expire(&self, replica: &ReplicaId) {
        self.rows.forget(replica);
        self.with_peer(replica, |peer| peer.is_member = false);
        let mut state = self.state.lock();
        let since = state.peers.get(replica).map(|peer| peer.since);
        let since = since.unwrap_or_else(SystemTime::now);
        state.directory.lose_replica(replica, since);
        self.directory_changed(&state);
    }

    /// Records that another server stops soon. Returns `false` if the server has already announced
    /// that over this connection.
    pub(super) fn peer_leaves(&self, replica: &ReplicaId) -> bool {
        let mut state = self.state.lock();
        state.directory.set_leaving(replica);
        let Some(peer) = state.peers.get_mut(replica) else {
            return false;
        };
        let is_known = std::mem::replace(&mut peer.is_leaving, true);
        if !is_known {
            self.publish(&state);
        }
        !is_known
    }

    /// Changes the state of a server that is dialed.
    pub(super) fn with_peer(&self, replica: &ReplicaId, change: impl FnOnce(&mut Peer)) {
        let mut state = self.state.lock();
        if let Some(peer) = state.peers.get_mut(replica) {
            change(peer);
        }
        self.publish(&state);
    }

    /// Applies what another server announced. A new list replaces the previous one with its last
    /// message. Does nothing after [`Peers::remove`], which may run while a message is handled.
    pub(crate) fn apply(&self, replica: &ReplicaId, holds: Holds) {
        let mut state = self.state.lock();
        if !state.peers.contains_key(replica) {
            return;
        }
        if holds.is_full {
            state.directory.begin(replica);
        }
        let ignored = state.directory.apply(replica, holds.added, &holds.removed);
        if !holds.has_more {
            state.directory.complete(replica);
        }
        self.directory_changed(&state);
        drop(state);
        if ignored > 0 && VIOLATIONS.admit() {
            warn!(
                peer = %replica, ignored, limit = self.limits.directory_nodes,
                "server announces more nodes than limits.directoryNodes; the rest is not reached over it"
            );
        }
    }

    /// Logs that another server violated the protocol.
    pub(super) fn warn_violation(
        &self,
        peer: &dyn std::fmt::Display,
        error: &dyn std::fmt::Display,
    ) {
        if VIOLATIONS.admit() {
            warn!(%peer, %error, "another server violated the protocol, connection closed");
        } else {
            debug!(%peer, %error, "another server violated the protocol, connection closed");
        }
    }

    pub(super) fn directory_changed(&self, state: &State) {
        self.metrics.set_directory_nodes(state.directory.nodes());
        self.directory_changes.send_modify(|count| *count += 1);
    }

    /// Updates the metrics, and the list for agents if it has changed.
    pub(super) fn publish(&self, state: &State) {
        let states: Vec<_> = state.peers.values().map(Peer::state).collect();
        self.metrics.set_peers(&states);
        let own = Member {
            id: self.own.clone(),
            addresses: state.addresses.clone(),
            is_leaving: *self.is_leaving.borrow(),
            zone: state.zone.known().cloned(),
        };
        let others = state.peers.iter().filter(|(_, peer)| peer.is_member);
        let others = others.map(|(id, peer)| Member {
            id: id.clone(),
            addresses: peer.addresses.clone(),
            is_leaving: peer.is_leaving,
            zone: peer.zone.known().cloned(),
        });
        let (members, mut left_out) = bound_members(std::iter::once(own).chain(others).collect());
        left_out.addresses += state.addresses_left_out;
        *self.left_out.lock() = left_out;
        self.members.send_if_modified(|published| {
            let is_changed = **published != *members;
            if is_changed {
                *published = members.into();
            }
            is_changed
        });
    }
}
