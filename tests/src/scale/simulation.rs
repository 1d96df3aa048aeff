//! The event queue of a run, and what each event does.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use bytes::BytesMut;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::Instant;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};
use tunnel_proto::wire::peer::{Holds, PeerMessage};

use super::agent::{Address, Effect, Moment, Plan, SimAgent};
use super::measures::{Measures, ScaleReport, entry_bytes};
use super::model::{
    ADMISSION, BATCH, DRAIN_DELAY, DRAIN_TIMEOUT, ENDPOINTS_DELAY, HANDSHAKE_TIMEOUT,
    HOST_LOST_AFTER, LIST_LINGER, ONE_WAY, PEER_DEAD, PEER_DELAY, PEER_RETRY, POLL, READY_AFTER,
    RESTART_AFTER, ROLLOUT_STEP, RUN_MAX, START_WITHIN, SUSPECT_MAX, SUSPECT_MIN, ScaleCase,
    ScaleOptions,
};
use super::server::{Phase, SimDial, SimServer};

pub(super) struct Simulation {
    options: ScaleOptions,
    base: Instant,
    now: Duration,
    random: SmallRng,
    queue: BTreeMap<(Duration, u64), Event>,
    events: u64,
    agents: Vec<SimAgent>,
    /// All processes, also those that have ended.
    servers: Vec<SimServer>,
    /// The newest process of each name.
    newest: BTreeMap<ReplicaId, usize>,
    /// The servers of the load balancer.
    endpoints: Vec<ReplicaId>,
    /// Lists of members that servers reported. Agents compare them often, mostly with themselves.
    lists: Vec<Rc<[Member]>>,
    measures: Measures,
}

#[derive(Debug)]
enum Event {
    /// Timer of an agent.
    Timer {
        agent: usize,
        plan: Plan,
    },
    /// A dial arrives at its server.
    Arrive(SimDial),
    /// A server completes a handshake.
    Complete {
        server: usize,
    },
    /// An agent receives Welcome.
    Welcome(SimDial),
    /// An agent learns that a dial has failed.
    Fail {
        dial: SimDial,
        code: Option<CloseCode>,
    },
    /// An agent notices that a session is lost.
    Lose {
        agent: usize,
        server: usize,
    },
    /// An agent receives Drain.
    Drain {
        agent: usize,
        server: usize,
    },
    /// The agents of a server receive its list of members.
    Members {
        server: usize,
    },
    /// A server announces changes.
    Announce {
        server: usize,
    },
    LinkUp {
        from: usize,
        to: usize,
    },
    LinkDown {
        from: usize,
        to: usize,
    },
    /// A server drops the list of another one.
    Expire {
        from: usize,
        to: usize,
    },
    /// The load balancer learns that a server is not ready.
    RemoveEndpoint {
        server: usize,
    },
    Change(Change),
}

/// A step of a case.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// Ends the process of a server; its host resets connections.
    Kill {
        server: usize,
    },
    /// Ends a server with its host.
    Lose {
        server: usize,
    },
    /// Starts a server, with the name of an earlier one or with a new one.
    Start {
        again: Option<usize>,
    },
    Ready {
        server: usize,
    },
    Drain {
        server: usize,
    },
    /// Callers no longer reach a server that drains.
    StopCalls {
        server: usize,
    },
}

impl Simulation {
    /// Creates the servers, connected to each other, and agents that have not started.
    ///
    /// # Errors
    /// Returns an error if a name is none.
    pub(super) fn new(options: &ScaleOptions) -> Result<Self> {
        let mut random = SmallRng::seed_from_u64(options.seed);
        let is_addressed = options.case != ScaleCase::RandomPlacement;
        let mut agents = Vec::with_capacity(options.nodes);
        for number in 0..options.nodes {
            let node: NodeName = format!("edge-{number:06}.example.com").parse()?;
            let instance = InstanceId::new(random.random());
            agents.push(SimAgent::new(node, instance, options.k, is_addressed));
        }
        let mut simulation = Self {
            options: options.clone(),
            base: Instant::now(),
            now: Duration::ZERO,
            random,
            queue: BTreeMap::new(),
            events: 0,
            agents,
            servers: Vec::new(),
            newest: BTreeMap::new(),
            endpoints: Vec::new(),
            lists: Vec::new(),
            measures: Measures::new(options),
        };
        for _ in 0..options.replicas {
            simulation.create_server(None)?;
        }
        for from in 0..options.replicas {
            for to in (0..options.replicas).filter(|to| *to != from) {
                let id = simulation.servers[to].id.clone();
                simulation.servers[from].known.insert(id.clone(), false);
                simulation.servers[from].links.insert(id, to);
            }
            simulation.publish(from);
            simulation.make_ready(from);
        }
        Ok(simulation)
    }

