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
use tunnel_proto::process::reload::{Follow, Fresh};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::files::{FileError, PairFiles, load_roots};
use tunnel_proto::tls::{self, AgentTrust, HeldKey};

use crate::ca::LocalCa;
use crate::ca::renewal::Renewals;
use crate::ca::revocation::Revocations;
use crate::config::{Config, KubeletCa};
use crate::metrics::Metrics;

/// A certificate that ends sooner than this is told at start and when it is replaced.
const ENDS_SOON: Duration = Duration::from_secs(7 * 86400);

/// The server's part in agents' handshakes.
pub(super) struct AgentSide {
    pub(super) own: Arc<dyn ResolvesServerCert>,
    pub(super) trust: Arc<AgentTrust>,
    /// Present when the local CA issues.
    pub(super) renewals: Option<Arc<Renewals>>,
    /// What enrolment's connections show; it goes with the join tokens, which pin the local CA.
    pub(super) enrolment: Arc<dyn ResolvesServerCert>,
}

/// What following files takes.
pub(super) struct Followed<'a> {
    pub(super) every: Duration,
    pub(super) metrics: &'a Metrics,
    pub(super) shutdown: &'a Shutdown,
}

/// Builds the agents' side and follows its files.
pub(super) fn agent_side(
    config: &Config,
    ca: &Arc<LocalCa>,
    revocations: &Arc<Revocations>,
    followed: &Followed<'_>,
) -> anyhow::Result<AgentSide> {
    let metrics = followed.metrics.clone();
    let Some(given) = &config.agent_files else {
        let own = ca.server_resolver(Box::new(move |not_after| metrics.certificate(not_after)));
        let trust = AgentTrust::new(tls::roots(ca.roots())?, revocations.judge())?;
        follow_ca(ca, &trust, followed.shutdown);
        let renewals = Renewals {
            ca: ca.clone(),
            trust: trust.clone(),
            revocations: revocations.clone(),
        };
        return Ok(AgentSide {
            enrolment: own.clone(),
            own,
            trust,
            renewals: Some(Arc::new(renewals)),
        });
    };
    let note = move |not_after| metrics.certificate(not_after);
    let own = follow_pair("agent_certificate", &given.pair, followed, note)
        .context("--agent-cert-file, --agent-key-file")?;
    let roots = fresh_roots(&given.ca).context("--agent-ca")?;
    let trust = AgentTrust::new(roots.value, revocations.judge())?;
    let swapped = trust.clone();
    let apply = move |roots| swapped.replace(roots);
    followed.follow_roots("agent_ca", &given.ca, roots.digest, apply);
    Ok(AgentSide {
        enrolment: ca.server_resolver(Box::new(|_| {})),
        own,
        trust,
        renewals: None,
    })
}

/// Kubelets as agents by a CA of the operator's file, followed; without one the cluster says it.
pub(super) fn follow_kubelets(
    config: &Config,
    agents: &AgentSide,
    followed: &Followed<'_>,
) -> anyhow::Result<()> {
    let KubeletCa::File(path) = &config.kubelet_ca else {
        return Ok(());
    };
    let first = fresh_roots(path).context("--kubelet-client-ca")?;
    agents.trust.replace_cluster(first.value)?;
    let trust = agents.trust.clone();
    let replace = move |roots| trust.replace_cluster(roots);
    followed.follow_roots("kubelet_client_ca", path, first.digest, replace);
    Ok(())
}

/// Trusts what the CA trusts, also when it becomes another.
fn follow_ca(ca: &Arc<LocalCa>, trust: &Arc<AgentTrust>, shutdown: &Shutdown) {
    let (ca, trust, mut changed) = (ca.clone(), trust.clone(), ca.changed());
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            let replaced = tls::roots(ca.roots()).and_then(|roots| trust.replace(roots));
            if let Err(error) = replaced {
                error!(%error, "agents' certificates are judged by the CA before this one");
            }
        }
    });
}

