//! One h2 stream: buffers between the task that uses it and the driver, which alone talks to h2.
//!
//! What is written meanwhile goes out as one frame when the driver comes by; what h2 received is taken out of it at once
//! and its window is given back when it is read here.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use h2::FlowControl;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::transport::{Gauge, RawStream, StreamCut};
use crate::wire::code::ResetCode;

/// Bytes written that wait for the driver; a writer beyond it waits.
const OUTBOX_BYTES: usize = 64 * 1024;
/// A received piece below this is copied together with its neighbours: it would keep a whole read buffer alive.
const SMALL_PIECE: usize = 4 * 1024;

/// What the user of a stream and the driver share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    gauge: Arc<Gauge>,
    /// Halves of the session that were shut down and are not written yet.
    finishing: Arc<AtomicUsize>,
}

#[derive(Debug)]
pub(super) struct State {
    inbox: Inbox,
    /// How the peer's half ended.
    pub(super) input_end: Option<Result<(), StreamCut>>,
    /// Nobody reads any more: what comes is dropped.
    pub(super) discarding: bool,
    reader: Option<Waker>,
    /// Gives window back for what was read.
    pub(super) credit: Option<FlowControl>,
    pub(super) outbox: BytesMut,
    pub(super) output: Output,
    /// Cut both directions with this code.
    pub(super) reset: Option<ResetCode>,
    writer: Option<Waker>,
    pub(super) pump: Option<Waker>,
}

/// The state of the sent half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Open,
    /// To be ended behind what is in the outbox.
    Finishing,
    /// Its end is in h2's queue.
    Queued,
    /// Its end was given to the system.
    Flushed,
    Cut(StreamCut),
}

/// Received bytes in order; small pieces are joined.
#[derive(Debug, Default)]
struct Inbox {
    pieces: VecDeque<Bytes>,
    last: BytesMut,
    unread: usize,
}

impl Inbox {
    fn push(&mut self, piece: Bytes) {
        self.unread += piece.len();
        if piece.len() < SMALL_PIECE {
            self.last.extend_from_slice(&piece);
        }
        if piece.len() >= SMALL_PIECE || self.last.len() >= SMALL_PIECE {
            if !self.last.is_empty() {
                self.pieces.push_back(self.last.split().freeze());
            }
            if piece.len() >= SMALL_PIECE {
                self.pieces.push_back(piece);
            }
        }
    }

    /// Moves bytes to `out` and says how many.
    fn take(&mut self, out: &mut ReadBuf<'_>) -> usize {
        let before = out.filled().len();
        while out.remaining() > 0 {
            if let Some(piece) = self.pieces.front_mut() {
                let count = piece.len().min(out.remaining());
                out.put_slice(&piece[..count]);
                piece.advance(count);
                if piece.is_empty() {
                    self.pieces.pop_front();
                }
            } else if !self.last.is_empty() {
                let count = self.last.len().min(out.remaining());
                out.put_slice(&self.last[..count]);
                self.last.advance(count);
            } else {
                break;
            }
        }
        let count = out.filled().len() - before;
        self.unread -= count;
        count
    }

    fn clear(&mut self) -> usize {
        self.pieces.clear();
        self.last.clear();
        std::mem::take(&mut self.unread)
    }
}

impl Shared {
    /// A stream whose `first` bytes are to be sent at once.
    pub(super) fn new(
        first: BytesMut,
        gauge: Arc<Gauge>,
        finishing: Arc<AtomicUsize>,
    ) -> Arc<Self> {
        gauge.set_unread(0);
        Arc::new(Self {
            state: Mutex::new(State {
                inbox: Inbox::default(),
                input_end: None,
                discarding: false,
                reader: None,
                credit: None,
                outbox: first,
                output: Output::Open,
                reset: None,
                writer: None,
                pump: None,
            }),
            gauge,
            finishing,
        })
    }

