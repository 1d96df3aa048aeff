//! Which server a connector holds: its assignment, moves, servers that another connector holds,
//! and servers that are stopping.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::wire::code::CloseCode;

use super::assigned::Assignment;
use super::attempt::DialPurpose;
use super::connector::{Connector, CurrentSession, Retry};
use super::shared::Shared;
use crate::connector::backoff::{
    ADDRESSED_INTERVAL, MOVE_SPREAD, RESUME_SPREAD, ReconnectEvent, drain_wait,
};
use crate::connector::endpoint::Endpoints;
use crate::connector::search::ReplicaSearch;

impl Connector {
    /// Adopts an assignment. A dial in progress continues, and its next round uses the new servers.
    pub(super) fn reassign(&mut self, assignment: Assignment, shared: &mut Shared, now: Instant) {
        if assignment == self.assignment {
            return;
        }
        let has_new_members = assignment.members_generation != self.assignment.members_generation;
        let has_new_losses = assignment.losses != self.assignment.losses;
        let has_new_replica = assignment.replica != self.assignment.replica;
        if !self.endpoints.is_of(&assignment.servers) {
            let servers = assignment.servers.clone();
            if self.needs_session() {
                // Claims of another connector change the servers as well, perhaps again and again.
                self.endpoints.replace(servers);
                if has_new_members || has_new_replica {
                    self.endpoints.restart_once();
                }
            } else if assignment.is_addressed() {
                self.endpoints = Endpoints::new(servers);
            } else {
                // The next dial for this session begins at its server.
                self.endpoints.replace(servers);
            }
        }
        if !self.move_endpoints.is_of(assignment.move_servers()) {
            self.move_endpoints = Endpoints::new(assignment.move_servers().into());
        }
        self.assignment = assignment;
        // A session that is lost again and again does not shorten the search of another connector.
        if has_new_members || (has_new_losses && self.search.is_over()) {
            let was_over = std::mem::take(&mut self.search).is_over();
            let is_over = match self.retry {
                None => was_over,
                Some(retry) => has_new_members && retry.may_end_early,
            };
            if is_over && !self.is_dialing() && self.needs_session() {
                self.backoff.restart();
                let resume_at = now + RESUME_SPREAD.mul_f64(shared.random());
                self.retry = Some(Retry {
                    at: self
                        .retry
                        .map_or(resume_at, |retry| retry.at.min(resume_at)),
                    may_end_early: true,
                });
            }
        }
        if (has_new_members || has_new_losses) && self.refresh_search.is_over() {
            self.refresh_search = ReplicaSearch::default();
            self.refresh_at = Some(now + RESUME_SPREAD.mul_f64(shared.random()));
        }
        self.plan_move(shared, now);
    }

    /// Selects the server at which the next dial begins after one that gave the current session.
    /// That is the assigned server's own address if the session is with that server, and
    /// otherwise the address that was dialed.
    pub(super) fn record_position(&mut self, dialed: Endpoints) {
        let assigned = self.assignment.replica.as_ref();
        let is_assigned = self
            .current
            .as_ref()
            .is_some_and(|current| Some(&current.replica) == assigned);
        if is_assigned && self.assignment.is_addressed() {
            self.endpoints = self.endpoints.restarted();
        } else {
            self.endpoints.record_ready(dialed);
        }
    }

    fn needs_session(&self) -> bool {
        self.current
            .as_ref()
            .is_none_or(CurrentSession::needs_replacement)
    }

    /// Schedules the dial of the servers to move to if the current session is with none of them. The
    /// set assigns only servers that no other connector holds.
    pub(super) fn plan_move(&mut self, shared: &mut Shared, now: Instant) {
        let targets = self.assignment.move_targets();
        let is_elsewhere = self.current.as_ref().is_some_and(|current| {
            let is_target = targets.contains(&current.replica);
            !current.needs_replacement() && !targets.is_empty() && !is_target
        });
        if !is_elsewhere {
            self.move_at = None;
        } else if self.move_at.is_none() && !self.search.is_over() && !self.is_moving() {
            self.move_at = Some(now + MOVE_SPREAD.mul_f64(shared.random()));
        }
    }

    /// Schedules another dial of the assigned server, unless the search is over.
    pub(super) fn retry_move(&mut self, shared: &mut Shared, now: Instant) {
        let wait = self.search.next(self.assignment.members, shared.random());
        self.move_at = wait.map(|wait| now + wait);
    }

    fn is_moving(&self) -> bool {
        self.attempt
            .as_ref()
            .is_some_and(|attempt| attempt.purpose == DialPurpose::Move)
    }

    /// Handles a dial that reached a server of another connector. The load balancer may choose
    /// another server next time. The search for a server with an address of its own never ends,
    /// since a path to it may be back without a change of the members.
    pub(super) fn handle_duplicate(&mut self, shared: &mut Shared, now: Instant) {
        let members = self.assignment.members;
        let wait = self.search.next(members, shared.random());
        let is_addressed = self.assignment.is_addressed();
        let wait = wait.or_else(|| is_addressed.then_some(ADDRESSED_INTERVAL));
        self.retry = wait.map(|wait| Retry {
            at: now + wait,
            may_end_early: true,
        });
        "each server that answers has a session of this agent".clone_into(&mut self.missing_reason);
        if wait.is_none() {
            shared.log.search_over(members);
        }
    }

    /// Returns when to dial again with newer credentials after a dial that reached a server of
    /// another connector, or `None` when the search is over. Then the session goes on with its
    /// older credentials, until the server closes it or a dial may reach another server.
    pub(super) fn next_refresh(&mut self, shared: &mut Shared, now: Instant) -> Option<Instant> {
        let members = self.assignment.members;
        let wait = self.refresh_search.next(members, shared.random());
        if wait.is_none() {
            shared.log.refresh_over(members);
        }
        wait.map(|wait| now + wait)
    }

    /// Handles the drain of the current session's server. Another session is dialed until one is
    /// ready, and the current one takes new streams until then. The dial may go to the same
    /// address, where another server answers by then.
    pub(super) fn handle_server_drain(
        &mut self,
        move_within: Duration,
        shared: &mut Shared,
        now: Instant,
    ) {
        let Some(current) = self.current.as_mut().filter(|current| !current.draining) else {
            return;
        };
        current.draining = true;
        shared.is_changed = true;
        self.move_at = None;
        if current.suspect {
            // Another session is already being dialed.
            return;
        }
        let event = ReconnectEvent::Lost {
            ready_for: now.duration_since(current.since),
            code: CloseCode::Draining,
        };
        let is_assigned = Some(&current.replica) == self.assignment.replica.as_ref();
        self.abandon(shared);
        if is_assigned || !self.assignment.is_addressed() {
            // With several servers, do not start with this one.
            self.endpoints.failed();
        } else {
            self.endpoints = self.endpoints.restarted();
        }
        self.retry_after(event, shared, now);
        if let Some(retry) = &mut self.retry {
            retry.at += drain_wait(move_within, shared.random());
        }
    }
}
