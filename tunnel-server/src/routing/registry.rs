//! Observed state: which sessions are connected for which node, and opening streams over them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::debug;
use tunnel_proto::process::settings::format_size;
use tunnel_proto::transport::{SessionError, Stream};
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::{NodeName, SessionId};

mod agent_session;
mod limiter;

pub use crate::routing::registry::agent_session::{AgentSession, SuspectReason};
pub use limiter::{CallerKey, QuotaExhausted, StreamQuota};
use limiter::{StreamLimiter, StreamPermit};

/// Sessions of a node that are tried for one stream: the active one and one spare.
const OPEN_ATTEMPTS_MAX: usize = 2;

/// How often the sessions of a node are looked up for one stream.
const LOOKUP_ROUNDS_MAX: usize = 3;

/// Sessions of one node at once. An agent holds two while it replaces one, and one more for each that a partition left behind.
const SESSIONS_PER_NODE: usize = 4;

/// Why a session was not registered.
#[derive(Debug)]
pub enum RegisterError {
    /// This live session of another instance serves the node.
    InUse(Arc<AgentSession>),
    /// The node has as many sessions as it may have, all in use.
    TooManySessions,
}

/// Why no stream to a node could be opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpenError {
    /// No session.
    #[error(
        "no agent is connected for this node; check that tunnel-agent runs there ('tunnel-server nodes' lists connected nodes)"
    )]
    NoAgent,
    /// Only sessions whose agent may be gone.
    #[error("the agent is suspect: {0}; requests are accepted again when it answers")]
    Suspect(SuspectReason),
    /// The agent, or the caller at this agent, has as many streams as it may have.
    #[error("{0}")]
    TooManyStreams(QuotaExhausted),
    /// Stalled readers hold as much memory as they may, in bytes of the whole pool.
    #[error(
        "stalled readers use too much of limits.bufferPool, {}; try again later",
        format_size(*.0)
    )]
    BufferPoolFull(u64),
    /// The agent is stopping and no other session is there.
    #[error("the agent is stopping")]
    Draining,
    /// The session was lost before anything was sent.
    #[error("the session with the agent was lost")]
    Lost(#[source] SessionError),
    /// The agent takes no stream in time.
    #[error("the agent did not accept the stream in time (limits.openTimeout)")]
    Timeout,
}

/// A stream with the session that carries it.
#[derive(Debug)]
pub struct OpenedStream {
    /// The stream; it gives its place back when dropped.
    pub stream: Stream,
    /// For logs.
    pub session: SessionId,
}

/// All connected agents. Sessions of one node are kept newest first; the newest that takes streams is the active one.
#[derive(Debug)]
pub struct Registry {
    nodes: Mutex<HashMap<NodeName, NodeSessions>>,
    next_id: AtomicU64,
    changes: watch::Sender<u64>,
    limits: RegistryLimits,
}

/// Limits of what goes to agents.
#[derive(Debug, Clone, Copy)]
pub struct RegistryLimits {
    /// Streams open to one agent at once, over all its sessions.
    pub streams_per_agent: usize,
    /// Size of the pool that stalled readers are charged to, bytes; for texts.
    pub buffer_pool: u64,
}

/// Never empty.
#[derive(Debug)]
struct NodeSessions {
    sessions: Vec<Arc<AgentSession>>,
    /// One for all sessions of the agent.
    limiter: Arc<StreamLimiter>,
}

impl NodeSessions {
    fn active(&self) -> Option<&Arc<AgentSession>> {
        self.sessions.iter().find(|agent| agent.is_routable())
    }

    /// Picks the session that makes room for `newcomer`, if one is needed.
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
        // One without streams is about to end anyway; streams of the others are cut only where there is none.
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

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new(limits: RegistryLimits) -> Self {
        Self {
            nodes: Mutex::default(),
            next_id: AtomicU64::new(1),
            changes: watch::Sender::new(0),
            limits,
        }
    }

    /// A fresh session id.
    pub fn next_id(&self) -> SessionId {
        SessionId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a session in front of the node's others, unless another instance that is not in `yielded` is live. Where the
    /// node has as many sessions as it may have, the oldest that takes no new streams, first of those without any, is marked as
    /// closing; the caller closes it, see [`Registration::superseded`].
    ///
    /// # Errors
    /// [`RegisterError`].
    pub fn register(
        self: &Arc<Self>,
        session: AgentSession,
        yielded: &[SessionId],
    ) -> Result<Registration, RegisterError> {
        let session = Arc::new(session);
        let mut nodes = self.lock();
        let node = nodes.entry(session.node.clone());
        let node = node.or_insert_with(|| NodeSessions {
            sessions: Vec::new(),
            limiter: StreamLimiter::new(self.limits.streams_per_agent),
        });
        let live = |other: &&Arc<AgentSession>| {
            other.instance != session.instance
                && !other.is_withdrawn()
                && !yielded.contains(&other.id)
        };
        if let Some(other) = node.sessions.iter().find(live) {
            return Err(RegisterError::InUse(other.clone()));
        }
        let superseded = node.supersede_at_limit(&session)?;
        // Before anyone can find both: two processes never own a name together.
        for other in &node.sessions {
            if other.instance != session.instance {
                other.withdraw();
            }
        }
        node.sessions.insert(0, session.clone());
        drop(nodes);
        self.changes.send_modify(|count| *count += 1);
        Ok(Registration {
            registry: self.clone(),
            session,
            superseded,
        })
    }

    /// Sessions of a node, newest first.
    #[must_use]
    pub fn of_node(&self, node: &NodeName) -> Vec<Arc<AgentSession>> {
        let nodes = self.lock();
        nodes
            .get(node)
            .map_or_else(Vec::new, |node| node.sessions.clone())
    }

    /// Whether a session of a node is connected.
    #[must_use]
    pub fn has(&self, node: &NodeName) -> bool {
        self.lock().contains_key(node)
    }

    /// Changes whenever a session comes or goes.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// When the last certificate of an agent process ends, over all its sessions; a session that another one has
    /// replaced lives on with the newer certificate.
    #[must_use]
    pub fn valid_until(&self, agent: &AgentSession) -> Instant {
        let of_process = self.of_node(&agent.node).into_iter();
        of_process
            .filter(|other| other.instance == agent.instance)
            .map(|other| other.valid_until())
            .fold(agent.valid_until(), Instant::max)
    }

    /// Every session.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<AgentSession>> {
        let nodes = self.lock();
        let sessions = nodes.values().flat_map(|node| &node.sessions);
        sessions.cloned().collect()
    }

