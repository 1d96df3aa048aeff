//! The path of a request from its listener to its target: resolve, authorize, open, and relay or
//! exchange. Each listener turns its bytes into an [`IngressRequest`], and the record that it begins
//! ends with the response or the stream.

use std::sync::Arc;

use http::Request;
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tracing::debug;
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::relay::{CutSide, PollCut, RelayEnd, RelaySide, end_cut};
use tunnel_proto::wire::code::ResetCode;
use tunnel_proto::wire::name::NodeName;

use super::caller_stream::{CloseState, discard_input};
use super::connect::dial::DirectDialer;
use super::context::IngressContext;
use super::decide_again::ask_cluster;
use super::error::ProxyError;
use super::http::exchange::{Exchange, TargetResponse, run_direct};
use super::http::upstream::{accepted, stream_request};
use super::request_record::{ExchangeGuard, RequestRecord};
use super::tunnel::Tunnel;
use crate::outcome::Outcome;
use crate::routing::access_review::ClusterUser;
use crate::routing::attempts::Attempts;
use crate::routing::registry::{CallerKey, OpenError};
use crate::routing::{Attempt, FailedAttempt, OpenStream};
use crate::running::RunningAccess;
use tunnel_routing::decision::delegated::{self, Decision, DelegatedRequest};
use tunnel_routing::decision::proxy::ProxyRequest;
use tunnel_routing::decision::{DecisionError, RequestFacts, decide};
use tunnel_routing::destination::{Destination, DialTarget, RequestedDestination, RequestedNode};
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::{
    Access, AccessCaller, CallerIdentity, Located, Policy, Route, TargetAccess, authorize, locate,
};

/// A request of a caller, as its listener has read it.
#[derive(Debug)]
pub(super) struct IngressRequest<'a> {
    /// The policy in force when the request began.
    pub(super) policy: &'a Policy,
    pub(super) caller: AccessCaller<'a>,
    pub(super) target: IngressTarget<'a>,
    pub(super) operation: RequestedOperation<'a>,
    /// The caller as a user of the cluster, if the cluster has verified who it is.
    pub(super) cluster_user: Option<&'a Arc<ClusterUser>>,
    /// The account that an unreviewed token claims, if the rules of a dry run name it.
    pub(super) claimed: Option<CallerIdentity>,
    /// Ends what carries the request.
    pub(super) end_signal: &'a Arc<Notify>,
}

