//! The connection to a target: a stream of the node's agent, TLS in it for the TLS doors, and an HTTP client on top.

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
use crate::ingress::error::{Outcome, ProxyError};
use crate::ingress::target_tls::{TlsProfile, server_name};
use crate::routing::decision::{Destination, Scheme};
use crate::routing::registry::CallerKey;

mod pool;
mod read_counter;

pub(crate) use crate::ingress::http::upstream::pool::{PoolKey, UpstreamPool};
use read_counter::{CountingStream, ReadCounter};

/// How long a connection to a target may take to close after a whole answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Largest head of a target's answer, and largest part of its trailer fields; Go's clients take 1 MiB, but nothing that
/// runs on nodes needs it.
const ANSWER_HEAD_MAX_BYTES: usize = 256 * 1024;

/// Interim answers (1xx) to one request that are passed over; more are no answer.
const INTERIM_MAX: usize = 64;

/// The caller's body, or none for a request that is sent again.
type SentBody = Either<RequestBody, Empty<Bytes>>;

/// What sends requests over a connection, and what drives it.
type Connection = (SendRequest<SentBody>, AbortOnDropHandle<()>);

/// A connection to a target.
#[derive(Debug)]
pub(crate) struct Upstream {
    sender: SendRequest<SentBody>,
    /// Drives the connection; dropping it closes the target's side at once.
    driver: AbortOnDropHandle<()>,
    /// None for a connection that the server dialled itself.
    session: Option<SessionId>,
    bytes: Arc<ByteCount>,
    read_counter: ReadCounter,
}

/// Where requests of one kind go, and how.
#[derive(Debug)]
pub(crate) struct UpstreamRequest<'a> {
    /// What all doors share.
    pub(crate) ingress: &'a Arc<IngressContext>,
    /// Whether there is TLS in the stream.
    pub(crate) scheme: Scheme,
    /// TLS on behalf of the caller.
    pub(crate) tls_profile: TlsProfile,
    /// The node and its port.
    pub(crate) destination: &'a Destination,
    /// Whose streams they count as.
    pub(crate) caller: &'a CallerKey,
    /// For the agent's record.
    pub(crate) trace_parent: String,
    /// The connection of an earlier request and what the request needs it for, where the request may use it.
    pub(crate) pool: Option<(&'a UpstreamPool, &'a PoolKey)>,
}

/// An exchange that failed, and the session that carried it, if one did.
struct AttemptError {
    failure: ProxyError,
    session: Option<SessionId>,
}

/// A request that got no answer over a connection.
struct SendError {
    failure: ProxyError,
    /// The request, if not a byte of it was sent.
    unsent: Option<Request<SentBody>>,
}

impl UpstreamRequest<'_> {
    /// Sends a request and waits for the head of its answer. When the agent refuses because it is stopping, nothing was
    /// started at the target: a request that is complete with its head then goes over another session of the node, once.
    /// The same holds for a kept connection that ended before it said anything about the request: servers close idle
    /// connections, and whoever reuses one has to ask again (RFC 9112, section 9.3.1).
    ///
    /// # Errors
    /// A [`ProxyError`] with the answer for the caller.
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
            // There was no other way, so the refusal is the answer.
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

    /// Prepares a stream for a request. Does not wait for the agent's reply on plain doors: the request follows the
    /// header at once, and a refusal surfaces as the request's error.
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
                // The agent's reply has its own limit inside the stream; this one is for a target that is silent in TLS.
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

/// Sends a request over a connection and waits for the final head.
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

/// Sends a request over a plain connection that the server has dialled itself, and that serves this request alone.
///
/// # Errors
/// A [`ProxyError`] with the answer for the caller.
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

/// The connection of an answer that is under way. Dropped midway, it closes the target's side at once.
#[derive(Debug)]
pub(crate) struct UpstreamBodyGuard {
    pub(crate) upstream: Upstream,
    pub(crate) ingress: Arc<IngressContext>,
    /// Where the connection is kept for a further request to the same destination.
    pub(crate) reuse: Option<(Arc<UpstreamPool>, PoolKey)>,
}

impl UpstreamBodyGuard {
    /// The answer has come to its end.
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
    /// Ends the connection in order, so that the target sees an end and no reset; unless it still waits for the target to
    /// take the rest of a request that nobody wants any more.
    pub(crate) fn close(self, drivers: &TaskTracker) {
        let Self { sender, driver, .. } = self;
        drop(sender);
        drivers.spawn(timeout(CLOSE_LIMIT, driver));
    }
}

fn tls_failure(error: &std::io::Error, target_label: &str) -> ProxyError {
    let failure = ProxyError::from_stream(error, target_label, Outcome::TargetTls);
    match failure.outcome {
        // A target that cuts or ends the connection in the handshake does not speak TLS.
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

/// How targets are spoken to.
pub(crate) fn client() -> Builder {
    let mut builder = Builder::new();
    builder
        .preserve_header_case(true)
        .max_header_size(ANSWER_HEAD_MAX_BYTES);
    builder
}
