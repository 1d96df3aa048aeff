//! The server in a cluster: records, ports and the Lease through the API. The tests run against a
//! fake API server, and against a real kube-apiserver where its binaries are installed.

/// Expands each scenario to a test against the fake API server and one against a real API server.
macro_rules! on_both {
    ($($scenario:ident),+ $(,)?) => {
        mod fake_api {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $scenario() -> anyhow::Result<()> {
                crate::cluster::in_cluster(tunnel_tests::cluster::Kind::FakeApiServer, super::$scenario).await
            })+
        }
        mod real {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $scenario() -> anyhow::Result<()> {
                crate::cluster::in_cluster(tunnel_tests::cluster::Kind::Real, super::$scenario).await
            })+
        }
    };
}

mod absent;
mod access;
mod agents;
mod authority;
mod doctor_table;
mod edge_clients;
mod hosts_file;
mod install;
mod joins;
mod kubectl;
mod kubelet;
mod leader;
mod names;
mod outage;
mod placement;
mod ports;
mod quiet;
mod ranges;
mod records;
mod replicas;
mod restarts;
mod revocations;
mod rights;
mod rollout;
mod rotations;
mod scaling;
mod signing;
mod start;

use std::net::SocketAddr;
use std::panic::Location;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::apiserver::FakeApiServer;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::{Api, Cluster, Families, Kind, Objects, cloud, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::targets::Exporter;

pub(crate) use kubectl::kustomizers;

/// Runs a scenario in a new cluster, unless the binaries of a real one are missing.
async fn in_cluster(
    kind: Kind,
    scenario: impl AsyncFnOnce(ClusterEnv) -> Result<()>,
) -> Result<()> {
    match ClusterEnv::start(kind).await? {
        Some(cluster_env) => scenario(cluster_env).await,
        None => Ok(()),
    }
}

/// A cluster, and a directory for the servers that follow the cluster.
struct ClusterEnv {
    cluster: Cluster,
    scratch: ScratchDir,
}

impl ClusterEnv {
    async fn start(kind: Kind) -> Result<Option<Self>> {
        Self::with_families(kind, Families::V4).await
    }

    async fn with_families(kind: Kind, families: Families) -> Result<Option<Self>> {
        let scratch = ScratchDir::new()?;
        let cluster = Cluster::with_ranges(kind, families).await?;
        Ok(cluster.map(|cluster| Self { cluster, scratch }))
    }

    /// Starts a fake API server.
    async fn fake() -> Result<Self> {
        let cluster_env = Self::start(Kind::FakeApiServer).await?;
        cluster_env.context("a stand-in")
    }

    fn fake_api(&self) -> Result<&FakeApiServer> {
        self.cluster.fake_api()
    }

    /// Returns the address of the API server.
    fn api_address(&self) -> Result<SocketAddr> {
        let kubeconfig = std::fs::read_to_string(self.cluster.server_kubeconfig()?)?;
        let (_, address) = kubeconfig.split_once("https://").context("no address")?;
        let end = address.find(|character: char| !"0123456789.:".contains(character));
        Ok(address[..end.unwrap_or(address.len())].parse()?)
    }

    fn admin(&self) -> &Api {
        self.cluster.admin()
    }

    fn objects(&self) -> Objects<'_> {
        self.cluster.objects()
    }

    /// Returns the setup of the server `name` with the rights of its ServiceAccount.
    fn setup(&self, name: &str) -> Result<ServerSetup> {
        let folder = self.scratch.path().join(name);
        let setup = ServerSetup::in_cluster(&folder, &self.cluster.server_kubeconfig()?);
        Ok(setup.args(&["--namespace", "kube-system"]))
    }

    async fn server(&self, name: &str) -> Result<Server> {
        self.setup(name)?.start().await
    }

    /// Creates the objects of the guide, starts the server "a" and waits until the server has
    /// written their records.
    async fn guided_server(&self) -> Result<Server> {
        self.guide().await?;
        let server = self.server("a").await?;
        self.wait_for_records(FIRST, GUIDE_RECORDS).await;
        Ok(server)
    }

    /// Creates the objects of the guide: the Service, an edge node and a cloud node.
    async fn guide(&self) -> Result<()> {
        self.create_service(GUIDE_IP).await?;
        self.add_nodes().await
    }

    /// Creates the Service of the listeners with this cluster address.
    async fn create_service(&self, address: &str) -> Result<Value> {
        let change = |service: &mut Value| service["spec"]["clusterIP"] = address.into();
        self.objects().create_service(change).await
    }

    /// Creates an edge node and a cloud node.
    async fn add_nodes(&self) -> Result<()> {
        self.objects().add(&edge("worker-1")).await?;
        let master = cloud("master-1", "192.168.33.220");
        self.objects().add(&master).await
    }

    /// Waits until the ConfigMap of the CA has certificates.
    async fn wait_for_bundle(&self) {
        eventually("the CA's certificates", FIRST, async || {
            let bundle = self.objects().bundle().await?;
            ensure!(bundle.contains("BEGIN CERTIFICATE"), "{bundle}");
            Ok(())
        })
        .await;
    }

    /// Waits until the records equal `expected`. A failure names the line of the scenario.
    #[track_caller]
    fn wait_for_records(&self, patience: Duration, expected: &str) -> impl Future<Output = ()> {
        let caller = Location::caller();
        async move {
            let what = format!("records {expected:?} ({caller})");
            eventually(&what, patience, async || {
                let found = self.objects().records().await?;
                ensure!(found == expected, "records are {found:?}");
                Ok(())
            })
            .await;
        }
    }

    /// Waits until the Service has its own ports, which the server never changes, and an `extra`
    /// one, which is given by its number and its target.
    #[track_caller]
    fn wait_for_ports(&self, extra: Option<(u16, u16)>) -> impl Future<Output = ()> {
        let caller = Location::caller();
        let extra =
            extra.map(|(port, target)| json!([format!("dnat-{port}"), port, "TCP", target]));
        let own = [
            json!(["http", 10255, "TCP", 10264]),
            json!(["https", 10250, "TCP", 10263]),
        ];
        let wanted: Vec<_> = own.into_iter().chain(extra).collect();
        async move {
            eventually(&format!("ports ({caller})"), REACTION, async || {
                let service = self.objects().service().await?;
                let found = service["spec"]["ports"].as_array().context("no ports")?;
                let fields = ["name", "port", "protocol", "targetPort"];
                let found: Vec<_> = found
                    .iter()
                    .map(|port| json!(fields.map(|field| &port[field])))
                    .collect();
                ensure!(found == wanted, "ports are {found:?}, not {wanted:?}");
                Ok(())
            })
            .await;
        }
    }
}

