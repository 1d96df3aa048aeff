//! The cluster's side: Nodes, ports and the Service's address are followed by every server; records and ports are written
//! by the one that holds the Lease.
//!
//! ```text
//! watches ──▶ World ──▶ derive (pure) ──▶ routes, records, policy of this server, at once
//!                                    └──▶ Desired ──▶ writers, after a short quiet, while leading
//! ```
//!
//! Everything is level-triggered: an event only makes the whole due anew, so a missed one leaves no residue. The data plane
//! knows none of this: it reads [`Routes`], [`Records`] and [`LivePolicy`], and asks a [`crate::routing::pod_lookup::PodFinder`].

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::DynamicObject;
use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};
use tunnel_proto::process::host::host_name;
use tunnel_proto::process::meta::{Readiness, ReadinessBlock};
use tunnel_proto::process::settings::ConfigError;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::AgentTrust;

use crate::ca::DoorNames;
use crate::config::KubernetesSettings;
use crate::dns::Records;
use crate::metrics::Metrics;
use crate::policy::{LivePolicy, PortPolicy};
use crate::routing::dial_policy::LiveRanges;
use crate::routing::pod_lookup::Question;
use crate::routing::registry::Registry;
use crate::routing::routes::Routes;
use crate::store::data_dir::DataDir;

mod authority;
mod client;
mod conditions;
mod events;
mod failure;
mod hosts;
mod kubelets;
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

use crate::cluster::conditions::Problems;
use crate::cluster::leader_election::Election;
use crate::cluster::state::{Desired, Own, World};
pub use authority::Holding;
use client::Connection;
use events::EventLog;
use metrics::{ClusterMetrics, Object};
use nodes::{AliasRules, NodeObject, NodeStore};
use publisher::Publisher;
pub use service::DoorPorts;
pub use signing::Signer;
use signing::Signing;
use watches::{Context, Seen, config, follow, follow_one};
use writers::Writers;

/// A server without any node kept waits this long for the first list before it says that it is ready.
const FIRST_LIST_LIMIT: Duration = Duration::from_secs(10);

/// What the cluster's side feeds.
#[derive(Debug)]
pub struct Parts {
    /// Gets the nodes.
    pub routes: Routes,
    /// Get what names answer with.
    pub records: Records,
    /// Gets the ports.
    pub policy: LivePolicy,
    /// Tells which agents are connected.
    pub registry: Arc<Registry>,
    /// Counts the routes.
    pub metrics: Metrics,
    /// Shows problems.
    pub readiness: Readiness,
    /// Keeps what was heard last.
    pub data: DataDir,
    /// Ends it all.
    pub shutdown: Shutdown,
    /// The doors that the Service's ports lead to.
    pub doors: DoorPorts,
    /// Gets what the CONNECT doors may dial, when there are any.
    pub ranges: Option<LiveRanges>,
    /// Whether only these ranges say what the CONNECT listeners dial without an agent, and no --connect-direct.
    pub dials_by_ranges: bool,
    /// Gets what callers of the TLS door call it.
    pub door_names: DoorNames,
    /// Questions of the doors about pods.
    pub questions: Option<mpsc::Receiver<Question>>,
    /// Questions of enrolments about tokens.
    pub attestations: Option<mpsc::Receiver<crate::ca::attestation::Question>>,
    /// Gets the CA of kubelets' client certificates.
    pub kubelets: Option<Arc<AgentTrust>>,
    /// Who is asked for the client certificate for kubelets.
    pub signer: Option<Signer>,
}

/// A way to the API server, and where problems with it are told. Clones share it.
#[derive(Clone)]
pub struct ClusterSide {
    connection: Connection,
    problems: Problems,
    metrics: ClusterMetrics,
}

impl ClusterSide {
    /// Prepares it. Nothing is sent.
    ///
    /// # Errors
    /// [`ConfigError`] when the kubeconfig or the ServiceAccount cannot be read.
    pub async fn open(
        settings: &KubernetesSettings,
        readiness: &Readiness,
        registry: &mut MetricsRegistry,
    ) -> Result<Self, ConfigError> {
        let connection = client::connect(settings).await?;
        Ok(Self::over(connection, readiness, registry))
    }

