//! Maintains one session that takes new streams: dials, runs happy eyeballs, replaces silent
//! sessions, and upgrades to QUIC. An agent has one connector for each server that it holds a
//! session with ([`set`]).
//!
//! Each session has one task ([`session_task`]) from the first packet to the close. The loop in
//! this module decides and never waits for a session task. At most one session is *current*. Other
//! sessions are being dialed, or have retired and end with their last stream.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_proto::transport::{CloseReason, ClosedBy};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::ReplicaId;

use crate::config::Limit;
use crate::config::TransportChoice;
use crate::metrics::{ConnectResult, GaugeGuard, SessionState};
use crate::session::{SessionContext, SessionEvent, SessionSummary};

pub mod assignment;
pub mod backoff;
mod dial;
pub mod distance;
pub(crate) mod endpoint;
mod happy_eyeballs;
pub(crate) mod live;
pub(crate) mod member_addresses;
mod placement;
mod replicas;
mod report;
pub mod search;
mod session_task;
pub(crate) mod set;
mod shared;
pub(crate) mod status;
mod transport_policy;

use backoff::{Backoff, ReconnectEvent};
use endpoint::Endpoints;
use live::LiveSession;
use report::ConnectionLog;
use search::ReplicaSearch;
pub(crate) use session_task::Dialers;
use session_task::{Attempt, ConnectError, DialPurpose, SessionExit};
use shared::{Assignment, SetLink};
use transport_policy::{SessionTransport, TransportChange, TransportPolicy};

/// Connects this agent to one server at a time.
struct Connector {
    dialers: Arc<Dialers>,
    context: Arc<SessionContext>,
    link: SetLink,
    assignment: Assignment,
    search: ReplicaSearch,
    /// The search of a dial with newer credentials.
    refresh_search: ReplicaSearch,
    backoff: Backoff,
    transport_policy: TransportPolicy,
    endpoints: Endpoints,
    /// The addresses that a move dials: those of the assigned replica alone, if it has any.
    move_endpoints: Endpoints,
    report: ConnectionLog,
    /// Tasks of all sessions, with their handles.
    tasks: JoinSet<SessionExit>,
    sessions: HashMap<Id, RunningSession>,
    event_sender: mpsc::Sender<(Id, SessionEvent)>,
    session_event: mpsc::Receiver<(Id, SessionEvent)>,
    current: Option<CurrentSession>,
    /// Time at which the last session ended because its server stops.
    server_stopped_at: Option<Instant>,
    attempt: Option<Attempt>,
    /// Start of the next attempt, or of the next round of an attempt that is between rounds.
    retry_at: Option<Instant>,
    /// Whether a change of the members may end the wait until `retry_at`: the dial before reached no
    /// server, or a replica of another connector. A refusal does not depend on the members.
    wait_ends_with_members: bool,
    /// Time to dial a session with newer credentials while the current one serves.
    refresh_at: Option<Instant>,
    /// Time to dial the assigned replica while the current session is with another one.
    move_at: Option<Instant>,
    /// Set while a live session takes new streams.
    live: Option<LiveSession>,
    /// Set while a server has refused this agent for the one that it waits for on this host. A
    /// standby that would be admitted next is ready.
    standby: Option<LiveSession>,
    /// Why there is no live session. Meaningless while there is one.
    missing_reason: String,
    /// Counts this connector in the metric of its state.
    state: Option<(SessionState, GaugeGuard)>,
    /// No session is dialed any more: the agent drains, or the set has retired this connector.
    draining: bool,
}

struct RunningSession {
    transport: SessionTransport,
    retire: CancellationToken,
    /// Credentials of the dial, see
    /// [`RotatingCredentials::generation`](crate::credentials::RotatingCredentials::generation).
    credentials: u64,
}

/// The session that takes new streams.
struct CurrentSession {
    id: Id,
    transport: SessionTransport,
    /// The server, unless it is of a version without names.
    replica: Option<ReplicaId>,
    since: Instant,
    /// A replacement is being dialed, but this session may still recover.
    suspect: bool,
    /// A replacement is wanted, since the server of this session is stopping.
    draining: bool,
}

impl CurrentSession {
    fn needs_replacement(&self) -> bool {
        self.suspect || self.draining
    }
}

