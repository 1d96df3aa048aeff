//! Agents of the DaemonSet while the CA changes. Each has the token of its pod, and a copy of ConfigMap
//! `tunnel-ca` that its kubelet replaces. No pod is deleted, and none is restarted.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tokio::time::sleep;
use tunnel_server::config::ObjectNames;
use tunnel_tests::ca::replace;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::{Objects, edge};
use tunnel_tests::eventually::eventually;
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::load::Load;
use tunnel_tests::process::{AgentSetup, Listener, Process, Server};
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::or_skip;

use super::super::kubectl::{Kubectl, kubectls};
use super::super::{ClusterEnv, FIRST, GUIDE_IP};
use super::ca_secret;
use crate::credentials::ca_rotation::is_of;
use crate::dns::report_figure;

on_both!(
    ca_is_replaced_three_times_under_requests_and_a_partitioned_agent_comes_back_by_itself,
    agents_that_a_forced_rotation_leaves_behind_are_named_and_enroll_again_by_themselves,
    new_ca_by_the_commands_of_the_guide_ends_with_all_servers_ready_and_all_agents_back,
    revoked_node_gets_no_certificate_with_the_token_of_a_new_pod_until_it_is_unrevoked,
);

/// The pods of the DaemonSet, and their kubelets.
struct DaemonSet<'a> {
    cluster_env: &'a ClusterEnv,
    nodes: Vec<EdgeNode>,
    /// Nodes without a path to the cloud.
    partitioned: Mutex<BTreeSet<String>>,
}

struct EdgeNode {
    name: String,
    /// The path to each server.
    links: Vec<Link>,
    exporter: Exporter,
    agent: Process,
    pods: usize,
}

impl<'a> DaemonSet<'a> {
    /// Makes the nodes and starts their pods.
    async fn start(
        cluster_env: &'a ClusterEnv,
        servers: &[&Server],
        names: &[&str],
    ) -> Result<Self> {
        let account = json!({ "metadata": { "name": ACCOUNT } });
        let path = "/api/v1/namespaces/kube-system/serviceaccounts";
        // The fake API server has it from the manifests.
        let _exists = cluster_env.admin().create(path, &account).await;
        let mut daemon_set = Self {
            cluster_env,
            nodes: Vec::new(),
            partitioned: Mutex::default(),
        };
        for name in names {
            cluster_env.objects().add(&edge(name)).await?;
            let addresses = servers
                .iter()
                .map(|server| server.address(Listener::Agents));
            let links = addresses.map(|address| Link::start(address, 1));
            let links: Vec<_> = links.collect::<std::io::Result<_>>()?;
            daemon_set.replace_bundle(name).await?;
            let agent = daemon_set.start_pod(name, &links, 0).await?;
            daemon_set.nodes.push(EdgeNode {
                name: (*name).to_owned(),
                links,
                exporter: Exporter::start(name).await?,
                agent,
                pods: 1,
            });
        }
        Ok(daemon_set)
    }

    fn node(&self, name: &str) -> Result<&EdgeNode> {
        let node = self.nodes.iter().find(|node| node.name == name);
        node.context("no such node")
    }

    fn bundle(&self, node: &str) -> PathBuf {
        let folder = self.cluster_env.scratch.path();
        folder.join(format!("{node}-tunnel-ca.crt"))
    }

    /// Creates a pod with its token and starts its agent, which finds the data directory empty.
    async fn start_pod(&self, node: &str, links: &[Link], number: usize) -> Result<Process> {
        let scratch = &self.cluster_env.scratch;
        let token = self.token(node, number).await?;
        let token = scratch.file(&format!("{node}-token"), token)?;
        let limits = "limits:\n  reloadEvery: 100ms\n  enrollAgain: 1s\n";
        let limits = scratch.file("agents.yaml", limits)?;
        let folder = scratch.path().join(format!("agent-{node}-{number}"));
        let (token, limits) = (token.to_string_lossy(), limits.to_string_lossy());
        let servers: Vec<SocketAddr> = links.iter().map(Link::addr).collect();
        let first = *servers.first().context("no server")?;
        let setup = AgentSetup::on_loopback(node, first, &folder)
            .args(&["--token-file", &token, "--config", &limits])
            .args(&["--ca-file", &self.bundle(node).to_string_lossy()]);
        let others = servers.iter().skip(1).map(SocketAddr::to_string);
        let setup = others.fold(setup, |setup, server| setup.args(&["--server", &server]));
        setup.start()
    }

