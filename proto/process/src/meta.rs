//! The meta port: `/livez`, `/readyz[?verbose]`, `/metrics`, and the endpoints that a binary adds.
//! Plain HTTP/1.1, read-only, one request for each connection.
//!
//! Anybody who reaches the port may cause its work. So what grows with the number of nodes is made
//! outside the runtime's own threads, one document of a source at a time, and is shared by the callers
//! of a moment (`documents.rs`) or made in chunks while it is read (`streamed.rs`), and a connection
//! ends when its caller takes nothing for 30 s (`stall_limit.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fmt::{self, Write as _};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs, UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use self::documents::Documents;
use super::accept::RetryingListener;
use super::conn_limiter::{ConnLimits, source};
use super::metrics::exposition::Exposition;
use super::query::parameters;
use super::serve_bounded::serve_bounded;
use super::shutdown::Shutdown;
use super::telemetry::audit_condition;
use super::unix_socket::{self, OWNER_ONLY, SocketFile};

mod documents;
mod response;
mod stall_limit;
mod streamed;

use self::response::response;
pub use self::response::{FullResponse, json, text};
use self::stall_limit::StallLimit;
pub use self::streamed::Chunks;
use self::streamed::{MetaBody, StreamedBody};

/// Maximum number of connections. At the limit, newer connections evict the oldest. Probes and one
/// or two scrapers need only a few.
const CONN_LIMITS: ConnLimits = ConnLimits {
    per_source: 32,
    total: 64,
};
/// Time limit for a caller to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the answer to an action, above the 10 s of a reading of files.
const ACTION_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for which a caller may take nothing of a response. The time in which a page is made does not
/// count. A socket takes more when a part of its buffer is free, so a caller that takes less than about
/// 1 KB/s counts as one that takes nothing.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Memory for the part of a response that a connection has not sent.
const BUFFERED_MAX_BYTES: usize = 64 * 1024;
/// Longest response body that [`get`] accepts. The metrics of 10,000 nodes are about 3 MiB.
const RESPONSE_MAX_BYTES: usize = 8 * 1024 * 1024;

/// A request for an additional endpoint.
#[derive(Debug, Clone, Copy)]
pub struct EndpointRequest<'a> {
    /// Address of the caller.
    pub peer: SocketAddr,
    /// Query of the request target; empty if there is none.
    pub query: &'a str,
}

/// The answer of an additional endpoint.
pub enum EndpointAnswer {
    /// A small response that costs nothing to speak of.
    Now(FullResponse),
    /// A response whose size grows with the number of nodes and is bounded. Callers of a moment share
    /// it.
    Document {
        /// Distinguishes the documents of one path. The number of variants must be bounded.
        variant: String,
        /// Makes the response. Runs outside the runtime's own threads.
        make: Box<dyn FnOnce() -> FullResponse + Send>,
    },
    /// A JSON response of any size, in chunks that are made while the caller reads: no more than one
    /// chunk of a request is in memory.
    Json(Chunks),
}

impl fmt::Debug for EndpointAnswer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now(response) => formatter.debug_tuple("Now").field(response).finish(),
            Self::Document { variant, .. } => formatter
                .debug_struct("Document")
                .field("variant", variant)
                .finish_non_exhaustive(),
            Self::Json(_) => formatter.debug_tuple("Json").finish_non_exhaustive(),
        }
    }
}

