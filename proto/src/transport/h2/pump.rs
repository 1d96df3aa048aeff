//! Moves the bytes of one stream between h2 and the stream's buffers. All pumps run inside the
//! session's driver.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{Reason, RecvStream, SendStream};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep, sleep_until};

use super::bulk_queue::{BULK_MIN_BYTES, BulkQueue};
use super::stream::{BulkState, Output, StreamShared, StreamState};
use crate::buffers::BUFFER_BYTES;
use crate::transport::{CUT_STALL_LIMIT, CutDeadline, StreamCut};
use crate::wire::code::ResetCode;

/// Offset of our reset codes on the wire, so that they do not collide with HTTP/2's own.
const CODE_OFFSET: u32 = 0x1000;
/// Maximum capacity that one stream reserves at once, for one frame. Streams share the connection's
/// window, and capacity that one stream holds unused is not available to the others.
const RESERVE_MAX_BYTES: usize = BUFFER_BYTES;
/// Capacity that a stream holds while it waits for the others, or for the peer's window. Without any
/// it would not know that it can send.
const HELD_WHILE_WAITING_BYTES: usize = 1024;

/// Streams whose end is in h2's send queue.
#[derive(Debug, Default)]
pub(super) struct Queued(Mutex<Vec<Arc<StreamShared>>>);

impl Queued {
    fn push(&self, stream: Arc<StreamShared>) {
        self.0.lock().push(stream);
    }

    pub(super) fn take(&self) -> Vec<Arc<StreamShared>> {
        std::mem::take(&mut *self.0.lock())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    pub(super) fn put_back(&self, streams: Vec<Arc<StreamShared>>) {
        self.0.lock().extend(streams);
    }
}

/// The source of the peer's half.
pub(super) enum Input {
    Response(ResponseFuture),
    Body(RecvStream),
}

/// One stream inside the driver. The future completes when both halves have ended. If it is dropped
/// earlier, the stream reports that the session is lost.
pub(super) struct Pump {
    shared: Arc<StreamShared>,
    send: SendStream<Bytes>,
    input: Input,
    queued: Arc<Queued>,
    bulk_queue: Arc<BulkQueue>,
    /// When the peer had no window left for the data of this stream, if it still has none.
    blocked_since: Option<Instant>,
    /// Limits the time before a cut. Boxed, because few streams are cut.
    cut_timer: Option<Box<CutTimer>>,
    /// Counts the stream under the limit on the peer's streams.
    _permit: Option<Arc<()>>,
}

impl Pump {
    pub(super) fn new(
        shared: Arc<StreamShared>,
        send: SendStream<Bytes>,
        input: Input,
        queued: Arc<Queued>,
        bulk_queue: Arc<BulkQueue>,
    ) -> Self {
        Self {
            shared,
            send,
            input,
            queued,
            bulk_queue,
            blocked_since: None,
            cut_timer: None,
            _permit: None,
        }
    }

    /// Holds `permit` until both halves have ended.
    pub(super) fn with_permit(mut self, permit: Arc<()>) -> Self {
        self._permit = Some(permit);
        self
    }

    /// Takes the received data of the peer's half out of h2, before h2 discards it.
    pub(super) fn drain(&mut self, cx: &mut Context<'_>) {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        if state.input_end.is_none() && state.reset.is_none() {
            self.receive(&mut state, cx);
            // The peer resets its streams as it closes the session, which is then the reason.
            if matches!(state.input_end, Some(Err(_))) {
                state.input_end = None;
            }
        }
    }

    /// Returns whether this pump moves the bytes of `stream`.
    pub(super) fn carries(&self, stream: &Arc<StreamShared>) -> bool {
        Arc::ptr_eq(&self.shared, stream)
    }

    fn receive(&mut self, state: &mut StreamState, cx: &mut Context<'_>) {
        if let Input::Response(response) = &mut self.input {
            match Pin::new(response).poll(cx) {
                Poll::Ready(Ok(response)) if response.status().is_success() => {
                    self.input = Input::Body(response.into_body());
                }
                Poll::Ready(Ok(_other)) => {
                    let cut = StreamCut::Reset(ResetCode::Protocol);
                    return self.shared.end_input(state, Err(cut));
                }
                Poll::Ready(Err(error)) => {
                    return self
                        .shared
                        .end_input(state, Err(stream_cut(&error, StreamCut::Reset)));
                }
                Poll::Pending => return,
            }
        }
        let Input::Body(body) = &mut self.input else {
            return;
        };
        if state.flow_control.is_none() {
            state.flow_control = Some(body.flow_control().clone());
        }
        while let Poll::Ready(data) = body.poll_data(cx) {
            match data {
                Some(Ok(piece)) => self.shared.receive(state, piece),
                Some(Err(error)) => {
                    let cut = stream_cut(&error, StreamCut::Reset);
                    return self.shared.end_input(state, Err(cut));
                }
                None => return self.shared.end_input(state, Ok(())),
            }
        }
    }

