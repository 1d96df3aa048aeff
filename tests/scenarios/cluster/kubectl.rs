//! Compatibility of the API server with real kubectl programs: every installed kubectl, including
//! Debian's.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Cluster, Kind};
use tunnel_tests::process::{Finished, Program, ScratchDir};
use tunnel_tests::tools::{Skip, Tool, or_skip};

/// A kubectl program with an administrator's credentials and caches of its own.
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

    async fn run(&self, words: &[&str]) -> Result<Finished> {
        let program = Program::at(&self.file)
            .env("KUBECONFIG", &self.kubeconfig)
            .env("HOME", self.home.path())
            .args(words.iter().copied());
        program.run().await
    }

    pub(super) async fn ok(&self, words: &[&str]) -> Result<String> {
        self.run(words).await?.ok()
    }

    pub(super) async fn json(&self, words: &[&str]) -> Result<Value> {
        let words = [words, &["-o", "json"]].concat();
        Ok(serde_json::from_str(&self.ok(&words).await?)?)
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

async fn with_each(kind: Kind, check: impl AsyncFn(&Kubectl, &Path) -> Result<()>) -> Result<()> {
    let Some(files) = or_skip(kubectls()) else {
        return Ok(());
    };
    for file in files {
        let Some(cluster) = Cluster::start(kind).await? else {
            return Ok(());
        };
        let kubectl = Kubectl::new(file, cluster.admin_kubeconfig()?)?;
        check(&kubectl, kubectl.home.path()).await?;
    }
    Ok(())
}

mod fake_api {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn kubectl_applies_changes_describes_and_deletes_every_kind() -> Result<()> {
        with_each(Kind::FakeApiServer, every_kind).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn kubectl_creates_objects_from_flags() -> Result<()> {
        with_each(Kind::FakeApiServer, from_flags).await
    }
}

mod real {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn kubectl_applies_changes_describes_and_deletes_every_kind() -> Result<()> {
        with_each(Kind::Real, every_kind).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn kubectl_applies_on_the_servers_side_and_sees_conflicts() -> Result<()> {
        with_each(Kind::Real, server_side).await
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn kubectl_creates_objects_from_flags() -> Result<()> {
        with_each(Kind::Real, from_flags).await
    }
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

async fn every_kind(kubectl: &Kubectl, folder: &Path) -> Result<()> {
    let mut list = json!({ "apiVersion": "v1", "kind": "List", "items": manifests() });
    let file = folder.join("all.json");
    std::fs::write(&file, list.to_string())?;
    let file = file.to_string_lossy().into_owned();
    let applied = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(
        applied
            .lines()
            .filter(|line| line.ends_with("created"))
            .count()
            == 14,
        "{applied}"
    );
    let again = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(
        again.lines().all(|line| line.ends_with("unchanged")),
        "{again}"
    );

    // kubectl removes a key that is missing in the file, and keeps one that another writer added.
    kubectl
        .ok(&[
            "-n",
            "kube-system",
            "patch",
            "configmap",
            "x",
            "--type=merge",
            "-p",
            r#"{"data":{"c":"3"}}"#,
        ])
        .await?;
    list["items"][1]["data"] = json!({ "a": "4" });
    list["items"][3]["spec"]["ports"][0]["targetPort"] = 10265.into();
    std::fs::write(&file, list.to_string())?;
    let changed = kubectl.ok(&["apply", "-f", &file]).await?;
    ensure!(
        changed
            .lines()
            .filter(|line| line.ends_with("configured"))
            .count()
            == 2,
        "{changed}"
    );
    let map = kubectl
        .json(&["-n", "kube-system", "get", "cm", "x"])
        .await?;
    ensure!(map["data"] == json!({ "a": "4", "c": "3" }), "{map}");

    kubectl
        .ok(&[
            "label",
            "node",
            "worker-1",
            "openyurt.io/is-edge-worker=true",
        ])
        .await?;
    kubectl.ok(&["label", "node", "worker-1", "zone-"]).await?;
    kubectl
        .ok(&["annotate", "node", "worker-1", "note=x"])
        .await?;
    let edge = kubectl
        .json(&[
            "get",
            "nodes",
            "-l",
            "openyurt.io/is-edge-worker=true,!zone",
        ])
        .await?;
    ensure!(edge["items"].as_array().map(Vec::len) == Some(1), "{edge}");
    kubectl
        .ok(&[
            "-n",
            "kube-system",
            "patch",
            "svc",
            "x",
            "-p",
            r#"{"spec":{"ports":[{"port":9100,"name":"dnat-9100"}]}}"#,
        ])
        .await?;
    let service = kubectl
        .json(&["-n", "kube-system", "get", "svc", "x"])
        .await?;
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

    for kind in [
        "nodes",
        "svc",
        "cm",
        "pods",
        "secrets",
        "leases",
        "sa",
        "ep",
        "deploy",
        "ds",
        "roles",
        "rolebindings",
        "clusterroles",
        "clusterrolebindings",
        "events",
    ] {
        kubectl.ok(&["-n", "kube-system", "get", kind]).await?;
        if kind != "events" {
            let name = if kind == "nodes" { "worker-1" } else { "x" };
            let stdout = kubectl
                .ok(&["-n", "kube-system", "describe", kind, name])
                .await?;
            ensure!(stdout.contains(name), "{kind}: {stdout}");
        }
    }
    let table = kubectl.ok(&["-n", "kube-system", "get", "svc"]).await?;
    ensure!(
        table.contains("CLUSTER-IP") && table.contains("9100/TCP"),
        "{table}"
    );

    // The deletion of the Service also deletes its Endpoints.
    let deleted = kubectl
        .ok(&["delete", "--wait=true", "--ignore-not-found", "-f", &file])
        .await?;
    ensure!(
        deleted
            .lines()
            .filter(|line| line.contains("deleted"))
            .count()
            == 13
            && !deleted.contains("endpoints"),
        "{deleted}"
    );
    let missing = kubectl
        .run(&["-n", "kube-system", "get", "cm", "x"])
        .await?;
    ensure!(
        missing
            .err
            .contains("Error from server (NotFound): configmaps \"x\" not found"),
        "{missing}"
    );
    Ok(())
}

async fn server_side(kubectl: &Kubectl, folder: &Path) -> Result<()> {
    let file = folder.join("map.json");
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "x", "namespace": "default" }, "data": { "a": "1" } });
    std::fs::write(&file, map.to_string())?;
    let file = file.to_string_lossy().into_owned();
    kubectl
        .ok(&[
            "apply",
            "--server-side",
            "--field-manager=first",
            "-f",
            &file,
        ])
        .await?;
    std::fs::write(&file, map.to_string().replace("\"1\"", "\"2\""))?;
    let refused = kubectl
        .run(&[
            "apply",
            "--server-side",
            "--field-manager=second",
            "-f",
            &file,
        ])
        .await?;
    ensure!(
        refused.err.contains("conflict") && refused.err.contains("first"),
        "{refused}"
    );
    kubectl
        .ok(&[
            "apply",
            "--server-side",
            "--force-conflicts",
            "--field-manager=second",
            "-f",
            &file,
        ])
        .await?;
    let map = kubectl.json(&["get", "cm", "x"]).await?;
    ensure!(map["data"]["a"] == "2", "{map}");
    Ok(())
}

/// Runs the commands of the guides, for which kubectl sends protobuf since 1.32.
async fn from_flags(kubectl: &Kubectl, _folder: &Path) -> Result<()> {
    let pair = rcgen::generate_simple_self_signed(vec!["x".to_owned()])?;
    let certificate = kubectl.home.file("tls.crt", pair.cert.pem())?;
    let key = kubectl
        .home
        .file("tls.key", pair.signing_key.serialize_pem())?;
    let cert = format!("--cert={}", certificate.display());
    let key = format!("--key={}", key.display());
    for words in [
        &["secret", "generic", "x"][..],
        &["secret", "tls", "pair", &cert, &key],
        &["configmap", "x", "--from-literal=a=", "--from-literal=b=c"],
        &["deployment", "x", "--image=example.org/x:1"],
        &["role", "x", "--verb=get", "--resource=pods"],
        &["rolebinding", "x", "--role=x", "--serviceaccount=default:x"],
        &["clusterrole", "x", "--verb=list", "--resource=nodes"],
        &[
            "clusterrolebinding",
            "x",
            "--clusterrole=x",
            "--serviceaccount=default:x",
        ],
        &["serviceaccount", "x"],
        &["namespace", "x"],
    ] {
        kubectl.ok(&[&["create"], words].concat()).await?;
    }
    let map = kubectl.json(&["get", "configmap", "x"]).await?;
    ensure!(map["data"] == json!({ "a": "", "b": "c" }), "{map}");
    let secret = kubectl.json(&["get", "secret", "pair"]).await?;
    ensure!(secret["data"]["tls.key"].is_string(), "no key");
    ensure!(secret["type"] == "kubernetes.io/tls", "{}", secret["type"]);
    let workload = kubectl.json(&["get", "deployment", "x"]).await?;
    let image = &workload["spec"]["template"]["spec"]["containers"][0]["image"];
    ensure!(*image == "example.org/x:1", "{workload}");
    let binding = kubectl.json(&["get", "clusterrolebinding", "x"]).await?;
    ensure!(binding["roleRef"]["name"] == "x", "{binding}");
    Ok(())
}
