//! One session with a server, from the control stream to the last goodbye.
//!
//! ```text
//! Admitting --Welcome--> Ready <--silent, heard again--> Suspect --silent for deadAfter--> closed
//!     |                    | |                             |
//!     |                    | +---another session is ready--+--> Retired --last stream ended--+
//!     |                    | (the server's Drain has another one dialed; until that is ready, this one is)
//!     |                    +--SIGTERM--> Draining --streams done-----------------------------+--> Farewell --> closed
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
use tunnel_proto::transport::liveness::SuspicionLog;
use tunnel_proto::transport::{CloseReason, ClosedBy, IncomingStream, Session};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{CAPABILITY_RENEW, ControlMessage};
use tunnel_proto::wire::name::{InstanceId, NodeName};

use crate::config::Limits;
use crate::credentials::Keeper;
use crate::egress::{Egress, NodeIp, Terms};
use crate::metrics::{GaugeGuard, Limit, Metrics};

mod admission;
mod vigil;
mod voice;

pub(crate) use admission::AdmitError;
use admission::{Admitted, admit};
use vigil::{Turn, Vigil};
use voice::Voice;

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
    pub(crate) shutdown: Shutdown,
    /// The credentials, which sessions renew.
    pub(crate) keeper: Arc<Keeper>,
    /// Cancelled when the drain is over and sessions should end.
    pub(crate) farewell: CancellationToken,
}

/// What ties the task of a session to the connector.
#[derive(Debug, Clone)]
pub(crate) struct Tether {
    /// Cancelled when another session takes the new streams, or nobody waits for this one any more.
    pub(crate) retire: CancellationToken,
    /// Where the connector hears of it.
    pub(crate) news: mpsc::Sender<(Id, News)>,
}

/// What the connector hears of a session, the first two in this order; its end is the end of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum News {
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

impl Tether {
    /// Tells the connector. To be called in the session's task. Cancel-safe: dropped early, nothing is told.
    pub(crate) async fn tell(&self, news: News) {
        let _connector_may_be_gone = self.news.send((task::id(), news)).await;
    }
}

/// A ready session that ended.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) ready_for: Duration,
    pub(crate) reason: CloseReason,
}

/// Runs a session that was dialled at `began`. Dropped early, the session is cut.
pub(crate) async fn run(
    session: Arc<dyn Session>,
    shared: &Shared,
    tether: &Tether,
    began: Instant,
) -> Result<Held, AdmitError> {
    let remote = session.health().remote;
    let node_ip = match shared.node_ip {
        Some(ip) => Some(NodeIp { ip, given: true }),
        None => NodeIp::towards(remote),
    };
    let Admitted {
        reader,
        writer,
        welcome,
    } = admit(&session, shared, node_ip).await?;
    session.allow_streams(
        // The control stream, and those that have ended at the server but not yet here.
        welcome
            .streams_per_agent
            .min(STREAMS_MOST)
            .saturating_mul(2)
            .saturating_add(1),
    );
    let _connected = shared.metrics.session(session.transport());
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
    tether.tell(News::Ready).await;
    let ready = Instant::now();
    let terms = Terms {
        session: welcome.session,
        node_ip,
        dial_timeout: welcome.target_dial_timeout,
    };
    let serving = Serving {
        shared,
        tether,
        terms: Arc::new(terms),
        voice: Voice::new(writer),
        vigil: Vigil::new(
            shared.limits.liveness(),
            session.transport(),
            session.health(),
            ready,
        ),
        suspect: None,
        log: SuspicionLog::default(),
        is_odd_logged: false,
        renews: welcome
            .capabilities
            .iter()
            .any(|able| able == CAPABILITY_RENEW),
        asked: 0,
        session,
    };
    let reason = serving.run(reader).await;
    Ok(Held {
        ready_for: ready.elapsed(),
        reason,
    })
}

/// A ready session.
struct Serving<'a> {
    session: Arc<dyn Session>,
    shared: &'a Shared,
    tether: &'a Tether,
    terms: Arc<Terms>,
    voice: Voice,
    vigil: Vigil,
    /// Counts it while it is suspect.
    suspect: Option<GaugeGuard>,
    log: SuspicionLog,
    /// A line about a message without meaning here was logged: the server may repeat such messages at will.
    is_odd_logged: bool,
    /// The server issues certificates on this session.
    renews: bool,
    /// Certificates that were asked for here and have not been answered.
    asked: u32,
}

