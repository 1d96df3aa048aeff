//! Selection of the CA, join tokens and revocations: from the data directory, or in a cluster from the
//! state that all servers share. The start waits for that state. The credentials
//! for agents' handshakes and the trust anchors come from the local CA, or from files of the
//! operator, which are watched while the server runs.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use prometheus_client::registry::Registry as MetricsRegistry;
use rustls::server::ResolvesServerCert;
use rustls::{RootCertStore, ServerConfig};
use tokio::net::TcpListener;
use tracing::{error, info};
use tunnel_process::meta::Meta;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls::{self, AgentTrust};
use tunnel_proto::transport::quic::QuicKeys;

use super::context::{ProcessContext, ServerContext};
use super::credential_watcher::{CredentialWatcher, watch_pair};
use crate::cluster::{ApiServerClock, ClusterHandle, UnknownMembership};
use crate::config::{Config, CredentialFiles, KubeletClientCa, KubernetesSettings};
use crate::session::refused;
use tunnel_ca::LocalCa;
use tunnel_ca::renewal::Renewals;
use tunnel_ca::revocation::Revocations;
use tunnel_ca::rotation::CaStore;
use tunnel_ca::tokens::TokenStore;

/// The credentials of the server and the state by which it admits agents.
pub(super) struct Authority {
    pub(super) ca: Arc<LocalCa>,
    /// The Secret of the CA, or `None` for a standalone server.
    pub(super) ca_secret: Option<Arc<dyn CaStore>>,
    pub(super) tokens: Arc<TokenStore>,
    pub(super) revocations: Arc<Revocations>,
    pub(super) keys: QuicKeys,
    /// Clock of the API server, or `None` for a standalone server.
    pub(super) api_server_clock: Option<ApiServerClock>,
    /// Connection to the cluster, or `None` for a standalone server.
    pub(super) cluster_handle: Option<ClusterHandle>,
    /// Returns the reason why it is not known which servers there are, if so.
    pub(super) unknown_servers: UnknownMembership,
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
        meta: Option<&TcpListener>,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Self> {
        let (config, data) = (&process.config, &process.data);
        if let Some(settings) = &config.kubernetes {
            return Self::load_shared(process, settings, meta, registry).await;
        }
        let ca = LocalCa::load_or_create(data)?;
        let ca = Arc::new(ca.with_life(config.limits.certificate_life));
        let tokens = TokenStore::open_cleaned(data, &process.shutdown)?;
        Ok(Self {
            tokens: Arc::new(tokens.marked_by(ca.clone())),
            ca,
            ca_secret: None,
            revocations: Arc::new(Revocations::open(data, is_issuer(config))?),
            keys: data.quic_keys()?,
            api_server_clock: None,
            cluster_handle: None,
            unknown_servers: Arc::new(|| None),
        })
    }

    async fn load_shared(
        process: &ProcessContext,
        settings: &KubernetesSettings,
        meta: Option<&TcpListener>,
        registry: &mut MetricsRegistry,
    ) -> anyhow::Result<Self> {
        let (config, data, shutdown) = (&process.config, &process.data, &process.shutdown);
        let cluster_handle = ClusterHandle::open(
            settings,
            &process.readiness,
            registry,
            config.limits.reload_every,
            shutdown,
        )
        .await?;
        let waiting = process.readiness.block("ca");
        let meanwhile = Shutdown::new();
        if let Some(meta) = meta {
            info!(address = %meta.local_addr()?, "waiting for the CA of the cluster; the meta port is open");
            // The server's metrics are not complete yet. This meta server exposes only conditions.
            Meta::new(process.readiness.clone(), MetricsRegistry::default()).start(
                duplicate_listener(meta).context("--meta-listen")?,
                &meanwhile,
            );
        }
        let life = config.limits.certificate_life;
        let shared = tokio::select! {
            shared = cluster_handle.shared_state(settings, data, life, shutdown) => Some(shared),
            () = shutdown.leaving().cancelled() => None,
            () = shutdown.stop().cancelled() => None,
        };
        meanwhile.finish().await;
        drop(waiting);
        let shared = shared.context("stopped before the CA was loaded from the cluster")??;
        let tokens = shared.tokens.marked_by(shared.ca.clone());
        let revocations = shared.revocations;
        // Only one server has the keys: the one with the data directory, or the only one.
        let keys = if settings.single_replica {
            shared.ca.quic_keys()
        } else {
            data.quic_keys()?
        };
        Ok(Self {
            ca: shared.ca,
            ca_secret: Some(shared.ca_secret),
            tokens: Arc::new(tokens),
            revocations: Arc::new(Revocations::open_shared(
                data,
                revocations,
                is_issuer(config),
            )?),
            keys,
            api_server_clock: Some(cluster_handle.clock()),
            cluster_handle: Some(cluster_handle),
            unknown_servers: Arc::new(|| None),
        })
    }
}

/// Returns whether the local CA issues the agents' certificates.
fn is_issuer(config: &Config) -> bool {
    config.agent_files.is_none()
}