    /// Returns the token in the projected volume of a new pod.
    async fn token(&self, node: &str, number: usize) -> Result<String> {
        let admin = self.cluster_env.admin();
        let name = format!("{ACCOUNT}-{node}-{number}");
        let pod = json!({
            "metadata": { "name": name },
            "spec": {
                "nodeName": node, "serviceAccountName": ACCOUNT,
                "containers": [{ "name": "agent", "image": "example.org/agent:1" }],
            },
        });
        let pods = "/api/v1/namespaces/kube-system/pods";
        let pod = admin.create(pods, &pod).await?;
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {
                "audiences": ["tunnel-server"], "expirationSeconds": 3600,
                "boundObjectRef": {
                    "apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"],
                },
            },
        });
        let path = format!("/api/v1/namespaces/kube-system/serviceaccounts/{ACCOUNT}/token");
        let answer = admin.create(&path, &request).await?;
        let token = answer["status"]["token"].as_str();
        token.map(str::to_owned).context("no token")
    }

    /// Replaces the pod of a node. The new one has an empty data directory and a fresh token.
    async fn replace_pod(&mut self, name: &str) -> Result<()> {
        let node = self.nodes.iter().position(|node| node.name == name);
        let index = node.context("no such node")?;
        let number = self.nodes[index].pods;
        let agent = self
            .start_pod(name, &self.nodes[index].links, number)
            .await?;
        self.nodes[index].pods += 1;
        self.nodes[index].agent = agent;
        Ok(())
    }

    /// Copies ConfigMap `tunnel-ca` to the file of a node's pod, as its kubelet does.
    async fn replace_bundle(&self, node: &str) -> Result<()> {
        let map = self
            .cluster_env
            .admin()
            .get(&Objects::bundle_path())
            .await?;
        let map = map.context("no ConfigMap of the CA")?;
        let (file, text) = (self.bundle(node), map["data"]["ca.crt"].as_str());
        match text {
            Some(text) if std::fs::read_to_string(&file).ok().as_deref() != Some(text) => {
                replace(&file, text.as_bytes())
            }
            Some(_) => Ok(()),
            None => {
                let _absent = std::fs::remove_file(&file);
                Ok(())
            }
        }
    }

    fn partitioned(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.partitioned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the kubelets of the nodes that reach the cloud.
    async fn run_kubelets(&self) -> Result<()> {
        loop {
            for node in &self.nodes {
                let is_partitioned = self.partitioned().contains(&node.name);
                if !is_partitioned {
                    self.replace_bundle(&node.name).await?;
                }
            }
            sleep(KUBELET_LAG).await;
        }
    }

    fn partition(&self, name: &str) -> Result<()> {
        self.partitioned().insert(name.to_owned());
        for link in &self.node(name)?.links {
            link.set(TrafficClass::ALL, Impairment::black_hole());
        }
        Ok(())
    }

    fn heal(&self, name: &str) -> Result<()> {
        self.partitioned().remove(name);
        self.node(name)?.links.iter().for_each(Link::heal);
        Ok(())
    }

    /// Opens the ports of the exporters to callers.
    async fn open_ports(&self) -> Result<()> {
        let ports = self.nodes.iter().map(|node| node.exporter.addr().port());
        let ports: Vec<_> = ports.map(|port| port.to_string()).collect();
        let list = ports.join(",");
        let lists = [("http-proxy-ports", list.as_str())];
        self.cluster_env.objects().set_ports(&lists).await
    }

    fn host(&self, name: &str) -> Result<String> {
        let port = self.node(name)?.exporter.addr().port();
        Ok(format!("{name}:{port}"))
    }

    /// Waits until one of the servers reaches the node.
    async fn wait_until_served(&self, servers: &[Server], name: &str) -> Result<()> {
        let host = self.host(name)?;
        eventually(&format!("{host} is served"), BACK, async || {
            let mut failures = Vec::new();
            for server in servers {
                match server.get_ok(&host, "/metrics").await {
                    Ok(_page) => return Ok(()),
                    Err(failure) => failures.push(format!("{failure:#}")),
                }
            }
            Err(failures.join("; "))
        })
        .await;
        Ok(())
    }
}

