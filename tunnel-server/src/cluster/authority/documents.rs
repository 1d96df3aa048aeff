//! The Secret with the documents that servers change together: heard by a watch, written by compare-and-swap.

use std::sync::Arc;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::PostParams;
use tokio::sync::{mpsc, watch};
use tracing::{debug, warn};
use tunnel_proto::process::shutdown::Shutdown;

use super::super::failure::Failure;
use super::super::metrics::Object;
use super::super::watches::Seen;
use super::{CONFLICTS_MAX, Place, follow_one, pause_after_conflict};
use crate::cluster::authority::snapshot::Kept;
use crate::cluster::conditions::Part;
use crate::store::document::{ClusterDoc, Heard, SharedDoc, Swap, Swapped};

/// Join tokens.
pub(super) const TOKENS: &str = "tokens.json";
/// Revoked nodes.
pub(super) const REVOKED: &str = "revoked.json";
/// QUIC keys of all replicas.
pub(super) const REPLICAS: &str = "replicas.json";
/// All of them.
pub(super) const DOCUMENTS: [&str; 3] = [TOKENS, REVOKED, REPLICAS];
/// Changes that wait to be written; one more is refused.
const SWAPS_MAX: usize = 64;

/// What was heard of all documents, and the way to change them. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Documents {
    name: String,
    swaps: mpsc::Sender<Swap>,
    contents: Arc<[(&'static str, watch::Sender<Heard>)]>,
    is_heard: watch::Sender<bool>,
}

impl Documents {
    /// Begins to follow the Secret.
    pub(super) fn new(place: &Place, name: &str, kept: &Kept, shutdown: &Shutdown) -> Self {
        let (swaps, wishes) = mpsc::channel(SWAPS_MAX);
        let content = |key: &'static str| {
            let content = kept.documents.get(key);
            let content = content.map(|text| Arc::from(text.as_bytes()));
            let heard = Heard {
                sequence: 0,
                content,
            };
            (key, watch::Sender::new(heard))
        };
        let documents = Self {
            name: place.named(name),
            swaps,
            contents: DOCUMENTS.map(content).into(),
            is_heard: watch::Sender::new(kept.is_whole()),
        };
        let (watched, writer) = (documents.clone(), documents.clone());
        let (place_watched, secret) = (place.clone(), name.to_owned());
        shutdown.spawn_service(async move {
            let secrets = place_watched.secrets.clone();
            let context = place_watched.context(Object::State);
            follow_one(secrets, &secret, context, |seen: Seen<Secret>| match seen {
                Seen::Present(found) => {
                    watched.note(&found);
                    place_watched.side.metrics.synced(Object::State);
                    place_watched.problem(Part::State, None);
                }
                Seen::Absent => {
                    let namespace = &place_watched.namespace;
                    let absent = Failure::absent(Object::State, namespace, &secret);
                    place_watched.problem(Part::State, Some(absent.to_string()));
                }
                Seen::Unknown => {}
            })
            .await;
        });
        let (place, secret) = (place.clone(), name.to_owned());
        shutdown.spawn_service(async move { writer.write(place, secret, wishes).await });
        documents
    }

    /// Waits until the Secret was heard, or is known from before.
    pub(super) async fn heard(&self) {
        let mut is_heard = self.is_heard.subscribe();
        // The sender is in `self`.
        let _never_closed = is_heard.wait_for(|is_heard| *is_heard).await;
    }

    /// Whether the Secret was heard.
    pub(super) fn is_heard(&self) -> bool {
        *self.is_heard.borrow()
    }

    /// One of them.
    pub(super) fn document(&self, key: &'static str) -> SharedDoc {
        SharedDoc::Cluster(self.plain(key))
    }

    /// As [`Documents::document`].
    fn plain(&self, key: &'static str) -> ClusterDoc {
        let contents = self.contents.iter().find(|(known, _)| *known == key);
        let heard = contents.map(|(_, heard)| heard.subscribe());
        // A key that is none of them has no content, ever.
        let heard = heard.unwrap_or_else(|| watch::Sender::new(Heard::default()).subscribe());
        let name = format!("{}, key {key}", self.name);
        ClusterDoc::new(name, key, heard, self.swaps.clone())
    }

    /// What is kept of them on disk.
    pub(super) fn texts(&self) -> Vec<(&'static str, String)> {
        let text = |(key, heard): &(&'static str, watch::Sender<Heard>)| {
            let content = heard.borrow().content.clone()?;
            Some((*key, String::from_utf8(content.to_vec()).ok()?))
        };
        self.contents.iter().filter_map(text).collect()
    }

    /// Waits until any of them changes. Cancel-safe.
    pub(super) async fn changed(seen: &mut [watch::Receiver<Heard>]) {
        let all = seen.iter_mut().map(|heard| Box::pin(heard.changed()));
        let _any = futures_util::future::select_all(all).await;
    }

    /// For [`Documents::changed`].
    pub(super) fn subscribe(&self) -> Vec<watch::Receiver<Heard>> {
        let senders = self.contents.iter().map(|(_, heard)| heard);
        senders.map(watch::Sender::subscribe).collect()
    }

    /// Takes in the Secret as it was found. A document that is gone takes nothing back.
    fn note(&self, secret: &Secret) {
        for (key, heard) in self.contents.iter() {
            let Some(content) = content(secret, key) else {
                continue;
            };
            heard.send_if_modified(|heard| {
                let is_news = heard.content.as_deref() != Some(&*content);
                if is_news {
                    heard.sequence += 1;
                    heard.content = Some(content);
                }
                is_news
            });
        }
        self.is_heard.send_if_modified(|is_heard| {
            let is_first = !*is_heard;
            *is_heard = true;
            is_first
        });
    }

    fn sequence(&self, key: &str) -> u64 {
        let contents = self.contents.iter().find(|(known, _)| *known == key);
        contents.map_or(0, |(_, heard)| heard.borrow().sequence)
    }

    async fn write(self, place: Place, secret: String, mut wishes: mpsc::Receiver<Swap>) {
        while let Some(swap) = wishes.recv().await {
            let swapped = match self.swap(&place, &secret, &swap).await {
                Ok(swapped) => swapped,
                Err(failure) => {
                    warn!(secret, key = swap.key, error = %failure, "cannot write");
                    Swapped::Failed(failure.to_string())
                }
            };
            let _nobody_waits_any_more = swap.done.try_send(swapped);
        }
    }

    async fn swap(&self, place: &Place, name: &str, swap: &Swap) -> Result<Swapped, Failure> {
        for _ in 0..CONFLICTS_MAX {
            let mut secret = place.secret(name).await?;
            let now = content(&secret, swap.key);
            if now.as_deref() != swap.expected.as_deref() {
                self.note(&secret);
                return Ok(Swapped::Different(now));
            }
            if now.as_deref() == Some(&*swap.content) {
                self.note(&secret);
                return Ok(Swapped::Written(self.sequence(swap.key)));
            }
            let data = secret.data.get_or_insert_default();
            data.insert(swap.key.to_owned(), ByteString(swap.content.to_vec()));
            let parameters = PostParams::default();
            let replaced = place.secrets.replace(name, &parameters, &secret);
            let written = place.call(replaced).await;
            if let Some(written) = place.wrote(Object::State, written)? {
                debug!(secret = name, key = swap.key, "wrote");
                self.note(&written);
                return Ok(Swapped::Written(self.sequence(swap.key)));
            }
            pause_after_conflict().await;
        }
        Err(super::conflicts())
    }
}

fn content(secret: &Secret, key: &str) -> Option<Arc<[u8]>> {
    let value = &secret.data.as_ref()?.get(key)?.0;
    let is_blank = value.trim_ascii().is_empty();
    (!is_blank).then(|| Arc::from(value.as_slice()))
}
