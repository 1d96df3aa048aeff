//! Where a caller's connection stands between and in its requests, and how long it may be silent there. hyper has one timer
//! for an idle connection and for a head that does not end; here they differ.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tunnel_proto::process::places::{InUse, Place};

use super::head_check::{Fault, Following, HeadCheck};

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
pub(crate) enum Overdue {
    /// The first head did not end in time.
    Opening,
    /// No further head began in time.
    Idle,
    /// A further head did not end in time.
    Next,
}

/// The limits of silence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// From a connection's start, or a head's first byte, to the head's end.
    pub(crate) head: Duration,
    /// From an answer's end to the next head's first byte.
    pub(crate) idle: Duration,
}

/// The last bytes that hyper was given; when they are an empty line, no part of a further head is among them.
#[derive(Debug, Clone, Copy, Default)]
struct Tail([u8; TAIL_BYTES]);

/// As many as [`HeadCheck::idle`] looks at.
const TAIL_BYTES: usize = 5;

impl Tail {
    fn push(&mut self, data: &[u8]) {
        for byte in data
            .get(data.len().saturating_sub(TAIL_BYTES)..)
            .unwrap_or_default()
        {
            self.0.rotate_left(1);
            self.0[TAIL_BYTES - 1] = *byte;
        }
    }

    fn is_empty_line(self) -> bool {
        self.0.ends_with(b"\n\n") || self.0.ends_with(b"\n\r\n")
    }
}

#[derive(Debug)]
struct State {
    stage: Stage,
    tail: Tail,
    /// The current request has a body, so that the tail tells nothing of a next head.
    body: bool,
    check: HeadCheck,
}

impl State {
    fn read(&mut self, data: &[u8], now: Instant) {
        if let Stage::Idle { .. } = self.stage {
            self.stage = Stage::Head { since: now };
            self.check.idle(&self.tail.0);
        }
        self.tail.push(data);
        self.check.read(data);
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
pub(crate) struct Course {
    state: Mutex<State>,
    /// A request has begun.
    begun: Notify,
    patience: Patience,
    /// In use while a request is under way.
    permit: Arc<Place>,
    /// The last write did not fit into the socket, so that hyper holds unsent bytes: the connection is in use until they are gone.
    write_blocked: AtomicBool,
    unsent: Mutex<Option<Unsent>>,
}

impl Course {
    /// A connection that begins at this moment.
    pub(crate) fn begin(patience: Patience, permit: Arc<Place>) -> Arc<Self> {
        let state = State {
            stage: Stage::Opening {
                since: Instant::now(),
            },
            tail: Tail::default(),
            body: false,
            check: HeadCheck::default(),
        };
        Arc::new(Self {
            state: Mutex::new(state),
            begun: Notify::new(),
            patience,
            permit,
            write_blocked: AtomicBool::new(false),
            unsent: Mutex::default(),
        })
    }

    /// Waits until a request is under way. Cancel-safe.
    pub(crate) async fn in_request(&self) {
        self.reach(|stage| matches!(stage, Stage::Busy { .. }))
            .await;
    }

    /// A request whose head was read, with or without a body, and what is wrong with that head; the request lasts until the
    /// first value goes. To be called before hyper reads on.
    pub(crate) fn request(
        self: &Arc<Self>,
        body: bool,
        following: Following,
    ) -> (Underway, Option<Fault>) {
        let fault = {
            let mut state = self.lock();
            state.begin(body);
            state.check.request(following)
        };
        self.begun.notify_waiters();
        let underway = Underway {
            course: self.clone(),
            _in_use: self.permit.in_use(),
        };
        (underway, fault)
    }

    /// Waits until the connection has been idle between requests for `time`, with all answers written. A request with a body
    /// does not count as over: the rest of a body that nobody reads must not be taken for a request. Cancel-safe.
    pub(crate) async fn idle_for(&self, time: Duration) {
        loop {
            let (stage, body) = {
                let state = self.lock();
                (state.stage, state.body)
            };
            let now = Instant::now();
            let at = match stage {
                Stage::Idle { .. } if body || self.is_write_blocked() => now + time,
                Stage::Idle { since } if since + time <= now => return,
                Stage::Idle { since } => since + time,
                // A connection that becomes idle after this point has not been for long enough before.
                Stage::Opening { .. } | Stage::Busy { .. } | Stage::Head { .. } => now + time,
            };
            sleep_until(at).await;
        }
    }

    /// Whether no request is under way, and all answers are written.
    pub(crate) fn is_idle(&self) -> bool {
        !matches!(self.lock().stage, Stage::Busy { .. }) && !self.is_write_blocked()
    }

    /// Whether hyper holds bytes that the socket has not taken.
    pub(crate) fn is_write_blocked(&self) -> bool {
        self.write_blocked.load(Ordering::Relaxed)
    }

    /// Waits until the end of an answer has been stuck for `time`: the request is over, hyper holds bytes, and the caller has
    /// taken none. Cancel-safe.
    pub(crate) async fn stuck_for(&self, time: Duration) {
        loop {
            let is_busy = matches!(self.lock().stage, Stage::Busy { .. });
            let since = self.lock_unsent().as_ref().map(|unsent| unsent.since);
            let now = Instant::now();
            let at = match since.filter(|_| !is_busy) {
                Some(since) if since + time <= now => return,
                Some(since) => since + time,
                None => now + time,
            };
            sleep_until(at).await;
        }
    }

    fn note_write(&self, blocked: bool) {
        if self.write_blocked.swap(blocked, Ordering::Relaxed) != blocked {
            *self.lock_unsent() = blocked.then(|| Unsent {
                since: Instant::now(),
                _in_use: self.permit.in_use(),
            });
        }
    }

    fn lock_unsent(&self) -> MutexGuard<'_, Option<Unsent>> {
        self.unsent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a silence that lasts too long. Cancel-safe.
    pub(crate) async fn overdue(&self) -> Overdue {
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

/// Bytes of answers that the socket has not taken.
#[derive(Debug)]
struct Unsent {
    /// When the socket took the last ones.
    since: Instant,
    _in_use: InUse,
}

/// See [`Course::request`].
#[derive(Debug)]
pub(crate) struct Underway {
    course: Arc<Course>,
    _in_use: InUse,
}

impl Drop for Underway {
    fn drop(&mut self) {
        self.course.lock().end(Instant::now());
    }
}

/// A caller's connection whose course sees what is read.
#[derive(Debug)]
pub(crate) struct Followed<S> {
    stream: Box<S>,
    course: Arc<Course>,
    /// Bytes that were read off the stream before, and come first.
    unread: Bytes,
}

impl<S> Followed<S> {
    pub(crate) fn new(stream: S, course: Arc<Course>) -> Self {
        Self {
            stream: Box::new(stream),
            course,
            unread: Bytes::new(),
        }
    }

    /// Puts bytes back that were read and not used.
    pub(crate) fn put_back(&mut self, unread: Bytes) {
        self.unread = unread;
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Followed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.has_remaining() {
            let count = self.unread.len().min(out.remaining());
            out.put_slice(&self.unread.split_to(count));
            return Poll::Ready(Ok(()));
        }
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
        let written = Pin::new(&mut self.stream).poll_write(cx, data);
        self.course.note_write(written.is_pending());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, data);
        self.course.note_write(written.is_pending());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.course.note_write(flushed.is_pending());
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