impl Connector {
    /// Creates a connector without a session.
    fn new(
        dialers: Arc<Dialers>,
        transport: TransportChoice,
        context: Arc<SessionContext>,
        report: ConnectionLog,
        link: SetLink,
    ) -> Self {
        let (event_sender, session_event) = mpsc::channel(EVENT_QUEUE);
        let assignment = link.assignments.borrow().clone();
        Self {
            backoff: Backoff::new(),
            transport_policy: TransportPolicy::new(transport, &context.limits),
            endpoints: Endpoints::new(assignment.servers.clone()),
            move_endpoints: Endpoints::new(assignment.move_servers().into()),
            assignment,
            search: ReplicaSearch::default(),
            refresh_search: ReplicaSearch::default(),
            report,
            tasks: JoinSet::new(),
            sessions: HashMap::new(),
            event_sender,
            session_event,
            current: None,
            server_stopped_at: None,
            attempt: None,
            retry_at: None,
            wait_ends_with_members: false,
            refresh_at: None,
            move_at: None,
            live: None,
            standby: None,
            missing_reason: "connecting".to_owned(),
            state: None,
            draining: false,
            dialers,
            context,
            link,
        }
    }

    /// Runs until every session has ended after a drain began or the set retired this connector.
    /// Dropping the future cuts all sessions.
    async fn run(mut self) {
        let drain = self.context.shutdown.drain().clone();
        let retire = self.link.retire.clone();
        let mut updates = self.context.rotating_credentials.updates();
        let mut assignments = self.link.assignments.clone();
        let mut transports = self.link.shared.transport.subscribe();
        let mut unnamed = self.link.shared.unnamed.subscribe();
        let host_lock = self.context.host_lock.clone();
        let mut lock_states = host_lock.subscribe();
        self.retry_at = Some(Instant::now() + self.link.start_in);
        loop {
            self.record_state();
            if self.draining && self.tasks.is_empty() {
                return;
            }
            let next_timeout = self.next_timeout();
            tokio::select! {
                biased;
                () = drain.cancelled(), if !self.draining => self.stop_dialing(),
                () = retire.cancelled(), if !self.draining => self.retire_current(),
                // Before joined tasks: the events of a task precede its end.
                Some((id, session_event)) = self.session_event.recv() => self.handle_session_event(id, session_event),
                Some(joined) = self.tasks.join_next_with_id() => self.handle_exit(joined),
                Ok(()) = updates.changed(), if !self.draining => self.refresh(Instant::now()),
                Ok(()) = assignments.changed(), if !self.draining => {
                    let assignment = assignments.borrow_and_update().clone();
                    self.reassign(assignment, Instant::now());
                }
                Ok(()) = transports.changed() => {
                    let newest = *transports.borrow_and_update();
                    self.handle_transport(newest, Instant::now());
                }
                Ok(()) = unnamed.changed() => {
                    let newest = *unnamed.borrow_and_update();
                    self.handle_unnamed(newest);
                }
                Ok(()) = lock_states.changed(), if !self.draining => self.take_over(Instant::now()),
                () = sleep_until(next_timeout.unwrap_or_else(Instant::now)), if next_timeout.is_some() => self.handle_timeout(Instant::now()),
            }
        }
    }

    /// Dials at once if this agent has taken over from another one on this host.
    fn take_over(&mut self, now: Instant) {
        let has_lock = self.context.host_lock.takeover_retry(now).is_some();
        let is_dialing = (self.attempt.as_ref())
            .is_some_and(|attempt| !attempt.happy_eyeballs.is_between_rounds());
        if has_lock && self.current.is_none() && !is_dialing {
            self.backoff = Backoff::new();
            self.retry_at = Some(now);
        }
    }

    fn stop_dialing(&mut self) {
        self.draining = true;
        self.retry_at = None;
        self.abandon();
    }

    fn next_timeout(&self) -> Option<Instant> {
        match (&self.attempt, &self.current) {
            (Some(attempt), _) if !attempt.happy_eyeballs.is_between_rounds() => {
                attempt.happy_eyeballs.next_timeout()
            }
            (None, Some(current)) if !current.needs_replacement() && !self.draining => {
                let probe_at = self.transport_policy.probe_at();
                [self.refresh_at, self.move_at, probe_at]
                    .into_iter()
                    .flatten()
                    .min()
            }
            (Some(_) | None, _) => self.retry_at,
        }
    }

    fn handle_timeout(&mut self, now: Instant) {
        match (&mut self.attempt, &self.current) {
            (Some(attempt), _) if attempt.happy_eyeballs.is_between_rounds() => {
                attempt.endpoints = self.endpoints.clone();
                let transport = attempt.happy_eyeballs.next_round(now);
                self.dial(transport, now);
            }
            (Some(attempt), _) => {
                if let Some(transport) = attempt.happy_eyeballs.start_second() {
                    self.context.metrics.limit(Limit::QuicHeadStart);
                    self.dial(transport, now);
                }
            }
            (None, Some(current))
                if !current.needs_replacement() && self.refresh_at.is_some_and(|at| at <= now) =>
            {
                let transport = current.transport;
                self.refresh_at = None;
                self.start_attempt(DialPurpose::Refresh, transport, None, now);
            }
            (None, Some(current))
                if !current.needs_replacement() && self.move_at.is_some_and(|at| at <= now) =>
            {
                let transport = current.transport;
                self.move_at = None;
                self.start_attempt(DialPurpose::Move, transport, None, now);
            }
            (None, Some(current)) if !current.needs_replacement() => {
                self.start_attempt(DialPurpose::Upgrade, SessionTransport::Quic, None, now);
            }
            (None, current) => {
                let newest = *self.link.shared.transport.borrow();
                if current.is_none() && newest == Some(SessionTransport::H2) {
                    self.transport_policy.adopt_fallback(now);
                }
                let (first, second) = self.transport_policy.dial_order();
                self.start_attempt(DialPurpose::Connect, first, second, now);
            }
        }
    }

