//! Selection of the CA, join tokens, revocations and QUIC keys: from the data directory, or in a
//! cluster from the state that all servers share. The start waits for that state.

use std::os::fd::AsFd as _;
use std::sync::Arc;

use anyhow::Context as _;
use prometheus_client::registry::Registry as MetricsRegistry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::info;
use tunnel_proto::process::meta::Meta;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicKeys;

use super::context::ProcessContext;
use crate::ca::LocalCa;
use crate::ca::revocation::Revocations;
use crate::ca::tokens::TokenStore;
use crate::cluster::ClusterHandle;
use crate::config::{Config, KubernetesSettings};

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

impl Authority {
    /// Loads the authority. In a cluster this may wait until an operator fixes the cluster. In the
    /// meantime the meta port reports the condition.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or created, or if the server is stopped before
    /// everything is loaded.
    pub(super) async fn load(
        process: &ProcessContext,
        meta: &TcpListener,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Self> {
        let (config, data) = (&process.config, &process.data);
        if let Some(settings) = &config.kubernetes {
            return Self::load_shared(process, settings, meta, registry).await;
        }
        let ca = LocalCa::load_or_create(data)?;
        Ok(Self {
            ca: Arc::new(ca.with_life(config.limits.certificate_life)),
            tokens: Arc::new(TokenStore::open(data)?),
            revocations: Arc::new(Revocations::open(data, is_issuer(config))?),
            keys: data.quic_keys()?,
            cluster_handle: None,
            lease_guard: LeaseGuard::default(),
        })
    }

    async fn load_shared(
        process: &ProcessContext,
        settings: &KubernetesSettings,
        meta: &TcpListener,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Self> {
        let (config, data, shutdown) = (&process.config, &process.data, &process.shutdown);
        let cluster_handle = ClusterHandle::open(settings, &process.readiness, registry).await?;
        let waiting = process.readiness.block("ca");
        // The server's metrics are not complete yet, so this meta server exposes none.
        let meanwhile = Shutdown::new();
        let meta_server = Meta::new(process.readiness.clone(), MetricsRegistry::default());
        info!(address = %meta.local_addr()?, "waiting for the CA of the cluster; the meta port is open");
        meta_server.start(
            duplicate_listener(meta).context("--meta-listen")?,
            &meanwhile,
        );
        let life = config.limits.certificate_life;
        let shared = tokio::select! {
            shared = cluster_handle.cluster_ca(settings, data, life, shutdown) => Some(shared),
            () = shutdown.drain().cancelled() => None,
            () = shutdown.stop().cancelled() => None,
        };
        meanwhile.finish().await;
        drop(waiting);
        let shared = shared.context("stopped before the CA was loaded from the cluster")??;
        let (tokens, revocations) = (shared.tokens, shared.revocations);
        Ok(Self {
            ca: shared.ca,
            tokens: Arc::new(TokenStore::from_document(tokens)?),
            revocations: Arc::new(Revocations::from_document(revocations, is_issuer(config))?),
            keys: shared.keys,
            cluster_handle: Some(cluster_handle),
            lease_guard: LeaseGuard {
                lease: shared.lease_guard,
            },
        })
    }
}

/// Returns whether the local CA issues the agents' certificates.
fn is_issuer(config: &Config) -> bool {
    config.agent_files.is_none()
}

/// Duplicates the handle of a listener.
fn duplicate_listener(listener: &TcpListener) -> std::io::Result<TcpListener> {
    let handle = listener.as_fd().try_clone_to_owned()?;
    TcpListener::from_std(handle.into())
}
