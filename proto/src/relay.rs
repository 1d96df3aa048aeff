//! Copies bytes in both directions between a socket and a stream. A half-close is forwarded, and a
//! cut on one side is forwarded to the other.
//!
//! - End of input on one side becomes `shutdown` of the other side. The opposite direction
//!   continues.
//! - A failed read means that bytes may be missing. The relay ends with [`RelayEnd::Cut`], and
//!   [`end_cut`] ends both sides such that each peer sees a cut (a stream resets on drop; a TCP socket
//!   needs zero linger). The bytes that were read before the cut are written first, as long as the
//!   reader takes bytes ([`CutDeadline`]).
//! - A reader that takes no bytes does not hide the cut of the other side: while a write is blocked
//!   for long, the relay asks its input for a cut, without reading ahead.
//! - A half-close does not hide what happens behind it: a side whose input has ended is watched
//!   while the opposite direction waits. This takes no timer, as many streams are half-closed.
//! - A failed write ends only its direction. The other side may still be sending a complete answer
//!   (a server that answers and closes before it has read the whole request). A stream that is read
//!   no more keeps no memory for what its peer sends.
//!
//! Large amounts are not copied between a socket and a stream: the stream sends the buffer into
//! which the socket was read, and the socket writes the pieces that the stream has received.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::io::poll_read_buf;

use crate::buffers::{BUFFER_BYTES, Buffer};
use crate::transport::{CUT_LIMIT, CUT_STALL_LIMIT, CutDeadline, Stream, StreamCut, find_cause};
use crate::wire::code::ResetCode;

#[cfg(any(test, feature = "test-util"))]
mod slow_flush;

#[cfg(any(test, feature = "test-util"))]
pub use slow_flush::SlowFlush;

/// A side of a relay: a [`Socket`], or the [`Stream`] of a session.
pub trait RelayIo {
    /// The type that reads and writes bytes.
    type Io: AsyncRead + AsyncWrite + PollCut + Unpin + ?Sized;
    /// Returns the value that reads and writes bytes.
    fn io(&mut self) -> &mut Self::Io;
    /// Returns the stream, if this side is one. A stream sends and receives `Bytes`.
    fn stream(&mut self) -> Option<&mut Stream>;
}

/// A side of a relay that is not a [`Stream`]: a socket, or TLS or HTTP over a socket.
#[derive(Debug)]
pub struct Socket<'a, T: ?Sized>(pub &'a mut T);

impl<T: AsyncRead + AsyncWrite + PollCut + Unpin + ?Sized> RelayIo for Socket<'_, T> {
    type Io = T;

    fn io(&mut self) -> &mut T {
        self.0
    }

    fn stream(&mut self) -> Option<&mut Stream> {
        None
    }
}

/// A connection that reports its cut even if bytes before the cut are unread.
pub trait PollCut {
    /// Completes when the peer has cut the connection: a reset, and no FIN, which ends one
    /// direction. Takes no byte. A stream wakes the task; a socket is asked again, every
    /// [`CUT_CHECK_INTERVAL`]. A later read returns the bytes before the cut, and then an error.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.below()
            .map_or(Poll::Pending, |below| below.poll_cut(cx))
    }

    /// Completes when the peer neither sends nor reads any more, but not after a FIN alone. To be
    /// polled in place of reads, when the input has ended. Wakes the task.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.below()
            .map_or(Poll::Pending, |below| below.poll_gone(cx))
    }

    /// Returns the number of bytes that were handed to the socket or the session below TLS, or 0 if
    /// nothing is below. A blocked flush shows no other progress.
    fn bytes_sent(&mut self) -> u64 {
        self.below().map_or(0, |below| below.bytes_sent())
    }

    /// Returns the connection below, which answers the methods that this one does not implement. With
    /// neither, a cut shows in reads and writes alone.
    fn below(&mut self) -> Option<&mut dyn PollCut>;
}

impl PollCut for Stream {
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        Self::poll_cut(self, cx)
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        Self::poll_gone(self, cx)
    }

    fn bytes_sent(&mut self) -> u64 {
        Self::bytes_sent(self)
    }

    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

