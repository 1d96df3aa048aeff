//! Stateless reset and connection-id keys of QUIC for each server. Each entry in the shared
//! document has its own Lease. A server that restarts without its disk can therefore still send
//! stateless resets to its agents, and two servers never use the same keys.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::LeaseSpec;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use tunnel_proto::process::files;
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::transport::quic::QuicKeys;
use tunnel_proto::wire::enroll::hex;

use super::super::api_call::{CALL_LIMIT, count_write};
use super::super::failure::{ApiError, ApiErrorKind};
use super::super::lease::{LeaseHandle, RELEASE_LIMIT, spec_for};
use super::super::objects::{Object, QUIC_KEY_LEASES_MAX, quic_key_lease_name};
use super::cluster_objects::ClusterObjects;
use super::documents::{QUIC_KEYS, SharedDocuments};
use crate::ca::CaError;
use crate::cluster::conditions::Condition;
use crate::store::data_dir::{DataDir, random};

/// Time between renewals of a Lease.
const RENEW_EVERY: Duration = Duration::from_secs(4);
/// A Lease that was not renewed for this long by the wall clock is free. Clock differences are
/// smaller.
const STALE: SignedDuration = SignedDuration::from_secs(60);
/// Limit for claiming keys at start-up. The server then continues with keys of its own.
const CLAIM_LIMIT: Duration = Duration::from_secs(8);
/// Limit for a server with a persisted claim. The server must answer DNS within a second of its
/// start, even if the API server is unavailable.
const CLAIM_LIMIT_PERSISTED: Duration = Duration::from_millis(500);

/// The Leases on all QUIC keys. Each server claims one of them.
pub(super) struct QuicKeyLeases {
    pub(super) cluster_objects: ClusterObjects,
    /// Name prefix of the Leases.
    pub(super) lease: String,
    /// Whether no other server runs concurrently, so that no Lease is needed.
    pub(super) is_single: bool,
    /// Identity of this server, unless the data directory contains one.
    pub(super) holder: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LeaseClaim {
    entry: u8,
    holder: String,
}

#[derive(Debug)]
pub(super) struct ClaimedKeys {
    pub(super) keys: QuicKeys,
    /// Claim to renew, if a Lease protects the entry.
    pub(super) claim: Option<LeaseClaim>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct QuicKeysDocument {
    #[serde(default, rename = "replicas")]
    entries: BTreeMap<u8, QuicKeysEntry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct QuicKeysEntry {
    /// The keys in hexadecimal.
    keys: String,
}

/// The persisted claim. A restarted server regains its entry at once, even without the API server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct PersistedClaim {
    claim: LeaseClaim,
    keys: String,
}

impl QuicKeyLeases {
    /// Claims an entry and returns its keys. If that fails, reports the failure and returns the
    /// persisted keys or new ones.
    pub(super) async fn claim(
        &self,
        documents: &SharedDocuments,
        data: &DataDir,
    ) -> Result<ClaimedKeys, CaError> {
        let mut persisted_claim = persisted_claim(data);
        let limit = match persisted_claim {
            Some(_) => CLAIM_LIMIT_PERSISTED,
            None => CLAIM_LIMIT,
        };
        let finding = self.find(documents, &mut persisted_claim);
        let found = tokio::time::timeout(limit, finding).await;
        let found = found
            .unwrap_or_else(|_elapsed| Err("the API server did not answer in time".to_owned()));
        let found = match found {
            Ok(found) => {
                self.cluster_objects
                    .condition(Condition::QuicKeyLease, None);
                found
            }
            Err(condition) => {
                let line = format!(
                    "cannot claim QUIC keys: {condition}; agents detect a restart of this server late"
                );
                self.cluster_objects
                    .condition(Condition::QuicKeyLease, Some(line));
                match persisted_claim {
                    Some(persisted_claim) => persisted_claim,
                    None => {
                        let keys = random::<{ QuicKeys::LEN }>()?;
                        return Ok(ClaimedKeys {
                            keys: QuicKeys::from_bytes(&keys),
                            claim: None,
                        });
                    }
                }
            }
        };
        let keys = parse_keys(&found.keys)
            .ok_or_else(|| io::Error::other("QUIC keys of the cluster have the wrong length"))?;
        if let Err(error) = persist_claim(data, &found) {
            warn!(%error, "cannot persist the claim on QUIC keys");
        }
        info!(entry = found.claim.entry, "claimed QUIC keys");
        Ok(ClaimedKeys {
            keys: QuicKeys::from_bytes(&keys),
            claim: (!self.is_single).then_some(found.claim),
        })
    }

