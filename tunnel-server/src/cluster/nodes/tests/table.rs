//! Tests with Node objects, including hostile ones, and the dials that each of them produces.

use serde_json::json;

use super::*;
use crate::ingress::connect::table::ClusterFixture;
use crate::routing::routes::RouteTable;
use tunnel_routing::dial_policy::{ClusterNetworks, LiveClusterNetworks};

/// Networks of the cluster's Services, and addresses of the server.
const SERVICES: &str = "10.96.0.0/12";
const OWN_SERVICE: &str = "10.96.0.7";
const OWN_POD: &str = "10.244.1.5";

#[derive(Debug, Clone, Copy)]
struct Object<'a> {
    name: &'a str,
    is_edge: bool,
    /// Addresses of type InternalIP, or of type ExternalIP with the prefix `x`.
    addresses: &'a [&'a str],
    networks: &'a [&'a str],
}

impl Object<'_> {
    fn parsed(&self) -> NodeObject {
        let addresses = self
            .addresses
            .iter()
            .map(|text| match text.strip_prefix('x') {
                Some(address) => json!({"type": "ExternalIP", "address": address}),
                None => json!({"type": "InternalIP", "address": text}),
            });
        let addresses: Vec<_> = addresses.collect();
        serde_json::from_value(json!({
            "metadata": {"name": self.name, "labels": {LABEL: self.is_edge.to_string()}},
            "spec": {"podCIDRs": self.networks},
            "status": {"addresses": addresses},
        }))
        .unwrap()
    }
}

/// The cluster without a hostile Node.
const BASE: [Object<'_>; 3] = [
    Object {
        name: "cloud-1",
        is_edge: false,
        addresses: &["10.0.0.9"],
        networks: &["10.244.1.0/24"],
    },
    Object {
        name: "edge-1",
        is_edge: true,
        addresses: &["192.168.33.221"],
        networks: &["10.244.2.0/24"],
    },
    Object {
        name: "edge-2",
        is_edge: true,
        addresses: &["10.50.0.2"],
        networks: &[],
    },
];

/// Targets of CONNECT and their results in the cluster without further Nodes.
const BEFORE: [(&str, &str); 12] = [
    ("cloud-1:10250", "direct 10.0.0.9"),
    ("10.0.0.9:10250", "direct 10.0.0.9"),
    ("10.0.0.9:2379", "403"),
    ("10.244.1.7:443", "direct 10.244.1.7"),
    ("[::ffff:10.244.1.7]:443", "direct 10.244.1.7"),
    ("10.96.0.10:443", "direct 10.96.0.10"),
    ("192.168.33.221:10250", "agent edge-1"),
    ("10.50.0.2:10250", "agent edge-2"),
    ("10.244.2.7:443", "403"),
    ("10.244.1.5:443", "403"),
    ("10.96.0.7:443", "403"),
    ("10.9.0.1:443", "403"),
];

/// Returns the server of the cluster with these additional Nodes, and the lines for the operator.
fn setting(more: &[Object<'_>]) -> (ClusterFixture, Vec<String>) {
    let objects: Vec<_> = BASE.iter().chain(more).map(Object::parsed).collect();
    let store = store(&objects);
    let set = store.nodes();
    let services = [SERVICES.parse().unwrap()];
    let ranges = LiveClusterNetworks::default();
    ranges.set(ClusterNetworks {
        services: services.to_vec(),
        own: vec![OWN_SERVICE.parse().unwrap()],
        ..set.ranges()
    });
    let agents = ["edge-1", "edge-2", "agent-1"];
    let setting = ClusterFixture {
        routes: RouteTable::merge(&routes(&store)),
        ranges,
        agents: agents.map(|name| name.parse().unwrap()).into(),
        own: vec![OWN_POD.parse().unwrap()],
    };
    (setting, set.conflicts(&services))
}

#[test]
fn without_hostile_nodes_everything_leads_where_it_should() {
    let with_agent = Object {
        name: "agent-1",
        is_edge: false,
        addresses: &["10.0.0.30"],
        networks: &["10.244.5.0/24"],
    };
    let (setting, conflicts) = setting(&[with_agent]);
    for (target, expected) in BEFORE {
        assert_eq!(setting.leads(target), expected, "{target}");
    }
    // A node without the label whose agent is connected.
    assert_eq!(setting.leads("10.0.0.30:10250"), "agent agent-1");
    assert_eq!(setting.leads("10.244.5.7:443"), "403");
    assert!(conflicts.is_empty(), "{conflicts:?}");
}

/// A Node of a table: its addresses or its Pod network, and the resulting CONNECT decisions.
struct Row {
    is_edge: bool,
    claims: Vec<&'static str>,
    probes: Vec<(&'static str, &'static str)>,
}

/// Parses the rows `edge|cloud CLAIMS | TARGET -> DECISION, ...` of a table. Nodes of kind `edge`
/// have the label.
fn rows(table: &'static str) -> impl Iterator<Item = Row> {
    let lines = table.lines();
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| {
        let (node, probes) = line.split_once(" | ").unwrap();
        let (kind, claims) = node.split_once(' ').unwrap();
        let probes = probes.split(", ");
        Row {
            is_edge: kind == "edge",
            claims: claims.split(' ').collect(),
            probes: probes
                .map(|probe| probe.split_once(" ->").unwrap())
                .collect(),
        }
    })
}

