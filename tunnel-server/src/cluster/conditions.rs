//! Conditions that an operator should fix. A condition is logged once, and shown in
//! `/readyz?verbose` and the metric `tunnel_conditions` for as long as it lasts.

use tunnel_process::meta::Readiness;

use super::objects::Object;

/// Maximum number of lines stored per condition. Further lines are only counted.
const LINES_MAX: usize = 32;

/// The current conditions. Clones share them.
#[derive(Debug, Clone)]
pub(super) struct Conditions(Readiness);

impl Conditions {
    pub(super) fn new(readiness: Readiness) -> Self {
        Self(readiness)
    }

    /// Replaces the lines of a condition. An empty list clears it.
    pub(super) fn set(&self, condition: Condition, lines: Vec<String>) {
        let count = lines.len();
        self.set_first(condition, lines, count);
    }

    /// Replaces the lines of a condition, of which there are `count`. Takes the first ones only.
    pub(super) fn set_first(
        &self,
        condition: Condition,
        lines: impl IntoIterator<Item = String>,
        count: usize,
    ) {
        let mut lines: Vec<_> = lines.into_iter().take(LINES_MAX).collect();
        if count > LINES_MAX {
            lines.push(format!("and {} more", count - LINES_MAX));
        }
        self.0.report_conditions(condition.label(), lines);
    }

    pub(super) fn of(&self, condition: Condition) -> Vec<String> {
        self.0.conditions_of(condition.label())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    /// The credentials for the API server.
    Credentials,
    /// A task that panicked, by its name.
    Task(&'static str),
    /// The first list of Nodes is not complete.
    NodeList,
    /// Names of Nodes that are refused.
    NodeNames,
    /// Addresses and networks of Nodes that conflict.
    NodeClaims,
    /// Networks of Services that are not valid.
    ServiceNetworks,
    /// Entries of the ports ConfigMap that are not valid.
    PortLists,
    Service,
    /// Records that do not fit into the ConfigMap.
    RecordsSize,
    /// The CA of kubelets' own client certificates.
    KubeletClientCa,
    /// The server's client certificate for kubelets.
    KubeletClientCertificate,
    Watching(Object),
    Writing(Object),
    CaSecret,
    /// The ConfigMap of the CA certificates.
    CaBundle,
    /// The Secret with the orders about nodes.
    Revocations,
    /// The namespace of the join tokens, and the Role there.
    Tokens,
    /// The annotation with names of the HTTPS serving certificate.
    ServingNames,
    /// The permission to get Pods.
    PodLookup,
    /// Reviews of callers' rights and tokens.
    AccessReview,
    ServiceRanges,
    /// Endpoints of the servers' headless Service that are ignored.
    PeerEndpoints,
}

impl Condition {
    fn label(self) -> &'static str {
        match self {
            Self::Credentials => "kubeconfig",
            Self::Task(task) => task,
            Self::NodeList => "node list",
            Self::NodeNames => "node names",
            Self::NodeClaims => "node claims",
            Self::ServiceNetworks => "service networks",
            Self::PortLists => "port lists",
            Self::Service => "service",
            Self::RecordsSize => "records size",
            Self::KubeletClientCa => "kubelet client CA",
            Self::KubeletClientCertificate => "kubelet certificate",
            Self::Watching(Object::Nodes) => "watching nodes",
            Self::Watching(Object::Records) => "watching records",
            Self::Watching(Object::Ports) => "watching ports",
            Self::Watching(Object::Service) => "watching service",
            Self::Watching(Object::KubeletClientCa) => "watching kubelet client CA",
            Self::Watching(Object::Ca) => "watching ca",
            Self::Watching(Object::CaBundle) => "watching ca certificates",
            Self::Watching(Object::Revocations) => "watching revocations",
            Self::Watching(Object::Peers) => "watching peers",
            Self::Watching(_) => "watching",
            Self::Writing(Object::Records) => "writing records",
            Self::Writing(Object::Service) => "writing service",
            Self::Writing(Object::Lease) => "writing lease",
            Self::Writing(_) => "writing",
            Self::CaSecret => "ca",
            Self::CaBundle => "ca certificates",
            Self::Revocations => "revocations",
            Self::Tokens => "tokens",
            Self::ServingNames => "serving names",
            Self::PodLookup => "pod lookup",
            Self::AccessReview => "access review",
            Self::ServiceRanges => "service ranges",
            Self::PeerEndpoints => "peer endpoints",
        }
    }
}
