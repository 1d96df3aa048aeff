//! A simulated agent: its connectors, as `connector.rs`, `placement.rs` and `set.rs` of the agent
//! run them.

use std::borrow::Cow;
use std::rc::Rc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::SmallRng;
use tokio::time::Instant;
use tunnel_agent::assignment::{assign_replicas, wanted_replicas};
use tunnel_agent::backoff::{
    ADDRESSED_INTERVAL, Backoff, MOVE_SPREAD, RESUME_SPREAD, ReconnectEvent, START_SPREAD,
    drain_wait,
};
use tunnel_agent::distance::ZoneDistances;
use tunnel_agent::search::ReplicaSearch;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};

use super::model::MOVE_WITHIN;

/// The time of an event, and what the agent starts because of it.
#[derive(Debug)]
pub(super) struct Moment<'a> {
    pub(super) now: Duration,
    /// The instant of time zero.
    pub(super) base: Instant,
    pub(super) random: &'a mut SmallRng,
    pub(super) effects: Vec<Effect>,
}

/// What an agent starts.
#[derive(Debug)]
pub(super) enum Effect {
    Timer {
        plan: Plan,
        at: Duration,
    },
    Dial {
        plan: Plan,
        address: Address,
    },
    /// The session with this server takes no new streams.
    Withdraw {
        server: usize,
    },
}

/// An intention of a connector. A newer one makes its timers and dials void.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) connector: usize,
    number: u32,
}

#[derive(Debug)]
pub(super) enum Address {
    /// The address of one replica.
    Own(ReplicaId),
    Configured,
}

#[derive(Debug)]
pub(super) struct SimAgent {
    pub(super) node: NodeName,
    pub(super) instance: InstanceId,
    k: usize,
    /// Whether each replica has an address of its own.
    is_addressed: bool,
    connectors: Vec<SimConnector>,
    members: Rc<[Member]>,
    round: u32,
}

#[derive(Debug, Default)]
struct SimConnector {
    is_retired: bool,
    plans: u32,
    state: DialState,
    assigned: Option<ReplicaId>,
    round: u32,
    members: usize,
    /// Position in the addresses: that of the assigned replica, then the configured one.
    cursor: usize,
    backoff: Backoff,
    search: ReplicaSearch,
    session: Option<SimSession>,
}

#[derive(Debug)]
struct SimSession {
    server: usize,
    replica: ReplicaId,
    since: Duration,
    is_leaving: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum DialState {
    #[default]
    Idle,
    Waiting(Purpose),
    Dialing(Purpose),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Connect,
    /// The connector has a session, and prefers another replica.
    Move,
}

impl SimAgent {
    pub(super) fn new(node: NodeName, instance: InstanceId, k: usize, is_addressed: bool) -> Self {
        Self {
            node,
            instance,
            k,
            is_addressed,
            connectors: Vec::new(),
            members: Rc::default(),
            round: 0,
        }
    }

    /// Starts the first connector.
    pub(super) fn start(&mut self, wait: Duration, moment: &mut Moment<'_>) {
        self.connectors.push(SimConnector::default());
        self.schedule(0, Purpose::Connect, wait, moment);
    }

    /// Returns whether a session with this server takes new streams.
    pub(super) fn has_session(&self, server: usize) -> bool {
        self.servers().any(|own| own == server)
    }

    /// Returns the servers of all sessions that take new streams.
    pub(super) fn servers(&self) -> impl Iterator<Item = usize> {
        let sessions = self
            .connectors
            .iter()
            .filter_map(|one| one.session.as_ref());
        sessions.map(|session| session.server)
    }

    /// Dials, unless the plan is void.
    pub(super) fn handle_timer(&mut self, plan: Plan, moment: &mut Moment<'_>) {
        let is_addressed = self.is_addressed;
        let Some(connector) = self.connector(plan) else {
            return;
        };
        let DialState::Waiting(purpose) = connector.state else {
            return;
        };
        connector.state = DialState::Dialing(purpose);
        let is_own = purpose == Purpose::Move || connector.cursor.is_multiple_of(2);
        let address = match &connector.assigned {
            Some(replica) if is_addressed && is_own => Address::Own(replica.clone()),
            Some(_) | None => Address::Configured,
        };
        moment.effects.push(Effect::Dial { plan, address });
    }

    /// Handles the end of a dial without a session.
    pub(super) fn handle_failure(
        &mut self,
        plan: Plan,
        code: Option<CloseCode>,
        moment: &mut Moment<'_>,
    ) {
        let Some(connector) = self.connector(plan) else {
            return;
        };
        let DialState::Dialing(purpose) = connector.state else {
            return;
        };
        if purpose == Purpose::Move {
            return self.handle_failed_move(plan.connector, moment);
        }
        connector.cursor += 1;
        // A stopping server reveals nothing about the next one.
        let is_leaving = connector.session.as_ref().is_some_and(|one| one.is_leaving);
        let code = code.filter(|code| !(is_leaving && *code == CloseCode::Draining));
        let wait = connector.backoff.next(
            ReconnectEvent::Failed(code),
            moment.base + moment.now,
            moment.random.random(),
        );
        self.schedule(plan.connector, Purpose::Connect, wait, moment);
    }

