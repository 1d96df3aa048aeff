//! One h2 stream: buffers between the task that uses the stream and the driver. Only the driver
//! uses h2.
//!
//! Written data is queued until the driver sends it. Small writes are joined into one frame, and
//! large ones are not copied. The driver takes received data out of h2 at once, and releases its
//! window when the user has read it.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};

use bytes::{Buf, Bytes, BytesMut};
use h2::FlowControl;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::buffers::BUFFER_BYTES;
use crate::transport::{CutSignal, RawStream, ReadMonitor, StreamCut};
use crate::wire::code::ResetCode;

/// Bytes that may wait for the driver: one frame. A writer waits while so many are unsent.
const UNSENT_MAX_BYTES: usize = BUFFER_BYTES;
/// Bytes that a reader takes at once, unless the first piece is larger.
const TAKE_MAX_BYTES: usize = 64 * 1024;
/// A piece below this size is copied and joined with its neighbors. A received one would keep a
/// whole read buffer in memory, and a sent one would need a frame of its own.
const COALESCE_BELOW_BYTES: usize = 4 * 1024;

/// The state that the user of a stream and the driver share.
#[derive(Debug)]
pub(super) struct StreamShared {
    state: Mutex<StreamState>,
    read_monitor: Arc<ReadMonitor>,
    /// Number of the session's halves that were shut down and are not written yet.
    unflushed_halves: Arc<AtomicUsize>,
}

#[derive(Debug)]
pub(super) struct StreamState {
    read_buffer: ReadBuffer,
    /// The end of the peer's half.
    pub(super) input_end: Option<Result<(), StreamCut>>,
    /// Set when the user reads no more. Received data is dropped.
    pub(super) is_discarding: bool,
    reader: Option<Waker>,
    /// Releases window for data that was read. Unread data holds its window after the end, too.
    pub(super) flow_control: Option<FlowControl>,
    /// Unsent bytes in front of those in the write buffer.
    write_pieces: VecDeque<Bytes>,
    /// Small writes, which are joined.
    pub(super) write_buffer: BytesMut,
    pub(super) output: Output,
    pub(super) bulk: BulkState,
    /// A code with which the driver must cut both directions.
    pub(super) reset: Option<ResetCode>,
    /// A code with which the driver must cut both directions when the unsent data was written to the
    /// socket. The sent half is then [`Output::Finishing`] or [`Output::Queued`].
    pub(super) cut: Option<ResetCode>,
    writer: Option<Waker>,
    pub(super) pump: Option<Waker>,
}

/// The state of the sent half.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    Open,
    /// The half ends after the unsent data, in a clean end or a cut.
    Finishing,
    /// The end of the half, or all data before its cut, is in h2's send queue.
    Queued,
    /// The end of the half was written to the socket.
    Flushed,
    Cut(StreamCut),
}

/// The state of a stream in the queue of those with much unsent data (`bulk_queue.rs`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum BulkState {
    #[default]
    Idle,
    Waiting,
    /// The stream may send what it has.
    Granted,
}

/// Received bytes in order. Small pieces are joined.
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

    /// Moves bytes to `out` and returns their number.
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

    /// Takes pieces without copying them. Returns nothing if only small pieces have arrived, which
    /// are cheaper to copy.
    fn take_pieces(&mut self) -> VecDeque<Bytes> {
        let mut taken = VecDeque::new();
        let mut count = 0;
        while let Some(piece) = self.pieces.front()
            && (count == 0 || count + piece.len() <= TAKE_MAX_BYTES)
        {
            count += piece.len();
            taken.extend(self.pieces.pop_front());
        }
        if count > 0 && self.pieces.is_empty() && !self.last.is_empty() {
            count += self.last.len();
            taken.push_back(std::mem::take(&mut self.last).freeze());
        }
        self.unread -= count;
        taken
    }

    fn clear(&mut self) -> usize {
        self.pieces.clear();
        self.last.clear();
        std::mem::take(&mut self.unread)
    }
}

