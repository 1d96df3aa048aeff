//! Secrets with the documents that all servers change: observed by a watch, written by
//! compare-and-swap.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{debug, warn};
use tunnel_process::shutdown::Shutdown;

use super::super::api_call::{CALL_LIMIT, count_write, with_limit};
use super::super::failure::ApiError;
use super::super::objects::Object;
use super::super::watches::{Observed, follow_one};
use super::cluster_objects::{ClusterObjects, conflicts};
use crate::cluster::conditions::Condition;
use tunnel_store::document::{
    CasOutcome, CompareAndSwap, DocumentOwner, ObservedContent, SharedDocument,
};

pub(super) const REVOKED: &str = "revoked.json";
/// Time in which an answer or an event is late: longer than the limit of a call and the pause of a
/// watch.
const RACE_MAX: Duration = Duration::from_secs(30);
/// Maximum number of pending changes. Further changes are refused.
const SWAPS_MAX: usize = 64;

#[derive(Debug, Clone)]
pub(super) struct DocumentsSecret {
    pub(super) name: String,
    pub(super) object: Object,
    pub(super) condition: Condition,
    pub(super) keys: &'static [&'static str],
}

/// The observed content of all documents of a Secret, with a channel to change them. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct SharedDocuments {
    secret: DocumentsSecret,
    name: String,
    namespace: String,
    swaps: mpsc::Sender<CompareAndSwap>,
    contents: Arc<[(&'static str, watch::Sender<ObservedContent>)]>,
    /// The version of the Secret that was last observed, and when.
    newest: Arc<Mutex<Option<(u64, Instant)>>>,
    is_observed: watch::Sender<bool>,
    changes: watch::Sender<()>,
}

impl SharedDocuments {
    /// Starts to watch the Secret. `persisted` is the last content of the documents by key, and
    /// `is_whole` says whether it is complete. `changes` is sent to after a document changed.
    pub(super) fn new(
        cluster_objects: &ClusterObjects,
        secret: DocumentsSecret,
        persisted: &BTreeMap<String, String>,
        is_whole: bool,
        changes: watch::Sender<()>,
        shutdown: &Shutdown,
    ) -> Self {
        let (swaps, swap_requests) = mpsc::channel(SWAPS_MAX);
        let content = |key: &'static str| {
            let content = persisted.get(key);
            let content = content.map(|text| Arc::from(text.as_bytes()));
            let observed = ObservedContent {
                content,
                ..ObservedContent::default()
            };
            (key, watch::Sender::new(observed))
        };
        let documents = Self {
            name: cluster_objects.describe_secret(&secret.name),
            namespace: cluster_objects.namespace.clone(),
            swaps,
            contents: secret.keys.iter().copied().map(content).collect(),
            secret,
            newest: Arc::default(),
            is_observed: watch::Sender::new(is_whole),
            changes,
        };
        let watching = documents.clone();
        shutdown.spawn_service(watching.watch(cluster_objects.clone()));
        let writing = documents.clone();
        shutdown.spawn_service(writing.write(cluster_objects.clone(), swap_requests));
        documents
    }

    /// Applies each observed content of the Secret.
    async fn watch(self, cluster_objects: ClusterObjects) {
        let DocumentsSecret {
            name: secret,
            object,
            condition,
            ..
        } = self.secret.clone();
        let secrets = cluster_objects.secrets.clone();
        let context = cluster_objects.cluster.watch_context(object);
        let change = |observed: Observed<Secret>| match observed {
            Observed::Present(found) => {
                self.observe(&found);
                cluster_objects.cluster.metrics.synced(object);
                cluster_objects.condition(condition, None);
            }
            Observed::Absent => {
                // The API server's own answer, so the documents are known to be empty.
                self.observe(&Secret::default());
                let absent = ApiError::absent(object, &cluster_objects.namespace, &secret);
                cluster_objects.condition(condition, Some(absent.to_string()));
            }
            Observed::Unknown => {}
        };
        follow_one(secrets, &secret, context, change).await;
    }

    /// Waits until the Secret, or its absence, was observed or a complete snapshot was loaded.
    pub(super) async fn wait_observed(&self) {
        let mut is_observed = self.is_observed.subscribe();
        // `self` holds the sender.
        let _never_closed = is_observed.wait_for(|is_observed| *is_observed).await;
    }

    /// Returns `true` if the Secret was observed or a complete snapshot was loaded.
    pub(super) fn is_observed(&self) -> bool {
        *self.is_observed.borrow()
    }

    pub(super) fn document(&self, key: &'static str) -> SharedDocument {
        let contents = self.contents.iter().find(|(known, _)| *known == key);
        let observed = contents.map(|(_, observed)| observed.subscribe());
        // An unknown key never has content.
        let observed =
            observed.unwrap_or_else(|| watch::Sender::new(ObservedContent::default()).subscribe());
        let owner = DocumentOwner {
            swaps: self.swaps.clone(),
            key,
        };
        let repair = format!(
            "servers that run write what they know after: kubectl -n {} patch secret {} --type=merge -p \
             '{{\"data\":{{\"{key}\":null}}}}'",
            self.namespace, self.secret.name
        );
        SharedDocument::new(format!("{}, key {key}", self.name), observed, owner)
            .with_repair(repair)
    }

    pub(super) fn texts(&self) -> Vec<(&'static str, String)> {
        let text = |(key, observed): &(&'static str, watch::Sender<ObservedContent>)| {
            let content = observed.borrow().content.clone()?;
            Some((*key, String::from_utf8(content.to_vec()).ok()?))
        };
        self.contents.iter().filter_map(text).collect()
    }

    /// Applies the observed Secret. A missing document leaves the previous content in place, as lost.
    /// The watch and the answers to writes may arrive in another order than the versions that they
    /// have: an older one changes nothing.
    fn observe(&self, secret: &Secret) {
        let mut newest = self.newest.lock();
        if !is_news(secret, &mut newest, Instant::now()) {
            return;
        }
        let mut is_changed = false;
        for (key, observed) in self.contents.iter() {
            let content = content(secret, key);
            is_changed |= observed.send_if_modified(|observed| {
                let is_lost = content.is_none() && observed.content.is_some();
                let is_same = content.is_none() || observed.content == content;
                let is_changed = is_lost != observed.is_lost || !is_same;
                observed.is_lost = is_lost;
                if is_changed && content.is_some() {
                    observed.sequence += 1;
                    observed.content = content;
                }
                is_changed
            });
        }
        self.is_observed.send_if_modified(|is_observed| {
            let is_first = !*is_observed;
            *is_observed = true;
            is_first
        });
        if is_changed {
            self.changes.send_replace(());
        }
    }

    fn sequence(&self, key: &str) -> u64 {
        let contents = self.contents.iter().find(|(known, _)| *known == key);
        contents.map_or(0, |(_, observed)| observed.borrow().sequence)
    }

    async fn write(
        self,
        cluster_objects: ClusterObjects,
        mut swap_requests: mpsc::Receiver<CompareAndSwap>,
    ) {
        while let Some(swap) = swap_requests.recv().await {
            let swapped = match self.swap(&cluster_objects, &swap).await {
                Ok(swapped) => swapped,
                Err(failure) => {
                    warn!(secret = self.secret.name, key = swap.key, error = %failure, "cannot write");
                    CasOutcome::Failed(failure.to_string())
                }
            };
            let _nobody_waits_any_more = swap.done.try_send(swapped);
        }
    }

    async fn swap(
        &self,
        cluster_objects: &ClusterObjects,
        swap: &CompareAndSwap,
    ) -> Result<CasOutcome, ApiError> {
        let (name, mut conflicts) = (self.secret.name.as_str(), conflicts());
        loop {
            let mut secret = cluster_objects.secret(name).await?;
            let now = content(&secret, swap.key);
            if now.as_deref() != swap.expected.as_deref() {
                self.observe(&secret);
                return Ok(CasOutcome::Conflict(now));
            }
            if now.as_deref() == Some(&*swap.content) {
                self.observe(&secret);
                return Ok(CasOutcome::Written(self.sequence(swap.key)));
            }
            let data = secret.data.get_or_insert_default();
            data.insert(swap.key.to_owned(), ByteString(swap.content.to_vec()));
            let parameters = PostParams::default();
            let replaced = cluster_objects.secrets.replace(name, &parameters, &secret);
            let written = with_limit(CALL_LIMIT, replaced).await;
            let metrics = &cluster_objects.cluster.metrics;
            if let Some(written) = count_write(metrics, self.secret.object, written)? {
                debug!(secret = name, key = swap.key, "wrote");
                self.observe(&written);
                return Ok(CasOutcome::Written(self.sequence(swap.key)));
            }
            conflicts.wait().await?;
        }
    }
}

