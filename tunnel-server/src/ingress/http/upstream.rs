//! Connection to a target: a stream through the node's agent, TLS inside the stream for HTTPS
//! listeners, and an HTTP client on top.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{Either, Empty};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::debug;
use tunnel_proto::transport::{ByteCount, Stream};
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::SessionId;

use crate::config::Limit;

use super::body::RequestBody;
use crate::ingress::IngressContext;
use crate::ingress::access_log::AccessLog;
use crate::ingress::error::ProxyError;
use crate::ingress::outcome::Outcome;
use crate::ingress::target_tls::{TlsProfile, server_name};
use crate::routing::destination::{Destination, Scheme};
use crate::routing::registry::CallerKey;

mod pool;
mod read_counter;

pub(crate) use crate::ingress::http::upstream::pool::{PoolKey, UpstreamPool};
use read_counter::{CountingStream, ReadCounter};

/// Time that a connection to a target has to close after a complete response.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Largest head of a target's response, and largest size of its trailer fields. Go's clients accept
/// 1 MiB, but nothing that runs on nodes needs that much.
const ANSWER_HEAD_MAX_BYTES: usize = 256 * 1024;

/// Interim responses (1xx) to one request that are skipped. More are an error.
const INTERIM_MAX: usize = 64;

/// The caller's body, or an empty body for a request that is sent again.
type SentBody = Either<RequestBody, Empty<Bytes>>;

/// The sender of requests on a connection, and the task that drives the connection.
type Connection = (SendRequest<SentBody>, AbortOnDropHandle<()>);

#[derive(Debug)]
pub(crate) struct Upstream {
    sender: SendRequest<SentBody>,
    /// The task that drives the connection. Dropping the handle closes the target's side at once.
    driver: AbortOnDropHandle<()>,
    /// `None` for a connection that the server dialed directly.
    session: Option<SessionId>,
    bytes: Arc<ByteCount>,
    read_counter: ReadCounter,
}

/// The destination of a request and the parameters of the connection to it.
#[derive(Debug)]
pub(crate) struct UpstreamRequest<'a> {
    /// State that all listeners share.
    pub(crate) ingress: &'a Arc<IngressContext>,
    /// Scheme of the target. With HTTPS there is TLS inside the stream.
    pub(crate) scheme: Scheme,
    /// TLS configuration for this caller.
    pub(crate) tls_profile: TlsProfile,
    /// The node and the target on that node.
    pub(crate) destination: &'a Destination,
    /// Key that counts the streams of the caller.
    pub(crate) caller: &'a CallerKey,
    /// Trace context for the agent's access log.
    pub(crate) trace_parent: String,
    /// The pool and the key of a reusable connection, if the request may use one.
    pub(crate) pool: Option<(&'a UpstreamPool, &'a PoolKey)>,
}

/// A failed exchange, and the session that carried it, if any.
struct AttemptError {
    failure: ProxyError,
    session: Option<SessionId>,
}

/// A request that received no response on a connection.
struct SendError {
    failure: ProxyError,
    /// The request, if no byte of it was sent.
    unsent: Option<Request<SentBody>>,
}

