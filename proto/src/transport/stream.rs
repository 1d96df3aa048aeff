//! `Stream`: the bytes of one stream, with the rules for replies, refusals, resets and accounting
//! that all transports share.

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::Sleep;
use tokio_util::io::poll_write_buf;

use super::ReadMonitor;
use crate::wire::code::{RefusalCode, ResetCode};
use crate::wire::frame::{self, FrameError, STREAM_MESSAGE_MAX};
use crate::wire::header::{Refusal, StreamReply};

mod incoming;
mod traffic;
mod watch;

pub use incoming::{IncomingStream, read_frame};
pub use traffic::{ByteCount, Traffic};
pub use watch::{CutSignal, StreamWatch};

/// The operations that a transport provides for each stream. [`Stream`] adds the rules that all
/// transports share.
///
/// `poll_shutdown` ends the sent half and is ready when the peer has received everything. If a read
/// or write fails because the peer reset or stopped the half, the `io::Error` contains a
/// [`StreamCut`].
pub trait RawStream: AsyncRead + AsyncWrite + Send + Unpin {
    /// Cuts both directions at once. The peer may lose bytes that it has not read.
    fn cut_now(&mut self, code: ResetCode);
    /// Cuts both directions. The peer reads the written bytes before the cut, if it takes them in
    /// time ([`CUT_LIMIT`](super::CUT_LIMIT)). The transport delivers them even after the stream is
    /// dropped.
    fn cut_behind(&mut self, code: ResetCode);
    /// Completes when the peer has cut the stream or the session was lost, even if bytes before that
    /// are unread. Takes no byte, and never completes after a clean end.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
    /// Completes when the peer reads no more of the half that this end sends, or the session was
    /// lost. Wakes the task. Need not complete once this end shuts its half down.
    fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Poll<io::Error>;
    /// Asks the peer to stop sending, because this end reads no more.
    fn stop(&mut self, code: ResetCode);
    /// Returns what the transport tells to a [`StreamWatch`].
    fn cut_signal(&self) -> Arc<dyn CutSignal>;
    /// Writes bytes from the front of `data`, like `poll_write`, and removes them from `data`. A
    /// transport that can queue [`Bytes`] does not copy them.
    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        poll_write_buf(Pin::new(self), cx, data)
    }
    /// Takes received bytes that need not be copied, about 64 KiB at most. Returns nothing if the
    /// next bytes are few or the transport does not keep them as [`Bytes`]. `poll_read` then
    /// returns them, and the end of the input.
    fn take_pieces(&mut self) -> VecDeque<Bytes> {
        VecDeque::new()
    }
}

/// The reason why a stream was cut, by the peer or by the loss of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StreamCut {
    /// The peer reset its half.
    #[error("stream was reset by the peer ({0})")]
    Reset(ResetCode),
    /// The peer stopped reading the half that this end sends.
    #[error("peer stopped reading the stream ({0})")]
    Stopped(ResetCode),
    /// This end cut the stream, because its reader was stalled while others waited for memory.
    #[error("nothing was read for 10 s while other streams waited for memory (limits.bufferPool)")]
    ReaderStalled,
    /// The session ended before the stream did.
    #[error("session was lost")]
    SessionLost,
    /// The half ended before its reply.
    #[error("stream ended without a reply")]
    NoReply,
    /// The reply did not arrive in time.
    #[error("peer sent no stream reply in time")]
    ReplyTimeout,
}

impl StreamCut {
    /// Returns whether both halves are cut. An end that only stops reading may have sent a complete
    /// answer.
    pub(crate) fn is_of_both_halves(&self) -> bool {
        match self {
            Self::Stopped(code) => match code {
                ResetCode::PeerCut
                | ResetCode::SessionLost
                | ResetCode::ReaderStalled
                | ResetCode::AgentStopping => true,
                ResetCode::Dropped
                | ResetCode::Protocol
                | ResetCode::Refused
                | ResetCode::Unknown(_) => false,
            },
            Self::Reset(_)
            | Self::ReaderStalled
            | Self::SessionLost
            | Self::NoReply
            | Self::ReplyTimeout => true,
        }
    }

