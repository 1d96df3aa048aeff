//! Which servers the agent holds sessions with, and what it dials when: a state machine without I/O.
//! The driver passes events and the time in, performs the actions, and calls [`Plan::handle_timeout`]
//! at [`Plan::poll_timeout`].
//!
//! The plan starts with one [`Connector`], which takes any server. The servers report who they are and
//! which servers there are. Then there are up to `--replicas` connectors, each with a server of its
//! own ([`assignment`](super::assignment)).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use rand::rngs::SmallRng;
use tokio::time::Instant;
use tracing::debug;
use tunnel_proto::wire::REPLICAS_MAX;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{NodeName, ReplicaId};

use super::assignment::{
    OTHER_ADDRESSES_MAX, assign_replicas, other_addresses, own_addresses, replicas_of_other_zones,
    wanted_replicas,
};
use super::backoff::{START_SPREAD, wanted_pause};
use super::distance::ZoneDistances;
use super::member_addresses::ServerPolicy;
use super::report::ConnectionLog;
use super::session_task::SessionExit;
use super::status::{ConnectorId, SessionStatus};
use super::transport_policy::SessionTransport;
use crate::config::{Limits, ServerAddress, TransportChoice};
use crate::handover::LockState;
use crate::metrics::{ConnectResult, Metrics, SessionState};
use crate::session::{DialId, SessionEvent};

mod assigned;
mod attempt;
mod connector;
mod dial;
mod placement;
mod shared;

use assigned::Assignment;
use connector::{Connector, CurrentSession};
pub(super) use shared::{Action, CredentialOutcome};
use shared::{Dial, Shared};

/// What the driver has observed.
#[derive(Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "an event is moved into the plan once"
)]
pub(super) enum Event {
    Session(DialId, SessionEvent),
    /// The task of a session has ended.
    Ended(DialId, SessionExit),
    /// New sessions should be dialed with newer credentials.
    Renewed,
    Lock(LockState),
    /// A client of a listener for targets of the cloud has found no live session.
    Wanted,
    /// The agent stops: no session is dialed any more.
    Drain,
}

pub(super) struct PlanSettings {
    pub(super) node: NodeName,
    pub(super) server_policy: Arc<ServerPolicy>,
    pub(super) transport: TransportChoice,
    /// Largest number of connectors.
    pub(super) replicas: usize,
    pub(super) limits: Limits,
}

/// The connectors of an agent, at most one for each server.
///
/// Sessions are sticky. A connector keeps the server that it reached first, also if another one is
/// preferred, until a preferred server is free and has an address of its own. No connector leaves
/// a server for one that another connector holds. Behind a load balancer a connector moves only to
/// another zone, if another connector has a session in its own.
pub(super) struct Plan {
    settings: PlanSettings,
    /// Connectors that have not retired.
    connectors: BTreeMap<ConnectorId, Connector>,
    next_connector: u64,
    members: ReportedMembers,
    distances: ZoneDistances,
    /// Reported addresses that are not dialed, each with the reason.
    refused: Vec<String>,
    /// Whether several servers were reported at any time.
    has_several: bool,
    shared: Shared,
}

/// The newest list of members.
#[derive(Debug, Default)]
struct ReportedMembers {
    /// The server that sent the list.
    by: Option<ReplicaId>,
    list: Vec<Member>,
    /// Number of changes of the list.
    generation: u64,
}

impl Plan {
    /// Creates a plan with one connector, which dials at `now`.
    pub(super) fn new(
        settings: PlanSettings,
        metrics: Metrics,
        random: SmallRng,
        now: Instant,
    ) -> Self {
        let shared = Shared {
            actions: VecDeque::new(),
            dials: HashMap::new(),
            next_dial: 0,
            random,
            metrics,
            log: ConnectionLog::new(settings.node.clone()),
            quic_head_start: settings.limits.quic_head_start,
            credentials: 0,
            lock: LockState::None,
            transport: None,
            losses: 0,
            wanted_at: now,
            has_other_live: false,
            is_changed: false,
            is_draining: false,
        };
        let mut plan = Self {
            settings,
            connectors: BTreeMap::new(),
            next_connector: 0,
            members: ReportedMembers::default(),
            distances: ZoneDistances::default(),
            refused: Vec::new(),
            has_several: false,
            shared,
        };
        plan.start_connector(now);
        plan
    }

    /// Sets the generation of the newest credentials. An action may have replaced them.
    pub(super) fn set_credentials(&mut self, generation: u64) {
        self.shared.credentials = generation;
    }

