//! A cluster's API for scenarios: a fake in this process, or a real kube-apiserver with etcd.
//!
//! Scenarios use only [`Cluster`], so that they hold for both. Features of the fake alone, faults
//! and counts, are behind [`Cluster::fake_api`].

mod api;
mod audit;
mod kubelet;
mod kubelet_client;
mod objects;
mod real;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tunnel_server::cluster::objects::tokens_namespace;

use crate::apiserver::{FakeApiServer, Setup};

pub use api::{Api, is_status};
pub use audit::AuditLog;
pub use kubelet::{Kubelet, KubeletCallers, KubeletHost};
pub use objects::{
    Node, Objects, SERVICE_ACCOUNT, cloud, edge, edge_at, empty_secrets, endpoints,
    internal_service, server_roles, server_roles_of, shipped,
};
pub use real::{Real, egress_flag};

/// The API server that a scenario runs against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The fake API server in this process.
    FakeApiServer,
    /// `kube-apiserver` and `etcd` from the directory in `KUBEBUILDER_ASSETS`.
    Real,
}

#[derive(Debug)]
enum ApiBackend {
    FakeApiServer(Box<FakeApiServer>),
    Real(Box<Real>),
}

/// A cluster without nodes, with a ServiceAccount for the server and its roles.
#[derive(Debug)]
pub struct Cluster {
    server: ApiBackend,
    admin: Api,
}

impl Cluster {
    /// Starts a cluster. Returns `None`, with a note, if a real one is requested and its binaries
    /// are missing.
    pub async fn start(kind: Kind) -> Result<Option<Self>> {
        Self::with_ranges(kind, Families::V4).await
    }

    /// Like [`Cluster::start`], with Services of these families.
    pub async fn with_ranges(kind: Kind, families: Families) -> Result<Option<Self>> {
        let server = match kind {
            Kind::FakeApiServer => {
                let (namespace, name) = SERVICE_ACCOUNT;
                let setup = Setup {
                    service_ranges: families.first_addresses(),
                    service_accounts: vec![(namespace.to_owned(), name.to_owned())],
                };
                ApiBackend::FakeApiServer(Box::new(FakeApiServer::start(setup)?))
            }
            Kind::Real => {
                let Some(binaries) = crate::tools::or_skip(Real::binaries()) else {
                    return Ok(None);
                };
                ApiBackend::Real(Box::new(Real::start(&binaries, families).await?))
            }
        };
        Self::of(server).await.map(Some)
    }

    /// Starts a real cluster with further flags of kube-apiserver. Returns `None`, with a note, if
    /// its binaries are missing.
    pub async fn real_with(flags: &[String]) -> Result<Option<Self>> {
        let Some(binaries) = crate::tools::or_skip(Real::binaries()) else {
            return Ok(None);
        };
        let real = Real::start_with(&binaries, Families::V4, flags, None).await?;
        Self::of(ApiBackend::Real(Box::new(real))).await.map(Some)
    }

    async fn of(server: ApiBackend) -> Result<Self> {
        let kubeconfig = match &server {
            ApiBackend::FakeApiServer(fake_api) => fake_api.admin_kubeconfig()?,
            ApiBackend::Real(real) => real.admin_kubeconfig(),
        };
        let admin = Api::new(&kubeconfig, "culvert-tests").await?;
        let cluster = Self { server, admin };
        cluster.wait_for_namespaces().await;
        if matches!(cluster.server, ApiBackend::Real(_)) {
            let namespace = json!({ "metadata": { "name": tokens_namespace(SERVICE_ACCOUNT.0) } });
            cluster
                .admin
                .create("/api/v1/namespaces", &namespace)
                .await?;
        }
        cluster.grant().await?;
        cluster.objects().create_shipped().await?;
        Ok(cluster)
    }

    /// Returns an API client with all permissions.
    pub fn admin(&self) -> &Api {
        &self.admin
    }

    /// Returns a kubeconfig with all permissions, for programs.
    pub fn admin_kubeconfig(&self) -> Result<PathBuf> {
        match &self.server {
            ApiBackend::FakeApiServer(fake_api) => fake_api.admin_kubeconfig(),
            ApiBackend::Real(real) => Ok(real.admin_kubeconfig()),
        }
    }

    pub fn server_kubeconfig(&self) -> Result<PathBuf> {
        let (namespace, name) = SERVICE_ACCOUNT;
        match &self.server {
            ApiBackend::FakeApiServer(fake_api) => {
                fake_api.service_account_kubeconfig(namespace, name)
            }
            ApiBackend::Real(real) => Ok(real.server_kubeconfig()),
        }
    }

    /// Returns the fake API server.
    ///
    /// # Errors
    /// Returns an error if this is a real cluster.
    pub fn fake_api(&self) -> Result<&FakeApiServer> {
        match &self.server {
            ApiBackend::FakeApiServer(fake_api) => Ok(fake_api),
            ApiBackend::Real(_) => bail!("a real API server has no faults on demand"),
        }
    }