impl UpstreamRequest<'_> {
    /// Sends a request and waits for the head of the response. If the agent refuses the stream
    /// because it is draining, nothing was started at the target. A request without a body is then
    /// sent once more over another session of the node. A request without a body is also sent again
    /// if a pooled connection ended before the target sent any byte about the request. Servers
    /// close idle connections, so a client that reuses one must be able to retry (RFC 9112, section
    /// 9.3.1).
    ///
    /// # Errors
    /// Returns a [`ProxyError`] with the response for the caller.
    pub(crate) async fn exchange(
        &self,
        request: Request<RequestBody>,
        access_log: &mut AccessLog,
    ) -> Result<(Response<Incoming>, Upstream), ProxyError> {
        let (head, body) = request.into_parts();
        let retry_head = body.is_end_stream().then(|| head.clone());
        let mut request = Request::from_parts(head, Either::Left(body));
        if let Some(mut upstream) = self
            .pool
            .and_then(|(pool, pool_key)| pool.take(pool_key, &self.ingress.registry))
        {
            access_log.carried(upstream.session, upstream.bytes.clone());
            let before = upstream.read_counter.bytes();
            let target_label = self.destination.to_string();
            match send(&mut upstream, request, &target_label).await {
                Ok(response) => return Ok((response, upstream)),
                Err(send_error) => {
                    let ended = send_error.failure.outcome == Outcome::TargetBadResponse
                        && upstream.read_counter.bytes() == before;
                    request = match (send_error.unsent, &retry_head) {
                        (Some(unsent), _) => unsent,
                        (None, Some(head)) if ended => {
                            Request::from_parts(head.clone(), Either::Right(Empty::new()))
                        }
                        (None, _) => return Err(send_error.failure),
                    };
                }
            }
        }
        let refused = match self.attempt(request, None, access_log).await {
            Ok(complete) => return Ok(complete),
            Err(attempt) => attempt,
        };
        let stopping = refused.failure.outcome == Outcome::Draining && refused.session.is_some();
        let Some(head) = retry_head.filter(|_| stopping) else {
            return Err(refused.failure);
        };
        let request = Request::from_parts(head, Either::Right(Empty::new()));
        let second = self.attempt(request, refused.session, access_log).await;
        second.map_err(|attempt| match attempt.session {
            Some(_) => attempt.failure,
            // No other session can carry the request, so the caller receives the refusal.
            None => refused.failure,
        })
    }

    async fn attempt(
        &self,
        request: Request<SentBody>,
        except: Option<SessionId>,
        access_log: &mut AccessLog,
    ) -> Result<(Response<Incoming>, Upstream), AttemptError> {
        let target_label = self.destination.to_string();
        let kind = StreamKind::Target(self.destination.target.clone());
        let header = StreamHeader {
            kind,
            trace_parent: self.trace_parent.clone(),
        };
        let (node, limit) = (&self.destination.node, self.ingress.limits.open);
        let began = Instant::now();
        let registry = &self.ingress.registry;
        let opened = registry.open(node, &header, self.caller, limit, except);
        let opened = opened.await.map_err(|error| AttemptError {
            failure: ProxyError::from_open(&error, &target_label),
            session: None,
        })?;
        let (session, bytes) = (opened.session, opened.stream.bytes());
        access_log.opened(session, bytes.clone(), began.elapsed());
        let exchanged = async {
            let read_counter = ReadCounter::default();
            let (sender, driver) = self
                .connect(opened.stream, &read_counter, &target_label)
                .await?;
            let mut upstream = Upstream {
                sender,
                driver,
                session: Some(session),
                bytes,
                read_counter,
            };
            let response = send(&mut upstream, request, &target_label).await;
            Ok((response.map_err(|send_error| send_error.failure)?, upstream))
        };
        exchanged.await.map_err(|failure| AttemptError {
            failure,
            session: Some(session),
        })
    }

    /// Prepares a stream for a request. On plain listeners this method does not wait for the
    /// agent's reply: the request follows the stream header at once, and a refusal appears as an
    /// error of the request.
    async fn connect(
        &self,
        stream: Stream,
        read_counter: &ReadCounter,
        target_label: &str,
    ) -> Result<Connection, ProxyError> {
        let ingress = self.ingress;
        match self.scheme {
            Scheme::Http => handshake(ingress, stream, read_counter, target_label).await,
            Scheme::Https => {
                let name = server_name(&self.destination.node);
                let name = name.map_err(|error| {
                    ProxyError::new(Outcome::TargetTls, format!("{target_label}: {error}"))
                })?;
                let connecting =
                    TlsConnector::from(self.tls_profile.tls.clone()).connect(name, stream);
                // The agent's reply has its own timeout inside the stream. This timeout covers a
                // target that does not respond in the TLS handshake.
                let limit = ingress.limits.open + ingress.limits.handshake;
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
                handshake(ingress, stream, read_counter, target_label).await
            }
        }
    }
}

