//! Observed state: which sessions are connected for which node, and opening streams over them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::Semaphore;
use tracing::debug;
use tunnel_proto::transport::{Session, SessionError, Stream};
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::{InstanceId, NodeName, SessionId};

/// Sessions of a node that are tried for one stream: the active one and one spare.
const ATTEMPTS: usize = 2;

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
    streams: Arc<Semaphore>,
    withdrawn: AtomicBool,
}

impl AgentSession {
    /// A session that is about to be registered; at most `streams` streams may be open on it at once.
    #[must_use]
    pub fn new(
        id: SessionId,
        node: NodeName,
        instance: InstanceId,
        session: Arc<dyn Session>,
        streams: usize,
    ) -> Self {
        Self {
            id,
            node,
            instance,
            software: String::new(),
            claimed_address: String::new(),
            since: SystemTime::now(),
            session,
            streams: Arc::new(Semaphore::new(streams)),
            withdrawn: AtomicBool::new(false),
        }
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
}

/// Why no stream to a node could be opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpenError {
    /// No session.
    #[error(
        "no agent is connected for this node; is tunnel-agent running there? 'tunnel-server nodes' lists who is"
    )]
    NoAgent,
    /// The agent has as many streams as it may have.
    #[error("the agent has {0} streams open, the most it may have; try again later")]
    TooManyStreams(usize),
    /// The agent is stopping and no other session is there.
    #[error("the agent is stopping")]
    Draining,
    /// The session was lost before anything was sent.
    #[error("the session with the agent was lost")]
    Lost(#[source] SessionError),
    /// The agent takes no stream in time.
    #[error("the agent did not take the stream in time")]
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

/// All connected agents. Sessions of one node are kept newest first; the newest that opens streams is the active one.
#[derive(Debug)]
pub struct Registry {
    sessions: Mutex<HashMap<NodeName, Vec<Arc<AgentSession>>>>,
    next_id: AtomicU64,
    streams_per_agent: usize,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new(streams_per_agent: usize) -> Self {
        Self {
            sessions: Mutex::default(),
            next_id: AtomicU64::new(1),
            streams_per_agent,
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
        let mut sessions = self.lock();
        let of_node = sessions.entry(session.node.clone()).or_default();
        let live = |other: &&Arc<AgentSession>| {
            other.instance != session.instance
                && !other.is_withdrawn()
                && !yielded.contains(&other.id)
        };
        if let Some(other) = of_node.iter().find(live) {
            return Err(other.clone());
        }
        of_node.insert(0, session.clone());
        drop(sessions);
        Ok(Registration {
            registry: self.clone(),
            session,
        })
    }

    /// Sessions of a node, newest first.
    #[must_use]
    pub fn of_node(&self, node: &NodeName) -> Vec<Arc<AgentSession>> {
        self.lock().get(node).cloned().unwrap_or_default()
    }

    /// Every session.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<AgentSession>> {
        self.lock().values().flatten().cloned().collect()
    }

    /// Opens a stream to a node's agent within `limit`, which also bounds the wait for the agent's reply. When the
    /// active session turns out to be gone, one spare is tried: nothing of the caller's was sent yet.
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
    ) -> Result<Opened, OpenError> {
        let sessions = self.of_node(node);
        let mut failure = if sessions.is_empty() {
            OpenError::NoAgent
        } else {
            OpenError::Draining
        };
        for agent in sessions
            .iter()
            .filter(|agent| !agent.is_withdrawn())
            .take(ATTEMPTS)
        {
            let Ok(permit) = agent.streams.clone().try_acquire_owned() else {
                return Err(OpenError::TooManyStreams(self.streams_per_agent));
            };
            match tokio::time::timeout(limit, agent.session.open(header, limit)).await {
                Ok(Ok(mut stream)) => {
                    stream.attach(permit);
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

    fn remove(&self, node: &NodeName, id: SessionId) {
        let mut sessions = self.lock();
        if let Some(of_node) = sessions.get_mut(node) {
            of_node.retain(|session| session.id != id);
            if of_node.is_empty() {
                sessions.remove(node);
            }
        }
        drop(sessions);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<NodeName, Vec<Arc<AgentSession>>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
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
mod tests {
    use tunnel_proto::identity::{PeerIdentity, Role};
    use tunnel_proto::transport::memory;
    use tunnel_proto::wire::code::CloseCode;
    use tunnel_proto::wire::header::{StreamKind, Target};
    use tunnel_proto::wire::name::Port;

    use super::*;

    fn node() -> NodeName {
        "worker-1".parse().unwrap()
    }

    fn connect(registry: &Arc<Registry>, instance: u8) -> (AgentSession, Arc<dyn Session>) {
        let identity = |role| PeerIdentity {
            role,
            not_after: SystemTime::UNIX_EPOCH,
        };
        let (server, agent) = memory::pair(identity(Role::Server), identity(Role::Agent(node())));
        let instance = InstanceId::new([instance; 16]);
        (
            AgentSession::new(registry.next_id(), node(), instance, server, 2),
            agent,
        )
    }

    fn header() -> StreamHeader {
        StreamHeader::new(StreamKind::Target(Target::Node(Port::new(9100).unwrap())))
    }

    const LIMIT: Duration = Duration::from_secs(5);

    #[tokio::test]
    async fn late_goodbye_of_old_session_keeps_new_one() {
        let registry = Arc::new(Registry::new(2));
        let (old, _old_agent) = connect(&registry, 1);
        let (new, _new_agent) = connect(&registry, 1);
        let new_id = new.id;
        let old = registry.register(old, &[]).unwrap();
        let _new = registry.register(new, &[]).unwrap();
        drop(old);
        assert_eq!(
            registry
                .of_node(&node())
                .iter()
                .map(|session| session.id)
                .collect::<Vec<_>>(),
            [new_id]
        );
    }

    #[tokio::test]
    async fn other_instance_is_let_in_only_after_the_live_one_yielded() {
        let registry = Arc::new(Registry::new(2));
        let (first, _first_agent) = connect(&registry, 1);
        let first = registry.register(first, &[]).unwrap();
        let (second, _second_agent) = connect(&registry, 2);
        let in_the_way = registry.register(second, &[]).unwrap_err();
        assert_eq!(in_the_way.id, first.session().id);
        let (third, _third_agent) = connect(&registry, 3);
        assert!(registry.register(third, &[in_the_way.id]).is_ok());
        let (fourth, _fourth_agent) = connect(&registry, 4);
        first.session().withdraw();
        assert!(
            registry.register(fourth, &[]).is_ok(),
            "a session that withdrew yields at once"
        );
    }

    #[tokio::test]
    async fn lost_session_gives_way_to_the_spare() {
        let registry = Arc::new(Registry::new(2));
        assert!(matches!(
            registry.open(&node(), &header(), LIMIT).await,
            Err(OpenError::NoAgent)
        ));
        let (spare, _spare_agent) = connect(&registry, 1);
        let spare = registry.register(spare, &[]).unwrap();
        let (active, active_agent) = connect(&registry, 1);
        let active = registry.register(active, &[]).unwrap();
        active_agent.close(CloseCode::Normal, "gone").await;
        let opened = registry.open(&node(), &header(), LIMIT).await.unwrap();
        assert_eq!(opened.session, spare.session().id);
        drop(active);
    }

    #[tokio::test]
    async fn streams_of_an_agent_are_bounded_and_come_back() {
        let registry = Arc::new(Registry::new(2));
        let (session, _agent) = connect(&registry, 1);
        let registered = registry.register(session, &[]).unwrap();
        let first = registry.open(&node(), &header(), LIMIT).await.unwrap();
        let _second = registry.open(&node(), &header(), LIMIT).await.unwrap();
        assert!(matches!(
            registry.open(&node(), &header(), LIMIT).await,
            Err(OpenError::TooManyStreams(2))
        ));
        drop(first);
        assert!(registry.open(&node(), &header(), LIMIT).await.is_ok());
        registered.session().withdraw();
        assert!(matches!(
            registry.open(&node(), &header(), LIMIT).await,
            Err(OpenError::Draining)
        ));
    }
}
