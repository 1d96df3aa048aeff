//! Following objects: list and watch with kube's watcher, and tries again that neither storm nor sleep too long.

use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use tracing::debug;

use super::failure::{ApiError, ApiErrorKind, Backoff, Throttle};
use super::metrics::{ClusterMetrics, Object};
use crate::cluster::conditions::{Condition, Conditions};

/// Objects of one page of a list: a Node can be 20 KB of JSON, and a page is in memory as a whole.
const PAGE_OBJECTS: u32 = 200;
/// The API server ends watches after this long, seconds; one that is silent for longer is dead.
pub(super) const WATCH_SECONDS: u32 = 60;
/// Failures are reported when they have gone on for this long. For a second or two after its start, an API server refuses with
/// 403 what it allows, until it has read the roles.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// Longer than a try to start a watch and the wait before it together.
const RECOVERED_AFTER: Duration = Duration::from_secs(12);
const FOREVER: Duration = Duration::from_secs(86_400 * 365);
/// Events that are handled together.
const BATCH_EVENTS: usize = 1024;

/// What to follow.
pub(super) fn config() -> watcher::Config {
    watcher::Config::default()
        .page_size(PAGE_OBJECTS)
        .timeout(WATCH_SECONDS)
}

/// What is followed, and where failures are told.
#[derive(Debug, Clone)]
pub(super) struct WatchContext {
    pub(super) object: Object,
    pub(super) metrics: ClusterMetrics,
    pub(super) problems: Conditions,
    pub(super) throttle: Throttle,
}

/// Feeds the events of a list and watch to `apply`, those that are there together in one call, for as long as it is
/// polled. Failures are counted and retried; those that last are told.
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
        // kube goes on from the same version when a watch cannot start, which never succeeds when that is the reason.
        let mut is_expired = false;
        while !is_expired {
            let next = tokio::time::timeout_at(errors.recovery_deadline(), events.next()).await;
            let mut taken = match next {
                Ok(Some(next)) => Some(next),
                Ok(None) => break,
                Err(_recovered) => {
                    errors.clear();
                    continue;
                }
            };
            let mut batch = Vec::new();
            let mut failed = None;
            while let Some(next) = taken {
                match next {
                    Ok(event) => batch.push(event),
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
                taken = if batch.len() < BATCH_EVENTS {
                    events.next().now_or_never().flatten()
                } else {
                    None
                };
            }
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

/// Failures of one watch in a row.
#[derive(Debug)]
struct WatchErrors {
    context: WatchContext,
    backoff: Backoff,
    /// When the first of them was.
    since: Option<Instant>,
    /// When the last failure was waited out.
    last_retry_at: Instant,
    /// The version of the last list expired, too: the next list proves nothing.
    is_expiring: bool,
}

impl WatchErrors {
    fn new(context: WatchContext) -> Self {
        Self {
            context,
            backoff: Backoff::default(),
            since: None,
            last_retry_at: Instant::now(),
            is_expiring: false,
        }
    }

    /// Without a failure until then a watch runs, whether it has something to say or not.
    fn recovery_deadline(&self) -> Instant {
        let time = if self.since.is_some() {
            RECOVERED_AFTER
        } else {
            FOREVER
        };
        self.last_retry_at + time
    }

    /// Everything was listed, so the API server answers again.
    fn listed(&mut self) {
        if self.since.is_some() && !self.is_expiring {
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.since = None;
        self.is_expiring = false;
        let part = Condition::Watching(self.context.object);
        self.context.problems.set(part, Vec::new());
    }

    /// How long to wait after a failure. Every restart of the API server makes some, so that they are reported when they last.
    /// A version that expired once in a while is no condition: an API server that has just started knows no old ones.
    fn next_delay(&mut self, failure: &ApiError) -> Duration {
        let WatchContext {
            object,
            metrics,
            problems,
            throttle,
        } = &self.context;
        metrics.watch_failed(*object, failure.kind);
        debug!(object = object.label(), error = %failure, "cannot watch, trying again");
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let wait = self.backoff.next_delay(failure, now, rand::random());
        let is_expired = failure.kind == ApiErrorKind::Expired;
        self.is_expiring = is_expired && !wait.is_zero();
        if self.is_expiring || (now.duration_since(since) >= REPORT_AFTER && !is_expired) {
            let line = format!("cannot watch {}: {failure}", object.label());
            problems.set(Condition::Watching(*object), vec![line]);
        }
        wait.max(throttle.remaining(now))
    }
}

/// One object that is followed by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum Observed<T> {
    /// Nothing was heard yet.
    #[default]
    Unknown,
    /// There is none.
    Absent,
    /// It is so.
    Present(T),
}

impl<T> Observed<T> {
    /// The same of a part of it, to be shared.
    pub(super) fn map<U>(self, part: impl FnOnce(T) -> U) -> Observed<Arc<U>> {
        match self {
            Self::Unknown => Observed::Unknown,
            Self::Absent => Observed::Absent,
            Self::Present(object) => Observed::Present(Arc::new(part(object))),
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
