//! The loop of an admitted session: control messages in both directions, renewal and liveness,
//! until the session ends. Liveness changes the session's state in the registry and the metrics.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};
use tunnel_process::timers::coalesced;
use tunnel_proto::session::{
    ControlSender, LivenessCheck, LivenessLimits, LivenessState, Observation, SessionMonitor,
    SilenceCause, Transition,
};
use tunnel_proto::transport::{CloseReason, ClosedBy, StreamCut, find_cause};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Member};
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::name::SessionId;

use super::admission::AdmittedSession;
use super::failures::{FailedNode, SHORT_SESSION};
use super::renewal::RenewalTask;
use super::{Sessions, can_agents_move};
use crate::config::Limit;
use crate::failure_code::SHORT_SESSION_CODE;
use crate::metrics::{GaugeGuard, Metrics};
use crate::routing::registry::{AgentSession, LastClose, SuspectReason};

/// Reason text of a close with [`CloseCode::CredentialExpired`].
const EXPIRED: &str = "certificate expired and was not renewed";
/// Longest time within which the agents renew that are asked to, so that a server does not issue the
/// certificates of thousands at once.
const RENEWED_WITHIN_MAX: Duration = Duration::from_secs(600);
/// Reason text of the close of a session that its agent has lost.
const LOST: &str = "agent has lost the connection";

impl Sessions {
    pub(super) async fn run(&self, admitted: AdmittedSession) {
        let AdmittedSession {
            mut reader,
            writer,
            registration,
            members,
            cloud,
        } = admitted;
        let agent = registration.session().clone();
        let _counted = self.metrics.agent(agent.session.transport().label());
        let connections = self.saved_connections.as_ref();
        let saved = connections
            .and_then(|connections| Some(connections.save(agent.session.reset_target()?)));
        if let Some(cloud) = cloud {
            let accepting = cloud.accept_streams(agent.clone());
            self.shutdown.spawn_service(accepting);
        }
        let (control_sender, sending) = ControlSender::new(writer);
        // The loop polls the future, because a task for each session would cost memory. The loop
        // never waits for a message to be sent, because it may never leave on a silent session.
        let mut sending = pin!(sending);
        let mut monitor = AgentMonitor::new(
            agent.clone(),
            self.limits.load().liveness(),
            self.metrics.clone(),
        );
        let mut closed = pin!(agent.session.closed());
        let mut next_poll = pin!(sleep(Duration::ZERO));
        // Both stay registered: all sessions share the lists of waiters and their locks.
        let mut leaving = pin!(self.shutdown.leaving().cancelled());
        let mut members_sent = pin!(send_members(members, &control_sender));
        let (mut is_leaving, mut can_recv, mut can_send) = (false, true, true);
        let mut renewal = RenewalTask::default();
        let ended = loop {
            tokio::select! {
                biased;
                result = &mut closed => break Ok(result),
                () = &mut next_poll => {}
                () = agent.busy() => {}
                () = &mut leaving, if !is_leaving => {
                    is_leaving = true;
                    control_sender.drain(self.drain, self.move_within());
                }
                never = &mut members_sent => match never {},
                received = reader.receive(), if can_recv => match received {
                    Ok(Some(ControlMessage::Renew(csr))) => {
                        if let Err((code, detail)) = renewal.begin(self, &agent, csr) {
                            control_sender.renewed(EnrollReply::Refused(code, detail));
                        }
                    }
                    Ok(Some(message)) => self.handle_control(&message, &agent, &mut monitor),
                    ended @ (Ok(None) | Err(_)) => {
                        can_recv = false;
                        control_ended(&agent, ended.err()).await;
                    }
                },
                issued = renewal.done() => control_sender.renewed(self.renewed(&agent, issued)),
                result = &mut sending, if can_send => {
                    can_send = false;
                    if let Err(error) = result {
                        debug!(node = %agent.node, session = agent.id.0, %error, "cannot send on the control stream");
                    }
                }
            }
            if agent.take_diag_request() {
                control_sender.diag_request();
            }
            if agent.take_renewal_request() {
                let life = self.limits.load().certificate_life;
                control_sender.renew_soon(RENEWED_WITHIN_MAX.min(life / 20));
            }
            match self.check(&agent, &mut monitor, &control_sender) {
                Ok(next) => next_poll.as_mut().reset(coalesced(next)),
                Err(check) => break Err(check),
            }
        };
        // Dropped before the close, which can wait for a peer that is gone.
        drop((registration, monitor, saved));
        self.end(&agent, ended).await;
    }

