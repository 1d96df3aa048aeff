//! The directory: which other servers hold which nodes, as those servers announced it. Pure.
//!
//! An entry is a hint. A stream that is forwarded to a server without a session of the node is
//! refused with `not_here`, and the server that receives a forwarded stream never forwards it again.
//! So a wrong or malicious entry costs one refused hop.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Bound;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};
use tunnel_proto::wire::peer::HeldNode;

mod contest;
mod gone;
mod holders;

pub use contest::{Contender, Tenure};
use gone::GoneNodes;
use holders::{Holder, Holders};

/// Maximum number of servers that are asked for one stream, but for those that answer at once that
/// another one may serve it.
pub const HOLDERS_TRIED_MAX: usize = 2;

/// The state of the connection to a server, in the order in which streams prefer it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinkState {
    /// The server answers in time.
    Live,
    /// The server has not answered for a few seconds. Its host may be lost.
    Suspect,
}

/// The nodes that other servers hold.
#[derive(Debug)]
pub struct Directory {
    /// The holders of each node, never empty. Entries refer to a server by its index, because there
    /// are hundreds of thousands of them.
    nodes: BTreeMap<NodeName, Holders>,
    replicas: Vec<Option<Replica>>,
    gone: GoneNodes,
    nodes_max_per_replica: usize,
}

/// One server that announced nodes.
#[derive(Debug)]
struct Replica {
    id: ReplicaId,
    is_leaving: bool,
    nodes: usize,
    /// Number of the current list.
    list: u32,
    /// Whether the current list has begun and not ended.
    has_begun: bool,
    /// Whether entries of earlier lists stay, until the current one ends or has no room.
    is_listing: bool,
}

/// What a server announced about a node: the agent process and its admission. The announcement after
/// a session was lost is another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcement {
    instance: InstanceId,
    /// In milliseconds since the Unix epoch.
    since: u64,
}

impl Holder {
    fn announcement(&self) -> Announcement {
        Announcement {
            instance: self.instance,
            since: self.since,
        }
    }
}

impl Directory {
    /// Creates an empty directory that stores at most this number of nodes of one server
    /// (`limits.directoryNodes`).
    pub fn new(nodes_max_per_replica: usize) -> Self {
        Self {
            nodes: BTreeMap::new(),
            replicas: Vec::new(),
            gone: GoneNodes::default(),
            nodes_max_per_replica,
        }
    }

    /// Begins a new list of a server. What the server held stays until [`Directory::complete`], or
    /// until the server reaches the limit of nodes. The server no longer counts as leaving.
    pub fn begin(&mut self, replica: &ReplicaId) {
        let Some(index) = self.index_or_insert(replica) else {
            return;
        };
        if let Some(replica) = self.slot_mut(index) {
            replica.is_leaving = false;
            replica.list = replica.list.wrapping_add(1);
            (replica.has_begun, replica.is_listing) = (true, true);
        }
    }

    /// Ends a new list of a server: removes what is not in the list. Does nothing if the server has
    /// not begun one.
    pub fn complete(&mut self, replica: &ReplicaId) {
        let Some(index) = self.index_of(replica) else {
            return;
        };
        let slot = self.slot_mut(index);
        if slot.is_some_and(|replica| std::mem::take(&mut replica.has_begun)) {
            self.gone
                .forget_replica(replica, self.nodes_max_per_replica);
            self.remove_earlier(index);
        }
    }

    /// Removes and adds nodes of a server. Returns the number of added nodes that were ignored,
    /// because the server has reached the limit.
    pub fn apply(
        &mut self,
        replica: &ReplicaId,
        added: Vec<HeldNode>,
        removed: &[NodeName],
    ) -> usize {
        let Some(index) = self.index_or_insert(replica) else {
            return added.len();
        };
        for node in removed {
            self.remove(node, index);
        }
        let mut ignored = 0;
        for held_node in added {
            if self.is_full(index) && !self.is_held_by(&held_node.node, index) {
                self.remove_earlier(index);
            }
            if !self.insert(held_node, index) {
                ignored += 1;
            }
        }
        ignored
    }

