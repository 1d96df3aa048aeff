//! The credentials of a running agent. Handshakes use them, sessions renew them, and the store
//! persists them.
//!
//! One state decides about all of it, under one lock: each change is computed from the whole state,
//! so that a renewal and a reload of --ca-file that happen at the same time both count. Files follow
//! the state, and have one writer. If the disk fails, the agent continues with the credentials in
//! memory and logs it.
//!
//! Newly issued credentials are on trial until a session is ready with them. The previous
//! credentials stay in memory and on disk until they expire, and take over if handshakes fail.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rcgen::CertificateParams;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::{error, info, warn};
use tunnel_process::errors::causes;
use tunnel_proto::identity::BACKDATED;
use tunnel_proto::tls::ReloadableIdentity;
use tunnel_proto::wire::enroll::EnrollReply;
use tunnel_proto::wire::name::NodeName;

use super::{
    CaFile, CredentialStore, Credentials, DiskContent, OnDisk, TrustRoots, check_issued, succeed,
};
use crate::metrics::Metrics;

/// The current credentials and their renewal state.
#[derive(Debug)]
pub(crate) struct RotatingCredentials {
    node: NodeName,
    /// What handshakes use, derived from the state.
    identity: Arc<ReloadableIdentity>,
    /// Store of the credentials; `None` if the operator provides the files.
    store: Option<CredentialStore>,
    state: Mutex<State>,
    /// Locked while files are written, by the task that writes what the state wants.
    on_disk: Arc<tokio::sync::Mutex<OnDisk>>,
    /// Time of the next certificate request.
    next: watch::Sender<Option<Instant>>,
    /// When a server last asked for a renewal.
    asked: Mutex<Option<Instant>>,
    /// Number of replacements that new sessions must be dialed with at once.
    updates: watch::Sender<u64>,
    /// Why servers do not accept the current certificate, until a session is ready with it or it is
    /// replaced.
    refusal: watch::Sender<Option<Refusal>>,
    metrics: Metrics,
}

/// Why there is no session with a certificate. Of several reasons the greatest one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Refusal {
    /// Servers do not trust the CA of the certificate, or the agent does not trust theirs.
    Untrusted,
    /// A server refused the certificate because of its validity period.
    Expired,
    /// A server reported the certificate as revoked.
    Revoked,
}

/// The credentials in use and those that can take over.
///
/// ```text
/// issued --> on trial --ready session--> in use, the previous pair stays until it expires
///              |  ^                        |  ^
///    3 refused |  | 3 refused    3 refused |  | 3 refused
///              v  |                        v  |
///        the previous pair               the previous pair
/// ```
///
/// The disk follows the pair that has a ready session.
#[derive(Debug)]
struct State {
    /// Roots of --ca-file, which replace those of every pair.
    ca: CaFile,
    current: Pair,
    other: Option<Pair>,
    /// Consecutive handshakes with the current pair that failed over a certificate.
    refused: u32,
    /// Number of replacements of the current pair.
    generation: u64,
    /// Number of sessions that were ready with the current pair of their time.
    confirmations: u64,
    /// What the next start must find.
    wanted: DiskContent,
}

/// A certificate with its roots.
#[derive(Debug)]
struct Pair {
    credentials: Credentials,
    /// Whether a session was ready with the pair.
    has_worked: bool,
}

impl Pair {
    fn is_proven(&self, now: SystemTime) -> bool {
        self.has_worked && self.credentials.not_after > now
    }
}

impl State {
    /// Returns the CAs that this agent trusts.
    fn trusted(&self) -> TrustRoots {
        let own = || self.current.credentials.roots.clone();
        self.ca.roots().unwrap_or_else(own)
    }

    /// Replaces the current pair by one that has not worked yet. Of the older pairs the one that
    /// was issued first stays, while it is valid and if it has worked: whatever servers have issued
    /// since, a session was ready with it.
    fn replace(&mut self, credentials: Credentials, now: SystemTime) {
        let newest = Pair {
            credentials,
            has_worked: false,
        };
        let older = std::mem::replace(&mut self.current, newest);
        let first = self.other.take_if(|other| {
            let is_first = other.credentials.issued <= older.credentials.issued;
            other.is_proven(now) && (is_first || !older.is_proven(now))
        });
        self.other = Some(first.unwrap_or(older));
        self.changed();
        self.store();
    }

    /// Lets the other pair take over.
    fn swap(&mut self) {
        if let Some(other) = &mut self.other {
            std::mem::swap(&mut self.current, other);
            self.changed();
        }
    }

