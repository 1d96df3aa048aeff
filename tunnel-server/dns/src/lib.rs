//! DNS records: the pure mapping from nodes to sorted addresses, and the hosts file that CoreDNS
//! reads.
//!
//! An edge node resolves to the address of the tunnel. A cloud node resolves to its own address.
//! This module does not decide where nodes come from (the cluster, the configuration, or the known
//! nodes of a standalone server). The embedded DNS server in the submodules answers queries from
//! the records.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tunnel_proto::wire::name::NodeName;
use tunnel_tables::VersionedMap;

mod answer;
mod host_resolvers;
mod limiter;
mod listeners;
mod loop_detection;
mod names;
mod response_time;
mod server;
mod tcp;
mod udp;
mod upstream;

pub use answer::{AnswerContext, ClientQuery, Decision, QueryOutcome, Transport, decide};
pub use host_resolvers::is_this_server;
pub use listeners::{Dns, DnsInputs, DnsSockets};
pub use names::{NameResolution, Names};
pub use response_time::response_times;
pub use server::DnsMetrics;
pub use udp::DnsSocket;

/// A node as seen by the records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the Node object.
    pub name: NodeName,
    /// Hostname address of the Node if it differs from the name. The kube-apiserver dials this
    /// name.
    pub hostname: Option<NodeName>,
    /// Location that decides the addresses in the records.
    pub location: NodeLocation,
}

/// Location of a node, which decides the addresses in its records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeLocation {
    /// Behind the tunnel. The name resolves to the address of the tunnel.
    Edge,
    /// Directly reachable at its own addresses, in order of preference. The first address of each
    /// family is used. A node with an empty list has no record.
    Cloud(Vec<IpAddr>),
}

/// The records of nodes: names with their addresses, at most one address per family. Sets with the
/// same names and addresses are equal, and produce equal hosts files. Clones share structure, and a
/// change of a node costs the logarithm of their number.
#[derive(Debug, Default, Clone)]
pub struct RecordSet {
    /// Addresses of edge nodes.
    tunnel: Addresses,
    nodes: VersionedMap<NodeName, NodeRecord>,
    /// The nodes with each host name.
    aliases: VersionedMap<NodeName, Vec<NodeName>>,
    edge: NameTotals,
    cloud: NameTotals,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NodeRecord {
    hostname: Option<NodeName>,
    /// `None` behind the tunnel.
    own: Option<Addresses>,
}

/// Number and size of the names of edge or of cloud nodes.
#[derive(Debug, Default, Clone, Copy)]
struct NameTotals {
    names: usize,
    /// Bytes of the names of edge nodes, or of the lines of cloud nodes with their newlines.
    bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    addresses: Addresses,
    is_edge: bool,
}

/// A hosts file, and what is not in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostsFile {
    pub text: String,
    pub left_out: Option<LeftOut>,
}

/// Names whose records do not fit into a hosts file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// The first of these names: cloud nodes come before edge nodes, and names are sorted.
    pub first: NodeName,
    pub names: usize,
}

/// Addresses of one name, at most one per family.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    v4: Option<IpAddr>,
    v6: Option<IpAddr>,
}

impl Addresses {
    pub fn first_of(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let mut first = Self::default();
        for address in addresses {
            let address = address.to_canonical();
            let slot = if address.is_ipv4() {
                &mut first.v4
            } else {
                &mut first.v6
            };
            slot.get_or_insert(address);
        }
        first
    }

    /// Returns the addresses, IPv4 first.
    pub fn iter(self) -> impl Iterator<Item = IpAddr> {
        self.v4.into_iter().chain(self.v6)
    }

    pub fn is_empty(self) -> bool {
        self.v4.is_none() && self.v6.is_none()
    }
}

