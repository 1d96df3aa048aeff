//! Tasks that maintain the credentials of a running agent.
//!
//! One task reloads the operator's files. Another renews a certificate that expired while no
//! session could renew it, with its key. If the key is refused, a token enrolls the agent again, and
//! so it does if servers and the certificate are of different CAs. Against a revocation a
//! ServiceAccount token may help, which the kubelet replaces.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};
use tunnel_process::backoff::Backoff;
use tunnel_process::errors::causes;
use tunnel_process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_process::shutdown::Shutdown;
use tunnel_process::timers::sleep_coalesced;
use tunnel_proto::tls::files::{FileError, digest_of, load_roots};

use super::initial_credentials::{InitialCredentials, enrollment};
use crate::config::{Config, CredentialFiles};
use crate::connector::status::SessionStatuses;
use crate::credentials::{
    CaFile, CredentialError, CredentialStore, Credentials, Refusal, RotatingCredentials, Token,
    TrustRoots, read_token,
};
use crate::enroll::{
    Enrollment, ProofSource, enroll, enroll_again, reenroll_backoff, renew_or_enroll,
};
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
    pub(super) ca: &'a CaFile,
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
        let rotating_credentials = self.rotating_credentials.clone();
        self.shutdown
            .spawn_service(async move { rotating_credentials.follow_ca_file().await });
        let renewal = Renewal {
            rotating_credentials: self.rotating_credentials.clone(),
            config: self.config.clone(),
            ca: self.ca.clone(),
            statuses: self.statuses.clone(),
            store: store.clone(),
            backoff: reenroll_backoff(self.config.limits.enroll_again),
        };
        let drain = self.shutdown.drain().clone();
        self.shutdown
            .spawn_service(async move { renewal.run(&drain).await });
    }

    /// Reloads the operator's files, and warns when their certificate is about to expire.
    fn watch_credential_files(&self, credential_files: CredentialFiles, digest: [u8; 32]) {
        let what = "--cert-file, --key-file, --ca-file";
        let watcher = watcher(what, digest, self.config, self.shutdown);
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
}

/// Replaces certificates outside a session.
struct Renewal {
    rotating_credentials: Arc<RotatingCredentials>,
    config: Config,
    ca: CaFile,
    statuses: Arc<SessionStatuses>,
    store: CredentialStore,
    backoff: Backoff,
}

impl Renewal {
    async fn run(mut self, drain: &CancellationToken) {
        let mut confirmations = self.rotating_credentials.confirmations();
        loop {
            if !self.rotating_credentials.is_refused() {
                self.statuses.set_enrollment(None);
            }
            let refusal = tokio::select! {
                () = drain.cancelled() => return,
                refusal = self.refusal() => refusal,
            };
            let confirmed = self.rotating_credentials.confirmations();
            if std::mem::replace(&mut confirmations, confirmed) != confirmed {
                self.backoff.restart();
            }
            let outcome = tokio::select! {
                () = drain.cancelled() => return,
                outcome = self.replace(refusal) => outcome,
            };
            match outcome {
                Outcome::Replaced(enrolled) => {
                    self.rotating_credentials.adopt(*enrolled, true).await;
                    sleep(REISSUE_INTERVAL).await;
                }
                Outcome::Failed => sleep(REFUSED_PAUSE).await,
                Outcome::Unneeded => {}
            }
        }
    }

    /// Waits until there is a reason to replace the certificate.
    async fn refusal(&self) -> Refusal {
        let rotating_credentials = &self.rotating_credentials;
        loop {
            tokio::select! {
                Some(refusal) = rotating_credentials.refusal_other_than(None) => return refusal,
                () = sleep_coalesced(until_expiry(rotating_credentials.not_after())) => {
                    rotating_credentials.save().await;
                    if rotating_credentials.not_after() <= SystemTime::now() {
                        return Refusal::Expired;
                    }
                }
            }
        }
    }

