//! Bodies of answers on the doors: our own short texts, or a target's body that notices when it is not passed whole.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::timeout;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use super::answer::Outcome;
use super::record::Record;
use super::socket::Unfinished;

/// How long a connection to a target may take to close after a whole answer.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// A body of the doors.
#[derive(Debug)]
pub struct DoorBody(Inner);

#[derive(Debug)]
enum Inner {
    Own(Full<Bytes>),
    Target(Box<TargetBody>),
}

/// A target's body on its way to the caller.
#[derive(Debug)]
struct TargetBody {
    body: Incoming,
    /// Present until the body has ended.
    passing: Option<Passing>,
    /// Dropping it midway drops the connection to the target, which closes the target's side at once.
    connection: Option<AbortOnDropHandle<()>>,
    /// Owns the connection while it closes.
    drivers: TaskTracker,
}

/// What is settled when a body ends: the caller's connection and the access record.
#[derive(Debug)]
pub struct Passing {
    /// Cuts the caller's connection unless finished.
    pub unfinished: Unfinished,
    /// Written when it goes.
    pub record: Record,
}

impl Passing {
    /// Everything was passed.
    pub fn finish(mut self) {
        self.record.set(Outcome::Ok);
        self.unfinished.finish();
    }
}

impl DoorBody {
    /// A short text of our own.
    #[must_use]
    pub fn text(text: String) -> Self {
        Self(Inner::Own(Full::new(text.into())))
    }

    /// Nothing.
    #[must_use]
    pub fn empty() -> Self {
        Self(Inner::Own(Full::default()))
    }

    /// A target's body; `connection` drives the connection that it comes from, and `drivers` owns that while it closes.
    #[must_use]
    pub fn target(
        body: Incoming,
        passing: Passing,
        connection: AbortOnDropHandle<()>,
        drivers: TaskTracker,
    ) -> Self {
        Self(Inner::Target(Box::new(TargetBody {
            body,
            passing: Some(passing),
            connection: Some(connection),
            drivers,
        })))
    }
}

impl Body for DoorBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut self.0 {
            Inner::Own(body) => Pin::new(body)
                .poll_frame(cx)
                .map_err(|never| match never {}),
            Inner::Target(target) => {
                let frame = ready!(Pin::new(&mut target.body).poll_frame(cx));
                match &frame {
                    Some(Ok(_)) => {}
                    Some(Err(_)) => target.cut(),
                    None => target.finish(),
                }
                Poll::Ready(frame)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            Inner::Own(body) => body.is_end_stream(),
            Inner::Target(target) => target.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            Inner::Own(body) => body.size_hint(),
            Inner::Target(target) => target.body.size_hint(),
        }
    }
}

impl TargetBody {
    fn finish(&mut self) {
        // After a whole answer the connection closes in order, so that the target sees an end and no reset; unless it
        // still waits for the target to take the rest of a request that nobody wants any more.
        if let Some(connection) = self.connection.take() {
            self.drivers.spawn(timeout(CLOSE_LIMIT, connection));
        }
        if let Some(passing) = self.passing.take() {
            passing.finish();
        }
    }

    fn cut(&mut self) {
        if let Some(mut passing) = self.passing.take() {
            passing.record.set(Outcome::Cut);
        }
    }
}

impl Drop for TargetBody {
    fn drop(&mut self) {
        // hyper does not poll a body of known length to its end, nor one that the request does not ask for (HEAD).
        if self.body.is_end_stream() {
            self.finish();
        } else if let Some(mut passing) = self.passing.take() {
            passing.record.set(Outcome::CallerGone);
        }
    }
}
