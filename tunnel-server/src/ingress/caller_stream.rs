//! A door's socket: closes without losing the answer, or aborts so that a cut is never taken for a clean end; and tells when
//! the caller has gone, whatever of its input is unread.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Sleep, timeout};
use tracing::debug;
use tunnel_proto::tcp;

/// After our FIN the rest of a caller's input is read away for at most this long: closing with unread input would reset
/// the connection and with it the end of the answer.
const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// What must happen to a caller's connection when it ends; shared by the socket and whatever answers on it.
#[derive(Debug, Default)]
pub struct CloseMode {
    cut: AtomicBool,
    /// Answers that have begun and not ended.
    open_responses: AtomicUsize,
    /// At least one answer or stream has begun.
    has_started: AtomicBool,
    /// The connection carries an upgraded stream, where a half-close is only that.
    upgraded: AtomicBool,
}

impl CloseMode {
    /// From here on the connection is aborted: no further byte, no close_notify, a TCP reset.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Keeps half-closes as they are.
    pub fn upgrade(&self) {
        self.upgraded.store(true, Ordering::Relaxed);
    }

    /// Marks an answer or stream as begun: unless it is finished, the connection ends in a reset.
    #[must_use]
    pub fn start(self: &Arc<Self>) -> ResponseGuard {
        self.has_started.store(true, Ordering::Relaxed);
        self.open_responses.fetch_add(1, Ordering::Relaxed);
        ResponseGuard {
            close_mode: self.clone(),
            finished: false,
        }
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }
}

/// See [`CloseMode::start`].
#[derive(Debug)]
pub struct ResponseGuard {
    close_mode: Arc<CloseMode>,
    finished: bool,
}

impl ResponseGuard {
    /// The answer or stream is complete.
    pub fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        if !self.finished {
            self.close_mode.cut();
        }
        self.close_mode
            .open_responses
            .fetch_sub(1, Ordering::Relaxed);
    }
}

/// A caller's socket. On a Unix socket nothing tells a cut from an end: what speaks through it has to, as TLS and framed
/// HTTP do.
#[derive(Debug)]
pub enum CallerSocket {
    /// TCP.
    Tcp(TcpStream),
    /// A Unix stream.
    Unix(UnixStream),
}

impl From<TcpStream> for CallerSocket {
    fn from(socket: TcpStream) -> Self {
        if let Err(error) = tcp::configure(&socket) {
            debug!(%error, "cannot set options of a caller's socket");
        }
        Self::Tcp(socket)
    }
}

impl From<UnixStream> for CallerSocket {
    fn from(socket: UnixStream) -> Self {
        Self::Unix(socket)
    }
}

/// The same on whichever socket it is.
macro_rules! on_either {
    ($either:expr, $socket:ident => $action:expr) => {
        match $either {
            CallerSocket::Tcp($socket) => $action,
            CallerSocket::Unix($socket) => $action,
        }
    };
}

