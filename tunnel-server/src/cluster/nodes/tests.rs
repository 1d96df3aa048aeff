use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Map, Value, json};

use super::*;
use crate::config::{CloudNodes, CloudTargetSettings};
use tunnel_dns::{Addresses, RecordSet};

mod names;
mod table;

const LABEL: &str = "openyurt.io/is-edge-worker";
const TUNNEL: &str = "10.106.217.16";

fn node(name: &str, is_edge: bool, addresses: &[(&str, &str)]) -> NodeObject {
    let addresses: Vec<_> = addresses
        .iter()
        .map(|(kind, address)| json!({"type": kind, "address": address}))
        .collect();
    let labels = if is_edge {
        json!({LABEL: "true"})
    } else {
        json!({})
    };
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"podCIDR": "10.0.0.0/24"},
        "status": {"addresses": addresses, "images": [{"names": ["x"], "sizeBytes": 1}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": 10350}}},
    }))
    .unwrap()
}

fn store(nodes: &[NodeObject]) -> NodeStore {
    let mut store = NodeStore::new(LABEL.into(), FactMap::new(), AliasRules::default());
    store.apply(nodes.iter().cloned().map(Event::Apply).collect());
    store
}

fn routes(store: &NodeStore) -> Vec<RouteNode> {
    store.nodes().iter().map(ClusterNode::route).collect()
}

fn records(store: &NodeStore, has_agent: impl Fn(&NodeName) -> bool) -> Vec<DnsNode> {
    let nodes = store.nodes();
    let nodes = nodes.iter();
    nodes
        .map(|node| node.record(has_agent(&node.name)))
        .collect()
}

fn refused(store: &NodeStore) -> Vec<String> {
    store.nodes().refused().collect()
}

fn hosts(store: &NodeStore) -> String {
    let tunnel = Addresses::first_of([TUNNEL.parse().unwrap()]);
    RecordSet::new(&records(store, |_| false), tunnel).hosts()
}

/// Parses a text like the hosts plugin of CoreDNS (`plugin/hosts/hostsfile.go`). `#` begins a
/// comment. Fields are separated by white space. The first field is an address, and all others are
/// names. Lines without both are skipped.
fn parsed(hosts: &str) -> BTreeSet<(IpAddr, String)> {
    let mut entries = BTreeSet::new();
    for line in hosts.lines() {
        let line = line.split('#').next().unwrap_or_default();
        let mut fields = line.split_whitespace();
        let Some(Ok(address)) = fields.next().map(str::parse) else {
            continue;
        };
        entries.extend(fields.map(|name| (address, name.trim_end_matches('.').to_lowercase())));
    }
    entries
}

#[test]
fn only_labels_of_the_settings_are_stored_and_followed() {
    let labeled = |labels: Value| -> NodeObject {
        let metadata = json!({"name": "worker-1", "labels": labels});
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    };
    let target = CloudTargetSettings {
        name: "registry".parse().unwrap(),
        addresses: Vec::new(),
        nodes: CloudNodes::Labeled("example.com/registry=true".parse().unwrap()),
    };
    let labeled_nodes = LabeledNodes::new(&[target]);
    let mut store = store(&[]).with_cloud_labels(labeled_nodes.clone());
    let many: Map<String, Value> = (0..1000)
        .map(|number| (format!("example.com/{number}"), "true".into()))
        .collect();
    for (labels, is_changed, nodes) in [
        (json!({"example.com/registry": "true"}), true, 1),
        (json!({"example.com/registry": "true", "a": "b"}), false, 1),
        (json!({"example.com/registry": "false"}), true, 0),
        (json!({"example.com/registry": "true"}), true, 1),
        (json!({"Example.com/registry": "true"}), true, 0),
        (Value::Object(many), false, 0),
    ] {
        let applied = store.apply(vec![Event::Apply(labeled(labels.clone()))]);
        assert_eq!(applied.is_changed, is_changed, "{labels}");
        let labels = labeled_nodes.labels();
        let set = store.nodes();
        let labeled = set.iter().filter(|node| node.has_cloud_label(&labels[0]));
        assert_eq!(labeled.count(), nodes);
    }
    let stored = serde_json::to_string(&store.nodes().facts()).unwrap();
    assert!(!stored.contains("example.com"), "{stored}");
}

