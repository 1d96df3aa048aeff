//! Controllers for the Kubernetes cluster. Every server watches Nodes, ports and the address of the
//! Service. Only the leader, which holds the Lease, writes records and ports.
//!
//! ```text
//! watches ──▶ ClusterState ──▶ derive (pure) ──▶ routes, records, policy of this server, at once
//!                                    └──▶ DesiredState ──▶ writers, after a short quiet, while leading
//! ```
//!
//! The controllers are level-triggered. An event only triggers a new derivation of the desired
//! state, so a missed event leaves no residue. The data plane does not depend on this module. The
//! data plane reads [`Routes`], [`Records`] and [`SharedPortPolicy`], and queries a
//! [`crate::routing::pod_lookup::PodResolver`].

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::DynamicObject;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};
use tunnel_proto::process::host::host_name;
use tunnel_proto::process::meta::{Readiness, ReadinessBlock};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;

use crate::ca::ServingNames;
use crate::config::KubernetesSettings;
use crate::dns::Records;
use crate::metrics::Metrics;
use crate::policy::{PortPolicy, SharedPortPolicy};
use crate::routing::dial_policy::LiveClusterNetworks;
use crate::routing::pod_lookup::Question;
use crate::routing::registry::Registry;
use crate::routing::routes::Routes;
use crate::store::data_dir::DataDir;

mod client;
mod cluster_ca;
mod conditions;
mod events;
mod failure;
mod handle;
mod hosts;
mod kubelet_ca;
mod leader_election;
mod metrics;
mod nodes;
pub mod objects;
mod pods;
mod ports;
mod publisher;
mod ranges;
mod service;
mod serving_names;
mod signing;
mod snapshot;
mod state;
#[cfg(test)]
mod testing;
mod token_review;
mod watches;
mod writers;

use crate::cluster::conditions::Conditions;
use crate::cluster::leader_election::Election;
use crate::cluster::state::{ClusterState, DesiredState, LocalFacts};
use client::Connection;
pub use cluster_ca::LeaseGuard;
use events::EventRecorder;
pub use handle::ClusterHandle;
use metrics::{ClusterMetrics, Object};
use nodes::{AliasRules, NodeObject, NodeStore};
use publisher::Publisher;
pub use service::ListenerPorts;
use signing::KubeletCertificateTask;
pub use signing::SignerConfig;
use watches::{Observed, WatchContext, config, follow, follow_one};
use writers::Writers;

/// A server without persisted nodes waits this long for the first list before it reports ready.
const FIRST_LIST_LIMIT: Duration = Duration::from_secs(10);

/// Inputs and outputs of the cluster controllers.
#[derive(Debug)]
pub struct ClusterInputs {
    /// Receives the nodes.
    pub routes: Routes,
    /// Receives the DNS records.
    pub records: Records,
    /// Receives the port policy.
    pub policy: SharedPortPolicy,
    /// Knows which agents are connected.
    pub registry: Arc<Registry>,
    /// Receives the number of routes.
    pub metrics: Metrics,
    /// Receives conditions and readiness.
    pub readiness: Readiness,
    /// Stores the snapshot of the cluster state.
    pub data: DataDir,
    /// Stops all controllers.
    pub shutdown: Shutdown,
    /// Listeners that the ports of the Service target.
    pub listener_ports: ListenerPorts,
    /// Receives the networks that the CONNECT listeners may dial. `None` without CONNECT listeners.
    pub ranges: Option<LiveClusterNetworks>,
    /// Whether these networks alone decide what the CONNECT listeners dial without an agent,
    /// because `--connect-direct` is not set.
    pub dials_by_ranges: bool,
    /// Receives the names of the HTTPS serving certificate.
    pub serving_names: ServingNames,
    /// Pod lookups from the listeners.
    pub questions: Option<mpsc::Receiver<Question>>,
    /// Token reviews for enrollments.
    pub attestations: Option<mpsc::Receiver<crate::ca::attestation::Question>>,
    /// Receives the CA of kubelet client certificates.
    pub kubelet_ca: Option<Arc<AgentTrust>>,
    /// Signer of the client certificate for kubelets.
    pub signer: Option<SignerConfig>,
}

/// A handle to the writers, which stop when the drain begins.
#[derive(Debug)]
pub struct WritersHandle(oneshot::Receiver<()>);

impl WritersHandle {
    /// Waits until all writes have ended and the Lease is released. This takes at most 2 s after
    /// the drain has begun.
    pub async fn ended(self) {
        let _either_way = self.0.await;
    }
}

