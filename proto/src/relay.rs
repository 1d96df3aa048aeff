//! Copies bytes in both directions between a socket and a stream. A half-close is forwarded, and a
//! cut on one side is forwarded to the other.
//!
//! - End of input on one side becomes `shutdown` of the other side. The opposite direction
//!   continues.
//! - A failed read means that bytes may be missing. The relay ends at once with [`RelayEnd::Cut`],
//!   and the caller drops both sides such that each peer sees a cut (a stream resets on drop; a TCP
//!   socket needs zero linger).
//! - A failed write ends only its direction. The other side may still be sending a complete answer
//!   (a server that answers and closes before it has read the whole request).

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

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
    /// Both inputs ended, but this side stopped reading before it had received everything, as TCP
    /// peers may.
    ReaderClosed(RelaySide),
    /// A read from this side failed. Bytes may be missing on the other side.
    Cut(RelaySide, io::Error),
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
pub async fn relay<L, R>(left: &mut L, right: &mut R) -> RelayOutcome
where
    L: AsyncRead + AsyncWrite + Unpin + ?Sized,
    R: AsyncRead + AsyncWrite + Unpin + ?Sized,
{
    let (mut left_to_right, mut right_to_left) = (Direction::new(), Direction::new());
    let end = poll_fn(|cx| {
        let first = left_to_right
            .poll(cx, left, right)
            .map_err(|error| RelayEnd::Cut(RelaySide::Left, error));
        let second = right_to_left
            .poll(cx, right, left)
            .map_err(|error| RelayEnd::Cut(RelaySide::Right, error));
        match (first, second) {
            (Poll::Ready(Err(end)), _) | (_, Poll::Ready(Err(end))) => Poll::Ready(end),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => {
                Poll::Ready(if left_to_right.reader_closed {
                    RelayEnd::ReaderClosed(RelaySide::Right)
                } else if right_to_left.reader_closed {
                    RelayEnd::ReaderClosed(RelaySide::Left)
                } else {
                    RelayEnd::Clean
                })
            }
            (Poll::Pending, _) | (_, Poll::Pending) => Poll::Pending,
        }
    })
    .await;
    RelayOutcome {
        left_to_right: left_to_right.bytes_copied,
        right_to_left: right_to_left.bytes_copied,
        end,
    }
}

/// The states of one direction: copying until the input ends, shutting down the output, done.
enum Phase {
    Copying,
    ShuttingDown,
    Done,
}

struct Direction {
    phase: Phase,
    /// Set only while the direction holds data, so an idle stream has no buffer.
    buffer: Option<Buffer>,
    start: usize,
    end: usize,
    bytes_copied: u64,
    unflushed: bool,
    reader_closed: bool,
}

impl Direction {
    fn new() -> Self {
        Self {
            phase: Phase::Copying,
            buffer: None,
            start: 0,
            end: 0,
            bytes_copied: 0,
            unflushed: false,
            reader_closed: false,
        }
    }

    /// Polls one direction. Returns an error only if the input was cut.
    fn poll<I, O>(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut I,
        output: &mut O,
    ) -> Poll<io::Result<()>>
    where
        I: AsyncRead + Unpin + ?Sized,
        O: AsyncWrite + Unpin + ?Sized,
    {
        // A fast direction must not starve the other direction or other tasks.
        let coop = ready!(tokio::task::coop::poll_proceed(cx));
        loop {
            match self.phase {
                Phase::Copying => {
                    while self.start < self.end {
                        let buffered = self.buffer.as_deref().unwrap_or_default();
                        let data = &buffered[self.start..self.end];
                        match ready!(Pin::new(&mut *output).poll_write(cx, data)) {
                            Ok(count) if count > 0 => {
                                self.start += count;
                                self.bytes_copied += count as u64;
                                self.unflushed = true;
                                coop.made_progress();
                            }
                            Ok(_) | Err(_) => return self.reader_closed(),
                        }
                    }
                    match self.poll_fill(cx, input) {
                        Poll::Ready(Ok(0)) => self.phase = Phase::ShuttingDown,
                        Poll::Ready(Ok(_)) => coop.made_progress(),
                        Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                        Poll::Pending => {
                            // The input is idle, so written data must not stay in the output's
                            // buffers.
                            if self.unflushed {
                                if ready!(Pin::new(&mut *output).poll_flush(cx)).is_err() {
                                    return self.reader_closed();
                                }
                                self.unflushed = false;
                            }
                            return Poll::Pending;
                        }
                    }
                }
                Phase::ShuttingDown => {
                    if ready!(Pin::new(&mut *output).poll_shutdown(cx)).is_err() {
                        return self.reader_closed();
                    }
                    self.phase = Phase::Done;
                }
                Phase::Done => return Poll::Ready(Ok(())),
            }
        }
    }

