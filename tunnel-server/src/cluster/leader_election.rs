//! Leader election by a Lease, compatible with client-go's `leaderelection`, so that a running
//! yurt-tunnel and this server exclude each other.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tunnel_process::telemetry::LogThrottle;

use super::client::ClusterHandle;
use super::failure::{ApiError, ApiErrorKind};
use super::lease::{LeaseHandle, spec_for};
use super::metrics::ClusterMetrics;
use super::objects::Object;
use crate::cluster::conditions::{Condition, Conditions};

/// The leader stops writing this long after the last renewal.
const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between attempts to acquire or renew the Lease.
const RETRY_PERIOD: Duration = Duration::from_secs(2);
/// Longest pause after a refusal that asks for one, so that a term of [`RENEW_DEADLINE`] has another
/// attempt.
const ASKED_PAUSE_MAX: Duration = Duration::from_secs(4);
/// Limit for one attempt, shorter than that of its calls.
const TRY_LIMIT: Duration = Duration::from_secs(4);

/// Time until which this server may write. Clones follow the same election.
#[derive(Debug, Clone)]
pub(super) struct Leadership(watch::Receiver<Option<Instant>>);

impl Leadership {
    /// Returns the time until which this server may write, or `None` if this server is not the
    /// leader.
    pub(super) fn until(&self, now: Instant) -> Option<Instant> {
        self.0.borrow().filter(|until| now < *until)
    }

    /// Waits until the term changes, which happens at each renewal. Cancel-safe.
    pub(super) async fn changed(&mut self) -> bool {
        self.0.changed().await.is_ok()
    }

    /// Waits until this server leads. Returns `false` if it never will. Cancel-safe.
    pub(super) async fn acquired(&mut self) -> bool {
        while self.until(Instant::now()).is_none() {
            if !self.changed().await {
                return false;
            }
        }
        true
    }

    /// Waits until this server does not lead. Cancel-safe.
    pub(super) async fn lost(&mut self) {
        while let Some(term) = self.until(Instant::now()) {
            tokio::select! {
                () = tokio::time::sleep_until(term) => {}
                changed = self.changed() => if !changed { return },
            }
        }
    }
}

/// Pure decision on the observed Lease.
#[derive(Debug, Clone, PartialEq)]
enum LeaseAction {
    /// The Lease does not exist and must be created.
    Create(LeaseSpec),
    /// The Lease is held by this server, free, or expired. This server writes it.
    Take(LeaseSpec),
    /// Another candidate holds the Lease.
    Follow(String),
}

#[derive(Debug)]
struct Candidate {
    identity: String,
    /// The Lease as of its last observed change, with the local time of that observation. The
    /// clocks of other candidates are not used.
    observed: Option<(LeaseSpec, Instant)>,
}

impl Candidate {
    fn next_action(
        &mut self,
        found: Option<&LeaseSpec>,
        now: Instant,
        wall: Timestamp,
    ) -> LeaseAction {
        let Some(found) = found else {
            return LeaseAction::Create(LeaseSpec {
                lease_transitions: Some(0),
                ..spec_for(&LeaseSpec::default(), &self.identity, wall)
            });
        };
        let observed_at = match &self.observed {
            Some((last_spec, at)) if last_spec == found => *at,
            Some(_) | None => {
                self.observed = Some((found.clone(), now));
                now
            }
        };
        let holder = found.holder_identity.as_deref().unwrap_or_default();
        let seconds = found.lease_duration_seconds.unwrap_or_default();
        let duration = Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
        let is_ours = holder == self.identity;
        if !holder.is_empty() && !is_ours && now < observed_at + duration {
            return LeaseAction::Follow(holder.to_owned());
        }
        LeaseAction::Take(spec_for(found, &self.identity, wall))
    }
}

#[derive(Debug)]
pub(super) struct Election {
    lease: LeaseHandle,
    candidate: Candidate,
    until: watch::Sender<Option<Instant>>,
    metrics: ClusterMetrics,
    conditions: Conditions,
}

impl Election {
    pub(super) fn new(lease: LeaseHandle, identity: String, cluster: &ClusterHandle) -> Self {
        Self {
            lease,
            candidate: Candidate {
                identity,
                observed: None,
            },
            until: watch::Sender::new(None),
            metrics: cluster.metrics.clone(),
            conditions: cluster.conditions.clone(),
        }
    }

    /// Returns a handle that follows this election.
    pub(super) fn leadership(&self) -> Leadership {
        Leadership(self.until.subscribe())
    }

