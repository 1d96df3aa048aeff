//! Fixture with a plain HTTP listener, callers, and agents that the test controls.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tunnel_process::conn_limiter::{ConnLimiter, ConnLimits};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::transport::memory::{self, MemorySession};
use tunnel_proto::transport::{BufferPool, Session, Stream};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::StreamHeader;
use tunnel_proto::wire::name::InstanceId;

use crate::config::{Limits, SharedLimits};
use crate::dry_run::DryRunReport;
use crate::ingress::ListenerKind;
use crate::ingress::caller_addr::CallerIdentity;
use crate::ingress::caller_stream::CallerClosed;
use crate::ingress::context::{CallerConn, ConnectProxy, HttpListener, IngressContext};
use crate::ingress::head_memory::HeadMemory;
use crate::ingress::http::serve;
use crate::ingress::target_tls::TargetTls;
use crate::metrics::Metrics;
use crate::routing::Routing;
use crate::routing::peers::Peers;
use crate::routing::registry::{AgentSession, Registration, Registry, RegistryLimits};
use crate::routing::routes::{RouteNode, RouteSource, Routes};
use crate::running::RunningAccesses;
use crate::testing::{POOL, STREAMS, WAIT_TIMEOUT, node, within};
use tunnel_routing::destination::Scheme;
use tunnel_routing::policy::rules::RuleTable;
use tunnel_routing::policy::{DelegationPolicy, Policy, PortLists, PortPolicy, SharedPolicy};

/// Bytes that a caller's connection in memory holds in each direction.
pub(in crate::ingress) const CALLER_BUFFER_BYTES: usize = 64 << 10;
/// Name of the caller with client-certificate delegation.
const DELEGATED: &str = "kube-apiserver-kubelet-client";

/// A plain HTTP listener, and agents that the test controls.
pub(in crate::ingress) struct Fixture {
    pub(in crate::ingress) ingress: Arc<IngressContext>,
    pub(in crate::ingress) registry: Arc<Registry>,
    counters: MetricsRegistry,
}

/// The agent's end of a session.
pub(in crate::ingress) struct Agent {
    /// The server's end.
    pub(in crate::ingress) near: Arc<MemorySession>,
    pub(in crate::ingress) far: Arc<dyn Session>,
    _registered: Registration,
}

impl Agent {
    /// Returns the next stream with its header.
    pub(in crate::ingress) async fn asked(&self) -> (StreamHeader, Stream) {
        let incoming = within(self.far.accept()).await.unwrap();
        let header = incoming.header(Instant::now() + WAIT_TIMEOUT);
        header.await.unwrap()
    }

    pub(in crate::ingress) async fn stream(&self) -> Stream {
        self.asked().await.1
    }

    pub(in crate::ingress) async fn refuses(&self, code: RefusalCode) {
        self.stream().await.refuse(code, "as the agent says").await;
    }

    /// Accepts a request, answers with [`HI`] and returns the head of the request.
    pub(in crate::ingress) async fn answers(&self) -> String {
        self.answers_with(HI).await
    }

    /// Accepts a request, answers with `answer` and returns the head of the request. The target
    /// then closes.
    pub(in crate::ingress) async fn answers_with(&self, answer: &str) -> String {
        let mut stream = self.accepts().await;
        let head = head(&mut stream).await;
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        head
    }

    /// Accepts the next stream, as if its target were connected.
    pub(in crate::ingress) async fn accepts(&self) -> Stream {
        let mut stream = self.stream().await;
        stream.accept("").await.unwrap();
        stream
    }

    /// Returns whether no stream arrives for a while.
    pub(in crate::ingress) async fn is_left_alone(&self) -> bool {
        let next = tokio::time::timeout(Duration::from_millis(20), self.far.accept());
        next.await.is_err()
    }
}

impl Fixture {
    pub(in crate::ingress) fn new() -> Self {
        Self::with_callers(64)
    }

