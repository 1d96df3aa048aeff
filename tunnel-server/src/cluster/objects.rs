//! Cluster objects that the server reads and writes: their kinds, keys, label values, and the
//! required permissions.

/// Key of the records in the nodes ConfigMap.
pub const RECORDS_KEY: &str = "tunnel-nodes";
/// Key of the http target ports in the ports ConfigMap.
pub const HTTP_PORTS_KEY: &str = "http-proxy-ports";
/// Key of the https target ports in the ports ConfigMap.
pub const HTTPS_PORTS_KEY: &str = "https-proxy-ports";
/// Key of the ports that agents dial on their loopback address.
pub const LOCALHOST_PORTS_KEY: &str = "localhost-proxy-ports";
/// Deprecated key: `PORT=TARGET` pairs whose target is the HTTP listener.
pub const PORT_PAIRS_KEY: &str = "dnat-ports-pair";
/// Value of the edge label on edge Nodes.
pub const EDGE_VALUE: &str = "true";
/// Name prefix of the Service ports that the server adds and removes. The port number follows.
pub const EXTRA_PORT_PREFIX: &str = "dnat-";
/// Namespace and name of the ConfigMap in which the API server publishes the CAs of its clients
/// (Kubernetes `pkg/controlplane/controller/clusterauthenticationtrust`).
pub const CLIENT_CA: (&str, &str) = ("kube-system", "extension-apiserver-authentication");
/// Key of the client CA in that ConfigMap.
pub const CLIENT_CA_KEY: &str = "client-ca-file";
/// Key of the CA certificates in the CA Secret and in the ConfigMap for agents. The value has one
/// certificate, or more while a CA is being replaced.
pub const CA_CERTIFICATE_KEY: &str = "ca.crt";
/// Key of the CA's private key in the CA Secret.
pub const CA_PRIVATE_KEY: &str = "ca.key";
/// Key of the rotation in progress in the CA Secret: the stage, and both CAs with their keys.
pub const CA_ROTATION_KEY: &str = "ca-rotation.json";
/// Annotation of the Service with additional names and addresses of the HTTPS listener, separated
/// by commas.
pub const NAMES_ANNOTATION: &str = "x-tunnel-server-names";
/// Annotation of the CA Secret with the CAs that its CA replaces: the SHA-256 of their public keys,
/// hex, separated by commas. Without it, a CA that does not continue the one in use is not used.
pub const REPLACES_CA_ANNOTATION: &str = "x-tunnel-server-replaces-ca";
/// Label of an EndpointSlice with the name of its Service.
pub const SERVICE_NAME_LABEL: &str = "kubernetes.io/service-name";
/// Name of the port for other servers in the headless Service of the servers.
pub const PEER_PORT_NAME: &str = "peers";
/// Port for other servers where the headless Service does not name one.
pub const PEER_PORT: u16 = 10269;
/// Maximum size of all values of a ConfigMap in bytes (Kubernetes `pkg/apis/core/validation`,
/// `MaxSecretSize`).
pub const CONFIG_MAP_MAX_BYTES: usize = 1 << 20;

/// Label of the Secrets of join tokens and of their uses.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// Value of the label for tokens, for the counters of their uses, and for uses that wait for an approval.
pub const JOIN_TOKEN: &str = "join-token";
/// Value of the label for other uses of tokens for patterns, of which no command needs a list.
pub const JOIN_TOKEN_USE: &str = "join-token-use";

/// Returns the namespace of the join tokens for the namespace of the server.
pub fn tokens_namespace(namespace: &str) -> String {
    format!("{namespace}-tokens")
}

/// Returns the name of the Secret of a join token.
pub fn join_token_name(id: &str) -> String {
    format!("join-token-{id}")
}

/// Common name of the server's client certificate for kubelets, which is its user name there. Also
/// the name prefix of the CertificateSigningRequests.
pub const KUBELET_CLIENT_NAME: &str = "culvert-tunnel-server";

tunnel_process::named! {
    /// An object that the server reads or writes.
    pub(super) enum Object: label {
        Nodes = "nodes",
        Records = "records",
        Ports = "ports",
        Service = "service",
        Lease = "lease",
        Events = "events",
        KubeletClientCa = "kubelet_client_ca",
        Ca = "ca",
        /// The ConfigMap of the CA certificates.
        CaBundle = "ca_certificates",
        /// The Secrets of the join tokens.
        Tokens = "tokens",
        /// The Secret with the orders about nodes.
        Revocations = "revocations",
        /// The EndpointSlices of the servers' headless Service.
        Peers = "peers",
    }
}

impl Object {
    pub(super) fn kind(self) -> &'static str {
        match self {
            Self::Nodes => "Node",
            Self::Records | Self::Ports | Self::CaBundle | Self::KubeletClientCa => "ConfigMap",
            Self::Service => "Service",
            Self::Lease => "Lease",
            Self::Events => "Event",
            Self::Ca | Self::Tokens | Self::Revocations => "Secret",
            Self::Peers => "EndpointSlice",
        }
    }
}

