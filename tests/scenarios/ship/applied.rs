//! End-to-end test of the manifests. kubectl applies `install.yaml`, and both programs run with the
//! arguments, environment, mounts and user of the applied objects. In their networks the Services
//! lead to the ports that the objects name. The only credential of the agent is its pod's token.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::client::{EgressDialer, ask_through};
use tunnel_tests::eventually::eventually;
use tunnel_tests::fakes::{ApiServer, api_server, edge_sites};
use tunnel_tests::manifests::{
    ADDRESS_PLACEHOLDER, Container, Facts, find, folder, items, overlay, pod_program, render,
    set_address,
};
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Namespace, Topology};
use tunnel_tests::process::{Finished, Process, Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip, require};

use crate::cluster::kustomizers;

/// A cluster of processes: an API server, kubectl, and network namespaces.
struct ShipFixture {
    api: ApiServer,
    kubectl: PathBuf,
    sites: Topology,
    scratch: ScratchDir,
}

impl ShipFixture {
    async fn start() -> Result<Option<Self>> {
        let tools = require(&[Tool::Curl, Tool::Nft, Tool::Unshare]);
        let programs = tools.and_then(|()| kustomizers());
        let sites = programs.and_then(|files| Ok((files, Topology::new()?)));
        let Some((files, sites)) = or_skip(sites) else {
            return Ok(None);
        };
        let api = api_server(sites.cloud(), "kube-system/tunnel-server").await?;
        Ok(Some(Self {
            api,
            kubectl: files.into_iter().next().context("one at least")?,
            sites,
            scratch: ScratchDir::new()?,
        }))
    }

    async fn kubectl(&self, words: &[&str]) -> Result<String> {
        let program = Program::at(&self.kubectl)
            .env("KUBECONFIG", &self.api.admin)
            .env("HOME", self.scratch.path())
            .args(words.iter().copied());
        program.inside(Some(self.sites.cloud())).run().await?.ok()
    }

    async fn create(&self, object: &Value) -> Result<()> {
        let file = self.scratch.file("object.json", object.to_string())?;
        let file = file.to_string_lossy();
        self.kubectl(&["create", "-f", &file]).await.map(drop)
    }

    /// Creates the ConfigMap that a controller writes in every cluster.
    async fn create_root_ca(&self) -> Result<()> {
        let cluster = kubeconfig(&self.api.admin)?["clusters"][0]["cluster"].clone();
        let ca = cluster["certificate-authority"].as_str().context("a CA")?;
        let ca = std::fs::read_to_string(ca)?;
        self.create(&config_map("kube-root-ca.crt", &ca)).await
    }

    /// Returns the relevant objects from the API server.
    async fn objects(&self) -> Result<Vec<Value>> {
        let kinds = "deployments,daemonsets,configmaps,secrets,services";
        let get = ["-n", "kube-system", "get", kinds, "-o", "json"];
        let list: Value = serde_json::from_str(&self.kubectl(&get).await?)?;
        Ok(items(&list["items"]).cloned().collect())
    }

    /// Installs the rules that kube-proxy would write for Services whose only endpoint is the
    /// cloud's address.
    async fn proxy(&self) -> Result<()> {
        let mut rules = String::new();
        let mut services = self.objects().await?;
        // kube-proxy writes no rules for headless Services.
        services
            .retain(|object| object["kind"] == "Service" && object["spec"]["clusterIP"] != "None");
        for service in services {
            let address = service["spec"]["clusterIP"].as_str().context("clusterIP")?;
            for port in items(&service["spec"]["ports"]) {
                let protocol = port["protocol"].as_str().context("protocol")?;
                let protocol = protocol.to_lowercase();
                let to = format!("dnat to {CLOUD_ADDRESS}:{}", port["targetPort"]);
                rules.push_str(&format!(
                    "add rule ip services output ip daddr {address} {protocol} dport {} {to}\n",
                    port["port"]
                ));
                if let Some(node_port) = port["nodePort"].as_u64() {
                    rules.push_str(&format!(
                        "add rule ip services prerouting {protocol} dport {node_port} {to}\n"
                    ));
                }
            }
        }
        let script = format!(
            "$IP route replace default dev lo src {CLOUD_ADDRESS}
$NFT -f - <<'RULES'
table ip services
delete table ip services
add table ip services
add chain ip services output {{ type nat hook output priority -100; }}
add chain ip services prerouting {{ type nat hook prerouting priority -100; }}
{rules}RULES"
        );
        self.sites.cloud().script(&script).context("services")?;
        Ok(())
    }

