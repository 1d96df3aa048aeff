//! List and watch of objects with kube's watcher, with retries that neither overload the API server
//! nor wait too long.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, Stream, StreamExt as _};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::debug;

use super::failure::{ApiError, ApiErrorKind, CallBackoff, Throttle};
use super::metrics::ClusterMetrics;
use super::objects::Object;
use crate::cluster::conditions::{Condition, Conditions};

/// Number of objects per list page. A Node can be 20 KB of JSON, and a whole page is in memory. The
/// API server ignores the limit for a list from its cache (`resourceVersion=0`), which would be one
/// response with all Nodes: 1 GB for 100,000 Nodes of 10 KB.
const PAGE_OBJECTS: u32 = 500;
/// Time in seconds after which the API server ends a watch. A connection that is silent for longer
/// is dead.
pub(super) const WATCH_SECONDS: u32 = 60;
/// Failures are reported when they have lasted this long. For a second or two after its start, an
/// API server answers 403 to allowed requests, until it has read the roles.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// Longer than one attempt to start a watch plus the delay before it.
const RECOVERED_AFTER: Duration = Duration::from_secs(12);
const FOREVER: Duration = Duration::from_secs(86_400 * 365);
/// After a restart of the API server the watches of all servers expire at the same moment. Their lists
/// of Nodes begin within this time.
const RELIST_SPREAD: Duration = Duration::from_secs(2);
/// Maximum number of events that are handled together.
const BATCH_EVENTS: usize = 1024;

pub(super) fn config() -> watcher::Config {
    watcher::Config::default()
        .page_size(PAGE_OBJECTS)
        .timeout(WATCH_SECONDS)
}

/// Watched object, and the receivers of its failures.
#[derive(Debug, Clone)]
pub(super) struct WatchContext {
    pub(super) object: Object,
    pub(super) metrics: ClusterMetrics,
    pub(super) conditions: Conditions,
    pub(super) throttle: Throttle,
}

