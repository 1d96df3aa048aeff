//! Starts the cluster integration if a cluster is configured, and does nothing otherwise.

use std::sync::Arc;

use tunnel_proto::process::meta::Readiness;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::wire::{PORT_HTTP, PORT_HTTPS};

use super::bound_addrs::BoundAddrs;
use super::identity::AgentAuth;
use crate::ca::ServingNames;
use crate::ca::attestation::Attestor;
use crate::cluster::{
    self, ClusterHandle, ClusterInputs, ListenerPorts, SignerConfig, WritersHandle,
};
use crate::config::{Config, KubeletCa};
use crate::dns::Records;
use crate::ingress::target_tls::TargetTls;
use crate::metrics::Metrics;
use crate::policy::SharedPortPolicy;
use crate::routing::dial_policy::LiveClusterNetworks;
use crate::routing::pod_lookup::PodResolver;
use crate::routing::registry::Registry;
use crate::routing::routes::Routes;
use crate::store::data_dir::DataDir;

/// The components that the cluster integration updates and reads.
pub(super) struct ClusterContext<'a> {
    pub(super) routes: &'a Routes,
    pub(super) records: &'a Records,
    pub(super) policy: &'a SharedPortPolicy,
    pub(super) ranges: &'a LiveClusterNetworks,
    pub(super) registry: &'a Arc<Registry>,
    pub(super) metrics: &'a Metrics,
    pub(super) readiness: &'a Readiness,
    pub(super) data: &'a DataDir,
    pub(super) bound: &'a BoundAddrs,
    pub(super) agents: &'a AgentAuth,
    pub(super) targets: &'a Arc<TargetTls>,
    pub(super) serving_names: &'a ServingNames,
    pub(super) shutdown: &'a Shutdown,
}

/// The services of a followed cluster.
#[derive(Debug, Default)]
pub(super) struct ClusterServices {
    /// Resolver of pods to nodes, for the listeners.
    pub(super) pods: Option<PodResolver>,
    /// Reviewer of ServiceAccount tokens, for enrollments.
    pub(super) attestor: Option<Attestor>,
    writing: Option<WritersHandle>,
}

impl ClusterServices {
    /// Waits until all writes to the cluster have ended. The drain must have begun.
    pub(super) async fn ended(&mut self) {
        if let Some(writing) = self.writing.take() {
            writing.ended().await;
        }
    }
}

/// Follows the configured cluster, if there is one.
pub(super) fn start_cluster(
    config: &Config,
    cluster_handle: Option<ClusterHandle>,
    parts: ClusterContext<'_>,
) -> ClusterServices {
    let (Some(settings), Some(cluster_handle)) = (&config.kubernetes, cluster_handle) else {
        return ClusterServices::default();
    };
    let pods = settings.pod_lookup.then(PodResolver::new);
    let (finder, questions) = pods.unzip();
    // ServiceAccount tokens only serve to obtain certificates of the local CA, so reviews need that
    // CA.
    let reviews = parts.agents.renewals.is_some().then(Attestor::new);
    let (attestor, attestations) = reviews.unzip();
    let parts = ClusterInputs {
        routes: parts.routes.clone(),
        records: parts.records.clone(),
        policy: parts.policy.clone(),
        ranges: config.connect.is_some().then(|| parts.ranges.clone()),
        dials_by_ranges: (config.connect.as_ref()).is_some_and(|connect| connect.direct.is_none()),
        registry: parts.registry.clone(),
        metrics: parts.metrics.clone(),
        readiness: parts.readiness.clone(),
        data: parts.data.clone(),
        shutdown: parts.shutdown.clone(),
        listener_ports: ListenerPorts {
            http: parts.bound.http.map_or(PORT_HTTP, |address| address.port()),
            https: parts
                .bound
                .https
                .map_or(PORT_HTTPS, |address| address.port()),
        },
        serving_names: parts.serving_names.clone(),
        questions,
        attestations,
        kubelet_ca: (config.kubelet_ca == KubeletCa::Cluster).then(|| parts.agents.trust.clone()),
        signer: config.targets.signer.clone().map(|name| SignerConfig {
            name,
            targets: parts.targets.clone(),
        }),
    };
    let writing = cluster::start(settings, cluster_handle, parts);
    ClusterServices {
        pods: finder,
        attestor,
        writing: Some(writing),
    }
}