    /// Returns whether a session was lost: the one that carried the stream, or the one behind another
    /// server.
    pub fn is_session_lost(&self) -> bool {
        match self {
            Self::SessionLost => true,
            Self::Reset(code) | Self::Stopped(code) => *code == ResetCode::SessionLost,
            Self::ReaderStalled | Self::NoReply | Self::ReplyTimeout => false,
        }
    }

    /// Returns whether an end cut the stream for its memory, because its reader was stalled.
    pub fn is_for_memory(&self) -> bool {
        match self {
            Self::ReaderStalled => true,
            Self::Reset(code) | Self::Stopped(code) => *code == ResetCode::ReaderStalled,
            Self::SessionLost | Self::NoReply | Self::ReplyTimeout => false,
        }
    }
}

impl From<StreamCut> for io::Error {
    fn from(cut: StreamCut) -> Self {
        let kind = match cut {
            StreamCut::Reset(_) => io::ErrorKind::ConnectionReset,
            StreamCut::Stopped(_) => io::ErrorKind::BrokenPipe,
            StreamCut::SessionLost | StreamCut::ReaderStalled => io::ErrorKind::ConnectionAborted,
            StreamCut::NoReply => io::ErrorKind::UnexpectedEof,
            StreamCut::ReplyTimeout => io::ErrorKind::TimedOut,
        };
        Self::new(kind, cut)
    }
}

/// Finds a cause of the type `T`, such as [`Refusal`], in an error from reading or writing a
/// stream, at any depth of wrapping.
pub fn find_cause<'a, T: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(current) = next {
        if let Some(found) = current.downcast_ref::<T>() {
            return Some(found);
        }
        // An `io::Error` hides its payload from `source`, which returns the payload's source
        // instead.
        next = match current
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref)
        {
            Some(inner) => Some(inner),
            None => current.source(),
        };
    }
    None
}

/// A stream of a session, with both halves. Dropping it before `shutdown` resets it.
pub struct Stream {
    raw: Box<dyn RawStream>,
    reply: ReplyState,
    /// An error that the writer met while the reply was pending. It is reported after the reply is
    /// known.
    deferred_write_error: Option<io::Error>,
    /// Wakers of the two halves. Each half may wait for an event that the other half observes: the
    /// reply, or the end of the input.
    waiters: [Option<Waker>; 2],
    read_ended: bool,
    /// Set while the transport has the waker of a read that found nothing, so that it need not be asked
    /// again before it wakes it. A question about a cut takes the waker's place.
    is_read_registered: bool,
    shut_down: bool,
    bytes: ByteCount,
    traffic: Arc<Traffic>,
    is_counted: bool,
    read_monitor: Arc<ReadMonitor>,
    attachment: Option<Box<dyn Send>>,
}

/// The reply of the peer on a stream whose reads return it ([`Stream::leave_reply`]).
enum PassingReply {
    /// What has passed of it.
    Begun(BytesMut),
    Refused(Refusal),
    /// It was not a refusal, or it cannot be decoded.
    Other,
}

enum ReplyState {
    /// The peer opened the stream, and this end sends the reply.
    Local,
    /// This end opened the stream, and leaves the reply to the ends of a forwarded stream.
    Passing(PassingReply),
    /// This end opened the stream, and the reply is not complete yet.
    Pending {
        buffer: BytesMut,
        deadline: Pin<Box<Sleep>>,
    },
    Accepted {
        dialed: String,
    },
    Refused(Refusal),
    Failed(StreamCut),
}

#[derive(Clone, Copy)]
enum Half {
    Read = 0,
    Write = 1,
}

impl Stream {
    /// Creates a stream that this end opened. The header must have been written.
    pub fn opened(
        raw: Box<dyn RawStream>,
        traffic: Arc<Traffic>,
        read_monitor: Arc<ReadMonitor>,
        reply_timeout: Duration,
    ) -> Self {
        let deadline = Box::pin(tokio::time::sleep(reply_timeout));
        Self::new(
            raw,
            ReplyState::Pending {
                buffer: BytesMut::new(),
                deadline,
            },
            traffic,
            read_monitor,
        )
    }