    /// Starts the container of an applied workload.
    async fn start_pod(
        &self,
        (kind, name): (&str, &str),
        namespace: &Namespace,
        facts: &Facts,
        token: &str,
    ) -> Result<Option<Process>> {
        let objects = self.objects().await?;
        let container = Container::of(find(&objects, kind, name)?, &objects, facts)?;
        let root = self.scratch.path().join(name);
        let program = pod_program(&container, (&root, namespace), &objects, token)?;
        let Some(program) = or_skip(program) else {
            return Ok(None);
        };
        let api = kubeconfig(&self.api.admin)?["clusters"][0]["cluster"]["server"].clone();
        let api = api.as_str().and_then(|url| url.rsplit_once(':'));
        let (_, port) = api.context("the API server has a port")?;
        // Every container of a cluster has these two variables.
        let program = program
            .env("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            .env("KUBERNETES_SERVICE_PORT", port);
        program.start().map(Some)
    }

    /// Starts the server of the Deployment in the cloud and waits until it has created a socket.
    async fn start_server(&self, socket: &str) -> Result<Option<(Process, PathBuf)>> {
        let token = kubeconfig(&self.api.account)?["users"][0]["user"]["token"].clone();
        let token = token.as_str().context("a token")?;
        let facts = Facts {
            node: "master-1".into(),
            address: CLOUD_ADDRESS.to_string(),
        };
        let workload = ("Deployment", "tunnel-server");
        let cloud = self.sites.cloud();
        let Some(server) = self.start_pod(workload, cloud, &facts, token).await? else {
            return Ok(None);
        };
        let socket = self.scratch.path().join("tunnel-server").join(socket);
        eventually("the socket", START, async || {
            ensure!(socket.exists(), "{server}");
            Ok(())
        })
        .await;
        Ok(Some((server, socket)))
    }

    /// Returns the token that a kubelet requests for a volume of a workload's pod. The pod is
    /// created here, in place of the workload's controller.
    async fn pod_token(&self, (kind, name): (&str, &str), node: &str) -> Result<String> {
        let objects = self.objects().await?;
        let spec = &find(&objects, kind, name)?["spec"]["template"]["spec"];
        let account = spec["serviceAccountName"].as_str().context("an account")?;
        let projected = items(&spec["volumes"])
            .flat_map(|volume| items(&volume["projected"]["sources"]))
            .find(|source| source.get("serviceAccountToken").is_some());
        let projected = &projected.context("no projected token")?["serviceAccountToken"];
        let mut spec = spec.clone();
        spec["nodeName"] = node.into();
        let pod = format!("{name}-x7k2p");
        let metadata = json!({ "name": pod, "namespace": "kube-system" });
        let object =
            json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
        self.create(&object).await?;
        let uid = ["get", "pod", &pod, "-o", "jsonpath={.metadata.uid}"];
        let uid = [&["-n", "kube-system"][..], &uid].concat();
        let uid = self.kubectl(&uid).await?;
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
            "spec": {
                "audiences": [projected["audience"]], "expirationSeconds": projected["expirationSeconds"],
                "boundObjectRef": { "apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid.trim() },
            },
        });
        let file = self.scratch.file("request.json", request.to_string())?;
        let path = format!("/api/v1/namespaces/kube-system/serviceaccounts/{account}/token");
        let create = ["create", "--raw", &path, "-f", &file.to_string_lossy()];
        let answer: Value = serde_json::from_str(&self.kubectl(&create).await?)?;
        let token = answer["status"]["token"].as_str();
        token.map(str::to_owned).context(answer.to_string())
    }

    /// Runs a subcommand of the server with the data directory of its pod.
    async fn verb(&self, words: &[&str]) -> Result<Finished> {
        let data = "tunnel-server/var/lib/tunnel-server";
        let data = self.scratch.path().join(data);
        let verb = Program::ours("tunnel-server")?.args(words.iter().copied());
        verb.arg("--data-dir").arg(data).run().await
    }
}

fn kubeconfig(file: &Path) -> Result<Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(file)?)?)
}

