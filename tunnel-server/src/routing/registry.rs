//! Registry of sessions: the sessions that are connected for each node. The registry opens streams
//! over them.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tracing::debug;
use tunnel_process::settings::format_size;
use tunnel_proto::transport::{SessionError, Stream};
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::{InstanceId, NodeName, SessionId};
use tunnel_proto::wire::peer::HeldNode;

use crate::routing::forwarded::ForwardedCount;
use crate::routing::via::Via;

mod agent_session;
mod closes;
mod holders;
mod idle;
mod limiter;
mod probe;

pub use crate::routing::registry::agent_session::{AgentSession, DiagError, SuspectReason};
use closes::{CLOSES_MAX, Closes};
pub use closes::{LastClose, SessionHistory};
use holders::ChangedNodes;
pub use idle::IdleStream;
use idle::IdleStreams;
pub use limiter::{CallerKey, QuotaExhausted, StreamQuota};
use limiter::{StreamLimiter, StreamPermit};
pub use probe::answers_probe;

/// Sessions that one node can have at once. An agent has two sessions while it replaces one, and
/// one more for each session that a partition left open.
const SESSIONS_PER_NODE: usize = 4;

/// Time for which a new session takes streams only if no older session of its node does. Longer
/// than the round trip in which an agent reads Welcome and answers with Bye, or withdraws the
/// session that this one replaces.
const TAKEOVER_DELAY: Duration = Duration::from_secs(1);
/// Silence of an older session after which a newer one takes streams at once. An agent replaces a
/// session in use after 5 s of silence.
const SILENCE: Duration = Duration::from_secs(4);

/// Time that a new stream waits for a permit that is about to be released: an idle stream was evicted
/// for it, here or at the server that forwards it. A reset and the new stream arrive together, and
/// different tasks handle them.
pub(super) const PERMIT_WAIT: Duration = Duration::from_millis(50);

/// End of the range of the random first session id. Agents name sessions that they have lost, also
/// to the next process of a server, whose live sessions must not have these ids. Below 2^32, ids stay
/// readable in logs.
const FIRST_ID_END: u64 = 1 << 32;

/// Reason why a session was not registered.
#[derive(Debug)]
pub enum RegisterError {
    /// A live session of another agent process serves the node.
    InUse(Arc<AgentSession>),
    /// The node has reached its limit of sessions, and all of them are in use.
    TooManySessions,
}

/// Reason why no stream to a node could be opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpenError {
    /// The node has no session.
    #[error(
        "no agent is connected for this node; 'tunnel-server nodes' says when it was last seen and whether it is revoked; check \
         that tunnel-agent runs there"
    )]
    NoAgent,
    /// All sessions of the node are suspect.
    #[error("the agent is suspect: {0}; requests are accepted again when it answers")]
    Suspect(SuspectReason),
    /// The agent, or the caller on this agent, has reached its limit of streams.
    #[error("{0}")]
    TooManyStreams(QuotaExhausted),
    /// The connection to the server that holds the node has reached its limit of streams.
    #[error(
        "the connection to the server of the agent has {0} streams open, the most it may have (limits.peerStreams); try again later"
    )]
    PeerStreams(usize),
    /// Stalled readers hold as much memory as they may. The value is the size of the whole pool, in
    /// bytes.
    #[error(
        "stalled readers use too much of limits.bufferPool, {}, or of the agent's, and the callers with the most unread data are refused; try again later",
        format_size(*.0)
    )]
    BufferPoolFull(u64),
    /// The agent is draining, and no other session is available.
    #[error("the agent is stopping")]
    Draining,
    /// The session was lost before anything was sent.
    #[error("the session with the agent was lost")]
    Lost(#[source] SessionError),
    /// The agent did not accept the stream in time.
    #[error("the agent did not accept the stream in time (limits.openTimeout)")]
    Timeout,
}

/// No stream could be opened, over `via` if there was anything to ask.
#[derive(Debug)]
pub struct NotOpened {
    pub via: Option<Via>,
    pub error: OpenError,
}

impl From<OpenError> for NotOpened {
    fn from(error: OpenError) -> Self {
        Self { via: None, error }
    }
}

/// A request for a stream of a caller to the target of a node.
#[derive(Debug)]
pub struct StreamRequest<'a> {
    pub node: &'a NodeName,
    pub header: StreamHeader,
    /// Key that counts the stream.
    pub caller_key: &'a CallerKey,
    /// Time to open the stream. The same time bounds the wait for the agent's reply.
    pub limit: Duration,
}

