//! The admin socket: an HTTP/1.1 API with JSON on a Unix socket that only the server's user can
//! open. The command-line verbs use it to control a running server.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, info, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::files;
use tunnel_process::meta::{FullResponse, json, text};
use tunnel_process::shutdown::Shutdown;
use tunnel_process::unix_socket::{self, OWNER_ONLY};
use tunnel_proto::wire::name::{NodeName, ReplicaId};
use tunnel_proto::wire::node_certificate::NodeCertificate;

use crate::admin::configuration::RunningConfig;
use crate::admin::pages::{NamedNodes, PAGE_MAX, PageQuery, revocations_page};
use crate::admin::status::NodeSources;
use crate::dry_run::DryRunReport;
use crate::ingress::connect::AdminTunnels;
use crate::routing::peers::{FetchError, Peers};
use tunnel_ca::LocalCa;
use tunnel_ca::revocation::{OrderAction, Revocations};
use tunnel_ca::rotation::{CaRotator, OtherAgents, RotationAction, RotationError, RotationStatus};
use tunnel_ca::tokens::{CreateTokenError, TokenStore};
use tunnel_store::data_dir::DataDir;
use tunnel_store::known_nodes::KnownNodes;

mod client;
pub mod configuration;
pub mod discovery;
pub mod doctor;
pub mod failures;
pub(crate) mod json_list;
mod message;
pub(crate) mod node_metrics;
pub(crate) mod page;
pub mod pages;
pub mod ping;
pub mod policy;
pub mod render;
pub mod status;
pub(crate) mod traffic;
pub mod verbs;

pub use client::{AdminClient, AdminError};
pub use message::{
    AgentCommand, ApproveOutcome, CreateToken, CreatedToken, ErrorBody, ForgetOutcome, NodesOrder,
    OrderOutcome, RevocationInfo, RunningServer, TokenNodes, TokenNodesError, agent_command,
};
#[cfg(feature = "test-util")]
pub use node_metrics::ExampleNodeMetrics;

#[derive(Clone)]
pub struct AdminState {
    /// CA whose certificate is served.
    pub ca: Arc<LocalCa>,
    /// Join tokens to create, list and revoke.
    pub tokens: Arc<TokenStore>,
    /// Known nodes to record and forget.
    pub nodes: Arc<KnownNodes>,
    /// Orders of operators about nodes.
    pub revocations: Arc<Revocations>,
    /// Other servers, at which orders are in force, too.
    pub peers: Arc<Peers>,
    pub rotator: Result<Arc<CaRotator>, NoRotation>,
    /// The status of nodes.
    pub sources: NodeSources,
    /// Keys of the Nodes' labels that the list has.
    pub node_labels: Vec<String>,
    /// Addresses that agents should dial, HOST:PORT.
    pub advertised: Vec<String>,
    /// Whether tokens can be exchanged for certificates; `false` with `--agent-ca`.
    pub can_issue: bool,
    /// Tunnels to nodes, for `connect`.
    pub tunnels: Option<AdminTunnels>,
    /// The settings in use, and the last reading of their file.
    pub configuration: RunningConfig,
    /// What the dry run of rules has found.
    pub dry_run: DryRunReport,
}

/// The reason why a server does not rotate its CA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoRotation {
    /// The CA of an operator issues the agents' certificates.
    #[error(
        "this server runs with --agent-ca, and agents do not use its CA: see docs/how-to/own-certificates.md"
    )]
    OwnCertificates,
}

tunnel_process::partial_debug!(AdminState { advertised });

