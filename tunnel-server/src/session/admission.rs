//! Admission of a session: from the control stream that the server opens to Welcome.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::{debug, info, warn};
use tunnel_process::telemetry::LogRateLimit;
use tunnel_proto::identity::{BACKDATED, TrustDomain};
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::transport::{CloseReason, Session, SessionError};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{
    CAPABILITY_CLOUD, CAPABILITY_DIAG, CAPABILITY_RENEW, CAPABILITY_RENEW_SOON, ControlMessage,
    Hello, Member, Welcome,
};
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::{InstanceId, NodeName, SessionId};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN, negotiate_version};

use super::Sessions;
use super::failures::FailedNode;
use super::refused::{DISTRUSTED, REVOKED};
use crate::config::Limit;
use crate::egress::CloudEgress;
use crate::routing::registry::{
    AgentSession, LastClose, RegisterError, Registration, answers_probe,
};

/// Time that a refused agent has to acknowledge the reason.
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Rounds of probing before a new session is refused. More rounds occur only if sessions of one
/// name arrive faster than the server can probe them.
const ADMISSION_ROUNDS: usize = 3;
/// Reason that the server sends to a node that opens sessions too fast.
const TOO_FAST: &str = "sessions are opened too fast (limits.admissionsPerNode); is the agent restarted in a loop, or its credential in use elsewhere?";
/// What causes two live agents of one name.
const CLONED: &str = "a cloned disk or a stolen certificate looks like this";

