//! Maintains the sessions of an agent, up to one with each of several servers.
//!
//! [`plan`] decides: a state machine without I/O. [`ConnectorSet`] drives it. Each session has one task
//! ([`session_task`]) from the first packet to the close, and the driver never waits for one.

use std::collections::HashMap;
use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::SmallRng;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{self, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug_span, error};
use tunnel_process::meta::ReadinessBlock;

use crate::config::TransportChoice;
use crate::metrics::SessionState;
use crate::session::{DialId, SessionContext, SessionEvent, SessionHandle};

pub mod assignment;
pub mod backoff;
pub mod distance;
pub(crate) mod endpoint;
mod happy_eyeballs;
pub(crate) mod member_addresses;
mod plan;
mod report;
pub mod search;
mod session_task;
pub(crate) mod status;
mod transport_policy;

use endpoint::Endpoints;
use plan::{Action, CredentialOutcome, Event, Plan, PlanSettings};
pub(crate) use session_task::Dialers;
use session_task::{Admission, ConnectError, SessionExit, SessionTask};
use status::{SESSION, SessionStatuses};
use transport_policy::SessionTransport;

/// The connectors of an agent: the driver of their plan.
pub(crate) struct ConnectorSet {
    plan: Plan,
    dialers: Arc<Dialers>,
    context: Arc<SessionContext>,
    statuses: Arc<SessionStatuses>,
    /// Blocks readiness while no session is live.
    readiness_block: Option<ReadinessBlock>,
    /// Tasks of all sessions.
    tasks: JoinSet<SessionExit>,
    dials: HashMap<task::Id, DialId>,
    sessions: HashMap<DialId, RunningSession>,
    event_sender: mpsc::Sender<(DialId, SessionEvent)>,
    session_event: mpsc::Receiver<(DialId, SessionEvent)>,
    members_changed: watch::Sender<()>,
}

/// What the driver has of a session, or of a dial in progress.
struct RunningSession {
    retire: CancellationToken,
    admission: Option<oneshot::Sender<Admission>>,
}

impl ConnectorSet {
    /// Creates up to `replicas` connectors that hold `readiness_block` until a session is ready.
    pub(crate) fn new(
        dialers: Arc<Dialers>,
        transport: TransportChoice,
        replicas: usize,
        context: Arc<SessionContext>,
        statuses: Arc<SessionStatuses>,
        readiness_block: Option<ReadinessBlock>,
    ) -> Self {
        let settings = PlanSettings {
            node: context.node.clone(),
            server_policy: dialers.server_policy.clone(),
            transport,
            replicas,
            limits: context.limits,
        };
        let metrics = context.metrics.clone();
        let random = SmallRng::seed_from_u64(rand::random());
        let (event_sender, session_event) = mpsc::channel(EVENT_QUEUE);
        Self {
            plan: Plan::new(settings, metrics, random, Instant::now()),
            dialers,
            context,
            statuses,
            readiness_block,
            tasks: JoinSet::new(),
            dials: HashMap::new(),
            sessions: HashMap::new(),
            event_sender,
            session_event,
            members_changed: watch::Sender::new(()),
        }
    }

    /// Runs until every session has ended after a drain began. Dropping the future cuts all sessions.
    pub(crate) async fn run(mut self) {
        let context = self.context.clone();
        let drain = context.shutdown.drain();
        let mut updates = context.rotating_credentials.updates();
        let mut lock_states = context.host_lock.subscribe();
        // The first event is the state at the start.
        lock_states.mark_changed();
        let mut is_draining = false;
        loop {
            self.perform_actions();
            self.publish();
            if self.plan.is_over() {
                return;
            }
            let timeout = self.plan.poll_timeout();
            let wanted_at = self.plan.wanted_at();
            let wanted = async {
                sleep_until(wanted_at.unwrap_or_else(Instant::now)).await;
                context.cloud_sessions.wanted().await;
            };
            let event = tokio::select! {
                biased;
                () = drain.cancelled(), if !is_draining => {
                    is_draining = true;
                    Some(Event::Drain)
                }
                // Before joined tasks: the events of a task precede its end.
                Some((id, session_event)) = self.session_event.recv() => Some(Event::Session(id, session_event)),
                Some(joined) = self.tasks.join_next_with_id() => self.ended(joined),
                Ok(()) = updates.changed() => Some(Event::Renewed),
                Ok(()) = lock_states.changed() => Some(Event::Lock(lock_states.borrow_and_update().clone())),
                () = wanted, if wanted_at.is_some() => Some(Event::Wanted),
                () = sleep_until(timeout.unwrap_or_else(Instant::now)), if timeout.is_some() => None,
            };
            self.update_credentials();
            match event {
                Some(event) => self.plan.handle_event(event, Instant::now()),
                None => self.plan.handle_timeout(Instant::now()),
            }
        }
    }

