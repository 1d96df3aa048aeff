//! Parsing of a request on a CONNECT listener, and its destination. All functions are pure.

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Uri};
use tunnel_proto::wire::name::{NodeName, Port};

use super::{DecisionError, Host, HostPort, bad_request, check_path, may_be_upgrade};
use crate::destination::{DialTarget, RequestedDestination, RequestedNode};
use crate::dial_policy::{AddressOwner, ClusterNetworks};
use crate::routes::{RouteError, RouteTable};

/// The target of a request and the kind of access to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProxyRequest {
    pub kind: RequestKind,
    pub host: Host,
    pub port: Port,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestKind {
    /// A byte stream in both directions.
    Connect,
    /// One plain HTTP request that only reads.
    Read,
}

impl std::fmt::Display for ProxyRequest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{}:{}", self.host, self.port)
    }
}

impl ProxyRequest {
    /// Parses the head of a request.
    ///
    /// # Errors
    /// Returns a [`DecisionError`] if the request leads to no target.
    pub fn of(method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Self, DecisionError> {
        if *method == Method::CONNECT {
            return Self::of_connect(uri, headers);
        }
        let Some(scheme) = uri.scheme() else {
            return Err(bad_request(
                "this port is a proxy: send CONNECT HOST:PORT, or GET with the whole http:// URL",
            ));
        };
        if *method != Method::GET && *method != Method::HEAD {
            return Err(DecisionError::Unsupported(
                "only CONNECT, GET and HEAD are supported on this port",
            ));
        }
        // An upgrade in a plain request would turn a password for metrics into shell access.
        if may_be_upgrade(headers) {
            return Err(DecisionError::Unsupported(
                "upgrades are not supported on this port; send CONNECT",
            ));
        }
        if *scheme != http::uri::Scheme::HTTP {
            return Err(bad_request(
                "only http:// URLs are supported; send CONNECT for TLS",
            ));
        }
        check_path(uri, headers)?;
        let (host, port) = host_and_port(uri)?;
        let port = port
            .or_else(|| Port::new(80))
            .ok_or_else(|| bad_request("no port"))?;
        Ok(Self {
            kind: RequestKind::Read,
            host,
            port,
        })
    }

    fn of_connect(uri: &Uri, headers: &HeaderMap) -> Result<Self, DecisionError> {
        if uri.scheme().is_some() || uri.path_and_query().is_some() {
            return Err(bad_request("CONNECT needs HOST:PORT and nothing else"));
        }
        // The end of a body and the beginning of the tunnel would be ambiguous (RFC 9110, section
        // 9.3.6).
        let has_length = headers
            .get_all(CONTENT_LENGTH)
            .iter()
            .any(|length| length != "0");
        if headers.contains_key(TRANSFER_ENCODING) || has_length {
            return Err(bad_request("CONNECT has no body"));
        }
        let (host, port) = host_and_port(uri)?;
        let port = port.ok_or_else(|| bad_request("CONNECT needs a port"))?;
        Ok(Self {
            kind: RequestKind::Connect,
            host,
            port,
        })
    }

    /// Returns the destination of the request. `has_agent` returns whether a node has a connected
    /// agent.
    ///
    /// # Errors
    /// Returns a [`DecisionError`] if the request leads to no target.
    pub fn resolve(
        &self,
        routes: &RouteTable,
        cluster: &ClusterNetworks,
        has_agent: impl Fn(&NodeName) -> bool,
    ) -> Result<RequestedDestination<DialTarget>, DecisionError> {
        let direct = |addresses| {
            let target = DialTarget::Addresses(addresses);
            Ok(RequestedDestination::Direct(target, self.port))
        };
        let node = match &self.host {
            Host::Name(name) => match routes.known_by_name(name) {
                Ok(node) => node,
                // What another server says diverts no name that this one may dial itself.
                Err(RouteError::UnknownName(name))
                    if (!name.as_str().contains('.') || cluster.is_empty())
                        && routes.is_held_elsewhere(&name) =>
                {
                    name
                }
                Err(RouteError::UnknownName(name)) if name.is_host_name() => {
                    return Ok(RequestedDestination::Direct(
                        DialTarget::Name(name),
                        self.port,
                    ));
                }
                Err(
                    error @ (RouteError::UnknownName(_)
                    | RouteError::UnknownAddress(_)
                    | RouteError::AmbiguousAddress(..)
                    | RouteError::AmbiguousName(..)),
                ) => return Err(error.into()),
            },
            Host::Address(address) => match cluster.owner(*address, routes, &has_agent) {
                AddressOwner::Agent(node) => node,
                AddressOwner::CloudNode | AddressOwner::Network | AddressOwner::Unknown => {
                    return direct(vec![address.to_canonical()]);
                }
                AddressOwner::Conflicting(conflict) => return Err(conflict.into()),
            },
        };
        // A node in the cloud has no agent, so the server reaches it over the network like any
        // other host.
        if let Some(addresses) = cluster.cloud_node(&node).filter(|_| !has_agent(&node)) {
            return direct(addresses.to_vec());
        }
        let port = routes.requested_port(&node, self.port);
        Ok(RequestedDestination::Node(RequestedNode { node, port }))
    }
}

fn host_and_port(uri: &Uri) -> Result<(Host, Option<Port>), DecisionError> {
    let parsed = uri
        .authority()
        .and_then(|text| HostPort::parse(text.as_str()));
    let parsed =
        parsed.ok_or_else(|| bad_request("the target is not a name or address with a port"))?;
    Ok((parsed.host, parsed.port))
}

#[cfg(test)]
mod tests;
