//! Attempts to open a session, from the first packet to success or failure.

use std::time::Duration;

use tokio::task::Id;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug_span};
use tunnel_proto::wire::code::CloseCode;

use super::backoff::ReconnectEvent;
use super::endpoint::EndpointCursor;
use super::happy_eyeballs::{DialAction, HappyEyeballs};
use super::session_task::{ConnectError, SessionTask};
use super::transport_policy::SessionTransport;
use super::{Connector, RunningSession};
use crate::session::SessionHandle;

/// Sessions that are being dialed. The first that is ready wins.
pub(super) struct Attempt {
    pub(super) purpose: DialPurpose,
    pub(super) happy_eyeballs: HappyEyeballs,
    /// Next endpoint of this round, and start of the next round.
    pub(super) cursor: EndpointCursor,
    pub(super) next_cursor: Option<EndpointCursor>,
    /// Session tasks of this attempt.
    pub(super) task_ids: Vec<Id>,
    /// Last failure of each transport.
    pub(super) failures: Vec<(SessionTransport, ConnectError)>,
}

/// The purpose of a dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialPurpose {
    /// There is no live session, or its server is stopping.
    Connect,
    /// The session uses h2, and QUIC would be better.
    Upgrade,
    /// The session uses older credentials.
    Refresh,
}

impl Connector {
    /// Starts an attempt with the first transport of `order`.
    pub(super) fn start_attempt(
        &mut self,
        purpose: DialPurpose,
        order: (SessionTransport, Option<SessionTransport>),
        now: Instant,
    ) {
        self.retry_at = None;
        self.attempt = Some(Attempt {
            purpose,
            happy_eyeballs: HappyEyeballs::new(order, now, self.context.limits.quic_head_start),
            cursor: self.endpoints.clone(),
            next_cursor: None,
            task_ids: Vec::new(),
            failures: Vec::new(),
        });
        self.dial(order.0, now);
    }

    /// Starts the session task of the attempt for one transport.
    pub(super) fn dial(&mut self, transport: SessionTransport, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        self.transport_policy
            .record_dial(transport, now, rand::random());
        let retire = CancellationToken::new();
        let session_task = SessionTask {
            transport,
            cursor: attempt.cursor.clone(),
            dialers: self.dialers.clone(),
            context: self.context.clone(),
            handle: SessionHandle {
                retire: retire.clone(),
                session_event: self.event_sender.clone(),
            },
        };
        let credentials = self.context.rotating_credentials.generation();
        let span =
            debug_span!("session", agent = %self.context.node, transport = %transport.transport());
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
    pub(super) fn failed(
        &mut self,
        transport: SessionTransport,
        cursor: EndpointCursor,
        error: ConnectError,
        now: Instant,
    ) {
        self.count(transport, &error);
        match error.code() {
            Some(CloseCode::CredentialExpired) => self.context.rotating_credentials.reject(),
            Some(CloseCode::CredentialRevoked) => self.context.rotating_credentials.revoke(),
            Some(_) | None => {}
        }
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        if attempt.next_cursor.is_none() || transport == attempt.happy_eyeballs.first() {
            let mut cursor = cursor;
            // After a failed name lookup the cursor already points to the next server.
            if !matches!(error, ConnectError::Resolve(_)) {
                cursor.failed();
            }
            attempt.next_cursor = Some(cursor);
        }
        let action = attempt.happy_eyeballs.failed(transport, error.failure());
        attempt.failures.retain(|(failed, _)| *failed != transport);
        attempt.failures.push((transport, error));
        match action {
            DialAction::Dial(transport) => self.dial(transport, now),
            DialAction::Wait => {}
            DialAction::RoundFailed => self.handle_round_failure(now),
            DialAction::Exhausted => {
                self.handle_round_failure(now);
                self.abandon();
            }
        }
    }

    /// Handles a round in which no transport gave a ready session.
    pub(super) fn handle_round_failure(&mut self, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let failures = &attempt.failures;
        match attempt.purpose {
            DialPurpose::Upgrade => self.report.probe_failed(failures),
            DialPurpose::Refresh => {
                self.report.probe_failed(failures);
                self.refresh_at = Some(now + REFRESH_RETRY);
            }
            DialPurpose::Connect => {
                if let Some(cursor) = attempt.next_cursor.take() {
                    self.endpoints = cursor;
                }
                let decisive = failures.iter().max_by_key(|(_, error)| error.failure());
                let code = decisive.and_then(|(_, error)| error.code());
                // A stopping server reveals nothing about the next one, which may be running by
                // now.
                let is_leaving = self
                    .current
                    .as_ref()
                    .is_some_and(|current| current.draining);
                let reason = match code {
                    Some(CloseCode::Draining | CloseCode::Overloaded) if is_leaving => None,
                    code => code,
                };
                let event = ReconnectEvent::Failed(reason);
                let retry_in = self.backoff.next(event, now, rand::random());
                self.retry_at = Some(now + retry_in);
                self.report.failed(failures, code, retry_in, now);
            }
        }
    }
}

/// Wait after a failed dial with new credentials, while the old session still serves.
const REFRESH_RETRY: Duration = Duration::from_secs(5);