impl CallerSocket {
    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self, socket => socket.poll_write_ready(cx))
    }

    fn try_write_vectored(&self, data: &[io::IoSlice<'_>]) -> io::Result<usize> {
        on_either!(self, socket => socket.try_write_vectored(data))
    }

    fn poll_read(&self, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(on_either!(self, socket => socket.poll_read_ready(cx)))?;
            match on_either!(self, socket => socket.try_read_buf(out)) {
                Ok(_) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    async fn ready(&self, interest: Interest) -> io::Result<()> {
        on_either!(self, socket => socket.ready(interest).await.map(drop))
    }

    fn finish(&self) -> io::Result<()> {
        on_either!(self, socket => tcp::finish(socket))
    }

    fn abort_on_close(&self) -> io::Result<()> {
        match self {
            Self::Tcp(socket) => tcp::abort_on_close(socket),
            Self::Unix(_) => Ok(()),
        }
    }
}

/// A caller's connection.
#[derive(Debug)]
pub struct CallerStream {
    /// Shared with [`CallerClosed`] alone, which must not outlive the work on the connection.
    socket: Arc<CallerSocket>,
    close_mode: Arc<CloseMode>,
    fin_sent: bool,
    linger: Option<Pin<Box<Sleep>>>,
}

impl CallerStream {
    /// Wraps an accepted connection.
    #[must_use]
    pub fn new(socket: impl Into<CallerSocket>, close_mode: Arc<CloseMode>) -> Self {
        Self {
            socket: Arc::new(socket.into()),
            close_mode,
            fin_sent: false,
            linger: None,
        }
    }

    /// A watch for the caller's end.
    #[must_use]
    pub fn caller_closed(&self) -> CallerClosed {
        CallerClosed(Some(self.socket.clone()))
    }

    fn aborted(&self) -> Option<io::Error> {
        self.close_mode
            .is_cut()
            .then(|| io::Error::new(io::ErrorKind::ConnectionAborted, "response was aborted"))
    }

    fn poll_send(
        &self,
        cx: &mut Context<'_>,
        mut send: impl FnMut(&CallerSocket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.aborted() {
            return Poll::Ready(Err(error));
        }
        loop {
            ready!(self.socket.poll_write_ready(cx))?;
            match send(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return Poll::Ready(sent),
            }
        }
    }

    /// Reads the caller's remaining input away until it closes too.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let sleep = self
            .linger
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER_LIMIT)));
        if sleep.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        loop {
            let mut scratch = [0; 4096];
            let mut scratch = ReadBuf::new(&mut scratch);
            match ready!(self.socket.poll_read(cx, &mut scratch)) {
                Ok(()) if !scratch.filled().is_empty() => {}
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
    }
}

/// Tells when a caller has ended its direction. hyper reads no further than it needs, so it does not see a FIN behind a
/// pipelined request or behind a body that the target does not take.
#[derive(Debug)]
pub struct CallerClosed(Option<Arc<CallerSocket>>);

impl CallerClosed {
    /// For callers that never go.
    #[cfg(test)]
    pub(super) fn never() -> Self {
        Self(None)
    }

    /// Ready once the caller's FIN or reset has come, unread input or not. Cancel-safe. On systems other than Linux never:
    /// there the end is noticed when all before it was read.
    pub async fn closed(&self) {
        #[cfg(any(target_os = "linux", target_os = "android"))]
        if let Some(socket) = &self.0
            // Of all interests this is the one that unread input does not satisfy, while the end of the input does.
            && let Ok(_read_closed) = socket.ready(Interest::PRIORITY).await
        {
            return;
        }
        std::future::pending().await
    }
}

impl CallerClosed {
    /// Whether [`CallerClosed::readable`] works on this connection.
    pub(super) fn can_wait(&self) -> bool {
        self.0.is_some()
    }

    /// Waits until the caller has sent something, or has ended the connection. Cancel-safe.
    pub(super) async fn readable(&self) {
        match &self.0 {
            // An error is for the read that follows.
            Some(socket) => drop(socket.ready(Interest::READABLE).await),
            None => std::future::pending().await,
        }
    }
}

impl AsyncRead for CallerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.socket.poll_read(cx, out)
    }
}

impl AsyncWrite for CallerStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(
            cx,
            |socket| on_either!(socket, socket => socket.try_write(data)),
        )
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |socket| socket.try_write_vectored(data))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// A socket holds nothing back.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.aborted() {
            return Poll::Ready(Err(error));
        }
        if !self.fin_sent {
            self.socket.finish()?;
            self.fin_sent = true;
        }
        if !self.close_mode.upgraded.load(Ordering::Relaxed) {
            ready!(self.poll_linger(cx));
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for CallerStream {
    fn drop(&mut self) {
        // Without a FIN the end of the last answer may still be in somebody's buffer: a close would look like the end of
        // an answer that is delimited by it.
        let open_ended = self.close_mode.has_started.load(Ordering::Relaxed) && !self.fin_sent;
        let open_responses = self.close_mode.open_responses.load(Ordering::Relaxed) > 0;
        if (self.close_mode.is_cut() || open_ended || open_responses)
            && let Err(error) = self.socket.abort_on_close()
        {
            debug!(%error, "cannot configure the socket to reset on close");
        }
    }
}

/// Reads a caller's remaining input away until it ends, at most 1 s, so that the close does not reset what the caller has
/// not taken yet.
pub async fn discard_input<R: AsyncRead + Unpin>(caller: &mut R) {
    let _timed_out = timeout(
        LINGER_LIMIT,
        tokio::io::copy(caller, &mut tokio::io::sink()),
    )
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_get_small_answers_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _caller = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let socket = CallerStream::new(accepted, Arc::default());
        let CallerSocket::Tcp(tcp) = &*socket.socket else {
            panic!("a TCP socket became {socket:?}");
        };
        assert!(tcp.nodelay().unwrap());
    }
}