/// The part of a request that names its target.
#[derive(Debug)]
pub(super) enum IngressTarget<'a> {
    /// Host and the selector headers.
    Host(RequestFacts<'a>),
    /// The server name from TLS, or the path, for a caller with delegation.
    Delegated(DelegatedRequest<'a>),
    /// The target of a CONNECT or of an absolute-form request, and the dialer of the listener.
    Proxy {
        request: &'a ProxyRequest,
        dialer: &'a Arc<DirectDialer>,
    },
    TcpService(&'a Destination),
}

/// A route to a target that the server dials.
#[derive(Debug)]
pub(super) struct DirectRoute {
    dialer: Arc<DirectDialer>,
    request: ProxyRequest,
    target: DialTarget,
}

/// The parameters of a byte stream to a target.
#[derive(Debug)]
pub(super) struct TunnelParams<'a> {
    /// Key that counts the streams of the caller.
    pub(super) caller_key: &'a CallerKey,
    /// Trace context for the agent's access log.
    pub(super) trace_parent: String,
    /// The tunnel is open only once the target has accepted.
    pub(super) awaits_reply: bool,
}

/// Returns the route of a request, if the policy allows one. Records the node and the port either
/// way.
///
/// # Errors
/// Returns a [`ProxyError`] with the response for the caller.
pub(super) async fn grant_route(
    ingress: &IngressContext,
    request: IngressRequest<'_>,
    record: &mut RequestRecord,
) -> Result<Route<DirectRoute>, ProxyError> {
    if !ingress.routes.are_known() {
        return Err(ProxyError::new(Outcome::Starting, STARTING));
    }
    let destination = resolve(ingress, &request).await?;
    record.record_in(ingress.recent.clone());
    match &destination {
        RequestedDestination::Node(requested) => {
            record.requested(&requested.node, requested.port.in_request());
        }
        RequestedDestination::Configured(destination) => {
            record.requested(&destination.node, destination.target.port());
        }
        RequestedDestination::Direct(direct, port) => {
            record.direct(&direct.request.to_string(), *port);
        }
    }
    let Policy { ports, rules, .. } = request.policy;
    let requested = Access {
        caller: request.caller,
        destination,
        operation: request.operation,
    };
    let Located { route, mut access } = locate(ports, requested)?;
    let operation = access.facts.operation;
    record.decided(operation, None);
    let (claimed, routes) = (request.claimed.as_ref(), ingress.routes.peek());
    request.policy.admit(&mut access, &routes)?;
    let facts = &access.facts;
    let tried = (ingress.dry_run).compare(rules, facts, claimed, &routes, &ingress.metrics);
    drop(routes);
    record.dry_run(tried);
    let granted = authorize(&rules.in_force, facts);
    let rule = granted.as_ref().map(|granted| Some(&granted.rule));
    let rule = rule.unwrap_or_else(|denied| denied.rule());
    record.decided(operation, rule);
    let granted = granted?;
    let running = running_access(&request, access);
    if granted.asks_cluster {
        // Few requests need the memory of a question.
        Box::pin(ask_cluster(ingress, &running, &granted)).await?;
    }
    let guard = ingress.running.begin(running);
    // Those who decide again after a change may have begun before the access was in their list.
    if !ingress.policy.is_in_force(request.policy) {
        let decided = Box::pin(ingress.decide_again(guard.access())).await;
        if let Err(refused) = decided {
            record.decided(operation, refused.rule.as_ref());
            return Err(ProxyError::new(Outcome::RefusedByPolicy, refused.reason));
        }
    }
    record.running(guard);
    Ok(route)
}

/// Returns an access that was allowed, with what the cluster is asked about it.
fn running_access(request: &IngressRequest<'_>, access: TargetAccess) -> RunningAccess {
    let mut running = RunningAccess::new(access, request.end_signal.clone());
    running.cluster_user = request.cluster_user.cloned();
    running.method = match request.operation {
        RequestedOperation::Http { method, .. } => Some(method.clone()),
        RequestedOperation::Connect => None,
    };
    running
}

/// The answer of every listener while any other one could be wrong: an unknown name may be that of a
/// node, an address may have two owners, and a direct dial may reach what has an agent.
const STARTING: &str =
    "this server is starting and does not know the nodes of the cluster yet; retry";

async fn resolve(
    ingress: &IngressContext,
    request: &IngressRequest<'_>,
) -> Result<RequestedDestination<DirectRoute>, ProxyError> {
    match &request.target {
        IngressTarget::Host(facts) => {
            let requested = decide(facts, &ingress.routes.peek())?;
            Ok(RequestedDestination::Node(requested))
        }
        IngressTarget::Delegated(request) => {
            let requested = resolve_delegated(ingress, request).await?;
            Ok(RequestedDestination::Node(requested))
        }
        IngressTarget::Proxy { request, dialer } => resolve_proxy(ingress, request, dialer),
        IngressTarget::TcpService(destination) => {
            Ok(RequestedDestination::Configured((*destination).clone()))
        }
    }
}

async fn resolve_delegated(
    ingress: &IngressContext,
    request: &DelegatedRequest<'_>,
) -> Result<RequestedNode, DecisionError> {
    let routes = &ingress.routes;
    let decision = delegated::decide(request, &routes.load())?;
    let pod = match decision {
        Decision::Node(requested) => return Ok(requested),
        Decision::LookUp(pod) => pod,
    };
    let Some(pods) = &ingress.pods else {
        return delegated::decide_by_host(request, &routes.load());
    };
    let node_result = pods.node_of(pod.clone()).await;
    delegated::decide_by_pod(request, &pod, node_result, &routes.load())
}

fn resolve_proxy(
    ingress: &IngressContext,
    request: &ProxyRequest,
    dialer: &Arc<DirectDialer>,
) -> Result<RequestedDestination<DirectRoute>, ProxyError> {
    let cluster = dialer.dial_policy().cluster();
    let requested = request.resolve(&ingress.routes.load(), &cluster, |node| {
        ingress.routing.is_held(node)
    })?;
    Ok(requested.map_direct(|target| DirectRoute {
        dialer: dialer.clone(),
        request: request.clone(),
        target,
    }))
}

impl DirectRoute {
    /// Dials the target, with the routes and sessions that are known once its name is resolved.
    async fn dial(
        &self,
        ingress: &IngressContext,
        record: &mut RequestRecord,
    ) -> Result<TargetSocket, ProxyError> {
        let target_label = self.request.to_string();
        record.direct(&target_label, self.request.port);
        let (port, routes) = (self.request.port, &ingress.routes);
        let has_agent = |node: &NodeName| ingress.routing.is_held(node);
        self.dialer
            .dial(&self.target, port, &target_label, routes, &has_agent)
            .await
    }
}

/// Sends an HTTP request over its route. Returns the response for the caller.
///
/// # Errors
/// Returns a [`ProxyError`] with the response for the caller.
pub(super) async fn exchange(
    exchange: &Exchange<'_>,
    route: Route<DirectRoute>,
    request: Request<Incoming>,
    record: &mut RequestRecord,
) -> Result<TargetResponse, ProxyError> {
    match route {
        Route::Agent(target) => exchange.run(request, target, record).await,
        Route::Direct(direct) => {
            // Only few requests need the memory of a dial.
            let exchanged = async {
                let socket = direct.dial(&exchange.conn.ingress, record).await?;
                let target_label = direct.request.to_string();
                run_direct(exchange.conn, socket, request, &target_label, record).await
            };
            Box::pin(exchanged).await
        }
    }
}

/// Opens a connection to the target of a route.
///
/// # Errors
/// Returns a [`ProxyError`] with the response for the caller.
pub(super) async fn open_tunnel(
    ingress: &IngressContext,
    route: Route<DirectRoute>,
    params: TunnelParams<'_>,
    record: &mut RequestRecord,
) -> Result<Tunnel, ProxyError> {
    let destination = match route {
        Route::Agent(target) => target.destination,
        Route::Direct(direct) => {
            let socket = direct.dial(ingress, record).await?;
            record.dialed(socket.bytes());
            return Ok(Tunnel::Direct(socket));
        }
    };
    record.destination(&destination);
    let mut request = stream_request(
        ingress,
        &destination,
        params.caller_key,
        params.trace_parent,
    );
    record.identify(&mut request.header);
    let mut attempt = TunnelAttempt {
        awaits_reply: params.awaits_reply,
        target_label: destination.to_string(),
        record,
    };
    let (routing, attempts) = (&ingress.routing, Attempts::default());
    let opened = routing.with_stream(&request, &mut attempt, attempts, None);
    opened.await
}

/// Makes the stream of each attempt a tunnel.
struct TunnelAttempt<'a> {
    awaits_reply: bool,
    target_label: String,
    record: &'a mut RequestRecord,
}