/// Starts all controllers. Does not wait for the API server: the persisted state is used until the
/// API server answers.
pub fn start(
    settings: &KubernetesSettings,
    cluster: ClusterHandle,
    inputs: ClusterInputs,
) -> WritersHandle {
    let ClusterHandle {
        connection,
        problems,
        metrics,
    } = cluster;
    let persisted = snapshot::load(&inputs.data);
    let first_list = persisted
        .nodes
        .is_empty()
        .then(|| inputs.readiness.block("nodes of the cluster"));
    info!(
        namespace = connection.namespace,
        persisted_nodes = persisted.nodes.len(),
        "following the cluster"
    );
    let aliases = AliasRules {
        patterns: settings.record_names.clone(),
        owners: persisted.aliases.clone(),
    };
    let mut store = NodeStore::new(
        settings.edge_label.clone(),
        persisted.nodes.clone(),
        aliases,
    );
    let world = watch::Sender::new(ClusterState::persisted(persisted, store.nodes()));
    let desired = watch::Sender::new(DesiredState::default());
    let writing = start_writers(
        settings,
        &connection,
        &inputs,
        (&world, &desired, &problems, &metrics),
    );
    snapshot::start(&inputs.data, world.subscribe(), &inputs.shutdown);
    inputs.shutdown.spawn_service(serving_names::follow(
        inputs.serving_names,
        (
            connection.namespace.clone(),
            settings.cluster_domain.clone(),
        ),
        world.subscribe(),
        problems.clone(),
    ));
    if let Some(questions) = inputs.questions {
        let answering = pods::answer(connection.client.clone(), questions, problems.clone());
        inputs.shutdown.spawn_service(answering);
    }
    if let Some(questions) = inputs.attestations {
        let tokens = settings.agent_tokens.clone();
        let answering = token_review::answer(connection.client.clone(), questions, tokens);
        inputs.shutdown.spawn_service(answering);
    }
    if let Some(trust) = inputs.kubelet_ca {
        let context = WatchContext {
            object: Object::KubeletCa,
            metrics: metrics.clone(),
            problems: problems.clone(),
            throttle: connection.throttle.clone(),
        };
        kubelet_ca::start(
            &connection.client,
            trust,
            inputs.data.kubelet_ca(),
            (context, problems.clone()),
            &inputs.shutdown,
        );
    }
    if inputs.ranges.is_some() {
        let (client, namespace) = (connection.client.clone(), connection.namespace.clone());
        let (world, problems, are_needed) =
            (world.clone(), problems.clone(), inputs.dials_by_ranges);
        inputs.shutdown.spawn_service(async move {
            ranges::follow(client, world, problems, are_needed, &namespace).await;
        });
    }
    if let Some(signer) = inputs.signer {
        let signing = KubeletCertificateTask {
            api: Api::all(connection.client.clone()),
            signer,
            data: inputs.data.clone(),
            problems: problems.clone(),
            metrics: inputs.metrics.clone(),
        };
        inputs.shutdown.spawn_service(signing.run());
    }
    let publisher = Publisher {
        ranges: inputs.ranges,
        own: LocalFacts {
            policy: PortPolicy::clone(&inputs.policy.load()),
            listener_ports: inputs.listener_ports,
        },
        routes: inputs.routes,
        records: inputs.records,
        policy: inputs.policy,
        agents: settings.edge_by_agent.then_some(inputs.registry),
        route_metrics: inputs.metrics,
        service: format!(
            "{}/{}",
            connection.namespace, settings.names.internal_service
        ),
        problems: problems.clone(),
        metrics: metrics.clone(),
        desired,
        last_nodes: None,
        last_ranges: None,
    };
    inputs
        .shutdown
        .spawn_service(publisher.run(world.subscribe()));
    start_watches(
        settings,
        &connection,
        &inputs.shutdown,
        (store, world, first_list),
        (problems, metrics),
    );
    writing
}

