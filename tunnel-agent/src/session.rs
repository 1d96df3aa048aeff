//! One session with a server, from the control stream to the last goodbye.
//!
//! ```text
//! Admitting --Welcome--> Ready --SIGTERM--> Draining --streams done--> Farewell --> closed
//!     |                    +------ server gone, Bye, or dead ------------------> closed
//!     +-- NotAdmitted, no version in common, timeout ---------------------> closed
//! ```

use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, debug_span, info, warn};
use tunnel_proto::process::meta::{Readiness, ReadinessBlock};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::control::{self, ControlReader, ControlWriter};
use tunnel_proto::transport::{CloseReason, ClosedBy, IncomingStream, Session, SessionError};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{ControlMessage, Hello, Welcome};
use tunnel_proto::wire::header::StreamKind;
use tunnel_proto::wire::name::{InstanceId, NodeName};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN, negotiate_version};

use crate::config::Limits;
use crate::egress::{Egress, NodeIp, Terms};
use crate::metrics::{ConnectResult, Metrics};

/// What all sessions of an agent share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) node: NodeName,
    /// The node's address when the operator gave it.
    pub(crate) node_ip: Option<IpAddr>,
    pub(crate) instance: InstanceId,
    pub(crate) limits: Limits,
    pub(crate) egress: Arc<Egress>,
    pub(crate) metrics: Metrics,
    pub(crate) readiness: Readiness,
    pub(crate) shutdown: Shutdown,
    /// Cancelled when the drain is over and the session should end.
    pub(crate) farewell: CancellationToken,
}

/// Why a connection did not become a ready session.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AdmitError {
    /// The server said so.
    #[error("server did not admit this agent ({code}): {detail}")]
    NotAdmitted { code: CloseCode, detail: String },
    /// The session ended meanwhile.
    #[error(transparent)]
    Closed(#[from] CloseReason),
    /// Welcome did not come.
    #[error("server did not welcome this agent in time")]
    Timeout,
    /// No version in common.
    #[error(
        "server speaks protocol versions {0} to {1}, this agent {VERSION_MIN} to {VERSION_MAX}; update the older one"
    )]
    Version(u32, u32),
    /// The server said something that has no place here.
    #[error("server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The control stream failed.
    #[error("control stream failed")]
    Control(#[from] io::Error),
}

impl AdmitError {
    /// What the server, or this end, gave as the reason.
    pub(crate) fn code(&self) -> Option<CloseCode> {
        match self {
            Self::NotAdmitted { code, .. } => Some(*code),
            Self::Closed(reason) => Some(reason.code),
            Self::Version(..) => Some(CloseCode::Version),
            Self::Timeout => Some(CloseCode::HandshakeTimeout),
            Self::Protocol(_) | Self::Control(_) => Some(CloseCode::Protocol),
        }
    }
}

/// A ready session that ended.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) ready_for: Duration,
    pub(crate) reason: CloseReason,
}

/// Runs a session that was dialled at `began`; drops `waiting` when it is ready. Dropped early, the session is cut.
pub(crate) async fn run(
    session: Arc<dyn Session>,
    shared: &Shared,
    began: Instant,
    waiting: &mut Option<ReadinessBlock>,
) -> Result<Held, AdmitError> {
    let remote = session.health().remote;
    let node_ip = match shared.node_ip {
        Some(ip) => Some(NodeIp { ip, given: true }),
        None => NodeIp::towards(remote),
    };
    let within = shared.limits.handshake_timeout;
    let admitted = tokio::select! {
        biased;
        () = shared.shutdown.drain().cancelled() => Err(AdmitError::Closed(CloseReason {
            by: ClosedBy::Local,
            code: CloseCode::Draining,
            reason: STOPPING.to_owned(),
        })),
        admitted = timeout(within, admit(&*session, shared, node_ip)) => {
            admitted.unwrap_or(Err(AdmitError::Timeout))
        }
    };
    let (reader, writer, welcome) = match admitted {
        Ok(admitted) => admitted,
        Err(error) => {
            let code = match error.code() {
                Some(
                    code @ (CloseCode::Version | CloseCode::HandshakeTimeout | CloseCode::Protocol),
                ) => code,
                Some(_) | None => CloseCode::Normal,
            };
            session.close(code, &error.to_string()).await;
            return Err(error);
        }
    };
    session.allow_streams(
        // The control stream, and those that have ended at the server but not yet here.
        welcome
            .streams_per_agent
            .min(STREAMS_MOST)
            .saturating_mul(2)
            .saturating_add(1),
    );
    let _connected = shared.metrics.session(session.transport());
    shared.metrics.connect_attempt(ConnectResult::Ready);
    waiting.take();
    info!(
        agent = %shared.node,
        session = %welcome.session,
        peer = %remote,
        transport = %session.transport(),
        version = welcome.version,
        node_ip = node_ip.map(|node| tracing::field::display(node.ip)),
        elapsed = ?began.elapsed(),
        "session ready"
    );
    let ready = Instant::now();
    let terms = Terms {
        session: welcome.session,
        node_ip,
        dial_timeout: welcome.target_dial_timeout,
    };
    let serving = Serving {
        session: &session,
        shared,
        terms: Arc::new(terms),
        writer,
    };
    let reason = serving.run(reader).await;
    Ok(Held {
        ready_for: ready.elapsed(),
        reason,
    })
}

