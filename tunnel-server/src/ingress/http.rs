//! HTTP reverse proxy: hyper serves the caller's connection, the server routes each request, and
//! hyper sends the request through a stream to the target.

pub(in crate::ingress) mod conn;
pub(crate) mod exchange;
pub(crate) mod head_check;
pub(crate) mod headers;
mod large_head;
pub(crate) mod request_body;
pub mod response;
pub(crate) mod timeouts;
mod unread;
mod upload_queue;
pub(crate) mod upstream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use http::header::CONNECTION;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1::{Builder, Parts};
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;
use tunnel_process::wakeups::Wakeups;
use tunnel_proto::relay::PollCut;

use super::connect;
use super::context::{CallerConn, HttpListener, IngressContext};
use crate::config::Limit;
use crate::ingress::caller_addr::CallerIdentity;
use crate::ingress::dispatch::{
    self, IngressRequest, IngressTarget, grant_route, relay_granted, relay_tunnel,
};
use crate::ingress::error::ProxyError;
use crate::ingress::http::conn::{CallerUpgrade, HttpConn};
use crate::ingress::http::exchange::{Exchange, ResponseContent, TargetResponse};
use crate::ingress::http::head_check::size::{CONNECTION_FIELDS, HeadLimits};
use crate::ingress::http::head_check::{BodyFraming, HeadError};
use crate::ingress::http::headers::{
    bearer_token, can_reuse_connection, close_unless_upgraded, requested_upgrade, reviewed_token,
    unread_token,
};
use crate::ingress::http::large_head::{LargeHead, LargeHeadEnd};
use crate::ingress::http::response::ResponseBody;
use crate::ingress::http::timeouts::{
    Activity, ConnTimeouts, RequestGuard, TimedStream, TimeoutConfig, TimeoutKind,
};
use crate::ingress::http::upstream::{TargetIo, UpstreamPool};
use crate::ingress::request_record::{ExchangeGuard, RequestRecord};
use crate::ingress::tunnel::Tunnel;
use crate::outcome::Outcome;
use crate::routing::access_review::{ClusterUser, account_name, claimed_account};
use tunnel_routing::decision::RequestFacts;
use tunnel_routing::decision::delegated::DelegatedRequest;
use tunnel_routing::destination::Scheme;
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::pod::KubeletPath;
use tunnel_routing::policy::rules::RuleTable;
use tunnel_routing::policy::{AccessCaller, Rules};

/// Idle time after which a connection frees hyper's buffers. The buffers are most of the memory of
/// an idle connection.
const RELEASE_BUFFERS_AFTER: Duration = Duration::from_secs(2);

/// Serves one caller's connection, plain or already decrypted, until the connection ends or the
/// drain closes it.
pub(super) async fn serve<S>(
    ingress: Arc<IngressContext>,
    listener: Arc<HttpListener>,
    stream: S,
    caller: CallerConn,
) where
    S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
{
    let limits = ingress.limits.load();
    let timeout_config = TimeoutConfig {
        head: limits.request_head_timeout,
        idle: limits.caller_idle_timeout,
    };
    let head_limits = HeadLimits::of_connection(limits.request_head_bytes);
    let timeouts = ConnTimeouts::start(timeout_config, head_limits, caller.permit.clone());
    let mut stream = TimedStream::new(stream, timeouts.clone());
    let conn = Arc::new(HttpConn {
        pool: Arc::new(UpstreamPool::new(ingress.drivers.clone())),
        upgrade: Mutex::default(),
        timeouts,
        is_connecting: AtomicBool::new(false),
        closes: AtomicBool::new(false),
        has_large_head: AtomicBool::new(false),
        ingress,
        listener,
        caller,
        credentials: Mutex::default(),
    });
    let mut large_head = None;
    let ended = loop {
        // The box is freed while the connection is idle.
        let driven = Box::pin(conn.clone().drive(stream, large_head.as_ref()));
        match driven.await {
            Ok(DriveEnd::Idle(idle)) => match conn.wait(idle).await {
                Ok(Some(readable)) => stream = readable,
                Ok(None) => break Ok(()),
                Err(end) => break Err(end),
            },
            Ok(DriveEnd::LargeHead(begun)) => {
                stream = begun;
                // Nothing expires the idle connection while the head is read, and a request with a
                // large head does not use it.
                conn.pool.close();
                match conn.read_large_head(&mut stream).await {
                    Ok(head) => large_head = Some(head),
                    Err(end) => break conn.without_head(stream, end).await,
                }
                conn.has_large_head.store(true, Ordering::Relaxed);
                // The next head waits until hyper's buffers for this one are freed.
                conn.timeouts.limit_heads(HeadLimits::NO_HEAD);
            }
            Ok(DriveEnd::LargeHeadServed(served)) => {
                stream = served;
                // hyper's buffers for the head are gone.
                large_head = None;
                conn.has_large_head.store(false, Ordering::Relaxed);
                conn.timeouts.limit_heads(head_limits);
                stream.release();
            }
            Ok(DriveEnd::Closed) => break Ok(()),
            Err(end) => break Err(end),
        }
    };
    drop(large_head);
    conn.pool.close();
    // The rest of a body does not come any more.
    if ended.is_err() || conn.timeouts.is_within_body() {
        conn.timeouts.fail();
    }
    if let Err(end) = ended {
        conn.report_end(end);
    }
}

