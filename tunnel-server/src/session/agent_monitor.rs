//! What the liveness of a session changes: its state in the registry, metrics and log lines.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{debug, info, warn};
use tunnel_proto::session::{
    LivenessLimits, LivenessState, Observation, SessionMonitor, Transition,
};

use crate::config::Limit;
use crate::metrics::{GaugeGuard, Metrics};
use crate::routing::registry::{AgentSession, SuspectReason};

/// Updates the liveness state of a session in the registry.
pub(super) struct AgentMonitor {
    agent: Arc<AgentSession>,
    monitor: SessionMonitor,
    metrics: Metrics,
    /// Counts the session in the gauge while it is suspect.
    suspect: Option<GaugeGuard>,
}

impl AgentMonitor {
    /// Creates the monitor of a session that was just admitted.
    pub(super) fn new(agent: Arc<AgentSession>, limits: LivenessLimits, metrics: Metrics) -> Self {
        let (session, now) = (&agent.session, Instant::now());
        let monitor = SessionMonitor::new(limits, session.transport(), session.health(), now);
        Self {
            agent,
            monitor,
            metrics,
            suspect: None,
        }
    }

    /// Returns the time of the next check.
    pub(super) fn next_check(&self) -> Instant {
        self.monitor.next_check()
    }

    /// Records whether the agent suspects this server. Takes effect with the next check.
    pub(super) fn peer_suspects(&mut self, is_suspect: bool) {
        self.monitor.peer_suspects(is_suspect, Instant::now());
    }

    /// Checks the session and acts on the result, except that a dead session is not closed.
    pub(super) fn check(&mut self, now: Instant) -> Observation {
        let agent = &self.agent;
        let observation = self.monitor.check(agent.session.health(), now);
        let check = observation.check;
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
                debug!(agent = %agent.node, session = %agent.id, state = ?check.state, "session state changed");
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
            agent = %node, %session, %transport, ?silence, reason = %suspect_reason,
            "session is suspect; no new streams are opened on it"
        ),
        None => info!(agent = %node, %session, %transport, "session is live again"),
    }
}
