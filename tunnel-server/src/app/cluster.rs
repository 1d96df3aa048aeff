//! Starts the cluster's side when there is a cluster, and leaves the rest alone when there is none.

use std::sync::Arc;

use tunnel_proto::process::meta::Readiness;
use tunnel_proto::process::shutdown::Shutdown;

use super::Bound;
use super::authority::Side;
use super::identity::AgentSide;
use crate::ca::DoorNames;
use crate::ca::attestation::Attestor;
use crate::config::Config;
use crate::dns::Records;
use crate::ingress::target_tls::Targets;
use crate::metrics::Metrics;
use crate::policy::LivePolicy;
use crate::routing::dial_policy::LiveRanges;
use crate::routing::pod_lookup::PodFinder;
use crate::routing::registry::Registry;
use crate::routing::routes::Routes;
use crate::store::data_dir::DataDir;

/// What the cluster's side feeds and reads.
#[cfg_attr(
    not(feature = "kubernetes"),
    expect(dead_code, reason = "nobody follows a cluster in this build")
)]
pub(super) struct Following<'a> {
    pub(super) routes: &'a Routes,
    pub(super) records: &'a Records,
    pub(super) policy: &'a LivePolicy,
    pub(super) ranges: &'a LiveRanges,
    pub(super) registry: &'a Arc<Registry>,
    pub(super) metrics: &'a Metrics,
    pub(super) readiness: &'a Readiness,
    pub(super) data: &'a DataDir,
    pub(super) bound: &'a Bound,
    pub(super) agents: &'a AgentSide,
    pub(super) targets: &'a Arc<Targets>,
    pub(super) door_names: &'a DoorNames,
    pub(super) shutdown: &'a Shutdown,
}

/// A cluster that is followed.
#[derive(Debug, Default)]
pub(super) struct FollowedCluster {
    /// Whom doors may ask for pods.
    pub(super) pods: Option<PodFinder>,
    /// Whom enrolments may ask about tokens.
    pub(super) attestor: Option<Attestor>,
    #[cfg(feature = "kubernetes")]
    writing: Option<crate::cluster::Writing>,
}

impl FollowedCluster {
    /// Waits until nothing is written to the cluster any more. The drain must have begun.
    pub(super) async fn ended(&mut self) {
        #[cfg(feature = "kubernetes")]
        if let Some(writing) = self.writing.take() {
            writing.ended().await;
        }
        #[cfg(not(feature = "kubernetes"))]
        std::future::ready(()).await;
    }
}

/// Follows the cluster of the configuration, if there is one.
#[cfg(feature = "kubernetes")]
pub(super) fn follow_cluster(
    config: &Config,
    side: Option<Side>,
    parts: Following<'_>,
) -> FollowedCluster {
    use tunnel_proto::wire::{PORT_HTTP, PORT_HTTPS};

    use crate::cluster::{self, DoorPorts, Parts, Signer};
    use crate::config::KubeletCa;

    let (Some(settings), Some(side)) = (&config.kubernetes, side) else {
        return FollowedCluster::default();
    };
    let pods = settings.pod_lookup.then(PodFinder::new);
    let (finder, questions) = pods.unzip();
    // Tokens buy certificates of the local CA; without it there is nothing to be had for them.
    let reviews = parts.agents.renewals.is_some().then(Attestor::new);
    let (attestor, attestations) = reviews.unzip();
    let parts = Parts {
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
        doors: DoorPorts {
            http: parts.bound.http.map_or(PORT_HTTP, |door| door.port()),
            https: parts.bound.https.map_or(PORT_HTTPS, |door| door.port()),
        },
        door_names: parts.door_names.clone(),
        questions,
        attestations,
        kubelets: (config.kubelet_ca == KubeletCa::Cluster).then(|| parts.agents.trust.clone()),
        signer: config.targets.signer.clone().map(|name| Signer {
            name,
            targets: parts.targets.clone(),
        }),
    };
    let writing = cluster::start(settings, side, parts);
    FollowedCluster {
        pods: finder,
        attestor,
        writing: Some(writing),
    }
}

/// This build follows none, and the configuration has none.
#[cfg(not(feature = "kubernetes"))]
pub(super) fn follow_cluster(
    _config: &Config,
    _side: Option<Side>,
    _parts: Following<'_>,
) -> FollowedCluster {
    FollowedCluster::default()
}
