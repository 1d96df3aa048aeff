//! The credentials of a running agent. Handshakes use them, sessions renew them, and the store
//! persists them.
//!
//! If the disk fails, the agent continues with the credentials in memory and logs it. Newly issued
//! credentials are on trial until a session is ready with them. The previous credentials stay in
//! memory and on disk, and take over again if handshakes fail.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rcgen::CertificateParams;
use rustls_pki_types::CertificateDer;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{error, info, warn};
use tunnel_proto::identity::BACKDATED;
use tunnel_proto::tls::{self, ReloadableIdentity};
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::name::NodeName;

use super::{CredentialStore, Credentials, Issued};
use crate::enroll::check_issued;
use crate::error::causes;
use crate::metrics::Metrics;

/// The current credentials and their renewal state.
#[derive(Debug)]
pub(crate) struct RotatingCredentials {
    node: NodeName,
    identity: Arc<ReloadableIdentity>,
    /// Store of the credentials; `None` if the operator provides the files.
    store: Option<CredentialStore>,
    /// Roots of --ca-file, which replace the server's.
    ca: Mutex<Option<Vec<CertificateDer<'static>>>>,
    current: Mutex<Credentials>,
    /// The other credentials, while the current ones are on trial. Locked before the current ones.
    alternate: Mutex<Option<AlternateCredentials>>,
    /// Number of replacements of the current credentials.
    generation: AtomicU64,
    /// Issued credentials that are not on disk yet.
    unsaved: Mutex<Option<Issued>>,
    /// Locked while writing, so that an older certificate never replaces a newer one.
    saving: tokio::sync::Mutex<()>,
    /// Time of the next certificate request.
    next: watch::Sender<Option<Instant>>,
    /// Number of replacements that new sessions must be dialed with at once.
    updates: watch::Sender<u64>,
    /// Notified when the server reports that the certificate has expired.
    rejected: Notify,
    /// Notified when the server reports that the certificate is revoked.
    revoked: Notify,
    metrics: Metrics,
}

/// The credentials that the current ones have replaced, in either direction.
///
/// ```text
/// issued --> on trial --ready session--> alone
///              |  ^
///    3 refused |  | 3 refused       (the disk follows the pair that has a ready session)
///              v  |
///        the older pair --ready session--> alone
/// ```
#[derive(Debug)]
struct AlternateCredentials {
    credentials: Credentials,
    /// Like [`RotatingCredentials::unsaved`], for these credentials.
    unsaved: Option<Issued>,
    /// Consecutive handshakes with the current credentials that failed over a certificate.
    refused: u32,
    /// Whether these are the newer credentials and the current ones are the previous ones.
    is_newer: bool,
    /// Whether the older of the two are on disk as the previous ones.
    is_stored: bool,
}

impl AlternateCredentials {
    fn older(credentials: Credentials, is_stored: bool) -> Self {
        Self {
            credentials,
            unsaved: None,
            refused: 0,
            is_newer: false,
            is_stored,
        }
    }
}

impl RotatingCredentials {
    /// Creates the rotation with its first credentials. Only credentials with a signer are renewed.
    pub(crate) fn new(
        node: NodeName,
        credentials: Credentials,
        store: Option<CredentialStore>,
        ca: Option<Vec<CertificateDer<'static>>>,
        metrics: Metrics,
    ) -> Arc<Self> {
        metrics.certificate(credentials.not_after);
        let identity = ReloadableIdentity::new(credentials.own.clone(), credentials.trust());
        let next = first_renewal(&credentials, SystemTime::now(), rand::random());
        let previous = store
            .as_ref()
            .and_then(|store| store.previous(&node, ca.as_deref()));
        Arc::new(Self {
            node,
            identity,
            alternate: Mutex::new(previous.map(|older| AlternateCredentials::older(older, true))),
            generation: AtomicU64::new(0),
            store,
            ca: Mutex::new(ca),
            current: Mutex::new(credentials),
            unsaved: Mutex::default(),
            saving: tokio::sync::Mutex::default(),
            next: watch::Sender::new(next.map(|wait| Instant::now() + wait)),
            updates: watch::Sender::new(0),
            rejected: Notify::new(),
            revoked: Notify::new(),
            metrics,
        })
    }

    /// Returns the current roots of --ca-file.
    pub(crate) fn ca(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.ca.lock().clone()
    }

