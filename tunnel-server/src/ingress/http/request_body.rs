//! The body of a request on its way to a target. The body may go on after the response is complete:
//! the exchange ends, and its record is written, when both directions have ended.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::headers::rewrite_frame;
use super::timeouts::RequestGuard;
use super::upload_queue::UploadQueue;
use crate::ingress::request_record::{ExchangeGuard, RequestRecord};
use crate::outcome::Outcome;

/// The end of a request body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UploadEnd {
    /// The target's connection has taken all of the body.
    Complete,
    /// The target's connection takes no more of the body.
    TargetClosed,
    /// The caller did not send all of the body.
    CallerGone,
    /// The rest of the body was cut: the session was lost, the caller sent nothing for long, or others
    /// waited for the memory of the stream.
    Cut,
}

/// The direction from the caller to the target of an exchange. Holds what ends with the exchange
/// from the end of the response on.
#[derive(Debug, Default)]
pub(crate) struct Upload {
    state: Mutex<UploadState>,
    /// Number of frames of the body that the target's connection has taken.
    frames: AtomicU64,
}

#[derive(Debug, Default)]
struct UploadState {
    end: Option<UploadEnd>,
    /// The connection to the target has ended.
    is_closed: bool,
    record: Option<RequestRecord>,
    request_guard: Option<RequestGuard>,
}

impl Upload {
    /// Marks the response as complete. The record of the exchange is written when the connection to
    /// the target has ended, too.
    pub(crate) fn answered(&self, exchange_guard: ExchangeGuard) {
        let ExchangeGuard {
            response_guard,
            mut record,
        } = exchange_guard;
        record.set_outcome(Outcome::Ok);
        response_guard.finish();
        let mut state = self.state.lock();
        if state.is_closed {
            let end = state.end;
            drop(state);
            record_end(&mut record, end);
        } else {
            state.record = Some(record);
        }
    }

    /// Holds the guard of a request whose response is complete until the connection to the target
    /// has ended.
    pub(crate) fn hold(&self, request_guard: RequestGuard) {
        let mut state = self.state.lock();
        if !state.is_closed {
            request_guard.answered();
            state.request_guard = Some(request_guard);
        }
    }

    /// Ends the exchange, because the connection to the target has ended.
    pub(crate) fn close(&self) {
        let (record, end, request_guard) = {
            let mut state = self.state.lock();
            state.is_closed = true;
            (state.record.take(), state.end, state.request_guard.take())
        };
        drop(request_guard);
        if let Some(mut record) = record {
            record_end(&mut record, end);
        }
    }

    /// Waits until the caller has sent nothing of the body for [`UPLOAD_IDLE_LIMIT`], or is gone, and
    /// records that. `is_blocked` returns whether the target reads slowly, which ends nothing.
    /// Cancel-safe.
    pub(crate) async fn idle(&self, is_blocked: impl Fn() -> bool) {
        let mut was_blocked = is_blocked();
        loop {
            let before = self.frames.load(Ordering::Relaxed);
            sleep(UPLOAD_IDLE_LIMIT).await;
            let has_passed = self.frames.load(Ordering::Relaxed) != before;
            if self.has_caller_failed() {
                return self.ended(UploadEnd::CallerGone);
            }
            let is_blocked = is_blocked();
            if !(has_passed || is_blocked || was_blocked) {
                return self.cut();
            }
            was_blocked = is_blocked;
        }
    }

    /// Returns whether the caller's connection has ended, though the target does not let the end of
    /// the body be read.
    fn has_caller_failed(&self) -> bool {
        let state = self.state.lock();
        let request_guard = state.request_guard.as_ref();
        request_guard.is_some_and(RequestGuard::has_conn_failed)
    }

    /// Records that the rest of the body was cut, unless the caller is gone.
    pub(crate) fn cut(&self) {
        let end = &mut self.state.lock().end;
        if *end != Some(UploadEnd::CallerGone) {
            *end = Some(UploadEnd::Cut);
        }
    }

    fn ended(&self, end: UploadEnd) {
        self.state.lock().end.get_or_insert(end);
    }

    /// Returns whether the caller has cut its body.
    pub(crate) fn is_caller_gone(&self) -> bool {
        self.state.lock().end == Some(UploadEnd::CallerGone)
    }
}

/// A body that stops after a complete response ends after this time, or a few times as long.
const UPLOAD_IDLE_LIMIT: Duration = Duration::from_secs(10);

/// A target that has answered may leave the rest of a body unread.
fn record_end(record: &mut RequestRecord, end: Option<UploadEnd>) {
    match end {
        Some(UploadEnd::Complete | UploadEnd::TargetClosed) | None => {}
        Some(UploadEnd::CallerGone) => record.set_outcome(Outcome::CallerGone),
        Some(UploadEnd::Cut) => record.set_outcome(Outcome::Cut),
    }
}

/// A caller's body without the trailers that must not be forwarded.
#[derive(Debug)]
pub(crate) struct RequestBody {
    body: Incoming,
    upload: Option<OpenUpload>,
    /// The queue of the connection that takes the body.
    queue: Option<Arc<UploadQueue>>,
}

/// A body that has not ended.
#[derive(Debug)]
struct OpenUpload {
    upload: Arc<Upload>,
    /// Dropped with the body.
    _ended: oneshot::Sender<Infallible>,
}

/// The exchange's end of a [`RequestBody`].
#[derive(Debug)]
pub(crate) struct UploadHandle {
    pub(crate) upload: Arc<Upload>,
    /// Resolves when the body has ended.
    pub(crate) ended: oneshot::Receiver<Infallible>,
}

impl RequestBody {
    /// Wraps a body. Returns no handle for a request without a body.
    pub(crate) fn new(body: Incoming) -> (Self, Option<UploadHandle>) {
        if body.is_end_stream() {
            let body = Self {
                body,
                upload: None,
                queue: None,
            };
            return (body, None);
        }
        let (sender, ended) = oneshot::channel();
        let upload = Arc::<Upload>::default();
        let open = OpenUpload {
            upload: upload.clone(),
            _ended: sender,
        };
        let body = Self {
            body,
            upload: Some(open),
            queue: None,
        };
        (body, Some(UploadHandle { upload, ended }))
    }

    /// Limits what the connection that sends the body holds of it.
    pub(crate) fn queue_in(&mut self, queue: Arc<UploadQueue>) {
        queue.begin();
        self.queue = Some(queue);
    }

    fn ended(&mut self, end: UploadEnd) {
        if let Some(open) = self.upload.take() {
            open.upload.ended(end);
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(queue) = &self.queue {
            ready!(queue.poll_room(cx));
        }
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let (Some(queue), Some(Ok(frame))) = (&self.queue, &frame) {
            queue.take(frame.data_ref().map_or(0, Bytes::len));
        }
        let frame = frame.map(|frame| frame.map(rewrite_frame));
        match &frame {
            Some(Ok(_)) => {
                if let Some(open) = &self.upload {
                    open.upload.frames.fetch_add(1, Ordering::Relaxed);
                }
            }
            Some(Err(_)) => self.ended(UploadEnd::CallerGone),
            None => self.ended(UploadEnd::Complete),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        // hyper does not poll a body of known length to its end.
        self.ended(if self.body.is_end_stream() {
            UploadEnd::Complete
        } else {
            UploadEnd::TargetClosed
        });
    }
}
