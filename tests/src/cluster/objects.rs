//! The objects that a tunnel uses: Nodes, the Service of the listeners, ConfigMaps, roles.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tunnel_server::cluster::objects::{
    CA_CERTIFICATE_KEY, RECORDS_KEY, RIGHTS, Right, Scope, tokens_namespace,
};
use tunnel_server::config::{EDGE_LABEL, ObjectNames};

use super::Cluster;

/// Namespace and name of the server's ServiceAccount.
pub const SERVICE_ACCOUNT: (&str, &str) = ("kube-system", "tunnel-server");

/// A Node to be created.
#[derive(Debug, Clone)]
pub struct Node(Value);

/// Returns a Node behind the tunnel, with an address that only its site can reach.
pub fn edge(name: &str) -> Node {
    edge_at(name, "192.168.33.221")
}

/// Returns a Node behind the tunnel with an address.
pub fn edge_at(name: &str, address: &str) -> Node {
    Node::new(name)
        .labeled(EDGE_LABEL, "true")
        .addressed("InternalIP", address)
}

/// Returns a Node that is reached at `address`.
pub fn cloud(name: &str, address: &str) -> Node {
    Node::new(name)
        .labeled(EDGE_LABEL, "false")
        .addressed("InternalIP", address)
}

impl Node {
    /// Returns a Node without labels and addresses.
    pub fn new(name: &str) -> Self {
        Self(json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": {} },
            "status": { "addresses": [], "daemonEndpoints": { "kubeletEndpoint": { "Port": 10250 } } },
        }))
    }

    pub fn labeled(mut self, label: &str, value: &str) -> Self {
        self.0["metadata"]["labels"][label] = value.into();
        self
    }

    pub fn addressed(mut self, kind: &str, address: &str) -> Self {
        if let Some(addresses) = self.0["status"]["addresses"].as_array_mut() {
            addresses.push(json!({ "type": kind, "address": address }));
        }
        self
    }

    /// Sets another port of the Node's kubelet.
    pub fn with_kubelet_port(mut self, port: u16) -> Self {
        self.0["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] = port.into();
        self
    }

    /// Sets the range of the Node's Pods.
    pub fn with_pods(mut self, network: &str) -> Self {
        self.0["spec"] = json!({ "podCIDR": network, "podCIDRs": [network] });
        self
    }

    /// Returns the object in the form of the API.
    pub fn object(&self) -> &Value {
        &self.0
    }
}

/// Shorthand for operations of scenarios on a cluster.
#[derive(Debug, Clone, Copy)]
pub struct Objects<'a>(&'a Cluster);

impl Cluster {
    pub fn objects(&self) -> Objects<'_> {
        Objects(self)
    }
}

