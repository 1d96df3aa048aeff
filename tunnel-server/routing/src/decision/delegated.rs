//! Routing decision for callers with client-certificate delegation. All functions are pure
//! (docs/reference/http.md describes the rules).
//!
//! Such a caller is kube-apiserver, which forwards the Host and header fields of its users.
//! kube-apiserver sends the following to the kubelet of `edge-1` (Kubernetes 1.36:
//! `pkg/registry/core/pod/rest/subresources.go`, `pkg/registry/core/node/rest/proxy.go`,
//! `staging/src/k8s.io/apimachinery/pkg/util/proxy`):
//!
//! | request | Host | SNI with `--kubelet-certificate-authority` | SNI without |
//! |---|---|---|---|
//! | logs | `edge-1:10250` | `edge-1` | `edge-1` |
//! | exec, attach, portForward: GET with WebSocket, POST with SPDY | the user's | `edge-1` | none |
//! | POST with SPDY, translated from the user's WebSocket | `edge-1:10250` | `edge-1` | none |
//! | node proxy | the user's | `edge-1` | `edge-1` |
//! | node proxy of an upgrade | the user's | `edge-1` | none |
//!
//! The node therefore comes from SNI, or else from the Pod in the path. The node comes from Host
//! only where no user has set Host.

use http::header::HOST;
use tunnel_proto::wire::name::{NodeName, Port};

use super::{
    DecisionError, Host, HostPort, RequestFacts, bad_request, check_form, choose_node,
    may_be_upgrade, single_value,
};
use crate::destination::{RequestedNode, RequestedPort};
use crate::pod::{KubeletPath, Pod, PodLookupError};
use crate::routes::{RouteError, RouteTable};

/// A request of a caller with delegation.
#[derive(Debug, Clone, Copy)]
pub struct DelegatedRequest<'a> {
    pub facts: RequestFacts<'a>,
    /// The server name (SNI) from the caller's TLS handshake.
    pub server_name: Option<&'a NodeName>,
}

/// The next step for a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    Node(RequestedNode),
    /// The node is the one that this Pod runs on.
    LookUp(Pod),
}

/// Returns the next step for a request. Selector headers are ignored.
///
/// # Errors
/// Returns a [`DecisionError`] if the request leads to no node.
pub fn decide(
    request: &DelegatedRequest<'_>,
    routes: &RouteTable,
) -> Result<Decision, DecisionError> {
    let facts = &request.facts;
    check_form(facts)?;
    if single_value(facts.headers, &HOST)?.is_none() {
        return Err(bad_request("the request has no Host"));
    }
    match request.server_name.map(|name| routes.by_name(name)) {
        Some(Ok(node)) => return requested(request, node, routes).map(Decision::Node),
        // The caller has named a node by SNI. The user's Host must not choose between the nodes
        // that share the name.
        Some(Err(error @ RouteError::AmbiguousName(..))) => return Err(error.into()),
        Some(Err(_)) | None => {}
    }
    match KubeletPath::of(facts.uri.path()) {
        KubeletPath::Stream(pod) => Ok(Decision::LookUp(pod)),
        KubeletPath::Malformed => Err(bad_request("the kubelet path does not name a valid pod")),
        KubeletPath::Other => decide_by_host(request, routes).map(Decision::Node),
    }
}

/// Returns the node and port of a request without a node in SNI. The path contains no Pod, or no
/// resolver is available.
///
/// # Errors
/// Returns a [`DecisionError`] if the request leads to no node. Every upgrade request fails.
pub fn decide_by_host(
    request: &DelegatedRequest<'_>,
    routes: &RouteTable,
) -> Result<RequestedNode, DecisionError> {
    let facts = &request.facts;
    if may_be_upgrade(facts.headers) {
        return Err(no_node_by_tls(request));
    }
    let host = single_value(facts.headers, &HOST)?.and_then(HostPort::parse);
    let host =
        host.ok_or_else(|| bad_request("Host is not a name or address with an optional port"))?;
    let node = choose_node(&host.host, None, None, routes)?;
    requested(request, node, routes)
}

