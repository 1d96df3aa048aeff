//! Dials of the connector: starts an attempt and its session tasks, and handles their failures.
//!
//! The word of an authenticated server, or a QUIC alert, ends an attempt on both transports.
//! Silence, or TLS that fails over TCP, ends it on one.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug_span};
use tunnel_proto::wire::code::CloseCode;

use super::backoff::ReconnectEvent;
use super::endpoint::Endpoints;
use super::happy_eyeballs::{DialAction, DialFailure, HappyEyeballs};
use super::report::failure_text;
use super::session_task::{Attempt, Claimant, ConnectError, DialPurpose, SessionTask};
use super::transport_policy::SessionTransport;
use super::{Connector, RunningSession};
use crate::config::Limit;
use crate::credentials::Refusal;
use crate::session::SessionHandle;

impl Connector {
    /// Starts an attempt with the first transport. The second starts if the first gives no answer.
    pub(super) fn start_attempt(
        &mut self,
        purpose: DialPurpose,
        first: SessionTransport,
        second: Option<SessionTransport>,
        now: Instant,
    ) {
        self.retry_at = None;
        let head_start = self.context.limits.quic_head_start;
        let happy_eyeballs = HappyEyeballs::new(first, second, now, head_start);
        let endpoints = match purpose {
            DialPurpose::Connect | DialPurpose::Upgrade | DialPurpose::Refresh => {
                self.endpoints.clone()
            }
            DialPurpose::Move => self.move_endpoints.clone(),
        };
        let attempt = Attempt::new(purpose, happy_eyeballs, endpoints);
        self.attempt = Some(attempt);
        self.dial(first, now);
    }

    /// Starts the session task of the attempt for one transport.
    pub(super) fn dial(&mut self, transport: SessionTransport, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        self.transport_policy
            .record_dial(transport, now, rand::random());
        let retire = CancellationToken::new();
        let is_move = attempt.purpose == DialPurpose::Move;
        let session_task = SessionTask {
            transport,
            endpoints: attempt.endpoints.clone(),
            dialers: self.dialers.clone(),
            context: self.context.clone(),
            handle: SessionHandle {
                retire: retire.clone(),
                session_event: self.event_sender.clone(),
                members_generation: self.link.shared.replicas.generations(),
            },
            claimant: Claimant {
                shared: self.link.shared.clone(),
                connector_id: self.link.connector_id,
                only: is_move.then(|| self.assignment.move_targets().into()),
            },
        };
        let credentials = self.context.rotating_credentials.generation();
        let span =
            debug_span!("session", node = %self.context.node, transport = %transport.transport());
        let id = self.tasks.spawn(session_task.run().instrument(span)).id();
        attempt.task_ids.push(id);
        let running = RunningSession {
            transport,
            retire,
            credentials,
        };
        self.sessions.insert(id, running);
    }

    /// Abandons the attempt. A session that the server may have admitted retires after its Welcome.
    pub(super) fn abandon(&mut self) {
        for id in self
            .attempt
            .take()
            .into_iter()
            .flat_map(|attempt| attempt.task_ids)
        {
            self.retire(id);
        }
    }

    /// Handles the failure of one transport of an attempt.
    pub(super) fn handle_failure(
        &mut self,
        transport: SessionTransport,
        endpoints: Endpoints,
        error: ConnectError,
        credentials: u64,
    ) {
        let now = Instant::now();
        self.record_failure(transport, &error);
        self.record_refusal(error.code(), credentials);
        if error.is_unknown_issuer() && !self.link.shared.live.is_any() {
            (self.context.rotating_credentials).distrust_server(credentials);
        }
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        match attempt.failed(transport, endpoints, error) {
            DialAction::Dial(transport) => self.dial(transport, now),
            DialAction::Wait => {}
            DialAction::RoundFailed => self.handle_round_failure(now),
            DialAction::Exhausted => {
                self.handle_round_failure(now);
                self.abandon();
            }
        }
    }

