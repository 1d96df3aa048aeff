//! Servers of one installation, connected with TLS over loopback, and agents that the test plays
//! over in-memory sessions.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustls_pki_types::ServerName;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::calibration::scaled;
use tunnel_proto::session::control::{self, PeerReader, PeerWriter};
use tunnel_proto::stream_record::StreamRecord;
use tunnel_proto::tls::{self, PeerTrust};
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{
    BufferPool, CongestionControl, Session, SessionSettings, Stream, find_cause, h2,
};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::control::Member;
use tunnel_proto::wire::header::{Refusal, StreamHeader, StreamKind};
use tunnel_proto::wire::name::{InstanceId, NodeName, ReplicaId};
use tunnel_proto::wire::node_certificate::NodeCertificate;
use tunnel_proto::wire::order::NodeOrder;
use tunnel_proto::wire::peer::{HeldNode, Holds, PeerHello, PeerMessage};
use tunnel_proto::wire::{VERSION_MAX, VERSION_MIN};
use tunnel_routing::policy::{PortLists, PortPolicy, SharedPolicy};

use crate::routing::Routing;
use crate::routing::current_routes::Routes;
use crate::routing::peers::{
    ForwardPolicy, KnownCertificates, PeerAddress, PeerEndpoint, PeerLimits, PeerMetrics, PeerTls,
    Peers,
};
use crate::routing::registry::{
    AgentSession, CallerKey, OpenError, Opened, Registration, Registry, RegistryLimits,
    StreamRequest,
};
use crate::routing::via::Via;
use crate::testing::{POOL, eventually, header};
use tunnel_ca::LocalCa;
use tunnel_store::data_dir::testing::Scratch;

/// A timeout for steps over loopback on a busy machine.
pub(super) const LIMIT: Duration = Duration::from_secs(30);
/// Time for which the list of a lost connection stays.
const LINGER: Duration = Duration::from_secs(1);
/// Streams of a connection, unless a test sets another limit.
const STREAMS: usize = 32;

/// Allows the port of [`header`].
pub(super) fn policy() -> PortPolicy {
    let lists = PortLists {
        http: "9100".parse().unwrap(),
        ..PortLists::default()
    };
    PortPolicy::of_lists(lists, Vec::new())
}

pub(super) fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

pub(super) fn id(name: &str) -> ReplicaId {
    name.parse().unwrap()
}

pub(super) fn instance(number: u8) -> InstanceId {
    InstanceId::new([number; 16])
}

pub(super) async fn within<T>(future: impl Future<Output = T>) -> T {
    let done = timeout(scaled(LIMIT), future).await;
    done.expect("timed out")
}

fn settings(pool: Arc<BufferPool>) -> SessionSettings {
    SessionSettings {
        stream_window: 1 << 20,
        streams: 64,
        keep_alive: None,
        idle_timeout: LIMIT,
        congestion: CongestionControl::default(),
        pool,
    }
}

/// The CA of one installation.
pub(super) struct Installation {
    ca: Arc<LocalCa>,
    _scratch: Scratch,
}

impl Installation {
    pub(super) fn new() -> Self {
        let scratch = Scratch::new();
        let ca = Arc::new(LocalCa::load_or_create(&scratch.0).unwrap());
        Self {
            ca,
            _scratch: scratch,
        }
    }

    fn tls(&self, name: &str) -> PeerTls {
        let own = self.ca.peer_resolver(id(name));
        let trust = PeerTrust::new(tls::roots(self.ca.roots()).unwrap()).unwrap();
        PeerTls {
            client: tls::peer_client(own.clone(), trust.clone()).unwrap(),
            server: tls::peer_server(own, trust).unwrap(),
        }
    }

    pub(super) async fn server(&self, name: &str) -> Server {
        self.server_with(name, STREAMS).await
    }