impl StreamShared {
    /// Creates a stream that sends `first` at once.
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
                write_pieces: VecDeque::new(),
                write_buffer: first,
                output: Output::Open,
                bulk: BulkState::default(),
                reset: None,
                cut: None,
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

    /// Waits until what was written may be sent. Called by the driver.
    pub(super) fn poll_sendable(&self, cx: &Context<'_>) -> Poll<()> {
        self.read_monitor.poll_sendable(cx)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock()
    }

    /// Adds data that h2 received.
    pub(super) fn receive(&self, state: &mut StreamState, piece: Bytes) {
        if state.is_discarding {
            return state.release_capacity(piece.len());
        }
        state.read_buffer.push(piece);
        self.read_monitor.set_unread(state.read_buffer.unread);
        wake(&mut state.reader);
    }

    /// Records the end of the peer's half.
    pub(super) fn end_input(&self, state: &mut StreamState, end: Result<(), StreamCut>) {
        state.input_end.get_or_insert(end);
        wake(&mut state.reader);
    }

    /// Sets the state of the sent half.
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

    /// Records that the end of the sent half, or all bytes before a cut, were written to the socket.
    pub(super) fn flushed(&self) {
        let mut state = self.lock();
        if state.output == Output::Queued {
            match state.cut {
                Some(code) => state.reset = state.reset.or(Some(code)),
                None => self.set_output(&mut state, Output::Flushed),
            }
            wake(&mut state.pump);
        }
    }

    /// Cuts both halves where they have not ended, because the driver has ended.
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

impl CutSignal for StreamShared {
    fn is_cut(&self) -> bool {
        matches!(self.lock().input_end, Some(Err(_)))
    }
}

impl StreamState {
    fn release_capacity(&mut self, bytes: usize) {
        if bytes > 0
            && let Some(flow_control) = &mut self.flow_control
        {
            // An error means that the stream was reset, which released its window.
            let _gone = flow_control.release_capacity(bytes);
        }
    }

    /// Wakes the driver, which then checks the whole state.
    pub(super) fn wake_pump(&mut self) {
        wake(&mut self.pump);
    }

    /// Returns the number of bytes that wait for the driver.
    pub(super) fn unsent(&self) -> usize {
        self.write_pieces.iter().map(Bytes::len).sum::<usize>() + self.write_buffer.len()
    }

    /// Takes at most `max_bytes` for one frame.
    pub(super) fn take_unsent(&mut self, max_bytes: usize) -> Bytes {
        match self.write_pieces.front_mut() {
            Some(piece) if piece.len() > max_bytes => piece.split_to(max_bytes),
            Some(_) => self.write_pieces.pop_front().unwrap_or_default(),
            None if self.write_buffer.len() > max_bytes => {
                self.write_buffer.split_to(max_bytes).freeze()
            }
            // An idle stream holds no buffer.
            None => std::mem::take(&mut self.write_buffer).freeze(),
        }
    }

    fn push_unsent(&mut self, piece: Bytes) {
        if piece.len() < COALESCE_BELOW_BYTES {
            self.write_buffer.extend_from_slice(&piece);
            return;
        }
        if !self.write_buffer.is_empty() {
            let joined = std::mem::take(&mut self.write_buffer);
            self.write_pieces.push_back(joined.freeze());
        }
        self.write_pieces.push_back(piece);
    }