#[tokio::test(flavor = "multi_thread")]
async fn applied_objects_run_and_a_node_is_reached_by_its_name() -> Result<()> {
    let Some(fixture) = ShipFixture::start().await? else {
        return Ok(());
    };
    let manifest = folder().join("install.yaml");
    let text = std::fs::read_to_string(manifest)?;
    let here = format!("server: {CLOUD_ADDRESS}:31008");
    let text = text.replace(&format!("server: {ADDRESS_PLACEHOLDER}"), &here);
    ensure!(text.contains(&here), "the address of the server");
    let manifest = fixture.scratch.file("install.yaml", text)?;
    let apply = ["apply", "-f", &manifest.to_string_lossy()];
    fixture.kubectl(&apply).await?;
    fixture.create_root_ca().await?;
    for (name, edge, address) in [
        ("worker-1", "true", EDGE_ADDRESS),
        ("master-1", "false", CLOUD_ADDRESS),
    ] {
        let node = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": name, "labels": { "openyurt.io/is-edge-worker": edge } },
            "status": { "addresses": [{ "type": "InternalIP", "address": address.to_string() }] },
        });
        fixture.create(&node).await?;
    }
    fixture.proxy().await?;
    let client_cert =
        TestCa::new("kubernetes")?.issue(&Leaf::caller("kube-apiserver-kubelet-client"))?;
    let bytes = |text: &str| ByteString(text.as_bytes().to_vec());
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": { "name": "tunnel-kubelet-client", "namespace": "kube-system" },
        "data": { "tls.crt": bytes(&client_cert.certificate), "tls.key": bytes(&client_cert.key) },
    });
    fixture.create(&secret).await?;

    // Without a running server, a subcommand would write the files directly, as another user.
    let socket = "var/lib/tunnel-server/admin.sock";
    let Some((server, _)) = fixture.start_server(socket).await? else {
        return Ok(());
    };

    // The agent can start after the server has written its CA to the ConfigMap that the manifest
    // mounts.
    let ca = eventually("ConfigMap tunnel-ca", START, async || {
        let objects = fixture.objects().await?;
        let map = find(&objects, "ConfigMap", "tunnel-ca").with_context(|| server.to_string())?;
        let ca = map["data"]["ca.crt"].as_str().map(str::to_owned);
        ca.context("no certificate")
    })
    .await;
    let edge = &fixture.sites.edges()[0];
    let _targets = edge_sites(&fixture.sites).await?;
    let agent = ("DaemonSet", "tunnel-agent");
    let token = fixture.pod_token(agent, "worker-1").await?;
    let facts = Facts {
        node: "worker-1".into(),
        address: EDGE_ADDRESS.to_string(),
    };
    let agent = fixture.start_pod(agent, edge.node(), &facts, &token);
    let Some(agent) = agent.await? else {
        return Ok(());
    };

    let objects = fixture.objects().await?;
    let address = |name: &str| -> Result<String> {
        let address = find(&objects, "Service", name)?["spec"]["clusterIP"].as_str();
        Ok(address.context("clusterIP")?.to_owned())
    };
    let internal_ip = address("x-tunnel-server-internal-svc")?;
    let dns = address("tunnel-dns")?;
    let records = format!("{CLOUD_ADDRESS}\tmaster-1\n{internal_ip}\tworker-1");
    eventually("record, port and agent", START, async || {
        let objects = fixture.objects().await?;
        let found = find(&objects, "ConfigMap", "yurt-tunnel-nodes");
        let found = &found.with_context(|| server.to_string())?["data"]["tunnel-nodes"];
        let mut found: Vec<_> = found.as_str().unwrap_or_default().lines().collect();
        found.sort_unstable();
        let mut wanted: Vec<_> = records.lines().collect();
        wanted.sort_unstable();
        ensure!(found == wanted, "{found:?}");
        let service = find(&objects, "Service", "x-tunnel-server-internal-svc")?;
        let extra = items(&service["spec"]["ports"]).any(|port| port["name"] == "dnat-9100");
        ensure!(extra, "{service}");
        let nodes = fixture.verb(&["nodes", "-o", "json"]).await?.ok()?;
        let nodes: Value = serde_json::from_str(&nodes)?;
        let connected = items(&nodes["nodes"]).any(|node| node["connected"] == true);
        ensure!(connected, "{nodes}; {agent}; {server}");
        Ok(())
    })
    .await;
    fixture.proxy().await?;

    for (name, process) in [("server", &server), ("agent", &agent)] {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", process.id().context("it runs")?))?;
        let is = |line: &str| {
            let mut lines = status.lines().map(str::split_whitespace);
            lines.any(|found| found.eq(line.split(' ')))
        };
        ensure!(is("Uid: 65532 65532 65532 65532"), "{name}: {status}");
        ensure!(is("CapEff: 0000000000000000"), "{name}: {status}");
        ensure!(is("NoNewPrivs: 1"), "{name}: {status}");
    }

    let resolver = format!("nameserver {dns}\noptions ndots:0\n");
    let cloud = fixture.sites.cloud();
    let caller = cloud.with_resolver("caller", fixture.scratch.path(), &resolver);
    let caller = caller.context("a caller's resolver")?;
    let curl = Program::tool(Tool::Curl)?.args(["-fsS", "--max-time", "10"]);
    let own = curl
        .clone()
        .arg(format!("http://{CLOUD_ADDRESS}:10265/metrics"))
        .inside(Some(cloud));
    let own = own.run().await?.ok()?;
    for count in [
        "tunnel_server_enrollments_total{result=\"issued\"} 1",
        "tunnel_server_credential_not_after_timestamp_seconds{files=\"target_certificate\"}",
    ] {
        ensure!(own.contains(count), "no {count}: {own}");
    }
    let tokens = fixture.verb(&["token", "list", "-o", "json"]).await?;
    let tokens: Value = serde_json::from_str(&tokens.ok()?)?;
    ensure!(
        items(&tokens["tokens"]).count() == 0,
        "join tokens: {tokens}"
    );
    let create = ["token", "create", "--node", "worker-2"];
    let created = fixture.verb(&create).await?;
    let dialed = format!("--server {CLOUD_ADDRESS}:31008 ");
    ensure!(created.err.contains(&dialed), "{created}");
    let metrics = curl
        .arg("http://worker-1:9100/metrics")
        .inside(Some(&caller));
    let metrics = metrics.run().await?.ok()?;
    ensure!(metrics.contains("worker-1"), "{metrics}");

    let ca = fixture.scratch.file("ca.crt", ca)?;
    let exec = Program::tool(Tool::Curl)?
        .args(["-siN", "-T", "-", "-X", "POST", "-H", "Expect:"])
        .args(["-H", "Transfer-Encoding:", "-H", "Connection: Upgrade"])
        .args(["-H", "Upgrade: SPDY/3.1", "--max-time", "10", "--cacert"])
        .arg(ca)
        .args(["--connect-to", &format!("::{internal_ip}:10250")])
        // The kubelet reviews the token.
        .args(["-H", "Authorization: Bearer of-a-user"])
        .arg("https://worker-1:10250/exec/default/pod/main?command=cat");
    // The echo has no end, so the first lines are enough.
    let shell = "yes through the tunnel | \"$@\" | head -n 6";
    let exec = exec.through(["sh", "-c", shell, "sh"]);
    let output = exec.inside(Some(&caller)).run().await?.ok()?;
    ensure!(output.starts_with("HTTP/1.1 101 "), "{output}");
    ensure!(output.contains("through the tunnel"), "{output}");
    Ok(())
}