    /// Replaces the roots of --ca-file from the next handshake on.
    ///
    /// # Errors
    /// Returns an error if the roots are unusable. The old roots stay.
    pub(crate) fn trust(&self, roots: Vec<CertificateDer<'static>>) -> Result<(), rustls::Error> {
        let store = tls::roots(roots.iter().cloned())?;
        *self.ca.lock() = Some(roots);
        if let Some(alternate) = &mut *self.alternate.lock() {
            alternate.credentials.roots = store.clone();
        }
        let mut current = self.current.lock();
        current.roots = store;
        self.identity.replace(current.own.clone(), current.trust());
        Ok(())
    }

    pub(crate) fn identity(&self) -> &Arc<ReloadableIdentity> {
        &self.identity
    }

    pub(crate) fn current(&self) -> Credentials {
        self.current.lock().clone()
    }

    pub(crate) fn not_after(&self) -> SystemTime {
        self.current.lock().not_after
    }

    /// Returns a watch that changes when new credentials need a new session.
    pub(crate) fn updates(&self) -> watch::Receiver<u64> {
        self.updates.subscribe()
    }

    /// Returns a watch that changes with every request and every answer.
    pub(crate) fn schedule(&self) -> watch::Receiver<Option<Instant>> {
        self.next.subscribe()
    }

    /// Records that the server reported the certificate as revoked.
    pub(crate) fn revoke(&self) {
        self.revoked.notify_one();
    }

    /// Waits until the server reports the certificate as revoked. Cancel-safe.
    pub(crate) async fn revoked(&self) {
        self.revoked.notified().await;
    }

    /// Records that the server refused the certificate because of its validity period.
    pub(crate) fn reject(&self) {
        self.rejected.notify_one();
    }

    /// Waits until the server refuses the certificate because of its validity period. Cancel-safe.
    pub(crate) async fn rejected(&self) {
        self.rejected.notified().await;
    }

    /// Waits until a renewal is due and returns the request. Only one caller receives the request
    /// and sends it. Cancel-safe.
    pub(crate) async fn due(&self) -> Vec<u8> {
        let mut next = self.next.subscribe();
        loop {
            let at = *next.borrow_and_update();
            tokio::select! {
                () = sleep_until(at.unwrap_or_else(Instant::now)), if at.is_some() => {
                    if let Some(request) = self.take_request() {
                        return request;
                    }
                }
                _ = next.changed() => {}
            }
        }
    }

    /// Returns the request, unless another session has just taken it. The request is due again if
    /// no answer arrives.
    fn take_request(&self) -> Option<Vec<u8>> {
        let now = Instant::now();
        let again = now + self.retry();
        let claimed = self.next.send_if_modified(|next| {
            let due = next.is_some_and(|at| at <= now);
            if due {
                *next = Some(again);
            }
            due
        });
        let signer = self.current.lock().signer.clone().filter(|_| claimed)?;
        match CertificateParams::default().serialize_request(&*signer) {
            Ok(request) => Some(request.der().to_vec()),
            Err(error) => {
                error!(node = %self.node, %error, "cannot make a certificate request");
                None
            }
        }
    }

    /// Handles the server's answer. Not cancel-safe: the certificate may not be persisted.
    pub(crate) async fn handle_reply(&self, reply: EnrollReply) {
        let (chain, roots) = match reply {
            EnrollReply::Issued { chain, roots } => (chain, roots),
            EnrollReply::Refused(code, detail) => {
                self.metrics.renewal(code.label());
                self.log_failure(&format!("{code}: {detail}"));
                return;
            }
        };
        let taken = self
            .current
            .lock()
            .signer
            .clone()
            .ok_or_else(|| "no certificate was requested".to_owned());
        let taken = taken.and_then(|signer| {
            check_issued(&self.node, &signer, &chain)?;
            self.current()
                .check_successor(&chain, &roots, SystemTime::now())?;
            Credentials::issued(signer, &chain, &roots, self.ca().as_deref())
        });
        match taken {
            Ok(credentials) => {
                self.metrics.renewal("issued");
                // A server that replaces its CA waits until its agents have connected with the
                // certificates that they received.
                let at_once = roots.len() > 1;
                self.adopt(credentials, Some((chain, roots)), at_once).await;
            }
            Err(problem) => {
                self.metrics.renewal("unusable");
                self.log_failure(&format!("unusable answer: {problem}"));
            }
        }
    }

