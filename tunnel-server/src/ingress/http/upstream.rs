//! One exchange with a target: a stream through the node's agent, TLS inside the stream for HTTPS
//! listeners, and an HTTP connection on top, or an idle connection that is used again. An agent that
//! is draining has not started anything, so the server tries another session of the node once. A
//! request whose session was lost, or is suspect, is sent once more if its method is safe
//! (`resend.rs`).

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;

use http::request::Parts;
use http::{Request, Response};
use http_body_util::{Either, Empty};
use hyper::body::{Body as _, Incoming};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::tls;
use tunnel_proto::transport::Stream;

use super::request_body::RequestBody;
use crate::config::Limit;
use crate::ingress::access_log::AccessLog;
use crate::ingress::context::IngressContext;
use crate::ingress::error::ProxyError;
use crate::ingress::outcome::Outcome;
use crate::ingress::target_tls::{TlsProfile, server_name};
use crate::routing::destination::{Destination, Scheme};
use crate::routing::registry::{CallerKey, Opened};
use crate::routing::via::Via;

pub(crate) mod connection;
mod opener;
mod pool;
mod resend;
mod target_io;

use connection::{Carrier, SendError, SentBody, Upstream};
pub(in crate::ingress) use opener::StreamOpener;
pub(crate) use pool::{PoolKey, UpstreamPool};
use resend::{FailedRequest, can_resend, is_safe};
pub(in crate::ingress) use target_io::{TargetConn, TargetIo};

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
    pub(crate) caller: &'a CallerKey,
    /// Trace context for the agent's access log.
    pub(crate) trace_parent: String,
    /// The pool and the key of a reusable connection, if the request may use one.
    pub(crate) pool: Option<(&'a UpstreamPool, &'a PoolKey)>,
}