impl Attempt for TunnelAttempt<'_> {
    type Output = Tunnel;
    type Error = ProxyError;

    async fn run(&mut self, mut opened: OpenStream) -> Result<Tunnel, FailedAttempt<ProxyError>> {
        self.record.opened(&opened);
        // Another server may have lost the node, and nothing of the caller must be sent before that
        // is known.
        if self.awaits_reply || opened.via.replica().is_some() {
            accepted(&mut opened.stream, &self.target_label).await?;
        }
        Ok(Tunnel::Agent {
            stream: opened.stream,
            target_label: self.target_label.clone(),
        })
    }

    fn not_opened(&self, error: OpenError) -> ProxyError {
        ProxyError::from_open(&error, &self.target_label)
    }
}

/// Relays bytes in both directions once the caller has the response that grants the tunnel.
pub(super) async fn relay_granted<C, E>(
    upgrade: impl Future<Output = Result<C, E>>,
    tunnel: Box<Tunnel>,
    exchange_guard: Box<ExchangeGuard>,
) where
    C: AsyncRead + AsyncWrite + PollCut + Send + Unpin,
    E: std::fmt::Display,
{
    match upgrade.await {
        Ok(caller_stream) => relay_tunnel(caller_stream, tunnel, exchange_guard).await,
        Err(error) => debug!(%error, "caller disconnected before the tunnel was open"),
    }
}

