//! A real kubelet behind NAT whose only way to the API server is the tunnel, by which the API server
//! also reaches the kubelet.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::cluster::{Families, Kubelet, Real};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Namespace, Topology};
use tunnel_tests::process::{AgentSetup, Listener, Program, ScratchDir, ServerSetup};
use tunnel_tests::tools::{Skip, or_skip};

use super::kubectl::{Kubectl, kubectls};

#[tokio::test(flavor = "multi_thread")]
async fn a_kubelet_behind_nat_is_ready_and_serves_logs_and_exec() -> Result<()> {
    let Some(site) = or_skip(Site::new()) else {
        return Ok(());
    };
    let (cloud, [edge, _]) = (site.sites.cloud(), site.sites.edges());
    let scratch = ScratchDir::new()?;
    let socket = scratch.path().join("connect.sock");
    let api = api_server(&site.binaries, &socket, &scratch, cloud).await?;
    let mut kubeconfig: Value = serde_json::from_slice(&std::fs::read(api.admin_kubeconfig())?)?;
    let url = &kubeconfig["clusters"][0]["cluster"]["server"];
    let target = url.as_str().and_then(|url| url.strip_prefix("https://"));
    let server = ServerSetup::new(&scratch.path().join("server"), Some(cloud))
        .args(&["--connect-uds", &socket.to_string_lossy()])
        .args(&["--cloud-apiserver", target.context("no server")?])
        .start()
        .await?;
    let node = edge.node_name();
    let token = server.token(node, Some(EDGE_ADDRESS.into())).await?;
    let endpoint = SocketAddr::new(
        CLOUD_ADDRESS.into(),
        server.address(Listener::Agents).port(),
    );
    let folder = scratch.path().join("agent");
    let agent = AgentSetup::new(node, endpoint, &folder, Some(edge.node()))
        .args(&["--token", &token])
        .args(&["--cloud-listen", "apiserver=127.0.0.1:0"])
        .start()?;
    let listener = agent.log().find(|line| Listener::Cloud.opened(line)).await;
    server.wait_until_connected(&[node]).await;

    let cluster = &mut kubeconfig["clusters"][0]["cluster"];
    cluster["server"] = format!("https://{listener}").into();
    cluster["tls-server-name"] = "kubernetes.default.svc".into();
    let kubeconfig = scratch.file("kubelet.kubeconfig", kubeconfig.to_string())?;
    let ip = EDGE_ADDRESS.to_string();
    let _kubelet = Kubelet::start(&site.kubelet, edge, &kubeconfig, &ip).await?;

    let kubectl = Operator {
        kubectl: Kubectl::new(site.kubectl, api.admin_kubeconfig())?,
        namespace: cloud,
    };
    kubectl.wait_until_ready(&format!("node/{node}")).await;
    kubectl.create(&pod(node)).await?;
    kubectl.wait_until_ready("pod/web").await;
    kubectl.logs_and_exec().await?;

    let lease = format!("get lease -n kube-node-lease {node} -o jsonpath={{.spec.renewTime}}");
    eventually("the first Lease", TIMEOUT, async || {
        kubectl.ok(&lease).await.map(|_| ())
    })
    .await;
    let setup = server.setup_for_restart();
    server.into_process().kill().await?;
    let before = kubectl.ok(&lease).await?;
    let _server = setup.start().await?;
    eventually("a renewed Lease after the restart", TIMEOUT, async || {
        let now = kubectl.ok(&lease).await?;
        ensure!(now != before, "{now}");
        Ok(())
    })
    .await;
    eventually("logs after the restart", TIMEOUT, async || {
        kubectl.logs_and_exec().await
    })
    .await;
    kubectl.ok("delete pod web --timeout=30s").await?;
    Ok(())
}

/// What the scenario needs of the machine.
struct Site {
    binaries: PathBuf,
    kubelet: PathBuf,
    kubectl: PathBuf,
    sites: Topology,
}

impl Site {
    fn new() -> Result<Self, Skip> {
        let binaries = Real::binaries()?;
        let own = binaries.join("kubectl");
        Ok(Self {
            kubelet: Kubelet::binary(&binaries)?,
            kubectl: if own.is_file() {
                own
            } else {
                kubectls()?.swap_remove(0)
            },
            sites: Topology::new()?,
            binaries,
        })
    }
}

/// Starts an API server that reaches kubelets over the CONNECT listener `socket`.
async fn api_server(
    binaries: &Path,
    socket: &Path,
    scratch: &ScratchDir,
    cloud: &Namespace,
) -> Result<Real> {
    let selector = Program::ours("tunnel-server")?
        .args(["render", "egress-selector", "--uds"])
        .arg(socket)
        .run()
        .await?
        .ok()?;
    let selector = scratch.file("egress.yaml", selector)?;
    let flag = format!("--egress-selector-config-file={}", selector.display());
    Real::start_with(binaries, Families::V4, &[flag], Some(cloud)).await
}

/// kubectl in the cloud.
struct Operator<'a> {
    kubectl: Kubectl,
    namespace: &'a Namespace,
}

impl Operator<'_> {
    fn program(&self, line: &str) -> Program {
        self.kubectl.program(line).inside(Some(self.namespace))
    }

    async fn ok(&self, line: &str) -> Result<String> {
        self.program(line).run().await?.ok()
    }

    async fn create(&self, object: &Value) -> Result<String> {
        let object = object.to_string();
        let created = self.program("create -f -").run_with(object.as_bytes());
        created.await?.ok()
    }

    async fn wait_until_ready(&self, object: &str) {
        let line = format!("get {object} -o json");
        eventually(&format!("{object} to be ready"), TIMEOUT, async || {
            let found: Value = serde_json::from_str(&self.ok(&line).await?)?;
            let conditions = found["status"]["conditions"].as_array();
            let ready = conditions
                .into_iter()
                .flatten()
                .any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
            ensure!(ready, "{}", found["status"]);
            Ok(())
        })
        .await;
    }

    async fn logs_and_exec(&self) -> Result<()> {
        ensure_contains(&self.ok("logs web").await?, &["started"])?;
        let exec = self.program("exec web -- sh /exit").run().await?;
        exec.ensure_failed(7, &[])
    }
}

/// A Pod whose container logs a line and has a script that ends with code 7.
fn pod(node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web" },
        "spec": {
            "nodeName": node, "hostNetwork": true, "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0, "tolerations": [{ "operator": "Exists" }],
            "containers": [{
                "name": "app", "image": Kubelet::IMAGE, "imagePullPolicy": "Never",
                "command": ["sh", "-c", "echo 'exit 7' >/exit; echo started; sleep 1000000"],
            }],
        },
    })
}

const TIMEOUT: Duration = Duration::from_secs(60);
