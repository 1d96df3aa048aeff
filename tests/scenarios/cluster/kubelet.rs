//! A real kubelet behind NAT whose only way to the API server is the tunnel, by which the API server
//! also reaches the kubelet.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::cluster::{
    AuditLog, Families, Kubelet, KubeletCallers, KubeletHost, Real, egress_flag,
};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Edge, Namespace, Topology};
use tunnel_tests::process::{
    AgentSetup, Listener, Process, Program, ScratchDir, Server, ServerSetup,
};
use tunnel_tests::tools::{Skip, Tool, bin_dir, or_skip};

use super::edge_clients::loopback_listener;
use super::kubectl::{Kubectl, kubectls};

#[tokio::test(flavor = "multi_thread")]
async fn kubelet_and_pod_behind_nat_use_the_api_server_and_serve_logs_and_exec() -> Result<()> {
    let Some(site) = or_skip(Site::new()) else {
        return Ok(());
    };
    let (cloud, [edge, _]) = (site.sites.cloud(), site.sites.edges());
    let scratch = ScratchDir::new()?;
    let socket = scratch.path().join("connect.sock");
    let audit = AuditLog::new()?;
    let api = api_server(&site.binaries, &socket, &audit, cloud).await?;
    let mut kubeconfig: Value = serde_json::from_slice(&std::fs::read(api.admin_kubeconfig())?)?;
    let cluster = &mut kubeconfig["clusters"][0]["cluster"];
    let ca = cluster["certificate-authority"].as_str();
    let ca = ca.context("no CA")?.to_owned();
    let target = cluster["server"].as_str();
    let target = target.and_then(|url| url.strip_prefix("https://"));
    let server = ServerSetup::new(&scratch.path().join("server"), Some(cloud))
        .args(&["--connect-uds", &socket.to_string_lossy()])
        .args(&["--cloud-apiserver", target.context("no server")?])
        .start()
        .await?;
    let (_agent, listener) = agent(&server, edge, scratch.path()).await?;
    cluster["server"] = format!("https://{listener}").into();
    cluster["tls-server-name"] = "kubernetes.default.svc".into();
    let kubeconfig = scratch.file("kubelet.kubeconfig", kubeconfig.to_string())?;
    let host = KubeletHost {
        node: edge.node_name(),
        ip: EDGE_ADDRESS,
        namespace: Some(edge.node()),
        callers: KubeletCallers::Anyone,
    };
    let _kubelet = Kubelet::start(&site.kubelet, &host, &kubeconfig).await?;

    let operator = Kubectl::new(site.kubectl.clone(), api.admin_kubeconfig())?;
    let operator = Operator {
        kubectl: operator,
        namespace: cloud,
    };
    let node = edge.node_name();
    operator.wait_until_ready(&format!("node/{node}")).await;
    operator.create(&pod("web", node, &web())).await?;
    operator.wait_until_ready("pod/web").await;
    operator.logs_and_exec().await?;
    let on_the_edge = Operator {
        kubectl: Kubectl::new(site.kubectl, kubeconfig)?,
        namespace: edge.node(),
    };
    on_the_edge.logs_and_exec().await?;
    redirect_pods(edge).await?;
    operator.start_client(node, &ca).await?;
    let events = audit.events_of("default", "client")?;
    let is_create = |event: &Value| event["verb"] == "create";
    ensure!(events.iter().any(is_create), "{events:?}");

    let lease = format!("get lease -n kube-node-lease {node} -o jsonpath={{.spec.renewTime}}");
    eventually("the first Lease", TIMEOUT, async || {
        operator.ok(&lease).await.map(|_| ())
    })
    .await;
    let setup = server.setup_for_restart();
    server.into_process().kill().await?;
    let before = operator.ok(&lease).await?;
    operator.ok("create configmap meanwhile").await?;
    let _server = setup.start().await?;
    eventually("a renewed Lease after the restart", TIMEOUT, async || {
        let now = operator.ok(&lease).await?;
        ensure!(now != before, "{now}");
        Ok(())
    })
    .await;
    eventually("logs after the restart", TIMEOUT, async || {
        operator.logs_and_exec().await
    })
    .await;
    operator.wait_until_client_sees("meanwhile").await;
    operator.ok("delete pod web client --timeout=30s").await?;
    Ok(())
}