/// The handler of an additional endpoint. Runs on the runtime's threads.
pub type EndpointHandler = Box<dyn Fn(EndpointRequest<'_>) -> EndpointAnswer + Send + Sync>;

/// The handler of an action. Runs on the runtime's threads.
pub type ActionHandler = Box<dyn Fn() -> BoxFuture<'static, FullResponse> + Send + Sync>;

/// The content of the meta port.
pub struct Meta {
    readiness: Readiness,
    metrics: Registry,
    endpoints: Vec<(&'static str, EndpointHandler)>,
    actions: Vec<(&'static str, ActionHandler)>,
}

crate::partial_debug!(Meta { readiness });

impl Meta {
    /// Creates a meta port for the readiness and metrics of a process. The metrics get one of the
    /// conditions.
    pub fn new(readiness: Readiness, mut metrics: Registry) -> Self {
        metrics.register_collector(Box::new(readiness.clone()));
        Self {
            readiness,
            metrics,
            endpoints: Vec::new(),
            actions: Vec::new(),
        }
    }

    /// Adds an endpoint for GET on exactly `path`.
    pub fn with(mut self, path: &'static str, endpoint: EndpointHandler) -> Self {
        self.endpoints.push((path, endpoint));
        self
    }

    /// Adds an action for POST on exactly `path`, at the Unix socket only: others of the host, and
    /// callers over the tunnel, reach the port.
    pub fn with_action(mut self, path: &'static str, action: ActionHandler) -> Self {
        self.actions.push((path, action));
        self
    }

    /// Serves on `listener` until the listeners close.
    pub fn start(self, listener: TcpListener, shutdown: &Shutdown) {
        self.into_server(shutdown).listen(listener);
    }

    /// Returns the server of this content, which any number of listeners can have.
    pub fn into_server(self, shutdown: &Shutdown) -> MetaServer {
        MetaServer(Arc::new(MetaState {
            meta: Arc::new(self),
            documents: Documents::new(shutdown.clone()),
            shutdown: shutdown.clone(),
        }))
    }

    fn ready(&self, verbose: bool) -> FullResponse {
        let (pending, done) = self.readiness.read();
        let status = if pending.is_empty() {
            StatusCode::OK
        } else {
            StatusCode::SERVICE_UNAVAILABLE
        };
        let mut body = String::new();
        if verbose {
            for (mark, components) in [("+", &done), ("-", &pending)] {
                for component in components {
                    let _infallible = writeln!(body, "[{mark}] {component}");
                }
            }
            for (component, line) in self.readiness.conditions() {
                let _infallible = writeln!(body, "[!] {component}: {line}");
            }
        }
        body.push_str(if pending.is_empty() {
            "ok\n"
        } else {
            "not ready\n"
        });
        text(status, body)
    }

    /// Answers a readiness probe of Kubernetes: a process that drains serves its streams.
    fn serving(&self) -> FullResponse {
        if self.readiness.is_serving() {
            text(StatusCode::OK, "ok\n")
        } else {
            text(StatusCode::SERVICE_UNAVAILABLE, "not serving\n")
        }
    }

    fn metrics(&self, format: Exposition) -> FullResponse {
        match format.encode(&self.metrics) {
            Ok(page) => response(StatusCode::OK, format.content_type(), page),
            Err(fmt::Error) => text(
                StatusCode::INTERNAL_SERVER_ERROR,
                "metrics cannot be encoded\n",
            ),
        }
    }
}

/// The meta port while it serves.
#[derive(Clone)]
pub struct MetaServer(Arc<MetaState>);

impl fmt::Debug for MetaServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.meta.fmt(formatter)
    }
}

impl MetaServer {
    /// Serves on `listener` until the listeners close.
    pub fn listen(&self, listener: TcpListener) {
        let state = self.0.clone();
        serve_bounded(
            listener,
            "meta",
            CONN_LIMITS,
            &self.0.shutdown,
            move |socket, peer| state.clone().serve(socket, peer, false),
        );
    }

    /// Binds a Unix socket for this user, and serves it until `stop`. At its limit of connections,
    /// newer ones end at once.
    ///
    /// # Errors
    /// Returns an error with the path if the socket cannot be bound.
    pub fn listen_unix(&self, path: &Path) -> io::Result<()> {
        let (listener, file) = unix_socket::bind(path, OWNER_ONLY)?;
        let state = self.0.clone();
        self.0
            .shutdown
            .spawn_service(state.accept_unix(listener, file));
        Ok(())
    }

    /// Serves a Unix socket like [`Self::listen_unix`], as soon as it can be bound.
    pub fn listen_unix_when_possible(&self, path: PathBuf) {
        let state = self.0.clone();
        self.0.shutdown.spawn_service(async move {
            let (listener, file) = unix_socket::bind_when_possible(&path, OWNER_ONLY).await;
            state.accept_unix(listener, file).await;
        });
    }
}

/// The content of the meta port, and the documents that are being sent.
struct MetaState {
    meta: Arc<Meta>,
    documents: Arc<Documents>,
    shutdown: Shutdown,
}

/// Address of callers at a Unix socket.
const LOCAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Reports to the connection which document it sends: the token is canceled when the connection must
/// end because its document is evicted.
type SentDocument = Mutex<Option<oneshot::Sender<CancellationToken>>>;

impl MetaState {
    async fn accept_unix(self: Arc<Self>, listener: UnixListener, file: SocketFile) {
        let _file = file;
        let permits = Arc::new(Semaphore::new(CONN_LIMITS.per_source));
        let mut accepting = RetryingListener::new(listener, "meta");
        loop {
            let socket = accepting.accept().await;
            let Ok(permit) = permits.clone().try_acquire_owned() else {
                continue;
            };
            let is_owner = unix_socket::is_of_owner(&socket);
            let connection = self.clone().serve(socket, LOCAL, is_owner);
            self.shutdown.spawn_service(async move {
                let _permit = permit;
                connection.await;
            });
        }
    }

    /// Serves a connection. `is_owner` says that the caller is this user or root.
    async fn serve<S>(self: Arc<Self>, socket: S, peer: SocketAddr, is_owner: bool)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send,
    {
        let (sender, sent) = oneshot::channel();
        let sent_document = Arc::new(SentDocument::new(Some(sender)));
        let service = service_fn(move |request: Request<Incoming>| {
            let (server, sent_document) = (self.clone(), sent_document.clone());
            async move {
                if is_owner && let Some(done) = server.act(&request).await {
                    return Ok(done.map(MetaBody::Left));
                }
                Ok::<_, Infallible>(server.respond(&request, peer, &sent_document).await)
            }
        });
        let mut server = hyper::server::conn::http1::Builder::new();
        server
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            // No pipelining: hyper would begin with the next request before the caller has read the
            // response, and so hold as many documents as the caller asks for.
            .keep_alive(false)
            // A caller may close its direction before it has the response.
            .half_close(true)
            .max_buf_size(BUFFERED_MAX_BYTES);
        let evicted = async {
            match sent.await {
                Ok(evicted) => evicted.cancelled().await,
                Err(_no_document) => std::future::pending().await,
            }
        };
        let socket = TokioIo::new(StallLimit::new(socket, STALL_TIMEOUT));
        tokio::select! {
            ended = server.serve_connection(socket, service) => {
                if let Err(error) = ended {
                    debug!(%error, %peer, "meta connection ended");
                }
            }
            () = evicted => debug!(%peer, "meta connection ended: its page took too much memory"),
        }
    }

    /// Takes the action of a request. Returns `None` if it is not for one.
    async fn act(&self, request: &Request<Incoming>) -> Option<FullResponse> {
        if request.method() != Method::POST {
            return None;
        }
        let mut actions = self.meta.actions.iter();
        let (_, action) = actions.find(|(path, _)| *path == request.uri().path())?;
        Some(action().await)
    }

    async fn respond(
        &self,
        request: &Request<Incoming>,
        peer: SocketAddr,
        sent_document: &SentDocument,
    ) -> Response<MetaBody> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            let problem = "only GET and HEAD are supported\n";
            return text(StatusCode::METHOD_NOT_ALLOWED, problem).map(MetaBody::Left);
        }
        let (path, variant, make) = match self.answer(request, peer) {
            (_, EndpointAnswer::Now(response)) => return response.map(MetaBody::Left),
            (_, EndpointAnswer::Json(chunks)) => {
                let body = StreamedBody::new(source(peer.ip()), chunks);
                return response(StatusCode::OK, "application/json", "")
                    .map(|_empty| MetaBody::Right(body));
            }
            (path, EndpointAnswer::Document { variant, make }) => (path, variant, make),
        };
        let document = self
            .documents
            .get(source(peer.ip()), (path, variant), make)
            .await;
        let Some(document) = document else {
            let problem = "the page cannot be made\n";
            return text(StatusCode::INTERNAL_SERVER_ERROR, problem).map(MetaBody::Left);
        };
        if let Some(sender) = sent_document.lock().take() {
            // The connection may have ended.
            let _ended = sender.send(document.evicted.clone());
        }
        document.response.clone().map(MetaBody::Left)
    }

    fn answer(
        &self,
        request: &Request<Incoming>,
        peer: SocketAddr,
    ) -> (&'static str, EndpointAnswer) {
        let meta = &self.meta;
        let response = match request.uri().path() {
            "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => meta.ready(is_verbose(request.uri().query())),
            "/servingz" => meta.serving(),
            "/metrics" => return ("/metrics", self.metrics(request)),
            path => match meta.endpoints.iter().find(|(known, _)| *known == path) {
                Some((path, endpoint)) => {
                    let query = request.uri().query().unwrap_or_default();
                    return (path, endpoint(EndpointRequest { peer, query }));
                }
                None => text(
                    StatusCode::NOT_FOUND,
                    "not found; use /livez, /readyz, /servingz or /metrics\n",
                ),
            },
        };
        ("", EndpointAnswer::Now(response))
    }

    /// The page has series for each node.
    fn metrics(&self, request: &Request<Incoming>) -> EndpointAnswer {
        let accept = request.headers().get_all(http::header::ACCEPT).iter();
        let format = Exposition::negotiate(accept.filter_map(|value| value.to_str().ok()));
        let meta = self.meta.clone();
        EndpointAnswer::Document {
            variant: format.content_type().to_owned(),
            make: Box::new(move || meta.metrics(format)),
        }
    }
}