impl RecordSet {
    /// Builds the records of these nodes. Edge nodes resolve to `tunnel`. A name that is both the
    /// name of one node and the hostname of others belongs to the node with that name. A hostname
    /// that several nodes claim has no record, because routes do not resolve it either.
    pub fn new<'a>(nodes: impl IntoIterator<Item = &'a Node>, tunnel: Addresses) -> Self {
        let mut records = Self::default();
        records.set_tunnel(tunnel);
        for node in nodes {
            records.insert(node);
        }
        records
    }

    /// Builds records from names and addresses. A name without addresses gets no record, nor does a
    /// name that DNS cannot carry.
    pub fn of(records: impl IntoIterator<Item = (NodeName, Addresses)>) -> Self {
        let mut set = Self::default();
        for (name, own) in records {
            let record = NodeRecord {
                hostname: None,
                own: Some(own),
            };
            set.replace(&name, Some(record));
        }
        set
    }

    /// Sets the addresses of edge nodes. Returns whether they are others.
    pub fn set_tunnel(&mut self, tunnel: Addresses) -> bool {
        std::mem::replace(&mut self.tunnel, tunnel) != tunnel
    }

    /// Adds a node, or replaces it. Returns whether it differs.
    pub fn insert(&mut self, node: &Node) -> bool {
        let own = match &node.location {
            NodeLocation::Edge => None,
            NodeLocation::Cloud(own) => Some(Addresses::first_of(own.iter().copied())),
        };
        let record = NodeRecord {
            hostname: node.hostname.clone(),
            own,
        };
        self.replace(&node.name, Some(record))
    }

    /// Removes a node. Returns whether there was one.
    pub fn remove(&mut self, node: &NodeName) -> bool {
        self.replace(node, None)
    }

    fn replace(&mut self, node: &NodeName, record: Option<NodeRecord>) -> bool {
        let before = self.nodes.get(node).cloned();
        if before == record {
            return false;
        }
        let alias_of = |record: &Option<NodeRecord>| record.as_ref()?.hostname.clone();
        let (old_alias, alias) = (alias_of(&before), alias_of(&record));
        let affected: BTreeSet<NodeName> = [Some(node.clone()), old_alias.clone(), alias.clone()]
            .into_iter()
            .flatten()
            .collect();
        self.account(&affected, usize::saturating_sub);
        if old_alias != alias {
            if let Some(alias) = old_alias {
                let mut nodes = self.aliases.remove(&alias).unwrap_or_default();
                nodes.retain(|other| other != node);
                if !nodes.is_empty() {
                    self.aliases.insert(alias, nodes);
                }
            }
            if let Some(alias) = alias {
                let mut nodes = self.aliases.get(&alias).cloned().unwrap_or_default();
                nodes.push(node.clone());
                self.aliases.insert(alias, nodes);
            }
        }
        match record {
            Some(record) => self.nodes.insert(node.clone(), record),
            None => drop(self.nodes.remove(node)),
        }
        self.account(&affected, usize::saturating_add);
        true
    }

    /// Adds the sizes of these names to the totals, or subtracts them.
    fn account(&mut self, names: &BTreeSet<NodeName>, change: fn(usize, usize) -> usize) {
        for name in names.iter().filter(|name| !name.has_long_label()) {
            let Some(own) = self.of_name(name).map(|node| node.own) else {
                continue;
            };
            let bytes = name.as_str().len();
            let (totals, bytes) = match own {
                None => (&mut self.edge, bytes),
                Some(own) if own.is_empty() => continue,
                Some(own) => {
                    let lines = own.iter().map(|address| line_bytes(address) + bytes);
                    (&mut self.cloud, lines.sum())
                }
            };
            totals.names = change(totals.names, 1);
            totals.bytes = change(totals.bytes, bytes);
        }
    }

    /// Returns the node of a name: the node with that name, or else the only one with that host
    /// name.
    fn of_name(&self, name: &NodeName) -> Option<&NodeRecord> {
        self.nodes
            .get(name)
            .or_else(|| match &self.aliases.get(name)?[..] {
                [alone] => self.nodes.get(alone),
                _ => None,
            })
    }

    fn record(&self, name: &NodeName, node: &NodeRecord) -> Option<Record> {
        let record = Record {
            addresses: node.own.unwrap_or(self.tunnel),
            is_edge: node.own.is_none(),
        };
        let has_record = !record.addresses.is_empty() && !name.has_long_label();
        has_record.then_some(record)
    }

    /// Returns the records in the order of their names.
    fn records(&self) -> Vec<(&NodeName, Record)> {
        let alone = self
            .aliases
            .iter()
            .filter_map(|(alias, nodes)| match &nodes[..] {
                [node] if !self.nodes.contains_key(alias) => Some((alias, self.nodes.get(node)?)),
                _ => None,
            });
        let mut records: Vec<_> = self
            .nodes
            .iter()
            .chain(alone)
            .filter_map(|(name, node)| Some((name, self.record(name, node)?)))
            .collect();
        records.sort_unstable_by_key(|(name, _record)| *name);
        records
    }

    /// Returns the addresses of a name. Names compare case-insensitively.
    pub fn get(&self, name: &NodeName) -> Option<Addresses> {
        let record = self.record(name, self.of_name(name)?)?;
        Some(record.addresses)
    }

    /// Returns the names with a record and their addresses, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeName, Addresses)> {
        let records = self.records().into_iter();
        records.map(|(name, record)| (name, record.addresses))
    }

    /// Returns the names whose records may differ from those of an older set. They are few if this set
    /// was made from a clone of `older`.
    pub fn changed_from(&self, older: &Self) -> BTreeSet<NodeName> {
        if self.tunnel != older.tunnel {
            // All edge nodes have other addresses.
            let names = |set: &Self| {
                let nodes = set.nodes.iter().map(|(name, _node)| name);
                let aliases = set.aliases.iter().map(|(name, _nodes)| name);
                nodes.chain(aliases).cloned().collect::<Vec<_>>()
            };
            return names(self).into_iter().chain(names(older)).collect();
        }
        let mut names = BTreeSet::new();
        for node in self.nodes.changed_from(&older.nodes) {
            // A host name follows the addresses of its node.
            names.extend(self.nodes.get(node).and_then(|node| node.hostname.clone()));
            names.insert(node.clone());
        }
        let aliases = self.aliases.changed_from(&older.aliases).into_iter();
        names.extend(aliases.cloned());
        names
    }

    /// Returns the number of names with a record.
    pub fn len(&self) -> usize {
        let edge = if self.tunnel.is_empty() {
            0
        } else {
            self.edge.names
        };
        edge + self.cloud.names
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the size of [`RecordSet::hosts`] in bytes, without making the text.
    pub fn hosts_bytes(&self) -> usize {
        let NameTotals { names, bytes } = self.edge;
        let edge = self
            .tunnel
            .iter()
            .map(|address| names * line_bytes(address) + bytes);
        (self.cloud.bytes + edge.sum::<usize>()).saturating_sub(1)
    }

    /// Returns the text of yurt-tunnel's ConfigMap, which the hosts plugin of CoreDNS reads. Each
    /// record and family is one line `IP<TAB>name`. Lines are sorted as plain strings, and the text
    /// does not end with a newline.
    pub fn hosts(&self) -> String {
        self.hosts_within(usize::MAX).text
    }

    /// Returns the text of [`RecordSet::hosts`] with the records that fit into `capacity` bytes:
    /// those of cloud nodes first, because no tunnel answers for them, and then those of edge nodes,
    /// both in the order of their names. The records after the first that does not fit are left out.
    pub fn hosts_within(&self, capacity: usize) -> HostsFile {
        let mut records = self.records();
        records.sort_by_key(|(_name, record)| record.is_edge);
        let mut in_order = records.into_iter();
        let mut lines: Vec<String> = Vec::with_capacity(self.len());
        // Each line with its newline; the last line has none.
        let mut free = capacity.saturating_add(1);
        let mut left_out = None;
        for (name, record) in in_order.by_ref() {
            let of_name = record
                .addresses
                .iter()
                .map(|address| format!("{address}\t{name}"));
            let before = lines.len();
            lines.extend(of_name);
            let bytes = lines[before..].iter().map(|line| line.len() + 1).sum();
            if let Some(rest) = free.checked_sub(bytes) {
                free = rest;
            } else {
                lines.truncate(before);
                left_out = Some(name.clone());
                break;
            }
        }
        let left_out = left_out.map(|first| LeftOut {
            first,
            names: 1 + in_order.len(),
        });
        lines.sort_unstable();
        HostsFile {
            text: lines.join("\n"),
            left_out,
        }
    }
}

