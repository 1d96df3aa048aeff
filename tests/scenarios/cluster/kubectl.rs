//! Compatibility of the API server with real kubectl programs: every installed kubectl, including
//! Debian's.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Cluster, Kind};
use tunnel_tests::process::{Finished, Program, ScratchDir};
use tunnel_tests::tools::{Skip, Tool, or_skip};

/// A kubectl program with an administrator's credentials and caches of its own. Command lines are
/// split at spaces.
pub(super) struct Kubectl {
    file: PathBuf,
    kubeconfig: PathBuf,
    home: ScratchDir,
}

impl Kubectl {
    pub(super) fn new(file: PathBuf, kubeconfig: PathBuf) -> Result<Self> {
        Ok(Self {
            file,
            kubeconfig,
            home: ScratchDir::new()?,
        })
    }

    /// Returns the program with this command line.
    pub(super) fn program(&self, line: &str) -> Program {
        Program::at(&self.file)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.home.path())
            .args(line.split_whitespace())
    }

    async fn run(&self, line: &str, input: &str) -> Result<Finished> {
        self.program(line).run_with(input.as_bytes()).await
    }

    pub(super) async fn ok(&self, line: &str) -> Result<String> {
        self.run(line, "").await?.ok()
    }

    /// Applies the objects of a file with this content.
    pub(super) async fn apply(&self, flags: &str, content: &str) -> Result<String> {
        let line = format!("apply {flags} -f -");
        self.run(&line, content).await?.ok()
    }

    async fn json(&self, line: &str) -> Result<Value> {
        let printed = self.ok(&format!("{line} -o json")).await?;
        Ok(serde_json::from_str(&printed)?)
    }
}

/// Returns all installed kubectl programs.
pub(crate) fn kubectls() -> Result<Vec<PathBuf>, Skip> {
    let all = Tool::Kubectl.find_all();
    if all.is_empty() {
        return Err(Skip::because("needs kubectl"));
    }
    Ok(all)
}

/// Returns the kubectl programs that can render the overlays, whose field `patches` begins with 1.21.
pub(crate) fn kustomizers() -> Result<Vec<PathBuf>, Skip> {
    let mut files = kubectls()?;
    files.retain(|file| minor_version(file) >= Some(21));
    if files.is_empty() {
        return Err(Skip::because("needs kubectl 1.21"));
    }
    Ok(files)
}

fn minor_version(kubectl: &Path) -> Option<u32> {
    let version = std::process::Command::new(kubectl)
        .args(["version", "--client", "-o", "json"])
        .output()
        .ok()?;
    let version: Value = serde_json::from_slice(&version.stdout).ok()?;
    let minor = version["clientVersion"]["minor"].as_str()?;
    // Builds of vendors have a "+".
    minor.trim_end_matches('+').parse().ok()
}

on_both!(by super::with_each:
    kubectl_applies_changes_describes_and_deletes_every_kind,
    kubectl_creates_objects_from_flags,
);