/// Passes the events of a list and watch to `apply` for as long as the future is polled. Events
/// that are available together are passed in one call. Failures are counted and retried. Persistent
/// failures are reported.
pub(super) async fn follow<K>(
    api: Api<K>,
    config: watcher::Config,
    context: WatchContext,
    mut apply: impl FnMut(Vec<Event<K>>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let mut errors = WatchErrors::new(context);
    loop {
        let mut events = pin!(watcher(api.clone(), config.clone()));
        // If a watch cannot start, kube retries with the same version. That never succeeds if the
        // version is the reason.
        let mut is_expired = false;
        while !is_expired {
            let next = tokio::time::timeout_at(errors.recovery_deadline(), events.next()).await;
            let (batch, failed) = match next {
                Ok(Some(first)) => take_available(first, &mut events),
                Ok(None) => break,
                Err(_recovered) => {
                    errors.clear();
                    continue;
                }
            };
            errors.is_listing |= batch.iter().any(|event| matches!(event, Event::Init));
            let is_listed = batch.iter().any(|event| matches!(event, Event::InitDone));
            if !batch.is_empty() {
                apply(batch);
            }
            if is_listed {
                errors.listed();
            }
            if let Some(error) = failed {
                let failure = ApiError::from(&error);
                is_expired = matches!(error, watcher::Error::WatchStartFailed(_))
                    && failure.kind == ApiErrorKind::Expired;
                tokio::time::sleep(errors.next_delay(&failure)).await;
                errors.last_retry_at = Instant::now();
            }
        }
    }
}

/// Returns the events that are available together, and the failure that follows them, if any.
fn take_available<K>(
    first: Result<Event<K>, watcher::Error>,
    events: &mut (impl Stream<Item = Result<Event<K>, watcher::Error>> + Unpin),
) -> (Vec<Event<K>>, Option<watcher::Error>) {
    let mut batch = Vec::new();
    let mut next = Some(first);
    while let Some(taken) = next {
        match taken {
            Ok(event) => batch.push(event),
            Err(error) => return (batch, Some(error)),
        }
        next = if batch.len() < BATCH_EVENTS {
            events.next().now_or_never().flatten()
        } else {
            None
        };
    }
    (batch, None)
}

/// Consecutive failures of one watch.
#[derive(Debug)]
struct WatchErrors {
    context: WatchContext,
    backoff: CallBackoff,
    /// Time of the first failure.
    since: Option<Instant>,
    /// Time at which the delay after the last failure ended.
    last_retry_at: Instant,
    /// The version of the last list expired as well, so the next list does not prove recovery.
    is_expiring: bool,
    /// A list is not complete. Its silence says nothing: the API server may not answer at all.
    is_listing: bool,
}

impl WatchErrors {
    fn new(context: WatchContext) -> Self {
        Self {
            context,
            backoff: CallBackoff::default(),
            since: None,
            last_retry_at: Instant::now(),
            is_expiring: false,
            is_listing: true,
        }
    }

    /// Returns the time at which a watch without further failures counts as recovered, whether it
    /// has events or not.
    fn recovery_deadline(&self) -> Instant {
        let time = if self.since.is_some() && !self.is_listing {
            RECOVERED_AFTER
        } else {
            FOREVER
        };
        self.last_retry_at + time
    }

    /// Handles a complete list, which proves that the API server answers again.
    fn listed(&mut self) {
        self.is_listing = false;
        if self.since.is_some() && !self.is_expiring {
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.since = None;
        self.is_expiring = false;
        let part = Condition::Watching(self.context.object);
        self.context.conditions.set(part, Vec::new());
    }

    /// Returns the delay after a failure. Every restart of the API server causes failures, so they
    /// are reported only if they last. A single expired version is not a condition, because an API
    /// server that has just started does not know old versions.
    fn next_delay(&mut self, failure: &ApiError) -> Duration {
        let WatchContext {
            object,
            metrics,
            conditions,
            throttle,
        } = &self.context;
        metrics.watch_failed(*object, failure.kind);
        debug!(object = object.label(), error = %failure, "cannot watch, trying again");
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let wait = self.backoff.next_delay(failure, now, rand::random());
        let is_expired = failure.kind == ApiErrorKind::Expired;
        let is_first_expiry = is_expired && wait.is_zero();
        self.is_expiring = is_expired && !is_first_expiry;
        if self.is_expiring || (now.duration_since(since) >= REPORT_AFTER && !is_expired) {
            let line = format!("cannot watch {}: {failure}", object.label());
            conditions.set(Condition::Watching(*object), vec![line]);
        }
        let spread = if is_first_expiry && *object == Object::Nodes {
            RELIST_SPREAD.mul_f64(rand::random())
        } else {
            Duration::ZERO
        };
        wait.max(spread).max(throttle.remaining(now))
    }
}

/// Observed state of one object that is watched by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Observed<T> {
    /// The object has not been observed yet.
    #[default]
    Unknown,
    /// The object does not exist.
    Absent,
    /// The object exists and has this content.
    Present(T),
}

impl<T> Observed<T> {
    /// Maps the object to a shared part of it.
    pub(super) fn map<U>(self, part: impl FnOnce(T) -> U) -> Observed<Arc<U>> {
        match self {
            Self::Unknown => Observed::Unknown,
            Self::Absent => Observed::Absent,
            Self::Present(object) => Observed::Present(Arc::new(part(object))),
        }
    }

    pub(super) fn present(&self) -> Option<&T> {
        match self {
            Self::Present(object) => Some(object),
            Self::Absent | Self::Unknown => None,
        }
    }

    /// Returns `true` if the object was observed, including as absent.
    pub(super) fn is_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// Watches the object with this name. `change` receives each state whose identity differs from the
/// previous one.
pub(super) async fn follow_one<K>(
    api: Api<K>,
    name: &str,
    context: WatchContext,
    mut change: impl FnMut(Observed<K>),
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
                Event::InitDone => {
                    last = Some(listed.take().map_or(Observed::Absent, Observed::Present))
                }
                Event::Apply(object) if is_it(&object) => last = Some(Observed::Present(object)),
                Event::Delete(object) if is_it(&object) => last = Some(Observed::Absent),
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
