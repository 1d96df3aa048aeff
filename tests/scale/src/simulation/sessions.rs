//! Sessions of agents: dials, handshakes and Welcome.

use std::time::Duration;

use rand::RngExt as _;
use tunnel_proto::wire::code::CloseCode;

use super::{Event, Simulation};
use crate::agent::{Address, Plan};
use crate::model::{ADMISSION, BATCH, HANDSHAKE_TIMEOUT, ONE_WAY, POLL};
use crate::server::{Phase, SimDial};

impl Simulation {
    pub(super) fn dial(&mut self, agent: usize, plan: Plan, address: &Address) {
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

    pub(super) fn arrive(&mut self, dial: SimDial) {
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

    pub(super) fn complete(&mut self, server: usize) {
        if let Some(dial) = self.servers[server].complete_handshake(self.now) {
            self.after(ADMISSION, Event::Welcome(dial));
        }
        if self.servers[server].is_busy {
            self.after(self.service_time(), Event::Complete { server });
        }
    }

    pub(super) fn welcome(&mut self, dial: SimDial) {
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
    pub(super) fn withdraw(&mut self, agent: usize, server: usize) {
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
}