    fn perform_actions(&mut self) {
        self.update_credentials();
        while let Some(action) = self.plan.poll_action() {
            self.perform(action);
            self.update_credentials();
        }
    }

    fn update_credentials(&mut self) {
        let generation = self.context.rotating_credentials.generation();
        self.plan.set_credentials(generation);
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Dial {
                id,
                transport,
                endpoints,
            } => self.dial(id, transport, endpoints),
            Action::Serve(id) => self.admit(id, Admission::Serve),
            Action::Decline(id) => self.admit(id, Admission::Decline),
            Action::Retire(id) => {
                if let Some(session) = self.sessions.get(&id) {
                    session.retire.cancel();
                }
            }
            Action::MembersChanged => self.members_changed.send_replace(()),
            Action::Credentials(generation, outcome) => {
                self.record_credentials(generation, outcome);
            }
        }
    }

    fn dial(&mut self, id: DialId, transport: SessionTransport, endpoints: Endpoints) {
        let retire = CancellationToken::new();
        let (admission_sender, admission) = oneshot::channel();
        let session_task = SessionTask {
            transport,
            endpoints,
            dialers: self.dialers.clone(),
            context: self.context.clone(),
            handle: SessionHandle {
                id,
                retire: retire.clone(),
                session_event: self.event_sender.clone(),
                members_changed: self.members_changed.subscribe(),
            },
            admission,
        };
        let span =
            debug_span!("session", node = %self.context.node, transport = %transport.transport());
        let task = self.tasks.spawn(session_task.run().instrument(span));
        self.dials.insert(task.id(), id);
        let admission = Some(admission_sender);
        self.sessions
            .insert(id, RunningSession { retire, admission });
    }

    fn admit(&mut self, id: DialId, admission: Admission) {
        let session = self.sessions.get_mut(&id);
        if let Some(sender) = session.and_then(|session| session.admission.take()) {
            let _task_has_panicked = sender.send(admission);
        }
    }

    fn record_credentials(&self, generation: u64, outcome: CredentialOutcome) {
        let rotating_credentials = &self.context.rotating_credentials;
        match outcome {
            CredentialOutcome::Accepted => {
                rotating_credentials.accept(generation);
                let rotating_credentials = rotating_credentials.clone();
                let confirm = async move { rotating_credentials.confirm(generation).await };
                self.context.shutdown.spawn_service(confirm);
            }
            CredentialOutcome::Failed => rotating_credentials.refused(generation),
            CredentialOutcome::Refused(refusal) => rotating_credentials.refuse(generation, refusal),
            CredentialOutcome::ServerUntrusted => rotating_credentials.distrust_server(generation),
        }
    }

    fn ended(&mut self, joined: Result<(task::Id, SessionExit), JoinError>) -> Option<Event> {
        let (task_id, exit) = joined.unwrap_or_else(|panic| {
            error!(node = %self.context.node, error = %panic, "session task panicked");
            let (endpoints, outcome) = (None, Err(ConnectError::Panicked));
            (panic.id(), SessionExit { endpoints, outcome })
        });
        let id = self.dials.remove(&task_id)?;
        self.sessions.remove(&id);
        Some(Event::Ended(id, exit))
    }

    /// Publishes the sessions: readiness, metrics, and the status that operators see.
    fn publish(&mut self) {
        self.statuses.set(self.plan.statuses());
        for state in SessionState::ALL {
            let sessions = self.plan.sessions(state);
            self.context.metrics.set_sessions(state, sessions);
        }
        if self.plan.is_ready() {
            self.readiness_block = None;
        } else if self.readiness_block.is_none() {
            self.readiness_block = Some(self.statuses.readiness().block(SESSION));
        }
    }
}

/// Events queued for the connectors, which receive them at once. A session waits if the queue is
/// full.
const EVENT_QUEUE: usize = 64;

#[cfg(test)]
mod tests;