    fn transmit(&mut self, state: &mut StreamState, cx: &mut Context<'_>) {
        match state.output {
            Output::Open | Output::Finishing => {}
            Output::Queued | Output::Flushed | Output::Cut(_) => return,
        }
        let stopped = match self.send.poll_reset(cx) {
            // h2 returns the reason of a GOAWAY here, too.
            Poll::Ready(Ok(_)) if state.input_end == Some(Err(StreamCut::SessionLost)) => {
                Some(StreamCut::SessionLost)
            }
            Poll::Ready(Ok(reason)) => Some(StreamCut::Stopped(reset_code(reason))),
            Poll::Ready(Err(error)) => Some(stream_cut(&error, StreamCut::Stopped)),
            Poll::Pending => None,
        };
        if let Some(cut) = stopped {
            return self.shared.set_output(state, Output::Cut(cut));
        }
        if state.unsent() > BULK_MIN_BYTES && self.shared.poll_sendable(cx).is_pending() {
            // The connection's window is left to the streams of others. Replies pass.
            return self.send.reserve_capacity(0);
        }
        // Bytes that the bulk queue lets this stream send.
        let mut granted = 0;
        while state.unsent() > 0 {
            let unsent = state.unsent();
            let must_wait = granted == 0 && unsent > BULK_MIN_BYTES;
            self.send.reserve_capacity(unsent.min(if must_wait {
                HELD_WHILE_WAITING_BYTES
            } else {
                RESERVE_MAX_BYTES
            }));
            let room = match self.send.capacity() {
                0 => match self.send.poll_capacity(cx) {
                    Poll::Pending => {
                        self.blocked_since.get_or_insert_with(Instant::now);
                        let held = unsent.min(HELD_WHILE_WAITING_BYTES);
                        return self.send.reserve_capacity(held);
                    }
                    Poll::Ready(Some(Ok(room))) => room,
                    Poll::Ready(Some(Err(error))) => {
                        let cut = stream_cut(&error, StreamCut::Stopped);
                        return self.shared.set_output(state, Output::Cut(cut));
                    }
                    Poll::Ready(None) => {
                        let cut = StreamCut::Stopped(ResetCode::Dropped);
                        return self.shared.set_output(state, Output::Cut(cut));
                    }
                },
                room => room,
            };
            if room == 0 {
                continue;
            }
            if must_wait {
                if !self.bulk_queue.acquire(&self.shared, state, unsent) {
                    return;
                }
                // The next turn reserves what it sends.
                granted = unsent;
                continue;
            }
            let piece = state.take_unsent(room);
            granted = granted.saturating_sub(piece.len());
            self.blocked_since = None;
            let last =
                state.unsent() == 0 && state.output == Output::Finishing && state.cut.is_none();
            self.submit(state, piece, last);
            if last {
                return;
            }
            state.wake_writer();
        }
        self.send.reserve_capacity(0);
        match (state.output, state.cut) {
            (Output::Finishing, None) => self.submit(state, Bytes::new(), true),
            // A reset clears h2's send queue, so it waits until the queue was written.
            (Output::Finishing, Some(_)) => self.end_in_queue(state),
            (Output::Open | Output::Queued | Output::Flushed | Output::Cut(_), _) => {}
        }
    }

    fn end_in_queue(&self, state: &mut StreamState) {
        self.shared.set_output(state, Output::Queued);
        self.queued.push(self.shared.clone());
    }

    /// Resets a stream that is to be cut if its peer takes no data in time. A stream that waits for
    /// others, or for a slow path, is not the peer's doing. Must be called after
    /// [`Pump::transmit`], which finds out whether the peer has no window.
    fn limit_cut(&mut self, state: &mut StreamState, cx: &mut Context<'_>) {
        let (Some(code), Output::Open | Output::Finishing | Output::Queued) =
            (state.cut, state.output)
        else {
            return;
        };
        let stalled_since = match (self.blocked_since, self.bulk_queue.path_free_since()) {
            (Some(blocked), Some(free)) => Some(blocked.max(free)),
            _ => None,
        };
        let cut_timer = self.cut_timer.get_or_insert_with(CutTimer::start);
        if cut_timer.poll(stalled_since, cx).is_ready() {
            state.reset.get_or_insert(code);
        }
    }

