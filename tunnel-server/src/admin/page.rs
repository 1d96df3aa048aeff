//! The status page: nodes, other servers and conditions as HTML or JSON, over HTTP/1.1. Read-only,
//! without scripts and cookies. On a loopback address there is no TLS; elsewhere each caller needs
//! a client certificate, or a name and a password.

use std::borrow::Cow;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::ServerConnection;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};
use tunnel_process::conn_limiter::{ConnLimits, source};
use tunnel_process::making;
use tunnel_process::meta::{FullResponse, Readiness};
use tunnel_process::schema::SCHEMA_VERSION;
use tunnel_process::serve_bounded::serve_bounded;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::{CallerError, caller_name};
use tunnel_proto::wire::name::NodeName;

use crate::admin::failures::FailureStatus;
use crate::admin::status::{NodeSources, NodeStatus, NodeTotals};
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::connect::basic_auth::{BasicAuth, BasicAuthError, Credentials};
use crate::ingress::recent_requests::RecentRequests;
use crate::routing::peers::Peers;
use crate::routing::registry::Registry;
use tunnel_store::data_dir::rfc3339;

mod facts;
mod html;
mod request;
mod throughput;
mod visible;

use facts::{
    ConditionFacts, ConditionsDocument, Document, FailureFacts, NodeDocument, NodeFacts,
    NodesDocument, ServersDocument, TotalFacts,
};
use html::PageHead;
use request::{Format, NodesQuery, PageAccess, PageRefusal, PageRequest, View};
use throughput::ThroughputSampler;
use visible::VisibleText;

/// What the status page reads.
pub(crate) struct PageSources {
    pub(crate) nodes: Box<dyn PageNodes>,
    pub(crate) registry: Arc<Registry>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) readiness: Readiness,
    pub(crate) recent: Arc<RecentRequests>,
    /// TLS, or `None` on a loopback address.
    pub(crate) tls: Option<Arc<ListenerTls>>,
    /// Passwords of callers without a certificate.
    pub(crate) passwords: Option<Arc<BasicAuth>>,
}

/// The nodes that the status page shows.
pub(crate) trait PageNodes: Send + Sync {
    /// Returns the status of all nodes, ordered by name, without holding that of many.
    fn all(&self) -> Box<dyn Iterator<Item = Cow<'_, NodeStatus>> + '_>;

    fn of_node(&self, name: &NodeName) -> Option<NodeStatus>;

    /// Returns what failed at agents, the last one first.
    fn failures(&self) -> Vec<FailureStatus>;
}

impl PageNodes for NodeSources {
    fn all(&self) -> Box<dyn Iterator<Item = Cow<'_, NodeStatus>> + '_> {
        Box::new(self.batches().flatten().map(Cow::Owned))
    }

    fn of_node(&self, name: &NodeName) -> Option<NodeStatus> {
        self.of_node(name)
    }

    fn failures(&self) -> Vec<FailureStatus> {
        self.failures()
    }
}

/// The status page of a running server.
struct StatusPage {
    sources: PageSources,
    throughput: Arc<ThroughputSampler>,
}

/// The caller of one connection.
struct PageCaller {
    access: PageAccess,
    source: IpAddr,
    /// The last credentials that were accepted on the connection.
    credentials: Mutex<Option<Credentials>>,
}

impl PageCaller {
    fn new(access: PageAccess, peer: SocketAddr) -> Self {
        Self {
            access,
            source: source(peer.ip()),
            credentials: Mutex::default(),
        }
    }
}

/// Serves the status page on `listener` until `stop`.
pub(crate) fn start(sources: PageSources, listener: TcpListener, shutdown: &Shutdown) {
    let page = Arc::new(StatusPage::new(sources));
    page.throughput.start(shutdown);
    serve_bounded(
        listener,
        "status",
        CONN_LIMITS,
        shutdown,
        move |socket, peer| {
            let serving = Box::pin(serve(page.clone(), socket, peer));
            async move {
                if timeout(CONNECTION_TIMEOUT, serving).await.is_err() {
                    debug!(%peer, "status connection closed after its time limit");
                }
            }
        },
    );
}

