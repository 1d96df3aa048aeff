//! One connected session as the registry sees it: who it is, and whether it takes new streams.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use tokio::sync::Notify;
use tokio::time::Instant;
use tunnel_proto::transport::{CloseReason, ClosedBy, Session};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::{InstanceId, NodeName, SessionId};

/// What is known of a connected agent.
#[derive(Debug)]
pub struct AgentSession {
    /// The session at this server.
    pub id: SessionId,
    /// The node it serves.
    pub node: NodeName,
    /// The agent's process.
    pub instance: InstanceId,
    /// Version of the agent's software.
    pub software: String,
    /// The address that the agent claims; shown, never used for routing.
    pub claimed_address: String,
    /// When it was admitted.
    pub since: SystemTime,
    /// The transport's session.
    pub session: Arc<dyn Session>,
    withdrawn: AtomicBool,
    suspect_reason: Mutex<Option<SuspectReason>>,
    streams: Arc<AtomicUsize>,
    busy: Notify,
    closing: OnceLock<CloseReason>,
    /// When the last certificate that the agent proved or was issued here ends, by this process's own clock: a clock
    /// that is set must not end every session.
    valid_until: Mutex<Instant>,
    /// Chain of the last certificate that was issued over this session.
    issued: Mutex<Vec<CertificateDer<'static>>>,
}

/// Why a session takes no new streams until it answers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SuspectReason {
    /// No sign of life since then.
    Silent(Instant),
    /// The agent says that it hears nothing from this end.
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
            Self::PeerHearsNothing => {
                formatter.write_str("the agent reports that it receives nothing from this server")
            }
        }
    }
}

impl AgentSession {
    /// A session that is about to be registered.
    #[must_use]
    pub fn new(
        id: SessionId,
        node: NodeName,
        instance: InstanceId,
        session: Arc<dyn Session>,
    ) -> Self {
        let valid_until = to_instant(session.peer().not_after);
        Self {
            id,
            node,
            instance,
            software: String::new(),
            claimed_address: String::new(),
            since: SystemTime::now(),
            session,
            withdrawn: AtomicBool::new(false),
            suspect_reason: Mutex::default(),
            streams: Arc::default(),
            busy: Notify::new(),
            closing: OnceLock::new(),
            valid_until: Mutex::new(valid_until),
            issued: Mutex::default(),
        }
    }

    /// A certificate with this chain, leaf first, that ends at `not_after` was issued to the agent over this session.
    pub fn renewed(&self, not_after: SystemTime, chain: Vec<CertificateDer<'static>>) {
        *self.issued.lock().unwrap_or_else(PoisonError::into_inner) = chain;
        let mut valid_until = self
            .valid_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *valid_until = to_instant(not_after).max(*valid_until);
    }

    /// The certificates that the agent was issued last over this session; none where it was not.
    #[must_use]
    pub fn issued(&self) -> Vec<CertificateDer<'static>> {
        self.issued
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// When the agent's last certificate ends.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        *self
            .valid_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this end is closing it.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.closing.get().is_some()
    }

    /// Takes the session out of routing for good; its open streams go on.
    pub fn withdraw(&self) {
        self.withdrawn.store(true, Ordering::Relaxed);
        self.session.stop_opening();
    }

    /// Whether the agent said that it is leaving.
    #[must_use]
    pub fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::Relaxed)
    }

    /// Takes the session out of routing, or with `None` back in; its open streams go on.
    pub fn set_suspect_reason(&self, suspect_reason: Option<SuspectReason>) {
        *self.lock_suspect_reason() = suspect_reason;
    }

    /// Why the session takes no new streams for now.
    #[must_use]
    pub fn suspect_reason(&self) -> Option<SuspectReason> {
        *self.lock_suspect_reason()
    }

    /// Whether new streams may go over the session.
    #[must_use]
    pub fn is_routable(&self) -> bool {
        !self.is_withdrawn() && self.suspect_reason().is_none()
    }

    /// Counts a stream until the value goes, and wakes [`AgentSession::busy`] when it is the only one.
    #[must_use]
    pub(super) fn count_stream(&self) -> StreamCountGuard {
        if self.streams.fetch_add(1, Ordering::Relaxed) == 0 {
            self.busy.notify_one();
        }
        StreamCountGuard(self.streams.clone())
    }

    /// Whether a stream of the session is open.
    #[must_use]
    pub(super) fn has_streams(&self) -> bool {
        self.streams.load(Ordering::Relaxed) > 0
    }

    /// Waits until a stream opens on the session that had none. Cancel-safe; for one waiter.
    pub async fn busy(&self) {
        self.busy.notified().await;
    }

    /// Closes the session and remembers why: a transport may only say that it was closed here.
    pub async fn close(&self, code: CloseCode, reason: &str) {
        self.begin_close(code, reason);
        self.session.close(code, reason).await;
    }

    /// Marks the session as closing because a newer one of its node needs the room; [`AgentSession::close_superseded`] has to
    /// follow.
    pub(super) fn supersede(&self) {
        self.withdraw();
        self.begin_close(CloseCode::Superseded, SUPERSEDED);
    }

    /// Closes the session in favor of a newer one of its node.
    pub async fn close_superseded(&self) {
        self.close(CloseCode::Superseded, SUPERSEDED).await;
    }

    fn begin_close(&self, code: CloseCode, reason: &str) {
        self.closing.get_or_init(|| CloseReason {
            by: ClosedBy::Local,
            code,
            reason: reason.to_owned(),
        });
    }

    /// Why the session ended, given what its transport says.
    #[must_use]
    pub fn end(&self, reported: CloseReason) -> CloseReason {
        match reported.by {
            ClosedBy::Local => self.closing.get().cloned().unwrap_or(reported),
            ClosedBy::Peer | ClosedBy::Network => reported,
        }
    }

    fn lock_suspect_reason(&self) -> MutexGuard<'_, Option<SuspectReason>> {
        self.suspect_reason
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

const SUPERSEDED: &str = "superseded";

/// A moment of the wall clock by this process's own.
fn to_instant(time: SystemTime) -> Instant {
    let left = time
        .duration_since(SystemTime::now())
        .unwrap_or_default()
        .min(VALIDITY_MAX);
    Instant::now() + left
}

/// Certificates of operators may say that they never end.
const VALIDITY_MAX: Duration = Duration::from_secs(10 * 365 * 86400);

/// Holds a session's count of streams one higher.
#[derive(Debug)]
pub(super) struct StreamCountGuard(Arc<AtomicUsize>);

impl Drop for StreamCountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
