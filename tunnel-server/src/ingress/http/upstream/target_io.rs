//! The bytes of an HTTP connection to a target: a stream, TLS inside a stream, or a socket.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker, ready};

use bytes::BufMut;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio_rustls::client::TlsStream;
use tokio_util::io::poll_read_buf;
use tunnel_proto::egress::TargetSocket;
use tunnel_proto::relay::PollCut;
use tunnel_proto::transport::{CutSignal, Stream};
use tunnel_proto::wire::code::ResetCode;

use super::sent_head::SentHead;
use crate::ingress::http::unread::UnreadBytes;
use crate::ingress::http::upload_queue::UploadQueue;

/// Interim responses (1xx) to one request that are skipped. More are an error.
pub(super) const INTERIM_MAX: usize = 64;

/// Bytes that one read returns at most. hyper makes one piece of each read of a body, and holds a whole
/// piece beyond its limit for a caller that takes nothing. When a read has filled the buffer of a
/// connection, hyper doubles it, up to the size of the largest head. One byte less than 64 KiB leaves
/// it at 64 KiB.
const READ_MAX_BYTES: usize = (64 << 10) - 1;

/// First bytes of a TLS alert (RFC 8446, section 5.1), with which a TLS server answers plain HTTP.
const TLS_ALERT: [u8; 2] = [21, 3];

/// What is known about the bytes of a connection to a target.
#[derive(Debug)]
pub(super) struct TargetTraffic {
    /// Number of HTTP bytes. With TLS, the bytes inside TLS count.
    bytes: AtomicU64,
    /// Whether the first bytes were a TLS alert.
    is_alert: AtomicBool,
    /// The next write begins with a head that is to be kept.
    is_head_due: AtomicBool,
    head: Mutex<Option<SentHead>>,
    /// Number of interim responses to the request in progress.
    interim: AtomicUsize,
    /// Notified when these are too many.
    interim_exceeded: Notify,
    pub(super) upload_queue: Arc<UploadQueue>,
}

impl TargetTraffic {
    pub(super) fn new(upload_queue: UploadQueue) -> Self {
        Self {
            bytes: AtomicU64::new(0),
            is_alert: AtomicBool::new(false),
            is_head_due: AtomicBool::new(false),
            head: Mutex::default(),
            interim: AtomicUsize::new(0),
            interim_exceeded: Notify::new(),
            upload_queue: Arc::new(upload_queue),
        }
    }

    /// Returns the number of HTTP bytes that the target has sent. An unchanged number shows that the
    /// target has not responded at all to a request.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn is_alert(&self) -> bool {
        self.is_alert.load(Ordering::Relaxed)
    }

    /// Keeps the head of the next request, which has no body, until [`Self::take_head`].
    pub(super) fn keep_head(&self) {
        self.is_head_due.store(true, Ordering::Relaxed);
    }

    /// Returns the head of the request in progress, if hyper has begun to write it.
    pub(super) fn take_head(&self) -> Option<SentHead> {
        self.is_head_due.store(false, Ordering::Relaxed);
        self.head.lock().take()
    }

    /// Records what hyper writes. Its first write has the whole head, and the rest of it again if the
    /// connection takes a part.
    fn write(&self, data: &[u8]) {
        if self.is_head_due.load(Ordering::Relaxed) {
            self.is_head_due.store(false, Ordering::Relaxed);
            *self.head.lock() = Some(data.into());
        }
    }

    /// Begins a request.
    pub(super) fn begin_request(&self) {
        self.interim.store(0, Ordering::Relaxed);
    }

    /// Records an interim response.
    pub(super) fn record_interim(&self) {
        if self.interim.fetch_add(1, Ordering::Relaxed) >= INTERIM_MAX {
            self.interim_exceeded.notify_one();
        }
    }

    /// Waits until there are more than [`INTERIM_MAX`] interim responses. Cancel-safe.
    pub(super) async fn too_many_interim(&self) {
        // A notification can be one of an earlier request.
        while self.interim.load(Ordering::Relaxed) <= INTERIM_MAX {
            self.interim_exceeded.notified().await;
        }
    }

    fn read(&self, data: &[u8]) {
        let before = self.bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
        if before == 0 && data.starts_with(&TLS_ALERT) {
            self.is_alert.store(true, Ordering::Relaxed);
        }
    }
}