/// Runs the scenario together with the kubelets.
async fn with_kubelets(
    daemon_set: &DaemonSet<'_>,
    scenario: impl Future<Output = Result<()>>,
) -> Result<()> {
    tokio::select! {
        ended = scenario => ended,
        failed = daemon_set.run_kubelets() => failed,
    }
}

async fn verb(server: &Server, arguments: &[&str]) -> Result<String> {
    server.verb(arguments)?.run().await?.ok()
}

/// Agents renew certificates of this lifetime about every four seconds.
const SHORT_LIFE: &str = "limits: { certificateLife: 8s }\n";

async fn ca_is_replaced_three_times_under_requests_and_a_partitioned_agent_comes_back_by_itself(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.create_service(GUIDE_IP).await?;
    let limits = cluster_env.scratch.file("limits.yaml", SHORT_LIFE)?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let setup = setup.args(&["--config", &limits.to_string_lossy()]);
    let server = setup.start().await?;
    cluster_env.wait_for_bundle().await;
    let nodes = ["worker-1", "worker-2", "worker-3"];
    let daemon_set = DaemonSet::start(&cluster_env, &[&server], &nodes).await?;
    daemon_set.open_ports().await?;
    for node in nodes {
        daemon_set
            .wait_until_served(slice::from_ref(&server), node)
            .await?;
    }
    let old = cluster_env.objects().secret(&ca_secret()).await?;
    let scenario = async {
        daemon_set.partition("worker-3")?;
        let hosts = [daemon_set.host("worker-1")?, daemon_set.host("worker-2")?];
        let load = Load::start(server.address(Listener::Http).into(), &hosts, 1).await?;
        let began = Instant::now();
        for _ in 0..ROTATIONS {
            verb(&server, &["ca", "rotate"]).await?;
            for _ in 0..2 {
                // The command is refused while an agent is pending.
                let next = eventually("the next stage", RENEWAL, async || {
                    verb(&server, &["ca", "rotate", "--next"]).await
                });
                let printed = next.await;
                let is_last = printed.contains("stage: none");
                let says = printed.contains("left behind") && printed.contains("1 without a valid");
                ensure!(!is_last || says, "{printed}");
            }
        }
        let (took, outcome) = (began.elapsed(), load.end().await?);
        report_figure(&format!(
            "{ROTATIONS} rotations in {took:.0?} under {:.0} requests/s, {} failed",
            outcome.answered as f64 / took.as_secs_f64(),
            outcome.failures.len(),
        ));
        outcome.check()?;
        daemon_set.heal("worker-3")?;
        daemon_set
            .wait_until_served(slice::from_ref(&server), "worker-3")
            .await?;
        let new = cluster_env.objects().secret(&ca_secret()).await?;
        let leaf = cluster_env
            .scratch
            .path()
            .join("agent-worker-3-0/agent.crt");
        eventually("a certificate of the new CA on disk", RENEWAL, async || {
            let leaf = std::fs::read(&leaf)?;
            ensure!(is_of(&leaf, new["ca.crt"].as_bytes())?, "another CA");
            ensure!(!is_of(&leaf, old["ca.crt"].as_bytes())?, "the old CA");
            Ok(())
        })
        .await;
        server.wait_until_connected(&nodes).await;
        Ok(())
    };
    with_kubelets(&daemon_set, scenario).await
}

