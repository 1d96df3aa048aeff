//! The loop of an admitted session: control messages in both directions, renewal and liveness,
//! until the session ends.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};
use tunnel_proto::session::{
    ControlSender, Liveness, LivenessCheck, LivenessLimits, LivenessState, SuspectLogThrottle,
};
use tunnel_proto::transport::{CloseReason, ClosedBy};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::ControlMessage;
use tunnel_proto::wire::enroll::EnrollReply;

use super::renewal::RenewalTask;
use super::{AdmittedSession, Sessions};
use crate::config::Limit;
use crate::metrics::{GaugeGuard, Metrics};
use crate::routing::registry::{AgentSession, SuspectReason};

/// Reason text of a close with [`CloseCode::CredentialExpired`].
const EXPIRED: &str = "certificate expired and was not renewed";
/// Shortest poll interval. Prevents a busy loop when tests use very short limits.
const POLL_INTERVAL_MIN: Duration = Duration::from_millis(1);

impl Sessions {
    /// Runs an admitted session until it ends.
    pub(super) async fn run(&self, admitted: AdmittedSession) {
        let AdmittedSession {
            mut reader,
            writer,
            registration,
        } = admitted;
        let agent = registration.session().clone();
        let _counted = self.metrics.agent(agent.session.transport().label());
        let (control_sender, sending) = ControlSender::new(writer);
        // Polled by the loop, because a task for each session would cost memory. The loop never waits
        // for a message to be sent, because it may never leave on a silent session.
        let mut sending = pin!(sending);
        let mut watch =
            SessionMonitor::new(agent.clone(), self.limits.liveness, self.metrics.clone());
        let mut closed = pin!(agent.session.closed());
        let mut next_poll = pin!(sleep(Duration::ZERO));
        let (mut draining, mut can_recv, mut can_send) = (false, true, true);
        let mut renewal = RenewalTask::default();
        // The reason of the close from the transport, or the time of silence on a dead session.
        let ended = loop {
            tokio::select! {
                biased;
                result = &mut closed => break Ok(result),
                () = &mut next_poll => {}
                () = agent.busy() => {}
                () = self.shutdown.drain().cancelled(), if !draining => {
                    draining = true;
                    control_sender.drain(self.limits.drain);
                }
                message = reader.receive(), if can_recv => match message {
                    Ok(Some(ControlMessage::Renew(csr))) => {
                        if let Err((code, detail)) = renewal.begin(self, &agent, csr) {
                            control_sender.renewed(EnrollReply::Refused(code, detail));
                        }
                    }
                    Ok(Some(message)) => handle_control(&message, &agent, &mut watch),
                    Ok(None) => {
                        agent.withdraw();
                        can_recv = false;
                    }
                    Err(error) => {
                        debug!(agent = %agent.node, session = %agent.id, %error, "control stream ended");
                        let reason = format!("control stream ended: {error}");
                        agent.close(CloseCode::Protocol, &reason).await;
                        can_recv = false;
                    }
                },
                issued = renewal.done() => control_sender.renewed(self.renewed(&agent, issued)),
                result = &mut sending, if can_send => {
                    can_send = false;
                    if let Err(error) = result {
                        debug!(agent = %agent.node, session = %agent.id, %error, "cannot send on the control stream");
                    }
                }
            }
            let now = Instant::now();
            let check = watch.check(now);
            control_sender.suspect(check.is_suspect_locally);
            if check.state == LivenessState::Dead {
                break Err(check.silence);
            }
            let expires_at = agent.valid_until() + self.limits.expiry_grace;
            let expires_at = if now < expires_at {
                expires_at
            } else {
                self.registry.valid_until(&agent) + self.limits.expiry_grace
            };
            if now >= expires_at && !agent.is_closing() {
                warn!(agent = %agent.node, session = %agent.id, "certificate expired and was not renewed, closing the session");
                self.metrics.limit(Limit::CertificateLife);
                agent.withdraw();
                let ending = agent.clone();
                self.shutdown.spawn_service(async move {
                    ending.close(CloseCode::CredentialExpired, EXPIRED).await;
                });
            }
            let pause = check.next_check.max(POLL_INTERVAL_MIN);
            let next = if now < expires_at {
                expires_at.min(now + pause)
            } else {
                now + pause
            };
            next_poll.as_mut().reset(next);
        };
        // Dropped before the close, which can wait for a peer that is gone.
        drop((registration, watch));
        let streams = agent.session.health().streams;
        let reason = match ended {
            Ok(result) => agent.end(result),
            Err(silence) => {
                self.metrics.limit(Limit::DeadAfter);
                let reason = format!(
                    "no sign of life for {} s (limits.deadAfter)",
                    silence.as_secs()
                );
                agent.close(CloseCode::Dead, &reason).await;
                CloseReason {
                    by: ClosedBy::Local,
                    code: CloseCode::Dead,
                    reason,
                }
            }
        };
        self.metrics.session_ended(reason.code);
        log_end(&agent, &reason, streams);
    }
}