/// Rounds of hyper's two connections, to the caller and to the target, in one poll, before other
/// tasks run.
const ROUNDS_PER_POLL: usize = 4;

/// Status in place of 503 for logs, exec, attach and port-forward of pods: kube-apiserver drops the text of
/// a 503, and passes on that of others (apimachinery, `pkg/api/errors/errors.go`).
const UNAVAILABLE_OF_KUBELET: StatusCode = StatusCode::BAD_GATEWAY;

/// Time that TLS has to hand its last bytes to the socket. The connection is then dropped.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Shuts down the server's direction of the connection.
async fn close_gracefully<S: AsyncWrite + Unpin>(mut stream: S) {
    match timeout(SHUTDOWN_TIMEOUT, stream.shutdown()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "cannot shut down a caller's connection"),
        Err(_elapsed) => debug!("shutdown of a caller's connection timed out"),
    }
}

/// Bytes of a response that hyper holds for a caller that does not read them, unless its request head
/// is larger. The last piece of a body exceeds them by 64 KiB at most. hyper's default is 400 KiB.
const RESPONSE_BUFFER_BYTES: usize = 64 * 1024;

/// Returns the hyper builder with the settings for callers' connections, and for heads of this size.
pub(super) fn builder(head: HeadLimits) -> Builder {
    // hyper refuses a head that is incomplete at its limit.
    let head_bytes = head.bytes + 1;
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        // `ConnTimeouts` enforces read timeouts.
        .header_read_timeout(None)
        .max_header_size(head_bytes)
        .max_buf_size(head_bytes.max(RESPONSE_BUFFER_BYTES))
        .auto_date_header(false)
        .preserve_header_case(true)
        // Applies to the header fields that the server adds. Fields from targets keep their case.
        .title_case_headers(true);
    if head.fields > CONNECTION_FIELDS {
        builder.max_headers(head.fields);
    }
    builder
}

/// Time from the first byte of a request to its end, if the connection is evicted in between.
const EVICTION_GRACE: Duration = Duration::from_secs(1);

/// Reason why hyper no longer drives a connection that has not failed.
enum DriveEnd<S> {
    /// The connection has been idle for [`RELEASE_BUFFERS_AFTER`].
    Idle(TimedStream<S>),
    /// A head waits that is too large for hyper with the settings of the connection.
    LargeHead(TimedStream<S>),
    /// The response to a request with a large head is written.
    LargeHeadServed(TimedStream<S>),
    Closed,
}

/// Reason why a caller's connection is dropped without a clean shutdown.
enum ConnEnd {
    Http(hyper::Error),
    /// The first head, or a large one, did not arrive in time, or the caller takes nothing of
    /// a response for longer than an idle connection stays.
    TimedOut,
    /// The caller takes nothing of a response whose target has cut its connection, or whose memory
    /// others need.
    Stalled,
    /// The caller closed its direction, or the connection, while a request was in progress.
    Gone,
    /// The rules have changed, and refuse the request in progress.
    Refused,
    /// The connection was idle, and a newer connection needed its permit.
    Evicted,
}

