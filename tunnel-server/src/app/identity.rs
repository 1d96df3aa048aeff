//! The server's credentials for agents, and the trust anchors for agents' certificates: from the
//! local CA, or from files of the operator, which are watched while the server runs.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::ServerConfig;
use rustls::server::ResolvesServerCert;
use tracing::error;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::{self, AgentTrust};

use super::authority::Authority;
use super::context::ServerContext;
use super::credential_watcher::{CredentialWatcher, read_roots, watch_pair};
use crate::ca::renewal::Renewals;
use crate::ca::{LocalCa, distrusted};
use crate::config::{AgentFiles, KubeletCa};

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
        authority
            .revocations
            .enforce(&context.registry, &context.shutdown);
        let agents = match &context.config.agent_files {
            Some(files) => Self::from_files(files, authority, &context.watcher)?,
            None => Self::from_ca(authority, context)?,
        };
        distrusted::enforce(&agents.trust, &context.registry, &context.shutdown);
        // Without a file, the cluster provides the CA of kubelets.
        if let KubeletCa::File(path) = &context.config.kubelet_ca {
            agents.watch_kubelet_ca(path, &context.watcher)?;
        }
        Ok(agents)
    }

    fn from_ca(authority: &Authority, context: &ServerContext) -> anyhow::Result<Self> {
        let (ca, revocations) = (&authority.ca, &authority.revocations);
        let metrics = context.metrics.clone();
        let own = ca.server_resolver(Box::new(move |not_after| metrics.certificate(not_after)));
        let trust = AgentTrust::new(tls::roots(ca.roots())?, revocations.revocation_check())?;
        watch_ca(ca, &trust, &context.shutdown);
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
        files: &AgentFiles,
        authority: &Authority,
        watcher: &CredentialWatcher,
    ) -> anyhow::Result<Self> {
        let metrics = watcher.metrics.clone();
        let record_expiry = move |not_after| metrics.certificate(not_after);
        let own = watch_pair("agent_certificate", &files.pair, watcher, record_expiry)
            .context("--agent-cert-file, --agent-key-file")?;
        let roots = read_roots(&files.ca).context("--agent-ca")?;
        let trust = AgentTrust::new(roots.value, authority.revocations.revocation_check())?;
        let swapped = trust.clone();
        let apply = move |roots| swapped.replace(roots);
        watcher.watch_roots("agent_ca", &files.ca, roots.digest, apply);
        Ok(Self {
            enrollment: authority.ca.server_resolver(Box::new(|_| {})),
            own,
            trust,
            renewals: None,
        })
    }

    /// Loads and watches the CA file that admits kubelets as agents.
    fn watch_kubelet_ca(&self, path: &Path, watcher: &CredentialWatcher) -> anyhow::Result<()> {
        let first = read_roots(path).context("--kubelet-client-ca")?;
        self.trust.replace_cluster(first.value)?;
        let trust = self.trust.clone();
        let replace = move |roots| trust.replace_cluster(roots);
        watcher.watch_roots("kubelet_client_ca", path, first.digest, replace);
        Ok(())
    }

    /// Returns the TLS configuration of sessions with this ALPN id.
    pub(super) fn session_tls(&self, alpn: &[u8]) -> Result<Arc<ServerConfig>, rustls::Error> {
        tls::session_server_with_trust(self.own.clone(), self.trust.clone(), alpn)
    }
}

/// Updates the trusted roots whenever the CA is replaced.
fn watch_ca(ca: &Arc<LocalCa>, trust: &Arc<AgentTrust>, shutdown: &Shutdown) {
    let (ca, trust, mut changed) = (ca.clone(), trust.clone(), ca.changed());
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            let replaced = tls::roots(ca.roots()).and_then(|roots| trust.replace(roots));
            if let Err(error) = replaced {
                error!(%error, "cannot apply the new agent CA; still using the previous one");
            }
        }
    });
}