/// Serves the admin socket of a data directory until `stop`, then removes it. A socket left behind
/// by a dead server is replaced. Where nothing can be written, the socket is created as soon as that
/// is possible. Must be called within a runtime.
///
/// # Errors
/// Returns an error with the path if another server answers on the socket, or if the socket cannot
/// be created.
pub fn start(state: AdminState, dir: &DataDir, shutdown: &Shutdown) -> io::Result<()> {
    let path = dir.admin_socket();
    let bound = match unix_socket::bind(&path, OWNER_ONLY) {
        Err(error) if files::is_unwritable(&error) => {
            warn!(%error, "cannot create the admin socket, so commands do not reach this server; trying again");
            None
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let problem = "another tunnel-server runs with this data directory";
            let text = format!("{}: {problem}", path.display());
            return Err(io::Error::new(error.kind(), text));
        }
        bound => Some(bound?),
    };
    let state = Arc::new(state);
    let tasks = shutdown.clone();
    shutdown.spawn_listener(async move {
        let (listener, socket) = match bound {
            Some(bound) => bound,
            None => {
                let bound = unix_socket::bind_when_possible(&path, OWNER_ONLY).await;
                info!(path = %path.display(), "commands reach this server again");
                bound
            }
        };
        let _removed_at_the_end = socket;
        let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut accepting = RetryingListener::new(listener, "admin");
        while let Ok(permit) = permits.clone().acquire_owned().await {
            let socket = accepting.accept().await;
            let state = state.clone();
            tasks.spawn_service(async move {
                serve(state, socket).await;
                drop(permit);
            });
        }
    });
    Ok(())
}

