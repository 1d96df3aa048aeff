//! Route table: maps names and addresses to nodes. The table is immutable and is replaced as a
//! whole, so that a lookup takes no lock.
//!
//! The table contains desired state only. The registry knows which agents are connected. A node is
//! in the table because of a token, a certificate or a Node object. An address is in the table because
//! an operator or the cluster assigned it, and never because an agent claims it. A name that is not in
//! the table is that of a node while another server holds a node of this name: what another server
//! says adds names, and changes no entry.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::routing::destination::RequestedPort;

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

/// An immutable table of known names and addresses.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RouteTable {
    names: BTreeSet<NodeName>,
    /// Host names that differ from the nodes' names. A host name that equals the name of any node
    /// is left out.
    hostnames: HashMap<NodeName, Vec<NodeName>>,
    addresses: HashMap<IpAddr, Vec<NodeName>>,
    kubelet_ports: HashMap<NodeName, Port>,
    /// Whether a node is named like an IPv4 address.
    has_address_names: bool,
    held_elsewhere: HeldElsewhere,
}

/// Reason why a name or an address has no route.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// No token, certificate or Node object exists for a node of this name.
    #[error("no node has the name {0}; 'tunnel-server nodes' lists the known nodes")]
    UnknownName(NodeName),
    /// Several nodes report this host name.
    #[error("{} is the host name of {}; address the node by its own name", .0, join(.1))]
    AmbiguousName(NodeName, Vec<NodeName>),
    /// No known node has this address.
    #[error("no known node has the address {0}; address the node by name")]
    UnknownAddress(IpAddr),
    /// Several nodes have this address, connected or not. A guess could reach the wrong machine.
    #[error("{} is the address of {}; address the node by name", .0, join(.1))]
    AmbiguousAddress(IpAddr, Vec<NodeName>),
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
    /// The labels of `--node-label` that the Node has.
    pub labels: NodeLabels,
}

impl RouteTable {
    pub fn new<'a>(nodes: impl IntoIterator<Item = (&'a NodeName, &'a [IpAddr])>) -> Self {
        let nodes = nodes.into_iter().map(|(name, addresses)| RouteNode {
            name: name.clone(),
            hostname: None,
            addresses: addresses.to_vec(),
            kubelet_port: None,
            is_edge: true,
            labels: NodeLabels::new(),
        });
        Self::merge(&nodes.collect::<Vec<_>>())
    }

    /// Creates a table from the nodes of several sources. A node that occurs several times has the
    /// addresses and host names of all its entries.
    pub fn merge<'a>(nodes: impl IntoIterator<Item = &'a RouteNode>) -> Self {
        let mut names = BTreeSet::new();
        let mut hostnames: HashMap<NodeName, BTreeSet<NodeName>> = HashMap::new();
        let mut owners: HashMap<IpAddr, BTreeSet<NodeName>> = HashMap::new();
        let mut kubelet_ports = HashMap::new();
        for node in nodes {
            names.insert(node.name.clone());
            if let Some(hostname) = node.hostname.as_ref().filter(|name| !is_address(name)) {
                let claims = hostnames.entry(hostname.clone()).or_default();
                claims.insert(node.name.clone());
            }
            if let Some(port) = node.kubelet_port {
                kubelet_ports.insert(node.name.clone(), port);
            }
            for address in &node.addresses {
                let owners = owners.entry(address.to_canonical()).or_default();
                owners.insert(node.name.clone());
            }
        }
        hostnames.retain(|hostname, _| !names.contains(hostname));
        let has_address_names = names.iter().any(is_address);
        Self {
            names,
            hostnames: listed(hostnames),
            addresses: listed(owners),
            kubelet_ports,
            has_address_names,
            held_elsewhere: HeldElsewhere::default(),
        }
    }

    /// Returns the number of known nodes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub fn names(&self) -> impl Iterator<Item = &NodeName> {
        self.names.iter()
    }

    /// Returns whether [`RouteTable::by_name`] finds a node for this name.
    #[must_use]
    pub fn knows(&self, name: &NodeName) -> bool {
        self.by_name(name).is_ok()
    }

    /// Returns whether another server holds a node of this name.
    #[must_use]
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
        if let Some(own) = self.names.get(name) {
            return Ok(own.clone());
        }
        match self.hostnames.get(name).map(Vec::as_slice) {
            None | Some([]) => Err(RouteError::UnknownName(name.clone())),
            Some([node]) => Ok(node.clone()),
            Some(several) => Err(RouteError::AmbiguousName(name.clone(), several.to_vec())),
        }
    }

    /// Returns whether a node has this name. Host names do not count.
    #[must_use]
    pub fn is_node(&self, name: &NodeName) -> bool {
        self.names.contains(name) || self.is_held_elsewhere(name)
    }

    /// Returns the port of a node's kubelet: the port in its Node object, or else 10250.
    #[must_use]
    pub fn kubelet_port(&self, node: &NodeName) -> Option<Port> {
        let port = self.kubelet_ports.get(node).copied();
        port.or_else(|| Port::new(KUBELET_PORT))
    }

    /// Returns what it means that a caller names a port of a node.
    #[must_use]
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
        match self
            .addresses
            .get(&address.to_canonical())
            .map(Vec::as_slice)
        {
            None | Some([]) => Err(RouteError::UnknownAddress(address)),
            Some([node]) => Ok(node.clone()),
            Some(several) => Err(RouteError::AmbiguousAddress(address, several.to_vec())),
        }
    }

    /// Returns the node whose own name is an address. Host names do not count: kubelets write them.
    fn named_like(&self, address: IpAddr) -> Option<NodeName> {
        if !self.has_address_names {
            return None;
        }
        self.names.get(&name_like(address)?).cloned()
    }

    /// Returns the addresses that several nodes share.
    #[must_use]
    pub fn conflicts(&self) -> BTreeMap<IpAddr, &[NodeName]> {
        let shared = self.addresses.iter().filter(|(_, nodes)| nodes.len() > 1);
        shared
            .map(|(address, nodes)| (*address, nodes.as_slice()))
            .collect()
    }
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