/// An agent of a node, and an exporter that the agent reaches.
struct Site {
    node: String,
    exporter: Exporter,
    _agent: Process,
}

impl Site {
    /// Starts the agent and the exporter. `arguments` are added to the agent's `run`.
    async fn start(
        cluster_env: &ClusterEnv,
        server: &Server,
        node: &str,
        arguments: &[&str],
    ) -> Result<Self> {
        let exporter = Exporter::start(node).await?;
        let token = server.token(node, None).await?;
        let folder = cluster_env.scratch.path().join(format!("agent-{node}"));
        let agents = server.address(Listener::Agents);
        let agent = if arguments.contains(&"--node-ip") {
            AgentSetup::new(node, agents, &folder, None).args(&["--meta-listen", "127.0.0.1:0"])
        } else {
            AgentSetup::on_loopback(node, agents, &folder)
        };
        let agent = agent.args(&["--token", &token]).args(arguments).start()?;
        server.wait_until_connected(&[node]).await;
        Ok(Self {
            node: node.to_owned(),
            exporter,
            _agent: agent,
        })
    }

    /// Starts the agent and the exporter of worker-1, and waits until the server answers for the
    /// exporter's port.
    async fn serving(cluster_env: &ClusterEnv, server: &Server) -> Result<Self> {
        let site = Self::start(cluster_env, server, "worker-1", &[]).await?;
        let port = site.port().to_string();
        let ports = [("http-proxy-ports", port.as_str())];
        cluster_env.objects().set_ports(&ports).await?;
        eventually("the port", FIRST, async || site.serves(server).await).await;
        Ok(site)
    }

    fn port(&self) -> u16 {
        self.exporter.addr().port()
    }

    /// Returns the value of a caller's `Host`.
    fn host(&self) -> String {
        format!("{}:{}", self.node, self.port())
    }

    /// Fails unless the exporter's page arrives through the HTTP listener.
    async fn serves(&self, server: &Server) -> Result<()> {
        let get = RawRequest::get(&self.host(), "/metrics");
        let reply = request(server.address(Listener::Http), &get).await?;
        ensure!(
            reply.status == 200 && reply.text().contains(&self.node),
            "{}: {}",
            reply.status,
            reply.text()
        );
        Ok(())
    }
}

/// Requests `path` on the server's meta port and returns the body.
async fn fetch_text(server: &Server, path: &str) -> Result<String> {
    let meta = server.address(Listener::Meta);
    let reply = request(meta, &RawRequest::get("meta", path)).await?;
    Ok(reply.text())
}

/// Waits until the page at `path` of the server's meta port contains `text`.
async fn wait_for_text(server: &Server, path: &str, patience: Duration, text: &str) {
    eventually(text, patience, async || {
        let found = fetch_text(server, path).await?;
        ensure!(found.contains(text), "{path} is {found}");
        Ok(())
    })
    .await;
}

/// Waits until the page at `path` of the server's meta port does not contain `text`.
async fn wait_until_gone(server: &Server, path: &str, patience: Duration, text: &str) {
    eventually(&format!("no {text}"), patience, async || {
        let found = fetch_text(server, path).await?;
        ensure!(!found.contains(text), "{path} is {found}");
        Ok(())
    })
    .await;
}

/// Address of the guide's Service.
const GUIDE_IP: &str = "10.106.217.16";

const GUIDE_RECORDS: &str = "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1";

/// The records of the guide with another edge node.
const WITH_WORKER_2: &str =
    "10.106.217.16\tworker-1\n10.106.217.16\tworker-2\n192.168.33.220\tmaster-1";

/// The page with all conditions.
const READYZ: &str = "/readyz?verbose";

/// Longest time from a change in the cluster to the server's reaction.
const REACTION: Duration = Duration::from_secs(2);

/// Longest time until a server's first writes, including the election.
const FIRST: Duration = Duration::from_secs(10);
