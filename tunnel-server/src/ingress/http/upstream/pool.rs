//! The connection to a target that a caller's connection keeps for its next request.

use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::HeaderValue;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::task::TaskTracker;

use super::Upstream;
use crate::ingress::target_tls::TlsProfileId;
use crate::routing::decision::Destination;
use crate::routing::registry::Registry;

/// A connection is kept for this long after an answer: enough for callers that ask again and again, and less than any
/// common server keeps an idle connection (gunicorn 2 s, Node.js and Apache 5 s), so that a request seldom meets the
/// target's close on its way. An idle stream also counts as one of the agent's, and holds up its drain.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// At most one connection, of the last request: callers that reuse connections do so for one target.
#[derive(Debug)]
pub(crate) struct UpstreamPool {
    slot: Mutex<Option<IdleConnection>>,
    /// The place has been filled.
    filled: Notify,
    drivers: TaskTracker,
}

/// What a connection is for: requests that differ in it never share one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolKey {
    pub(crate) destination: Destination,
    /// Whether the server lends its certificate, and which; a target takes a connection for that identity's.
    pub(crate) tls_profile: TlsProfileId,
    /// The caller's credential, if it sent one: a target may take a connection for that caller's.
    pub(crate) authorization: Option<HeaderValue>,
}

#[derive(Debug)]
struct IdleConnection {
    upstream: Upstream,
    pool_key: PoolKey,
    until: Instant,
}

impl UpstreamPool {
    /// Nothing kept yet; `drivers` owns connections while they close.
    pub(crate) fn new(drivers: TaskTracker) -> Self {
        Self {
            slot: Mutex::new(None),
            filled: Notify::new(),
            drivers,
        }
    }

    /// Keeps a connection after a whole answer, if the agent has places to spare.
    pub(crate) fn put(&self, upstream: Upstream, pool_key: PoolKey, registry: &Registry) {
        let node = &pool_key.destination.node;
        let may_stay = upstream
            .session
            .is_some_and(|session| registry.can_reuse(node, session));
        if upstream.sender.is_closed() || !may_stay {
            return upstream.close(&self.drivers);
        }
        let idle = IdleConnection {
            upstream,
            pool_key,
            until: Instant::now() + IDLE_TIMEOUT,
        };
        let before = self.lock().replace(idle);
        self.filled.notify_one();
        if let Some(before) = before {
            before.upstream.close(&self.drivers);
        }
    }

    /// The kept connection, if it is for `pool_key` over the session that a new one would use and the target has not
    /// ended it. One that leads elsewhere is closed.
    pub(crate) fn take(&self, pool_key: &PoolKey, registry: &Registry) -> Option<Upstream> {
        let IdleConnection {
            upstream,
            pool_key: current_key,
            until,
        } = self.lock().take()?;
        let fits = current_key == *pool_key
            && until > Instant::now()
            && upstream.sender.is_ready()
            && upstream.session.is_some()
            && registry.active(&pool_key.destination.node) == upstream.session;
        if fits {
            return Some(upstream);
        }
        upstream.close(&self.drivers);
        None
    }

    /// Closes what is kept, in order.
    pub(crate) fn close(&self) {
        let idle = self.lock().take();
        if let Some(idle) = idle {
            idle.upstream.close(&self.drivers);
        }
    }

    /// Closes what is kept when its time is over, for ever. Cancel-safe.
    pub(crate) async fn expire(&self) -> Infallible {
        loop {
            let until = self.lock().as_ref().map(|idle| idle.until);
            match until {
                None => self.filled.notified().await,
                Some(until) if until <= Instant::now() => self.close(),
                Some(until) => sleep_until(until).await,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<IdleConnection>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