/// Returns the node and port of a request after the lookup of its Pod.
///
/// # Errors
/// Returns a [`DecisionError`] if the request leads to no node. A failed lookup never falls back to
/// the node in Host.
pub fn decide_by_pod(
    request: &DelegatedRequest<'_>,
    pod: &Pod,
    node_result: Result<NodeName, PodLookupError>,
    routes: &RouteTable,
) -> Result<RequestedNode, DecisionError> {
    let unknown = |why: String| DecisionError::Pod(pod.clone(), why);
    let node = node_result.map_err(|error| unknown(error.to_string()))?;
    // The name is that of a Node object. Another node with this name as its host name must not
    // match.
    if !routes.is_node(&node) {
        let why = format!(
            "it runs on {node}, which is not a known node; list known nodes with 'tunnel-server nodes'"
        );
        return Err(unknown(why));
    }
    requested(request, node, routes)
}

/// Returns the node and its port. The port comes from Host if Host names this node, because callers
/// other than kube-apiserver can have delegation. Otherwise the port is that of the kubelet.
fn requested(
    request: &DelegatedRequest<'_>,
    node: NodeName,
    routes: &RouteTable,
) -> Result<RequestedNode, DecisionError> {
    let kubelet = routes
        .kubelet_port(&node)
        .ok_or_else(|| bad_request("the kubelet port of the node is unknown"))?;
    let port = port_of_host(request, &node, kubelet, routes);
    let port = port.unwrap_or(RequestedPort::Kubelet(kubelet));
    Ok(RequestedNode { node, port })
}

/// Returns the port for this node from Host, if Host contains one that is not the kubelet's.
fn port_of_host(
    request: &DelegatedRequest<'_>,
    node: &NodeName,
    kubelet: Port,
    routes: &RouteTable,
) -> Option<RequestedPort> {
    let facts = &request.facts;
    let host = HostPort::parse(single_value(facts.headers, &HOST).ok()??)?;
    let (route, is_address) = match &host.host {
        Host::Name(name) => (routes.by_name(name), false),
        Host::Address(address) => (routes.by_address(*address), true),
    };
    if route.as_ref() != Ok(node) {
        return None;
    }
    let named = host.port.or(facts.implied_port);
    let named = named.or_else(|| Port::new(facts.scheme.default_port()))?;
    if named == kubelet {
        return None;
    }
    // kube-apiserver itself can listen on a port of a node with an agent, and its user's Host then
    // contains that port. Only kubelets serve the stream paths. A direct caller that puts a node's
    // name into SNI does not put an address into Host.
    let is_stream = matches!(KubeletPath::of(facts.uri.path()), KubeletPath::Stream(_));
    let server_name = request.server_name.map(|name| routes.by_name(name));
    let is_by_tls = server_name.is_some_and(|found| found.as_ref() == Ok(node));
    Some(if is_stream || (is_by_tls && is_address) {
        RequestedPort::NamedOrKubelet { named, kubelet }
    } else {
        RequestedPort::Named(named)
    })
}

/// Returns the error for an upgrade request without a node in SNI.
fn no_node_by_tls(request: &DelegatedRequest<'_>) -> DecisionError {
    let what = match request.server_name {
        Some(name) => format!("its TLS server name (SNI) {name} is no known node"),
        None => "its TLS has no server name (SNI)".to_owned(),
    };
    let pods = match KubeletPath::of(request.facts.uri.path()) {
        KubeletPath::Stream(_) => ", or let this server look pods up (in a cluster, --pod-lookup)",
        KubeletPath::Malformed | KubeletPath::Other => "",
    };
    bad_request(format!(
        "the node of this upgrade request is not known: {what}, and Host may be a user's; start kube-apiserver with \
         --kubelet-certificate-authority, which makes it send the node's name{pods}"
    ))
}

#[cfg(test)]
mod tests;