/// Handles a control message from the agent.
fn handle_control(message: &ControlMessage, agent: &AgentSession, watch: &mut SessionMonitor) {
    let (node, session) = (&agent.node, agent.id);
    match message {
        ControlMessage::Withdraw => {
            if !agent.is_withdrawn() {
                info!(agent = %node, %session, "agent withdrew; open streams continue");
            }
            agent.withdraw();
        }
        ControlMessage::Bye(reason) => {
            debug!(agent = %node, %session, reason, "agent sent Bye");
            agent.withdraw();
        }
        ControlMessage::Suspect(silent) => watch.liveness.peer_suspects(*silent),
        ControlMessage::Hello(_)
        | ControlMessage::Welcome(_)
        | ControlMessage::NotAdmitted(..)
        | ControlMessage::Drain(_)
        | ControlMessage::Renew(_)
        | ControlMessage::Renewed(_)
        | ControlMessage::Unknown => {
            debug!(agent = %node, %session, "unexpected control message");
        }
    }
}

/// Updates the liveness state of a session in the registry.
struct SessionMonitor {
    agent: Arc<AgentSession>,
    liveness: Liveness,
    metrics: Metrics,
    state: LivenessState,
    suspect: Option<GaugeGuard>,
    log: SuspectLogThrottle,
}

impl SessionMonitor {
    fn new(agent: Arc<AgentSession>, limits: LivenessLimits, metrics: Metrics) -> Self {
        let (session, now) = (&agent.session, Instant::now());
        let liveness = Liveness::new(limits, session.transport(), session.health().into(), now);
        Self {
            agent,
            liveness,
            metrics,
            state: LivenessState::Live,
            suspect: None,
            log: SuspectLogThrottle::default(),
        }
    }

    fn check(&mut self, now: Instant) -> LivenessCheck {
        let agent = &self.agent;
        let check = self.liveness.check(agent.session.health().into(), now);
        if check.probe {
            agent.session.probe();
        }
        let suspect_reason = match check.state {
            LivenessState::Live => None,
            LivenessState::Suspect | LivenessState::Dead if check.is_suspect_locally => {
                let since = now.checked_sub(check.silence).unwrap_or(now);
                Some(SuspectReason::Silent(since))
            }
            LivenessState::Suspect | LivenessState::Dead => Some(SuspectReason::PeerHearsNothing),
        };
        agent.set_suspect_reason(suspect_reason);
        if self.state != check.state {
            if self.state == LivenessState::Live && check.is_suspect_locally {
                self.metrics.limit(self.reached(check.silence));
            }
            self.state = check.state;
            self.suspect = suspect_reason.map(|_| self.metrics.suspect());
            debug!(agent = %agent.node, session = %agent.id, state = ?check.state, "session state changed");
        }
        if self.log.is_due(suspect_reason.is_some(), now) {
            log_liveness_change(agent, suspect_reason, check.silence);
        }
        check
    }
}

impl SessionMonitor {
    /// Returns the limit that makes a session suspect after this silence.
    fn reached(&self, silence: Duration) -> Limit {
        if self.liveness.is_suspect_idle(silence) {
            Limit::SuspectAfterIdle
        } else {
            Limit::SuspectAfterBusy
        }
    }
}

fn log_liveness_change(
    agent: &AgentSession,
    suspect_reason: Option<SuspectReason>,
    silence: Duration,
) {
    let (node, session, transport) = (&agent.node, agent.id, agent.session.transport());
    match suspect_reason {
        Some(suspect_reason) => warn!(
            agent = %node, %session, %transport, ?silence, reason = %suspect_reason,
            "session is suspect; no new streams are opened on it"
        ),
        None => info!(agent = %node, %session, %transport, "session is live again"),
    }
}

fn log_end(agent: &AgentSession, reason: &CloseReason, streams: usize) {
    let (node, session, health) = (&agent.node, agent.id, agent.session.health());
    info!(
        agent = %node, %session, by = %reason.by, code = %reason.code, reason = reason.reason,
        bytes_in = health.bytes_in, bytes_out = health.bytes_out, "agent disconnected"
    );
    let lost = reason.by == ClosedBy::Network || reason.code == CloseCode::Dead;
    if lost && streams > 0 {
        warn!(agent = %node, %session, streams, "streams were reset with the session");
    }
}

#[cfg(test)]
mod tests;
