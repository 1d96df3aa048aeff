//! One session that takes new streams: the connector dials, runs happy eyeballs, replaces silent
//! sessions, and upgrades to QUIC.
//!
//! Each session has one task ([`session_task`](crate::connector::session_task)) from the first packet
//! to the close. At most one session is *current*. Other sessions are being dialed, or have retired and
//! end with their last stream.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::transport::{CloseReason, ClosedBy};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::name::{ReplicaId, ZoneName};

use super::assigned::Assignment;
use super::attempt::{Attempt, DialPurpose};
use super::shared::{Dial, Shared};
use crate::config::{Limit, Limits, TransportChoice};
use crate::connector::backoff::{Backoff, ReconnectEvent};
use crate::connector::endpoint::Endpoints;
use crate::connector::search::ReplicaSearch;
use crate::connector::session_task::{ConnectError, SessionExit};
use crate::connector::status::{ConnectorId, SessionStatus};
use crate::connector::transport_policy::{SessionTransport, TransportChange, TransportPolicy};
use crate::metrics::SessionState;
use crate::session::{DialId, SessionSummary};

/// Connects the agent to one server at a time.
pub(super) struct Connector {
    pub(super) id: ConnectorId,
    pub(super) assignment: Assignment,
    pub(super) search: ReplicaSearch,
    /// The search of a dial with newer credentials.
    pub(super) refresh_search: ReplicaSearch,
    pub(super) backoff: Backoff,
    pub(super) transport_policy: TransportPolicy,
    pub(super) endpoints: Endpoints,
    /// The addresses that a move dials: those of the assigned server alone, if it has any.
    pub(super) move_endpoints: Endpoints,
    pub(super) current: Option<CurrentSession>,
    pub(super) attempt: Option<Attempt>,
    pub(super) retry: Option<Retry>,
    /// Time to dial a session with newer credentials while the current one serves.
    pub(super) refresh_at: Option<Instant>,
    /// Time to dial the assigned server while the current session is with another one.
    pub(super) move_at: Option<Instant>,
    /// Time at which the last session ended because its server stops.
    pub(super) server_stopped_at: Option<Instant>,
    /// Whether a server has refused this agent for the one that it waits for on this host. A standby
    /// that would be admitted next is ready.
    pub(super) is_standby: bool,
    /// Why there is no live session. Meaningless while there is one.
    pub(super) missing_reason: String,
}

/// The start of the next attempt, or of the next round of an attempt that is between rounds.
#[derive(Clone, Copy)]
pub(super) struct Retry {
    pub(super) at: Instant,
    /// Whether a change of the members, or a client that waits for a session, may end the wait: the
    /// dial before reached no server, or a server of another connector. The wait after a refusal
    /// stays.
    pub(super) may_end_early: bool,
}

impl Retry {
    pub(super) fn at(at: Instant) -> Self {
        Self {
            at,
            may_end_early: false,
        }
    }
}

/// The session that takes new streams.
pub(super) struct CurrentSession {
    pub(super) id: DialId,
    pub(super) transport: SessionTransport,
    /// The server.
    pub(super) replica: ReplicaId,
    /// The zone of the server in the last list that had it.
    pub(super) zone: Option<ZoneName>,
    pub(super) since: Instant,
    /// A replacement is being dialed, but this session may still recover.
    pub(super) suspect: bool,
    /// A replacement is wanted, since the server of this session is stopping. The session keeps no
    /// other connector away from that server.
    pub(super) draining: bool,
}

impl CurrentSession {
    pub(super) fn needs_replacement(&self) -> bool {
        self.suspect || self.draining
    }
}

impl Connector {
    /// Creates a connector without a session, which dials at `start_at`.
    pub(super) fn new(
        id: ConnectorId,
        assignment: Assignment,
        transport: TransportChoice,
        limits: &Limits,
        start_at: Instant,
    ) -> Self {
        Self {
            id,
            search: ReplicaSearch::default(),
            refresh_search: ReplicaSearch::default(),
            backoff: Backoff::new(),
            transport_policy: TransportPolicy::new(transport, limits),
            endpoints: Endpoints::new(assignment.servers.clone()),
            move_endpoints: Endpoints::new(assignment.move_servers().into()),
            assignment,
            current: None,
            attempt: None,
            retry: Some(Retry::at(start_at)),
            refresh_at: None,
            move_at: None,
            server_stopped_at: None,
            is_standby: false,
            missing_reason: "connecting".to_owned(),
        }
    }