impl HttpConn {
    /// Drives the connection until it ends, or hyper should not drive it. `large_head` is the head
    /// with which `stream` begins, if it is a large one.
    async fn drive<S>(
        self: Arc<Self>,
        stream: TimedStream<S>,
        large_head: Option<&LargeHead>,
    ) -> Result<DriveEnd<S>, ConnEnd>
    where
        S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
    {
        let answering = self.clone();
        let service = service_fn(move |request| {
            // Runs before hyper reads further.
            let (request_guard, head_error) = answering.start(&request);
            let conn = answering.clone();
            Box::pin(async move {
                Ok::<_, Infallible>(conn.answer(request, request_guard, head_error).await)
            })
        });
        let builder = self.builder(large_head);
        let mut connection = builder.serve_connection(TokioIo::new(stream), service);
        let wakeups = Arc::<Wakeups>::default();
        let mut expire = pin!(self.pool.expire());
        let mut gone = pin!(self.gone());
        let drain = self.ingress.shutdown.drain();
        let mut idle = pin!(self.timeouts.idle_for(RELEASE_BUFFERS_AFTER));
        let mut stuck = pin!(self.stuck());
        let mut end_signal = pin!(self.caller.close_state.end_signal().notified());
        let requests = self.timeouts.requests();
        let mut other_head = pin!(async {
            match large_head {
                Some(_) => self.timeouts.wait_for_end_after(requests).await,
                None => self.timeouts.wait_for_large_head().await,
            }
        });
        // hyper closes a connection that ends with the response to a large head.
        let stays = || large_head.is_none() || !self.closes.load(Ordering::Relaxed);
        let (mut draining, mut has_expired, mut evicted) = (false, false, false);
        let (mut evict_at, mut closes_later) = (None, false);
        loop {
            tokio::select! {
                biased;
                ended = poll_fn(|cx| {
                    let polled = wakeups.poll(cx, ROUNDS_PER_POLL, |cx| {
                        connection.poll_without_shutdown(cx)
                    });
                    match polled {
                        // hyper has finished but leaves the flush to its own shutdown.
                        Poll::Ready(Ok(())) if self.timeouts.is_write_blocked() => Poll::Pending,
                        polled => polled,
                    }
                }) => {
                    let stream = stream_from_parts(connection.into_parts());
                    return match ended {
                        Ok(()) if evicted => Err(self.evict(stream)),
                        Ok(()) => Ok(self.finish(stream).await),
                        Err(error) => Err(self.fail(stream, error).await),
                    };
                }
                () = self.caller.permit.evicted(), if !evicted => {
                    evicted = true;
                    evict_at = Some(self.eviction_time());
                    continue;
                }
                () = sleep_until(evict_at.unwrap_or_else(Instant::now)), if evict_at.is_some() => {
                    if self.timeouts.activity() != Activity::Busy {
                        return Err(self.evict(stream_from_parts(connection.into_parts())));
                    }
                    evict_at = None;
                }
                () = other_head.as_mut(), if !draining && !has_expired && !evicted && stays() => {
                    let stream = stream_from_parts(connection.into_parts());
                    return Ok(match large_head {
                        Some(_served) => DriveEnd::LargeHeadServed(stream),
                        None => DriveEnd::LargeHead(stream),
                    });
                }
                () = idle.as_mut(), if self.caller.closed.can_wait() && !draining && !has_expired && !evicted => {
                    return Ok(DriveEnd::Idle(stream_from_parts(connection.into_parts())));
                }
                end = stuck.as_mut() => return Err(end),
                () = end_signal.as_mut() => {
                    let mut stream = stream_from_parts(connection.into_parts());
                    self.caller.close_state.cut_behind(&mut stream).await;
                    return Err(ConnEnd::Refused);
                }
                never = expire.as_mut() => match never {},
                () = gone.as_mut() => return Err(ConnEnd::Gone),
                () = drain.cancelled(), if !draining => draining = true,
                expired = self.timeouts.expired(), if !has_expired => {
                    has_expired = true;
                    self.report_timeout(expired);
                    if expired == TimeoutKind::FirstHead {
                        return Err(ConnEnd::TimedOut);
                    }
                }
                () = self.timeouts.wait_for_end_after(0), if closes_later => {}
            }
            // hyper closes a connection whose last response is written, also within a body.
            closes_later = self.is_uploading();
            if closes_later {
                self.closes.store(true, Ordering::Relaxed);
            } else {
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    }

    fn builder(&self, large_head: Option<&LargeHead>) -> Builder {
        let mut builder = builder(match large_head {
            Some(head) => HeadLimits::enough_for(head.size),
            None => HeadLimits::of_connection(self.ingress.limits.load().request_head_bytes),
        });
        // After a CONNECT, a half-close is forwarded to the target. For other requests,
        // `CallerClosed` reports a disconnect.
        builder.half_close(self.listener.connect.is_some());
        builder
    }

    /// Returns whether the body of a request goes on behind its complete response.
    fn is_uploading(&self) -> bool {
        self.timeouts.is_answered() && self.timeouts.activity() == Activity::Busy
    }

    /// Returns when an evicted connection closes, unless a request is in progress then: at once, or
    /// after the time for a request that has just arrived.
    fn eviction_time(&self) -> Instant {
        self.closes.store(true, Ordering::Relaxed);
        let now = Instant::now();
        match self.timeouts.activity() {
            Activity::Idle if self.caller.closed.has_unread() => now + EVICTION_GRACE,
            Activity::Idle | Activity::Busy => now,
            Activity::Head(since) => since + EVICTION_GRACE,
        }
    }

    /// Waits until the connection must be cut because the caller takes nothing.
    async fn stuck(&self) -> ConnEnd {
        let end = tokio::select! {
            biased;
            () = self.timeouts.write_blocked_for(self.ingress.limits.load().caller_idle_timeout) => {
                self.report_timeout(TimeoutKind::Idle);
                ConnEnd::TimedOut
            }
            () = self.timeouts.response_stalled() => ConnEnd::Stalled,
        };
        self.caller.close_state.mark_cut();
        end
    }

    /// Completes once the caller has disconnected while a response was in progress. Never completes
    /// during a CONNECT. After the response, while the body of the request goes on, completes only
    /// when the connection has failed: a FIN may end the body.
    async fn gone(&self) {
        self.caller.closed.closed().await;
        // Between requests, hyper detects the end after it has read the data that was sent before
        // the end.
        self.timeouts.wait_for_request().await;
        if self.is_connecting.load(Ordering::Relaxed) {
            std::future::pending().await
        }
        if self.timeouts.is_answered() {
            self.caller.closed.failed().await;
        }
    }

    /// Closes the connection after an error of hyper.
    async fn fail<S>(&self, mut stream: TimedStream<S>, error: hyper::Error) -> ConnEnd
    where
        S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
    {
        // hyper has answered a request that it could not parse. If output is still unwritten, the
        // connection is reset so that the caller notices the loss.
        if self.timeouts.is_write_blocked() {
            self.caller.close_state.mark_cut();
        } else if error.is_parse() {
            close_gracefully(stream).await;
        } else if self.caller.close_state.is_cut() {
            self.caller.close_state.cut_behind(&mut stream).await;
        }
        ConnEnd::Http(error)
    }

    /// Waits without hyper until the caller sends data, and then returns the stream.
    async fn wait<S>(&self, stream: TimedStream<S>) -> Result<Option<TimedStream<S>>, ConnEnd>
    where
        S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
    {
        tokio::select! {
            biased;
            () = self.caller.closed.readable() => return Ok(Some(stream)),
            () = self.caller.permit.evicted() => {
                if self.caller.closed.has_unread() {
                    return Ok(Some(stream));
                }
                return Err(self.evict(stream));
            }
            () = self.ingress.shutdown.drain().cancelled() => {}
            expired = self.timeouts.expired_in_state() => self.report_timeout(expired),
        }
        close_gracefully(stream).await;
        Ok(None)
    }

    /// Reports why a connection was dropped without a clean shutdown.
    fn report_end(&self, end: ConnEnd) {
        let (metrics, addr) = (&self.ingress.metrics, self.caller.addr);
        match end {
            ConnEnd::Http(error) if error.is_parse() => {
                // hyper has already answered with 400, 414 or 431.
                let mut record =
                    RequestRecord::start(self.listener.name, addr, "unparsable request", metrics);
                record.unreadable();
                let failure = ProxyError::new(Outcome::BadRequest, error.to_string());
                record.fail(&if error.is_parse_too_large() {
                    failure.with_limit(Limit::RequestHeadBytes)
                } else {
                    failure
                });
            }
            ConnEnd::Http(error) => debug!(%error, peer = %addr, "caller's connection ended"),
            // The record of the request has the reason.
            ConnEnd::TimedOut | ConnEnd::Refused => {}
            ConnEnd::Stalled => {
                debug!(peer = %addr, "caller took nothing of a response, which was cut")
            }
            ConnEnd::Gone => debug!(peer = %addr, "caller disconnected"),
            ConnEnd::Evicted => metrics.evicted_caller(),
        }
    }

    fn report_timeout(&self, expired: TimeoutKind) {
        let limit = match expired {
            TimeoutKind::FirstHead | TimeoutKind::NextHead => Limit::RequestHeadTimeout,
            TimeoutKind::Idle => Limit::CallerIdleTimeout,
        };
        self.ingress.metrics.limit(limit);
        debug!(peer = %self.caller.addr, limit = limit.label(), "caller connection timed out");
    }

    /// Ends a connection whose large head is not served.
    async fn without_head<S>(
        &self,
        stream: TimedStream<S>,
        end: LargeHeadEnd,
    ) -> Result<(), ConnEnd>
    where
        S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
    {
        match end {
            LargeHeadEnd::Refused => Ok(()),
            LargeHeadEnd::Gone => {
                close_gracefully(stream).await;
                Ok(())
            }
            LargeHeadEnd::Evicted => Err(self.evict(stream)),
            LargeHeadEnd::TimedOut(expired) => {
                self.report_timeout(expired);
                Err(ConnEnd::TimedOut)
            }
        }
    }

    /// Hands the connection to the upgrade that was granted, or shuts the connection down.
    async fn finish<S>(&self, mut stream: TimedStream<S>) -> DriveEnd<S>
    where
        S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
    {
        stream.release();
        let granted = self.upgrade.lock().take();
        match granted {
            // If the receiver is gone, dropping the connection closes it.
            Some(granted) => drop(granted.send(Box::new(stream))),
            None => close_gracefully(stream).await,
        }
        DriveEnd::Closed
    }

    /// Closes the connection to make room for a newer one. The server sends a FIN and does not wait
    /// for the caller's FIN, because the file descriptor is needed. An upgraded connection is in
    /// use and continues.
    fn evict<S>(&self, mut stream: TimedStream<S>) -> ConnEnd
    where
        S: AsyncRead + AsyncWrite + PollCut + Send + Unpin + 'static,
    {
        if let Some(granted) = self.upgrade.lock().take() {
            stream.release();
            drop(granted.send(Box::new(stream)));
        } else if let Some(Err(error)) = stream.shutdown().now_or_never() {
            debug!(%error, "cannot shut down a caller's connection");
        }
        ConnEnd::Evicted
    }

    /// Records that hyper has read a head, and returns the error in the head, if any.
    fn start(&self, request: &Request<Incoming>) -> (RequestGuard, Option<HeadError>) {
        self.is_connecting
            .store(self.is_connect(request), Ordering::Relaxed);
        if self.has_large_head.load(Ordering::Relaxed) && !can_reuse_connection(request) {
            self.closes.store(true, Ordering::Relaxed);
        }
        let has_body = !request.body().is_end_stream();
        self.timeouts.request(has_body, BodyFraming::of(request))
    }

    fn is_connect(&self, request: &Request<Incoming>) -> bool {
        *request.method() == Method::CONNECT && self.listener.connect.is_some()
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        request_guard: RequestGuard,
        head_error: Option<HeadError>,
    ) -> Response<ResponseBody> {
        let is_connect = self.is_connect(&request);
        let subject = match &self.listener.connect {
            Some(_) => connect::subject(&request),
            None => [request.method().as_str(), request.uri().path()].join(" "),
        };
        let mut record = RequestRecord::start(
            self.listener.name,
            self.caller.addr,
            subject,
            &self.ingress.metrics,
        );
        record.head(&request);
        record.caller(&self.caller.identity);
        record.ends_with(&self.ingress.shutdown);
        let is_of_kubelet = KubeletPath::of(request.uri().path()) != KubeletPath::Other;
        // A caller that gets no answer gets a reset.
        let unanswered = self.caller.close_state.start();
        let wanted = requested_upgrade(request.version(), request.headers());
        let wanted = wanted.filter(|_| !is_connect);
        let served = match (self.refusal(head_error), &self.listener.connect) {
            (Some(failure), _) => Err(failure),
            (None, Some(proxy)) => {
                Box::pin(connect::serve_request(proxy, self, request, &mut record)).await
            }
            (None, None) => {
                self.serve_request(request, wanted.as_ref(), &mut record)
                    .await
            }
        };
        let mut response = match served {
            Ok(TargetResponse { head, content }) => {
                record.status(head.status());
                content.into_response(head, record, self)
            }
            Err(failure) => {
                record.fail(&failure);
                // hyper takes up to 16 requests that have arrived before it lets another task run.
                // A refusal waits for nothing, so a caller that sends many would delay all others.
                yield_now().await;
                let mut response = if is_connect {
                    failure.connect_response()
                } else {
                    failure.response()
                };
                if is_of_kubelet && response.status() == StatusCode::SERVICE_UNAVAILABLE {
                    *response.status_mut() = UNAVAILABLE_OF_KUBELET;
                }
                record.status(response.status());
                response
            }
        };
        // The bytes after a request for an upgrade can belong to the other protocol. While the
        // server leaves, callers find another one with their next connection.
        let is_leaving = self.ingress.shutdown.leaving().is_cancelled();
        let closes = is_leaving || self.closes.load(Ordering::Relaxed);
        let is_tunnel = is_connect && response.status().is_success();
        if wanted.is_some() || (closes && !is_tunnel) {
            close_unless_upgraded(&mut response);
        }
        if self.has_large_head.load(Ordering::Relaxed)
            && response.headers().contains_key(CONNECTION)
        {
            self.closes.store(true, Ordering::Relaxed);
        }
        unanswered.finish();
        response.map(|body| body.with_request_guard(request_guard))
    }

    /// Returns the failure that answers a request before the server looks at its destination.
    fn refusal(&self, head_error: Option<HeadError>) -> Option<ProxyError> {
        let bad = head_error
            .map(|head_error| ProxyError::new(Outcome::BadRequest, head_error.to_string()));
        let refused = self
            .caller
            .certificate_error
            .map(|error| ProxyError::new(Outcome::RefusedByPolicy, error.to_string()));
        bad.or(refused)
    }

    async fn serve_request(
        &self,
        request: Request<Incoming>,
        upgrade: Option<&HeaderValue>,
        record: &mut RequestRecord,
    ) -> Result<TargetResponse, ProxyError> {
        let policy = self.ingress.policy.load();
        // Few requests need the memory of a review.
        let token_user = match self.named_token(&policy.rules.in_force, request.headers()) {
            Some(token) => Box::pin(self.token_user(token)).await?,
            None => None,
        };
        let account = token_user.as_ref();
        let account = account.and_then(|user| account_name(&user.name));
        let account = account.map(|account| CallerIdentity::ServiceAccount(account.into()));
        let identity = account.as_ref().unwrap_or(&self.caller.identity);
        if account.is_some() {
            record.caller(identity);
        }
        let token = match account {
            Some(_) => reviewed_token(request.headers()),
            None => unread_token(request.headers(), &policy.rules),
        };
        let has_delegation = self.has_delegation(&policy);
        let ingress_request = IngressRequest {
            policy: &policy,
            caller: AccessCaller {
                identity,
                listener: self.listener.kind(),
                source: self.caller.addr.tcp_source(),
                must_authenticate: false,
                has_delegation,
                token,
            },
            cluster_user: token_user.as_ref().or(self.caller.cluster_user.as_ref()),
            claimed: self.claimed_account(&policy.rules, request.headers()),
            end_signal: self.caller.close_state.end_signal(),
            target: self.target(&request, has_delegation),
            operation: RequestedOperation::of(&request),
        };
        let route = grant_route(&self.ingress, ingress_request, record).await?;
        let exchange = Exchange {
            conn: self,
            caller_key: &self.caller.addr.key(identity),
            has_delegation,
            upgrade,
        };
        dispatch::exchange(&exchange, route, request, record).await
    }

    /// Returns the bearer token of a request, if it claims an account that a rule names. The token passes on
    /// to the target in any case.
    fn named_token<'a>(&self, rules: &RuleTable, headers: &'a HeaderMap) -> Option<&'a str> {
        if rules.callers.is_empty() || self.caller.identity != CallerIdentity::Anonymous {
            return None;
        }
        let token = bearer_token(headers)?;
        let account = claimed_account(token)?;
        rules.names_account(&account).then_some(token)
    }

