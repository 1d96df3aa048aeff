//! One exchange with a target: a stream through the node's agent, TLS inside the stream for HTTPS
//! listeners, and an HTTP connection on top, or an idle connection that is used again.

use std::fmt;
use std::future::{pending, poll_fn};
use std::mem::take;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use http_body_util::{Either, Empty};
use hyper::body::Incoming;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::tls;
use tunnel_proto::transport::{Stream, StreamWatch, source_number};
use tunnel_proto::wire::header::{StreamHeader, StreamKind};

use super::headers::replay_of;
use super::request_body::RequestBody;
use crate::config::Limit;
use crate::ingress::context::IngressContext;
use crate::ingress::error::ProxyError;
use crate::ingress::request_record::RequestRecord;
use crate::ingress::target_tls::{TlsProfile, server_name};
use crate::outcome::Outcome;
use crate::routing::attempts::{Attempts, EndedStream, NextAttempt, Replay, ResendCause};
use crate::routing::registry::{CallerKey, OpenError, StreamRequest};
use crate::routing::via::Via;
use crate::routing::{Attempt, FailedAttempt, OpenStream};
use tunnel_routing::destination::{Destination, Scheme};

pub(crate) mod connection;
mod pool;
mod sent_head;
mod target_io;

use connection::{Carrier, Resend, SendError, SentBody, Upstream};
pub(crate) use pool::{PoolKey, UpstreamPool};
pub(in crate::ingress) use target_io::{DirectSocket, TargetConn, TargetIo};

/// Time for which a request waits before anything of it is sent, while its caller has the most unread
/// data. A moment without memory is shorter.
const UNSENT_MAX: Duration = Duration::from_secs(5);

/// The destination of a request and the parameters of the connection to it.
#[derive(Debug)]
pub(crate) struct UpstreamRequest<'a> {
    /// State that all listeners share.
    pub(crate) ingress: &'a Arc<IngressContext>,
    /// Scheme of the target. With HTTPS there is TLS inside the stream.
    pub(crate) scheme: Scheme,
    pub(crate) tls_profile: TlsProfile,
    /// The node and the target on that node.
    pub(crate) destination: &'a Destination,
    /// Key that counts the streams of the caller.
    pub(crate) caller_key: &'a CallerKey,
    /// Trace context for the agent's access log.
    pub(crate) trace_parent: String,
    /// The pool and the key of a reusable connection, if the request may use one.
    pub(crate) pool: Option<(&'a UpstreamPool, &'a PoolKey)>,
}