impl PartialEq for RecordSet {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for RecordSet {}

/// Returns the size of a line of a hosts file without the name: address, tabulator and newline.
fn line_bytes(address: IpAddr) -> usize {
    address.to_string().len() + 2
}

/// The records in use, unknown until they are first replaced. Clones share them.
#[derive(Debug, Clone)]
pub struct Records(watch::Sender<Option<Arc<RecordSet>>>);

impl Default for Records {
    fn default() -> Self {
        Self(watch::Sender::new(None))
    }
}

impl Records {
    /// Returns the records, none while they are unknown.
    pub fn load(&self) -> Arc<RecordSet> {
        self.known().unwrap_or_default()
    }

    /// Returns the records, or `None` while it is unknown which nodes there are.
    pub fn known(&self) -> Option<Arc<RecordSet>> {
        self.0.borrow().clone()
    }

    /// Replaces the records, which are known from then on. Returns `true` if they differ from the
    /// previous ones. Equal records do not wake receivers.
    pub fn replace(&self, records: RecordSet) -> bool {
        self.0.send_if_modified(|current| {
            let is_other = current.as_deref() != Some(&records);
            if is_other {
                *current = Some(Arc::new(records));
            }
            is_other
        })
    }

    /// Replaces the records with others.
    pub fn publish(&self, records: Arc<RecordSet>) {
        self.0.send_replace(Some(records));
    }