impl<T: PollCut + ?Sized> PollCut for Box<T> {
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        (**self).poll_cut(cx)
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        (**self).poll_gone(cx)
    }

    fn bytes_sent(&mut self) -> u64 {
        (**self).bytes_sent()
    }

    fn below(&mut self) -> Option<&mut dyn PollCut> {
        (**self).below()
    }
}

impl<T: PollCut> PollCut for tokio_rustls::server::TlsStream<T> {
    fn below(&mut self) -> Option<&mut dyn PollCut> {
        Some(self.get_mut().0)
    }
}

impl<T: PollCut> PollCut for tokio_rustls::client::TlsStream<T> {
    fn below(&mut self) -> Option<&mut dyn PollCut> {
        Some(self.get_mut().0)
    }
}

/// An upgraded connection of hyper does not report what happens below hyper.
impl PollCut for hyper_util::rt::TokioIo<hyper::upgrade::Upgraded> {
    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

/// A pipe has no cut.
#[cfg(any(test, feature = "test-util"))]
impl PollCut for tokio::io::DuplexStream {
    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

/// A side of the relay, by argument position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelaySide {
    /// The first argument of [`relay`].
    Left,
    /// The second argument of [`relay`].
    Right,
}

/// The way in which a relay ended.
#[derive(Debug)]
pub enum RelayEnd {
    /// Both sides ended cleanly.
    Clean,
    /// This side reads no more, before it had received everything, as TCP peers may; the left one if
    /// both do. All that the right side sent was delivered if it is that. The rest of what the other
    /// side sends is discarded.
    ReaderClosed(RelaySide),
    /// This side was cut. Bytes may be missing on the other side.
    Cut(RelaySide, Cut),
}

/// The cut of one side of a relay.
#[derive(Debug)]
pub struct Cut {
    /// The error of the side that was cut.
    pub error: io::Error,
    /// Whether the other side took no bytes any more, so that some before the cut are lost.
    pub has_lost_bytes: bool,
}

impl Cut {
    /// Returns whether an end cut its stream for the memory, because the reader was stalled.
    pub fn is_for_memory(&self) -> bool {
        find_cause(&self.error).is_some_and(StreamCut::is_for_memory)
    }