/// Objects that a permission covers, for a row of the permission table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Every object of the cluster.
    Cluster,
    /// Any name in the namespace.
    Namespace,
    /// Only the object in the namespace that this flag names.
    Named(&'static str),
    /// Any name in the namespace of the join tokens, which has nothing else.
    TokensNamespace,
    /// Any name in the namespaces of the ServiceAccounts of `--agent-service-account`.
    AgentNamespaces,
    /// Only the object with this namespace and name.
    Exactly(&'static str, &'static str),
}

/// Returns the command that creates an empty object, as manifests ship it. RBAC cannot limit
/// `create` to a name, so the server has no permission to create it.
pub fn creation(kind: &str, namespace: &str, name: &str) -> String {
    match kind {
        "ConfigMap" => format!("kubectl -n {namespace} create configmap {name}"),
        "Secret" => format!("kubectl -n {namespace} create secret generic {name}"),
        // kubectl cannot create a Lease from flags.
        _ => format!(
            "echo '{{\"apiVersion\":\"coordination.k8s.io/v1\",\"kind\":\"{kind}\",\"metadata\":{{\"name\":\"{name}\"}}}}' | kubectl -n \
             {namespace} create -f -"
        ),
    }
}

/// One permission that the server needs.
#[derive(Debug, Clone, Copy)]
pub struct Right {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// Resource of the API group, such as `nodes`.
    pub resource: &'static str,
    /// Objects that the permission covers.
    pub scope: Scope,
    pub verbs: &'static [&'static str],
    /// Reason why the server needs the permission.
    pub purpose: &'static str,
}

/// All permissions that the server needs, and no others.
pub const RIGHTS: &[Right] = &[
    Right {
        group: "",
        resource: "nodes",
        scope: Scope::Cluster,
        verbs: &["list", "watch"],
        purpose: "names, addresses, edge label and those of `--node-label`, kubelet port and Pods' networks of nodes",
    },
    Right {
        group: "networking.k8s.io",
        resource: "servicecidrs",
        scope: Scope::Cluster,
        verbs: &["list"],
        purpose: "the ranges of Services, with --connect-uds or --connect-listen and without --connect-direct",
    },
    Right {
        group: "",
        resource: "pods",
        scope: Scope::Cluster,
        verbs: &["get"],
        purpose: "the node of a pod, with --pod-lookup",
    },
    Right {
        group: "authentication.k8s.io",
        resource: "tokenreviews",
        scope: Scope::Cluster,
        verbs: &["create"],
        purpose: "agents' ServiceAccount tokens",
    },
    Right {
        group: "",
        resource: "pods",
        scope: Scope::AgentNamespaces,
        verbs: &["get"],
        purpose: "the node of an agent's Pod, where the API server's answer about the token does not name it",
    },
    Right {
        group: "",
        resource: "configmaps",
        scope: Scope::Exactly(CLIENT_CA.0, CLIENT_CA.1),
        verbs: &["list", "watch"],
        purpose: "the CA of kubelets' client certificates, unless --kubelet-client-ca is given",
    },
    Right {
        group: "",
        resource: "configmaps",
        scope: Scope::Named("--nodes-config-map"),
        verbs: &["get", "list", "watch", "update"],
        purpose: "the records; edits by others are repaired",
    },
    Right {
        group: "",
        resource: "configmaps",
        scope: Scope::Named("--ports-config-map"),
        verbs: &["list", "watch"],
        purpose: "lists of ports",
    },
    Right {
        group: "",
        resource: "configmaps",
        scope: Scope::Named("--ca-config-map"),
        verbs: &["get", "list", "watch", "update"],
        purpose: "the CA's certificates for agents; edits by others are repaired",
    },
    Right {
        group: "",
        resource: "secrets",
        scope: Scope::Named("--ca-secret"),
        verbs: &["get", "list", "watch", "update"],
        purpose: "the CA; the first server fills the empty Secret",
    },
    Right {
        group: "",
        resource: "secrets",
        scope: Scope::TokensNamespace,
        verbs: &["get", "list", "create", "update", "delete"],
        purpose: "join tokens, a Secret each: read when one is used; the leader removes old ones",
    },
    Right {
        group: "",
        resource: "secrets",
        scope: Scope::Named("--revocations-secret"),
        verbs: &["get", "list", "watch", "update"],
        purpose: "orders about nodes: who may write them decides which nodes are refused",
    },
    Right {
        group: "",
        resource: "services",
        scope: Scope::Named("--internal-service"),
        verbs: &["get", "list", "watch", "update"],
        purpose: "its address for the records; the extra ports",
    },
    Right {
        group: "coordination.k8s.io",
        resource: "leases",
        scope: Scope::Named("--leader-lease"),
        verbs: &["get", "update"],
        purpose: "one writer among several servers",
    },
    Right {
        group: "discovery.k8s.io",
        resource: "endpointslices",
        scope: Scope::Namespace,
        verbs: &["list", "watch"],
        purpose: "the other servers, by the Service of --peer-service; not needed with --single-replica",
    },
    Right {
        group: "events.k8s.io",
        resource: "events",
        scope: Scope::Namespace,
        verbs: &["create"],
        purpose: "mistakes in the ports ConfigMap, records that are too large",
    },
    Right {
        group: "certificates.k8s.io",
        resource: "certificatesigningrequests",
        scope: Scope::Cluster,
        verbs: &["create", "get"],
        purpose: "the client certificate for kubelets, with --target-cert-signer",
    },
];
