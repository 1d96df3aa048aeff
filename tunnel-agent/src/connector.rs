//! Holds the session that takes new streams: dials, races transports, replaces what is silent, and climbs back to QUIC.
//!
//! One task per session ([`lane`]) from the first packet to the last goodbye; this loop decides and never waits for any
//! of them. At most one session is *current*; others are being dialled, or have retired and end with their last stream.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tunnel_proto::process::meta::{Readiness, ReadinessBlock};
use tunnel_proto::transport::{CloseReason, ClosedBy};
use tunnel_proto::wire::code::CloseCode;

use crate::config::TransportChoice;
use crate::metrics::{ConnectResult, Limit};
use crate::session::{Held, News, Shared};

mod attempt;
pub(crate) mod endpoint;
mod ladder;
mod lane;
pub mod plan;
mod race;
mod report;

use attempt::{Attempt, Purpose};
use endpoint::Endpoints;
use ladder::{Change, Ladder, Rung};
pub(crate) use lane::Paths;
use lane::{ConnectError, Ended};
use plan::{Event, Plan};
use report::Report;
pub(crate) use report::causes;

/// Connects this agent to its servers.
pub(crate) struct Connector {
    paths: Arc<Paths>,
    shared: Arc<Shared>,
    readiness: Readiness,
    plan: Plan,
    ladder: Ladder,
    endpoints: Endpoints,
    report: Report,
    /// The tasks of all sessions, and how to let each of them go.
    tasks: JoinSet<Ended>,
    sessions: HashMap<Id, Running>,
    tell: mpsc::Sender<(Id, News)>,
    news: mpsc::Receiver<(Id, News)>,
    current: Option<Current>,
    attempt: Option<Attempt>,
    /// When the next attempt begins, or the next round of one that rests.
    retry_at: Option<Instant>,
    /// When a session with newer credentials is to be dialled beside the current one.
    refresh_at: Option<Instant>,
    /// Held while no live session takes new streams.
    waiting: Option<ReadinessBlock>,
    draining: bool,
}

struct Running {
    rung: Rung,
    retire: CancellationToken,
    /// Which credentials it was dialed with, see [`Keeper::generation`](crate::credentials::Keeper::generation).
    credentials: u64,
}

/// The session that takes new streams.
struct Current {
    id: Id,
    rung: Rung,
    since: Instant,
    /// Another one is wanted, but this one may still recover.
    suspect: bool,
    /// Another one is wanted, since this one's server is stopping.
    draining: bool,
}

impl Current {
    fn wants_another(&self) -> bool {
        self.suspect || self.draining
    }
}

impl Connector {
    /// A connector that holds `waiting` until a session is ready.
    pub(crate) fn new(
        paths: Arc<Paths>,
        transport: TransportChoice,
        shared: Arc<Shared>,
        readiness: Readiness,
        waiting: Option<ReadinessBlock>,
    ) -> Self {
        let (tell, news) = mpsc::channel(NEWS_QUEUE);
        Self {
            plan: Plan::new(),
            ladder: Ladder::new(transport, &shared.limits),
            endpoints: Endpoints::default(),
            report: Report::new(shared.node.clone()),
            tasks: JoinSet::new(),
            sessions: HashMap::new(),
            tell,
            news,
            current: None,
            attempt: None,
            retry_at: None,
            refresh_at: None,
            waiting,
            draining: false,
            paths,
            shared,
            readiness,
        }
    }

    /// Runs until a drain is over and every session has ended. Dropped early, all sessions are cut.
    pub(crate) async fn run(mut self) {
        let drain = self.shared.shutdown.drain().clone();
        let mut fresh = self.shared.keeper.fresh();
        self.retry_at = Some(Instant::now());
        loop {
            if self.draining && self.tasks.is_empty() {
                return;
            }
            let due = self.due();
            tokio::select! {
                biased;
                () = drain.cancelled(), if !self.draining => {
                    self.draining = true;
                    self.retry_at = None;
                    self.abandon();
                }
                // Before the ends of tasks: what a task told comes before its end.
                Some((id, news)) = self.news.recv() => self.heed(id, news),
                Some(joined) = self.tasks.join_next_with_id() => self.ended(joined),
                Ok(()) = fresh.changed(), if !self.draining => self.refresh(Instant::now()),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.act(Instant::now()),
            }
        }
    }

    /// When something is to be begun.
    fn due(&self) -> Option<Instant> {
        match (&self.attempt, &self.current) {
            (Some(attempt), _) if !attempt.race.is_resting() => attempt.race.due(),
            (None, Some(current)) if !current.wants_another() && !self.draining => {
                [self.refresh_at, self.ladder.probe_at()]
                    .into_iter()
                    .flatten()
                    .min()
            }
            (Some(_) | None, _) => self.retry_at,
        }
    }

