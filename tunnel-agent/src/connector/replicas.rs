//! The members that servers reported, and the replicas that the connectors of a set hold.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::Id;
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{ReplicaId, ZoneName};

use super::distance::ZoneDistances;

/// The number of a connector in its set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ConnectorId(pub(super) u64);

/// What the connectors of a set know of the replicas.
///
/// A session task claims the replica that it reached. The claim ends when the session retires or
/// ends, so that a connector has two claims only until its new session has replaced the old one.
#[derive(Debug, Default)]
pub(super) struct ReplicaTable {
    claims: Mutex<HashMap<Id, Claim>>,
    reported: Mutex<ReportedMembers>,
    distances: Mutex<ZoneDistances>,
    /// Number of changes of the reported members.
    generation: watch::Sender<u64>,
    losses: AtomicU64,
    /// Wakes the set, which assigns replicas again.
    changed: Notify,
}

#[derive(Debug)]
struct Claim {
    connector_id: ConnectorId,
    /// `None` for a server that has no name, since it is of an older version.
    replica: Option<ReplicaId>,
    /// The zone of the replica in the last list that had it.
    zone: Option<ZoneName>,
    is_leaving: bool,
    is_suspect: bool,
}

/// The newest list of members.
#[derive(Debug, Default)]
struct ReportedMembers {
    /// The server that sent the list.
    by: Option<ReplicaId>,
    members: Arc<[Member]>,
}

impl ReplicaTable {
    /// Claims `replica` for the session task `id`. Returns `false` if another connector holds it.
    /// A server without a name gives the new streams to its newest session at once, so that session
    /// is never declined, see [`Shared::unnamed`](super::shared::Shared::unnamed).
    pub(super) fn claim(
        &self,
        id: Id,
        connector_id: ConnectorId,
        replica: Option<&ReplicaId>,
    ) -> bool {
        let mut claims = self.claims.lock();
        let is_taken = claims.values().any(|claim| {
            claim.connector_id != connector_id
                && !claim.is_leaving
                && claim.replica.as_ref() == replica
        });
        if is_taken && replica.is_some() {
            return false;
        }
        let replica = replica.cloned();
        let claim = Claim {
            connector_id,
            replica,
            zone: None,
            is_leaving: false,
            is_suspect: false,
        };
        claims.insert(id, claim);
        drop(claims);
        self.changed.notify_one();
        true
    }

    /// Ends the claim of a session that has retired or ended.
    pub(super) fn release(&self, id: Id) {
        let released = self.claims.lock().remove(&id);
        if released.is_some() {
            self.changed.notify_one();
        }
    }

    /// Records that a connector has lost its session, so that a search for a replica may find one.
    pub(super) fn record_loss(&self) {
        self.losses.fetch_add(1, Ordering::Relaxed);
        self.changed.notify_one();
    }

    /// Returns the number of sessions that connectors have lost.
    pub(super) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// Records that the server of a session is stopping. Its claim keeps no other connector away
    /// from that replica.
    pub(super) fn set_leaving(&self, id: Id) {
        if let Some(claim) = self.claims.lock().get_mut(&id) {
            claim.is_leaving = true;
        }
        self.changed.notify_one();
    }

    /// Records whether a session is suspect. Its claim stays.
    pub(super) fn set_suspect(&self, id: Id, is_suspect: bool) {
        if let Some(claim) = self.claims.lock().get_mut(&id) {
            claim.is_suspect = is_suspect;
        }
        self.changed.notify_one();
    }

    /// Returns the replica that a session task has claimed.
    pub(super) fn claimed_by(&self, id: Id) -> Option<ReplicaId> {
        let claims = self.claims.lock();
        claims.get(&id).and_then(|claim| claim.replica.clone())
    }

    /// Returns the zone of the replica that a session task has claimed, if it is known.
    pub(super) fn zone_of(&self, id: Id) -> Option<ZoneName> {
        let claims = self.claims.lock();
        claims.get(&id).and_then(|claim| claim.zone.clone())
    }

