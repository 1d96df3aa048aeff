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
    let corefiles = cluster.corefiles.as_ref().map_err(Clone::clone)?;
    if corefiles.is_empty() {
        return Err(NO_COREFILE.to_owned());
    }
    let faults = corefiles.iter().flat_map(|corefile| {
        let blocks = hosts_blocks(&corefile.text).into_iter();
        let of_records = blocks.filter(|block| block.file.contains("tunnel-nodes"));
        of_records.filter_map(move |block| fallthrough_fault(&corefile.config_map, &block))
    });
    Ok(faults.collect())
}

fn fallthrough_fault(config_map: &str, block: &HostsBlock<'_>) -> Option<Fault> {
    let what = match &block.fallthrough {
        _ if block.passes_others() => return None,
        None => format!(
            "hosts {} has no fallthrough: all other names fail",
            block.file
        ),
        Some(zones) => format!(
            "hosts {} has fallthrough only for {}: other names fail",
            block.file,
            zones.join(", ")
        ),
    };
    Some(Fault {
        severity: Severity::Error,
        place: format!("ConfigMap kube-system/{config_map}"),
        what,
        fix: match (config_map, &block.fallthrough) {
            (COREDNS, None) => ADD_FALLTHROUGH.to_owned(),
            (RKE2_COREDNS, _) => {
                "put fallthrough without zones into the hosts block, in the HelmChartConfig \
                 rke2-coredns, which writes this ConfigMap"
                    .to_owned()
            }
            _ => format!(
                "kubectl -n kube-system edit configmap {config_map}: fallthrough without zones in \
                 the hosts block"
            ),
        },
    })
}

/// A block of the plugin hosts.
#[derive(Debug, PartialEq, Eq)]
struct HostsBlock<'a> {
    /// Empty if the block names no file.
    file: &'a str,
    /// The zones that the block answers for: its own, else those of the server block.
    zones: Vec<&'a str>,
    /// The zones whose other names the next plugin is asked for; all without zones. `None` without
    /// fallthrough.
    fallthrough: Option<Vec<&'a str>>,
}

impl HostsBlock<'_> {
    /// Returns whether the next plugin is asked for all names that are not in the file.
    fn passes_others(&self) -> bool {
        let Some(passed) = &self.fallthrough else {
            return false;
        };
        let is_passed = |zone: &str| passed.iter().any(|passed| is_below(zone, passed));
        passed.is_empty() || self.zones.iter().all(|zone| is_passed(zone))
    }
}

/// Returns whether a zone is another zone, or in it. The root has all zones.
fn is_below(zone: &str, other: &str) -> bool {
    let (zone, other) = (plain_zone(zone), plain_zone(other));
    let before = zone.strip_suffix(&other);
    other.is_empty() || before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Returns a zone without scheme, port and last dot.
fn plain_zone(zone: &str) -> String {
    let zone = zone.rsplit("//").next().unwrap_or_default();
    let zone = zone.split(':').next().unwrap_or_default();
    zone.trim_end_matches('.').to_lowercase()
}

/// Returns the blocks of the plugin hosts. A comment begins with `#`. A file without a server block is
/// part of one of the root.
fn hosts_blocks(corefile: &str) -> Vec<HostsBlock<'_>> {
    let mut blocks = Vec::new();
    let mut server_zones = Vec::new();
    let mut open: Option<HostsBlock<'_>> = None;
    let mut depth = 0_usize;
    for line in corefile.lines() {
        let code = line.split('#').next().unwrap_or_default();
        let words: Vec<&str> = code.split_whitespace().collect();
        let opens = words.last().is_some_and(|word| word.ends_with('{'));
        let named = |words: &[&'_ str]| -> usize {
            words
                .iter()
                .take_while(|word| !word.starts_with('{'))
                .count()
        };
        match words.first() {
            Some(&"hosts") if open.is_none() => {
                let own = words.get(2..).unwrap_or_default();
                let own = own.get(..named(own)).unwrap_or_default().to_vec();
                let file = words.get(1).filter(|word| **word != "{");
                let block = HostsBlock {
                    file: file.copied().unwrap_or_default(),
                    zones: if own.is_empty() {
                        server_zones.clone()
                    } else {
                        own
                    },
                    fallthrough: None,
                };
                if opens {
                    open = Some(block);
                } else {
                    blocks.push(block);
                }
            }
            Some(&"fallthrough") => {
                if let Some(block) = &mut open {
                    block.fallthrough = Some(words.get(1..).unwrap_or_default().to_vec());
                }
            }
            Some(&"}") => blocks.extend(open.take()),
            Some(_) if depth == 0 && opens => {
                server_zones = words.get(..named(&words)).unwrap_or_default().to_vec();
            }
            Some(_) | None => {}
        }
        depth += usize::from(opens);
        depth = depth.saturating_sub(usize::from(words.first() == Some(&"}")));
    }
    if let Some(unfinished) = open {
        blocks.push(unfinished);
    }
    for block in &mut blocks {
        if block.zones.is_empty() {
            block.zones.push(".");
        }
    }
    blocks
}

