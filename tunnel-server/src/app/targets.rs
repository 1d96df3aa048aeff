//! The files of TLS towards callers and https targets, followed while the server runs.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::server::ResolvesServerCert;
use rustls::sign::CertifiedKey;

use super::identity::{Followed, fresh_pair, fresh_roots, told_end};
use crate::callers::DoorTls;
use crate::config::Config;
use crate::targets::Targets;

/// Label and log name of the server's own client certificate.
const TARGET_CERTIFICATE: &str = "target_certificate";

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
pub(super) fn targets(config: &Config, followed: &Followed<'_>) -> anyhow::Result<Arc<Targets>> {
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
        let context = "--target-cert-file, --target-key-file";
        let own = fresh_pair(files).context(context)?;
        let metrics = followed.metrics.clone();
        let note = move |not_after| metrics.credential(TARGET_CERTIFICATE, not_after);
        told_end(TARGET_CERTIFICATE, &own.value, &note);
        targets.lend(own.value).context(context)?;
        let swapped = targets.clone();
        let apply = move |own: Arc<CertifiedKey>| {
            told_end(TARGET_CERTIFICATE, &own, &note);
            swapped.lend(own)
        };
        followed.follow_pair(TARGET_CERTIFICATE, files, own.digest, apply);
    }
    Ok(targets)
}
