//! The console: the installation, its nodes, servers and conditions as HTML or JSON, over HTTP/1.1.
//! Read-only, with one script and without cookies. On a loopback address there is no TLS; elsewhere
//! each caller needs a client certificate, or a name and a password.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
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
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};
use tunnel_process::conn_limiter::{ConnLimits, source};
use tunnel_process::making;
use tunnel_process::meta::{FullResponse, Readiness};
use tunnel_process::schema::SCHEMA_VERSION;
use tunnel_process::serve_bounded::serve_bounded;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::{CallerError, caller_name};
use tunnel_proto::wire::name::{NodeName, ReplicaId};

use crate::admin::failures::FailureStatus;
use crate::admin::status::{ListedNode, NodeSort, NodeSources, NodeState, NodeStatus};
use crate::admin::traffic::{NodeTraffic, Traffic, TrafficFigures};
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::connect::basic_auth::{BasicAuth, BasicAuthError, Credentials};
use crate::ingress::recent_requests::RecentRequests;
use crate::routing::peers::{PeerStatus, Peers};
use tunnel_store::data_dir::rfc3339;

mod facts;
mod html;
mod picture;
mod plot;
mod query;
mod request;
mod survey;
mod text;
mod visible;

use facts::{
    ConditionFacts, ConditionsDocument, Document, FailingFacts, HistoryFacts, NeedingFacts,
    NeedingState, NodeDocument, NodeFacts, NodesDocument, OverviewDocument, SERVER, SERVER_STATE,
    ServerFacts, ServersDocument, TotalFacts,
};
use html::PageHead;
use query::NodesQuery;
use request::{Format, PageAccess, PageRefusal, PageRequest, View};
use survey::{NeedingNodes, Survey, SurveyPass};
use visible::VisibleText;

/// What the console reads.
pub(crate) struct PageSources {
    pub(crate) nodes: Box<dyn PageNodes>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) peers: Arc<Peers>,
    pub(crate) readiness: Readiness,
    pub(crate) recent: Arc<RecentRequests>,
    /// TLS, or `None` on a loopback address.
    pub(crate) tls: Option<Arc<ListenerTls>>,
    /// Passwords of callers without a certificate.
    pub(crate) passwords: Option<Arc<BasicAuth>>,
}

/// The nodes that the console shows.
pub(crate) trait PageNodes: Send + Sync {
    /// Calls `each` with every node and its figures.
    fn for_each(&self, figures: &TrafficFigures<'_>, each: &mut EachNode<'_>);

    /// Returns the status of the node with a name from [`PageNodes::for_each`].
    fn named(&self, name: &str) -> Option<NodeStatus>;

    /// Returns what failed at agents, the last one first.
    fn failures(&self) -> Vec<FailureStatus>;
}

/// What is done with each node of a list.
pub(crate) type EachNode<'a> = dyn FnMut(&dyn ListedNode, Option<NodeTraffic>) + 'a;

impl PageNodes for NodeSources {
    fn for_each(&self, figures: &TrafficFigures<'_>, each: &mut EachNode<'_>) {
        self.view()
            .for_each(|node| each(node, node.figures(figures)));
    }

    fn named(&self, name: &str) -> Option<NodeStatus> {
        self.of_node(&name.parse().ok()?)
    }

    fn failures(&self) -> Vec<FailureStatus> {
        self.failures()
    }
}