/// Returns whether a query has the key `verbose`, with or without a value. The proxy of kube-apiserver
/// sends `verbose=` for `verbose`.
fn is_verbose(query: Option<&str>) -> bool {
    parameters(query.unwrap_or_default()).any(|(key, _)| key == "verbose")
}

/// Returns the address at which this host reaches a listener on `address`: loopback if the listener
/// is on all addresses.
pub fn dialable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Where a running process is asked for its meta port's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetaAddress {
    /// The TCP address of a meta port.
    Tcp(SocketAddr),
    /// A Unix socket, see [`MetaServer::listen_unix`].
    Unix(PathBuf),
}

impl fmt::Display for MetaAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix(path) => path.display().fmt(formatter),
        }
    }
}

impl From<SocketAddr> for MetaAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl MetaAddress {
    /// Requests `path`, within 5 s. Cancel-safe.
    ///
    /// # Errors
    /// As [`get`].
    pub async fn get(&self, path: &str) -> io::Result<(StatusCode, String)> {
        let socket = match self {
            Self::Tcp(address) => return get(address, path).await,
            Self::Unix(socket) => socket,
        };
        let answer = exchange_unix(socket, Method::GET, path);
        within(HEAD_TIMEOUT, answer).await
    }
}

/// Takes the action `path` of the process that listens on a Unix socket, within 15 s. Cancel-safe.
///
/// # Errors
/// When there is no response, or it is not plain text of at most 8 MiB.
pub async fn act(socket: &Path, path: &str) -> io::Result<(StatusCode, String)> {
    within(ACTION_TIMEOUT, exchange_unix(socket, Method::POST, path)).await
}