fn join(nodes: &[NodeName]) -> String {
    nodes
        .iter()
        .map(NodeName::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}

fn listed<K: std::hash::Hash + Eq>(
    owners: HashMap<K, BTreeSet<NodeName>>,
) -> HashMap<K, Vec<NodeName>> {
    let owners = owners.into_iter();
    owners
        .map(|(key, nodes)| (key, nodes.into_iter().collect()))
        .collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RouteSource {
    /// Tokens and certificates, with the addresses that operators assigned.
    Known,
    /// Node objects of the cluster.
    Cluster,
}

/// The current route table, merged from its sources. Clones share the table.
#[derive(Debug, Clone, Default)]
pub struct Routes(Arc<RoutesInner>);

#[derive(Debug, Default)]
struct RoutesInner {
    table: ArcSwap<RouteTable>,
    sources: Mutex<BTreeMap<RouteSource, Arc<[RouteNode]>>>,
}

impl Routes {
    /// Creates empty routes. Names that are in no source are looked up with `is_held_elsewhere`.
    #[must_use]
    pub fn new(is_held_elsewhere: IsHeldElsewhere) -> Self {
        let table = RouteTable {
            held_elsewhere: HeldElsewhere(Some(is_held_elsewhere)),
            ..RouteTable::default()
        };
        Self(Arc::new(RoutesInner {
            table: ArcSwap::from_pointee(table),
            sources: Mutex::default(),
        }))
    }

    #[must_use]
    pub fn load(&self) -> Arc<RouteTable> {
        self.0.table.load_full()
    }

    #[must_use]
    pub fn of(&self, source: RouteSource) -> Arc<[RouteNode]> {
        let sources = self.0.sources.lock();
        sources.get(&source).cloned().unwrap_or_default()
    }

    /// Replaces all nodes of a source and installs the merged table.
    pub fn set(&self, source: RouteSource, nodes: Vec<RouteNode>) -> Arc<RouteTable> {
        let mut sources = self.0.sources.lock();
        sources.insert(source, nodes.into());
        let merged = RouteTable::merge(sources.values().flat_map(|nodes| nodes.iter()));
        let table = Arc::new(RouteTable {
            held_elsewhere: self.0.table.load().held_elsewhere.clone(),
            ..merged
        });
        // Stored under the lock, so that a merge of older sources never replaces a newer table.
        self.0.table.store(table.clone());
        table
    }
}

/// Port of the kubelet if the Node object contains none.
const KUBELET_PORT: u16 = 10250;

#[cfg(test)]
mod tests {
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
        assert_eq!(table.conflicts().len(), 1);
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
        RouteNode {
            name: name(own),
            hostname: hostname.map(name),
            addresses: addresses.iter().map(|ip| ip.parse().unwrap()).collect(),
            kubelet_port: None,
            is_edge: true,
            labels: NodeLabels::new(),
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
        let routes = Routes::new(Arc::new(|name| {
            ["g1", "alias", "twin", "10.0.0.1", "10.0.0.9"].contains(&name.as_str())
        }));
        assert_eq!(routes.load().by_name(&name("g1")), Ok(name("g1")));
        let cluster = vec![
            route("a", Some("alias"), &["10.0.0.1"]),
            route("b", Some("twin"), &[]),
            route("c", Some("twin"), &[]),
        ];
        let table = routes.set(RouteSource::Cluster, cluster);
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
    fn sources_are_merged_and_replaced_one_by_one() {
        let routes = Routes::default();
        let [one, two]: [IpAddr; 2] = ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        routes.set(RouteSource::Known, vec![route("a", None, &["10.0.0.1"])]);
        let moved = route("a", None, &["10.0.0.2"]);
        let cluster = vec![moved, route("b", None, &["10.0.0.1"])];
        let table = routes.set(RouteSource::Cluster, cluster);
        assert_eq!(table, routes.load());
        assert_eq!(table.by_address(two), Ok(name("a")));
        let both = vec![name("a"), name("b")];
        let shared = RouteError::AmbiguousAddress(one, both);
        assert_eq!(table.by_address(one), Err(shared));
        let table = routes.set(RouteSource::Cluster, Vec::new());
        assert_eq!(table.by_address(one), Ok(name("a")));
        assert!(!table.knows(&name("b")));
    }
}
