//! Hostnames of Nodes as aliases: which alias a node may have, and which node owns an alias that
//! several nodes claim. Pure.
//!
//! A kubelet can set the hostname of its Node freely, and an alias becomes a name in DNS and in
//! routes. An alias must therefore derive from the Node's own name, which the API server ties to
//! the kubelet's certificate, or match a pattern of the operator.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_proto::wire::name::NodeName;

use super::facts::ClusterNode;
use crate::dns::NamePattern;

/// Owner nodes by alias.
pub(in crate::cluster) type AliasOwners = BTreeMap<Box<str>, Box<str>>;

/// Rules for aliases, in addition to the Nodes themselves.
#[derive(Debug, Clone, Default)]
pub(in crate::cluster) struct AliasRules {
    /// Patterns of `--record-names`, which allow further aliases.
    pub(in crate::cluster) patterns: Vec<NamePattern>,
    pub(in crate::cluster) owners: AliasOwners,
}

impl AliasRules {
    /// Returns the alias if a node with this name may have it.
    pub(super) fn check(&self, alias: NodeName, own: &NodeName) -> Result<NodeName, String> {
        let (text, node) = (alias.as_str(), own.as_str());
        let is_first_label = node.split('.').next() == Some(text);
        let rest = text.strip_prefix(node);
        let has_own = rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        if is_first_label || has_own || self.patterns.iter().any(|pattern| pattern.matches(&alias))
        {
            return Ok(alias);
        }
        Err(
            "it is neither the node's name, with a domain or without, nor in --record-names; \
             add it there if it is the node's"
                .to_owned(),
        )
    }
}

/// Assigns each alias to one node: the previous owner, or else the node whose object is oldest.
/// Returns the reasons why other nodes lost it.
pub(super) fn assign_aliases(nodes: &mut [ClusterNode], before: &AliasOwners) -> Vec<String> {
    let names: BTreeSet<NodeName> = nodes.iter().map(|node| node.name.clone()).collect();
    let mut claims: BTreeMap<NodeName, Vec<usize>> = BTreeMap::new();
    for (index, node) in nodes.iter().enumerate() {
        if let Some(alias) = &node.hostname {
            claims.entry(alias.clone()).or_default().push(index);
        }
    }
    let mut refused = Vec::new();
    for (alias, claimants) in claims {
        let owner = owner(
            nodes,
            &claimants,
            before.get(alias.as_str()).map(|name| &**name),
        );
        let why = match owner {
            _ if names.contains(&alias) => "it is another node's own name".to_owned(),
            Some(owner) => format!("node {} had it first", nodes[owner].name),
            None => "other nodes claim the same name, and their ages are unknown".to_owned(),
        };
        let owner = owner.filter(|_| !names.contains(&alias));
        for index in claimants {
            if owner != Some(index) {
                let node = &mut nodes[index];
                node.hostname = None;
                refused.push(format!(
                    "host name {:?} of node {}: {why}",
                    alias.as_str(),
                    node.name
                ));
            }
        }
    }
    refused
}

fn owner(nodes: &[ClusterNode], claimants: &[usize], before: Option<&str>) -> Option<usize> {
    if let [alone] = claimants {
        return Some(*alone);
    }
    let has_it = |index: &usize| before == Some(nodes[*index].name.as_str());
    if let Some(same) = claimants.iter().copied().find(|index| has_it(index)) {
        return Some(same);
    }
    let ages: Option<Vec<_>> = claimants
        .iter()
        .map(|index| Some((nodes[*index].facts.created?, *index)))
        .collect();
    // If two objects have the same age, the first one by name wins.
    ages?.into_iter().min().map(|(_, index)| index)
}