impl UpstreamRequest<'_> {
    /// Sends a request and waits for the head of the response, in as many attempts as [`Attempts`]
    /// permits. Where another session of the node takes the request, a suspect session counts as
    /// lost.
    ///
    /// # Errors
    /// Returns a [`ProxyError`] with the response for the caller.
    pub(crate) async fn exchange(
        &self,
        request: Request<RequestBody>,
        record: &mut RequestRecord,
    ) -> Result<(Response<Incoming>, Upstream), ProxyError> {
        let replay = replay_of(&request);
        let request = request.map(Either::Left);
        let (mut attempts, mut failed) = (Attempts::default(), None);
        let idle = self
            .pool
            .and_then(|(pool, pool_key)| pool.take(pool_key, &self.ingress.routing));
        let resend = if let Some(mut upstream) = idle {
            let carrier = &upstream.carrier;
            let via = carrier.via.clone();
            record.reused(via.clone(), carrier.bytes.clone(), carrier.audit_id);
            // Boxed, since it is the largest part of this future.
            let mut error = match Box::pin(self.send(&mut upstream, request, replay)).await {
                Ok(response) => return Ok((response, upstream)),
                Err(error) => error,
            };
            let resend = take(&mut error.resend);
            if !matches!(resend, Resend::Request(_)) {
                let replay = resend.replay(replay);
                let FailedAttempt { end, error } = self.failed(*error, via.as_ref(), replay, true);
                if attempts.next(via.as_ref(), &end) == NextAttempt::GiveUp {
                    return Err(error);
                }
                failed = (attempts.resent() == Some(ResendCause::SessionLost)).then_some(error);
            }
            resend
        } else {
            Resend::Request(request)
        };
        let exchanged = async move {
            let mut stream_request = stream_request(
                self.ingress,
                self.destination,
                self.caller_key,
                self.trace_parent.clone(),
            );
            record.identify(&mut stream_request.header);
            let mut attempt = SendAttempt {
                upstream: self,
                resend,
                replay,
                record,
            };
            let routing = &self.ingress.routing;
            let exchanged = routing.with_stream(&stream_request, &mut attempt, attempts, failed);
            exchanged.await
        };
        // A request over an idle connection does not need this memory.
        Box::pin(exchanged).await
    }

    /// Describes how an attempt over `via` failed.
    fn failed(
        &self,
        error: SendError,
        via: Option<&Via>,
        replay: Replay,
        is_reused: bool,
    ) -> FailedAttempt<ProxyError> {
        let (routing, node) = (&self.ingress.routing, &self.destination.node);
        let is_of_target = error.failure.outcome == Outcome::TargetBadResponse;
        error.failure.of_attempt(EndedStream {
            replay,
            has_answer: error.has_answer,
            // An answer of this server is none of the target's.
            is_reused: is_reused && is_of_target,
            is_suspect: via.is_some_and(|via| routing.is_suspect(node, via)),
            ..EndedStream::default()
        })
    }

    async fn send(
        &self,
        upstream: &mut Upstream,
        request: Request<SentBody>,
        replay: Replay,
    ) -> Result<Response<Incoming>, Box<SendError>> {
        let via = upstream.carrier.via.clone();
        let moves = pin!(self.moves(replay, via.as_ref()));
        let unsent = unsent_for_long(&upstream.carrier, false);
        if replay != Replay::Never {
            upstream.traffic.keep_head();
        }
        let sent = tokio::select! {
            biased;
            sent = upstream.send(request, &self.ingress.drivers, self.destination, moves) => sent,
            () = unsent => Err(self.memory_full().into()),
        };
        let head = upstream.traffic.take_head();
        sent.map_err(|mut error| {
            let is_sent = matches!(error.resend, Resend::Nothing);
            if let Some(head) = head.filter(|_| is_sent) {
                error.resend = Resend::Head(head);
            }
            error
        })
    }

    fn memory_full(&self) -> ProxyError {
        let full = OpenError::BufferPoolFull(self.ingress.head_memory.pool_bytes());
        ProxyError::from_open(&full, self.destination)
    }

    /// Waits until a request should not wait over `via` any longer: the session is suspect, and
    /// another one takes the request. Never ends for a request that is not sent again.
    async fn moves(&self, replay: Replay, via: Option<&Via>) {
        match (replay, via) {
            (Replay::Safe, Some(via)) => {
                let routing = &self.ingress.routing;
                routing.replaceable(&self.destination.node, via).await;
            }
            _ => pending().await,
        }
    }

    /// Prepares a stream for a request. On plain listeners this method does not wait for the
    /// agent's reply: the request follows the stream header at once, and a refusal appears as an
    /// error of the request.
    async fn connect(&self, stream: Stream, carrier: Carrier) -> Result<Upstream, ProxyError> {
        let (ingress, limits) = (self.ingress, self.ingress.limits.load());
        let target_label = self.destination;
        match self.scheme {
            Scheme::Http => {
                let conn = TargetConn::Stream(stream);
                Upstream::start(conn, carrier, ingress, target_label).await
            }
            Scheme::Https => {
                let name = server_name(&self.destination.node);
                let name = name.map_err(|error| {
                    ProxyError::new(Outcome::TargetTls, format!("{target_label}: {error}"))
                })?;
                let connector =
                    TlsConnector::from(self.tls_profile.config(&target_label.target).clone());
                let connecting = Box::pin(connector.connect(name, stream));
                // The agent's reply has its own timeout inside the stream. This timeout covers a
                // target that does not respond in the TLS handshake.
                let limit = limits.open_timeout + limits.handshake_timeout;
                let stream = match timeout(limit, connecting).await {
                    Ok(Ok(stream)) => stream,
                    Ok(Err(error)) => return Err(tls_failure(&error, target_label)),
                    Err(_elapsed) => {
                        let text = format!(
                            "{target_label}: the target did not finish the TLS handshake in time"
                        );
                        let failure = ProxyError::new(Outcome::TargetTimeout, text);
                        return Err(failure.with_limit(Limit::HandshakeTimeout));
                    }
                };
                let conn = TargetConn::Tls(Box::new(stream));
                Upstream::start(conn, carrier, ingress, target_label).await
            }
        }
    }
}

/// Waits until a request must be refused: nothing of it was sent for [`UNSENT_MAX`], and its caller
/// holds the most of what the other end of the session is short of. Never ends for a request of which
/// something was sent, but in the handshake before a request.
fn unsent_for_long(
    carrier: &Carrier,
    is_handshake: bool,
) -> impl Future<Output = ()> + Send + use<> {
    let (watch, bytes) = (carrier.watch.clone(), carrier.bytes.clone());
    let mut before = bytes.read().1;
    async move {
        // Most requests are sent when this is polled for the first time, and need no timer.
        if !is_handshake && bytes.read().1 != before {
            return pending().await;
        }
        loop {
            sleep(UNSENT_MAX).await;
            poll_fn(|cx| watch.poll_held(cx)).await;
            let now = bytes.read().1;
            if now == before {
                return;
            }
            if !is_handshake {
                return pending().await;
            }
            before = now;
        }
    }
}