async fn serve(page: Arc<StatusPage>, socket: TcpStream, peer: SocketAddr) {
    let Some(tls) = page.sources.tls.clone() else {
        let caller = PageCaller::new(PageAccess::Loopback, peer);
        return serve_http(page, socket, caller).await;
    };
    let handshake = TlsAcceptor::from(tls.config()).accept(socket);
    match timeout(HEAD_TIMEOUT, handshake).await {
        Ok(Ok(stream)) => {
            let access = access_over_tls(stream.get_ref().1, page.sources.passwords.is_some());
            serve_http(page, stream, PageCaller::new(access, peer)).await;
        }
        Ok(Err(error)) => debug!(%error, %peer, "TLS handshake of a status connection failed"),
        Err(_elapsed) => debug!(%peer, "TLS handshake of a status connection timed out"),
    }
}

/// Returns how a caller may use the page after a handshake. TLS has verified the certificate.
fn access_over_tls(tls: &ServerConnection, has_passwords: bool) -> PageAccess {
    let leaf = tls.peer_certificates().and_then(<[_]>::first);
    if leaf.is_none() && has_passwords {
        return PageAccess::Password;
    }
    match leaf.map_or(Err(CallerError::NoSingleName), caller_name) {
        Ok(_name) => PageAccess::Certificate,
        Err(error) => PageAccess::NoCaller(error),
    }
}