/// Relays bytes in both directions until both have ended or one is reset, and records the outcome.
/// Half-closes are forwarded. A reset of one side resets the other, behind the bytes before it.
///
/// The arguments are boxed, because a future holds each argument twice. The guard is the last
/// argument and so is dropped first: an aborted relay ends in a reset.
pub(super) async fn relay_tunnel<C>(
    mut caller_stream: C,
    mut tunnel: Box<Tunnel>,
    mut exchange_guard: Box<ExchangeGuard>,
) where
    C: AsyncRead + AsyncWrite + PollCut + Send + Unpin,
{
    let close_state = exchange_guard.response_guard.close_state().clone();
    let relayed = tokio::select! {
        biased;
        relayed = tunnel.relay(&mut caller_stream) => relayed,
        () = close_state.end_signal().notified() => {
            debug!("{} is refused by the rules in force", tunnel.name());
            exchange_guard.abort();
            let cut = tunnel.cut_for_peer(ResetCode::PeerCut, false);
            tokio::join!(cut, close_state.cut_behind(&mut caller_stream));
            return;
        }
    };
    match relayed {
        RelayEnd::Clean => {
            tunnel.finish();
            exchange_guard.finish();
        }
        RelayEnd::ReaderClosed(side) => {
            debug!(?side, "{} ended with unread bytes", tunnel.name());
            exchange_guard.record.set_outcome(match side {
                RelaySide::Left => Outcome::CallerGone,
                // The caller gets all that the target has sent, and a clean end.
                RelaySide::Right => Outcome::Ok,
            });
            tunnel.finish();
            discard_input(&mut caller_stream).await;
            exchange_guard.response_guard.finish();
        }
        RelayEnd::Cut(side, cut) => {
            debug!(?side, error = %cut.error, "{} was reset", tunnel.name());
            let record = &mut exchange_guard.record;
            match &*tunnel {
                _ if cut.is_for_memory() => record.set_outcome(Outcome::ReaderStalled),
                _ if side == RelaySide::Left => record.set_outcome(Outcome::CallerGone),
                // The error can be the agent's refusal.
                Tunnel::Agent {
                    stream,
                    target_label,
                } if !stream.is_accepted() => {
                    let failure = ProxyError::from_stream(&cut.error, target_label, Outcome::Cut);
                    record.fail(&failure);
                }
                Tunnel::Agent { .. } | Tunnel::Direct(_) | Tunnel::Upgraded(_) => {
                    record.set_outcome(Outcome::Cut);
                }
            }
            exchange_guard.abort();
            let caller_side = CallerSide {
                stream: caller_stream,
                close_state,
            };
            Box::pin(end_cut(caller_side, *tunnel, side, &cut)).await;
        }
    }
}

/// The stream of a caller, whose connection is cut with it.
struct CallerSide<C> {
    stream: C,
    close_state: Arc<CloseState>,
}

impl<C: AsyncWrite + Send + Unpin> CutSide for CallerSide<C> {
    async fn cut_for_peer(mut self, _code: ResetCode, takes_none: bool) {
        if !takes_none {
            self.close_state.cut_behind(&mut self.stream).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tunnel_proto::transport::{Session as _, Stream};

    use super::*;
    use crate::ingress::http::tests::fixture::{Agent, Fixture};
    use crate::testing::{WAIT_TIMEOUT, header};

    #[tokio::test(start_paused = true)]
    async fn target_that_is_gone_behind_a_complete_answer_is_no_failure() {
        let (fixture, agent) = Fixture::with_agent();
        let (mut caller, mut target, relayed) = start(&fixture, &agent).await;
        let answered = async {
            target.write_all(b"all").await.unwrap();
            target.shutdown().await.unwrap();
            drop(target);
            let mut got = Vec::new();
            caller.read_to_end(&mut got).await.unwrap();
            got
        };
        let (got, ()) = tokio::join!(answered, relayed);
        assert_eq!(got, b"all");
        assert_eq!(records(&fixture, Outcome::Ok), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn caller_that_takes_nothing_behind_its_last_byte_is_gone() {
        let (fixture, agent) = Fixture::with_agent();
        let (caller, mut target, relayed) = start(&fixture, &agent).await;
        drop(caller);
        let answered = async {
            assert_eq!(target.read(&mut [0]).await.unwrap(), 0);
            target.write_all(b"late").await.unwrap();
            target.shutdown().await.unwrap();
        };
        tokio::join!(answered, relayed);
        assert_eq!(records(&fixture, Outcome::CallerGone), 1);
    }

    /// Returns a caller, the target's end of its stream, and the relay between them.
    async fn start(
        fixture: &Fixture,
        agent: &Agent,
    ) -> (DuplexStream, Stream, impl Future<Output = ()>) {
        let stream = agent.near.open(&header(), WAIT_TIMEOUT).await.unwrap();
        let target = agent.accepts().await;
        let (caller, caller_stream) = duplex(64);
        let addr: SocketAddr = "192.0.2.1:5".parse().unwrap();
        let exchange_guard = Box::new(ExchangeGuard {
            response_guard: Arc::<CloseState>::default().start(),
            record: RequestRecord::start("service", addr, "ssh", &fixture.ingress.metrics),
        });
        let tunnel = Box::new(Tunnel::Agent {
            stream,
            target_label: "worker-1".into(),
        });
        let relayed = relay_tunnel(caller_stream, tunnel, exchange_guard);
        (caller, target, relayed)
    }

    fn records(fixture: &Fixture, outcome: Outcome) -> u64 {
        let series = format!("tunnel_server_streams_total{{result=\"{outcome}\"}}");
        fixture.metric(&series)
    }
}