    /// Obtains a certificate in place of one that is refused.
    async fn replace(&mut self, refusal: Refusal) -> Outcome {
        let rotating_credentials = self.rotating_credentials.clone();
        let current = rotating_credentials.current();
        let mut schedule = rotating_credentials.schedule();
        schedule.mark_unchanged();
        let by_token = self.by_token(refusal);
        let renewal = self.enrollment(ProofSource::ExpiredCertificate(Box::new(current)));
        let replacing = async {
            match (refusal, &by_token) {
                (Refusal::Untrusted, Some(by_token)) => {
                    Ok(enroll_again(by_token, &mut self.backoff).await)
                }
                (Refusal::Revoked, Some(by_token)) => enroll(by_token).await,
                (Refusal::Expired, Some(by_token)) => renew_or_enroll(&renewal, by_token).await,
                (Refusal::Expired, None) => enroll(&renewal).await,
                // Only an operator can help.
                (Refusal::Untrusted | Refusal::Revoked, None) => std::future::pending().await,
            }
        };
        let is_expired = refusal == Refusal::Expired;
        let enrolled = tokio::select! {
            enrolled = replacing => enrolled,
            // A session has renewed the certificate first.
            _ = schedule.changed(), if is_expired => return Outcome::Unneeded,
            // A session is ready with the certificate or has renewed it, or another reason counts.
            _ = rotating_credentials.refusal_other_than(Some(refusal)), if !is_expired => {
                return Outcome::Unneeded;
            }
        };
        match enrolled {
            Ok(enrolled) => Outcome::Replaced(Box::new(enrolled)),
            Err(refused) => {
                let error = causes(&refused);
                error!(node = %renewal.node, error, "cannot renew the certificate; fix the reported cause");
                Outcome::Failed
            }
        }
    }

    /// Returns the enrollment with the token, if one may help. Of an operator's join token a
    /// revocation is the end.
    fn by_token(&self, refusal: Refusal) -> Option<Enrollment> {
        let source = self.config.token.clone()?;
        let has_ca = self.ca.roots().is_some();
        let is_account = || matches!(read_token(&source, has_ca), Ok(Token::ServiceAccount(_)));
        if refusal == Refusal::Revoked && !is_account() {
            return None;
        }
        let replaced = self.rotating_credentials.last_not_after();
        Some(self.enrollment(ProofSource::Token(source, Some(replaced))))
    }

    fn enrollment(&self, proof: ProofSource) -> Enrollment {
        enrollment(&self.config, &self.ca, proof, &self.store, &self.statuses)
    }
}

/// How an attempt to replace a certificate ended.
enum Outcome {
    Replaced(Box<Credentials>),
    Failed,
    /// The certificate is in use again, or another one.
    Unneeded,
}

/// Reads --ca-file and follows it while servers issue the certificates. The file may be in a mounted
/// ConfigMap that is replaced with the CA. The operator's certificate is reloaded together with its
/// CA, see [`CredentialTasks`].
pub(super) fn follow_ca_file(
    config: &Config,
    metrics: &Metrics,
    shutdown: &Shutdown,
) -> Result<CaFile, FileError> {
    let (Some(path), Some(first), None) = (&config.ca_file, &config.ca, &config.credential_files)
    else {
        return Ok(CaFile::channel(None).1);
    };
    let parse = {
        let path = path.clone();
        move |certificates| {
            TrustRoots::new(certificates).map_err(|error| FileError::Root(path.clone(), error))
        }
    };
    let watcher = watcher("--ca-file", digest_of(first), config, shutdown);
    let (sender, ca) = CaFile::channel(Some(parse(first.clone())?));
    let load = {
        let path = path.clone();
        move || {
            let certificates = load_roots(&path)?;
            let digest = digest_of(&certificates);
            let value = parse(certificates)?;
            Ok::<_, FileError>(Loaded { digest, value })
        }
    };
    let apply = move |roots| {
        sender.send_replace(Some(roots));
        Ok(())
    };
    let on_reload = on_reload(metrics.clone());
    shutdown.spawn_service(async move { watcher.run(load, apply, on_reload).await });
    Ok(ca)
}

fn watcher(
    what: &'static str,
    digest: [u8; 32],
    config: &Config,
    shutdown: &Shutdown,
) -> FileWatcher {
    FileWatcher {
        what,
        interval: config.limits.reload_every,
        reload_signal: shutdown.reloads(),
        digest,
    }
}

/// Returns the observer of a file watcher that reports unusable files.
fn on_reload(metrics: Metrics) -> impl Fn(ReloadOutcome<'_>) + Send + 'static {
    move |reload| {
        if let Some(is_unusable) = reload.is_unusable() {
            metrics.files_unusable(is_unusable);
        }
    }
}

/// Returns the wait until the next expiry check.
fn until_expiry(not_after: SystemTime) -> Duration {
    let left = not_after
        .duration_since(SystemTime::now())
        .unwrap_or_default();
    // Certificates have whole seconds; check shortly after that second.
    (left + Duration::from_millis(100)).min(CHECK_INTERVAL)
}
