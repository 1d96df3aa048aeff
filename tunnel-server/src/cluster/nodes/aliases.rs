//! Hostnames of Nodes as aliases: which alias a node may have, and which node owns an alias that
//! several nodes claim. Pure.
//!
//! A kubelet can set the hostname of its Node freely, and an alias becomes a name in DNS and in
//! routes. An alias must therefore derive from the Node's own name, which the API server ties to
//! the kubelet's certificate, or match a pattern of the operator.

use std::collections::BTreeMap;

use tunnel_proto::wire::name::NodeName;
use tunnel_tables::SharedSet;

use tunnel_proto::wire::name_pattern::NamePattern;

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

/// The nodes that claim an alias, and the one that has it.
#[derive(Debug, Clone, Default)]
pub(super) struct AliasClaim {
    /// The nodes with the creation times of their objects, the oldest first. If two objects have the
    /// same age, the first one by name is first.
    claimants: SharedSet<(Option<i64>, NodeName)>,
    pub(super) owner: Option<NodeName>,
}

impl AliasClaim {
    pub(super) fn add(&mut self, created: Option<i64>, node: &NodeName) {
        self.claimants.insert((created, node.clone()), ());
    }

    pub(super) fn remove(&mut self, created: Option<i64>, node: &NodeName) {
        self.claimants.remove(&(created, node.clone()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.claimants.is_empty()
    }

    /// Returns the node that should have the alias: the only one that claims it, or else the previous
    /// owner if it still claims it, or else the oldest one if all ages are known.
    pub(super) fn owner_after(&self, previous: Option<NodeName>) -> Option<NodeName> {
        let ((created, first), ()) = self.claimants.first()?;
        if self.claimants.len() == 1 {
            return Some(first.clone());
        }
        previous.or_else(|| created.is_some().then(|| first.clone()))
    }
}