/// A stream to a node.
#[derive(Debug)]
pub struct Opened {
    /// The stream. Dropping it releases its permit.
    pub stream: Stream,
    /// What carries the stream.
    pub via: Via,
    /// Counts a stream that another server forwards. `None` for a session of this server.
    pub forwarded: Option<ForwardedCount>,
}

/// The sessions of all connected agents. The sessions of a node are ordered from newest to oldest.
/// The newest session that accepts streams is the active session. In its first second a session
/// comes after those that were registered before it: an agent that already has a session here
/// learns that from Welcome, and then closes the newcomer.
#[derive(Debug)]
pub struct Registry {
    nodes: Mutex<HashMap<NodeName, NodeSessions>>,
    next_id: AtomicU64,
    changes: watch::Sender<u64>,
    limits: RegistryLimits,
    idle: Arc<IdleStreams>,
    closes: Mutex<Closes>,
    changed_nodes: Arc<ChangedNodes>,
}

/// Limits of streams to agents.
#[derive(Debug, Clone, Copy)]
pub struct RegistryLimits {
    /// Streams that can be open to one agent at once, over all its sessions.
    pub streams_per_agent: usize,
    /// Size of the pool that accounts for stalled readers, in bytes. Used only in messages.
    pub buffer_pool: u64,
}

/// The sessions of one node. Never empty.
#[derive(Debug)]
struct NodeSessions {
    /// Shared, because each stream takes a copy and sessions change rarely.
    sessions: Arc<[Arc<AgentSession>]>,
    /// Shared by all sessions of the agent.
    limiter: Arc<StreamLimiter>,
    /// Time since which the node has sessions without interruption.
    since: Instant,
}

impl NodeSessions {
    /// Returns a session of another agent process than `instance` that has not withdrawn and is not
    /// in `yielded`.
    fn rival(&self, instance: InstanceId, yielded: &[SessionId]) -> Option<&Arc<AgentSession>> {
        self.sessions.iter().find(|other| {
            other.instance != instance && !other.is_withdrawn() && !yielded.contains(&other.id)
        })
    }

    fn active(&self) -> Option<&Arc<AgentSession>> {
        by_preference(&self.sessions).find(|agent| agent.is_routable())
    }

    /// Selects the session that is closed to make room for `newcomer`, if the node is at its limit.
    fn supersede_at_limit(
        &self,
        newcomer: &AgentSession,
    ) -> Result<Option<Arc<AgentSession>>, RegisterError> {
        let open = || self.sessions.iter().filter(|agent| !agent.is_closing());
        if open().count() < SESSIONS_PER_NODE {
            return Ok(None);
        }
        let retiring = |agent: &&Arc<AgentSession>| {
            !agent.is_routable() || agent.instance != newcomer.instance
        };
        // A session without streams is about to end anyway. Streams of other sessions are cut only
        // if there is no such session.
        let oldest = open()
            .filter(retiring)
            .filter(|agent| !agent.has_streams())
            .last()
            .or_else(|| open().filter(retiring).last());
        let oldest = oldest.ok_or(RegisterError::TooManySessions)?;
        oldest.supersede();
        Ok(Some(oldest.clone()))
    }
}

/// Returns sessions in the order in which a new stream tries them: those older than
/// [`TAKEOVER_DELAY`], newest first, then the others, oldest first. A session that had been silent
/// when its agent opened another one comes last, since its Withdraw may be lost.
fn by_preference(sessions: &[Arc<AgentSession>]) -> impl Iterator<Item = &Arc<AgentSession>> {
    let now = Instant::now();
    let is_newcomer = move |agent: &Arc<AgentSession>| agent.age(now) < TAKEOVER_DELAY;
    let has_newcomer = sessions.iter().any(is_newcomer);
    let is_silent = move |agent: &Arc<AgentSession>| {
        has_newcomer && now - agent.session.stats().received_at > SILENCE
    };
    let (older, newcomers) = (sessions.iter(), sessions.iter().rev());
    let older = older.filter(move |agent| !is_newcomer(agent));
    let newcomers = newcomers.filter(move |agent| is_newcomer(agent));
    let responsive = older.clone().filter(move |agent| !is_silent(agent));
    let silent = older.filter(move |agent| is_silent(agent));
    responsive.chain(newcomers).chain(silent)
}

impl Registry {
    pub fn new(limits: RegistryLimits) -> Self {
        Self {
            nodes: Mutex::default(),
            next_id: AtomicU64::new(rand::random_range(1..FIRST_ID_END)),
            changes: watch::Sender::new(0),
            limits,
            idle: Arc::default(),
            closes: Mutex::new(Closes::new(CLOSES_MAX)),
            changed_nodes: Arc::default(),
        }
    }