    /// Starts a server that opens and accepts at most `streams` on each connection.
    pub(super) async fn server_with(&self, name: &str, streams: usize) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = PeerLimits {
            streams,
            directory_nodes: 100,
            buffer_pool: 1,
        };
        let peers = Peers::new(id(name), limits, PeerMetrics::default());
        peers.advertise(vec![format!("{name}.example:10262")]);
        let registry = Arc::new(Registry::new(RegistryLimits {
            streams_per_agent: 64,
            buffer_pool: POOL,
        }));
        let (membership, members) = watch::channel(Arc::default());
        let server = Server {
            routing: Routing::new(registry.clone(), peers.clone()),
            peers,
            registry,
            policy: SharedPolicy::default(),
            pool: BufferPool::new(POOL),
            orders: Arc::default(),
            records: Arc::default(),
            address,
            membership,
            shutdown: Shutdown::new(),
        };
        server.policy.replace(&policy().into());
        server.endpoint(self).start(listener, members);
        server
    }

    /// Starts servers that are connected to each other.
    pub(super) async fn connected<const N: usize>(&self, names: [&str; N]) -> [Server; N] {
        let mut servers = Vec::new();
        for name in names {
            servers.push(self.server(name).await);
        }
        connect(&servers.iter().collect::<Vec<_>>()).await;
        let Ok(servers) = servers.try_into() else {
            panic!("as many servers as names");
        };
        servers
    }

    /// Connects to `server` with a certificate for `name`.
    pub(super) async fn dial_as(&self, name: &str, server: &Server) -> Arc<dyn Session> {
        let socket = TcpStream::connect(server.address).await.unwrap();
        let connector = TlsConnector::from(self.tls(name).client);
        let name = ServerName::try_from("server.example").unwrap();
        let stream = connector.connect(name, h2::ReadAhead::new(socket)).await;
        h2::connect_peer(stream.unwrap(), &settings(BufferPool::new(POOL)))
            .await
            .unwrap()
    }
}

/// Opens the control stream of a connection.
pub(super) async fn control(session: &Arc<dyn Session>) -> (PeerReader, PeerWriter) {
    let header = StreamHeader::new(StreamKind::Control {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
    });
    control::split(within(session.open(&header, LIMIT)).await.unwrap())
}

/// Returns the first message of the server `name`.
pub(super) fn hello(name: &str) -> PeerMessage {
    PeerMessage::Hello(first_message(name))
}

pub(super) fn first_message(name: &str) -> PeerHello {
    PeerHello {
        replica: id(name),
        epoch: 1,
        versions: (VERSION_MIN, VERSION_MAX),
        addresses: Vec::new(),
        zone: None,
    }
}

/// Returns an address of the server `name`, which is never dialed.
pub(super) fn address(name: &str) -> PeerAddress {
    PeerAddress {
        id: id(name),
        address: "192.0.2.1:10269".to_owned(),
        zone: None,
    }
}

/// Returns the announcement of one more node.
pub(super) fn claim(name: &str) -> Holds {
    let held_node = HeldNode {
        node: node(name),
        instance: instance(9),
        since: SystemTime::now(),
    };
    Holds {
        added: vec![held_node],
        ..Holds::default()
    }
}

/// Returns the function that returns the connected nodes.
fn certificates_of(registry: &Arc<Registry>) -> KnownCertificates {
    let registry = registry.clone();
    Box::new(move || {
        let nodes = registry.all().into_iter();
        let nodes = nodes.map(|agent| NodeCertificate::unknown(agent.node.clone()));
        nodes.collect()
    })
}

/// Connects all servers to each other, and waits until each has received the lists of the others.
pub(super) async fn connect(servers: &[&Server]) {
    let agent_of = |server: &&Server| server.agent(server.peers.own().as_str(), 0);
    let agents: Vec<_> = servers.iter().map(agent_of).collect();
    for server in servers {
        server.dial(servers);
    }
    let has = |nodes: usize| move |server: &&Server| server.peers.held_nodes().len() == nodes;
    let is_connected = || servers.iter().all(has(servers.len() - 1));
    eventually("servers are connected", is_connected).await;
    drop(agents);
    let is_empty = || servers.iter().all(has(0));
    eventually("servers hold no nodes", is_empty).await;
}

pub(super) struct Server {
    pub(super) peers: Arc<Peers>,
    pub(super) routing: Routing,
    pub(super) registry: Arc<Registry>,
    pub(super) policy: SharedPolicy,
    /// The memory for what other servers may send unread.
    pub(super) pool: Arc<BufferPool>,
    /// Orders of other servers.
    pub(super) orders: Arc<Mutex<Vec<NodeOrder>>>,
    /// Records of the streams that other servers forwarded.
    pub(super) records: Arc<Mutex<Vec<StreamRecord>>>,
    pub(super) address: SocketAddr,
    pub(super) shutdown: Shutdown,
    membership: watch::Sender<Arc<[PeerAddress]>>,
}

impl Server {
    /// Creates this server's end of the connections to the others.
    pub(super) fn endpoint(&self, installation: &Installation) -> PeerEndpoint {
        let (received, records) = (self.orders.clone(), self.records.clone());
        PeerEndpoint {
            peers: self.peers.clone(),
            registry: self.registry.clone(),
            tls: installation.tls(self.peers.own().as_str()),
            settings: settings(self.pool.clone()),
            handshake_timeout: LIMIT,
            policy: ForwardPolicy {
                policy: self.policy.clone(),
                routes: Routes::default(),
            },
            list_linger: LINGER,
            open_timeout: LIMIT,
            shutdown: self.shutdown.clone(),
            on_stream: Box::new(move |record| records.lock().push(record.clone())),
            on_enroll: None,
            known_certificates: certificates_of(&self.registry),
            on_orders: Box::new(move |_replica, orders| received.lock().extend(orders)),
        }
    }