async fn serve(state: Arc<AdminState>, socket: UnixStream) {
    if !unix_socket::is_of_owner(&socket) {
        return debug!("admin connection of another user refused");
    }
    let user = socket.peer_cred().map(|user| user.uid());
    let service = service_fn(async |request: Request<Incoming>| {
        if let (&Method::CONNECT, Some(tunnels)) = (request.method(), &state.tunnels) {
            return Ok(tunnels.answer(request, user.as_ref().ok().copied()).await);
        }
        let answered = answer(&state, request).await;
        Ok::<_, Infallible>(answered.unwrap_or_else(RequestError::into_response))
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT);
    let connection = server.serve_connection(TokioIo::new(socket), service);
    if let Err(error) = connection.with_upgrades().await {
        debug!(%error, "admin connection ended");
    }
}

async fn answer(
    state: &Arc<AdminState>,
    request: Request<Incoming>,
) -> Result<FullResponse, RequestError> {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    match (request.method().as_str(), &segments[..]) {
        ("GET", ["tokens"]) => {
            let tokens = blocking(state, |state| state.tokens.list(SystemTime::now())).await??;
            value(StatusCode::OK, &tokens)
        }
        ("POST", ["tokens"]) => {
            let token_request = read(request, BODY_MAX_BYTES).await?;
            let created = blocking(state, |state| create_token(&state, token_request)).await??;
            value(StatusCode::CREATED, &created)
        }
        ("DELETE", ["tokens", id]) => {
            let id = (*id).to_owned();
            blocking(state, move |state| revoke_token(&state, &id)).await??;
            Ok(text(StatusCode::NO_CONTENT, ""))
        }
        ("GET", ["nodes"]) => {
            let query = page_query(&request)?;
            let page = move |state: Arc<AdminState>| state.sources.page(&query);
            value(StatusCode::OK, &blocking(state, page).await?)
        }
        ("POST", ["nodes"]) => {
            let names = node_names(&read::<NamedNodes>(request, NAMES_MAX_BYTES).await?.nodes)?;
            let page = move |state: Arc<AdminState>| state.sources.page_of(&names, PAGE_MAX);
            value(StatusCode::OK, &blocking(state, page).await?)
        }
        ("POST", ["nodes", "approve"]) => {
            let names = node_names(&read::<NamedNodes>(request, NAMES_MAX_BYTES).await?.nodes)?;
            let approve = move |state: Arc<AdminState>| approve_nodes(&state, &names);
            value(StatusCode::OK, &blocking(state, approve).await??)
        }
        ("POST", ["nodes", "forget"]) => {
            let names = node_names(&read::<NamedNodes>(request, NAMES_MAX_BYTES).await?.nodes)?;
            let forget = move |state: Arc<AdminState>| forget_nodes(&state, &names);
            value(StatusCode::OK, &blocking(state, forget).await??)
        }
        ("GET", ["failures"]) => {
            let failures = blocking(state, |state| state.sources.failures()).await?;
            value(StatusCode::OK, &failures)
        }
        ("GET", ["ping", node]) => {
            let node = node_names(&[(*node).to_owned()])?.remove(0);
            let report = ping::ping(&state.sources, &node).await;
            value(StatusCode::OK, &report.ok_or_else(|| unknown_node(&node))?)
        }
        ("GET", ["diag", node]) => {
            let node = node_names(&[(*node).to_owned()])?.remove(0);
            value(StatusCode::OK, &agent_diag(state, &node).await?)
        }
        ("GET", ["node-labels"]) => value(
            StatusCode::OK,
            &blocking(state, |state| label_keys(&state)).await?,
        ),
        ("POST", ["revocations"]) => {
            let order = read(request, NAMES_MAX_BYTES).await?;
            value(StatusCode::OK, &apply_order(state, order).await?)
        }
        ("GET", ["revocations"]) => {
            let query = page_query(&request)?;
            let page = move |state: Arc<AdminState>| revocations_page(&state.revocations, &query);
            value(StatusCode::OK, &blocking(state, page).await?)
        }
        ("GET", ["ca", "rotation"]) => {
            let status = rotation(state, false, rotation_status).await?;
            value(StatusCode::OK, &status)
        }
        ("POST", ["ca", "rotation"]) => {
            let action = read(request, BODY_MAX_BYTES).await?;
            let rotate =
                move |state: &AdminState, others: &OtherAgents| rotate_ca(state, action, others);
            value(StatusCode::OK, &rotation(state, true, rotate).await?)
        }
        ("GET", ["ca"]) => Ok(text(StatusCode::OK, state.ca.root_pem())),
        ("GET", ["config"]) => value(StatusCode::OK, &state.configuration.state.status()),
        ("POST", ["config"]) => value(StatusCode::OK, &state.configuration.state.reload().await),
        ("POST", ["config", "end-running"]) => {
            let tunnels = state.tunnels.as_ref();
            let tunnels = tunnels.ok_or_else(|| RequestError::not_found(path.clone()))?;
            value(StatusCode::OK, &tunnels.end_refused().await)
        }
        ("GET", ["dry-run"]) => value(StatusCode::OK, &state.dry_run.status()),
        ("GET", ["settings"]) => value(StatusCode::OK, &*state.configuration.settings()),
        ("GET", ["diag"]) => value(
            StatusCode::OK,
            &RunningServer::of(state.configuration.lines()),
        ),
        (
            _,
            [
                "tokens" | "nodes" | "failures" | "ping" | "node-labels" | "revocations" | "ca"
                | "config" | "dry-run" | "settings" | "diag",
                ..,
            ],
        ) => Err(RequestError {
            status: StatusCode::METHOD_NOT_ALLOWED,
            problem: format!("{} {path} is not offered", method(request.method())),
        }),
        _ => Err(RequestError::not_found(format!("{path} is not offered"))),
    }
}

/// Creates a token and records its node as known. Blocks the thread.
fn create_token(
    state: &AdminState,
    token_request: CreateToken,
) -> Result<CreatedToken, RequestError> {
    if !state.can_issue {
        return Err(RequestError::bad_request(format!(
            "this server runs with --agent-ca and issues no certificates, so a token would be of no use: have that CA issue \
             one with the SAN URI culvert://agent/{node} and the usage client auth, and start the agent with --cert-file, \
             --key-file and --ca-file",
            node = token_request.node
        )));
    }
    let now = SystemTime::now();
    let token = token_request
        .create(
            &state.tokens,
            &state.nodes,
            &state.revocations,
            state.ca.spki_sha256(),
            now,
        )
        .map_err(|error| match error {
            CreateTokenError::InvalidTtl
            | CreateTokenError::InvalidUses
            | CreateTokenError::Options(_) => RequestError::bad_request(error.to_string()),
            CreateTokenError::Revoked(_) => RequestError::conflict(&error),
            CreateTokenError::File(_) | CreateTokenError::Token(_) => {
                RequestError::internal(&error)
            }
        })?;
    state.nodes.save()?;
    info!(node = %token_request.node, token = token.id(), "join token created");
    Ok(CreatedToken::new(
        &token,
        &token_request.node,
        now + token_request.ttl(),
        &state.advertised,
    ))
}

/// Admits nodes that wait for it. Blocks the thread.
fn approve_nodes(state: &AdminState, names: &[NodeName]) -> Result<ApproveOutcome, RequestError> {
    let approved = state.tokens.approve(names)?;
    for node in &approved {
        info!(%node, "node approved");
    }
    Ok(ApproveOutcome::of(names, &approved))
}

/// Returns the keys of the labels by which nodes can be selected: those of the Nodes that the server
/// stores, those of join tokens, and those that agents give their nodes.
fn label_keys(state: &AdminState) -> BTreeSet<String> {
    let nodes = state.nodes.snapshot();
    let own = nodes.iter().flat_map(|(_, node)| node.labels.keys());
    let own = own.map(ToString::to_string);
    let mut keys: BTreeSet<String> = own.chain(state.node_labels.iter().cloned()).collect();
    let sessions = state.sources.sessions.iter();
    for agent in sessions.flat_map(|sessions| sessions.registry.all()) {
        keys.extend(agent.claimed_labels.keys().map(ToString::to_string));
    }
    keys
}

/// Revokes a token. Blocks the thread.
fn revoke_token(state: &AdminState, id: &str) -> Result<(), RequestError> {
    if !state.tokens.revoke(id)? {
        return Err(RequestError::not_found(format!("no token has the id {id}")));
    }
    info!(token = id, "join token revoked");
    Ok(())
}

/// Puts an order in force, and waits for a moment until it is in force at the other servers and
/// saved. Both go on after that.
async fn apply_order(
    state: &Arc<AdminState>,
    NodesOrder { action, nodes }: NodesOrder,
) -> Result<OrderOutcome, RequestError> {
    let nodes = node_names(&nodes)?;
    let order = move |state: Arc<AdminState>| {
        let changed = state.revocations.order(action, &nodes, SystemTime::now());
        for node in &changed {
            match action {
                OrderAction::Revoke => info!(%node, "node revoked"),
                OrderAction::Unrevoke => info!(%node, "revocation of a node ended"),
                OrderAction::Reissue => info!(%node, "certificates of a node revoked"),
            }
        }
        let unknown = changed
            .iter()
            .filter(|node| state.sources.of_node(node).is_none());
        OrderOutcome {
            unknown: unknown.map(NodeName::to_string).collect(),
            changed: changed.iter().map(NodeName::to_string).collect(),
            ..OrderOutcome::default()
        }
    };
    let ordered: OrderOutcome = blocking(state, order).await?;
    let deadline = Instant::now() + ORDER_WAIT;
    loop {
        let outcome = order_outcome(state, ordered.clone());
        if outcome.pending.is_empty() || ordered.changed.is_empty() || Instant::now() >= deadline {
            return Ok(outcome);
        }
        tokio::time::sleep(ORDER_POLL).await;
    }
}

/// Returns where all orders of this server are in force and saved.
fn order_outcome(state: &AdminState, ordered: OrderOutcome) -> OrderOutcome {
    let servers = state.peers.holders_of(&state.revocations.all());
    let _later = state.revocations.confirm_by_peers();
    let (holders, others): (Vec<_>, Vec<_>) =
        servers.into_iter().partition(|(_, is_same)| *is_same);
    let own = state.peers.own().to_string();
    let name = |(replica, _): (ReplicaId, bool)| replica.to_string();
    let unconfirmed = others
        .into_iter()
        .map(|other| format!("server {}", name(other)));
    OrderOutcome {
        in_force: std::iter::once(own)
            .chain(holders.into_iter().map(name))
            .collect(),
        pending: unconfirmed.chain(state.revocations.unwritten()).collect(),
        ..ordered
    }
}

/// Removes the nodes that are not connected from the known nodes. Blocks the thread.
fn forget_nodes(state: &AdminState, names: &[NodeName]) -> Result<ForgetOutcome, RequestError> {
    let mut outcome = ForgetOutcome::default();
    for node in names {
        if let Some(sessions) = &state.sources.sessions {
            sessions.peers.forget_gone(node);
        }
        let status = state.sources.of_node(node);
        let list = if status.is_some_and(|status| status.connected) {
            &mut outcome.connected
        } else if state.nodes.forget(node) {
            info!(%node, "node forgotten");
            &mut outcome.forgotten
        } else {
            &mut outcome.unknown
        };
        list.push(node.to_string());
    }
    state.nodes.save()?;
    Ok(outcome)
}

/// Asks the agent of a node for facts about itself.
async fn agent_diag(
    state: &Arc<AdminState>,
    node: &NodeName,
) -> Result<serde_json::Value, RequestError> {
    let sessions = state.sources.sessions.as_ref();
    let agents = sessions.map_or_else(Vec::new, |sessions| sessions.registry.of_node(node));
    let agent = agents.iter().find(|agent| agent.is_routable());
    let Some(agent) = agent.or_else(|| agents.first()).cloned() else {
        let lookup = node.clone();
        let status = blocking(state, move |state| state.sources.of_node(&lookup)).await?;
        let replica = status.ok_or_else(|| unknown_node(node))?.replica;
        return Err(RequestError::conflict(&match replica {
            Some(server) => format!(
                "the agent of {node} is connected to server {server}: use the command there"
            ),
            None => {
                format!("no agent is connected for {node}: tunnel-server nodes --failed {node}")
            }
        }));
    };
    let document = agent.diag().await;
    let document = document.map_err(|error| RequestError::conflict(&error))?;
    serde_json::from_str(&document).map_err(|error| {
        RequestError::conflict(&format!("cannot read the agent's answer: {error}"))
    })
}

fn unknown_node(node: &NodeName) -> RequestError {
    RequestError::not_found(format!("no node has the name {node}"))
}

/// Runs work about the rotation of the CA with what the other servers know. `begins`: a stage may begin.
/// Answers within [`ROTATION_LIMIT`].
async fn rotation<F>(
    state: &Arc<AdminState>,
    begins: bool,
    work: F,
) -> Result<RotationStatus, RequestError>
where
    F: FnOnce(&AdminState, &OtherAgents) -> Result<RotationStatus, RequestError> + Send + 'static,
{
    let began = Instant::now();
    let others = other_agents(state, begins, began + OTHER_AGENTS_LIMIT).await?;
    let work = move |state: Arc<AdminState>| work(&state, &others);
    blocking_until(state, began + ROTATION_LIMIT, work).await?
}

/// Returns what the other servers know of the certificates of agents, if a stage begins or is in progress.
async fn other_agents(
    state: &AdminState,
    begins: bool,
    deadline: Instant,
) -> Result<OtherAgents, RequestError> {
    let (peers, others) = (&state.peers, OtherAgents::default());
    match &state.rotator {
        Ok(rotator) if begins || rotator.is_in_progress() => {
            let fetching = peers.fetch_certificates(deadline, others, add_agents);
            fetching
                .await
                .map_err(|panic| RequestError::internal(&panic))
        }
        Ok(_) | Err(_) => Ok(others),
    }
}

/// Adds what another server answered.
fn add_agents(
    others: &mut OtherAgents,
    server: ReplicaId,
    answer: Result<Vec<NodeCertificate>, FetchError>,
) {
    match answer {
        Ok(nodes) => others.add(server, nodes),
        Err(FetchError::TooManyNodes) => others.add_too_large(server),
        Err(FetchError::NoAnswer) => {}
    }
}

/// Returns the stage of the rotation of the CA. Blocks the thread.
fn rotation_status(
    state: &AdminState,
    others: &OtherAgents,
) -> Result<RotationStatus, RequestError> {
    let rotator = state.rotator.as_ref().map_err(RequestError::conflict)?;
    rotator
        .status(others)
        .map_err(|error| RequestError::internal(&error))
}

/// Changes the stage of the rotation of the CA. Blocks the thread.
fn rotate_ca(
    state: &AdminState,
    action: RotationAction,
    others: &OtherAgents,
) -> Result<RotationStatus, RequestError> {
    let rotator = state.rotator.as_ref().map_err(RequestError::conflict)?;
    rotator.act(action, others).map_err(|error| match error {
        RotationError::Ca(error) => RequestError::internal(&error),
        RotationError::Changed
        | RotationError::NotInProgress
        | RotationError::InProgress
        | RotationError::AlreadyReturning
        | RotationError::Pending { .. }
        | RotationError::Clock(_)
        | RotationError::ServersUnknown(_)
        | RotationError::UnknownStages(_)
        | RotationError::OtherStages(_)
        | RotationError::NotCounted(_)
        | RotationError::TooManyNodes(_)
        | RotationError::AgentsMove(_) => RequestError::conflict(&error),
    })
}

/// Runs work that accesses files outside the runtime's own threads.
async fn blocking<T: Send + 'static>(
    state: &Arc<AdminState>,
    work: impl FnOnce(Arc<AdminState>) -> T + Send + 'static,
) -> Result<T, RequestError> {
    let state = state.clone();
    tokio::task::spawn_blocking(move || work(state))
        .await
        .map_err(|panic| RequestError::internal(&panic))
}

