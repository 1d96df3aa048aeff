//! Settings of the embedded DNS server: listen address, addresses of edge nodes, and upstream
//! resolvers.

use std::net::SocketAddr;
use std::time::Duration;

use tunnel_proto::wire::name::NodeName;

use super::{Addresses, Node};

/// Validated settings of the embedded DNS server.
#[derive(Debug, Clone)]
pub struct DnsSettings {
    /// Address for UDP and TCP, on the same port.
    pub listen: SocketAddr,
    /// Zone of the long names `<node>.<zone>`.
    pub zone: Option<NodeName>,
    /// Cluster domains. Only the resolvers of a domain receive queries for names below it.
    pub clusters: Vec<ClusterDomain>,
    /// Resolvers for all other names.
    pub default_resolvers: Resolvers,
    /// Addresses that the names of edge nodes resolve to.
    pub answer: Addresses,
    /// Nodes from the configuration, in addition to the known nodes.
    pub fixed: Vec<Node>,
}

/// A cluster domain such as `cluster.local`, with its resolvers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterDomain {
    /// Domain of the names that belong to the cluster.
    pub domain: NodeName,
    /// Resolvers of the cluster. Without a resolver, names below the domain do not exist, except
    /// those of nodes.
    pub resolvers: Vec<SocketAddr>,
}

/// Resolvers for names that are not local.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolvers {
    /// The resolvers in this host's `/etc/resolv.conf`, read at start-up.
    Host,
    /// These resolvers. The first one that answers is used. An empty list turns forwarding off.
    These(Vec<SocketAddr>),
}

/// Limits of the embedded DNS server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DnsLimits {
    /// Time limit for a forwarded query. The client then receives SERVFAIL.
    pub forward_budget: Duration,
    /// Maximum number of forwarded queries in flight.
    pub forwards: usize,
    /// Maximum number of open TCP connections.
    pub connections: usize,
    /// Maximum number of queries per second from one client.
    pub per_source: u32,
}