/// The certificates are valid for 30 days, so that servers refuse them for their CA alone. The
/// kubelets replace the files only after the last step.
async fn agents_that_a_forced_rotation_leaves_behind_are_named_and_enroll_again_by_themselves(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.create_service(GUIDE_IP).await?;
    let setup = cluster_env.setup("a")?.args(&["--single-replica"]);
    let server = setup.start().await?;
    cluster_env.wait_for_bundle().await;
    let nodes = ["worker-1", "worker-2"];
    let daemon_set = DaemonSet::start(&cluster_env, &[&server], &nodes).await?;
    daemon_set.open_ports().await?;
    server.wait_until_connected(&nodes).await;
    daemon_set.partition("worker-2")?;
    verb(&server, &["ca", "rotate"]).await?;
    let refused = server.verb(&["ca", "rotate", "--next"])?.run().await?;
    refused.ensure_failed(1, &["2", "--force"])?;
    for _ in 0..2 {
        let printed = verb(&server, &["ca", "rotate", "--next", "--force"]).await?;
        let named = [
            "left behind: 2 agents",
            "worker-1",
            "worker-2",
            "ServiceAccount token",
        ];
        for words in named {
            ensure!(printed.contains(words), "{words}: {printed}");
        }
    }
    let agent = daemon_set.node("worker-1")?.agent.log();
    eventually("attempts with the old roots", BACK, async || {
        ensure!(agent.contains("enrolling again with the token"));
        ensure!(agent.contains("UnknownIssuer"));
        Ok(())
    })
    .await;
    let scenario = async {
        daemon_set
            .wait_until_served(slice::from_ref(&server), "worker-1")
            .await?;
        daemon_set.heal("worker-2")?;
        daemon_set
            .wait_until_served(slice::from_ref(&server), "worker-2")
            .await
    };
    with_kubelets(&daemon_set, scenario).await
}

/// The commands of the section of the guide, in a cluster with two servers. A Deployment has no
/// controller here, so the test starts and stops the servers that `kubectl scale` means.
async fn new_ca_by_the_commands_of_the_guide_ends_with_all_servers_ready_and_all_agents_back(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let Some(programs) = or_skip(kubectls()) else {
        return Ok(());
    };
    let program = programs.into_iter().next_back().context("no kubectl")?;
    let kubectl = Kubectl::new(program, cluster_env.cluster.admin_kubeconfig()?)?;
    cluster_env.create_service(GUIDE_IP).await?;
    let mut servers = vec![
        cluster_env.server("a").await?,
        cluster_env.server("b").await?,
    ];
    cluster_env.wait_for_bundle().await;
    let nodes = ["worker-1", "worker-2", "worker-3"];
    let running: Vec<_> = servers.iter().collect();
    let daemon_set = DaemonSet::start(&cluster_env, &running, &nodes).await?;
    daemon_set.open_ports().await?;
    for node in nodes {
        daemon_set.wait_until_served(&servers, node).await?;
    }
    verb(&servers[0], &["nodes", "revoke", "worker-3"]).await?;
    let revocations = ObjectNames::default().revocations_secret;
    eventually("the revocation in the Secret", FIRST, async || {
        let secret = cluster_env.objects().secret(&revocations).await?;
        ensure!(secret.values().any(|text| text.contains("worker-3")));
        Ok(())
    })
    .await;
    let old = cluster_env.objects().secret(&ca_secret()).await?;
    let scenario = async {
        let mut stopped = Vec::new();
        for command in commands_of_new_ca()? {
            match command.as_str() {
                "-n kube-system scale deploy/tunnel-server --replicas=0" => {
                    for server in servers.drain(..) {
                        stopped.push(server.setup_for_restart());
                        server.into_process().stop(STOP).await?;
                    }
                    // The data directory of a pod goes with it.
                    for name in ["a", "b"] {
                        std::fs::remove_dir_all(cluster_env.scratch.path().join(name))?;
                    }
                }
                "-n kube-system scale deploy/tunnel-server --replicas=2" => {
                    for setup in stopped.drain(..) {
                        servers.push(setup.start().await?);
                    }
                }
                // The pods have gone.
                command if command.contains(" wait --for=delete pod ") => {}
                command => drop(kubectl.ok(&command.replace('\'', "")).await?),
            }
        }
        ensure!(servers.len() == 2, "the guide starts no servers");
        for server in &servers {
            eventually("a server is ready", FIRST, async || {
                let ready = RawRequest::get("meta", "/readyz");
                let reply = request(server.address(Listener::Meta), &ready).await?;
                ensure!(reply.status == 200, "{}", reply.text());
                anyhow::Ok(())
            })
            .await;
        }
        let new = cluster_env.objects().secret(&ca_secret()).await?;
        ensure!(new["ca.crt"] != old["ca.crt"], "the old CA is in use");
        for node in ["worker-1", "worker-2"] {
            daemon_set.wait_until_served(&servers, node).await?;
        }
        for server in &servers {
            let revocations = verb(server, &["nodes", "revocations"]).await?;
            ensure!(revocations.contains("worker-3"), "{revocations}");
            let listed = server.nodes().await?;
            let is_away = |node: &Value| node["node"] != "worker-3" || node["connected"] == false;
            ensure!(listed.iter().all(is_away), "{listed:?}");
        }
        Ok(())
    };
    with_kubelets(&daemon_set, scenario).await
}