    /// Creates a fixture with one connected agent.
    pub(in crate::ingress) fn with_agent() -> (Self, Agent) {
        let fixture = Self::new();
        let agent = fixture.agent();
        (fixture, agent)
    }

    /// Creates a fixture with a limit of `callers` connections.
    pub(in crate::ingress) fn with_callers(callers: usize) -> Self {
        let routes = Routes::default();
        routes.set(
            RouteSource::Known,
            vec![RouteNode::edge(node(), Vec::new())],
        );
        let policy = SharedPolicy::default();
        let lists = PortLists {
            http: "9100, 9101".parse().unwrap(),
            ..PortLists::default()
        };
        policy.replace(&Policy {
            rules: RuleTable::yurt_tunnel().into(),
            delegation: DelegationPolicy::named([DELEGATED.to_owned()]),
            ..PortPolicy::of_lists(lists, Vec::new()).into()
        });
        let limits = RegistryLimits {
            streams_per_agent: STREAMS,
            buffer_pool: POOL,
        };
        let mut counters = MetricsRegistry::default();
        let pool = BufferPool::new(POOL);
        let registry = Arc::new(Registry::new(limits));
        let peers = Peers::alone("server-0".parse().unwrap(), Vec::new());
        let ingress = IngressContext {
            routes,
            routing: Routing::new(registry.clone(), peers),
            policy,
            dry_run: DryRunReport::default(),
            running: RunningAccesses::default(),
            pods: None,
            reviewer: None,
            targets: TargetTls::new(None).unwrap(),
            limits: SharedLimits::from(Limits {
                request_head_bytes: 64 << 10,
                ..Limits::default()
            }),
            head_memory: HeadMemory::new(pool.clone()),
            callers: ConnLimiter::new(ConnLimits {
                per_source: callers + 1,
                total: callers,
            }),
            verified_callers: ConnLimiter::new(ConnLimits {
                per_source: 1,
                total: 1,
            }),
            metrics: Metrics::new(&mut counters, pool),
            recent: None,
            shutdown: Shutdown::new(),
            drivers: TaskTracker::new(),
        };
        Self {
            ingress: Arc::new(ingress),
            registry,
            counters,
        }
    }

    pub(in crate::ingress) fn agent(&self) -> Agent {
        let (near, far) = memory::pair();
        let id = self.registry.next_id();
        let entry = AgentSession::new(id, node(), InstanceId::new([1; 16]), near.clone());
        Agent {
            near,
            far,
            _registered: self.registry.register(entry, &[]).unwrap(),
        }
    }