/// Pod networks.
const NETWORKS: &str = "
cloud 10.244.3.0/24 | 10.244.3.7:443 -> direct 10.244.3.7
cloud fd00:10:244::/64 | [fd00:10:244::7]:443 -> direct fd00:10:244::7
cloud ::ffff:10.244.3.0/120 | 10.244.3.7:443 -> direct 10.244.3.7
# These networks are not used.
cloud 0.0.0.0/0 | 8.8.8.8:443 -> 403, 127.0.0.1:22 -> 403
cloud ::/0 | [2001:db8::1]:443 -> 403, [::1]:22 -> 403
cloud 10.0.0.0/7 | 10.9.0.1:443 -> 403
cloud fd00::/31 | [fd00::1]:443 -> 403
cloud ::ffff:0:0/96 | 8.8.8.8:443 -> 403
cloud 127.0.0.0/8 | 127.0.0.1:10265 -> 403, [::ffff:127.0.0.1]:22 -> 403
cloud 127.0.0.1/32 | 127.0.0.1:22 -> 403
cloud ::1/128 | [::1]:22 -> 403
cloud ::ffff:127.0.0.0/104 | 127.0.0.1:22 -> 403, [::ffff:127.0.0.1]:22 -> 403
cloud 0.0.0.0/8 | 0.0.0.0:22 -> 403
cloud ::/128 | [::]:22 -> 403
cloud 169.254.0.0/16 | 169.254.7.7:80 -> 403, 169.254.169.254:80 -> 403
cloud fe80::/64 | [fe80::1]:443 -> 403
cloud 224.0.0.0/8 | 224.0.0.1:443 -> 403
cloud ff02::/32 | [ff02::1]:443 -> 403
cloud 255.255.255.255/32 | 255.255.255.255:443 -> 403
cloud 100.100.100.0/24 | 100.100.100.200:80 -> 403, 100.100.100.7:80 -> 403
cloud fd00:ec2::/64 | [fd00:ec2::254]:80 -> 403
cloud 64:ff9b::/96 | [64:ff9b::7f00:1]:80 -> 403
cloud 2002:7f00::/32 | [2002:7f00:1::1]:80 -> 403
# The networks of other nodes are excluded, and the remainder is used.
cloud 10.0.0.0/8 | 10.9.0.1:443 -> direct 10.9.0.1, 10.50.0.3:443 -> direct 10.50.0.3
cloud 10.244.2.0/24 | 10.244.2.8:443 -> 403
cloud 10.244.2.128/25 | 10.244.2.200:443 -> 403
edge 10.244.4.0/24 | 10.244.4.7:443 -> 403
edge 10.244.1.64/26 | 10.244.1.70:443 -> 403, 10.244.1.7:443 -> direct 10.244.1.7
edge 10.244.1.0/24 | 10.244.1.7:443 -> 403, [::ffff:10.244.1.7]:443 -> 403
edge 10.0.0.0/24 | 10.0.0.9:10250 -> direct 10.0.0.9
edge 10.96.0.0/12 | 10.96.0.10:443 -> direct 10.96.0.10
edge 0.0.0.0/0 | 10.244.1.7:443 -> direct 10.244.1.7
edge ::ffff:0:0/96 | 10.244.1.7:443 -> direct 10.244.1.7
edge 127.0.0.0/8 | 127.0.0.1:22 -> 403
";

#[test]
fn networks_of_hostile_nodes_redirect_no_dial() {
    for row in rows(NETWORKS) {
        let (setting, conflicts) = setting(&[Object {
            name: "n-1",
            is_edge: row.is_edge,
            addresses: &[],
            networks: &row.claims,
        }]);
        row.check(&setting, |_| false);
        let network = row.claims[0];
        let is_usual = ["10.244.3.", "10.244.4.", "fd00:10:"];
        let is_usual = is_usual.iter().any(|start| network.contains(start));
        let names_it = conflicts.iter().any(|line| line.contains("n-1"));
        assert_eq!(names_it, !is_usual, "{network}: {conflicts:?}");
    }
}

