//! One session with a server, from the control stream to the last goodbye.
//!
//! ```text
//! Admitting --Welcome--> Ready <--silent, heard again--> Suspect --silent for deadAfter--> closed
//!     |                    | |                             |
//!     |                    | +---another session is ready--+--> Retired --last stream ended--+
//!     |                    | (the server's Drain has another one dialed; until that is ready, this one is)
//!     |                    +--SIGTERM--> Draining --streams done-----------------------------+--> Shutdown --> closed
//!     +-- NotAdmitted, no version in common, timeout --> closed      (server gone, Bye: closed, from everywhere)
//! ```

use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{self, Id};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, debug_span, info, warn};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::control::ControlReader;
use tunnel_proto::transport::liveness::SuspectLogThrottle;
use tunnel_proto::transport::{CloseReason, ClosedBy, IncomingStream, Session};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{CAPABILITY_RENEW, ControlMessage};
use tunnel_proto::wire::name::{InstanceId, NodeName};

use crate::config::Limits;
use crate::credentials::RotatingCredentials;
use crate::egress::{Egress, NodeIp, SessionParams};
use crate::metrics::{GaugeGuard, Limit, Metrics};

mod admission;
mod control_sender;
mod monitor;

pub(crate) use admission::AdmitError;
use admission::{Admitted, admit};
use control_sender::ControlSender;
use monitor::{SessionMonitor, Transition};

/// What all sessions of an agent share.
#[derive(Debug)]
pub(crate) struct SessionContext {
    pub(crate) node: NodeName,
    /// The node's address when the operator gave it.
    pub(crate) node_ip: Option<IpAddr>,
    pub(crate) instance: InstanceId,
    pub(crate) limits: Limits,
    pub(crate) egress: Arc<Egress>,
    pub(crate) metrics: Metrics,
    pub(crate) shutdown: Shutdown,
    /// The credentials, which sessions renew.
    pub(crate) rotating_credentials: Arc<RotatingCredentials>,
    /// Cancelled when the drain is over and sessions should end.
    pub(crate) graceful_shutdown: CancellationToken,
}

/// What ties the task of a session to the connector.
#[derive(Debug, Clone)]
pub(crate) struct SessionHandle {
    /// Cancelled when another session takes the new streams, or nobody waits for this one any more.
    pub(crate) retire: CancellationToken,
    /// Where the connector hears of it.
    pub(crate) session_event: mpsc::Sender<(Id, SessionEvent)>,
}

/// What the connector hears of a session, the first two in this order; its end is the end of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SessionEvent {
    /// The handshake is done.
    Answered,
    /// Welcome came: the server may open streams.
    Ready,
    /// The server is suspect: silent for too long, or it says that it does not hear this end.
    Suspect,
    /// The server is heard again.
    Live,
    /// The server is stopping; said once at most.
    Draining,
}

impl SessionHandle {
    /// Tells the connector. To be called in the session's task. Cancel-safe: dropped early, nothing is told.
    pub(crate) async fn send(&self, session_event: SessionEvent) {
        let _connector_may_be_gone = self.session_event.send((task::id(), session_event)).await;
    }
}

/// A ready session that ended.
#[derive(Debug)]
pub(crate) struct SessionSummary {
    pub(crate) ready_for: Duration,
    pub(crate) reason: CloseReason,
}

/// Runs a session that was dialled at `began`. Dropped early, the session is cut.
pub(crate) async fn run(
    session: Arc<dyn Session>,
    context: &SessionContext,
    handle: &SessionHandle,
    began: Instant,
) -> Result<SessionSummary, AdmitError> {
    let remote = session.health().remote;
    let node_ip = match context.node_ip {
        Some(ip) => Some(NodeIp {
            ip,
            is_configured: true,
        }),
        None => NodeIp::for_route_to(remote),
    };
    let Admitted {
        reader,
        writer,
        welcome,
    } = admit(&session, context, node_ip).await?;
    session.set_max_concurrent_streams(
        // The control stream, and those that have ended at the server but not yet here.
        welcome
            .streams_per_agent
            .min(STREAMS_MAX)
            .saturating_mul(2)
            .saturating_add(1),
    );
    let _connected = context.metrics.session(session.transport());
    info!(
        agent = %context.node,
        session = %welcome.session,
        peer = %remote,
        transport = %session.transport(),
        version = welcome.version,
        node_ip = node_ip.map(|node| tracing::field::display(node.ip)),
        elapsed = ?began.elapsed(),
        "session ready"
    );
    handle.send(SessionEvent::Ready).await;
    let ready = Instant::now();
    let params = SessionParams {
        session: welcome.session,
        node_ip,
        dial_timeout: welcome.target_dial_timeout,
    };
    let active = ActiveSession {
        context,
        handle,
        params: Arc::new(params),
        control_sender: ControlSender::new(writer),
        monitor: SessionMonitor::new(
            context.limits.liveness(),
            session.transport(),
            session.health(),
            ready,
        ),
        suspect: None,
        log: SuspectLogThrottle::default(),
        is_unexpected_logged: false,
        can_renew: welcome
            .capabilities
            .iter()
            .any(|able| able == CAPABILITY_RENEW),
        pending_renewals: 0,
        session,
    };
    let reason = active.run(reader).await;
    Ok(SessionSummary {
        ready_for: ready.elapsed(),
        reason,
    })
}