    /// Starts all agents.
    pub(super) fn start_agents(&mut self) {
        for agent in 0..self.agents.len() {
            let wait = START_WITHIN.mul_f64(self.random.random());
            self.with_agent(agent, |agent, moment| agent.start(wait, moment));
        }
    }

    /// Schedules the event of the case, and measures from now on.
    pub(super) fn begin_case(&mut self) {
        let replicas = self.options.replicas;
        self.measures.restart(self.now);
        match self.options.case {
            ScaleCase::ColdStart | ScaleCase::RandomPlacement => {}
            ScaleCase::ReplicaKilled => {
                self.change_after(Duration::ZERO, Change::Kill { server: 0 });
            }
            ScaleCase::ReplicaLost => self.change_after(Duration::ZERO, Change::Lose { server: 0 }),
            ScaleCase::ZoneLost => {
                for server in 0..(replicas / 3).max(1) {
                    self.change_after(Duration::ZERO, Change::Lose { server });
                }
            }
            ScaleCase::RollingRestart => {
                let mut start = Duration::ZERO;
                for server in 0..replicas {
                    let drain = start + READY_AFTER;
                    self.change_after(start, Change::Start { again: None });
                    self.change_after(drain, Change::Drain { server });
                    self.change_after(drain + DRAIN_DELAY, Change::StopCalls { server });
                    self.change_after(drain + DRAIN_TIMEOUT, Change::Kill { server });
                    start += ROLLOUT_STEP;
                }
            }
            ScaleCase::ApiServerAway => {
                self.change_after(Duration::ZERO, Change::Kill { server: 0 });
                self.change_after(RESTART_AFTER, Change::Start { again: Some(0) });
            }
        }
    }

    /// Runs until nothing is left to do.
    ///
    /// # Errors
    /// Returns an error if a message cannot be encoded.
    pub(super) fn run(&mut self) -> Result<()> {
        let end = self.now + RUN_MAX;
        while let Some(((at, _), event)) = self.queue.pop_first() {
            self.now = at;
            if at > end {
                break;
            }
            self.handle(event)?;
        }
        Ok(())
    }

