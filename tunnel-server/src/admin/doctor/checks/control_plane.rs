//! Checks of kube-apiserver and CoreDNS. Pure.

use std::collections::BTreeSet;

use tunnel_doctor::{Fault, Severity};

use crate::admin::doctor::facts::Facts;
use crate::cluster::doctor::{ApiServerFacts, ClusterFacts, Fact};

/// How a kube-apiserver dials kubelets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KubeletPath {
    /// Through a proxy, by the name or address of the node.
    EgressSelector,
    /// By the name of the node.
    Name,
    /// By an address of the node.
    Address,
}

impl KubeletPath {
    fn of(apiserver: &ApiServerFacts) -> Self {
        if apiserver.egress_selector.is_some() {
            Self::EgressSelector
        } else if dials_by_name(apiserver) {
            Self::Name
        } else {
            Self::Address
        }
    }
}

/// Returns whether the first address type is a name.
fn dials_by_name(apiserver: &ApiServerFacts) -> bool {
    let types = apiserver.address_types.as_deref().unwrap_or_default();
    let first = types.split(',').next().unwrap_or_default().trim();
    // Without the flag it is Hostname.
    matches!(first, "" | "Hostname" | "InternalDNS" | "ExternalDNS")
}

/// Returns whether a kube-apiserver is known to dial nodes by their addresses.
pub(super) fn dials_by_address(cluster: &ClusterFacts) -> bool {
    let mut apiservers = cluster.apiservers.iter().flatten();
    apiservers.any(|apiserver| KubeletPath::of(apiserver) == KubeletPath::Address)
}

/// Returns the facts of the kube-apiservers, of which there is at least one.
fn apiservers(facts: &Facts) -> Fact<&[ApiServerFacts]> {
    let cluster = facts.cluster.as_ref().map_err(Clone::clone)?;
    let apiservers = cluster.apiservers.as_deref().map_err(Clone::clone)?;
    if apiservers.is_empty() {
        return Err(NO_POD.to_owned());
    }
    Ok(apiservers)
}

fn fault(apiserver: &ApiServerFacts, severity: Severity, what: &str, fix: &str) -> Fault {
    Fault {
        severity,
        place: format!("Pod kube-system/{}", apiserver.pod),
        what: what.to_owned(),
        fix: fix.to_owned(),
    }
}

/// D01: the path to kubelets.
pub(super) fn kubelet_path(facts: &Facts) -> Fact<Vec<Fault>> {
    let apiservers = apiservers(facts)?;
    let has_shared_addresses = facts.cluster.as_ref().is_ok_and(has_shared_addresses);
    let faults = apiservers.iter().filter_map(|apiserver| {
        let by_name = dials_by_name(apiserver);
        match KubeletPath::of(apiserver) {
            KubeletPath::EgressSelector if !by_name && has_shared_addresses => Some(fault(
                apiserver,
                Severity::Error,
                "the egress selector is asked for addresses, and edge nodes share an address",
                HOSTNAME_FIRST,
            )),
            KubeletPath::Address => Some(fault(
                apiserver,
                Severity::Error,
                "nodes are dialed by address and without an egress selector, past the tunnel",
                HOSTNAME_FIRST,
            )),
            KubeletPath::EgressSelector | KubeletPath::Name => None,
        }
    });
    Ok(faults.collect())
}

/// Returns whether an edge node has an internal address of another node.
fn has_shared_addresses(cluster: &ClusterFacts) -> bool {
    let Ok(nodes) = &cluster.nodes else {
        return false;
    };
    let mut seen = BTreeSet::new();
    let edges = nodes.nodes.iter().filter(|node| node.is_edge);
    let mut addresses = edges.flat_map(|node| &node.internal);
    addresses.any(|address| !seen.insert(*address))
}

/// D02: the resolver of a kube-apiserver that dials nodes by name.
pub(super) fn resolver(facts: &Facts) -> Fact<Vec<Fault>> {
    let by_name = apiservers(facts)?
        .iter()
        .filter(|apiserver| KubeletPath::of(apiserver) == KubeletPath::Name);
    let faults = by_name.filter_map(|apiserver| {
        let (what, fix) = match apiserver.dns_policy.as_str() {
            "ClusterFirstWithHostNet" => (
                "resolves names by CoreDNS, which needs this kube-apiserver to start",
                "dnsPolicy: None, and dnsConfig.nameservers with the server's DNS and a second one",
            ),
            "None" if apiserver.nameservers.len() < 2 => (
                "has a single name server: while it is away, no name resolves",
                "add a second address to dnsConfig.nameservers",
            ),
            "None" => return None,
            _ => (
                "resolves names as its host does, which knows edge nodes only if it was set up so",
                "dnsPolicy: None, and dnsConfig.nameservers with the server's DNS and a second one",
            ),
        };
        Some(fault(apiserver, Severity::Warning, what, fix))
    });
    Ok(faults.collect())
}

