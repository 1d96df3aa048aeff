//! Route table: maps names and addresses to nodes. A clone shares structure: a change of a node costs
//! the logarithm of their number.
//!
//! The table contains desired state only. The registry knows which agents are connected. A node is
//! in the table because of a token, a certificate or a Node object. An address is in the table because
//! an operator or the cluster assigned it, and never because an agent claims it. A name that is not in
//! the table is that of a node while another server holds a node of this name: what another server
//! says adds names, and changes no entry.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::ops::Bound;
use std::sync::Arc;

use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_tables::{SharedMap, SharedSet};

use crate::destination::RequestedPort;

/// Returns whether another server holds a node.
pub type IsHeldElsewhere = Arc<dyn Fn(&NodeName) -> bool + Send + Sync>;

/// The nodes that other servers hold at this moment. All values are equal.
#[derive(Clone, Default)]
struct HeldElsewhere(Option<IsHeldElsewhere>);

impl PartialEq for HeldElsewhere {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for HeldElsewhere {}

impl fmt::Debug for HeldElsewhere {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("HeldElsewhere")
    }
}

/// A table of known names and addresses.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RouteTable {
    nodes: SharedMap<NodeName, NodeSources>,
    /// The nodes with each host name. The name of a node comes before equal host names.
    hostnames: Owners<NodeName>,
    addresses: Owners<IpAddr>,
    /// Number of nodes that are named like an IPv4 address.
    address_names: usize,
    held_elsewhere: HeldElsewhere,
}

/// A node, according to each of the sources.
type NodeSources = [Option<Arc<RouteNode>>; SOURCES];

/// The nodes with each host name or address.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owners<K: Ord> {
    nodes: SharedMap<K, SharedSet<NodeName>>,
    /// Number of keys that several nodes have.
    conflicts: usize,
}

/// Reason why a name or an address has no route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// No token, certificate or Node object exists for a node of this name.
    #[error("no node has the name {0}; 'tunnel-server nodes' lists the known nodes")]
    UnknownName(NodeName),
    /// Several nodes report this host name.
    #[error("{} is the host name of {}; address the node by its own name", .0, .1)]
    AmbiguousName(NodeName, SeveralNodes),
    /// No known node has this address.
    #[error("no known node has the address {0}; address the node by name")]
    UnknownAddress(IpAddr),
    /// Several nodes have this address, connected or not. A guess could reach the wrong machine.
    #[error("{} is the address of {}; address the node by name", .0, .1)]
    AmbiguousAddress(IpAddr, SeveralNodes),
}

impl RouteError {
    /// Returns whether several nodes have the name or the address.
    pub fn is_ambiguous(&self) -> bool {
        match self {
            Self::AmbiguousName(..) | Self::AmbiguousAddress(..) => true,
            Self::UnknownName(_) | Self::UnknownAddress(_) => false,
        }
    }
}

/// Several nodes, of which a message names the first ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeveralNodes {
    /// The first nodes, in the order of their names.
    pub first: Vec<NodeName>,
    /// Number of further nodes.
    pub more: usize,
}

/// Labels of a Node, by key.
pub type NodeLabels = BTreeMap<Box<str>, Box<str>>;

/// A node, according to one source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteNode {
    pub name: NodeName,
    /// Host name of the node, if it differs from the name.
    pub hostname: Option<NodeName>,
    pub addresses: Vec<IpAddr>,
    /// Port of the kubelet, from the Node object.
    pub kubelet_port: Option<Port>,
    /// Whether the node is reached through the tunnel. In a cluster the label of the Node says so,
    /// and other nodes are edge nodes.
    pub is_edge: bool,
    /// The labels of the join token, or those of `--node-label` that the Node has.
    pub labels: NodeLabels,
}

impl RouteNode {
    /// Creates a node that is reached through the tunnel, and of which nothing else is known.
    pub fn edge(name: NodeName, addresses: Vec<IpAddr>) -> Self {
        Self {
            name,
            hostname: None,
            addresses,
            kubelet_port: None,
            is_edge: true,
            labels: NodeLabels::new(),
        }
    }
}