/// Returns the arguments of `kubectl` in the section about a cluster.
fn commands_of_new_ca() -> Result<Vec<String>> {
    let text = page("docs/how-to/replace-ca.md")?;
    let blocks = blocks(&text).into_iter();
    let blocks = blocks.filter(|block| block.runner() == Some("daemonset"));
    let lines = blocks.flat_map(|block| {
        let lines: Vec<_> = block.text.lines().map(str::to_owned).collect();
        lines
    });
    let commands = lines.filter_map(|line| line.strip_prefix("kubectl ").map(str::to_owned));
    let commands: Vec<_> = commands.collect();
    ensure!(commands.len() >= 4, "{commands:?}");
    Ok(commands)
}

async fn revoked_node_gets_no_certificate_with_the_token_of_a_new_pod_until_it_is_unrevoked(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.create_service(GUIDE_IP).await?;
    let server = cluster_env.server("a").await?;
    cluster_env.wait_for_bundle().await;
    let mut daemon_set = DaemonSet::start(&cluster_env, &[&server], &["worker-1"]).await?;
    server.wait_until_connected(&["worker-1"]).await;
    let printed = verb(&server, &["nodes", "revoke", "worker-1"]).await?;
    ensure!(
        printed.contains("until 'tunnel-server nodes unrevoke NAME'"),
        "{printed}"
    );
    server.wait_until_connected(&[]).await;
    let refusals = "tunnel_server_enrollments_total{result=\"revoked\"}";
    for _ in 0..2 {
        let before = server.metric(refusals).await?;
        daemon_set.replace_pod("worker-1").await?;
        eventually("the refusal of a new pod", BACK, async || {
            ensure!(server.metric(refusals).await? > before);
            Ok(())
        })
        .await;
        server.wait_until_connected(&[]).await;
    }
    verb(&server, &["nodes", "unrevoke", "worker-1"]).await?;
    daemon_set.replace_pod("worker-1").await?;
    server.wait_until_connected(&["worker-1"]).await;
    Ok(())
}

/// ServiceAccount of the DaemonSet.
const ACCOUNT: &str = "tunnel-agent";
const ROTATIONS: usize = 3;
/// Longer than the drain of a server.
const STOP: Duration = Duration::from_secs(45);
/// Time between two looks of a kubelet at the ConfigMap.
const KUBELET_LAG: Duration = Duration::from_millis(300);
/// Longest time for which an agent stays out after the way back is free.
const BACK: Duration = Duration::from_secs(40);
/// Longer than a renewal, also in a stage that begins again 40 s later because the server itself followed late.
const RENEWAL: Duration = Duration::from_secs(120);
