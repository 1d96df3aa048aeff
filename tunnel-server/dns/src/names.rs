//! Pure name resolution: whether the records, nothing or another resolver answers a name.
//!
//! ```text
//! <node>.<zone>                         record, else no such name
//! <node>.<cluster>, <node>.svc.<cluster>  record: no Service or Pod has a name of this form
//! anything else below <cluster>         the cluster's resolver; without one, no such name
//! localhost, *.localhost                no such name, whatever the records say (RFC 6761, section 6.3)
//! <node>                                record
//! any other single label                no such name: it never leaves this host
//! everything else                       another resolver
//! ```

use std::net::SocketAddr;
use std::sync::LazyLock;

use tunnel_proto::wire::name::NodeName;

use super::{Addresses, ClusterDomain, RecordSet};

/// Local names, and the resolvers for all other names.
#[derive(Debug, Clone, Default)]
pub struct Names {
    /// Zone of the long names `<node>.<zone>`.
    pub zone: Option<NodeName>,
    pub clusters: Vec<ClusterDomain>,
    /// Resolvers for all other names. If empty, these queries are refused.
    pub default_resolvers: Vec<SocketAddr>,
}

/// Source of the answer for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameResolution<'a> {
    /// The name is local and has these addresses, possibly none. `authority` is the domain that is
    /// authoritative for the name, empty for the root.
    Local {
        addresses: Addresses,
        /// Domain that is authoritative for the name.
        authority: &'a str,
    },
    Absent {
        /// Domain that is authoritative for the name.
        authority: &'a str,
    },
    /// The name may be that of a node, and it is not known yet which nodes there are.
    Unknown,
    /// One of these resolvers answers. If the list is empty, the query is refused.
    Upstream(&'a [SocketAddr]),
}

impl Names {
    /// Resolves `name`, which is in lower case and without a trailing dot. An empty `name` is the
    /// root. Without `records`, no name of a node is absent.
    pub fn resolve(&self, name: &str, records: Option<&RecordSet>) -> NameResolution<'_> {
        let resolution = self.resolve_known(name, records.unwrap_or(&NO_RECORDS));
        match resolution {
            NameResolution::Absent { .. } if records.is_none() && self.may_be_node(name) => {
                NameResolution::Unknown
            }
            known => known,
        }
    }

    /// Returns whether a name has one of the forms of a node's name.
    pub(super) fn may_be_node(&self, name: &str) -> bool {
        let in_zone = self.zone.as_ref().and_then(|zone| strip_domain(name, zone));
        let in_cluster = || {
            self.cluster_of(name)
                .map(|(_cluster, inner)| node_in_cluster(inner))
        };
        let inner = in_zone.map(Some).or_else(in_cluster).unwrap_or(Some(name));
        inner.is_some_and(|inner| {
            let is_reserved = is_localhost(inner) || strip_parent(inner, REVERSE).is_some();
            !is_reserved && inner.parse::<NodeName>().is_ok()
        })
    }

    fn resolve_known(&self, name: &str, records: &RecordSet) -> NameResolution<'_> {
        let record = |name: &str| records.get(&name.parse().ok()?);
        if let Some(zone) = &self.zone
            && let Some(inner) = strip_domain(name, zone)
        {
            return local_or_absent(inner, record(inner), zone.as_str());
        }
        if let Some((cluster, inner)) = self.cluster_of(name) {
            let found = node_in_cluster(inner).and_then(record);
            return if found.is_none() && !cluster.resolvers.is_empty() {
                NameResolution::Upstream(&cluster.resolvers)
            } else {
                local_or_absent(inner, found, cluster.domain.as_str())
            };
        }
        if is_localhost(name) {
            return NameResolution::Absent { authority: ROOT };
        }
        if let Some(addresses) = record(name) {
            return NameResolution::Local {
                addresses,
                authority: ROOT,
            };
        }
        if !name.is_empty() && !name.contains('.') {
            return NameResolution::Absent { authority: ROOT };
        }
        NameResolution::Upstream(&self.default_resolvers)
    }

    pub fn is_forwarding(&self) -> bool {
        !self.default_resolvers.is_empty()
            || self
                .clusters
                .iter()
                .any(|cluster| !cluster.resolvers.is_empty())
    }

    pub fn resolvers(&self) -> Vec<SocketAddr> {
        let clusters = self.clusters.iter().flat_map(|cluster| &cluster.resolvers);
        let mut all: Vec<_> = self
            .default_resolvers
            .iter()
            .chain(clusters)
            .copied()
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns the innermost cluster domain that contains `name`, and the part of the name before
    /// it.
    fn cluster_of<'n>(&self, name: &'n str) -> Option<(&ClusterDomain, &'n str)> {
        let holding = self
            .clusters
            .iter()
            .filter_map(|cluster| Some((cluster, strip_domain(name, &cluster.domain)?)));
        holding.min_by_key(|(_, inner)| inner.len())
    }
}

