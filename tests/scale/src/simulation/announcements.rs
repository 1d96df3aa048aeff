//! Connections between servers: the members that they learn and the announcements that they send.

use std::rc::Rc;
use std::time::Duration;

use anyhow::Result;
use bytes::BytesMut;
use tunnel_proto::wire::control::{Member, Message as _};
use tunnel_proto::wire::name::ReplicaId;
use tunnel_proto::wire::peer::{Holds, PeerMessage};

use super::{Event, Simulation};
use crate::model::{LIST_LINGER, ONE_WAY, PEER_DELAY, ScaleCase};
use crate::server::Phase;

impl Simulation {
    /// Announces a change of an agent after `wait`, or with an earlier one.
    pub(super) fn announce_change(&mut self, agent: usize, server: usize, wait: Duration) {
        let at = self.now + wait + PEER_DELAY;
        let changed = &mut self.servers[server];
        changed.changed.insert(agent);
        if changed.announce_at.is_none_or(|earlier| at < earlier) {
            changed.announce_at = Some(at);
            self.at(at, Event::Announce { server });
        }
    }

    pub(super) fn announce(&mut self, server: usize) -> Result<()> {
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

    pub(super) fn link_up(&mut self, from: usize, to: usize) -> Result<()> {
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
        server.directory.complete(&id);
        if is_leaving {
            server.directory.set_leaving(&id);
        }
        self.publish(from);
        self.check_agents_of(from, to);
        Ok(())
    }

    pub(super) fn link_down(&mut self, from: usize, to: usize) {
        let id = self.servers[to].id.clone();
        if self.servers[from].links.get(&id) == Some(&to) {
            self.servers[from].links.remove(&id);
            self.after(LIST_LINGER, Event::Expire { from, to });
            self.check_agents_of(from, to);
        }
    }

    pub(super) fn expire(&mut self, from: usize, to: usize) {
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
    pub(super) fn publish(&mut self, server: usize) {
        let is_shared = self.options.case == ScaleCase::RandomPlacement;
        let addresses = |id: &ReplicaId| {
            let host = if is_shared { "servers" } else { id.as_str() };
            vec![format!("{host}.example.com:10262")]
        };
        let zone = |id: &ReplicaId| self.zones.get(id).cloned();
        let members = self.servers[server].list_members(addresses, zone);
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

    pub(super) fn report_members(&mut self, server: usize) {
        let members = self.servers[server].members.clone();
        let agents: Vec<usize> = self.servers[server].agents.keys().copied().collect();
        for agent in agents {
            self.with_agent(agent, |agent, moment| {
                agent.handle_members(&members, false, moment);
            });
        }
    }
}

/// Returns the size of an announcement on the wire, without TLS.
fn encoded_len(holds: &Holds) -> Result<usize> {
    let mut encoded = BytesMut::new();
    PeerMessage::Holds(holds.clone()).encode(&mut encoded)?;
    Ok(encoded.len())
}