    /// Dials a session with the new credentials now.
    fn refresh(&mut self, now: Instant) {
        self.refresh_search = ReplicaSearch::default();
        // A dial in progress may have started with the old credentials.
        if self.current.is_some() {
            self.refresh_at = Some(now);
        } else {
            self.abandon();
            self.retry_at = Some(now);
        }
    }

    fn retire(&self, id: Id) {
        if let Some(session) = self.sessions.get(&id) {
            session.retire.cancel();
        }
        self.link.shared.replicas.release(id);
    }

    fn handle_session_event(&mut self, id: Id, session_event: SessionEvent) {
        let now = Instant::now();
        let is_current = self
            .current
            .as_ref()
            .is_some_and(|current| current.id == id);
        let Some(&RunningSession {
            transport,
            credentials,
            ..
        }) = self.sessions.get(&id)
        else {
            return;
        };
        match session_event {
            SessionEvent::Answered => {
                let attempt = self.attempt.as_mut();
                if let Some(attempt) = attempt.filter(|attempt| attempt.task_ids.contains(&id)) {
                    attempt.happy_eyeballs.answered(transport);
                }
            }
            SessionEvent::Ready => {
                let rotating_credentials = self.context.rotating_credentials.clone();
                rotating_credentials.accept(credentials);
                let shutdown = &self.context.shutdown;
                shutdown
                    .spawn_service(async move { rotating_credentials.confirm(credentials).await });
                self.handle_ready(id, transport, now);
            }
            SessionEvent::Draining { move_within } if is_current => {
                self.handle_server_drain(move_within, now);
            }
            SessionEvent::Members(members) if is_current => self.report_members(members),
            SessionEvent::RoundTripTime(rtt) => self.link.shared.replicas.record_rtt(id, rtt),
            SessionEvent::Suspect if is_current => self.handle_suspect(now),
            SessionEvent::Live if is_current => self.handle_recovery(),
            // An event of a retired session.
            SessionEvent::Live if transport == SessionTransport::Quic => {
                self.transport_policy.probe_quic_now(now)
            }
            SessionEvent::Suspect
            | SessionEvent::Live
            | SessionEvent::Draining { .. }
            | SessionEvent::Members(_) => {}
        }
    }

    fn handle_ready(&mut self, id: Id, transport: SessionTransport, now: Instant) {
        let metrics = &self.context.metrics;
        metrics.connect_attempt(transport.transport(), ConnectResult::Ready);
        let attempt = self
            .attempt
            .take_if(|attempt| attempt.task_ids.contains(&id));
        let Some(attempt) = attempt else {
            // The attempt was abandoned in the meantime; the session retires by itself.
            return;
        };
        for other in attempt.task_ids.into_iter().filter(|other| *other != id) {
            self.retire(other);
        }
        let shared = &self.link.shared;
        let replica = shared.replicas.claimed_by(id);
        let has_name = replica.is_some();
        let current = CurrentSession {
            id,
            transport,
            replica,
            since: now,
            suspect: false,
            draining: false,
        };
        self.live.get_or_insert_with(|| shared.live.add());
        self.standby = None;
        shared
            .transport
            .send_if_modified(|newest| newest.replace(transport) != Some(transport));
        if !has_name {
            shared.unnamed.send_replace(Some(self.link.connector_id));
        }
        if let Some(old) = self.current.replace(current) {
            self.retire(old.id);
        }
        self.retry_at = None;
        let change = self.transport_policy.ready(transport, now, rand::random());
        match change {
            TransportChange::None => {}
            TransportChange::Fallback => self.context.metrics.fallback(),
            TransportChange::Upgrade => self.context.metrics.promotion(),
        }
        self.report.ready(change);
        let newest = self.context.rotating_credentials.generation();
        if (self.sessions.get(&id)).is_some_and(|session| session.credentials == newest) {
            self.refresh_at = None;
            self.refresh_search = ReplicaSearch::default();
        }
        match attempt.purpose {
            DialPurpose::Connect => {
                self.search = ReplicaSearch::default();
                self.record_position(attempt.endpoints);
            }
            DialPurpose::Move if has_name => self.search = ReplicaSearch::default(),
            // A server of an older version answers at the address of the assigned replica.
            DialPurpose::Move => self.retry_move(now),
            DialPurpose::Upgrade | DialPurpose::Refresh => {}
        }
        self.plan_move(now);
    }

