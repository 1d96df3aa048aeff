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

use crate::transport::{RawStream, ReadMonitor, StreamCut};
use crate::wire::code::ResetCode;

/// Bytes written that wait for the driver; a writer beyond it waits.
const WRITE_BUFFER_BYTES: usize = 64 * 1024;
/// A received piece below this is copied together with its neighbours: it would keep a whole read buffer alive.
const COALESCE_BELOW_BYTES: usize = 4 * 1024;

/// What the user of a stream and the driver share.
#[derive(Debug)]
pub(super) struct StreamShared {
    state: Mutex<StreamState>,
    read_monitor: Arc<ReadMonitor>,
    /// Halves of the session that were shut down and are not written yet.
    unflushed_halves: Arc<AtomicUsize>,
}

#[derive(Debug)]
pub(super) struct StreamState {
    read_buffer: ReadBuffer,
    /// How the peer's half ended.
    pub(super) input_end: Option<Result<(), StreamCut>>,
    /// Nobody reads any more: what comes is dropped.
    pub(super) is_discarding: bool,
    reader: Option<Waker>,
    /// Gives window back for what was read.
    pub(super) flow_control: Option<FlowControl>,
    pub(super) write_buffer: BytesMut,
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
struct ReadBuffer {
    pieces: VecDeque<Bytes>,
    last: BytesMut,
    unread: usize,
}

impl ReadBuffer {
    fn push(&mut self, piece: Bytes) {
        self.unread += piece.len();
        if piece.len() < COALESCE_BELOW_BYTES {
            self.last.extend_from_slice(&piece);
        }
        if piece.len() >= COALESCE_BELOW_BYTES || self.last.len() >= COALESCE_BELOW_BYTES {
            if !self.last.is_empty() {
                self.pieces.push_back(self.last.split().freeze());
            }
            if piece.len() >= COALESCE_BELOW_BYTES {
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

impl StreamShared {
    /// A stream whose `first` bytes are to be sent at once.
    pub(super) fn new(
        first: BytesMut,
        read_monitor: Arc<ReadMonitor>,
        unflushed_halves: Arc<AtomicUsize>,
    ) -> Arc<Self> {
        read_monitor.set_unread(0);
        Arc::new(Self {
            state: Mutex::new(StreamState {
                read_buffer: ReadBuffer::default(),
                input_end: None,
                is_discarding: false,
                reader: None,
                flow_control: None,
                write_buffer: first,
                output: Output::Open,
                reset: None,
                writer: None,
                pump: None,
            }),
            read_monitor,
            unflushed_halves,
        })
    }

    pub(super) fn read_monitor(&self) -> Arc<ReadMonitor> {
        self.read_monitor.clone()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what h2 received.
    pub(super) fn receive(&self, state: &mut StreamState, piece: Bytes) {
        if state.is_discarding {
            return state.release_capacity(piece.len());
        }
        state.read_buffer.push(piece);
        self.read_monitor.set_unread(state.read_buffer.unread);
        wake(&mut state.reader);
    }

    /// The peer's half has ended.
    pub(super) fn end_input(&self, state: &mut StreamState, end: Result<(), StreamCut>) {
        state.input_end.get_or_insert(end);
        // What is unread stays charged; the connection's window must not wait for the other half to end.
        let unread = state.read_buffer.unread;
        state.release_capacity(unread);
        state.flow_control = None;
        wake(&mut state.reader);
    }

    /// The sent half has come further.
    pub(super) fn set_output(&self, state: &mut StreamState, output: Output) {
        let counts = |output| matches!(output, Output::Finishing | Output::Queued);
        match (counts(state.output), counts(output)) {
            (false, true) => {
                self.unflushed_halves.fetch_add(1, Ordering::AcqRel);
            }
            (true, false) => {
                self.unflushed_halves.fetch_sub(1, Ordering::AcqRel);
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
    pub(super) fn mark_lost(&self) {
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

impl StreamState {
    fn release_capacity(&mut self, bytes: usize) {
        if bytes > 0
            && let Some(flow_control) = &mut self.flow_control
        {
            // An error means that the stream was reset, and its window with it.
            let _gone = flow_control.release_capacity(bytes);
        }
    }

    /// Wakes the driver, which is told nothing else: it looks at everything.
    pub(super) fn wake_pump(&mut self) {
        wake(&mut self.pump);
    }

    /// The outbox has room again.
    pub(super) fn wake_writer(&mut self) {
        wake(&mut self.writer);
    }

    /// Takes all bytes out of the inbox, for the session's own messages.
    pub(super) fn drain_into(&mut self, out: &mut BytesMut) {
        let mut chunk = [0; 512];
        loop {
            let mut chunk = ReadBuf::new(&mut chunk);
            let count = self.read_buffer.take(&mut chunk);
            if count == 0 {
                return;
            }
            out.extend_from_slice(chunk.filled());
            self.release_capacity(count);
        }
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

fn register_waker(slot: &mut Option<Waker>, cx: &Context<'_>) {
    if !slot
        .as_ref()
        .is_some_and(|waker| waker.will_wake(cx.waker()))
    {
        *slot = Some(cx.waker().clone());
    }
}

/// The user's end.
#[derive(Debug)]
pub(super) struct H2Stream(pub(super) Arc<StreamShared>);

impl RawStream for H2Stream {
    fn reset(&mut self, code: ResetCode) {
        let mut state = self.0.lock();
        state.is_discarding = true;
        let unread = state.read_buffer.clear();
        state.release_capacity(unread);
        if state.output != Output::Flushed || state.input_end.is_none() {
            state.reset.get_or_insert(code);
        }
        self.0.read_monitor.set_unread(0);
        state.wake_pump();
    }

    /// h2 has no word for it before the own half has ended: until then what comes is dropped.
    fn stop(&mut self, _code: ResetCode) {
        let mut state = self.0.lock();
        state.is_discarding = true;
        let unread = state.read_buffer.clear();
        state.release_capacity(unread);
        self.0.read_monitor.set_unread(0);
        state.wake_pump();
    }
}

impl AsyncRead for H2Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        let count = state.read_buffer.take(out);
        if count > 0 || out.remaining() == 0 {
            self.0.read_monitor.set_unread(state.read_buffer.unread);
            state.release_capacity(count);
            return Poll::Ready(Ok(()));
        }
        match state.input_end {
            Some(Ok(())) => Poll::Ready(Ok(())),
            Some(Err(cut)) => Poll::Ready(Err(cut.into())),
            None => {
                register_waker(&mut state.reader, cx);
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
        let room = WRITE_BUFFER_BYTES.saturating_sub(state.write_buffer.len());
        if room == 0 && !data.is_empty() {
            register_waker(&mut state.writer, cx);
            return Poll::Pending;
        }
        let count = data.len().min(room);
        state.write_buffer.extend_from_slice(&data[..count]);
        state.wake_pump();
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
                state.wake_pump();
            }
            Output::Finishing | Output::Queued => {}
        }
        register_waker(&mut state.writer, cx);
        Poll::Pending
    }
}