    /// Returns the account that a bearer token claims, if the rules of a dry run name it.
    fn claimed_account(&self, rules: &Rules, headers: &HeaderMap) -> Option<CallerIdentity> {
        let dry_run = rules.dry_run.as_ref();
        let dry_run = dry_run.filter(|_| self.caller.identity == CallerIdentity::Anonymous)?;
        let account = claimed_account(bearer_token(headers)?)?;
        let is_named = dry_run.names_account(&account);
        is_named.then(|| CallerIdentity::ServiceAccount(account.into()))
    }

    /// Returns the user of a token, if the cluster accepts it.
    async fn token_user(&self, token: &str) -> Result<Option<Arc<ClusterUser>>, ProxyError> {
        let Some(reviewer) = &self.ingress.reviewer else {
            return Ok(None);
        };
        let reviewed = reviewer.user_of(token, self.caller.addr.source()).await;
        reviewed.map_err(|error| {
            let text = format!("the bearer token cannot be reviewed: {error}");
            ProxyError::new(Outcome::RefusedByPolicy, text)
        })
    }

    fn target<'a>(
        &'a self,
        request: &'a Request<Incoming>,
        has_delegation: bool,
    ) -> IngressTarget<'a> {
        let facts = RequestFacts {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            scheme: self.listener.scheme,
            implied_port: self.listener.implied_port,
        };
        if !has_delegation || self.listener.scheme != Scheme::Https {
            return IngressTarget::Host(facts);
        }
        IngressTarget::Delegated(DelegatedRequest {
            facts,
            server_name: self.caller.server_name.as_ref(),
        })
    }
}

