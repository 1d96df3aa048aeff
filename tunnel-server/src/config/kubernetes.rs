//! Settings of the cluster integration: whether there is a cluster, how to connect to it, and the
//! names of its objects.

use std::path::PathBuf;

use tunnel_proto::process::settings::ConfigErrors;

use super::RawConfig;
use super::check::parsed;
use crate::dns::{NamePattern, NamePatternError};

/// Environment variable that is set in every container of a cluster.
const CLUSTER_VARIABLE: &str = "KUBERNETES_SERVICE_HOST";

/// The environment of the process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Environment {
    /// Whether the process runs in a container of a cluster.
    pub in_cluster: bool,
}

impl Environment {
    /// Detects the environment of this process.
    #[must_use]
    pub fn of_process() -> Self {
        Self {
            in_cluster: std::env::var_os(CLUSTER_VARIABLE).is_some(),
        }
    }
}

/// The settings for following a cluster. The default names are those of yurt-tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesSettings {
    /// `--kubeconfig`; `None` means the ServiceAccount of the container.
    pub kubeconfig: Option<PathBuf>,
    /// `--namespace` of all objects; `None` means the container's own, or `kube-system` outside a
    /// cluster.
    pub namespace: Option<String>,
    /// Names of the cluster's objects.
    pub names: ObjectNames,
    /// `--edge-label`: a Node with this label and the value `true` is an edge node.
    pub edge_label: String,
    /// `--edge-nodes label-or-agent`: a Node with an agent connected to this server is an edge node
    /// too.
    pub edge_by_agent: bool,
    /// `--record-names`: additional host names that Nodes may have, besides those made of their own
    /// names.
    pub record_names: Vec<NamePattern>,
    /// `--pod-lookup`: whether the cluster is asked for a pod's node.
    pub pod_lookup: bool,
    /// ServiceAccount tokens with which agents enroll.
    pub agent_tokens: AgentTokens,
    /// `--single-replica`: two servers never run at the same time.
    pub single_replica: bool,
    /// `--cluster-domain` of Services' names.
    pub cluster_domain: String,
}

/// The ServiceAccount tokens with which agents enroll.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentTokens {
    /// `--agent-token-audience`: required audience of the tokens.
    pub audience: String,
    /// `--agent-service-account`: user names of the accounts.
    pub accounts: Vec<String>,
}

impl Default for AgentTokens {
    fn default() -> Self {
        Self {
            audience: "tunnel-server".into(),
            accounts: vec![format!("{ACCOUNT_PREFIX}kube-system:tunnel-agent")],
        }
    }
}

/// Prefix of the user names of ServiceAccounts; namespace and name follow.
const ACCOUNT_PREFIX: &str = "system:serviceaccount:";

/// The names of the objects in the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectNames {
    /// ConfigMap to which the records are written.
    pub nodes_config_map: String,
    /// ConfigMap with the lists of ports.
    pub ports_config_map: String,
    /// Service whose address is in the records of edge nodes.
    pub internal_service: String,
    /// Lease for leader election among the servers that write.
    pub leader_lease: String,
    /// Secret with the local CA.
    pub ca_secret: String,
    /// Secret with the state that all servers change.
    pub state_secret: String,
    /// ConfigMap with the certificates of the local CA.
    pub ca_config_map: String,
    /// Name prefix of the Leases of QUIC keys.
    pub replica_lease: String,
}

impl Default for ObjectNames {
    fn default() -> Self {
        Self {
            nodes_config_map: "yurt-tunnel-nodes".into(),
            ports_config_map: "yurt-tunnel-server-cfg".into(),
            internal_service: "x-tunnel-server-internal-svc".into(),
            leader_lease: "tunnel-dns-controller".into(),
            ca_secret: "tunnel-server-ca".into(),
            state_secret: "tunnel-server-state".into(),
            ca_config_map: "tunnel-ca".into(),
            replica_lease: "tunnel-server-replica".into(),
        }
    }
}

/// Default label of edge nodes.
pub const EDGE_LABEL: &str = "openyurt.io/is-edge-worker";

/// Default domain of Services, as in kubelets.
const CLUSTER_DOMAIN: &str = "cluster.local";

/// Returns the settings if there is a cluster to follow.
pub(super) fn kubernetes(
    errors: &mut ConfigErrors,
    raw: &RawConfig,
    environment: Environment,
) -> Option<KubernetesSettings> {
    let has_cluster = environment.in_cluster || raw.kubeconfig.is_some();
    match raw.kubernetes.as_deref().unwrap_or("auto") {
        "off" => None,
        "auto" if !has_cluster => None,
        "on" if !has_cluster => {
            errors.add(
                "--kubernetes",
                "on needs --kubeconfig outside a container of a cluster",
            );
            None
        }
        "auto" | "on" => Some(settings(errors, raw)),
        other => {
            errors.add("--kubernetes", format!("{other:?} is not auto, on or off"));
            None
        }
    }
}

