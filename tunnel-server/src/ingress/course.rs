//! Where a caller's connection stands between and in its requests, and how long it may be silent there. hyper has one timer
//! for an idle connection and for a head that does not end; here they differ.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// What a caller's connection is doing.
///
/// ```text
///   Opening ──head──▶ Busy ──answer ended──▶ Idle ──first byte──▶ Head ──head──▶ Busy
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No request has come yet.
    Opening { since: Instant },
    /// Requests that are not answered to their end.
    Busy { requests: usize },
    /// Between requests; nothing of the next one has come.
    Idle { since: Instant },
    /// A next head has begun.
    Head { since: Instant },
}

/// Which silence has lasted too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The first head did not end in time.
    Opening,
    /// No further head began in time.
    Idle,
    /// A further head did not end in time.
    Next,
}

/// The limits of silence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// From a connection's start, or a head's first byte, to the head's end.
    pub(super) head: Duration,
    /// From an answer's end to the next head's first byte.
    pub(super) idle: Duration,
}

/// The last bytes that hyper was given; when they are an empty line, no part of a further head is among them.
#[derive(Debug, Clone, Copy, Default)]
struct Tail([u8; 3]);

impl Tail {
    fn push(&mut self, data: &[u8]) {
        for byte in data.get(data.len().saturating_sub(3)..).unwrap_or_default() {
            self.0.rotate_left(1);
            self.0[2] = *byte;
        }
    }

    fn is_empty_line(self) -> bool {
        matches!(self.0, [_, b'\n', b'\n'] | [b'\n', b'\r', b'\n'])
    }
}

#[derive(Debug)]
struct State {
    stage: Stage,
    tail: Tail,
    /// The current request has a body, so that the tail tells nothing of a next head.
    body: bool,
}

impl State {
    fn read(&mut self, data: &[u8], now: Instant) {
        self.tail.push(data);
        if let Stage::Idle { .. } = self.stage {
            self.stage = Stage::Head { since: now };
        }
    }

    fn begin(&mut self, body: bool) {
        self.body = body;
        let requests = match self.stage {
            Stage::Busy { requests } => requests + 1,
            Stage::Opening { .. } | Stage::Idle { .. } | Stage::Head { .. } => 1,
        };
        self.stage = Stage::Busy { requests };
    }

    fn end(&mut self, now: Instant) {
        self.stage = match self.stage {
            Stage::Busy { requests } if requests > 1 => Stage::Busy {
                requests: requests - 1,
            },
            _ if self.body || self.tail.is_empty_line() => Stage::Idle { since: now },
            // What came behind the request is the beginning of another one.
            _ => Stage::Head { since: now },
        };
    }

    fn deadline(&self, patience: Patience) -> Option<(Instant, Overdue)> {
        match self.stage {
            Stage::Busy { .. } => None,
            Stage::Opening { since } => Some((since + patience.head, Overdue::Opening)),
            Stage::Idle { since } => Some((since + patience.idle, Overdue::Idle)),
            Stage::Head { since } => Some((since + patience.head, Overdue::Next)),
        }
    }
}

/// The course of one caller's connection.
#[derive(Debug)]
pub(super) struct Course {
    state: Mutex<State>,
    /// A request has begun.
    begun: Notify,
    patience: Patience,
}

impl Course {
    /// A connection that begins at this moment.
    pub(super) fn begin(patience: Patience) -> Arc<Self> {
        let state = State {
            stage: Stage::Opening {
                since: Instant::now(),
            },
            tail: Tail::default(),
            body: false,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            begun: Notify::new(),
            patience,
        })
    }

    /// Waits until the first request head is there. Cancel-safe.
    pub(super) async fn opened(&self) {
        self.reach(|stage| !matches!(stage, Stage::Opening { .. }))
            .await;
    }

    /// Waits until a request is under way. Cancel-safe.
    pub(super) async fn in_request(&self) {
        self.reach(|stage| matches!(stage, Stage::Busy { .. }))
            .await;
    }

    /// A request whose head was read; it lasts until the value goes.
    pub(super) fn request(self: &Arc<Self>, body: bool) -> Underway {
        self.lock().begin(body);
        self.begun.notify_waiters();
        Underway(self.clone())
    }

    /// Waits for a silence that lasts too long. Cancel-safe.
    pub(super) async fn overdue(&self) -> Overdue {
        // No silence that begins from now on lasts too long before that, so it need not be told of any: requests come by
        // the ten thousand a second, silences do not.
        let look_every = self.patience.head.min(self.patience.idle);
        loop {
            let now = Instant::now();
            let deadline = self.lock().deadline(self.patience);
            let look = now + look_every;
            let at = match deadline {
                Some((at, which)) if at <= now => return which,
                Some((at, _)) => at.min(look),
                None => look,
            };
            sleep_until(at).await;
        }
    }

    async fn reach(&self, there: impl Fn(&Stage) -> bool) {
        loop {
            let begun = self.begun.notified();
            if there(&self.lock().stage) {
                return;
            }
            begun.await;
        }
    }

    fn read(&self, data: &[u8]) {
        self.lock().read(data, Instant::now());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// See [`Course::request`].
#[derive(Debug)]
pub(super) struct Underway(Arc<Course>);

impl Drop for Underway {
    fn drop(&mut self) {
        self.0.lock().end(Instant::now());
    }
}

/// A caller's connection whose course sees what is read.
#[derive(Debug)]
pub(super) struct Followed<S> {
    pub(super) stream: S,
    pub(super) course: Arc<Course>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Followed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, out))?;
        if let Some(data) = out.filled().get(before..).filter(|data| !data.is_empty()) {
            self.course.read(data);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Followed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