/// Requests `path` from the meta port at `address`, within 5 s. Cancel-safe.
///
/// # Errors
/// When there is no response, or it is not plain text of at most 8 MiB.
pub async fn get(
    address: impl ToSocketAddrs + fmt::Display,
    path: &str,
) -> io::Result<(StatusCode, String)> {
    within(HEAD_TIMEOUT, send_get(address, path)).await
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(limit, work)
        .await
        .unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

async fn exchange_unix(
    socket: &Path,
    method: Method,
    path: &str,
) -> io::Result<(StatusCode, String)> {
    exchange(
        UnixStream::connect(socket).await?,
        method,
        "localhost",
        path,
    )
    .await
}

async fn send_get(
    address: impl ToSocketAddrs + fmt::Display,
    path: &str,
) -> io::Result<(StatusCode, String)> {
    let host = address.to_string();
    exchange(TcpStream::connect(address).await?, Method::GET, &host, path).await
}

async fn exchange(
    socket: impl AsyncRead + AsyncWrite + Unpin + Send,
    method: Method,
    host: &str,
    path: &str,
) -> io::Result<(StatusCode, String)> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::HOST, host)
        .body(Full::default())
        .map_err(io::Error::other)?;
    let (status, body) = send_request(socket, request, RESPONSE_MAX_BYTES).await?;
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