async fn serve_http<S>(page: Arc<StatusPage>, stream: S, caller: PageCaller)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let service = service_fn(async |request: Request<Incoming>| {
        let (head, _body) = request.into_parts();
        Ok::<_, Infallible>(answer(&page, head, &caller).await)
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_header_size(HEAD_MAX_BYTES);
    if let Err(error) = server.serve_connection(TokioIo::new(stream), service).await {
        debug!(%error, "status connection ended");
    }
}

/// Answers a request. Rendering takes milliseconds with many nodes.
async fn answer(page: &Arc<StatusPage>, head: Parts, caller: &PageCaller) -> FullResponse {
    let admitted = page.authenticate(&head.headers, caller);
    let parsed = admitted.and_then(|()| PageRequest::parse(&head, caller.access));
    let rendered = match parsed {
        Ok(page_request) => {
            let page = page.clone();
            let mut permit = making::acquire(caller.source).await;
            permit.pause().await;
            let rendering = permit.make(move || page.render(&page_request));
            rendering.await.unwrap_or_else(|error| {
                warn!(%error, "cannot render the status page");
                Err(PageRefusal::Render)
            })
        }
        Err(refusal) => Err(refusal),
    };
    rendered.unwrap_or_else(|refusal| {
        let text = format!("{refusal}\n");
        let mut response = response("text/plain; charset=utf-8", text);
        *response.status_mut() = refusal.status();
        if let Some((name, value)) = refusal.header() {
            response.headers_mut().insert(name, value);
        }
        response
    })
}

impl StatusPage {
    fn new(sources: PageSources) -> Self {
        Self {
            throughput: Arc::new(ThroughputSampler::new(sources.registry.clone())),
            sources,
        }
    }

    /// Checks the name and the password of a request from a caller without a certificate.
    fn authenticate(&self, headers: &HeaderMap, caller: &PageCaller) -> Result<(), PageRefusal> {
        let needs_password = match caller.access {
            PageAccess::Loopback | PageAccess::Password => true,
            PageAccess::Certificate | PageAccess::NoCaller(_) => false,
        };
        let Some(passwords) = self.sources.passwords.as_ref().filter(|_| needs_password) else {
            return Ok(());
        };
        let shown = &caller.credentials;
        match passwords.authenticate(AUTHORIZATION, headers, caller.source, shown) {
            Ok(_user) => Ok(()),
            Err(BasicAuthError::Missing | BasicAuthError::Wrong) => Err(PageRefusal::Password),
            Err(BasicAuthError::Throttled(left)) => Err(PageRefusal::Throttled(left.as_secs() + 1)),
        }
    }

    /// Renders a page. Blocks the thread.
    fn render(&self, page_request: &PageRequest) -> Result<FullResponse, PageRefusal> {
        let document = match &page_request.view {
            View::Style => return Ok(response("text/css; charset=utf-8", STYLE)),
            View::Nodes(query) => Document::Nodes(self.nodes(query)),
            View::Node(name) => Document::Node(Box::new(self.node(name)?)),
            View::Servers => Document::Servers(self.servers()),
            View::Conditions => Document::Conditions(self.conditions()),
        };
        match page_request.format {
            Format::Json => {
                let text = serde_json::to_string(&document).map_err(|error| cannot(&error))?;
                Ok(response("application/json", format!("{text}\n")))
            }
            Format::Html => {
                let own = self.sources.peers.own().to_string();
                let head = PageHead::new(&own, rfc3339(SystemTime::now()));
                let text = html::render(&document, head).map_err(|error| cannot(&error))?;
                Ok(response("text/html; charset=utf-8", text))
            }
        }
    }

    fn nodes(&self, query: &NodesQuery) -> NodesDocument {
        let (mut totals, mut streams) = (NodeTotals::default(), 0);
        let nodes = self.sources.nodes.all().inspect(|node| {
            totals.add(node);
            streams += node.streams;
        });
        let page = facts::nodes_page(nodes, query);
        let nodes = page.nodes.into_iter();
        NodesDocument {
            schema_version: SCHEMA_VERSION,
            search: query.search.clone(),
            matching: page.matching,
            page: page.page,
            pages: page.pages,
            nodes: nodes.map(|node| self.facts(node.into_owned())).collect(),
            totals: TotalFacts {
                nodes: totals,
                streams,
                throughput: self.throughput.total(),
            },
        }
    }

    fn node(&self, name: &NodeName) -> Result<NodeDocument, PageRefusal> {
        let status = self.sources.nodes.of_node(name);
        let requests = self.sources.recent.of_node(name).into_iter();
        Ok(NodeDocument {
            schema_version: SCHEMA_VERSION,
            node: self.facts(status.ok_or(PageRefusal::UnknownNode)?),
            requests: requests.map(Into::into).collect(),
        })
    }

    fn servers(&self) -> ServersDocument {
        let peers = &self.sources.peers;
        ServersDocument {
            schema_version: SCHEMA_VERSION,
            own: peers.own().to_string(),
            servers: peers.status().into_iter().map(Into::into).collect(),
        }
    }

    fn conditions(&self) -> ConditionsDocument {
        let readiness = &self.sources.readiness;
        let conditions = readiness.conditions().into_iter();
        ConditionsDocument {
            schema_version: SCHEMA_VERSION,
            blocking: readiness.read().0,
            failures: (self.sources.nodes.failures().into_iter())
                .map(FailureFacts)
                .collect(),
            conditions: conditions
                .map(|(component, text)| ConditionFacts {
                    component,
                    text: VisibleText::new(text),
                })
                .collect(),
        }
    }

    fn facts(&self, status: NodeStatus) -> NodeFacts {
        let name = status.node.parse::<NodeName>().ok();
        let errors = name.as_ref().map(|name| self.sources.recent.errors(name));
        let errors = errors.into_iter().flatten();
        NodeFacts {
            status,
            throughput: name.and_then(|name| self.throughput.of_node(&name)),
            errors: errors
                .map(|(outcome, count)| (outcome.label(), count))
                .collect(),
        }
    }
}

fn cannot(error: &dyn std::error::Error) -> PageRefusal {
    warn!(%error, "cannot render the status page");
    PageRefusal::Render
}

/// Returns a response that loads nothing but the style sheet, is in no frame and in no cache.
fn response(content_type: &'static str, body: impl Into<Bytes>) -> FullResponse {
    let mut response = Response::new(Full::new(body.into()));
    let fields: [(HeaderName, &'static str); 6] = [
        (CONTENT_TYPE, content_type),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (VARY, "Accept"),
    ];
    for (name, value) in fields {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}

const POLICY: &str = "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; \
                      frame-ancestors 'none'";
const STYLE: &str = include_str!("../../templates/style.css");
/// Maximum number of connections. At the limit, newer connections evict the oldest. A browser opens
/// up to six.
const CONN_LIMITS: ConnLimits = ConnLimits {
    per_source: 16,
    total: 32,
};
/// Maximum time of a TLS handshake, and for a caller to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a connection. A page of 200 nodes is about 200 KB, which a slow link carries in
/// this time.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
const HEAD_MAX_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests;