/// DNS-1, from Node objects.
#[test]
fn nodes_become_the_guides_records() {
    let own = |address, name| [("InternalIP", address), ("Hostname", name)];
    let store = store(&[
        node("worker-1", true, &own("192.168.33.221", "worker-1")),
        node("master-1", false, &own("192.168.33.220", "master-1")),
    ]);
    assert_eq!(
        hosts(&store),
        "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1"
    );
}

/// DNS-6: a name that is the suffix of another one does not match it.
#[test]
fn deleted_node_takes_only_its_own_line() {
    let nodes = ["1", "worker-1", "xworker-1"].map(|name| node(name, true, &[]));
    let mut store = store(&nodes);
    let applied = store.apply(vec![Event::Delete(nodes[0].clone())]);
    assert!(applied.is_changed);
    assert_eq!(
        hosts(&store),
        format!("{TUNNEL}\tworker-1\n{TUNNEL}\txworker-1")
    );
}

/// DNS-5, and changes that have no effect.
#[test]
fn label_and_addresses_count_and_heartbeats_do_not() {
    let cloud = node("a", false, &[("InternalIP", "10.0.0.1")]);
    let mut store = store(std::slice::from_ref(&cloud));
    assert_eq!(hosts(&store), "10.0.0.1\ta");
    assert!(!store.apply(vec![Event::Apply(cloud)]).is_changed);
    let addresses = [("InternalIP", "10.0.0.2"), ("ExternalIP", "1.2.3.4")];
    let moved = node("a", false, &addresses);
    assert!(store.apply(vec![Event::Apply(moved)]).is_changed);
    assert_eq!(hosts(&store), "10.0.0.2\ta");
    let edge = node("a", true, &[("InternalIP", "10.0.0.2")]);
    assert!(store.apply(vec![Event::Apply(edge)]).is_changed);
    assert_eq!(hosts(&store), format!("{TUNNEL}\ta"));
    for value in ["True", "false", "1", ""] {
        let mut other = node("a", true, &[("ExternalIP", "1.2.3.4")]);
        other.metadata.labels = Some([(LABEL.to_owned(), value.to_owned())].into());
        store.apply(vec![Event::Apply(other)]);
        assert_eq!(hosts(&store), "1.2.3.4\ta", "label {value:?}");
    }
}

#[test]
fn only_labels_of_the_setting_with_valid_values_are_stored() {
    let labeled = |labels: Value| -> NodeObject {
        let metadata = json!({"name": "worker-1", "labels": labels});
        serde_json::from_value(json!({ "metadata": metadata })).unwrap()
    };
    let keys = ["zone", "example.com/rack"].map(|key| key.parse().unwrap());
    let mut store = store(&[]).with_labels(keys.to_vec());
    let long = "a".repeat(64);
    let many: BTreeMap<String, &str> = (0..1000).map(|n| (format!("label-{n}"), "a")).collect();
    for (labels, is_changed, expected) in [
        (json!({"zone": "a", "example.com/rack": ""}), true, 2),
        (
            json!({"zone": "a", "example.com/rack": "", "b": "c"}),
            false,
            2,
        ),
        (json!({"zone": "b"}), true, 1),
        (json!({"zone": "<b>\u{202e}"}), true, 0),
        (json!({"zone": long}), false, 0),
        (json!(many), false, 0),
        (json!({"zone": "b"}), true, 1),
    ] {
        let applied = store.apply(vec![Event::Apply(labeled(labels.clone()))]);
        assert_eq!(applied.is_changed, is_changed, "{labels}");
        assert_eq!(routes(&store)[0].labels.len(), expected, "{labels}");
    }
    let other = NodeStore::new(LABEL.into(), store.nodes().facts(), AliasRules::default());
    let other = other.with_labels(vec!["other".parse().unwrap()]);
    assert!(routes(&other)[0].labels.is_empty(), "of a file");
}

