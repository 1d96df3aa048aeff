//! Host names of Nodes as their aliases: which a node may have, and which node has one that several claim; pure.
//!
//! A kubelet writes the host name of its Node as it likes, and an alias is a name in DNS and in routes. So it comes from the
//! Node's own name, which the API server ties to the kubelet's certificate, or from a pattern of the operator.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_proto::wire::name::NodeName;

use super::ClusterNode;
use crate::dns::NamePattern;

/// Nodes by the alias that they have.
pub(in crate::cluster) type AliasOwners = BTreeMap<Box<str>, Box<str>>;

/// What decides about aliases beside the Nodes themselves.
#[derive(Debug, Clone, Default)]
pub(in crate::cluster) struct AliasRules {
    /// `--record-names`.
    pub(in crate::cluster) patterns: Vec<NamePattern>,
    /// Who had which alias last.
    pub(in crate::cluster) owners: AliasOwners,
}

impl AliasRules {
    /// The alias, if a node of this name may have it.
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

/// Leaves each alias to one node: that which had it before, else the one whose object is oldest. Returns why others lost it.
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
    // Of two of one second, the first by name.
    ages?.into_iter().min().map(|(_, index)| index)
}
