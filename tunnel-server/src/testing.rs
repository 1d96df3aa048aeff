//! Test support: the state of a server, and agents that the test plays over in-memory sessions.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::calibration::scaled;
use tunnel_proto::session::control::{self, ControlReader, ControlWriter};
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{BufferPool, Session, Stream};
use tunnel_proto::wire::control::{CAPABILITY_DIAG, CAPABILITY_RENEW_SOON, ControlMessage, Hello};
use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::{InstanceId, NodeName, Port};
use tunnel_proto::wire::peer::{HeldNode, Holds};

use crate::admin::status::{NodeSources, SessionSources};
use crate::config::{Limits, SharedLimits};
use crate::metrics::Metrics;
use crate::routing::peers::{PeerAddress, PeerLimits, PeerMetrics, Peers};
use crate::routing::registry::{CallerKey, OpenError, Registry, RegistryLimits, StreamRequest};
use crate::routing::routes::{RouteNode, RouteSource, Routes};
use crate::routing::{OpenStream, Routing};
use crate::session::{Sessions, admission_rate};
use tunnel_ca::revocation::Revocations;
use tunnel_store::known_nodes::{KnownNodes, NodeMap};
use tunnel_store::testing::Scratch;
pub(crate) use tunnel_store::testing::{assert_contains, node};

/// A timeout beyond every limit of the code under test.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(600);
/// Number of streams that an agent of a [`Bench`] may have.
pub(crate) const STREAMS: usize = 8;
/// Address of the server of a [`Bench`] for agents.
pub(crate) const ADVERTISED: &str = "192.0.2.1:10262";
/// Size of the buffer pool.
pub(crate) const POOL: u64 = 64 << 20;
const REGISTRY_LIMITS: RegistryLimits = RegistryLimits {
    streams_per_agent: STREAMS,
    buffer_pool: POOL,
};
/// Permits for sessions.
const SESSIONS: usize = 64;

pub(crate) fn header() -> StreamHeader {
    StreamHeader::new(StreamKind::Target(Target::Node(Port::new(9100).unwrap())))
}

/// Opens a stream at a server without others.
pub(crate) async fn open(
    registry: &Arc<Registry>,
    node: &NodeName,
    caller_key: &CallerKey,
) -> Result<OpenStream, OpenError> {
    let peers = Peers::alone("server-1".parse().unwrap(), Vec::new());
    let request = StreamRequest {
        node,
        header: header(),
        caller_key,
        limit: WAIT_TIMEOUT,
    };
    Routing::new(registry.clone(), peers).open(&request).await
}

/// Waits until `holds` returns `true`.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let patience = scaled(Duration::from_secs(10));
    if timeout(patience, waiting).await.is_err() {
        panic!("not seen: {what}");
    }
}

/// Returns the other servers of `server-1`: `server-2`, which holds these nodes.
pub(crate) fn peers_holding(held: &[NodeName]) -> Arc<Peers> {
    let limits = PeerLimits {
        streams: 1,
        directory_nodes: 1000,
        buffer_pool: 1,
    };
    let peers = Peers::new("server-1".parse().unwrap(), limits, PeerMetrics::default());
    let other = PeerAddress {
        id: "server-2".parse().unwrap(),
        address: "192.0.2.2:10269".into(),
        zone: None,
    };
    peers.expect(&other);
    let added = held.iter().map(|node| HeldNode {
        node: node.clone(),
        instance: InstanceId::new([1; 16]),
        since: SystemTime::UNIX_EPOCH,
    });
    let holds = Holds {
        is_full: true,
        added: added.collect(),
        ..Holds::default()
    };
    peers.apply(&other.id, holds);
    peers
}

/// Returns the sources of nodes that are known, of the cluster, and held by `server-2`.
pub(crate) fn node_sources(
    known: &[&str],
    of_cluster: &[&str],
    held: &[&str],
) -> (NodeSources, Scratch) {
    let scratch = Scratch::new();
    let names = |names: &[&str]| -> Vec<NodeName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    };
    let nodes = KnownNodes::open(&scratch.0).unwrap();
    for node in names(known) {
        nodes.record(&node, &[]);
    }
    let sources = NodeSources::of_files(nodes, Revocations::open(&scratch.0, true).unwrap());
    let of_cluster = names(of_cluster).into_iter();
    let of_cluster = of_cluster.map(|name| RouteNode::edge(name, Vec::new()));
    sources
        .routes
        .set(RouteSource::Cluster, of_cluster.collect());
    let sources = NodeSources {
        sessions: Some(SessionSources {
            registry: Arc::new(Registry::new(REGISTRY_LIMITS)),
            peers: peers_holding(&names(held)),
            failures: Arc::default(),
        }),
        ..sources
    };
    (sources, scratch)
}

