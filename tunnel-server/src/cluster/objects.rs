//! The objects of the cluster that the server reads and writes: keys, label values, ports, and the rights it needs.

/// Key of the records in the nodes ConfigMap.
pub const RECORDS_KEY: &str = "tunnel-nodes";
/// Key of the ports of http targets in the ports ConfigMap.
pub const HTTP_PORTS_KEY: &str = "http-proxy-ports";
/// Key of the ports of https targets.
pub const HTTPS_PORTS_KEY: &str = "https-proxy-ports";
/// Key of the ports that agents dial on their loopback.
pub const LOCALHOST_PORTS_KEY: &str = "localhost-proxy-ports";
/// Deprecated key: `PORT=TARGET` pairs whose target is the plain door.
pub const PORT_PAIRS_KEY: &str = "dnat-ports-pair";
/// Value of the edge label on edge Nodes.
pub const EDGE_VALUE: &str = "true";
/// Names of the Service's ports that the server adds and removes begin so; the port follows.
pub const EXTRA_PORT_PREFIX: &str = "dnat-";
/// Namespace and name of the ConfigMap in which the API server publishes the CAs of its clients
/// (Kubernetes `pkg/controlplane/controller/clusterauthenticationtrust`).
pub const CLIENT_CA: (&str, &str) = ("kube-system", "extension-apiserver-authentication");
/// Its key with the CA of client certificates.
pub const CLIENT_CA_KEY: &str = "client-ca-file";
/// Key of the CA's certificates in its Secret and in the ConfigMap for agents: one, or more while a CA is being replaced.
pub const CA_CERTIFICATE_KEY: &str = "ca.crt";
/// Key of the CA's private key in its Secret.
pub const CA_PRIVATE_KEY: &str = "ca.key";
/// Annotation of the Service with further names and addresses of the TLS door, separated by commas.
pub const NAMES_ANNOTATION: &str = "x-tunnel-server-names";
/// Servers of one cluster that can have QUIC keys of their own.
pub const REPLICAS_MAX: u8 = 8;
/// Most bytes of all values of a ConfigMap (Kubernetes `pkg/apis/core/validation`, `MaxSecretSize`).
pub const CONFIG_MAP_MAX_BYTES: usize = 1 << 20;

/// Common name of the server's client certificate for kubelets, which is its user there; and the beginning of the names of the
/// requests for it.
pub const KUBELET_CLIENT_NAME: &str = "culvert-tunnel-server";

/// What a resource is, for a line of the table of rights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Every object of the cluster.
    Cluster,
    /// In the namespace, any name.
    Namespace,
    /// In the namespace, only the object of this flag.
    Named(&'static str),
    /// In the namespaces of the ServiceAccounts of `--agent-service-account`, any name.
    AgentNamespaces,
    /// Only the object of this namespace and name.
    Exactly(&'static str, &'static str),
    /// In the namespace, the objects of this flag with `-0`, `-1` and so on behind it, [`REPLICAS_MAX`] in all.
    Numbered(&'static str),
}

/// The name of the Lease of an entry.
#[must_use]
pub fn replica_lease(prefix: &str, entry: u8) -> String {
    format!("{prefix}-{entry}")
}

/// The command that creates an object without content, as manifests ship it: creating cannot be limited to a name, so the server
/// has no right to it.
#[must_use]
pub fn creation(kind: &str, namespace: &str, name: &str) -> String {
    match kind {
        "ConfigMap" => format!("kubectl -n {namespace} create configmap {name}"),
        "Secret" => format!("kubectl -n {namespace} create secret generic {name}"),
        // kubectl creates no Lease from flags.
        _ => format!(
            "echo '{{\"apiVersion\":\"coordination.k8s.io/v1\",\"kind\":\"{kind}\",\"metadata\":{{\"name\":\"{name}\"}}}}' | kubectl -n \
             {namespace} create -f -"
        ),
    }
}

/// One right that the server needs.
#[derive(Debug, Clone, Copy)]
pub struct Right {
    /// API group; empty for the core.
    pub group: &'static str,
    /// Resource.
    pub resource: &'static str,
    /// Which objects.
    pub scope: Scope,
    /// Verbs.
    pub verbs: &'static [&'static str],
    /// What for.
    pub purpose: &'static str,
}

/// All rights that the server needs, no more.
pub const RIGHTS: &[Right] = &[
    Right {
        group: "",
        resource: "nodes",
        scope: Scope::Cluster,
        verbs: &["list", "watch"],
        purpose: "names, addresses, edge label, kubelet port and Pods' networks of nodes",
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
        scope: Scope::Named("--state-secret"),
        verbs: &["get", "list", "watch", "update"],
        purpose: "join tokens, revocations and QUIC keys of all servers",
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
        group: "coordination.k8s.io",
        resource: "leases",
        scope: Scope::Numbered("--replica-lease"),
        verbs: &["get", "update"],
        purpose: "QUIC keys are used by one server at a time; not needed with --single-replica",
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

/// The rights as a table, for the reference.
#[must_use]
pub fn rights_table() -> String {
    let mut table =
        "| group | resource | objects | verbs | for |\n|---|---|---|---|---|\n".to_owned();
    for right in RIGHTS {
        let group = if right.group.is_empty() {
            "core"
        } else {
            right.group
        };
        let objects = match right.scope {
            Scope::Cluster => "all of the cluster".to_owned(),
            Scope::Namespace => "any in the namespace".to_owned(),
            Scope::Named(flag) => format!("the one of `{flag}`"),
            Scope::AgentNamespaces => {
                "any in the namespaces of `--agent-service-account`".to_owned()
            }
            Scope::Exactly(namespace, name) => format!("`{name}` in `{namespace}`"),
            Scope::Numbered(flag) => {
                format!("the ones of `{flag}`, `-0` to `-{}`", REPLICAS_MAX - 1)
            }
        };
        let (resource, verbs, purpose) = (right.resource, right.verbs.join(", "), right.purpose);
        let row = format!("| {group} | {resource} | {objects} | {verbs} | {purpose} |\n");
        table.push_str(&row);
    }
    table
}