    /// Returns the session `id`, if that takes new streams.
    pub(super) fn current(&self, id: DialId) -> Option<&CurrentSession> {
        self.current.as_ref().filter(|current| current.id == id)
    }

    /// Returns the session, if its server stays.
    pub(super) fn staying(&self) -> Option<&CurrentSession> {
        self.current.as_ref().filter(|current| !current.draining)
    }

    /// Returns whether the session is with `replica`, which stays.
    pub(super) fn holds(&self, replica: &ReplicaId) -> bool {
        self.staying()
            .is_some_and(|current| current.replica == *replica)
    }

    /// Returns whether there is a live session, or this is a standby.
    pub(super) fn is_ready(&self) -> bool {
        let current = self.current.as_ref();
        self.is_standby || current.is_some_and(|current| !current.suspect)
    }

    /// Records the zone of the session's server, if it is one of `members`.
    pub(super) fn record_zone(&mut self, members: &[Member]) {
        if let Some(current) = &mut self.current
            && let Some(member) = members.iter().find(|member| member.id == current.replica)
        {
            current.zone.clone_from(&member.zone);
        }
    }

    /// Returns the session as operators see it.
    pub(super) fn status(&self) -> SessionStatus {
        match &self.current {
            Some(current) if !current.suspect => SessionStatus::Live {
                replica: current.replica.clone(),
                zone: current.zone.clone(),
                transport: current.transport.transport(),
                since: current.since,
            },
            current => SessionStatus::Missing {
                replica: (current.as_ref())
                    .map(|current| current.replica.clone())
                    .or_else(|| self.assignment.replica.clone()),
                reason: self.missing_reason.clone(),
                retry_at: self.retry_at().filter(|_| self.attempt.is_none()),
            },
        }
    }

    /// Returns the state of the wanted session, or `None` if none is dialed any more.
    pub(super) fn state(&self) -> Option<SessionState> {
        match &self.current {
            Some(current) if current.suspect => Some(SessionState::Suspect),
            Some(_) => Some(SessionState::Connected),
            None if self.attempt.is_some() || self.retry.is_some() => {
                Some(SessionState::Connecting)
            }
            None => None,
        }
    }

    fn retry_at(&self) -> Option<Instant> {
        self.retry.map(|retry| retry.at)
    }

    /// Returns whether an attempt is in progress and not between two rounds.
    pub(super) fn is_dialing(&self) -> bool {
        let attempt = self.attempt.as_ref();
        attempt.is_some_and(|attempt| !attempt.happy_eyeballs.is_between_rounds())
    }

    /// Dials at once if this agent has taken over from another one on this host.
    pub(super) fn take_over(&mut self, shared: &Shared, now: Instant) {
        let has_lock = shared.lock.takeover_retry(now).is_some();
        if has_lock && self.current.is_none() && !self.is_dialing() {
            self.backoff = Backoff::new();
            self.retry = Some(Retry::at(now));
        }
    }

    /// Returns whether the wait for the next dial may end early.
    pub(super) fn can_dial_early(&self) -> bool {
        !self.is_dialing() && self.retry.is_some_and(|retry| retry.may_end_early)
    }

    /// Makes the next dial due. Its transports and its position in the servers stay.
    pub(super) fn dial_early(&mut self, now: Instant) {
        if let Some(retry) = &mut self.retry {
            retry.at = retry.at.min(now);
        }
    }

    pub(super) fn stop_dialing(&mut self, shared: &mut Shared) {
        self.retry = None;
        self.abandon(shared);
    }

    /// Retires the session, since fewer connectors are wanted. Its streams go on.
    pub(super) fn retire_all(&mut self, shared: &mut Shared) {
        self.stop_dialing(shared);
        if let Some(current) = self.current.take() {
            shared.retire(current.id);
            shared.is_changed = true;
        }
    }

    pub(super) fn next_timeout(&self) -> Option<Instant> {
        match (&self.attempt, &self.current) {
            (Some(attempt), _) if !attempt.happy_eyeballs.is_between_rounds() => {
                attempt.happy_eyeballs.next_timeout()
            }
            (None, Some(current)) if !current.needs_replacement() => {
                let probe_at = self.transport_policy.probe_at();
                let times = [self.refresh_at, self.move_at, probe_at];
                times.into_iter().flatten().min()
            }
            (Some(_) | None, _) => self.retry_at(),
        }
    }

