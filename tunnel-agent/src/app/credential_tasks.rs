//! What keeps the credentials of a running agent alive beside its sessions: the operator's files are followed, and a
//! certificate that ended while no session could renew it is renewed by its key. A ServiceAccount token buys another one when
//! the key does not, and in place of one that was revoked.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use tokio::time::sleep;
use tracing::{error, warn};
use tunnel_proto::identity::sha256;
use tunnel_proto::process::file_watch::{FileWatcher, Loaded, ReloadOutcome};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::files::{FileError, load_roots};

use super::enrollment;
use crate::config::{Config, CredentialFiles};
use crate::connector::causes;
use crate::credentials::{
    CredentialError, CredentialStore, Credentials, RotatingCredentials, Token, read_token,
};
use crate::enroll::{EnrollProof, enroll, renew_or_enroll};
use crate::metrics::Metrics;

/// The wall clock may be set, so the end of a certificate is looked at this often.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Pause after a renewal that a person has to help.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// A server that refuses the time of a certificate and issues one that it refuses again must not be asked in a loop.
const REISSUE_INTERVAL: Duration = Duration::from_secs(5);
/// Certificates of the operator are warned of when less than this is left, or a quarter of their life.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 86400);
/// How often that is said.
const WARN_INTERVAL: Duration = Duration::from_secs(6 * 3600);

/// Renews what has ended, or what a server takes for that.
pub(super) fn renew(
    rotating_credentials: Arc<RotatingCredentials>,
    store: CredentialStore,
    config: &Config,
    shutdown: &Shutdown,
) {
    let mut config = config.clone();
    let drain = shutdown.drain().clone();
    shutdown.spawn_service(async move {
        while !drain.is_cancelled() {
            let mut is_revoked = false;
            tokio::select! {
                () = drain.cancelled() => return,
                () = rotating_credentials.rejected() => {}
                () = rotating_credentials.revoked() => is_revoked = true,
                () = sleep(until_expiry(rotating_credentials.not_after())) => {
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
                enrollment(&config, proof, &store)
            });
            // Nothing but a token helps against a revocation, and a join token is for people to give.
            if is_revoked && by_token.is_none() {
                continue;
            }
            let renewal = enrollment(&config, EnrollProof::ExpiredCertificate(Box::new(current)), &store);
            let mut schedule = rotating_credentials.schedule();
            schedule.mark_unchanged();
            let enrolled = tokio::select! {
                () = drain.cancelled() => return,
                // A session was faster.
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
                    rotating_credentials.adopt(enrolled.credentials, enrolled.issued, true).await;
                    sleep(REISSUE_INTERVAL).await;
                }
                Err(refused) => {
                    let error = causes(&refused);
                    error!(agent = %renewal.node, error, "cannot renew the certificate; fix the reported cause");
                    sleep(REFUSED_PAUSE).await;
                }
            }
        }
    });
}

/// The ServiceAccount token, where the agent has one.
fn service_account_token(config: &Config) -> Option<Token> {
    let token = read_token(config.token.as_ref()?, config.ca.is_some());
    token
        .ok()
        .filter(|token| matches!(token, Token::ServiceAccount(_)))
}

/// How long to wait before the end of a certificate is looked at again.
fn until_expiry(not_after: SystemTime) -> Duration {
    let left = not_after
        .duration_since(SystemTime::now())
        .unwrap_or_default();
    // Whole seconds in the certificate, and a moment beyond.
    (left + Duration::from_millis(100)).min(CHECK_INTERVAL)
}

/// Follows --ca-file beside certificates that the server issues: it may be a mounted ConfigMap that is replaced with the CA.
pub(super) fn watch_ca_file(
    rotating_credentials: Arc<RotatingCredentials>,
    config: &Config,
    (metrics, shutdown): (&Metrics, &Shutdown),
) {
    let (Some(path), Some(first)) = (config.ca_file.clone(), &config.ca) else {
        return;
    };
    let watcher = FileWatcher {
        what: "--ca-file",
        interval: config.limits.reload_every,
        reload_signal: shutdown.reloads(),
        digest: digest_of(first),
    };
    let load = {
        let path = path.clone();
        move || {
            let value = load_roots(&path)?;
            let digest = digest_of(&value);
            Ok::<_, FileError>(Loaded { digest, value })
        }
    };
    let apply = move |roots| {
        let trusted = rotating_credentials.trust(roots);
        trusted.map_err(|error| FileError::Root(path.clone(), error))
    };
    let counted = metrics.clone();
    let on_reload = move |reload| counted.files_unusable(reload == ReloadOutcome::Failed);
    shutdown.spawn_service(async move { watcher.run(load, apply, on_reload).await });
}

fn digest_of(certificates: &[CertificateDer<'_>]) -> [u8; 32] {
    let bytes: Vec<u8> = certificates.iter().flat_map(|der| der.to_vec()).collect();
    sha256(&bytes)
}

/// Follows the operator's files, and warns when what they hold is about to end.
pub(super) fn watch_credential_files(
    rotating_credentials: Arc<RotatingCredentials>,
    credential_files: CredentialFiles,
    config: &Config,
    digest: [u8; 32],
    (metrics, shutdown): (&Metrics, &Shutdown),
) {
    let watcher = FileWatcher {
        what: "--cert-file, --key-file, --ca-file",
        interval: config.limits.reload_every,
        reload_signal: shutdown.reloads(),
        digest,
    };
    let node = config.node_name.clone();
    let (sender, mut receiver) = tokio::sync::mpsc::channel::<Credentials>(1);
    let load = {
        let node = node.clone();
        move || credential_files.load(&node)
    };
    // A full queue holds what is newer than what is in use, and the next look comes.
    let apply = move |credentials| {
        let busy = |_| CredentialError::Busy;
        sender.try_send(credentials).map_err(busy)
    };
    let counted = metrics.clone();
    let on_reload = move |reload| counted.files_unusable(reload == ReloadOutcome::Failed);
    shutdown.spawn_service(async move { watcher.run(load, apply, on_reload).await });
    let watched = rotating_credentials.clone();
    shutdown.spawn_service(async move {
        while let Some(credentials) = receiver.recv().await {
            rotating_credentials.adopt(credentials, None, true).await;
        }
    });
    shutdown.spawn_service(async move {
        loop {
            let current = watched.current();
            let life = current.not_after.duration_since(current.issued);
            let soon = EXPIRY_WARNING.min(life.unwrap_or_default() / 4);
            if current.not_after < SystemTime::now() + soon {
                let ends = humantime::format_rfc3339_seconds(current.not_after);
                warn!(agent = %node, %ends, "certificate of --cert-file ends soon or has ended; replace the file");
            }
            sleep(WARN_INTERVAL).await;
        }
    });
}