    /// Returns the connectors with a session whose server stays, and its replica if it has a name.
    pub(super) fn by_connector(&self) -> HashMap<ConnectorId, Option<ReplicaId>> {
        let claims = self.claims.lock();
        claims
            .values()
            .filter(|claim| !claim.is_leaving)
            .map(|claim| (claim.connector_id, claim.replica.clone()))
            .collect()
    }

    /// Returns whether a connector has any session, also with a server that is stopping.
    pub(super) fn has_session(&self, connector_id: ConnectorId) -> bool {
        let claims = self.claims.lock();
        claims
            .values()
            .any(|claim| claim.connector_id == connector_id)
    }

    /// Returns whether another connector has a live session with one of the `wanted` replicas, or
    /// with a server without a name.
    pub(super) fn has_other_live(&self, connector_id: ConnectorId, wanted: &[ReplicaId]) -> bool {
        let is_wanted = |claim: &Claim| {
            let replica = claim.replica.as_ref();
            replica.is_none_or(|replica| wanted.contains(replica))
        };
        self.claims.lock().values().any(|claim| {
            claim.connector_id != connector_id
                && !claim.is_suspect
                && !claim.is_leaving
                && is_wanted(claim)
        })
    }

    /// Replaces the list of members by the one that the server `by` sent. A server that is stopping
    /// loses its view of the others, and does not replace the list of another server. Servers of
    /// older versions send none.
    pub(super) fn report(
        &self,
        by: Option<&ReplicaId>,
        is_leaving: bool,
        mut members: Vec<Member>,
    ) {
        let mut reported = self.reported.lock();
        let has_newer = reported.by.is_some() && reported.by.as_ref() != by;
        if members.is_empty() || (is_leaving && has_newer) {
            return;
        }
        members.truncate(REPLICAS_MAX);
        // Each server puts itself first.
        members.sort_by(|one, other| one.id.cmp(&other.id));
        for claim in self.claims.lock().values_mut() {
            let is_claimed = |member: &&Member| claim.replica.as_ref() == Some(&member.id);
            if let Some(member) = members.iter().find(is_claimed) {
                claim.zone.clone_from(&member.zone);
            }
        }
        reported.by = by.cloned();
        if *reported.members == *members {
            return;
        }
        reported.members = members.into();
        drop(reported);
        self.generation.send_modify(|generation| *generation += 1);
        self.changed.notify_one();
    }

    /// Records the round-trip time of the session of a session task.
    pub(super) fn record_rtt(&self, id: Id, rtt: Duration) {
        let zone = self.zone_of(id);
        let is_changed = zone.is_some_and(|zone| self.distances.lock().record(&zone, rtt));
        if is_changed {
            self.changed.notify_one();
        }
    }

    /// Returns the distances of the zones.
    pub(super) fn distances(&self) -> ZoneDistances {
        self.distances.lock().clone()
    }

    /// Returns a number that changes with the reported members.
    pub(super) fn members_generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// Returns a watch of [`Self::members_generation`].
    pub(super) fn generations(&self) -> watch::Receiver<u64> {
        self.generation.subscribe()
    }

    /// Returns the reported members, and the replicas that connectors hold. A server that has just
    /// started, or has lost its connections to the others, does not report those.
    pub(super) fn members(&self) -> Vec<Member> {
        let mut members = self.reported.lock().members.to_vec();
        for claim in self.claims.lock().values() {
            let Some(replica) = &claim.replica else {
                continue;
            };
            match members.iter_mut().find(|member| member.id == *replica) {
                Some(member) => member.is_leaving |= claim.is_leaving,
                None => members.push(Member {
                    id: replica.clone(),
                    addresses: Vec::new(),
                    is_leaving: claim.is_leaving,
                    zone: claim.zone.clone(),
                }),
            }
        }
        members
    }

    /// Waits until claims or members have changed. For one caller. Cancel-safe.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}