    async fn find(
        &self,
        documents: &SharedDocuments,
        persisted_claim: &mut Option<PersistedClaim>,
    ) -> Result<PersistedClaim, String> {
        let claim = if self.is_single {
            LeaseClaim {
                entry: 0,
                holder: self.holder.clone(),
            }
        } else {
            let claim = self.acquire_any(persisted_claim).await;
            claim.map_err(|failure| failure.to_string())?
        };
        let keys = load_or_create_keys(documents, claim.entry).await?;
        Ok(PersistedClaim { claim, keys })
    }

    /// Acquires the Lease of the previous entry, or else of the first entry that is free or new. If
    /// another server holds the previous entry, the persisted claim is dropped, because those keys
    /// belong to that server.
    async fn acquire_any(
        &self,
        persisted_claim: &mut Option<PersistedClaim>,
    ) -> Result<LeaseClaim, ApiError> {
        let before = persisted_claim
            .as_ref()
            .map(|persisted_claim| &persisted_claim.claim);
        let holder = before.map_or_else(|| self.holder.clone(), |claim| claim.holder.clone());
        let first = before.map(|claim| claim.entry);
        let mut absent = None;
        let others = (0..QUIC_KEY_LEASES_MAX).filter(|entry| Some(*entry) != first);
        for entry in first.into_iter().chain(others) {
            let claim = LeaseClaim {
                entry,
                holder: holder.clone(),
            };
            match self.acquire_or_renew(&claim).await {
                Ok(true) => return Ok(claim),
                Ok(false) => {}
                // There may be fewer Leases than entries.
                Err(failure) if failure.kind == ApiErrorKind::NotFound => {
                    absent.get_or_insert(failure);
                    continue;
                }
                Err(failure) => return Err(failure),
            }
            if Some(entry) == first {
                *persisted_claim = None;
            }
        }
        Err(absent.unwrap_or_else(|| {
            let text = format!("all {QUIC_KEY_LEASES_MAX} entries are held by other servers");
            ApiError::new(ApiErrorKind::Conflict, text)
        }))
    }

    fn lease_of(&self, claim: &LeaseClaim) -> LeaseHandle {
        let name = quic_key_lease_name(&self.lease, claim.entry);
        LeaseHandle::new(name, &self.cluster_objects.cluster)
    }

    /// Acquires or renews the Lease of an entry. Returns `true` if this server holds it.
    async fn acquire_or_renew(&self, claim: &LeaseClaim) -> Result<bool, ApiError> {
        let lease = self.lease_of(claim);
        let found = lease.get().await?;
        let wall = Timestamp::now();
        let before = found.as_ref().and_then(|lease| lease.spec.clone());
        let before = before.unwrap_or_default();
        if !is_free(&before, &claim.holder, wall) {
            return Ok(false);
        }
        let spec = spec_for(&before, &claim.holder, wall);
        let written = lease.write(found, spec).await;
        let metrics = &self.cluster_objects.cluster.metrics;
        Ok(count_write(metrics, Object::Lease, written)?.is_some())
    }

