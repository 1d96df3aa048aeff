//! Entry points of the fuzz target: Node objects as the API server sends them, and as persisted.

use kube::runtime::watcher::Event;

use super::nodes::{AliasRules, FactMap, NodeObject, NodeStore};
use super::snapshot::PersistedNode;
use crate::routing::routes::RouteNode;
use tunnel_routing::dial_policy::ClusterNetworks;

/// Returns what follows from a list of Node objects in JSON, or `None` if the bytes are no such
/// list.
pub fn observe(json: &[u8]) -> Option<(Vec<RouteNode>, ClusterNetworks)> {
    let objects: Vec<NodeObject> = serde_json::from_slice(json).ok()?;
    let mut store = NodeStore::new(EDGE_LABEL.into(), FactMap::new(), AliasRules::default());
    let mut events = vec![Event::Init];
    events.extend(objects.into_iter().map(Event::InitApply));
    events.push(Event::InitDone);
    store.apply(events);
    Some(derive(&store))
}

/// Returns what follows from persisted Nodes in JSON, by name, or `None` if the bytes are none.
pub fn restore(json: &[u8]) -> Option<(Vec<RouteNode>, ClusterNetworks)> {
    let (facts, owners) = PersistedNode::split(serde_json::from_slice(json).ok()?);
    let rules = AliasRules {
        owners,
        ..AliasRules::default()
    };
    Some(derive(&NodeStore::new(EDGE_LABEL.into(), facts, rules)))
}

fn derive(store: &NodeStore) -> (Vec<RouteNode>, ClusterNetworks) {
    let nodes = store.nodes();
    (
        nodes.iter().map(|node| node.route()).collect(),
        nodes.ranges(),
    )
}

const EDGE_LABEL: &str = "openyurt.io/is-edge-worker";