/// Sends a request over the stream of each attempt.
struct SendAttempt<'a> {
    upstream: &'a UpstreamRequest<'a>,
    /// What the next attempt sends.
    resend: Resend,
    replay: Replay,
    record: &'a mut RequestRecord,
}

impl Attempt for SendAttempt<'_> {
    type Output = (Response<Incoming>, Upstream);
    type Error = ProxyError;

    async fn run(
        &mut self,
        mut opened: OpenStream,
    ) -> Result<Self::Output, FailedAttempt<ProxyError>> {
        let upstream = self.upstream;
        // A request that is sent a second time is not sent again, so it stays with a suspect session.
        let replay = match (self.replay, opened.resent) {
            (Replay::Safe, Some(_)) => Replay::Unserved,
            (replay, _) => replay,
        };
        self.record.opened(&opened);
        // Another server may have lost the node, and a body can be sent only once.
        if replay == Replay::Never && opened.via.replica().is_some() {
            accepted(&mut opened.stream, upstream.destination).await?;
        }
        let via = opened.via.clone();
        let request = match take(&mut self.resend) {
            Resend::Request(request) => Some(request),
            Resend::Head(head) => {
                let again = |head| Request::from_parts(head, Either::Right(Empty::new()));
                Box::pin(head.parse()).await.map(again)
            }
            Resend::Nothing => None,
        };
        let Some(request) = request else {
            let error = SendError::moved(upstream.destination);
            return Err(upstream.failed(*error, Some(&via), Replay::Never, false));
        };
        let carrier = Carrier {
            via: Some(opened.via),
            bytes: opened.stream.bytes(),
            watch: opened.stream.watch(),
            audit_id: Some(self.record.audit_id()),
        };
        let unsent = unsent_for_long(&carrier, true);
        let connected = tokio::select! {
            biased;
            connected = upstream.connect(opened.stream, carrier) => connected.map_err(Into::into),
            () = unsent => Err(upstream.memory_full().into()),
            () = upstream.moves(replay, Some(&via)) => Err(SendError::moved(upstream.destination)),
        };
        let mut connection = match connected {
            Ok(connection) => connection,
            Err(error) => {
                self.resend = Resend::Request(request);
                let replay = self.resend.replay(replay);
                return Err(upstream.failed(*error, Some(&via), replay, false));
            }
        };
        match upstream.send(&mut connection, request, replay).await {
            Ok(response) => Ok((response, connection)),
            Err(mut error) => {
                self.resend = take(&mut error.resend);
                let replay = self.resend.replay(replay);
                Err(upstream.failed(*error, Some(&via), replay, false))
            }
        }
    }

    fn not_opened(&self, error: OpenError) -> ProxyError {
        ProxyError::from_open(&error, self.upstream.destination)
    }
}

/// Returns the request for streams of a caller to a destination. `trace_parent` is the trace context
/// for the agent's access log.
pub(in crate::ingress) fn stream_request<'a>(
    ingress: &IngressContext,
    destination: &'a Destination,
    caller_key: &'a CallerKey,
    trace_parent: String,
) -> StreamRequest<'a> {
    StreamRequest {
        node: &destination.node,
        header: StreamHeader {
            trace_parent,
            source: source_number(caller_key),
            ..StreamHeader::new(StreamKind::Target(destination.target.clone()))
        },
        caller_key,
        limit: ingress.limits.load().open_timeout,
    }
}

/// Waits until the target has accepted a stream on which nothing was sent.
pub(in crate::ingress) async fn accepted(
    stream: &mut Stream,
    target_label: impl fmt::Display,
) -> Result<(), FailedAttempt<ProxyError>> {
    let accepted = stream.accepted().await;
    accepted.map(|_address| ()).map_err(|error| {
        let failure = ProxyError::from_stream(&error, target_label, Outcome::AgentLost);
        failure.of_attempt(EndedStream {
            replay: Replay::Unserved,
            ..EndedStream::default()
        })
    })
}

/// Sends a request on a plain connection that the server has dialed directly. The connection
/// carries only this request.
///
/// # Errors
/// Returns a [`ProxyError`] with the response for the caller.
pub(super) async fn exchange_direct(
    ingress: &IngressContext,
    socket: TargetSocket,
    request: Request<RequestBody>,
    target_label: &str,
) -> Result<(Response<Incoming>, Upstream), ProxyError> {
    let target_label = &target_label;
    let bytes = socket.bytes();
    let socket = Arc::new(DirectSocket::from(socket));
    let carrier = Carrier {
        via: None,
        bytes,
        watch: StreamWatch::of_socket(socket.clone()),
        audit_id: None,
    };
    let mut upstream =
        Upstream::start(TargetConn::Direct(socket), carrier, ingress, target_label).await?;
    let request = request.map(Either::Left);
    let moves = pin!(pending());
    let sent = upstream
        .send(request, &ingress.drivers, target_label, moves)
        .await;
    Ok((sent.map_err(|send_error| send_error.failure)?, upstream))
}