/// Starts the leader election and the writers that depend on it. The Lease is released after the
/// last write has ended.
fn start_writers(
    settings: &KubernetesSettings,
    connection: &Connection,
    inputs: &ClusterInputs,
    (world, desired, problems, metrics): (
        &watch::Sender<ClusterState>,
        &watch::Sender<DesiredState>,
        &Conditions,
        &ClusterMetrics,
    ),
) -> WritersHandle {
    let Connection {
        client,
        throttle,
        namespace,
    } = connection;
    let identity = identity();
    let mut election = Election::new(
        Api::<Lease>::namespaced(client.clone(), namespace),
        (settings.names.leader_lease.clone(), identity.clone()),
        (problems.clone(), metrics.clone()),
        throttle.clone(),
    );
    let mut writers = Writers {
        maps: Api::namespaced(client.clone(), namespace),
        services: writers::services(client.clone(), namespace),
        events: EventRecorder::new(
            Api::namespaced(client.clone(), namespace),
            namespace.clone(),
            identity,
        ),
        names: settings.names.clone(),
        world: world.subscribe(),
        desired: desired.subscribe(),
        leadership: election.leadership(),
        throttle: throttle.clone(),
        problems: problems.clone(),
        metrics: metrics.clone(),
        written: None,
    };
    let drain = inputs.shutdown.drain().clone();
    let (end, ended) = oneshot::channel();
    inputs.shutdown.spawn_service(async move {
        let writing = Box::pin(writers.run(&drain));
        let electing = Box::pin(election.run(&drain));
        tokio::join!(writing, electing);
        election.release().await;
        let _nobody_waits = end.send(());
    });
    WritersHandle(ended)
}

fn start_watches(
    settings: &KubernetesSettings,
    connection: &Connection,
    shutdown: &Shutdown,
    (mut store, world, first_list): (
        NodeStore,
        watch::Sender<ClusterState>,
        Option<ReadinessBlock>,
    ),
    (problems, metrics): (Conditions, ClusterMetrics),
) {
    let Connection {
        client,
        throttle,
        namespace,
    } = connection;
    let names = settings.names.clone();
    let context = |object| WatchContext {
        object,
        metrics: metrics.clone(),
        problems: problems.clone(),
        throttle: throttle.clone(),
    };
    let nodes = Api::<NodeObject>::all(client.clone());
    let services = writers::services(client.clone(), namespace);
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let (nodes_context, service_context) = (context(Object::Nodes), context(Object::Service));
    let (records_context, ports_context) = (context(Object::Records), context(Object::Ports));
    let (first_list_tx, first_list_rx) = oneshot::channel();
    let mut first_list_tx = Some(first_list_tx);
    let world = Arc::new(world);
    let (service_state, records_state, ports_state) = (world.clone(), world.clone(), world.clone());
    shutdown.spawn_service(async move {
        follow(nodes, config(), nodes_context, |events| {
            let applied = store.apply(events);
            if applied.is_listed {
                metrics.synced(Object::Nodes);
                if let Some(first_list_tx) = first_list_tx.take() {
                    let _nobody_waits = first_list_tx.send(());
                }
            }
            world.send_if_modified(|world| {
                if applied.is_changed {
                    world.nodes = Arc::new(store.nodes());
                }
                let is_first_list = applied.is_listed && !world.is_listed;
                world.is_listed |= applied.is_listed;
                applied.is_changed || is_first_list
            });
        })
        .await;
    });
    let service_name = names.internal_service.clone();
    shutdown.spawn_service(async move {
        follow_one(
            services,
            &service_name,
            service_context,
            |observed: Observed<DynamicObject>| {
                service_state.send_modify(|world| world.service = observed.map(with_metadata));
            },
        )
        .await;
    });
    let (records_maps, records_name) = (maps.clone(), names.nodes_config_map.clone());
    shutdown.spawn_service(async move {
        follow_one(records_maps, &records_name, records_context, |observed| {
            records_state.send_modify(|world| world.records_map = observed.map(|map| map));
        })
        .await;
    });
    shutdown.spawn_service(async move {
        follow_one(maps, &names.ports_config_map, ports_context, |observed| {
            ports_state.send_modify(|world| world.ports_map = observed.map(|map| map));
        })
        .await;
    });
    if let Some(first_list) = first_list {
        shutdown.spawn_service(async move {
            if tokio::time::timeout(FIRST_LIST_LIMIT, first_list_rx)
                .await
                .is_err()
            {
                warn!("no list of Nodes from the API server yet; serving the persisted nodes");
            }
            drop(first_list);
        });
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

/// Returns the identity of this candidate: host name and a random suffix, as client-go users do. A
/// restarted server is therefore a different candidate.
fn identity() -> String {
    let host = host_name().unwrap_or_default();
    let random: u128 = rand::random();
    format!("{host}_{random:032x}")
}

#[cfg(test)]
mod tests;
