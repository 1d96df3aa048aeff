//! The interfaces for operators: the admin socket and the meta port.

use std::io;

use http::StatusCode;
use prometheus_client::registry::Registry as MetricsRegistry;
use serde::Serialize;
use tokio::net::TcpListener;
use tunnel_process::meta::{self, EndpointAnswer, EndpointHandler, EndpointRequest, Meta};

use super::authority::Authority;
use super::context::ServerContext;
use super::rotation::rotator;
use crate::admin::configuration::RunningConfig;
use crate::admin::discovery::{self, DiscoveryQuery};
use crate::admin::json_list::JsonList;
use crate::admin::node_metrics::{NodeMetrics, observe_rtts};
use crate::admin::status::{NodeSources, ObservedNode, SessionSources};
use crate::admin::{self, AdminState};
use crate::ingress::connect::AdminTunnels;
use tunnel_routing::policy::PortPolicy;

/// What the admin socket has in addition to the state that all parts share.
pub(super) struct OperatorInputs {
    /// Addresses that agents should dial, HOST:PORT.
    pub(super) advertised: Vec<String>,
    /// Tunnels to nodes, for `connect`.
    pub(super) tunnels: AdminTunnels,
    pub(super) configuration: RunningConfig,
}

pub(super) fn start_socket(
    authority: &Authority,
    sources: NodeSources,
    operator: OperatorInputs,
    context: &ServerContext,
) -> io::Result<()> {
    let state = AdminState {
        ca: authority.ca.clone(),
        tokens: authority.tokens.clone(),
        nodes: context.nodes.clone(),
        revocations: authority.revocations.clone(),
        peers: context.peers.clone(),
        rotator: rotator(authority, context),
        sources,
        node_labels: node_labels(context),
        advertised: operator.advertised,
        can_issue: context.config.agent_files.is_none(),
        tunnels: Some(operator.tunnels),
        configuration: operator.configuration,
        dry_run: context.dry_run.clone(),
    };
    admin::start(state, &context.data, &context.shutdown)
}

pub(super) fn start_meta(
    nodes: NodeSources,
    listener: Option<TcpListener>,
    mut metrics_registry: MetricsRegistry,
    context: &ServerContext,
) {
    observe_rtts(
        context.registry.clone(),
        context.metrics.clone(),
        &context.shutdown,
    );
    let Some(listener) = listener else {
        return;
    };
    let server_metrics = metrics_registry.sub_registry_with_prefix("tunnel_server");
    server_metrics.register_collector(Box::new(node_metrics(context)));
    Meta::new(context.readiness.clone(), metrics_registry)
        .with("/nodes", nodes_endpoint(nodes.clone()))
        .with("/sd/prometheus", discovery_endpoint(nodes, context))
        .start(listener, &context.shutdown);
}

fn node_labels(context: &ServerContext) -> Vec<String> {
    let kubernetes = context.config.kubernetes.iter();
    kubernetes
        .flat_map(|kubernetes| &kubernetes.node_labels)
        .map(ToString::to_string)
        .collect()
}

fn node_metrics(context: &ServerContext) -> NodeMetrics {
    NodeMetrics {
        nodes: context.nodes.clone(),
        routes: context.routes.clone(),
        registry: context.registry.clone(),
        peers: context.peers.clone(),
        mode: context.config.metrics_per_node,
    }
}

/// Returns what everything that shows nodes reads.
pub(super) fn node_sources(authority: &Authority, context: &ServerContext) -> NodeSources {
    NodeSources {
        nodes: context.nodes.clone(),
        routes: context.routes.clone(),
        revocations: authority.revocations.clone(),
        sessions: Some(SessionSources {
            registry: context.registry.clone(),
            peers: context.peers.clone(),
            failures: context.failures.clone(),
        }),
    }
}

fn nodes_endpoint(nodes: NodeSources) -> EndpointHandler {
    Box::new(move |request: EndpointRequest<'_>| {
        if !request.peer.ip().to_canonical().is_loopback() {
            let refused = "only for callers on this host\n";
            return EndpointAnswer::Now(meta::text(StatusCode::FORBIDDEN, refused));
        }
        json_list(&nodes, |node| Some(node.status()))
    })
}

/// Returns the handler of `/sd/prometheus`. Every caller of the meta port may use it, since
/// Prometheus is on another host.
fn discovery_endpoint(nodes: NodeSources, context: &ServerContext) -> EndpointHandler {
    let (policy, peers) = (context.policy.clone(), context.peers.clone());
    Box::new(move |request: EndpointRequest<'_>| {
        let query = match checked_query(request.query, &policy.load().ports) {
            Ok(query) => query,
            Err((status, text)) => return EndpointAnswer::Now(meta::text(status, text)),
        };
        let peers = peers.clone();
        json_list(&nodes, move |node| {
            discovery::target_group(&query, node, peers.own())
        })
    })
}

/// Answers with a JSON list of what `each` makes of all nodes.
fn json_list<T: Serialize>(
    nodes: &NodeSources,
    each: impl FnMut(&ObservedNode<'_>) -> Option<T> + Send + 'static,
) -> EndpointAnswer {
    EndpointAnswer::Json(Box::new(JsonList::new(nodes.batches(each))))
}

fn checked_query(query: &str, policy: &PortPolicy) -> Result<DiscoveryQuery, Refusal> {
    let query = DiscoveryQuery::parse(query)
        .map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))?;
    query
        .authorize(policy)
        .map_err(|refusal| (StatusCode::FORBIDDEN, format!("{refusal}\n")))?;
    Ok(query)
}

/// The status and the text of a response that refuses a request.
type Refusal = (StatusCode, String);
