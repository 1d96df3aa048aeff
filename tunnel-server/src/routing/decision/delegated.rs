//! Where the requests of callers with client-certificate delegation go; pure (`contract` section "Addressing").
//!
//! Such a caller is kube-apiserver, which passes its users' Host and header fields on. What it sends to the kubelet of `edge-1`
//! (Kubernetes 1.36: `pkg/registry/core/pod/rest/subresources.go`, `pkg/registry/core/node/rest/proxy.go`,
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
//! So a node comes from SNI, else from the pod in the path, and from Host only where no user wrote it.

use http::HeaderMap;
use http::header::{CONNECTION, HOST, UPGRADE};
use tunnel_proto::wire::name::{NodeName, Port};

use super::{
    Destination, Host, HostPort, Outcome, ProxyError, RequestFacts, bad_request, check_form,
    choose_node, refused_port, route_failure, single_value,
};
use crate::policy::PortPolicy;
use crate::routing::pod_lookup::{KubeletPath, Pod, PodLookupError};
use crate::routing::routes::{RouteError, RouteTable};

/// A request of a caller with delegation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DelegatedRequest<'a> {
    /// The request itself.
    pub(crate) facts: RequestFacts<'a>,
    /// The name that the caller's TLS asked for.
    pub(crate) server_name: Option<&'a NodeName>,
}

/// What is to be done with a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// Its destination is known.
    Forward(ResolvedDestination),
    /// It goes to the node that this pod runs on.
    LookUp(Pod),
}

/// A destination, and which Host the target sees.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ResolvedDestination {
    pub(crate) destination: Destination,
    /// The target gets the Host of the caller as it is.
    pub(crate) keeps_host: bool,
}

impl From<Destination> for ResolvedDestination {
    fn from(destination: Destination) -> Self {
        Self {
            destination,
            keeps_host: false,
        }
    }
}

/// Decides where a request goes. Selectors are not read.
///
/// # Errors
/// A [`ProxyError`] with the answer for the caller.
pub(crate) fn decide(
    request: &DelegatedRequest<'_>,
    routes: &RouteTable,
    policy: &PortPolicy,
) -> Result<Decision, ProxyError> {
    let facts = &request.facts;
    check_form(facts)?;
    if single_value(facts.headers, &HOST)?.is_none() {
        return Err(bad_request("the request has no Host"));
    }
    match request.server_name.map(|name| routes.by_name(name)) {
        Some(Ok(node)) => return addressed(request, node, routes, policy).map(Decision::Forward),
        // A node was meant, and the user's Host must not choose among those that share the name.
        Some(Err(error @ RouteError::AmbiguousName(..))) => return Err(route_failure(&error)),
        Some(Err(_)) | None => {}
    }
    match KubeletPath::of(facts.uri.path()) {
        KubeletPath::Stream(pod) => Ok(Decision::LookUp(pod)),
        KubeletPath::Malformed => Err(bad_request("the kubelet path does not name a valid pod")),
        KubeletPath::Other => decide_by_host(request, routes, policy).map(Decision::Forward),
    }
}

/// Where a request goes that has no node by SNI, and no pod in its path or nobody to ask for it.
///
/// # Errors
/// A [`ProxyError`] with the answer for the caller, for every upgrade request.
pub(crate) fn decide_by_host(
    request: &DelegatedRequest<'_>,
    routes: &RouteTable,
    policy: &PortPolicy,
) -> Result<ResolvedDestination, ProxyError> {
    let facts = &request.facts;
    if is_upgrade(facts.headers) {
        return Err(no_node_by_tls(request));
    }
    let host = single_value(facts.headers, &HOST)?.and_then(HostPort::parse);
    let host =
        host.ok_or_else(|| bad_request("Host is not a name or address with an optional port"))?;
    let node = choose_node(&host.host, None, None, routes)?;
    addressed(request, node, routes, policy)
}