    /// Acquires and renews the Lease until `stop`.
    pub(super) async fn run(&mut self, stop: &CancellationToken) {
        let mut throttle = LogThrottle::default();
        loop {
            let begun = Instant::now();
            let tried = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                tried = tokio::time::timeout(TRY_LIMIT, self.attempt(begun)) => tried,
            };
            // A pause that the API server asks of other requests is not waited for: the term ends.
            let mut asked = Duration::ZERO;
            match tried.unwrap_or_else(|_elapsed| Err(ApiError::timeout())) {
                Ok(is_leader) => {
                    self.conditions
                        .set(Condition::Writing(Object::Lease), Vec::new());
                    self.set_leader(is_leader.then(|| begun + RENEW_DEADLINE));
                }
                Err(failure) => {
                    asked = failure.retry_after.unwrap_or_default();
                    self.metrics
                        .record_write(Object::Lease, failure.kind.label());
                    let logged = throttle.failed(failure.kind, Instant::now());
                    if failure.needs_operator() {
                        let line = format!(
                            "cannot acquire the Lease, so no server writes records and ports: {failure}"
                        );
                        self.conditions
                            .set(Condition::Writing(Object::Lease), vec![line]);
                    } else if let Some(suppressed) = logged {
                        warn!(lease = self.lease.name(), error = %failure, suppressed, "cannot get or renew the Lease, trying again");
                    }
                    let is_over = self
                        .until
                        .borrow()
                        .is_some_and(|until| until <= Instant::now());
                    if is_over {
                        self.set_leader(None);
                    }
                }
            }
            let now = Instant::now();
            let pause = RETRY_PERIOD.mul_f64(0.9 + rand::random::<f64>() * 0.2);
            let wait = pause
                .saturating_sub(now - begun)
                .max(asked.min(ASKED_PAUSE_MAX));
            // The end of the term takes effect when it occurs, not at the next attempt.
            let term = *self.until.borrow();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
                () = async { tokio::time::sleep_until(term.unwrap_or(now)).await }, if term.is_some() => {
                    self.set_leader(None);
                }
            }
        }
    }

    /// Stops leading without a call. The Lease ends by itself, unless the next attempt renews it.
    pub(super) fn resign(&mut self) {
        self.set_leader(None);
    }

    /// Releases the Lease if this server holds it, so that another candidate need not wait for its
    /// end.
    pub(super) async fn release(&mut self) {
        let is_leader = self.until.borrow().is_some();
        self.set_leader(None);
        if is_leader {
            let identity = &self.candidate.identity;
            let released = self.lease.release(identity, expire_at_once).await;
            if released.is_ok() {
                info!(lease = self.lease.name(), "released the Lease");
            }
        }
    }

    /// Makes one attempt. Returns `true` if this server holds the Lease.
    async fn attempt(&mut self, now: Instant) -> Result<bool, ApiError> {
        let found = self.lease.get().await?;
        let spec = found
            .as_ref()
            .map(|lease| lease.spec.clone().unwrap_or_default());
        let next_action = self
            .candidate
            .next_action(spec.as_ref(), now, Timestamp::now());
        let spec = match next_action {
            LeaseAction::Follow(holder) => {
                if self.until.borrow().is_some() {
                    warn!(
                        lease = self.lease.name(),
                        holder, "another server took the Lease"
                    );
                }
                return Ok(false);
            }
            LeaseAction::Create(spec) | LeaseAction::Take(spec) => spec,
        };
        match self.lease.write(found, spec).await {
            Ok(lease) => {
                let spec = lease.spec.unwrap_or_default();
                self.candidate.observed = Some((spec, now));
                Ok(true)
            }
            // Another candidate was faster. The next attempt finds out which one.
            Err(failure)
                if failure.kind == ApiErrorKind::Conflict && self.until.borrow().is_none() =>
            {
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    fn set_leader(&self, until: Option<Instant>) {
        let before = self.until.send_replace(until).is_some();
        let is_leader = until.is_some();
        self.metrics.leader(is_leader);
        if is_leader && !before {
            info!(
                lease = self.lease.name(),
                "acquired the Lease; this server writes records and ports"
            );
        } else if before && !is_leader {
            info!(
                lease = self.lease.name(),
                "lost the Lease; this server stops writing and continues to serve"
            );
        }
    }
}

/// Sets the times of a released Lease as client-go does.
fn expire_at_once(spec: &mut LeaseSpec) {
    let now = MicroTime(Timestamp::now());
    spec.lease_duration_seconds = Some(1);
    spec.acquire_time = Some(now.clone());
    spec.renew_time = Some(now);
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// Returns a leadership that the test grants and revokes.
    pub(in super::super) fn leadership() -> (watch::Sender<Option<Instant>>, Leadership) {
        let (sender, receiver) = watch::channel(None);
        (sender, Leadership(receiver))
    }
}

#[cfg(test)]
mod tests;