    /// Opens a stream of `caller` to a node's agent within `limit`, which also bounds the wait for the agent's reply. When the
    /// active session turns out to be gone, one spare is tried: nothing of the caller's was sent yet. The session
    /// `except`, which refused the stream already, is left out.
    ///
    /// Cancel-safe: dropped early, the stream is reset.
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn open(
        &self,
        node: &NodeName,
        header: &StreamHeader,
        caller: &CallerKey,
        limit: Duration,
        except: Option<SessionId>,
    ) -> Result<OpenedStream, OpenError> {
        let mut failure = OpenError::NoAgent;
        // A session that is replaced while it is asked has its successor beside it by then.
        for _ in 0..LOOKUP_ROUNDS_MAX {
            failure = match self.try_open(node, header, caller, limit, except).await {
                Err(OpenError::Draining) => OpenError::Draining,
                outcome => return outcome,
            };
        }
        Err(failure)
    }

    async fn try_open(
        &self,
        node: &NodeName,
        header: &StreamHeader,
        caller: &CallerKey,
        limit: Duration,
        except: Option<SessionId>,
    ) -> Result<OpenedStream, OpenError> {
        let (routable, permit) = self.admit(node, caller, except)?;
        let mut failure = OpenError::NoAgent;
        for agent in routable {
            match tokio::time::timeout(limit, agent.session.open(header, limit)).await {
                Ok(Ok(mut stream)) => {
                    stream.attach((permit, agent.count_stream()));
                    return Ok(OpenedStream {
                        stream,
                        session: agent.id,
                    });
                }
                Ok(Err(SessionError::NotOpening)) => failure = OpenError::Draining,
                Ok(Err(error)) => {
                    debug!(agent = %node, session = %agent.id, %error, "session cannot open a stream");
                    failure = OpenError::Lost(error);
                }
                Err(_elapsed) => return Err(OpenError::Timeout),
            }
        }
        Err(failure)
    }

    /// The session that a new stream to a node goes to first.
    #[must_use]
    pub fn active(&self, node: &NodeName) -> Option<SessionId> {
        let nodes = self.lock();
        let active = nodes.get(node)?.active();
        active.map(|agent| agent.id)
    }

    /// Whether an idle stream over `session` may be kept for a further request: new streams would take the same way, and
    /// the node's agent has at most a quarter of its streams open.
    #[must_use]
    pub fn can_reuse(&self, node: &NodeName, session: SessionId) -> bool {
        let nodes = self.lock();
        nodes.get(node).is_some_and(|node| {
            node.limiter.has_spare() && node.active().is_some_and(|agent| agent.id == session)
        })
    }

    /// The sessions to try for a new stream of `caller`, at least one, and the stream's permit.
    fn admit(
        &self,
        node: &NodeName,
        caller: &CallerKey,
        except: Option<SessionId>,
    ) -> Result<(Vec<Arc<AgentSession>>, StreamPermit), OpenError> {
        let (sessions, limiter) = match self.lock().get(node) {
            Some(node) => (node.sessions.clone(), node.limiter.clone()),
            None => return Err(OpenError::NoAgent),
        };
        let mut suspect_reason = None;
        let mut routable = Vec::new();
        for agent in &sessions {
            if agent.is_withdrawn() || except == Some(agent.id) {
                continue;
            }
            match agent.suspect_reason() {
                Some(reason) => suspect_reason = suspect_reason.or(Some(reason)),
                None if routable.len() < OPEN_ATTEMPTS_MAX => routable.push(agent.clone()),
                None => {}
            }
        }
        if routable.is_empty() {
            return Err(suspect_reason.map_or(OpenError::Draining, OpenError::Suspect));
        }
        // Another session is no way out: the pool is everyone's, and its share is the agent's.
        if !sessions.iter().all(|agent| agent.session.has_room()) {
            return Err(OpenError::BufferPoolFull(self.limits.buffer_pool));
        }
        let permit = limiter.acquire(caller).map_err(OpenError::TooManyStreams)?;
        Ok((routable, permit))
    }

    fn remove(&self, node: &NodeName, id: SessionId) {
        let mut nodes = self.lock();
        if let Some(of_node) = nodes.get_mut(node) {
            of_node.sessions.retain(|session| session.id != id);
            if of_node.sessions.is_empty() {
                nodes.remove(node);
            }
        }
        drop(nodes);
        self.changes.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, NodeSessions>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a session registered; dropping it removes exactly that session.
#[derive(Debug)]
pub struct Registration {
    registry: Arc<Registry>,
    session: Arc<AgentSession>,
    superseded: Option<Arc<AgentSession>>,
}

impl Registration {
    /// Takes the older session that has to be closed for this one, where the node was at its limit.
    #[must_use]
    pub fn superseded(&mut self) -> Option<Arc<AgentSession>> {
        self.superseded.take()
    }

    /// The registered session.
    #[must_use]
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
