//! The commands of the guide for Helm, as printed, on a real API server: a release is installed,
//! upgraded and removed, and what the servers wrote stays.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tunnel_tests::cluster::{Families, Real};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::eventually;
use tunnel_tests::guides::{blocks, page};
use tunnel_tests::manifests::repository;
use tunnel_tests::process::{Program, ScratchDir};
use tunnel_tests::tools::{Tool, or_skip, require};

use crate::cluster::kustomizers;

/// Objects that the servers fill.
const FILLED: [&str; 4] = [
    "secret/tunnel-server-ca",
    "secret/tunnel-server-revocations",
    "configmap/tunnel-ca",
    "configmap/yurt-tunnel-nodes",
];

#[tokio::test(flavor = "multi_thread")]
async fn real_release_is_installed_upgraded_and_removed_by_the_commands_of_the_guide() -> Result<()>
{
    let Some(cluster) = HelmCluster::start().await? else {
        return Ok(());
    };
    let guide = page("docs/how-to/helm.md")?;
    let commands: Vec<_> = blocks(&guide)
        .into_iter()
        .filter(|block| block.runner() == Some("real"))
        .map(|block| block.text)
        .collect();
    let [install, upgrade, keep, uninstall] = &commands[..] else {
        anyhow::bail!("commands of the guide: {commands:?}");
    };
    cluster.run(install).await?;
    let deployment = cluster.get("deployment/tunnel-server").await?;
    ensure!(
        deployment["spec"]["template"]["spec"]["containers"][0]["image"]
            .as_str()
            .is_some_and(|image| image.starts_with("registry.example.com/culvert/tunnel-server:")),
        "{deployment:#}"
    );
    for object in FILLED {
        cluster.fill(object).await?;
    }
    cluster.run(upgrade).await?;
    let deployment = cluster.get("deployment/tunnel-server").await?;
    ensure!(deployment["spec"]["replicas"] == 3, "{deployment:#}");
    cluster.assert_filled("an upgrade").await?;
    cluster.run(keep).await?;
    cluster.run(uninstall).await?;
    cluster.assert_filled("an uninstallation").await?;
    let left = cluster
        .kubectl(&["get", "deployments,daemonsets,services,roles", "-o", "name"])
        .await?;
    let left: Vec<_> = left
        .lines()
        .filter(|name| name.contains("tunnel"))
        .collect();
    ensure!(left.is_empty(), "{left:?}");
    // The next release takes the objects over, as the guide says.
    cluster.run(install).await?;
    cluster.assert_filled("another installation").await
}

/// An API server, and Helm.
struct HelmCluster {
    real: Real,
    kubectl: PathBuf,
    helm: PathBuf,
    scratch: ScratchDir,
}

impl HelmCluster {
    async fn start() -> Result<Option<Self>> {
        let programs = Real::binaries().and_then(|folder| {
            require(&[Tool::Helm, Tool::Bash])?;
            Ok((folder, kustomizers()?))
        });
        let Some((folder, files)) = or_skip(programs) else {
            return Ok(None);
        };
        let own = folder.join("kubectl");
        let installed = files.into_iter().next().context("one at least")?;
        let kubectl = if own.is_file() { own } else { installed };
        let cluster = Self {
            real: Real::start(&folder, Families::V4).await?,
            kubectl,
            helm: Tool::Helm.find().context("helm")?,
            scratch: ScratchDir::new()?,
        };
        // The API server creates the namespace soon after its start.
        eventually("the namespace", WAIT_TIMEOUT, async || {
            cluster.kubectl(&["get", "namespace", "kube-system"]).await
        })
        .await;
        Ok(Some(cluster))
    }

    /// Runs commands of the guide in the root of the repository.
    async fn run(&self, commands: &str) -> Result<()> {
        let folder = |program: &PathBuf| program.parent().map(PathBuf::from).unwrap_or_default();
        let system = std::env::var_os("PATH").unwrap_or_default();
        let path = [folder(&self.helm), folder(&self.kubectl)]
            .into_iter()
            .chain(std::env::split_paths(&system));
        let script = format!("set -euo pipefail; cd \"$1\"\n{commands}");
        let ran = Program::tool(Tool::Bash)?
            .env("KUBECONFIG", self.real.admin_kubeconfig())
            .env("HOME", self.scratch.path())
            .env("PATH", std::env::join_paths(path)?)
            .args(["-c", &script, "guide"])
            .arg(repository())
            .run()
            .await?;
        ran.ok().map(drop)
    }

    async fn kubectl(&self, words: &[&str]) -> Result<String> {
        let program = Program::at(&self.kubectl)
            .env("KUBECONFIG", self.real.admin_kubeconfig())
            .env("HOME", self.scratch.path())
            .args(["--namespace", "kube-system"]);
        program.args(words.iter().copied()).run().await?.ok()
    }

    async fn get(&self, object: &str) -> Result<Value> {
        let text = self.kubectl(&["get", object, "-o", "json"]).await?;
        Ok(serde_json::from_str(&text)?)
    }

    /// Writes a key as a server does.
    async fn fill(&self, object: &str) -> Result<()> {
        let patch = json!({ "data": { "written": WRITTEN } }).to_string();
        let words = ["patch", object, "--type=merge", "--patch", &patch];
        self.kubectl(&words).await.map(drop)
    }

    async fn assert_filled(&self, after: &str) -> Result<()> {
        for object in FILLED {
            let found = self
                .get(object)
                .await
                .with_context(|| format!("after {after}"))?;
            ensure!(
                found["data"]["written"] == WRITTEN,
                "{object} after {after}"
            );
        }
        Ok(())
    }
}

/// A value of both kinds of objects: base64 for Secrets.
const WRITTEN: &str = "YnkgYSBzZXJ2ZXI=";