impl RouteTable {
    pub fn new<'a>(nodes: impl IntoIterator<Item = (&'a NodeName, &'a [IpAddr])>) -> Self {
        let mut table = Self::default();
        for (name, addresses) in nodes {
            let node = RouteNode::edge(name.clone(), addresses.to_vec());
            table.replace(RouteSource::Cluster, name, Some(node));
        }
        table
    }

    /// Creates an empty table. Names that are in no source are looked up with `is_held_elsewhere`.
    pub fn with_held_elsewhere(is_held_elsewhere: IsHeldElsewhere) -> Self {
        Self {
            held_elsewhere: HeldElsewhere(Some(is_held_elsewhere)),
            ..Self::default()
        }
    }

    /// Creates a table from the nodes of one source. Of several nodes with one name, the last counts.
    pub fn merge<'a>(nodes: impl IntoIterator<Item = &'a RouteNode>) -> Self {
        let mut table = Self::default();
        for node in nodes {
            table.replace(RouteSource::Cluster, &node.name, Some(node.clone()));
        }
        table
    }

    /// Replaces what a source says about a node. The node has the addresses and host names of all
    /// its sources.
    pub fn replace(&mut self, source: RouteSource, name: &NodeName, node: Option<RouteNode>) {
        let before = self.nodes.get(name).cloned().unwrap_or_default();
        let own = &before[source as usize];
        if own.as_deref() == node.as_ref() {
            return;
        }
        let mut after = before.clone();
        after[source as usize] = node.map(Arc::new);
        let (old_hostnames, hostnames) = (hostnames(&before), hostnames(&after));
        self.hostnames.replace(name, &old_hostnames, &hostnames);
        let (old_addresses, addresses) = (addresses(&before), addresses(&after));
        self.addresses.replace(name, &old_addresses, &addresses);
        let was_known = before.iter().any(Option::is_some);
        let is_known = after.iter().any(Option::is_some);
        if is_address(name) {
            self.address_names += usize::from(is_known);
            self.address_names -= usize::from(was_known);
        }
        if is_known {
            self.nodes.insert(name.clone(), after);
        } else {
            self.nodes.remove(name);
        }
    }

    /// Replaces all nodes of a source.
    pub fn set(&mut self, source: RouteSource, nodes: Vec<RouteNode>) {
        let names: BTreeSet<_> = nodes.iter().map(|node| node.name.clone()).collect();
        let of_source = self.of(source).map(|node| node.name.clone());
        let gone: Vec<_> = of_source.filter(|name| !names.contains(name)).collect();
        for name in gone {
            self.replace(source, &name, None);
        }
        for node in nodes {
            self.replace(source, &node.name.clone(), Some(node));
        }
    }

    /// Returns all nodes of a source, in the order of their names.
    pub fn of(&self, source: RouteSource) -> impl Iterator<Item = &Arc<RouteNode>> {
        let nodes = self.nodes.iter();
        nodes.filter_map(move |(_name, sources)| sources[source as usize].as_ref())
    }

    /// Returns the nodes of a source whose names are after `after`, in order.
    pub fn after<'a>(
        &'a self,
        source: RouteSource,
        after: Bound<&'a NodeName>,
    ) -> impl Iterator<Item = &'a Arc<RouteNode>> {
        let nodes = self.nodes.range((after, Bound::Unbounded));
        nodes.filter_map(move |(_name, sources)| sources[source as usize].as_ref())
    }

    /// Returns a node of a source.
    pub fn node(&self, source: RouteSource, name: &NodeName) -> Option<&Arc<RouteNode>> {
        self.nodes.get(name)?[source as usize].as_ref()
    }

    /// Returns the number of known nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Returns whether [`RouteTable::by_name`] finds a node for this name.
    pub fn knows(&self, name: &NodeName) -> bool {
        self.by_name(name).is_ok()
    }

    /// Returns whether another server holds a node of this name.
    pub fn is_held_elsewhere(&self, name: &NodeName) -> bool {
        let is_held = self.held_elsewhere.0.as_ref();
        is_held.is_some_and(|is_held| is_held(name))
    }

    /// Returns the node with this name or host name, or else the node of this name that another
    /// server holds.
    ///
    /// # Errors
    /// Returns [`RouteError::UnknownName`] if no node matches, or [`RouteError::AmbiguousName`] if
    /// several nodes have the host name.
    pub fn by_name(&self, name: &NodeName) -> Result<NodeName, RouteError> {
        match self.known_by_name(name) {
            Err(RouteError::UnknownName(name)) if self.is_held_elsewhere(&name) => Ok(name),
            known => known,
        }
    }

    /// Returns the node of the table with this name or host name.
    ///
    /// # Errors
    /// As [`RouteTable::by_name`].
    pub fn known_by_name(&self, name: &NodeName) -> Result<NodeName, RouteError> {
        // A clone of the table's own name would be one more count that all requests share.
        if self.nodes.contains_key(name) {
            return Ok(name.clone());
        }
        match self.hostnames.of(name) {
            Ok(Some(node)) => Ok(node),
            Ok(None) => Err(RouteError::UnknownName(name.clone())),
            Err(several) => Err(RouteError::AmbiguousName(name.clone(), several)),
        }
    }

    /// Returns whether a node has this name. Host names do not count.
    pub fn is_node(&self, name: &NodeName) -> bool {
        self.nodes.contains_key(name) || self.is_held_elsewhere(name)
    }

    /// Returns the port of a node's kubelet: the port in its Node object, or else 10250.
    pub fn kubelet_port(&self, node: &NodeName) -> Option<Port> {
        let mut sources = self.nodes.get(node).into_iter().flatten().flatten().rev();
        let port = sources.find_map(|node| node.kubelet_port);
        port.or_else(|| Port::new(KUBELET_PORT))
    }

    /// Returns what it means that a caller names a port of a node.
    pub fn requested_port(&self, node: &NodeName, named: Port) -> RequestedPort {
        if self.kubelet_port(node) == Some(named) {
            RequestedPort::Kubelet(named)
        } else {
            RequestedPort::Named(named)
        }
    }

    /// Returns the node that is named like this address, or else the only node that has it, or else
    /// the node that is named so and that another server holds.
    ///
    /// # Errors
    /// Returns [`RouteError::UnknownAddress`] if no node has the address, or
    /// [`RouteError::AmbiguousAddress`] if several nodes have it.
    pub fn by_address(&self, address: IpAddr) -> Result<NodeName, RouteError> {
        match self.known_by_address(address) {
            Err(error @ RouteError::UnknownAddress(_)) => name_like(address)
                .filter(|name| self.is_held_elsewhere(name))
                .ok_or(error),
            known => known,
        }
    }

    /// Returns the node of the table that is named like this address, or else the only one that has
    /// it.
    ///
    /// # Errors
    /// As [`RouteTable::by_address`].
    pub fn known_by_address(&self, address: IpAddr) -> Result<NodeName, RouteError> {
        if let Some(named) = self.named_like(address.to_canonical()) {
            return Ok(named);
        }
        match self.addresses.of(&address.to_canonical()) {
            Ok(Some(node)) => Ok(node),
            Ok(None) => Err(RouteError::UnknownAddress(address)),
            Err(several) => Err(RouteError::AmbiguousAddress(address, several)),
        }
    }

    /// Returns the node whose own name is an address. Host names do not count: kubelets write them.
    fn named_like(&self, address: IpAddr) -> Option<NodeName> {
        if self.address_names == 0 {
            return None;
        }
        self.nodes.get_key(&name_like(address)?).cloned()
    }

    /// Returns the first `limit` nodes that have an address, ordered by name.
    pub fn owners(&self, address: IpAddr, limit: usize) -> Vec<NodeName> {
        let owners = self.addresses.nodes.get(&address.to_canonical());
        let owners = owners.into_iter().flat_map(SharedSet::keys);
        owners.take(limit).cloned().collect()
    }

    /// Returns the number of addresses that several nodes share.
    pub fn conflicts(&self) -> usize {
        self.addresses.conflicts
    }
}

