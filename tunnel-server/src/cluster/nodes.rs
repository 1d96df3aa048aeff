//! The Nodes of the cluster: validated, and mapped to routes and records.

use kube::runtime::watcher::Event;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::config::{LabelKey, NodeLabel};
use crate::dns::{Node as DnsNode, NodeLocation};
use crate::egress::labeled_nodes::{LabeledNodes, NodesByLabel};
use crate::routing::dial_policy::{ClusterNetworks, PodNetwork};
use crate::routing::routes::RouteNode;

mod aliases;
mod claims;
mod facts;

pub(super) use aliases::{AliasOwners, AliasRules};
use facts::{ClusterNode, NodeFacts};
pub(super) use facts::{FactMap, NodeObject};

/// The Nodes as observed by list and watch.
#[derive(Debug)]
pub(super) struct NodeStore {
    edge_label: String,
    facts: FactMap,
    listing: FactMap,
    aliases: AliasRules,
    labeled_nodes: LabeledNodes,
    labels: Vec<LabelKey>,
}

impl NodeStore {
    pub(super) fn new(edge_label: String, facts: FactMap, aliases: AliasRules) -> Self {
        Self {
            edge_label,
            facts,
            listing: FactMap::new(),
            aliases,
            labeled_nodes: LabeledNodes::default(),
            labels: Vec::new(),
        }
    }

    /// Lets the facts say which Nodes have the labels of the cloud targets.
    pub(super) fn with_cloud_labels(self, labeled_nodes: LabeledNodes) -> Self {
        Self {
            labeled_nodes,
            ..self
        }
    }

    /// Lets the facts contain these labels of the Nodes.
    pub(super) fn with_labels(mut self, labels: Vec<LabelKey>) -> Self {
        for facts in self.facts.values_mut() {
            facts.retain_labels(&labels);
        }
        self.labels = labels;
        self
    }

    /// Returns the validated nodes. An alias stays with the node that had it at the previous call.
    pub(super) fn nodes(&mut self) -> NodeSet {
        let nodes = NodeSet::new(&self.facts, &self.aliases);
        self.aliases.owners = nodes.alias_owners();
        nodes
    }

    /// Applies events. Returns whether the facts changed, and whether a list was completed.
    pub(super) fn apply(&mut self, events: Vec<Event<NodeObject>>) -> Applied {
        let mut applied = Applied::default();
        for event in events {
            match event {
                Event::Init => self.listing.clear(),
                Event::InitApply(node) => {
                    if let Some((name, facts)) = self.prune(node) {
                        self.listing.insert(name, facts);
                    }
                }
                Event::InitDone => {
                    applied.is_listed = true;
                    let listed = std::mem::take(&mut self.listing);
                    applied.is_changed |= listed != self.facts;
                    self.facts = listed;
                }
                Event::Apply(node) => {
                    if let Some((name, facts)) = self.prune(node)
                        && self.facts.get(&name) != Some(&facts)
                    {
                        applied.is_changed = true;
                        self.facts.insert(name, facts);
                    }
                }
                Event::Delete(node) => {
                    let name = node.metadata.name.unwrap_or_default();
                    applied.is_changed |= self.facts.remove(name.as_str()).is_some();
                }
            }
        }
        applied
    }

    fn prune(&self, mut node: NodeObject) -> Option<(Box<str>, NodeFacts)> {
        let name = node.metadata.name.take()?;
        let labels = facts::selected_labels(&node.metadata, &self.labels);
        let cloud_labels = facts::matching(&node.metadata, self.labeled_nodes.labels());
        let mut facts = NodeFacts::of(node, &self.edge_label);
        (facts.labels, facts.cloud_labels) = (labels, cloud_labels);
        Some((name.into(), facts))
    }
}

/// The effect of [`NodeStore::apply`] on the facts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Applied {
    pub(super) is_changed: bool,
    pub(super) is_listed: bool,
}

/// All Nodes with valid names, and the reasons why others are refused.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeSet {
    nodes: Vec<ClusterNode>,
    refused: Vec<String>,
}

impl NodeSet {
    /// Keeps Nodes whose names are lower-case DNS subdomains (RFC 1123) and not reserved cluster
    /// names. A hostname is an alias of at most one node.
    pub(super) fn new(facts: &FactMap, aliases: &AliasRules) -> Self {
        let mut set = Self::default();
        for (name, facts) in facts {
            let own = node_name(name).and_then(|own| {
                // Otherwise two objects could map to one node.
                let is_itself = own.as_str() == &**name;
                is_itself
                    .then_some(own)
                    .ok_or_else(|| "not in lower case, or with a dot at the end".to_owned())
            });
            match own {
                Ok(name) => set.nodes.push(ClusterNode {
                    hostname: alias(&mut set.refused, facts, &name, aliases),
                    name,
                    facts: facts.clone(),
                }),
                Err(reason) => set.refused.push(format!("node {name:?}: {reason}")),
            }
        }
        let refused = aliases::assign_aliases(&mut set.nodes, &aliases.owners);
        set.refused.extend(refused);
        set
    }

