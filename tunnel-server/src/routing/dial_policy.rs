//! Where the server may dial by itself: what the operator lists, or what a cluster tells of itself; pure, but for the
//! cell that the cluster's side fills.
//!
//! Node objects are hostile input. An address that several claims contradict each other about is never dialled, and what a
//! node behind an agent claims is never dialled past its agent, also when a name resolves to it.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::process::networks::{Cidr, effective_ip, forbidden_kind};
use tunnel_proto::process::settings::PortSet;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::ingress::error::{Outcome, ProxyError};
use crate::routing::routes::{RouteError, RouteTable};

/// One entry of `--connect-direct`: a network, with ports where not all are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectTarget {
    network: Cidr,
    ports: Option<PortSet>,
}

/// What a cluster tells of addresses that the server reaches without an agent. Kubelets write most of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterNetworks {
    /// Of Services.
    pub services: Vec<Cidr>,
    /// Of Pods, on all nodes.
    pub pods: Vec<PodNetwork>,
    /// Nodes in the cloud with their addresses; all others are reached through agents.
    pub cloud_nodes: BTreeMap<NodeName, Vec<IpAddr>>,
    /// Addresses of the server's own Service.
    pub own: Vec<IpAddr>,
}

/// A network of Pods, as a Node object has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNetwork {
    /// The network.
    pub network: Cidr,
    /// The Node.
    pub node: NodeName,
}

/// To what an address belongs, for a dial of the server's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AddressOwner {
    /// A node that is reached through its agent alone.
    Agent(NodeName),
    /// A node in the cloud without an agent.
    CloudNode,
    /// Services, or Pods in the cloud.
    Network,
    /// Several; none of them is believed.
    Conflicting(ClaimConflict),
    /// Nothing that is known.
    Unknown,
}

/// Conflicting claims on one address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClaimConflict {
    /// Of nodes.
    #[error(transparent)]
    Nodes(RouteError),
    /// Of a node, and of the Services in whose network it is.
    #[error("{0} is in the network of Services, and the address of {1}; address the node by name")]
    Services(IpAddr, NodeName),
}

/// What is known of nodes and of this host when an address is judged.
#[derive(Clone, Copy)]
pub(crate) struct AddressClaims<'a> {
    /// Who has which address.
    pub(crate) routes: &'a RouteTable,
    /// Whether a node has an agent that is connected.
    pub(crate) has_agent: &'a (dyn Fn(&NodeName) -> bool + Send + Sync),
    /// Whether an address is one of this host.
    pub(crate) is_own: &'a (dyn Fn(IpAddr) -> bool + Send + Sync),
    /// Ports of this server.
    pub(crate) own_ports: &'a [Port],
}

/// The ranges of this moment; clones share them.
#[derive(Debug, Clone, Default)]
pub struct LiveClusterNetworks(Arc<ArcSwap<ClusterNetworks>>);

/// What `--connect-direct` allows.
#[derive(Debug, Clone)]
pub enum DialPolicy {
    /// What the cluster tells, which is nothing outside of one.
    Cluster(LiveClusterNetworks),
    /// What the operator lists; the cluster still tells which nodes have no agent.
    Listed(Vec<DirectTarget>, LiveClusterNetworks),
}

/// Why an address is not dialled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DialRefusal {
    /// No setting allows it.
    #[error("{1} is {0}, and such addresses are never dialed")]
    Never(&'static str, IpAddr),
    /// Nothing that is allowed contains it.
    #[error("{0} is not within --connect-direct")]
    NotListed(SocketAddr),
    /// The address is a node's, and the way there is its agent.
    #[error(
        "{0} is the address of {1}, which is reached through its agent; address the node by name"
    )]
    Agent(IpAddr, NodeName),
    /// Objects of the cluster contradict each other.
    #[error(transparent)]
    Conflicting(ClaimConflict),
    /// An object of the cluster leads back to this server.
    #[error("{0} is an address of this server; list it in --connect-direct to allow it")]
    Own(SocketAddr),
}

impl DialRefusal {
    /// The answer for a caller who wrote `target`.
    pub(crate) fn failure(&self, target: &str) -> ProxyError {
        let outcome = match self {
            Self::Conflicting(_) => Outcome::AmbiguousAddress,
            Self::Never(..) | Self::NotListed(_) | Self::Agent(..) | Self::Own(_) => {
                Outcome::RefusedByPolicy
            }
        };
        ProxyError::new(outcome, format!("{target}: {self}"))
    }
}

