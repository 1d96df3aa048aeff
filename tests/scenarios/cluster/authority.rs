//! State that all servers of a cluster share: one CA, and one set of join tokens and revocations.

mod daemonset;
mod first;
mod orders;
mod restart;
mod rotation;
mod shared;
pub(super) mod tokens;

pub(super) use restart::kill;

use anyhow::{Context, Result};
use tunnel_server::config::{ObjectNames, RawConfig};
use tunnel_tests::client::{BodyEnd, ByteStream, Endpoint, UpgradeClient};
use tunnel_tests::cluster::{Cluster, Kind};
use tunnel_tests::env::TestEnv;

/// Starts a fake API server with the Secrets that the manifests ship.
pub(super) async fn cluster() -> Result<Cluster> {
    Cluster::start(Kind::FakeApiServer)
        .await?
        .context("a stand-in")
}

/// Starts a server in this process that follows the cluster with the rights of its ServiceAccount.
/// The server starts with an empty disk.
pub(super) async fn server(
    cluster: &Cluster,
    change: impl FnOnce(&mut RawConfig),
) -> Result<TestEnv> {
    let kubeconfig = cluster.server_kubeconfig()?;
    TestEnv::start_with(|settings| {
        settings.kubernetes = Some("on".into());
        settings.kubeconfig = Some(kubeconfig.to_string_lossy().into_owned());
        settings.namespace = Some("kube-system".into());
        change(settings);
    })
    .await
}

const SECRETS: &str = "/api/v1/namespaces/kube-system/secrets";

fn ca_secret() -> String {
    ObjectNames::default().ca_secret
}

/// Replaces a key of the Secret of the CA, as an operator does.
async fn set_ca(cluster: &Cluster, key: &str, text: &str) -> Result<()> {
    let values = [(key, text)];
    cluster.objects().set_secret(&ca_secret(), &values).await
}

/// A running `kubectl exec` whose far end echoes.
pub(super) struct Exec(ByteStream);

impl Exec {
    pub(super) async fn start(endpoint: Endpoint, port: u16) -> Result<Self> {
        let client = UpgradeClient::spdy(&format!("worker-1:{port}"), "/exec/default/pod/c");
        Ok(Self(client.connect(endpoint).await?.switched()?))
    }

    pub(super) async fn goes_on(&mut self) -> Result<()> {
        self.0.send(b"still here").await?;
        let echoed = self.0.receive(10).await?;
        anyhow::ensure!(echoed == b"still here", "{echoed:?}");
        Ok(())
    }

    /// Returns how the far end's direction ends.
    pub(super) async fn ended(&mut self) -> BodyEnd {
        self.0.read_to_end().await.ended
    }
}
