//! Unmodified clients of pods, with the files and variables that a kubelet gives each pod. The
//! rules of the rendered unit lead them to the agent, and its stop leaves no rule behind.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Api, Cluster, Kind, Real, SERVICE_ACCOUNT};
use tunnel_tests::netns::in_service_namespace;
use tunnel_tests::process::{Process, Program, ScratchDir};
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
    let audit = scratch.path().join("audit.log");
    let cluster = match kind {
        Kind::FakeApiServer => Cluster::start(kind).await?,
        Kind::Real => Cluster::real_with(&audit_flags(&scratch, &audit)?).await?,
    };
    let Some(cluster) = cluster else {
        return Ok(());
    };
    grant(cluster.admin()).await?;
    mount_account(&cluster).await?;
    let unit = Unit::rendered(&scratch).await?;
    let before = network().await?;
    unit.run("ExecStart=").await?;
    ensure!(network().await? != before, "no rule was added");
    let file = files.into_iter().next().context("a kubectl")?;
    for transport in ["quic", "h2"] {
        let done = informers_recover(&cluster, transport, &file).await;
        done.context(transport)?;
    }
    unit.run("ExecStop=").await?;
    let after = network().await?;
    ensure!(after == before, "{after}\nis not\n{before}");
    let found = audited(&cluster, &audit);
    let wanted = ["create", "delete", "get", "list", "watch"].map(str::to_owned);
    ensure!(found == BTreeSet::from(wanted), "{found:?}");
    Ok(())
}

/// Restarts the server below informers that dial the address of the Service, and the address of
/// the agent's listener where that is a SAN of the API server.
async fn informers_recover(cluster: &Cluster, transport: &str, kubectl: &Path) -> Result<()> {
    let listen = format!("apiserver={POD_LISTEN}:{POD_PORT}");
    let mut pair = EdgePair::start(cluster, transport, &["--cloud-listen", &listen]).await?;
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
    let read = get.clone().run().await?.ok()?;
    ensure!(read.contains(&created), "{read}");
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

/// Lets the ServiceAccount do everything with ConfigMaps of its namespace.
async fn grant(admin: &Api) -> Result<()> {
    let (namespace, account) = SERVICE_ACCOUNT;
    let path = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}");
    let metadata = json!({ "name": "pods-of-the-edge" });
    let rules = json!([{ "apiGroups": [""], "resources": ["configmaps"], "verbs": ["*"] }]);
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
            let tool = match words.next() {
                Some("ip") => Tool::Ip,
                Some("nft") => Tool::Nft,
                _ => bail!("unknown program in {command}"),
            };
            Program::tool(tool)?.args(words).run().await?.ok()?;
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

/// Returns the flags of kube-apiserver that write an audit log to `log`.
fn audit_flags(scratch: &ScratchDir, log: &Path) -> Result<[String; 2]> {
    let policy = json!({
        "apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": [{ "level": "Metadata" }],
    });
    let policy = scratch.file("audit.yaml", policy.to_string())?;
    Ok([
        format!("--audit-policy-file={}", policy.display()),
        format!("--audit-log-path={}", log.display()),
    ])
}

/// Returns the verbs of the ServiceAccount's requests for ConfigMaps, by the audit log of the API
/// server.
fn audited(cluster: &Cluster, log: &Path) -> BTreeSet<String> {
    let user = Cluster::server_user();
    if let Ok(fake_api) = cluster.fake_api() {
        let requests = fake_api.requests().into_iter();
        let own = requests.filter(|request| request.user == user);
        let own = own.filter(|request| request.resource == "configmaps");
        return own.map(|request| request.verb).collect();
    }
    let lines = std::fs::read_to_string(log).unwrap_or_default();
    let events = lines
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let own = events.filter(|event| event["user"]["username"] == user.as_str());
    let own = own.filter(|event| event["objectRef"]["resource"] == "configmaps");
    own.filter_map(|event| event["verb"].as_str().map(str::to_owned))
        .collect()
}

/// Address of the Service `kubernetes`.
const SERVICE_IP: &str = "10.96.0.1";
/// The agent's listener for pods.
const POD_LISTEN: &str = "169.254.2.1";
const POD_PORT: &str = "10268";
const LIMIT: Duration = Duration::from_secs(120);
