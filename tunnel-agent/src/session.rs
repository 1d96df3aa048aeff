//! One session with a server, from the control stream to the close.
//!
//! ```text
//! Admitting --Welcome--> Ready <--silent, alive again--> Suspect --silent for deadAfter--> closed
//!     |                    | |                             |
//!     |                    | +---another session is ready--+--> Retired --last stream ended--+
//!     |                    | (the server's Drain has another one dialed; until that is ready, this one is)
//!     |                    +--SIGTERM--> Draining --streams done-----------------------------+--> Shutdown --> closed
//!     +-- NotAdmitted, no version in common, timeout --> closed      (server gone, Bye: closed, from everywhere)
//! ```
//!
//! A stream that the server opened late returns a session from Shutdown to Retired.

use std::future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::{Instrument, debug, debug_span, info, warn};
use tunnel_process::telemetry::LogRateLimit;
use tunnel_process::timers::coalesced;
use tunnel_proto::session::control::ControlReader;
use tunnel_proto::session::{
    ControlSender, LivenessState, Observation, SessionMonitor, SilenceCause, Transition,
};
use tunnel_proto::transport::{CloseReason, ClosedBy, IncomingStream, Session, TransportKind};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::control::{
    CAPABILITY_CLOUD, CAPABILITY_RENEW, ControlMessage, Member, Welcome,
};
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::name::ReplicaId;

use crate::config::Limit;
use crate::egress::SessionParams;
use crate::ingress::sessions::CloudSessionGuard;
use crate::metrics::GaugeGuard;
use crate::node_ip::{NodeIp, SessionNodeIp};

mod admission;
mod context;
mod lost;

pub(crate) use admission::AdmitError;
use admission::{Admitted, CLOSE_REASON_TIMEOUT, STOPPING, admit};
pub(crate) use context::{DialId, SessionContext, SessionEvent, SessionHandle};
pub(crate) use lost::LostSessions;

#[derive(Debug)]
pub(crate) struct SessionSummary {
    pub(crate) ready_for: Duration,
    pub(crate) reason: CloseReason,
    pub(crate) replica: ReplicaId,
}

/// A session after Welcome. It serves no streams before [`AdmittedSession::run`].
pub(crate) struct AdmittedSession {
    session: Arc<dyn Session>,
    admitted: Admitted,
    node_ip: Option<NodeIp>,
    began: Instant,
}

impl AdmittedSession {
    /// Waits for the admission of a session that was dialed at `began`. Closes the session on
    /// failure.
    pub(crate) async fn admit(
        session: Arc<dyn Session>,
        context: &SessionContext,
        began: Instant,
    ) -> Result<Self, AdmitError> {
        let node_ip = context.node_ip.current(session.stats().remote);
        let admitted = admit(&session, context, node_ip).await?;
        Ok(Self {
            session,
            admitted,
            node_ip,
            began,
        })
    }

    /// Returns the server's name.
    pub(crate) fn replica(&self) -> &ReplicaId {
        &self.admitted.welcome.replica_id
    }

    /// Returns the servers of the installation as of Welcome, and leaves an empty list.
    pub(crate) fn take_members(&mut self) -> Vec<Member> {
        std::mem::take(&mut self.admitted.welcome.members)
    }