    /// Marks a server as leaving. Its nodes are reached over other holders if they have any.
    pub fn set_leaving(&mut self, replica: &ReplicaId) {
        if let Some(replica) = self.replica_mut(replica) {
            replica.is_leaving = true;
        }
    }

    /// Removes a server and all that it held.
    pub fn remove_replica(&mut self, replica: &ReplicaId) {
        self.lose_replica(replica, UNIX_EPOCH);
        self.gone
            .forget_replica(replica, self.nodes_max_per_replica);
    }

    /// Removes what a server held that has had no connection since then. The nodes that no other server
    /// holds are [`Directory::gone_holder`]'s until a server knows their state.
    pub fn lose_replica(&mut self, replica: &ReplicaId, since: SystemTime) {
        let Some(index) = self.index_of(replica) else {
            return;
        };
        let max = self.nodes_max_per_replica;
        self.nodes.retain(|node, holders| {
            if holders.iter().any(|holder| holder.replica == index) {
                *holders = without(holders, index);
                if holders.is_empty() {
                    self.gone.add(replica, node.clone(), max);
                }
            }
            !holders.is_empty()
        });
        self.gone.begin(replica, since);
        if let Some(slot) = self.replicas.get_mut(usize::from(index)) {
            *slot = None;
        }
    }

    /// Removes the entries of a server that are from earlier lists than the current one.
    fn remove_earlier(&mut self, index: u16) {
        let Some(replica) = self.slot_mut(index) else {
            return;
        };
        if !std::mem::take(&mut replica.is_listing) {
            return;
        }
        let list = replica.list;
        let is_earlier = |holder: &Holder| holder.replica == index && holder.list != list;
        let mut count = 0;
        self.nodes.retain(|_node, holders| {
            if holders.iter().any(is_earlier) {
                *holders = without(holders, index);
                count += 1;
            }
            !holders.is_empty()
        });
        if let Some(replica) = self.slot_mut(index) {
            replica.nodes -= count;
        }
    }

    /// Removes one entry, because the server answered that it has no session of the node. A newer
    /// announcement than the one that the question was based on stays.
    pub fn forget(&mut self, node: &NodeName, replica: &ReplicaId, announcement: Announcement) {
        if self.announcement(node, replica) != Some(announcement) {
            return;
        }
        if let Some(index) = self.index_of(replica) {
            self.remove(node, index);
        }
    }

    /// Returns what a server announced about a node.
    pub fn announcement(&self, node: &NodeName, replica: &ReplicaId) -> Option<Announcement> {
        let index = self.index_of(replica)?;
        let mut holders = self.holders_of(node).iter();
        let holder = holders.find(|holder| holder.replica == index)?;
        Some(holder.announcement())
    }

    /// Returns the servers that hold a node: those that are leaving last, and otherwise by the
    /// rendezvous weight of node and server, so that the streams of different nodes prefer different
    /// servers.
    pub fn holders(&self, node: &NodeName) -> Vec<ReplicaId> {
        let holders = self.holders_of(node).iter();
        let mut replicas: Vec<_> = holders
            .filter_map(|holder| self.replica(holder.replica))
            .map(|replica| (replica.is_leaving, !weight(node, &replica.id), &replica.id))
            .collect();
        replicas.sort_unstable();
        replicas.into_iter().map(|(_, _, id)| id.clone()).collect()
    }