/// From the control stream's header to Welcome.
async fn admit(
    session: &dyn Session,
    shared: &Shared,
    node_ip: Option<NodeIp>,
) -> Result<(ControlReader, ControlWriter, Welcome), AdmitError> {
    let incoming = match session.accept().await {
        Ok(incoming) => incoming,
        Err(SessionError::Closed(reason)) => return Err(reason.into()),
        Err(SessionError::NotOpening | SessionError::Header(_)) => {
            return Err(AdmitError::Protocol("session accepts no streams"));
        }
    };
    let converse = async {
        let deadline = Instant::now() + shared.limits.handshake_timeout;
        let (header, mut stream) = incoming.header(deadline).await?;
        let StreamKind::Control {
            version_min,
            version_max,
        } = header.kind
        else {
            return Err(AdmitError::Protocol(
                "first stream is not the control stream",
            ));
        };
        negotiate_version(version_min, version_max)
            .ok_or(AdmitError::Version(version_min, version_max))?;
        stream.accept("").await?;
        let (mut reader, mut writer) = control::split(stream);
        writer
            .send(&ControlMessage::Hello(hello(shared, node_ip)))
            .await?;
        loop {
            match reader.receive().await? {
                Some(ControlMessage::Welcome(welcome)) => return Ok((reader, writer, welcome)),
                Some(ControlMessage::NotAdmitted(code, detail)) => {
                    return Err(AdmitError::NotAdmitted { code, detail });
                }
                Some(ControlMessage::Unknown) => {}
                Some(
                    ControlMessage::Hello(_)
                    | ControlMessage::Drain(_)
                    | ControlMessage::Withdraw
                    | ControlMessage::Bye(_),
                ) => return Err(AdmitError::Protocol("unexpected message before Welcome")),
                None => return Err(AdmitError::Protocol("control stream ended before Welcome")),
            }
        }
    };
    let outcome = tokio::select! {
        biased;
        // First, since what the server said before it closed is more than the code of the close.
        outcome = converse => outcome,
        reason = session.closed() => Err(reason.into()),
    };
    match outcome {
        Err(error @ (AdmitError::Control(_) | AdmitError::Protocol(_))) => {
            // The reason of a closed session says more than the failure of its streams.
            match timeout(REASON_WITHIN, session.closed()).await {
                Ok(reason) => Err(reason.into()),
                Err(_still_open) => Err(error),
            }
        }
        outcome => outcome,
    }
}

fn hello(shared: &Shared, node_ip: Option<NodeIp>) -> Hello {
    Hello {
        versions: (VERSION_MIN, VERSION_MAX),
        capabilities: Vec::new(),
        node_name: shared.node.clone(),
        instance: shared.instance,
        software: env!("CARGO_PKG_VERSION").to_owned(),
        node_ip: node_ip.map_or_else(String::new, |node| node.ip.to_string()),
    }
}

/// A ready session.
struct Serving<'a> {
    session: &'a Arc<dyn Session>,
    shared: &'a Shared,
    terms: Arc<Terms>,
    writer: ControlWriter,
}