    fn over(connection: Connection, readiness: &Readiness, registry: &mut MetricsRegistry) -> Self {
        let metrics = ClusterMetrics::new(registry);
        Self {
            connection,
            problems: Problems::new(readiness.clone(), metrics.clone()),
            metrics,
        }
    }
}

impl std::fmt::Debug for ClusterSide {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("ClusterSide")
            .field("namespace", &self.connection.namespace)
            .finish_non_exhaustive()
    }
}

/// What is written to the cluster. It ends by itself when the drain begins.
#[derive(Debug)]
pub struct Writing(oneshot::Receiver<()>);

impl Writing {
    /// Waits until nothing is written any more and the Lease is given back, which takes 2 s at most after the drain has
    /// begun.
    pub async fn ended(self) {
        let _either_way = self.0.await;
    }
}

/// Starts to follow a cluster. Nothing waits for the API server: until it is heard, what was kept is in force.
pub fn start(settings: &KubernetesSettings, side: ClusterSide, parts: Parts) -> Writing {
    let ClusterSide {
        connection,
        problems,
        metrics,
    } = side;
    let kept = snapshot::load(&parts.data);
    let first_list = kept
        .nodes
        .is_empty()
        .then(|| parts.readiness.block("nodes of the cluster"));
    info!(
        namespace = connection.namespace,
        kept_nodes = kept.nodes.len(),
        "following the cluster"
    );
    let aliases = AliasRules {
        patterns: settings.record_names.clone(),
        owners: kept.aliases.clone(),
    };
    let mut store = NodeStore::new(settings.edge_label.clone(), kept.nodes.clone(), aliases);
    let world = watch::Sender::new(World::kept(kept, store.nodes()));
    let desired = watch::Sender::new(Desired::default());
    let writing = write(
        settings,
        &connection,
        &parts,
        (&world, &desired, &problems, &metrics),
    );
    snapshot::start(&parts.data, world.subscribe(), &parts.shutdown);
    parts.shutdown.spawn_service(serving_names::follow(
        parts.door_names,
        (
            connection.namespace.clone(),
            settings.cluster_domain.clone(),
        ),
        world.subscribe(),
        problems.clone(),
    ));
    if let Some(questions) = parts.questions {
        let answering = pods::answer(connection.client.clone(), questions, problems.clone());
        parts.shutdown.spawn_service(answering);
    }
    if let Some(questions) = parts.attestations {
        let tokens = settings.agent_tokens.clone();
        let answering = token_review::answer(connection.client.clone(), questions, tokens);
        parts.shutdown.spawn_service(answering);
    }
    if let Some(trust) = parts.kubelets {
        let context = Context {
            object: Object::KubeletCa,
            metrics: metrics.clone(),
            problems: problems.clone(),
            throttle: connection.throttle.clone(),
        };
        kubelets::start(
            &connection.client,
            trust,
            parts.data.kubelet_ca(),
            (context, problems.clone()),
            &parts.shutdown,
        );
    }
    if parts.ranges.is_some() {
        let (client, namespace) = (connection.client.clone(), connection.namespace.clone());
        let (world, problems, are_needed) =
            (world.clone(), problems.clone(), parts.dials_by_ranges);
        parts.shutdown.spawn_service(async move {
            ranges::follow(client, world, problems, are_needed, &namespace).await;
        });
    }
    if let Some(signer) = parts.signer {
        let signing = Signing {
            api: Api::all(connection.client.clone()),
            signer,
            data: parts.data.clone(),
            problems: problems.clone(),
            metrics: parts.metrics.clone(),
        };
        parts.shutdown.spawn_service(signing.run());
    }
    let publisher = Publisher {
        ranges: parts.ranges,
        own: Own {
            policy: PortPolicy::clone(&parts.policy.load()),
            doors: parts.doors,
        },
        routes: parts.routes,
        records: parts.records,
        policy: parts.policy,
        agents: settings.edge_by_agent.then_some(parts.registry),
        route_metrics: parts.metrics,
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
    parts
        .shutdown
        .spawn_service(publisher.run(world.subscribe()));
    watch_all(
        settings,
        &connection,
        &parts.shutdown,
        (store, world, first_list),
        (problems, metrics),
    );
    writing
}

/// The election and the writers that depend on it: writing has ended when the Lease is given back.
fn write(
    settings: &KubernetesSettings,
    connection: &Connection,
    parts: &Parts,
    (world, desired, problems, metrics): (
        &watch::Sender<World>,
        &watch::Sender<Desired>,
        &Problems,
        &ClusterMetrics,
    ),
) -> Writing {
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
        events: EventLog::new(
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
    let drain = parts.shutdown.drain().clone();
    let (end, ended) = oneshot::channel();
    parts.shutdown.spawn_service(async move {
        let writing = Box::pin(writers.run(&drain));
        let electing = Box::pin(election.run(&drain));
        tokio::join!(writing, electing);
        election.release().await;
        let _nobody_waits = end.send(());
    });
    Writing(ended)
}

fn watch_all(
    settings: &KubernetesSettings,
    connection: &Connection,
    shutdown: &Shutdown,
    (mut store, world, first_list): (NodeStore, watch::Sender<World>, Option<ReadinessBlock>),
    (problems, metrics): (Problems, ClusterMetrics),
) {
    let Connection {
        client,
        throttle,
        namespace,
    } = connection;
    let names = settings.names.clone();
    let context = |object| Context {
        object,
        metrics: metrics.clone(),
        problems: problems.clone(),
        throttle: throttle.clone(),
    };
    let nodes = Api::<NodeObject>::all(client.clone());
    let services = writers::services(client.clone(), namespace);
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let (of_nodes, of_service) = (context(Object::Nodes), context(Object::Service));
    let (of_records, of_ports) = (context(Object::Records), context(Object::Ports));
    let (heard, listed) = oneshot::channel();
    let mut heard = Some(heard);
    let world = Arc::new(world);
    let (service_world, records_world, ports_world) = (world.clone(), world.clone(), world.clone());
    shutdown.spawn_service(async move {
        follow(nodes, config(), of_nodes, |events| {
            let applied = store.apply(events);
            if applied.is_listed {
                metrics.synced(Object::Nodes);
                if let Some(heard) = heard.take() {
                    let _nobody_waits = heard.send(());
                }
            }
            world.send_if_modified(|world| {
                if applied.is_changed {
                    world.nodes = Arc::new(store.nodes());
                }
                let is_news = applied.is_listed && !world.is_listed;
                world.is_listed |= applied.is_listed;
                applied.is_changed || is_news
            });
        })
        .await;
    });
    let service_name = names.internal_service.clone();
    shutdown.spawn_service(async move {
        follow_one(
            services,
            &service_name,
            of_service,
            |seen: Seen<DynamicObject>| {
                service_world.send_modify(|world| world.service = seen.map(with_metadata));
            },
        )
        .await;
    });
    let (records_maps, records_name) = (maps.clone(), names.nodes_config_map.clone());
    shutdown.spawn_service(async move {
        follow_one(records_maps, &records_name, of_records, |seen| {
            records_world.send_modify(|world| world.records_map = seen.map(|map| map));
        })
        .await;
    });
    shutdown.spawn_service(async move {
        follow_one(maps, &names.ports_config_map, of_ports, |seen| {
            ports_world.send_modify(|world| world.ports_map = seen.map(|map| map));
        })
        .await;
    });
    if let Some(first_list) = first_list {
        shutdown.spawn_service(async move {
            if tokio::time::timeout(FIRST_LIST_LIMIT, listed)
                .await
                .is_err()
            {
                warn!("the cluster has not told its nodes yet; serving those that are known");
            }
            drop(first_list);
        });
    }
}

/// The Service's fields with the name and annotations, which kube keeps apart.
fn with_metadata(service: DynamicObject) -> serde_json::Value {
    let mut fields = service.data;
    fields["metadata"] = serde_json::json!({
        "name": service.metadata.name,
        "annotations": service.metadata.annotations,
    });
    fields
}

/// As client-go's users make it: host name and a random part, so that a restarted server is another candidate.
fn identity() -> String {
    let host = host_name().unwrap_or_default();
    let random: u128 = rand::random();
    format!("{host}_{random:032x}")
}

#[cfg(test)]
mod tests;