    /// Marks the silent current session as suspect and dials a replacement in parallel.
    fn handle_suspect(&mut self, now: Instant) {
        let Some(current) = &mut self.current else {
            return;
        };
        current.suspect = true;
        self.link.shared.replicas.set_suspect(current.id, true);
        let event = ReconnectEvent::Lost {
            ready_for: now.duration_since(current.since),
            code: CloseCode::Dead,
        };
        let is_replaced = current.draining;
        "the session is suspect".clone_into(&mut self.missing_reason);
        self.live = None;
        self.transport_policy.record_loss(now);
        if is_replaced {
            return;
        }
        // The dial in progress had another purpose.
        self.abandon();
        self.retry(event, now);
    }

    /// Handles the recovery of the current session before a replacement was ready.
    fn handle_recovery(&mut self) {
        let live = &self.link.shared.live;
        self.live.get_or_insert_with(|| live.add());
        self.transport_policy.record_recovery();
        if let Some(current) = &mut self.current {
            current.suspect = false;
            self.link.shared.replicas.set_suspect(current.id, false);
            if current.draining {
                return;
            }
        }
        self.abandon();
        self.retry_at = None;
    }

    fn handle_exit(&mut self, joined: Result<(Id, SessionExit), JoinError>) {
        let (id, ended) = match joined {
            Ok((id, ended)) => (id, Ok(ended)),
            Err(panicked) => (panicked.id(), Err(panicked)),
        };
        let Some(RunningSession {
            transport,
            credentials,
            ..
        }) = self.sessions.remove(&id)
        else {
            return;
        };
        self.link.shared.replicas.release(id);
        let ended = ended.unwrap_or_else(|panicked| {
            self.report.panicked(transport, &panicked);
            SessionExit {
                endpoints: self.endpoints.clone(),
                outcome: Err(ConnectError::Panicked),
            }
        });
        if let Err(error) = &ended.outcome
            && error.is_certificate_failure()
        {
            self.context.rotating_credentials.refused(credentials);
        }
        let current = self.current.take_if(|current| current.id == id);
        if let Some(current) = current {
            return self.handle_loss(&current, ended.outcome, credentials);
        }
        match (&mut self.attempt, ended.outcome) {
            (Some(attempt), Err(error)) if attempt.task_ids.contains(&id) => {
                attempt.task_ids.retain(|session_task| *session_task != id);
                self.handle_failure(transport, ended.endpoints, error, credentials);
            }
            (_, Err(error)) => self.record_failure(transport, &error),
            (_, Ok(summary)) => self.report.ended(transport, &summary),
        }
    }

    /// Handles the end of the current session.
    fn handle_loss(
        &mut self,
        current: &CurrentSession,
        outcome: Result<SessionSummary, ConnectError>,
        credentials: u64,
    ) {
        let now = Instant::now();
        let summary = outcome.unwrap_or_else(|error| SessionSummary {
            ready_for: now.duration_since(current.since),
            reason: CloseReason {
                by: ClosedBy::Local,
                code: CloseCode::Protocol,
                reason: error.to_string(),
            },
            replica: current.replica.clone(),
        });
        self.live = None;
        self.transport_policy.record_loss(now);
        // Another session is already being dialed, and a local close reveals nothing new about the
        // path.
        let is_dialing = self.attempt.is_some() || self.retry_at.is_some();
        let is_known_loss = current.suspect && is_dialing && summary.reason.by == ClosedBy::Local;
        if self.draining {
            return self.report.ended(current.transport, &summary);
        }
        self.link.shared.replicas.record_loss();
        if is_known_loss {
            return self.report.lost(current.transport, &summary, None);
        }
        self.record_refusal(Some(summary.reason.code), credentials);
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
        self.abandon();
        let retry_in = self.retry(event, now);
        self.attempt = connecting;
        // A close code on the old session shows that the server is back, so a fresh dial is better.
        // This also applies to the server that replaces a stopped one.
        if retry_in.is_zero() || current.draining {
            self.abandon();
        }
        let retry_in = self.attempt.is_none().then_some(retry_in);
        self.report.lost(current.transport, &summary, retry_in);
    }

    /// Asks [`backoff`] for the start of the next attempt.
    fn retry(&mut self, event: ReconnectEvent, now: Instant) -> Duration {
        self.search = ReplicaSearch::default();
        let retry_in = self.backoff.next(event, now, rand::random());
        self.wait_ends_with_members = false;
        if !self.draining {
            self.retry_at = Some(now + retry_in);
        }
        retry_in
    }
}

/// Events queued for the connector, which receives them at once. A session waits if the queue is
/// full.
const EVENT_QUEUE: usize = 64;

#[cfg(test)]
mod tests;
