//! Certificate files for TLS with https targets, watched while the server runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use rustls::sign::CertifiedKey;
use tracing::warn;
use tunnel_process::file_watch::Loaded;
use tunnel_process::meta::Readiness;
use tunnel_proto::tls::files::{FileError, KeyPairFiles};

use super::context::ServerContext;
use super::credential_watcher::{read_pair, report_expiry};
use crate::ingress::target_tls::TargetTls;
use crate::metrics::Metrics;

/// Metric label and log name of the server's own client certificate.
const TARGET_CERTIFICATE: &str = "target_certificate";
/// Name under which `/readyz?verbose` reports that no client certificate is available, as for a
/// certificate requested from the cluster.
const CONDITION: &str = "kubelet certificate";
/// Digest that stands for missing files. No content has it.
const ABSENT: [u8; 32] = [0; 32];

/// Builds the TLS configuration for https targets and client-certificate delegation.
pub(super) fn build(context: &ServerContext) -> anyhow::Result<Arc<TargetTls>> {
    let settings = &context.config.targets;
    let targets = match &settings.ca {
        Some(path) => {
            let new = |roots| TargetTls::new(Some(roots));
            (context.watcher).trust_file("target_ca", "--target-ca", path, new, TargetTls::trust)?
        }
        None => TargetTls::new(None)?,
    };
    if let Some(files) = &settings.identity {
        delegate(&targets, files, context).context("--target-cert-file, --target-key-file")?;
    }
    Ok(targets)
}

/// Loads and watches the client certificate for delegation. In a cluster the files may come from a
/// Secret that is created after the server has started. Until then no certificate is delegated, and
/// the readiness reports the condition.
fn delegate(
    targets: &Arc<TargetTls>,
    files: &KeyPairFiles,
    context: &ServerContext,
) -> anyhow::Result<()> {
    let may_come_later = context.config.kubernetes.is_some();
    let mut delegated = DelegatedFiles {
        files: files.clone(),
        targets: targets.clone(),
        metrics: context.metrics.clone(),
        readiness: context.readiness.clone(),
        is_awaited: AtomicBool::new(false),
    };
    let digest = match read_pair(files) {
        Ok(own) => {
            delegated.report_expiry(&own.value);
            targets.delegate(own.value)?;
            own.digest
        }
        Err(error) if may_come_later && error.is_absent() => {
            let text = no_client_certificate(&error);
            warn!("{text}; retrying");
            context.readiness.set_conditions(CONDITION, vec![text]);
            delegated.is_awaited = AtomicBool::new(true);
            ABSENT
        }
        Err(error) => return Err(error.into()),
    };
    let delegated = Arc::new(delegated);
    let loaded = delegated.clone();
    let (load, apply) = (move || loaded.load(), move |own| delegated.apply(own));
    let watcher = &context.watcher;
    watcher.watch(TARGET_CERTIFICATE, digest, load, apply);
    Ok(())
}

/// The watched files of the client certificate for delegation.
struct DelegatedFiles {
    files: KeyPairFiles,
    targets: Arc<TargetTls>,
    metrics: Metrics,
    readiness: Readiness,
    /// Whether there was no certificate yet.
    is_awaited: AtomicBool,
}

impl DelegatedFiles {
    /// Loads the files. Absent files are no error while the certificate is awaited.
    fn load(&self) -> Result<Loaded<Option<Arc<CertifiedKey>>>, FileError> {
        let read = read_pair(&self.files);
        if let Err(error) = &read
            && self.is_awaited.load(Ordering::Relaxed)
        {
            let text = no_client_certificate(error);
            self.readiness.set_conditions(CONDITION, vec![text]);
            if error.is_absent() {
                return Ok(Loaded {
                    digest: ABSENT,
                    value: None,
                });
            }
        }
        read.map(|own| Loaded {
            digest: own.digest,
            value: Some(own.value),
        })
    }

    fn apply(&self, own: Option<Arc<CertifiedKey>>) -> Result<(), FileError> {
        let Some(own) = own else {
            return Ok(());
        };
        let KeyPairFiles { certificate, key } = &self.files;
        self.targets
            .delegate(own.clone())
            .map_err(|error| FileError::Pair(certificate.clone(), key.clone(), error))?;
        self.report_expiry(&own);
        if self.is_awaited.swap(false, Ordering::Relaxed) {
            self.readiness.set_conditions(CONDITION, Vec::new());
        }
        Ok(())
    }

    fn report_expiry(&self, own: &CertifiedKey) {
        report_expiry(TARGET_CERTIFICATE, own, &|not_after| {
            self.metrics.credential(TARGET_CERTIFICATE, not_after);
        });
    }
}

fn no_client_certificate(error: &FileError) -> String {
    format!("no client certificate for delegation to kubelets: {error}")
}
