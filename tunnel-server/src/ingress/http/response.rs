//! Responses to callers: their bodies, which are short texts of the server or come from targets,
//! and the responses for failures. A body detects that it was not forwarded completely.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::{HeaderValue, Response};
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::ext::ReasonPhrase;
use tunnel_proto::transport::StreamWatch;
use tunnel_proto::wire::header::one_line;

use super::headers::{ERROR_HEADER, rewrite_frame};
use super::request_body::Upload;
use super::timeouts::RequestGuard;
use super::upstream::UpstreamBodyGuard;
use crate::ingress::error::ProxyError;
use crate::ingress::request_record::ExchangeGuard;
use crate::outcome::Outcome;

#[derive(Debug)]
pub struct ResponseBody {
    inner: Inner,
    /// Ends the request on the caller's connection when dropped.
    request_guard: Option<RequestEnd>,
}

#[derive(Debug)]
enum Inner {
    Own(Full<Bytes>),
    Target(Box<TargetBody>),
}

/// A response body that is forwarded from a target to the caller.
struct TargetBody {
    body: Incoming,
    /// `None` once the body has ended.
    exchange_guard: Option<ExchangeGuard>,
    /// Dropping the guard before the end drops the connection to the target, which closes the
    /// target's side at once.
    upstream_guard: Option<UpstreamBodyGuard>,
    /// The body of the request, which may go on after the response.
    upload: Option<Arc<Upload>>,
    failure: Option<BodyFailure>,
}

/// The error of a body that the target has cut. hyper drops what it has buffered with the error, so
/// it first gets the time to hand all bytes before the cut to the socket.
struct BodyFailure {
    error: hyper::Error,
    flushed: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// The end of a response, and of its request unless the body of the request goes on.
#[derive(Debug)]
struct RequestEnd {
    request_guard: Option<RequestGuard>,
    upload: Option<Arc<Upload>>,
}

impl Drop for RequestEnd {
    fn drop(&mut self) {
        let Some(request_guard) = self.request_guard.take() else {
            return;
        };
        request_guard.end_response();
        if let Some(upload) = &self.upload {
            upload.hold(request_guard);
        }
    }
}

impl ResponseBody {
    /// Creates a body with a short text of the server.
    pub fn text(text: String) -> Self {
        Self::new(Inner::Own(Full::new(text.into())))
    }

    pub fn empty() -> Self {
        Self::new(Inner::Own(Full::default()))
    }

    /// Creates a body that is forwarded from a target over `upstream_guard`. `upload` is the body of
    /// the request, if it has one.
    pub(crate) fn target(
        body: Incoming,
        exchange_guard: ExchangeGuard,
        upstream_guard: UpstreamBodyGuard,
        upload: Option<Arc<Upload>>,
    ) -> Self {
        Self::new(Inner::Target(Box::new(TargetBody {
            body,
            exchange_guard: Some(exchange_guard),
            upstream_guard: Some(upstream_guard),
            upload,
            failure: None,
        })))
    }

    /// Attaches the guard of the request that this body ends.
    pub(crate) fn with_request_guard(mut self, request_guard: RequestGuard) -> Self {
        let upload = match &self.inner {
            Inner::Own(_) => None,
            Inner::Target(target) => target.upload.clone(),
        };
        self.request_guard = Some(RequestEnd {
            request_guard: Some(request_guard),
            upload,
        });
        self
    }

