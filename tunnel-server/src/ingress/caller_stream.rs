//! The socket of a caller. The socket closes without losing the end of the response, or aborts so
//! that a caller never takes an aborted response for a complete one. The socket also reports that
//! the caller has disconnected, even while input is unread.

use std::io;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::time::{Sleep, timeout};
use tracing::debug;
use tunnel_proto::relay::PollCut;
use tunnel_proto::tcp::{self, ConnError, Failed};
use tunnel_proto::transport::CUT_LIMIT;

/// Longest time for which the server discards the rest of a caller's input after the server's FIN.
/// Closing with unread input would reset the connection and lose the end of the response.
const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// What determines how a caller's connection closes. The socket and the tasks that respond on it share
/// this state.
#[derive(Debug, Default)]
pub struct CloseState {
    cut: AtomicBool,
    /// Responses that have begun and have not ended.
    open_responses: AtomicUsize,
    /// At least one response or stream has begun.
    has_started: AtomicBool,
    /// The connection carries an upgraded stream. The server's FIN is then a half-close, and the
    /// caller's input is not discarded.
    upgraded: AtomicBool,
    /// Notified when the rules refuse what the connection carries, which then ends.
    end_signal: Arc<Notify>,
}

impl CloseState {
    /// Returns what is notified when an access of the connection has to end.
    pub(super) fn end_signal(&self) -> &Arc<Notify> {
        &self.end_signal
    }

    /// Aborts the connection: the server sends no further byte, no close_notify and a TCP reset. The
    /// next write or shutdown waits until the caller has what was written before, and then fails.
    pub fn mark_cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Cuts the connection, of which `stream` is the byte stream, or that above it. Waits until the
    /// caller has the bytes before the cut. Dropping the stream resets the connection.
    pub async fn cut_behind<W: AsyncWrite + Unpin>(&self, stream: &mut W) {
        self.mark_cut();
        // The error is the cut.
        let _cut = timeout(2 * CUT_LIMIT, stream.shutdown()).await;
    }

    /// Marks the connection as upgraded, so that half-closes are forwarded.
    pub fn upgrade(&self) {
        self.upgraded.store(true, Ordering::Relaxed);
    }

    /// Marks a response or stream as begun. The connection ends in a reset unless
    /// [`ResponseGuard::finish`] is called.
    pub fn start(self: &Arc<Self>) -> ResponseGuard {
        self.has_started.store(true, Ordering::Relaxed);
        self.open_responses.fetch_add(1, Ordering::Relaxed);
        ResponseGuard {
            close_state: self.clone(),
            finished: false,
        }
    }

    pub(super) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }
}

/// A response or stream in progress. See [`CloseState::start`].
#[derive(Debug)]
pub struct ResponseGuard {
    close_state: Arc<CloseState>,
    finished: bool,
}

impl ResponseGuard {
    /// Returns the state of the caller's connection.
    pub(super) fn close_state(&self) -> &Arc<CloseState> {
        &self.close_state
    }