    fn changed(&mut self) {
        self.refused = 0;
        self.generation += 1;
    }

    /// Lets the next start find the pairs of this state.
    fn store(&mut self) {
        self.wanted = DiskContent {
            current: self.current.credentials.files(),
            previous: self.other.as_ref().map(|pair| pair.credentials.files()),
        };
    }
}

impl RotatingCredentials {
    /// Creates the rotation with its first credentials, which the store has if there is one. Only
    /// credentials with a signer are renewed. The roots of `ca`, if there are any, replace those of
    /// issued credentials.
    pub(crate) fn new(
        node: NodeName,
        credentials: Credentials,
        store: Option<CredentialStore>,
        ca: CaFile,
        metrics: Metrics,
    ) -> Arc<Self> {
        metrics.certificate(credentials.not_after);
        let next = first_renewal(&credentials, SystemTime::now(), rand::random());
        let roots = ca.roots();
        let roots = roots.as_ref().map(TrustRoots::certificates);
        let previous = store
            .as_ref()
            .and_then(|store| store.previous(&node, roots));
        let mut state = State {
            ca,
            wanted: DiskContent {
                current: credentials.files(),
                previous: None,
            },
            // The process may have ended before the first session.
            current: Pair {
                credentials,
                has_worked: false,
            },
            other: previous.map(|credentials| Pair {
                credentials,
                has_worked: true,
            }),
            refused: 0,
            generation: 0,
            confirmations: 0,
        };
        state.store();
        let current = &state.current.credentials;
        let identity = ReloadableIdentity::new(
            current.own.clone(),
            current.trust(state.ca.roots().as_ref()),
        );
        let on_disk = OnDisk::complete(state.wanted.clone());
        Arc::new(Self {
            node,
            identity,
            store,
            state: Mutex::new(state),
            on_disk: Arc::new(tokio::sync::Mutex::new(on_disk)),
            next: watch::Sender::new(next.map(|wait| Instant::now() + wait)),
            asked: Mutex::default(),
            updates: watch::Sender::new(0),
            refusal: watch::Sender::new(None),
            metrics,
        })
    }

    /// Uses the roots that --ca-file has now from the next handshake on.
    pub(crate) fn reload_ca(&self) {
        self.publish(&self.state.lock());
    }

    /// Uses the roots of --ca-file whenever they change.
    pub(crate) async fn follow_ca_file(&self) {
        let mut ca = self.state.lock().ca.clone();
        loop {
            ca.changed().await;
            self.reload_ca();
        }
    }

    /// Lets the next handshake use what the state says. The caller has the lock of the state.
    fn publish(&self, state: &State) {
        let current = &state.current.credentials;
        let trust = current.trust(state.ca.roots().as_ref());
        self.identity.replace(current.own.clone(), trust);
        self.metrics.certificate(current.not_after);
    }

    pub(crate) fn identity(&self) -> &Arc<ReloadableIdentity> {
        &self.identity
    }

    pub(crate) fn current(&self) -> Credentials {
        self.state.lock().current.credentials.clone()
    }

    pub(crate) fn not_after(&self) -> SystemTime {
        self.state.lock().current.credentials.not_after
    }

    /// Returns a watch that changes when new credentials need a new session.
    pub(crate) fn updates(&self) -> watch::Receiver<u64> {
        self.updates.subscribe()
    }

    /// Returns a watch that changes with every request and every answer.
    pub(crate) fn schedule(&self) -> watch::Receiver<Option<Instant>> {
        self.next.subscribe()
    }

    /// Returns the latest expiry of the certificates that this agent has. A certificate that replaces
    /// them ends later.
    pub(crate) fn last_not_after(&self) -> SystemTime {
        let state = self.state.lock();
        let other = state.other.as_ref().map(|pair| pair.credentials.not_after);
        let current = state.current.credentials.not_after;
        other.map_or(current, |other| other.max(current))
    }

    /// Records that a handshake failed with the certificate of this generation, and why.
    pub(crate) fn refuse(&self, generation: u64, refusal: Refusal) {
        let state = self.state.lock();
        if generation == state.generation {
            // Servers judge the validity period first, so a certificate that has ended is never
            // reported as revoked again, also when it is not revoked any more.
            let has_ended = state.current.credentials.not_after <= SystemTime::now();
            let is_changed = |known: &mut Option<Refusal>| {
                let next = match (refusal, has_ended) {
                    (Refusal::Expired, true) => Some(refusal),
                    _ => (*known).max(Some(refusal)),
                };
                std::mem::replace(known, next) != next
            };
            self.refusal.send_if_modified(is_changed);
        }
    }

