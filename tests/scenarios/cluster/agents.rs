//! Agents that prove their nodes with credentials of the cluster: the kubelet's certificate, or a
//! Pod's token.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tunnel_agent::config::RawConfig as AgentRawConfig;
use tunnel_server::config::RawConfig;
use tunnel_tests::apiserver::FakeApiServer;
use tunnel_tests::ca::{Issued, Leaf, TestCa};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::cluster::Cluster;
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;

use super::authority;

mod accounts;
mod apiserver;
mod kubelets;
mod streams;

pub(super) use accounts::claims;

/// A cluster with a CA of its clients, and an in-process server that follows the cluster with the
/// rights of the table.
struct Site {
    cluster: Cluster,
    client_ca: TestCa,
    env: TestEnv,
}

impl Site {
    async fn start() -> Result<Self> {
        Self::start_with(|_| {}).await
    }

    async fn start_with(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let cluster = authority::cluster().await?;
        let client_ca = TestCa::new("kubernetes")?;
        cluster.fake_api()?.set_client_ca(client_ca.pem())?;
        let env = authority::server(&cluster, |settings| {
            settings.limits = TestEnv::limits("reloadEvery: 50ms");
            change(settings);
        })
        .await?;
        let site = Self {
            cluster,
            client_ca,
            env,
        };
        fs::write(site.tunnel_ca(), site.env.ca().root_pem())?;
        // Until then callers get 503 `starting`.
        eventually("the nodes are known", WAIT_TIMEOUT, async || {
            let page = site.page("/readyz?verbose").await?;
            ensure!(!page.contains("[-] nodes of the cluster"), "{page}");
            anyhow::Ok(())
        })
        .await;
        Ok(site)
    }

    fn api(&self) -> Result<&FakeApiServer> {
        self.cluster.fake_api()
    }

    /// Returns the page at `path` of the server's meta port.
    async fn page(&self, path: &str) -> Result<String> {
        let head = RawRequest::get("meta", path);
        Ok(request(self.env.meta(), &head).await?.text())
    }

    /// Returns the file with the CA of the server, which stands for the mounted ConfigMap with the
    /// CA bundle.
    fn tunnel_ca(&self) -> PathBuf {
        self.env.path().join("tunnel-ca.crt")
    }

    /// Creates the PKI directory of a node's kubelet with a first certificate.
    fn kubelet(&self, node: &str) -> Result<KubeletPki> {
        let pki = KubeletPki {
            folder: self.env.path().join(format!("{node}-pki")),
        };
        fs::create_dir(&pki.folder)?;
        pki.rotate("1", &self.client_ca.issue(&Leaf::kubelet(node))?)?;
        Ok(pki)
    }

    /// Starts an agent whose only credential is the kubelet's certificate, and waits for its
    /// session.
    async fn agent_of_kubelet(
        &self,
        node: &str,
        pki: &KubeletPki,
        change: impl FnOnce(&mut AgentRawConfig),
    ) -> Result<Agent> {
        let config = self.env.agent_config_with(node, |settings| {
            settings.cert_file = Some(pki.current());
            settings.ca_file = Some(self.tunnel_ca());
            settings.limits = TestEnv::agent_limits("reloadEvery: 50ms");
            change(settings);
        })?;
        let agent = Agent::start(config).await?;
        self.env.connected(node).await;
        Ok(agent)
    }

    /// Creates a Pod of the agents' ServiceAccount on a node and returns its UID.
    fn pod(&self, name: &str, node: &str) -> Result<String> {
        let pod = json!({
            "metadata": { "name": name },
            "spec": { "nodeName": node, "serviceAccountName": "tunnel-agent", "containers": [] },
        });
        self.api()?.put("pods", Some("kube-system"), pod)?;
        let pod = self.api()?.get("pods", Some("kube-system"), name);
        let uid = pod.as_ref().and_then(|pod| pod["metadata"]["uid"].as_str());
        uid.map(str::to_owned).context("a Pod without uid")
    }
}

/// The directory `/var/lib/kubelet/pki` of a node.
struct KubeletPki {
    folder: PathBuf,
}

impl KubeletPki {
    fn current(&self) -> PathBuf {
        self.folder.join("kubelet-client-current.pem")
    }

    /// Rotates the certificate like `fileStore.Update` of `client-go/util/certificate`: writes a
    /// new file with certificate and key, and moves a link to it over the old link.
    fn rotate(&self, stamp: &str, issued: &Issued) -> Result<()> {
        let file = self.folder.join(format!("kubelet-client-{stamp}.pem"));
        fs::write(&file, format!("{}{}", issued.certificate, issued.key))?;
        only_the_owner(&file)?;
        let fresh = self.folder.join("kubelet-client-updated.pem");
        symlink(&file, &fresh)?;
        fs::rename(fresh, self.current())?;
        Ok(())
    }
}

fn only_the_owner(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(file, fs::Permissions::from_mode(0o600))?;
    Ok(())
}
