//! The destination of a request or stream, as a caller asks for it and as the server reaches it.

use std::net::IpAddr;

use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

/// The destination that a request asks for. `D` is what the server needs to dial a target itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestedDestination<D> {
    Node(RequestedNode),
    Configured(Destination),
    /// A target that the server dials, and its port.
    Direct(D, Port),
}

impl<D> RequestedDestination<D> {
    /// Maps what the server needs to dial a target itself.
    pub fn map_direct<E>(self, map: impl FnOnce(D) -> E) -> RequestedDestination<E> {
        match self {
            Self::Node(requested) => RequestedDestination::Node(requested),
            Self::Configured(destination) => RequestedDestination::Configured(destination),
            Self::Direct(direct, port) => RequestedDestination::Direct(map(direct), port),
        }
    }
}

/// The node and the port that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedNode {
    /// The node whose agent carries the request.
    pub node: NodeName,
    pub port: RequestedPort,
}

/// The port of a node that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestedPort {
    /// The port that the caller names.
    Named(Port),
    /// The port of the node's kubelet, from the Node object or by default.
    Kubelet(Port),
    /// A port that the caller names, or whose user does. The port of the kubelet applies if the
    /// lists do not contain the named port. Only for callers with delegation.
    NamedOrKubelet {
        /// The port in Host.
        named: Port,
        /// The port of the node's kubelet.
        kubelet: Port,
    },
}

impl RequestedPort {
    /// Returns the port of the node's kubelet, as far as it is known to matter.
    pub fn kubelet(self) -> Option<Port> {
        match self {
            Self::Named(_) => None,
            Self::Kubelet(port) | Self::NamedOrKubelet { kubelet: port, .. } => Some(port),
        }
    }

    /// Returns the port that the request asks for, before the policy decides.
    pub fn in_request(self) -> Port {
        match self {
            Self::Named(port) | Self::Kubelet(port) => port,
            Self::NamedOrKubelet { named, .. } => named,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DialTarget {
    /// A name that must be resolved.
    Name(NodeName),
    /// Addresses in order of preference.
    Addresses(Vec<IpAddr>),
}

/// A destination behind an agent, and the choice of the Host field for the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTarget {
    /// The node and the target.
    pub destination: Destination,
    /// The target receives the caller's Host unchanged.
    pub keeps_host: bool,
}

/// The destination of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// The node whose agent carries the request.
    pub node: NodeName,
    /// The target that the agent dials.
    pub target: Target,
}

impl Destination {
    /// Returns the Host field for the target: `node:port`, or the loopback address for loopback
    /// targets.
    pub fn host_field(&self) -> String {
        match &self.target {
            Target::Loopback(port) => format!("127.0.0.1:{port}"),
            Target::Node(port) => format!("{}:{port}", self.node),
            Target::Host(host, port) => format!("{host}:{port}"),
        }
    }

    /// Returns whether a Host field is the one for the target, as [`Self::host_field`] returns it.
    pub fn is_host_field(&self, field: &str) -> bool {
        let (host, port) = match &self.target {
            Target::Loopback(port) => ("127.0.0.1", port),
            Target::Node(port) => (self.node.as_str(), port),
            Target::Host(_, _) => return field == self.host_field(),
        };
        let digits = field.strip_prefix(host);
        let digits = digits.and_then(|rest| rest.strip_prefix(':'));
        digits.is_some_and(|digits| {
            !digits.starts_with(['0', '+']) && digits.parse() == Ok(port.get())
        })
    }
}

impl std::fmt::Display for Destination {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} {}", self.node, self.target)
    }
}

/// One entry of `services:`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpService {
    /// Name of the service, for logs.
    pub name: String,
    /// Destination of the service's connections.
    pub destination: Destination,
}

/// Scheme of a listener. A listener with TLS also uses TLS towards its targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    /// Plain HTTP, without TLS.
    Http,
    /// HTTP over TLS (https).
    Https,
}

impl Scheme {
    /// Returns the port that applies when Host contains none.
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}
