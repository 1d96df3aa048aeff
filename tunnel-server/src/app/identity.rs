//! What the server proves itself with towards agents, and whom it takes for one: the local CA, or what the operator
//! brings, which is followed while the server runs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use rustls::RootCertStore;
use rustls::server::ResolvesServerCert;
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;
use tracing::{error, warn};
use tunnel_proto::identity::{sha256, validity};
use tunnel_proto::process::file_watch::{FileWatcher, Loaded};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::files::{FileError, KeyPairFiles, load_roots};
use tunnel_proto::tls::{self, AgentTrust, ReloadableKey};

use crate::ca::LocalCa;
use crate::ca::renewal::Renewals;
use crate::ca::revocation::Revocations;
use crate::config::{Config, KubeletCa};
use crate::metrics::Metrics;

/// A certificate that ends sooner than this is told at start and when it is replaced.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 86400);

/// The server's part in agents' handshakes.
pub(super) struct AgentAuth {
    pub(super) own: Arc<dyn ResolvesServerCert>,
    pub(super) trust: Arc<AgentTrust>,
    /// Present when the local CA issues.
    pub(super) renewals: Option<Arc<Renewals>>,
    /// What enrollment's connections show; it goes with the join tokens, which pin the local CA.
    pub(super) enrollment: Arc<dyn ResolvesServerCert>,
}

/// What following files takes.
pub(super) struct CredentialWatcher<'a> {
    pub(super) interval: Duration,
    pub(super) metrics: &'a Metrics,
    pub(super) shutdown: &'a Shutdown,
}

/// Builds the agents' side and follows its files.
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

/// Kubelets as agents by a CA of the operator's file, followed; without one the cluster says it.
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

/// Trusts what the CA trusts, also when it becomes another.
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

/// A chain and key from files, followed; `record_expiry` hears when each certificate ends.
pub(super) fn watch_pair(
    what: &'static str,
    files: &KeyPairFiles,
    watcher: &CredentialWatcher<'_>,
    record_expiry: impl Fn(SystemTime) + Send + Sync + 'static,
) -> Result<Arc<ReloadableKey>, FileError> {
    let first = read_pair(files)?;
    report_expiry(what, &first.value, &record_expiry);
    let held = ReloadableKey::new(first.value);
    let swapped = held.clone();
    let apply = move |own: Arc<CertifiedKey>| {
        report_expiry(what, &own, &record_expiry);
        swapped.replace(own);
        Ok(())
    };
    watcher.watch_pair(what, files, first.digest, apply);
    Ok(held)
}

/// A chain and key as their files are at this moment.
pub(super) fn read_pair(files: &KeyPairFiles) -> Result<Loaded<Arc<CertifiedKey>>, FileError> {
    let value = files.load()?;
    let digest = digest_of(&value.cert);
    Ok(Loaded { digest, value })
}

/// CA certificates as their file is at this moment.
pub(super) fn read_roots(path: &Path) -> Result<Loaded<Arc<RootCertStore>>, FileError> {
    let roots = load_roots(path)?;
    let digest = digest_of(&roots);
    let value = tls::roots(roots).map_err(|error| FileError::Root(path.to_owned(), error))?;
    Ok(Loaded { digest, value })
}

impl CredentialWatcher<'_> {
    /// Follows the file of CA certificates whose content of that digest is in use; `apply` takes what is new.
    pub(super) fn watch_roots(
        &self,
        what: &'static str,
        path: &Path,
        digest: [u8; 32],
        mut apply: impl FnMut(Arc<RootCertStore>) -> Result<(), rustls::Error> + Send + 'static,
    ) {
        let (read, named) = (path.to_owned(), path.to_owned());
        let apply =
            move |roots| apply(roots).map_err(|error| FileError::Root(named.clone(), error));
        self.watch(what, digest, move || read_roots(&read), apply);
    }

    /// Follows the files of a chain and its key in the same way.
    pub(super) fn watch_pair(
        &self,
        what: &'static str,
        files: &KeyPairFiles,
        digest: [u8; 32],
        mut apply: impl FnMut(Arc<CertifiedKey>) -> Result<(), rustls::Error> + Send + 'static,
    ) {
        let (read, named) = (files.clone(), files.clone());
        let apply = move |own| {
            apply(own).map_err(|error| {
                FileError::Pair(named.certificate.clone(), named.key.clone(), error)
            })
        };
        self.watch(what, digest, move || read_pair(&read), apply);
    }

    /// Follows files whose content has `digest` now.
    pub(super) fn watch<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        what: &'static str,
        digest: [u8; 32],
        load: impl Fn() -> Result<Loaded<T>, E> + Send + Sync + 'static,
        apply: impl FnMut(T) -> Result<(), E> + Send + 'static,
    ) {
        let watcher = FileWatcher {
            what,
            interval: self.interval,
            reload_signal: self.shutdown.reloads(),
            digest,
        };
        let metrics = self.metrics.clone();
        self.shutdown.spawn_service(async move {
            let on_reload = move |reload| metrics.reloaded(what, reload);
            watcher.run(load, apply, on_reload).await;
        });
    }
}

/// Content that differs in any certificate differs in this; a key is its certificate's.
fn digest_of(certificates: &[CertificateDer<'_>]) -> [u8; 32] {
    let bytes: Vec<u8> = certificates.iter().flat_map(|der| der.to_vec()).collect();
    sha256(&bytes)
}

pub(super) fn report_expiry(what: &str, own: &CertifiedKey, record_expiry: &impl Fn(SystemTime)) {
    let ends = own.cert.first().and_then(|leaf| validity(leaf).ok());
    let Some((_, not_after)) = ends else {
        return;
    };
    record_expiry(not_after);
    if not_after < SystemTime::now() + EXPIRY_WARNING {
        let not_after = crate::store::data_dir::rfc3339(not_after);
        warn!(
            what,
            not_after, "certificate expires soon or has expired; replace its file"
        );
    }
}