const COREDNS: &str = "coredns";
const RKE2_COREDNS: &str = "rke2-coredns-rke2-coredns";
const NO_COREFILE: &str = "there is no ConfigMap coredns of kubeadm, k3s or RKE2 in kube-system";
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
    fn blocks_of_hosts_are_found_with_the_zones_that_they_pass_on() {
        let kubeadm = ".:53 {\n errors # hosts x {\n hosts /e/tunnel-nodes {\n ttl 5\n }\n\
                       hosts {\n  192.0.2.1 a\n  fallthrough\n }\n forward . 192.0.2.53\n}\n";
        let k3s = ".:53 {\n    errors\n    kubernetes cluster.local in-addr.arpa ip6.arpa {\n      pods \
                   insecure\n      fallthrough in-addr.arpa ip6.arpa\n    }\n    hosts \
                   /etc/coredns/NodeHosts {\n      ttl 60\n      reload 15s\n      fallthrough\n    }\n    \
                   import /etc/coredns/custom/*.override\n}\nimport /etc/coredns/custom/*.server\n";
        let of = |fallthrough: &str| {
            format!(
                "edge.example:53 example.org {{\n hosts /e/tunnel-nodes {{\n {fallthrough}\n }}\n}}\n"
            )
        };
        let own_zone = "hosts /e/tunnel-nodes edge.example {\n fallthrough edge.example.\n}\n";
        for (text, expected) in [
            (
                kubeadm.to_owned(),
                vec![("/e/tunnel-nodes", false), ("", true)],
            ),
            (k3s.to_owned(), vec![("/etc/coredns/NodeHosts", true)]),
            (of("fallthrough"), vec![("/e/tunnel-nodes", true)]),
            (of("fallthrough ."), vec![("/e/tunnel-nodes", true)]),
            (
                of("fallthrough edge.example"),
                vec![("/e/tunnel-nodes", false)],
            ),
            (
                of("fallthrough EXAMPLE org"),
                vec![("/e/tunnel-nodes", true)],
            ),
            (
                of("fallthrough ample org"),
                vec![("/e/tunnel-nodes", false)],
            ),
            (of("ttl 5"), vec![("/e/tunnel-nodes", false)]),
            (own_zone.to_owned(), vec![("/e/tunnel-nodes", true)]),
            (
                "hosts /e/tunnel-nodes".to_owned(),
                vec![("/e/tunnel-nodes", false)],
            ),
            (String::new(), vec![]),
        ] {
            let blocks = hosts_blocks(&text);
            let found = blocks
                .iter()
                .map(|block| (block.file, block.passes_others()));
            assert_eq!(found.collect::<Vec<_>>(), expected, "{text}");
        }
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
