//! What an operator should mend: said once in the log, and for as long as it lasts in `/readyz?verbose` and a metric.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::{info, warn};
use tunnel_proto::process::meta::Readiness;

use super::metrics::{ClusterMetrics, Object};

/// Lines that are kept of one part; the rest is counted.
const LINES_MAX: usize = 32;

/// Problems of the parts. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Problems {
    readiness: Readiness,
    metrics: ClusterMetrics,
    parts: Arc<Mutex<BTreeMap<&'static str, Vec<String>>>>,
}

impl Problems {
    pub(super) fn new(readiness: Readiness, metrics: ClusterMetrics) -> Self {
        Self {
            readiness,
            metrics,
            parts: Arc::default(),
        }
    }

    /// Replaces the problems of a part; none clears it.
    pub(super) fn set(&self, part: Part, mut lines: Vec<String>) {
        let name = part.label();
        let count = lines.len();
        if count > LINES_MAX {
            lines.truncate(LINES_MAX);
            lines.push(format!("and {} more", count - LINES_MAX));
        }
        {
            let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
            let before = parts.get(name).map_or(&[][..], Vec::as_slice);
            if before == lines {
                return;
            }
            for line in lines.iter().filter(|line| !before.contains(line)) {
                warn!(part = name, "{line}");
            }
            if lines.is_empty() {
                info!(part = name, "the problems are over");
                parts.remove(name);
            } else {
                parts.insert(name, lines.clone());
            }
        }
        self.metrics.problems(name, count);
        self.readiness.note(name, lines);
    }

    /// The problems of a part.
    pub(super) fn of(&self, part: Part) -> Vec<String> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.get(part.label()).cloned().unwrap_or_default()
    }
}

/// What has problems.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
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
    Authority,
    /// The ConfigMap of the CA's certificates.
    Bundle,
    /// The Secret with tokens and revocations.
    State,
    /// QUIC keys of this server.
    Replica,
    /// The annotation with names of the TLS door.
    DoorNames,
    /// The right to get Pods.
    PodLookup,
    /// The ranges of Services.
    ServiceRanges,
}

impl Part {
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
            Self::Watching(Object::Bundle) => "watching ca certificates",
            Self::Watching(Object::State) => "watching state",
            Self::Watching(_) => "watching",
            Self::Writing(Object::Records) => "writing records",
            Self::Writing(Object::Service) => "writing service",
            Self::Writing(Object::Lease) => "writing lease",
            Self::Writing(_) => "writing",
            Self::Authority => "ca",
            Self::Bundle => "ca certificates",
            Self::State => "state",
            Self::Replica => "quic keys",
            Self::DoorNames => "door names",
            Self::PodLookup => "pod lookup",
            Self::ServiceRanges => "service ranges",
        }
    }
}
