//! The TLS connection below h2. It records what h2 does not report: how much was received, and
//! whether everything was written.
//!
//! h2 reads no frame while a PING, the answer to one, or SETTINGS waits to be written. If the socket
//! takes no more data, this end would receive nothing for as long as that lasts: it would suspect a
//! peer that sends all the time, and two ends that send much could wait for each other for ever. In
//! this case the connection keeps what h2 has to write until the socket takes it, see
//! [`ConnState::keep_writes`].

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::control_rate::ControlRate;
use crate::tls;

/// Bytes that h2 reads in one poll of the driver. Many small frames must not accumulate inside h2,
/// because h2 would close the connection. After each poll the driver moves them to their streams.
const READ_PER_POLL_MAX: usize = 256 * 1024;
/// Bytes that the connection keeps for the socket, above which h2 waits, and reads nothing. More than
/// the streams hand to h2 while the socket is blocked, and one PING, its answer and SETTINGS.
const UNWRITTEN_MAX: usize = 512 * 1024;
/// Time for which a closed connection continues to read. A close with unread data would send a
/// reset, and the peer would lose the last data.
const LINGER: Duration = Duration::from_secs(1);

/// The state of the connection below h2, for the driver.
#[derive(Debug)]
pub(super) struct ConnState {
    received: AtomicU64,
    /// Time of the last poll of the driver that received something.
    received_at: Mutex<Instant>,
    read_this_poll: AtomicUsize,
    /// Whether h2 has read, or tried to, since its poll began.
    has_tried_to_read: AtomicBool,
    /// Whether the connection keeps what the socket does not take.
    keeps_writes: AtomicBool,
    /// Whether the socket takes no more of h2's output.
    is_blocked: AtomicBool,
    /// Time at which the socket was last blocked no longer.
    unblocked_at: Mutex<Instant>,
    ending: AtomicBool,
    is_eof_deferred: AtomicBool,
    /// The TLS alert that ended the connection; otherwise close_notify (0). h2 preserves only the
    /// text of an error.
    alert: AtomicU8,
}

impl ConnState {
    pub(super) fn new() -> Self {
        Self {
            received: AtomicU64::new(0),
            received_at: Mutex::new(Instant::now()),
            read_this_poll: AtomicUsize::new(0),
            has_tried_to_read: AtomicBool::new(false),
            keeps_writes: AtomicBool::new(false),
            is_blocked: AtomicBool::new(false),
            unblocked_at: Mutex::new(Instant::now()),
            ending: AtomicBool::new(false),
            is_eof_deferred: AtomicBool::new(false),
            alert: AtomicU8::new(0),
        }
    }

    /// Returns the number of bytes received inside TLS.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns the time at which bytes were last received, or the begin of the connection.
    pub(super) fn received_at(&self) -> Instant {
        *self.received_at.lock()
    }

    pub(super) fn begin_poll(&self) {
        self.read_this_poll.store(0, Ordering::Relaxed);
    }

    /// Records that a poll of h2 begins.
    pub(super) fn begin_h2_poll(&self) {
        self.has_tried_to_read.store(false, Ordering::Relaxed);
    }

    /// Keeps what h2 writes until h2 reads, if it did not try to because the socket is blocked.
    /// Returns whether h2 must be polled again. It is polled again once only, because h2 also reads
    /// nothing when [`UNWRITTEN_MAX`] bytes are kept.
    pub(super) fn keep_writes(&self) -> bool {
        let must_keep = !self.has_tried_to_read.load(Ordering::Relaxed) && !self.is_flushed();
        let kept_before = self.keeps_writes.swap(must_keep, Ordering::Relaxed);
        must_keep && !kept_before
    }

    fn begin_read(&self) {
        self.has_tried_to_read.store(true, Ordering::Relaxed);
        self.keeps_writes.store(false, Ordering::Relaxed);
    }

    /// Returns whether h2 reads no more in this poll of the driver.
    pub(super) fn is_read_limited(&self) -> bool {
        self.read_this_poll.load(Ordering::Relaxed) >= READ_PER_POLL_MAX
    }

    /// Returns whether all output of h2 has been written to the socket. True after h2 was polled
    /// and wrote everything.
    pub(super) fn is_flushed(&self) -> bool {
        !self.is_blocked.load(Ordering::Relaxed)
    }

    /// Returns the time since which the socket has taken all output of h2, if it does.
    pub(super) fn flushed_since(&self) -> Option<Instant> {
        self.is_flushed().then(|| *self.unblocked_at.lock())
    }