/// Starts an agent with listeners for the API server, one for programs of the host and one for Pods.
/// Returns the agent and the address of the former.
async fn agent(server: &Server, edge: &Edge, folder: &Path) -> Result<(Process, SocketAddr)> {
    let node = edge.node_name();
    let token = server.token(node, Some(EDGE_ADDRESS.into())).await?;
    let port = server.address(Listener::Agents).port();
    let endpoint = SocketAddr::new(CLOUD_ADDRESS.into(), port);
    let agent = AgentSetup::new(node, endpoint, &folder.join("agent"), Some(edge.node()))
        .args(&["--token", &token])
        .args(&["--cloud-listen", "apiserver=127.0.0.1:0"])
        .args(&["--cloud-listen", "apiserver=169.254.2.1:10268"])
        .start()?;
    let listener = agent.log().find(loopback_listener).await;
    server.wait_until_connected(&[node]).await;
    Ok((agent, listener))
}

/// Leads Pods of the edge that dial the Service `kubernetes` to the agent.
async fn redirect_pods(edge: &Edge) -> Result<()> {
    let agent = || Program::ours("tunnel-agent");
    let add = agent()?.args(["address", "add", "169.254.2.1"]);
    add.inside(Some(edge.node())).run().await?.ok()?;
    let render = agent()?.args(["render", "edge-apiserver", "--way", "nft"]);
    let render = render.args(["--service-ip", "10.96.0.1"]);
    let rules = render.run().await?.ok()?;
    let nft = Program::tool(Tool::Nft)?.args(["-f", "-"]);
    let nft = nft.inside(Some(edge.node()));
    nft.run_with(rules.as_bytes()).await?.ok().map(drop)
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
    audit: &AuditLog,
    cloud: &Namespace,
) -> Result<Real> {
    let scratch = ScratchDir::new()?;
    let mut flags = audit.flags().to_vec();
    flags.push(egress_flag(&scratch, socket)?);
    Real::start_with(binaries, Families::V4, &flags, Some(cloud)).await
}

/// kubectl in the cloud or on the edge.
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

/// A container that logs a line and has a script that ends with code 7.
pub(super) fn web() -> Value {
    json!({ "command": ["sh", "-c", "echo 'exit 7' >/exit; echo started; sleep 1000000"] })
}

/// A Pod on the network of its node, of a container with these fields.
pub(super) fn pod(name: &str, node: &str, container: &Value) -> Value {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "nodeName": node, "hostNetwork": true, "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": 0, "tolerations": [{ "operator": "Exists" }],
            "containers": [container],
        },
    });
    let container = &mut pod["spec"]["containers"][0];
    container["name"] = "app".into();
    container["image"] = Kubelet::IMAGE.into();
    container["imagePullPolicy"] = "Never".into();
    pod
}

impl Operator<'_> {
    /// Starts the Pod `client` with the files of a ServiceAccount and kube's default configuration,
    /// and waits until it has seen the ConfigMap that it creates.
    async fn start_client(&self, node: &str, ca: &str) -> Result<()> {
        for line in [
            "create serviceaccount client",
            "create role client --verb=get,list,watch,create,delete --resource=configmaps",
            "create rolebinding client --role=client --serviceaccount=default:client",
            &format!("create configmap ca --from-file=ca.crt={ca}"),
        ] {
            self.ok(line).await?;
        }
        let binaries = bin_dir().context("folder of the binaries")?;
        let account = "/var/run/secrets/kubernetes.io/serviceaccount";
        let folders = [
            ("binaries", binaries.as_path(), "/binaries"),
            ("usr", Path::new("/usr"), "/usr"),
            ("lib", Path::new("/usr/lib"), "/lib"),
            ("lib64", Path::new("/usr/lib64"), "/lib64"),
        ];
        let mut mounts = vec![json!({ "name": "account", "mountPath": account })];
        let mut volumes = vec![json!({ "name": "account", "projected": { "sources": [
            { "serviceAccountToken": { "path": "token" } },
            { "configMap": { "name": "ca" } },
            { "downwardAPI": { "items": [
                { "path": "namespace", "fieldRef": { "fieldPath": "metadata.namespace" } },
            ] } },
        ] } })];
        for (name, path, target) in folders {
            mounts.push(json!({ "name": name, "mountPath": target, "readOnly": true }));
            volumes.push(json!({ "name": name, "hostPath": { "path": path } }));
        }
        let container =
            json!({ "command": ["/binaries/informer", "from-the-pod"], "volumeMounts": mounts });
        let mut pod = pod("client", node, &container);
        pod["spec"]["serviceAccountName"] = "client".into();
        pod["spec"]["volumes"] = volumes.into();
        self.create(&pod).await?;
        self.wait_until_client_sees("from-the-pod").await;
        Ok(())
    }

    async fn wait_until_client_sees(&self, object: &str) {
        eventually(&format!("{object} at the Pod"), TIMEOUT, async || {
            let printed = self.ok("logs client").await?;
            ensure_contains(&printed, &[&format!("applied {object}")])
        })
        .await;
    }
}

const TIMEOUT: Duration = Duration::from_secs(60);