fn settings(errors: &mut ConfigErrors, raw: &RawConfig) -> KubernetesSettings {
    let kubeconfig = raw.kubeconfig.as_deref().map(PathBuf::from);
    if let Some(error) = kubeconfig
        .as_ref()
        .and_then(|path| std::fs::File::open(path).err())
    {
        errors.add(
            "--kubeconfig",
            format!("{}: {error}", raw.kubeconfig.as_deref().unwrap_or_default()),
        );
    }
    let defaults = ObjectNames::default();
    let mut name = |setting: &str, written: &Option<String>, default: String| {
        let name = written.clone().unwrap_or(default);
        if !is_object_name(&name) {
            errors.add(
                setting,
                format!("{name:?} is not a name of Kubernetes (a-z, 0-9, '-' and '.')"),
            );
        }
        name
    };
    let names = ObjectNames {
        nodes_config_map: name(
            "--nodes-config-map",
            &raw.nodes_config_map,
            defaults.nodes_config_map,
        ),
        ports_config_map: name(
            "--ports-config-map",
            &raw.ports_config_map,
            defaults.ports_config_map,
        ),
        internal_service: name(
            "--internal-service",
            &raw.internal_service,
            defaults.internal_service,
        ),
        leader_lease: name("--leader-lease", &raw.leader_lease, defaults.leader_lease),
        ca_secret: name("--ca-secret", &raw.ca_secret, defaults.ca_secret),
        state_secret: name("--state-secret", &raw.state_secret, defaults.state_secret),
        ca_config_map: name(
            "--ca-config-map",
            &raw.ca_config_map,
            defaults.ca_config_map,
        ),
        replica_lease: name(
            "--replica-lease",
            &raw.replica_lease,
            defaults.replica_lease,
        ),
    };
    let cluster_domain = raw.cluster_domain.clone();
    let cluster_domain = cluster_domain.map(|domain| {
        let domain = domain.trim_end_matches('.').to_ascii_lowercase();
        name("--cluster-domain", &Some(domain), String::new())
    });
    let namespace = raw
        .namespace
        .clone()
        .map(|namespace| name("--namespace", &Some(namespace), String::new()));
    let edge_by_agent = match raw.edge_nodes.as_deref().unwrap_or("label") {
        "label" => false,
        "label-or-agent" => true,
        other => {
            errors.add(
                "--edge-nodes",
                format!("{other:?} is not label or label-or-agent"),
            );
            false
        }
    };
    KubernetesSettings {
        kubeconfig,
        namespace,
        names,
        edge_label: raw.edge_label.clone().unwrap_or_else(|| EDGE_LABEL.into()),
        edge_by_agent,
        record_names: record_names(errors, &raw.record_names),
        single_replica: parsed(
            errors,
            "--single-replica",
            raw.single_replica.as_deref(),
            false,
        ),
        cluster_domain: cluster_domain.unwrap_or_else(|| CLUSTER_DOMAIN.into()),
        pod_lookup: parsed(errors, "--pod-lookup", raw.pod_lookup.as_deref(), true),
        agent_tokens: agent_tokens(errors, raw),
    }
}

fn record_names(errors: &mut ConfigErrors, texts: &[String]) -> Vec<NamePattern> {
    let patterns = texts.iter().map(|text| (text, text.parse()));
    patterns
        .filter_map(|(text, pattern)| match pattern {
            Ok(pattern) => Some(pattern),
            Err(problem) => {
                let problem: NamePatternError = problem;
                errors.add("--record-names", format!("{text:?}: {problem}"));
                None
            }
        })
        .collect()
}

fn agent_tokens(errors: &mut ConfigErrors, raw: &RawConfig) -> AgentTokens {
    let defaults = AgentTokens::default();
    let audience = raw.agent_token_audience.clone();
    let audience = audience.unwrap_or(defaults.audience);
    if audience.trim().is_empty() {
        errors.add(
            "--agent-token-audience",
            "is empty: any token of the cluster would do",
        );
    }
    for account in &raw.agent_service_account {
        let parts = account.strip_prefix(ACCOUNT_PREFIX);
        let parts = parts.and_then(|account| account.split_once(':'));
        if !parts.is_some_and(|(namespace, name)| is_object_name(namespace) && is_object_name(name))
        {
            let problem = format!("{account:?} is not {ACCOUNT_PREFIX}NAMESPACE:NAME");
            errors.add("--agent-service-account", problem);
        }
    }
    let accounts = match &*raw.agent_service_account {
        [] => defaults.accounts,
        configured => configured.to_vec(),
    };
    AgentTokens { audience, accounts }
}

/// The source of the CA of kubelets' client certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeletCa {
    /// Kubelets' certificates are not accepted.
    Off,
    /// The cluster provides the CA.
    Cluster,
    /// The operator provides the CA in this file.
    File(PathBuf),
}

/// Returns the source that `--kubelet-client-ca` selects.
pub(super) fn kubelet_ca(raw: &RawConfig, has_cluster: bool) -> KubeletCa {
    match raw.kubelet_client_ca.as_deref() {
        Some("off") => KubeletCa::Off,
        Some(path) => KubeletCa::File(path.into()),
        None if has_cluster => KubeletCa::Cluster,
        None => KubeletCa::Off,
    }
}

/// Returns whether `name` is a lower-case DNS subdomain (RFC 1123), like the names of objects.
fn is_object_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(inner)
    };
    name.len() <= 253 && name.split('.').all(is_label)
}
