//! Short descriptions of the route of a CONNECT, for test tables.

use std::net::{IpAddr, SocketAddr};

use http::Request;
use tunnel_proto::wire::name::{NodeName, Port};

use super::dial::filter_allowed;
use crate::ingress::error::ProxyError;
use crate::routing::routes::RouteTable;
use tunnel_routing::decision::proxy::ProxyRequest;
use tunnel_routing::destination::{DialTarget, RequestedDestination};
use tunnel_routing::dial_policy::{AddressClaims, DialPolicy, LiveClusterNetworks};
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::{
    Access, AccessCaller, Listener, PortPolicy, PortSettings, Route, locate,
};

/// Returns the route for an anonymous caller of a CONNECT listener.
pub(crate) fn authorize_anonymous<D>(
    policy: &PortPolicy,
    destination: RequestedDestination<D>,
) -> Result<Route<D>, ProxyError> {
    let access = Access {
        caller: AccessCaller {
            listener: Listener::Connect,
            ..AccessCaller::ANONYMOUS
        },
        destination,
        operation: RequestedOperation::Connect,
    };
    let located = locate(policy, access)?;
    policy.check(&located.access)?;
    Ok(located.route)
}

/// A server in a cluster.
#[derive(Debug)]
pub(crate) struct ClusterFixture {
    pub(crate) routes: RouteTable,
    pub(crate) ranges: LiveClusterNetworks,
    /// Nodes whose agents are connected.
    pub(crate) agents: Vec<NodeName>,
    /// Addresses of the server.
    pub(crate) own: Vec<IpAddr>,
}

impl ClusterFixture {
    /// Returns `agent NODE`, `direct ADDRESSES`, `name NAME` for a name that must be resolved, or
    /// the status of the refusal.
    pub(crate) fn leads(&self, target: &str) -> String {
        let own_ports: Vec<_> = Port::new(10264).into_iter().collect();
        let policy = PortPolicy::new(PortSettings::default(), own_ports.clone());
        let request = Request::builder().method("CONNECT").uri(target);
        let request = request.body(()).unwrap();
        let has_agent = |node: &NodeName| self.agents.contains(node);
        let proxy_request =
            ProxyRequest::of(request.method(), request.uri(), request.headers()).unwrap();
        let route = proxy_request
            .resolve(&self.routes, &self.ranges.load(), has_agent)
            .map_err(ProxyError::from)
            .and_then(|requested| authorize_anonymous(&policy, requested));
        let addresses = match route {
            Ok(Route::Agent(target)) => return format!("agent {}", target.destination.node),
            Ok(Route::Direct(DialTarget::Name(name))) => return format!("name {name}"),
            Ok(Route::Direct(DialTarget::Addresses(addresses))) => addresses,
            Err(failure) => return failure.outcome.status().as_u16().to_string(),
        };
        let claims = AddressClaims {
            routes: &self.routes,
            has_agent: &has_agent,
            is_own: &|ip| self.own.contains(&ip),
            own_ports: &own_ports,
        };
        let addresses = addresses.into_iter();
        let addresses = addresses.map(|ip| SocketAddr::new(ip, proxy_request.port.get()));
        let dial_policy = DialPolicy::Cluster(self.ranges.clone());
        match filter_allowed(&dial_policy, addresses.collect(), &claims) {
            Ok(addresses) => {
                let addresses: Vec<_> = addresses.iter().map(|to| to.ip().to_string()).collect();
                format!("direct {}", addresses.join(" "))
            }
            Err(why) => ProxyError::from_dial(&why, target)
                .outcome
                .status()
                .as_u16()
                .to_string(),
        }
    }
}