    /// Runs the session to its end. Dropping the future cuts the session.
    pub(crate) async fn run(
        self,
        context: &SessionContext,
        handle: &SessionHandle,
    ) -> SessionSummary {
        let Self {
            session,
            admitted,
            node_ip,
            began,
        } = self;
        let welcome = &admitted.welcome;
        let replica = welcome.replica_id.clone();
        session.set_max_concurrent_streams(max_concurrent_streams(welcome));
        let _connected = context.metrics.session(session.transport());
        info!(
            node = %context.node,
            session = welcome.session.0,
            %replica,
            peer = %session.stats().remote,
            transport = %session.transport(),
            version = welcome.version,
            node_ip = node_ip.map(|node| tracing::field::display(node.ip)),
            elapsed = began.elapsed().as_secs_f64(),
            "session ready"
        );
        let ready = Instant::now();
        let params = SessionParams {
            session: welcome.session,
            node_ip: SessionNodeIp::new(
                context.node_ip.clone(),
                welcome.session,
                session.stats().remote,
                node_ip,
            ),
            dial_timeout: welcome.target_dial_timeout,
        };
        let id = welcome.session;
        let (active, reader) = ActiveSession::new(session, admitted, params, context, handle);
        let lost = context.lost_sessions.take(&replica);
        active.control_sender.lost(lost.clone());
        let reason = active.run(reader).await;
        if reason.code == CloseCode::Dead && reason.by != ClosedBy::Peer {
            // The server may not have read of the others either.
            let lost = lost.into_iter().chain([id]);
            context.lost_sessions.add(&replica, lost);
        }
        SessionSummary {
            ready_for: ready.elapsed(),
            reason,
            replica,
        }
    }

    /// Sends Bye and closes, since another session of this agent is with the same server. That
    /// server waits a second for this Bye before it replaces the other session.
    pub(crate) async fn decline(self) {
        let Self {
            session, admitted, ..
        } = self;
        let Admitted {
            // The stream is reset with its second half.
            reader: _reader,
            mut writer,
            welcome,
        } = admitted;
        debug!(
            session = welcome.session.0,
            "another session is with this server; closing this one"
        );
        let bye = async {
            writer.send(&ControlMessage::Bye(KNOWN.to_owned())).await?;
            writer.finish().await
        };
        // Completes when the server has received Bye.
        let _peer_may_be_gone = timeout(BYE_TIMEOUT, bye).await;
        session.close(CloseCode::Normal, KNOWN).await;
    }
}

/// Waits until the value has changed, and returns the receiver for the next wait.
async fn changed(mut value: watch::Receiver<()>) -> watch::Receiver<()> {
    if value.changed().await.is_err() {
        future::pending::<()>().await;
    }
    value
}

/// Returns the number of streams that the server may have open at a time.
fn max_concurrent_streams(welcome: &Welcome) -> u32 {
    // One more for the control stream, and room for streams that have ended at the server but not
    // yet here.
    welcome
        .streams_per_agent
        .min(STREAMS_MAX)
        .saturating_mul(2)
        .saturating_add(1)
}

struct ActiveSession<'a> {
    session: Arc<dyn Session>,
    context: &'a SessionContext,
    handle: &'a SessionHandle,
    params: Arc<SessionParams>,
    control_sender: ControlSender,
    /// The task that sends control messages.
    sending: AbortOnDropHandle<()>,
    monitor: SessionMonitor,
    /// The cause at the last check.
    silence_cause: SilenceCause,
    suspect: Option<GaugeGuard>,
    /// Time of the next report of the round-trip time.
    rtt_due: Instant,
    /// The registration for streams to targets of the cloud, until another session takes the new
    /// streams. `None` if the server has no such targets.
    cloud: Option<CloudSessionGuard>,
    /// Whether the connector knows that the server is stopping.
    is_draining: bool,
    /// Whether the server issues certificates on this session.
    can_renew: bool,
    /// Certificate requests without an answer on this session.
    pending_renewals: u32,
    /// Time of the last answer to a request for facts.
    facts_sent: Option<Instant>,
}

impl<'a> ActiveSession<'a> {
    fn new(
        session: Arc<dyn Session>,
        admitted: Admitted,
        params: SessionParams,
        context: &'a SessionContext,
        handle: &'a SessionHandle,
    ) -> (Self, ControlReader) {
        let (control_sender, sending) = ControlSender::new(admitted.writer);
        let sending = async move {
            if let Err(error) = sending.await {
                debug!(%error, "control message was not sent");
            }
        };
        let sending = TaskTracker::new().spawn(sending.in_current_span());
        let capabilities = &admitted.welcome.capabilities;
        let has_capability = |name: &str| capabilities.iter().any(|able| able == name);
        let cloud = has_capability(CAPABILITY_CLOUD).then(|| {
            let sessions = &context.cloud_sessions;
            sessions.register(params.session, session.clone())
        });
        let (limits, now) = (context.limits.liveness(), Instant::now());
        let active = Self {
            context,
            handle,
            params: Arc::new(params),
            control_sender,
            sending: AbortOnDropHandle::new(sending),
            monitor: SessionMonitor::new(limits, session.transport(), session.stats(), now),
            silence_cause: SilenceCause::NoAnswer,
            suspect: None,
            rtt_due: now + FIRST_RTT_AFTER,
            cloud,
            is_draining: false,
            can_renew: has_capability(CAPABILITY_RENEW),
            pending_renewals: 0,
            facts_sent: None,
            session,
        };
        (active, admitted.reader)
    }

