//! Unmodified clients of pods, with the files and variables that a kubelet gives each pod. The
//! rules of the rendered unit lead them to the agent, and its stop leaves no rule behind.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Api, AuditLog, Cluster, Kind, Real, SERVICE_ACCOUNT, egress_flag};
use tunnel_tests::eventually::eventually;
use tunnel_tests::netns::in_service_namespace;
use tunnel_tests::process::{Process, Program, ScratchDir};
use tunnel_tests::targets::{FakeKubelet, TargetTls};
use tunnel_tests::tools::{Tool, or_skip};

use super::{Duration, EdgePair, Kubectl, LONG, kubectls};

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_pods_reach_the_fake_api_server_and_recover() -> Result<()> {
    let test = "cluster::edge_clients::pods::clients_of_pods_reach_the_fake_api_server_and_recover";
    in_service_namespace(test, LIMIT, async || clients(Kind::FakeApiServer).await).await
}

#[tokio::test(flavor = "multi_thread")]
async fn real_clients_of_pods_reach_the_api_server_and_recover() -> Result<()> {
    if or_skip(Real::binaries()).is_none() {
        return Ok(());
    }
    let test = "cluster::edge_clients::pods::real_clients_of_pods_reach_the_api_server_and_recover";
    in_service_namespace(test, LIMIT, async || clients(Kind::Real).await).await
}

async fn clients(kind: Kind) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    let scratch = ScratchDir::new()?;
    let audit = AuditLog::new()?;
    let socket = scratch.path().join("egress.sock");
    let cluster = match kind {
        Kind::FakeApiServer => Cluster::start(kind).await?,
        Kind::Real => {
            let mut flags = audit.flags().to_vec();
            flags.push(egress_flag(&scratch, &socket)?);
            Cluster::real_with(&flags).await?
        }
    };
    let Some(cluster) = cluster else {
        return Ok(());
    };
    grant(cluster.admin()).await?;
    mount_account(&cluster).await?;
    let _kubelet = create_pod(cluster.admin()).await?;
    if let Ok(fake_api) = cluster.fake_api() {
        fake_api.set_egress(&socket).await;
    }
    let unit = Unit::rendered(&scratch).await?;
    let before = network().await?;
    unit.run("ExecStart=").await?;
    ensure!(network().await? != before, "no rule was added");
    let file = files.into_iter().next().context("a kubectl")?;
    for transport in ["quic", "h2"] {
        let done = informers_recover(&cluster, transport, &socket, &file).await;
        done.context(transport)?;
    }
    unit.run("ExecStop=").await?;
    let after = network().await?;
    ensure!(after == before, "{after}\nis not\n{before}");
    let found = audited(&cluster, &audit)?;
    for verb in ["create", "delete", "get", "list", "watch"] {
        ensure!(found.contains(&format!("{verb} configmaps/")), "{found:?}");
    }
    // The verb of an exec is that of its HTTP method.
    let is_exec = |action: &String| action.ends_with(" pods/exec");
    ensure!(found.iter().any(is_exec), "{found:?}");
    Ok(())
}

