//! State of one connected session in the registry: its identity, and whether it accepts new
//! streams.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use rustls_pki_types::CertificateDer;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, timeout};
use tunnel_proto::transport::{CloseReason, ClosedBy, Session};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::label::Labels;
use tunnel_proto::wire::name::{InstanceId, NodeName, SessionId};

use super::holders::ChangedNodes;

#[derive(Debug)]
pub struct AgentSession {
    /// Identifies the session on this server.
    pub id: SessionId,
    /// The node that the agent serves.
    pub node: NodeName,
    /// Identifies the agent's process.
    pub instance: InstanceId,
    /// Version of the agent's software.
    pub software: String,
    /// Address that the agent claims. Shown to operators and never used for routing.
    pub claimed_address: String,
    /// Labels that the agent gives its node, for operators.
    pub claimed_labels: Labels,
    /// Whether the agent answers requests for facts about itself.
    pub offers_diag: bool,
    /// Whether the agent renews its certificate when it is asked to.
    pub renews_soon: bool,
    /// Time at which the session was admitted.
    pub since: SystemTime,
    /// [`AgentSession::since`] on the monotonic clock.
    registered: Instant,
    /// Time since which the agent's process has had sessions at this server without interruption.
    admitted: Instant,
    pub session: Arc<dyn Session>,
    withdrawn: AtomicBool,
    /// Learns of the end of the session's part in routing. Set when it is registered.
    changed_nodes: OnceLock<Arc<ChangedNodes>>,
    /// Whether other servers were answered that this process keeps the name.
    times_kept_name: AtomicU64,
    suspect_reason: Mutex<Option<SuspectReason>>,
    becomes_suspect: Notify,
    streams: Arc<AtomicUsize>,
    busy: Notify,
    diag: DiagExchange,
    renewal: RenewalRequest,
    closing: OnceLock<CloseReason>,
    /// End of the last certificate that the agent proved or was issued over this session. Stored on
    /// the monotonic clock, so that a change of the system time cannot end every session.
    valid_until: Mutex<Instant>,
    /// Chain of the last certificate that was issued over this session.
    issued: Mutex<Vec<CertificateDer<'static>>>,
}

/// Requests of operators for facts about the agent.
#[derive(Debug, Default)]
struct DiagExchange {
    /// Whether the agent has to be asked.
    is_due: AtomicBool,
    waiting: Mutex<Vec<oneshot::Sender<String>>>,
}

/// The request to renew the certificate for a stage of a rotation of the CA.
#[derive(Debug, Default)]
struct RenewalRequest {
    is_due: AtomicBool,
    /// Begin of the stage for which the agent was last asked, in seconds since the Unix epoch.
    stage: AtomicU64,
}

/// The reason why an agent gave no facts about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DiagError {
    #[error(
        "the agent offers no facts: it is older than this server, or runs with --remote-diag off; use tunnel-agent diag on the node"
    )]
    NotOffered,
    #[error("others wait for facts of this agent; try again")]
    Busy,
    #[error("the agent gave no answer in {} s; tunnel-server ping NODE says whether it answers at all", DIAG_TIMEOUT.as_secs())]
    NoAnswer,
    #[error("the session with the agent ended before the answer")]
    Ended,
}

/// Reason why a session accepts no new streams until the agent responds again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SuspectReason {
    /// The agent has shown no sign of life since this time.
    Silent(Instant),
    /// The agent has received no data since this time, although it answers.
    Undelivered(Instant),
    /// The agent reports that it receives nothing from the server, or cannot deliver its data.
    PeerHearsNothing,
}

impl std::fmt::Display for SuspectReason {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Silent(since) => {
                write!(
                    formatter,
                    "nothing received for {} s",
                    since.elapsed().as_secs()
                )
            }
            Self::Undelivered(since) => write!(
                formatter,
                "no data delivered for {} s, while small packets pass",
                since.elapsed().as_secs()
            ),
            Self::PeerHearsNothing => formatter
                .write_str("the agent reports that it receives nothing, or delivers no data"),
        }
    }
}

impl AgentSession {
    /// Creates the entry of a session that is about to be registered.
    pub fn new(
        id: SessionId,
        node: NodeName,
        instance: InstanceId,
        session: Arc<dyn Session>,
    ) -> Self {
        let valid_until = to_instant(session.peer().not_after);
        let now = Instant::now();
        Self {
            id,
            node,
            instance,
            software: String::new(),
            claimed_address: String::new(),
            claimed_labels: Labels::new(),
            offers_diag: false,
            renews_soon: false,
            since: SystemTime::now(),
            registered: now,
            admitted: now,
            session,
            withdrawn: AtomicBool::new(false),
            changed_nodes: OnceLock::new(),
            times_kept_name: AtomicU64::new(0),
            suspect_reason: Mutex::default(),
            becomes_suspect: Notify::new(),
            streams: Arc::default(),
            busy: Notify::new(),
            diag: DiagExchange::default(),
            renewal: RenewalRequest::default(),
            closing: OnceLock::new(),
            valid_until: Mutex::new(valid_until),
            issued: Mutex::default(),
        }
    }