/// Sends a request over a connection of its own, and returns the response, of at most `max_bytes`.
/// Cancel-safe.
///
/// # Errors
/// When there is no response, or a longer one.
pub async fn send_request(
    socket: impl AsyncRead + AsyncWrite + Unpin + Send,
    request: Request<Full<Bytes>>,
    max_bytes: usize,
) -> io::Result<(StatusCode, Bytes)> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    let exchange = async move {
        let response = sender
            .send_request(request)
            .await
            .map_err(io::Error::other)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), max_bytes)
            .collect()
            .await
            .map_err(io::Error::other)?;
        Ok((status, body.to_bytes()))
    };
    // The connection ends with its sender. The result of the exchange contains any error of the
    // connection.
    let (result, _connection_over) = tokio::join!(exchange, connection);
    result
}

/// Readiness by named blocks. The process is ready when no block exists.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Arc<Mutex<ReadinessState>>);

/// The component that blocks readiness in a drain.
const DRAINING: &str = "draining";

#[derive(Debug, Default)]
struct ReadinessState {
    pending: BTreeSet<&'static str>,
    done: BTreeSet<&'static str>,
    /// The lines of a component, and since when it has had some.
    conditions: BTreeMap<&'static str, (SystemTime, Vec<String>)>,
}

impl Readiness {
    /// Blocks readiness until the returned value is dropped.
    pub fn block(&self, component: &'static str) -> ReadinessBlock {
        self.change(|state| {
            state.pending.insert(component);
            state.done.remove(component);
        });
        ReadinessBlock {
            readiness: self.clone(),
            component,
        }
    }

    /// Blocks readiness while the process drains, which ends no stream: [`Self::is_serving`] does not
    /// change.
    pub fn drain(&self) -> ReadinessBlock {
        self.block(DRAINING)
    }

    /// Returns whether nothing but a drain blocks readiness.
    pub fn is_serving(&self) -> bool {
        self.0.lock().pending.iter().all(|name| *name == DRAINING)
    }

    /// Returns the components that still block readiness, and those that are ready.
    pub fn read(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let state = self.0.lock();
        (
            state.pending.iter().copied().collect(),
            state.done.iter().copied().collect(),
        )
    }

    /// Sets the conditions of a component, one line each. Conditions inform an operator and do not
    /// block readiness. The call replaces the component's previous conditions.
    pub fn set_conditions(&self, component: &'static str, lines: Vec<String>) {
        self.change(|state| {
            if lines.is_empty() {
                state.conditions.remove(component);
            } else {
                let conditions = state.conditions.entry(component);
                conditions
                    .or_insert_with(|| (SystemTime::now(), Vec::new()))
                    .1 = lines;
            }
        });
    }

    /// Sets the conditions of a component, and logs each line that is new, and the end of the last one.
    pub fn report_conditions(&self, component: &'static str, lines: Vec<String>) {
        let before = self.conditions_of(component);
        if before == lines {
            return;
        }
        for line in lines.iter().filter(|line| !before.contains(line)) {
            warn!(condition = component, "{line}");
        }
        if lines.is_empty() {
            info!(condition = component, "condition cleared");
        }
        self.set_conditions(component, lines);
    }

    /// Returns the conditions of a component, one line each.
    pub fn conditions_of(&self, component: &str) -> Vec<String> {
        let state = self.0.lock();
        let conditions = state.conditions.get(component);
        conditions.map_or_else(Vec::new, |(_since, lines)| lines.clone())
    }

    /// Returns the time since which a component has had conditions.
    pub fn condition_since(&self, component: &str) -> Option<SystemTime> {
        let state = self.0.lock();
        state
            .conditions
            .get(component)
            .map(|(since, _lines)| *since)
    }