/// Restarts the server below informers that dial the address of the Service, and the address of
/// the agent's listener where that is a SAN of the API server.
async fn informers_recover(
    cluster: &Cluster,
    transport: &str,
    socket: &Path,
    kubectl: &Path,
) -> Result<()> {
    let listen = format!("apiserver={POD_LISTEN}:{POD_PORT}");
    let socket = socket.to_string_lossy();
    let server_args = ["--drain-delay", "0s", "--drain-timeout", "1s"];
    let server_args = [&server_args[..], &["--connect-uds", &socket]].concat();
    let agent_args = ["--cloud-listen", &listen];
    let mut pair = EdgePair::start(cluster, transport, &server_args, &agent_args).await?;
    let mut targets = vec![(SERVICE_IP, "443")];
    if cluster.fake_api().is_ok() {
        targets.push((POD_LISTEN, POD_PORT));
    }
    let mut informers = Vec::new();
    for (number, target) in targets.into_iter().enumerate() {
        let own = format!("own-{transport}-{number}");
        let program = in_pod(Program::ours("informer")?.arg(&own), target);
        let mut informer = program.start()?;
        wait_for(&mut informer, &format!("deleted {own}")).await?;
        informers.push(informer);
    }
    let created = format!("created-{transport}");
    create(cluster.admin(), &created).await?;
    for informer in &mut informers {
        wait_for(informer, &format!("applied {created}")).await?;
    }
    let kubectl = Kubectl::new(kubectl.to_owned(), PathBuf::new())?;
    let get = in_pod(
        kubectl.program(&format!("get configmap {created} -o name")),
        (SERVICE_IP, "443"),
    );
    // A new kube-apiserver grants discovery to all users some time after its port is open.
    eventually("a ConfigMap that kubectl reads", LONG, async || {
        let read = get.clone().run().await?.ok()?;
        ensure!(read.contains(&created), "{read}");
        Ok(())
    })
    .await;
    exec(&kubectl, &pair.kubeconfig).await?;
    let setup = pair.server.setup_for_restart();
    pair.server.into_process().stop(LONG).await?;
    get.run().await?.ensure_failed(1, &[])?;
    let created = format!("meanwhile-{transport}");
    create(cluster.admin(), &created).await?;
    pair.server = setup.start().await?;
    for informer in &mut informers {
        wait_for(informer, &format!("applied {created}")).await?;
    }
    Ok(())
}

/// Runs a command in the pod by both addresses of the API server. The exit code comes back.
async fn exec(kubectl: &Kubectl, kubeconfig: &Path) -> Result<()> {
    let program = kubectl.program(&format!("exec -i -n {} web -- exit-3", SERVICE_ACCOUNT.0));
    let by_listener = program.clone().env("KUBECONFIG", kubeconfig);
    let by_service = in_pod(program, (SERVICE_IP, "443"));
    for program in [by_listener, by_service] {
        let finished = program.run_with(b"hello").await?;
        finished.ensure_failed(3, &["exit code 3"])?;
        ensure!(finished.out == "hello", "{finished}");
    }
    Ok(())
}

/// Creates the Node of the agent and a Pod on the Node, and starts their kubelet.
pub(super) async fn create_pod(admin: &Api) -> Result<FakeKubelet> {
    let tls = TargetTls::self_signed(&[NODE])?;
    let listen = ([127, 0, 0, 1], KUBELET_PORT).into();
    let kubelet = FakeKubelet::start_on(listen, NODE, Some(tls)).await?;
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE },
        "status": {
            "addresses": [{ "type": "Hostname", "address": NODE }],
            "daemonEndpoints": { "kubeletEndpoint": { "Port": KUBELET_PORT } },
        },
    });
    admin.create("/api/v1/nodes", &node).await?;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web" },
        "spec": { "nodeName": NODE, "containers": [{ "name": "app", "image": "none" }] },
    });
    let pods = format!("/api/v1/namespaces/{}/pods", SERVICE_ACCOUNT.0);
    admin.create(&pods, &pod).await?;
    Ok(kubelet)
}

/// Gives a program the variables of a pod for this host and port.
fn in_pod(program: Program, (host, port): (&str, &str)) -> Program {
    program
        .env("KUBERNETES_SERVICE_HOST", host)
        .env("KUBERNETES_SERVICE_PORT", port)
}

async fn wait_for(informer: &mut Process, line: &str) -> Result<()> {
    let is_it = |found: &str| (found == line).then_some(());
    informer.wait_for_line(line, LONG, is_it).await
}

async fn create(admin: &Api, name: &str) -> Result<()> {
    let path = format!("/api/v1/namespaces/{}/configmaps", SERVICE_ACCOUNT.0);
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name } });
    admin.create(&path, &map).await.map(drop)
}

/// Lets the ServiceAccount change ConfigMaps and run commands in its namespace.
async fn grant(admin: &Api) -> Result<()> {
    let (namespace, account) = SERVICE_ACCOUNT;
    let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}");
    let metadata = json!({ "name": "pods-of-the-edge" });
    let resources = ["configmaps", "pods", "pods/exec"];
    let rules = json!([{ "apiGroups": [""], "resources": resources, "verbs": ["*"] }]);
    let role = json!({ "metadata": metadata, "rules": rules });
    admin.create(&format!("{path}/roles"), &role).await?;
    let binding = json!({
        "metadata": metadata,
        "subjects": [{ "kind": "ServiceAccount", "namespace": namespace, "name": account }],
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"] },
    });
    let bindings = format!("{path}/rolebindings");
    admin.create(&bindings, &binding).await.map(drop)
}

