//! Settings of the cluster integration: whether there is a cluster, how to connect to it, and the
//! names of its objects.

use std::path::PathBuf;

use tunnel_process::settings::{ConfigErrors, parse_quoted};

use super::RawConfig;
use super::label_key::{self, LabelKey, is_object_name};
use tunnel_proto::wire::name_pattern::NamePattern;

/// Environment variable that is set in every container of a cluster.
const CLUSTER_VARIABLE: &str = "KUBERNETES_SERVICE_HOST";

#[derive(Debug, Clone, Copy, Default)]
pub struct Environment {
    /// Whether the process runs in a container of a cluster.
    pub in_cluster: bool,
}

impl Environment {
    pub fn of_process() -> Self {
        Self {
            in_cluster: std::env::var_os(CLUSTER_VARIABLE).is_some(),
        }
    }
}

/// The settings for following a cluster. The default names are those of yurt-tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesSettings {
    /// Whether the server runs in a container of the cluster.
    pub in_cluster: bool,
    /// `--kubeconfig`; `None` means the ServiceAccount of the container.
    pub kubeconfig: Option<PathBuf>,
    /// `--namespace` of all objects; `None` means the container's own, or `kube-system` outside a
    /// cluster.
    pub namespace: Option<String>,
    pub names: ObjectNames,
    /// `--edge-label`: a Node with this label and the value `true` is an edge node.
    pub edge_label: String,
    /// `--edge-nodes label-or-agent`: a Node with an agent connected to any server is an edge node
    /// too.
    pub edge_by_agent: bool,
    /// `--record-names`: additional host names that Nodes may have, besides those made of their own
    /// names.
    pub record_names: Vec<NamePattern>,
    /// `--node-label`: keys of the Nodes' labels that discovery and `nodes --selector` use.
    pub node_labels: Vec<LabelKey>,
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
    /// Secret with the orders about nodes.
    pub revocations_secret: String,
    /// ConfigMap with the certificates of the local CA.
    pub ca_config_map: String,
    /// Headless Service whose endpoints are the servers.
    pub peer_service: String,
}

impl Default for ObjectNames {
    fn default() -> Self {
        Self {
            nodes_config_map: "yurt-tunnel-nodes".into(),
            ports_config_map: "yurt-tunnel-server-cfg".into(),
            internal_service: "x-tunnel-server-internal-svc".into(),
            leader_lease: "tunnel-dns-controller".into(),
            ca_secret: "tunnel-server-ca".into(),
            revocations_secret: "tunnel-server-revocations".into(),
            ca_config_map: "tunnel-ca".into(),
            peer_service: "tunnel-server-peers".into(),
        }
    }
}

/// Default label of edge nodes.
pub const EDGE_LABEL: &str = "openyurt.io/is-edge-worker";

/// Default domain of Services, as in kubelets.
const CLUSTER_DOMAIN: &str = "cluster.local";

impl KubernetesSettings {
    /// Returns the settings if there is a cluster to follow.
    pub(super) fn check(
        raw: &RawConfig,
        environment: Environment,
        errors: &mut ConfigErrors,
    ) -> Option<Self> {
        let has_cluster = environment.in_cluster || raw.kubeconfig.is_some();
        let choice = errors.one_of(
            "--kubernetes",
            raw.kubernetes.as_deref().unwrap_or("auto"),
            &[("auto", None), ("on", Some(true)), ("off", Some(false))],
        )?;
        if choice == Some(true) && !has_cluster {
            errors.add(
                "--kubernetes",
                "on needs --kubeconfig outside a container of a cluster",
            );
            return None;
        }
        choice
            .unwrap_or(has_cluster)
            .then(|| Self::new(raw, environment, errors))
    }