    fn act(&mut self, now: Instant) {
        match (&mut self.attempt, &self.current) {
            (Some(attempt), _) if attempt.race.is_resting() => {
                attempt.place = self.endpoints.clone();
                let rung = attempt.race.again(now);
                self.dial(rung, now);
            }
            (Some(attempt), _) => {
                if let Some(rung) = attempt.race.head_start_over() {
                    self.shared.metrics.limit(Limit::QuicHeadStart);
                    self.dial(rung, now);
                }
            }
            (None, Some(current))
                if !current.wants_another() && self.refresh_at.is_some_and(|at| at <= now) =>
            {
                let rung = current.rung;
                self.refresh_at = None;
                self.begin(Purpose::Refresh, (rung, None), now);
            }
            (None, Some(current)) if !current.wants_another() => {
                self.begin(Purpose::Climb, (Rung::Quic, None), now);
            }
            (None, _) => self.begin(Purpose::Connect, self.ladder.order(), now),
        }
    }

    /// There are new credentials: the next session has them, and one is wanted now.
    fn refresh(&mut self, now: Instant) {
        // What is being dialled may have begun with the old ones.
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
    }

    fn heed(&mut self, id: Id, news: News) {
        let now = Instant::now();
        let is_current = self
            .current
            .as_ref()
            .is_some_and(|current| current.id == id);
        let Some(&Running {
            rung, credentials, ..
        }) = self.sessions.get(&id)
        else {
            return;
        };
        match news {
            News::Answered => {
                let attempt = self.attempt.as_mut();
                if let Some(attempt) = attempt.filter(|attempt| attempt.lanes.contains(&id)) {
                    attempt.race.answered(rung);
                }
            }
            News::Ready => {
                let keeper = self.shared.keeper.clone();
                let shutdown = &self.shared.shutdown;
                shutdown.spawn_service(async move { keeper.proved(credentials).await });
                self.ready(id, rung, now);
            }
            News::Draining if is_current => self.server_drains(now),
            News::Suspect if is_current => self.suspect(now),
            News::Live if is_current => self.live(),
            // Of a retired session.
            News::Live if rung == Rung::Quic => self.ladder.quic_answers(now),
            News::Suspect | News::Live | News::Draining => {}
        }
    }

    fn ready(&mut self, id: Id, rung: Rung, now: Instant) {
        let metrics = &self.shared.metrics;
        metrics.connect_attempt(rung.transport(), ConnectResult::Ready);
        let attempt = self.attempt.take_if(|attempt| attempt.lanes.contains(&id));
        let Some(attempt) = attempt else {
            // Abandoned meanwhile; it retires by itself.
            return;
        };
        for other in attempt.lanes.into_iter().filter(|other| *other != id) {
            self.retire(other);
        }
        let current = Current {
            id,
            rung,
            since: now,
            suspect: false,
            draining: false,
        };
        if let Some(old) = self.current.replace(current) {
            self.retire(old.id);
        }
        self.retry_at = None;
        self.waiting = None;
        let change = self.ladder.ready(rung, now, rand::random());
        match change {
            Change::None => {}
            Change::Fallback => self.shared.metrics.fallback(),
            Change::Promotion => self.shared.metrics.promotion(),
        }
        self.report.ready(change);
    }

    /// The current session is silent: another one is wanted beside it.
    fn suspect(&mut self, now: Instant) {
        let Some(current) = &mut self.current else {
            return;
        };
        current.suspect = true;
        let event = Event::Lost {
            ready_for: now.duration_since(current.since),
            code: CloseCode::Dead,
        };
        let is_replaced = current.draining;
        self.not_ready();
        self.ladder.missed(now);
        if is_replaced {
            return;
        }
        // What was dialled for another purpose.
        self.abandon();
        self.retry(event, now);
    }

    /// It is heard again, before another one was ready.
    fn live(&mut self) {
        self.waiting = None;
        self.ladder.heard();
        if let Some(current) = &mut self.current {
            current.suspect = false;
            if current.draining {
                return;
            }
        }
        self.abandon();
        self.retry_at = None;
        self.report.over();
    }