impl Serving<'_> {
    async fn run(mut self, mut reader: ControlReader) -> CloseReason {
        let shared = self.shared;
        let session = self.session.clone();
        let mut closed = pin!(session.closed());
        let mut ticks = interval(shared.limits.keep_alive);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut liveness = Liveness::new(session.health().heard, Instant::now());
        let (mut withdrawn, mut listening) = (false, true);
        loop {
            tokio::select! {
                biased;
                reason = &mut closed => return reason,
                () = shared.shutdown.drain().cancelled(), if !withdrawn => {
                    withdrawn = true;
                    self.tell(&ControlMessage::Withdraw).await;
                }
                () = shared.farewell.cancelled() => return self.farewell().await,
                message = reader.receive(), if listening => match message {
                    Ok(Some(ControlMessage::Bye(reason))) => {
                        info!(agent = %shared.node, session = %self.terms.session, reason, "server says goodbye");
                        return self.after_bye().await;
                    }
                    Ok(Some(message)) => self.heed(&message),
                    Ok(None) => listening = false,
                    Err(error) => return self.control_failed(&error).await,
                },
                incoming = session.accept() => {
                    // An error means that the session has ended, which the first branch tells.
                    if let Ok(incoming) = incoming {
                        self.serve(incoming);
                    }
                }
                now = ticks.tick() => {
                    let silence = liveness.silence(session.health().heard, now);
                    if silence >= shared.limits.dead_after {
                        return self.end(CloseCode::Dead, "nothing was heard for too long").await;
                    }
                    if silence > Duration::ZERO {
                        session.probe();
                    }
                }
            }
        }
    }

    fn serve(&self, incoming: IncomingStream) {
        let (egress, terms) = (self.shared.egress.clone(), self.terms.clone());
        let span = debug_span!("stream", agent = %self.shared.node, session = %terms.session);
        self.shared
            .shutdown
            .spawn_work(async move { egress.serve(incoming, &terms).await }.instrument(span));
    }

    fn heed(&self, message: &ControlMessage) {
        let (agent, session) = (&self.shared.node, self.terms.session);
        match message {
            ControlMessage::Drain(deadline) => {
                info!(%agent, %session, ?deadline, "server is stopping; streams go on until it closes the session");
            }
            ControlMessage::Unknown => {
                debug!(%agent, %session, "message of a later version ignored")
            }
            ControlMessage::Hello(_)
            | ControlMessage::Welcome(_)
            | ControlMessage::NotAdmitted(..)
            | ControlMessage::Withdraw
            | ControlMessage::Bye(_) => {
                warn!(%agent, %session, "unexpected message on the control stream ignored");
            }
        }
    }

    /// Sends a message that the session does not depend on.
    async fn tell(&mut self, message: &ControlMessage) {
        let sent = timeout(GOODBYE_WITHIN, self.writer.send(message)).await;
        if !matches!(sent, Ok(Ok(()))) {
            debug!(agent = %self.shared.node, session = %self.terms.session, "control message was not sent");
        }
    }

    /// Says Bye, refuses what the server opened before it knew, and closes.
    async fn farewell(mut self) -> CloseReason {
        self.tell(&ControlMessage::Bye(STOPPING.to_owned())).await;
        let _peer_may_be_gone = timeout(GOODBYE_WITHIN, self.writer.finish()).await;
        let until = Instant::now() + (self.session.health().rtt + LATE_STREAMS).min(GOODBYE_WITHIN);
        loop {
            tokio::select! {
                biased;
                reason = self.session.closed() => return reason,
                () = sleep_until(until) => break,
                incoming = self.session.accept() => {
                    if let Ok(incoming) = incoming {
                        self.serve(incoming);
                    }
                }
            }
        }
        self.end(CloseCode::Normal, STOPPING).await
    }

    /// The server closes next; if not, this end does.
    async fn after_bye(self) -> CloseReason {
        match timeout(GOODBYE_WITHIN, self.session.closed()).await {
            Ok(reason) => reason,
            Err(_still_open) => self.end(CloseCode::Normal, "server said goodbye").await,
        }
    }

    async fn control_failed(self, error: &io::Error) -> CloseReason {
        if let Ok(reason) = timeout(REASON_WITHIN, self.session.closed()).await {
            return reason;
        }
        warn!(agent = %self.shared.node, session = %self.terms.session, %error, "control stream failed");
        self.end(CloseCode::Protocol, "control stream failed").await
    }

    async fn end(self, code: CloseCode, reason: &str) -> CloseReason {
        self.session.close(code, reason).await;
        CloseReason {
            by: ClosedBy::Local,
            code,
            reason: reason.to_owned(),
        }
    }
}

/// For how long the count of what was heard has not grown.
#[derive(Debug)]
struct Liveness {
    heard: u64,
    since: Instant,
}

impl Liveness {
    fn new(heard: u64, now: Instant) -> Self {
        Self { heard, since: now }
    }

    fn silence(&mut self, heard: u64, now: Instant) -> Duration {
        if heard != self.heard {
            *self = Self::new(heard, now);
        }
        now.saturating_duration_since(self.since)
    }
}

/// What the agent says when it drains.
const STOPPING: &str = "agent is stopping";
/// Bound on what Welcome may allow; quinn keeps some 80 bytes for each allowed stream.
const STREAMS_MOST: u32 = 65536;
/// How long the reason of a session's end may come after the failure of its streams.
const REASON_WITHIN: Duration = Duration::from_millis(100);
/// Bound on each step of saying goodbye.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// Beyond one round trip: how long streams may still arrive that were opened before the server read Withdraw.
const LATE_STREAMS: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests;
