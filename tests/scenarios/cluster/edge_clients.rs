//! Clients on an edge reach the API server through the tunnel, over a listener of their agent.

mod behind_nat;
mod pods;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::checks::get_ok;
use tunnel_tests::cluster::Cluster;
use tunnel_tests::eventually::eventually;
use tunnel_tests::process::{Listener, Process, Program, ScratchDir, Server, ServerSetup};
use tunnel_tests::targets::Exporter;
use tunnel_tests::tools::or_skip;

use super::ClusterEnv;
use super::kubectl::{Kubectl, kubectls};

on_both!(
    kubectl_of_an_edge_reads_writes_and_watches_the_api_server,
    label_of_the_node_grants_a_target_and_its_removal_refuses_new_streams,
);

/// A server that offers the API server of a cluster to its agents, and an agent with a listener for
/// it.
struct EdgePair {
    server: Server,
    _agent: Process,
    kubeconfig: PathBuf,
    _scratch: ScratchDir,
}

impl EdgePair {
    /// Starts both, with further arguments of their `run`.
    async fn start(
        cluster: &Cluster,
        transport: &str,
        server_args: &[&str],
        agent_args: &[&str],
    ) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let mut kubeconfig: Value =
            serde_json::from_slice(&std::fs::read(cluster.admin_kubeconfig()?)?)?;
        let api = kubeconfig["clusters"][0]["cluster"]["server"]
            .as_str()
            .and_then(|url| url.strip_prefix("https://"))
            .context("a server")?
            .to_owned();
        let server = ServerSetup::on_loopback(&scratch.path().join("server"))
            .args(&["--cloud-apiserver", &api])
            .args(server_args)
            .start()
            .await?;
        let setup = server
            .agent_setup("worker-1", &scratch.path().join("agent"))
            .await?
            .args(&["--transport", transport])
            .args(&["--cloud-listen", "apiserver=127.0.0.1:0"])
            .args(agent_args);
        let agent = setup.start()?;
        let listener = agent.log().find(loopback_listener).await;
        server.wait_until_connected(&["worker-1"]).await;
        let cluster = &mut kubeconfig["clusters"][0]["cluster"];
        cluster["server"] = format!("https://{listener}").into();
        cluster["tls-server-name"] = "kubernetes.default.svc".into();
        let kubeconfig = scratch.file("kubeconfig", kubeconfig.to_string())?;
        Ok(Self {
            server,
            _agent: agent,
            kubeconfig,
            _scratch: scratch,
        })
    }
}

/// Returns the address in the line of an agent that reports its loopback listener for a target of the
/// cloud.
pub(super) fn loopback_listener(line: &str) -> Option<SocketAddr> {
    let opened = Listener::Cloud.opened(line);
    opened.filter(|address| address.ip().is_loopback())
}

async fn kubectl_of_an_edge_reads_writes_and_watches_the_api_server(
    cluster_env: ClusterEnv,
) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    for transport in ["quic", "h2"] {
        let pair = EdgePair::start(&cluster_env.cluster, transport, &[], &[]).await?;
        for (number, file) in files.iter().enumerate() {
            let kubectl = Kubectl::new(file.clone(), pair.kubeconfig.clone())?;
            let name = format!("{transport}-{number}");
            let mut watch = kubectl.program("get configmaps --watch -o name").start()?;
            let created = format!("create configmap {name} --from-literal=a=1");
            kubectl.ok(&created).await?;
            let line = format!("configmap/{name}");
            watch
                .wait_for_line("event", LONG, |found| (found == line).then_some(()))
                .await?;
            let read = kubectl.ok(&format!("get configmap {name} -o name")).await?;
            ensure!(read.trim() == line, "{read}");
            kubectl.ok(&format!("delete configmap {name}")).await?;
            watch.kill().await?;
        }
    }
    Ok(())
}

async fn label_of_the_node_grants_a_target_and_its_removal_refuses_new_streams(
    cluster_env: ClusterEnv,
) -> Result<()> {
    cluster_env.guide().await?;
    let registry = Exporter::start("registry").await?;
    let target = registry.addr();
    let settings =
        format!("cloud: [{{ name: registry, target: '{target}', label: {LABEL}=true }}]");
    let file = cluster_env.scratch.file("server.yaml", settings)?;
    let file = file.to_string_lossy();
    let setup = cluster_env.setup("a")?.args(&["--config", &file]);
    let server = setup.start().await?;
    let folder = cluster_env.scratch.path().join("agent");
    let setup = server.agent_setup("worker-1", &folder).await?;
    let agent = setup.args(&["--cloud-listen", "registry=127.0.0.1:0"]);
    let agent = agent.start()?;
    let local = agent.log().find(loopback_listener).await;
    server.wait_until_connected(&["worker-1"]).await;
    for (value, is_granted) in [
        (json!(null), false),
        (json!("true"), true),
        (json!("false"), false),
        (json!("true"), true),
        (json!(null), false),
    ] {
        let patch = json!({ "metadata": { "labels": { LABEL: value } } });
        let path = "/api/v1/nodes/worker-1";
        cluster_env.admin().merge(path, &patch).await?;
        let what = format!("the effect of {patch}");
        eventually(&what, LONG, async || {
            let answer = get_ok(local, "registry", "/metrics").await;
            ensure!(answer.is_ok() == is_granted, "{answer:?}");
            anyhow::Ok(())
        })
        .await;
    }
    let is_refused = |line: &str| {
        line.contains("\"code\":\"refused_by_policy\"")
            .then_some(())
    };
    server.log().find(is_refused).await;
    Ok(())
}

#[tokio::test]
async fn label_without_a_cluster_is_a_configuration_error() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let settings = format!("cloud: [{{ name: a, target: 'a:1', label: {LABEL}=true }}]");
    let file = scratch.file("server.yaml", settings)?;
    let check = Program::ours("tunnel-server")?.args(["check-config", "--kubernetes", "off"]);
    let check = check.arg("--data-dir").arg(scratch.path());
    let finished = check.arg("--config").arg(file).run().await?;
    finished.ensure_failed(64, &["cloud: a: label: needs a cluster"])
}

/// A label that kubelets cannot set.
const LABEL: &str = "node-restriction.kubernetes.io/registry";
const LONG: Duration = Duration::from_secs(30);