    /// Takes new credentials into use and persists issued ones. With `at_once` a new session is
    /// dialed with them. Not cancel-safe: they may not be persisted.
    pub(crate) async fn adopt(
        &self,
        credentials: Credentials,
        issued: Option<Issued>,
        at_once: bool,
    ) {
        self.identity
            .replace(credentials.own.clone(), credentials.trust());
        self.metrics.certificate(credentials.not_after);
        let not_after = humantime::format_rfc3339_seconds(credentials.not_after);
        info!(node = %self.node, %not_after, "using a new certificate");
        self.log_clock_skew(&credentials);
        // Counted from the arrival of the certificate: with a wrong clock the agent must not ask
        // again at once.
        let next = first_renewal(&credentials, credentials.issued, rand::random());
        let older = std::mem::replace(&mut *self.current.lock(), credentials);
        self.generation.fetch_add(1, Ordering::Relaxed);
        if issued.is_some() {
            self.save_previous(older);
        }
        let next = next.map(|wait| Instant::now() + wait);
        self.next.send_replace(next);
        if at_once {
            self.updates.send_modify(|count| *count += 1);
        }
        if issued.is_some() {
            *self.unsaved.lock() = issued;
        }
        self.save().await;
    }

    /// Saves the credentials that a server's answer has replaced. Credentials that carried a
    /// session are kept while they are valid, whatever the server issued since.
    fn save_previous(&self, older: Credentials) {
        if self.store.is_none() {
            return;
        }
        let mut alternate = self.alternate.lock();
        let is_stored = match &mut *alternate {
            Some(alternate) if alternate.is_newer => alternate.is_stored,
            Some(alternate) if alternate.credentials.not_after > SystemTime::now() => {
                alternate.refused = 0;
                return;
            }
            Some(_) | None => false,
        };
        *alternate = Some(AlternateCredentials::older(older, is_stored));
    }

    /// Returns the generation of the current credentials. A handshake that begins after the call
    /// uses this generation or a newer one.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Records a handshake that failed over a certificate: the server refused the agent's, or the
    /// agent the server's. After three consecutive failures with credentials on trial, the other
    /// credentials become current. The disk does not change before a session is ready.
    pub(crate) fn refused(&self, generation: u64) {
        let mut alternate = self.alternate.lock();
        let Some(trial) = alternate
            .as_mut()
            .filter(|_| generation == self.generation())
        else {
            return;
        };
        trial.refused += 1;
        if trial.refused < REFUSED_MOST {
            return;
        }
        trial.refused = 0;
        trial.is_newer = !trial.is_newer;
        let mut current = self.current.lock();
        std::mem::swap(&mut *current, &mut trial.credentials);
        let mut unsaved = self.unsaved.lock();
        std::mem::swap(&mut *unsaved, &mut trial.unsaved);
        self.metrics.unsaved(unsaved.is_some());
        self.identity.replace(current.own.clone(), current.trust());
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.metrics.certificate(current.not_after);
        self.metrics.renewal("returned");
        let not_after = humantime::format_rfc3339_seconds(current.not_after);
        warn!(
            node = %self.node, %not_after, previous = trial.is_newer,
            "{REFUSED_MOST} consecutive handshakes failed on certificates; switched to the agent's other certificate and roots"
        );
        let next = first_renewal(&current, SystemTime::now(), rand::random());
        drop((unsaved, current, alternate));
        self.next
            .send_replace(next.map(|wait| Instant::now() + wait));
    }

    /// Records that a session is ready: only the credentials that it was dialed with remain. Not
    /// cancel-safe: the disk may be behind.
    pub(crate) async fn confirm(&self, generation: u64) {
        let taken = self
            .alternate
            .lock()
            .take_if(|_| generation == self.generation());
        let (Some(alternate), Some(store)) = (taken, self.store.clone()) else {
            return;
        };
        let _one_at_a_time = self.saving.lock().await;
        let removed = tokio::task::spawn_blocking(move || {
            if alternate.is_newer && alternate.is_stored {
                store.restore_previous()
            } else {
                store.remove_previous()
            }
        });
        match removed.await {
            Ok(Ok(())) => {}
            Ok(Err(problem)) => {
                let error = causes(&problem);
                warn!(node = %self.node, error, "cannot update the certificates in the data directory");
            }
            Err(panic) => {
                error!(node = %self.node, error = %panic, "task that removes the previous certificate panicked")
            }
        }
    }

