//! Starts the cluster integration if a cluster is configured, and does nothing otherwise.

use std::sync::Arc;

use tunnel_proto::wire::{PORT_HTTP, PORT_HTTPS};

use super::authority::AgentAuth;
use super::context::ServerContext;
use super::sockets::BoundAddrs;
use crate::cluster::{
    self, ClusterHandle, ClusterInputs, ListenerPorts, SignerConfig, WritersHandle,
};
use crate::config::KubeletClientCa;
use crate::ingress::target_tls::TargetTls;
use crate::routing::access_review::AccessReviewer;
use crate::routing::pod_lookup::PodResolver;
use tunnel_ca::ServingNames;
use tunnel_ca::attestation::Attestor;

#[derive(Debug, Default)]
pub(super) struct ClusterServices {
    /// Resolver of pods to nodes, for the listeners.
    pub(super) pods: Option<PodResolver>,
    /// Reviewer of callers' rights and tokens, for the listeners.
    pub(super) reviewer: Option<AccessReviewer>,
    /// Reviewer of ServiceAccount tokens, for enrollments.
    pub(super) attestor: Option<Attestor>,
    writing: Option<WritersHandle>,
}

impl ClusterServices {
    /// Waits until all writes to the cluster have ended. The server must have begun
    /// to leave.
    pub(super) async fn ended(&mut self) {
        if let Some(writing) = self.writing.take() {
            writing.ended().await;
        }
    }
}

/// Follows the configured cluster, if there is one.
pub(super) fn start_cluster(
    cluster_handle: Option<ClusterHandle>,
    bound: &BoundAddrs,
    agents: &AgentAuth,
    targets: &Arc<TargetTls>,
    serving_names: &ServingNames,
    context: &ServerContext,
) -> ClusterServices {
    let config = &context.config;
    let (Some(settings), Some(cluster_handle)) = (&config.kubernetes, cluster_handle) else {
        return ClusterServices::default();
    };
    let pods = settings.pod_lookup.then(PodResolver::new);
    let (finder, pod_lookups) = pods.unzip();
    // ServiceAccount tokens only serve to obtain certificates of the local CA, so reviews need that
    // CA.
    let reviews = agents.renewals.is_some().then(Attestor::new);
    let (attestor, attestations) = reviews.unzip();
    let (reviewer, questions) = AccessReviewer::new(Some(agents.trust.clone()));
    let inputs = ClusterInputs {
        routes: context.routes.clone(),
        records: context.records.clone(),
        policy: context.policy.clone(),
        ports: context.ports.subscribe(),
        own_ports: bound.reserved_ports(),
        ranges: config.connect.is_some().then(|| context.ranges.clone()),
        dials_by_ranges: (config.connect.as_ref()).is_some_and(|connect| connect.direct.is_none()),
        labeled_nodes: context.labeled_nodes.clone(),
        routing: context.routing(),
        metrics: context.metrics.clone(),
        readiness: context.readiness.clone(),
        data: context.data.clone(),
        store: context.store.clone(),
        shutdown: context.shutdown.clone(),
        listener_ports: ListenerPorts {
            http: bound.http.map_or(PORT_HTTP, |address| address.port()),
            https: bound.https.map_or(PORT_HTTPS, |address| address.port()),
        },
        serving_names: serving_names.clone(),
        pod_lookups,
        reviews: Some(questions),
        attestations,
        kubelet_client_ca: (config.kubelet_client_ca == KubeletClientCa::Cluster)
            .then(|| agents.trust.clone()),
        signer: config.targets.signer.clone().map(|name| SignerConfig {
            name,
            targets: targets.clone(),
        }),
    };
    let writing = cluster::start(settings, cluster_handle, inputs);
    ClusterServices {
        pods: finder,
        reviewer: Some(reviewer),
        attestor,
        writing: Some(writing),
    }
}