    fn new(
        raw: Box<dyn RawStream>,
        reply: ReplyState,
        traffic: Arc<Traffic>,
        read_monitor: Arc<ReadMonitor>,
    ) -> Self {
        traffic.streams.fetch_add(1, Ordering::Relaxed);
        Self {
            raw,
            reply,
            deferred_write_error: None,
            waiters: [None, None],
            read_ended: false,
            is_read_registered: false,
            shut_down: false,
            bytes: ByteCount::default(),
            traffic,
            is_counted: true,
            read_monitor,
            attachment: None,
        }
    }

    /// Excludes the stream from the number of open streams, because the control stream is not a
    /// pending request.
    pub(crate) fn exclude_from_count(&mut self) {
        if std::mem::take(&mut self.is_counted) {
            self.traffic.streams.fetch_sub(1, Ordering::Relaxed);
            self.read_monitor.exclude();
        }
    }

    /// Keeps a value (a permit, a guard) until the stream is dropped.
    pub fn attach(&mut self, value: impl Send + 'static) {
        self.attachment = Some(Box::new((self.attachment.take(), value)));
    }

    /// Cuts both directions with `code`. The cut stays behind the bytes that were written.
    pub fn cut_behind(&mut self, code: ResetCode) {
        if self.bytes.read().1 == 0 {
            // There is nothing but a header or a reply, which a cut may overtake.
            self.raw.cut_now(code);
        } else {
            self.raw.cut_behind(code);
        }
        self.read_monitor.finish();
        self.read_ended = true;
        self.is_read_registered = false;
        self.shut_down = true;
    }

    /// Returns the stream's byte counters. They may outlive the stream, for its access log.
    pub fn bytes(&self) -> ByteCount {
        self.bytes.clone()
    }