/// Runs the server of the overlay like a kubelet: as root without capabilities, with a host folder
/// that belongs to root. The server dials a webhook's Service by its address, because the overlay
/// grants the right to read the Service ranges.
#[tokio::test(flavor = "multi_thread")]
async fn egress_selector_overlay_runs_and_a_service_is_reached_by_its_address() -> Result<()> {
    let Some(fixture) = ShipFixture::start().await? else {
        return Ok(());
    };
    let mut objects = render(&fixture.kubectl, &overlay("egress-selector"))?;
    set_address(&mut objects, &format!("{CLOUD_ADDRESS}:31008"))?;
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    let manifest = fixture.scratch.file("overlay.json", list.to_string())?;
    let apply = ["apply", "-f", &manifest.to_string_lossy()];
    fixture.kubectl(&apply).await?;
    fixture.create_root_ca().await?;
    let webhook = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "webhook", "namespace": "kube-system" },
        "spec": { "ports": [{ "port": 8080, "targetPort": 10264 }] },
    });
    let ranges = json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "kubernetes" },
        "spec": { "cidrs": ["10.96.0.0/12"] },
    });
    fixture.create(&webhook).await?;
    fixture.create(&ranges).await?;
    fixture.proxy().await?;
    let socket = "run/culvert/connect.sock";
    let Some((server, socket)) = fixture.start_server(socket).await? else {
        return Ok(());
    };
    let metadata = std::fs::metadata(&socket)?;
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o777);
    ensure!((owner, mode) == (0, 0o600), "{owner} {mode:o}");

    let objects = fixture.objects().await?;
    let address = find(&objects, "Service", "webhook")?["spec"]["clusterIP"].as_str();
    let target = format!("{}:8080", address.context("clusterIP")?);
    let dialer = EgressDialer::uds(&socket);
    let request = "GET / HTTP/1.1\r\nHost: nobody:9100\r\nConnection: close\r\n\r\n";
    let answer = eventually("the Service", START, async || {
        let tunnel = dialer.dial(&target).await;
        let tunnel = tunnel.with_context(|| server.to_string())?;
        anyhow::Ok(ask_through(tunnel, request).await?)
    })
    .await;
    // The webhook of this test is the server's own HTTP listener.
    ensure!(answer.contains("unknown_node"), "{answer}");
    Ok(())
}

fn config_map(name: &str, ca: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name, "namespace": "kube-system" },
        "data": { "ca.crt": ca },
    })
}

const START: Duration = Duration::from_secs(20);