impl Objects<'_> {
    /// Returns the path of a core-group object in the server's namespace.
    pub fn path(plural: &str, name: &str) -> String {
        format!("/api/v1/namespaces/{}/{plural}/{name}", SERVICE_ACCOUNT.0)
    }

    fn collection(plural: &str) -> String {
        format!("/api/v1/namespaces/{}/{plural}", SERVICE_ACCOUNT.0)
    }

    /// Creates the objects that the server fills, empty as in the manifests.
    pub async fn create_shipped(self) -> Result<()> {
        for (collection, object) in shipped() {
            self.0.admin().create(&collection, &object).await?;
        }
        Ok(())
    }

    /// Deletes the shipped objects of a kind, which gives the cluster's state before the manifests
    /// are applied.
    pub async fn delete_shipped(self, kind: &str) -> Result<()> {
        for (collection, object) in shipped() {
            if object["kind"] == kind {
                let name = object["metadata"]["name"].as_str().context("a name")?;
                self.0
                    .admin()
                    .delete(&format!("{collection}/{name}"))
                    .await?;
            }
        }
        Ok(())
    }

    /// Returns what the server wrote into each existing object: the data, or the holder of a Lease.
    pub async fn filled(self) -> Result<BTreeMap<String, Value>> {
        let mut filled = BTreeMap::new();
        for (collection, object) in shipped() {
            let name = object["metadata"]["name"].as_str().context("a name")?;
            let path = format!("{collection}/{name}");
            if let Some(found) = self.0.admin().get(&path).await? {
                let holder = &found["spec"]["holderIdentity"];
                filled.insert(path, json!([found["data"], holder]));
            }
        }
        Ok(filled)
    }

    /// Returns the decoded data of the Secret of the CA or of the shared state; all values are
    /// text.
    pub async fn secret(self, name: &str) -> Result<BTreeMap<String, String>> {
        let path = Self::path("secrets", name);
        let secret = self.0.admin().get(&path).await?.context("no Secret")?;
        let data = secret["data"].as_object().into_iter().flatten();
        data.map(|(key, value)| {
            let bytes: ByteString = serde_json::from_value(value.clone())?;
            Ok((key.clone(), String::from_utf8(bytes.0)?))
        })
        .collect()
    }

    /// Replaces keys of a Secret, as an operator does.
    pub async fn set_secret(self, name: &str, values: &[(&str, &str)]) -> Result<()> {
        let data: serde_json::Map<_, _> = values
            .iter()
            .map(|(key, text)| {
                let bytes = ByteString(text.as_bytes().to_vec());
                Ok(((*key).to_owned(), serde_json::to_value(bytes)?))
            })
            .collect::<Result<_>>()?;
        let path = Self::path("secrets", name);
        let patch = json!({ "data": data });
        self.0.admin().merge(&path, &patch).await.map(drop)
    }

    /// Returns the path of the ConfigMap with the CA's certificates.
    pub fn bundle_path() -> String {
        Self::path("configmaps", &ObjectNames::default().ca_config_map)
    }

    /// Returns the CA's certificates for agents.
    pub async fn bundle(self) -> Result<String> {
        let map = self.0.admin().get(&Self::bundle_path()).await?;
        let map = map.context("no ConfigMap of the CA")?;
        let text = map["data"][CA_CERTIFICATE_KEY].as_str();
        text.map(str::to_owned).context("no certificates")
    }

    pub async fn add(self, node: &Node) -> Result<()> {
        self.0
            .admin()
            .create("/api/v1/nodes", &node.0)
            .await
            .map(drop)
    }

    pub async fn remove(self, node: &str) -> Result<()> {
        self.0
            .admin()
            .delete(&format!("/api/v1/nodes/{node}"))
            .await
    }

    pub async fn set_edge(self, node: &str, edge: bool) -> Result<()> {
        let patch = json!({ "metadata": { "labels": { EDGE_LABEL: edge.to_string() } } });
        self.0
            .admin()
            .merge(&format!("/api/v1/nodes/{node}"), &patch)
            .await
            .map(drop)
    }

    /// Sets the addresses of a Node, as a kubelet does.
    pub async fn set_addresses(self, node: &str, addresses: Value) -> Result<()> {
        let patch = json!({ "status": { "addresses": addresses } });
        self.0
            .admin()
            .merge(&format!("/api/v1/nodes/{node}/status"), &patch)
            .await
            .map(drop)
    }

    /// Creates the Service of the listeners with the ports of the guide.
    pub async fn create_service(self, change: impl FnOnce(&mut Value)) -> Result<Value> {
        let mut service = internal_service();
        change(&mut service);
        self.0
            .admin()
            .create(&Self::collection("services"), &service)
            .await
    }

    /// Returns the Service of the listeners.
    pub async fn service(self) -> Result<Value> {
        let path = Self::path("services", &ObjectNames::default().internal_service);
        self.0
            .admin()
            .get(&path)
            .await?
            .context("no Service of the listeners")
    }

    /// Writes the ConfigMap of the ports, with a text per key.
    pub async fn set_ports(self, lists: &[(&str, &str)]) -> Result<()> {
        let name = ObjectNames::default().ports_config_map;
        let data: serde_json::Map<_, _> = lists
            .iter()
            .map(|(key, text)| ((*key).to_owned(), Value::from(*text)))
            .collect();
        let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name }, "data": data });
        let path = Self::path("configmaps", &name);
        match self.0.admin().get(&path).await? {
            Some(_) => self.0.admin().replace(&path, &map).await.map(drop),
            None => self
                .0
                .admin()
                .create(&Self::collection("configmaps"), &map)
                .await
                .map(drop),
        }
    }

    /// Deletes the ConfigMap of the ports.
    pub async fn remove_ports(self) -> Result<()> {
        self.0
            .admin()
            .delete(&Self::path(
                "configmaps",
                &ObjectNames::default().ports_config_map,
            ))
            .await
    }

    /// Returns the path of the ConfigMap of the DNS records.
    pub fn records_path() -> String {
        Self::path("configmaps", &ObjectNames::default().nodes_config_map)
    }

    /// Returns the ConfigMap of the DNS records.
    pub async fn records_map(self) -> Result<Value> {
        self.0
            .admin()
            .get(&Self::records_path())
            .await?
            .context("no ConfigMap of the records")
    }

    /// Returns the text of the DNS records.
    pub async fn records(self) -> Result<String> {
        let map = self.records_map().await?;
        let text = map["data"][RECORDS_KEY].as_str().map(str::to_owned);
        text.with_context(|| format!("no key {RECORDS_KEY} in {map}"))
    }
}

/// Returns the Secrets as the manifests contain them.
pub fn empty_secrets() -> [Value; 2] {
    let names = ObjectNames::default();
    [names.ca_secret, names.revocations_secret].map(|name| {
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
            "metadata": { "name": name, "namespace": SERVICE_ACCOUNT.0 },
        })
    })
}