    pub fn next_id(&self) -> SessionId {
        SessionId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a session as the newest session of its node, unless another agent process has a live
    /// session that is not in `yielded`. If the node is at its limit of sessions, the oldest
    /// session that accepts no new streams is marked as closing. Sessions without streams are
    /// preferred. The caller closes that session, see [`Registration::superseded`].
    ///
    /// # Errors
    /// Returns a [`RegisterError`] if the session was not registered.
    pub fn register(
        self: &Arc<Self>,
        mut session: AgentSession,
        yielded: &[SessionId],
    ) -> Result<Registration, RegisterError> {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(session.node.clone());
        let node = node.or_insert_with(|| NodeSessions {
            sessions: Arc::default(),
            limiter: StreamLimiter::new(self.limits.streams_per_agent),
            since: Instant::now(),
        });
        let is_first = node.sessions.is_empty();
        if let Some(other) = node.rival(session.instance, yielded) {
            return Err(RegisterError::InUse(other.clone()));
        }
        let superseded = node.supersede_at_limit(&session)?;
        for other in node.sessions.iter() {
            if other.instance == session.instance {
                session.continue_from(other);
            }
        }
        session.report_to(&self.changed_nodes);
        let session = Arc::new(session);
        // Runs before a lookup can return both sessions, so that two agent processes never own a
        // name together.
        for other in node.sessions.iter() {
            if other.instance != session.instance {
                other.withdraw();
            }
        }
        let newest = std::iter::once(&session);
        node.sessions = newest.chain(node.sessions.iter()).cloned().collect();
        drop(nodes);
        if is_first {
            self.closes.lock().record_connect(&session.node);
        }
        self.notify(&session.node);
        Ok(Registration {
            registry: self.clone(),
            session,
            superseded,
        })
    }

    /// Returns a session that prevents the registration of a session of `instance`: one of another
    /// agent process that has not withdrawn and is not in `yielded`.
    pub fn rival(
        &self,
        node: &NodeName,
        instance: InstanceId,
        yielded: &[SessionId],
    ) -> Option<Arc<AgentSession>> {
        let nodes = self.nodes.lock();
        nodes.get(node)?.rival(instance, yielded).cloned()
    }

    /// Returns the sessions of a node, newest first.
    pub fn of_node(&self, node: &NodeName) -> Vec<Arc<AgentSession>> {
        let nodes = self.nodes.lock();
        nodes
            .get(node)
            .map_or_else(Vec::new, |node| node.sessions.to_vec())
    }

    /// Returns one session of a node.
    pub fn session(&self, node: &NodeName, id: SessionId) -> Option<Arc<AgentSession>> {
        let nodes = self.nodes.lock();
        let mut sessions = nodes.get(node)?.sessions.iter();
        sessions.find(|agent| agent.id == id).cloned()
    }

    /// Returns the agent process of a node that has not withdrawn, with the admission of its oldest
    /// session. All sessions of a node that have not withdrawn are of one process. A node whose
    /// sessions are suspect is held, too: no other server may dial past an agent that is silent for a
    /// moment.
    pub fn held_node(&self, name: &NodeName) -> Option<HeldNode> {
        let nodes = self.nodes.lock();
        let sessions = &nodes.get(name)?.sessions;
        let instance = sessions
            .iter()
            .find(|agent| !agent.is_withdrawn())?
            .instance;
        let same = sessions.iter().filter(|agent| agent.instance == instance);
        Some(HeldNode {
            node: name.clone(),
            instance,
            since: same.map(|agent| agent.since).min()?,
        })
    }

    /// Returns the nodes for which [`Self::held_node`] may have another result than at the last call;
    /// at the first call those with sessions. For one task.
    pub fn take_changed_nodes(&self) -> Vec<NodeName> {
        match self.changed_nodes.take() {
            Some(names) => names.into_iter().collect(),
            None => self.nodes.lock().keys().cloned().collect(),
        }
    }

    /// Returns the number of nodes that [`Self::take_changed_nodes`] would return.
    #[cfg(test)]
    pub(in crate::routing) fn changed_nodes(&self) -> usize {
        self.changed_nodes.len()
    }

    /// Waits until [`Self::take_changed_nodes`] may have a node. Cancel-safe. For the same task.
    pub async fn nodes_changed(&self) {
        self.changed_nodes.added().await;
    }

    /// Records how a session of a node ended. The registry remembers the last one of each node, for
    /// at most 20,000 nodes.
    pub fn record_close(&self, node: &NodeName, close: LastClose) {
        self.closes.lock().record(node, close);
    }

    /// Records why an agent of a node was not admitted.
    pub fn record_refusal(&self, node: &NodeName, close: LastClose) {
        self.closes.lock().record_refusal(node, close);
    }

    /// Returns the history of a node at this process, up to now.
    pub fn history(&self, node: &NodeName) -> Option<SessionHistory> {
        let since = self.nodes.lock().get(node).map(|node| node.since);
        let mut history = self.closes.lock().history(node).cloned()?;
        history.connected += since.map_or(Duration::ZERO, |since| since.elapsed());
        Some(history)
    }

    /// Returns how the session of a node that closed last has ended, if this process saw it.
    pub fn last_close(&self, node: &NodeName) -> Option<LastClose> {
        self.closes.lock().of_node(node).cloned()
    }

    /// Returns the last sign of life in the session of a node that closed last, as
    /// [`Self::last_close`].
    pub fn last_seen(&self, node: &NodeName) -> Option<SystemTime> {
        let closes = self.closes.lock();
        closes.of_node(node).map(|close| close.last_seen)
    }

    /// Returns the nodes whose last session that this process saw end was from each of these
    /// addresses. The cost is in proportion to the number of ends.
    pub fn closed_from(&self, addresses: &HashSet<IpAddr>) -> HashMap<IpAddr, Vec<NodeName>> {
        self.closes.lock().nodes_at(addresses)
    }

    /// Returns the number of nodes with a session.
    pub fn nodes(&self) -> usize {
        self.nodes.lock().len()
    }

    /// Returns whether a session of a node is connected.
    pub fn has(&self, node: &NodeName) -> bool {
        self.nodes.lock().contains_key(node)
    }

    /// Returns a receiver that is notified whenever a session is added or removed.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the end of the last certificate of an agent process, over all its sessions. A
    /// session that was replaced by another one remains valid until the end of the newer
    /// certificate.
    pub fn valid_until(&self, agent: &AgentSession) -> Instant {
        let of_process = self.of_node(&agent.node).into_iter();
        of_process
            .filter(|other| other.instance == agent.instance)
            .map(|other| other.valid_until())
            .fold(agent.valid_until(), Instant::max)
    }

    pub fn all(&self) -> Vec<Arc<AgentSession>> {
        let nodes = self.nodes.lock();
        let sessions = nodes.values().flat_map(|node| node.sessions.iter());
        sessions.cloned().collect()
    }

    /// Opens a stream over the active session of a node without the sessions in `except`.
    ///
    /// Cancel-safe: if the future is dropped early, the stream is reset.
    ///
    /// # Errors
    /// Returns a [`NotOpened`] with the session that does not open the stream.
    pub(super) async fn open(
        &self,
        request: &StreamRequest<'_>,
        except: &[Via],
    ) -> Result<Opened, NotOpened> {
        let (agent, limiter) = self.choose_session(request.node, except)?;
        let permit = self
            .permit(request.node, request.caller_key, &limiter)
            .await;
        let permit = permit.map_err(OpenError::TooManyStreams)?;
        let via = Via::Local(agent.id);
        let opening = agent.session.open(&request.header, request.limit);
        let error = match tokio::time::timeout(request.limit, opening).await {
            Ok(Ok(mut stream)) => {
                stream.attach((permit, agent.count_stream()));
                return Ok(Opened {
                    stream,
                    via,
                    forwarded: None,
                });
            }
            Ok(Err(SessionError::NotOpening)) => OpenError::Draining,
            Ok(Err(SessionError::NoRoom)) => OpenError::BufferPoolFull(self.limits.buffer_pool),
            Ok(Err(error)) => {
                debug!(node = %agent.node, session = agent.id.0, %error, "session cannot open a stream");
                OpenError::Lost(error)
            }
            Err(_elapsed) => OpenError::Timeout,
        };
        Err(NotOpened {
            via: Some(via),
            error,
        })
    }

    /// Returns what a new stream to a node tries first.
    pub fn active(&self, node: &NodeName) -> Option<Via> {
        let nodes = self.nodes.lock();
        let active = nodes.get(node)?.active();
        active.map(|agent| Via::Local(agent.id))
    }

    /// Returns whether an idle stream of a session can be kept for another request. New streams must
    /// use the same session, and at most a quarter of the streams of the node's agent may be open.
    pub fn can_reuse(&self, node: &NodeName, session: SessionId) -> bool {
        let nodes = self.nodes.lock();
        nodes.get(node).is_some_and(|node| {
            node.limiter.has_spare() && node.active().is_some_and(|agent| agent.id == session)
        })
    }

    /// Adds an idle stream of a caller over `via`, which is evicted when a new stream needs its
    /// permit.
    pub fn keep_idle(&self, node: &NodeName, via: &Via, caller_key: &CallerKey) -> IdleStream {
        self.idle.add(node, via, caller_key)
    }

    /// Evicts the oldest idle stream over `via`. Returns whether there was one.
    pub fn evict_idle(&self, node: &NodeName, via: &Via) -> bool {
        self.idle.evict(node, |other, _| other == via)
    }

    /// Returns whether one more idle stream over another server may stay. Idle streams over any of
    /// `servers` together take at most a quarter of an agent's streams, if there are as many.
    pub fn can_keep_idle(&self, node: &NodeName, via: &Via, servers: usize) -> bool {
        let share = self.limits.streams_per_agent / 4 / servers.max(1);
        self.idle.count(node, via) < share.max(1)
    }

    /// Acquires the permit of a new stream of a caller. Idle streams of callers of this server yield
    /// to the new one.
    async fn permit(
        &self,
        node: &NodeName,
        caller_key: &CallerKey,
        limiter: &Arc<StreamLimiter>,
    ) -> Result<StreamPermit, QuotaExhausted> {
        // Another server may have evicted one of its idle streams for this stream.
        let mut can_wait = caller_key.is_replica();
        let mut deadline = None;
        loop {
            let released = limiter.released();
            let exhausted = match limiter.acquire(caller_key) {
                Ok(permit) => return Ok(permit),
                Err(exhausted) => exhausted,
            };
            // The permit that wakes this loop may be of another share than the evicted one's.
            can_wait |= self.idle.evict(node, |via, other| {
                matches!(via, Via::Local(_)) && exhausted.quota.includes(other, caller_key)
            });
            if !can_wait {
                return Err(exhausted);
            }
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + PERMIT_WAIT);
            if timeout_at(deadline, released).await.is_err() {
                return Err(exhausted);
            }
        }
    }

