//! The nodes that callers reach at each server.

use tunnel_proto::wire::name::ReplicaId;
use tunnel_routing::directory::LinkState;

use super::Simulation;
use crate::server::Phase;

impl Simulation {
    /// Checks whether callers at a server reach the nodes that another one had.
    pub(super) fn check_agents_of(&mut self, from: usize, to: usize) {
        let agents: Vec<usize> = self.servers[to].agents.keys().copied().collect();
        for agent in agents {
            self.check(from, agent);
        }
    }

    pub(super) fn check_everywhere(&mut self, agent: usize) {
        for server in 0..self.servers.len() {
            self.check(server, agent);
        }
    }

    /// Checks whether callers at a server reach a node.
    pub(super) fn check(&mut self, server: usize, agent: usize) {
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
        let link = |replica: &ReplicaId| {
            let to = links.get(replica)?;
            let is_suspect = self.servers[server].suspects.contains(to);
            Some(if is_suspect {
                LinkState::Suspect
            } else {
                LinkState::Live
            })
        };
        let directory = &self.servers[server].directory;
        let candidates = directory.candidates(&agent.node, link);
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
}
