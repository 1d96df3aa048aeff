//! The server's credentials for agents, and the trust anchors for agents' certificates: from the
//! local CA, or from files of the operator, which are watched while the server runs.

use std::sync::Arc;

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use tracing::error;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::{self, AgentTrust};

use super::credential_watcher::{CredentialWatcher, read_roots, watch_pair};
use crate::ca::LocalCa;
use crate::ca::renewal::Renewals;
use crate::ca::revocation::Revocations;
use crate::config::{Config, KubeletCa};

/// The credentials and trust anchors for agents' handshakes.
pub(super) struct AgentAuth {
    pub(super) own: Arc<dyn ResolvesServerCert>,
    pub(super) trust: Arc<AgentTrust>,
    /// Issuer of agents' certificates, if the local CA issues them.
    pub(super) renewals: Option<Arc<Renewals>>,
    /// Certificate for enrollment connections. The local CA issues it, because join tokens pin that
    /// CA.
    pub(super) enrollment: Arc<dyn ResolvesServerCert>,
}

/// Builds the credentials for agents' handshakes and watches their files.
pub(super) fn agent_auth(
    config: &Config,
    ca: &Arc<LocalCa>,
    revocations: &Arc<Revocations>,
    watcher: &CredentialWatcher<'_>,
) -> anyhow::Result<AgentAuth> {
    let metrics = watcher.metrics.clone();
    let Some(files) = &config.agent_files else {
        let own = ca.server_resolver(Box::new(move |not_after| metrics.certificate(not_after)));
        let trust = AgentTrust::new(tls::roots(ca.roots())?, revocations.revocation_check())?;
        watch_ca(ca, &trust, watcher.shutdown);
        let renewals = Renewals {
            ca: ca.clone(),
            trust: trust.clone(),
            revocations: revocations.clone(),
        };
        return Ok(AgentAuth {
            enrollment: own.clone(),
            own,
            trust,
            renewals: Some(Arc::new(renewals)),
        });
    };
    let record_expiry = move |not_after| metrics.certificate(not_after);
    let own = watch_pair("agent_certificate", &files.pair, watcher, record_expiry)
        .context("--agent-cert-file, --agent-key-file")?;
    let roots = read_roots(&files.ca).context("--agent-ca")?;
    let trust = AgentTrust::new(roots.value, revocations.revocation_check())?;
    let swapped = trust.clone();
    let apply = move |roots| swapped.replace(roots);
    watcher.watch_roots("agent_ca", &files.ca, roots.digest, apply);
    Ok(AgentAuth {
        enrollment: ca.server_resolver(Box::new(|_| {})),
        own,
        trust,
        renewals: None,
    })
}

/// Loads and watches the CA file that admits kubelets as agents. Without a file, the cluster
/// provides the CA.
pub(super) fn watch_kubelet_ca(
    config: &Config,
    agents: &AgentAuth,
    watcher: &CredentialWatcher<'_>,
) -> anyhow::Result<()> {
    let KubeletCa::File(path) = &config.kubelet_ca else {
        return Ok(());
    };
    let first = read_roots(path).context("--kubelet-client-ca")?;
    agents.trust.replace_cluster(first.value)?;
    let trust = agents.trust.clone();
    let replace = move |roots| trust.replace_cluster(roots);
    watcher.watch_roots("kubelet_client_ca", path, first.digest, replace);
    Ok(())
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
