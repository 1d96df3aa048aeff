//! Sessions that are being dialled: from the first packet of an attempt to its end.

use std::time::Duration;

use tokio::task::Id;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug_span};
use tunnel_proto::wire::code::CloseCode;

use super::endpoint::Endpoints;
use super::ladder::Rung;
use super::lane::{ConnectError, Lane};
use super::plan::Event;
use super::race::{Race, Step};
use super::{Connector, Running};
use crate::session::Tether;

/// Sessions that are being dialled; the first that is ready wins.
pub(super) struct Attempt {
    pub(super) purpose: Purpose,
    pub(super) race: Race,
    /// Where to look in this round, and in the next.
    pub(super) place: Endpoints,
    pub(super) next_place: Option<Endpoints>,
    /// The tasks that are at it.
    pub(super) lanes: Vec<Id>,
    /// The last failure of each transport.
    pub(super) failures: Vec<(Rung, ConnectError)>,
}

/// Why sessions are dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// No live session is there, or its server is stopping.
    Connect,
    /// A session over h2 is, and QUIC would be better.
    Climb,
    /// A session with older credentials is.
    Refresh,
}

impl Connector {
    /// Begins an attempt with the first of `order`.
    pub(super) fn begin(&mut self, purpose: Purpose, order: (Rung, Option<Rung>), now: Instant) {
        self.retry_at = None;
        self.attempt = Some(Attempt {
            purpose,
            race: Race::new(order, now, self.shared.limits.quic_head_start),
            place: self.endpoints.clone(),
            next_place: None,
            lanes: Vec::new(),
            failures: Vec::new(),
        });
        self.dial(order.0, now);
    }

    /// Starts the task of a session for the attempt.
    pub(super) fn dial(&mut self, rung: Rung, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        self.ladder.tried(rung, now, rand::random());
        let retire = CancellationToken::new();
        let lane = Lane {
            rung,
            place: attempt.place.clone(),
            paths: self.paths.clone(),
            shared: self.shared.clone(),
            tether: Tether {
                retire: retire.clone(),
                news: self.tell.clone(),
            },
        };
        let credentials = self.shared.keeper.generation();
        let span = debug_span!("session", agent = %self.shared.node, transport = %rung.transport());
        let id = self.tasks.spawn(lane.run().instrument(span)).id();
        attempt.lanes.push(id);
        let running = Running {
            rung,
            retire,
            credentials,
        };
        self.sessions.insert(id, running);
    }

    /// Lets go of what is being dialled. A session that the server may have admitted retires after its Welcome.
    pub(super) fn abandon(&mut self) {
        for id in self
            .attempt
            .take()
            .into_iter()
            .flat_map(|attempt| attempt.lanes)
        {
            self.retire(id);
        }
    }

    /// One transport of an attempt has failed.
    pub(super) fn failed(
        &mut self,
        rung: Rung,
        place: Endpoints,
        error: ConnectError,
        now: Instant,
    ) {
        self.count(rung, &error);
        match error.code() {
            Some(CloseCode::CredentialExpired) => self.shared.keeper.reject(),
            Some(CloseCode::CredentialRevoked) => self.shared.keeper.revoke(),
            Some(_) | None => {}
        }
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        if attempt.next_place.is_none() || rung == attempt.race.first() {
            let mut place = place;
            // The place is the next server's already when a name was not resolved.
            if !matches!(error, ConnectError::Resolve(_)) {
                place.failed();
            }
            attempt.next_place = Some(place);
        }
        let step = attempt.race.failed(rung, error.failure());
        attempt.failures.retain(|(failed, _)| *failed != rung);
        attempt.failures.push((rung, error));
        match step {
            Step::Dial(rung) => self.dial(rung, now),
            Step::Wait => {}
            Step::Rest => self.round_over(now),
            Step::Over => {
                self.round_over(now);
                self.abandon();
            }
        }
    }

    /// No transport of the attempt gave a ready session so far.
    pub(super) fn round_over(&mut self, now: Instant) {
        let Some(attempt) = &mut self.attempt else {
            return;
        };
        let failures = &attempt.failures;
        match attempt.purpose {
            Purpose::Climb => self.report.probe_failed(failures),
            Purpose::Refresh => {
                self.report.probe_failed(failures);
                self.refresh_at = Some(now + REFRESH_AGAIN);
            }
            Purpose::Connect => {
                if let Some(place) = attempt.next_place.take() {
                    self.endpoints = place;
                }
                let decisive = failures.iter().max_by_key(|(_, error)| error.failure());
                let code = decisive.and_then(|(_, error)| error.code());
                // That one server is stopping says nothing about the next one, which may be there by now.
                let is_leaving = self.current.as_ref().is_some_and(|held| held.draining);
                let reason = match code {
                    Some(CloseCode::Draining | CloseCode::Overloaded) if is_leaving => None,
                    code => code,
                };
                let event = Event::Failed(reason);
                let retry_in = self.plan.next(event, now, rand::random());
                self.retry_at = Some(now + retry_in);
                self.report.failed(failures, code, retry_in, now);
            }
        }
    }
}

/// When a session with new credentials did not come about, while the old one still serves.
const REFRESH_AGAIN: Duration = Duration::from_secs(5);