/// Addresses. Those with the prefix `x` are of type ExternalIP.
const ADDRESSES: &str = "
cloud 10.0.0.20 | n-1:10250 -> direct 10.0.0.20, 10.0.0.20:2379 -> 403
edge 172.16.0.2 | 172.16.0.2:10250 -> agent n-1, n-1:10250 -> agent n-1
edge ::ffff:172.16.0.2 | 172.16.0.2:10250 -> agent n-1
# Addresses of several nodes of any kind.
edge 10.0.0.9 | 10.0.0.9:10250 -> 400, cloud-1:10250 -> 400
edge x10.0.0.9 | 10.0.0.9:10250 -> 400, cloud-1:10250 -> 400
edge ::ffff:10.0.0.9 | 10.0.0.9:10250 -> 400, cloud-1:10250 -> 400
cloud 10.0.0.9 | 10.0.0.9:10250 -> 400, cloud-1:10250 -> 400
edge 192.168.33.221 | 192.168.33.221:10250 -> 400, n-1:10250 -> agent n-1
cloud 192.168.33.221 | 192.168.33.221:10250 -> 400, n-1:10250 -> 400
cloud x192.168.33.221 | 192.168.33.221:10250 -> 400, n-1:10250 -> 400
cloud ::ffff:192.168.33.221 | [::ffff:192.168.33.221]:10250 -> 400
cloud 10.0.0.9 10.0.0.20 | cloud-1:10250 -> 400, n-1:443 -> direct 10.0.0.20
# Addresses of Services.
edge 10.96.0.10 | 10.96.0.10:443 -> 400, 10.96.0.11:443 -> direct 10.96.0.11
cloud 10.96.0.10 | 10.96.0.10:443 -> 400, n-1:443 -> 400
cloud 10.96.0.7 | 10.96.0.7:443 -> 400, n-1:443 -> 400
# Addresses of Pods: the single address belongs to the node, and the rest is unaffected.
edge 10.244.1.7 | 10.244.1.7:443 -> 403, 10.244.1.8:443 -> direct 10.244.1.8
edge 10.244.1.9 | 10.244.1.9:10250 -> agent n-1
cloud 10.244.2.7 | 10.244.2.7:443 -> direct 10.244.2.7, 10.244.2.8:443 -> 403
# Addresses of the server itself.
cloud 10.244.1.5 | 10.244.1.5:10264 -> 403, n-1:10264 -> 403
# Addresses that no node can have.
cloud 127.0.0.1 | 127.0.0.1:22 -> 403, n-1:22 -> direct
cloud ::ffff:127.0.0.1 | 127.0.0.1:22 -> 403, n-1:22 -> direct
cloud ::1 | [::1]:22 -> 403, n-1:22 -> direct
cloud 0.0.0.0 | 0.0.0.0:22 -> 403, n-1:22 -> direct
cloud 169.254.169.254 | 169.254.169.254:80 -> 403, n-1:80 -> direct
cloud 100.100.100.200 | 100.100.100.200:80 -> 403, n-1:80 -> direct
cloud fe80::1 | [fe80::1]:22 -> 403, n-1:22 -> direct
cloud 64:ff9b::7f00:1 | [64:ff9b::7f00:1]:22 -> 403, n-1:22 -> direct
cloud 2002:7f00:1::1 | [2002:7f00:1::1]:22 -> 403, n-1:22 -> direct
";

#[test]
fn addresses_of_hostile_nodes_redirect_no_dial() {
    for row in rows(ADDRESSES) {
        let (mut setting, conflicts) = setting(&[Object {
            name: "n-1",
            is_edge: row.is_edge,
            addresses: &row.claims,
            networks: &[],
        }]);
        if row.is_edge {
            setting.agents.push("n-1".parse().unwrap());
        }
        let claims = row.claims.iter().map(|address| {
            address
                .trim_start_matches('x')
                .trim_start_matches("::ffff:")
        });
        let claims: Vec<_> = claims.collect();
        row.check(&setting, |target| {
            claims.iter().any(|claim| target.contains(claim))
        });
        // Nodes behind agents may share an address, because each has its own site.
        let is_others = claims
            .iter()
            .any(|claim| claim.starts_with("10.") && *claim != "10.0.0.20")
            || !row.is_edge && claims.contains(&"192.168.33.221");
        let names_it = conflicts.iter().any(|line| line.contains("n-1"));
        assert_eq!(names_it, is_others, "{claims:?}: {conflicts:?}");
    }
}

impl Row {
    /// Compares the decisions for the targets of the row. All other targets must keep their
    /// decisions, except the claimed ones.
    fn check(&self, setting: &ClusterFixture, is_claimed: impl Fn(&str) -> bool) {
        let case = format!("{:?}, edge: {}", self.claims, self.is_edge);
        for (target, expected) in &self.probes {
            // A name that leads to no address has the decision `direct` alone.
            let decision = setting.leads(target);
            assert_eq!(decision.trim_end(), expected.trim(), "{target} with {case}");
        }
        for (target, expected) in BEFORE {
            let is_probed = self.probes.iter().any(|(probed, _)| *probed == target);
            if !is_probed && !is_claimed(target) {
                assert_eq!(setting.leads(target), expected, "{target} with {case}");
            }
        }
    }
}
