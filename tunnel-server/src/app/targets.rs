//! Certificate files for TLS with https targets, watched while the server runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use rustls::sign::CertifiedKey;
use tracing::warn;
use tunnel_proto::process::file_watch::Loaded;
use tunnel_proto::tls::files::{FileError, KeyPairFiles};

use super::context::ServerContext;
use super::credential_watcher::{read_pair, read_roots, report_expiry};
use crate::ingress::target_tls::TargetTls;

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
    let roots = settings.ca.as_deref().map(read_roots).transpose();
    let roots = roots.context("--target-ca")?;
    let targets = TargetTls::new(roots.as_ref().map(|roots| roots.value.clone()))?;
    if let (Some(path), Some(roots)) = (&settings.ca, roots) {
        let swapped = targets.clone();
        let apply = move |roots| swapped.trust(roots);
        let watcher = &context.watcher;
        watcher.watch_roots("target_ca", path, roots.digest, apply);
    }
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
    let (metrics, readiness) = (context.metrics.clone(), &context.readiness);
    let may_come_later = context.config.kubernetes.is_some();
    let note = move |not_after| metrics.credential(TARGET_CERTIFICATE, not_after);
    let digest = match read_pair(files) {
        Ok(own) => {
            report_expiry(TARGET_CERTIFICATE, &own.value, &note);
            targets.delegate(own.value)?;
            own.digest
        }
        Err(error) if may_come_later && error.is_absent() => {
            let text = no_client_certificate(&error);
            warn!("{text}; retrying");
            readiness.set_conditions(CONDITION, vec![text]);
            ABSENT
        }
        Err(error) => return Err(error.into()),
    };
    let waits = Arc::new(AtomicBool::new(digest == ABSENT));
    let (read, named) = (files.clone(), files.clone());
    let (still, waiting) = (waits.clone(), readiness.clone());
    let load = move || match read_pair(&read) {
        Err(error) if still.load(Ordering::Relaxed) => {
            waiting.set_conditions(CONDITION, vec![no_client_certificate(&error)]);
            let absent = Loaded {
                digest: ABSENT,
                value: None,
            };
            if error.is_absent() {
                Ok(absent)
            } else {
                Err(error)
            }
        }
        pair => pair.map(|own| Loaded {
            digest: own.digest,
            value: Some(own.value),
        }),
    };
    let (swapped, readiness) = (targets.clone(), readiness.clone());
    let apply = move |own: Option<Arc<CertifiedKey>>| {
        let Some(own) = own else {
            return Ok(());
        };
        let delegated = swapped.delegate(own.clone());
        delegated.map_err(|error| {
            FileError::Pair(named.certificate.clone(), named.key.clone(), error)
        })?;
        report_expiry(TARGET_CERTIFICATE, &own, &note);
        if waits.swap(false, Ordering::Relaxed) {
            readiness.set_conditions(CONDITION, Vec::new());
        }
        Ok(())
    };
    let watcher = &context.watcher;
    watcher.watch(TARGET_CERTIFICATE, digest, load, apply);
    Ok(())
}

fn no_client_certificate(error: &FileError) -> String {
    format!("no client certificate for delegation to kubelets: {error}")
}
