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
//! data plane reads [`Routes`], [`Records`] and [`SharedPolicy`], and queries a
//! [`crate::routing::pod_lookup::PodResolver`].

use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::info;
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;
use tunnel_proto::wire::name::Port;

use crate::config::KubernetesSettings;
use crate::egress::labeled_nodes::LabeledNodes;
use crate::metrics::Metrics;
use crate::routing::Routing;
use crate::routing::access_review::ReviewQueues;
use crate::routing::pod_lookup::PodLookupRequest;
use crate::routing::routes::Routes;
use tunnel_ca::ServingNames;
use tunnel_dns::{RecordSet, Records};
use tunnel_routing::dial_policy::{ClusterNetworks, LiveClusterNetworks};
use tunnel_routing::policy::{PortSettings, SharedPolicy};
use tunnel_store::data_dir::DataDir;
use tunnel_store::state_store::StateStore;

mod access_review;
mod api_call;
mod client;
mod clock;
mod conditions;
mod credentials;
pub mod dns_snapshot;
pub(crate) mod doctor;
mod events;
mod failure;
#[cfg(feature = "test-util")]
pub mod fuzz;
mod head_limit;
mod hosts;
mod kubelet_client_ca;
mod leader_election;
mod lease;
mod membership;
mod metrics;
mod nodes;
pub mod objects;
mod pods;
mod publisher;
mod ranges;
mod restart;
mod service;
mod serving_names;
mod shared_state;
mod signing;
mod snapshot;
mod state;
mod state_watches;
#[cfg(test)]
mod testing;
mod token_review;
mod watches;
mod writers;

use crate::cluster::leader_election::Election;
use crate::cluster::lease::LeaseHandle;
use crate::cluster::objects::Object;
use crate::cluster::state::{ClusterState, DesiredState, LocalFacts};
use crate::cluster::watches::Observed;
pub use client::ClusterHandle;
use client::Connection;
pub(crate) use clock::ApiServerClock;
pub(crate) use credentials::check_kubeconfig;
use events::EventRecorder;
use kubelet_client_ca::PersistedFile;
pub(crate) use membership::follow_peers;
pub use membership::{OwnMembership, UnknownMembership};
#[cfg(feature = "test-util")]
pub use metrics::register_example_metrics;
use nodes::{AliasRules, NodeStore};
use publisher::Publisher;
use restart::run_restarting;
pub use service::ListenerPorts;
use shared_state::TokenSecrets;
use signing::KubeletClientCertificateTask;
pub use signing::SignerConfig;
use snapshot::Snapshot;
use writers::Writers;

#[derive(Debug)]
pub struct ClusterInputs {
    /// Receives the nodes of the cluster.
    pub routes: Routes,
    /// Receives the DNS records.
    pub records: Records,
    /// Receives the port policy.
    pub policy: SharedPolicy,
    /// Settings of the ports, whose lists the ConfigMap replaces. They follow the file.
    pub ports: watch::Receiver<PortSettings>,
    /// Ports of the tunnel itself.
    pub own_ports: Vec<Port>,
    /// Knows which agents are connected.
    pub routing: Routing,
    /// Receives the number of routes.
    pub metrics: Metrics,
    /// Receives conditions and readiness.
    pub readiness: Readiness,
    /// Has the files of the kubelet's CA and of the certificate for kubelets.
    pub data: DataDir,
    /// Stores the snapshot of the cluster state.
    pub(crate) store: StateStore,
    /// Stops all controllers and their tasks.
    pub shutdown: Shutdown,
    /// Listeners that the ports of the Service target.
    pub listener_ports: ListenerPorts,
    /// Receives the networks that the CONNECT listeners may dial. `None` without CONNECT listeners.
    pub ranges: Option<LiveClusterNetworks>,
    /// Whether these networks alone decide what the CONNECT listeners dial without an agent,
    /// because `--connect-direct` is not set.
    pub dials_by_ranges: bool,
    /// Receives the nodes with the labels that targets of the cloud name.
    pub labeled_nodes: LabeledNodes,
    /// Receives the names of the HTTPS serving certificate.
    pub serving_names: ServingNames,
    /// Pod lookups from the listeners.
    pub pod_lookups: Option<mpsc::Receiver<PodLookupRequest>>,
    /// Questions of the listeners about callers.
    pub reviews: Option<ReviewQueues>,
    /// Token reviews for enrollments.
    pub attestations: Option<mpsc::Receiver<tunnel_ca::attestation::TokenReviewRequest>>,
    /// Receives the CA of kubelet client certificates.
    pub kubelet_client_ca: Option<Arc<AgentTrust>>,
    /// Signer of the client certificate for kubelets.
    pub signer: Option<SignerConfig>,
}