    fn new(raw: &RawConfig, environment: Environment, errors: &mut ConfigErrors) -> Self {
        let namespace = raw.namespace.as_deref();
        Self {
            in_cluster: environment.in_cluster,
            kubeconfig: raw.kubeconfig.as_ref().map(PathBuf::from),
            namespace: namespace
                .and_then(|name| errors.ok_or_record("--namespace", object_name(name))),
            names: ObjectNames::check(raw, errors),
            edge_label: raw.edge_label.clone().unwrap_or_else(|| EDGE_LABEL.into()),
            edge_by_agent: errors
                .one_of(
                    "--edge-nodes",
                    raw.edge_nodes.as_deref().unwrap_or("label"),
                    &[("label", false), ("label-or-agent", true)],
                )
                .unwrap_or_default(),
            record_names: errors.parse_list("--record-names", &raw.record_names, parse_quoted),
            node_labels: label_key::check(&raw.node_labels, errors),
            pod_lookup: errors.parse("--pod-lookup", raw.pod_lookup.as_deref(), true),
            agent_tokens: AgentTokens::check(raw, errors),
            single_replica: errors.parse("--single-replica", raw.single_replica.as_deref(), false),
            cluster_domain: errors.parse_with(
                "--cluster-domain",
                raw.cluster_domain.as_deref(),
                CLUSTER_DOMAIN.to_owned(),
                |domain| object_name(&domain.trim_end_matches('.').to_ascii_lowercase()),
            ),
        }
    }
}

impl ObjectNames {
    fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Self {
        let defaults = Self::default();
        let mut name = |setting: &str, text: &Option<String>, default: String| {
            errors.parse_with(setting, text.as_deref(), default, object_name)
        };
        Self {
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
            revocations_secret: name(
                "--revocations-secret",
                &raw.revocations_secret,
                defaults.revocations_secret,
            ),
            ca_config_map: name(
                "--ca-config-map",
                &raw.ca_config_map,
                defaults.ca_config_map,
            ),
            peer_service: name("--peer-service", &raw.peer_service, defaults.peer_service),
        }
    }
}

impl AgentTokens {
    fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> Self {
        let defaults = Self::default();
        let audience = raw.agent_token_audience.clone();
        let audience = audience.unwrap_or(defaults.audience);
        if audience.trim().is_empty() {
            errors.add(
                "--agent-token-audience",
                "is empty: any token of the cluster would do",
            );
        }
        let accounts = &raw.agent_service_account;
        let accounts = errors.parse_list("--agent-service-account", accounts, account);
        Self {
            audience,
            accounts: if accounts.is_empty() {
                defaults.accounts
            } else {
                accounts
            },
        }
    }
}

/// Checks the user name of a ServiceAccount.
fn account(text: &str) -> Result<String, String> {
    text.strip_prefix(ACCOUNT_PREFIX)
        .and_then(|account| account.split_once(':'))
        .filter(|(namespace, name)| is_object_name(namespace) && is_object_name(name))
        .map(|_| text.to_owned())
        .ok_or_else(|| format!("{text:?} is not {ACCOUNT_PREFIX}NAMESPACE:NAME"))
}

/// The source of the CA of kubelets' client certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeletClientCa {
    /// Kubelets' certificates are not accepted.
    Off,
    /// The cluster provides the CA.
    Cluster,
    /// The operator provides the CA in this file.
    File(PathBuf),
}

impl KubeletClientCa {
    /// Returns the source that `--kubelet-client-ca` selects.
    pub(super) fn new(raw: &RawConfig, has_cluster: bool) -> Self {
        match raw.kubelet_client_ca.as_deref() {
            Some("off") => Self::Off,
            Some(path) => Self::File(path.into()),
            None if has_cluster => Self::Cluster,
            None => Self::Off,
        }
    }
}

fn object_name(name: &str) -> Result<String, String> {
    if !is_object_name(name) {
        return Err(format!(
            "{name:?} is not a name of Kubernetes (a-z, 0-9, '-' and '.')"
        ));
    }
    Ok(name.to_owned())
}