    /// Returns the time within which agents move to another server, or zero without one.
    fn move_within(&self) -> Duration {
        if can_agents_move(&self.peers.members().borrow(), self.peers.own()) {
            self.move_within
        } else {
            Duration::ZERO
        }
    }

    /// Checks the liveness of the agent and the life of its certificate. Returns the time of the
    /// next check, or the result of the check on a dead session.
    fn check(
        &self,
        agent: &Arc<AgentSession>,
        monitor: &mut AgentMonitor,
        control_sender: &ControlSender,
    ) -> Result<Instant, LivenessCheck> {
        let now = Instant::now();
        let observation = monitor.check(now);
        control_sender.suspect(observation.check.is_suspect_locally);
        if observation.is_receive_report_due {
            control_sender.receiving();
        }
        if observation.transition == Transition::Dead {
            return Err(observation.check);
        }
        let expires_at = self.close_expired(agent, now);
        let next_check = monitor.next_check();
        Ok(expires_at.map_or(next_check, |expires_at| expires_at.min(next_check)))
    }

    /// Closes the session if its certificate has ended and was not renewed, by any session of the
    /// agent's process. Returns the time of the close while the certificate is valid.
    fn close_expired(&self, agent: &Arc<AgentSession>, now: Instant) -> Option<Instant> {
        let grace = self.limits.load().expiry_grace();
        let expires_at = agent.valid_until() + grace;
        if now < expires_at {
            return Some(expires_at);
        }
        let expires_at = self.registry.valid_until(agent) + grace;
        if now < expires_at {
            return Some(expires_at);
        }
        if !agent.is_closing() {
            warn!(node = %agent.node, session = agent.id.0, "certificate expired and was not renewed, closing the session");
            self.metrics.limit(Limit::CertificateLife);
            agent.withdraw();
            let ending = agent.clone();
            self.shutdown.spawn_service(async move {
                ending.close(CloseCode::CredentialExpired, EXPIRED).await;
            });
        }
        None
    }

    /// Reports the end of a session. `ended` is the reason of the close from the transport, or the
    /// last check of a dead session, which is closed first.
    async fn end(&self, agent: &AgentSession, ended: Result<CloseReason, LivenessCheck>) {
        let streams = agent.session.stats().streams;
        let remote = agent.session.stats().remote;
        let last_seen = agent.last_seen(SystemTime::now());
        let reason = match ended {
            Ok(result) => agent.end(result),
            Err(check) => self.close_dead(agent, check).await,
        };
        self.metrics.session_ended(reason.code);
        self.record_short(agent, &reason);
        let close = LastClose::new(&reason, remote, last_seen, SystemTime::now());
        self.registry.record_close(&agent.node, close);
        self.nodes.record_last_seen(&agent.node, last_seen);
        log_end(agent, &reason, streams);
    }