    /// Writes unsaved credentials to disk. Not cancel-safe: they may be written all the same.
    pub(crate) async fn save(&self) {
        let _one_at_a_time = self.saving.lock().await;
        let wanted = self.unsaved.lock().clone();
        let (Some(store), Some((chain, roots))) = (self.store.clone(), wanted.clone()) else {
            return;
        };
        let signer = self.current.lock().signer.clone();
        let is_older_stored = self
            .alternate
            .lock()
            .as_ref()
            .is_none_or(|alternate| alternate.is_newer || alternate.is_stored);
        let saved = tokio::task::spawn_blocking(move || {
            let older = if is_older_stored {
                Ok(())
            } else {
                store.save_previous()
            };
            let is_older_stored = older.is_ok();
            let saved = older
                .and_then(|()| store.save(&chain, &roots))
                .and_then(|()| signer.map_or(Ok(()), |signer| store.restore_key(&signer)));
            (is_older_stored, saved)
        });
        let saved = saved.await.map(|(is_older_stored, saved)| {
            // Also if the rest failed: half of a new pair may be on disk.
            if let Some(alternate) = self.alternate.lock().as_mut().filter(|_| is_older_stored) {
                alternate.is_stored = true;
            }
            saved
        });
        match saved {
            Ok(Ok(())) => {
                let mut unsaved = self.unsaved.lock();
                if *unsaved == wanted {
                    *unsaved = None;
                }
                self.metrics.unsaved(false);
            }
            Ok(Err(problem)) => {
                self.metrics.unsaved(true);
                error!(
                    node = %self.node, error = causes(&problem),
                    "cannot write the certificate to the data directory; it stays in use until this process ends"
                );
            }
            Err(panic) => {
                error!(node = %self.node, error = %panic, "task that writes the certificate panicked")
            }
        }
    }

    /// Logs the clock skew, since a newly issued certificate shows the server's time.
    fn log_clock_skew(&self, credentials: &Credentials) {
        let now = SystemTime::now();
        let ahead = now.duration_since(credentials.issued).unwrap_or_default();
        let behind = credentials.issued.duration_since(now).unwrap_or_default();
        let (skew, word) = if ahead > behind {
            (ahead, "ahead of")
        } else {
            (behind, "behind")
        };
        if skew > BACKDATED && credentials.signer.is_some() {
            let skew = humantime::format_duration(Duration::from_secs(skew.as_secs()));
            warn!(
                node = %self.node, clock = %humantime::format_rfc3339_seconds(now),
                "clock of this host is {skew} {word} the server's; synchronize both clocks"
            );
        }
    }

    /// Logs a failed renewal as a warning, or as an error when the expiry is near.
    fn log_failure(&self, problem: &str) {
        let (issued, not_after) = {
            let current = self.current.lock();
            (current.issued, current.not_after)
        };
        let left = not_after
            .duration_since(SystemTime::now())
            .unwrap_or_default();
        let life = not_after.duration_since(issued).unwrap_or_default();
        let ends = humantime::format_rfc3339_seconds(not_after);
        if left < life / 4 {
            error!(node = %self.node, %ends, error = problem, "certificate ends soon and cannot be renewed");
        } else {
            warn!(node = %self.node, %ends, error = problem, "certificate was not renewed; trying again");
        }
    }

    /// Returns the wait before the next request.
    fn retry(&self) -> Duration {
        let current = self.current.lock();
        let life = current.not_after.duration_since(current.issued);
        retry_after(life.unwrap_or_default(), rand::random())
    }
}

/// Returns the time until the next certificate request: 50 % of this certificate's lifetime, plus
/// or minus 10 %. `random` is from 0 to 1. Returns `None` if the agent does not renew the
/// certificate.
fn first_renewal(credentials: &Credentials, now: SystemTime, random: f64) -> Option<Duration> {
    credentials.signer.as_ref()?;
    let life = credentials
        .not_after
        .duration_since(credentials.issued)
        .unwrap_or_default();
    let age = now.duration_since(credentials.issued).unwrap_or_default();
    Some(life.mul_f64(0.4 + 0.2 * random).saturating_sub(age))
}

/// Returns a twentieth of the lifetime, times 0.5 to 1.5; at most an hour or so.
fn retry_after(life: Duration, random: f64) -> Duration {
    (life / 20)
        .clamp(RETRY_MIN, RETRY_MAX)
        .mul_f64(0.5 + random)
}

/// Consecutive handshakes that may fail with one pair before the other is used. One failure may be
/// an accident.
const REFUSED_MOST: u32 = 3;
/// Minimum wait before another request, since the server answers no faster.
const RETRY_MIN: Duration = Duration::from_secs(3);
const RETRY_MAX: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests;