    pub(super) fn gauge(&self) -> Arc<Gauge> {
        self.gauge.clone()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what h2 received.
    pub(super) fn receive(&self, state: &mut State, piece: Bytes) {
        if state.discarding {
            return state.give_back(piece.len());
        }
        state.inbox.push(piece);
        self.gauge.set_unread(state.inbox.unread);
        wake(&mut state.reader);
    }

    /// The peer's half has ended.
    pub(super) fn end_input(&self, state: &mut State, end: Result<(), StreamCut>) {
        state.input_end.get_or_insert(end);
        // What is unread stays charged; the connection's window must not wait for the other half to end.
        let unread = state.inbox.unread;
        state.give_back(unread);
        state.credit = None;
        wake(&mut state.reader);
    }

    /// The sent half has come further.
    pub(super) fn set_output(&self, state: &mut State, output: Output) {
        let counts = |output| matches!(output, Output::Finishing | Output::Queued);
        match (counts(state.output), counts(output)) {
            (false, true) => {
                self.finishing.fetch_add(1, Ordering::AcqRel);
            }
            (true, false) => {
                self.finishing.fetch_sub(1, Ordering::AcqRel);
            }
            (false, false) | (true, true) => {}
        }
        state.output = output;
        wake(&mut state.writer);
    }

    /// The end of the sent half was given to the system.
    pub(super) fn flushed(&self) {
        let mut state = self.lock();
        if state.output == Output::Queued {
            self.set_output(&mut state, Output::Flushed);
            wake(&mut state.pump);
        }
    }

    /// The driver has gone: whatever has not ended is cut.
    pub(super) fn lose(&self) {
        let mut state = self.lock();
        self.end_input(&mut state, Err(StreamCut::SessionLost));
        match state.output {
            Output::Open | Output::Finishing | Output::Queued => {
                self.set_output(&mut state, Output::Cut(StreamCut::SessionLost));
            }
            Output::Flushed | Output::Cut(_) => {}
        }
    }
}

impl State {
    fn give_back(&mut self, bytes: usize) {
        if bytes > 0
            && let Some(credit) = &mut self.credit
        {
            // An error means that the stream was reset, and its window with it.
            let _gone = credit.release_capacity(bytes);
        }
    }

    /// Wakes the driver, which is told nothing else: it looks at everything.
    pub(super) fn call_pump(&mut self) {
        wake(&mut self.pump);
    }

    /// The outbox has room again.
    pub(super) fn call_writer(&mut self) {
        wake(&mut self.writer);
    }

    /// Takes all bytes out of the inbox, for the session's own messages.
    pub(super) fn take_all(&mut self, out: &mut BytesMut) {
        let mut chunk = [0; 512];
        loop {
            let mut chunk = ReadBuf::new(&mut chunk);
            let count = self.inbox.take(&mut chunk);
            if count == 0 {
                return;
            }
            out.extend_from_slice(chunk.filled());
            self.give_back(count);
        }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

fn wait(slot: &mut Option<Waker>, cx: &Context<'_>) {
    if !slot
        .as_ref()
        .is_some_and(|waker| waker.will_wake(cx.waker()))
    {
        *slot = Some(cx.waker().clone());
    }
}

/// The user's end.
#[derive(Debug)]
pub(super) struct H2Stream(pub(super) Arc<Shared>);

impl RawStream for H2Stream {
    fn reset(&mut self, code: ResetCode) {
        let mut state = self.0.lock();
        state.discarding = true;
        let unread = state.inbox.clear();
        state.give_back(unread);
        if state.output != Output::Flushed || state.input_end.is_none() {
            state.reset.get_or_insert(code);
        }
        self.0.gauge.set_unread(0);
        state.call_pump();
    }

    /// h2 has no word for it before the own half has ended: until then what comes is dropped.
    fn stop(&mut self, _code: ResetCode) {
        let mut state = self.0.lock();
        state.discarding = true;
        let unread = state.inbox.clear();
        state.give_back(unread);
        self.0.gauge.set_unread(0);
        state.call_pump();
    }
}

impl AsyncRead for H2Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        let count = state.inbox.take(out);
        if count > 0 || out.remaining() == 0 {
            self.0.gauge.set_unread(state.inbox.unread);
            state.give_back(count);
            return Poll::Ready(Ok(()));
        }
        match state.input_end {
            Some(Ok(())) => Poll::Ready(Ok(())),
            Some(Err(cut)) => Poll::Ready(Err(cut.into())),
            None => {
                wait(&mut state.reader, cx);
                Poll::Pending
            }
        }
    }
}

impl AsyncWrite for H2Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.0.lock();
        match state.output {
            Output::Open if state.reset.is_none() => {}
            Output::Cut(cut) => return Poll::Ready(Err(cut.into())),
            Output::Open | Output::Finishing | Output::Queued | Output::Flushed => {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
        }
        let room = OUTBOX_BYTES.saturating_sub(state.outbox.len());
        if room == 0 && !data.is_empty() {
            wait(&mut state.writer, cx);
            return Poll::Pending;
        }
        let count = data.len().min(room);
        state.outbox.extend_from_slice(&data[..count]);
        state.call_pump();
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        match state.output {
            Output::Flushed => return Poll::Ready(Ok(())),
            Output::Cut(cut) => return Poll::Ready(Err(cut.into())),
            Output::Open => {
                self.0.set_output(&mut state, Output::Finishing);
                state.call_pump();
            }
            Output::Finishing | Output::Queued => {}
        }
        wait(&mut state.writer, cx);
        Poll::Pending
    }
}