    pub(super) fn handle_timeout(&mut self, shared: &mut Shared, now: Instant) {
        match (&mut self.attempt, &self.current) {
            (Some(attempt), _) if attempt.happy_eyeballs.is_between_rounds() => {
                attempt.endpoints = self.endpoints.clone();
                let transport = attempt.happy_eyeballs.next_round(now);
                self.dial(transport, shared, now);
            }
            (Some(attempt), _) => {
                if let Some(transport) = attempt.happy_eyeballs.start_second() {
                    shared.metrics.limit(Limit::QuicHeadStart);
                    self.dial(transport, shared, now);
                }
            }
            (None, Some(current)) if !current.needs_replacement() => {
                let is_due = |at: &mut Instant| *at <= now;
                let (purpose, transport) = if self.refresh_at.take_if(is_due).is_some() {
                    (DialPurpose::Refresh, current.transport)
                } else if self.move_at.take_if(is_due).is_some() {
                    (DialPurpose::Move, current.transport)
                } else {
                    (DialPurpose::Upgrade, SessionTransport::Quic)
                };
                self.start_attempt(purpose, transport, None, shared, now);
            }
            (None, current) => {
                if current.is_none() && shared.transport == Some(SessionTransport::H2) {
                    self.transport_policy.adopt_fallback(now);
                }
                let (first, second) = self.transport_policy.dial_order();
                self.start_attempt(DialPurpose::Connect, first, second, shared, now);
            }
        }
    }

    /// Dials a session with the new credentials now.
    pub(super) fn refresh(&mut self, shared: &mut Shared, now: Instant) {
        self.refresh_search = ReplicaSearch::default();
        // A dial in progress may have started with the old credentials.
        if self.current.is_some() {
            self.refresh_at = Some(now);
        } else {
            self.abandon(shared);
            self.retry = Some(Retry::at(now));
        }
    }

    pub(super) fn handle_answer(&mut self, id: DialId, transport: SessionTransport) {
        let attempt = self.attempt.as_mut();
        if let Some(attempt) = attempt.filter(|attempt| attempt.dials.contains(&id)) {
            attempt.happy_eyeballs.answered(transport);
        }
    }

    /// Makes an admitted session the current one. Returns `false` if its attempt was abandoned in the
    /// meantime.
    pub(super) fn handle_ready(
        &mut self,
        id: DialId,
        replica: &ReplicaId,
        shared: &mut Shared,
        now: Instant,
    ) -> bool {
        let attempt = self.attempt.take_if(|attempt| attempt.dials.contains(&id));
        let (Some(attempt), Some(dial)) = (attempt, shared.dials.get(&id)) else {
            return false;
        };
        let (transport, credentials) = (dial.transport, dial.credentials);
        for other in attempt.dials.into_iter().filter(|other| *other != id) {
            shared.retire(other);
        }
        let current = CurrentSession {
            id,
            transport,
            replica: replica.clone(),
            zone: None,
            since: now,
            suspect: false,
            draining: false,
        };
        self.is_standby = false;
        shared.is_changed = true;
        if let Some(old) = self.current.replace(current) {
            shared.retire(old.id);
        }
        self.retry = None;
        let change = self.transport_policy.ready(transport, now, shared.random());
        match change {
            TransportChange::None => {}
            TransportChange::Fallback => shared.metrics.fallback(),
            TransportChange::Upgrade => shared.metrics.upgrade(),
        }
        shared.log.ready(change);
        if credentials == shared.credentials {
            self.refresh_at = None;
            self.refresh_search = ReplicaSearch::default();
        }
        match attempt.purpose {
            DialPurpose::Connect => {
                self.search = ReplicaSearch::default();
                self.record_position(attempt.endpoints);
            }
            DialPurpose::Move => self.search = ReplicaSearch::default(),
            DialPurpose::Upgrade | DialPurpose::Refresh => {}
        }
        self.plan_move(shared, now);
        true
    }