/// A chain and key from files, followed; `note` hears when each certificate ends.
pub(super) fn follow_pair(
    what: &'static str,
    files: &PairFiles,
    followed: &Followed<'_>,
    note: impl Fn(SystemTime) + Send + Sync + 'static,
) -> Result<Arc<HeldKey>, FileError> {
    let first = fresh_pair(files)?;
    told_end(what, &first.value, &note);
    let held = HeldKey::new(first.value);
    let swapped = held.clone();
    let apply = move |own: Arc<CertifiedKey>| {
        told_end(what, &own, &note);
        swapped.replace(own);
        Ok(())
    };
    followed.follow_pair(what, files, first.digest, apply);
    Ok(held)
}

/// A chain and key as their files are at this moment.
pub(super) fn fresh_pair(files: &PairFiles) -> Result<Fresh<Arc<CertifiedKey>>, FileError> {
    let value = files.load()?;
    let digest = digest_of(&value.cert);
    Ok(Fresh { digest, value })
}

/// CA certificates as their file is at this moment.
pub(super) fn fresh_roots(path: &Path) -> Result<Fresh<Arc<RootCertStore>>, FileError> {
    let roots = load_roots(path)?;
    let digest = digest_of(&roots);
    let value = tls::roots(roots).map_err(|error| FileError::Root(path.to_owned(), error))?;
    Ok(Fresh { digest, value })
}

impl Followed<'_> {
    /// Follows the file of CA certificates whose content of that digest is in use; `apply` takes what is new.
    pub(super) fn follow_roots(
        &self,
        what: &'static str,
        path: &Path,
        digest: [u8; 32],
        mut apply: impl FnMut(Arc<RootCertStore>) -> Result<(), rustls::Error> + Send + 'static,
    ) {
        let (read, named) = (path.to_owned(), path.to_owned());
        let apply =
            move |roots| apply(roots).map_err(|error| FileError::Root(named.clone(), error));
        self.follow(what, digest, move || fresh_roots(&read), apply);
    }

    /// Follows the files of a chain and its key in the same way.
    pub(super) fn follow_pair(
        &self,
        what: &'static str,
        files: &PairFiles,
        digest: [u8; 32],
        mut apply: impl FnMut(Arc<CertifiedKey>) -> Result<(), rustls::Error> + Send + 'static,
    ) {
        let (read, named) = (files.clone(), files.clone());
        let apply = move |own| {
            apply(own).map_err(|error| {
                FileError::Pair(named.certificate.clone(), named.key.clone(), error)
            })
        };
        self.follow(what, digest, move || fresh_pair(&read), apply);
    }

    /// Follows files whose content has `digest` now.
    pub(super) fn follow<T: Send + 'static, E: std::fmt::Display + Send + 'static>(
        &self,
        what: &'static str,
        digest: [u8; 32],
        load: impl Fn() -> Result<Fresh<T>, E> + Send + Sync + 'static,
        apply: impl FnMut(T) -> Result<(), E> + Send + 'static,
    ) {
        let follow = Follow {
            what,
            every: self.every,
            asked: self.shutdown.reloads(),
            digest,
        };
        let metrics = self.metrics.clone();
        self.shutdown.spawn_service(async move {
            let told = move |reload| metrics.reloaded(what, reload);
            follow.run(load, apply, told).await;
        });
    }
}

/// Content that differs in any certificate differs in this; a key is its certificate's.
fn digest_of(certificates: &[CertificateDer<'_>]) -> [u8; 32] {
    let bytes: Vec<u8> = certificates.iter().flat_map(|der| der.to_vec()).collect();
    sha256(&bytes)
}

pub(super) fn told_end(what: &str, own: &CertifiedKey, note: &impl Fn(SystemTime)) {
    let ends = own.cert.first().and_then(|leaf| validity(leaf).ok());
    let Some((_, not_after)) = ends else {
        return;
    };
    note(not_after);
    if not_after < SystemTime::now() + ENDS_SOON {
        let not_after = crate::store::data_dir::rfc3339(not_after);
        warn!(
            what,
            not_after, "certificate ends soon or has ended; replace its file"
        );
    }
}
