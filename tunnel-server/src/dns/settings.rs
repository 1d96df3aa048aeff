//! What the embedded DNS is told: where it listens, what edge nodes answer with, and whom it asks about other names.

use std::net::SocketAddr;
use std::time::Duration;

use tunnel_proto::wire::name::NodeName;

use super::{Addresses, Node};

/// Checked settings.
#[derive(Debug, Clone)]
pub struct DnsSettings {
    /// UDP and TCP, on the same port.
    pub listen: SocketAddr,
    /// Long names are `<node>.<zone>`.
    pub zone: Option<NodeName>,
    /// The clusters' domains. Names below them are for their resolvers only.
    pub clusters: Vec<ClusterDomain>,
    /// Who is asked about all other names.
    pub default_resolvers: Resolvers,
    /// What edge nodes answer with.
    pub answer: Addresses,
    /// Names of the configuration, beside the known nodes.
    pub fixed: Vec<Node>,
}

/// A cluster's domain, such as `cluster.local`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterDomain {
    /// The domain.
    pub domain: NodeName,
    /// The cluster's resolvers; without one, names below the domain do not exist, except those of nodes.
    pub resolvers: Vec<SocketAddr>,
}

/// Who is asked about names that are not ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolvers {
    /// Those of this host's `/etc/resolv.conf`, as read at start.
    Host,
    /// These, the first that answers; with none nothing is forwarded.
    These(Vec<SocketAddr>),
}

/// What bounds the embedded DNS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DnsLimits {
    /// Time for an answer from elsewhere; then SERVFAIL.
    pub forward_budget: Duration,
    /// Forwarded queries under way.
    pub forwards: usize,
    /// TCP connections open.
    pub connections: usize,
    /// Queries of one source, per second.
    pub per_source: u32,
}
