//! A stream for tests, whose flush takes as long as its reader.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::PollCut;

/// TLS over a socket: a flush hands what is queued to the socket as its reader takes it.
#[derive(Debug)]
pub struct SlowFlush {
    queued: u64,
    /// Times at which the reader still takes a byte.
    takes: u32,
    /// Bytes that the socket has taken.
    pub sent: u64,
    next: Pin<Box<Sleep>>,
}

impl SlowFlush {
    const INTERVAL: Duration = Duration::from_millis(900);

    /// Creates a stream whose reader takes a byte of the `queued` ones every 900 ms, at most `takes`
    /// times.
    pub fn new(queued: u64, takes: u32) -> Self {
        Self {
            queued,
            takes,
            sent: 0,
            next: Box::pin(sleep_until(Instant::now() + Self::INTERVAL)),
        }
    }
}

impl PollCut for SlowFlush {
    fn bytes_sent(&mut self) -> u64 {
        self.sent
    }

    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

impl AsyncRead for SlowFlush {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        _: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}

impl AsyncWrite for SlowFlush {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Pending
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.queued > 0 {
            if self.takes == 0 {
                return Poll::Pending;
            }
            ready!(self.next.as_mut().poll(cx));
            let next = self.next.deadline() + Self::INTERVAL;
            self.next.as_mut().reset(next);
            self.takes -= 1;
            self.queued -= 1;
            self.sent += 1;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Pending
    }
}