    /// Begins to dial these servers.
    pub(super) fn dial(&self, servers: &[&Self]) {
        let members = servers.iter().map(|server| server.listed());
        self.membership.send_replace(members.collect());
    }

    /// Replaces the list of servers.
    pub(super) fn follow<const N: usize>(&self, members: [PeerAddress; N]) {
        self.membership.send_replace(members.into());
    }

    /// Returns this server as a list has it.
    pub(super) fn listed(&self) -> PeerAddress {
        PeerAddress {
            id: self.peers.own().clone(),
            address: self.address.to_string(),
            zone: None,
        }
    }

    /// Begins to dial this server alone, at this address.
    pub(super) fn dial_at(&self, server: &Self, address: SocketAddr) {
        let peer = PeerAddress {
            id: server.peers.own().clone(),
            address: address.to_string(),
            zone: None,
        };
        self.membership.send_replace([peer].into());
    }

    /// Opens another address of the listener for other servers.
    pub(super) async fn forward_port(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, to) = (listener.local_addr().unwrap(), self.address);
        self.shutdown.spawn_service(async move {
            let (mut near, _) = listener.accept().await.unwrap();
            let mut far = TcpStream::connect(to).await.unwrap();
            let _cut = tokio::io::copy_bidirectional(&mut near, &mut far).await;
        });
        address
    }

    /// Connects an agent.
    pub(super) fn agent(&self, name: &str, number: u8) -> Agent {
        let (near, far) = memory::pair();
        let session = self.registry.next_id();
        let entry = AgentSession::new(session, node(name), instance(number), near.clone());
        Agent {
            registration: self.registry.register(entry, &[]).unwrap(),
            near,
            far,
        }
    }

    /// Waits until this server knows that `holder` holds a node.
    pub(super) async fn sees(&self, name: &str, holder: &Self) {
        let entry = (node(name), holder.peers.own().clone());
        eventually("node is held", || self.peers.held_nodes().contains(&entry)).await;
    }

    /// Receives that `holder` holds a node, whether that is true or not.
    pub(super) fn receive_claim(&self, name: &str, holder: &Self) {
        self.peers.apply(holder.peers.own(), claim(name));
    }

    /// Opens a stream as a listener does.
    pub(super) async fn open(&self, name: &str, except: Option<&Via>) -> Result<Opened, OpenError> {
        let request = StreamRequest {
            node: &node(name),
            header: header(),
            caller_key: &CallerKey::Local(None),
            limit: LIMIT,
        };
        let except = except.map_or(&[][..], std::slice::from_ref);
        let opening = self.routing.open_once(&request, except, Instant::now());
        within(opening).await.map_err(|refused| refused.error)
    }

    /// Returns the names of the servers that agents may dial; a name with `-` in front is leaving.
    pub(super) fn members(&self) -> Vec<String> {
        let members = self.peers.members().borrow().clone();
        let name = |member: &Member| {
            let mark = if member.is_leaving { "-" } else { "" };
            format!("{mark}{}", member.id)
        };
        members.iter().map(name).collect()
    }

    /// Closes all connections and stops.
    pub(super) async fn stop(&self) {
        within(self.peers.close()).await;
        within(self.shutdown.finish()).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shutdown.stop().cancel();
    }
}

/// An agent played by the test.
pub(super) struct Agent {
    registration: Registration,
    /// Server's end of the session.
    pub(super) near: Arc<MemorySession>,
    /// Agent's end of the session.
    pub(super) far: Arc<MemorySession>,
}

impl Agent {
    pub(super) fn session(&self) -> &Arc<AgentSession> {
        self.registration.session()
    }

    /// Accepts the next stream and reads its header.
    pub(super) async fn stream(&self) -> Stream {
        let incoming = within(self.far.accept()).await.unwrap();
        let (received, stream) = incoming.header(Instant::now() + LIMIT).await.unwrap();
        assert_eq!(received.kind, header().kind);
        stream
    }

    /// Accepts the next stream, as if its target were connected.
    pub(super) async fn accepts(&self) -> Stream {
        let mut stream = self.stream().await;
        stream.accept("").await.unwrap();
        stream
    }
}

/// Returns the code with which a stream is refused.
pub(super) async fn refusal(opened: &mut Opened) -> RefusalCode {
    let error = within(opened.stream.accepted()).await.unwrap_err();
    let refusal = find_cause::<Refusal>(&error);
    refusal.unwrap_or_else(|| panic!("{error}")).code
}