/// Where a request goes whose pod was looked up.
///
/// # Errors
/// A [`ProxyError`] with the answer for the caller. A look-up that failed never leads to the node of Host.
pub(crate) fn decide_by_pod(
    request: &DelegatedRequest<'_>,
    (pod, found): (&Pod, Result<NodeName, PodLookupError>),
    routes: &RouteTable,
    policy: &PortPolicy,
) -> Result<ResolvedDestination, ProxyError> {
    let unknown = |why: &dyn std::fmt::Display| {
        let text = format!("cannot find the node of pod {pod}: {why}");
        ProxyError::new(Outcome::UnknownNode, text)
    };
    let node = found.map_err(|error| unknown(&error))?;
    // The name of a Node object: no alias of another node stands for it.
    if !routes.is_node(&node) {
        let why = format!(
            "it runs on {node}, which is not a known node; list known nodes with 'tunnel-server nodes'"
        );
        return Err(unknown(&why));
    }
    addressed(request, node, routes, policy)
}

/// The port of a node: Host's when Host names this node, since other callers than kube-apiserver may have delegation, else the
/// kubelet's.
fn addressed(
    request: &DelegatedRequest<'_>,
    node: NodeName,
    routes: &RouteTable,
    policy: &PortPolicy,
) -> Result<ResolvedDestination, ProxyError> {
    let kubelet = routes
        .kubelet_port(&node)
        .ok_or_else(|| bad_request("the kubelet port of the node is unknown"))?;
    let port = port_of_host(request, &node, routes, policy).unwrap_or(kubelet);
    let keeps_host = port == kubelet;
    let target = if keeps_host {
        policy.kubelet(port)
    } else {
        policy
            .target(port)
            .map_err(|refusal| refused_port(&node, port, &refusal))?
    };
    Ok(ResolvedDestination {
        destination: Destination { node, target },
        keeps_host,
    })
}

/// The port that Host means for this node, if it means one.
fn port_of_host(
    request: &DelegatedRequest<'_>,
    node: &NodeName,
    routes: &RouteTable,
    policy: &PortPolicy,
) -> Option<Port> {
    let facts = &request.facts;
    let host = HostPort::parse(single_value(facts.headers, &HOST).ok()??)?;
    let (named, is_address) = match &host.host {
        Host::Name(name) => (routes.by_name(name), false),
        Host::Address(address) => (routes.by_address(*address), true),
    };
    if named.as_ref() != Ok(node) {
        return None;
    }
    let port = host.port.or(facts.implied_port);
    let port = port.or_else(|| Port::new(facts.scheme.default_port()))?;
    // kube-apiserver may itself be at a port of a node with an agent, and its user's Host is then that port. Only kubelets serve
    // the paths of streams, and a caller of its own that puts a node's name into TLS puts no address into Host.
    let is_stream = matches!(KubeletPath::of(facts.uri.path()), KubeletPath::Stream(_));
    let server_name = request.server_name.map(|name| routes.by_name(name));
    let is_by_tls = server_name.is_some_and(|found| found.as_ref() == Ok(node));
    let may_be_of_a_user = is_stream || (is_by_tls && is_address);
    (!may_be_of_a_user || policy.target(port).is_ok()).then_some(port)
}

/// Whether kube-apiserver passed a request on as an upgrade, with its user's Host: a Connection field with "upgrade" anywhere in
/// it (`IsUpgradeRequest` of `staging/src/k8s.io/apimachinery/pkg/util/httpstream`). More than an HTTP server takes for one.
fn is_upgrade(headers: &HeaderMap) -> bool {
    let has_upgrade = |value: &[u8]| {
        let mut windows = value.windows(b"upgrade".len());
        windows.any(|window| window.eq_ignore_ascii_case(b"upgrade"))
    };
    let mut values = headers.get_all(CONNECTION).iter();
    headers.contains_key(UPGRADE) || values.any(|value| has_upgrade(value.as_bytes()))
}

/// The answer to an upgrade request whose TLS says no node.
fn no_node_by_tls(request: &DelegatedRequest<'_>) -> ProxyError {
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
