//! Tasks that maintain the credentials of a running agent.
//!
//! One task reloads the operator's files. Another renews a certificate that expired while no
//! session could renew it, with its key. If the key is refused or the certificate was revoked, a
//! ServiceAccount token enrolls the agent again.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::sleep;
use tracing::{error, warn};
use tunnel_proto::process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::timers::sleep_coalesced;
use tunnel_proto::tls::files::{FileError, digest_of, load_roots};

use super::initial_credentials::{InitialCredentials, enrollment};
use crate::config::{Config, CredentialFiles};
use crate::connector::status::SessionStatuses;
use crate::credentials::{
    CredentialError, CredentialStore, Credentials, RotatingCredentials, Token, read_token,
};
use crate::enroll::{EnrollProof, enroll, renew_or_enroll};
use crate::error::causes;
use crate::metrics::Metrics;

/// Interval for checking the expiry of a certificate, since the wall clock may be changed.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Pause after a failed renewal that needs operator action.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// Least time between two renewals. A server that reports its own new certificates as expired must
/// not be asked in a tight loop.
const REISSUE_INTERVAL: Duration = Duration::from_secs(5);
/// The agent warns about the operator's certificates when less than this, or a quarter of their
/// lifetime, is left.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 86400);
/// Interval between two expiry warnings.
const WARN_INTERVAL: Duration = Duration::from_secs(6 * 3600);

pub(super) struct CredentialTasks<'a> {
    pub(super) rotating_credentials: &'a Arc<RotatingCredentials>,
    pub(super) config: &'a Config,
    pub(super) metrics: &'a Metrics,
    pub(super) statuses: &'a Arc<SessionStatuses>,
    pub(super) shutdown: &'a Shutdown,
}

