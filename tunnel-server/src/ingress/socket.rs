//! A door's socket: closes without losing the answer, or aborts so that a cut is never taken for a clean end.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, timeout};
use tracing::debug;
use tunnel_proto::tcp;

/// After our FIN the rest of a caller's input is read away for at most this long: closing with unread input would reset
/// the connection and with it the end of the answer.
const LINGER_LIMIT: Duration = Duration::from_secs(1);

/// What must happen to a caller's connection when it ends; shared by the socket and whatever answers on it.
#[derive(Debug, Default)]
pub struct Fate {
    cut: AtomicBool,
    /// Answers that have begun and not ended.
    unfinished: AtomicUsize,
    /// At least one answer or stream has begun.
    begun: AtomicBool,
    /// The connection carries an upgraded stream, where a half-close is only that.
    upgraded: AtomicBool,
}

impl Fate {
    /// From here on the connection is aborted: no further byte, no close_notify, a TCP reset.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Keeps half-closes as they are.
    pub fn upgrade(&self) {
        self.upgraded.store(true, Ordering::Relaxed);
    }

    /// All answers so far have arrived as far as can be known: an end without FIN is not a cut.
    pub fn settle(&self) {
        self.begun.store(false, Ordering::Relaxed);
    }

    /// Marks an answer or stream as begun: unless it is finished, the connection ends in a reset.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> Unfinished {
        self.begun.store(true, Ordering::Relaxed);
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        Unfinished {
            fate: self.clone(),
            finished: false,
        }
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }
}

/// See [`Fate::begin`].
#[derive(Debug)]
pub struct Unfinished {
    fate: Arc<Fate>,
    finished: bool,
}

impl Unfinished {
    /// The answer or stream is complete.
    pub fn finish(mut self) {
        self.finished = true;
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.finished {
            self.fate.cut();
        }
        self.fate.unfinished.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A caller's TCP connection.
#[derive(Debug)]
pub struct DoorSocket {
    tcp: TcpStream,
    fate: Arc<Fate>,
    fin_sent: bool,
    linger: Option<Pin<Box<Sleep>>>,
}

impl DoorSocket {
    /// Wraps an accepted connection.
    #[must_use]
    pub fn new(socket: TcpStream, fate: Arc<Fate>) -> Self {
        if let Err(error) = tcp::prepare(&socket) {
            debug!(%error, "cannot set options of a caller's socket");
        }
        Self {
            tcp: socket,
            fate,
            fin_sent: false,
            linger: None,
        }
    }

    fn aborted(&self) -> Option<io::Error> {
        self.fate
            .is_cut()
            .then(|| io::Error::new(io::ErrorKind::ConnectionAborted, "answer was cut"))
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
            match ready!(Pin::new(&mut self.tcp).poll_read(cx, &mut scratch)) {
                Ok(()) if !scratch.filled().is_empty() => {}
                Ok(()) | Err(_) => return Poll::Ready(()),
            }
        }
    }
}

impl AsyncRead for DoorSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, out)
    }
}

impl AsyncWrite for DoorSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.aborted() {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.tcp).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(error) = self.aborted() {
            return Poll::Ready(Err(error));
        }
        Pin::new(&mut self.tcp).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.aborted() {
            return Poll::Ready(Err(error));
        }
        if !self.fin_sent {
            ready!(Pin::new(&mut self.tcp).poll_shutdown(cx))?;
            self.fin_sent = true;
        }
        if !self.fate.upgraded.load(Ordering::Relaxed) {
            ready!(self.poll_linger(cx));
        }
        Poll::Ready(Ok(()))
    }
}

impl Drop for DoorSocket {
    fn drop(&mut self) {
        // Without a FIN the end of the last answer may still be in somebody's buffer: a close would look like the end of
        // an answer that is delimited by it.
        let open_ended = self.fate.begun.load(Ordering::Relaxed) && !self.fin_sent;
        let unfinished = self.fate.unfinished.load(Ordering::Relaxed) > 0;
        if (self.fate.is_cut() || open_ended || unfinished)
            && let Err(error) = tcp::abort_on_close(&self.tcp)
        {
            debug!(%error, "cannot make the close a reset");
        }
    }
}

/// Reads a caller's remaining input away until it ends, at most 1 s, so that the close does not reset what the caller has
/// not taken yet.
pub async fn read_away<R: AsyncRead + Unpin>(caller: &mut R) {
    let _patience_over = timeout(
        LINGER_LIMIT,
        tokio::io::copy(caller, &mut tokio::io::sink()),
    )
    .await;
}