    /// Marks the silent current session as suspect and dials a replacement in parallel.
    pub(super) fn handle_suspect(&mut self, shared: &mut Shared, now: Instant) {
        let Some(current) = &mut self.current else {
            return;
        };
        current.suspect = true;
        shared.is_changed = true;
        let event = ReconnectEvent::Lost {
            ready_for: now.duration_since(current.since),
            code: CloseCode::Dead,
        };
        let is_replaced = current.draining;
        "the session is suspect".clone_into(&mut self.missing_reason);
        self.transport_policy.record_loss(now);
        if is_replaced {
            return;
        }
        // The dial in progress had another purpose.
        self.abandon(shared);
        self.retry_after(event, shared, now);
    }

    /// Handles the recovery of the current session before a replacement was ready.
    pub(super) fn handle_recovery(&mut self, shared: &mut Shared) {
        self.transport_policy.record_recovery();
        if let Some(current) = &mut self.current {
            current.suspect = false;
            shared.is_changed = true;
            if current.draining {
                return;
            }
        }
        self.abandon(shared);
        self.retry = None;
    }

    /// Dials QUIC if the session is over h2, since another connector has a new session over QUIC.
    pub(super) fn probe_quic_over_h2(&mut self, now: Instant) {
        let current = self.current.as_ref();
        if current.is_some_and(|current| current.transport == SessionTransport::H2) {
            self.transport_policy.probe_quic_now(now);
        }
    }

    /// Handles the end of a session or dial.
    pub(super) fn handle_exit(
        &mut self,
        id: DialId,
        dial: &Dial,
        exit: SessionExit,
        shared: &mut Shared,
        now: Instant,
    ) {
        if let Some(current) = self.current.take_if(|current| current.id == id) {
            shared.is_changed = true;
            return self.handle_loss(&current, exit.outcome, dial.credentials, shared, now);
        }
        match (&mut self.attempt, exit.outcome) {
            (Some(attempt), Err(error)) if attempt.dials.contains(&id) => {
                attempt.dials.retain(|dial| *dial != id);
                let endpoints = exit.endpoints.unwrap_or_else(|| attempt.endpoints.clone());
                self.handle_failure(dial, endpoints, error, shared, now);
            }
            (_, outcome) => shared.record_end(dial.transport, &outcome),
        }
    }

    /// Handles the end of the current session.
    fn handle_loss(
        &mut self,
        current: &CurrentSession,
        outcome: Result<SessionSummary, ConnectError>,
        credentials: u64,
        shared: &mut Shared,
        now: Instant,
    ) {
        let summary = outcome.unwrap_or_else(|error| SessionSummary {
            ready_for: now.duration_since(current.since),
            reason: CloseReason::local(CloseCode::Protocol, error.to_string()),
            replica: current.replica.clone(),
        });
        self.transport_policy.record_loss(now);
        // Another session is already being dialed, and a local close reveals nothing new about the
        // path.
        let is_dialing = self.attempt.is_some() || self.retry.is_some();
        let is_known_loss = current.suspect && is_dialing && summary.reason.by == ClosedBy::Local;
        if shared.is_draining {
            return shared.log.ended(current.transport, &summary);
        }
        shared.losses += 1;
        if is_known_loss {
            return shared.log.lost(current.transport, &summary, None);
        }
        self.record_refusal(Some(summary.reason.code), credentials, shared);
        self.server_stopped_at = (summary.reason.code == CloseCode::Draining).then_some(now);
        self.missing_reason = format!("session lost: {}", summary.reason);
        let event = ReconnectEvent::Lost {
            ready_for: summary.ready_for,
            code: summary.reason.code,
        };
        let connecting = self
            .attempt
            .take_if(|attempt| attempt.purpose == DialPurpose::Connect);
        // The remaining attempt had another purpose.
        self.abandon(shared);
        let retry_in = self.retry_after(event, shared, now);
        self.attempt = connecting;
        // A close code on the old session shows that the server is back, so a fresh dial is better.
        // This also applies to the server that replaces a stopped one.
        if retry_in.is_zero() || current.draining {
            self.abandon(shared);
        }
        let retry_in = self.attempt.is_none().then_some(retry_in);
        shared.log.lost(current.transport, &summary, retry_in);
    }

    /// Asks [`backoff`](crate::connector::backoff) for the start of the next attempt.
    pub(super) fn retry_after(
        &mut self,
        event: ReconnectEvent,
        shared: &mut Shared,
        now: Instant,
    ) -> Duration {
        self.search = ReplicaSearch::default();
        let retry_in = self.backoff.next(event, now, shared.random());
        if !shared.is_draining {
            self.retry = Some(Retry::at(now + retry_in));
        }
        retry_in
    }
}
