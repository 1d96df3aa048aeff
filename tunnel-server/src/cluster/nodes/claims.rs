//! Pure checks of addresses and networks that Nodes claim. Direct dials ignore the conflicting
//! claims, so an operator should review them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use tunnel_process::name_list::NameList;
use tunnel_process::networks::Cidr;
use tunnel_proto::wire::name::NodeName;

use super::NodeSet;

/// A network, or an address as a network of one, with the node that claims it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct AddressClaim<'a> {
    network: Cidr,
    /// Networks sort before equal addresses, and contain them.
    is_address: bool,
    node: &'a NodeName,
}

impl NodeSet {
    /// Returns lines about networks that are not used, and about claims that conflict with each
    /// other.
    pub(in crate::cluster) fn conflicts(&self, services: &[Cidr]) -> Vec<String> {
        let mut lines = Vec::new();
        let mut claims = Vec::new();
        for node in self.iter() {
            for network in node.facts.networks() {
                match network.check_claimed() {
                    Ok(()) => claims.push(AddressClaim {
                        network,
                        is_address: false,
                        node: &node.name,
                    }),
                    Err(why) => lines.push(format!(
                        "node {}: {network} of its podCIDRs is not used, since {why}",
                        node.name
                    )),
                }
            }
            claims.extend(node.facts.addresses().map(|address| AddressClaim {
                network: address.into(),
                is_address: true,
                node: &node.name,
            }));
        }
        claims.sort_unstable();
        claims.dedup();
        lines.extend(in_services(&claims, services));
        lines.extend(self.shared_addresses());
        lines.extend(nested(&claims));
        lines
    }

    /// Returns lines about addresses that a cloud node shares with other nodes. Nodes behind agents
    /// may share an address, because each has its own site.
    fn shared_addresses(&self) -> Vec<String> {
        let mut owners: BTreeMap<IpAddr, (bool, Vec<&NodeName>)> = BTreeMap::new();
        for node in self.iter() {
            for address in node.facts.addresses() {
                let (has_cloud, nodes) = owners.entry(address).or_default();
                *has_cloud |= !node.facts.is_edge;
                if nodes.last() != Some(&&node.name) {
                    nodes.push(&node.name);
                }
            }
        }
        let shared = owners
            .into_iter()
            .filter(|(_, (has_cloud, nodes))| *has_cloud && nodes.len() > 1);
        shared
            .map(|(address, (_, nodes))| {
                format!(
                    "nodes {}: {address} is claimed by all of them, and never dialed directly",
                    NameList::of(&nodes)
                )
            })
            .collect()
    }
}

fn in_services(claims: &[AddressClaim<'_>], services: &[Cidr]) -> Vec<String> {
    let overlapping = claims.iter().filter_map(|claim| {
        let services = services.iter().find(|network| network.overlaps(&claim.network))?;
        let AddressClaim { network, node, .. } = claim;
        Some(if claim.is_address {
            let address = network.start();
            format!("node {node}: {address} is in {services} of Services, and never dialed directly")
        } else {
            format!("node {node}: {network} of its podCIDRs overlaps {services} of Services, which are dialed as such")
        })
    });
    overlapping.collect()
}

/// Returns a line for each network that contains claims of other nodes. The claims are sorted, so
/// the contents of a network follow it.
fn nested(claims: &[AddressClaim<'_>]) -> Vec<String> {
    let mut contained: BTreeMap<AddressClaim<'_>, BTreeSet<&NodeName>> = BTreeMap::new();
    let mut open: Vec<AddressClaim<'_>> = Vec::new();
    for claim in claims {
        let is_outside = |last: &AddressClaim<'_>| !last.network.overlaps(&claim.network);
        while open.last().is_some_and(is_outside) {
            open.pop();
        }
        if let Some(outer) = open.last().filter(|outer| outer.node != claim.node) {
            contained.entry(*outer).or_default().insert(claim.node);
        }
        if !claim.is_address {
            open.push(*claim);
        }
    }
    let lines = contained.into_iter().map(|(outer, nodes)| {
        format!(
            "node {}: {} of its podCIDRs holds addresses or networks of {}, and takes none from a node behind an agent",
            outer.node,
            outer.network,
            nodes.into_iter().collect::<NameList>()
        )
    });
    lines.collect()
}