    async fn run(mut self, mut reader: ControlReader) -> CloseReason {
        let (context, handle) = (self.context, self.handle);
        let session = self.session.clone();
        let mut closed = pin!(session.closed());
        // Each accepted stream begins another round. These futures stay registered from round to
        // round: the lists of waiters and the timers have locks that all tasks share.
        let mut drained = pin!(context.shutdown.drain().cancelled());
        let mut retired = pin!(handle.retire.cancelled());
        let mut withdraw_due = pin!(sleep(WITHDRAW_DELAY));
        let mut stopped = pin!(context.graceful_shutdown.cancelled());
        let mut renewal_due = pin!(context.rotating_credentials.due());
        let opened = self.cloud.as_ref().map(CloudSessionGuard::opened);
        let opened = opened.unwrap_or_default();
        let mut stream_opened = pin!(opened.notified());
        let params = self.params.clone();
        let mut connection_lost = pin!(params.node_ip.follow(&*session));
        let mut next_check = pin!(sleep_until(self.monitor.next_check()));
        let mut members = handle.members_changed.clone();
        members.mark_unchanged();
        let mut members_changed = pin!(changed(members));
        let mut path_probe_due = pin!(sleep(Duration::ZERO));
        let mut path_probes = 0_u32;
        let (mut withdrawn, mut replaced, mut listening) = (false, false, true);
        loop {
            let check_at = coalesced(self.monitor.next_check());
            if next_check.deadline() != check_at {
                next_check.as_mut().reset(check_at);
            }
            tokio::select! {
                biased;
                reason = &mut closed => return reason,
                () = &mut drained, if !withdrawn => {
                    withdrawn = true;
                    self.control_sender.withdraw();
                }
                () = &mut retired, if !replaced => {
                    replaced = true;
                    if self.is_draining {
                        withdraw_due.as_mut().reset(Instant::now() + WITHDRAW_DELAY);
                    } else {
                        self.retire();
                    }
                }
                () = &mut withdraw_due, if replaced && !self.monitor.is_retired() => self.retire(),
                () = &mut stopped => return self.graceful_shutdown().await,
                request = &mut renewal_due, if self.may_renew(withdrawn) => {
                    renewal_due.set(context.rotating_credentials.due());
                    self.pending_renewals = self.pending_renewals.saturating_add(1);
                    self.control_sender.renew(request);
                }
                () = &mut stream_opened => {
                    stream_opened.set(opened.notified());
                    self.monitor.stream(Instant::now());
                }
                () = &mut connection_lost => return self.abandon(),
                members = &mut members_changed => {
                    members_changed.set(changed(members));
                    if session.transport() != TransportKind::H2 {
                        path_probes = PATH_PROBES;
                        path_probe_due.as_mut().reset(Instant::now());
                    }
                }
                () = &mut path_probe_due, if path_probes > 0 => {
                    path_probes -= 1;
                    path_probe_due.as_mut().reset(Instant::now() + PATH_PROBE_INTERVAL);
                    session.probe();
                }
                () = &mut next_check => match self.check().await {
                    Transition::Dead => return self.end_silent().await,
                    Transition::Finished => {
                        if let Some(reason) = self.send_bye(REPLACED).await {
                            return reason;
                        }
                        // A stream that has arrived is not cut: the session finishes again.
                        if session.stats().streams == 0 {
                            return self.end(CloseCode::Normal, REPLACED).await;
                        }
                    }
                    Transition::Unchanged | Transition::Suspect | Transition::Live => {}
                },
                message = reader.receive(), if listening => match message {
                    Ok(Some(ControlMessage::Bye(reason))) => {
                        info!(node = %context.node, session = self.params.session.0, reason, "server sent Bye");
                        return self.after_bye().await;
                    }
                    Ok(Some(ControlMessage::Renewed(reply))) => {
                        if let Err(why) = self.handle_renewed(reply) {
                            return self.end(CloseCode::Protocol, why).await;
                        }
                    }
                    Ok(Some(message)) => self.handle_control(message).await,
                    Ok(None) => listening = false,
                    Err(error) => return self.control_failed(&error).await,
                },
                incoming = session.accept() => {
                    // An error means that the session has ended, which the first branch reports.
                    if let Ok(incoming) = incoming {
                        self.serve(incoming);
                    }
                }
            }
        }
    }