    /// Returns the servers to ask for one stream to a node, in order: the first holders that have a
    /// connection, at most [`HOLDERS_TRIED_MAX`]. `link` returns the state of the connection to a
    /// server, and `None` for one to leave out. Servers whose connection is suspect are last.
    pub fn candidates(
        &self,
        node: &NodeName,
        link: impl Fn(&ReplicaId) -> Option<LinkState>,
    ) -> Vec<ReplicaId> {
        let holders = self.holders(node).into_iter();
        let mut candidates: Vec<_> = holders
            .filter_map(|replica| Some((link(&replica)?, replica)))
            .collect();
        // Stable, so that servers with the same state keep their order.
        candidates.sort_by_key(|(state, _)| *state);
        candidates.truncate(HOLDERS_TRIED_MAX);
        candidates.into_iter().map(|(_, replica)| replica).collect()
    }

    /// Returns whether another server holds the node.
    pub fn holds(&self, node: &NodeName) -> bool {
        self.nodes.contains_key(node)
    }

    /// Returns the servers that hold a node with another agent process than `instance`.
    pub fn others(&self, node: &NodeName, instance: InstanceId) -> Vec<(ReplicaId, HeldNode)> {
        let others = self.holders_of(node).iter();
        others
            .filter(|holder| holder.instance != instance)
            .filter_map(|holder| {
                let replica = self.replica(holder.replica)?;
                let held_node = HeldNode {
                    node: node.clone(),
                    instance: holder.instance,
                    since: UNIX_EPOCH + Duration::from_millis(holder.since),
                };
                Some((replica.id.clone(), held_node))
            })
            .collect()
    }

    /// Returns the number of nodes that other servers hold.
    pub fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the number of nodes that a server holds.
    pub fn nodes_of(&self, replica: &ReplicaId) -> usize {
        let mut replicas = self.replicas.iter().flatten();
        let found = replicas.find(|known| known.id == *replica);
        found.map_or(0, |replica| replica.nodes)
    }

    /// Returns the nodes whose names are after `after`, in order.
    pub fn nodes_after(&self, after: Bound<&NodeName>) -> impl Iterator<Item = &NodeName> {
        let nodes = self.nodes.range((after, Bound::Unbounded));
        nodes.map(|(node, _holders)| node)
    }

    /// Returns the nodes after `after` that nobody holds and that a server held before it was gone: those of
    /// each server in order.
    pub fn gone_after(&self, after: Bound<&NodeName>) -> impl Iterator<Item = &NodeName> {
        self.gone.after(after)
    }

    /// Returns the first `limit` nodes after `after` that a server held which is gone or no longer expected,
    /// in order. Another server may hold them.
    pub fn unresolved_after(&self, after: Bound<&NodeName>, limit: usize) -> Vec<&NodeName> {
        self.gone.unresolved_after(after, limit)
    }

    /// Records that the state of a node is known otherwise.
    pub fn resolve(&mut self, node: &NodeName) {
        self.gone.forget(node);
    }

    /// Returns the server that held a node last and is gone, and since when.
    pub fn gone_holder(&self, node: &NodeName) -> Option<(&ReplicaId, SystemTime)> {
        self.gone.of_node(node)
    }