    fn reader_closed(&mut self) -> Poll<io::Result<()>> {
        self.reader_closed = true;
        self.phase = Phase::Done;
        self.buffer = None;
        Poll::Ready(Ok(()))
    }

    fn poll_fill<I: AsyncRead + Unpin + ?Sized>(
        &mut self,
        cx: &mut Context<'_>,
        input: &mut I,
    ) -> Poll<io::Result<usize>> {
        // The buffer returns to the pool if the read is pending.
        let mut buffer = self.buffer.take().unwrap_or_else(Buffer::take);
        let mut read = ReadBuf::new(&mut buffer);
        ready!(Pin::new(input).poll_read(cx, &mut read))?;
        (self.start, self.end) = (0, read.filled().len());
        self.buffer = (self.end > 0).then_some(buffer);
        Poll::Ready(Ok(self.end))
    }
}

/// Size of a buffer. A larger one gains little: this is four TLS records, or the amount that a busy
/// socket returns from one read.
const BUFFER_BYTES: usize = 64 * 1024;
/// Buffers that a thread pools. One serves all of its connections in turn. More are in use only if
/// a reader is slow.
const BUFFERS_PER_THREAD: usize = 4;

thread_local! {
    static POOL: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// A buffer of [`BUFFER_BYTES`] with unspecified content. Dropping it returns it to the thread's
/// pool.
#[derive(Debug)]
pub(crate) struct Buffer(Box<[u8]>);

impl Buffer {
    /// Takes a buffer from the pool, or allocates one.
    pub(crate) fn take() -> Self {
        // Access fails only while the thread ends.
        let pooled = POOL.try_with(|pool| pool.borrow_mut().pop()).ok().flatten();
        Self(pooled.unwrap_or_else(|| vec![0; BUFFER_BYTES].into_boxed_slice()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.0);
        let _thread_exits = POOL.try_with(|pool| {
            let mut pool = pool.borrow_mut();
            if pool.len() < BUFFERS_PER_THREAD {
                pool.push(buffer);
            }
        });
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio_util::task::AbortOnDropHandle;

    use super::*;

    #[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
    fn start() -> (DuplexStream, DuplexStream, AbortOnDropHandle<RelayOutcome>) {
        let (left, mut left_inner) = duplex(1024);
        let (right, mut right_inner) = duplex(1024);
        let task = tokio::spawn(async move { relay(&mut left_inner, &mut right_inner).await });
        (left, right, AbortOnDropHandle::new(task))
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
        let mut left = tokio::io::join(FailingReader, tokio::io::sink());
        let (mut right, _keep) = duplex(64);
        let outcome = relay(&mut left, &mut right).await;
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

    /// Each stream has a relay at either end for as long as it is open.
    #[test]
    fn relay_is_small() {
        let ((mut left, _), (mut right, _)) = (duplex(1), duplex(1));
        let size = size_of_val(&relay(&mut left, &mut right));
        assert!(size <= 256, "{size} bytes");
    }

    #[tokio::test]
    async fn quiet_stream_holds_no_buffer() {
        let mut direction = Direction::new();
        let ((mut left, mut far_left), (mut right, mut far_right)) = (duplex(64), duplex(64));
        far_left.write_all(b"question").await.unwrap();
        poll_fn(|cx| {
            assert!(direction.poll(cx, &mut left, &mut right).is_pending());
            Poll::Ready(())
        })
        .await;
        let mut got = [0; 8];
        far_right.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"question");
        assert!(direction.buffer.is_none());
    }

    #[test]
    fn buffer_that_was_dropped_is_used_again() {
        let mut first = Buffer::take();
        first[0] = 7;
        let address = first.as_ptr();
        drop(first);
        let reused = Buffer::take();
        assert_eq!((reused.as_ptr(), reused[0]), (address, 7));
    }

    #[test]
    fn thread_keeps_a_few() {
        let buffers: Vec<_> = (0..3 * BUFFERS_PER_THREAD)
            .map(|_| Buffer::take())
            .collect();
        drop(buffers);
        POOL.with(|pool| assert_eq!(pool.borrow().len(), BUFFERS_PER_THREAD));
    }
}
