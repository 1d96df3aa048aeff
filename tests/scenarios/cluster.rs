//! The server in a cluster: records, ports and the Lease through the API. The tests run against a
//! fake API server, and against a real kube-apiserver where its binaries are installed.

/// Expands each scenario to a test against the fake API server and one against a real API server.
macro_rules! on_both {
    ($($scenario:ident),+ $(,)?) => {
        mod fake_api {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $scenario() -> anyhow::Result<()> {
                match crate::cluster::ClusterEnv::start(tunnel_tests::cluster::Kind::FakeApiServer).await? {
                    Some(cluster_env) => super::$scenario(cluster_env).await,
                    None => Ok(()),
                }
            })+
        }
        mod real {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $scenario() -> anyhow::Result<()> {
                match crate::cluster::ClusterEnv::start(tunnel_tests::cluster::Kind::Real).await? {
                    Some(cluster_env) => super::$scenario(cluster_env).await,
                    None => Ok(()),
                }
            })+
        }
    };
}

mod absent;
mod agents;
mod authority;
mod hosts_file;
mod install;
mod kubectl;
mod leader;
mod names;
mod outage;
mod ports;
mod quiet;
mod ranges;
mod records;
mod rights;
mod rollout;
mod signing;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::client::{HttpReply, RawRequest, request};
use tunnel_tests::cluster::{Cluster, Families, Kind, Objects, cloud, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::targets::Exporter;

pub(crate) use kubectl::kubectls;

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

    /// Creates the objects of the guide: the Service, an edge node and a cloud node.
    async fn guide(&self) -> Result<()> {
        self.guide_at(GUIDE_IP).await
    }

    async fn guide_at(&self, address: &str) -> Result<()> {
        let service = |service: &mut Value| service["spec"]["clusterIP"] = address.into();
        self.objects().create_service(service).await?;
        self.objects().add(&edge("worker-1")).await?;
        self.objects()
            .add(&cloud("master-1", "192.168.33.220"))
            .await
    }

    /// Waits until the records equal `expected`.
    async fn wait_for_records(&self, what: &str, patience: Duration, expected: &str) {
        eventually(what, patience, async || {
            let found = self.objects().records().await?;
            ensure!(found == expected, "records are {found:?}");
            Ok(())
        })
        .await;
    }

    /// Waits until the Service's ports equal `expected`. Each is a name, number, protocol and
    /// target.
    async fn wait_for_ports(&self, what: &str, expected: &[(&str, u16, &str, u16)]) {
        eventually(what, REACTION, async || {
            let service = self.objects().service().await?;
            let found = service["spec"]["ports"].as_array().context("no ports")?;
            let found: Vec<_> = found
                .iter()
                .map(|port| {
                    json!([
                        port["name"],
                        port["port"],
                        port["protocol"],
                        port["targetPort"]
                    ])
                })
                .collect();
            let wanted: Vec<_> = expected.iter().map(|port| json!(port)).collect();
            ensure!(found == wanted, "ports are {found:?}, not {wanted:?}");
            Ok(())
        })
        .await;
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

    fn port(&self) -> u16 {
        self.exporter.addr().port()
    }

    /// Returns the value of a caller's `Host`.
    fn host(&self) -> String {
        format!("{}:{}", self.node, self.port())
    }

    /// Requests the exporter's page through the HTTP listener.
    async fn get(&self, server: &Server) -> Result<HttpReply> {
        request(
            server.address(Listener::Http),
            &RawRequest::get(&self.host(), "/metrics"),
        )
        .await
    }

    /// Fails unless the exporter's page arrives through the HTTP listener.
    async fn serves(&self, server: &Server) -> Result<()> {
        let reply = self.get(server).await?;
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

/// Address of the guide's Service.
const GUIDE_IP: &str = "10.106.217.16";

const GUIDE_RECORDS: &str = "10.106.217.16\tworker-1\n192.168.33.220\tmaster-1";

/// Longest time from a change in the cluster to the server's reaction.
const REACTION: Duration = Duration::from_secs(2);

/// Longest time until a server's first writes, including the election.
const FIRST: Duration = Duration::from_secs(10);