/// Returns whether a Secret is not older than the `newest` one, which it then replaces. After
/// [`RACE_MAX`] any version is news: a cluster that was restored from a backup has lower ones.
fn is_news(secret: &Secret, newest: &mut Option<(u64, Instant)>, now: Instant) -> bool {
    let version = secret.metadata.resource_version.as_deref();
    let Some(version) = version.and_then(|version| version.parse().ok()) else {
        return true;
    };
    if let Some((known, at)) = *newest
        && version < known
        && now.saturating_duration_since(at) < RACE_MAX
    {
        return false;
    }
    *newest = Some((version, now));
    true
}

fn content(secret: &Secret, key: &str) -> Option<Arc<[u8]>> {
    let value = &secret.data.as_ref()?.get(key)?.0;
    let is_blank = value.trim_ascii().is_empty();
    (!is_blank).then(|| Arc::from(value.as_slice()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(version: &str) -> Secret {
        let mut secret = Secret::default();
        secret.metadata.resource_version = Some(version.to_owned());
        secret
    }

    #[test]
    fn older_version_that_arrives_late_is_no_news() {
        let (mut newest, start) = (None, Instant::now());
        let mut is_new = |version: &str, seconds| {
            let now = start + Duration::from_secs(seconds);
            is_news(&secret(version), &mut newest, now)
        };
        assert!(is_new("9", 0));
        assert!(is_new("10", 1), "numbers, not texts");
        assert!(!is_new("9", 2));
        assert!(is_new("10", 3), "the same version");
        assert!(!is_new("9", 32));
        assert!(is_new("opaque", 4));
        // The cluster was restored from a backup.
        assert!(is_new("5", 33));
        assert!(is_new("6", 34));
    }
}