    /// The server of the current session is stopping: another session is dialed until one is ready, and this one takes
    /// new streams until then. It may lead to the same address, where another server answers by then.
    fn server_drains(&mut self, now: Instant) {
        let Some(current) = self.current.as_mut().filter(|current| !current.draining) else {
            return;
        };
        current.draining = true;
        if current.suspect {
            // Another one is being dialed already.
            return;
        }
        let event = Event::Lost {
            ready_for: now.duration_since(current.since),
            code: CloseCode::Draining,
        };
        self.abandon();
        // Where there are several servers, not this one first.
        self.endpoints.failed();
        let spread = DRAIN_SPREAD.mul_f64(rand::random());
        let retry_in = self.plan.next(event, now, rand::random());
        if !self.draining {
            self.retry_at = Some(now + retry_in + spread);
        }
    }

    fn ended(&mut self, joined: Result<(Id, Ended), JoinError>) {
        let now = Instant::now();
        let (id, ended) = match joined {
            Ok((id, ended)) => (id, Ok(ended)),
            Err(panicked) => (panicked.id(), Err(panicked)),
        };
        let Some(Running {
            rung, credentials, ..
        }) = self.sessions.remove(&id)
        else {
            return;
        };
        let ended = ended.unwrap_or_else(|panicked| {
            self.report.broken(rung, &panicked);
            Ended {
                place: self.endpoints.clone(),
                outcome: Err(ConnectError::Broken),
            }
        });
        if let Err(error) = &ended.outcome
            && error.is_over_certificates()
        {
            self.shared.keeper.refused(credentials);
        }
        let current = self.current.take_if(|current| current.id == id);
        if let Some(current) = current {
            return self.lost(&current, ended.outcome, now);
        }
        match (&mut self.attempt, ended.outcome) {
            (Some(attempt), Err(error)) if attempt.lanes.contains(&id) => {
                attempt.lanes.retain(|lane| *lane != id);
                self.failed(rung, ended.place, error, now);
            }
            (_, Err(error)) => self.count(rung, &error),
            (_, Ok(held)) => self.report.ended(rung, &held),
        }
    }

    /// The current session has ended.
    fn lost(&mut self, current: &Current, outcome: Result<Held, ConnectError>, now: Instant) {
        let held = outcome.unwrap_or_else(|error| Held {
            ready_for: now.duration_since(current.since),
            reason: CloseReason {
                by: ClosedBy::Local,
                code: CloseCode::Protocol,
                reason: error.to_string(),
            },
        });
        self.not_ready();
        self.ladder.missed(now);
        // Another one is being dialled already, and that this end gave up says nothing new about the path.
        let is_old_news = current.suspect && held.reason.by == ClosedBy::Local;
        if self.draining {
            return self.report.ended(current.rung, &held);
        }
        if is_old_news {
            return self.report.lost(current.rung, &held, None);
        }
        if held.reason.code == CloseCode::CredentialRevoked {
            self.shared.keeper.revoke();
        }
        let event = Event::Lost {
            ready_for: held.ready_for,
            code: held.reason.code,
        };
        let dialling = self
            .attempt
            .take_if(|attempt| attempt.purpose == Purpose::Connect);
        // What is left was dialled for another purpose.
        self.abandon();
        let retry_in = self.retry(event, now);
        self.attempt = dialling;
        // A server that is back, which its word on the old session shows, is better asked afresh; so is the one that comes
        // after a server that has stopped.
        if retry_in.is_zero() || current.draining {
            self.abandon();
        }
        let retry_in = self.attempt.is_none().then_some(retry_in);
        self.report.lost(current.rung, &held, retry_in);
    }

    /// Asks the plan when the next attempt begins.
    fn retry(&mut self, event: Event, now: Instant) -> Duration {
        let retry_in = self.plan.next(event, now, rand::random());
        if !self.draining {
            self.retry_at = Some(now + retry_in);
        }
        retry_in
    }

    fn count(&self, rung: Rung, error: &ConnectError) {
        let metrics = &self.shared.metrics;
        if error.failure() == race::Failure::Silence {
            metrics.limit(Limit::HandshakeTimeout);
        }
        metrics.connect_attempt(rung.transport(), error.result());
    }

    fn not_ready(&mut self) {
        let readiness = &self.readiness;
        self.waiting.get_or_insert_with(|| readiness.block(SESSION));
    }
}

/// The readiness block that a ready session lifts.
pub(crate) const SESSION: &str = "session";
/// All agents of a server that stops hear of it in the same moment: their dials are spread over this time. Requests wait for
/// the slowest of them.
const DRAIN_SPREAD: Duration = Duration::from_millis(500);
/// News that wait for the connector, which takes them at once; a session that finds the queue full waits.
const NEWS_QUEUE: usize = 64;

#[cfg(test)]
mod tests;
