//! Which node a name or an address belongs to: an immutable table, replaced as a whole, so that a lookup takes no lock.
//!
//! Desired state only: whether an agent is connected is the registry's business. A node is here because somebody
//! vouched for it (a token, a certificate); an address only because an operator gave it, never because an agent claims it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::wire::name::NodeName;

/// Known names and addresses at one moment.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RouteTable {
    names: BTreeSet<NodeName>,
    addresses: HashMap<IpAddr, Vec<NodeName>>,
}

/// Why a name or address leads nowhere.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    /// Nobody has vouched for a node of this name.
    #[error("no node is called {0}; 'tunnel-server nodes' lists the known ones")]
    UnknownName(NodeName),
    /// No known node has this address.
    #[error("no known node has the address {0}; address the node by name")]
    UnknownAddress(IpAddr),
    /// Several nodes have this address, connected or not; guessing would reach the wrong machine.
    #[error("{} is the address of {}; address the node by name", .0, join(.1))]
    Ambiguous(IpAddr, Vec<NodeName>),
}

impl RouteTable {
    /// A table of nodes with their addresses.
    pub fn new<'a>(nodes: impl IntoIterator<Item = (&'a NodeName, &'a [IpAddr])>) -> Self {
        let mut table = Self::default();
        let mut owners: HashMap<IpAddr, BTreeSet<NodeName>> = HashMap::new();
        for (node, addresses) in nodes {
            table.names.insert(node.clone());
            for address in addresses {
                owners
                    .entry(address.to_canonical())
                    .or_default()
                    .insert(node.clone());
            }
        }
        table.addresses = owners
            .into_iter()
            .map(|(address, nodes)| (address, nodes.into_iter().collect()))
            .collect();
        table
    }

    /// Whether the node is known.
    #[must_use]
    pub fn knows(&self, name: &NodeName) -> bool {
        self.names.contains(name)
    }

    /// The known node of this name.
    ///
    /// # Errors
    /// [`RouteError::UnknownName`].
    pub fn by_name(&self, name: &NodeName) -> Result<NodeName, RouteError> {
        self.names
            .get(name)
            .cloned()
            .ok_or_else(|| RouteError::UnknownName(name.clone()))
    }

    /// The one known node with this address.
    ///
    /// # Errors
    /// [`RouteError::UnknownAddress`], or [`RouteError::Ambiguous`] when several have it.
    pub fn by_address(&self, address: IpAddr) -> Result<NodeName, RouteError> {
        match self
            .addresses
            .get(&address.to_canonical())
            .map(Vec::as_slice)
        {
            None | Some([]) => Err(RouteError::UnknownAddress(address)),
            Some([node]) => Ok(node.clone()),
            Some(several) => Err(RouteError::Ambiguous(address, several.to_vec())),
        }
    }

    /// Addresses that several nodes share.
    #[must_use]
    pub fn conflicts(&self) -> BTreeMap<IpAddr, &[NodeName]> {
        let shared = self.addresses.iter().filter(|(_, nodes)| nodes.len() > 1);
        shared
            .map(|(address, nodes)| (*address, nodes.as_slice()))
            .collect()
    }
}

fn join(nodes: &[NodeName]) -> String {
    nodes
        .iter()
        .map(NodeName::as_str)
        .collect::<Vec<_>>()
        .join(", ")
}

/// The table in force. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Routes(Arc<ArcSwap<RouteTable>>);

impl Routes {
    /// The table of this moment.
    #[must_use]
    pub fn load(&self) -> Arc<RouteTable> {
        self.0.load_full()
    }

    /// Puts another table in force.
    pub fn replace(&self, table: RouteTable) {
        self.0.store(Arc::new(table));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let error = table
            .by_address("::ffff:192.168.33.221".parse().unwrap())
            .unwrap_err();
        assert!(error.to_string().contains("worker-1, worker-2"), "{error}");
        assert_eq!(table.conflicts().len(), 1);
        assert!(matches!(
            table.by_address("10.0.0.9".parse().unwrap()),
            Err(RouteError::UnknownAddress(_))
        ));
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
}