    pub fn changed(&self) -> watch::Receiver<Option<Arc<RecordSet>>> {
        self.0.subscribe()
    }
}

/// Validated settings of the embedded DNS server.
#[derive(Debug, Clone)]
pub struct DnsSettings {
    /// Address for UDP and TCP, on the same port.
    pub listen: SocketAddr,
    /// Zone of the long names `<node>.<zone>`.
    pub zone: Option<NodeName>,
    /// Cluster domains. Only the resolvers of a domain receive queries for names below it.
    pub clusters: Vec<ClusterDomain>,
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
    /// The resolvers in this host's `/etc/resolv.conf`, without this server, as the file is now.
    Host,
    /// These resolvers. The first one that answers is used. An empty list turns forwarding off.
    These(Vec<SocketAddr>),
}

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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    fn name(text: &str) -> NodeName {
        text.parse().unwrap()
    }

    fn node(own_name: &str, hostname: Option<&str>, own: Option<&[&str]>) -> Node {
        Node {
            name: name(own_name),
            hostname: hostname.map(name),
            location: own.map_or(NodeLocation::Edge, |own| {
                NodeLocation::Cloud(own.iter().map(|ip| ip.parse().unwrap()).collect())
            }),
        }
    }

    fn tunnel(addresses: &[&str]) -> Addresses {
        Addresses::first_of(addresses.iter().map(|ip| ip.parse().unwrap()))
    }

    /// The fixture from OpenYurt's guide, byte for byte (DNS-1).
    #[test]
    fn hosts_text_is_the_guides() {
        let nodes = [
            node("master-1", None, Some(&["192.168.33.220"])),
            node("worker-1", None, None),
        ];
        let records = RecordSet::new(&nodes, tunnel(&["10.106.217.16"]));
        let expected = "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1";
        assert_eq!(records.hosts(), expected);
    }

    #[test]
    fn each_family_has_a_line_and_a_node_without_address_none() {
        let nodes = [
            node("edge", None, None),
            node("cloud", None, Some(&["10.0.0.1", "10.0.0.2", "fd00::1"])),
            node("lost", None, Some(&[])),
            node(&"x".repeat(64), None, Some(&["10.0.0.3"])),
        ];
        let records = RecordSet::new(&nodes, tunnel(&["fd00::9", "10.9.9.9"]));
        let expected = "10.0.0.1\tcloud\n10.9.9.9\tedge\nfd00::1\tcloud\nfd00::9\tedge";
        assert_eq!(records.hosts(), expected);
        assert_eq!(records.get(&name("lost")), None);
    }

