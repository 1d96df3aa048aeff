//! Snapshot of the last cluster state in the store of the data directory. A server that starts
//! without the API server serves from it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tunnel_proto::process::shutdown::Shutdown;

use super::nodes::NodeFacts;
use crate::cluster::state::{ClusterState, PersistedState};
use crate::store::state_store::{RowSet, StateStore, Table, follow};

/// The rows of the state.
pub(super) struct Snapshot {
    nodes: RowSet<Box<str>, NodeFacts>,
    aliases: RowSet<Box<str>, Box<str>>,
    /// One row, whose key is the prefix.
    cluster_wide: RowSet<String, ClusterWide>,
}

/// What is not about one node.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ClusterWide {
    is_listed: bool,
    tunnel_addresses: Vec<IpAddr>,
    ports: Option<BTreeMap<String, String>>,
}

impl Snapshot {
    /// Loads the rows. What cannot be read is missing, because the cluster provides it again. Blocks
    /// the thread.
    pub(super) fn load(store: &StateStore) -> Self {
        Self {
            nodes: RowSet::load(store, Table::Cluster, "node/"),
            aliases: RowSet::load(store, Table::Cluster, "alias/"),
            cluster_wide: RowSet::load(store, Table::Cluster, "state"),
        }
    }

    pub(super) fn state(&self) -> PersistedState {
        let cluster_wide = self.cluster_wide.values().values().next();
        PersistedState {
            nodes: self.nodes.values().clone(),
            is_listed: cluster_wide.is_some_and(|cluster_wide| cluster_wide.is_listed),
            aliases: self.aliases.values().clone(),
            tunnel_addresses: cluster_wide.map_or_else(Vec::new, |cluster_wide| {
                cluster_wide.tunnel_addresses.clone()
            }),
            ports: cluster_wide.and_then(|cluster_wide| cluster_wide.ports.clone()),
        }
    }

    /// Starts the task that persists the state soon after it changes.
    pub(super) fn start(mut self, source: watch::Receiver<ClusterState>, shutdown: &Shutdown) {
        shutdown.spawn_service(follow(source, move |state: ClusterState| {
            let state = state.to_persisted();
            self.nodes.replace(state.nodes);
            self.aliases.replace(state.aliases);
            // Last, because it says that the list of nodes is complete.
            let cluster_wide = ClusterWide {
                is_listed: state.is_listed,
                tunnel_addresses: state.tunnel_addresses,
                ports: state.ports,
            };
            self.cluster_wide
                .replace(BTreeMap::from([(String::new(), cluster_wide)]));
        }));
    }
}