    /// Records the end of a session that was short, and not because an end was stopped or has another
    /// session.
    fn record_short(&self, agent: &AgentSession, reason: &CloseReason) {
        let is_orderly = match reason.code {
            CloseCode::Normal | CloseCode::Draining | CloseCode::Superseded => true,
            CloseCode::Protocol
            | CloseCode::Version
            | CloseCode::NameNotInCredential
            | CloseCode::NameInUse
            | CloseCode::HandshakeTimeout
            | CloseCode::Dead
            | CloseCode::CredentialRevoked
            | CloseCode::Overloaded
            | CloseCode::CredentialExpired
            | CloseCode::TooManySessions
            | CloseCode::CredentialUntrusted
            | CloseCode::Unknown(_) => false,
        };
        let age = agent.age(Instant::now());
        if is_orderly || age >= SHORT_SESSION {
            return;
        }
        let detail = format!(
            "session over {} ended after {} s by {} ({}): {}",
            agent.session.transport(),
            age.as_secs(),
            reason.by,
            reason.code,
            reason.reason
        );
        let node = FailedNode::Verified(agent.node.clone());
        let remote = agent.session.stats().remote;
        self.record_failure(SHORT_SESSION_CODE, node, remote, detail);
    }

    fn handle_control(
        &self,
        message: &ControlMessage,
        agent: &AgentSession,
        monitor: &mut AgentMonitor,
    ) {
        let (node, session) = (&agent.node, agent.id);
        match message {
            ControlMessage::Withdraw => {
                if !agent.is_withdrawn() {
                    info!(%node, session = session.0, "agent withdrew; open streams continue");
                }
                agent.withdraw();
            }
            ControlMessage::Bye(reason) => {
                debug!(%node, session = session.0, reason, "agent sent Bye");
                agent.withdraw();
            }
            ControlMessage::Suspect(silent) => monitor.peer_suspects(*silent),
            ControlMessage::Receiving => monitor.peer_receives(),
            ControlMessage::Lost(sessions) => self.close_lost(agent, sessions),
            ControlMessage::DiagReply(document) => agent.diag_received(document),
            ControlMessage::Hello(_)
            | ControlMessage::Welcome(_)
            | ControlMessage::NotAdmitted(..)
            | ControlMessage::Drain { .. }
            | ControlMessage::Renew(_)
            | ControlMessage::Renewed(_)
            | ControlMessage::Members(_)
            | ControlMessage::DiagRequest
            | ControlMessage::RenewSoon(_)
            | ControlMessage::Unknown => {
                debug!(%node, session = session.0, "unexpected control message");
            }
        }
    }

    /// Closes sessions that the process of `agent` has lost. Their connections may be silent for a
    /// long time, and their streams with them.
    fn close_lost(&self, agent: &AgentSession, sessions: &[SessionId]) {
        let is_lost = |other: &Arc<AgentSession>| {
            other.instance == agent.instance
                && other.id != agent.id
                && sessions.contains(&other.id)
                && !other.is_closing()
        };
        let of_node = self.registry.of_node(&agent.node);
        for lost in of_node.into_iter().filter(is_lost) {
            info!(node = %lost.node, session = lost.id.0, "agent has lost this session and opened another one; closing it");
            lost.withdraw();
            let ending = async move { lost.close(CloseCode::Dead, LOST).await };
            self.shutdown.spawn_service(ending);
        }
    }

    /// Closes the session of an agent that was silent for too long.
    async fn close_dead(&self, agent: &AgentSession, check: LivenessCheck) -> CloseReason {
        self.metrics.limit(Limit::DeadAfter);
        let reason = format!(
            "{} for {} s (limits.deadAfter)",
            check.cause,
            check.silence.as_secs()
        );
        agent.close(CloseCode::Dead, &reason).await;
        CloseReason::local(CloseCode::Dead, reason)
    }
}

/// Sends each change of the list of servers to the agent. Never completes. Cancel-safe.
async fn send_members(
    mut members: watch::Receiver<Arc<[Member]>>,
    control_sender: &ControlSender,
) -> Infallible {
    while members.changed().await.is_ok() {
        let newest = members.borrow_and_update().to_vec();
        control_sender.members(newest);
    }
    std::future::pending().await
}

/// Handles the end of the control stream: the agent sends no more, or violated the protocol.
async fn control_ended(agent: &AgentSession, error: Option<io::Error>) {
    let Some(error) = error else {
        return agent.withdraw();
    };
    debug!(node = %agent.node, session = agent.id.0, %error, "control stream ended");
    if find_cause(&error) == Some(&StreamCut::SessionLost) {
        // The session has ended before, and knows the reason.
        return;
    }
    let reason = format!("control stream ended: {error}");
    agent.close(CloseCode::Protocol, &reason).await;
}