impl UpstreamRequest<'_> {
    /// Sends a request and waits for the head of the response. If the agent refuses the stream
    /// because it is draining, nothing was started at the target. A request without a body is then
    /// sent once more over another session of the node. A request without a body is also sent again
    /// if a pooled connection ended before the target sent any byte about the request. Servers
    /// close idle connections, so a client that reuses one must be able to retry (RFC 9112, section
    /// 9.3.1). A request whose session was lost is sent once more where [`can_resend`] permits it and
    /// another session of the node takes it, at this server or at another one. Where there is such
    /// a session, a suspect session counts as lost.
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
        let (mut is_resent, mut lost) = (false, None);
        if let Some(mut upstream) = self
            .pool
            .and_then(|(pool, pool_key)| pool.take(pool_key, &self.ingress.routing))
        {
            let via = upstream.carrier.via.clone();
            access_log.carried(via.clone(), upstream.carrier.bytes.clone());
            let sent = self.send(&mut upstream, request, retry_head.as_ref());
            match sent.await {
                Ok(response) => return Ok((response, upstream)),
                Err(send_error) => {
                    let is_lost =
                        self.can_resend(retry_head.as_ref(), &send_error, via.as_ref(), false);
                    let SendError {
                        failure,
                        unsent,
                        has_answer,
                    } = *send_error;
                    let has_ended = failure.outcome == Outcome::TargetBadResponse && !has_answer;
                    request = match (unsent, &retry_head) {
                        (Some(unsent), _) => unsent,
                        (None, Some(head)) if is_lost || has_ended => {
                            is_resent = true;
                            lost = via.filter(|_| is_lost).map(|via| (failure, via));
                            repeated(head)
                        }
                        (None, _) => return Err(failure),
                    };
                }
            }
        }
        let trace_parent = self.trace_parent.clone();
        let mut opener =
            StreamOpener::new(self.ingress, self.destination, self.caller, trace_parent);
        if let Some((failure, via)) = lost {
            opener.resend_on_other_session(failure, via);
        }
        loop {
            let mut opened = opener.open(access_log).await?;
            let (via, forwarded) = (opened.via.clone(), opened.forwarded.take());
            // Another server may have lost the node, and a body can be sent only once.
            if retry_head.is_none()
                && via.replica().is_some()
                && let Err(error) = opened.stream.accepted().await
            {
                let failure = ProxyError::from_stream(&error, self.destination, Outcome::AgentLost);
                opener.retry_on_other_session(failure, via, forwarded)?;
                continue;
            }
            let resendable = retry_head.as_ref().filter(|_| !is_resent);
            let send_error = match self.attempt(opened, request, resendable).await {
                Ok(complete) => return Ok(complete),
                Err(send_error) => send_error,
            };
            let is_lost = self.can_resend(retry_head.as_ref(), &send_error, Some(&via), is_resent);
            let Some(head) = &retry_head else {
                return Err(send_error.failure);
            };
            if is_lost {
                is_resent = true;
                opener.resend_on_other_session(send_error.failure, via);
            } else {
                opener.retry_on_other_session(send_error.failure, via, forwarded)?;
            }
            request = repeated(head);
        }
    }

    /// Returns whether a request without a body (`head`) that `via` carried is sent once more, see
    /// [`can_resend`].
    fn can_resend(
        &self,
        head: Option<&Parts>,
        error: &SendError,
        via: Option<&Via>,
        is_resent: bool,
    ) -> bool {
        let (Some(head), Some(via)) = (head, via) else {
            return false;
        };
        can_resend(FailedRequest {
            head,
            cut: error.failure.cut,
            is_suspect: (self.ingress.routing).is_suspect(&self.destination.node, via),
            has_answer: error.has_answer,
            is_resent,
        })
    }

    /// Sends a request over a new stream. `head` is that of a request that may be sent again.
    async fn attempt(
        &self,
        opened: Opened,
        request: Request<SentBody>,
        head: Option<&Parts>,
    ) -> Result<(Response<Incoming>, Upstream), Box<SendError>> {
        let via = opened.via.clone();
        let carrier = Carrier {
            via: Some(opened.via),
            bytes: opened.stream.bytes(),
            watch: Some(opened.stream.watch()),
        };
        let mut upstream = tokio::select! {
            biased;
            connected = self.connect(opened.stream, carrier) => connected?,
            () = self.moves(head, Some(&via)) => return Err(SendError::moved(self.destination)),
        };
        let response = self.send(&mut upstream, request, head).await?;
        Ok((response, upstream))
    }

    async fn send(
        &self,
        upstream: &mut Upstream,
        request: Request<SentBody>,
        head: Option<&Parts>,
    ) -> Result<Response<Incoming>, Box<SendError>> {
        let via = upstream.carrier.via.clone();
        let moves = pin!(self.moves(head, via.as_ref()));
        upstream.send(request, self.destination, moves).await
    }

    /// Waits until a request should not wait over `via` any longer: the session is suspect, and
    /// another one takes the request. Never ends for a request that is not sent again.
    async fn moves(&self, head: Option<&Parts>, via: Option<&Via>) {
        match (head, via) {
            (Some(head), Some(via)) if is_safe(head) => {
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
        let (ingress, limits) = (self.ingress, &self.ingress.limits);
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
                let connecting =
                    TlsConnector::from(self.tls_profile.tls.clone()).connect(name, stream);
                // The agent's reply has its own timeout inside the stream. This timeout covers a
                // target that does not respond in the TLS handshake.
                let limit = limits.open + limits.handshake;
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

/// Returns a request without a body for another attempt.
fn repeated(head: &Parts) -> Request<SentBody> {
    Request::from_parts(head.clone(), Either::Right(Empty::new()))
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
    let carrier = Carrier {
        via: None,
        bytes: socket.bytes(),
        watch: None,
    };
    let mut upstream =
        Upstream::start(TargetConn::Direct(socket), carrier, ingress, target_label).await?;
    let request = request.map(Either::Left);
    let sent = upstream.send(request, target_label, pin!(pending())).await;
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
    pub(crate) fn abort(self, record: AccessLog) {
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
            let text = tls::with_dates(&error.to_string());
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
