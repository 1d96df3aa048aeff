//! Dial policy of the server: the addresses that the operator lists, or those that the objects of a
//! cluster describe. All functions are pure. The only state is the cell that the controllers of the
//! cluster fill.
//!
//! Node objects are hostile input. The server never dials an address that is the subject of
//! conflicting claims. An address that a node behind an agent claims is reached only through that
//! agent, even if a name resolves to the address.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_networks::{Cidr, effective_ip, forbidden_kind};
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_proto::wire::ports::PortSet;
use tunnel_tables::SharedMap;

use crate::routes::{RouteError, RouteTable};

/// One entry of `--connect-direct`: a network, and its ports if the entry does not allow all ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectTarget {
    network: Cidr,
    ports: Option<PortSet>,
}

/// The addresses that the server reaches without an agent, according to the cluster. Kubelets write
/// most of this data.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterNetworks {
    /// The networks of the cluster's Services.
    pub services: Vec<Cidr>,
    /// Networks of Pods, by node.
    pub pods: SharedMap<NodeName, Vec<Cidr>>,
    /// Nodes in the cloud and their addresses. The server reaches all other nodes through agents.
    pub cloud_nodes: SharedMap<NodeName, Vec<IpAddr>>,
    /// Addresses of the server's own Service.
    pub own: Vec<IpAddr>,
}

impl ClusterNetworks {
    /// Returns whether there is no network, as outside of a cluster.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The owner of an address, for connections that the server dials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AddressOwner {
    /// A node that is reachable only through its agent.
    Agent(NodeName),
    /// A node in the cloud without an agent.
    CloudNode,
    /// Services, or Pods in the cloud.
    Network,
    /// Several owners claim the address. The server trusts none of the claims.
    Conflicting(ClaimConflict),
    /// No known object owns the address.
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimConflict {
    /// Several nodes claim the address.
    #[error(transparent)]
    Nodes(RouteError),
    /// A node claims an address in a network of Services.
    #[error("{0} is in the network of Services, and the address of {1}; address the node by name")]
    Services(IpAddr, NodeName),
}

/// The known nodes and the addresses of this host, as input for a check of an address.
#[derive(Clone, Copy)]
pub struct AddressClaims<'a> {
    /// The owners of addresses.
    pub routes: &'a RouteTable,
    pub has_agent: &'a (dyn Fn(&NodeName) -> bool + Send + Sync),
    /// Returns whether an address belongs to this host.
    pub is_own: &'a (dyn Fn(IpAddr) -> bool + Send + Sync),
    pub own_ports: &'a [Port],
}

impl fmt::Debug for AddressClaims<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut claims = formatter.debug_struct("AddressClaims");
        claims.field("own_ports", &self.own_ports);
        claims.finish_non_exhaustive()
    }
}

/// The current networks of the cluster. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct LiveClusterNetworks(Arc<ArcSwap<ClusterNetworks>>);

/// The addresses that the server may dial, from `--connect-direct` or from the cluster.
#[derive(Debug, Clone)]
pub enum DialPolicy {
    /// Allows the networks of the cluster. Outside a cluster there are none.
    Cluster(LiveClusterNetworks),
    /// Allows the networks that the operator lists. The cluster still determines which nodes have
    /// no agent.
    Listed(Vec<DirectTarget>, LiveClusterNetworks),
}

/// Reason why the server does not dial an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DialRefusal {
    /// No setting can allow this kind of address.
    #[error("{1} is {0}, and such addresses are never dialed")]
    Never(&'static str, IpAddr),
    /// No allowed network contains the address.
    #[error("{0} is not within --connect-direct")]
    NotListed(SocketAddr),
    /// The address belongs to a node that is reached through its agent.
    #[error(
        "{0} is the address of {1}, which is reached through its agent; address the node by name"
    )]
    Agent(IpAddr, NodeName),
    /// Objects of the cluster contain conflicting claims.
    #[error(transparent)]
    Conflicting(ClaimConflict),
    /// A port of this server, which the operator has not listed as such.
    #[error(
        "{0} is an address of this server; list it with its port in --connect-direct to allow it"
    )]
    Own(SocketAddr),
}

