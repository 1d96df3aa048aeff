//! Streams that the agent's end opens. In HTTP/2 only the client opens streams, and the client is
//! the server's end. The server's end therefore offers streams: extended CONNECT requests (RFC
//! 8441) without data. The agent's end opens a stream by answering an offer.
//!
//! The first `open` at the agent's end requests offers by SETTINGS_ENABLE_CONNECT_PROTOCOL. An
//! agent that opens no streams, or that does not know offers, sends no such setting and receives no
//! offers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use h2::client::SendRequest;
use h2::ext::Protocol;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{Method, Request, Uri};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Interval, MissedTickBehavior, interval};

/// Streams on offer at a time. An agent that opens more streams within one round trip waits for the
/// next offers. Each offer costs memory at both ends.
pub(super) const OFFERS_MAX: usize = 8;
/// Shortest time between two batches of offers, which allows 1,600 streams a second. A peer that
/// answers or resets its offers faster waits for the next batch.
pub(super) const OFFER_INTERVAL: Duration = Duration::from_millis(5);
/// URI of the requests that are offers.
const OFFER_URI: &str = "https://culvert/offer";
/// Value of `:protocol` in offers.
const OFFER_PROTOCOL: &str = "culvert";

/// The offers of the server's end, and the limit on the streams that its peer opens by them.
pub(super) struct Offers {
    /// Streams that the peer may have open at once. Offers count.
    limit: usize,
    pending: FuturesUnordered<BoxFuture<'static, Option<Answer>>>,
    /// A reference for each open stream that the peer has opened.
    open: Arc<()>,
    /// Set by the first offer.
    ticks: Option<Interval>,
}

/// The halves of an offer that the peer has answered.
type Answer = (SendStream<Bytes>, RecvStream);

impl Offers {
    /// Creates offers with a limit of 0, so none is sent.
    pub(super) fn new() -> Self {
        Self {
            limit: 0,
            pending: FuturesUnordered::new(),
            open: Arc::default(),
            ticks: None,
        }
    }

    pub(super) fn set_limit(&mut self, count: u32) {
        self.limit = usize::try_from(count).unwrap_or(usize::MAX);
    }

    /// Returns an answered offer, and the permit that its stream holds while the stream is open.
    pub(super) fn take_answered(&mut self, cx: &mut Context<'_>) -> Option<(Answer, Arc<()>)> {
        while let Poll::Ready(Some(answer)) = self.pending.poll_next_unpin(cx) {
            // Without an answer the peer has reset the offer, as it does for an `open` whose stream
            // is dropped at once.
            if let Some(answer) = answer {
                return Some((answer, self.open.clone()));
            }
        }
        None
    }

    /// Offers streams until [`OFFERS_MAX`] or the limit is reached, if the peer has requested
    /// offers.
    pub(super) fn replenish(
        &mut self,
        opener: &Mutex<Option<SendRequest<Bytes>>>,
        cx: &mut Context<'_>,
    ) {
        let open = Arc::strong_count(&self.open) - 1;
        let allowed = self.limit.saturating_sub(open).min(OFFERS_MAX);
        let missing = allowed.saturating_sub(self.pending.len());
        if missing == 0 {
            return;
        }
        let mut opener = opener.lock();
        let Some(opener) = opener.as_mut() else {
            return;
        };
        // The connection is not ready while the agent's limit on all streams is reached.
        let is_requested = opener.is_extended_connect_protocol_enabled();
        if !is_requested || !matches!(opener.poll_ready(cx), Poll::Ready(Ok(()))) {
            return;
        }
        let ticks = self.ticks.get_or_insert_with(|| {
            let mut ticks = interval(OFFER_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            ticks
        });
        if ticks.poll_tick(cx).is_pending() {
            return;
        }
        for _ in 0..missing {
            let Ok((response, send)) = opener.send_request(offer(), false) else {
                return;
            };
            self.pending.push(Box::pin(async move {
                let response = response.await.ok()?;
                let is_success = response.status().is_success();
                is_success.then(|| (send, response.into_body()))
            }));
        }
    }

    /// Withdraws all offers, because the session ends.
    pub(super) fn clear(&mut self) {
        self.pending.clear();
    }
}

fn offer() -> Request<()> {
    let mut request = Request::new(());
    *request.method_mut() = Method::CONNECT;
    *request.uri_mut() = Uri::from_static(OFFER_URI);
    request
        .extensions_mut()
        .insert(Protocol::from_static(OFFER_PROTOCOL));
    request
}

/// Returns whether a request is an offer. h2 refuses offers that this end has not requested.
pub(super) fn is_offer<B>(request: &Request<B>) -> bool {
    request.extensions().get::<Protocol>().is_some()
}

/// The offers that the agent's end has received and not answered.
#[derive(Debug)]
pub(super) struct ReceivedOffers {
    is_requested: AtomicBool,
    queue: Mutex<VecDeque<(SendResponse<Bytes>, RecvStream)>>,
    /// A permit for each offer in the queue. Closed with the session.
    available: Semaphore,
}

impl ReceivedOffers {
    pub(super) fn new() -> Self {
        Self {
            is_requested: AtomicBool::new(false),
            queue: Mutex::default(),
            available: Semaphore::new(0),
        }
    }

    /// Returns true the first time, when offers must be requested.
    pub(super) fn begin_request(&self) -> bool {
        !self.is_requested.swap(true, Ordering::Relaxed)
    }

    /// Adds an offer. Resets it if there are too many.
    pub(super) fn push(&self, mut respond: SendResponse<Bytes>, body: RecvStream) {
        let mut queue = self.queue.lock();
        if queue.len() >= OFFERS_MAX || self.available.is_closed() {
            return respond.send_reset(Reason::REFUSED_STREAM);
        }
        queue.push_back((respond, body));
        self.available.add_permits(1);
    }

    /// Waits for an offer. Returns `None` when the session has closed. Cancel-safe.
    pub(super) async fn take(&self) -> Option<(SendResponse<Bytes>, RecvStream)> {
        self.available.acquire().await.ok()?.forget();
        self.queue.lock().pop_front()
    }

    /// Ends every wait for an offer.
    pub(super) fn close(&self) {
        self.available.close();
        let discarded = std::mem::take(&mut *self.queue.lock());
        drop(discarded);
    }
}