impl<K: Ord> Default for Owners<K> {
    fn default() -> Self {
        Self {
            nodes: SharedMap::default(),
            conflicts: 0,
        }
    }
}

impl<K: Ord + Clone> Owners<K> {
    /// Returns the only node with this key, or an error with several.
    fn of(&self, key: &K) -> Result<Option<NodeName>, SeveralNodes> {
        let Some(nodes) = self.nodes.get(key) else {
            return Ok(None);
        };
        match nodes.first() {
            Some((alone, ())) if nodes.len() == 1 => Ok(Some(alone.clone())),
            Some(_) | None => Err(SeveralNodes::of(nodes)),
        }
    }

    /// Replaces the keys of a node.
    fn replace(&mut self, node: &NodeName, before: &BTreeSet<K>, after: &BTreeSet<K>) {
        for key in before.difference(after) {
            let Some(mut nodes) = self.nodes.get(key).cloned() else {
                continue;
            };
            nodes.remove(node);
            self.conflicts -= usize::from(nodes.len() == 1);
            if nodes.is_empty() {
                self.nodes.remove(key);
            } else {
                self.nodes.insert(key.clone(), nodes);
            }
        }
        for key in after.difference(before) {
            let mut nodes = self.nodes.get(key).cloned().unwrap_or_default();
            nodes.insert(node.clone(), ());
            self.conflicts += usize::from(nodes.len() == 2);
            self.nodes.insert(key.clone(), nodes);
        }
    }
}

