//! What keeps the credentials of a running agent alive beside its sessions: the operator's files are followed, and a
//! certificate that ended while no session could renew it is renewed by its key. A ServiceAccount token buys another one when
//! the key does not, and in place of one that was revoked.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls_pki_types::CertificateDer;
use tokio::time::sleep;
use tracing::{error, warn};
use tunnel_proto::identity::sha256;
use tunnel_proto::process::reload::{Follow, Fresh, Reload};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls::files::{FileError, load_roots};

use super::enrolment;
use crate::config::{Config, Given};
use crate::connector::causes;
use crate::credentials::{CredentialError, Credentials, Keeper, Store, Token, read_token};
use crate::enroll::{Claim, enroll, renew_or_enroll};
use crate::metrics::Metrics;

/// The wall clock may be set, so the end of a certificate is looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// Pause after a renewal that a person has to help.
const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// A server that refuses the time of a certificate and issues one that it refuses again must not be asked in a loop.
const APART: Duration = Duration::from_secs(5);
/// Certificates of the operator are warned of when less than this is left, or a quarter of their life.
const ENDS_SOON: Duration = Duration::from_secs(7 * 86400);
/// How often that is said.
const WARN_EVERY: Duration = Duration::from_secs(6 * 3600);

/// Renews what has ended, or what a server takes for that.
pub(super) fn renew(keeper: Arc<Keeper>, store: Store, config: &Config, shutdown: &Shutdown) {
    let mut config = config.clone();
    let drain = shutdown.drain().clone();
    shutdown.spawn_service(async move {
        while !drain.is_cancelled() {
            let mut is_revoked = false;
            tokio::select! {
                () = drain.cancelled() => return,
                () = keeper.rejected() => {}
                () = keeper.revoked() => is_revoked = true,
                () = sleep(until_end(keeper.not_after())) => {
                    keeper.save().await;
                    if keeper.not_after() > SystemTime::now() {
                        continue;
                    }
                }
            }
            let current = keeper.current();
            // --ca-file may have been replaced since the start.
            config.ca = keeper.ca();
            let by_token = account(&config).map(|token| {
                let claim = Claim::by(token, Some(current.not_after));
                enrolment(&config, claim, &store)
            });
            // Nothing but a token helps against a revocation, and a join token is for people to give.
            if is_revoked && by_token.is_none() {
                continue;
            }
            let late = enrolment(&config, Claim::Ended(Box::new(current)), &store);
            let mut schedule = keeper.schedule();
            schedule.mark_unchanged();
            let enrolled = tokio::select! {
                () = drain.cancelled() => return,
                // A session was faster.
                _ = schedule.changed() => continue,
                enrolled = async {
                    match &by_token {
                        Some(by_token) if is_revoked => enroll(by_token).await,
                        Some(by_token) => renew_or_enroll(&late, by_token).await,
                        None => enroll(&late).await,
                    }
                } => enrolled,
            };
            match enrolled {
                Ok(enrolled) => {
                    keeper.adopt(enrolled.credentials, enrolled.issued, true).await;
                    sleep(APART).await;
                }
                Err(refused) => {
                    let error = causes(&refused);
                    error!(agent = %late.node, error, "certificate cannot be renewed; somebody has to act");
                    sleep(REFUSED_PAUSE).await;
                }
            }
        }
    });
}

/// The ServiceAccount token, where the agent has one.
fn account(config: &Config) -> Option<Token> {
    let token = read_token(config.token.as_ref()?, config.ca.is_some());
    token
        .ok()
        .filter(|token| matches!(token, Token::Account(_)))
}

/// How long to wait before the end of a certificate is looked at again.
fn until_end(not_after: SystemTime) -> Duration {
    let left = not_after
        .duration_since(SystemTime::now())
        .unwrap_or_default();
    // Whole seconds in the certificate, and a moment beyond.
    (left + Duration::from_millis(100)).min(LOOK_EVERY)
}

/// Follows --ca-file beside certificates that the server issues: it may be a mounted ConfigMap that is replaced with the CA.
pub(super) fn follow_ca(
    keeper: Arc<Keeper>,
    config: &Config,
    (metrics, shutdown): (&Metrics, &Shutdown),
) {
    let (Some(path), Some(first)) = (config.ca_file.clone(), &config.ca) else {
        return;
    };
    let follow = Follow {
        what: "--ca-file",
        every: config.limits.reload_every,
        asked: shutdown.reloads(),
        digest: digest_of(first),
    };
    let load = {
        let path = path.clone();
        move || {
            let value = load_roots(&path)?;
            let digest = digest_of(&value);
            Ok::<_, FileError>(Fresh { digest, value })
        }
    };
    let apply = move |roots| {
        let trusted = keeper.trust(roots);
        trusted.map_err(|error| FileError::Root(path.clone(), error))
    };
    let counted = metrics.clone();
    let told = move |reload| counted.files_unusable(reload == Reload::Failed);
    shutdown.spawn_service(async move { follow.run(load, apply, told).await });
}

fn digest_of(certificates: &[CertificateDer<'_>]) -> [u8; 32] {
    let bytes: Vec<u8> = certificates.iter().flat_map(|der| der.to_vec()).collect();
    sha256(&bytes)
}

/// Follows the operator's files, and warns when what they hold is about to end.
pub(super) fn follow(
    keeper: Arc<Keeper>,
    given: Given,
    config: &Config,
    digest: [u8; 32],
    (metrics, shutdown): (&Metrics, &Shutdown),
) {
    let follow = Follow {
        what: "--cert-file, --key-file, --ca-file",
        every: config.limits.reload_every,
        asked: shutdown.reloads(),
        digest,
    };
    let node = config.node_name.clone();
    let (fresh, mut taken) = tokio::sync::mpsc::channel::<Credentials>(1);
    let load = {
        let node = node.clone();
        move || given.load(&node)
    };
    // A full queue holds what is newer than what is in use, and the next look comes.
    let apply = move |credentials| {
        let busy = |_| CredentialError::Busy;
        fresh.try_send(credentials).map_err(busy)
    };
    let counted = metrics.clone();
    let told = move |reload| counted.files_unusable(reload == Reload::Failed);
    shutdown.spawn_service(async move { follow.run(load, apply, told).await });
    let warned = keeper.clone();
    shutdown.spawn_service(async move {
        while let Some(credentials) = taken.recv().await {
            keeper.adopt(credentials, None, true).await;
        }
    });
    shutdown.spawn_service(async move {
        loop {
            let current = warned.current();
            let life = current.not_after.duration_since(current.issued);
            let soon = ENDS_SOON.min(life.unwrap_or_default() / 4);
            if current.not_after < SystemTime::now() + soon {
                let ends = humantime::format_rfc3339_seconds(current.not_after);
                warn!(agent = %node, %ends, "certificate of --cert-file ends soon or has ended; replace the file");
            }
            sleep(WARN_EVERY).await;
        }
    });
}