    /// Records that the agent does not trust the CA of a server. Another certificate brings other
    /// roots, unless --ca-file replaces them.
    pub(crate) fn distrust_server(&self, generation: u64) {
        let has_ca_file = self.state.lock().ca.roots().is_some();
        if !has_ca_file {
            self.refuse(generation, Refusal::Untrusted);
        }
    }

    /// Returns whether there is a reason why the current certificate is not accepted.
    pub(crate) fn is_refused(&self) -> bool {
        self.refusal.borrow().is_some()
    }

    /// Waits until there is a reason why the current certificate is not accepted, other than `known`.
    /// Cancel-safe.
    pub(crate) async fn refusal_other_than(&self, known: Option<Refusal>) -> Option<Refusal> {
        let mut refusal = self.refusal.subscribe();
        let next = refusal.wait_for(|refusal| *refusal != known).await;
        // The sender is a field.
        next.map_or(None, |refusal| *refusal)
    }

    /// Records that a session is ready with the certificate of this generation: earlier refusals do not
    /// count. Unlike [`Self::confirm`] this is done when it returns, before the session can end.
    pub(crate) fn accept(&self, generation: u64) {
        let mut state = self.state.lock();
        if generation == state.generation {
            state.confirmations += 1;
            self.refusal.send_replace(None);
        }
    }

    /// Returns the number of sessions that were ready with the current certificate of their time.
    pub(crate) fn confirmations(&self) -> u64 {
        self.state.lock().confirmations
    }

    /// Lets the next renewal be due at a random moment within this time, as servers ask while their CA
    /// is being replaced. Of several that ask within 10 s one counts.
    pub(crate) fn renew_within(&self, within: Duration) {
        let now = Instant::now();
        {
            let mut asked = self.asked.lock();
            if asked.is_some_and(|at| now - at < ASKED_INTERVAL) {
                return;
            }
            *asked = Some(now);
        }
        let at = now + within.min(ASKED_WITHIN_MAX).mul_f64(rand::random());
        // Without a time the certificate is not renewed.
        let is_sooner = self.next.send_if_modified(|next| {
            let is_sooner = next.is_some_and(|next| at < next);
            if is_sooner {
                *next = Some(at);
            }
            is_sooner
        });
        if is_sooner {
            info!(node = %self.node, "a server asks for a renewal of the certificate, which follows soon");
        }
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
        let signer = self.signer().filter(|_| claimed)?;
        match CertificateParams::default().serialize_request(&*signer) {
            Ok(request) => Some(request.der().to_vec()),
            Err(error) => {
                error!(node = %self.node, %error, "cannot make a certificate request");
                None
            }
        }
    }

    fn signer(&self) -> Option<Arc<rcgen::KeyPair>> {
        self.state.lock().current.credentials.signer.clone()
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
        match self.take_issued(&chain, &roots) {
            Ok(()) => {
                self.metrics.renewal("issued");
                self.save().await;
            }
            Err(problem) => {
                self.metrics.renewal("unusable");
                self.log_failure(&format!("unusable answer: {problem}"));
            }
        }
    }

    /// Checks issued credentials by the state that they become part of, and takes them into use.
    fn take_issued(&self, chain: &[Vec<u8>], roots: &[Vec<u8>]) -> Result<(), String> {
        let mut state = self.state.lock();
        let signer = state.current.credentials.signer.clone();
        let signer = signer.ok_or("no certificate was requested")?;
        check_issued(&self.node, &signer, chain)?;
        let credentials = Credentials::issued(signer, chain, roots)?;
        let older = &state.current.credentials.roots;
        let credentials = succeed(
            credentials,
            state.trusted().certificates(),
            Some(older),
            SystemTime::now(),
        )?;
        // A server that replaces its CA waits until its agents have connected with the certificates
        // that they received.
        let at_once = roots.len() > 1;
        self.replace(&mut state, credentials, at_once);
        Ok(())
    }

    /// Takes new credentials into use and persists them. With `at_once` a new session is dialed with
    /// them. Not cancel-safe: they may not be persisted.
    pub(crate) async fn adopt(&self, credentials: Credentials, at_once: bool) {
        self.replace(&mut self.state.lock(), credentials, at_once);
        self.save().await;
    }