/// Takes the stream back from hyper, including the bytes that hyper has read but not used.
fn stream_from_parts<S, F>(parts: Parts<TokioIo<TimedStream<S>>, F>) -> TimedStream<S> {
    let mut stream = parts.io.into_inner();
    stream.put_back(parts.read_buf);
    stream
}

impl ResponseContent {
    fn into_response(
        self,
        head: Response<()>,
        record: RequestRecord,
        conn: &HttpConn,
    ) -> Response<ResponseBody> {
        let exchange_guard = ExchangeGuard {
            response_guard: conn.caller.close_state.start(),
            record,
        };
        let shutdown = &conn.ingress.shutdown;
        match self {
            Self::Body(body, upstream_guard, upload) => {
                conn.timeouts
                    .watch_target(Some(upstream_guard.upstream.watch()));
                return head
                    .map(|()| ResponseBody::target(body, exchange_guard, upstream_guard, upload));
            }
            Self::Upgraded { upgrade, target } => {
                conn.caller.close_state.upgrade();
                let exchange_guard = Box::new(exchange_guard);
                let in_use = conn.caller.permit.in_use();
                shutdown.spawn_work(async move {
                    let _in_use = in_use;
                    relay_upgraded(upgrade, target, exchange_guard).await;
                });
            }
            Self::Tunnel { upgrade, tunnel } => {
                conn.caller.close_state.upgrade();
                let exchange_guard = Box::new(exchange_guard);
                let in_use = conn.caller.permit.in_use();
                shutdown.spawn_work(async move {
                    let _in_use = in_use;
                    relay_granted(upgrade, tunnel, exchange_guard).await;
                });
            }
        }
        head.map(|()| ResponseBody::empty())
    }
}

/// The reason why a target's connection cannot be upgraded.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("the connection ended before the upgrade")]
    Target(#[source] hyper::Error),
    #[error("hyper returned another connection")]
    Foreign,
}

/// Relays bytes in both directions after a 101.
async fn relay_upgraded(
    upgrade: CallerUpgrade,
    target: OnUpgrade,
    mut exchange_guard: Box<ExchangeGuard>,
) {
    let target = async {
        let upgraded = target.await.map_err(UpgradeError::Target)?;
        TargetIo::from_upgraded(upgraded).map_err(|_other| UpgradeError::Foreign)
    };
    match tokio::join!(upgrade, target) {
        (Ok(caller_stream), Ok(target)) => {
            relay_tunnel(
                caller_stream,
                Box::new(Tunnel::Upgraded(Box::new(target))),
                exchange_guard,
            )
            .await;
        }
        (Err(error), _) => debug!(%error, "caller disconnected before the upgrade"),
        (Ok(_caller_stream), Err(error)) => {
            debug!(?error, "target connection failed before the upgrade");
            exchange_guard.record.set_outcome(Outcome::Cut);
            exchange_guard.abort();
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