    pub(super) fn report(&self) -> ScaleReport {
        let staying = self
            .servers
            .iter()
            .filter(|server| server.phase == Phase::Ready);
        let sessions: Vec<_> = staying.clone().map(|server| server.agents.len()).collect();
        let bytes = staying.map(|server| entry_bytes(&server.directory));
        self.measures.report(&sessions, bytes.fold(0.0, f64::max))
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Timer { agent, plan } => {
                self.with_agent(agent, |agent, moment| agent.handle_timer(plan, moment));
            }
            Event::Arrive(dial) => self.arrive(dial),
            Event::Complete { server } => self.complete(server),
            Event::Welcome(dial) => self.welcome(dial),
            Event::Fail { dial, code } => {
                let plan = dial.plan;
                self.with_agent(dial.agent, |agent, moment| {
                    agent.handle_failure(plan, code, moment);
                });
            }
            Event::Lose { agent, server } => {
                self.with_agent(agent, |agent, moment| agent.handle_loss(server, moment));
            }
            Event::Drain { agent, server } => {
                self.with_agent(agent, |agent, moment| agent.handle_drain(server, moment));
            }
            Event::Members { server } => self.report_members(server),
            Event::Announce { server } => self.announce(server)?,
            Event::LinkUp { from, to } => self.link_up(from, to)?,
            Event::LinkDown { from, to } => self.link_down(from, to),
            Event::Expire { from, to } => self.expire(from, to),
            Event::RemoveEndpoint { server } => {
                let id = &self.servers[server].id;
                self.endpoints.retain(|endpoint| endpoint != id);
            }
            Event::Change(change) => self.change(change)?,
        }
        Ok(())
    }

    fn change(&mut self, change: Change) -> Result<()> {
        match change {
            Change::Kill { server } => self.end(server, Phase::Ended),
            Change::Lose { server } => self.end(server, Phase::Silent),
            Change::Start { again } => self.start_server(again)?,
            Change::Ready { server } => self.make_ready(server),
            Change::Drain { server } => self.drain(server),
            Change::StopCalls { server } => self.stop_calls(server),
        }
        Ok(())
    }

    fn at(&mut self, at: Duration, event: Event) {
        self.events += 1;
        self.queue.insert((at, self.events), event);
    }

    fn after(&mut self, wait: Duration, event: Event) {
        self.at(self.now + wait, event);
    }

    fn change_after(&mut self, wait: Duration, change: Change) {
        self.after(wait, Event::Change(change));
    }

    /// Lets an agent handle an event, and does what it starts.
    fn with_agent<T>(
        &mut self,
        index: usize,
        handle: impl FnOnce(&mut SimAgent, &mut Moment<'_>) -> T,
    ) -> T {
        let mut moment = Moment {
            now: self.now,
            base: self.base,
            random: &mut self.random,
            effects: Vec::new(),
        };
        let result = handle(&mut self.agents[index], &mut moment);
        for effect in moment.effects {
            match effect {
                Effect::Timer { plan, at } => self.at(at, Event::Timer { agent: index, plan }),
                Effect::Dial { plan, address } => self.dial(index, plan, &address),
                Effect::Withdraw { server } => self.withdraw(index, server),
            }
        }
        self.check_completeness(index);
        result
    }

    fn check_completeness(&mut self, agent: usize) {
        let ready = self
            .servers
            .iter()
            .filter(|server| server.phase == Phase::Ready);
        let wanted = self.options.k.min(ready.count());
        let sessions: BTreeSet<usize> = self.agents[agent].servers().collect();
        let staying = sessions
            .iter()
            .filter(|server| self.servers[**server].phase.is_staying());
        let is_complete = staying.count() >= wanted;
        self.measures
            .record_completeness(agent, is_complete, self.now);
    }

    fn dial(&mut self, agent: usize, plan: Plan, address: &Address) {
        self.measures.dials += 1;
        let replica = match address {
            Address::Own(replica) => Some(replica),
            Address::Configured if self.endpoints.is_empty() => None,
            Address::Configured => {
                let index = self.random.random_range(0..self.endpoints.len());
                Some(&self.endpoints[index])
            }
        };
        let server = replica
            .and_then(|replica| self.newest.get(replica))
            .copied();
        let gives_up_at = self.now + HANDSHAKE_TIMEOUT;
        let dial = SimDial {
            agent,
            plan,
            server: server.unwrap_or(0),
            gives_up_at,
        };
        if server.is_some() {
            self.after(ONE_WAY, Event::Arrive(dial));
        }
        self.at(gives_up_at, Event::Fail { dial, code: None });
    }

    fn arrive(&mut self, dial: SimDial) {
        let server = &mut self.servers[dial.server];
        let phase = server.phase;
        let code = match phase {
            // The agent waits until it gives up.
            Phase::Silent => return,
            Phase::Ended => None,
            Phase::Leaving => Some(CloseCode::Draining),
            Phase::Starting | Phase::Ready => {
                if server.queue_handshake(dial, self.now) {
                    if !std::mem::replace(&mut server.is_busy, true) {
                        let server = dial.server;
                        self.after(self.service_time(), Event::Complete { server });
                    }
                    return;
                }
                self.measures.refused += 1;
                None
            }
        };
        self.after(ONE_WAY, Event::Fail { dial, code });
    }

    fn service_time(&self) -> Duration {
        Duration::from_secs(1) / self.options.handshakes_per_second
    }

    fn complete(&mut self, server: usize) {
        if let Some(dial) = self.servers[server].complete_handshake(self.now) {
            self.after(ADMISSION, Event::Welcome(dial));
        }
        if self.servers[server].is_busy {
            self.after(self.service_time(), Event::Complete { server });
        }
    }

    fn welcome(&mut self, dial: SimDial) {
        let server = dial.server;
        let code = match self.servers[server].phase {
            Phase::Starting | Phase::Ready => None,
            Phase::Leaving => Some(CloseCode::Draining),
            Phase::Ended | Phase::Silent => return,
        };
        if code.is_some() {
            return self.after(Duration::ZERO, Event::Fail { dial, code });
        }
        let replica = self.servers[server].id.clone();
        let stays = self.with_agent(dial.agent, |agent, moment| {
            agent.handle_welcome(dial.plan, server, &replica, moment)
        });
        if !stays {
            return;
        }
        self.measures.record_move(self.now);
        let since = self.wall_clock();
        self.servers[server].agents.insert(dial.agent, since);
        self.announce_change(dial.agent, server, BATCH);
        let members = self.servers[server].members.clone();
        self.with_agent(dial.agent, |agent, moment| {
            agent.handle_members(&members, true, moment);
        });
        self.check(server, dial.agent);
    }

    /// Ends the session of an agent that has replaced it.
    fn withdraw(&mut self, agent: usize, server: usize) {
        // The others remember what a server had when it ended.
        if !self.servers[server].phase.is_up() {
            return;
        }
        self.servers[server].agents.remove(&agent);
        let since_poll = self.now.as_secs_f64() % POLL.as_secs_f64();
        let until_poll = POLL.saturating_sub(Duration::from_secs_f64(since_poll));
        self.announce_change(agent, server, until_poll);
        self.check_everywhere(agent);
    }

    /// Announces a change of an agent after `wait`, or with an earlier one.
    fn announce_change(&mut self, agent: usize, server: usize, wait: Duration) {
        let at = self.now + wait + PEER_DELAY;
        let changed = &mut self.servers[server];
        changed.changed.insert(agent);
        if changed.announce_at.is_none_or(|earlier| at < earlier) {
            changed.announce_at = Some(at);
            self.at(at, Event::Announce { server });
        }
    }

    fn announce(&mut self, server: usize) -> Result<()> {
        let announcing = &mut self.servers[server];
        if announcing.announce_at != Some(self.now) || !announcing.phase.is_up() {
            return Ok(());
        }
        let (messages, changed) = announcing.take_changes(&self.agents);
        let id = announcing.id.clone();
        let receivers: Vec<usize> = (0..self.servers.len())
            .filter(|other| self.servers[*other].links.get(&id) == Some(&server))
            .collect();
        for holds in messages {
            let bytes = encoded_len(&holds)?;
            self.measures
                .record_message(bytes, receivers.len(), self.now);
            for receiver in &receivers {
                let directory = &mut self.servers[*receiver].directory;
                directory.apply(&id, holds.added.clone(), &holds.removed);
            }
        }
        for agent in changed {
            self.check_everywhere(agent);
        }
        Ok(())
    }

    fn link_up(&mut self, from: usize, to: usize) -> Result<()> {
        if !self.servers[from].phase.is_up() || !self.servers[to].phase.is_up() {
            return Ok(());
        }
        let id = self.servers[to].id.clone();
        let is_leaving = self.servers[to].phase == Phase::Leaving;
        let list = self.servers[to].full_list(&self.agents);
        for holds in &list {
            self.measures
                .record_message(encoded_len(holds)?, 1, self.now);
        }
        let server = &mut self.servers[from];
        server.links.insert(id.clone(), to);
        server.known.insert(id.clone(), is_leaving);
        server.directory.begin(&id);
        for holds in list {
            server.directory.apply(&id, holds.added, &holds.removed);
        }
        if is_leaving {
            server.directory.set_leaving(&id);
        }
        self.publish(from);
        self.check_agents_of(from, to);
        Ok(())
    }

    fn link_down(&mut self, from: usize, to: usize) {
        let id = self.servers[to].id.clone();
        if self.servers[from].links.get(&id) == Some(&to) {
            self.servers[from].links.remove(&id);
            self.after(LIST_LINGER, Event::Expire { from, to });
            self.check_agents_of(from, to);
        }
    }

    fn expire(&mut self, from: usize, to: usize) {
        let id = self.servers[to].id.clone();
        let server = &mut self.servers[from];
        if !server.phase.is_up() || server.links.contains_key(&id) {
            return;
        }
        server.directory.remove_replica(&id);
        server.known.remove(&id);
        self.publish(from);
        self.check_agents_of(from, to);
    }

    /// Sends the members that a server knows to its agents, if they have changed. A leaving server
    /// reports none, since its view is not that of the others.
    fn publish(&mut self, server: usize) {
        let is_shared = self.options.case == ScaleCase::RandomPlacement;
        let members = self.servers[server].list_members(|id| {
            let host = if is_shared { "servers" } else { id.as_str() };
            vec![format!("{host}.example.com:10262")]
        });
        let known = self
            .lists
            .iter()
            .rev()
            .find(|list| ***list == *members)
            .cloned();
        let list = known.unwrap_or_else(|| {
            let list: Rc<[Member]> = members.into();
            self.lists.push(list.clone());
            list
        });
        let reporting = &mut self.servers[server];
        if !Rc::ptr_eq(&reporting.members, &list) {
            reporting.members = list;
            if reporting.phase.is_staying() {
                self.after(ONE_WAY, Event::Members { server });
            }
        }
    }

    fn report_members(&mut self, server: usize) {
        let members = self.servers[server].members.clone();
        let agents: Vec<usize> = self.servers[server].agents.keys().copied().collect();
        for agent in agents {
            self.with_agent(agent, |agent, moment| {
                agent.handle_members(&members, false, moment);
            });
        }
    }

    fn create_server(&mut self, again: Option<usize>) -> Result<usize> {
        let server = self.servers.len();
        let id = match again {
            Some(earlier) => self.servers[earlier].id.clone(),
            None => format!("tunnel-server-{server}").parse()?,
        };
        self.newest.insert(id.clone(), server);
        self.servers.push(SimServer::new(id, self.options.nodes));
        Ok(server)
    }

    /// Starts a server, which connects to the others. The others dial a known one at growing
    /// intervals.
    fn start_server(&mut self, again: Option<usize>) -> Result<()> {
        let server = self.create_server(again)?;
        let dialed_after = if again.is_some() {
            PEER_RETRY
        } else {
            ENDPOINTS_DELAY
        };
        for other in 0..server {
            if self.servers[other].phase.is_up() {
                self.after(
                    ENDPOINTS_DELAY,
                    Event::LinkUp {
                        from: server,
                        to: other,
                    },
                );
                self.after(
                    dialed_after,
                    Event::LinkUp {
                        from: other,
                        to: server,
                    },
                );
            }
        }
        self.publish(server);
        self.change_after(READY_AFTER, Change::Ready { server });
        Ok(())
    }

    fn make_ready(&mut self, server: usize) {
        let ready = &mut self.servers[server];
        ready.phase = Phase::Ready;
        ready.takes_calls = true;
        let id = ready.id.clone();
        if !self.endpoints.contains(&id) {
            self.endpoints.push(id);
        }
        for agent in 0..self.agents.len() {
            self.check(server, agent);
        }
    }

    fn drain(&mut self, server: usize) {
        self.servers[server].phase = Phase::Leaving;
        let id = self.servers[server].id.clone();
        for other in 0..self.servers.len() {
            if self.servers[other].links.get(&id) == Some(&server) {
                self.servers[other].directory.set_leaving(&id);
                self.servers[other].known.insert(id.clone(), true);
                self.publish(other);
            }
        }
        let agents: Vec<usize> = self.servers[server].agents.keys().copied().collect();
        for agent in agents {
            self.after(ONE_WAY, Event::Drain { agent, server });
        }
        self.after(ENDPOINTS_DELAY, Event::RemoveEndpoint { server });
    }

    fn stop_calls(&mut self, server: usize) {
        let stopped = &mut self.servers[server];
        stopped.takes_calls = false;
        for (node, unreachable) in stopped.unreachable.iter_mut().enumerate() {
            self.measures
                .record_reachability(unreachable, node, true, self.now);
        }
    }

    /// Ends the process of a server.
    fn end(&mut self, server: usize, phase: Phase) {
        self.stop_calls(server);
        let was_leaving = self.servers[server].phase == Phase::Leaving;
        self.servers[server].phase = phase;
        self.servers[server].clear();
        let is_silent = phase == Phase::Silent;
        for from in 0..self.servers.len() {
            if is_silent {
                self.after(PEER_DEAD, Event::LinkDown { from, to: server });
            } else {
                self.link_down(from, server);
            }
        }
        let agents: Vec<usize> = self.servers[server].agents.keys().copied().collect();
        for agent in agents {
            let wait = if is_silent {
                let spread = (SUSPECT_MAX - SUSPECT_MIN).mul_f64(self.random.random());
                SUSPECT_MIN + spread
            } else {
                ONE_WAY
            };
            self.after(wait, Event::Lose { agent, server });
            self.check_everywhere(agent);
            self.check_completeness(agent);
        }
        if !was_leaving && self.options.case != ScaleCase::ApiServerAway {
            let wait = if is_silent {
                HOST_LOST_AFTER
            } else {
                ENDPOINTS_DELAY
            };
            self.after(wait, Event::RemoveEndpoint { server });
        }
    }

    /// Checks whether callers at a server reach the nodes that another one had.
    fn check_agents_of(&mut self, from: usize, to: usize) {
        let agents: Vec<usize> = self.servers[to].agents.keys().copied().collect();
        for agent in agents {
            self.check(from, agent);
        }
    }

    fn check_everywhere(&mut self, agent: usize) {
        for server in 0..self.servers.len() {
            self.check(server, agent);
        }
    }

    /// Checks whether callers at a server reach a node.
    fn check(&mut self, server: usize, agent: usize) {
        if !self.servers[server].takes_calls {
            return;
        }
        let is_reachable = self.is_reachable(server, agent);
        let unreachable = &mut self.servers[server].unreachable[agent];
        self.measures
            .record_reachability(unreachable, agent, is_reachable, self.now);
    }

    fn is_reachable(&self, server: usize, agent: usize) -> bool {
        let agent = &self.agents[agent];
        if agent.has_session(server) {
            return true;
        }
        let links = &self.servers[server].links;
        let is_linked = |replica: &ReplicaId| links.contains_key(replica);
        let directory = &self.servers[server].directory;
        let candidates = directory.candidates(&agent.node, None, is_linked);
        for holder in candidates.iter().filter_map(|replica| links.get(replica)) {
            match self.servers[*holder].phase {
                // The stream opens, and gets no reply.
                Phase::Silent => return false,
                Phase::Starting | Phase::Ready | Phase::Leaving if agent.has_session(*holder) => {
                    return true;
                }
                // Refuses with `not_here`, or the connection ends.
                Phase::Starting | Phase::Ready | Phase::Leaving | Phase::Ended => {}
            }
        }
        false
    }

    /// Returns the clock of the servers.
    fn wall_clock(&self) -> SystemTime {
        UNIX_EPOCH + EPOCH + self.now
    }
}

/// Returns the size of an announcement on the wire, without TLS.
fn encoded_len(holds: &Holds) -> Result<usize> {
    let mut encoded = BytesMut::new();
    PeerMessage::Holds(holds.clone()).encode(&mut encoded)?;
    Ok(encoded.len())
}

/// Time zero of the servers' clock.
const EPOCH: Duration = Duration::from_secs(1_800_000_000);