    /// Returns the code with which a stream on the other side is cut.
    fn code(&self, side: RelaySide) -> ResetCode {
        match (find_cause::<StreamCut>(&self.error), side) {
            (Some(cut), _) if cut.is_for_memory() => ResetCode::ReaderStalled,
            // The caller gets the same answer as from the server that has the session.
            (Some(StreamCut::SessionLost), RelaySide::Right) => ResetCode::SessionLost,
            (Some(_) | None, RelaySide::Left | RelaySide::Right) => ResetCode::PeerCut,
        }
    }
}

/// A side of a relay that can be cut for its peer.
pub trait CutSide {
    /// Cuts the side, a stream with this code. The peer gets the bytes that were written before, unless
    /// it `takes_none`.
    fn cut_for_peer(self, code: ResetCode, takes_none: bool) -> impl Future<Output = ()> + Send;
}

impl CutSide for Stream {
    /// Cuts also a half that was shut down, which a drop would just not read.
    async fn cut_for_peer(mut self, code: ResetCode, _takes_none: bool) {
        self.cut_behind(code);
    }
}

/// Ends both sides after a relay that ended with the cut of `side`: that side is dropped, and the other
/// one is cut for its peer.
pub async fn end_cut(left: impl CutSide, right: impl CutSide, side: RelaySide, cut: &Cut) {
    let (code, takes_none) = (cut.code(side), cut.has_lost_bytes);
    match side {
        RelaySide::Left => {
            drop(left);
            right.cut_for_peer(code, takes_none).await;
        }
        RelaySide::Right => {
            drop(right);
            left.cut_for_peer(code, takes_none).await;
        }
    }
}

/// The totals and the end of a relay.
#[derive(Debug)]
pub struct RelayOutcome {
    /// Bytes from left to right.
    pub left_to_right: u64,
    /// Bytes from right to left.
    pub right_to_left: u64,
    /// The way in which the relay ended.
    pub end: RelayEnd,
}

/// Relays until both directions have ended or one is cut. Idle streams are never cut.
///
/// If the future is dropped, bytes in flight are lost, and the caller must drop both sides as after
/// a cut.
pub async fn relay<L: RelayIo, R: RelayIo>(left: &mut L, right: &mut R) -> RelayOutcome {
    let (mut left_to_right, mut right_to_left) = (Direction::new(), Direction::new());
    let end = poll_fn(|cx| {
        let first = left_to_right.poll(cx, left, right);
        // A side that was cut takes no bytes either.
        let second = if left_to_right.is_cut() {
            Poll::Pending
        } else {
            right_to_left.poll(cx, right, left)
        };
        match (first, second) {
            (Poll::Ready(Err(cut)), _) => Poll::Ready(RelayEnd::Cut(RelaySide::Left, cut)),
            (_, Poll::Ready(Err(cut))) => Poll::Ready(RelayEnd::Cut(RelaySide::Right, cut)),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => {
                // The opener, if both read no more: what it asked for may not have arrived.
                Poll::Ready(if right_to_left.reader_closed {
                    RelayEnd::ReaderClosed(RelaySide::Left)
                } else if left_to_right.reader_closed {
                    RelayEnd::ReaderClosed(RelaySide::Right)
                } else {
                    RelayEnd::Clean
                })
            }
            (Poll::Pending, _) | (_, Poll::Pending) => {
                if !right_to_left.is_done()
                    && let Poll::Ready(end) =
                        left_to_right.poll_finished_input(cx, left, RelaySide::Left)
                {
                    return Poll::Ready(end);
                }
                if left_to_right.is_done() {
                    return Poll::Pending;
                }
                right_to_left.poll_finished_input(cx, right, RelaySide::Right)
            }
        }
    })
    .await;
    RelayOutcome {
        left_to_right: left_to_right.bytes_copied,
        right_to_left: right_to_left.bytes_copied,
        end,
    }
}

/// The states of one direction.
///
/// ```text
/// Copying --end of input--> ShuttingDown --> Done
/// Copying --failed read---> Flushing(error) -> the relay ends
/// ```
enum Phase {
    Copying,
    ShuttingDown,
    /// The input was cut, and all bytes before the cut were written.
    Flushing(io::Error),
    Done,
}

struct Direction {
    phase: Phase,
    unsent: Unsent,
    bytes_copied: u64,
    unflushed: bool,
    reader_closed: bool,
    /// Boxed, because most relays never wait for their reader.
    blocked_write: Option<Box<BlockedWrite>>,
    /// Set when the peer of a finished input is gone.
    gone: Option<Box<Gone>>,
}

/// The end of a peer whose input has ended, while the opposite direction waits.
struct Gone {
    error: io::Error,
    since: Instant,
    /// Time in which the opposite direction may end by itself: a client may send its last bytes to a
    /// server that has closed, and its FIN just behind them.
    grace: Pin<Box<Sleep>>,
}

impl Direction {
    fn new() -> Self {
        Self {
            phase: Phase::Copying,
            unsent: Unsent::empty(),
            bytes_copied: 0,
            unflushed: false,
            reader_closed: false,
            blocked_write: None,
            gone: None,
        }
    }

    fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Watches an input that has ended, or is not read any more. Returns the end of the relay when
    /// its peer is gone. To be polled while the opposite direction is not done.
    fn poll_finished_input<I: RelayIo>(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut I,
        side: RelaySide,
    ) -> Poll<RelayEnd> {
        let (limit, is_shutting_down) = match &self.phase {
            Phase::Copying | Phase::Flushing(_) => return Poll::Pending,
            // The output may still take bytes.
            Phase::ShuttingDown => (CUT_LIMIT, true),
            Phase::Done => (CUT_STALL_LIMIT, false),
        };
        let mut gone = match self.gone.take() {
            Some(gone) => gone,
            None => {
                let error = ready!(input.io().poll_gone(cx));
                let since = Instant::now();
                let grace = Box::pin(sleep_until(since + limit));
                Box::new(Gone {
                    error,
                    since,
                    grace,
                })
            }
        };
        // The output may have taken the last bytes since then.
        if gone.grace.deadline() > gone.since + limit {
            gone.grace.as_mut().reset(gone.since + limit);
        }
        if gone.grace.as_mut().poll(cx).is_pending() {
            self.gone = Some(gone);
            return Poll::Pending;
        }
        let is_of_both_halves = match find_cause::<StreamCut>(&gone.error) {
            Some(cut) => cut.is_of_both_halves(),
            None => gone.error.kind() != io::ErrorKind::BrokenPipe,
        };
        if is_shutting_down && !is_of_both_halves {
            // The end of its complete bytes waits for the reader, however slow that is.
            self.gone = Some(gone);
            return Poll::Pending;
        }
        let error = gone.error;
        Poll::Ready(if is_of_both_halves || is_shutting_down {
            let cut = Cut {
                error,
                has_lost_bytes: is_shutting_down,
            };
            RelayEnd::Cut(side, cut)
        } else {
            RelayEnd::ReaderClosed(side)
        })
    }

    /// Returns whether the input was cut, and the bytes before the cut are on their way.
    fn is_cut(&self) -> bool {
        matches!(self.phase, Phase::Flushing(_))
    }

    /// Polls one direction. Returns an error only if the input was cut.
    fn poll<I: RelayIo, O: RelayIo>(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut I,
        output: &mut O,
    ) -> Poll<Result<(), Cut>> {
        // A fast direction must not starve the other direction or other tasks.
        let coop = ready!(tokio::task::coop::poll_proceed(cx));
        loop {
            match &mut self.phase {
                Phase::Copying => {
                    while !self.unsent.is_empty() {
                        match self.unsent.poll_write(cx, output) {
                            Poll::Ready(Ok(count)) if count > 0 => {
                                self.bytes_copied += count as u64;
                                self.unflushed = true;
                                if let Some(blocked_write) = &mut self.blocked_write {
                                    blocked_write.progressed();
                                }
                                coop.made_progress();
                            }
                            Poll::Ready(Ok(_) | Err(_)) => return self.reader_closed(input),
                            Poll::Pending => return self.poll_wait_for_reader(cx, input, output),
                        }
                    }
                    match self.unsent.poll_read(cx, input) {
                        Poll::Ready(Ok(())) if self.unsent.is_empty() => {
                            self.phase = Phase::ShuttingDown;
                        }
                        Poll::Ready(Ok(())) => coop.made_progress(),
                        Poll::Ready(Err(error)) => self.phase = Phase::Flushing(error),
                        Poll::Pending => {
                            // The input is idle, so written data must not stay in the output's
                            // buffers.
                            if self.unflushed {
                                match Pin::new(output.io()).poll_flush(cx) {
                                    Poll::Ready(Ok(())) => self.unflushed = false,
                                    Poll::Ready(Err(_)) => return self.reader_closed(input),
                                    Poll::Pending => {
                                        return self.poll_wait_for_reader(cx, input, output);
                                    }
                                }
                            }
                            return Poll::Pending;
                        }
                    }
                }
                Phase::Flushing(error) => {
                    let flushed = Pin::new(output.io()).poll_flush(cx);
                    let has_lost_bytes = flushed.is_pending();
                    if has_lost_bytes {
                        let sent = output.io().bytes_sent();
                        let blocked_write = self.blocked_write.get_or_insert_with(Box::default);
                        ready!(blocked_write.poll_flush_deadline(cx, sent));
                    }
                    let error = std::mem::replace(error, io::ErrorKind::ConnectionReset.into());
                    self.phase = Phase::Done;
                    return Poll::Ready(Err(Cut {
                        error,
                        has_lost_bytes,
                    }));
                }
                Phase::ShuttingDown => {
                    if ready!(Pin::new(output.io()).poll_shutdown(cx)).is_err() {
                        return self.reader_closed(input);
                    }
                    self.phase = Phase::Done;
                }
                Phase::Done => return Poll::Ready(Ok(())),
            }
        }
    }