/// Runs work like [`blocking`]. What has not ended by `deadline` goes on, and the answer says so.
async fn blocking_until<T: Send + 'static>(
    state: &Arc<AdminState>,
    deadline: Instant,
    work: impl FnOnce(Arc<AdminState>) -> T + Send + 'static,
) -> Result<T, RequestError> {
    let ended = timeout_at(deadline, blocking(state, work)).await;
    ended.unwrap_or_else(|_elapsed| {
        Err(RequestError {
            status: StatusCode::GATEWAY_TIMEOUT,
            problem: STORE_IS_SLOW.to_owned(),
        })
    })
}

fn node_names(names: &[String]) -> Result<Vec<NodeName>, RequestError> {
    if names.len() > PAGE_MAX {
        let problem = format!("a request has at most {PAGE_MAX} nodes");
        return Err(RequestError::bad_request(problem));
    }
    let parsed = names.iter().map(|name| {
        let parsed = name.parse::<NodeName>();
        parsed.map_err(|error| RequestError::bad_request(format!("{name:?}: {error}")))
    });
    parsed.collect()
}

fn page_query<B>(request: &Request<B>) -> Result<PageQuery, RequestError> {
    PageQuery::parse(request.uri().query().unwrap_or_default())
        .map_err(|error| RequestError::bad_request(error.to_string()))
}

