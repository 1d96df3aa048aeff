//! The Nodes of the cluster: validated, and mapped to routes and records. A change of a Node costs
//! the logarithm of their number.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use kube::runtime::watcher::Event;
use tunnel_process::networks::Cidr;
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_tables::{SharedMap, VersionedMap};

use crate::config::{LabelKey, NodeLabel};
use crate::egress::labeled_nodes::LabeledNodes;
use crate::routing::routes::RouteNode;
use tunnel_dns::{Node as DnsNode, NodeLocation};
#[cfg(any(test, feature = "test-util"))]
use tunnel_routing::dial_policy::ClusterNetworks;

mod aliases;
mod claims;
mod facts;

use aliases::AliasClaim;
pub(super) use aliases::{AliasOwners, AliasRules};
pub(super) use facts::{ClusterNode, FactMap, NodeFacts, NodeObject};

/// The Nodes as observed by list and watch.
#[derive(Debug)]
pub(super) struct NodeStore {
    edge_label: String,
    nodes: NodeSet,
    listing: FactMap,
    aliases: AliasRules,
    labeled_nodes: LabeledNodes,
    labels: Vec<LabelKey>,
}

impl NodeStore {
    /// Creates the store with persisted facts.
    pub(super) fn new(edge_label: String, facts: FactMap, aliases: AliasRules) -> Self {
        let mut store = Self {
            edge_label,
            nodes: NodeSet::default(),
            listing: FactMap::new(),
            aliases,
            labeled_nodes: LabeledNodes::default(),
            labels: Vec::new(),
        };
        if !facts.is_empty() {
            store.list(facts);
        }
        store
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
        let mut persisted = self.nodes.facts();
        for facts in persisted.values_mut() {
            facts.retain_labels(&labels);
        }
        let retained = persisted
            .into_iter()
            .map(|(name, facts)| (name, Some(facts)));
        self.nodes.apply(retained, &self.aliases);
        self.labels = labels;
        self
    }

    /// Returns the validated nodes.
    pub(super) fn nodes(&self) -> NodeSet {
        self.nodes.clone()
    }

    /// Applies events. Returns whether the facts changed, and whether a list was completed.
    pub(super) fn apply(&mut self, events: Vec<Event<NodeObject>>) -> Applied {
        let mut applied = Applied::default();
        let mut changes = Vec::new();
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
                    let earlier = std::mem::take(&mut changes);
                    applied.is_changed |= self.nodes.apply(earlier, &self.aliases);
                    let listed = std::mem::take(&mut self.listing);
                    applied.is_changed |= self.list(listed);
                }
                Event::Apply(node) => {
                    let pruned = self.prune(node);
                    changes.extend(pruned.map(|(name, facts)| (name, Some(facts))));
                }
                Event::Delete(node) => {
                    let name = node.metadata.name.unwrap_or_default();
                    changes.push((name.into(), None));
                }
            }
        }
        applied.is_changed |= self.nodes.apply(changes, &self.aliases);
        applied
    }

    /// Replaces all nodes. The persisted owners of aliases are for the first list alone.
    fn list(&mut self, listed: FactMap) -> bool {
        let removed: Vec<_> = self
            .nodes
            .objects()
            .filter(|name| !listed.contains_key(name))
            .collect();
        let removed = removed.into_iter().map(|name| (name, None));
        let listed = listed.into_iter().map(|(name, facts)| (name, Some(facts)));
        let is_changed = self.nodes.apply(removed.chain(listed), &self.aliases);
        self.aliases.owners.clear();
        is_changed
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

/// All Nodes with valid names, and the reasons why others are refused. Clones share structure, and
/// [`NodeSet::changed_since`] says what has changed since an older clone.
#[derive(Debug, Default, Clone)]
pub(super) struct NodeSet {
    nodes: VersionedMap<NodeName, Arc<ClusterNode>>,
    /// Claims of host names that the nodes may have, by host name.
    claims: SharedMap<NodeName, AliasClaim>,
    /// Objects whose name or host name is refused.
    refused: SharedMap<Box<str>, Refusal>,
}

/// Reason why an object, or its host name, is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Refusal {
    Name(String),
    Alias {
        text: Box<str>,
        reason: String,
    },
    /// Another node has the host name.
    LostAlias,
}

