//! Observed state: which sessions are connected for which node, and opening streams over them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::Instant;
use tracing::debug;
use tunnel_proto::process::settings::format_size;
use tunnel_proto::transport::{SessionError, Stream};
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::{NodeName, SessionId};

mod agent;

pub use agent::{AgentSession, Suspicion};

/// Sessions of a node that are tried for one stream: the active one and one spare.
const ATTEMPTS: usize = 2;

/// How often the sessions of a node are looked up for one stream.
const ROUNDS: usize = 3;

/// Why no stream to a node could be opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpenError {
    /// No session.
    #[error(
        "no agent is connected for this node; is tunnel-agent running there? 'tunnel-server nodes' lists who is"
    )]
    NoAgent,
    /// Only sessions whose agent may be gone.
    #[error("the agent may be gone: {0}; requests are taken again when it answers")]
    Suspect(Suspicion),
    /// The agent has as many streams as it may have.
    #[error(
        "the agent has {0} streams open, the most it may have (limits.streamsPerAgent); try again later"
    )]
    TooManyStreams(usize),
    /// Stalled readers hold as much memory as they may, in bytes of the whole pool.
    #[error(
        "callers that do not read hold too much of limits.bufferPool, {}; try again later",
        format_size(*.0)
    )]
    NoRoom(u64),
    /// The agent is stopping and no other session is there.
    #[error("the agent is stopping")]
    Draining,
    /// The session was lost before anything was sent.
    #[error("the session with the agent was lost")]
    Lost(#[source] SessionError),
    /// The agent takes no stream in time.
    #[error("the agent did not take the stream in time (limits.openTimeout)")]
    Timeout,
}

/// A stream with the session that carries it.
#[derive(Debug)]
pub struct Opened {
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
    /// Places for streams: one set for all sessions of the agent.
    places: Arc<Semaphore>,
}

impl NodeSessions {
    fn active(&self) -> Option<&Arc<AgentSession>> {
        self.sessions.iter().find(|agent| agent.is_routable())
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

    /// Adds a session in front of the node's others, unless another instance that is not in `yielded` is live.
    ///
    /// # Errors
    /// The live session that stands in the way.
    pub fn register(
        self: &Arc<Self>,
        session: AgentSession,
        yielded: &[SessionId],
    ) -> Result<Registration, Arc<AgentSession>> {
        let session = Arc::new(session);
        let mut nodes = self.lock();
        let node = nodes.entry(session.node.clone());
        let node = node.or_insert_with(|| NodeSessions {
            sessions: Vec::new(),
            places: Arc::new(Semaphore::new(self.limits.streams_per_agent)),
        });
        let live = |other: &&Arc<AgentSession>| {
            other.instance != session.instance
                && !other.is_withdrawn()
                && !yielded.contains(&other.id)
        };
        if let Some(other) = node.sessions.iter().find(live) {
            return Err(other.clone());
        }
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

    /// Opens a stream to a node's agent within `limit`, which also bounds the wait for the agent's reply. When the
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
        limit: Duration,
        except: Option<SessionId>,
    ) -> Result<Opened, OpenError> {
        let mut failure = OpenError::NoAgent;
        // A session that is replaced while it is asked has its successor beside it by then.
        for _ in 0..ROUNDS {
            failure = match self.try_open(node, header, limit, except).await {
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
        limit: Duration,
        except: Option<SessionId>,
    ) -> Result<Opened, OpenError> {
        let (routable, place) = self.admit(node, except)?;
        let mut failure = OpenError::NoAgent;
        for agent in routable {
            match tokio::time::timeout(limit, agent.session.open(header, limit)).await {
                Ok(Ok(mut stream)) => {
                    stream.attach((place, agent.count_stream()));
                    return Ok(Opened {
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
    /// the node's agent has at least half of its places free.
    #[must_use]
    pub fn may_keep(&self, node: &NodeName, session: SessionId) -> bool {
        let nodes = self.lock();
        nodes.get(node).is_some_and(|node| {
            let free = node.places.available_permits();
            free * 2 >= self.limits.streams_per_agent
                && node.active().is_some_and(|agent| agent.id == session)
        })
    }

    /// The sessions to try for a new stream, at least one, and the stream's place.
    fn admit(
        &self,
        node: &NodeName,
        except: Option<SessionId>,
    ) -> Result<(Vec<Arc<AgentSession>>, OwnedSemaphorePermit), OpenError> {
        let (sessions, places) = match self.lock().get(node) {
            Some(node) => (node.sessions.clone(), node.places.clone()),
            None => return Err(OpenError::NoAgent),
        };
        let mut suspicion = None;
        let mut routable = Vec::new();
        for agent in &sessions {
            if agent.is_withdrawn() || except == Some(agent.id) {
                continue;
            }
            match agent.suspicion() {
                Some(doubt) => suspicion = suspicion.or(Some(doubt)),
                None if routable.len() < ATTEMPTS => routable.push(agent.clone()),
                None => {}
            }
        }
        if routable.is_empty() {
            return Err(suspicion.map_or(OpenError::Draining, OpenError::Suspect));
        }
        // Another session is no way out: the pool is everyone's, and its share is the agent's.
        if !sessions.iter().all(|agent| agent.session.has_room()) {
            return Err(OpenError::NoRoom(self.limits.buffer_pool));
        }
        let place = places
            .try_acquire_owned()
            .map_err(|_none_left| OpenError::TooManyStreams(self.limits.streams_per_agent))?;
        Ok((routable, place))
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
}

impl Registration {
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
