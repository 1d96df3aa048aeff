//! A plain door, callers, and agents that the test plays.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tunnel_proto::process::places::{PlaceLimits, Places};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::{BufferPool, Session, Stream};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::InstanceId;

use crate::ingress::caller_stream::Hangup;
use crate::ingress::client_auth::Borrowers;
use crate::ingress::connect::Gate;
use crate::ingress::http::serve;
use crate::ingress::peer::CallerName;
use crate::ingress::target_tls::Targets;
use crate::ingress::{Door, DoorLimits, Doors, Line, Mode};
use crate::metrics::Metrics;
use crate::policy::{LivePolicy, PortPolicy};
use crate::routing::decision::Scheme;
use crate::routing::registry::{AgentSession, Registration, Registry, RegistryLimits};
use crate::routing::routes::{RouteNode, Routes, Source};
use crate::testing::{PATIENCE, POOL, STREAMS, node, session, within};

/// A plain door, and agents that the test plays.
pub(in crate::ingress) struct Bench {
    pub(in crate::ingress) doors: Arc<Doors>,
    counters: MetricsRegistry,
}

/// An agent's end, newest first.
pub(in crate::ingress) struct Agent {
    pub(in crate::ingress) far: Arc<dyn Session>,
    _registered: Registration,
}

impl Agent {
    /// The next stream, and what it is for.
    pub(in crate::ingress) async fn asked(&self) -> (StreamHeader, Stream) {
        let incoming = within(self.far.accept()).await.unwrap();
        incoming.header(Instant::now() + PATIENCE).await.unwrap()
    }

    pub(in crate::ingress) async fn stream(&self) -> Stream {
        self.asked().await.1
    }

    pub(in crate::ingress) async fn refuses(&self, code: RefusalCode) {
        self.stream().await.refuse(code, "as the agent says").await;
    }

    /// Takes a request and returns it as it came.
    pub(in crate::ingress) async fn answers(&self) -> String {
        self.answers_with(HI).await
    }

    /// The same with an answer of the test's, after which the target closes.
    pub(in crate::ingress) async fn answers_with(&self, answer: &str) -> String {
        let mut stream = self.accepts().await;
        let head = head(&mut stream).await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        head
    }

    /// The next stream, its target connected.
    pub(in crate::ingress) async fn accepts(&self) -> Stream {
        let mut stream = self.stream().await;
        stream.accept("").await.unwrap();
        stream
    }

    /// Whether no stream comes for a while.
    pub(in crate::ingress) async fn is_left_alone(&self) -> bool {
        tokio::time::timeout(Duration::from_millis(20), self.far.accept())
            .await
            .is_err()
    }
}

impl Bench {
    pub(in crate::ingress) fn new() -> Self {
        Self::with_callers(64)
    }

    /// A bench with this many places for callers.
    pub(in crate::ingress) fn with_callers(callers: usize) -> Self {
        let routes = Routes::default();
        let known = RouteNode {
            name: node(),
            hostname: None,
            addresses: Vec::new(),
            kubelet_port: None,
        };
        routes.set(Source::Known, vec![known]);
        let policy = LivePolicy::default();
        policy.replace(PortPolicy {
            http: "9100, 9101".parse().unwrap(),
            ..PortPolicy::default()
        });
        let limits = RegistryLimits {
            streams_per_agent: STREAMS,
            buffer_pool: POOL,
        };
        let mut counters = MetricsRegistry::default();
        let doors = Doors {
            routes,
            registry: Arc::new(Registry::new(limits)),
            policy,
            pods: None,
            targets: Targets::new(None).unwrap(),
            borrowers: Borrowers::default(),
            limits: DoorLimits {
                handshake: Duration::from_secs(5),
                request_head_time: Duration::from_secs(10),
                request_head_bytes: 64 << 10,
                idle: Duration::from_secs(180),
                open: Duration::from_secs(10),
            },
            callers: Places::new(PlaceLimits {
                per_source: callers + 1,
                total: callers,
            }),
            verified_callers: Places::new(PlaceLimits {
                per_source: 1,
                total: 1,
            }),
            metrics: Metrics::new(&mut counters, BufferPool::new(POOL)),
            shutdown: Shutdown::new(),
            drivers: TaskTracker::new(),
        };
        Self {
            doors: Arc::new(doors),
            counters,
        }
    }

    pub(in crate::ingress) fn agent(&self) -> Agent {
        let (near, far) = session();
        let id = self.doors.registry.next_id();
        let entry = AgentSession::new(id, node(), InstanceId::new([1; 16]), near);
        Agent {
            far,
            _registered: self.doors.registry.register(entry, &[]).unwrap(),
        }
    }

