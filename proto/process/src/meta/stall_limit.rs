//! A connection that ends when its caller takes nothing of what is written for a while.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A socket whose writes fail when they have waited for the time limit and no byte was taken.
pub(super) struct StallLimit<S> {
    socket: S,
    limit: Duration,
    /// The end of the time, once a write has waited.
    stalled: Option<Pin<Box<Sleep>>>,
    is_waiting: bool,
}

impl<S> StallLimit<S> {
    pub(super) fn new(socket: S, limit: Duration) -> Self {
        Self {
            socket,
            limit,
            stalled: None,
            is_waiting: false,
        }
    }

    /// Returns the result of a write, or an error if writes have waited for too long.
    fn poll_limited<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.is_waiting = false;
            return written;
        }
        let limit = self.limit;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(limit)));
        if !std::mem::replace(&mut self.is_waiting, true) {
            stalled.as_mut().reset(Instant::now() + limit);
        }
        ready!(stalled.as_mut().poll(cx));
        let problem = "the caller took nothing for too long";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, problem)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, data);
        self.poll_limited(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, data);
        self.poll_limited(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn connection_lasts_while_bytes_are_taken_and_ends_when_none_are() {
        let (socket, mut caller) = duplex(64);
        let mut socket = StallLimit::new(socket, LIMIT);
        // Nothing is written while a page is made.
        sleep(10 * LIMIT).await;
        let begin = Instant::now();
        let writing = async {
            let error = socket.write_all(&[0; 4096]).await.unwrap_err();
            (error.kind(), begin.elapsed())
        };
        let reading = async {
            for _ in 0..20 {
                sleep(LIMIT - Duration::from_secs(1)).await;
                caller.read_exact(&mut [0; 8]).await.unwrap();
            }
            begin.elapsed()
        };
        let ((error, ended), last_read) = tokio::join!(writing, reading);
        assert_eq!(error, io::ErrorKind::TimedOut);
        let waited = ended - last_read;
        assert!(
            (LIMIT..LIMIT + Duration::from_secs(1)).contains(&waited),
            "{waited:?}"
        );
    }
}
