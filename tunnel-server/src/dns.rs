//! Which name answers with which addresses: a pure value, from nodes to sorted records, and the hosts file that CoreDNS reads.
//!
//! An edge node answers with the tunnel's address, a cloud node with its own. Who knows the nodes (the cluster, the
//! configuration, the known nodes of a standalone server) is not decided here. Who answers from the records is the
//! embedded DNS, in the modules below.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::watch;
use tunnel_proto::wire::name::NodeName;

#[cfg(feature = "dns")]
mod answer;
#[cfg(feature = "dns")]
mod limiter;
#[cfg(feature = "dns")]
mod loop_detection;
#[cfg(feature = "dns")]
mod metrics;
#[cfg(feature = "dns")]
mod names;
mod pattern;
#[cfg(feature = "dns")]
mod server;
mod settings;
#[cfg(feature = "dns")]
mod snapshot;
#[cfg(feature = "dns")]
mod tcp;
#[cfg(feature = "dns")]
mod udp;
#[cfg(feature = "dns")]
mod upstream;

#[cfg(feature = "dns")]
pub use crate::dns::snapshot::restore;
#[cfg(feature = "dns")]
pub use answer::{AnswerContext, ClientQuery, Decision, Transport, decide};
#[cfg(feature = "dns")]
pub use loop_detection::LoopError;
#[cfg(feature = "dns")]
pub use metrics::{DnsMetrics, QueryOutcome};
#[cfg(feature = "dns")]
pub use names::{NameResolution, Names};
pub use pattern::{NamePattern, NamePatternError};
#[cfg(feature = "dns")]
pub use server::{Dns, DnsInputs, DnsSockets};
pub use settings::{ClusterDomain, DnsLimits, DnsSettings, Resolvers};
#[cfg(feature = "dns")]
pub use udp::DnsSocket;

/// A node as the records see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// The Node's Hostname address where it differs from the name: the kube-apiserver dials that one.
    pub hostname: Option<NodeName>,
    /// How it is reached.
    pub location: NodeLocation,
}

/// How a node is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeLocation {
    /// Through the tunnel: its name answers with the tunnel's address.
    Edge,
    /// Directly, at its own addresses in order of preference; the first of each family counts. None: it has no record.
    Cloud(Vec<IpAddr>),
}

/// Names with their addresses, at most one of each family. Equal sets have equal texts.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RecordSet(BTreeMap<NodeName, Addresses>);

/// What a name answers with: at least one address.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    v4: Option<IpAddr>,
    v6: Option<IpAddr>,
}

impl Addresses {
    /// The first address of each family.
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

    /// Both addresses, IPv4 first.
    pub fn iter(self) -> impl Iterator<Item = IpAddr> {
        self.v4.into_iter().chain(self.v6)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.v4.is_none() && self.v6.is_none()
    }
}

impl RecordSet {
    /// The records of these nodes, edge nodes answering with `tunnel`. A name that stands for several nodes belongs to the
    /// node whose own name it is; a hostname that several others claim has no record, as it leads nowhere in routes.
    pub fn new<'a>(nodes: impl IntoIterator<Item = &'a Node> + Clone, tunnel: Addresses) -> Self {
        let answer = |node: &Node| match &node.location {
            NodeLocation::Edge => tunnel,
            NodeLocation::Cloud(own) => Addresses::first_of(own.iter().copied()),
        };
        let mut aliases = BTreeMap::new();
        for node in nodes.clone() {
            if let Some(alias) = &node.hostname {
                let claims = aliases.entry(alias.clone()).or_insert_with(Vec::new);
                claims.push(answer(node));
            }
        }
        let alone = aliases
            .into_iter()
            .filter_map(|(alias, claims)| match claims[..] {
                [answer] => Some((alias, answer)),
                _ => None,
            });
        let own = nodes
            .into_iter()
            .map(|node| (node.name.clone(), answer(node)));
        // Own names come last, so that they win.
        Self::of(alone.chain(own))
    }

    /// Names with their addresses as they are; a name without any has no record.
    pub fn of(records: impl IntoIterator<Item = (NodeName, Addresses)>) -> Self {
        let mut records: BTreeMap<_, _> = records.into_iter().collect();
        records.retain(|_, addresses| !addresses.is_empty());
        Self(records)
    }

    /// What a name answers with; names compare without case.
    #[must_use]
    pub fn get(&self, name: &NodeName) -> Option<Addresses> {
        self.0.get(name).copied()
    }

    /// All names with their addresses, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeName, Addresses)> {
        self.0.iter().map(|(name, addresses)| (name, *addresses))
    }

    /// How many names have a record.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no name has a record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text of yurt-tunnel's ConfigMap, read by CoreDNS's hosts plugin: one line `IP<TAB>name` a record and family,
    /// sorted as plain strings, no newline at the end.
    #[must_use]
    pub fn hosts(&self) -> String {
        let mut lines: Vec<String> = self
            .iter()
            .flat_map(|(name, addresses)| {
                let name = name.clone();
                addresses
                    .iter()
                    .map(move |address| format!("{address}\t{name}"))
            })
            .collect();
        lines.sort_unstable();
        lines.join("\n")
    }
}

/// The records in force. Clones share them.
#[derive(Debug, Clone)]
pub struct Records(watch::Sender<Arc<RecordSet>>);

impl Default for Records {
    fn default() -> Self {
        Self(watch::Sender::new(Arc::default()))
    }
}

impl Records {
    /// The records of this moment.
    #[must_use]
    pub fn load(&self) -> Arc<RecordSet> {
        self.0.borrow().clone()
    }

    /// Puts other records in force. Says whether they differ from those before; equal ones wake nobody.
    pub fn replace(&self, records: RecordSet) -> bool {
        self.0.send_if_modified(|current| {
            let is_other = **current != records;
            if is_other {
                *current = Arc::new(records);
            }
            is_other
        })
    }

    /// Changes whenever the records do.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<Arc<RecordSet>> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
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

    /// The fixture of OpenYurt's guide, byte for byte (DNS-1).
    #[test]
    fn hosts_text_is_the_guides() {
        let nodes = [
            node("master-1", None, Some(&["192.168.33.220"])),
            node("worker-1", None, None),
        ];
        let records = RecordSet::new(&nodes, tunnel(&["10.106.217.16"]));
        assert_eq!(
            records.hosts(),
            "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1"
        );
    }

    #[test]
    fn each_family_has_a_line_and_a_node_without_address_none() {
        let nodes = [
            node("edge", None, None),
            node("cloud", None, Some(&["10.0.0.1", "10.0.0.2", "fd00::1"])),
            node("lost", None, Some(&[])),
        ];
        let records = RecordSet::new(&nodes, tunnel(&["fd00::9", "10.9.9.9"]));
        assert_eq!(
            records.hosts(),
            "10.0.0.1\tcloud\n10.9.9.9\tedge\nfd00::1\tcloud\nfd00::9\tedge"
        );
        assert_eq!(records.get(&name("lost")), None);
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
        let set = RecordSet::new(
            &[node("a", None, Some(&["10.0.0.1"]))],
            Addresses::default(),
        );
        assert!(records.replace(set.clone()));
        assert!(changed.has_changed().unwrap());
        changed.mark_unchanged();
        assert!(!records.replace(set));
        assert!(!changed.has_changed().unwrap());
    }
}