#[test]
fn list_replaces_what_was_there_only_when_it_is_complete() {
    let (a, b) = (node("a", true, &[]), node("b", true, &[]));
    let mut store = store(std::slice::from_ref(&a));
    let begun = store.apply(vec![Event::Init, Event::InitApply(b.clone())]);
    assert_eq!(begun, Applied::default());
    assert_eq!(hosts(&store), format!("{TUNNEL}\ta"));
    // The list restarted, so its earlier items do not count.
    let done = store.apply(vec![Event::Init, Event::InitApply(a), Event::InitDone]);
    assert_eq!((done.is_listed, done.is_changed), (true, false));
    let done = store.apply(vec![Event::Init, Event::InitApply(b), Event::InitDone]);
    assert_eq!((done.is_listed, done.is_changed), (true, true));
    assert_eq!(hosts(&store), format!("{TUNNEL}\tb"));
}

#[test]
fn routes_have_all_addresses_the_host_name_and_the_kubelets_port() {
    let addresses = [
        ("Hostname", "Worker-1.example"),
        ("InternalIP", "10.0.0.1"),
        ("InternalIP", "fd00::1"),
        ("ExternalIP", "1.2.3.4"),
        ("InternalIP", "127.0.0.1"),
        ("InternalDNS", "x.example"),
        ("InternalIP", "none"),
    ];
    let routes = routes(&store(&[node("worker-1", true, &addresses)]));
    assert_eq!(
        routes[0].hostname.as_ref().map(NodeName::as_str),
        Some("worker-1.example")
    );
    let texts: Vec<_> = routes[0].addresses.iter().map(IpAddr::to_string).collect();
    assert_eq!(texts, ["10.0.0.1", "fd00::1", "1.2.3.4"]);
    assert_eq!(routes[0].kubelet_port.map(Port::get), Some(10350));
    let table = crate::routing::routes::RouteTable::merge(&routes);
    let port_of = |name: &str| table.kubelet_port(&name.parse().unwrap()).map(Port::get);
    assert_eq!(port_of("worker-1"), Some(10350));
    assert_eq!(port_of("other"), Some(10250), "where no Node says another");
}

#[test]
fn connected_agent_can_make_an_edge_node() {
    let store = store(&[node("a", false, &[("InternalIP", "10.0.0.1")])]);
    let nodes = records(&store, |name| name.as_str() == "a");
    assert_eq!(nodes[0].location, NodeLocation::Edge);
}

/// Kubernetes has no limit on the length of a label.
#[test]
fn name_that_dns_cannot_carry_has_a_route_and_no_record() {
    let label = "a".repeat(64);
    let own = store(&[node(&label, true, &[("InternalIP", "10.0.0.1")])]);
    assert_eq!(routes(&own)[0].name.as_str(), label);
    assert!(refused(&own).is_empty());
    assert_eq!(hosts(&own), "");
    let alias = format!("{label}.{label}");
    let host = store(&[node(&label, true, &[("Hostname", &alias)])]);
    assert_eq!(routes(&host)[0].hostname, None);
    assert_eq!(refused(&host).len(), 1);
}

/// T13: names with another meaning, and invalid names.
#[test]
fn hostile_names_go_nowhere() {
    let long = "a".repeat(254);
    let odd = [
        "x 10.0.0.1 kubernetes.default",
        "a\nb",
        "a\tb",
        "a#b",
        "a\0b",
        "b\u{fc}cher",
        &long,
        "",
    ];
    let plain = "localhost x.localhost kubernetes kubernetes.default kubernetes.default.svc \
                 kube-dns.kube-system.svc kube-dns.kube-system.svc.cluster.local cluster.local \
                 *.example * . .. a..b -a a- 1.0.0.127.in-addr.arpa a_b a/b a:1";
    for name in odd.into_iter().chain(plain.split(' ')) {
        let own = node(name, true, &[("InternalIP", "10.0.0.1")]);
        let hostile = store(&[own]);
        assert_eq!(hostile.nodes().iter().count(), 0, "{name:?}");
        assert_eq!(refused(&hostile).len(), 1, "{name:?}");
        let host = store(&[node("good", true, &[("Hostname", name)])]);
        assert_eq!(routes(&host)[0].hostname, None, "{name:?}");
        assert_eq!(hosts(&host), format!("{TUNNEL}\tgood"));
    }
    for name in ["Worker-1", "worker-1."] {
        assert_eq!(refused(&store(&[node(name, true, &[])])).len(), 1);
    }
    let good = "ip-10-0-0-1.eu.compute.internal 1 a.b.c svc-1 kubernetes-node mylocalhost";
    for name in good.split(' ') {
        assert!(
            refused(&store(&[node(name, true, &[])])).is_empty(),
            "{name}"
        );
    }
}