async fn read<T: serde::de::DeserializeOwned>(
    request: Request<Incoming>,
    max_bytes: usize,
) -> Result<T, RequestError> {
    let body = Limited::new(request.into_body(), max_bytes)
        .collect()
        .await
        .map_err(|error| RequestError::bad_request(format!("cannot read the request: {error}")))?;
    serde_json::from_slice(&body.to_bytes())
        .map_err(|error| RequestError::bad_request(format!("cannot read the request: {error}")))
}

fn value(status: StatusCode, value: &impl Serialize) -> Result<FullResponse, RequestError> {
    Ok(json(status, value))
}

/// Returns the method if it is common. An uncommon method is not repeated in the error.
fn method(method: &Method) -> &str {
    let known = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::DELETE,
        Method::HEAD,
    ];
    if known.contains(method) {
        method.as_str()
    } else {
        "this method on"
    }
}

/// A refusal with its HTTP status.
struct RequestError {
    status: StatusCode,
    problem: String,
}

impl From<io::Error> for RequestError {
    fn from(error: io::Error) -> Self {
        Self::internal(&error)
    }
}

impl RequestError {
    fn bad_request(problem: String) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            problem,
        }
    }

    fn not_found(problem: String) -> Self {
        Self {
            status: StatusCode::NOT_FOUND,
            problem,
        }
    }

    fn conflict(problem: &impl fmt::Display) -> Self {
        Self {
            status: StatusCode::CONFLICT,
            problem: problem.to_string(),
        }
    }

    fn internal(error: &dyn std::error::Error) -> Self {
        warn!(%error, "admin request failed");
        Self {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            problem: error.to_string(),
        }
    }

    fn into_response(self) -> FullResponse {
        let problem = ErrorBody {
            error: self.problem,
        };
        json(self.status, &serde_json::json!(problem))
    }
}