async fn with_each(kind: Kind, check: impl AsyncFn(&Kubectl) -> Result<()>) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    for file in files {
        let Some(cluster) = Cluster::start(kind).await? else {
            return Ok(());
        };
        check(&Kubectl::new(file, cluster.admin_kubeconfig()?)?).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn real_api_server_sees_conflicts_of_server_side_applies() -> Result<()> {
    with_each(
        Kind::Real,
        kubectl_applies_on_the_servers_side_and_sees_conflicts,
    )
    .await
}

/// Returns one object of each kind that matters. Lists that are replaced as a whole contain the
/// values that the API would fill in, because kubectl treats a filled-in field as a change on each
/// apply.
fn manifests() -> Value {
    let template = json!({
        "metadata": { "labels": { "app": "x" } },
        "spec": { "containers": [{ "name": "main", "image": "example.org/x:1", "ports": [{ "containerPort": 10263 }] }] },
    });
    let selector = json!({ "matchLabels": { "app": "x" } });
    let meta = |name: &str| json!({ "name": name, "namespace": "kube-system" });
    let rbac = "rbac.authorization.k8s.io/v1";
    let role =
        |kind: &str| json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "x" });
    let rules = json!([{ "apiGroups": [""], "resources": ["nodes"], "verbs": ["list"] }]);
    let subjects = json!([{ "kind": "ServiceAccount", "name": "x", "namespace": "kube-system" }]);
    let ports = json!([{ "name": "http", "port": 10255, "targetPort": 10264 }]);
    json!([
        { "apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta("x") },
        { "apiVersion": "v1", "kind": "ConfigMap", "metadata": meta("x"), "data": { "a": "1", "b": "2" } },
        { "apiVersion": "v1", "kind": "Secret", "metadata": meta("x"), "data": { "a": "MQ==" } },
        { "apiVersion": "v1", "kind": "Service", "metadata": meta("x"), "spec": { "selector": { "app": "x" }, "ports": ports } },
        { "apiVersion": "v1", "kind": "Node", "metadata": { "name": "worker-1", "labels": { "zone": "a" } } },
        { "apiVersion": "v1", "kind": "Pod", "metadata": meta("x"), "spec": template["spec"] },
        { "apiVersion": "v1", "kind": "Endpoints", "metadata": meta("x"), "subsets": [{ "addresses": [{ "ip": "192.168.33.220" }], "ports": [{ "name": "http", "port": 10264, "protocol": "TCP" }] }] },
        { "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": meta("x"), "spec": { "holderIdentity": "me" } },
        { "apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta("x"), "spec": { "selector": selector, "template": template } },
        { "apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": meta("x"), "spec": { "selector": selector, "template": template } },
        { "apiVersion": rbac, "kind": "Role", "metadata": meta("x"), "rules": rules },
        { "apiVersion": rbac, "kind": "RoleBinding", "metadata": meta("x"), "roleRef": role("Role"), "subjects": subjects },
        { "apiVersion": rbac, "kind": "ClusterRole", "metadata": { "name": "x" }, "rules": rules },
        { "apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": { "name": "x" }, "roleRef": role("ClusterRole"), "subjects": subjects },
    ])
}

/// Returns the number of lines that end with `end`.
fn count(text: &str, end: &str) -> usize {
    text.lines().filter(|line| line.ends_with(end)).count()
}

async fn kubectl_applies_changes_describes_and_deletes_every_kind(kubectl: &Kubectl) -> Result<()> {
    let mut list = json!({ "apiVersion": "v1", "kind": "List", "items": manifests() });
    let applied = kubectl.apply("", &list.to_string()).await?;
    ensure!(count(&applied, "created") == 14, "{applied}");
    let again = kubectl.apply("", &list.to_string()).await?;
    ensure!(
        count(&again, "unchanged") == again.lines().count(),
        "{again}"
    );

    // kubectl removes a key that is missing in the file, and keeps one that another writer added.
    let patch = r#"-n kube-system patch configmap x --type=merge -p {"data":{"c":"3"}}"#;
    kubectl.ok(patch).await?;
    list["items"][1]["data"] = json!({ "a": "4" });
    list["items"][3]["spec"]["ports"][0]["targetPort"] = 10265.into();
    let changed = kubectl.apply("", &list.to_string()).await?;
    ensure!(count(&changed, "configured") == 2, "{changed}");
    let map = kubectl.json("-n kube-system get cm x").await?;
    ensure!(map["data"] == json!({ "a": "4", "c": "3" }), "{map}");

    for line in [
        "label node worker-1 openyurt.io/is-edge-worker=true",
        "label node worker-1 zone-",
        "annotate node worker-1 note=x",
    ] {
        kubectl.ok(line).await?;
    }
    let get = "get nodes -l openyurt.io/is-edge-worker=true,!zone";
    let edge = kubectl.json(get).await?;
    ensure!(edge["items"].as_array().map(Vec::len) == Some(1), "{edge}");
    let ports = r#"{"spec":{"ports":[{"port":9100,"name":"dnat-9100"}]}}"#;
    let patch = format!("-n kube-system patch svc x -p {ports}");
    kubectl.ok(&patch).await?;
    let service = kubectl.json("-n kube-system get svc x").await?;
    let names: Vec<_> = service["spec"]["ports"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|port| &port["name"])
        .collect();
    ensure!(
        names == ["dnat-9100", "http"] || names == ["http", "dnat-9100"],
        "{service}"
    );

    let kinds = "nodes svc cm pods secrets leases sa ep deploy ds roles rolebindings clusterroles \
                 clusterrolebindings events";
    for kind in kinds.split(' ') {
        kubectl.ok(&format!("-n kube-system get {kind}")).await?;
        if kind != "events" {
            let name = if kind == "nodes" { "worker-1" } else { "x" };
            let describe = format!("-n kube-system describe {kind} {name}");
            let stdout = kubectl.ok(&describe).await?;
            ensure!(stdout.contains(name), "{kind}: {stdout}");
        }
    }
    let table = kubectl.ok("-n kube-system get svc").await?;
    ensure!(
        table.contains("CLUSTER-IP") && table.contains("9100/TCP"),
        "{table}"
    );

    // The deletion of the Service also deletes its Endpoints.
    let delete = "delete --wait=true --ignore-not-found -f -";
    let deleted = kubectl.run(delete, &list.to_string()).await?.ok()?;
    let lines = deleted.lines().filter(|line| line.contains("deleted"));
    ensure!(
        lines.count() == 13 && !deleted.contains("endpoints"),
        "{deleted}"
    );
    let missing = kubectl.run("-n kube-system get cm x", "").await?;
    let not_found = "Error from server (NotFound): configmaps \"x\" not found";
    ensure!(missing.err.contains(not_found), "{missing}");
    Ok(())
}

async fn kubectl_applies_on_the_servers_side_and_sees_conflicts(kubectl: &Kubectl) -> Result<()> {
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x", "namespace": "default" }, "data": { "a": "1" } });
    let map = map.to_string();
    let flags = "--server-side --field-manager=first";
    kubectl.apply(flags, &map).await?;
    let changed = map.replace("\"1\"", "\"2\"");
    let second = "apply --server-side --field-manager=second -f -";
    let refused = kubectl.run(second, &changed).await?;
    ensure!(
        refused.err.contains("conflict") && refused.err.contains("first"),
        "{refused}"
    );
    let flags = "--server-side --force-conflicts --field-manager=second";
    kubectl.apply(flags, &changed).await?;
    let map = kubectl.json("get cm x").await?;
    ensure!(map["data"]["a"] == "2", "{map}");
    Ok(())
}

/// Runs the commands of the guides, for which kubectl sends protobuf since 1.32.
async fn kubectl_creates_objects_from_flags(kubectl: &Kubectl) -> Result<()> {
    let pair = rcgen::generate_simple_self_signed(vec!["x".to_owned()])?;
    let certificate = kubectl.home.file("tls.crt", pair.cert.pem())?;
    let key = pair.signing_key.serialize_pem();
    let key = kubectl.home.file("tls.key", key)?;
    let (certificate, key) = (certificate.display(), key.display());
    for line in [
        "secret generic x",
        &format!("secret tls pair --cert={certificate} --key={key}"),
        "configmap x --from-literal=a= --from-literal=b=c",
        "deployment x --image=example.org/x:1",
        "role x --verb=get --resource=pods",
        "rolebinding x --role=x --serviceaccount=default:x",
        "clusterrole x --verb=list --resource=nodes",
        "clusterrolebinding x --clusterrole=x --serviceaccount=default:x",
        "serviceaccount x",
        "namespace x",
    ] {
        kubectl.ok(&format!("create {line}")).await?;
    }
    let map = kubectl.json("get configmap x").await?;
    ensure!(map["data"] == json!({ "a": "", "b": "c" }), "{map}");
    let secret = kubectl.json("get secret pair").await?;
    ensure!(secret["data"]["tls.key"].is_string(), "no key");
    ensure!(secret["type"] == "kubernetes.io/tls", "{}", secret["type"]);
    let workload = kubectl.json("get deployment x").await?;
    let image = &workload["spec"]["template"]["spec"]["containers"][0]["image"];
    ensure!(*image == "example.org/x:1", "{workload}");
    let binding = kubectl.json("get clusterrolebinding x").await?;
    ensure!(binding["roleRef"]["name"] == "x", "{binding}");
    Ok(())
}