/// A handle to the writers, which stop when the server leaves, so that another one takes the Lease.
#[derive(Debug)]
pub struct WritersHandle(oneshot::Receiver<()>);

impl WritersHandle {
    /// Waits until all writes have ended and the Lease is released. This takes at most 2 s after
    /// the server has begun to leave.
    pub async fn ended(self) {
        let _either_way = self.0.await;
    }
}

/// Starts all controllers. Does not wait for the API server: the persisted state is used until the
/// API server answers.
pub fn start(
    settings: &KubernetesSettings,
    cluster: ClusterHandle,
    mut inputs: ClusterInputs,
) -> WritersHandle {
    let shutdown = inputs.shutdown.clone();
    let namespace = cluster.connection.namespace.clone();
    let mut snapshot = Snapshot::load(&inputs.store);
    let labels = settings.node_labels.iter().map(ToString::to_string);
    let labels = std::iter::once(settings.edge_label.clone()).chain(labels);
    let persisted = snapshot.state().with_labels(labels.collect());
    let (facts, owners) = snapshot.take_nodes();
    let persisted_nodes = persisted.is_listed.then_some(facts.len());
    info!(
        namespace,
        persisted_nodes = facts.len(),
        "following the cluster"
    );
    let aliases = AliasRules {
        patterns: settings.record_names.clone(),
        owners,
    };
    let nodes = NodeStore::new(settings.edge_label.clone(), facts, aliases)
        .with_cloud_labels(inputs.labeled_nodes.clone())
        .with_labels(settings.node_labels.clone());
    let state = watch::Sender::new(ClusterState::persisted(persisted, nodes.nodes()));
    let desired = watch::Sender::new(DesiredState::default());
    let writing = start_writers(settings, &cluster, &state, &desired, &shutdown);
    snapshot.start(nodes.nodes(), state.subscribe(), &shutdown);
    shutdown.spawn_service(serving_names::follow(
        inputs.serving_names.clone(),
        namespace,
        settings.cluster_domain.clone(),
        state.subscribe(),
        cluster.conditions.clone(),
    ));
    start_answering(settings, &cluster, &mut inputs);
    start_kubelet_credentials(&cluster, &mut inputs);
    if inputs.ranges.is_some() {
        shutdown.spawn_service(ranges::follow(
            cluster.clone(),
            state.clone(),
            inputs.dials_by_ranges,
        ));
    }
    inputs.routes.begin();
    let mut publisher = publisher(settings, &cluster, inputs, desired);
    let (observed, conditions) = (state.subscribe(), cluster.conditions.clone());
    shutdown.spawn_service(async move {
        run_restarting(
            "task publisher",
            &mut publisher,
            &conditions,
            |publisher| Box::pin(publisher.run(observed.clone())),
            |_publisher| {},
        )
        .await;
    });
    state_watches::start(
        &cluster,
        &settings.names,
        nodes,
        state,
        persisted_nodes,
        &shutdown,
    );
    writing
}

/// Starts the leader election and the writers that depend on it. The Lease is released after the
/// last write has ended.
fn start_writers(
    settings: &KubernetesSettings,
    cluster: &ClusterHandle,
    state: &watch::Sender<ClusterState>,
    desired: &watch::Sender<DesiredState>,
    shutdown: &Shutdown,
) -> WritersHandle {
    let Connection {
        client,
        throttle,
        namespace,
        ..
    } = &cluster.connection;
    let identity = lease::identity();
    let lease = LeaseHandle::new(settings.names.leader_lease.clone(), cluster);
    let election = Election::new(lease, identity.clone(), cluster);
    let records_map = follow_records_map(settings, cluster, &election, shutdown);
    let writers = Writers {
        maps: Api::namespaced(client.clone(), namespace),
        services: writers::services(client.clone(), namespace),
        events: EventRecorder::new(
            Api::namespaced(client.clone(), namespace),
            namespace.clone(),
            identity,
        ),
        names: settings.names.clone(),
        observed: state.subscribe(),
        desired: desired.subscribe(),
        records_map,
        leadership: election.leadership(),
        throttle: throttle.clone(),
        conditions: cluster.conditions.clone(),
        metrics: cluster.metrics.clone(),
        written: None,
    };
    let tokens = TokenSecrets::new(cluster, shutdown);
    shutdown.spawn_service(tokens.clean_as_leader(election.leadership()));
    let leaving = shutdown.leaving().clone();
    let (end, ended) = oneshot::channel();
    let conditions = cluster.conditions.clone();
    shutdown.spawn_service(async move {
        let mut state = (writers, election);
        let running = run_restarting(
            "task writers",
            &mut state,
            &conditions,
            |(writers, election)| {
                let leaving = leaving.clone();
                Box::pin(async move {
                    let writing = Box::pin(writers.run(&leaving));
                    let electing = Box::pin(election.run(&leaving));
                    tokio::join!(writing, electing);
                })
            },
            // Another server may lead meanwhile.
            |(_writers, election)| election.resign(),
        );
        tokio::select! {
            biased;
            () = running => {}
            () = leaving.cancelled() => {}
        }
        state.1.release().await;
        let _nobody_waits = end.send(());
    });
    WritersHandle(ended)
}

