//! The files of TLS towards callers and https targets, followed while the server runs.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use rustls::sign::CertifiedKey;
use tracing::warn;
use tunnel_proto::process::meta::Readiness;
use tunnel_proto::process::reload::Fresh;
use tunnel_proto::tls::files::{FileError, PairFiles};

use super::identity::{Followed, fresh_pair, fresh_roots, told_end};
use crate::config::Config;
use crate::ingress::client_auth::DoorTls;
use crate::ingress::target_tls::Targets;

/// Label and log name of the server's own client certificate.
const TARGET_CERTIFICATE: &str = "target_certificate";
/// Under which `/readyz?verbose` tells that there is nothing to lend, as for a certificate that is asked of the cluster.
const PART: &str = "kubelet certificate";
/// In place of the digest of files that are not there yet; no content has it.
const ABSENT: [u8; 32] = [0; 32];

/// TLS of doors with `own`, and with the CA of callers if there is one, followed as `what`; the flag says whether callers
/// need a certificate.
pub(super) fn door_tls(
    what: &'static str,
    own: Arc<dyn ResolvesServerCert>,
    callers: Option<(&Path, bool)>,
    followed: &Followed<'_>,
) -> anyhow::Result<Arc<DoorTls>> {
    let Some((path, required)) = callers else {
        return Ok(DoorTls::new(own, None, false)?);
    };
    let roots = fresh_roots(path).context("--client-ca")?;
    let tls = DoorTls::new(own, Some(roots.value), required).context("--client-ca")?;
    let swapped = tls.clone();
    let apply = move |roots| swapped.trust(roots);
    followed.follow_roots(what, path, roots.digest, apply);
    Ok(tls)
}

/// TLS towards https targets, and what is lent to callers.
pub(super) fn targets(
    config: &Config,
    followed: &Followed<'_>,
    readiness: &Readiness,
) -> anyhow::Result<Arc<Targets>> {
    let settings = &config.targets;
    let roots = settings.ca.as_deref().map(fresh_roots).transpose();
    let roots = roots.context("--target-ca")?;
    let targets = Targets::new(roots.as_ref().map(|roots| roots.value.clone()))?;
    if let (Some(path), Some(roots)) = (&settings.ca, roots) {
        let swapped = targets.clone();
        let apply = move |roots| swapped.trust(roots);
        followed.follow_roots("target_ca", path, roots.digest, apply);
    }
    if let Some(files) = &settings.identity {
        let may_come_later = config.kubernetes.is_some();
        lend(&targets, files, may_come_later, followed, readiness)
            .context("--target-cert-file, --target-key-file")?;
    }
    Ok(targets)
}

/// Lends what the files hold, and follows them. In a cluster they are of a Secret that may be made after the server has
/// started: while there are none, nothing is lent, and `readiness` says so.
fn lend(
    targets: &Arc<Targets>,
    files: &PairFiles,
    may_come_later: bool,
    followed: &Followed<'_>,
    readiness: &Readiness,
) -> anyhow::Result<()> {
    let metrics = followed.metrics.clone();
    let note = move |not_after| metrics.credential(TARGET_CERTIFICATE, not_after);
    let digest = match fresh_pair(files) {
        Ok(own) => {
            told_end(TARGET_CERTIFICATE, &own.value, &note);
            targets.lend(own.value)?;
            own.digest
        }
        Err(error) if may_come_later && error.is_absent() => {
            let text = nothing_lent(&error);
            warn!("{text}; it is looked for again");
            readiness.note(PART, vec![text]);
            ABSENT
        }
        Err(error) => return Err(error.into()),
    };
    let waits = Arc::new(AtomicBool::new(digest == ABSENT));
    let (read, named) = (files.clone(), files.clone());
    let (still, waiting) = (waits.clone(), readiness.clone());
    let load = move || match fresh_pair(&read) {
        Err(error) if still.load(Ordering::Relaxed) => {
            waiting.note(PART, vec![nothing_lent(&error)]);
            let absent = Fresh {
                digest: ABSENT,
                value: None,
            };
            if error.is_absent() {
                Ok(absent)
            } else {
                Err(error)
            }
        }
        pair => pair.map(|own| Fresh {
            digest: own.digest,
            value: Some(own.value),
        }),
    };
    let (swapped, readiness) = (targets.clone(), readiness.clone());
    let apply = move |own: Option<Arc<CertifiedKey>>| {
        let Some(own) = own else {
            return Ok(());
        };
        let lent = swapped.lend(own.clone());
        lent.map_err(|error| FileError::Pair(named.certificate.clone(), named.key.clone(), error))?;
        told_end(TARGET_CERTIFICATE, &own, &note);
        if waits.swap(false, Ordering::Relaxed) {
            readiness.note(PART, Vec::new());
        }
        Ok(())
    };
    followed.follow(TARGET_CERTIFICATE, digest, load, apply);
    Ok(())
}

fn nothing_lent(error: &FileError) -> String {
    format!("no client certificate to lend for kubelets: {error}")
}