    /// Marks the response or stream as complete.
    pub fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for ResponseGuard {
    fn drop(&mut self) {
        if !self.finished {
            self.close_state.mark_cut();
        }
        self.close_state
            .open_responses
            .fetch_sub(1, Ordering::Relaxed);
    }
}

/// A caller's socket. A Unix socket cannot signal an abort, so the protocol on it must mark the end
/// of its messages, as TLS and framed HTTP do.
#[derive(Debug)]
pub enum CallerSocket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl From<TcpStream> for CallerSocket {
    /// Wraps a socket of a listener with the options of [`tcp::configure`].
    fn from(socket: TcpStream) -> Self {
        Self::Tcp(socket)
    }
}

impl From<UnixStream> for CallerSocket {
    fn from(socket: UnixStream) -> Self {
        Self::Unix(socket)
    }
}

/// Evaluates an expression for the socket of either variant.
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
            match self.try_read(out) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }

    /// Reads what has arrived. A read that does not fill `out` has emptied the socket (epoll(7)), so
    /// the next one waits for more, as one of tokio does, and costs no system call that finds
    /// nothing.
    fn try_read(&self, out: &mut ReadBuf<'_>) -> io::Result<()> {
        let (room, mut has_read) = (out.remaining(), false);
        let read = on_either!(self, socket => socket.try_io(Interest::READABLE, || {
            let count = socket.try_read_buf(out)?;
            has_read = true;
            if (1..room).contains(&count) {
                // Clears the readiness.
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(())
        }));
        if has_read { Ok(()) } else { read }
    }

    async fn ready(&self, interest: Interest) -> io::Result<()> {
        on_either!(self, socket => socket.ready(interest).await.map(drop))
    }

    /// Waits until the caller has reset the connection, or its host does not answer. At a Unix
    /// socket a caller resets nothing: it has closed the socket then. A FIN is neither. Cancel-safe.
    async fn failed(&self) {
        match self {
            Self::Tcp(socket) => tcp::failed(socket).await,
            Self::Unix(socket) => {
                // Without a registration, the next write notices the end.
                if unix_closed(socket).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
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

    /// Makes the socket close with a reset, once the caller has what was written.
    async fn abort_behind(&self) {
        match self {
            Self::Tcp(socket) => tcp::abort_behind(socket, CUT_LIMIT).await,
            Self::Unix(_) => {}
        }
    }
}

/// Waits until the other end of a Unix socket has closed it. Such an end is no error, and changes
/// nothing for reads behind a FIN, so the wait needs a registration of its own, which takes no
/// interest in the FIN.
async fn unix_closed(socket: &UnixStream) -> io::Result<()> {
    let own = socket.as_fd().try_clone_to_owned()?;
    #[expect(
        deprecated,
        reason = "its replacement is unsafe for types without I/O safety, unlike `OwnedFd`"
    )]
    let registered = AsyncFd::with_interest(own, Interest::PRIORITY)?;
    let interest = Interest::PRIORITY | Interest::ERROR;
    registered.ready(interest).await.map(drop)
}

/// A caller's connection as an async byte stream.
pub struct CallerStream {
    /// Shared only with [`CallerClosed`], which must not outlive the work on the connection.
    socket: Arc<CallerSocket>,
    close_state: Arc<CloseState>,
    fin_sent: bool,
    linger: Option<Pin<Box<Sleep>>>,
    /// Bytes that the socket has accepted.
    bytes_sent: u64,
    conn_error: ConnError,
    /// Completes when the caller has the bytes before a cut.
    aborting: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    failed: Failed,
}

impl CallerStream {
    /// Wraps an accepted connection.
    pub fn new(socket: impl Into<CallerSocket>, close_state: Arc<CloseState>) -> Self {
        Self {
            socket: Arc::new(socket.into()),
            close_state,
            fin_sent: false,
            linger: None,
            bytes_sent: 0,
            conn_error: ConnError::default(),
            aborting: None,
            failed: Failed::default(),
        }
    }

    /// Returns a handle that reports the end of the caller's direction.
    pub fn caller_closed(&self) -> CallerClosed {
        CallerClosed(Some(self.socket.clone()))
    }

    /// Fails after a cut. Waits until the caller has the bytes before the cut, for at most
    /// [`CUT_LIMIT`], because the connection is dropped after the error.
    fn poll_not_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.close_state.is_cut() {
            return Poll::Ready(Ok(()));
        }
        let aborting = self.aborting.get_or_insert_with(|| {
            let socket = self.socket.clone();
            Box::pin(async move { socket.abort_behind().await })
        });
        ready!(aborting.as_mut().poll(cx));
        self.aborting = Some(Box::pin(std::future::ready(())));
        let error = io::Error::new(io::ErrorKind::ConnectionAborted, "response was aborted");
        Poll::Ready(Err(error))
    }

    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        mut send: impl FnMut(&CallerSocket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_not_cut(cx))?;
        loop {
            ready!(self.socket.poll_write_ready(cx))?;
            match send(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Ok(count) => {
                    self.bytes_sent += count as u64;
                    return Poll::Ready(Ok(count));
                }
                Err(error) => {
                    self.conn_error.record(&error);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }

    /// Discards the caller's remaining input until the caller closes its direction too, or until
    /// [`LINGER_LIMIT`].
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

/// Reports when a caller has closed its direction. hyper reads no further than it needs, so it does
/// not see a FIN behind a pipelined request or behind a body that the target does not read.
#[derive(Debug)]
pub struct CallerClosed(Option<Arc<CallerSocket>>);

impl CallerClosed {
    /// Creates a handle for a caller that never disconnects.
    #[cfg(test)]
    pub(super) fn never() -> Self {
        Self(None)
    }

    /// Completes once the caller's FIN or reset has arrived, even if input is unread. Cancel-safe.
    pub async fn closed(&self) {
        if let Some(socket) = &self.0
            // Unread input does not satisfy this interest, but the end of the input does. No other
            // interest has this property.
            && let Ok(_read_closed) = socket.ready(Interest::PRIORITY).await
        {
            return;
        }
        std::future::pending().await
    }
}

impl CallerClosed {
    /// Completes once the connection has failed, see [`CallerSocket::failed`]. Cancel-safe.
    pub(super) async fn failed(&self) {
        match &self.0 {
            Some(socket) => socket.failed().await,
            None => std::future::pending().await,
        }
    }

    /// Returns whether [`CallerClosed::readable`] works on this connection.
    pub(super) fn can_wait(&self) -> bool {
        self.0.is_some()
    }

    /// Waits until the caller has sent data or has ended the connection. Cancel-safe.
    pub(super) async fn readable(&self) {
        match &self.0 {
            // The read that follows returns the error.
            Some(socket) => drop(socket.ready(Interest::READABLE).await),
            None => std::future::pending().await,
        }
    }

    /// Returns whether the caller has sent data that was not read.
    pub(super) fn has_unread(&self) -> bool {
        let socket = self.0.as_deref();
        socket.is_some_and(|socket| on_either!(socket, socket => tcp::has_unread(socket)))
    }
}

impl PollCut for CallerStream {
    fn poll_cut(&mut self, _cx: &mut Context<'_>) -> Poll<io::Error> {
        match on_either!(&*self.socket, socket => self.conn_error.check(socket)) {
            Some(error) => Poll::Ready(error),
            None => Poll::Pending,
        }
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let socket = &self.socket;
        ready!(self.failed.poll(cx, || {
            let socket = socket.clone();
            async move { socket.failed().await }
        }));
        Poll::Ready(
            on_either!(&*self.socket, socket => self.conn_error.check(socket))
                .filter(|error| error.kind() != io::ErrorKind::BrokenPipe)
                // A caller that does not read the answer wants nothing more.
                .unwrap_or_else(|| io::ErrorKind::ConnectionReset.into()),
        )
    }

    fn bytes_sent(&mut self) -> u64 {
        self.bytes_sent
    }

    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

impl AsyncRead for CallerStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(self.socket.poll_read(cx, out))?;
        if out.filled().len() == before && out.remaining() > 0 {
            self.conn_error.end_of_input()?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for CallerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(
            cx,
            |socket| on_either!(socket, socket => socket.try_write(data)),
        )
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(cx, |socket| socket.try_write_vectored(data))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Returns at once, because a socket has no buffer to flush.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_not_cut(cx))?;
        if !self.fin_sent {
            self.socket.finish()?;
            self.fin_sent = true;
        }
        if !self.close_state.upgraded.load(Ordering::Relaxed) {
            ready!(self.poll_linger(cx));
        }
        Poll::Ready(Ok(()))
    }
}

tunnel_process::partial_debug!(CallerStream {
    socket,
    close_state
});

impl Drop for CallerStream {
    fn drop(&mut self) {
        // Without a FIN, the end of the last response may still be in a buffer. A plain close would
        // then look like the end of a response that is delimited by the close.
        let open_ended = self.close_state.has_started.load(Ordering::Relaxed) && !self.fin_sent;
        let open_responses = self.close_state.open_responses.load(Ordering::Relaxed) > 0;
        if (self.close_state.is_cut() || open_ended || open_responses)
            && let Err(error) = self.socket.abort_on_close()
        {
            debug!(%error, "cannot configure the socket to reset on close");
        }
    }
}

/// Discards a caller's remaining input until its end, for at most 1 s. A close with unread input
/// would reset the connection before the caller has read everything.
pub async fn discard_input<R: AsyncRead + Unpin>(stream: &mut R) {
    let _timed_out = timeout(
        LINGER_LIMIT,
        tokio::io::copy(stream, &mut tokio::io::sink()),
    )
    .await;
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncReadExt;

    use super::*;
    use crate::testing::within;

    #[tokio::test]
    async fn callers_get_small_answers_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        tcp::configure(&listener).unwrap();
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

    #[tokio::test]
    async fn bytes_that_the_socket_has_accepted_are_counted() {
        let (_caller, accepted) = UnixStream::pair().unwrap();
        let mut socket = CallerStream::new(accepted, Arc::default());
        socket.write_all(b"ans").await.unwrap();
        let pieces = [io::IoSlice::new(b"w"), io::IoSlice::new(b"er")];
        assert_eq!(socket.write_vectored(&pieces).await.unwrap(), 3);
        assert_eq!(socket.bytes_sent(), 6);
    }

    /// A caller may read on behind its FIN. Bytes that it has not read make its close a reset.
    #[tokio::test]
    async fn caller_that_closes_a_unix_socket_behind_its_fin_is_gone() {
        for has_unread in [false, true] {
            let (mut caller, accepted) = UnixStream::pair().unwrap();
            let mut socket = CallerStream::new(accepted, Arc::default());
            let closed = socket.caller_closed();
            caller.write_all(b"all").await.unwrap();
            caller.shutdown().await.unwrap();
            let mut got = Vec::new();
            socket.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, b"all");
            // The FIN is known.
            closed.closed().await;
            poll_fn(|cx| {
                assert!(socket.poll_gone(cx).is_pending());
                Poll::Ready(())
            })
            .await;
            socket.write_all(b"answer").await.unwrap();
            if !has_unread {
                caller.read_exact(&mut [0; 6]).await.unwrap();
            }
            drop(caller);
            let (error, ()) = tokio::join!(
                within(poll_fn(|cx| socket.poll_gone(cx))),
                within(closed.failed())
            );
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        }
    }
}
