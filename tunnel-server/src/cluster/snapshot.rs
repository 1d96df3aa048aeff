//! Snapshot of the last cluster state in the store of the data directory. A server that starts
//! without the API server serves from it. A change of a Node writes the row of this Node.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_process::shutdown::Shutdown;

use super::nodes::{AliasOwners, ClusterNode, FactMap, NodeFacts, NodeSet};
use crate::cluster::state::{ClusterState, PersistedState};
use tunnel_store::state_store::{RowChange, RowSet, StateStore, Table, follow};

/// The rows of the state.
pub(super) struct Snapshot {
    store: StateStore,
    /// The Nodes of the rows.
    nodes: BTreeMap<Box<str>, PersistedNode>,
    /// One row, whose key is the prefix.
    state: RowSet<String, PersistedState>,
}

/// The row of a Node.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PersistedNode {
    pub(super) facts: NodeFacts,
    /// The host name that the node has, which others may claim, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) alias: Option<Box<str>>,
}

impl PersistedNode {
    fn of(node: &ClusterNode) -> Self {
        Self {
            facts: node.facts.clone(),
            alias: node.hostname.as_ref().map(|alias| alias.as_str().into()),
        }
    }

    /// Returns the facts and the owners of host names in these rows.
    pub(super) fn split(nodes: BTreeMap<Box<str>, Self>) -> (FactMap, AliasOwners) {
        let (mut facts, mut owners) = (FactMap::new(), AliasOwners::new());
        for (name, node) in nodes {
            owners.extend(node.alias.map(|alias| (alias, name.clone())));
            facts.insert(name, node.facts);
        }
        (facts, owners)
    }
}

impl Snapshot {
    /// Loads the rows. What cannot be read is missing, because the cluster provides it again. Blocks
    /// the thread.
    pub(super) fn load(store: &StateStore) -> Self {
        let nodes = store.load_observed(Table::Cluster, NODES).into_iter();
        Self {
            store: store.clone(),
            nodes: nodes.map(|(name, node)| (name.into(), node)).collect(),
            state: RowSet::load(store, Table::Cluster, "state"),
        }
    }

    pub(super) fn state(&self) -> PersistedState {
        let state = self.state.values().values().next();
        state.cloned().unwrap_or_default()
    }

    /// Takes the facts and the owners of host names.
    pub(super) fn take_nodes(&mut self) -> (FactMap, AliasOwners) {
        PersistedNode::split(std::mem::take(&mut self.nodes))
    }

    /// Starts the task that persists the state soon after it changes. `persisted` are the Nodes of the
    /// rows.
    pub(super) fn start(
        self,
        mut persisted: NodeSet,
        source: watch::Receiver<ClusterState>,
        shutdown: &Shutdown,
    ) {
        let Self {
            store, mut state, ..
        } = self;
        shutdown.spawn_service(follow(source, move |observed: ClusterState| {
            store.change(Table::Cluster, row_changes(&observed.nodes, &persisted));
            persisted = observed.nodes.clone();
            // Last, because it says that the list of nodes is complete.
            state.replace(BTreeMap::from([(String::new(), observed.to_persisted())]));
        }));
    }
}

/// Returns the changes of the rows for other Nodes than the persisted ones.
pub(super) fn row_changes(nodes: &NodeSet, persisted: &NodeSet) -> Vec<RowChange> {
    let changed = nodes.changed_from(persisted).into_iter();
    let rows = changed.map(|(name, node)| {
        let node = node.map(PersistedNode::of);
        RowChange::of(&format!("{NODES}{name}"), node.as_ref())
    });
    rows.collect()
}

/// Prefix of the keys of Nodes.
const NODES: &str = "node/";