impl NodeSet {
    /// Replaces and removes the facts of Nodes. Keeps Nodes whose names are lower-case DNS
    /// subdomains (RFC 1123) and not reserved cluster names. A hostname is an alias of at most one
    /// node: the previous owner, or else the node whose object is the oldest. Returns whether
    /// anything changed.
    fn apply(
        &mut self,
        changes: impl IntoIterator<Item = (Box<str>, Option<NodeFacts>)>,
        rules: &AliasRules,
    ) -> bool {
        let mut is_changed = false;
        let mut contested = BTreeSet::new();
        for (name, facts) in changes {
            is_changed |= match (own_name(&name), facts) {
                (Ok(own), Some(facts)) => self.replace(&own, facts, rules, &mut contested),
                (Ok(own), None) => self.remove(&own, &mut contested),
                (Err(reason), Some(_)) => self.refuse(name, Some(Refusal::Name(reason))),
                (Err(_), None) => self.refuse(name, None),
            };
        }
        for alias in contested {
            self.assign(&alias, rules);
        }
        is_changed
    }

    fn replace(
        &mut self,
        own: &NodeName,
        facts: NodeFacts,
        rules: &AliasRules,
        contested: &mut BTreeSet<NodeName>,
    ) -> bool {
        let before = self.nodes.get(own).cloned();
        if before.as_ref().is_some_and(|before| before.facts == facts) {
            return false;
        }
        let (claim, mut refusal) = match alias(&facts, own, rules) {
            Ok(claim) => (claim, None),
            Err(refusal) => (None, Some(refusal)),
        };
        match &before {
            Some(before) => self.withdraw_claim(before, contested),
            None => {
                contested.insert(own.clone());
            }
        }
        let before = before.as_ref();
        let kept = before.and_then(|before| {
            before
                .hostname
                .clone()
                .filter(|kept| Some(kept) == claim.as_ref())
        });
        if let Some(claim) = &claim {
            let mut claims = self.claims.get(claim).cloned().unwrap_or_default();
            claims.add(facts.created, own);
            self.claims.insert(claim.clone(), claims);
            contested.insert(claim.clone());
            if kept.is_none() {
                refusal = Some(Refusal::LostAlias);
            }
        }
        self.refuse(own.as_str().into(), refusal);
        let node = ClusterNode {
            name: own.clone(),
            claim,
            hostname: kept,
            facts,
        };
        self.nodes.insert(own.clone(), Arc::new(node));
        true
    }

    fn remove(&mut self, own: &NodeName, contested: &mut BTreeSet<NodeName>) -> bool {
        let Some(before) = self.nodes.remove(own) else {
            return false;
        };
        self.withdraw_claim(&before, contested);
        contested.insert(own.clone());
        self.refuse(own.as_str().into(), None);
        true
    }

    fn withdraw_claim(&mut self, node: &ClusterNode, contested: &mut BTreeSet<NodeName>) {
        let Some(alias) = &node.claim else { return };
        if let Some(mut claims) = self.claims.get(alias).cloned() {
            claims.remove(node.facts.created, &node.name);
            self.claims.insert(alias.clone(), claims);
        }
        contested.insert(alias.clone());
    }

    /// Records why an object is refused, or that it is not. Returns whether that is new.
    fn refuse(&mut self, object: Box<str>, refusal: Option<Refusal>) -> bool {
        match refusal {
            Some(refusal) => {
                let before = self.refused.insert(object, refusal.clone());
                before != Some(refusal)
            }
            None => self.refused.remove(&*object).is_some(),
        }
    }

