//! Which replica a connector holds: its assignment, moves, replicas that another connector holds,
//! and servers that are stopping.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Member;

use super::Connector;
use super::backoff::{ADDRESSED_INTERVAL, MOVE_SPREAD, RESUME_SPREAD, ReconnectEvent, drain_wait};
use super::endpoint::Endpoints;
use super::replicas::ConnectorId;
use super::search::ReplicaSearch;
use super::session_task::DialPurpose;
use super::shared::Assignment;
use super::status::SessionStatus;
use super::transport_policy::SessionTransport;
use crate::metrics::SessionState;

impl Connector {
    /// Adopts an assignment. A dial in progress continues, and its next round uses the new servers.
    pub(super) fn reassign(&mut self, assignment: Assignment, now: Instant) {
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
            let attempt = self.attempt.as_ref();
            let is_dialing =
                attempt.is_some_and(|attempt| !attempt.happy_eyeballs.is_between_rounds());
            let is_over = match self.retry_at {
                None => was_over,
                Some(_) => has_new_members && self.wait_ends_with_members,
            };
            if is_over && !is_dialing && self.needs_session() {
                self.backoff.restart();
                let resume_at = now + RESUME_SPREAD.mul_f64(rand::random());
                let retry_at = self.retry_at.unwrap_or(resume_at);
                self.retry_at = Some(retry_at.min(resume_at));
            }
        }
        if (has_new_members || has_new_losses) && self.refresh_search.is_over() {
            self.refresh_search = ReplicaSearch::default();
            self.refresh_at = Some(now + RESUME_SPREAD.mul_f64(rand::random()));
        }
        self.plan_move(now);
    }

    /// Retires the session, since fewer connectors are wanted. Its streams go on.
    pub(super) fn retire_current(&mut self) {
        self.stop_dialing();
        if let Some(current) = self.current.take() {
            self.retire(current.id);
        }
        self.live = None;
    }

    /// Handles a new session of another connector with a server of an older version. That server
    /// may be the current session's, and then gives it no new streams. The current session retires,
    /// and its streams go on. A search could only replace the other session in turn.
    pub(super) fn handle_unnamed(&mut self, newest: Option<ConnectorId>) {
        let is_replaced = self
            .current
            .as_ref()
            .is_some_and(|current| current.replica.is_none() && !current.draining);
        if !is_replaced || newest == Some(self.link.connector_id) {
            return;
        }
        self.abandon();
        self.retry_at = None;
        self.search.end();
        if let Some(current) = self.current.take() {
            self.retire(current.id);
        }
        self.live = None;
        "another session is with a server of an older version".clone_into(&mut self.missing_reason);
        self.report.replaced();
    }

    /// Handles the transport of a new session of any connector: QUIC gets through.
    pub(super) fn handle_transport(&mut self, newest: Option<SessionTransport>, now: Instant) {
        let is_over_h2 = self
            .current
            .as_ref()
            .is_some_and(|current| current.transport == SessionTransport::H2);
        if newest == Some(SessionTransport::Quic) && is_over_h2 {
            self.transport_policy.probe_quic_now(now);
        }
    }

    /// Passes the members that the current session's server reports to the set.
    pub(super) fn report_members(&self, members: Vec<Member>) {
        if let Some(current) = &self.current {
            let replicas = &self.link.shared.replicas;
            replicas.report(current.replica.as_ref(), current.draining, members);
        }
    }

    /// Selects the server at which the next dial begins after one that gave the current session.
    /// That is the assigned replica's own address if the session is with that replica, and
    /// otherwise the address that was dialed.
    pub(super) fn record_position(&mut self, dialed: Endpoints) {
        let assigned = self.assignment.replica.as_ref();
        let is_assigned = self
            .current
            .as_ref()
            .is_some_and(|current| current.replica.as_ref() == assigned);
        if is_assigned && self.assignment.is_addressed() {
            self.endpoints = self.endpoints.restarted();
        } else {
            self.endpoints.record_ready(dialed);
        }
    }

    fn needs_session(&self) -> bool {
        self.current
            .as_ref()
            .is_none_or(|current| current.needs_replacement())
    }

    /// Schedules the dial of the replicas to move to if the current session is with none of them. The
    /// set assigns only replicas that no other connector holds.
    pub(super) fn plan_move(&mut self, now: Instant) {
        let targets = self.assignment.move_targets();
        let is_elsewhere = self.current.as_ref().is_some_and(|current| {
            let is_current = |target| current.replica.as_ref() == Some(target);
            !current.needs_replacement() && !targets.is_empty() && !targets.iter().any(is_current)
        });
        if !is_elsewhere {
            self.move_at = None;
        } else if self.move_at.is_none() && !self.search.is_over() && !self.is_moving() {
            self.move_at = Some(now + MOVE_SPREAD.mul_f64(rand::random()));
        }
    }

    /// Schedules another dial of the assigned replica, unless the search is over.
    pub(super) fn retry_move(&mut self, now: Instant) {
        let wait = self.search.next(self.assignment.members, rand::random());
        self.move_at = wait.map(|wait| now + wait);
    }

    fn is_moving(&self) -> bool {
        self.attempt
            .as_ref()
            .is_some_and(|attempt| attempt.purpose == DialPurpose::Move)
    }

    /// Handles a dial that reached a replica of another connector. The load balancer may choose
    /// another replica next time. The search for a replica with an address of its own never ends,
    /// since a path to it may be back without a change of the members.
    pub(super) fn handle_duplicate(&mut self, now: Instant) {
        let members = self.assignment.members;
        let wait = self.search.next(members, rand::random());
        let is_addressed = self.assignment.is_addressed();
        let wait = wait.or_else(|| is_addressed.then_some(ADDRESSED_INTERVAL));
        self.retry_at = wait.map(|wait| now + wait);
        self.wait_ends_with_members = true;
        "each server that answers has a session of this agent".clone_into(&mut self.missing_reason);
        if wait.is_none() {
            self.report.search_over(members);
        }
    }

    /// Returns when to dial again with newer credentials after a dial that reached a replica of
    /// another connector, or `None` when the search is over. Then the session goes on with its
    /// older credentials, until the server closes it or a dial may reach another replica.
    pub(super) fn next_refresh(&mut self, now: Instant) -> Option<Instant> {
        let members = self.assignment.members;
        let wait = self.refresh_search.next(members, rand::random());
        if wait.is_none() {
            self.report.refresh_over(members);
        }
        wait.map(|wait| now + wait)
    }

    /// Handles the drain of the current session's server. Another session is dialed until one is
    /// ready, and the current one takes new streams until then. The dial may go to the same
    /// address, where another server answers by then.
    pub(super) fn handle_server_drain(&mut self, move_within: Duration, now: Instant) {
        let Some(current) = self.current.as_mut().filter(|current| !current.draining) else {
            return;
        };
        current.draining = true;
        self.link.shared.replicas.set_leaving(current.id);
        self.move_at = None;
        if current.suspect {
            // Another session is already being dialed.
            return;
        }
        let event = ReconnectEvent::Lost {
            ready_for: now.duration_since(current.since),
            code: CloseCode::Draining,
        };
        let is_assigned = current.replica == self.assignment.replica;
        self.abandon();
        if is_assigned || !self.assignment.is_addressed() {
            // With several servers, do not start with this one.
            self.endpoints.failed();
        } else {
            self.endpoints = self.endpoints.restarted();
        }
        self.search = ReplicaSearch::default();
        let retry_in = self.backoff.next(event, now, rand::random());
        self.wait_ends_with_members = false;
        if !self.draining {
            self.retry_at = Some(now + retry_in + drain_wait(move_within, rand::random()));
        }
    }

    /// Returns the session as operators see it, unless no session is dialed any more.
    fn status(&self) -> Option<SessionStatus> {
        if self.draining {
            return None;
        }
        let current = self.current.as_ref();
        let replica = current.and_then(|current| current.replica.clone());
        Some(match current {
            Some(current) if !current.suspect => SessionStatus::Live {
                zone: self.link.shared.replicas.zone_of(current.id),
                replica,
                transport: current.transport.transport(),
                since: current.since,
            },
            Some(_) | None => SessionStatus::Missing {
                replica: replica.or_else(|| self.assignment.replica.clone()),
                reason: self.missing_reason.clone(),
                retry_at: self.retry_at.filter(|_| self.attempt.is_none()),
            },
        })
    }

    /// Updates the metric of the sessions by state, and the status in `/readyz?verbose`.
    pub(super) fn record_state(&mut self) {
        let statuses = &self.link.shared.statuses;
        statuses.set(self.link.connector_id, self.status());
        let state = match &self.current {
            Some(current) if current.suspect => Some(SessionState::Suspect),
            Some(_) => Some(SessionState::Connected),
            None if self.attempt.is_some() || self.retry_at.is_some() => {
                Some(SessionState::Connecting)
            }
            None => None,
        };
        if self.state.as_ref().map(|(state, _)| *state) != state {
            let metrics = &self.context.metrics;
            self.state = state.map(|state| (state, metrics.session_state(state)));
        }
    }
}