/// The server state that sessions need.
pub(crate) struct Bench {
    pub(crate) sessions: Sessions,
    counters: MetricsRegistry,
    _scratch: Scratch,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::new();
        let mut counters = MetricsRegistry::default();
        let sessions = Sessions {
            registry: Arc::new(Registry::new(REGISTRY_LIMITS)),
            peers: Peers::alone("server-1".parse().unwrap(), vec![ADVERTISED.into()]),
            nodes: Arc::new(KnownNodes::open(&scratch.0).unwrap()),
            metrics: Metrics::new(&mut counters, BufferPool::new(POOL)),
            shutdown: Shutdown::new(),
            limits: SharedLimits::from(Limits {
                streams_per_agent: 4,
                ..Limits::default()
            }),
            drain: Duration::from_secs(30),
            move_within: Duration::from_secs(10),
            failures: Arc::default(),
            saved_connections: None,
            admission_rate: Arc::new(admission_rate(1000)),
            permits: Arc::new(Semaphore::new(SESSIONS)),
            revocations: Arc::new(Revocations::open(&scratch.0, true).unwrap()),
            trust: None,
            cloud: None,
            renewals: None,
        };
        Self {
            sessions,
            counters,
            _scratch: scratch,
        }
    }

    /// Returns what lists of nodes are made from.
    pub(crate) fn node_sources(&self) -> NodeSources {
        let sessions = &self.sessions;
        let routes = Routes::default();
        routes.follow_known(sessions.nodes.snapshot(), &mut NodeMap::default());
        NodeSources {
            nodes: sessions.nodes.clone(),
            routes,
            revocations: sessions.revocations.clone(),
            sessions: Some(SessionSources {
                registry: sessions.registry.clone(),
                peers: sessions.peers.clone(),
                failures: sessions.failures.clone(),
            }),
        }
    }

    /// Creates a server with one agent that is admitted.
    pub(crate) async fn with_agent() -> (Self, Agent) {
        let bench = Self::new();
        let agent = bench.agent(1).await;
        (bench, agent)
    }

    /// Returns the value of a metric. `name` contains the labels as exposed.
    pub(crate) fn metric(&self, name: &str) -> Option<u64> {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.counters).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().parse().unwrap())
    }

    pub(crate) async fn open(&self) -> Result<OpenStream, OpenError> {
        open(&self.sessions.registry, &node(), &CallerKey::Local(None)).await
    }

    /// Connects an agent that is admitted.
    pub(crate) async fn agent(&self, instance: u8) -> Agent {
        let (agent, answer) = self.connect_agent(instance, 4096).await;
        assert!(matches!(answer, ControlMessage::Welcome(_)), "{answer:?}");
        agent
    }

    /// Connects an agent that sends Hello, and returns the server's answer.
    pub(crate) async fn connect_agent(
        &self,
        instance: u8,
        control_bytes: usize,
    ) -> (Agent, ControlMessage) {
        let mut agent = self.hello(instance, control_bytes).await;
        let answer = agent.recv().await;
        (agent, answer)
    }

    /// Connects an agent that sends Hello. The control stream buffers `control_bytes` in each
    /// direction.
    pub(crate) async fn hello(&self, instance: u8, control_bytes: usize) -> Agent {
        let (near, far) = memory::pair();
        near.script().next_window = Some(control_bytes);
        let (sessions, serving) = (self.sessions.clone(), near.clone());
        let serve = async move { sessions.serve(serving).await };
        self.sessions.shutdown.spawn_service(serve);
        let (reader, writer) = say_hello(&*far, instance).await;
        Agent {
            near,
            far,
            reader,
            writer,
        }
    }
}

/// Accepts the control stream of a session and sends Hello as an agent.
pub(crate) async fn say_hello(
    session: &dyn Session,
    instance: u8,
) -> (ControlReader, ControlWriter) {
    let mut stream = accept(session).await;
    stream.accept("").await.unwrap();
    let (reader, mut writer) = control::split(stream);
    let hello = Hello {
        versions: (1, 1),
        capabilities: [CAPABILITY_DIAG, CAPABILITY_RENEW_SOON]
            .map(str::to_owned)
            .to_vec(),
        node_name: node(),
        instance: InstanceId::new([instance; 16]),
        software: "played".into(),
        node_ip: String::new(),
        labels: std::collections::BTreeMap::new(),
    };
    writer
        .send(&ControlMessage::Hello(Box::new(hello)))
        .await
        .unwrap();
    (reader, writer)
}

/// Accepts the next stream of a session and reads its header.
async fn accept(session: &dyn Session) -> Stream {
    let incoming = within(session.accept()).await.unwrap();
    let header = incoming.header(Instant::now() + WAIT_TIMEOUT);
    header.await.unwrap().1
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.sessions.shutdown.stop().cancel();
    }
}

/// An agent played by the test.
pub(crate) struct Agent {
    /// Server's end of the session.
    pub(crate) near: Arc<MemorySession>,
    /// Agent's end of the session.
    pub(crate) far: Arc<dyn Session>,
    pub(crate) reader: ControlReader,
    pub(crate) writer: ControlWriter,
}

impl Agent {
    /// Accepts the next stream of the server and reads its header.
    pub(crate) async fn stream(&self) -> Stream {
        accept(&*self.far).await
    }

    /// Receives the next control message of the server.
    pub(crate) async fn recv(&mut self) -> ControlMessage {
        within(self.reader.receive()).await.unwrap().unwrap()
    }

    pub(crate) async fn send(&mut self, message: ControlMessage) {
        self.writer.send(&message).await.unwrap();
    }
}

pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(WAIT_TIMEOUT, future).await.expect("timed out")
}