impl SeveralNodes {
    fn of(nodes: &SharedSet<NodeName>) -> Self {
        let first: Vec<_> = nodes.keys().take(NAMES_SHOWN_MAX).cloned().collect();
        Self {
            more: nodes.len() - first.len(),
            first,
        }
    }
}

impl fmt::Display for SeveralNodes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, name) in self.first.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{name}")?;
        }
        match self.more {
            0 => Ok(()),
            more => write!(formatter, " and {more} more"),
        }
    }
}

fn hostnames(sources: &NodeSources) -> BTreeSet<NodeName> {
    let hostnames = sources
        .iter()
        .flatten()
        .filter_map(|node| node.hostname.clone());
    hostnames.filter(|name| !is_address(name)).collect()
}

fn addresses(sources: &NodeSources) -> BTreeSet<IpAddr> {
    let addresses = sources.iter().flatten().flat_map(|node| &node.addresses);
    addresses.map(IpAddr::to_canonical).collect()
}

/// Returns the name of a node that is named like an address. No name has the form of an IPv6 address.
fn name_like(address: IpAddr) -> Option<NodeName> {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string().parse().ok(),
        IpAddr::V6(_) => None,
    }
}

fn is_address(name: &NodeName) -> bool {
    name.as_str().parse::<IpAddr>().is_ok()
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouteSource {
    /// Tokens and certificates, with the addresses and labels that operators assigned.
    #[default]
    Known,
    /// Node objects of the cluster.
    Cluster,
}

/// Number of the sources of a table.
const SOURCES: usize = 2;

/// Maximum number of nodes that a message names.
const NAMES_SHOWN_MAX: usize = 10;
/// Port of the kubelet if the Node object contains none.
const KUBELET_PORT: u16 = 10250;

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;
    use crate::testing::assert_contains;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    #[test]
    fn shared_address_is_ambiguous_and_names_every_owner() {
        let (one, two) = (name("worker-1"), name("worker-2"));
        let shared: IpAddr = "192.168.33.221".parse().unwrap();
        let own: IpAddr = "10.0.0.2".parse().unwrap();
        let table = RouteTable::new([(&one, &[shared][..]), (&two, &[shared, own][..])]);
        assert_eq!(table.by_address(own).unwrap(), two);
        let mapped = "::ffff:192.168.33.221".parse().unwrap();
        let error = table.by_address(mapped).unwrap_err();
        assert_contains(&error, "worker-1, worker-2");
        assert_eq!(table.conflicts(), 1);
        let unknown = table.by_address("10.0.0.9".parse().unwrap());
        assert!(matches!(unknown, Err(RouteError::UnknownAddress(_))));
    }

    #[test]
    fn names_match_without_case_and_never_by_suffix() {
        let node = name("worker-1");
        let table = RouteTable::new([(&node, &[][..])]);
        assert_eq!(table.by_name(&name("WORKER-1.")).unwrap(), node);
        for other in ["1", "orker-1", "xworker-1", "worker-1.local"] {
            assert!(table.by_name(&name(other)).is_err());
        }
    }

    fn route(own: &str, hostname: Option<&str>, addresses: &[&str]) -> RouteNode {
        let addresses = addresses.iter().map(|ip| ip.parse().unwrap());
        RouteNode {
            hostname: hostname.map(name),
            ..RouteNode::edge(name(own), addresses.collect())
        }
    }

    #[test]
    fn host_names_lead_to_their_node_unless_several_have_them_or_a_node_is_called_so() {
        let table = RouteTable::merge(&[
            route("a", Some("host-a.example"), &[]),
            route("b", Some("twin"), &[]),
            route("c", Some("twin"), &[]),
            route("d", Some("a"), &[]),
        ]);
        assert_eq!(table.by_name(&name("Host-A.example.")), Ok(name("a")));
        assert_eq!(table.by_name(&name("a")), Ok(name("a")));
        let error = table.by_name(&name("twin")).unwrap_err();
        assert_contains(&error, "of b, c;");
        assert!(!table.knows(&name("twin")) && table.knows(&name("host-a.example")));
        assert_eq!(table.len(), 4);
    }

    #[test]
    fn node_that_is_named_like_an_address_has_it_before_all_others() {
        let address: IpAddr = "172.31.42.71".parse().unwrap();
        let table = RouteTable::merge(&[
            route("172.31.42.71", None, &["10.0.0.1"]),
            route("a", None, &["172.31.42.71"]),
            route("b", None, &["172.31.42.71"]),
            // A kubelet takes no address by its host name.
            route("c", Some("10.0.0.1"), &[]),
        ]);
        let named = name("172.31.42.71");
        assert_eq!(table.by_address(address), Ok(named.clone()));
        assert_eq!(table.by_name(&named), Ok(named.clone()));
        assert_eq!(table.by_address("10.0.0.1".parse().unwrap()), Ok(named));
        assert!(!table.knows(&name("10.0.0.1")));
    }

    #[test]
    fn other_servers_add_names_and_change_no_entry() {
        let mut table = RouteTable::with_held_elsewhere(Arc::new(|name| {
            ["g1", "alias", "twin", "10.0.0.1", "10.0.0.9"].contains(&name.as_str())
        }));
        assert_eq!(table.by_name(&name("g1")), Ok(name("g1")));
        let cluster = vec![
            route("a", Some("alias"), &["10.0.0.1"]),
            route("b", Some("twin"), &[]),
            route("c", Some("twin"), &[]),
        ];
        table.set(RouteSource::Cluster, cluster);
        assert_eq!(table.by_name(&name("g1")), Ok(name("g1")));
        assert!(table.is_node(&name("g1")) && table.knows(&name("g1")));
        assert_eq!(table.by_name(&name("alias")), Ok(name("a")));
        assert!(table.by_name(&name("twin")).is_err());
        let [own, other] = ["10.0.0.1", "10.0.0.9"].map(|ip| ip.parse().unwrap());
        assert_eq!(table.by_address(own), Ok(name("a")));
        assert_eq!(table.by_address(other), Ok(name("10.0.0.9")));
        assert!(table.known_by_name(&name("g1")).is_err());
        assert!(table.known_by_address(other).is_err());
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn message_about_a_shared_address_names_ten_nodes() {
        let nodes: Vec<_> = (0..1000)
            .map(|number| route(&format!("edge-{number:03}"), None, &["10.0.0.1"]))
            .collect();
        let table = RouteTable::merge(&nodes);
        let error = table.by_address("10.0.0.1".parse().unwrap()).unwrap_err();
        assert_contains(&error, "of edge-000, edge-001,");
        assert_contains(&error, ", edge-009 and 990 more;");
    }

    /// Random changes of both sources lead to the table of the last nodes.
    #[test]
    fn changed_table_equals_one_that_is_built_again() {
        let names = ["a", "b", "c", "10.0.0.3"];
        let addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"];
        for seed in 0..20 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut table = RouteTable::default();
            let mut last = [(); SOURCES].map(|()| BTreeMap::new());
            for _ in 0..200 {
                let source = if random.random_bool(0.5) {
                    RouteSource::Known
                } else {
                    RouteSource::Cluster
                };
                let own = names[random.random_range(0..names.len())];
                let nodes = &mut last[source as usize];
                let change = if random.random_bool(0.3) {
                    nodes.remove(own);
                    None
                } else {
                    let of_node = addresses.iter().filter(|_| random.random_bool(0.4));
                    let of_node: Vec<_> = of_node.copied().collect();
                    let hostname = names[random.random_range(0..names.len())];
                    let node = RouteNode {
                        kubelet_port: Port::new(random.random_range(0..3)),
                        ..route(own, Some(hostname), &of_node)
                    };
                    nodes.insert(own, node.clone());
                    Some(node)
                };
                table.replace(source, &name(own), change);
                let mut built = RouteTable::default();
                let [known, cluster] = &last;
                built.set(RouteSource::Cluster, cluster.values().cloned().collect());
                built.set(RouteSource::Known, known.values().cloned().collect());
                assert_eq!(table, built, "seed {seed}");
            }
            table.set(RouteSource::Known, Vec::new());
            assert_eq!(table.of(RouteSource::Known).count(), 0);
            table.set(RouteSource::Cluster, Vec::new());
            assert_eq!(table, RouteTable::default());
        }
    }
}