fn duplicate_listener(listener: &TcpListener) -> std::io::Result<TcpListener> {
    let handle = listener.as_fd().try_clone_to_owned()?;
    TcpListener::from_std(handle.into())
}

/// The credentials and trust anchors for agents' handshakes.
pub(super) struct AgentAuth {
    own: Arc<dyn ResolvesServerCert>,
    pub(super) trust: Arc<AgentTrust>,
    /// Issuer of agents' certificates, if the local CA issues them.
    pub(super) renewals: Option<Arc<Renewals>>,
    /// Certificate for enrollment connections. The local CA issues it, because join tokens pin that
    /// CA.
    pub(super) enrollment: Arc<dyn ResolvesServerCert>,
}

impl AgentAuth {
    /// Builds the credentials, watches their files, and closes sessions whose certificate is
    /// revoked or whose CA is removed.
    pub(super) fn build(authority: &Authority, context: &ServerContext) -> anyhow::Result<Self> {
        let (revocations, registry) = (authority.revocations.clone(), context.registry.clone());
        let tasks = context.shutdown.clone();
        let close_revoked = move || refused::close_revoked(&revocations, &registry, &tasks);
        authority
            .revocations
            .enforce(&context.readiness, &context.shutdown, close_revoked);
        let agents = match &context.config.agent_files {
            Some(files) => Self::from_files(files, authority, &context.watcher)?,
            None => Self::from_ca(authority, context)?,
        };
        refused::follow_trust(&agents.trust, &context.registry, &context.shutdown);
        // Without a file, the cluster provides the CA of kubelets.
        if let KubeletClientCa::File(path) = &context.config.kubelet_client_ca {
            agents.watch_kubelet_client_ca(path, &context.watcher)?;
        }
        Ok(agents)
    }

    fn from_ca(authority: &Authority, context: &ServerContext) -> anyhow::Result<Self> {
        let (ca, revocations) = (&authority.ca, &authority.revocations);
        let metrics = context.metrics.clone();
        let own = ca.server_resolver(Box::new(move |not_after| metrics.certificate(not_after)));
        let new = |roots| AgentTrust::new(roots, revocations.revocation_check());
        let trust = trust_ca("agent_ca", ca, &context.shutdown, new, AgentTrust::replace)?;
        let renewals = Renewals {
            ca: ca.clone(),
            trust: trust.clone(),
            revocations: revocations.clone(),
        };
        Ok(Self {
            enrollment: own.clone(),
            own,
            trust,
            renewals: Some(Arc::new(renewals)),
        })
    }

    fn from_files(
        files: &CredentialFiles,
        authority: &Authority,
        watcher: &CredentialWatcher,
    ) -> anyhow::Result<Self> {
        let metrics = watcher.metrics.clone();
        let record_expiry = move |not_after| metrics.certificate(not_after);
        let own = watch_pair("agent_certificate", &files.pair, watcher, record_expiry)
            .context("--agent-cert-file, --agent-key-file")?;
        let new = |roots| AgentTrust::new(roots, authority.revocations.revocation_check());
        let trust = watcher.trust_file(
            "agent_ca",
            "--agent-ca",
            &files.ca,
            new,
            AgentTrust::replace,
        )?;
        Ok(Self {
            enrollment: authority.ca.server_resolver(Box::new(|_| {})),
            own,
            trust,
            renewals: None,
        })
    }

    /// Loads and watches the CA file that admits kubelets as agents.
    fn watch_kubelet_client_ca(
        &self,
        path: &Path,
        watcher: &CredentialWatcher,
    ) -> anyhow::Result<()> {
        let (what, setting) = ("kubelet_client_ca", "--kubelet-client-ca");
        let new = |roots| (self.trust.replace_cluster(roots)).map(|()| self.trust.clone());
        let watched = watcher.trust_file(what, setting, path, new, AgentTrust::replace_cluster);
        watched.map(drop)
    }

    pub(super) fn session_tls(&self, alpn: &[u8]) -> Result<Arc<ServerConfig>, rustls::Error> {
        tls::session_server(self.own.clone(), self.trust.clone(), alpn)
    }
}

/// Creates a trust in the local CA, and replaces its roots when the CA changes.
pub(super) fn trust_ca<T: Send + Sync + 'static>(
    what: &'static str,
    ca: &Arc<LocalCa>,
    shutdown: &Shutdown,
    new: impl FnOnce(Arc<RootCertStore>) -> Result<Arc<T>, rustls::Error>,
    replace: fn(&T, Arc<RootCertStore>) -> Result<(), rustls::Error>,
) -> Result<Arc<T>, rustls::Error> {
    let trust = new(tls::roots(ca.roots())?)?;
    let (ca, replaced, mut changed) = (ca.clone(), trust.clone(), ca.changed());
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            let roots = tls::roots(ca.roots());
            if let Err(error) = roots.and_then(|roots| replace(&replaced, roots)) {
                error!(what, %error, "cannot apply the new CA; still using the previous one");
            }
        }
    });
    Ok(trust)
}
