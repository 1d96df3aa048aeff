//! Where the server may dial by itself: what the operator lists, or what a cluster tells of itself; pure, but for the
//! cell that the cluster's side fills.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::process::networks::{Cidr, judged, never_dialled};
use tunnel_proto::process::settings::PortSet;
use tunnel_proto::wire::name::{NodeName, Port};

/// One entry of `--connect-direct`: a network, with ports where not all are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectTarget {
    network: Cidr,
    ports: Option<PortSet>,
}

/// What a cluster tells of addresses that the server reaches without an agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterRanges {
    /// Of Services.
    pub services: Vec<Cidr>,
    /// Of Pods on nodes in the cloud.
    pub pods: Vec<Cidr>,
    /// Nodes in the cloud with their addresses.
    pub cloud_nodes: BTreeMap<NodeName, Vec<IpAddr>>,
}

/// The ranges of this moment; clones share them.
#[derive(Debug, Clone, Default)]
pub struct LiveRanges(Arc<ArcSwap<ClusterRanges>>);

/// What `--connect-direct` allows.
#[derive(Debug, Clone)]
pub enum Allowed {
    /// What the cluster tells, which is nothing outside of one.
    Cluster(LiveRanges),
    /// What the operator lists; the cluster still tells which nodes have no agent.
    Listed(Vec<DirectTarget>, LiveRanges),
}

/// Why an address is not dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// No setting allows it.
    #[error("{1} is {0}, and such addresses are never dialled")]
    Never(&'static str, IpAddr),
    /// Nothing that is allowed contains it.
    #[error("{0} is not within --connect-direct")]
    NotListed(SocketAddr),
}

impl ClusterRanges {
    /// The addresses of a node in the cloud.
    #[must_use]
    pub fn cloud_node(&self, node: &NodeName) -> Option<&[IpAddr]> {
        self.cloud_nodes.get(node).map(Vec::as_slice)
    }

    /// Whether an address is one of Services, of Pods in the cloud, or of a node in the cloud that has no agent.
    #[must_use]
    pub fn owns(&self, ip: IpAddr, has_agent: impl Fn(&NodeName) -> bool) -> bool {
        let ip = ip.to_canonical();
        let has = |(node, addresses): (&NodeName, &Vec<IpAddr>)| {
            addresses.contains(&ip) && !has_agent(node)
        };
        self.is_network(ip) || self.cloud_nodes.iter().any(has)
    }

    fn is_network(&self, ip: IpAddr) -> bool {
        let mut networks = self.services.iter().chain(&self.pods);
        networks.any(|network| covers(network, ip))
    }

    fn contains(&self, ip: IpAddr) -> bool {
        self.is_network(ip) || self.cloud_nodes.values().flatten().any(|node| *node == ip)
    }
}

impl LiveRanges {
    /// The ranges of this moment.
    #[must_use]
    pub fn load(&self) -> Arc<ClusterRanges> {
        self.0.load_full()
    }

    /// Puts others of Services in force.
    pub fn set_services(&self, services: Vec<Cidr>) {
        self.0.rcu(|last| ClusterRanges {
            services: services.clone(),
            ..ClusterRanges::clone(last)
        });
    }

    /// Puts other nodes in force, with the ranges of their Pods.
    pub fn set_nodes(&self, pods: Vec<Cidr>, cloud_nodes: BTreeMap<NodeName, Vec<IpAddr>>) {
        self.0.rcu(|last| ClusterRanges {
            services: last.services.clone(),
            pods: pods.clone(),
            cloud_nodes: cloud_nodes.clone(),
        });
    }
}

impl Allowed {
    /// What the cluster tells.
    #[must_use]
    pub fn cluster(&self) -> Arc<ClusterRanges> {
        match self {
            Self::Cluster(ranges) | Self::Listed(_, ranges) => ranges.load(),
        }
    }

    /// Whether anything may be dialled at all.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        match self {
            Self::Cluster(ranges) => *ranges.load() == ClusterRanges::default(),
            Self::Listed(targets, _) => targets.is_empty(),
        }
    }

    /// Judges an address that something resolved to; the one that is returned is the one to dial.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn judge(&self, address: SocketAddr) -> Result<SocketAddr, Refused> {
        let ip = address.ip().to_canonical();
        let address = SocketAddr::new(ip, address.port());
        if let Some(kind) = never_dialled(judged(ip)) {
            return Err(Refused::Never(kind, ip));
        }
        if judged(ip) != ip {
            // An IPv4 address that a translator would dial: list the address itself.
            return Err(Refused::Never("translated", ip));
        }
        let Some(port) = Port::new(address.port()) else {
            return Err(Refused::NotListed(address));
        };
        let is_allowed = match self {
            Self::Cluster(ranges) => {
                !ETCD_PORTS.contains(&port.get()) && ranges.load().contains(ip)
            }
            Self::Listed(targets, _) => targets.iter().any(|target| target.contains(ip, port)),
        };
        is_allowed
            .then_some(address)
            .ok_or(Refused::NotListed(address))
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