    fn new(inner: Inner) -> Self {
        Self {
            inner,
            request_guard: None,
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        match &mut this.inner {
            Inner::Own(body) => Pin::new(body)
                .poll_frame(cx)
                .map_err(|never| match never {}),
            Inner::Target(target) => {
                if target.failure.is_some() {
                    return target.poll_failure(cx);
                }
                // What has arrived with the head needs no connection. A waker here would only cause
                // another round of polls.
                let cx_of_none = &mut Context::from_waker(Waker::noop());
                let mut polled = Pin::new(&mut target.body).poll_frame(cx_of_none);
                if polled.is_pending() {
                    if let Some(upstream_guard) = &mut target.upstream_guard {
                        // The body, or the reason why it ends early, comes from the connection.
                        let _ended = upstream_guard.upstream.poll_driver(cx);
                    }
                    polled = Pin::new(&mut target.body).poll_frame(cx);
                }
                let frame = match ready!(polled) {
                    Some(Err(error)) => {
                        target.fail(error, this.request_guard.as_ref());
                        // hyper flushes before it polls again.
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    frame => frame.map(|frame| frame.map(rewrite_frame)),
                };
                match &frame {
                    // Nothing follows trailer fields, and hyper does not poll again.
                    Some(Ok(frame)) if frame.is_trailers() => target.finish(),
                    Some(Ok(_) | Err(_)) => {}
                    None => target.finish(),
                }
                Poll::Ready(frame)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Own(body) => body.is_end_stream(),
            Inner::Target(target) => target.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Own(body) => body.size_hint(),
            Inner::Target(target) => target.body.size_hint(),
        }
    }
}

impl TargetBody {
    fn finish(&mut self) {
        if let Some(upstream_guard) = self.upstream_guard.take() {
            upstream_guard.complete();
        }
        let Some(exchange_guard) = self.exchange_guard.take() else {
            return;
        };
        match &self.upload {
            None => exchange_guard.finish(),
            Some(upload) => upload.answered(exchange_guard),
        }
    }

    fn watch(&self) -> Option<&StreamWatch> {
        Some(self.upstream_guard.as_ref()?.upstream.watch())
    }

    /// Records the end of a response that is not complete.
    fn cut(&mut self, outcome: Outcome) {
        let is_stalled = self.watch().is_some_and(StreamWatch::is_stalled);
        // A caller that cuts its body ends the connection to the target, which may be seen first.
        let is_caller_gone = (self.upload.as_ref()).is_some_and(|upload| upload.is_caller_gone());
        if let Some(exchange_guard) = &mut self.exchange_guard {
            exchange_guard.record.set_outcome(if is_stalled {
                Outcome::ReaderStalled
            } else if is_caller_gone {
                Outcome::CallerGone
            } else {
                outcome
            });
        }
    }

    /// Closes the caller's and the target's side at once. The record is written when no more bytes
    /// of the request pass.
    fn abort(&mut self) {
        if let (Some(exchange_guard), Some(upstream_guard)) =
            (self.exchange_guard.take(), self.upstream_guard.take())
        {
            drop(exchange_guard.response_guard);
            upstream_guard.abort(exchange_guard.record);
        }
    }

    fn fail(&mut self, error: hyper::Error, request_end: Option<&RequestEnd>) {
        self.cut(Outcome::Cut);
        let timeouts = request_end
            .and_then(|end| end.request_guard.as_ref())
            .map(RequestGuard::timeouts);
        self.failure = Some(BodyFailure {
            error,
            flushed: Box::pin(async move {
                if let Some(timeouts) = timeouts {
                    timeouts.flushed().await;
                }
            }),
        });
    }

    fn poll_failure<T>(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<T, hyper::Error>>> {
        if let Some(failure) = &mut self.failure {
            ready!(failure.flushed.as_mut().poll(cx));
        }
        // The caller's connection is cut from here on.
        self.exchange_guard = None;
        Poll::Ready(self.failure.take().map(|failure| Err(failure.error)))
    }
}

tunnel_process::partial_debug!(TargetBody { exchange_guard });

impl Drop for TargetBody {
    fn drop(&mut self) {
        // hyper does not poll a body of known length to its end, and does not poll the body of a
        // response to HEAD.
        if self.body.is_end_stream() && self.failure.is_none() {
            self.finish();
        } else if self.failure.is_none() {
            let is_cut = self.watch().is_some_and(StreamWatch::is_cut);
            self.cut(if is_cut {
                Outcome::Cut
            } else {
                Outcome::CallerGone
            });
            self.abort();
        }
    }
}

/// Seconds after which a caller can retry when the agent is full.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Authentication challenge of CONNECT listeners (RFC 7617, section 2).
const CHALLENGE: HeaderValue = HeaderValue::from_static("Basic realm=\"tunnel-server\"");

/// Longest reason phrase in a status line, in bytes.
const REASON_MAX_BYTES: usize = 512;

impl ProxyError {
    pub fn response(&self) -> Response<ResponseBody> {
        let mut response = Response::new(ResponseBody::text(format!(
            "{}\n",
            one_line(self.to_string())
        )));
        *response.status_mut() = self.outcome.status();
        let headers = response.headers_mut();
        headers.insert(ERROR_HEADER, HeaderValue::from_static(self.outcome.label()));
        headers.insert(
            http::header::CONTENT_TYPE,
            HeaderValue::from_static("text/plain; charset=utf-8"),
        );
        match self.outcome {
            Outcome::TooManyStreams | Outcome::Overloaded => {
                headers.insert(http::header::RETRY_AFTER, RETRY_AFTER);
            }
            // The end of such a request can be ambiguous, so the server does not read a further
            // request from the connection.
            Outcome::BadRequest => {
                headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            }
            Outcome::ProxyAuth => {
                headers.insert(http::header::PROXY_AUTHENTICATE, CHALLENGE);
                // A caller without valid credentials must open a new connection for each guess.
                headers.insert(http::header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }

    /// Returns the bytes of the response after which the connection closes, for a request that hyper
    /// has not read.
    pub fn last_answer(&self) -> String {
        let text = one_line(self.to_string());
        let response = self.response();
        let status = response.status();
        let reason = status.canonical_reason().unwrap_or_default();
        let mut answer = format!("HTTP/1.1 {} {reason}\r\n", status.as_str());
        for (name, value) in response.headers() {
            let name = title_case(name.as_str());
            let value = value.to_str().unwrap_or_default();
            if name != "Connection" {
                answer.push_str(&format!("{name}: {value}\r\n"));
            }
        }
        let length = text.len() + 1;
        answer + &format!("Content-Length: {length}\r\nConnection: close\r\n\r\n{text}\n")
    }

    /// Returns the response to a CONNECT. The status line contains the text too, because
    /// kube-apiserver shows no other part of the response.
    pub fn connect_response(&self) -> Response<ResponseBody> {
        let mut response = self.response();
        let mut reason = one_line(self.to_string()).into_bytes();
        reason.truncate(REASON_MAX_BYTES);
        if let Ok(reason) = ReasonPhrase::try_from(reason) {
            response.extensions_mut().insert(reason);
        }
        response
    }
}

/// Returns the name of a field as hyper writes it.
fn title_case(name: &str) -> String {
    let words = name.split('-').map(|word| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_ascii_uppercase() + rest
    });
    words.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::registry::{OpenError, QuotaExhausted, StreamQuota, SuspectReason};

    #[test]
    fn agent_that_may_be_gone_and_a_full_pool_are_503() {
        let answer = |error| {
            let failure = ProxyError::from_open(&error, "worker-1 node:9100");
            assert!(failure.text.starts_with("worker-1 node:9100: "));
            let response = failure.response();
            let code = response.headers()[ERROR_HEADER]
                .to_str()
                .unwrap()
                .to_owned();
            let retry = response.headers().contains_key(http::header::RETRY_AFTER);
            (response.status().as_u16(), code, retry)
        };
        let suspect = OpenError::Suspect(SuspectReason::PeerHearsNothing);
        assert_eq!(answer(suspect), (503, "no_agent".into(), false));
        let full = OpenError::BufferPoolFull(1 << 20);
        assert_eq!(answer(full), (503, "too_many_streams".into(), true));
        let busy = OpenError::TooManyStreams(QuotaExhausted {
            quota: StreamQuota::UnverifiedCaller,
            streams: 128,
        });
        assert_eq!(answer(busy), (503, "too_many_streams".into(), true));
    }
}
