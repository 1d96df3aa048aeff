//! The destination of a request or stream: a node, and the target that its agent dials.

use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::NodeName;

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
    #[must_use]
    pub fn host_field(&self) -> String {
        match &self.target {
            Target::Loopback(port) => format!("127.0.0.1:{port}"),
            Target::Node(port) => format!("{}:{port}", self.node),
            Target::Host(host, port) => format!("{host}:{port}"),
        }
    }
}

impl std::fmt::Display for Destination {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} {}", self.node, self.target)
    }
}

/// One entry of `services:`.
#[derive(Debug, Clone)]
pub struct Service {
    /// Name of the service, for logs.
    pub name: String,
    /// Destination of the service's connections.
    pub destination: Destination,
}

/// Scheme of a listener. A listener with TLS also uses TLS towards its targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// Plain HTTP, without TLS.
    Http,
    /// HTTP over TLS (https).
    Https,
}

impl Scheme {
    /// Returns the port that applies when Host contains none.
    #[must_use]
    pub fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}