impl Serving<'_> {
    async fn run(mut self, mut reader: ControlReader) -> CloseReason {
        let (shared, tether) = (self.shared, self.tether);
        let session = self.session.clone();
        let mut closed = pin!(session.closed());
        let (mut withdrawn, mut listening, mut draining) = (false, true, false);
        loop {
            tokio::select! {
                biased;
                reason = &mut closed => return reason,
                () = shared.shutdown.drain().cancelled(), if !withdrawn => {
                    withdrawn = true;
                    self.voice.withdraw();
                }
                () = tether.retire.cancelled(), if !self.vigil.is_retired() => self.retire(),
                () = shared.farewell.cancelled() => return self.farewell(STOPPING).await,
                request = shared.keeper.due(), if self.may_renew(withdrawn) => {
                    self.asked = self.asked.saturating_add(1);
                    self.voice.renew(request);
                }
                () = sleep_until(self.vigil.next()) => match self.look().await {
                    Turn::Dead => {
                        shared.metrics.limit(Limit::DeadAfter);
                        let why = "nothing was heard for too long (agent's limits.deadAfter)";
                        return self.end(CloseCode::Dead, why).await;
                    }
                    Turn::Done => return self.farewell(REPLACED).await,
                    Turn::Same | Turn::Suspect | Turn::Live => {}
                },
                message = reader.receive(), if listening => match message {
                    Ok(Some(ControlMessage::Bye(reason))) => {
                        info!(agent = %shared.node, session = %self.terms.session, reason, "server says goodbye");
                        return self.after_bye().await;
                    }
                    Ok(Some(ControlMessage::Renewed(reply))) => {
                        // Closed rather than ignored: a server that hands out what nobody asked for is broken or worse,
                        // and should carry no requests either.
                        let Some(left) = self.asked.checked_sub(1) else {
                            shared.metrics.renewal("unasked");
                            let why = "a certificate came that was not asked for";
                            warn!(agent = %shared.node, session = %self.terms.session, "{why}; ending the session");
                            return self.end(CloseCode::Protocol, why).await;
                        };
                        self.asked = left;
                        let keeper = shared.keeper.clone();
                        shared.shutdown.spawn_service(async move { keeper.answered(reply).await });
                    }
                    Ok(Some(ControlMessage::Drain(deadline))) if !draining => {
                        draining = true;
                        info!(
                            agent = %shared.node, session = %self.terms.session, ?deadline,
                            "server is stopping; dialing another session, open streams go on"
                        );
                        tether.tell(News::Draining).await;
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
            }
        }
    }

    /// Whether the next certificate may be asked for here: not on a session that may be gone, or is about to.
    fn may_renew(&self, withdrawn: bool) -> bool {
        self.renews && !withdrawn && !self.vigil.is_retired() && self.suspect.is_none()
    }

    fn serve(&mut self, incoming: IncomingStream) {
        let (egress, terms) = (self.shared.egress.clone(), self.terms.clone());
        let has_room = self.session.has_room();
        let span = debug_span!("stream", agent = %self.shared.node, session = %terms.session);
        self.shared.shutdown.spawn_work(
            async move { egress.serve(incoming, has_room, &terms).await }.instrument(span),
        );
        self.vigil.stream(Instant::now());
    }

    fn heed(&mut self, message: &ControlMessage) {
        let (agent, session) = (&self.shared.node, self.terms.session);
        match message {
            ControlMessage::Doubt(doubts) => {
                debug!(%agent, %session, doubts, "server says whether it hears this end");
                self.vigil.peer_doubts(*doubts, Instant::now());
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
                if !std::mem::replace(&mut self.is_odd_logged, true) {
                    warn!(%agent, %session, "unexpected message on the control stream ignored");
                }
            }
        }
    }

    /// Looks at the session and does what follows, except for its end.
    async fn look(&mut self) -> Turn {
        let now = Instant::now();
        let seen = self.vigil.look(self.session.health(), now);
        if seen.probe {
            self.session.probe();
        }
        self.voice.doubt(seen.own_doubt);
        match seen.turn {
            Turn::Suspect => {
                if seen.own_doubt {
                    let idle = seen.silence >= self.shared.limits.suspect_after_idle;
                    self.shared.metrics.limit(if idle {
                        Limit::SuspectAfterIdle
                    } else {
                        Limit::SuspectAfterBusy
                    });
                }
                self.suspect = Some(self.shared.metrics.suspect());
                self.tether.tell(News::Suspect).await;
            }
            Turn::Live => {
                self.suspect = None;
                self.tether.tell(News::Live).await;
            }
            Turn::Same | Turn::Dead | Turn::Done => {}
        }
        if self.log.is_due(self.suspect.is_some(), now) {
            let (agent, session) = (&self.shared.node, self.terms.session);
            let (silence, own, transport) =
                (seen.silence, seen.own_doubt, self.session.transport());
            if self.suspect.is_some() {
                warn!(%agent, %session, %transport, ?silence, own, "session is suspect");
            } else {
                info!(%agent, %session, %transport, "session is live again");
            }
        }
        seen.turn
    }

    /// Another session takes the new streams; this one ends with its last.
    fn retire(&mut self) {
        let streams = self.session.health().streams;
        debug!(agent = %self.shared.node, session = %self.terms.session, streams, "session retires");
        self.voice.withdraw();
        self.vigil.retire(Instant::now());
    }

    /// Says Bye, serves what the server opened before it knew (a draining egress refuses it), and closes.
    async fn farewell(mut self, why: &'static str) -> CloseReason {
        let stopping = self.shared.farewell.clone();
        let session = self.session.clone();
        let replaced = !stopping.is_cancelled();
        self.voice.bye(why, GOODBYE_WITHIN).await;
        let mut until = Instant::now() + (session.health().rtt + LATE_STREAMS).min(GOODBYE_WITHIN);
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
const REPLACED: &str = "another session has taken over";
/// Bound on what Welcome may allow; quinn keeps some 80 bytes for each allowed stream.
const STREAMS_MOST: u32 = 65536;
/// How long the reason of a session's end may come after the failure of its streams.
const REASON_WITHIN: Duration = Duration::from_millis(100);
/// Bound on each step of saying goodbye.
const GOODBYE_WITHIN: Duration = Duration::from_secs(1);
/// Beyond one round trip: how long streams may still arrive that were opened before the server read the last word.
const LATE_STREAMS: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests;