/// The apex of a domain exists but has no addresses.
fn local_or_absent<'a>(
    inner: &str,
    found: Option<Addresses>,
    authority: &'a str,
) -> NameResolution<'a> {
    match found {
        Some(addresses) => NameResolution::Local {
            addresses,
            authority,
        },
        None if inner.is_empty() => NameResolution::Local {
            addresses: Addresses::default(),
            authority,
        },
        None => NameResolution::Absent { authority },
    }
}

/// Returns the node that a name below a cluster domain refers to, if the name cannot be anything
/// else. Services are `<service>.<namespace>.svc`, their pods have one more label, and other pods
/// are `<address>.<namespace>.pod`. Those names are never nodes.
fn node_in_cluster(inner: &str) -> Option<&str> {
    match inner.rsplit_once('.') {
        Some((name, "svc")) => (!name.contains('.')).then_some(name),
        Some((_, "pod")) => None,
        _ => Some(inner),
    }
}

/// Returns the part of `name` before `domain`, empty for the domain itself.
fn strip_domain<'n>(name: &'n str, domain: &NodeName) -> Option<&'n str> {
    if name == domain.as_str() {
        return Some("");
    }
    strip_parent(name, domain.as_str())
}

fn strip_parent<'n>(name: &'n str, domain: &str) -> Option<&'n str> {
    name.strip_suffix(domain)?.strip_suffix('.')
}

fn is_localhost(name: &str) -> bool {
    name == LOCALHOST || strip_parent(name, LOCALHOST).is_some()
}

static NO_RECORDS: LazyLock<RecordSet> = LazyLock::new(RecordSet::default);
const LOCALHOST: &str = "localhost";
/// Domain of reverse lookups.
const REVERSE: &str = "arpa";
const ROOT: &str = "";

#[cfg(test)]
mod tests {
    use super::*;

    const CLUSTER: &str = "10.96.0.10:53";
    const HOST: &str = "192.0.2.53:53";

    fn names(cluster: &[&str]) -> Names {
        let parse = |text: &&str| text.parse().unwrap();
        Names {
            zone: Some("nodes.tunnel.internal".parse().unwrap()),
            clusters: vec![ClusterDomain {
                domain: "cluster.local".parse().unwrap(),
                resolvers: cluster.iter().map(parse).collect(),
            }],
            default_resolvers: vec![HOST.parse().unwrap()],
        }
    }

    fn records() -> RecordSet {
        let hostile = ["kubernetes.default.svc.cluster.local", "localhost", "kube"];
        let usual = ["worker-1", "ip-10.ec2.internal", "default", "a.b"];
        let names = usual.iter().chain(&hostile);
        RecordSet::of(names.map(|name| (name.parse().unwrap(), tunnel())))
    }

    fn tunnel() -> Addresses {
        Addresses::first_of(["10.0.0.1".parse().unwrap()])
    }

