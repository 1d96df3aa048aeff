//! An admitted session to its end: what the agent is told, what it says, and whether it is still there.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, info, warn};
use tunnel_proto::transport::control::ControlWriter;
use tunnel_proto::transport::liveness::{Liveness, LivenessLimits, State, SuspicionLog, Verdict};
use tunnel_proto::transport::{CloseReason, ClosedBy};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::ControlMessage;
use tunnel_proto::wire::enroll::EnrollReply;

use super::renewing::Renewing;
use super::{Admitted, Sessions};
use crate::config::Limit;
use crate::metrics::{GaugeGuard, Metrics};
use crate::routing::registry::{AgentSession, Suspicion};

/// Reason of the close.
const EXPIRED: &str = "the certificate has ended and was not renewed";
/// Clocks that are shortened for tests must not keep a processor busy.
const LOOK_AT_MOST_EVERY: Duration = Duration::from_millis(1);

impl Sessions {
    /// Runs an admitted session until it ends.
    pub(super) async fn run(&self, admitted: Admitted) {
        let Admitted {
            mut reader,
            writer,
            registration,
        } = admitted;
        let agent = registration.session().clone();
        let _counted = self.metrics.agent(agent.session.transport().label());
        let (word, words) = watch::channel(Word::default());
        // Nothing waits for what the agent is told: on a silent session it may never leave.
        let mut telling = pin!(tell(writer, words));
        let mut watch = Watch::new(agent.clone(), self.limits.liveness, self.metrics.clone());
        let mut closed = pin!(agent.session.closed());
        let mut next_look = pin!(sleep(Duration::ZERO));
        let (mut draining, mut listening, mut able_to_tell) = (false, true, true);
        let mut renewing = Renewing::default();
        // Why the transport says that it ended, or for how long nothing has been heard.
        let ended = loop {
            tokio::select! {
                biased;
                told = &mut closed => break Ok(told),
                () = &mut next_look => {}
                () = agent.busy() => {}
                () = self.shutdown.drain().cancelled(), if !draining => {
                    draining = true;
                    word.send_modify(|word| word.drain = Some(self.limits.drain));
                }
                message = reader.receive(), if listening => match message {
                    Ok(Some(ControlMessage::Renew(csr))) => {
                        if let Err((code, detail)) = renewing.begin(self, &agent, csr) {
                            word.send_modify(|word| word.answer(EnrollReply::Refused(code, detail)));
                        }
                    }
                    Ok(Some(message)) => heed(&message, &agent, &mut watch),
                    Ok(None) => {
                        agent.withdraw();
                        listening = false;
                    }
                    Err(error) => {
                        debug!(agent = %agent.node, session = %agent.id, %error, "control stream ended");
                        let reason = format!("control stream ended: {error}");
                        agent.close(CloseCode::Protocol, &reason).await;
                        listening = false;
                    }
                },
                issued = renewing.done() => {
                    let reply = self.renewed(&agent, issued);
                    word.send_modify(|word| word.answer(reply));
                }
                told = &mut telling, if able_to_tell => {
                    able_to_tell = false;
                    if let Err(error) = told {
                        debug!(agent = %agent.node, session = %agent.id, %error, "control stream takes no more");
                    }
                }
            }
            let now = Instant::now();
            let verdict = watch.look(now);
            word.send_if_modified(|word| {
                let changed = word.doubt != verdict.own_doubt;
                word.doubt = verdict.own_doubt;
                changed
            });
            if verdict.state == State::Dead {
                break Err(verdict.silence);
            }
            let over = agent.valid_until() + self.limits.expired;
            let over = if now < over {
                over
            } else {
                self.registry.valid_until(&agent) + self.limits.expired
            };
            if now >= over && !agent.is_closing() {
                warn!(agent = %agent.node, session = %agent.id, "certificate has ended and was not renewed, ending the session");
                self.metrics.limit(Limit::CertificateLife);
                agent.withdraw();
                let ending = agent.clone();
                self.shutdown.spawn_service(async move {
                    ending.close(CloseCode::CredentialExpired, EXPIRED).await;
                });
            }
            let pause = verdict.look_again.max(LOOK_AT_MOST_EVERY);
            let next = if now < over {
                over.min(now + pause)
            } else {
                now + pause
            };
            next_look.as_mut().reset(next);
        };
        // Gone before the close, which may wait a while for a peer that is not there.
        drop((registration, watch));
        let streams = agent.session.health().streams;
        let reason = match ended {
            Ok(told) => agent.end(told),
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

/// What the agent says.
fn heed(message: &ControlMessage, agent: &AgentSession, watch: &mut Watch) {
    let (node, session) = (&agent.node, agent.id);
    match message {
        ControlMessage::Withdraw => {
            if !agent.is_withdrawn() {
                info!(agent = %node, %session, "agent withdrew, its open streams go on");
            }
            agent.withdraw();
        }
        ControlMessage::Bye(reason) => {
            debug!(agent = %node, %session, reason, "agent said goodbye");
            agent.withdraw();
        }
        ControlMessage::Doubt(silent) => watch.liveness.peer_doubts(*silent),
        ControlMessage::Hello(_)
        | ControlMessage::Welcome(_)
        | ControlMessage::NotAdmitted(..)
        | ControlMessage::Drain(_)
        | ControlMessage::Renew(_)
        | ControlMessage::Renewed(_)
        | ControlMessage::Unknown => {
            debug!(agent = %node, %session, "control message without meaning here");
        }
    }
}

/// What the agent is to be told; only the latest word counts.
#[derive(Debug, Clone, Default)]
struct Word {
    drain: Option<Duration>,
    doubt: bool,
    /// The answer to the last wish for a certificate, and how many there were.
    renewed: Option<EnrollReply>,
    answers: u64,
}

impl Word {
    fn answer(&mut self, reply: EnrollReply) {
        self.renewed = Some(reply);
        self.answers += 1;
    }
}

/// Tells the agent each new word, however long a message takes to leave. Ends when it cannot.
async fn tell(mut writer: ControlWriter, mut words: watch::Receiver<Word>) -> io::Result<()> {
    let mut said = Word::default();
    loop {
        let word = words.borrow_and_update().clone();
        if let (Some(deadline), None) = (word.drain, said.drain) {
            writer.send(&ControlMessage::Drain(deadline)).await?;
        }
        if word.doubt != said.doubt {
            writer.send(&ControlMessage::Doubt(word.doubt)).await?;
        }
        if let Some(reply) = word
            .renewed
            .clone()
            .filter(|_| word.answers != said.answers)
        {
            writer.send(&ControlMessage::Renewed(reply)).await?;
        }
        said = word;
        if words.changed().await.is_err() {
            return Ok(());
        }
    }
}

/// Keeps the registry's opinion of a session up to date.
struct Watch {
    agent: Arc<AgentSession>,
    liveness: Liveness,
    metrics: Metrics,
    state: State,
    suspect: Option<GaugeGuard>,
    log: SuspicionLog,
}

impl Watch {
    fn new(agent: Arc<AgentSession>, limits: LivenessLimits, metrics: Metrics) -> Self {
        let (session, now) = (&agent.session, Instant::now());
        let liveness = Liveness::new(limits, session.transport(), session.health().into(), now);
        Self {
            agent,
            liveness,
            metrics,
            state: State::Live,
            suspect: None,
            log: SuspicionLog::default(),
        }
    }

    fn look(&mut self, now: Instant) -> Verdict {
        let agent = &self.agent;
        let verdict = self.liveness.look(agent.session.health().into(), now);
        if verdict.probe {
            agent.session.probe();
        }
        let suspicion = match verdict.state {
            State::Live => None,
            State::Suspect | State::Dead if verdict.own_doubt => {
                let since = now.checked_sub(verdict.silence).unwrap_or(now);
                Some(Suspicion::Silent(since))
            }
            State::Suspect | State::Dead => Some(Suspicion::Unheard),
        };
        agent.set_suspicion(suspicion);
        if self.state != verdict.state {
            if self.state == State::Live && verdict.own_doubt {
                self.metrics.limit(self.reached(verdict.silence));
            }
            self.state = verdict.state;
            self.suspect = suspicion.map(|_| self.metrics.suspect());
            debug!(agent = %agent.node, session = %agent.id, state = ?verdict.state, "session changed");
        }
        if self.log.is_due(suspicion.is_some(), now) {
            log_change(agent, suspicion, verdict.silence);
        }
        verdict
    }
}

impl Watch {
    /// The limit that makes a session suspect after this silence.
    fn reached(&self, silence: Duration) -> Limit {
        if self.liveness.is_suspect_idle(silence) {
            Limit::SuspectAfterIdle
        } else {
            Limit::SuspectAfterBusy
        }
    }
}

fn log_change(agent: &AgentSession, suspicion: Option<Suspicion>, silence: Duration) {
    let (node, session, transport) = (&agent.node, agent.id, agent.session.transport());
    match suspicion {
        Some(suspicion) => warn!(
            agent = %node, %session, %transport, ?silence, reason = %suspicion,
            "session is suspect, it gets no new streams"
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
        warn!(agent = %node, %session, streams, "streams were cut with the session");
    }
}

#[cfg(test)]
mod tests;