    fn replace(&self, state: &mut State, credentials: Credentials, at_once: bool) {
        let not_after = humantime::format_rfc3339_seconds(credentials.not_after);
        info!(node = %self.node, %not_after, "using a new certificate");
        self.log_clock_skew(&credentials);
        // Counted from the arrival of the certificate: with a wrong clock the agent must not ask
        // again at once.
        let next = first_renewal(&credentials, credentials.issued, rand::random());
        state.replace(credentials, SystemTime::now());
        if self.store.is_none() {
            // The operator's files are the only source.
            state.other = None;
        }
        self.publish(state);
        self.refusal.send_replace(None);
        self.next
            .send_replace(next.map(|wait| Instant::now() + wait));
        if at_once {
            self.updates.send_modify(|count| *count += 1);
        }
    }

    /// Returns the generation of the current credentials. A handshake that begins after the call
    /// uses this generation or a newer one.
    pub(crate) fn generation(&self) -> u64 {
        self.state.lock().generation
    }

    /// Records a handshake that failed over a certificate: the server refused the agent's, or the
    /// agent the server's. After three consecutive failures the other credentials become current, if
    /// there are any. Credentials that have worked do not give way to expired ones. The disk does not
    /// change before a session is ready.
    pub(crate) fn refused(&self, generation: u64) {
        let now = SystemTime::now();
        let mut state = self.state.lock();
        if generation != state.generation {
            return;
        }
        let Some(other) = &state.other else {
            return;
        };
        if state.current.has_worked && other.credentials.not_after <= now {
            return;
        }
        state.refused += 1;
        if state.refused < REFUSED_MOST {
            return;
        }
        state.swap();
        self.publish(&state);
        self.metrics.renewal("returned");
        let current = &state.current.credentials;
        let other = state.other.as_ref().map(|pair| &pair.credentials);
        let previous = other.is_some_and(|other| other.issued > current.issued);
        let not_after = humantime::format_rfc3339_seconds(current.not_after);
        warn!(
            node = %self.node, %not_after, previous,
            "{REFUSED_MOST} consecutive handshakes failed on certificates; switched to the agent's other certificate and roots"
        );
        let next = first_renewal(current, now, rand::random());
        // While servers refuse one pair and then the other, requests are no more frequent than
        // those without an answer.
        let next = next.map(|wait| Instant::now() + wait.max(retry_wait(current)));
        self.next.send_replace(next);
    }

    /// Records that a session is ready: the credentials that it was dialed with work. The others stay
    /// until a renewal, unless they never worked: no clock removes them. Not cancel-safe: the disk may be behind.
    pub(crate) async fn confirm(&self, generation: u64) {
        {
            let mut state = self.state.lock();
            if generation != state.generation {
                return;
            }
            state.current.has_worked = true;
            state.refused = 0;
            state.other.take_if(|other| !other.has_worked);
            state.store();
        }
        self.save().await;
    }

    /// Writes what the state wants on disk. The write goes on if the call is canceled.
    pub(crate) async fn save(&self) {
        let Some(store) = self.store.clone() else {
            return;
        };
        let mut on_disk = self.on_disk.clone().lock_owned().await;
        let wanted = self.state.lock().wanted.clone();
        if on_disk.writes(&wanted).is_empty() {
            self.metrics.unsaved(false);
            return;
        }
        let signer = self.signer();
        let saved = tokio::task::spawn_blocking(move || {
            store.write(&mut on_disk, wanted, signer.as_deref())
        });
        match saved.await {
            Ok(Ok(())) => self.metrics.unsaved(false),
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
            let state = self.state.lock();
            let current = &state.current.credentials;
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
        retry_wait(&self.state.lock().current.credentials)
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

/// Returns the wait before another request with these credentials.
fn retry_wait(credentials: &Credentials) -> Duration {
    let life = credentials.not_after.duration_since(credentials.issued);
    retry_after(life.unwrap_or_default(), rand::random())
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
/// Least time between two requests of servers for a renewal that count: a renewal writes files. A server
/// asks every 30 s at most.
const ASKED_INTERVAL: Duration = Duration::from_secs(10);
/// Longest time within which a renewal that a server asks for follows.
const ASKED_WITHIN_MAX: Duration = Duration::from_secs(86_400);
/// Minimum wait before another request, since the server answers no faster.
const RETRY_MIN: Duration = Duration::from_secs(3);
const RETRY_MAX: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests;