    #[test]
    fn every_form_of_a_nodes_name_is_answered_and_no_service_is_shadowed() {
        let local = |authority| NameResolution::Local {
            addresses: tunnel(),
            authority,
        };
        let absent = |authority| NameResolution::Absent { authority };
        let zone = "nodes.tunnel.internal";
        let cluster = "cluster.local";
        let host = [HOST.parse().unwrap()];
        let rows: &[(&str, NameResolution<'_>)] = &[
            ("worker-1", local("")),
            ("ip-10.ec2.internal", local("")),
            ("worker-1.nodes.tunnel.internal", local(zone)),
            ("ip-10.ec2.internal.nodes.tunnel.internal", local(zone)),
            ("worker-9.nodes.tunnel.internal", absent(zone)),
            ("worker-1.cluster.local", local(cluster)),
            ("worker-1.svc.cluster.local", local(cluster)),
            // The form of a Service in namespace kube-system is never a node.
            ("worker-1.kube-system.svc.cluster.local", absent(cluster)),
            ("a.b.svc.cluster.local", absent(cluster)),
            ("worker-1.kube-system.pod.cluster.local", absent(cluster)),
            // A node whose name is that of a Service or of this host.
            ("kubernetes.default.svc.cluster.local", absent(cluster)),
            ("kube.kube-system.svc.cluster.local", absent(cluster)),
            ("localhost", absent("")),
            ("x.localhost", absent("")),
            ("worker-9", absent("")),
            ("xworker-1", absent("")),
            ("com", absent("")),
            ("", NameResolution::Upstream(&host)),
            ("example.com", NameResolution::Upstream(&host)),
            ("worker-1.example.com", NameResolution::Upstream(&host)),
            ("xcluster.local", NameResolution::Upstream(&host)),
            ("1.0.0.10.in-addr.arpa", NameResolution::Upstream(&host)),
        ];
        let (names, records) = (names(&[]), records());
        for (name, expected) in rows {
            assert_eq!(names.resolve(name, Some(&records)), *expected, "{name}");
        }
        let apex = |authority| NameResolution::Local {
            addresses: Addresses::default(),
            authority,
        };
        assert_eq!(names.resolve(zone, Some(&records)), apex(zone));
        assert_eq!(names.resolve(cluster, Some(&records)), apex(cluster));
    }

    #[test]
    fn the_cluster_is_asked_only_when_its_resolver_is_given_and_never_about_nodes() {
        let (names, records) = (names(&[CLUSTER]), records());
        let resolver = [CLUSTER.parse().unwrap()];
        for name in [
            "kubernetes.default.svc.cluster.local",
            "worker-1.kube-system.svc.cluster.local",
            "worker-9.svc.cluster.local",
            "cluster.local",
        ] {
            let found = names.resolve(name, Some(&records));
            assert_eq!(found, NameResolution::Upstream(&resolver), "{name}");
        }
        for name in ["worker-1.svc.cluster.local", "worker-1.cluster.local"] {
            let found = names.resolve(name, Some(&records));
            let is_local = matches!(found, NameResolution::Local { .. });
            assert!(is_local, "{name}: {found:?}");
        }
        assert_eq!(names.resolvers().len(), 2);
    }

    #[test]
    fn no_name_of_a_node_is_absent_while_the_nodes_are_unknown() {
        let host = [HOST.parse().unwrap()];
        let absent = |authority| NameResolution::Absent { authority };
        for (name, expected) in [
            ("worker-1", NameResolution::Unknown),
            ("worker-1.nodes.tunnel.internal", NameResolution::Unknown),
            ("a.b.nodes.tunnel.internal", NameResolution::Unknown),
            ("worker-1.cluster.local", NameResolution::Unknown),
            ("worker-1.svc.cluster.local", NameResolution::Unknown),
            // These are never nodes.
            ("localhost", absent("")),
            ("x.localhost", absent("")),
            ("worker_1", absent("")),
            (
                "kubernetes.default.svc.cluster.local",
                absent("cluster.local"),
            ),
            (
                "10-0-0-1.default.pod.cluster.local",
                absent("cluster.local"),
            ),
            ("ip-10.ec2.internal", NameResolution::Upstream(&host)),
        ] {
            assert_eq!(names(&[]).resolve(name, None), expected, "{name}");
        }
    }

    #[test]
    fn the_innermost_cluster_domain_decides() {
        let mut names = names(&[CLUSTER]);
        names.clusters.push(ClusterDomain {
            domain: "b.cluster.local".parse().unwrap(),
            resolvers: Vec::new(),
        });
        let authority = "b.cluster.local";
        let records = records();
        let found = names.resolve("x.y.svc.b.cluster.local", Some(&records));
        assert_eq!(found, NameResolution::Absent { authority });
    }
}