/// A ready session.
struct ActiveSession<'a> {
    session: Arc<dyn Session>,
    context: &'a SessionContext,
    handle: &'a SessionHandle,
    params: Arc<SessionParams>,
    control_sender: ControlSender,
    monitor: SessionMonitor,
    /// Counts it while it is suspect.
    suspect: Option<GaugeGuard>,
    log: SuspectLogThrottle,
    /// A line about a message without meaning here was logged: the server may repeat such messages at will.
    is_unexpected_logged: bool,
    /// The server issues certificates on this session.
    can_renew: bool,
    /// Certificates that were asked for here and have not been answered.
    pending_renewals: u32,
}

impl ActiveSession<'_> {
    async fn run(mut self, mut reader: ControlReader) -> CloseReason {
        let (context, handle) = (self.context, self.handle);
        let session = self.session.clone();
        let mut closed = pin!(session.closed());
        let (mut withdrawn, mut listening, mut draining) = (false, true, false);
        loop {
            tokio::select! {
                biased;
                reason = &mut closed => return reason,
                () = context.shutdown.drain().cancelled(), if !withdrawn => {
                    withdrawn = true;
                    self.control_sender.withdraw();
                }
                () = handle.retire.cancelled(), if !self.monitor.is_retired() => self.retire(),
                () = context.graceful_shutdown.cancelled() => return self.graceful_shutdown(STOPPING).await,
                request = context.rotating_credentials.due(), if self.may_renew(withdrawn) => {
                    self.pending_renewals = self.pending_renewals.saturating_add(1);
                    self.control_sender.renew(request);
                }
                () = sleep_until(self.monitor.next()) => match self.check().await {
                    Transition::Dead => {
                        context.metrics.limit(Limit::DeadAfter);
                        let why = "no data received for too long (agent's limits.deadAfter)";
                        return self.end(CloseCode::Dead, why).await;
                    }
                    Transition::Finished => return self.graceful_shutdown(REPLACED).await,
                    Transition::Unchanged | Transition::Suspect | Transition::Live => {}
                },
                message = reader.receive(), if listening => match message {
                    Ok(Some(ControlMessage::Bye(reason))) => {
                        info!(agent = %context.node, session = %self.params.session, reason, "server sent Bye");
                        return self.after_bye().await;
                    }
                    Ok(Some(ControlMessage::Renewed(reply))) => {
                        // Closed rather than ignored: a server that hands out what nobody asked for is broken or worse,
                        // and should carry no requests either.
                        let Some(left) = self.pending_renewals.checked_sub(1) else {
                            context.metrics.renewal("unasked");
                            let why = "received a certificate that was not requested";
                            warn!(agent = %context.node, session = %self.params.session, "{why}; closing the session");
                            return self.end(CloseCode::Protocol, why).await;
                        };
                        self.pending_renewals = left;
                        let rotating_credentials = context.rotating_credentials.clone();
                        context.shutdown.spawn_service(async move { rotating_credentials.handle_reply(reply).await });
                    }
                    Ok(Some(ControlMessage::Drain(deadline))) if !draining => {
                        draining = true;
                        info!(
                            agent = %context.node, session = %self.params.session, ?deadline,
                            "server is stopping; dialing another session, open streams go on"
                        );
                        handle.send(SessionEvent::Draining).await;
                    }
                    Ok(Some(message)) => self.handle_control(&message),
                    Ok(None) => listening = false,
                    Err(error) => return self.control_failed(&error).await,
                },
                incoming = session.accept() => {
                    // An error means that the session has ended, which the first branch tells.
                    if let Ok(incoming) = incoming {
                        self.serve(incoming);
                    }
                }
            }
        }
    }

    /// Whether the next certificate may be asked for here: not on a session that may be gone, or is about to.
    fn may_renew(&self, withdrawn: bool) -> bool {
        self.can_renew && !withdrawn && !self.monitor.is_retired() && self.suspect.is_none()
    }

    fn serve(&mut self, incoming: IncomingStream) {
        let (egress, params) = (self.context.egress.clone(), self.params.clone());
        let has_room = self.session.has_room();
        let span = debug_span!("stream", agent = %self.context.node, session = %params.session);
        self.context.shutdown.spawn_work(
            async move { egress.serve(incoming, has_room, &params).await }.instrument(span),
        );
        self.monitor.stream(Instant::now());
    }

    fn handle_control(&mut self, message: &ControlMessage) {
        let (agent, session) = (&self.context.node, self.params.session);
        match message {
            ControlMessage::Suspect(doubts) => {
                debug!(%agent, %session, doubts, "server reported whether it doubts this session");
                self.monitor.peer_suspects(*doubts, Instant::now());
            }
            ControlMessage::Unknown => {
                debug!(%agent, %session, "message of a later version ignored")
            }
            ControlMessage::Hello(_)
            | ControlMessage::Welcome(_)
            | ControlMessage::NotAdmitted(..)
            | ControlMessage::Drain(_)
            | ControlMessage::Withdraw
            | ControlMessage::Renew(_)
            | ControlMessage::Renewed(_)
            | ControlMessage::Bye(_) => {
                if !std::mem::replace(&mut self.is_unexpected_logged, true) {
                    warn!(%agent, %session, "unexpected message on the control stream ignored");
                }
            }
        }
    }

    /// Looks at the session and does what follows, except for its end.
    async fn check(&mut self) -> Transition {
        let now = Instant::now();
        let observation = self.monitor.check(self.session.health(), now);
        if observation.probe {
            self.session.probe();
        }
        self.control_sender.doubt(observation.is_suspect_locally);
        match observation.transition {
            Transition::Suspect => {
                if observation.is_suspect_locally {
                    let idle = observation.silence >= self.context.limits.suspect_after_idle;
                    self.context.metrics.limit(if idle {
                        Limit::SuspectAfterIdle
                    } else {
                        Limit::SuspectAfterBusy
                    });
                }
                self.suspect = Some(self.context.metrics.suspect());
                self.handle.send(SessionEvent::Suspect).await;
            }
            Transition::Live => {
                self.suspect = None;
                self.handle.send(SessionEvent::Live).await;
            }
            Transition::Unchanged | Transition::Dead | Transition::Finished => {}
        }
        if self.log.is_due(self.suspect.is_some(), now) {
            let (agent, session) = (&self.context.node, self.params.session);
            let (silence, own, transport) = (
                observation.silence,
                observation.is_suspect_locally,
                self.session.transport(),
            );
            if self.suspect.is_some() {
                warn!(%agent, %session, %transport, ?silence, own, "session is suspect");
            } else {
                info!(%agent, %session, %transport, "session is live again");
            }
        }
        observation.transition
    }

    /// Another session takes the new streams; this one ends with its last.
    fn retire(&mut self) {
        let streams = self.session.health().streams;
        debug!(agent = %self.context.node, session = %self.params.session, streams, "retiring session");
        self.control_sender.withdraw();
        self.monitor.retire(Instant::now());
    }

    /// Says Bye, serves what the server opened before it knew (a draining egress refuses it), and closes.
    async fn graceful_shutdown(mut self, why: &'static str) -> CloseReason {
        let stopping = self.context.graceful_shutdown.clone();
        let session = self.session.clone();
        let replaced = !stopping.is_cancelled();
        self.control_sender.bye(why, BYE_TIMEOUT).await;
        let mut until = Instant::now() + (session.health().rtt + LATE_STREAMS).min(BYE_TIMEOUT);
        loop {
            tokio::select! {
                biased;
                reason = session.closed() => return reason,
                // A stream that has arrived is not cut, unless the whole agent stops.
                incoming = session.accept(), if replaced || Instant::now() < until => {
                    if let Ok(incoming) = incoming {
                        self.serve(incoming);
                    }
                }
                () = sleep_until(until) => {
                    if !replaced || stopping.is_cancelled() || session.health().streams == 0 {
                        break;
                    }
                    until = Instant::now() + LATE_STREAMS;
                }
            }
        }
        self.end(CloseCode::Normal, why).await
    }

    /// The server closes next; if not, this end does.
    async fn after_bye(self) -> CloseReason {
        match timeout(BYE_TIMEOUT, self.session.closed()).await {
            Ok(reason) => reason,
            Err(_still_open) => self.end(CloseCode::Normal, "server sent Bye").await,
        }
    }

    async fn control_failed(self, error: &io::Error) -> CloseReason {
        if let Ok(reason) = timeout(CLOSE_REASON_TIMEOUT, self.session.closed()).await {
            return reason;
        }
        warn!(agent = %self.context.node, session = %self.params.session, %error, "control stream failed");
        let reason = format!("control stream failed: {error}");
        self.end(CloseCode::Protocol, &reason).await
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

/// What the agent says when it drains.
const STOPPING: &str = "agent is stopping";
/// What it says on a session that another one has replaced.
const REPLACED: &str = "replaced by another session";
/// Bound on what Welcome may allow; quinn keeps some 80 bytes for each allowed stream.
const STREAMS_MAX: u32 = 65536;
/// How long the reason of a session's end may come after the failure of its streams.
const CLOSE_REASON_TIMEOUT: Duration = Duration::from_millis(100);
/// Bound on each step of saying goodbye.
const BYE_TIMEOUT: Duration = Duration::from_secs(1);
/// Beyond one round trip: how long streams may still arrive that were opened before the server read the last word.
const LATE_STREAMS: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests;