    pub(super) fn refused(&self) -> &[String] {
        &self.refused
    }

    pub(super) fn facts(&self) -> FactMap {
        let nodes = self.nodes.iter();
        nodes
            .map(|node| (node.name.as_str().into(), node.facts.clone()))
            .collect()
    }

    /// Returns every node with all its addresses, for routing.
    pub(super) fn routes(&self) -> Vec<RouteNode> {
        let nodes = self.nodes.iter();
        nodes
            .map(|node| RouteNode {
                name: node.name.clone(),
                hostname: node.hostname.clone(),
                addresses: [&*node.facts.internal, &*node.facts.external].concat(),
                kubelet_port: node.facts.kubelet_port.and_then(Port::new),
                is_edge: node.facts.is_edge,
                labels: node.facts.labels.clone(),
            })
            .collect()
    }

    pub(super) fn alias_owners(&self) -> AliasOwners {
        let nodes = self.nodes.iter();
        nodes
            .filter_map(|node| {
                let alias = node.hostname.as_ref()?;
                Some((alias.as_str().into(), node.name.as_str().into()))
            })
            .collect()
    }

    /// Returns the cloud nodes with their addresses, and all Pod networks that pass validation.
    pub(super) fn ranges(&self) -> ClusterNetworks {
        let pods = self.nodes.iter().flat_map(|node| {
            let networks = node.facts.networks();
            networks
                .filter(|network| network.check_claimed().is_ok())
                .map(|network| PodNetwork {
                    network,
                    node: node.name.clone(),
                })
        });
        let cloud = self.nodes.iter().filter(|node| !node.facts.is_edge);
        ClusterNetworks {
            pods: pods.collect(),
            cloud_nodes: cloud
                .map(|node| (node.name.clone(), node.facts.addresses().collect()))
                .collect(),
            ..ClusterNetworks::default()
        }
    }

    /// Returns the nodes that have each of the labels.
    pub(super) fn by_label(&self, labels: &[NodeLabel]) -> NodesByLabel {
        let labels = labels.iter().map(|label| {
            let nodes = self.nodes.iter();
            let nodes = nodes.filter(|node| node.facts.has_cloud_label(label));
            (label.clone(), nodes.map(|node| node.name.clone()).collect())
        });
        labels.collect()
    }

    /// Returns every node as seen by the records. `has_agent` marks a node without the label as an
    /// edge node.
    pub(super) fn records(&self, has_agent: impl Fn(&NodeName) -> bool) -> Vec<DnsNode> {
        let nodes = self.nodes.iter();
        nodes
            .map(|node| DnsNode {
                name: node.name.clone(),
                hostname: node.hostname.clone(),
                location: if node.facts.is_edge || has_agent(&node.name) {
                    NodeLocation::Edge
                } else if node.facts.internal.is_empty() {
                    NodeLocation::Cloud(node.facts.external.clone())
                } else {
                    NodeLocation::Cloud(node.facts.internal.clone())
                },
            })
            .collect()
    }
}

fn node_name(text: &str) -> Result<NodeName, String> {
    let name: NodeName = text.parse().map_err(|error| format!("{error}"))?;
    if is_reserved(&name) {
        return Err("names of this form belong to the host or to Services".into());
    }
    Ok(name)
}

/// Returns the Hostname address of a node if it differs from the node name and is allowed as an
/// alias.
fn alias(
    refused: &mut Vec<String>,
    facts: &NodeFacts,
    own: &NodeName,
    aliases: &AliasRules,
) -> Option<NodeName> {
    let text = facts.hostname.as_deref()?;
    let checked = node_name(text)
        .and_then(|alias| alias.for_dns().map_err(|error| error.to_string()))
        .and_then(|alias| aliases.check(alias, own));
    match checked {
        Ok(alias) => Some(alias).filter(|alias| alias != own),
        Err(reason) => {
            refused.push(format!("host name {text:?} of node {own}: {reason}"));
            None
        }
    }
}

/// Returns `true` for names that resolvers and clusters use for other purposes. A record for such a
/// name would misdirect callers.
fn is_reserved(name: &NodeName) -> bool {
    let name = name.as_str();
    let is_under = |zone: &str| {
        name == zone
            || name
                .strip_suffix(zone)
                .is_some_and(|rest| rest.ends_with('.'))
    };
    let mut labels = name.split('.').skip(2);
    is_under("localhost")
        || is_under("localdomain")
        || is_under("cluster.local")
        || is_under("in-addr.arpa")
        || is_under("ip6.arpa")
        || matches!(name, "kubernetes" | "kubernetes.default" | "svc")
        || labels.next() == Some("svc")
}

#[cfg(test)]
mod tests;