    /// Waits for the reader. Returns the cut of an input that the reader hides, or the end of a
    /// stream whose memory others need.
    fn poll_wait_for_reader<I: RelayIo, O: RelayIo>(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut I,
        output: &mut O,
    ) -> Poll<Result<(), Cut>> {
        let must_end = match input.stream() {
            Some(stream) => stream.poll_stalled(cx),
            None => Poll::Pending,
        };
        let error = match must_end {
            Poll::Ready(error) => error,
            Poll::Pending => {
                let sent = output.io().bytes_sent();
                let blocked_write = self.blocked_write.get_or_insert_with(Box::default);
                ready!(blocked_write.poll(cx, input.io(), sent))
            }
        };
        Poll::Ready(Err(Cut {
            error,
            has_lost_bytes: true,
        }))
    }

    fn reader_closed<I: RelayIo>(&mut self, input: &mut I) -> Poll<Result<(), Cut>> {
        if let Some(stream) = input.stream() {
            stream.stop_reading();
        }
        self.reader_closed = true;
        self.phase = Phase::Done;
        self.unsent = Unsent::empty();
        self.blocked_write = None;
        Poll::Ready(Ok(()))
    }
}

/// Time for which a write is blocked before the input is asked whether it was cut, and the time
/// between two questions.
pub const CUT_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Watches the input of a direction whose writes are blocked.
#[derive(Default)]
struct BlockedWrite {
    blocked_since: Option<Instant>,
    /// Bytes that the output had sent at the last poll.
    sent: u64,
    /// Until when the output gets the bytes before a cut of the input.
    deadline: Option<CutDeadline>,
    /// The error of a cut that was noticed while bytes before it are unread.
    cut: Option<io::Error>,
    /// The next check. It stays while bytes flow, so that not each blocked write needs a timer.
    check: Option<Pin<Box<Sleep>>>,
}

impl BlockedWrite {
    fn progressed(&mut self) {
        self.blocked_since = None;
    }

    fn record_sent(&mut self, sent: u64) {
        if std::mem::replace(&mut self.sent, sent) != sent {
            self.progressed();
        }
    }

    /// Completes with the error of the input when the input was cut and the output has not taken
    /// bytes for long. To be polled while a write or a flush is blocked. `sent` is
    /// [`PollCut::bytes_sent`] of the output.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut (impl PollCut + ?Sized),
        sent: u64,
    ) -> Poll<io::Error> {
        self.record_sent(sent);
        loop {
            let now = Instant::now();
            let blocked_since = *self.blocked_since.get_or_insert(now);
            if self.cut.is_none()
                && now >= blocked_since + CUT_CHECK_INTERVAL
                && let Poll::Ready(error) = input.poll_cut(cx)
            {
                self.deadline = Some(CutDeadline::of_cut_at(now));
                self.cut = Some(error);
            }
            let next = match self.deadline {
                Some(deadline) => deadline.end(Some(blocked_since)),
                None => now + CUT_CHECK_INTERVAL,
            };
            if next <= now
                && let Some(error) = self.cut.take()
            {
                return Poll::Ready(error);
            }
            ready!(self.poll_check(cx, next));
        }
    }

    /// Completes when the output takes no more of the bytes before a cut, or not in time. To be
    /// polled while a flush is blocked. `sent` is [`PollCut::bytes_sent`] of the output.
    fn poll_flush_deadline(&mut self, cx: &mut Context<'_>, sent: u64) -> Poll<()> {
        self.record_sent(sent);
        loop {
            let now = Instant::now();
            let blocked_since = *self.blocked_since.get_or_insert(now);
            let deadline = *self
                .deadline
                .get_or_insert_with(|| CutDeadline::of_cut_at(now));
            let end = deadline.end(Some(blocked_since));
            if end <= now {
                return Poll::Ready(());
            }
            ready!(self.poll_check(cx, end));
        }
    }