    #[test]
    fn records_that_fit_are_those_of_cloud_nodes_and_then_the_first_by_name() {
        let nodes = [
            node("edge-a", Some("alias"), None),
            node("edge-b", None, None),
            node("zz", None, Some(&["10.0.0.1", "fd00::1"])),
            node("aa", None, Some(&["10.0.0.2"])),
        ];
        let records = RecordSet::new(&nodes, tunnel(&["10.9.9.9"]));
        let (aa, zz) = ("10.0.0.2\taa", "10.0.0.1\tzz\n10.0.0.2\taa\nfd00::1\tzz");
        let with_alias = zz.replace("fd00", "10.9.9.9\talias\nfd00");
        let with_a = with_alias.replace("fd00", "10.9.9.9\tedge-a\nfd00");
        let all = with_a.replace("fd00", "10.9.9.9\tedge-b\nfd00");
        for (text, left_out) in [
            ("", Some(("aa", 5))),
            (aa, Some(("zz", 4))),
            (zz, Some(("alias", 3))),
            (&with_alias, Some(("edge-a", 2))),
            (&with_a, Some(("edge-b", 1))),
            (&all, None),
        ] {
            let expected = HostsFile {
                text: text.to_owned(),
                left_out: left_out.map(|(first, names)| LeftOut {
                    first: name(first),
                    names,
                }),
            };
            assert_eq!(records.hosts_within(text.len()), expected);
            let shorter = records.hosts_within(text.len().saturating_sub(1));
            assert!(text.is_empty() || shorter.text.len() < text.len(), "{text}");
        }
        assert_eq!(records.hosts(), all);
    }

    /// Random changes lead to the records that the last nodes have.
    #[test]
    fn changed_records_equal_those_that_are_built_again() {
        let names = ["a", "b", "c", "alias", "shared", "long"];
        let long = "x".repeat(64);
        let names = names.map(|name| if name == "long" { &*long } else { name });
        for seed in 0..20 {
            let mut random = StdRng::seed_from_u64(seed);
            let (mut changed, mut nodes) = (RecordSet::default(), BTreeMap::new());
            for _ in 0..200 {
                let mut any = || names[random.random_range(0..names.len())];
                let (own, hostname) = (any(), any());
                let location = match random.random_range(0..4) {
                    0 => None,
                    1 => Some(&["10.0.0.1", "fd00::1"][..]),
                    2 => Some(&["10.0.0.22"][..]),
                    _ => Some(&[][..]),
                };
                let hostname = Some(hostname).filter(|other| *other != own);
                let node = node(own, hostname, location);
                if random.random_bool(0.3) {
                    assert_eq!(changed.remove(&node.name), nodes.remove(own).is_some());
                } else {
                    let is_other = nodes.get(own) != Some(&node);
                    assert_eq!(changed.insert(&node), is_other);
                    nodes.insert(own, node);
                }
                let addresses = [&[][..], &["10.9.9.9"], &["10.9.9.9", "fd00::9"]];
                let tunnel = tunnel(addresses[random.random_range(0..3)]);
                changed.set_tunnel(tunnel);
                let built = RecordSet::new(nodes.values(), tunnel);
                assert_eq!(changed, built);
                let text = built.hosts();
                assert_eq!(
                    (changed.hosts(), changed.hosts_bytes()),
                    (text.clone(), text.len())
                );
                assert_eq!(changed.len(), built.iter().count());
                assert!(
                    changed
                        .iter()
                        .all(|(name, addresses)| built.get(name) == Some(addresses))
                );
            }
        }
    }

    #[test]
    fn hostname_never_takes_another_nodes_name() {
        let nodes = [
            node("b", Some("shared"), Some(&["10.0.0.2"])),
            node("a", Some("shared"), Some(&["10.0.0.1"])),
            node("c", Some("a"), Some(&["10.0.0.3"])),
        ];
        let records = RecordSet::new(&nodes, Addresses::default());
        let get = |text| records.get(&name(text)).unwrap();
        assert_eq!(get("a"), tunnel(&["10.0.0.1"]));
        assert_eq!(records.get(&name("shared")), None, "claimed by two");
        assert_eq!(get("C"), tunnel(&["10.0.0.3"]));
    }

    #[test]
    fn equal_records_wake_nobody() {
        let records = Records::default();
        let mut changed = records.changed();
        let nodes = [node("a", None, Some(&["10.0.0.1"]))];
        let set = RecordSet::new(&nodes, Addresses::default());
        assert!(records.replace(set.clone()));
        assert!(changed.has_changed().unwrap());
        changed.mark_unchanged();
        assert!(!records.replace(set));
        assert!(!changed.has_changed().unwrap());
    }
}
