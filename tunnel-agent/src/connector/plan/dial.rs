//! Dials of the connector: starts an attempt and its session tasks, and handles their failures.
//!
//! The word of an authenticated server, or a QUIC alert, ends an attempt on both transports.
//! Silence, or TLS that fails over TCP, ends it on one.

use std::time::Duration;

use tokio::time::Instant;
use tunnel_proto::wire::code::CloseCode;

use super::attempt::{Attempt, DialPurpose};
use super::connector::{Connector, Retry};
use super::shared::{CredentialOutcome, Dial, Shared};
use crate::connector::backoff::ReconnectEvent;
use crate::connector::endpoint::Endpoints;
use crate::connector::happy_eyeballs::{DialAction, HappyEyeballs};
use crate::connector::report::failure_text;
use crate::connector::session_task::ConnectError;
use crate::connector::transport_policy::SessionTransport;
use crate::credentials::Refusal;

impl Connector {
    /// Starts an attempt with the first transport. The second starts if the first gives no answer.
    pub(super) fn start_attempt(
        &mut self,
        purpose: DialPurpose,
        first: SessionTransport,
        second: Option<SessionTransport>,
        shared: &mut Shared,
        now: Instant,
    ) {
        self.retry = None;
        let happy_eyeballs = HappyEyeballs::new(first, second, now, shared.quic_head_start);
        let endpoints = match purpose {
            DialPurpose::Connect | DialPurpose::Upgrade | DialPurpose::Refresh => {
                self.endpoints.clone()
            }
            DialPurpose::Move => self.move_endpoints.clone(),
        };
        self.attempt = Some(Attempt {
            purpose,
            happy_eyeballs,
            endpoints,
            next_endpoints: None,
            dials: Vec::new(),
            failures: Vec::new(),
        });
        self.dial(first, shared, now);
    }

    /// Starts the dial of the attempt over one transport.
    pub(super) fn dial(&mut self, transport: SessionTransport, shared: &mut Shared, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        self.transport_policy
            .record_dial(transport, now, shared.random());
        let is_move = attempt.purpose == DialPurpose::Move;
        let dial = Dial {
            connector: self.id,
            transport,
            credentials: shared.credentials,
            only: is_move.then(|| self.assignment.move_targets().into()),
        };
        let id = shared.dial(dial, attempt.endpoints.clone());
        attempt.dials.push(id);
    }

    /// Abandons the attempt. A session that the server may have admitted retires after its Welcome.
    pub(super) fn abandon(&mut self, shared: &mut Shared) {
        let attempt = self.attempt.take().into_iter();
        for id in attempt.flat_map(|attempt| attempt.dials) {
            shared.retire(id);
        }
    }

    /// Handles the failure of one transport of an attempt.
    pub(super) fn handle_failure(
        &mut self,
        dial: &Dial,
        endpoints: Endpoints,
        error: ConnectError,
        shared: &mut Shared,
        now: Instant,
    ) {
        shared.record_failure(dial.transport, &error);
        self.record_refusal(error.code(), dial.credentials, shared);
        if error.is_unknown_issuer() && !self.is_any_ready(shared) {
            let outcome = CredentialOutcome::ServerUntrusted;
            shared.record_credentials(dial.credentials, outcome);
        }
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        match attempt.failed(dial.transport, endpoints, error) {
            DialAction::Dial(transport) => self.dial(transport, shared, now),
            DialAction::Wait => {}
            DialAction::RoundFailed => self.handle_round_failure(shared, now),
            DialAction::Exhausted => {
                self.handle_round_failure(shared, now);
                self.abandon(shared);
            }
        }
    }

    /// Records that a server refused the certificate of this generation. A CA that only some servers
    /// trust is no reason to replace the certificate while it carries a session.
    pub(super) fn record_refusal(
        &self,
        code: Option<CloseCode>,
        credentials: u64,
        shared: &mut Shared,
    ) {
        let refusal = match code {
            Some(CloseCode::CredentialExpired) => Refusal::Expired,
            Some(CloseCode::CredentialRevoked) => Refusal::Revoked,
            Some(CloseCode::CredentialUntrusted) if !self.is_any_ready(shared) => {
                Refusal::Untrusted
            }
            Some(_) | None => return,
        };
        shared.record_credentials(credentials, CredentialOutcome::Refused(refusal));
    }

    /// Returns whether this or another connector has a live session, or is a standby.
    fn is_any_ready(&self, shared: &Shared) -> bool {
        self.is_ready() || shared.has_other_live
    }

    /// Handles a round in which no transport gave a ready session.
    fn handle_round_failure(&mut self, shared: &mut Shared, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let code = attempt.code();
        let failures = &attempt.failures;
        match attempt.purpose {
            DialPurpose::Upgrade => shared.log.probe_failed(failures),
            DialPurpose::Refresh => {
                shared.log.probe_failed(failures);
                self.refresh_at = if attempt.has_duplicate() {
                    self.next_refresh(shared, now)
                } else {
                    Some(now + REFRESH_RETRY)
                };
            }
            DialPurpose::Move => {
                shared.log.probe_failed(failures);
                if let Some(endpoints) = attempt.next_endpoints.take() {
                    self.move_endpoints.advance_to(endpoints);
                }
                // The next address of the same server may work. A refusal holds for all of them.
                if code.is_none() && !self.move_endpoints.is_at_end() {
                    self.move_at = Some(now);
                } else {
                    self.retry_move(shared, now);
                }
            }
            DialPurpose::Connect => {
                if let Some(endpoints) = attempt.next_endpoints.take() {
                    self.endpoints.advance_to(endpoints);
                }
                if attempt.has_duplicate() {
                    shared.log.probe_failed(&attempt.failures);
                    return self.handle_duplicate(shared, now);
                }
                self.missing_reason = failure_text(failures);
                // A stopping server reveals nothing about the next one, which may be running by
                // now.
                let current = self.current.as_ref();
                let is_leaving = current.is_some_and(|current| current.draining)
                    || (self.server_stopped_at).is_some_and(|at| now < at + STOPPED_REFUSES_FOR);
                let reason = match code {
                    Some(CloseCode::Draining | CloseCode::Overloaded) if is_leaving => None,
                    code => code,
                };
                let is_in_use = code == Some(CloseCode::NameInUse);
                let is_standby = is_in_use && shared.lock.is_standby();
                let takeover_retry = shared.lock.takeover_retry(now).filter(|_| is_in_use);
                let mut retry_in = takeover_retry.unwrap_or_else(|| {
                    let event = ReconnectEvent::Failed(reason);
                    self.backoff.next(event, now, shared.random())
                });
                if is_standby {
                    retry_in = retry_in.min(STANDBY_DIAL_MAX);
                }
                self.retry = Some(Retry {
                    at: now + retry_in,
                    may_end_early: reason.is_none(),
                });
                if is_standby {
                    STANDBY.clone_into(&mut self.missing_reason);
                    self.is_standby = true;
                    shared.log.standby(failures, retry_in);
                } else if takeover_retry.is_some() {
                    shared.log.standby(failures, retry_in);
                } else {
                    self.is_standby = false;
                    shared.log.failed(failures, code, retry_in, now);
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