    /// Waits until `next`, or for a shorter time.
    fn poll_check(&mut self, cx: &mut Context<'_>, next: Instant) -> Poll<()> {
        let check = self
            .check
            .get_or_insert_with(|| Box::pin(sleep_until(next)));
        if check.deadline() > next {
            check.as_mut().reset(next);
        }
        ready!(check.as_mut().poll(cx));
        self.check = None;
        Poll::Ready(())
    }
}

/// The bytes that one direction has read and not written.
enum Unsent {
    /// Bytes that were copied into a buffer.
    Buffer(Buffer),
    /// Bytes that a stream has received, or will send, without a copy.
    Pieces(VecDeque<Bytes>),
}

impl Unsent {
    /// Returns a value without bytes, which uses no memory.
    fn empty() -> Self {
        Self::Pieces(VecDeque::new())
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Buffer(buffer) => buffer.0.is_empty(),
            Self::Pieces(pieces) => pieces.is_empty(),
        }
    }

    /// Reads bytes in place of those that were written. There are none at the end of the input.
    fn poll_read<I: RelayIo>(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut I,
    ) -> Poll<io::Result<()>> {
        *self = Self::empty();
        if let Some(stream) = input.stream() {
            let pieces = ready!(stream.poll_take_pieces(cx))?;
            if !pieces.is_empty() {
                *self = Self::Pieces(pieces);
                return Poll::Ready(Ok(()));
            }
        }
        // The buffer returns to the pool if the read is pending, so an idle stream has no buffer.
        let mut buffer = Buffer::take();
        if ready!(poll_read_buf(Pin::new(input.io()), cx, &mut buffer.0))? > 0 {
            *self = Self::Buffer(buffer);
        }
        Poll::Ready(Ok(()))
    }

    /// Writes bytes from the front and returns their number.
    fn poll_write<O: RelayIo>(
        &mut self,
        cx: &mut Context<'_>,
        output: &mut O,
    ) -> Poll<io::Result<usize>> {
        if let Some(stream) = output.stream() {
            self.hand_over_buffer();
            if let Self::Pieces(pieces) = self
                && let Some(piece) = pieces.front_mut()
            {
                let count = ready!(stream.poll_send(cx, piece))?;
                if piece.is_empty() {
                    pieces.pop_front();
                }
                return Poll::Ready(Ok(count));
            }
        }
        let io = Pin::new(output.io());
        let written = match self {
            Self::Buffer(buffer) => io.poll_write(cx, &buffer.0),
            Self::Pieces(pieces) if pieces.len() > 1 && io.is_write_vectored() => {
                let mut slices = [IoSlice::new(&[]); PIECES_PER_WRITE];
                for (slice, piece) in slices.iter_mut().zip(pieces.iter()) {
                    *slice = IoSlice::new(piece);
                }
                io.poll_write_vectored(cx, &slices[..pieces.len().min(PIECES_PER_WRITE)])
            }
            Self::Pieces(pieces) => {
                io.poll_write(cx, pieces.front().map_or(&b""[..], |piece| &piece[..]))
            }
        };
        let count = ready!(written)?;
        self.advance(count);
        Poll::Ready(Ok(count))
    }

    /// Turns a buffer with much data into a piece that a stream can queue.
    fn hand_over_buffer(&mut self) {
        if let Self::Buffer(buffer) = self
            && buffer.0.len() >= HAND_OVER_BYTES
        {
            let piece = buffer.0.split().freeze();
            *self = Self::Pieces(VecDeque::from([piece]));
        }
    }

    fn advance(&mut self, mut count: usize) {
        match self {
            Self::Buffer(buffer) => buffer.0.advance(count),
            Self::Pieces(pieces) => {
                while let Some(piece) = pieces.front_mut() {
                    if count < piece.len() {
                        return piece.advance(count);
                    }
                    count -= piece.len();
                    pieces.pop_front();
                }
            }
        }
    }
}