    /// Returns the sum of a metric's series.
    pub(in crate::ingress) fn metric(&self, series: &str) -> u64 {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &self.counters).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.map_or(0, |value| value.trim().parse().unwrap())
    }

    /// Sends a request and returns the whole response.
    pub(in crate::ingress) async fn ask(&self, request: &str) -> String {
        self.ask_at(http_listener(), request).await
    }

    /// Sends a request to a listener for https targets, behind its TLS. Returns the whole response.
    pub(in crate::ingress) async fn ask_secure(&self, request: &str) -> String {
        self.ask_at(https_listener(), request).await
    }

    /// Sends a request as a caller with client-certificate delegation and this server name. Returns
    /// the whole response.
    pub(in crate::ingress) async fn ask_delegated(
        &self,
        server_name: Option<&str>,
        request: &str,
    ) -> String {
        let delegated = |line: &mut CallerConn| {
            line.has_delegation = true;
            line.identity = CallerIdentity::Certificate(DELEGATED.into());
            line.server_name = server_name.map(|name| name.parse().unwrap());
        };
        let caller = self.connect_with(https_listener(), delegated);
        Self::exchange(caller, request).await
    }

    /// Creates a CONNECT listener without TLS.
    pub(in crate::ingress) fn connect_proxy(connect_proxy: ConnectProxy) -> Arc<HttpListener> {
        listener("connect", Scheme::Http, Some(connect_proxy))
    }

    pub(in crate::ingress) async fn ask_at(
        &self,
        http_listener: Arc<HttpListener>,
        request: &str,
    ) -> String {
        Self::exchange(self.connect_at(http_listener), request).await
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

    /// Opens a caller's connection in memory and sends these bytes.
    pub(in crate::ingress) async fn send(&self, bytes: &str) -> DuplexStream {
        let mut caller = self.connect();
        caller.write_all(bytes.as_bytes()).await.unwrap();
        caller
    }

    /// Opens a caller's connection in memory.
    pub(in crate::ingress) fn connect(&self) -> DuplexStream {
        self.connect_at(http_listener())
    }

    pub(in crate::ingress) fn connect_at(&self, http_listener: Arc<HttpListener>) -> DuplexStream {
        self.connect_with(http_listener, |_| {})
    }

    /// Opens a connection in memory for a caller with this address and identity.
    pub(in crate::ingress) fn connect_as(
        &self,
        http_listener: Arc<HttpListener>,
        from: &str,
        identity: CallerIdentity,
    ) -> DuplexStream {
        let addr: SocketAddr = from.parse().unwrap();
        self.connect_with(http_listener, |line| {
            (line.addr, line.identity) = (addr.into(), identity);
        })
    }

    fn connect_with(
        &self,
        http_listener: Arc<HttpListener>,
        change: impl FnOnce(&mut CallerConn),
    ) -> DuplexStream {
        let (caller, served) = tokio::io::duplex(CALLER_BUFFER_BYTES);
        let addr: SocketAddr = "192.0.2.1:5".parse().unwrap();
        let mut line = CallerConn {
            addr: addr.into(),
            identity: CallerIdentity::Anonymous,
            close_state: Arc::default(),
            closed: CallerClosed::never(),
            permit: Arc::new(self.ingress.callers.acquire(addr.ip()).unwrap()),
            has_delegation: false,
            server_name: None,
            certificate_error: None,
            cluster_user: None,
        };
        change(&mut line);
        let serve = serve(self.ingress.clone(), http_listener, served, line);
        self.ingress.shutdown.spawn_work(serve);
        caller
    }

    /// Opens a caller's connection over TCP.
    pub(in crate::ingress) async fn dial(&self) -> TcpStream {
        self.dial_at(http_listener()).await
    }

    pub(in crate::ingress) async fn dial_at(&self, http_listener: Arc<HttpListener>) -> TcpStream {
        TcpStream::connect(self.listen(http_listener).await)
            .await
            .unwrap()
    }

    /// Starts a listener on loopback and returns its address.
    pub(in crate::ingress) async fn listen(&self, http_listener: Arc<HttpListener>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        self.ingress
            .start(listener, ListenerKind::Http(http_listener));
        address
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.ingress.shutdown.drain().cancel();
        self.ingress.shutdown.stop().cancel();
    }
}

fn https_listener() -> Arc<HttpListener> {
    listener("https", Scheme::Https, None)
}

pub(in crate::ingress) fn http_listener() -> Arc<HttpListener> {
    listener("http", Scheme::Http, None)
}

fn listener(
    name: &'static str,
    scheme: Scheme,
    connect: Option<ConnectProxy>,
) -> Arc<HttpListener> {
    Arc::new(HttpListener {
        name,
        scheme,
        implied_port: None,
        tls: None,
        connect,
    })
}

/// A short response whose connection can be reused.
pub(in crate::ingress) const HI: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi";

/// Returns a request without a body, and without its empty line.
pub(in crate::ingress) fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: worker-1:9100\r\n")
}

/// Reads up to and including the next empty line.
pub(in crate::ingress) async fn head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(within(stream.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

/// Checks the status of a response.
#[track_caller]
pub(in crate::ingress) fn assert_status(response: &str, status: u16) {
    let expected = format!("HTTP/1.1 {status} ");
    assert!(response.starts_with(&expected), "not {status}: {response}");
}

/// Sends a request and reads exactly the response [`HI`].
pub(in crate::ingress) async fn expect_hi<S>(caller: &mut S, request: &str)
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