    /// Handles a Welcome. Returns whether the session stays.
    pub(super) fn handle_welcome(
        &mut self,
        plan: Plan,
        server: usize,
        replica: &ReplicaId,
        moment: &mut Moment<'_>,
    ) -> bool {
        let own = plan.connector;
        let is_taken = self.connectors.iter().enumerate().any(|(index, other)| {
            let session = other.session.as_ref().filter(|one| !one.is_leaving);
            index != own && session.is_some_and(|session| session.replica == *replica)
        });
        let Some(connector) = self.connector(plan) else {
            return false;
        };
        let DialState::Dialing(purpose) = connector.state else {
            return false;
        };
        let is_other = purpose == Purpose::Move && connector.assigned.as_ref() != Some(replica);
        if purpose == Purpose::Move && (is_other || is_taken) {
            self.handle_failed_move(own, moment);
            return false;
        }
        if is_taken {
            connector.cursor += 1;
            self.handle_duplicate(own, moment);
            return false;
        }
        connector.state = DialState::Idle;
        connector.plans += 1;
        connector.search = ReplicaSearch::default();
        let session = SimSession {
            server,
            replica: replica.clone(),
            since: moment.now,
            is_leaving: false,
        };
        if let Some(old) = connector.session.replace(session) {
            let server = old.server;
            moment.effects.push(Effect::Withdraw { server });
        }
        true
    }

    /// Handles the loss of the session with a server.
    pub(super) fn handle_loss(&mut self, server: usize, moment: &mut Moment<'_>) {
        let Some(index) = self.connector_of(server) else {
            return;
        };
        let connector = &mut self.connectors[index];
        let Some(session) = connector.session.take() else {
            return;
        };
        let wait = connector.wait_after(session.since, CloseCode::Dead, moment);
        self.schedule(index, Purpose::Connect, wait, moment);
        self.reconcile(moment);
    }

    /// Handles the drain of a server, which asks its agents to move.
    pub(super) fn handle_drain(&mut self, server: usize, moment: &mut Moment<'_>) {
        let Some(index) = self.connector_of(server) else {
            return;
        };
        let connector = &mut self.connectors[index];
        let Some(session) = connector.session.as_mut().filter(|one| !one.is_leaving) else {
            return;
        };
        session.is_leaving = true;
        let since = session.since;
        connector.cursor += 1;
        let wait = connector.wait_after(since, CloseCode::Draining, moment)
            + drain_wait(MOVE_WITHIN, moment.random.random());
        self.schedule(index, Purpose::Connect, wait, moment);
        self.reconcile(moment);
    }

    /// Handles a list of members, and assigns replicas again if it is new or if `is_changed`, since
    /// the sessions have changed.
    pub(super) fn handle_members(
        &mut self,
        members: &Rc<[Member]>,
        is_changed: bool,
        moment: &mut Moment<'_>,
    ) {
        let is_new = !Rc::ptr_eq(&self.members, members) && self.members != *members;
        if is_new {
            self.members = members.clone();
            self.round += 1;
        }
        if is_new || is_changed {
            self.reconcile(moment);
        }
    }

    fn handle_failed_move(&mut self, index: usize, moment: &mut Moment<'_>) {
        let connector = &mut self.connectors[index];
        let wait = connector
            .search
            .next(connector.members, moment.random.random());
        match wait {
            Some(wait) => self.schedule(index, Purpose::Move, wait, moment),
            None => connector.stop_dialing(),
        }
    }

    fn handle_duplicate(&mut self, index: usize, moment: &mut Moment<'_>) {
        let is_addressed = self.is_addressed;
        let connector = &mut self.connectors[index];
        let is_addressed = is_addressed && connector.assigned.is_some();
        let wait = connector
            .search
            .next(connector.members, moment.random.random());
        match wait.or_else(|| is_addressed.then_some(ADDRESSED_INTERVAL)) {
            Some(wait) => self.schedule(index, Purpose::Connect, wait, moment),
            None => connector.stop_dialing(),
        }
    }

    /// Starts and retires connectors, and assigns replicas to them.
    fn reconcile(&mut self, moment: &mut Moment<'_>) {
        let (wanted, members) = {
            let members = self.known_members();
            let wanted = wanted_replicas(&self.node, &members, &ZoneDistances::default(), self.k);
            (wanted, members.len())
        };
        let busy = self.active().filter(|one| one.replica().is_some()).count();
        let count = wanted.len().max(busy).clamp(1, self.k);
        while self.active().count() > count && self.retire_connector(moment) {}
        while self.active().count() < count {
            self.connectors.push(SimConnector {
                round: self.round,
                ..SimConnector::default()
            });
            let wait = START_SPREAD.mul_f64(moment.random.random());
            let newest = self.connectors.len() - 1;
            self.schedule(newest, Purpose::Connect, wait, moment);
        }
        let current: Vec<_> = self.active().map(|one| one.replica().cloned()).collect();
        let mut assigned = assign_replicas(&wanted, &current).into_iter();
        for index in 0..self.connectors.len() {
            if self.connectors[index].is_retired {
                continue;
            }
            self.connectors[index].members = members;
            self.reassign(index, assigned.next().flatten(), moment);
        }
    }

