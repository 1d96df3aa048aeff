//! Watches that keep the [`ClusterState`] equal to the cluster: Nodes, the Service, and the
//! ConfigMap of the ports.

use std::fmt::Debug;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::DynamicObject;
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::{oneshot, watch};
use tokio::time::timeout;
use tunnel_process::shutdown::Shutdown;

use super::client::ClusterHandle;
use super::client::Connection;
use super::nodes::{NodeObject, NodeStore};
use super::objects::Object;
use super::restart::run_restarting;
use super::watches::{Observed, WatchContext, config, follow, follow_one};
use super::writers;
use crate::cluster::conditions::{Condition, Conditions};
use crate::cluster::state::ClusterState;
use crate::config::ObjectNames;

/// The first list of Nodes is usually complete by then. After that, the server says what it does
/// without the list.
const FIRST_LIST_REPORTED: Duration = Duration::from_secs(10);

/// Starts one task per watch. `nodes` has the Nodes as persisted, and `state` receives the observed
/// state. `persisted_nodes` is the number of nodes of a persisted list, which is served until the
/// first one is complete. Without a persisted list the server is not ready until then.
pub(super) fn start(
    cluster: &ClusterHandle,
    names: &ObjectNames,
    nodes: NodeStore,
    state: watch::Sender<ClusterState>,
    persisted_nodes: Option<usize>,
    shutdown: &Shutdown,
) {
    let Connection {
        client, namespace, ..
    } = &cluster.connection;
    let (first_list_tx, first_list_rx) = oneshot::channel();
    let mut following = NodesFollower {
        cluster: cluster.clone(),
        nodes,
        state: state.clone(),
        first_list: Some(first_list_tx),
    };
    shutdown.spawn_service(async move {
        let conditions = following.cluster.conditions.clone();
        run_restarting(
            "task nodes",
            &mut following,
            &conditions,
            |following| Box::pin(following.run()),
            |_following| {},
        )
        .await;
    });
    shutdown.spawn_service(follow_object(
        "task service",
        writers::services(client.clone(), namespace),
        names.internal_service.clone(),
        cluster.watch_context(Object::Service),
        state.clone(),
        |state, observed| state.service = observed.map(with_metadata),
    ));
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    shutdown.spawn_service(follow_object(
        "task ports",
        maps,
        names.ports_config_map.clone(),
        cluster.watch_context(Object::Ports),
        state,
        |state, observed| state.ports_map = observed.map(|map| map),
    ));
    let conditions = cluster.conditions.clone();
    shutdown.spawn_service(report_first_list(
        persisted_nodes,
        first_list_rx,
        conditions,
    ));
}

/// Applies the Nodes to the cluster state.
struct NodesFollower {
    cluster: ClusterHandle,
    nodes: NodeStore,
    state: watch::Sender<ClusterState>,
    /// Completed with the first list.
    first_list: Option<oneshot::Sender<()>>,
}

impl NodesFollower {
    async fn run(&mut self) {
        let Self {
            cluster,
            nodes,
            state,
            first_list,
        } = self;
        let api = Api::<NodeObject>::all(cluster.connection.client.clone());
        let context = cluster.watch_context(Object::Nodes);
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
                    state.nodes = nodes.nodes();
                }
                let is_first_list = applied.is_listed && !state.is_listed;
                state.is_listed |= applied.is_listed;
                applied.is_changed || is_first_list
            });
        })
        .await;
    }
}

/// Applies each observed state of the object with this name to the cluster state.
async fn follow_object<K>(
    task: &'static str,
    api: Api<K>,
    name: String,
    context: WatchContext,
    mut state: watch::Sender<ClusterState>,
    apply: fn(&mut ClusterState, Observed<K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let conditions = context.conditions.clone();
    run_restarting(
        task,
        &mut state,
        &conditions,
        |state| {
            let (api, name, context) = (api.clone(), name.clone(), context.clone());
            Box::pin(async move {
                follow_one(api, &name, context, |observed| {
                    state.send_modify(|state| apply(state, observed));
                })
                .await;
            })
        },
        |_state| {},
    )
    .await;
}

/// Reports a first list that is late, until it is complete.
async fn report_first_list(
    persisted_nodes: Option<usize>,
    mut listed: oneshot::Receiver<()>,
    conditions: Conditions,
) {
    if timeout(FIRST_LIST_REPORTED, &mut listed).await.is_ok() {
        return;
    }
    let line = match persisted_nodes {
        None => "the API server has not sent a complete list of Nodes yet; this server is not ready until then"
            .to_owned(),
        Some(nodes) => format!(
            "the API server has not sent a complete list of Nodes yet; the {nodes} persisted nodes are served meanwhile"
        ),
    };
    conditions.set(Condition::NodeList, vec![line]);
    if listed.await.is_ok() {
        conditions.set(Condition::NodeList, Vec::new());
    }
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