/// Returns all objects that the server fills, with their collections, as the manifests contain
/// them.
pub fn shipped() -> Vec<(String, Value)> {
    let names = ObjectNames::default();
    let object = |api: &str, kind: &str, name: String| json!({ "apiVersion": api, "kind": kind, "metadata": { "name": name, "namespace": SERVICE_ACCOUNT.0 } });
    let secrets = empty_secrets().map(|secret| (Objects::collection("secrets"), secret));
    let maps = [names.nodes_config_map, names.ca_config_map];
    let maps = maps.map(|name| {
        let map = object("v1", "ConfigMap", name);
        (Objects::collection("configmaps"), map)
    });
    let api = "coordination.k8s.io/v1";
    let lease = (
        format!("/apis/{api}/namespaces/{}/leases", SERVICE_ACCOUNT.0),
        object(api, "Lease", names.leader_lease),
    );
    secrets.into_iter().chain(maps).chain([lease]).collect()
}

/// Returns the Service of the listeners with the ports of the guide.
pub fn internal_service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": { "name": ObjectNames::default().internal_service, "labels": { "name": "yurt-tunnel-server" } },
        "spec": {
            "selector": { "k8s-app": "yurt-tunnel-server" },
            "ports": [
                { "name": "http", "port": 10255, "targetPort": 10264, "protocol": "TCP" },
                { "name": "https", "port": 10250, "targetPort": 10263, "protocol": "TCP" },
            ],
        },
    })
}

/// Returns the Endpoints that an endpoints controller would create for one server at `address`.
pub fn endpoints(service: &Value, address: &str) -> Value {
    let ports = service["spec"]["ports"].as_array().into_iter().flatten();
    let ports: Vec<_> =
        ports.map(|port| json!({ "name": port["name"], "port": port["targetPort"], "protocol": port["protocol"] })).collect();
    json!({
        "apiVersion": "v1", "kind": "Endpoints", "metadata": { "name": service["metadata"]["name"] },
        "subsets": [{ "addresses": [{ "ip": address }], "ports": ports }],
    })
}

/// Returns the roles of the server's table of rights: one ClusterRole, one Role, and the Role of the
/// namespace of the join tokens.
pub fn server_roles() -> [Value; 3] {
    server_roles_of(|_| true)
}

/// Returns these roles with only the rights that are `needed`.
pub fn server_roles_of(needed: impl Fn(&Right) -> bool) -> [Value; 3] {
    let (tokens, others): (Vec<&Right>, Vec<&Right>) = RIGHTS
        .iter()
        .filter(|right| needed(right))
        .partition(|right| right.scope == Scope::TokensNamespace);
    let (cluster, inside): (Vec<&Right>, Vec<&Right>) = others
        .into_iter()
        .partition(|right| right.scope == Scope::Cluster);
    let rules = |rights: Vec<&Right>| rights.into_iter().map(rule).collect::<Vec<_>>();
    let (namespace, name) = SERVICE_ACCOUNT;
    let api = "rbac.authorization.k8s.io/v1";
    [
        json!({ "apiVersion": api, "kind": "ClusterRole", "metadata": { "name": name }, "rules": rules(cluster) }),
        json!({ "apiVersion": api, "kind": "Role", "metadata": { "name": name, "namespace": namespace }, "rules": rules(inside) }),
        json!({ "apiVersion": api, "kind": "Role", "metadata": { "name": "tunnel-server-tokens", "namespace": tokens_namespace(namespace) }, "rules": rules(tokens) }),
    ]
}

fn rule(right: &Right) -> Value {
    let mut rule =
        json!({ "apiGroups": [right.group], "resources": [right.resource], "verbs": right.verbs });
    match right.scope {
        Scope::Named(flag) => rule["resourceNames"] = json!([named_by(flag)]),
        // All roles here belong to this namespace, as those of agents do by default.
        Scope::Exactly(_, name) => rule["resourceNames"] = json!([name]),
        Scope::Cluster | Scope::Namespace | Scope::TokensNamespace | Scope::AgentNamespaces => {}
    }
    rule
}

/// Returns the default name of a flag. An unknown flag gives the name of no object.
fn named_by(flag: &str) -> String {
    let names = ObjectNames::default();
    match flag {
        "--nodes-config-map" => names.nodes_config_map,
        "--ports-config-map" => names.ports_config_map,
        "--internal-service" => names.internal_service,
        "--leader-lease" => names.leader_lease,
        "--ca-secret" => names.ca_secret,
        "--revocations-secret" => names.revocations_secret,
        "--ca-config-map" => names.ca_config_map,
        other => format!("no-such-flag{other}"),
    }
}
