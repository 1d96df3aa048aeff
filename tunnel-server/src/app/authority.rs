//! Selection of the CA, join tokens, revocations and QUIC keys: from the data directory, or in a
//! cluster from the state that all servers share. The start waits for that state.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use anyhow::Context as _;
use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::info;
use tunnel_proto::process::meta::{Meta, Readiness};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicKeys;

use crate::ca::LocalCa;
use crate::ca::revocation::Revocations;
use crate::ca::tokens::TokenStore;
use crate::cluster::ClusterHandle;
use crate::config::{Config, KubernetesSettings};
use crate::store::data_dir::DataDir;

/// The credentials of the server and the state by which it admits agents.
pub(super) struct Authority {
    pub(super) ca: Arc<LocalCa>,
    pub(super) tokens: Arc<TokenStore>,
    pub(super) revocations: Arc<Revocations>,
    pub(super) keys: QuicKeys,
    /// Connection to the cluster, or `None` for a standalone server.
    pub(super) cluster_handle: Option<ClusterHandle>,
    pub(super) lease_guard: LeaseGuard,
}

/// The lease on the QUIC keys, if other servers could take them.
#[derive(Debug, Default)]
pub(super) struct LeaseGuard {
    lease: Option<crate::cluster::LeaseGuard>,
}

impl LeaseGuard {
    /// Releases the lease. Sessions that use the keys may continue. Cancel-safe.
    pub(super) async fn release(self, stop: &CancellationToken) {
        if let Some(lease) = self.lease {
            tokio::select! {
                () = lease.release() => {}
                () = stop.cancelled() => {}
            }
        }
    }
}

/// The inputs for loading the [`Authority`].
pub(super) struct AuthorityContext<'a> {
    pub(super) config: &'a Config,
    pub(super) data: &'a DataDir,
    pub(super) readiness: &'a Readiness,
    pub(super) shutdown: &'a Shutdown,
}

impl AuthorityContext<'_> {
    /// Loads the authority. In a cluster this may wait until an operator fixes the cluster. In the
    /// meantime the meta port reports the condition.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or created, or if the server is stopped before
    /// everything is loaded.
    pub(super) async fn authority(
        self,
        meta: &TcpListener,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Authority> {
        if let Some(settings) = &self.config.kubernetes {
            return self.shared_authority(settings, meta, registry).await;
        }
        let ca = LocalCa::load_or_create(self.data)?;
        Ok(Authority {
            ca: Arc::new(ca.with_life(self.config.limits.certificate_life)),
            tokens: Arc::new(TokenStore::open(self.data)?),
            revocations: Arc::new(Revocations::open(self.data, self.is_issuer())?),
            keys: self.data.quic_keys()?,
            cluster_handle: None,
            lease_guard: LeaseGuard::default(),
        })
    }

    async fn shared_authority(
        self,
        settings: &KubernetesSettings,
        meta: &TcpListener,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Authority> {
        let cluster_handle = ClusterHandle::open(settings, self.readiness, registry).await?;
        let waiting = self.readiness.block("ca");
        // The server's metrics are not complete yet, so this meta server exposes none.
        let meanwhile = Shutdown::new();
        let told = Meta::new(self.readiness.clone(), MetricsRegistry::default());
        info!(address = %meta.local_addr()?, "waiting for the CA of the cluster; the meta port is open");
        told.start(
            duplicate_listener(meta).context("--meta-listen")?,
            &meanwhile,
        );
        let life = self.config.limits.certificate_life;
        let shared = tokio::select! {
            shared = cluster_handle.cluster_ca(settings, (self.data, life), self.shutdown) => Some(shared),
            () = self.shutdown.drain().cancelled() => None,
            () = self.shutdown.stop().cancelled() => None,
        };
        meanwhile.finish().await;
        drop(waiting);
        let shared = shared.context("stopped before the CA was loaded from the cluster")??;
        let (tokens, revocations) = (shared.tokens, shared.revocations);
        Ok(Authority {
            ca: shared.ca,
            tokens: Arc::new(TokenStore::from_document(tokens)?),
            revocations: Arc::new(Revocations::from_document(revocations, self.is_issuer())?),
            keys: shared.keys,
            cluster_handle: Some(cluster_handle),
            lease_guard: LeaseGuard {
                lease: shared.lease_guard,
            },
        })
    }

    /// Returns whether the local CA issues the agents' certificates.
    fn is_issuer(&self) -> bool {
        self.config.agent_files.is_none()
    }
}

/// Duplicates the handle of a listener.
fn duplicate_listener(listener: &TcpListener) -> std::io::Result<TcpListener> {
    let handle = listener.as_fd().try_clone_to_owned()?;
    TcpListener::from_std(handle.into())
}