    /// Renews the Lease until it is released.
    pub(super) fn renew_until_released(
        self,
        claim: LeaseClaim,
        shutdown: &Shutdown,
    ) -> QuicKeyLease {
        let end = CancellationToken::new();
        let (ended, done) = tokio::sync::oneshot::channel();
        let asked = end.clone();
        shutdown.spawn_service(async move {
            let every = RENEW_EVERY.mul_f64(0.9 + rand::random::<f64>() * 0.2);
            while tokio::time::timeout(every, asked.cancelled()).await.is_err() {
                match self.acquire_or_renew(&claim).await {
                    Ok(true) => self.cluster_objects.condition(Condition::QuicKeyLease, None),
                    Ok(false) => {
                        let line = format!(
                            "another server holds the QUIC keys of entry {}, because this server could not renew the Lease; restart this server",
                            claim.entry
                        );
                        self.cluster_objects.condition(Condition::QuicKeyLease, Some(line));
                    }
                    Err(failure) if failure.needs_operator() => {
                        let line = format!("the Lease of the QUIC keys cannot be renewed: {failure}");
                        self.cluster_objects.condition(Condition::QuicKeyLease, Some(line));
                    }
                    Err(failure) => {
                        debug!(error = %failure, "cannot renew the Lease of the QUIC keys");
                    }
                }
            }
            // Only the holder counts, so the times stay.
            let released = self.lease_of(&claim).release(&claim.holder, |_spec| {}).await;
            debug!(?released, "released the Lease of the QUIC keys");
            let _nobody_waits = ended.send(());
        });
        QuicKeyLease { end, done }
    }
}

/// The Lease on this server's QUIC keys. It is renewed until it is released.
#[derive(Debug)]
pub struct QuicKeyLease {
    end: CancellationToken,
    done: tokio::sync::oneshot::Receiver<()>,
}

impl QuicKeyLease {
    /// Releases the keys for a later server. New sessions must not use them after this call. Takes
    /// at most 2 s.
    pub async fn release(self) {
        self.end.cancel();
        let _either_way = tokio::time::timeout(RELEASE_LIMIT + CALL_LIMIT, self.done).await;
    }
}

/// Returns `true` if `holder` may take the Lease. Pure.
fn is_free(spec: &LeaseSpec, holder: &str, wall: Timestamp) -> bool {
    let held_by = spec.holder_identity.as_deref().unwrap_or_default();
    let renewed = spec.renew_time.as_ref().map(|time| time.0);
    let is_stale = renewed.is_none_or(|renewed| wall.duration_since(renewed) > STALE);
    held_by.is_empty() || held_by == holder || is_stale
}

/// Returns the keys of an entry. The first caller creates them.
async fn load_or_create_keys(documents: &SharedDocuments, entry: u8) -> Result<String, String> {
    let document = documents.document(QUIC_KEYS);
    let finding = tokio::task::spawn_blocking(move || {
        let read = |content: Option<QuicKeysDocument>| {
            let stored = content?.entries.get(&entry)?.keys.clone();
            parse_keys(&stored).map(|_| stored)
        };
        if let Some(keys) = read(document.read()?) {
            return Ok(keys);
        }
        let fresh = hex(&random::<{ QuicKeys::LEN }>()?);
        let mut keys = fresh.clone();
        document.change(|content: Option<QuicKeysDocument>| {
            let mut content = content.unwrap_or_default();
            match content
                .entries
                .get(&entry)
                .filter(|stored| parse_keys(&stored.keys).is_some())
            {
                Some(stored) => keys.clone_from(&stored.keys),
                None => {
                    keys.clone_from(&fresh);
                    let fresh = QuicKeysEntry {
                        keys: fresh.clone(),
                    };
                    content.entries.insert(entry, fresh);
                }
            }
            Ok(content)
        })?;
        Ok(keys)
    });
    let found: io::Result<String> = finding
        .await
        .unwrap_or_else(|panic| Err(io::Error::other(panic)));
    found.map_err(|error| error.to_string())
}

fn persisted_claim(data: &DataDir) -> Option<PersistedClaim> {
    let stored = files::read_secret(&data.quic_key_claim()).ok()??;
    let persisted_claim: PersistedClaim = serde_json::from_slice(&stored).ok()?;
    parse_keys(&persisted_claim.keys).map(|_| persisted_claim)
}

fn persist_claim(data: &DataDir, found: &PersistedClaim) -> io::Result<()> {
    if persisted_claim(data).as_ref() == Some(found) {
        return Ok(());
    }
    let content = serde_json::to_vec(found).map_err(io::Error::other)?;
    files::replace(&data.quic_key_claim(), &content)
}

fn parse_keys(text: &str) -> Option<[u8; QuicKeys::LEN]> {
    let mut bytes = [0; QuicKeys::LEN];
    if text.len() != 2 * QuicKeys::LEN || !text.is_ascii() {
        return None;
    }
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(holder: &str, renewed: Timestamp) -> LeaseSpec {
        spec_for(&LeaseSpec::default(), holder, renewed)
    }

    #[test]
    fn a_lease_is_free_when_nobody_holds_it_or_its_holder_is_gone_for_long() {
        let now = Timestamp::now();
        let ago = |seconds| now - SignedDuration::from_secs(seconds);
        assert!(is_free(&LeaseSpec::default(), "a", now));
        assert!(is_free(&lease("", now), "a", now));
        assert!(is_free(&lease("a", now), "a", now));
        assert!(!is_free(&lease("b", ago(50)), "a", now));
        assert!(is_free(&lease("b", ago(61)), "a", now));
        // The holder's clock is ahead.
        assert!(!is_free(&lease("b", ago(-300)), "a", now));
    }

    #[test]
    fn keys_are_read_as_they_were_written_or_not_at_all() {
        let keys = random::<{ QuicKeys::LEN }>().unwrap();
        assert_eq!(parse_keys(&hex(&keys)), Some(keys));
        for damaged in ["", "00", &"x".repeat(144), &"é".repeat(72)] {
            assert_eq!(parse_keys(damaged), None);
        }
    }
}