    /// Returns the number of payload bytes that were written.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.bytes.read().1
    }

    /// Waits for the peer's reply and returns the address that the peer dialed. The address is
    /// empty if the peer did not report it. For openers; cancel-safe.
    ///
    /// # Errors
    /// An `io::Error` around [`Refusal`] or [`StreamCut`].
    pub async fn accepted(&mut self) -> io::Result<&str> {
        std::future::poll_fn(|cx| self.poll_reply(cx, Half::Read)).await?;
        match &self.reply {
            ReplyState::Accepted { dialed } => Ok(dialed),
            ReplyState::Local
            | ReplyState::Passing(_)
            | ReplyState::Pending { .. }
            | ReplyState::Refused(_)
            | ReplyState::Failed(_) => Ok(""),
        }
    }

    /// Returns whether the peer has accepted the stream, as far as reads have returned its reply. For
    /// openers.
    pub fn is_accepted(&self) -> bool {
        matches!(self.reply, ReplyState::Accepted { .. })
    }

    /// Sets who caused the stream, in place of what its header says. The source that holds the most
    /// is the first that gets no new streams, and whose stalled streams end.
    pub fn set_source(&self, source: u64) {
        self.read_monitor.set_source(source);
    }

    /// Returns an observer of the stream, for tasks that do not read it.
    pub fn watch(&self) -> StreamWatch {
        StreamWatch {
            cut: self.raw.cut_signal(),
            read_monitor: self.read_monitor.clone(),
        }
    }

    /// Returns an error when the stream must end because its reader is stalled. Resets the stream
    /// then.
    pub(crate) fn poll_stalled(&mut self, cx: &Context<'_>) -> Poll<io::Error> {
        ready!(self.read_monitor.poll_stalled(cx));
        self.cut_behind(ResetCode::ReaderStalled);
        Poll::Ready(StreamCut::ReaderStalled.into())
    }

    /// Leaves the reply to the ends of a forwarded stream: reads return the peer's reply with the
    /// bytes behind it, and writes begin with the reply to the peer.
    pub(crate) fn leave_reply(&mut self) {
        self.reply = match self.reply {
            ReplyState::Pending { .. } => ReplyState::Passing(PassingReply::Begun(BytesMut::new())),
            ReplyState::Local
            | ReplyState::Passing(_)
            | ReplyState::Accepted { .. }
            | ReplyState::Refused(_)
            | ReplyState::Failed(_) => ReplyState::Local,
        };
        self.read_monitor.end_read();
    }

    /// Returns the refusal that reads have returned after [`Stream::leave_reply`].
    pub(crate) fn passed_refusal(&self) -> Option<&Refusal> {
        match &self.reply {
            ReplyState::Passing(PassingReply::Refused(refusal)) => Some(refusal),
            ReplyState::Passing(PassingReply::Begun(_) | PassingReply::Other)
            | ReplyState::Local
            | ReplyState::Pending { .. }
            | ReplyState::Accepted { .. }
            | ReplyState::Refused(_)
            | ReplyState::Failed(_) => None,
        }
    }

    fn note_reply(&mut self, data: &[u8]) {
        let ReplyState::Passing(passing) = &mut self.reply else {
            return;
        };
        let PassingReply::Begun(begun) = passing else {
            return;
        };
        // The longest reply has its length in front.
        let room = (STREAM_MESSAGE_MAX + 16).saturating_sub(begun.len());
        begun.extend_from_slice(&data[..data.len().min(room)]);
        *passing = match frame::take(begun, STREAM_MESSAGE_MAX) {
            Ok(None) => return,
            Ok(Some(reply)) => match StreamReply::decode(&reply) {
                Ok(StreamReply::Refused(refusal)) => PassingReply::Refused(refusal),
                Ok(StreamReply::Accepted { .. }) | Err(_) => PassingReply::Other,
            },
            Err(_) => PassingReply::Other,
        };
    }

    /// Writes the header, which is not payload. Not cancel-safe, but dropping the stream resets it.
    pub(super) async fn write_header(&mut self, header: &[u8]) -> io::Result<()> {
        self.raw.write_all(header).await
    }

    /// Accepts the stream: reports to the opener that the target is connected. For the accepting
    /// end. Call this function before any payload is written. Not cancel-safe.
    ///
    /// # Errors
    /// When the stream or its session was cut.
    pub async fn accept(&mut self, dialed: &str) -> io::Result<()> {
        let mut buffer = BytesMut::new();
        let reply = StreamReply::Accepted {
            dialed: dialed.to_owned(),
        };
        reply.encode(&mut buffer).map_err(invalid)?;
        self.raw.write_all(&buffer).await?;
        // The reader is expected to read from now on.
        self.read_monitor.end_read();
        Ok(())
    }

    /// Refuses the stream with a reply and a clean end, and stops reading it. For the accepting
    /// end. Returns when the peer has received the reply, or the session has ended. Not
    /// cancel-safe.
    pub async fn refuse(mut self, code: RefusalCode, detail: &str) {
        let mut buffer = BytesMut::new();
        // Encoding cannot fail, because the detail of a refusal is bounded below the cap.
        let encoded = StreamReply::refused(code, detail).encode(&mut buffer);
        self.raw.stop(ResetCode::Refused);
        self.read_monitor.finish();
        self.read_ended = true;
        if encoded.is_ok() && self.raw.write_all(&buffer).await.is_ok() {
            let _cut_anyway = self.shutdown().await;
        }
    }

    /// Waits until the reply is known. Returns an error if the reply is a refusal or cannot arrive.
    fn poll_reply(&mut self, cx: &mut Context<'_>, half: Half) -> Poll<io::Result<()>> {
        let ReplyState::Pending { buffer, deadline } = &mut self.reply else {
            return Poll::Ready(match &self.reply {
                ReplyState::Refused(refusal) => Err(io::Error::new(
                    io::ErrorKind::ConnectionRefused,
                    refusal.clone(),
                )),
                ReplyState::Failed(cut) => Err((*cut).into()),
                ReplyState::Local
                | ReplyState::Passing(_)
                | ReplyState::Accepted { .. }
                | ReplyState::Pending { .. } => Ok(()),
            });
        };
        let outcome = match poll_reply_frame(&mut *self.raw, buffer, cx) {
            Poll::Ready(Ok(StreamReply::Accepted { dialed })) => ReplyState::Accepted { dialed },
            Poll::Ready(Ok(StreamReply::Refused(refusal))) => ReplyState::Refused(refusal),
            Poll::Ready(Err(error)) => ReplyState::Failed(
                find_cause::<StreamCut>(&error)
                    .copied()
                    .unwrap_or(StreamCut::NoReply),
            ),
            Poll::Pending if deadline.as_mut().poll(cx).is_ready() => {
                ReplyState::Failed(StreamCut::ReplyTimeout)
            }
            Poll::Pending => {
                self.waiters[half as usize] = Some(cx.waker().clone());
                return Poll::Pending;
            }
        };
        self.reply = outcome;
        // The reader is expected to read from now on.
        self.read_monitor.end_read();
        for waker in self.waiters.iter_mut().filter_map(Option::take) {
            waker.wake();
        }
        self.poll_reply(cx, half)
    }

    /// Reads bytes that need not be copied. If there are none, `poll_read` must be called.
    pub(crate) fn poll_take_pieces(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<VecDeque<Bytes>>> {
        ready!(self.poll_reply(cx, Half::Read))?;
        let pieces = self.raw.take_pieces();
        if !pieces.is_empty() {
            self.read_monitor.end_read();
            self.count_received(pieces.iter().map(Bytes::len).sum());
            pieces.iter().for_each(|piece| self.note_reply(piece));
        }
        Poll::Ready(Ok(pieces))
    }

    /// Completes when the peer has cut the stream, the session was lost, or the stream must end
    /// because its reader is stalled, even if bytes before that are unread.
    pub(crate) fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.read_ended {
            return Poll::Pending;
        }
        if let Poll::Ready(error) = self.poll_stalled(cx) {
            return Poll::Ready(error);
        }
        if let Poll::Ready(error) = self.poll_raw_cut(cx) {
            return Poll::Ready(error);
        }
        // A peer whose half is complete, though bytes of it are unread, cuts only what it reads.
        let error = ready!(self.raw.poll_stopped(cx));
        match find_cause::<StreamCut>(&error) {
            // What has arrived of a complete half outlives the session.
            Some(cut) if !cut.is_of_both_halves() || cut.is_session_lost() => Poll::Pending,
            Some(_) | None => Poll::Ready(error),
        }
    }

    /// Completes when the peer reads no more and its half has ended, or when the stream is cut.
    pub(crate) fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Poll::Ready(error) = self.poll_cut(cx) {
            return Poll::Ready(error);
        }
        if !self.read_ended {
            return Poll::Pending;
        }
        self.raw.poll_stopped(cx)
    }

    /// Reads no more, and asks the peer to send no more. What is unread is discarded.
    pub(crate) fn stop_reading(&mut self) {
        if !self.read_ended {
            self.raw.stop(ResetCode::Dropped);
            self.end_reading();
        }
    }

    fn end_reading(&mut self) {
        self.read_ended = true;
        self.is_read_registered = false;
        self.read_monitor.finish();
        if let Some(writer) = self.waiters[Half::Write as usize].take() {
            writer.wake();
        }
    }

    /// Completes when the opener has cut the stream, or the session was lost. For the accepting
    /// end, before its reply. A FIN is no cut.
    pub(crate) fn poll_opener_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.poll_raw_cut(cx)
    }

    fn poll_raw_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.is_read_registered = false;
        self.raw.poll_cut(cx)
    }

    /// Like [`Stream::poll_opener_cut`], and completes also when the opener reads no more, so that
    /// it wants no reply. This alone shows the end of an opener whose half is complete.
    pub(crate) fn poll_opener_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Poll::Ready(error) = self.poll_opener_cut(cx) {
            return Poll::Ready(error);
        }
        self.raw.poll_stopped(cx)
    }

    fn count_received(&self, count: usize) {
        self.read_monitor.count_read(count);
        self.bytes.add_received(count);
        self.traffic
            .bytes_in
            .fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Writes bytes from the front of `data`, like `poll_write`, and removes them from `data`. Does
    /// not copy them if the transport can queue [`Bytes`].
    pub(crate) fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        data: &mut Bytes,
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(cx, |raw, cx| raw.poll_send(cx, data))
    }

    fn poll_write_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(&mut dyn RawStream, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.deferred_write_error.is_none() {
            ready!(self.read_monitor.poll_writable(cx));
            let Poll::Ready(written) = write(&mut *self.raw, cx) else {
                self.read_monitor.end_write(None);
                return Poll::Pending;
            };
            match written {
                Ok(count) => {
                    self.read_monitor.end_write(Some(count));
                    self.bytes.add_sent(count);
                    self.traffic
                        .bytes_out
                        .fetch_add(count as u64, Ordering::Relaxed);
                    return Poll::Ready(Ok(count));
                }
                Err(error) => self.deferred_write_error = Some(error),
            }
        }
        self.poll_write_error_after_read(cx).map(Err)
    }

    /// Delays the error that the peer has stopped reading until the read half has ended. The peer
    /// may have answered before, and that answer takes precedence. So a writer that does not read
    /// may wait forever; `shutdown` does not.
    fn poll_write_error_after_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let error = ready!(self.poll_deferred_write_error(cx));
        let stopped = matches!(find_cause::<StreamCut>(&error), Some(StreamCut::Stopped(_)));
        if stopped && !self.read_ended {
            self.deferred_write_error = Some(error);
            self.waiters[Half::Write as usize] = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(error)
    }

    /// Delays a write error until the reply is known, because a refusal explains the error.
    fn poll_deferred_write_error(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if let Err(refusal) = ready!(self.poll_reply(cx, Half::Write)) {
            return Poll::Ready(refusal);
        }
        Poll::Ready(
            self.deferred_write_error
                .take()
                .unwrap_or_else(|| io::ErrorKind::BrokenPipe.into()),
        )
    }
}

