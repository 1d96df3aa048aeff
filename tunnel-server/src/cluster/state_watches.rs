//! Watches that keep the [`ClusterState`] equal to the cluster: Nodes, the Service, and the
//! ConfigMaps of the records and of the ports.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::DynamicObject;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{oneshot, watch};
use tracing::warn;
use tunnel_proto::process::meta::ReadinessBlock;
use tunnel_proto::process::shutdown::Shutdown;

use super::client::ClusterHandle;
use super::client::Connection;
use super::nodes::{NodeObject, NodeStore};
use super::objects::Object;
use super::watches::{Observed, WatchContext, config, follow, follow_one};
use super::writers;
use crate::cluster::state::ClusterState;
use crate::config::ObjectNames;

/// A server without persisted nodes waits this long for the first list before it reports ready.
const FIRST_LIST_LIMIT: Duration = Duration::from_secs(10);

/// Starts one task per watch. `nodes` has the Nodes as persisted, `state` receives the observed
/// state, and `first_list` blocks readiness until the first list of Nodes.
pub(super) fn start(
    cluster: &ClusterHandle,
    names: &ObjectNames,
    nodes: NodeStore,
    state: watch::Sender<ClusterState>,
    first_list: Option<ReadinessBlock>,
    shutdown: &Shutdown,
) {
    let Connection {
        client, namespace, ..
    } = &cluster.connection;
    let (first_list_tx, first_list_rx) = oneshot::channel();
    shutdown.spawn_service(follow_nodes(
        cluster.clone(),
        nodes,
        state.clone(),
        first_list_tx,
    ));
    shutdown.spawn_service(follow_object(
        writers::services(client.clone(), namespace),
        names.internal_service.clone(),
        cluster.watch_context(Object::Service),
        state.clone(),
        |state, observed| state.service = observed.map(with_metadata),
    ));
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    shutdown.spawn_service(follow_object(
        maps.clone(),
        names.nodes_config_map.clone(),
        cluster.watch_context(Object::Records),
        state.clone(),
        |state, observed| state.records_map = observed.map(|map| map),
    ));
    shutdown.spawn_service(follow_object(
        maps,
        names.ports_config_map.clone(),
        cluster.watch_context(Object::Ports),
        state,
        |state, observed| state.ports_map = observed.map(|map| map),
    ));
    if let Some(first_list) = first_list {
        shutdown.spawn_service(wait_first_list(first_list, first_list_rx));
    }
}

/// Applies the Nodes to the cluster state. `first_list` is completed with the first list.
async fn follow_nodes(
    cluster: ClusterHandle,
    mut nodes: NodeStore,
    state: watch::Sender<ClusterState>,
    first_list: oneshot::Sender<()>,
) {
    let api = Api::<NodeObject>::all(cluster.connection.client.clone());
    let context = cluster.watch_context(Object::Nodes);
    let mut first_list = Some(first_list);
    follow(api, config(), context, |events| {
        let applied = nodes.apply(events);
        if applied.is_listed {
            cluster.metrics.synced(Object::Nodes);
            if let Some(first_list) = first_list.take() {
                let _nobody_waits = first_list.send(());
            }
        }
        state.send_if_modified(|state| {
            if applied.is_changed {
                state.nodes = Arc::new(nodes.nodes());
            }
            let is_first_list = applied.is_listed && !state.is_listed;
            state.is_listed |= applied.is_listed;
            applied.is_changed || is_first_list
        });
    })
    .await;
}

/// Applies each observed state of the object with this name to the cluster state.
async fn follow_object<K>(
    api: Api<K>,
    name: String,
    context: WatchContext,
    state: watch::Sender<ClusterState>,
    apply: fn(&mut ClusterState, Observed<K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    follow_one(api, &name, context, |observed| {
        state.send_modify(|state| apply(state, observed));
    })
    .await;
}

/// Waits for the first list, for at most [`FIRST_LIST_LIMIT`], and then drops the block.
async fn wait_first_list(block: ReadinessBlock, first_list: oneshot::Receiver<()>) {
    if tokio::time::timeout(FIRST_LIST_LIMIT, first_list)
        .await
        .is_err()
    {
        warn!("no list of Nodes from the API server yet; serving the persisted nodes");
    }
    drop(block);
}

/// Returns the fields of the Service with its name and annotations, which kube stores separately.
fn with_metadata(service: DynamicObject) -> serde_json::Value {
    let mut fields = service.data;
    fields["metadata"] = serde_json::json!({
        "name": service.metadata.name,
        "annotations": service.metadata.annotations,
    });
    fields
}