impl ClusterNetworks {
    /// The addresses of a node in the cloud.
    #[must_use]
    pub fn cloud_node(&self, node: &NodeName) -> Option<&[IpAddr]> {
        self.cloud_nodes.get(node).map(Vec::as_slice)
    }

    /// To what an address belongs.
    ///
    /// Kubelets write the addresses and networks of their Nodes. A network takes no address from a node, and one of a node
    /// in the cloud takes none from the network of a node behind an agent. No kubelet writes the networks of Services: a
    /// network of Pods means nothing there, and a node that claims an address there is not believed, nor are the Services.
    pub(crate) fn owner(
        &self,
        ip: IpAddr,
        routes: &RouteTable,
        has_agent: &dyn Fn(&NodeName) -> bool,
    ) -> AddressOwner {
        let ip = ip.to_canonical();
        let is_direct = |node: &NodeName| self.cloud_nodes.contains_key(node) && !has_agent(node);
        let is_service = self.services.iter().any(|network| network.contains(ip));
        match routes.by_address(ip) {
            Ok(node) if is_service => AddressOwner::Conflicting(ClaimConflict::Services(ip, node)),
            Ok(node) if is_direct(&node) => AddressOwner::CloudNode,
            Ok(node) => AddressOwner::Agent(node),
            Err(RouteError::UnknownAddress(_)) if is_service => AddressOwner::Network,
            Err(RouteError::UnknownAddress(_)) => {
                let mut around = self.pods.iter().filter(|pods| pods.network.contains(ip));
                let is_in_cloud = around.clone().any(|pods| is_direct(&pods.node));
                if is_in_cloud && around.all(|pods| is_direct(&pods.node)) {
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
    /// The ranges of this moment.
    #[must_use]
    pub fn load(&self) -> Arc<ClusterNetworks> {
        self.0.load_full()
    }

    /// Puts others in force.
    pub fn set(&self, ranges: ClusterNetworks) {
        self.0.store(Arc::new(ranges));
    }
}

impl DialPolicy {
    /// What the cluster tells.
    #[must_use]
    pub fn cluster(&self) -> Arc<ClusterNetworks> {
        match self {
            Self::Cluster(ranges) | Self::Listed(_, ranges) => ranges.load(),
        }
    }

    /// Whether anything may be dialled at all.
    #[must_use]
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

    /// Judges an address that something resolved to; the one that is returned is the one to dial.
    ///
    /// # Errors
    /// [`DialRefusal`].
    pub(crate) fn check(
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
            // An IPv4 address that a translator would dial: list the address itself.
            return Err(DialRefusal::Never("translated", ip));
        }
        let Some(port) = Port::new(address.port()) else {
            return Err(DialRefusal::NotListed(address));
        };
        let cluster = self.cluster();
        let owner = cluster.owner(ip, claims.routes, &|node| (claims.has_agent)(node));
        let this_port = [port];
        // On a host of the control plane the server shares the node's address: there only its own ports are left out.
        let own_ports = match owner {
            AddressOwner::Agent(node) => return Err(DialRefusal::Agent(ip, node)),
            AddressOwner::Conflicting(conflict) => return Err(DialRefusal::Conflicting(conflict)),
            AddressOwner::CloudNode => Some(claims.own_ports),
            AddressOwner::Network => Some(&this_port[..]),
            AddressOwner::Unknown => None,
        };
        match (self, own_ports) {
            (Self::Listed(targets, _), _) => {
                let is_listed = targets.iter().any(|target| target.contains(ip, port));
                is_listed
                    .then_some(address)
                    .ok_or(DialRefusal::NotListed(address))
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
    /// No node is known, and no address is this host's.
    pub(crate) fn none(routes: &RouteTable) -> AddressClaims<'_> {
        AddressClaims {
            routes,
            has_agent: &|_| false,
            is_own: &|_| false,
            own_ports: &[],
        }
    }
}

impl DirectTarget {
    fn contains(&self, ip: IpAddr, port: Port) -> bool {
        covers(&self.network, ip) && self.ports.as_ref().is_none_or(|ports| ports.contains(port))
    }
}

/// etcd on nodes of the control plane: who means it lists it.
const ETCD_PORTS: RangeInclusive<u16> = 2379..=2381;

/// This host's own loopback is in no network but one of loopback addresses: 0.0.0.0/0 means other hosts.
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
