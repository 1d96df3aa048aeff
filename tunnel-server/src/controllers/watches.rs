//! Following objects: list and watch with kube's watcher, and tries again that neither storm nor sleep too long.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tracing::{debug, warn};

use super::failure::{Backoff, Failure, FailureKind, Throttle};
use super::metrics::{ClusterMetrics, Object};

/// Objects of one page of a list: a Node can be 20 KB of JSON, and a page is in memory as a whole.
const PAGE_OBJECTS: u32 = 200;
/// The API server ends watches after this long, seconds; one that is silent for longer is dead.
pub(super) const WATCH_SECONDS: u32 = 60;
/// Events that are handled together.
const BATCH_EVENTS: usize = 1024;

/// What to follow.
pub(super) fn config() -> watcher::Config {
    watcher::Config::default()
        .page_size(PAGE_OBJECTS)
        .timeout(WATCH_SECONDS)
}

/// Feeds the events of a list and watch to `apply`, those that are there together in one call, for as long as it is
/// polled. Failures are counted, logged when their kind changes, and retried.
pub(super) async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    (object, metrics, throttle): (Object, ClusterMetrics, Throttle),
    mut apply: impl FnMut(Vec<Event<K>>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut backoff = Backoff::default();
    let mut said: Option<FailureKind> = None;
    loop {
        let mut events = pin!(watcher(api.clone(), config.clone()));
        // kube goes on from the same version when a watch cannot start, which never succeeds when that is the reason.
        let mut is_expired = false;
        while !is_expired {
            let Some(next) = events.next().await else {
                break;
            };
            let mut batch = Vec::new();
            let mut failure = None;
            let mut taken = Some(next);
            while let Some(next) = taken {
                match next {
                    Ok(event) => batch.push(event),
                    Err(error) => {
                        is_expired = matches!(&error, watcher::Error::WatchStartFailed(_))
                            && Failure::from(&error).kind == FailureKind::Expired;
                        failure = Some(Failure::from(&error));
                        break;
                    }
                }
                taken = if batch.len() < BATCH_EVENTS {
                    events.next().now_or_never().flatten()
                } else {
                    None
                };
            }
            let is_alive = batch
                .iter()
                .any(|event| matches!(event, Event::InitDone | Event::Apply(_) | Event::Delete(_)));
            if is_alive && failure.is_none() && said.take().is_some() {
                debug!(object = object.label(), "watching again");
            }
            if !batch.is_empty() {
                apply(batch);
            }
            let Some(failure) = failure else { continue };
            metrics.watch_failed(object, failure.kind);
            if said.replace(failure.kind) != Some(failure.kind) {
                warn!(object = object.label(), error = %failure, "cannot watch, trying again");
            }
            let now = tokio::time::Instant::now();
            let wait = backoff
                .after(&failure, now, rand::random())
                .max(throttle.left(now));
            tokio::time::sleep(wait).await;
        }
    }
}

/// One object that is followed by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Seen<T> {
    /// Nothing was heard yet.
    #[default]
    Unknown,
    /// There is none.
    Absent,
    /// It is so.
    Present(T),
}

impl<T> Seen<T> {
    /// The same of a part of it, to be shared.
    pub(super) fn map<U>(self, part: impl FnOnce(T) -> U) -> Seen<Arc<U>> {
        match self {
            Self::Unknown => Seen::Unknown,
            Self::Absent => Seen::Absent,
            Self::Present(object) => Seen::Present(Arc::new(part(object))),
        }
    }

    /// The object, if it is there.
    pub(super) fn present(&self) -> Option<&T> {
        match self {
            Self::Present(object) => Some(object),
            Self::Absent | Self::Unknown => None,
        }
    }

    /// Whether the cluster was heard.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// Follows the one object of this name; `change` gets each state that differs in identity from the last.
pub(super) async fn follow_one<K>(
    api: Api<K>,
    name: &str,
    context: (Object, ClusterMetrics, Throttle),
    mut change: impl FnMut(Seen<K>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let only = config().fields(&format!("metadata.name={name}"));
    let mut listed = None;
    let is_it = |object: &K| object.meta().name.as_deref() == Some(name);
    follow(api, only, context, |events| {
        let mut last = None;
        for event in events {
            match event {
                Event::Init => listed = None,
                Event::InitApply(object) if is_it(&object) => listed = Some(object),
                Event::InitDone => last = Some(listed.take().map_or(Seen::Absent, Seen::Present)),
                Event::Apply(object) if is_it(&object) => last = Some(Seen::Present(object)),
                Event::Delete(object) if is_it(&object) => last = Some(Seen::Absent),
                Event::InitApply(_) | Event::Apply(_) | Event::Delete(_) => {}
            }
        }
        if let Some(state) = last {
            change(state);
        }
    })
    .await;
}

#[cfg(test)]
mod tests;