    /// Returns whether a certificate may be requested on this session. A session that may be gone,
    /// or is about to end, does not qualify.
    fn may_renew(&self, withdrawn: bool) -> bool {
        self.can_renew && !withdrawn && !self.monitor.is_retired() && self.suspect.is_none()
    }

    fn serve(&mut self, incoming: IncomingStream) {
        let (egress, params) = (self.context.egress.clone(), self.params.clone());
        let has_room = self.session.has_room();
        let span = debug_span!("stream", node = %self.context.node, session = params.session.0);
        self.context.shutdown.spawn_work(
            async move { egress.serve(incoming, has_room, &params).await }.instrument(span),
        );
        self.monitor.stream(Instant::now());
    }

    /// Passes a reply to a certificate request on. Returns the reason to close the session if no
    /// certificate was requested: such a server is faulty or hostile, and should carry no requests
    /// either.
    fn handle_renewed(&mut self, reply: EnrollReply) -> Result<(), &'static str> {
        let context = self.context;
        let Some(left) = self.pending_renewals.checked_sub(1) else {
            context.metrics.renewal("unasked");
            let why = "received a certificate that was not requested";
            warn!(node = %context.node, session = self.params.session.0, "{why}; closing the session");
            return Err(why);
        };
        self.pending_renewals = left;
        let rotating_credentials = context.rotating_credentials.clone();
        context
            .shutdown
            .spawn_service(async move { rotating_credentials.handle_reply(reply).await });
        Ok(())
    }

    async fn handle_control(&mut self, message: ControlMessage) {
        let (agent, session) = (&self.context.node, self.params.session);
        match message {
            ControlMessage::Suspect(doubts) => {
                debug!(node = %agent, session = session.0, doubts, "server reported whether it doubts this session");
                self.monitor.peer_suspects(doubts, Instant::now());
            }
            ControlMessage::Receiving => self.monitor.peer_receives(),
            ControlMessage::Drain {
                deadline,
                move_within,
            } if !self.is_draining => {
                self.is_draining = true;
                info!(
                    node = %agent, session = session.0, deadline = deadline.as_secs_f64(), move_within = move_within.as_secs_f64(),
                    "server is stopping; dialing another session, open streams go on"
                );
                let draining = SessionEvent::Draining { move_within };
                self.handle.send(draining).await;
            }
            ControlMessage::Members(members) => {
                debug!(node = %agent, session = session.0, members = members.len(), "server reported the servers of its installation");
                self.handle.send(SessionEvent::Members(members)).await;
            }
            ControlMessage::DiagRequest => self.send_facts(),
            ControlMessage::RenewSoon(within) => {
                self.context.rotating_credentials.renew_within(within);
            }
            ControlMessage::Unknown => {
                debug!(node = %agent, session = session.0, "message of a later version ignored")
            }
            ControlMessage::Hello(_)
            | ControlMessage::Welcome(_)
            | ControlMessage::NotAdmitted(..)
            | ControlMessage::Drain { .. }
            | ControlMessage::Withdraw
            | ControlMessage::Renew(_)
            | ControlMessage::Lost(_)
            | ControlMessage::Renewed(_)
            | ControlMessage::DiagReply(_)
            | ControlMessage::Bye(_) => {
                // The server may repeat such messages at will.
                static UNEXPECTED: LogRateLimit =
                    LogRateLimit::new("unexpected messages on control streams");
                if UNEXPECTED.admit() {
                    warn!(node = %agent, session = session.0, "unexpected message on the control stream ignored");
                }
            }
        }
    }

    /// Answers a request for facts, at most once a second: they take a millisecond to make.
    fn send_facts(&mut self) {
        let now = Instant::now();
        let is_early = self
            .facts_sent
            .is_some_and(|sent| now - sent < FACTS_INTERVAL);
        let Some(facts) = self.context.facts.as_ref().filter(|_| !is_early) else {
            debug!(node = %self.context.node, session = self.params.session.0, "request for facts ignored");
            return;
        };
        info!(node = %self.context.node, session = self.params.session.0, "sending facts and last log lines to the server, which an operator asked for");
        self.facts_sent = Some(now);
        self.control_sender.diag_reply(facts.document());
    }

    /// Checks the session's liveness and acts on any transition except the end.
    async fn check(&mut self) -> Transition {
        let (stats, now) = (self.session.stats(), Instant::now());
        let Observation {
            transition,
            check,
            is_log_due,
            is_receive_report_due,
        } = self.monitor.check(stats, now);
        self.silence_cause = check.cause;
        if check.probe {
            self.session.probe();
        }
        self.control_sender.suspect(check.is_suspect_locally);
        if is_receive_report_due {
            self.control_sender.receiving();
        }
        match transition {
            Transition::Suspect => {
                if check.is_suspect_locally {
                    self.context.metrics.limit(if check.is_suspect_idle {
                        Limit::SuspectAfterIdle
                    } else {
                        Limit::SuspectAfterBusy
                    });
                }
                self.suspect = Some(self.context.metrics.suspect());
                self.set_live_for_cloud(false);
                self.handle.send(SessionEvent::Suspect).await;
            }
            Transition::Live => {
                self.suspect = None;
                self.set_live_for_cloud(true);
                self.handle.send(SessionEvent::Live).await;
            }
            // A transport that has measured nothing yet reports zero.
            Transition::Unchanged if check.state == LivenessState::Live && !stats.rtt.is_zero() => {
                if now >= self.rtt_due {
                    self.rtt_due = now + RTT_INTERVAL;
                    let measured = SessionEvent::RoundTripTime(stats.rtt);
                    self.handle.send(measured).await;
                }
            }
            Transition::Unchanged | Transition::Dead | Transition::Finished => {}
        }
        if is_log_due {
            let (agent, session) = (&self.context.node, self.params.session);
            let (transport, silence) = (self.session.transport(), check.silence);
            match check.state {
                LivenessState::Live => {
                    info!(node = %agent, session = session.0, %transport, "session is live again");
                }
                LivenessState::Suspect | LivenessState::Dead => {
                    let own = check.is_suspect_locally;
                    warn!(node = %agent, session = session.0, %transport, silence = silence.as_secs_f64(), own, reason = %check.cause, "session is suspect");
                }
            }
        }
        transition
    }

    /// Ends a session whose connection is lost, without waiting for the server.
    fn abandon(mut self) -> CloseReason {
        self.cloud = None;
        let (session, code) = (self.session.clone(), CloseCode::Dead);
        let reason = "this host has lost the address of the connection";
        let close = async move { session.close(code, reason).await };
        self.context.shutdown.spawn_service(close);
        CloseReason::local(code, reason)
    }

    fn set_live_for_cloud(&self, is_live: bool) {
        if let Some(cloud) = &self.cloud {
            cloud.set_live(is_live);
        }
    }

    /// Retires the session: another session takes the new streams, and this one ends with its last
    /// stream.
    fn retire(&mut self) {
        self.cloud = None;
        let streams = self.session.stats().streams;
        debug!(node = %self.context.node, session = self.params.session.0, streams, "retiring session");
        self.control_sender.withdraw();
        self.monitor.retire(Instant::now());
    }

    /// Sends Bye and closes, since the agent stops.
    async fn graceful_shutdown(mut self) -> CloseReason {
        match self.send_bye(STOPPING).await {
            Some(reason) => reason,
            None => self.end(CloseCode::Normal, STOPPING).await,
        }
    }

    /// Sends Bye, unless it was sent before, and for a moment serves streams that the server opened
    /// before reading it (a draining egress refuses them). Returns the reason if the session has ended
    /// meanwhile.
    async fn send_bye(&mut self, why: &str) -> Option<CloseReason> {
        self.cloud = None;
        let session = self.session.clone();
        let is_replaced = !self.context.graceful_shutdown.is_cancelled();
        self.control_sender.bye(why);
        if !self.sending.is_finished() {
            let _peer_may_be_gone = timeout(BYE_TIMEOUT, &mut self.sending).await;
        }
        let until = Instant::now() + (session.stats().rtt + LATE_STREAMS).min(BYE_TIMEOUT);
        loop {
            tokio::select! {
                biased;
                reason = session.closed() => return Some(reason),
                // A stream that has arrived is not cut, unless the whole agent stops.
                incoming = session.accept(), if is_replaced || Instant::now() < until => {
                    if let Ok(incoming) = incoming {
                        self.serve(incoming);
                    }
                }
                () = sleep_until(until) => return None,
            }
        }
    }

    /// Waits for the server to close, and closes from this end after a timeout.
    async fn after_bye(mut self) -> CloseReason {
        self.cloud = None;
        match timeout(BYE_TIMEOUT, self.session.closed()).await {
            Ok(reason) => reason,
            Err(_still_open) => self.end(CloseCode::Normal, "server sent Bye").await,
        }
    }

    async fn control_failed(self, error: &io::Error) -> CloseReason {
        if let Ok(reason) = timeout(CLOSE_REASON_TIMEOUT, self.session.closed()).await {
            return reason;
        }
        warn!(node = %self.context.node, session = self.params.session.0, %error, "control stream failed");
        let reason = format!("control stream failed: {error}");
        self.end(CloseCode::Protocol, &reason).await
    }

    async fn end_silent(self) -> CloseReason {
        self.context.metrics.limit(Limit::DeadAfter);
        let why = format!(
            "{} for too long (agent's limits.deadAfter)",
            self.silence_cause
        );
        self.end(CloseCode::Dead, &why).await
    }

    async fn end(mut self, code: CloseCode, reason: &str) -> CloseReason {
        self.cloud = None;
        self.session.close(code, reason).await;
        CloseReason::local(code, reason)
    }
}