/// Starts the task that follows the ConfigMap of the records while this server leads.
fn follow_records_map(
    settings: &KubernetesSettings,
    cluster: &ClusterHandle,
    election: &Election,
    shutdown: &Shutdown,
) -> watch::Receiver<Observed<Arc<ConfigMap>>> {
    let mut map = watch::Sender::new(Observed::Unknown);
    let receiver = map.subscribe();
    let Connection {
        client, namespace, ..
    } = &cluster.connection;
    let api = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let (name, leadership) = (
        settings.names.nodes_config_map.clone(),
        election.leadership(),
    );
    let context = cluster.watch_context(Object::Records);
    shutdown.spawn_service(async move {
        let conditions = context.conditions.clone();
        run_restarting(
            "task records",
            &mut map,
            &conditions,
            |map| {
                let (api, name) = (api.clone(), name.clone());
                let (context, leadership) = (context.clone(), leadership.clone());
                Box::pin(async move {
                    writers::follow_records_as_leader(api, &name, &context, leadership, map).await;
                })
            },
            |_map| {},
        )
        .await;
    });
    receiver
}

/// Starts the tasks that answer pod lookups, access reviews and token reviews.
fn start_answering(
    settings: &KubernetesSettings,
    cluster: &ClusterHandle,
    inputs: &mut ClusterInputs,
) {
    let client = &cluster.connection.client;
    if let Some(questions) = inputs.pod_lookups.take() {
        let answering = pods::answer(client.clone(), questions, cluster.conditions.clone());
        inputs.shutdown.spawn_service(answering);
    }
    if let Some(questions) = inputs.reviews.take() {
        let answering =
            access_review::answer(client.clone(), questions, cluster.conditions.clone());
        inputs.shutdown.spawn_service(answering);
    }
    if let Some(questions) = inputs.attestations.take() {
        let tokens = settings.agent_tokens.clone();
        let answering = token_review::answer(client.clone(), questions, tokens);
        inputs.shutdown.spawn_service(answering);
    }
}

/// Starts the tasks that follow the CA of kubelets, and that obtain the client certificate for
/// kubelets.
fn start_kubelet_credentials(cluster: &ClusterHandle, inputs: &mut ClusterInputs) {
    if let Some(trust) = inputs.kubelet_client_ca.take() {
        let persisted = PersistedFile {
            path: inputs.data.kubelet_client_ca(),
            store: inputs.store.clone(),
        };
        kubelet_client_ca::start(cluster, trust, persisted, &inputs.shutdown);
    }
    if let Some(signer) = inputs.signer.take() {
        let signing = KubeletClientCertificateTask {
            api: Api::all(cluster.connection.client.clone()),
            signer,
            data: inputs.data.clone(),
            conditions: cluster.conditions.clone(),
            metrics: inputs.metrics.clone(),
        };
        inputs.shutdown.spawn_service(signing.run());
    }
}

fn publisher(
    settings: &KubernetesSettings,
    cluster: &ClusterHandle,
    inputs: ClusterInputs,
    desired: watch::Sender<DesiredState>,
) -> Publisher {
    let ports = inputs.ports.borrow().clone();
    Publisher {
        waiting: Some(inputs.readiness.block("nodes of the cluster")),
        ranges: inputs.ranges,
        local_facts: LocalFacts {
            ports,
            own_ports: inputs.own_ports,
            listener_ports: inputs.listener_ports,
        },
        ports: inputs.ports,
        routes: inputs.routes,
        labeled_nodes: inputs.labeled_nodes,
        records: inputs.records,
        policy: inputs.policy,
        agents: settings.edge_by_agent.then_some(inputs.routing),
        route_metrics: inputs.metrics,
        service: format!(
            "{}/{}",
            cluster.connection.namespace, settings.names.internal_service
        ),
        conditions: cluster.conditions.clone(),
        metrics: cluster.metrics.clone(),
        desired,
        handled_nodes: 0,
        following: RecordSet::default(),
        has_unpublished: false,
        published: None,
        networks: ClusterNetworks::default(),
        last_ranges: None,
        claims_due: None,
    }
}

#[cfg(test)]
mod tests;