/// What carries the bytes of a connection to a target.
#[derive(Debug)]
pub(in crate::ingress) enum TargetConn {
    Stream(Stream),
    Tls(Box<TlsStream<Stream>>),
    /// A connection that the server dialed.
    Direct(Arc<DirectSocket>),
}

/// A socket to a target, which can be asked for a cut while hyper does not read it.
#[derive(Debug)]
pub(in crate::ingress) struct DirectSocket(Mutex<TargetSocket>);

impl From<TargetSocket> for DirectSocket {
    fn from(socket: TargetSocket) -> Self {
        Self(Mutex::new(socket))
    }
}

impl CutSignal for DirectSocket {
    fn is_cut(&self) -> bool {
        let cx = &mut Context::from_waker(Waker::noop());
        self.0.lock().poll_cut(cx).is_ready()
    }
}

/// A connection to a target that counts what it reads.
#[derive(Debug)]
pub(in crate::ingress) struct TargetIo {
    conn: TargetConn,
    traffic: Arc<TargetTraffic>,
    /// Bytes behind a 101.
    unread: UnreadBytes,
}

/// Evaluates an expression for the connection of any kind.
macro_rules! on_conn {
    ($io:expr, $conn:ident => $action:expr) => {
        match &mut $io.conn {
            TargetConn::Stream($conn) => $action,
            TargetConn::Tls($conn) => $action,
            TargetConn::Direct(socket) => {
                let $conn = &mut *socket.0.lock();
                $action
            }
        }
    };
}

impl TargetIo {
    pub(super) fn new(conn: TargetConn, traffic: Arc<TargetTraffic>) -> Self {
        Self {
            conn,
            traffic,
            unread: UnreadBytes::default(),
        }
    }

    /// Cuts the connection. A stream stays behind the bytes that were written.
    pub(in crate::ingress) fn cut_behind(self) {
        match self.conn {
            TargetConn::Stream(mut stream) => stream.cut_behind(ResetCode::PeerCut),
            TargetConn::Tls(mut tls) => tls.get_mut().0.cut_behind(ResetCode::PeerCut),
            // The drop resets it.
            TargetConn::Direct(_) => {}
        }
    }

    /// Takes the connection back from hyper after a 101.
    ///
    /// # Errors
    /// The connection as it was, if it is no connection to a target.
    pub(in crate::ingress) fn from_upgraded(upgraded: Upgraded) -> Result<Self, Upgraded> {
        let parts = upgraded.downcast::<TokioIo<Self>>()?;
        let mut io = parts.io.into_inner();
        io.unread = parts.read_buf.into();
        Ok(io)
    }
}

impl PollCut for TargetIo {
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        on_conn!(self, conn => PollCut::poll_cut(conn, cx))
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        on_conn!(self, conn => PollCut::poll_gone(conn, cx))
    }

    fn bytes_sent(&mut self) -> u64 {
        on_conn!(self, conn => PollCut::bytes_sent(conn))
    }

    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

impl AsyncRead for TargetIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.read(out) {
            return Poll::Ready(Ok(()));
        }
        let before = out.filled().len();
        let mut piece = (&mut *out).limit(READ_MAX_BYTES);
        ready!(on_conn!(self, conn => poll_read_buf(Pin::new(conn), cx, &mut piece)))?;
        self.traffic
            .read(out.filled().get(before..).unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TargetIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.traffic.write(data);
        let written = on_conn!(self, conn => Pin::new(conn).poll_write(cx, data));
        self.traffic.upload_queue.record_write(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.traffic
            .write(data.first().map_or(&[][..], |first| &**first));
        let written = on_conn!(self, conn => Pin::new(conn).poll_write_vectored(cx, data));
        self.traffic.upload_queue.record_write(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        match &self.conn {
            TargetConn::Stream(conn) => conn.is_write_vectored(),
            TargetConn::Tls(conn) => conn.is_write_vectored(),
            TargetConn::Direct(socket) => socket.0.lock().is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper flushes when its own queue is empty.
        self.traffic.upload_queue.record_flush();
        on_conn!(self, conn => Pin::new(conn).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_conn!(self, conn => Pin::new(conn).poll_shutdown(cx))
    }
}