/// D03: the kubelet CA of a kube-apiserver that dials nodes by name.
pub(super) fn kubelet_ca(facts: &Facts) -> Fact<Vec<Fault>> {
    let apiservers = apiservers(facts)?.iter();
    let by_name = apiservers.filter(|apiserver| KubeletPath::of(apiserver) == KubeletPath::Name);
    let faults = by_name.filter_map(|apiserver| {
        let file = apiserver.kubelet_ca.as_ref()?;
        let what = format!("verifies the HTTPS listener by {file}, which needs Culvert's CA too");
        let fix = "if the CA is not in the file, add it: kubectl -n kube-system get configmap \
                   tunnel-ca -o jsonpath='{.data.ca\\.crt}'";
        Some(fault(apiserver, Severity::Info, &what, fix))
    });
    Ok(faults.collect())
}

/// D06: the configuration of CoreDNS.
pub(super) fn corefile(facts: &Facts) -> Fact<Vec<Fault>> {
    let cluster = facts.cluster.as_ref().map_err(Clone::clone)?;
    let Some(corefile) = cluster.corefile.as_ref().map_err(Clone::clone)? else {
        return Err("there is no ConfigMap kube-system/coredns".to_owned());
    };
    let fault = |severity, what: String, fix: &str| Fault {
        severity,
        place: "ConfigMap kube-system/coredns".to_owned(),
        what,
        fix: fix.to_owned(),
    };
    let blocks = hosts_blocks(corefile);
    let of_records = blocks
        .iter()
        .filter(|block| block.file.contains("tunnel-nodes"));
    let faults = of_records
        .filter(|block| !block.has_fallthrough)
        .map(|block| {
            let what = format!(
                "hosts {} has no fallthrough: all other names fail",
                block.file
            );
            fault(Severity::Error, what, ADD_FALLTHROUGH)
        });
    Ok(faults.collect())
}

/// A block of the plugin hosts.
#[derive(Debug, PartialEq, Eq)]
struct HostsBlock<'a> {
    /// Empty if the block names no file.
    file: &'a str,
    has_fallthrough: bool,
}

/// Returns the blocks of the plugin hosts. A comment begins with `#`.
fn hosts_blocks(corefile: &str) -> Vec<HostsBlock<'_>> {
    let mut blocks = Vec::new();
    let mut open: Option<HostsBlock<'_>> = None;
    for line in corefile.lines() {
        let code = line.split('#').next().unwrap_or_default();
        let mut words = code.split_whitespace();
        match words.next() {
            Some("hosts") if open.is_none() => {
                let file = words.next().filter(|word| *word != "{").unwrap_or_default();
                let block = HostsBlock {
                    file,
                    has_fallthrough: false,
                };
                if code.contains('{') {
                    open = Some(block);
                } else {
                    blocks.push(block);
                }
            }
            Some("fallthrough") => {
                if let Some(block) = &mut open {
                    block.has_fallthrough = true;
                }
            }
            Some("}") => blocks.extend(open.take()),
            Some(_) | None => {}
        }
    }
    blocks
}

const ADD_FALLTHROUGH: &str = "kubectl -n kube-system get configmap coredns -o yaml | \
                               sed '/hosts .*tunnel-nodes/a\\        fallthrough' | \
                               kubectl replace -f -";
const NO_POD: &str =
    "there is no Pod of kube-apiserver in kube-system: its flags are not visible here";
const HOSTNAME_FIRST: &str = "add --egress-selector-config-file, or \
                              --kubelet-preferred-address-types=Hostname,InternalIP,ExternalIP";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_hosts_are_found() {
        let corefile = ".:53 {\n errors # hosts x {\n hosts /etc/edge/tunnel-nodes {\n ttl 5\n }\n\
                        hosts {\n  192.0.2.1 a\n  fallthrough\n }\n forward . 192.0.2.53\n}\n";
        let expected = [
            HostsBlock {
                file: "/etc/edge/tunnel-nodes",
                has_fallthrough: false,
            },
            HostsBlock {
                file: "",
                has_fallthrough: true,
            },
        ];
        assert_eq!(hosts_blocks(corefile), expected);
    }

    #[test]
    fn path_follows_from_the_flags() {
        for (egress, types, path) in [
            (Some("/e"), Some("InternalIP"), KubeletPath::EgressSelector),
            (None, Some("Hostname,InternalIP"), KubeletPath::Name),
            (None, Some("InternalIP,Hostname"), KubeletPath::Address),
            (None, None, KubeletPath::Name),
        ] {
            let apiserver = ApiServerFacts {
                egress_selector: egress.map(str::to_owned),
                address_types: types.map(str::to_owned),
                ..ApiServerFacts::default()
            };
            assert_eq!(KubeletPath::of(&apiserver), path, "{types:?}");
        }
    }
}
