//! What an operator should mend: said once in the log, and for as long as it lasts in `/readyz?verbose` and a metric.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::{info, warn};
use tunnel_proto::process::meta::Readiness;

use super::metrics::{ClusterMetrics, Object};

/// Lines that are kept of one part; the rest is counted.
const LINES_MAX: usize = 32;

/// Conditions of the parts. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Conditions {
    readiness: Readiness,
    metrics: ClusterMetrics,
    by_condition: Arc<Mutex<BTreeMap<&'static str, Vec<String>>>>,
}

impl Conditions {
    pub(super) fn new(readiness: Readiness, metrics: ClusterMetrics) -> Self {
        Self {
            readiness,
            metrics,
            by_condition: Arc::default(),
        }
    }

    /// Replaces the problems of a part; none clears it.
    pub(super) fn set(&self, condition: Condition, mut lines: Vec<String>) {
        let name = condition.label();
        let count = lines.len();
        if count > LINES_MAX {
            lines.truncate(LINES_MAX);
            lines.push(format!("and {} more", count - LINES_MAX));
        }
        {
            let mut by_condition = self
                .by_condition
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let before = by_condition.get(name).map_or(&[][..], Vec::as_slice);
            if before == lines {
                return;
            }
            for line in lines.iter().filter(|line| !before.contains(line)) {
                warn!(condition = name, "{line}");
            }
            if lines.is_empty() {
                info!(condition = name, "condition cleared");
                by_condition.remove(name);
            } else {
                by_condition.insert(name, lines.clone());
            }
        }
        self.metrics.problems(name, count);
        self.readiness.set_conditions(name, lines);
    }

    /// The problems of a part.
    pub(super) fn of(&self, condition: Condition) -> Vec<String> {
        let by_condition = self
            .by_condition
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        by_condition
            .get(condition.label())
            .cloned()
            .unwrap_or_default()
    }
}

/// What has problems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    /// Names of Nodes.
    NodeNames,
    /// Addresses and networks of Nodes.
    NodeClaims,
    /// Networks of Services.
    ServiceNetworks,
    /// Entries of the ports ConfigMap.
    PortLists,
    /// The Service that records need.
    Service,
    /// Size of the records.
    RecordsSize,
    /// The CA of kubelets' client certificates.
    KubeletCa,
    /// Other servers beside this one.
    Replicas,
    /// The client certificate for kubelets.
    KubeletCertificate,
    /// Following objects.
    Watching(Object),
    /// Writing an object.
    Writing(Object),
    /// The Secret of the CA.
    CaSecret,
    /// The ConfigMap of the CA's certificates.
    CaBundle,
    /// The Secret with tokens and revocations.
    State,
    /// QUIC keys of this server.
    QuicKeyLease,
    /// The annotation with names of the TLS door.
    ServingNames,
    /// The right to get Pods.
    PodLookup,
    /// The ranges of Services.
    ServiceRanges,
}

impl Condition {
    fn label(self) -> &'static str {
        match self {
            Self::NodeNames => "node names",
            Self::NodeClaims => "node claims",
            Self::ServiceNetworks => "service networks",
            Self::PortLists => "port lists",
            Self::Service => "service",
            Self::RecordsSize => "records size",
            Self::KubeletCa => "kubelet client CA",
            Self::Replicas => "replicas",
            Self::KubeletCertificate => "kubelet certificate",
            Self::Watching(Object::Nodes) => "watching nodes",
            Self::Watching(Object::Records) => "watching records",
            Self::Watching(Object::Ports) => "watching ports",
            Self::Watching(Object::Service) => "watching service",
            Self::Watching(Object::KubeletCa) => "watching kubelet client CA",
            Self::Watching(Object::Ca) => "watching ca",
            Self::Watching(Object::CaBundle) => "watching ca certificates",
            Self::Watching(Object::State) => "watching state",
            Self::Watching(_) => "watching",
            Self::Writing(Object::Records) => "writing records",
            Self::Writing(Object::Service) => "writing service",
            Self::Writing(Object::Lease) => "writing lease",
            Self::Writing(_) => "writing",
            Self::CaSecret => "ca",
            Self::CaBundle => "ca certificates",
            Self::State => "state",
            Self::QuicKeyLease => "quic keys",
            Self::ServingNames => "serving names",
            Self::PodLookup => "pod lookup",
            Self::ServiceRanges => "service ranges",
        }
    }
}