    /// Returns the session for a new stream, and the limiter of the agent's streams.
    fn choose_session(
        &self,
        node: &NodeName,
        except: &[Via],
    ) -> Result<(Arc<AgentSession>, Arc<StreamLimiter>), OpenError> {
        let (sessions, limiter) = match self.nodes.lock().get(node) {
            Some(node) => (node.sessions.clone(), node.limiter.clone()),
            None => return Err(OpenError::NoAgent),
        };
        let mut untried = by_preference(&sessions)
            .filter(|agent| !agent.is_withdrawn() && !except.contains(&Via::Local(agent.id)));
        let mut suspect_reason = None;
        let is_live = |agent: &&Arc<AgentSession>| {
            let reason = agent.suspect_reason();
            suspect_reason = suspect_reason.or(reason);
            reason.is_none()
        };
        let Some(agent) = untried.find(is_live) else {
            return Err(suspect_reason.map_or(OpenError::Draining, OpenError::Suspect));
        };
        // Trying another session would not help: the buffer pool is global, and the quota is per
        // agent. A session that takes no streams is not asked, since none waits for it.
        let mut taking = sessions.iter().filter(|agent| !agent.is_withdrawn());
        if !taking.all(|agent| agent.session.has_room()) {
            return Err(OpenError::BufferPoolFull(self.limits.buffer_pool));
        }
        Ok((agent.clone(), limiter))
    }