/// The connection of a response in progress. Dropping the guard before the end of the response
/// closes the target's side at once.
#[derive(Debug)]
pub(crate) struct UpstreamBodyGuard {
    pub(crate) upstream: Upstream,
    pub(crate) ingress: Arc<IngressContext>,
    /// The pool and the key under which the connection is kept for another request to the same
    /// destination.
    pub(crate) reuse: Option<(Arc<UpstreamPool>, PoolKey)>,
}

impl UpstreamBodyGuard {
    /// Closes the target's side at once. The record is written when the connection has taken its
    /// last byte, which it may do meanwhile, on another thread.
    pub(crate) fn abort(self, record: RequestRecord) {
        self.upstream.abort(&self.ingress.drivers, record);
    }

    /// Releases the connection after the end of the response.
    pub(crate) fn complete(self) {
        match self.reuse {
            Some((pool, pool_key)) => {
                pool.put(self.upstream, pool_key, &self.ingress.routing);
            }
            None => self.upstream.close(&self.ingress.drivers),
        }
    }
}

fn tls_failure(error: &std::io::Error, target_label: &Destination) -> ProxyError {
    let failure = ProxyError::from_stream(error, target_label, Outcome::TargetTls);
    match failure.outcome {
        // A target that resets or closes the connection during the handshake does not speak TLS.
        Outcome::TargetBadResponse | Outcome::TargetTls => {
            let text = tls::text(error);
            // Long errors of TLS are cut, so the cause comes first.
            let text = match tls::unsupported(error) {
                Some(cause) => format!("{cause} ({text})"),
                None => format!("{text}{}", scheme_hint(error)),
            };
            ProxyError::new(
                Outcome::TargetTls,
                format!("{target_label}: TLS with the target failed: {text}"),
            )
        }
        _ => failure,
    }
}

/// Returns a hint to append if the target's first bytes were no TLS.
fn scheme_hint(error: &std::io::Error) -> &'static str {
    let tls_error = error
        .get_ref()
        .and_then(|error| error.downcast_ref::<rustls::Error>());
    if matches!(tls_error, Some(rustls::Error::InvalidMessage(_))) {
        "; does the target speak plain HTTP? Then move its port to --http-proxy-ports, and send \
         requests for it to the HTTP listener"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Method;
    use http::header::UPGRADE;
    use tokio::io::AsyncWriteExt;
    use tokio::time::Instant;
    use tunnel_proto::transport::Session as _;

    use super::*;
    use crate::ingress::http::tests::fixture::Fixture;
    use crate::testing::{WAIT_TIMEOUT, header};

    #[tokio::test(start_paused = true)]
    async fn request_of_which_nothing_was_sent_for_5_s_is_refused_once_its_writer_must_wait() {
        let (_fixture, agent) = Fixture::with_agent();
        for is_sent in [false, true] {
            let mut stream = agent.near.open(&header(), WAIT_TIMEOUT).await.unwrap();
            let carrier = Carrier {
                via: None,
                bytes: stream.bytes(),
                watch: stream.watch(),
                audit_id: None,
            };
            let unsent = unsent_for_long(&carrier, false);
            if is_sent {
                stream.write_all(b"a").await.unwrap();
            }
            let begins_to_wait = async {
                sleep(UNSENT_MAX * 3 / 2).await;
                stream.watch().hold();
                Instant::now()
            };
            let refused = async {
                let refused = timeout(UNSENT_MAX * 4, unsent).await;
                refused.is_ok().then(Instant::now)
            };
            let (refused_at, waits_since) = tokio::join!(refused, begins_to_wait);
            assert_eq!(refused_at, (!is_sent).then_some(waits_since));
        }
    }

    #[test]
    fn only_get_and_head_without_an_upgrade_may_be_served_twice() {
        for (method, upgrade, expected) in [
            (Method::GET, None, true),
            (Method::HEAD, None, true),
            (Method::GET, Some("SPDY/3.1"), false),
            (Method::GET, Some("websocket"), false),
            (Method::OPTIONS, None, false),
            (Method::POST, None, false),
            (Method::PUT, None, false),
            (Method::DELETE, None, false),
        ] {
            let mut request = Request::builder().method(&method).uri("/a");
            if let Some(protocol) = upgrade {
                request = request.header(UPGRADE, protocol);
            }
            let request = request.body(Empty::<Bytes>::new()).unwrap();
            let is_safe = replay_of(&request) == Replay::Safe;
            assert_eq!(is_safe, expected, "{method} {upgrade:?}");
        }
    }
}