    /// Gives an alias to one of the nodes that claim it.
    fn assign(&mut self, alias: &NodeName, rules: &AliasRules) {
        let Some(mut claims) = self.claims.get(alias).cloned() else {
            return;
        };
        let before = claims.owner.take();
        if claims.is_empty() {
            self.claims.remove(alias);
            return;
        }
        let restored = || rules.owners.get(alias.as_str())?.parse().ok();
        let previous = before.clone().or_else(restored);
        let previous = previous.filter(|previous| self.claims_alias(previous, alias));
        if self.nodes.get(alias).is_none() {
            claims.owner = claims.owner_after(previous);
        }
        let owner = claims.owner.clone();
        self.claims.insert(alias.clone(), claims);
        if let Some(before) = before.filter(|before| Some(before) != owner.as_ref())
            && self.claims_alias(&before, alias)
        {
            self.set_hostname(&before, None);
            self.refuse(before.as_str().into(), Some(Refusal::LostAlias));
        }
        if let Some(owner) = owner {
            self.set_hostname(&owner, Some(alias));
            self.refuse(owner.as_str().into(), None);
        }
    }

    fn claims_alias(&self, node: &NodeName, alias: &NodeName) -> bool {
        let node = self.nodes.get(node);
        node.is_some_and(|node| node.claim.as_ref() == Some(alias))
    }

    fn set_hostname(&mut self, node: &NodeName, hostname: Option<&NodeName>) {
        let before = self.nodes.get(node);
        let Some(before) = before.filter(|before| before.hostname.as_ref() != hostname) else {
            return;
        };
        let changed = ClusterNode {
            hostname: hostname.cloned(),
            ..ClusterNode::clone(before)
        };
        self.nodes.insert(node.clone(), Arc::new(changed));
    }

    /// Returns the version of the last change of a node.
    pub(super) fn version(&self) -> u64 {
        self.nodes.version()
    }

    /// Returns the nodes that may differ from those of an older clone, with `None` for those that are
    /// gone.
    pub(super) fn changed_from<'a>(
        &'a self,
        older: &'a Self,
    ) -> Vec<(&'a NodeName, Option<&'a ClusterNode>)> {
        let changed = self.nodes.changed_from(&older.nodes).into_iter();
        let changed = changed.map(|name| (name, self.nodes.get(name).map(AsRef::as_ref)));
        changed.collect()
    }

    /// Returns the nodes that have changed since `version`, with `None` for those that are gone. If
    /// that is not known any more, returns `None`: all nodes may have changed.
    pub(super) fn changed_since(
        &self,
        version: u64,
    ) -> Option<impl Iterator<Item = (&NodeName, Option<&ClusterNode>)>> {
        let names = self.nodes.changed_since(version)?;
        Some(names.map(|name| (name, self.nodes.get(name).map(AsRef::as_ref))))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ClusterNode> {
        self.nodes.iter().map(|(_name, node)| &**node)
    }

    /// Returns the names of all objects, also of refused ones.
    fn objects(&self) -> impl Iterator<Item = Box<str>> {
        let named = self.iter().map(|node| node.name.as_str().into());
        let refused = self
            .refused
            .iter()
            .filter(|(_name, refusal)| matches!(refusal, Refusal::Name(_)));
        named.chain(refused.map(|(name, _refusal)| name.clone()))
    }

    /// Returns the number of refused names and host names.
    pub(super) fn refused_count(&self) -> usize {
        self.refused.len()
    }

    /// Returns the reasons why names and host names are refused, by object.
    pub(super) fn refused(&self) -> impl Iterator<Item = String> {
        let refused = self.refused.iter();
        refused.map(|(object, refusal)| match refusal {
            Refusal::Name(reason) => format!("node {object:?}: {reason}"),
            Refusal::Alias { text, reason } => {
                format!("host name {text:?} of node {object}: {reason}")
            }
            Refusal::LostAlias => self.lost_alias(object),
        })
    }

    fn lost_alias(&self, object: &str) -> String {
        let node = object.parse().ok().and_then(|own| self.nodes.get(&own));
        let Some(alias) = node.and_then(|node| node.claim.as_ref()) else {
            return String::new();
        };
        let owner = self
            .claims
            .get(alias)
            .and_then(|claim| claim.owner.as_ref());
        let why = match owner {
            _ if self.nodes.get(alias).is_some() => "it is another node's own name".to_owned(),
            Some(owner) => format!("node {owner} had it first"),
            None => "other nodes claim the same name, and their ages are unknown".to_owned(),
        };
        format!("host name {:?} of node {object}: {why}", alias.as_str())
    }

    pub(super) fn facts(&self) -> FactMap {
        let nodes = self.iter();
        nodes
            .map(|node| (node.name.as_str().into(), node.facts.clone()))
            .collect()
    }

    /// Returns what the nodes contribute to the networks of direct dials.
    #[cfg(any(test, feature = "test-util"))]
    pub(super) fn ranges(&self) -> ClusterNetworks {
        let mut networks = ClusterNetworks::default();
        for node in self.iter() {
            networks.set_node(&node.name, node.pod_networks(), node.cloud_addresses());
        }
        networks
    }
}