impl CredentialTasks<'_> {
    /// Starts the tasks that the source of the first credentials needs: reloads of the operator's
    /// files, or renewals of an expired certificate.
    pub(super) fn start(&self, initial_credentials: &InitialCredentials) {
        let store = match initial_credentials {
            InitialCredentials::CredentialFiles(_, digest) => {
                if let Some(credential_files) = self.config.credential_files.clone() {
                    self.watch_credential_files(credential_files, *digest);
                }
                return;
            }
            InitialCredentials::Stored(_, store) => store,
            InitialCredentials::Enroll(enrollment) | InitialCredentials::Renew(enrollment, _) => {
                &enrollment.store
            }
        };
        self.watch_ca_file();
        self.renew(store.clone());
    }

    /// Renews a certificate that has expired, or that a server reports as expired.
    fn renew(&self, store: CredentialStore) {
        let rotating_credentials = self.rotating_credentials.clone();
        let mut config = self.config.clone();
        let drain = self.shutdown.drain().clone();
        let statuses = self.statuses.clone();
        self.shutdown.spawn_service(async move {
            while !drain.is_cancelled() {
                let mut is_revoked = false;
                tokio::select! {
                    () = drain.cancelled() => return,
                    () = rotating_credentials.rejected() => {}
                    () = rotating_credentials.revoked() => is_revoked = true,
                    () = sleep_coalesced(until_expiry(rotating_credentials.not_after())) => {
                        rotating_credentials.save().await;
                        if rotating_credentials.not_after() > SystemTime::now() {
                            continue;
                        }
                    }
                }
                let current = rotating_credentials.current();
                // --ca-file may have been replaced since the start.
                config.ca = rotating_credentials.ca();
                let by_token = service_account_token(&config).map(|token| {
                    let proof = EnrollProof::from_token(token, Some(current.not_after));
                    enrollment(&config, proof, &store, &statuses)
                });
                // Only a token helps against a revocation, and a join token comes from an operator.
                if is_revoked && by_token.is_none() {
                    continue;
                }
                let proof = EnrollProof::ExpiredCertificate(Box::new(current));
                let renewal = enrollment(&config, proof, &store, &statuses);
                let mut schedule = rotating_credentials.schedule();
                schedule.mark_unchanged();
                let enrolled = tokio::select! {
                    () = drain.cancelled() => return,
                    // A session has renewed the certificate first.
                    _ = schedule.changed() => continue,
                    enrolled = async {
                        match &by_token {
                            Some(by_token) if is_revoked => enroll(by_token).await,
                            Some(by_token) => renew_or_enroll(&renewal, by_token).await,
                            None => enroll(&renewal).await,
                        }
                    } => enrolled,
                };
                match enrolled {
                    Ok(enrolled) => {
                        rotating_credentials.adopt(enrolled, true).await;
                        sleep(REISSUE_INTERVAL).await;
                    }
                    Err(refused) => {
                        let error = causes(&refused);
                        error!(node = %renewal.node, error, "cannot renew the certificate; fix the reported cause");
                        sleep(REFUSED_PAUSE).await;
                    }
                }
            }
        });
    }

    /// Reloads --ca-file while the server issues certificates. The file may be in a mounted
    /// ConfigMap that is replaced with the CA.
    fn watch_ca_file(&self) {
        let (Some(path), Some(first)) = (self.config.ca_file.clone(), &self.config.ca) else {
            return;
        };
        let watcher = self.watcher("--ca-file", digest_of(first));
        let load = {
            let path = path.clone();
            move || {
                let value = load_roots(&path)?;
                let digest = digest_of(&value);
                Ok::<_, FileError>(Loaded { digest, value })
            }
        };
        let rotating_credentials = self.rotating_credentials.clone();
        let apply = move |roots| {
            let trusted = rotating_credentials.trust(roots);
            trusted.map_err(|error| FileError::Root(path.clone(), error))
        };
        let on_reload = on_reload(self.metrics.clone());
        self.shutdown
            .spawn_service(async move { watcher.run(load, apply, on_reload).await });
    }

    /// Reloads the operator's files, and warns when their certificate is about to expire.
    fn watch_credential_files(&self, credential_files: CredentialFiles, digest: [u8; 32]) {
        let watcher = self.watcher("--cert-file, --key-file, --ca-file", digest);
        let node = self.config.node_name.clone();
        let (sender, mut receiver) = tokio::sync::mpsc::channel::<Credentials>(1);
        let load = {
            let node = node.clone();
            move || credential_files.load(&node)
        };
        // A full queue contains newer credentials than those in use, and the next check follows.
        let apply = move |credentials| {
            let busy = |_| CredentialError::Busy;
            sender.try_send(credentials).map_err(busy)
        };
        let on_reload = on_reload(self.metrics.clone());
        self.shutdown
            .spawn_service(async move { watcher.run(load, apply, on_reload).await });
        let rotating_credentials = self.rotating_credentials.clone();
        let watched = rotating_credentials.clone();
        self.shutdown.spawn_service(async move {
            while let Some(credentials) = receiver.recv().await {
                rotating_credentials.adopt(credentials, true).await;
            }
        });
        self.shutdown.spawn_service(async move {
            loop {
                let current = watched.current();
                let life = current.not_after.duration_since(current.issued);
                let soon = EXPIRY_WARNING.min(life.unwrap_or_default() / 4);
                if current.not_after < SystemTime::now() + soon {
                    let ends = humantime::format_rfc3339_seconds(current.not_after);
                    warn!(%node, %ends, "certificate of --cert-file ends soon or has ended; replace the file");
                }
                sleep(WARN_INTERVAL).await;
            }
        });
    }

    fn watcher(&self, what: &'static str, digest: [u8; 32]) -> FileWatcher {
        FileWatcher {
            what,
            interval: self.config.limits.reload_every,
            reload_signal: self.shutdown.reloads(),
            digest,
        }
    }
}

/// Returns the observer of a file watcher that reports unusable files.
fn on_reload(metrics: Metrics) -> impl Fn(ReloadOutcome) + Send + 'static {
    move |reload| metrics.files_unusable(reload == ReloadOutcome::Failed)
}

fn service_account_token(config: &Config) -> Option<Token> {
    let token = read_token(config.token.as_ref()?, config.ca.is_some());
    token
        .ok()
        .filter(|token| matches!(token, Token::ServiceAccount(_)))
}

/// Returns the wait until the next expiry check.
fn until_expiry(not_after: SystemTime) -> Duration {
    let left = not_after
        .duration_since(SystemTime::now())
        .unwrap_or_default();
    // Certificates have whole seconds; check shortly after that second.
    (left + Duration::from_millis(100)).min(CHECK_INTERVAL)
}
