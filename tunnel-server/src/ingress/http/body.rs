//! Bodies of responses to callers: short texts of the server, and bodies of targets. A body detects
//! that it was not forwarded completely.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};

use super::upstream::UpstreamBodyGuard;
use crate::ingress::access_log::ExchangeGuard;
use crate::ingress::http::stripped_body::StrippedBody;
use crate::ingress::http::timeouts::RequestGuard;
use crate::ingress::outcome::Outcome;

/// The body of a response to a caller.
#[derive(Debug)]
pub struct ResponseBody {
    inner: Inner,
    /// Ends the request on the caller's connection when dropped.
    _request_guard: Option<RequestGuard>,
}

#[derive(Debug)]
enum Inner {
    Own(Full<Bytes>),
    Target(Box<TargetBody>),
}

/// A response body that is forwarded from a target to the caller.
#[derive(Debug)]
struct TargetBody {
    body: StrippedBody,
    /// `None` once the body has ended.
    exchange_guard: Option<ExchangeGuard>,
    /// Dropping the guard before the end drops the connection to the target, which closes the
    /// target's side at once.
    upstream_guard: Option<UpstreamBodyGuard>,
}

impl ResponseBody {
    /// Creates a body with a short text of the server.
    #[must_use]
    pub fn text(text: String) -> Self {
        Self::new(Inner::Own(Full::new(text.into())))
    }

    /// Creates an empty body.
    #[must_use]
    pub fn empty() -> Self {
        Self::new(Inner::Own(Full::default()))
    }

    /// Creates a body that is forwarded from a target over `upstream_guard`.
    #[must_use]
    pub(crate) fn target(
        body: Incoming,
        exchange_guard: ExchangeGuard,
        upstream_guard: UpstreamBodyGuard,
    ) -> Self {
        Self::new(Inner::Target(Box::new(TargetBody {
            body: StrippedBody(body),
            exchange_guard: Some(exchange_guard),
            upstream_guard: Some(upstream_guard),
        })))
    }

    /// Attaches the guard of the request that this body ends.
    #[must_use]
    pub(crate) fn with_request_guard(self, request_guard: RequestGuard) -> Self {
        Self {
            inner: self.inner,
            _request_guard: Some(request_guard),
        }
    }

    fn new(inner: Inner) -> Self {
        Self {
            inner,
            _request_guard: None,
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
        match &mut self.inner {
            Inner::Own(body) => Pin::new(body)
                .poll_frame(cx)
                .map_err(|never| match never {}),
            Inner::Target(target) => {
                let frame = ready!(Pin::new(&mut target.body).poll_frame(cx));
                match &frame {
                    // Nothing follows trailer fields, and hyper does not poll again.
                    Some(Ok(frame)) if frame.is_trailers() => target.finish(),
                    Some(Ok(_)) => {}
                    Some(Err(_)) => target.cut(),
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
        if let Some(exchange_guard) = self.exchange_guard.take() {
            exchange_guard.finish();
        }
    }

    fn cut(&mut self) {
        if let Some(mut exchange_guard) = self.exchange_guard.take() {
            exchange_guard.access_log.set_outcome(Outcome::Cut);
        }
    }
}

impl Drop for TargetBody {
    fn drop(&mut self) {
        // hyper does not poll a body of known length to its end, and does not poll the body of a
        // response to HEAD.
        if self.body.is_end_stream() {
            self.finish();
        } else if let Some(mut exchange_guard) = self.exchange_guard.take() {
            exchange_guard.access_log.set_outcome(Outcome::CallerGone);
        }
    }
}
