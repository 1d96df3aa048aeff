//! The CA, join tokens, revocations and QUIC keys: from the data directory, or in a cluster from what all servers share,
//! which a start waits for.

use std::sync::Arc;

use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicKeys;

use crate::ca::LocalCa;
use crate::ca::revocation::Revocations;
use crate::ca::tokens::TokenStore;
use crate::config::Config;
use crate::store::data_dir::DataDir;

/// The way to the cluster.
#[cfg(feature = "kubernetes")]
pub(super) type Side = crate::cluster::ClusterSide;
/// This build has none.
#[cfg(not(feature = "kubernetes"))]
pub(super) type Side = std::convert::Infallible;

/// What a server proves itself with and admits agents by.
pub(super) struct Authority {
    pub(super) ca: Arc<LocalCa>,
    pub(super) tokens: Arc<TokenStore>,
    pub(super) revocations: Arc<Revocations>,
    pub(super) keys: QuicKeys,
    /// Present in a cluster.
    pub(super) side: Option<Side>,
    pub(super) holding: Holding,
}

/// The right to the QUIC keys, where others could get it.
#[derive(Debug, Default)]
pub(super) struct Holding {
    #[cfg(feature = "kubernetes")]
    lease: Option<crate::cluster::Holding>,
}

impl Holding {
    /// Gives the right back; the sessions that have the keys may go on. Cancel-safe.
    pub(super) async fn release(self, stop: &CancellationToken) {
        #[cfg(feature = "kubernetes")]
        if let Some(lease) = self.lease {
            tokio::select! {
                () = lease.release() => {}
                () = stop.cancelled() => {}
            }
        }
        #[cfg(not(feature = "kubernetes"))]
        let _nobody_to_give_it_back_to = (self, stop);
        std::future::ready(()).await;
    }
}

/// What finding it takes.
pub(super) struct Opening<'a> {
    pub(super) config: &'a Config,
    pub(super) data: &'a DataDir,
    pub(super) readiness: &'a Readiness,
    pub(super) shutdown: &'a Shutdown,
}

impl Opening<'_> {
    /// Finds all of it. In a cluster this may take until somebody mends the cluster; meanwhile the meta port tells what
    /// is wrong.
    ///
    /// # Errors
    /// When a file cannot be read or made, or the server is to stop before it has all.
    pub(super) async fn authority(
        self,
        meta: &TcpListener,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Authority> {
        #[cfg(feature = "kubernetes")]
        if let Some(settings) = &self.config.kubernetes {
            return self.of_cluster(settings, meta, registry).await;
        }
        let _only_a_cluster_is_waited_for = (meta, registry, self.readiness, self.shutdown);
        std::future::ready(()).await;
        let ca = LocalCa::load_or_create(self.data)?;
        Ok(Authority {
            ca: Arc::new(ca.with_life(self.config.limits.certificate_life)),
            tokens: Arc::new(TokenStore::open(self.data)?),
            revocations: Arc::new(Revocations::open(self.data, self.is_issuer())?),
            keys: self.data.quic_keys()?,
            side: None,
            holding: Holding::default(),
        })
    }

    #[cfg(feature = "kubernetes")]
    async fn of_cluster(
        self,
        settings: &crate::config::KubernetesSettings,
        meta: &TcpListener,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Authority> {
        use anyhow::Context as _;
        use tracing::info;
        use tunnel_proto::process::meta::Meta;

        let side = Side::open(settings, self.readiness, registry).await?;
        let waiting = self.readiness.block("ca");
        // The metrics are not complete yet, so that this one has none.
        let meanwhile = Shutdown::new();
        let told = Meta::new(self.readiness.clone(), MetricsRegistry::default());
        info!(address = %meta.local_addr()?, "waiting for the CA of the cluster, meta port is open");
        told.start(again(meta).context("--meta-listen")?, &meanwhile);
        let life = self.config.limits.certificate_life;
        let shared = tokio::select! {
            shared = side.authority(settings, (self.data, life), self.shutdown) => Some(shared),
            () = self.shutdown.drain().cancelled() => None,
            () = self.shutdown.stop().cancelled() => None,
        };
        meanwhile.finish().await;
        drop(waiting);
        let shared = shared.context("stopped before the cluster gave a CA")??;
        let (tokens, revocations) = (shared.tokens, shared.revocations);
        Ok(Authority {
            ca: shared.ca,
            tokens: Arc::new(TokenStore::over(tokens)?),
            revocations: Arc::new(Revocations::over(revocations, self.is_issuer())?),
            keys: shared.keys,
            side: Some(side),
            holding: Holding {
                lease: shared.holding,
            },
        })
    }

    /// Whether agents' certificates are of our CA.
    fn is_issuer(&self) -> bool {
        self.config.agent_files.is_none()
    }
}

/// Another handle to the same listener.
#[cfg(feature = "kubernetes")]
fn again(listener: &TcpListener) -> std::io::Result<TcpListener> {
    use std::os::fd::AsFd as _;

    let handle = listener.as_fd().try_clone_to_owned()?;
    TcpListener::from_std(handle.into())
}