    pub(super) fn handle_event(&mut self, event: Event, now: Instant) {
        let shared = &mut self.shared;
        match event {
            Event::Session(id, session_event) => self.handle_session_event(id, session_event, now),
            Event::Ended(id, exit) => self.handle_exit(id, exit, now),
            Event::Renewed | Event::Lock(_) | Event::Wanted | Event::Drain
                if shared.is_draining => {}
            Event::Renewed => {
                for connector in self.connectors.values_mut() {
                    connector.refresh(shared, now);
                }
            }
            Event::Lock(state) => {
                shared.lock = state;
                for connector in self.connectors.values_mut() {
                    connector.take_over(shared, now);
                }
            }
            Event::Wanted => self.dial_early(now),
            Event::Drain => {
                shared.is_draining = true;
                for connector in self.connectors.values_mut() {
                    connector.stop_dialing(shared);
                }
            }
        }
        self.reconcile(now);
    }

    /// Returns the time of the next [`Self::handle_timeout`].
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let connectors = self.connectors.values();
        let next = connectors.filter_map(Connector::next_timeout).min();
        next.filter(|_| !self.shared.is_draining)
    }

    /// Returns from when on [`Event::Wanted`] makes the next dial due. Returns `None` while that
    /// changes nothing: there is a session, a dial is in progress, or a server has refused.
    pub(super) fn wanted_at(&self) -> Option<Instant> {
        let mut connectors = self.connectors.values();
        let is_useful = !self.shared.is_draining
            && !self.is_ready()
            && connectors.any(Connector::can_dial_early);
        is_useful.then_some(self.shared.wanted_at)
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|at| at > now) {
            return;
        }
        for connector in self.connectors.values_mut() {
            if connector.next_timeout().is_some_and(|at| at <= now) {
                connector.handle_timeout(&mut self.shared, now);
            }
        }
        self.reconcile(now);
    }

    /// Returns the next action. A dial uses the newest credentials.
    pub(super) fn poll_action(&mut self) -> Option<Action> {
        let shared = &mut self.shared;
        let action = shared.actions.pop_front();
        if let Some(Action::Dial { id, .. }) = &action
            && let Some(dial) = shared.dials.get_mut(id)
        {
            dial.credentials = shared.credentials;
        }
        action
    }

    /// Returns whether any connector has a live session, or is a standby.
    pub(super) fn is_ready(&self) -> bool {
        self.connectors.values().any(Connector::is_ready)
    }

    /// Returns whether the agent has stopped: it drains, and every session has ended.
    pub(super) fn is_over(&self) -> bool {
        self.shared.is_draining && self.shared.dials.is_empty()
    }

    /// Returns the wanted sessions as operators see them. There are none in a drain.
    pub(super) fn statuses(&self) -> BTreeMap<ConnectorId, SessionStatus> {
        let connectors = self.connectors.iter();
        connectors
            .filter(|_| !self.shared.is_draining)
            .map(|(id, connector)| (*id, connector.status()))
            .collect()
    }

    /// Returns the number of wanted sessions in a state.
    pub(super) fn sessions(&self, state: SessionState) -> usize {
        let connectors = self.connectors.values();
        connectors
            .filter(|connector| connector.state() == Some(state))
            .count()
    }

    /// Makes the next dial of one connector due, since a client waits for a session.
    fn dial_early(&mut self, now: Instant) {
        if self.wanted_at().is_none_or(|at| at > now) {
            return;
        }
        let mut connectors = self.connectors.values_mut();
        if let Some(connector) = connectors.find(|one| one.can_dial_early()) {
            connector.dial_early(now);
            self.shared.wanted_at = now + wanted_pause(self.shared.random());
        }
    }

    fn handle_session_event(&mut self, id: DialId, session_event: SessionEvent, now: Instant) {
        let shared = &mut self.shared;
        let Some(&Dial {
            connector,
            transport,
            ..
        }) = shared.dials.get(&id)
        else {
            return;
        };
        if let SessionEvent::Admitted { replica, members } = session_event {
            self.handle_admitted(id, &replica, now);
            return self.report_members(&replica, false, members);
        }
        let Some(connector) = self.connectors.get_mut(&connector) else {
            return;
        };
        let current = connector.current(id);
        match (session_event, current) {
            (SessionEvent::Answered, _) => connector.handle_answer(id, transport),
            (SessionEvent::Draining { move_within }, Some(_)) => {
                connector.handle_server_drain(move_within, shared, now);
            }
            (SessionEvent::Members(members), Some(current)) => {
                let (replica, is_leaving) = (current.replica.clone(), current.draining);
                self.report_members(&replica, is_leaving, members);
            }
            (SessionEvent::RoundTripTime(rtt), Some(current)) => {
                let zone = current.zone.as_ref();
                shared.is_changed |= zone.is_some_and(|zone| self.distances.record(zone, rtt));
            }
            (SessionEvent::Suspect, Some(_)) => connector.handle_suspect(shared, now),
            (SessionEvent::Live, Some(_)) => connector.handle_recovery(shared),
            // The path of a retired session works.
            (SessionEvent::Live, None) if transport == SessionTransport::Quic => {
                connector.transport_policy.probe_quic_now(now);
            }
            (SessionEvent::Admitted { .. }, _)
            | (
                SessionEvent::Suspect
                | SessionEvent::Live
                | SessionEvent::Draining { .. }
                | SessionEvent::Members(_)
                | SessionEvent::RoundTripTime(_),
                None,
            ) => {}
        }
    }

    /// Serves an admitted session unless another connector has one with its server, or the dial was
    /// for another server.
    fn handle_admitted(&mut self, id: DialId, replica: &ReplicaId, now: Instant) {
        let shared = &mut self.shared;
        let Some(dial) = shared.dials.get(&id) else {
            return;
        };
        let (owner, transport) = (dial.connector, dial.transport);
        let is_acceptable = (dial.only.as_ref()).is_none_or(|only| only.contains(replica));
        let is_taken = self
            .connectors
            .iter()
            .any(|(other, connector)| *other != owner && connector.holds(replica));
        if !is_acceptable || is_taken {
            return shared.actions.push_back(Action::Decline(id));
        }
        shared
            .metrics
            .connect_attempt(transport.transport(), ConnectResult::Ready);
        let accepted = Action::Credentials(dial.credentials, CredentialOutcome::Accepted);
        shared.actions.extend([accepted, Action::Serve(id)]);
        let owner = self.connectors.get_mut(&owner);
        // An abandoned session retires by itself.
        if !owner.is_some_and(|owner| owner.handle_ready(id, replica, shared, now)) {
            return;
        }
        if shared.transport.replace(transport) != Some(transport)
            && transport == SessionTransport::Quic
        {
            for connector in self.connectors.values_mut() {
                connector.probe_quic_over_h2(now);
            }
        }
    }

    fn handle_exit(&mut self, id: DialId, exit: SessionExit, now: Instant) {
        let shared = &mut self.shared;
        let Some(dial) = shared.dials.remove(&id) else {
            return;
        };
        if let Err(error) = &exit.outcome
            && error.is_certificate_failure()
        {
            shared.record_credentials(dial.credentials, CredentialOutcome::Failed);
        }
        shared.has_other_live = self
            .connectors
            .iter()
            .any(|(other, connector)| *other != dial.connector && connector.is_ready());
        match self.connectors.get_mut(&dial.connector) {
            Some(connector) => connector.handle_exit(id, &dial, exit, shared, now),
            None => shared.record_end(dial.transport, &exit.outcome),
        }
    }

    /// Replaces the list of members by the one that the server `by` sent. A server that is stopping
    /// loses its view of the others, and does not replace the list of another server.
    fn report_members(&mut self, by: &ReplicaId, is_leaving: bool, mut members: Vec<Member>) {
        let reported = &mut self.members;
        let has_newer = reported.by.as_ref().is_some_and(|other| other != by);
        if members.is_empty() || (is_leaving && has_newer) {
            return;
        }
        members.truncate(REPLICAS_MAX);
        // Each server puts itself first.
        members.sort_by(|one, other| one.id.cmp(&other.id));
        for connector in self.connectors.values_mut() {
            connector.record_zone(&members);
        }
        reported.by = Some(by.clone());
        if reported.list != members {
            reported.list = members;
            reported.generation += 1;
            self.shared.is_changed = true;
            self.shared.actions.push_back(Action::MembersChanged);
        }
    }

    /// Starts and retires connectors, and assigns servers to them, as often as sessions or members
    /// have changed.
    fn reconcile(&mut self, now: Instant) {
        while std::mem::take(&mut self.shared.is_changed) && !self.shared.is_draining {
            self.assign(now);
        }
    }

    fn assign(&mut self, now: Instant) {
        let members = self.members();
        let (node, limit) = (self.settings.node.clone(), self.settings.replicas);
        let wanted = wanted_replicas(&node, &members, &self.distances, limit);
        let with_session = self.connectors.values().filter_map(Connector::staying);
        let count = wanted.len().max(with_session.count());
        let count = count.clamp(1, limit.max(1));
        while self.connectors.len() > count && self.retire_connector(&wanted) {}
        while self.connectors.len() < count {
            let start_in = START_SPREAD.mul_f64(self.shared.random());
            self.start_connector(now + start_in);
        }
        let current: Vec<Option<ReplicaId>> = (self.connectors.values())
            .map(|connector| connector.staying().map(|current| current.replica.clone()))
            .collect();
        let assigned = assign_replicas(&wanted, &current);
        // The reported members outlive the sessions: they may be the only servers that are left.
        // A server that was always alone is dialed at its configured address.
        self.has_several |= members.len() > 1;
        let others = if self.has_several { members.len() } else { 0 };
        let ranked = wanted_replicas(&node, &members, &self.distances, others);
        let ids: Vec<ConnectorId> = self.connectors.keys().copied().collect();
        for (index, (id, replica)) in ids.into_iter().zip(assigned).enumerate() {
            let is_free = |candidate: &&ReplicaId| {
                let mut others = current.iter().enumerate();
                !others.any(|(other, held)| other != index && held.as_ref() == Some(*candidate))
            };
            let free: Vec<_> = ranked.iter().filter(is_free).cloned().collect();
            let mut next = self.assignment(&members, replica, &free);
            next.other_zones = replicas_of_other_zones(&members, &current, index).into();
            if let Some(connector) = self.connectors.get_mut(&id) {
                connector.reassign(next, &mut self.shared, now);
            }
        }
    }

    /// Returns the reported members, and the servers of sessions, with the addresses that may be
    /// dialed. A server that has just started, or has lost its connections to the others, does not
    /// report those. Logs the other addresses when they change.
    fn members(&mut self) -> Vec<Member> {
        let mut members = self.members.list.clone();
        let sessions = self.connectors.values();
        for session in sessions.filter_map(|connector| connector.current.as_ref()) {
            match members
                .iter_mut()
                .find(|member| member.id == session.replica)
            {
                Some(member) => member.is_leaving |= session.draining,
                None => members.push(Member {
                    id: session.replica.clone(),
                    addresses: Vec::new(),
                    is_leaving: session.draining,
                    zone: session.zone.clone(),
                }),
            }
        }
        let (members, mut refused) = self.settings.server_policy.dialable_members(members);
        let addresses: usize = members.iter().map(|member| member.addresses.len()).sum();
        if addresses > OTHER_ADDRESSES_MAX {
            refused.push(format!(
                "{addresses} addresses, and at most {OTHER_ADDRESSES_MAX} are dialed"
            ));
        }
        if self.refused != refused {
            self.shared.log.refused_addresses(&refused);
            self.refused = refused;
        }
        members
    }

    /// Retires the newest connector without a session whose server stays. A session with a server
    /// that is stopping takes streams, so its connector retires only if another connector has a
    /// live session with one of the `wanted` servers. Returns `false` if there is no such
    /// connector.
    fn retire_connector(&mut self, wanted: &[ReplicaId]) -> bool {
        let is_wanted =
            |current: &CurrentSession| !current.suspect && wanted.contains(&current.replica);
        let is_live_elsewhere = |id: &ConnectorId| {
            let mut others = self.connectors.iter().filter(|(other, _)| *other != id);
            others.any(|(_, other)| other.staying().is_some_and(is_wanted))
        };
        let newest_first = || self.connectors.iter().rev();
        let spare =
            || newest_first().find(|(id, one)| one.staying().is_none() && is_live_elsewhere(id));
        let without_session = newest_first().find(|(_, one)| one.current.is_none());
        let id = without_session.or_else(spare).map(|(id, _)| *id);
        let Some(mut connector) = id.and_then(|id| self.connectors.remove(&id)) else {
            return false;
        };
        debug!(node = %self.settings.node, "fewer servers than sessions; retiring one");
        connector.retire_all(&mut self.shared);
        true
    }

    fn start_connector(&mut self, start_at: Instant) {
        let id = ConnectorId(self.next_connector);
        self.next_connector += 1;
        let assignment = self.assignment(&[], None, &[]);
        let PlanSettings {
            transport, limits, ..
        } = &self.settings;
        let connector = Connector::new(id, assignment, *transport, limits, start_at);
        self.connectors.insert(id, connector);
    }

    /// Returns an assignment of `replica`. The servers `free` are dialed if it cannot be reached.
    fn assignment(
        &self,
        members: &[Member],
        replica: Option<ReplicaId>,
        free: &[ReplicaId],
    ) -> Assignment {
        let parse = |address: &str| address.parse::<ServerAddress>().ok();
        let mut servers: Vec<_> = replica
            .iter()
            .flat_map(|replica| own_addresses(members, replica))
            .filter_map(parse)
            .collect();
        let own_servers = servers.len();
        let others = other_addresses(members, free).into_iter();
        // Every connector can dial the configured servers.
        let configured = self.settings.server_policy.configured().iter().cloned();
        for server in configured.chain(others.filter_map(parse)) {
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        Assignment {
            replica,
            servers: servers.into(),
            own_servers,
            other_zones: Arc::default(),
            members: members.len(),
            members_generation: self.members.generation,
            losses: self.shared.losses,
        }
    }
}

#[cfg(test)]
mod tests;
