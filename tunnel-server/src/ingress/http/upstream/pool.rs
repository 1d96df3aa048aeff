//! Pool of one idle connection to a target, which a caller's connection keeps for its next request.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use http::HeaderValue;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;

use super::connection::Upstream;
use crate::ingress::target_tls::TlsProfileId;
use crate::routing::Routing;
use crate::routing::registry::{CallerKey, IdleStream};
use tunnel_routing::destination::Destination;

/// Time for which an idle connection is kept after a response. The time is enough for callers that
/// send requests continuously. Common servers keep idle connections longer (gunicorn 2 s, Node.js
/// and Apache 5 s), so a request rarely collides with the target's close. An idle stream counts as
/// a stream of the agent and delays the agent's drain.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// A pool of at most one connection, which belongs to the last request. Callers that reuse
/// connections use each for one target.
#[derive(Debug)]
pub(crate) struct UpstreamPool {
    slot: Mutex<Option<IdleConnection>>,
    drivers: TaskTracker,
}

/// The properties of a connection. Two requests share a connection only if their keys are equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PoolKey {
    pub(crate) destination: Destination,
    /// Identifies the client certificate that the server uses, if any. A target can associate a
    /// connection with the identity in that certificate.
    pub(crate) tls_profile: TlsProfileId,
    /// The caller's credential, if it sent one. A target can associate a connection with that
    /// credential.
    pub(crate) authorization: Option<HeaderValue>,
    /// Key that counts the stream.
    pub(crate) caller_key: CallerKey,
}

#[derive(Debug)]
struct IdleConnection {
    upstream: Upstream,
    pool_key: PoolKey,
    until: Instant,
    entry: IdleStream,
}

impl UpstreamPool {
    /// Creates an empty pool. `drivers` tracks connections while they close.
    pub(crate) fn new(drivers: TaskTracker) -> Self {
        Self {
            slot: Mutex::new(None),
            drivers,
        }
    }

    /// Keeps a connection after a complete response if the agent has streams to spare.
    pub(crate) fn put(&self, upstream: Upstream, pool_key: PoolKey, routing: &Routing) {
        let node = &pool_key.destination.node;
        let via = upstream.carrier.via.as_ref();
        let via = via.filter(|via| !upstream.sender.is_closed() && routing.can_reuse(node, via));
        let entry = via.map(|via| routing.keep_idle(node, via, &pool_key.caller_key));
        let Some(entry) = entry else {
            return upstream.close(&self.drivers);
        };
        let idle = IdleConnection {
            upstream,
            pool_key,
            until: Instant::now() + IDLE_TIMEOUT,
            entry,
        };
        let before = self.slot.lock().replace(idle);
        if let Some(before) = before {
            before.upstream.close(&self.drivers);
        }
    }

    /// Drives the idle connection, and returns it if it is open, matches `pool_key` and uses what a
    /// new stream would use, which is not refused. Any other open connection stays in the slot: the
    /// new stream evicts it if it needs its permit, which a graceful close would hold until the
    /// target has closed too. Must be called by the task of the caller's connection, which then polls
    /// the connection that is returned, or [`Self::expire`].
    pub(crate) fn take(&self, pool_key: &PoolKey, routing: &Routing) -> Option<Upstream> {
        let mut slot = self.slot.lock();
        // The next request was faster than `expire`. The task that uses or keeps the connection polls
        // it again before it waits; its waker here would only cause another round of polls.
        let cx = &mut Context::from_waker(Waker::noop());
        let has_ended = slot.as_mut()?.upstream.poll_driver(cx).is_ready();
        let IdleConnection {
            upstream,
            pool_key: current_key,
            until,
            entry,
        } = slot.as_ref()?;
        if has_ended || entry.is_evicted() {
            // The stream of an evicted connection is reset.
            *slot = None;
            return None;
        }
        let is_open = *until > Instant::now() && upstream.sender.is_ready();
        let fits = current_key == pool_key
            && upstream.carrier.via.is_some()
            && !upstream.carrier.watch.is_source_refused()
            && routing.active(&pool_key.destination.node) == upstream.carrier.via;
        if is_open && !fits {
            return None;
        }
        let upstream = slot.take()?.upstream;
        if is_open {
            return Some(upstream);
        }
        upstream.close(&self.drivers);
        None
    }

    /// Closes the idle connection gracefully.
    pub(crate) fn close(&self) {
        let idle = self.slot.lock().take();
        if let Some(idle) = idle {
            idle.upstream.close(&self.drivers);
        }
    }

    /// Drops the idle connection. Its stream is reset, which returns the permit at once, also at
    /// another server. A connection without a request loses nothing.
    fn evict(&self) {
        let idle = self.slot.lock().take();
        drop(idle);
    }

    /// Closes each idle connection when its time has expired, or when a new stream needs its permit,
    /// and drives it until then. Never completes. Must be polled by the task of the caller's
    /// connection, after hyper. Cancel-safe.
    pub(crate) async fn expire(&self) -> Infallible {
        // The timer never waits longer than a connection may be idle.
        let mut timer = pin!(sleep(IDLE_TIMEOUT));
        loop {
            let (until, is_evicted) = poll_fn(|_| match &*self.slot.lock() {
                Some(idle) => Poll::Ready((idle.until, idle.entry.is_evicted())),
                None => Poll::Pending,
            })
            .await;
            if is_evicted {
                self.evict();
            } else if until <= Instant::now() {
                self.close();
            } else {
                if timer.is_elapsed() {
                    timer.as_mut().reset(until);
                }
                tokio::select! {
                    () = timer.as_mut() => {}
                    () = poll_fn(|cx| self.poll_idle(until, cx)) => {}
                }
            }
        }
    }

    /// Drives the idle connection. Completes when the connection that is idle until `until` has
    /// ended or must end for a new stream, or when another one is idle.
    fn poll_idle(&self, until: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let mut slot = self.slot.lock();
        // A connection in use is expected back.
        let Some(idle) = &mut *slot else {
            return Poll::Pending;
        };
        if idle.until == until {
            if idle.entry.poll_evicted(cx).is_ready() {
                // `expire` evicts it.
                return Poll::Ready(());
            }
            ready!(idle.upstream.poll_driver(cx));
            *slot = None;
        }
        Poll::Ready(())
    }
}