    /// Records that a server refused the certificate of this generation. A CA that only some servers
    /// trust is no reason to replace the certificate while it carries a session.
    pub(super) fn record_refusal(&self, code: Option<CloseCode>, credentials: u64) {
        let refusal = match code {
            Some(CloseCode::CredentialExpired) => Refusal::Expired,
            Some(CloseCode::CredentialRevoked) => Refusal::Revoked,
            Some(CloseCode::CredentialUntrusted) if !self.link.shared.live.is_any() => {
                Refusal::Untrusted
            }
            Some(_) | None => return,
        };
        (self.context.rotating_credentials).refuse(credentials, refusal);
    }

    /// Counts the failure of one transport.
    pub(super) fn record_failure(&self, transport: SessionTransport, error: &ConnectError) {
        let metrics = &self.context.metrics;
        if error.failure() == DialFailure::Timeout {
            metrics.limit(Limit::HandshakeTimeout);
        }
        metrics.connect_attempt(transport.transport(), error.result());
    }

    /// Handles a round in which no transport gave a ready session.
    fn handle_round_failure(&mut self, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let code = attempt.code();
        let failures = &attempt.failures;
        match attempt.purpose {
            DialPurpose::Upgrade => self.report.probe_failed(failures),
            DialPurpose::Refresh => {
                self.report.probe_failed(failures);
                self.refresh_at = if attempt.has_duplicate() {
                    self.next_refresh(now)
                } else {
                    Some(now + REFRESH_RETRY)
                };
            }
            DialPurpose::Move => {
                self.report.probe_failed(failures);
                if let Some(endpoints) = attempt.next_endpoints.take() {
                    self.move_endpoints.advance_to(endpoints);
                }
                // The next address of the same replica may work. A refusal holds for all of them.
                if code.is_none() && !self.move_endpoints.is_at_end() {
                    self.move_at = Some(now);
                } else {
                    self.retry_move(now);
                }
            }
            DialPurpose::Connect => {
                if let Some(endpoints) = attempt.next_endpoints.take() {
                    self.endpoints.advance_to(endpoints);
                }
                if attempt.has_duplicate() {
                    self.report.probe_failed(&attempt.failures);
                    return self.handle_duplicate(now);
                }
                self.missing_reason = failure_text(failures);
                // A stopping server reveals nothing about the next one, which may be running by
                // now.
                let is_leaving = self
                    .current
                    .as_ref()
                    .is_some_and(|current| current.draining);
                let is_leaving = is_leaving
                    || self
                        .server_stopped_at
                        .is_some_and(|at| now < at + STOPPED_REFUSES_FOR);
                let reason = match code {
                    Some(CloseCode::Draining | CloseCode::Overloaded) if is_leaving => None,
                    code => code,
                };
                let is_in_use = code == Some(CloseCode::NameInUse);
                let host_lock = &self.context.host_lock;
                let takeover_retry = host_lock.takeover_retry(now).filter(|_| is_in_use);
                let mut retry_in = takeover_retry.unwrap_or_else(|| {
                    let event = ReconnectEvent::Failed(reason);
                    self.backoff.next(event, now, rand::random())
                });
                if is_in_use && host_lock.is_standby() {
                    retry_in = retry_in.min(STANDBY_DIAL_MAX);
                }
                self.retry_at = Some(now + retry_in);
                self.wait_ends_with_members = reason.is_none();
                if is_in_use && host_lock.is_standby() {
                    STANDBY.clone_into(&mut self.missing_reason);
                    let live = &self.link.shared.live;
                    self.standby.get_or_insert_with(|| live.add());
                    self.report.standby(failures, retry_in);
                } else if takeover_retry.is_some() {
                    self.report.standby(failures, retry_in);
                } else {
                    self.standby = None;
                    self.report.failed(failures, code, retry_in, now);
                }
            }
        }
    }
}

/// Longest pause between two dials of a standby, which is ready as long as its servers answer.
const STANDBY_DIAL_MAX: Duration = Duration::from_secs(60);
/// Why an agent has no session that waits for another one on its host.
const STANDBY: &str =
    "standby: another agent of this node runs on this host, and this one serves when it stops";

/// Time for which the socket of a stopped server may still refuse QUIC dials: the server sends its
/// closes again where they were lost.
const STOPPED_REFUSES_FOR: Duration = Duration::from_secs(1);
/// Wait after a failed dial with new credentials, while the old session still serves.
const REFRESH_RETRY: Duration = Duration::from_secs(5);