fn log_end(agent: &AgentSession, reason: &CloseReason, streams: usize) {
    let (node, session, stats) = (&agent.node, agent.id, agent.session.stats());
    info!(
        %node, session = session.0, by = %reason.by, code = %reason.code, reason = reason.reason,
        bytes_in = stats.bytes_in, bytes_out = stats.bytes_out, "agent disconnected"
    );
    let lost = reason.by == ClosedBy::Network || reason.code == CloseCode::Dead;
    if lost && streams > 0 {
        warn!(%node, session = session.0, streams, "streams were reset with the session");
    }
}

/// Updates the liveness state of a session in the registry.
struct AgentMonitor {
    agent: Arc<AgentSession>,
    monitor: SessionMonitor,
    metrics: Metrics,
    suspect: Option<GaugeGuard>,
}

impl AgentMonitor {
    /// Creates the monitor of a session that was just admitted.
    fn new(agent: Arc<AgentSession>, limits: LivenessLimits, metrics: Metrics) -> Self {
        let (session, now) = (&agent.session, Instant::now());
        let monitor = SessionMonitor::new(limits, session.transport(), session.stats(), now);
        Self {
            agent,
            monitor,
            metrics,
            suspect: None,
        }
    }

    fn next_check(&self) -> Instant {
        self.monitor.next_check()
    }

    /// Records whether the agent suspects this server. Takes effect with the next check.
    fn peer_suspects(&mut self, is_suspect: bool) {
        self.monitor.peer_suspects(is_suspect, Instant::now());
    }

    /// Records a report of the agent that it receives data.
    fn peer_receives(&mut self) {
        self.monitor.peer_receives();
    }

    /// Checks the session and acts on the result, except that a dead session is not closed.
    fn check(&mut self, now: Instant) -> Observation {
        let agent = &self.agent;
        let observation = self.monitor.check(agent.session.stats(), now);
        let check = observation.check;
        if check.probe {
            agent.session.probe();
        }
        let suspect_reason = match check.state {
            LivenessState::Live => None,
            LivenessState::Suspect | LivenessState::Dead if check.is_suspect_locally => {
                let since = now.checked_sub(check.silence).unwrap_or(now);
                Some(match check.cause {
                    SilenceCause::NoAnswer => SuspectReason::Silent(since),
                    SilenceCause::Undelivered => SuspectReason::Undelivered(since),
                })
            }
            LivenessState::Suspect | LivenessState::Dead => Some(SuspectReason::PeerHearsNothing),
        };
        agent.set_suspect_reason(suspect_reason);
        match observation.transition {
            Transition::Suspect | Transition::Live | Transition::Dead => {
                if self.suspect.is_none() && check.is_suspect_locally {
                    self.metrics.limit(if check.is_suspect_idle {
                        Limit::SuspectAfterIdle
                    } else {
                        Limit::SuspectAfterBusy
                    });
                }
                self.suspect = suspect_reason.map(|_| self.metrics.suspect());
                debug!(node = %agent.node, session = agent.id.0, state = ?check.state, "session state changed");
            }
            // The server retires no sessions.
            Transition::Unchanged | Transition::Finished => {}
        }
        if observation.is_log_due {
            log_change(agent, suspect_reason, check.silence);
        }
        observation
    }
}

fn log_change(agent: &AgentSession, suspect_reason: Option<SuspectReason>, silence: Duration) {
    let (node, session, transport) = (&agent.node, agent.id, agent.session.transport());
    match suspect_reason {
        Some(suspect_reason) => warn!(
            %node, session = session.0, %transport, silence = silence.as_secs_f64(), reason = %suspect_reason,
            "session is suspect; no new streams are opened on it"
        ),
        None => info!(%node, session = session.0, %transport, "session is live again"),
    }
}

#[cfg(test)]
mod tests;
