//! The event queue of a run, and what each event does.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio::time::Instant;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId, ZoneName};

use super::agent::{Effect, Moment, Plan, SimAgent};
use super::measures::{Measures, ScaleReport, entry_bytes};
use super::model::{
    DRAIN_DELAY, DRAIN_TIMEOUT, READY_AFTER, RESTART_AFTER, ROLLOUT_STEP, RUN_MAX, START_WITHIN,
    ScaleCase, ScaleOptions, zone_size,
};
use super::server::{Phase, SimDial, SimServer};

mod announcements;
mod processes;
mod reachability;
mod sessions;

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
    /// The zones that the servers know.
    zones: BTreeMap<ReplicaId, ZoneName>,
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
    /// A server has not heard from another one for a while.
    LinkSuspect {
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
            zones: BTreeMap::new(),
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
            ScaleCase::ZoneLost | ScaleCase::UnknownZoneLost => {
                for server in 0..zone_size(replicas) {
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
            Event::LinkSuspect { from, to } => {
                self.servers[from].suspects.insert(to);
                self.check_agents_of(from, to);
            }
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
        let has_session = sessions
            .iter()
            .any(|server| self.servers[*server].phase.is_up());
        self.measures.record_session(agent, has_session, self.now);
        self.measures
            .record_completeness(agent, is_complete, self.now);
    }

    /// Returns the clock of the servers.
    fn wall_clock(&self) -> SystemTime {
        UNIX_EPOCH + EPOCH + self.now
    }
}

/// Time zero of the servers' clock.
const EPOCH: Duration = Duration::from_secs(1_800_000_000);