impl ClusterNetworks {
    /// Replaces what a Node object says. `cloud_addresses` are those of a node in the cloud.
    pub fn set_node(
        &mut self,
        node: &NodeName,
        pods: Vec<Cidr>,
        cloud_addresses: Option<Vec<IpAddr>>,
    ) {
        if pods.is_empty() {
            self.pods.remove(node);
        } else {
            self.pods.insert(node.clone(), pods);
        }
        match cloud_addresses {
            Some(addresses) => self.cloud_nodes.insert(node.clone(), addresses),
            None => self.cloud_nodes.remove(node),
        };
    }

    pub fn cloud_node(&self, node: &NodeName) -> Option<&[IpAddr]> {
        self.cloud_nodes.get(node).map(Vec::as_slice)
    }

    /// Returns the owner of an address.
    ///
    /// Kubelets write the addresses and networks of their Nodes. An address of a node takes
    /// precedence over a network that contains it. A network of a node in the cloud does not take
    /// precedence over a network of a node behind an agent that contains the same address. Kubelets
    /// do not write the networks of Services. Within a network of Services, networks of Pods have
    /// no effect. A node that claims an address there causes a conflict: the server trusts neither
    /// the node nor the Services.
    pub fn owner(
        &self,
        ip: IpAddr,
        routes: &RouteTable,
        has_agent: &dyn Fn(&NodeName) -> bool,
    ) -> AddressOwner {
        let ip = ip.to_canonical();
        let is_direct = |node: &NodeName| self.cloud_nodes.contains_key(node) && !has_agent(node);
        let is_service = self.services.iter().any(|network| network.contains(ip));
        match routes.known_by_address(ip) {
            Ok(node) if is_service => AddressOwner::Conflicting(ClaimConflict::Services(ip, node)),
            Ok(node) if is_direct(&node) => AddressOwner::CloudNode,
            Ok(node) => AddressOwner::Agent(node),
            Err(RouteError::UnknownAddress(_)) if is_service => AddressOwner::Network,
            Err(RouteError::UnknownAddress(_)) => {
                let contains =
                    |networks: &[Cidr]| networks.iter().any(|network| network.contains(ip));
                let around = self.pods.iter().filter(|(_node, pods)| contains(pods));
                let mut around = around.map(|(node, _pods)| node).peekable();
                if around.peek().is_some() && around.all(is_direct) {
                    AddressOwner::Network
                } else {
                    AddressOwner::Unknown
                }
            }
            Err(
                error @ (RouteError::AmbiguousAddress(..)
                | RouteError::UnknownName(_)
                | RouteError::AmbiguousName(..)),
            ) => AddressOwner::Conflicting(ClaimConflict::Nodes(error)),
        }
    }
}

impl LiveClusterNetworks {
    pub fn load(&self) -> Arc<ClusterNetworks> {
        self.0.load_full()
    }

    pub fn set(&self, ranges: ClusterNetworks) {
        self.0.store(Arc::new(ranges));
    }
}

impl DialPolicy {
    pub fn cluster(&self) -> Arc<ClusterNetworks> {
        match self {
            Self::Cluster(ranges) | Self::Listed(_, ranges) => ranges.load(),
        }
    }

    /// Returns whether the policy allows no address at all.
    pub fn is_deny_all(&self) -> bool {
        match self {
            Self::Cluster(ranges) => {
                let ranges = ranges.load();
                ranges.services.is_empty()
                    && ranges.pods.is_empty()
                    && ranges.cloud_nodes.is_empty()
            }
            Self::Listed(targets, _) => targets.is_empty(),
        }
    }