/// Sends a request on a connection and waits for the final response head.
async fn send(
    upstream: &mut Upstream,
    mut request: Request<SentBody>,
    target_label: &str,
) -> Result<Response<Incoming>, Box<SendError>> {
    let (interim, too_many) = (AtomicUsize::new(0), Arc::new(Notify::new()));
    let notify = too_many.clone();
    hyper::ext::on_informational(&mut request, move |_| {
        if interim.fetch_add(1, Ordering::Relaxed) >= INTERIM_MAX {
            notify.notify_one();
        }
    });
    let sent = tokio::select! {
        biased;
        sent = upstream.sender.try_send_request(request) => sent,
        () = too_many.notified() => {
            let text = format!("{target_label}: the target sent more than {INTERIM_MAX} interim answers");
            let failure = ProxyError::new(Outcome::TargetBadResponse, text);
            return Err(Box::new(SendError { failure, unsent: None }));
        }
    };
    sent.map_err(|mut error| {
        let unsent = error.take_message();
        let bad = Outcome::TargetBadResponse;
        let failure = ProxyError::from_stream(&error.into_error(), target_label, bad);
        Box::new(SendError { failure, unsent })
    })
}

/// Sends a request on a plain connection that the server has dialed directly. The connection
/// carries only this request.
///
/// # Errors
/// Returns a [`ProxyError`] with the response for the caller.
pub(crate) async fn exchange_direct<S>(
    ingress: &Arc<IngressContext>,
    (connection, bytes): (S, Arc<ByteCount>),
    request: Request<RequestBody>,
    target_label: &str,
) -> Result<(Response<Incoming>, Upstream), ProxyError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let read_counter = ReadCounter::default();
    let (sender, driver) = handshake(ingress, connection, &read_counter, target_label).await?;
    let mut upstream = Upstream {
        sender,
        driver,
        session: None,
        bytes,
        read_counter,
    };
    let sent = send(&mut upstream, request.map(Either::Left), target_label).await;
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
    /// Releases the connection after the end of the response.
    pub(crate) fn complete(self) {
        match self.reuse {
            Some((pool, pool_key)) => {
                pool.put(self.upstream, pool_key, &self.ingress.registry);
            }
            None => self.upstream.close(&self.ingress.drivers),
        }
    }
}

impl Upstream {
    /// Closes the connection gracefully, so that the target receives an end and not a reset. The
    /// connection is aborted if the target does not read the rest of an obsolete request within
    /// [`CLOSE_LIMIT`].
    pub(crate) fn close(self, drivers: &TaskTracker) {
        let Self { sender, driver, .. } = self;
        drop(sender);
        drivers.spawn(timeout(CLOSE_LIMIT, driver));
    }
}

fn tls_failure(error: &std::io::Error, target_label: &str) -> ProxyError {
    let failure = ProxyError::from_stream(error, target_label, Outcome::TargetTls);
    match failure.outcome {
        // A target that resets or closes the connection during the handshake does not speak TLS.
        Outcome::TargetBadResponse | Outcome::TargetTls => ProxyError::new(
            Outcome::TargetTls,
            format!("{target_label}: TLS with the target failed: {error}"),
        ),
        _ => failure,
    }
}

async fn handshake<S>(
    ingress: &Arc<IngressContext>,
    stream: S,
    read_counter: &ReadCounter,
    target_label: &str,
) -> Result<Connection, ProxyError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stream = CountingStream {
        stream,
        read_counter: read_counter.clone(),
    };
    let built = client().handshake(TokioIo::new(stream)).await;
    let (sender, connection) = built.map_err(|error| {
        ProxyError::from_stream(&error, target_label, Outcome::TargetBadResponse)
    })?;
    let drive = async move {
        if let Err(error) = connection.with_upgrades().await {
            debug!(%error, "connection to a target ended");
        }
    };
    Ok((sender, AbortOnDropHandle::new(ingress.drivers.spawn(drive))))
}

/// Returns the hyper builder with the settings for connections to targets.
pub(crate) fn client() -> Builder {
    let mut builder = Builder::new();
    builder
        .preserve_header_case(true)
        .max_header_size(ANSWER_HEAD_MAX_BYTES);
    builder
}