    /// Waits for room for written data. Returns the number of bytes that may be added, at most
    /// `wanted`.
    fn poll_room(&mut self, cx: &Context<'_>, wanted: usize) -> Poll<io::Result<usize>> {
        match self.output {
            Output::Open if self.reset.is_none() => {}
            Output::Cut(cut) => return Poll::Ready(Err(cut.into())),
            Output::Open | Output::Finishing | Output::Queued | Output::Flushed => {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
        }
        let room = UNSENT_MAX_BYTES.saturating_sub(self.unsent());
        if room == 0 && wanted > 0 {
            register_waker(&mut self.writer, cx);
            return Poll::Pending;
        }
        Poll::Ready(Ok(wanted.min(room)))
    }

    /// Wakes the writer if there is room for much unsent data. A writer that is woken for little
    /// makes small frames.
    pub(super) fn wake_writer(&mut self) {
        if self.unsent() <= UNSENT_MAX_BYTES / 2 {
            wake(&mut self.writer);
        }
    }

    /// Takes all bytes out of the read buffer, for the session's own messages.
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

/// The user's end of a stream.
#[derive(Debug)]
pub(super) struct H2Stream(pub(super) Arc<StreamShared>);

impl H2Stream {
    /// Drops received data, from here on and what is unread.
    fn discard_input(&self, state: &mut StreamState) {
        state.is_discarding = true;
        let unread = state.read_buffer.clear();
        state.release_capacity(unread);
        self.0.read_monitor.set_unread(0);
        state.wake_pump();
    }
}

impl RawStream for H2Stream {
    fn cut_now(&mut self, code: ResetCode) {
        let mut state = self.0.lock();
        if state.output != Output::Flushed || state.input_end.is_none() {
            state.reset.get_or_insert(code);
        }
        self.discard_input(&mut state);
    }

    fn cut_behind(&mut self, code: ResetCode) {
        let mut state = self.0.lock();
        if state.output == Output::Open && !matches!(state.input_end, Some(Err(_))) {
            state.cut = Some(code);
            self.0.set_output(&mut state, Output::Finishing);
            return self.discard_input(&mut state);
        }
        drop(state);
        self.cut_now(code);
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut state = self.0.lock();
        match state.input_end {
            Some(Err(cut)) => Poll::Ready(cut.into()),
            Some(Ok(())) => Poll::Pending,
            None => {
                register_waker(&mut state.reader, cx);
                Poll::Pending
            }
        }
    }

    fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let mut state = self.0.lock();
        match state.output {
            Output::Cut(cut) => Poll::Ready(cut.into()),
            Output::Open | Output::Finishing | Output::Queued | Output::Flushed => {
                register_waker(&mut state.writer, cx);
                Poll::Pending
            }
        }
    }

    fn cut_signal(&self) -> Arc<dyn CutSignal> {
        self.0.clone()
    }

    /// Discards received data. HTTP/2 has no message for this before the sent half has ended.
    fn stop(&mut self, _code: ResetCode) {
        self.discard_input(&mut self.0.lock());
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        let mut state = self.0.lock();
        let count = ready!(state.poll_room(cx, data.len()))?;
        state.push_unsent(data.split_to(count));
        state.wake_pump();
        Poll::Ready(Ok(count))
    }

    fn take_pieces(&mut self) -> VecDeque<Bytes> {
        let mut state = self.0.lock();
        let before = state.read_buffer.unread;
        let pieces = state.read_buffer.take_pieces();
        let unread = state.read_buffer.unread;
        if unread < before {
            self.0.read_monitor.set_unread(unread);
            state.release_capacity(before - unread);
        }
        pieces
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
        let count = ready!(state.poll_room(cx, data.len()))?;
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

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn written_pieces_stay_in_order_and_whole() {
        let (shared, mut stream, mut random, sent) = fixture();
        let mut data = Bytes::from(sent.clone());
        let mut cx = Context::from_waker(Waker::noop());
        let mut got = Vec::<u8>::new();
        while got.len() < sent.len() {
            let mut piece = data.slice(..data.len().min(random.random_range(1..40_000)));
            let written = if random.random::<bool>() {
                stream.poll_send(&mut cx, &mut piece)
            } else {
                Pin::new(&mut stream).poll_write(&mut cx, &piece)
            };
            if let Poll::Ready(written) = written {
                data.advance(written.unwrap());
            }
            let mut state = shared.lock();
            assert!(state.unsent() <= UNSENT_MAX_BYTES);
            let frame = state.take_unsent(random.random_range(1..40_000));
            got.extend_from_slice(&frame);
        }
        assert!(got == sent);
    }

    #[test]
    fn received_pieces_stay_in_order_and_whole() {
        let (shared, mut stream, mut random, sent) = fixture();
        let mut data = Bytes::from(sent.clone());
        let mut cx = Context::from_waker(Waker::noop());
        let mut got = Vec::<u8>::new();
        while got.len() < sent.len() {
            let piece = data.split_to(data.len().min(random.random_range(1..20_000)));
            shared.receive(&mut shared.lock(), piece);
            if random.random::<bool>() {
                let pieces = stream.take_pieces();
                got.extend(pieces.into_iter().flatten());
            } else {
                let room: usize = random.random_range(1..20_000);
                let mut chunk = vec![0; room];
                let mut chunk = ReadBuf::new(&mut chunk);
                let _nothing_yet = Pin::new(&mut stream).poll_read(&mut cx, &mut chunk);
                got.extend_from_slice(chunk.filled());
            }
            let unread = shared.lock().read_buffer.unread;
            assert_eq!(unread, sent.len() - data.len() - got.len());
        }
        assert!(got == sent);
    }

    #[test]
    fn small_writes_share_a_frame_and_leave_no_buffer() {
        let (shared, mut stream, ..) = fixture();
        let mut cx = Context::from_waker(Waker::noop());
        for byte in 0..100 {
            let mut data = Bytes::copy_from_slice(&[byte]);
            assert!(stream.poll_send(&mut cx, &mut data).is_ready());
        }
        let mut state = shared.lock();
        let frame = state.take_unsent(UNSENT_MAX_BYTES);
        assert!(frame.into_iter().eq(0..100_u8));
        assert_eq!((state.unsent(), state.write_buffer.capacity()), (0, 0));
    }

    #[test]
    fn large_write_is_not_copied_and_waits_while_64_kib_are_unsent() {
        let (shared, mut stream, ..) = fixture();
        let mut cx = Context::from_waker(Waker::noop());
        let mut data = Bytes::from(vec![7; MIB]);
        let address = data.as_ptr();
        let written = stream.poll_send(&mut cx, &mut data);
        assert!(matches!(written, Poll::Ready(Ok(UNSENT_MAX_BYTES))));
        assert_eq!(data.len(), MIB - UNSENT_MAX_BYTES);
        assert!(stream.poll_send(&mut cx, &mut data).is_pending());
        let small = Pin::new(&mut stream).poll_write(&mut cx, b"x");
        assert!(small.is_pending());
        assert_eq!(shared.lock().take_unsent(5000).as_ptr(), address);
        let written = stream.poll_send(&mut cx, &mut data);
        assert!(matches!(written, Poll::Ready(Ok(5000))));
    }

    #[test]
    fn blocked_writer_is_woken_when_half_of_its_room_is_free() {
        let (shared, mut stream, ..) = fixture();
        let wakeups = Arc::<CountedWakeups>::default();
        let waker = Waker::from(wakeups.clone());
        let mut cx = Context::from_waker(&waker);
        let mut data = Bytes::from(vec![7; MIB]);
        assert!(stream.poll_send(&mut cx, &mut data).is_ready());
        assert!(stream.poll_send(&mut cx, &mut data).is_pending());
        let mut state = shared.lock();
        for (taken, woken) in [(1000, 0), (UNSENT_MAX_BYTES / 2 - 1000, 0), (1000, 1)] {
            assert_eq!(state.take_unsent(taken).len(), taken);
            state.wake_writer();
            assert_eq!(wakeups.0.load(Ordering::Relaxed), woken);
        }
    }

    #[derive(Debug, Default)]
    struct CountedWakeups(AtomicUsize);

    impl Wake for CountedWakeups {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns a stream, a seeded source, and random bytes of that source.
    fn fixture() -> (Arc<StreamShared>, H2Stream, SmallRng, Vec<u8>) {
        let shared = StreamShared::new(BytesMut::new(), Arc::default(), Arc::default());
        let mut random = SmallRng::seed_from_u64(1);
        let bytes = (0..MIB).map(|_| random.random()).collect();
        (shared.clone(), H2Stream(shared), random, bytes)
    }
}