    /// Checks an address that a name resolved to. Returns the address to dial.
    ///
    /// # Errors
    /// Returns a [`DialRefusal`] if the policy does not allow the address.
    pub fn check(
        &self,
        address: SocketAddr,
        claims: &AddressClaims<'_>,
    ) -> Result<SocketAddr, DialRefusal> {
        let ip = address.ip().to_canonical();
        let address = SocketAddr::new(ip, address.port());
        if let Some(kind) = forbidden_kind(effective_ip(ip)) {
            return Err(DialRefusal::Never(kind, ip));
        }
        if effective_ip(ip) != ip {
            // A translator would dial an IPv4 address for this address. The operator must list the
            // IPv4 address itself.
            return Err(DialRefusal::Never("translated", ip));
        }
        let Some(port) = Port::new(address.port()) else {
            return Err(DialRefusal::NotListed(address));
        };
        let cluster = self.cluster();
        let owner = cluster.owner(ip, claims.routes, &|node| (claims.has_agent)(node));
        let this_port = [port];
        // On a host of the control plane, the server shares the address of the node. There only the
        // server's own ports are excluded.
        let own_ports = match owner {
            AddressOwner::Agent(node) => return Err(DialRefusal::Agent(ip, node)),
            AddressOwner::Conflicting(conflict) => return Err(DialRefusal::Conflicting(conflict)),
            AddressOwner::CloudNode => Some(claims.own_ports),
            AddressOwner::Network => Some(&this_port[..]),
            AddressOwner::Unknown => None,
        };
        match (self, own_ports) {
            (Self::Listed(targets, _), _) => {
                let mut listed = targets.iter().filter(|target| target.contains(ip, port));
                if !listed.clone().any(|_| true) {
                    return Err(DialRefusal::NotListed(address));
                }
                // A network that contains an address of this host, or of the Service that leads to
                // it, does not mean its server. The ports of the Service are others than the server's.
                let is_own = cluster.own.contains(&ip)
                    || claims.own_ports.contains(&port) && (claims.is_own)(ip);
                if is_own && !listed.any(|target| target.names(ip)) {
                    return Err(DialRefusal::Own(address));
                }
                Ok(address)
            }
            (Self::Cluster(_), None) => Err(DialRefusal::NotListed(address)),
            (Self::Cluster(_), Some(_)) if ip.is_loopback() || ETCD_PORTS.contains(&port.get()) => {
                Err(DialRefusal::NotListed(address))
            }
            (Self::Cluster(_), Some(own_ports)) => {
                let is_own =
                    cluster.own.contains(&ip) || own_ports.contains(&port) && (claims.is_own)(ip);
                (!is_own)
                    .then_some(address)
                    .ok_or(DialRefusal::Own(address))
            }
        }
    }
}

#[cfg(test)]
impl AddressClaims<'_> {
    /// Claims without known nodes and without addresses of this host.
    pub fn none(routes: &RouteTable) -> AddressClaims<'_> {
        AddressClaims {
            routes,
            has_agent: &|_| false,
            is_own: &|_| false,
            own_ports: &[],
        }
    }
}

impl DirectTarget {
    /// Returns whether the entry has this address alone, and ports.
    fn names(&self, ip: IpAddr) -> bool {
        self.network == Cidr::from(ip) && self.ports.is_some()
    }

    fn contains(&self, ip: IpAddr, port: Port) -> bool {
        covers(&self.network, ip) && self.ports.as_ref().is_none_or(|ports| ports.contains(port))
    }
}

/// Ports of etcd on nodes of the control plane. An operator who needs them must list them.
const ETCD_PORTS: RangeInclusive<u16> = 2379..=2381;

/// Returns whether a network covers an address. Only a network of loopback addresses covers the
/// loopback addresses of this host. `0.0.0.0/0` means other hosts.
fn covers(network: &Cidr, ip: IpAddr) -> bool {
    network.contains(ip) && (!ip.is_loopback() || network.start().is_loopback())
}

impl FromStr for DirectTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let (network, ports) = match text.strip_prefix('[') {
            Some(rest) => {
                let (network, rest) = rest
                    .split_once(']')
                    .ok_or_else(|| format!("{text:?} has no closing bracket"))?;
                (network, rest.strip_prefix(':'))
            }
            // An IPv6 network without brackets has no ports.
            None if text.matches(':').count() > 1 => (text, None),
            None => match text.split_once(':') {
                Some((network, ports)) => (network, Some(ports)),
                None => (text, None),
            },
        };
        let network = network
            .parse()
            .map_err(|error| format!("{text:?}: {error}"))?;
        let ports = ports
            .map(|ports| {
                let ports: PortSet = ports
                    .parse()
                    .map_err(|error| format!("{text:?}: {error}"))?;
                let has_some = ports.ranges().next().is_some();
                has_some
                    .then_some(ports)
                    .ok_or_else(|| format!("{text:?} names no port"))
            })
            .transpose()?;
        Ok(Self { network, ports })
    }
}

#[cfg(test)]
mod tests;