/// Reason sent on a session that another one has replaced.
const REPLACED: &str = "replaced by another session";
/// Reason sent on a session with a server that another session is with.
const KNOWN: &str = "another session of this agent is with this server";
/// Upper bound for the number of streams in Welcome. quinn uses some 80 bytes for each allowed
/// stream.
const STREAMS_MAX: u32 = 65536;
/// Time limit for each step of the close.
const BYE_TIMEOUT: Duration = Duration::from_secs(1);
/// Probes after a change of the servers. On a node of the cluster kube-proxy deletes the connection
/// tracking entries of UDP Services when their endpoints change, and the host's firewall then drops
/// what the server sends until the agent has sent something.
const PATH_PROBES: u32 = 4;
/// Time between these probes, the first of which is sent at once. The endpoints change some time after
/// the servers have reported a change, and kube-proxy acts once a second at most.
const PATH_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between two answers to requests for facts.
const FACTS_INTERVAL: Duration = Duration::from_secs(1);
/// Time from the replacement of a session whose server is stopping to its Withdraw. The server of the
/// new session announces it to the others within 100 ms. Until then they forward to the old one.
const WITHDRAW_DELAY: Duration = Duration::from_millis(500);
/// Time in addition to one round trip in which streams may arrive that the server opened before it
/// read the last message.
const LATE_STREAMS: Duration = Duration::from_millis(50);

/// Time until the round-trip time is reported: h2 measures with its first keep-alive.
const FIRST_RTT_AFTER: Duration = Duration::from_secs(10);
/// Interval at which the round-trip time is reported.
const RTT_INTERVAL: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