impl ClusterNode {
    /// Returns the node with all its addresses, for routing.
    pub(super) fn route(&self) -> RouteNode {
        RouteNode {
            name: self.name.clone(),
            hostname: self.hostname.clone(),
            addresses: [&*self.facts.internal, &*self.facts.external].concat(),
            kubelet_port: self.facts.kubelet_port.and_then(Port::new),
            is_edge: self.facts.is_edge,
            labels: self.facts.labels.clone(),
        }
    }

    pub(super) fn has_cloud_label(&self, label: &NodeLabel) -> bool {
        self.facts.has_cloud_label(label)
    }

    /// Returns the networks of Pods that pass validation.
    pub(super) fn pod_networks(&self) -> Vec<Cidr> {
        let networks = self.facts.networks();
        networks
            .filter(|network| network.check_claimed().is_ok())
            .collect()
    }

    pub(super) fn cloud_addresses(&self) -> Option<Vec<IpAddr>> {
        (!self.facts.is_edge).then(|| self.facts.addresses().collect())
    }

    pub(super) fn is_edge(&self) -> bool {
        self.facts.is_edge
    }

    /// Returns the node as seen by the records. `has_agent` makes a node without the label an edge
    /// node.
    pub(super) fn record(&self, has_agent: bool) -> DnsNode {
        DnsNode {
            name: self.name.clone(),
            hostname: self.hostname.clone(),
            location: if self.facts.is_edge || has_agent {
                NodeLocation::Edge
            } else if self.facts.internal.is_empty() {
                NodeLocation::Cloud(self.facts.external.clone())
            } else {
                NodeLocation::Cloud(self.facts.internal.clone())
            },
        }
    }
}

/// Returns the name of a node. Only an object with exactly this name is the node, since otherwise two
/// objects could be one node.
fn own_name(object: &str) -> Result<NodeName, String> {
    let own = node_name(object)?;
    if own.as_str() == object {
        Ok(own)
    } else {
        Err("not in lower case, or with a dot at the end".to_owned())
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
    facts: &NodeFacts,
    own: &NodeName,
    aliases: &AliasRules,
) -> Result<Option<NodeName>, Refusal> {
    let Some(text) = facts.hostname.as_deref() else {
        return Ok(None);
    };
    let checked = node_name(text)
        .and_then(|alias| alias.for_dns().map_err(|error| error.to_string()))
        .and_then(|alias| aliases.check(alias, own));
    match checked {
        Ok(alias) => Ok(Some(alias).filter(|alias| alias != own)),
        Err(reason) => Err(Refusal::Alias {
            text: text.into(),
            reason,
        }),
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