/// T13, T14 and R07 together: for any names, the hosts text parses back to exactly the valid ones,
/// and adding or removing one never changes the line of another.
#[test]
fn hosts_text_parses_back_and_no_name_touches_anothers_line() {
    const PIECES: [&str; 16] = [
        "1", "worker", "-", ".", "worker-1", "edge", "x", "\n", "\t", " ", "#", "10.0.0.1", "\0",
        "A", "svc", "\u{e4}",
    ];
    let mut random = StdRng::seed_from_u64(7);
    let mut store = NodeStore::new(LABEL.into(), FactMap::new(), AliasRules::default());
    let mut good = 0;
    for _ in 0..2_000 {
        let name: String = (0..random.random_range(1..5))
            .map(|_| PIECES[random.random_range(0..PIECES.len())])
            .collect();
        let is_edge = random.random_bool(0.5);
        let addresses = [("InternalIP", "10.0.0.9"), ("Hostname", &*name)];
        let change = node(&name, is_edge, &addresses);
        let before: BTreeSet<String> = hosts(&store).lines().map(str::to_owned).collect();
        let event = if random.random_bool(0.3) {
            Event::Delete(change)
        } else {
            Event::Apply(change)
        };
        store.apply(vec![event]);
        let text = hosts(&store);
        let after: BTreeSet<String> = text.lines().map(str::to_owned).collect();
        let own = name
            .parse::<NodeName>()
            .ok()
            .filter(|own| own.as_str() == name);
        for line in before.symmetric_difference(&after) {
            let (_, of) = line.split_once('\t').unwrap();
            let own = own.as_ref().map(NodeName::as_str);
            assert_eq!(Some(of), own, "{name:?} changed {line:?}");
        }
        let nodes = records(&store, |_| false);
        let expected = nodes.iter().map(|node| {
            let is_edge = node.location == NodeLocation::Edge;
            let address = if is_edge { TUNNEL } else { "10.0.0.9" };
            (address.parse().unwrap(), node.name.to_string())
        });
        let expected: BTreeSet<(IpAddr, String)> = expected.collect();
        assert_eq!(parsed(&text), expected);
        good += expected.len();
    }
    assert!(good > 10_000, "{good}");
}

#[test]
fn cloud_nodes_and_their_pods_are_separate_from_those_at_the_edge() {
    let facts = |is_edge: bool, address: &str, networks: &[&str]| {
        let object = serde_json::json!({
            "metadata": { "labels": { "edge": is_edge.to_string() } },
            "spec": { "podCIDR": networks[0], "podCIDRs": networks },
            "status": { "addresses": [{ "type": "InternalIP", "address": address }] },
        });
        NodeFacts::of(serde_json::from_value(object).unwrap(), "edge")
    };
    let cloud = facts(false, "10.0.0.9", &["10.244.1.0/24", "fd00:1::/64", "odd"]);
    let edge = facts(true, "192.168.33.221", &["10.244.2.0/24"]);
    let nodes = [("cloud-1".into(), cloud), ("edge-1".into(), edge)];
    let ranges = NodeStore::new(LABEL.into(), nodes.into(), AliasRules::default());
    let ranges = ranges.nodes().ranges();
    let pods = ranges.pods.iter();
    let pods = pods.flat_map(|(node, pods)| pods.iter().map(move |pods| format!("{node} {pods}")));
    let pods: Vec<_> = pods.collect();
    let expected = [
        "cloud-1 10.244.1.0/24",
        "cloud-1 fd00:1::/64",
        "edge-1 10.244.2.0/24",
    ];
    assert_eq!(pods, expected);
    let own = vec!["10.0.0.9".parse().unwrap()];
    let cloud_nodes = [("cloud-1".parse().unwrap(), own)].into_iter().collect();
    assert_eq!(ranges.cloud_nodes, cloud_nodes);
}