/// Maximum number of concurrent connections; further ones wait. Each command opens one.
const CONNECTIONS_MAX: usize = 16;
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which the answer to an order waits for the other servers and the stores.
const ORDER_WAIT: Duration = Duration::from_secs(3);
const ORDER_POLL: Duration = Duration::from_millis(20);
/// Time for a whole answer about the rotation of the CA, less than commands wait for it. The API server,
/// whose calls may take 15 s together, has what the other servers leave.
const ROTATION_LIMIT: Duration = client::RESPONSE_TIMEOUT.saturating_sub(Duration::from_secs(1));
/// Time for the answers of the other servers about the certificates of agents.
const OTHER_AGENTS_LIMIT: Duration = Duration::from_secs(8);
/// The answer when the time is over.
const STORE_IS_SLOW: &str = "the API server or the disk takes too long, and what the command began goes on; \
     wait until 'tunnel-server ca rotate --status' answers before the next command";
/// Maximum size of a request body. A token with a hundred addresses is a few KiB.
const BODY_MAX_BYTES: usize = 64 * 1024;
/// Maximum size of a request with names of nodes: as many as it may have, with 253 characters each.
const NAMES_MAX_BYTES: usize = PAGE_MAX * 256 + 1024;

#[cfg(test)]
mod tests;