/// The console of a running server.
struct Console {
    sources: PageSources,
    /// Number of entries that need somebody, as of the last sample. The pages without a list of them have
    /// it from here, so that the page of one node costs no pass over all nodes.
    needs: AtomicUsize,
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

/// Serves the console on `listener` until `stop`.
pub(crate) fn start(sources: PageSources, listener: TcpListener, shutdown: &Shutdown) {
    let page = Arc::new(Console::new(sources));
    let sampled = page.clone();
    shutdown.spawn_service(async move {
        let mut ticks = interval(NEEDS_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let page = sampled.clone();
            let sample = move || page.sample_needs(SystemTime::now());
            let _panicked = tokio::task::spawn_blocking(sample).await;
        }
    });
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

async fn serve(page: Arc<Console>, socket: TcpStream, peer: SocketAddr) {
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

async fn serve_http<S>(page: Arc<Console>, stream: S, caller: PageCaller)
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
async fn answer(page: &Arc<Console>, head: Parts, caller: &PageCaller) -> FullResponse {
    let admitted = page.authenticate(&head.headers, caller);
    let parsed = admitted.and_then(|()| PageRequest::parse(&head, caller.access));
    let rendered = match parsed {
        Ok(page_request) => {
            let page = page.clone();
            let mut permit = making::acquire(caller.source).await;
            permit.pause().await;
            let rendering = permit.make(move || page.render(&page_request));
            rendering.await.unwrap_or_else(|error| {
                warn!(%error, "cannot render the console");
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

impl Console {
    fn new(sources: PageSources) -> Self {
        Self {
            sources,
            needs: AtomicUsize::new(0),
        }
    }

    /// Counts what needs somebody. Blocks the thread.
    fn sample_needs(&self, now: SystemTime) {
        let needs = self.conditions(self.needing()).needs(now);
        self.needs.store(needs, Ordering::Relaxed);
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
        let mut listed = NodesQuery::default();
        let document = match &page_request.view {
            View::Style => return Ok(response("text/css; charset=utf-8", STYLE)),
            View::Script => return Ok(response("text/javascript; charset=utf-8", SCRIPT)),
            View::Overview => Document::Overview(Box::new(self.overview())),
            View::Nodes(query) => {
                let document = self.nodes(query);
                listed.clone_from(query);
                listed.page = document.page;
                Document::Nodes(Box::new(document))
            }
            View::Node(name) => Document::Node(Box::new(self.node(name)?)),
            View::Servers => Document::Servers(self.servers()),
            View::Conditions => Document::Conditions(self.conditions(self.needing())),
        };
        match page_request.format {
            Format::Json => {
                let text = serde_json::to_string(&document).map_err(|error| cannot(&error))?;
                Ok(response("application/json", format!("{text}\n")))
            }
            Format::Html => {
                let (own, now) = (self.sources.peers.own().to_string(), SystemTime::now());
                let needs = match &document {
                    Document::Overview(overview) => overview.conditions.needs(now),
                    Document::Conditions(conditions) => conditions.needs(now),
                    Document::Nodes(_) | Document::Node(_) | Document::Servers(_) => {
                        self.needs.load(Ordering::Relaxed)
                    }
                };
                let servers = self.sources.peers.expected() + 1;
                let head = PageHead::new(&own, servers, needs, now);
                let text =
                    html::render(&document, &listed, head).map_err(|error| cannot(&error))?;
                Ok(response("text/html; charset=utf-8", text))
            }
        }
    }

    fn survey(&self, query: &NodesQuery, per_page: usize) -> Survey {
        let mut pass = SurveyPass::new(query, per_page);
        let sources = &self.sources;
        let mut add = |node: &dyn ListedNode, traffic: Option<NodeTraffic>| {
            pass.add(node, traffic.as_ref());
        };
        let has_bytes = query.order.sort == NodeSort::Traffic;
        let figures = sources.traffic.figures(has_bytes);
        sources.nodes.for_each(&figures, &mut add);
        pass.finish()
    }

    fn overview(&self) -> OverviewDocument {
        let survey = self.survey(&NodesQuery::default(), OVERVIEW_NODES);
        OverviewDocument {
            schema_version: SCHEMA_VERSION,
            nodes: self.listed(&survey.names),
            totals: TotalFacts {
                nodes: survey.totals,
                streams: survey.streams,
            },
            counts: survey.counts,
            history: self.sources.traffic.minutes(HistoryFacts::new),
            servers: self.servers(),
            conditions: self.conditions(survey.needing),
        }
    }

    /// Returns the nodes whose state is a fault.
    fn needing(&self) -> NeedingNodes {
        self.survey(&NodesQuery::default(), 1).needing
    }

    fn nodes(&self, query: &NodesQuery) -> NodesDocument {
        let survey = self.survey(query, NODES_PER_PAGE);
        NodesDocument {
            schema_version: SCHEMA_VERSION,
            query: query.to_string(),
            matching: survey.matching,
            page: survey.page,
            pages: survey.pages,
            nodes: self.listed(&survey.names),
            counts: survey.counts,
            totals: TotalFacts {
                nodes: survey.totals,
                streams: survey.streams,
            },
        }
    }

    /// Returns the nodes with these names that still exist.
    fn listed(&self, names: &[String]) -> Vec<NodeFacts> {
        let nodes = names
            .iter()
            .filter_map(|name| self.sources.nodes.named(name));
        nodes.map(|status| self.facts(status)).collect()
    }

    fn node(&self, name: &NodeName) -> Result<NodeDocument, PageRefusal> {
        let status = self.sources.nodes.named(name.as_str());
        let requests = self.sources.recent.of_node(name).into_iter();
        let history = self.sources.traffic.points(name).into_iter();
        Ok(NodeDocument {
            schema_version: SCHEMA_VERSION,
            node: self.facts(status.ok_or(PageRefusal::UnknownNode)?),
            history: history.map(Into::into).collect(),
            requests: requests.map(Into::into).collect(),
        })
    }

    fn servers(&self) -> ServersDocument {
        let peers = &self.sources.peers;
        let own = ServerFacts {
            name: VisibleText::new(peers.own().as_str()),
            address: VisibleText::default(),
            state: "this",
            zone: peers
                .zone_of(peers.own())
                .map(|zone| VisibleText::new(zone.as_str())),
            nodes: self.sources.traffic.nodes(),
            since: None,
            linked: Some(names(&peers.linked())),
        };
        let reports = peers.rows.reports();
        let others = peers.status().into_iter().map(|peer| {
            let report = reports.get(&peer.id);
            let linked = report.map(|report| names(&report.linked));
            ServerFacts {
                linked,
                ..ServerFacts::from(peer)
            }
        });
        ServersDocument {
            schema_version: SCHEMA_VERSION,
            own: peers.own().to_string(),
            servers: std::iter::once(own).chain(others).collect(),
        }
    }

    /// Returns the conditions, and before them the servers that do not answer, or not each other.
    fn conditions(&self, needing: NeedingNodes) -> ConditionsDocument {
        let readiness = &self.sources.readiness;
        let peers = self.sources.peers.status();
        let (up, down): (Vec<_>, Vec<_>) = (peers.into_iter()).partition(PeerStatus::answers);
        let down = down.into_iter().map(|peer| ConditionFacts {
            since: (!peer.is_suspect).then(|| rfc3339(peer.since)),
            command: SERVER_STATE,
            host: Some(VisibleText::new(peer.id.as_str())),
            ..ConditionFacts::new(SERVER, format!("{} does not answer", peer.id))
        });
        let reports = self.sources.peers.rows.reports();
        let apart = up.iter().flat_map(|one| {
            let report = reports.get(&one.id);
            let others = up.iter().filter(|other| other.id != one.id);
            let apart = others.filter(move |other| {
                report.is_some_and(|report| !report.linked.contains(&other.id))
            });
            apart.map(|other| {
                let text = format!("{} has no connection to {}", one.id, other.id);
                ConditionFacts {
                    host: Some(VisibleText::new(one.id.as_str())),
                    ..ConditionFacts::new(SERVER, text)
                }
            })
        });
        let gone = down.chain(apart.take(APART_SHOWN));
        let conditions = readiness.conditions().into_iter();
        let conditions = conditions.map(|(component, text)| ConditionFacts {
            since: readiness.condition_since(component).map(rfc3339),
            ..ConditionFacts::new(component, text)
        });
        let needing = NodeState::ALL.into_iter().zip(needing.0);
        let needing = needing.filter(|(_, of_state)| of_state.count > 0);
        let needing = needing.map(|(state, of_state)| NeedingState {
            state: state.label(),
            count: of_state.count,
            nodes: (of_state.latest.into_iter())
                .map(|node| {
                    let status = self.sources.nodes.named(&node.node);
                    NeedingFacts::new(state, node, status.as_ref())
                })
                .collect(),
        });
        let own = self.sources.recent.failing(SystemTime::now()).into_iter();
        let own = own.map(|failing| FailingFacts::new(self.sources.peers.own(), failing));
        let others = reports.iter().flat_map(|(server, report)| {
            let failing = report.failing.iter();
            failing.map(move |failing| FailingFacts::new(server, failing.clone()))
        });
        let mut failing: Vec<_> = own.chain(others).collect();
        // Times in UTC are ordered as texts.
        failing.sort_by(|one, other| other.last.cmp(&one.last));
        failing.truncate(FAILING_SHOWN);
        ConditionsDocument {
            schema_version: SCHEMA_VERSION,
            blocking: readiness.read().0,
            conditions: gone.chain(conditions).collect(),
            failures: self.sources.nodes.failures(),
            needing: needing.collect(),
            failing,
        }
    }

    fn facts(&self, status: NodeStatus) -> NodeFacts {
        let (name, server) = names_of(&status);
        let traffic =
            (name.as_ref()).and_then(|name| self.sources.traffic.of_node(name, server.as_ref()));
        let errors = name.as_ref().map(|name| self.sources.recent.errors(name));
        let errors = errors.into_iter().flatten();
        NodeFacts {
            status,
            traffic,
            errors: errors
                .map(|(outcome, count)| (outcome.label(), count))
                .collect(),
        }
    }
}

/// Returns the names of a node and of the server that carries requests to it.
fn names_of(status: &NodeStatus) -> (Option<NodeName>, Option<ReplicaId>) {
    let server = status.replica.as_ref();
    let server = server.and_then(|server| server.parse().ok());
    (status.node.parse().ok(), server)
}

fn names(servers: &[ReplicaId]) -> Vec<String> {
    servers.iter().map(ToString::to_string).collect()
}

fn cannot(error: &dyn std::error::Error) -> PageRefusal {
    warn!(%error, "cannot render the console");
    PageRefusal::Render
}

/// Returns a response that loads nothing but the style sheet and the script of the console, is in no
/// frame and in no cache.
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

const POLICY: &str = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; \
                      form-action 'self'; base-uri 'none'; frame-ancestors 'none'";
const STYLE: &str = include_str!("../../templates/style.css");
const SCRIPT: &str = include_str!("../../templates/script.js");
/// Nodes of one page of the list: less than 40 KiB without plots.
const NODES_PER_PAGE: usize = 40;
const OVERVIEW_NODES: usize = 20;
/// Entries of requests that fail on a page.
const FAILING_SHOWN: usize = 32;
/// Missing connections between other servers that are conditions.
const APART_SHOWN: usize = 8;
/// Time between two counts of what needs somebody. A page reloads as often.
const NEEDS_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum number of connections. At the limit, newer connections evict the oldest. A browser opens
/// up to six.
const CONN_LIMITS: ConnLimits = ConnLimits {
    per_source: 16,
    total: 32,
};
/// Maximum time of a TLS handshake, and for a caller to send its request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a connection. A page is about 60 KB, which a slow link carries in this time. A
/// browser that reloads a page makes a new connection then.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(60);
const HEAD_MAX_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests;