    /// Returns every node with each of its holders, ordered by node.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeName, &ReplicaId)> {
        self.nodes.iter().flat_map(move |(node, holders)| {
            let replicas = holders.iter();
            replicas.filter_map(move |holder| Some((node, &self.replica(holder.replica)?.id)))
        })
    }

    /// Stores an entry. Returns `false` if the server has reached the limit.
    fn insert(&mut self, held_node: HeldNode, index: u16) -> bool {
        let max = self.nodes_max_per_replica;
        let Some(Some(replica)) = self.replicas.get_mut(usize::from(index)) else {
            return false;
        };
        let holder = Holder {
            instance: held_node.instance,
            since: millis(held_node.since),
            list: replica.list,
            replica: index,
        };
        self.gone.forget(&held_node.node);
        match self.nodes.entry(held_node.node) {
            Entry::Occupied(mut entry) => {
                let holders = entry.get_mut();
                match holders.iter_mut().find(|known| known.replica == index) {
                    Some(known) => *known = holder,
                    None if replica.nodes >= max => return false,
                    None => {
                        replica.nodes += 1;
                        *holders = holders.iter().copied().chain([holder]).collect();
                    }
                }
            }
            Entry::Vacant(_) if replica.nodes >= max => return false,
            Entry::Vacant(entry) => {
                replica.nodes += 1;
                entry.insert(Holders::One(holder));
            }
        }
        true
    }

    fn remove(&mut self, node: &NodeName, index: u16) {
        let Some(holders) = self.nodes.get_mut(node) else {
            return;
        };
        let others = without(holders, index);
        if others.len() == holders.len() {
            return;
        }
        let is_last = others.is_empty();
        if is_last {
            self.nodes.remove(node);
        } else {
            *holders = others;
        }
        let Some(Some(replica)) = self.replicas.get_mut(usize::from(index)) else {
            return;
        };
        replica.nodes -= 1;
        // A server that leaves ends its sessions, of which another server may not have the next one.
        if is_last && replica.is_leaving {
            let max = self.nodes_max_per_replica;
            self.gone.add(&replica.id, node.clone(), max);
        }
    }

    fn is_held_by(&self, node: &NodeName, index: u16) -> bool {
        let mut holders = self.holders_of(node).iter();
        holders.any(|holder| holder.replica == index)
    }

    fn holders_of(&self, node: &NodeName) -> &[Holder] {
        let holders = self.nodes.get(node);
        holders.map_or(&[][..], |holders| &holders[..])
    }

    fn replica(&self, index: u16) -> Option<&Replica> {
        self.replicas.get(usize::from(index))?.as_ref()
    }

    fn slot_mut(&mut self, index: u16) -> Option<&mut Replica> {
        self.replicas.get_mut(usize::from(index))?.as_mut()
    }

    /// Returns whether a server has reached the limit of nodes.
    fn is_full(&self, index: u16) -> bool {
        let replica = self.replica(index);
        replica.is_some_and(|replica| replica.nodes >= self.nodes_max_per_replica)
    }

    fn replica_mut(&mut self, replica: &ReplicaId) -> Option<&mut Replica> {
        let mut replicas = self.replicas.iter_mut().flatten();
        replicas.find(|known| known.id == *replica)
    }

    fn index_of(&self, replica: &ReplicaId) -> Option<u16> {
        let mut known = self.replicas.iter();
        let position = known.position(|known| {
            let known = known.as_ref();
            known.is_some_and(|known| known.id == *replica)
        });
        u16::try_from(position?).ok()
    }

    /// Returns the index of a server, which is inserted if it is new. `None` means that there are
    /// too many servers.
    fn index_or_insert(&mut self, replica: &ReplicaId) -> Option<u16> {
        if let Some(index) = self.index_of(replica) {
            return Some(index);
        }
        let vacant = self.replicas.iter().position(Option::is_none);
        let position = vacant.unwrap_or(self.replicas.len());
        let index = u16::try_from(position).ok()?;
        let new = Some(Replica {
            id: replica.clone(),
            is_leaving: false,
            nodes: 0,
            list: 0,
            has_begun: false,
            is_listing: false,
        });
        match self.replicas.get_mut(position) {
            Some(slot) => *slot = new,
            None => self.replicas.push(new),
        }
        Some(index)
    }
}

fn without(holders: &[Holder], index: u16) -> Holders {
    let others = holders.iter().filter(|holder| holder.replica != index);
    others.copied().collect()
}

/// Returns the rendezvous weight of a node and a server: the same value at every server of a
/// release.
fn weight(node: &NodeName, replica: &ReplicaId) -> u64 {
    let mut hasher = DefaultHasher::new();
    node.as_str().hash(&mut hasher);
    replica.as_str().hash(&mut hasher);
    hasher.finish()
}

/// Returns the milliseconds since the Unix epoch, rounded down as on the wire.
fn millis(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
