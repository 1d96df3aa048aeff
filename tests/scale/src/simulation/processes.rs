//! Servers that start, become ready, drain and end.

use anyhow::Result;
use rand::RngExt as _;

use super::{Change, Event, Simulation};
use crate::model::{
    ENDPOINTS_DELAY, HOST_LOST_AFTER, ONE_WAY, PEER_DEAD, PEER_RETRY, PEER_SUSPECT, READY_AFTER,
    SUSPECT_MAX, SUSPECT_MIN, ScaleCase,
};
use crate::server::{Phase, SimServer};

impl Simulation {
    pub(super) fn create_server(&mut self, again: Option<usize>) -> Result<usize> {
        let server = self.servers.len();
        let id = match again {
            Some(earlier) => self.servers[earlier].id.clone(),
            None => format!("tunnel-server-{server}").parse()?,
        };
        self.newest.insert(id.clone(), server);
        if let Some(zone) = self.options.case.zone(server, self.options.replicas) {
            self.zones
                .insert(id.clone(), format!("zone-{zone}").parse()?);
        }
        self.servers.push(SimServer::new(id, self.options.nodes));
        Ok(server)
    }

    /// Starts a server, which connects to the others. The others dial a known one at growing
    /// intervals.
    pub(super) fn start_server(&mut self, again: Option<usize>) -> Result<()> {
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

    pub(super) fn make_ready(&mut self, server: usize) {
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

    pub(super) fn drain(&mut self, server: usize) {
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

    pub(super) fn stop_calls(&mut self, server: usize) {
        let stopped = &mut self.servers[server];
        stopped.takes_calls = false;
        for (node, unreachable) in stopped.unreachable.iter_mut().enumerate() {
            self.measures
                .record_reachability(unreachable, node, true, self.now);
        }
    }

    /// Ends the process of a server.
    pub(super) fn end(&mut self, server: usize, phase: Phase) {
        self.stop_calls(server);
        let was_leaving = self.servers[server].phase == Phase::Leaving;
        self.servers[server].phase = phase;
        self.servers[server].clear();
        let is_silent = phase == Phase::Silent;
        for from in 0..self.servers.len() {
            if is_silent {
                self.after(PEER_SUSPECT, Event::LinkSuspect { from, to: server });
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
}