/// A stream copies less than this amount, and otherwise queues the buffer itself. So what a stalled
/// stream keeps in memory is at most a third more than its unsent bytes, and a buffer at each end.
const HAND_OVER_BYTES: usize = BUFFER_BYTES / 4 * 3;
/// Pieces that one call writes to a socket. An h2 stream yields five at most if its peer fills its
/// frames, even frames of 16 KiB.
const PIECES_PER_WRITE: usize = 16;

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use rand::rngs::SmallRng;
    use rand::{RngExt, SeedableRng};
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadBuf, duplex, empty, join};
    use tokio_util::task::AbortOnDropHandle;

    use super::*;
    use crate::transport::{Session, memory};
    use crate::wire::header::{StreamHeader, StreamKind, Target};
    use crate::wire::name::Port;

    #[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
    fn start() -> (DuplexStream, DuplexStream, AbortOnDropHandle<RelayOutcome>) {
        let (left, mut left_inner) = duplex(1024);
        let (right, mut right_inner) = duplex(1024);
        let task = tokio::spawn(async move {
            relay(&mut Socket(&mut left_inner), &mut Socket(&mut right_inner)).await
        });
        (left, right, AbortOnDropHandle::new(task))
    }

    impl<R, W> PollCut for tokio::io::Join<R, W> {
        fn below(&mut self) -> Option<&mut dyn PollCut> {
            None
        }
    }

    #[tokio::test]
    async fn reader_that_closed_does_not_stop_the_answer() {
        let (mut left, right, task) = start();
        let (mut right_read, right_write) = tokio::io::split(right);
        left.write_all(b"x").await.unwrap();
        assert_eq!(right_read.read_u8().await.unwrap(), b'x');
        drop((right_read, right_write));
        // The relay's right side is closed in both directions: its input ends, and its output
        // fails.
        let mut got = Vec::new();
        left.write_all(b"lost").await.unwrap();
        left.read_to_end(&mut got).await.unwrap();
        drop(left);
        let end = task.await.unwrap().end;
        assert!(matches!(end, RelayEnd::ReaderClosed(RelaySide::Right)));
    }

    #[tokio::test]
    async fn failed_read_is_a_cut() {
        let mut left = join(FailingReader, tokio::io::sink());
        let (mut right, _keep) = duplex(64);
        let outcome = relay(&mut Socket(&mut left), &mut Socket(&mut right)).await;
        assert!(matches!(outcome.end, RelayEnd::Cut(RelaySide::Left, _)));
    }

    struct FailingReader;

    impl AsyncRead for FailingReader {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        }
    }

    /// The reader takes a byte of what TLS has queued every 900 ms, a number of times.
    #[tokio::test(start_paused = true)]
    async fn reader_that_takes_bytes_gets_what_tls_holds_in_front_of_a_cut() {
        for (queued, takes, expected) in [
            (3, 3, (2700, false)),
            (3, 1, (1900, true)),
            (3, 0, (1000, true)),
            (9, 9, (5000, true)),
        ] {
            let mut left = join(FailingReader, tokio::io::sink());
            let mut right = SlowFlush::new(queued, takes);
            let began = Instant::now();
            let outcome = relay(&mut Socket(&mut left), &mut Socket(&mut right)).await;
            let RelayEnd::Cut(RelaySide::Left, cut) = outcome.end else {
                panic!("{outcome:?}");
            };
            let waited = began.elapsed().as_millis();
            // Each timer may be a millisecond late.
            let is_in_time = (expected.0..expected.0 + 20).contains(&waited);
            assert!(is_in_time, "{queued}, {takes}: {waited} ms");
            assert_eq!(cut.has_lost_bytes, expected.1, "{queued}, {takes}");
        }
    }

    /// A target that has answered and closed, and an opener that sends on and reads nothing yet.
    #[tokio::test]
    async fn stream_whose_reader_has_closed_is_stopped_before_its_answer_is_read() {
        let answer = [7; 500];
        let (opener, session) = memory::pair();
        opener.script().next_window = Some(64);
        let header = StreamHeader::new(StreamKind::Target(Target::Node(Port::new(9100).unwrap())));
        let accepting = async {
            let incoming = session.accept().await.unwrap();
            let header = incoming.header(Instant::now() + CUT_LIMIT);
            let (_, mut stream) = header.await.unwrap();
            stream.accept("").await.unwrap();
            stream
        };
        let (opened, mut stream) = tokio::join!(opener.open(&header, CUT_LIMIT), accepting);
        let mut opened = opened.unwrap();
        let (mut target, mut socket) = duplex(1024);
        target.write_all(&answer).await.unwrap();
        drop(target);
        opened.write_all(b"upload").await.unwrap();
        let mut right = Socket(&mut socket);
        let mut relayed = std::pin::pin!(relay(&mut stream, &mut right));
        poll_fn(|cx| {
            assert!(relayed.as_mut().poll(cx).is_pending());
            Poll::Ready(())
        })
        .await;
        let error = opened.shutdown().await.unwrap_err();
        let stopped = find_cause::<StreamCut>(&error);
        assert_eq!(stopped, Some(&StreamCut::Stopped(ResetCode::Dropped)));
        let mut got = Vec::new();
        let (relayed, read) = tokio::join!(relayed, opened.read_to_end(&mut got));
        read.unwrap();
        assert_eq!(got, answer);
        let end = relayed.end;
        assert!(
            matches!(end, RelayEnd::ReaderClosed(RelaySide::Right)),
            "{end:?}"
        );
    }

    #[test]
    fn pieces_stay_in_order_and_whole_over_partial_writes() {
        let mut random = SmallRng::seed_from_u64(1);
        let sent: Vec<u8> = (0..1 << 20).map(|_| random.random()).collect();
        let mut data = Bytes::from(sent.clone());
        let mut pieces = VecDeque::new();
        while !data.is_empty() {
            pieces.push_back(data.split_to(data.len().min(random.random_range(1..9000))));
        }
        let mut unsent = Unsent::Pieces(pieces);
        let got = Vec::new();
        let mut socket = join(empty(), PartialWriter { random, got });
        let mut cx = Context::from_waker(Waker::noop());
        while !unsent.is_empty() {
            let written = unsent.poll_write(&mut cx, &mut Socket(&mut socket));
            assert!(written.is_ready());
        }
        assert!(socket.writer().got == sent);
    }

    /// A writer that accepts a random part of the bytes.
    struct PartialWriter {
        random: SmallRng,
        got: Vec<u8>,
    }

    impl AsyncWrite for PartialWriter {
        fn poll_write(
            self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            data: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.poll_write_vectored(cx, &[IoSlice::new(data)])
        }

        fn poll_write_vectored(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            data: &[IoSlice<'_>],
        ) -> Poll<io::Result<usize>> {
            let data: Vec<u8> = data.iter().flat_map(|slice| slice.to_vec()).collect();
            let count = self.random.random_range(1..=data.len());
            self.got.extend_from_slice(&data[..count]);
            Poll::Ready(Ok(count))
        }

        fn is_write_vectored(&self) -> bool {
            true
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Each stream has a relay at either end for as long as it is open.
    #[test]
    fn relay_is_small() {
        let ((mut left, _), (mut right, _)) = (duplex(1), duplex(1));
        let (mut left, mut right) = (Socket(&mut left), Socket(&mut right));
        let size = size_of_val(&relay(&mut left, &mut right));
        assert!(size <= 256, "{size} bytes");
    }

    #[tokio::test]
    async fn quiet_stream_holds_no_buffer() {
        let mut direction = Direction::new();
        let ((mut left, mut far_left), (mut right, mut far_right)) = (duplex(64), duplex(64));
        far_left.write_all(b"question").await.unwrap();
        let (mut left, mut right) = (Socket(&mut left), Socket(&mut right));
        poll_fn(|cx| {
            assert!(direction.poll(cx, &mut left, &mut right).is_pending());
            Poll::Ready(())
        })
        .await;
        let mut got = [0; 8];
        far_right.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"question");
        assert!(
            matches!(&direction.unsent, Unsent::Pieces(pieces) if pieces.capacity() == 0),
            "the stream is idle"
        );
    }
}