    /// Resets the stream if it is to be reset. Returns whether it was.
    fn reset(&mut self, state: &mut StreamState) -> bool {
        let Some(code) = state.reset else {
            return false;
        };
        self.send
            .send_reset(Reason::from(code.number().saturating_add(CODE_OFFSET)));
        let cut = StreamCut::Reset(code);
        self.shared.end_input(state, Err(cut));
        self.shared.set_output(state, Output::Cut(cut));
        true
    }

    fn submit(&mut self, state: &mut StreamState, piece: Bytes, last: bool) {
        match self.send.send_data(piece, last) {
            Ok(()) if last => self.end_in_queue(state),
            Ok(()) => {}
            Err(error) => {
                let cut = stream_cut(&error, StreamCut::Stopped);
                self.shared.set_output(state, Output::Cut(cut));
            }
        }
    }
}

impl std::fmt::Debug for Pump {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("Pump").field(&self.shared).finish()
    }
}

impl Future for Pump {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let shared = this.shared.clone();
        let mut state = shared.lock();
        state.pump = Some(cx.waker().clone());
        if this.reset(&mut state) {
            return Poll::Ready(());
        }
        if state.input_end.is_none() {
            this.receive(&mut state, cx);
        }
        this.transmit(&mut state, cx);
        this.limit_cut(&mut state, cx);
        if this.reset(&mut state) {
            return Poll::Ready(());
        }
        let sent = matches!(state.output, Output::Flushed | Output::Cut(_));
        match (&state.input_end, sent) {
            (Some(_), true) => Poll::Ready(()),
            (None, true) if state.is_discarding => {
                // Unread data is not wanted. NO_ERROR means that our half was complete
                // (RFC 9113, section 8.1).
                this.send.send_reset(Reason::NO_ERROR);
                this.shared.end_input(&mut state, Ok(()));
                Poll::Ready(())
            }
            (_, _) => Poll::Pending,
        }
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        let state = self.shared.lock();
        let sent = matches!(state.output, Output::Flushed | Output::Cut(_));
        let done = state.input_end.is_some() && sent;
        let is_waiting = state.bulk == BulkState::Waiting;
        drop(state);
        if is_waiting {
            self.bulk_queue.leave(&self.shared);
        }
        if !done {
            self.shared.mark_lost();
        }
    }
}

/// The time in which the peer must take the data before a cut.
struct CutTimer {
    deadline: CutDeadline,
    sleep: Pin<Box<Sleep>>,
}

impl CutTimer {
    /// Starts the timer at the moment of the cut.
    fn start() -> Box<Self> {
        let deadline = CutDeadline::of_cut_at(Instant::now());
        Box::new(Self {
            deadline,
            sleep: Box::pin(sleep_until(deadline.end(None))),
        })
    }

    /// `stalled_since` is the time since which the peer alone has kept the data from being sent.
    fn poll(&mut self, stalled_since: Option<Instant>, cx: &mut Context<'_>) -> Poll<()> {
        let now = Instant::now();
        let due = self.deadline.end(stalled_since);
        if due <= now {
            return Poll::Ready(());
        }
        // That the path is free again wakes no stream.
        self.sleep.as_mut().reset(due.min(now + CUT_STALL_LIMIT));
        self.sleep.as_mut().poll(cx)
    }
}

/// Maps an error of h2 to a stream error: a reset by the peer, or the loss of the connection.
fn stream_cut(error: &h2::Error, by_peer: impl FnOnce(ResetCode) -> StreamCut) -> StreamCut {
    match error.reason() {
        Some(reason) if error.is_reset() => by_peer(reset_code(reason)),
        Some(_) | None => StreamCut::SessionLost,
    }
}

fn reset_code(reason: Reason) -> ResetCode {
    match u32::from(reason).checked_sub(CODE_OFFSET) {
        Some(number) => ResetCode::from_number(number),
        // HTTP/2's own codes: NO_ERROR after a complete half, or a code from the library.
        None => ResetCode::Dropped,
    }
}
