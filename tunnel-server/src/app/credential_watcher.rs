//! Credential files of the operator, which are watched while the server runs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use rustls::RootCertStore;
use rustls::sign::CertifiedKey;
use tracing::warn;
use tunnel_process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_process::meta::Readiness;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::identity::validity;
use tunnel_proto::tls::files::{FileError, KeyPairFiles, digest_of, load_roots};
use tunnel_proto::tls::{self, ReloadableKey};

use crate::metrics::Metrics;
use tunnel_store::data_dir::rfc3339;

/// Remaining lifetime below which a certificate's expiry is logged, at start and when the
/// certificate is replaced.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 86400);

/// The settings and handles for watching credential files.
#[derive(Debug)]
pub(super) struct CredentialWatcher {
    pub(super) interval: Duration,
    /// Has a condition while a watched file is unusable.
    pub(super) readiness: Readiness,
    pub(super) metrics: Metrics,
    pub(super) shutdown: Shutdown,
}

impl CredentialWatcher {
    /// Creates a trust in the CA certificates of a file, and replaces its roots when the file changes.
    /// Errors name the `setting`.
    pub(super) fn trust_file<T: Send + Sync + 'static>(
        &self,
        what: &'static str,
        setting: &'static str,
        path: &Path,
        new: impl FnOnce(Arc<RootCertStore>) -> Result<Arc<T>, rustls::Error>,
        replace: fn(&T, Arc<RootCertStore>) -> Result<(), rustls::Error>,
    ) -> anyhow::Result<Arc<T>> {
        let first = read_roots(path).context(setting)?;
        let trust = new(first.value).context(setting)?;
        let (replaced, read, named) = (trust.clone(), path.to_owned(), path.to_owned());
        let apply = move |roots| {
            replace(&replaced, roots).map_err(|error| FileError::Root(named.clone(), error))
        };
        self.watch(what, first.digest, move || read_roots(&read), apply);
        Ok(trust)
    }

    /// Watches files whose current content has `digest`.
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
        let (metrics, readiness) = (self.metrics.clone(), self.readiness.clone());
        metrics.watched(what);
        self.shutdown.spawn_service(async move {
            let on_reload = move |reload: ReloadOutcome<'_>| {
                metrics.reloaded(what, reload);
                if let Some(lines) = reload.condition() {
                    readiness.set_conditions(what, lines);
                }
            };
            watcher.run(load, apply, on_reload).await;
        });
    }
}

/// Loads and watches a certificate chain and key. Calls `record_expiry` with the expiry of each
/// certificate.
pub(super) fn watch_pair(
    what: &'static str,
    files: &KeyPairFiles,
    watcher: &CredentialWatcher,
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
    let read = files.clone();
    watcher.watch(what, first.digest, move || read_pair(&read), apply);
    Ok(held)
}

pub(super) fn read_pair(files: &KeyPairFiles) -> Result<Loaded<Arc<CertifiedKey>>, FileError> {
    let value = files.load()?;
    let digest = digest_of(&value.cert);
    Ok(Loaded { digest, value })
}

fn read_roots(path: &Path) -> Result<Loaded<Arc<RootCertStore>>, FileError> {
    let roots = load_roots(path)?;
    let digest = digest_of(&roots);
    let value = tls::roots(roots).map_err(|error| FileError::Root(path.to_owned(), error))?;
    Ok(Loaded { digest, value })
}

pub(super) fn report_expiry(what: &str, own: &CertifiedKey, record_expiry: &impl Fn(SystemTime)) {
    let ends = own.cert.first().and_then(|leaf| validity(leaf).ok());
    let Some((_, not_after)) = ends else {
        return;
    };
    record_expiry(not_after);
    if not_after < SystemTime::now() + EXPIRY_WARNING {
        let not_after = rfc3339(not_after);
        warn!(
            what,
            not_after, "certificate expires soon or has expired; replace its file"
        );
    }
}