    fn reassign(&mut self, index: usize, replica: Option<ReplicaId>, moment: &mut Moment<'_>) {
        let connector = &mut self.connectors[index];
        if connector.assigned != replica {
            connector.assigned = replica;
            connector.cursor = 0;
        }
        if std::mem::replace(&mut connector.round, self.round) != self.round {
            let was_over = std::mem::take(&mut connector.search).is_over();
            let is_idle = connector.state == DialState::Idle;
            if was_over && is_idle && connector.replica().is_none() {
                let wait = RESUME_SPREAD.mul_f64(moment.random.random());
                self.schedule(index, Purpose::Connect, wait, moment);
            }
        }
        self.plan_move(index, moment);
    }

    fn plan_move(&mut self, index: usize, moment: &mut Moment<'_>) {
        let connector = &mut self.connectors[index];
        let (own, assigned) = (connector.replica(), connector.assigned.as_ref());
        let is_elsewhere = own.is_some() && assigned.is_some() && own != assigned;
        let state = connector.state;
        if !is_elsewhere || !self.is_addressed {
            if state == DialState::Waiting(Purpose::Move) {
                connector.stop_dialing();
            }
        } else if state == DialState::Idle && !connector.search.is_over() {
            let wait = MOVE_SPREAD.mul_f64(moment.random.random());
            self.schedule(index, Purpose::Move, wait, moment);
        }
    }

    /// Retires the newest connector without a session whose server stays. Returns `false` if there
    /// is none.
    fn retire_connector(&mut self, moment: &mut Moment<'_>) -> bool {
        let mut idle = self.connectors.iter_mut().rev();
        let Some(connector) = idle.find(|one| !one.is_retired && one.replica().is_none()) else {
            return false;
        };
        connector.is_retired = true;
        connector.stop_dialing();
        if let Some(session) = connector.session.take() {
            let server = session.server;
            moment.effects.push(Effect::Withdraw { server });
        }
        true
    }

    /// Returns the reported members, and the replicas of the sessions.
    fn known_members(&self) -> Cow<'_, [Member]> {
        let mut members = Cow::Borrowed(&*self.members);
        for session in self
            .connectors
            .iter()
            .filter_map(|one| one.session.as_ref())
        {
            let position = members
                .iter()
                .position(|member| member.id == session.replica);
            match position {
                Some(position) if session.is_leaving && !members[position].is_leaving => {
                    members.to_mut()[position].is_leaving = true;
                }
                Some(_) => {}
                None => members.to_mut().push(Member {
                    id: session.replica.clone(),
                    addresses: Vec::new(),
                    is_leaving: session.is_leaving,
                    zone: None,
                }),
            }
        }
        members
    }

    fn active(&self) -> impl Iterator<Item = &SimConnector> {
        self.connectors.iter().filter(|one| !one.is_retired)
    }

    /// Returns the connector of a plan that is not void.
    fn connector(&mut self, plan: Plan) -> Option<&mut SimConnector> {
        let connector = self.connectors.get_mut(plan.connector)?;
        (connector.plans == plan.number).then_some(connector)
    }

    fn connector_of(&self, server: usize) -> Option<usize> {
        let mut connectors = self.connectors.iter();
        connectors.position(|one| {
            let session = one.session.as_ref();
            session.is_some_and(|session| session.server == server)
        })
    }

    /// Plans the next dial of a connector.
    fn schedule(
        &mut self,
        index: usize,
        purpose: Purpose,
        wait: Duration,
        moment: &mut Moment<'_>,
    ) {
        let connector = &mut self.connectors[index];
        connector.plans += 1;
        connector.state = DialState::Waiting(purpose);
        let plan = Plan {
            connector: index,
            number: connector.plans,
        };
        let at = moment.now + wait;
        moment.effects.push(Effect::Timer { plan, at });
    }
}

impl SimConnector {
    /// Returns the replica of the session, unless its server is stopping.
    fn replica(&self) -> Option<&ReplicaId> {
        let session = self.session.as_ref().filter(|session| !session.is_leaving);
        session.map(|session| &session.replica)
    }

    fn wait_after(
        &mut self,
        since: Duration,
        code: CloseCode,
        moment: &mut Moment<'_>,
    ) -> Duration {
        self.search = ReplicaSearch::default();
        let event = ReconnectEvent::Lost {
            ready_for: moment.now.saturating_sub(since),
            code,
        };
        self.backoff
            .next(event, moment.base + moment.now, moment.random.random())
    }

    fn stop_dialing(&mut self) {
        self.plans += 1;
        self.state = DialState::Idle;
    }
}