    /// Records that a certificate with this chain, leaf first, was issued over this session. The
    /// certificate ends at `not_after`.
    pub fn renewed(&self, not_after: SystemTime, chain: Vec<CertificateDer<'static>>) {
        *self.issued.lock() = chain;
        let mut valid_until = self.valid_until.lock();
        *valid_until = to_instant(not_after).max(*valid_until);
    }

    /// Returns the chain that was last issued over this session. Empty if none was issued.
    pub fn issued(&self) -> Vec<CertificateDer<'static>> {
        self.issued.lock().clone()
    }

    /// Returns the end of the agent's last certificate.
    pub fn valid_until(&self) -> Instant {
        *self.valid_until.lock()
    }

    /// Returns the time since the session was registered.
    pub fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.registered)
    }

    /// Returns the time since which the agent's process has had sessions at this server, each
    /// registered before the previous one ended.
    pub(in crate::routing) fn admitted(&self) -> Instant {
        self.admitted
    }

    /// Records that the agent's process had `other` when this session was registered.
    pub(super) fn continue_from(&mut self, other: &Self) {
        self.admitted = self.admitted.min(other.admitted);
    }

    /// Records that this server has answered another one that this process keeps the name.
    pub(in crate::routing) fn keep_name(&self) {
        self.times_kept_name.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how often this server has answered that this process keeps the name. If that changes
    /// while this server asks, the answer may be older, and about a session that has yielded.
    pub(in crate::routing) fn times_kept_name(&self) -> u64 {
        self.times_kept_name.load(Ordering::Relaxed)
    }

    /// Returns the time of the agent's last sign of life.
    pub fn last_seen(&self, now: SystemTime) -> SystemTime {
        let silence = self.session.stats().received_at.elapsed();
        now.checked_sub(silence).unwrap_or(now)
    }

    /// Returns whether the server is closing the session.
    pub fn is_closing(&self) -> bool {
        self.closing.get().is_some()
    }

    /// Removes the session from routing permanently. Open streams continue.
    pub fn withdraw(&self) {
        let was_withdrawn = self.withdrawn.swap(true, Ordering::Relaxed);
        self.session.stop_opening();
        if let Some(changed_nodes) = self.changed_nodes.get().filter(|_| !was_withdrawn) {
            changed_nodes.add(&self.node);
        }
    }

    /// Sets what learns that the session has withdrawn.
    pub(super) fn report_to(&self, changed_nodes: &Arc<ChangedNodes>) {
        let _only_set_once = self.changed_nodes.set(changed_nodes.clone());
    }

    /// Returns whether the session was removed from routing permanently.
    pub fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::Relaxed)
    }

    /// Removes the session from routing, or returns it to routing with `None`. Open streams
    /// continue.
    pub fn set_suspect_reason(&self, suspect_reason: Option<SuspectReason>) {
        *self.lock_suspect_reason() = suspect_reason;
        if suspect_reason.is_some() {
            self.becomes_suspect.notify_waiters();
        }
    }

    /// Waits until the session is suspect. Cancel-safe.
    pub async fn suspected(&self) {
        loop {
            // Receives each notification from here on.
            let becomes_suspect = self.becomes_suspect.notified();
            if self.suspect_reason().is_some() {
                return;
            }
            becomes_suspect.await;
        }
    }

    /// Returns the reason why the session is suspect, if it is.
    pub fn suspect_reason(&self) -> Option<SuspectReason> {
        *self.lock_suspect_reason()
    }

    /// Returns whether new streams can use the session.
    pub fn is_routable(&self) -> bool {
        !self.is_withdrawn() && self.suspect_reason().is_none()
    }

    /// Counts a stream until the guard is dropped. Wakes [`AgentSession::busy`] if the stream is
    /// the only one.
    pub(crate) fn count_stream(&self) -> StreamCountGuard {
        if self.streams.fetch_add(1, Ordering::Relaxed) == 0 {
            self.busy.notify_one();
        }
        StreamCountGuard(self.streams.clone())
    }

    /// Returns whether a stream of the session is open.
    pub(super) fn has_streams(&self) -> bool {
        self.streams.load(Ordering::Relaxed) > 0
    }

    /// Waits until a stream opens on a session that had none, or until facts about the agent or a
    /// renewal are asked for. Cancel-safe. Supports one waiter.
    pub async fn busy(&self) {
        self.busy.notified().await;
    }

    /// Asks the agent for facts about itself. Returns its document, whose content is the agent's
    /// choice.
    ///
    /// # Errors
    /// Returns a [`DiagError`].
    pub async fn diag(&self) -> Result<String, DiagError> {
        if !self.offers_diag {
            return Err(DiagError::NotOffered);
        }
        let (sender, receiver) = oneshot::channel();
        {
            let mut waiting = self.diag.waiting.lock();
            waiting.retain(|other| !other.is_closed());
            if waiting.len() >= DIAG_WAITING_MAX {
                return Err(DiagError::Busy);
            }
            waiting.push(sender);
        }
        self.diag.is_due.store(true, Ordering::Relaxed);
        self.busy.notify_one();
        let answer = async {
            tokio::select! {
                biased;
                answer = timeout(DIAG_TIMEOUT, receiver) => match answer {
                    Ok(Ok(document)) => Ok(document),
                    Ok(Err(_dropped)) => Err(DiagError::Ended),
                    Err(_elapsed) => Err(DiagError::NoAnswer),
                },
                _ = self.session.closed() => Err(DiagError::Ended),
            }
        };
        answer.await
    }

    /// Returns whether the agent has to be asked for facts about itself, once for each request.
    pub fn take_diag_request(&self) -> bool {
        self.diag.is_due.swap(false, Ordering::Relaxed)
    }

    /// Asks the agent to renew its certificate soon, once for each begin of a stage of the rotation of
    /// the CA.
    pub fn ask_to_renew(&self, stage_since: SystemTime) {
        let since = stage_since.duration_since(SystemTime::UNIX_EPOCH);
        let since = since.unwrap_or_default().as_secs();
        if self.renews_soon && self.renewal.stage.swap(since, Ordering::Relaxed) != since {
            self.renewal.is_due.store(true, Ordering::Relaxed);
            self.busy.notify_one();
        }
    }

    /// Returns whether the agent has to be asked to renew its certificate, once for each request.
    pub fn take_renewal_request(&self) -> bool {
        self.renewal.is_due.swap(false, Ordering::Relaxed)
    }

    /// Passes the agent's document to all who wait for it. One that nobody asked for is dropped.
    pub fn diag_received(&self, document: &str) {
        for waiting in self.diag.waiting.lock().drain(..) {
            let _gone = waiting.send(document.to_owned());
        }
    }

    /// Closes the session and stores the reason, because a transport may report only that the
    /// session was closed locally.
    pub async fn close(&self, code: CloseCode, reason: &str) {
        self.begin_close(code, reason);
        self.session.close(code, reason).await;
    }

    /// Marks the session as closing to make room for a newer session of its node. The caller must
    /// then call [`AgentSession::close_superseded`].
    pub(super) fn supersede(&self) {
        self.withdraw();
        self.begin_close(CloseCode::Superseded, SUPERSEDED);
    }

    /// Closes the session in favor of a newer session of its node.
    pub async fn close_superseded(&self) {
        self.close(CloseCode::Superseded, SUPERSEDED).await;
    }

    fn begin_close(&self, code: CloseCode, reason: &str) {
        self.closing
            .get_or_init(|| CloseReason::local(code, reason));
    }

    /// Returns the reason why the session ended, based on the reason that its transport reported.
    pub fn end(&self, reported: CloseReason) -> CloseReason {
        match reported.by {
            ClosedBy::Local => self.closing.get().cloned().unwrap_or(reported),
            ClosedBy::Peer | ClosedBy::Network => reported,
        }
    }

    fn lock_suspect_reason(&self) -> MutexGuard<'_, Option<SuspectReason>> {
        self.suspect_reason.lock()
    }
}

const SUPERSEDED: &str = "superseded";

/// Converts a time of the system clock to the monotonic clock.
fn to_instant(time: SystemTime) -> Instant {
    let left = time
        .duration_since(SystemTime::now())
        .unwrap_or_default()
        .min(VALIDITY_MAX);
    Instant::now() + left
}

/// Upper limit of a validity. Certificates of operators can be valid forever.
const VALIDITY_MAX: Duration = Duration::from_secs(10 * 365 * 86400);

/// Counts one stream of a session until dropped.
#[derive(Debug)]
pub(crate) struct StreamCountGuard(Arc<AtomicUsize>);

impl Drop for StreamCountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Time for an agent's document.
const DIAG_TIMEOUT: Duration = Duration::from_secs(10);
/// Operators that wait for one agent's document at once.
const DIAG_WAITING_MAX: usize = 4;
