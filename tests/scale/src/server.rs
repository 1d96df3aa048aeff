//! A simulated server: its queue of handshakes, the agents that it has, its announcements, and the
//! product's directory of what other servers announced.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{NodeName, ReplicaId, ZoneName};
use tunnel_proto::wire::peer::{HeldNode, Holds, PEER_MESSAGE_MAX};
use tunnel_routing::directory::Directory;

use super::agent::{Plan, SimAgent};
use super::model::{DIRECTORY_NODES, PRE_AUTH_TOTAL};

#[derive(Debug)]
pub(super) struct SimServer {
    pub(super) id: ReplicaId,
    pub(super) phase: Phase,
    /// Whether callers reach this server. A server that drains accepts calls for a while.
    pub(super) takes_calls: bool,
    pub(super) directory: Directory,
    /// The other servers to which this one has a connection, and the process that answers there.
    pub(super) links: BTreeMap<ReplicaId, usize>,
    /// The other servers that do not answer on their connections.
    pub(super) suspects: BTreeSet<usize>,
    /// The other servers that this one reports to its agents, and whether they are leaving.
    pub(super) known: BTreeMap<ReplicaId, bool>,
    pub(super) members: Rc<[Member]>,
    /// The agents with a session here, and the time of its admission. Remain when the process ends.
    pub(super) agents: BTreeMap<usize, SystemTime>,
    /// Agents whose change is not yet announced.
    pub(super) changed: BTreeSet<usize>,
    /// Time of the next announcement.
    pub(super) announce_at: Option<Duration>,
    /// For each node: since when a caller at this server does not reach it.
    pub(super) unreachable: Vec<Option<Duration>>,
    handshakes: VecDeque<SimDial>,
    /// Whether the completion of a handshake is scheduled.
    pub(super) is_busy: bool,
}

/// What happens to the process of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Accepts agents, but no callers.
    Starting,
    Ready,
    Leaving,
    /// Has ended; its host resets connections.
    Ended,
    /// Its host is lost, and resets nothing.
    Silent,
}

impl Phase {
    pub(super) fn is_up(self) -> bool {
        matches!(self, Self::Starting | Self::Ready | Self::Leaving)
    }

    /// Returns whether sessions with this server last.
    pub(super) fn is_staying(self) -> bool {
        matches!(self, Self::Starting | Self::Ready)
    }
}

/// A dial of an agent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SimDial {
    pub(super) agent: usize,
    pub(super) plan: Plan,
    pub(super) server: usize,
    pub(super) gives_up_at: Duration,
}

impl SimServer {
    pub(super) fn new(id: ReplicaId, nodes: usize) -> Self {
        Self {
            id,
            phase: Phase::Starting,
            takes_calls: false,
            directory: Directory::new(DIRECTORY_NODES),
            links: BTreeMap::new(),
            suspects: BTreeSet::new(),
            known: BTreeMap::new(),
            members: Rc::default(),
            agents: BTreeMap::new(),
            changed: BTreeSet::new(),
            announce_at: None,
            unreachable: vec![None; nodes],
            handshakes: VecDeque::new(),
            is_busy: false,
        }
    }

    /// Queues a handshake. Returns `false` if there are too many.
    pub(super) fn queue_handshake(&mut self, dial: SimDial, now: Duration) -> bool {
        self.drop_abandoned(now);
        let is_accepted = self.handshakes.len() < PRE_AUTH_TOTAL;
        if is_accepted {
            self.handshakes.push_back(dial);
        }
        is_accepted
    }

    /// Completes the oldest handshake whose agent still waits.
    pub(super) fn complete_handshake(&mut self, now: Duration) -> Option<SimDial> {
        self.drop_abandoned(now);
        let dial = self.handshakes.pop_front();
        self.is_busy = !self.handshakes.is_empty();
        dial
    }

    fn drop_abandoned(&mut self, now: Duration) {
        let is_abandoned = |dial: &SimDial| dial.gives_up_at <= now;
        while self.handshakes.front().is_some_and(is_abandoned) {
            self.handshakes.pop_front();
        }
    }

    /// Returns the list of members that this server reports, ordered by name.
    pub(super) fn list_members(
        &self,
        addresses: impl Fn(&ReplicaId) -> Vec<String>,
        zone: impl Fn(&ReplicaId) -> Option<ZoneName>,
    ) -> Vec<Member> {
        let own = (&self.id, self.phase == Phase::Leaving);
        let known = self.known.iter().map(|(id, is_leaving)| (id, *is_leaving));
        let mut members: Vec<_> = std::iter::once(own)
            .chain(known)
            .map(|(id, is_leaving)| Member {
                id: id.clone(),
                addresses: addresses(id),
                is_leaving,
                zone: zone(id),
            })
            .collect();
        members.sort_by(|one, other| one.id.cmp(&other.id));
        members
    }

    /// Returns the changes since the last announcement, and the agents that they are about.
    pub(super) fn take_changes(&mut self, agents: &[SimAgent]) -> (Vec<Holds>, BTreeSet<usize>) {
        let changed = std::mem::take(&mut self.changed);
        self.announce_at = None;
        let mut messages = Messages::default();
        for index in &changed {
            match self.agents.get(index) {
                Some(since) => messages.add(held_node(&agents[*index], *since)),
                None => messages.remove(agents[*index].node.clone()),
            }
        }
        (messages.finish(), changed)
    }

    /// Returns the list of all agents.
    pub(super) fn full_list(&self, agents: &[SimAgent]) -> Vec<Holds> {
        let mut messages = Messages::default();
        for (index, since) in &self.agents {
            messages.add(held_node(&agents[*index], *since));
        }
        let mut list = messages.finish();
        if list.is_empty() {
            list.push(Holds::default());
        }
        list[0].is_full = true;
        list
    }

    /// Ends the process: nothing is stored any more, apart from the agents that other servers look
    /// for here.
    pub(super) fn clear(&mut self) {
        for agent in std::mem::take(&mut self.changed) {
            self.agents.entry(agent).or_insert(UNIX_EPOCH);
        }
        self.directory = Directory::new(DIRECTORY_NODES);
        self.links.clear();
        self.suspects.clear();
        self.known.clear();
        self.handshakes.clear();
    }
}

fn held_node(agent: &SimAgent, since: SystemTime) -> HeldNode {
    HeldNode {
        node: agent.node.clone(),
        instance: agent.instance,
        since,
    }
}

/// Announcements of limited size, as `announce.rs` of the server makes them.
#[derive(Debug, Default)]
struct Messages {
    done: Vec<Holds>,
    next: Holds,
    bytes: usize,
}

impl Messages {
    fn add(&mut self, node: HeldNode) {
        self.reserve(node.size_max());
        self.next.added.push(node);
    }

    fn remove(&mut self, node: NodeName) {
        self.reserve(node.as_str().len() + NAME_BYTES);
        self.next.removed.push(node);
    }

    /// Ends the message if it has no room for an entry of this size.
    fn reserve(&mut self, bytes: usize) {
        if self.bytes + bytes > MESSAGE_BYTES {
            self.bytes = 0;
            self.done.push(std::mem::take(&mut self.next));
        }
        self.bytes += bytes;
    }

    fn finish(mut self) -> Vec<Holds> {
        if self.bytes > 0 {
            self.done.push(self.next);
        }
        self.done
    }
}

/// Upper bound for the bytes of the entries in one message.
const MESSAGE_BYTES: usize = PEER_MESSAGE_MAX - 256;
/// Upper bound for the tag and the length of a name.
const NAME_BYTES: usize = 4;