/// Reason why a session was not admitted.
#[derive(Debug, thiserror::Error)]
enum AdmissionError {
    #[error("{1}")]
    Refused(CloseCode, String),
    #[error("control stream failed")]
    Control(#[from] std::io::Error),
    #[error("session closed before Hello")]
    Ended(#[from] SessionError),
}

impl Sessions {
    /// Serves an authenticated session until it ends.
    pub async fn serve(&self, session: Arc<dyn Session>) {
        let Some(node) = session.peer().node().cloned() else {
            // The verifier accepts only agents. This check is a second line of defense.
            return session.close(CloseCode::Protocol, "not an agent").await;
        };
        if !self.admission_rate.allows(&node) {
            let code = CloseCode::TooManySessions;
            self.metrics.handshake(code.label());
            self.metrics.limit(Limit::AdmissionsPerNode);
            let refused = FailedNode::Verified(node.clone());
            let remote = session.stats().remote;
            self.record_failure(code.label(), refused, remote, TOO_FAST);
            debug!(%node, peer = %session.stats().remote, "node opens sessions too fast, session refused");
            return session.close(code, TOO_FAST).await;
        }
        let Ok(_permit) = self.permits.try_acquire() else {
            let code = CloseCode::Overloaded;
            self.metrics.handshake(code.label());
            self.metrics.limit(Limit::SessionsTotal);
            static FULL: LogRateLimit = LogRateLimit::new("sessions above limits.sessionsTotal");
            if FULL.admit() {
                warn!(%node, "session refused: the process has no memory for another one; raise its memory limit, or limits.sessionsTotal");
            }
            return session
                .close(code, "server has limits.sessionsTotal sessions")
                .await;
        };
        let began = Instant::now();
        // Each step has its own box, so that the memory of admission is not held for the life of
        // the session.
        match Box::pin(self.establish(&session, &node)).await {
            Ok(admitted) => {
                self.metrics.handshake("ok");
                let remote = session.stats().remote;
                info!(
                    %node, session = admitted.registration.session().id.0, peer = %remote,
                    transport = %session.transport(), software = admitted.registration.session().software,
                    elapsed = began.elapsed().as_secs_f64(), "agent connected"
                );
                drop((session, node));
                Box::pin(self.run(admitted)).await;
            }
            Err(error) => Box::pin(self.refuse(&session, &node, error)).await,
        }
    }

    async fn establish(
        &self,
        session: &Arc<dyn Session>,
        node: &NodeName,
    ) -> Result<AdmittedSession, AdmissionError> {
        let pending = timeout(
            self.limits.load().handshake_timeout,
            self.recv_hello(session, node),
        );
        match pending.await {
            Ok(Ok(pending)) => self.admit(session, node, pending).await,
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => Err(AdmissionError::Refused(
                CloseCode::HandshakeTimeout,
                "Hello was not received in time".into(),
            )),
        }
    }

    async fn recv_hello(
        &self,
        session: &Arc<dyn Session>,
        node: &NodeName,
    ) -> Result<PendingSession, AdmissionError> {
        let kind = StreamKind::Control {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
        };
        let stream = session
            .open(
                &StreamHeader::new(kind),
                self.limits.load().handshake_timeout,
            )
            .await?;
        let (mut reader, mut writer) = control::split(stream);
        let Some(ControlMessage::Hello(hello)) = reader.receive().await? else {
            return Err(AdmissionError::Refused(
                CloseCode::Protocol,
                "the first message is not Hello".into(),
            ));
        };
        let refusal = match negotiate_version(hello.versions.0, hello.versions.1) {
            None => Some((
                CloseCode::Version,
                format!(
                    "agent speaks protocol versions {} to {}, this server {VERSION_MIN} to {VERSION_MAX}; upgrade the older one",
                    hello.versions.0, hello.versions.1
                ),
            )),
            Some(_) if hello.node_name != *node => Some((
                CloseCode::NameNotInCredential,
                format!(
                    "agent claims to be {}, its certificate is for {node}",
                    hello.node_name
                ),
            )),
            // The handshake of this session began before SIGTERM.
            Some(_) if self.shutdown.leaving().is_cancelled() => Some((
                CloseCode::Draining,
                "this server is stopping; connect to another one".to_owned(),
            )),
            Some(_) => None,
        };
        if let Some((code, detail)) = refusal {
            return Err(reject(&mut writer, code, detail).await);
        }
        Ok(PendingSession {
            reader,
            writer,
            hello,
        })
    }

    /// Registers the session and sends Welcome.
    async fn admit(
        &self,
        session: &Arc<dyn Session>,
        node: &NodeName,
        pending: PendingSession,
    ) -> Result<AdmittedSession, AdmissionError> {
        let PendingSession {
            reader,
            mut writer,
            hello,
        } = pending;
        let (registration, yielded) = self.register(session, node, &hello, &mut writer).await?;
        if let Some((code, detail)) = self.distrust_reason(session) {
            return Err(reject(&mut writer, code, detail.to_owned()).await);
        }
        self.revocations.record_generation(session.peer());
        self.supersede(node, &yielded);
        // Welcome has the current value of the list.
        let mut members = self.peers.members();
        let limits = self.limits.load();
        let cloud = self.cloud_of(&hello.node_name).cloned();
        let welcome = ControlMessage::Welcome(Welcome {
            version: negotiate_version(hello.versions.0, hello.versions.1).unwrap_or(VERSION_MIN),
            session: registration.session().id,
            capabilities: self.capabilities(session, cloud.is_some()),
            streams_per_agent: limits.streams_per_agent,
            target_dial_timeout: limits.target_dial_timeout,
            replica_id: self.peers.own().clone(),
            members: members.borrow_and_update().to_vec(),
        });
        let sent = timeout(limits.handshake_timeout, writer.send(&welcome)).await;
        sent.map_err(|_elapsed| {
            let detail = "Welcome was not sent in time".to_owned();
            AdmissionError::Refused(CloseCode::HandshakeTimeout, detail)
        })??;
        let peer = session.peer();
        let (issued, not_after) = (peer.not_before + BACKDATED, peer.not_after);
        match peer.domain {
            TrustDomain::Tunnel => self.nodes.record_connection(node, issued, not_after),
            TrustDomain::Cluster => self.nodes.record_kubelet(node, issued, not_after),
        }
        Ok(AdmittedSession {
            reader,
            writer,
            registration,
            members,
            cloud,
        })
    }

    /// Registers the session, after probing the live sessions of another agent process, here and at
    /// the other servers. Returns the sessions that did not answer, too.
    async fn register(
        &self,
        session: &Arc<dyn Session>,
        node: &NodeName,
        hello: &Hello,
        writer: &mut ControlWriter,
    ) -> Result<(Registration, Vec<SessionId>), AdmissionError> {
        let id = self.registry.next_id();
        let mut yielded = Vec::new();
        let (holder, mut probed) = tokio::join!(
            self.peers.is_held_by_other(node, hello.instance),
            self.probe_rivals(node, hello.instance, &mut yielded),
        );
        if let Some(replica) = holder {
            let detail = format!("another live agent serves {node} at server {replica}; {CLONED}");
            return Err(reject(writer, CloseCode::NameInUse, detail).await);
        }
        let mut registration = loop {
            if let Err(live) = probed {
                let remote = live.session.stats().remote;
                let detail = format!("another live agent serves {node} from {remote}; {CLONED}");
                return Err(reject(writer, CloseCode::NameInUse, detail).await);
            }
            let mut entry = AgentSession::new(id, node.clone(), hello.instance, session.clone());
            entry.software.clone_from(&hello.software);
            entry.claimed_address.clone_from(&hello.node_ip);
            entry.claimed_labels.clone_from(&hello.labels);
            let has_capability = |name: &str| hello.capabilities.iter().any(|own| own == name);
            entry.offers_diag = has_capability(CAPABILITY_DIAG);
            entry.renews_soon = has_capability(CAPABILITY_RENEW_SOON);
            match self.registry.register(entry, &yielded) {
                Ok(registration) => break registration,
                // A session that was registered in the meantime.
                Err(RegisterError::InUse(_)) => {
                    probed = self.probe_rivals(node, hello.instance, &mut yielded).await;
                }
                Err(RegisterError::TooManySessions) => {
                    let detail = format!("{node} has too many sessions; stop its other agents");
                    return Err(reject(writer, CloseCode::TooManySessions, detail).await);
                }
            }
        };
        if let Some(old) = registration.superseded() {
            info!(%node, session = old.id.0, "closing the oldest session of a node at its limit");
            self.shutdown
                .spawn_service(async move { old.close_superseded().await });
        }
        let agent = registration.session();
        self.peers.check_owner(agent, &self.shutdown);
        Ok((registration, yielded))
    }

    /// Probes the live sessions of other agent processes on this server. Adds those that do not
    /// answer to `yielded`, and returns the first one that answers as the error.
    async fn probe_rivals(
        &self,
        node: &NodeName,
        instance: InstanceId,
        yielded: &mut Vec<SessionId>,
    ) -> Result<(), Arc<AgentSession>> {
        while let Some(live) = self.registry.rival(node, instance, yielded) {
            if yielded.len() >= ADMISSION_ROUNDS || answers_probe(&live.session).await {
                return Err(live);
            }
            yielded.push(live.id);
        }
        Ok(())
    }

    /// Returns why a registered session is not trusted. Its certificate may have been
    /// revoked, or the CA removed, since the handshake. Both operations find sessions in the
    /// registry.
    fn distrust_reason(&self, session: &Arc<dyn Session>) -> Option<(CloseCode, &'static str)> {
        let trusted = |trust: &Arc<AgentTrust>| trust.still_accepts(&session.peer_chain());
        if self.revocations.is_revoked(session.peer()) {
            Some((CloseCode::CredentialRevoked, REVOKED))
        } else if self.trust.as_ref().is_some_and(|trust| !trusted(trust)) {
            Some((CloseCode::CredentialUntrusted, DISTRUSTED))
        } else {
            None
        }
    }

    /// Closes the sessions of another agent process that did not answer.
    fn supersede(&self, node: &NodeName, yielded: &[SessionId]) {
        for old in self
            .registry
            .of_node(node)
            .into_iter()
            .filter(|old| yielded.contains(&old.id))
        {
            warn!(%node, session = old.id.0, "silent session is superseded by a new agent process");
            old.withdraw();
            self.shutdown
                .spawn_service(async move { old.close_superseded().await });
        }
    }

    /// Returns what the server does for this agent in addition to version 1.
    fn capabilities(&self, session: &Arc<dyn Session>, has_cloud: bool) -> Vec<String> {
        // This server does not renew certificates that another CA issued.
        let renews = self.renewals.is_some() && session.peer().domain == TrustDomain::Tunnel;
        let renews = renews.then(|| CAPABILITY_RENEW.to_owned());
        let has_cloud = has_cloud.then(|| CAPABILITY_CLOUD.to_owned());
        renews.into_iter().chain(has_cloud).collect()
    }

    async fn refuse(&self, session: &Arc<dyn Session>, node: &NodeName, error: AdmissionError) {
        let peer = session.stats().remote;
        let is_refused = matches!(error, AdmissionError::Refused(..));
        let (code, reason) = match error {
            AdmissionError::Refused(code, detail) => (code, detail),
            AdmissionError::Control(error) => (
                CloseCode::Protocol,
                format!("control stream failed: {error}"),
            ),
            AdmissionError::Ended(error) => (CloseCode::Protocol, error.to_string()),
        };
        self.metrics.handshake(code.label());
        static REFUSED: LogRateLimit = LogRateLimit::new("agents not admitted");
        if REFUSED.admit() {
            warn!(%node, %peer, %code, error = reason, "agent not admitted");
        }
        // An agent that finds a server stopping looks for another one.
        if is_refused && code != CloseCode::Draining {
            let refused = FailedNode::Verified(node.clone());
            self.record_failure(code.label(), refused, peer, reason.as_str());
        }
        session.close(code, &reason).await;
        // The refusal of a second agent says nothing about the session of the first one, and
        // `tunnel-agent doctor` ends its connection without a message.
        if is_refused && !self.registry.has(node) {
            let refusal = CloseReason::local(code, reason);
            let now = SystemTime::now();
            let close = LastClose::new(&refusal, peer, now, now);
            self.registry.record_refusal(node, close);
        }
    }
}

struct PendingSession {
    reader: ControlReader,
    writer: ControlWriter,
    hello: Box<Hello>,
}

/// A session that received Welcome.
pub(super) struct AdmittedSession {
    pub(super) reader: ControlReader,
    pub(super) writer: ControlWriter,
    pub(super) registration: Registration,
    /// The servers that agents may dial, as they were in Welcome.
    pub(super) members: watch::Receiver<Arc<[Member]>>,
    /// Serves the streams of the agent to targets of the cloud, if Welcome said so. The list of targets
    /// may have changed since then.
    pub(super) cloud: Option<Arc<CloudEgress>>,
}

/// Sends the reason to the agent, waits until the agent has received it, and returns the error. The
/// close that follows would otherwise cut the message.
async fn reject(writer: &mut ControlWriter, code: CloseCode, detail: String) -> AdmissionError {
    let sending = async {
        writer
            .send(&ControlMessage::NotAdmitted(code, detail.clone()))
            .await?;
        writer.finish().await
    };
    if let Ok(Err(error)) = timeout(REJECT_TIMEOUT, sending).await {
        debug!(%error, "cannot send the reason of the refusal to the agent");
    }
    AdmissionError::Refused(code, detail)
}

#[cfg(test)]
mod tests;