    fn remove(&self, node: &NodeName, id: SessionId) {
        let mut connected = None;
        let mut nodes = self.nodes.lock();
        if let Some(of_node) = nodes.get_mut(node) {
            let others = of_node.sessions.iter().filter(|session| session.id != id);
            of_node.sessions = others.cloned().collect();
            if of_node.sessions.is_empty() {
                connected = Some(of_node.since.elapsed());
                nodes.remove(node);
            }
        }
        drop(nodes);
        if let Some(connected) = connected {
            self.closes.lock().record_connected(node, connected);
        }
        self.notify(node);
    }

    fn notify(&self, node: &NodeName) {
        self.changed_nodes.add(node);
        self.changes.send_modify(|count| *count += 1);
    }
}

/// Keeps a session registered. Dropping the value removes exactly that session.
#[derive(Debug)]
pub struct Registration {
    registry: Arc<Registry>,
    session: Arc<AgentSession>,
    superseded: Option<Arc<AgentSession>>,
}

impl Registration {
    /// Takes the older session that the caller must close to make room for this one, if the node
    /// was at its limit.
    pub fn superseded(&mut self) -> Option<Arc<AgentSession>> {
        self.superseded.take()
    }

    pub fn session(&self) -> &Arc<AgentSession> {
        &self.session
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.remove(&self.session.node, self.session.id);
    }
}

#[cfg(test)]
mod tests;