    /// Returns whether the connection has ended and h2 has not been informed yet. h2 forgets which
    /// halves were complete when it sees the end, so the driver takes out its data first.
    pub(super) fn has_eof(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// Returns the TLS alert by which the peer ended the connection, or 0.
    pub(super) fn alert(&self) -> u8 {
        self.alert.load(Ordering::Relaxed)
    }

    /// Hides the end of the connection from h2 until [`ConnState::release_eof`].
    pub(super) fn defer_eof(&self) {
        self.is_eof_deferred.store(true, Ordering::Relaxed);
    }

    /// Lets h2 see the end of the connection.
    pub(super) fn release_eof(&self) {
        self.is_eof_deferred.store(false, Ordering::Relaxed);
    }

    fn record_read(&self, count: usize) {
        self.received.fetch_add(count as u64, Ordering::Relaxed);
        // One reading of the clock for each poll of the driver is precise enough.
        if self.read_this_poll.fetch_add(count, Ordering::Relaxed) == 0 {
            *self.received_at.lock() = Instant::now();
        }
    }

    fn record_write(&self, is_pending: bool) {
        let was_blocked = self.is_blocked.swap(is_pending, Ordering::Relaxed);
        if was_blocked && !is_pending {
            *self.unblocked_at.lock() = Instant::now();
        }
    }
}

/// The connection, wrapped for h2.
pub(super) struct ConnIo<S> {
    inner: S,
    conn_state: Arc<ConnState>,
    control_rate: ControlRate,
    /// What h2 has written and the socket has not taken.
    unwritten: BytesMut,
    end: Option<io::Result<()>>,
    linger: Option<Pin<Box<Sleep>>>,
}

impl<S> ConnIo<S> {
    /// Wraps a connection whose peer sends `preface` bytes before its first frame.
    pub(super) fn new(inner: S, preface: usize) -> (Self, Arc<ConnState>) {
        let conn_state = Arc::new(ConnState::new());
        let io = Self {
            inner,
            conn_state: conn_state.clone(),
            control_rate: ControlRate::new(preface),
            unwritten: BytesMut::new(),
            end: None,
            linger: None,
        };
        (io, conn_state)
    }
}

impl<S: AsyncWrite + Unpin> ConnIo<S> {
    /// Writes what is kept.
    fn poll_kept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.unwritten.has_remaining() {
            let count = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.unwritten))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unwritten.advance(count);
        }
        self.unwritten = BytesMut::new();
        Poll::Ready(Ok(()))
    }

    fn keeps_writes(&self) -> bool {
        self.conn_state.keeps_writes.load(Ordering::Relaxed)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ConnIo<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.conn_state.begin_read();
        if self.conn_state.is_read_limited() {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.end.is_none() {
            let before = out.filled().len();
            let mut read = ready!(Pin::new(&mut self.inner).poll_read(cx, out));
            let count = out.filled().len() - before;
            if let Some(bytes) = out.filled().get(before..)
                && let Err(flood) = self.control_rate.received(bytes)
            {
                read = Err(io::Error::new(io::ErrorKind::InvalidData, flood));
            }
            if read.is_ok() && count > 0 {
                self.conn_state.record_read(count);
                return Poll::Ready(Ok(()));
            }
            if let Some(alert) = read.as_ref().err().and_then(tls::received_alert) {
                self.conn_state.alert.store(alert, Ordering::Relaxed);
            }
            self.end = Some(read);
            self.conn_state.ending.store(true, Ordering::Relaxed);
        }
        if self.conn_state.is_eof_deferred.load(Ordering::Relaxed) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(self.end.take().unwrap_or(Ok(())))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ConnIo<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(data)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let mut written = match this.poll_kept(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut this.inner).poll_write_vectored(cx, data),
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending => Poll::Pending,
        };
        this.conn_state.record_write(written.is_pending());
        if written.is_pending() && this.keeps_writes() && this.unwritten.len() < UNWRITTEN_MAX {
            let before = this.unwritten.len();
            for piece in data {
                this.unwritten.extend_from_slice(piece);
            }
            written = Poll::Ready(Ok(this.unwritten.len() - before));
        }
        if let Poll::Ready(Ok(count)) = written {
            this.control_rate.sent(count);
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let flushed = match this.poll_kept(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut this.inner).poll_flush(cx),
            not_written => not_written,
        };
        this.conn_state.record_write(flushed.is_pending());
        if flushed.is_pending() && this.keeps_writes() {
            return Poll::Ready(Ok(()));
        }
        flushed
    }

    /// Sends close_notify and FIN. Then reads the peer's last bytes until the peer closes, for at
    /// most [`LINGER`].
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let linger = match &mut this.linger {
            Some(linger) => linger,
            None => {
                // h2 considers what is kept as written: GOAWAY may be the last of it.
                ready!(this.poll_kept(cx))?;
                ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
                this.linger.insert(Box::pin(sleep(LINGER)))
            }
        };
        let mut discarded = [0; 4096];
        while linger.as_mut().poll(cx).is_pending() {
            let mut discarded = ReadBuf::new(&mut discarded);
            match ready!(Pin::new(&mut this.inner).poll_read(cx, &mut discarded)) {
                Ok(()) if !discarded.filled().is_empty() => {}
                Ok(()) | Err(_) => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}
