//! The interfaces for operators: the admin socket and the meta port.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::net::TcpListener;
use tunnel_proto::process::meta::{self, Meta};

use super::authority::Authority;
use super::context::ServerContext;
use crate::admin::{self, AdminState, status};
use crate::ingress::connect::AdminTunnels;
use crate::routing::routes::RouteSource;

/// Starts the admin socket, then the meta port.
pub(super) fn start(
    authority: &Authority,
    advertised: Vec<String>,
    tunnels: AdminTunnels,
    meta_listener: TcpListener,
    metrics_registry: MetricsRegistry,
    context: &ServerContext,
) -> io::Result<()> {
    let list = list_nodes(context);
    let state = AdminState {
        ca: authority.ca.clone(),
        tokens: authority.tokens.clone(),
        nodes: context.nodes.clone(),
        revocations: authority.revocations.clone(),
        status: list.clone(),
        advertised,
        can_issue: context.config.agent_files.is_none(),
        tunnels: Some(tunnels),
    };
    admin::start(state, &context.data, &context.shutdown)?;
    Meta::new(context.readiness.clone(), metrics_registry)
        .with("/nodes", Box::new(move |peer| nodes_endpoint(peer, list())))
        .start(meta_listener, &context.shutdown);
    Ok(())
}

/// Returns the function that lists the nodes with their status.
fn list_nodes(context: &ServerContext) -> Arc<dyn Fn() -> Vec<serde_json::Value> + Send + Sync> {
    let (nodes, routes) = (context.nodes.clone(), context.routes.clone());
    let (registry, peers) = (context.registry.clone(), context.peers.clone());
    Arc::new(move || {
        let list = status::list(&nodes, &routes.of(RouteSource::Cluster), &registry, &peers);
        // A structure of texts and numbers always has a JSON form.
        list.iter()
            .filter_map(|node| serde_json::to_value(node).ok())
            .collect::<Vec<_>>()
    })
}

fn nodes_endpoint(peer: SocketAddr, nodes: Vec<serde_json::Value>) -> meta::FullResponse {
    if !peer.ip().to_canonical().is_loopback() {
        return meta::text(
            http::StatusCode::FORBIDDEN,
            "only for callers on this host\n",
        );
    }
    meta::json(http::StatusCode::OK, &nodes.into())
}