/// Mounts the files of a pod at their usual paths. The namespace of the test has its own mounts.
async fn mount_account(cluster: &Cluster) -> Result<()> {
    let mount = Program::at(Path::new("mount")).args(["-t", "tmpfs", "tmpfs", "/var/run"]);
    mount.run().await?.ok()?;
    let folder = Path::new("/var/run/secrets/kubernetes.io/serviceaccount");
    std::fs::create_dir_all(folder)?;
    let kubeconfig: Value = serde_json::from_slice(&std::fs::read(cluster.server_kubeconfig()?)?)?;
    let token = &kubeconfig["users"][0]["user"]["token"];
    let ca = &kubeconfig["clusters"][0]["cluster"]["certificate-authority"];
    std::fs::write(folder.join("token"), token.as_str().context("a token")?)?;
    std::fs::copy(ca.as_str().context("a CA")?, folder.join("ca.crt"))?;
    std::fs::write(folder.join("namespace"), SERVICE_ACCOUNT.0)?;
    Ok(())
}

/// The rendered unit, and the file with its rules.
struct Unit {
    text: String,
    rules: PathBuf,
}

impl Unit {
    async fn rendered(scratch: &ScratchDir) -> Result<Self> {
        let render = async |file: &str| {
            let program = Program::ours("tunnel-agent")?.args(["render", "edge-apiserver"]);
            let program = program.args(["--service-ip", SERVICE_IP, "--way", file]);
            program.run().await?.ok()
        };
        Ok(Self {
            text: render("unit").await?,
            rules: scratch.file("edge-apiserver.nft", render("nft").await?)?,
        })
    }

    /// Runs the commands of a field of the unit, as systemd does.
    async fn run(&self, field: &str) -> Result<()> {
        for command in self
            .text
            .lines()
            .filter_map(|line| line.strip_prefix(field))
        {
            let rules = self.rules.to_string_lossy();
            let command = command.replace("/etc/culvert/edge-apiserver.nft", &rules);
            let mut words = command.split_whitespace().skip(1);
            let program = match words.next() {
                Some("tunnel-agent") => Program::ours("tunnel-agent")?,
                Some("nft") => Program::tool(Tool::Nft)?,
                _ => bail!("unknown program in {command}"),
            };
            program.args(words).run().await?.ok()?;
        }
        Ok(())
    }
}

/// Returns the rules and the addresses of the loopback interface.
async fn network() -> Result<String> {
    let rules = Program::tool(Tool::Nft)?.args(["list", "ruleset"]);
    let addresses = Program::tool(Tool::Ip)?.args(["address", "show", "dev", "lo"]);
    Ok(rules.run().await?.ok()? + &addresses.run().await?.ok()?)
}

/// Returns `VERB RESOURCE/SUBRESOURCE` of the ServiceAccount's requests, by the audit log of the API
/// server.
fn audited(cluster: &Cluster, audit: &AuditLog) -> Result<BTreeSet<String>> {
    if let Ok(fake_api) = cluster.fake_api() {
        let user = Cluster::server_user();
        let requests = fake_api.requests().into_iter();
        let own = requests.filter(|request| request.user == user);
        return Ok(own
            .map(|own| format!("{} {}/{}", own.verb, own.resource, own.subresource))
            .collect());
    }
    let (namespace, account) = SERVICE_ACCOUNT;
    let events = audit.events_of(namespace, account)?.into_iter();
    let actions = events.map(|event| {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let [resource, sub] = ["resource", "subresource"].map(|of| text(&event["objectRef"][of]));
        format!("{} {resource}/{sub}", text(&event["verb"]))
    });
    Ok(actions.collect())
}

/// Address of the Service `kubernetes`.
const SERVICE_IP: &str = "10.96.0.1";
/// The agent's listener for pods.
const POD_LISTEN: &str = "169.254.2.1";
const POD_PORT: &str = "10268";
pub(super) const NODE: &str = "worker-1";
const KUBELET_PORT: u16 = 10250;
pub(super) const LIMIT: Duration = Duration::from_secs(120);
