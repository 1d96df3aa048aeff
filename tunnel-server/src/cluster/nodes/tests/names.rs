//! Tests with Node objects, including hostile ones, and the records and routes that their names
//! produce.

use std::collections::BTreeSet;

use serde_json::json;

use super::*;
use crate::cluster::snapshot::{PersistedNode, row_changes};
use crate::routing::routes::RouteTable;

/// A Node's name and Hostname, and whether the Hostname is an alias. `--record-names` is
/// `*.edge.example.com,gw-*`.
const NAMES: [(&str, &str, bool); 34] = [
    ("worker-1", "worker-1", false),
    ("worker-1", "worker-1.example.com", true),
    ("worker-1", "Worker-1.Example.Com.", true),
    ("worker-1.site.example", "worker-1", true),
    ("worker-1.site.example", "worker-1.site.example.lan", true),
    ("worker-1.site.example", "worker-1.site", false),
    ("worker-1.site.example", "worker-1.example", false),
    ("worker-1.site.example", "site", false),
    ("worker-1.site.example", "example", false),
    ("worker-1", "registry", false),
    ("worker-1", "worker", false),
    ("worker-1", "worker-10", false),
    ("worker-1", "worker-1x.example", false),
    ("worker-1", "xworker-1", false),
    ("worker-1", "a.worker-1", false),
    ("worker-1", "registry.example.com", false),
    ("worker-1", "example.com", false),
    ("worker-1", "worker-2", false),
    ("worker-1", "master-1", false),
    ("master-1.site.example", "master-1", false),
    ("worker-1", "kubernetes", false),
    ("kubernetes.site.example", "kubernetes", false),
    ("worker-1", "worker-1.default.svc", false),
    ("worker-1", "worker-1.cluster.local", false),
    ("worker-1", "worker-1.localhost", false),
    ("worker-1", "worker-1 10.0.0.1", false),
    ("worker-1", "worker-1.*", false),
    ("worker-1", "10.0.0.1", false),
    ("worker-1", "site-1.edge.example.com", true),
    ("worker-1", "a.b.edge.example.com", false),
    ("worker-1", "edge.example.com", false),
    ("worker-1", "gw-7", true),
    ("worker-1", "gw-7.example.com", false),
    ("worker-1", "gw", false),
];

#[test]
fn names_of_hostile_nodes_make_no_foreign_record_or_route() {
    let rules = AliasRules {
        patterns: ["*.edge.example.com", "gw-*"]
            .map(|text| text.parse().unwrap())
            .into(),
        owners: AliasOwners::new(),
    };
    for (own, hostname, is_alias) in NAMES {
        let addresses = [("InternalIP", "6.6.6.6"), ("Hostname", hostname)];
        let hostile = node(own, false, &addresses);
        let master = node("master-1", false, &[("InternalIP", "192.168.33.220")]);
        let mut store = NodeStore::new(LABEL.into(), FactMap::new(), rules.clone());
        store.apply(vec![Event::Apply(master), Event::Apply(hostile)]);
        let found = parsed(&hosts(&store));
        let mut expected = BTreeSet::from([
            ("192.168.33.220".parse().unwrap(), "master-1".to_owned()),
            ("6.6.6.6".parse().unwrap(), own.to_owned()),
        ]);
        if is_alias {
            let alias = hostname.trim_end_matches('.').to_lowercase();
            expected.insert(("6.6.6.6".parse().unwrap(), alias));
        }
        assert_eq!(found, expected, "{hostname:?} of {own}");
        let is_refused = !is_alias && hostname != own;
        let refused = refused(&store);
        assert_eq!(refused.len(), usize::from(is_refused), "{hostname:?}");
        let routes = RouteTable::merge(&routes(&store));
        if let Ok(name) = hostname.parse() {
            let leads = routes.by_name(&name).map(|node| node.to_string());
            let expected = match hostname {
                _ if is_alias => Some(own),
                "master-1" => Some("master-1"),
                other => Some(own).filter(|own| *own == other),
            };
            assert_eq!(leads.ok().as_deref(), expected, "{hostname:?} of {own}");
        }
    }
}

/// Returns one of two nodes whose first labels are equal.
fn twin(name: &str, created: Option<&str>) -> NodeObject {
    let addresses = [("InternalIP", "10.0.0.1"), ("Hostname", "a")];
    let mut object = node(name, false, &addresses);
    let created = created.map(|text| serde_json::from_value(json!(text)).unwrap());
    object.metadata.creation_timestamp = created;
    object
}

/// Returns the facts and the owners of aliases as a restart has them.
fn persisted(store: &NodeStore) -> (FactMap, AliasOwners) {
    let rows = row_changes(&store.nodes(), &NodeSet::default()).into_iter();
    let rows = rows.map(|row| {
        let (key, node) = row.decoded();
        let name = key.strip_prefix("node/").unwrap().into();
        (name, node.unwrap())
    });
    PersistedNode::split(rows.collect())
}

/// Returns the node that has the alias `a`, or an empty text.
fn owner(store: &NodeStore) -> String {
    let (_facts, owners) = persisted(store);
    let owner = owners.get("a").map(ToString::to_string);
    owner.unwrap_or_default()
}

#[test]
fn contested_alias_stays_with_the_node_that_had_it_first() {
    let old = twin("a.old", Some("2026-01-01T00:00:00Z"));
    let new = twin("a.new", Some("2026-02-01T00:00:00Z"));
    let mut both = store(&[]);
    both.apply(vec![Event::Apply(new.clone()), Event::Apply(old.clone())]);
    assert_eq!(owner(&both), "a.old", "the older object");
    let line = "host name \"a\" of node a.new: node a.old had it first";
    assert_eq!(refused(&both), [line]);

    let mut late = store(std::slice::from_ref(&new));
    assert_eq!(owner(&late), "a.new", "alone");
    late.apply(vec![Event::Apply(old.clone())]);
    assert_eq!(owner(&late), "a.new", "had it before");

    // After a restart, the snapshot on disk determines the previous owner.
    let (facts, owners) = persisted(&late);
    let rules = AliasRules {
        owners,
        ..AliasRules::default()
    };
    let mut restarted = NodeStore::new(LABEL.into(), facts, rules);
    assert_eq!(owner(&restarted), "a.new");
    restarted.apply(vec![
        Event::Init,
        Event::InitApply(old.clone()),
        Event::InitApply(new.clone()),
        Event::InitDone,
    ]);
    assert_eq!(owner(&restarted), "a.new");

    restarted.apply(vec![Event::Delete(new.clone())]);
    assert_eq!(owner(&restarted), "a.old", "the other is gone");
    restarted.apply(vec![Event::Apply(new)]);
    assert_eq!(owner(&restarted), "a.old", "came back too late");
}

#[test]
fn contested_alias_of_nodes_of_unknown_age_is_nobodys() {
    let store = store(&[
        twin("a.one", None),
        twin("a.two", Some("2026-01-01T00:00:00Z")),
    ]);
    assert_eq!(owner(&store), "");
    assert_eq!(refused(&store).len(), 2);
}