fn poll_reply_frame(
    raw: &mut dyn RawStream,
    buffer: &mut BytesMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<StreamReply>> {
    loop {
        if let Some(frame) = frame::take(buffer, STREAM_MESSAGE_MAX).map_err(invalid)? {
            return Poll::Ready(StreamReply::decode(&frame).map_err(invalid));
        }
        // Never read beyond the frame, because the following bytes belong to the reader.
        let bytes_needed = frame::bytes_needed(buffer, STREAM_MESSAGE_MAX)
            .map_err(invalid)?
            .min(512);
        let mut chunk = [0; 512];
        let mut chunk = ReadBuf::new(&mut chunk[..bytes_needed]);
        ready!(Pin::new(&mut *raw).poll_read(cx, &mut chunk))?;
        if chunk.filled().is_empty() {
            return Poll::Ready(Err(StreamCut::NoReply.into()));
        }
        buffer.extend_from_slice(chunk.filled());
    }
}

fn invalid(error: FrameError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_reply(cx, Half::Read))?;
        let before = out.filled().len();
        if this.is_read_registered && out.remaining() > 0 && this.read_monitor.register_again(cx) {
            return Poll::Pending;
        }
        let waker = this.read_monitor.begin_read(cx);
        let mut read_cx = Context::from_waker(&waker);
        let read = Pin::new(&mut this.raw).poll_read(&mut read_cx, out);
        this.is_read_registered = read.is_pending();
        let read = ready!(read);
        this.read_monitor.end_read();
        let count = out.filled().len() - before;
        if read.is_err() || (count == 0 && out.remaining() > 0) {
            this.end_reading();
        }
        read?;
        this.count_received(count);
        this.note_reply(&out.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut()
            .poll_write_with(cx, |raw, cx| Pin::new(raw).poll_write(cx, data))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.deferred_write_error.is_none() {
            match ready!(Pin::new(&mut this.raw).poll_flush(cx)) {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(error) => this.deferred_write_error = Some(error),
            }
        }
        this.poll_write_error_after_read(cx).map(Err)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.shut_down = true;
        if this.deferred_write_error.is_none() {
            match ready!(Pin::new(&mut this.raw).poll_shutdown(cx)) {
                Ok(()) => return Poll::Ready(Ok(())),
                Err(error) => this.deferred_write_error = Some(error),
            }
        }
        this.poll_deferred_write_error(cx).map(Err)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.is_counted {
            self.traffic.streams.fetch_sub(1, Ordering::Relaxed);
        }
        if !self.shut_down {
            let code = match self.read_monitor.must_end() {
                true => ResetCode::ReaderStalled,
                false => ResetCode::Dropped,
            };
            self.cut_behind(code);
        } else if !self.read_ended {
            self.raw.stop(ResetCode::Dropped);
        }
        self.read_monitor.exclude();
    }
}

tunnel_process::partial_debug!(Stream {
    bytes,
    shut_down,
    read_ended
});

#[cfg(test)]
mod tests;