    /// Returns all conditions with their components, one entry for each line; those of the audit
    /// log among them.
    pub fn conditions(&self) -> Vec<(&'static str, String)> {
        let state = self.0.lock();
        let conditions = state.conditions.iter();
        conditions
            .flat_map(|(component, (_since, lines))| {
                lines.iter().map(|line| (*component, line.clone()))
            })
            .chain(audit_condition().map(|line| (AUDIT, line)))
            .collect()
    }

    fn change(&self, change: impl FnOnce(&mut ReadinessState)) {
        change(&mut self.0.lock());
    }
}

/// Component of the condition of the audit log.
const AUDIT: &str = "audit";

/// Encodes the number of lines of each condition. Conditions that are cleared have no series, and a
/// gauge without series is left out.
impl Collector for Readiness {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut counts = BTreeMap::new();
        for (component, _line) in self.conditions() {
            *counts.entry(component).or_insert(0_i64) += 1;
        }
        if counts.is_empty() {
            return Ok(());
        }
        let help = "Lines of each condition in /readyz?verbose";
        let mut family =
            encoder.encode_descriptor("tunnel_conditions", help, None, MetricType::Gauge)?;
        for (component, count) in counts {
            let labels = [("condition", component)];
            ConstGauge::new(count).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

/// A guard that blocks readiness, see [`Readiness::block`].
#[derive(Debug)]
pub struct ReadinessBlock {
    readiness: Readiness,
    component: &'static str,
}

impl Drop for ReadinessBlock {
    fn drop(&mut self) {
        self.readiness.change(|state| {
            state.pending.remove(self.component);
            state.done.insert(self.component);
        });
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::{Instant, sleep, timeout};

    use super::*;
    use crate::scratch::ScratchDir;

    #[tokio::test]
    async fn readiness_is_answered_and_can_be_asked_for() {
        let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
        let block = readiness.block("session");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Meta::new(readiness.clone(), Registry::default()).start(listener, &shutdown);
        let (status, body) = get(address, "/readyz?verbose").await.unwrap();
        assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(body, "[-] session\nnot ready\n");
        drop(block);
        readiness.set_conditions("ports", vec!["\"abc\" is no port".into()]);
        let since = readiness.condition_since("ports");
        readiness.report_conditions("ports", vec!["\"abc\" is no port".into()]);
        assert!(since.is_some() && readiness.condition_since("ports") == since);
        assert_eq!(readiness.conditions_of("ports"), ["\"abc\" is no port"]);
        let (status, body) = get(address, "/readyz?verbose").await.unwrap();
        assert_eq!(status, StatusCode::OK);
        assert_eq!(body, "[+] session\n[!] ports: \"abc\" is no port\nok\n");
        let (_, metrics) = get(address, "/metrics").await.unwrap();
        assert!(metrics.contains("tunnel_conditions{condition=\"ports\"} 1\n"));
        readiness.report_conditions("ports", Vec::new());
        assert_eq!(readiness.condition_since("ports"), None);
        let (status, body) = get(address, "/readyz").await.unwrap();
        assert_eq!((status, body.as_str()), (StatusCode::OK, "ok\n"));
        let (_, metrics) = get(address, "/metrics").await.unwrap();
        assert!(!metrics.contains("tunnel_conditions"), "{metrics}");
        assert_eq!(get(address, "/x").await.unwrap().0, StatusCode::NOT_FOUND);
        shutdown.finish().await;
        assert!(get(address, "/readyz").await.is_err());
    }

    /// The probe of the manifests: kube-proxy deletes the UDP connections of endpoints that do not
    /// serve.
    #[tokio::test]
    async fn a_process_that_drains_is_not_ready_and_serves() {
        let (readiness, shutdown) = (Readiness::default(), Shutdown::new());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        Meta::new(readiness.clone(), Registry::default()).start(listener, &shutdown);
        let status = async |path| get(address, path).await.unwrap().0;
        let starting = readiness.block("nodes");
        assert_eq!(status("/servingz").await, StatusCode::SERVICE_UNAVAILABLE);
        drop(starting);
        assert_eq!(status("/servingz").await, StatusCode::OK);
        let draining = readiness.drain();
        assert_eq!(status("/readyz").await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(status("/servingz").await, StatusCode::OK);
        let _other = readiness.block("ca");
        assert_eq!(status("/servingz").await, StatusCode::SERVICE_UNAVAILABLE);
        drop(draining);
        for verbose in ["verbose", "verbose=", "verbose=1", "timeout=1s&verbose"] {
            let (_, body) = get(address, format!("/readyz?{verbose}").as_str())
                .await
                .unwrap();
            assert!(body.contains("[-] ca\n"), "{verbose}: {body}");
        }
        let (_, body) = get(address, "/readyz?verbosely").await.unwrap();
        assert_eq!(body, "not ready\n");
    }

    #[tokio::test]
    async fn unix_socket_answers_until_the_end_and_the_port_until_listeners_close() {
        let shutdown = Shutdown::new();
        let scratch = ScratchDir::new().unwrap();
        let folder = scratch.path();
        let socket = MetaAddress::Unix(folder.join("meta.sock"));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = MetaAddress::from(listener.local_addr().unwrap());
        let meta = Meta::new(Readiness::default(), Registry::default());
        let done = || -> BoxFuture<'static, FullResponse> {
            Box::pin(async { text(StatusCode::OK, "done\n") })
        };
        let server = meta.with_action("/act", Box::new(done));
        let server = server.into_server(&shutdown);
        server.listen(listener);
        let path = folder.join("meta.sock");
        server.listen_unix(&path).unwrap();
        for address in [&socket, &port] {
            let answer = address.get("/livez").await.unwrap();
            assert_eq!(answer, (StatusCode::OK, "ok\n".to_owned()), "{address}");
            let (status, _) = address.get("/act").await.unwrap();
            assert_eq!(status, StatusCode::NOT_FOUND, "a GET takes no action");
        }
        // Callers over the tunnel reach the port.
        let MetaAddress::Tcp(address) = port else {
            panic!("{port}")
        };
        let tcp = TcpStream::connect(address).await.unwrap();
        let (status, _) = exchange(tcp, Method::POST, "a", "/act").await.unwrap();
        assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
        let done = act(&path, "/act").await.unwrap();
        assert_eq!(done, (StatusCode::OK, "done\n".to_owned()));
        shutdown.close_listeners().await;
        assert!(port.get("/livez").await.is_err());
        assert!(socket.get("/readyz").await.is_ok());
        shutdown.finish().await;
        assert!(socket.get("/livez").await.is_err());
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    }

    /// A meta port with the endpoint `/list`.
    struct Fixture {
        address: SocketAddr,
        shutdown: Shutdown,
    }

    impl Fixture {
        async fn start(make: impl Fn() -> FullResponse + Send + Sync + 'static) -> Self {
            let shutdown = Shutdown::new();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let make = Arc::new(make);
            Meta::new(Readiness::default(), Registry::default())
                .with(
                    "/list",
                    Box::new(move |request| {
                        let make = make.clone();
                        EndpointAnswer::Document {
                            variant: request.query.to_owned(),
                            make: Box::new(move || make()),
                        }
                    }),
                )
                .start(listener, &shutdown);
            Self { address, shutdown }
        }

        async fn connect(&self, request: &str) -> TcpStream {
            let mut socket = TcpStream::connect(self.address).await.unwrap();
            socket.write_all(request.as_bytes()).await.unwrap();
            socket
        }
    }

    /// A body that counts how many responses still exist.
    fn counted(exists: &Arc<()>, bytes: usize) -> FullResponse {
        struct Counted(Vec<u8>, #[expect(dead_code, reason = "counts")] Arc<()>);
        impl AsRef<[u8]> for Counted {
            fn as_ref(&self) -> &[u8] {
                &self.0
            }
        }
        let body = Counted(vec![b'x'; bytes], exists.clone());
        text(StatusCode::OK, Bytes::from_owner(body))
    }

    const LIST: &str = "GET /list HTTP/1.1\r\nHost: meta\r\n\r\n";

    #[tokio::test]
    async fn probe_is_answered_while_a_document_is_made() {
        let (began, begun) = std::sync::mpsc::channel();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = Mutex::new(ends);
        let fixture = Fixture::start(move || {
            // Only the first one is awaited.
            let _awaited = began.send(());
            let _ended: Result<(), _> = ends.lock().recv();
            text(StatusCode::OK, "made")
        })
        .await;
        let mut readers = Vec::new();
        for _ in 0..10 {
            readers.push(fixture.connect(LIST).await);
        }
        let begun = tokio::task::spawn_blocking(move || begun.recv());
        begun.await.unwrap().unwrap();
        let livez = get(fixture.address, "/livez").await.unwrap();
        assert_eq!(livez, (StatusCode::OK, "ok\n".to_owned()));
        drop(end);
        for mut reader in readers {
            let mut answer = String::new();
            reader.read_to_string(&mut answer).await.unwrap();
            assert!(answer.ends_with("\r\n\r\nmade"), "{answer}");
        }
    }

    #[tokio::test]
    async fn one_request_of_a_pipeline_is_answered() {
        let fixture = Fixture::start(|| text(StatusCode::OK, "made")).await;
        let mut caller = fixture.connect(&LIST.repeat(2)).await;
        let mut answers = Vec::new();
        // Unread requests may end the connection with a reset.
        let _reset = caller.read_to_end(&mut answers).await;
        let answers = String::from_utf8(answers).unwrap();
        assert_eq!(answers.matches("HTTP/1.1 200").count(), 1, "{answers}");
        assert!(answers.contains("connection: close"), "{answers}");
    }

    #[tokio::test(start_paused = true)]
    async fn caller_that_does_not_read_holds_a_document_for_30_s() {
        let exists = Arc::new(());
        let of_endpoint = exists.clone();
        let fixture = Fixture::start(move || counted(&of_endpoint, BYTES)).await;
        let begin = Instant::now();
        let mut reader = fixture.connect(LIST).await;
        reader.readable().await.unwrap();
        assert_eq!(Arc::strong_count(&exists), 3, "made and sent");
        while Arc::strong_count(&exists) > 2 {
            sleep(Duration::from_secs(1)).await;
        }
        let held = begin.elapsed();
        assert!(held > Duration::from_secs(5), "{held:?}");
        assert!(held <= STALL_TIMEOUT + Duration::from_secs(2), "{held:?}");
        let mut received = Vec::new();
        let _cut = reader.read_to_end(&mut received).await;
        assert!(received.len() < BYTES, "{} bytes", received.len());
        fixture.shutdown.finish().await;
    }

    #[tokio::test]
    async fn documents_of_callers_that_do_not_read_have_bounded_memory() {
        let exists = Arc::new(());
        let of_endpoint = exists.clone();
        let fixture = Fixture::start(move || counted(&of_endpoint, BYTES)).await;
        let mut readers = Vec::new();
        for number in 0..12 {
            let request = format!("GET /list?{number} HTTP/1.1\r\nHost: meta\r\n\r\n");
            let reader = fixture.connect(&request).await;
            reader.readable().await.unwrap();
            readers.push(reader);
        }
        // Evicted connections end in tasks of their own.
        let bound = timeout(Duration::from_secs(20), async {
            while Arc::strong_count(&exists) > 2 + documents::DOCUMENTS_MIN {
                tokio::task::yield_now().await;
            }
        });
        bound.await.unwrap();
        let mut last = readers.pop().unwrap();
        let mut received = Vec::new();
        last.read_to_end(&mut received).await.unwrap();
        assert!(received.len() > BYTES, "the newest one is complete");
    }

    /// More than the kernel buffers for a caller.
    const BYTES: usize = 16 * 1024 * 1024;

    #[test]
    fn readiness_waits_for_every_block() {
        let readiness = Readiness::default();
        let first = readiness.block("listeners");
        let second = readiness.block("session");
        drop(first);
        assert_eq!(readiness.read(), (vec!["session"], vec!["listeners"]));
        drop(second);
        assert!(readiness.read().0.is_empty());
        let _again = readiness.block("session");
        assert_eq!(readiness.read().0, ["session"]);
    }
}