    /// Returns the address of the metrics of etcd.
    ///
    /// # Errors
    /// Returns an error if this is a fake API server.
    pub fn etcd(&self) -> Result<SocketAddr> {
        match &self.server {
            ApiBackend::FakeApiServer(_) => bail!("the stand-in has no etcd"),
            ApiBackend::Real(real) => Ok(real.etcd()),
        }
    }

    /// Kills the real kube-apiserver and starts it again.
    ///
    /// # Errors
    /// Returns an error if this is a fake API server, or if the start fails.
    pub async fn restart(&mut self) -> Result<()> {
        match &mut self.server {
            ApiBackend::FakeApiServer(_) => bail!("the stand-in goes away and comes back by `be`"),
            ApiBackend::Real(real) => real.restart().await,
        }
    }

    /// Returns the name of the server's user in its requests.
    pub fn server_user() -> String {
        let (namespace, name) = SERVICE_ACCOUNT;
        format!("system:serviceaccount:{namespace}:{name}")
    }

    /// Waits for the namespaces that scenarios use. A real API server creates them some time after
    /// its port is open.
    async fn wait_for_namespaces(&self) {
        for namespace in [SERVICE_ACCOUNT.0, "default"] {
            let path = format!("/api/v1/namespaces/{namespace}");
            crate::eventually::eventually(&path, real::START, async || {
                let found = self.admin.get(&path).await;
                let found = found.and_then(|found| found.context("not yet there"));
                found.map_err(|error| match &self.server {
                    ApiBackend::Real(real) => {
                        format!("{error:#}; log of kube-apiserver:{}", real.log())
                    }
                    ApiBackend::FakeApiServer(_) => format!("{error:#}"),
                })
            })
            .await;
        }
    }

    /// Binds the roles from the server's own table, as its manifests do.
    async fn grant(&self) -> Result<()> {
        let (namespace, name) = SERVICE_ACCOUNT;
        let subject = json!([{ "kind": "ServiceAccount", "namespace": namespace, "name": name }]);
        for role in server_roles() {
            let kind = role["kind"].as_str().unwrap_or_default().to_owned();
            let collection = |kind: &str| match role["metadata"]["namespace"].as_str() {
                Some(namespace) => {
                    format!("{RBAC}/namespaces/{namespace}/{}s", kind.to_lowercase())
                }
                None => format!("{RBAC}/{}s", kind.to_lowercase()),
            };
            self.admin.create(&collection(&kind), &role).await?;
            let binding = json!({
                "metadata": role["metadata"], "subjects": subject,
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role["metadata"]["name"] },
            });
            self.admin
                .create(&collection(&format!("{kind}Binding")), &binding)
                .await?;
        }
        Ok(())
    }

    /// Removes all roles of the server, or restores them.
    pub async fn allow_server(&self, allowed: bool) -> Result<()> {
        for role in server_roles() {
            let rules = if allowed {
                role["rules"].clone()
            } else {
                Value::Array(Vec::new())
            };
            self.admin
                .merge(&role_path(&role), &json!({ "rules": rules }))
                .await?;
        }
        Ok(())
    }

    /// Deletes all roles of the server, for programs that apply them: kube-apiserver gives nobody the
    /// fields of another manager.
    pub async fn delete_roles(&self) -> Result<()> {
        for role in server_roles() {
            self.admin.delete(&role_path(&role)).await?;
        }
        Ok(())
    }

    /// Lets the server create ConfigMaps and Leases, as the roles of earlier manifests did.
    pub async fn allow_creation(&self) -> Result<()> {
        let [_, role, _] = server_roles();
        let mut rules = role["rules"].as_array().cloned().unwrap_or_default();
        for (group, resource) in [("", "configmaps"), ("coordination.k8s.io", "leases")] {
            rules.push(
                json!({ "apiGroups": [group], "resources": [resource], "verbs": ["create"] }),
            );
        }
        let (namespace, name) = SERVICE_ACCOUNT;
        let path = format!("{RBAC}/namespaces/{namespace}/roles/{name}");
        self.admin
            .merge(&path, &json!({ "rules": rules }))
            .await
            .map(drop)
    }
}

fn role_path(role: &Value) -> String {
    let kind = role["kind"].as_str().unwrap_or_default().to_lowercase();
    let name = role["metadata"]["name"].as_str().unwrap_or_default();
    match role["metadata"]["namespace"].as_str() {
        Some(namespace) => format!("{RBAC}/namespaces/{namespace}/{kind}s/{name}"),
        None => format!("{RBAC}/{kind}s/{name}"),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Families {
    /// Services get IPv4 addresses only.
    V4,
    /// IPv4 first, and IPv6 for Services that request both.
    Dual,
}

impl Families {
    fn first_addresses(self) -> Vec<std::net::IpAddr> {
        let v4 = std::net::IpAddr::from([10, 96, 0, 0]);
        let v6 = std::net::IpAddr::from([0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0]);
        match self {
            Self::V4 => vec![v4],
            Self::Dual => vec![v4, v6],
        }
    }

    /// Returns the ranges in the syntax of kube-apiserver's flag.
    fn ranges(self) -> &'static str {
        match self {
            Self::V4 => "10.96.0.0/12",
            Self::Dual => "10.96.0.0/12,fd00:10:96::/112",
        }
    }
}

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