    /// The sum of a metric's series.
    pub(in crate::ingress) fn metric(&self, series: &str) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.counters).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.map_or(0, |value| value.trim().parse().unwrap())
    }

    /// The whole answer to a request.
    pub(in crate::ingress) async fn ask(&self, request: &str) -> String {
        self.ask_at(door(), request).await
    }

    /// The same at a door for https targets, behind its TLS.
    pub(in crate::ingress) async fn ask_secure(&self, request: &str) -> String {
        self.ask_at(https_listener(), request).await
    }

    /// The same for a caller with client-certificate delegation, whose TLS asked for this name.
    pub(in crate::ingress) async fn ask_delegated(
        &self,
        server_name: Option<&str>,
        request: &str,
    ) -> String {
        let delegated = |line: &mut Line| {
            line.borrows = true;
            line.server_name = server_name.map(|name| name.parse().unwrap());
        };
        let caller = self.connect_with(https_listener(), delegated);
        Self::exchange(caller, request).await
    }

    /// A CONNECT door with this gate, without TLS.
    pub(in crate::ingress) fn gate(gate: Gate) -> Arc<Door> {
        Arc::new(Door {
            name: "connect",
            scheme: Scheme::Http,
            implied_port: None,
            tls: None,
            connect: Some(gate),
        })
    }

    pub(in crate::ingress) async fn ask_at(&self, door: Arc<Door>, request: &str) -> String {
        Self::exchange(self.connect_at(door), request).await
    }

    async fn exchange(mut caller: DuplexStream, request: &str) -> String {
        let ask = async {
            caller.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            caller.read_to_string(&mut answer).await.unwrap();
            answer
        };
        within(ask).await
    }

    /// A caller's connection in memory.
    pub(in crate::ingress) fn connect(&self) -> DuplexStream {
        self.connect_at(door())
    }

    pub(in crate::ingress) fn connect_at(&self, door: Arc<Door>) -> DuplexStream {
        self.connect_with(door, |_| {})
    }

    /// The same of a caller who comes from this address and has proved this name.
    pub(in crate::ingress) fn connect_as(
        &self,
        door: Arc<Door>,
        from: &str,
        name: CallerName,
    ) -> DuplexStream {
        let peer: SocketAddr = from.parse().unwrap();
        self.connect_with(door, |line| {
            (line.peer, line.name) = (peer.into(), name);
        })
    }

    fn connect_with(&self, door: Arc<Door>, change: impl FnOnce(&mut Line)) -> DuplexStream {
        let (caller, served) = tokio::io::duplex(64 << 10);
        let peer: SocketAddr = "192.0.2.1:5".parse().unwrap();
        let mut line = Line {
            peer: peer.into(),
            name: CallerName::Unnamed,
            fate: Arc::default(),
            hangup: Hangup::never(),
            permit: Arc::new(self.doors.callers.enter(peer.ip()).unwrap()),
            borrows: false,
            server_name: None,
            refused: None,
        };
        change(&mut line);
        let serve = serve(self.doors.clone(), door, served, line);
        self.doors.shutdown.spawn_work(serve);
        caller
    }

    /// A caller's connection over TCP.
    pub(in crate::ingress) async fn dial(&self) -> TcpStream {
        self.dial_at(door()).await
    }

    pub(in crate::ingress) async fn dial_at(&self, door: Arc<Door>) -> TcpStream {
        TcpStream::connect(self.listen(door).await).await.unwrap()
    }

    /// The address of a listener on loopback.
    pub(in crate::ingress) async fn listen(&self, door: Arc<Door>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        self.doors.start(listener, Mode::Http(door));
        address
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.doors.shutdown.drain().cancel();
        self.doors.shutdown.stop().cancel();
    }
}

fn https_listener() -> Arc<Door> {
    Arc::new(Door {
        name: "https",
        scheme: Scheme::Https,
        implied_port: None,
        tls: None,
        connect: None,
    })
}

pub(in crate::ingress) fn door() -> Arc<Door> {
    Arc::new(Door {
        name: "http",
        scheme: Scheme::Http,
        implied_port: None,
        tls: None,
        connect: None,
    })
}

/// A short answer whose connection may go on.
pub(in crate::ingress) const HI: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

/// A request that asks for nothing after it, without its empty line.
pub(in crate::ingress) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: worker-1:9100\r\n")
}

/// Reads through the next empty line.
pub(in crate::ingress) async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(within(stream.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Sends a request and reads exactly the answer [`HI`].
pub(in crate::ingress) async fn hears_hi<S>(caller: &mut S, request: &str)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    caller.write_all(request.as_bytes()).await.unwrap();
    let head = head(caller).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let mut body = [0; 2];
    within(caller.read_exact(&mut body)).await.unwrap();
    assert_eq!(&body, b"hi");
}
