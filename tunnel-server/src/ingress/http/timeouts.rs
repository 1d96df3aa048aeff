//! State of a caller's connection within and between requests, and the read timeout of each state.
//! hyper has only one timer for an idle connection and for an incomplete head. This module has a
//! separate timeout for each.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tunnel_process::conn_limiter::{ConnPermit, InUseGuard};
use tunnel_proto::relay::{CUT_CHECK_INTERVAL, PollCut};
use tunnel_proto::transport::{CutDeadline, StreamWatch};

use super::head_check::size::HeadLimits;
use super::head_check::{BodyFraming, HeadCheck, HeadError, HeadProgress, HeadStop};
use super::unread::UnreadBytes;
use crate::config::CONNECTION_HEAD_BYTES;

/// State of a caller's connection.
///
/// ```text
///   FirstHead ──head──▶ Busy ──response ended──▶ Idle ──first byte──▶ Head ──head──▶ Busy
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnState {
    /// No request has arrived yet.
    FirstHead {
        since: Instant,
    },
    /// Requests are in progress. Their responses are not complete.
    Busy {
        requests: usize,
    },
    /// The connection is between requests, and no byte of the next request has arrived.
    Idle {
        since: Instant,
    },
    Head {
        since: Instant,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeoutKind {
    /// The first head was not complete in time.
    FirstHead,
    /// The next head did not begin in time.
    Idle,
    /// A later head was not complete in time.
    NextHead,
}

/// Timeouts of a caller's connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeoutConfig {
    /// Time from the start of the connection, or from the first byte of a head, to the end of the
    /// head.
    pub(crate) head: Duration,
    /// Time from the end of a response to the first byte of the next head.
    pub(crate) idle: Duration,
}

/// What a connection does, for a decision about its eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activity {
    /// No byte of a next request has arrived, or no request at all.
    Idle,
    /// The first bytes of a request arrived at this time.
    Head(Instant),
    /// Requests are in progress, or their responses are not written.
    Busy,
}

#[derive(Debug)]
struct State {
    conn_state: ConnState,
    /// The current request has a body, of which hyper may hold bytes.
    body: bool,
    check: HeadCheck,
    /// The check has stopped at a head that is too large for the connection, which hyper does not
    /// get.
    has_large_head: bool,
    /// The response to the last request is complete, and the body of the request goes on.
    is_answered: bool,
    /// Number of requests that have begun.
    requests: u64,
    /// [`ConnTimeouts::wait_for_request_end`] waits for the end of a request.
    is_end_awaited: bool,
}

impl State {
    fn read(&mut self, data: &[u8]) -> Option<HeadStop> {
        let stop = self.check.read(data);
        self.has_large_head |= stop.is_some();
        stop
    }

    fn start(&mut self, body: bool) {
        self.body = body;
        self.is_answered = false;
        self.requests += 1;
        let requests = match self.conn_state {
            ConnState::Busy { requests } => requests + 1,
            ConnState::FirstHead { .. } | ConnState::Idle { .. } | ConnState::Head { .. } => 1,
        };
        self.conn_state = ConnState::Busy { requests };
    }

    fn end(&mut self, now: Instant) {
        self.conn_state = match self.conn_state {
            ConnState::Busy { requests } if requests > 1 => ConnState::Busy {
                requests: requests - 1,
            },
            _ if self.check.has_begun() => ConnState::Head { since: now },
            _ => ConnState::Idle { since: now },
        };
    }

    fn deadline(&self, timeout_config: TimeoutConfig) -> Option<(Instant, TimeoutKind)> {
        match self.conn_state {
            ConnState::Busy { .. } => None,
            ConnState::FirstHead { since } => {
                Some((since + timeout_config.head, TimeoutKind::FirstHead))
            }
            ConnState::Idle { since } => Some((since + timeout_config.idle, TimeoutKind::Idle)),
            ConnState::Head { since } => Some((since + timeout_config.head, TimeoutKind::NextHead)),
        }
    }
}

/// Timeouts of one caller's connection.
#[derive(Debug)]
pub(crate) struct ConnTimeouts {
    state: Mutex<State>,
    /// Notified when a request begins.
    request_started: Notify,
    /// Notified when a request ends, if its end is awaited.
    request_ended: Notify,
    timeout_config: TimeoutConfig,
    /// Marked as in use while a request is in progress.
    permit: Arc<ConnPermit>,
    /// The last write did not fit into the socket, so hyper holds unsent bytes. The connection is
    /// in use until they are sent.
    write_blocked: AtomicBool,
    blocked_write: Mutex<Option<BlockedWrite>>,
    /// Notified when a write is no longer blocked.
    write_unblocked: Notify,
    /// Notified when a write is blocked.
    write_stopped: Notify,
    /// Observes the stream of the response in progress.
    target: Mutex<Option<StreamWatch>>,
    /// The connection has failed, also for a request whose body was not read to its end.
    has_failed: AtomicBool,
}

impl ConnTimeouts {
    /// Creates the timeouts for a connection that begins at this moment.
    pub(crate) fn start(
        timeout_config: TimeoutConfig,
        head_limits: HeadLimits,
        permit: Arc<ConnPermit>,
    ) -> Arc<Self> {
        let state = State {
            conn_state: ConnState::FirstHead {
                since: Instant::now(),
            },
            body: false,
            check: HeadCheck::new(head_limits),
            has_large_head: false,
            is_answered: false,
            requests: 0,
            is_end_awaited: false,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            request_started: Notify::new(),
            request_ended: Notify::new(),
            timeout_config,
            permit,
            write_blocked: AtomicBool::new(false),
            blocked_write: Mutex::default(),
            write_unblocked: Notify::new(),
            write_stopped: Notify::new(),
            target: Mutex::default(),
            has_failed: AtomicBool::new(false),
        })
    }

    /// Records that the connection has failed: its last request may be incomplete.
    pub(crate) fn fail(&self) {
        self.has_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether the connection has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Returns whether a body has begun whose end has not arrived.
    pub(crate) fn is_within_body(&self) -> bool {
        self.state.lock().check.is_within_body()
    }

    /// Waits until a request is in progress. Cancel-safe.
    pub(crate) async fn wait_for_request(&self) {
        self.wait_for_state(|conn_state| matches!(conn_state, ConnState::Busy { .. }))
            .await;
    }

    /// Returns whether the last response is complete while the body of its request goes on.
    pub(crate) fn is_answered(&self) -> bool {
        self.state.lock().is_answered
    }

    /// Starts a request whose head hyper has read. Returns a guard that ends the request when
    /// dropped, and the error in the head, if any. `body` says whether the request has a body. Must
    /// be called before hyper reads further.
    pub(crate) fn request(
        self: &Arc<Self>,
        body: bool,
        framing: BodyFraming,
    ) -> (RequestGuard, Option<HeadError>) {
        let head_error = {
            let mut state = self.state.lock();
            state.start(body);
            state.check.request(framing)
        };
        self.request_started.notify_waiters();
        let request_guard = RequestGuard {
            timeouts: self.clone(),
            _in_use: self.permit.in_use(),
        };
        (request_guard, head_error)
    }

    /// Waits until the connection has been idle between requests for `time` and all responses are
    /// written. A connection does not count as idle after a request with a body, because the rest
    /// of an unread body must not be taken for a request. Cancel-safe.
    pub(crate) async fn idle_for(&self, time: Duration) {
        let mut last_request = None;
        loop {
            let (conn_state, body, request) = {
                let state = self.state.lock();
                (state.conn_state, state.body, state.requests)
            };
            let now = Instant::now();
            let at = match conn_state {
                ConnState::Idle { .. } if body || self.is_write_blocked() => now + time,
                ConnState::Idle { since } if since + time <= now => return,
                ConnState::Idle { since } => since + time,
                // The request has been in progress for `time`. A followed log can last for days, so
                // its end wakes this task. Shorter requests need not.
                ConnState::Busy { .. } if last_request == Some(request) => {
                    self.wait_for_request_end().await;
                    continue;
                }
                // A connection that becomes idle after this point cannot have been idle for `time`
                // earlier than this.
                ConnState::FirstHead { .. } | ConnState::Busy { .. } | ConnState::Head { .. } => {
                    now + time
                }
            };
            last_request = Some(request);
            sleep_until(at).await;
        }
    }

    /// Waits until a request ends. Returns at once if none is in progress. Cancel-safe.
    async fn wait_for_request_end(&self) {
        let ended = self.request_ended.notified();
        {
            let mut state = self.state.lock();
            if !matches!(state.conn_state, ConnState::Busy { .. }) {
                return;
            }
            state.is_end_awaited = true;
        }
        ended.await;
    }

    /// Returns what the connection does.
    pub(crate) fn activity(&self) -> Activity {
        if self.is_write_blocked() {
            return Activity::Busy;
        }
        match self.state.lock().conn_state {
            ConnState::Busy { .. } => Activity::Busy,
            ConnState::Head { since } => Activity::Head(since),
            ConnState::FirstHead { .. } | ConnState::Idle { .. } => Activity::Idle,
        }
    }

    /// Waits until a head waits that is too large for hyper, and hyper has nothing else to do. Must
    /// be polled by the task of the connection, after hyper. Cancel-safe.
    pub(crate) async fn wait_for_large_head(&self) {
        poll_fn(|_| {
            let state = self.state.lock();
            if state.has_large_head && state.check.is_read() {
                Poll::Ready(())
            } else {
                Poll::Pending
            }
        })
        .await;
        self.wait_until_written().await;
    }

    /// Waits until more than this number of requests have begun, and their responses are written.
    /// Must be polled by the task of the connection, after hyper. Cancel-safe.
    pub(crate) async fn wait_for_end_after(&self, requests: u64) {
        loop {
            let request_started = self.request_started.notified();
            if self.requests() > requests {
                break;
            }
            request_started.await;
        }
        self.wait_until_written().await;
    }

    /// Waits until no request is in progress, and all responses are written.
    async fn wait_until_written(&self) {
        loop {
            if self.is_write_blocked() {
                self.write_unblocked.notified().await;
            } else if self.activity() == Activity::Busy {
                self.wait_for_request_end().await;
            } else {
                return;
            }
        }
    }

    /// Returns the number of requests that have begun.
    pub(crate) fn requests(&self) -> u64 {
        self.state.lock().requests
    }

    /// Sets the limits of the next heads.
    pub(crate) fn limit_heads(&self, limits: HeadLimits) {
        let mut state = self.state.lock();
        state.has_large_head = false;
        state.check.set_limits(limits);
    }

    /// Starts the timeout of a large head, unless it has begun with the first bytes of the head.
    pub(crate) fn begin_large_head(&self) {
        let mut state = self.state.lock();
        state.has_large_head = false;
        if let ConnState::Idle { .. } = state.conn_state {
            let since = Instant::now();
            state.conn_state = ConnState::Head { since };
        }
    }

    /// Follows bytes of a large head, which must not exceed `limits`.
    pub(crate) fn read_large_head(&self, data: &[u8], limits: HeadLimits) -> HeadProgress {
        self.state.lock().check.read_head(data, limits)
    }

    /// Returns whether hyper holds bytes that the socket has not accepted.
    pub(crate) fn is_write_blocked(&self) -> bool {
        self.write_blocked.load(Ordering::Relaxed)
    }

    /// Waits until the end of a response has been stuck for `time`: the request has ended, hyper
    /// holds bytes, and the caller has not accepted any of them. Cancel-safe.
    pub(crate) async fn write_blocked_for(&self, time: Duration) {
        loop {
            let is_busy = matches!(self.state.lock().conn_state, ConnState::Busy { .. });
            let since = self
                .blocked_write
                .lock()
                .as_ref()
                .map(|blocked_write| blocked_write.since);
            let now = Instant::now();
            let at = match since.filter(|_| !is_busy) {
                Some(since) if since + time <= now => return,
                Some(since) => since + time,
                None => now + time,
            };
            sleep_until(at).await;
        }
    }

    /// Records a write or a flush. `blocked_at` is [`PollCut::bytes_sent`] of the connection if it
    /// is blocked: below TLS the socket may accept bytes while a flush stays blocked.
    fn record_write(&self, blocked_at: Option<u64>) {
        let is_blocked = blocked_at.is_some();
        if self.write_blocked.swap(is_blocked, Ordering::Relaxed) == is_blocked {
            if let Some(sent) = blocked_at
                && let Some(write) = &mut *self.blocked_write.lock()
                && write.sent != sent
            {
                (write.sent, write.since) = (sent, Instant::now());
            }
            return;
        }
        *self.blocked_write.lock() = blocked_at.map(|sent| BlockedWrite {
            since: Instant::now(),
            sent,
            _in_use: self.permit.in_use(),
        });
        if is_blocked {
            self.write_stopped.notify_one();
        } else {
            self.write_unblocked.notify_waiters();
        }
    }

    /// Sets the observer of the stream of the response in progress.
    pub(crate) fn watch_target(&self, target: Option<&StreamWatch>) {
        *self.target.lock() = target.cloned();
    }

    /// Waits until the response in progress must end because the caller takes nothing of it: the
    /// target has cut its connection, or others wait for the memory. Must be polled whenever the
    /// connection was, since each response has another stream. Cancel-safe.
    pub(crate) async fn response_stalled(&self) {
        tokio::select! {
            () = self.cut_behind_stalled_caller() => {}
            () = poll_fn(|cx| self.poll_stalled(cx)) => {}
        }
    }

    fn poll_stalled(&self, cx: &Context<'_>) -> Poll<()> {
        match &*self.target.lock() {
            Some(target) => target.poll_stalled(cx),
            None => Poll::Pending,
        }
    }

    /// Waits until the target has cut its connection behind bytes that the caller does not take, or
    /// not in time: hyper does not ask for more of the response while the caller takes nothing.
    /// Checks only while writes are blocked, and not at once, so that fast responses cost nothing.
    /// Cancel-safe, but the time since the cut starts again.
    async fn cut_behind_stalled_caller(&self) {
        // The number of the request whose target was cut, and until when the caller gets its bytes.
        let mut cut = None;
        loop {
            let since = self.blocked_write.lock().as_ref().map(|write| write.since);
            let Some(since) = since else {
                self.write_stopped.notified().await;
                if cut.is_none() {
                    sleep(CUT_CHECK_INTERVAL).await;
                }
                continue;
            };
            let now = Instant::now();
            if !self.target.lock().as_ref().is_some_and(StreamWatch::is_cut) {
                cut = None;
                sleep_until(now + CUT_CHECK_INTERVAL).await;
                continue;
            }
            let request = self.state.lock().requests;
            let deadline = match cut {
                Some((of, deadline)) if of == request => deadline,
                Some(_) | None => CutDeadline::of_cut_at(now),
            };
            cut = Some((request, deadline));
            let end = deadline.end(Some(since));
            if end <= now {
                return;
            }
            sleep_until(end).await;
        }
    }

    /// Waits until hyper has handed the socket all bytes of a response, before the response is cut.
    /// Gives up at the end of the [`CutDeadline`]. Cancel-safe.
    pub(crate) async fn flushed(self: Arc<Self>) {
        let deadline = CutDeadline::of_cut_at(Instant::now());
        loop {
            let unblocked = self.write_unblocked.notified();
            let since = self.blocked_write.lock().as_ref().map(|write| write.since);
            let Some(since) = since else {
                return;
            };
            let end = deadline.end(Some(since));
            if end <= Instant::now() {
                return;
            }
            // The caller may have taken bytes before the time is over.
            let _unblocked_or_elapsed = timeout_at(end, unblocked).await;
        }
    }

    /// Waits until a timeout expires. Cancel-safe.
    pub(crate) async fn expired(&self) -> TimeoutKind {
        // A timeout that starts after this point cannot expire before `check_interval`, so requests
        // need not wake this task. Ten thousand requests can arrive per second, but timeouts are
        // rare.
        let check_interval = self.timeout_config.head.min(self.timeout_config.idle);
        loop {
            let now = Instant::now();
            let deadline = self.state.lock().deadline(self.timeout_config);
            let next_check = now + check_interval;
            let at = match deadline {
                Some((at, which)) if at <= now => return which,
                Some((at, _)) => at.min(next_check),
                None => next_check,
            };
            sleep_until(at).await;
        }
    }

    /// Waits until the timeout of the current state expires. Only for a connection whose state does
    /// not change in the meantime: unlike [`ConnTimeouts::expired`], this method does not check the
    /// state again. Cancel-safe.
    pub(crate) async fn expired_in_state(&self) -> TimeoutKind {
        let deadline = self.state.lock().deadline(self.timeout_config);
        match deadline {
            Some((at, which)) => {
                sleep_until(at).await;
                which
            }
            None => std::future::pending().await,
        }
    }

    async fn wait_for_state(&self, is_reached: impl Fn(&ConnState) -> bool) {
        loop {
            let request_started = self.request_started.notified();
            if is_reached(&self.state.lock().conn_state) {
                return;
            }
            request_started.await;
        }
    }

    /// Returns how many bytes may be read at once, see [`HeadCheck::read_max`].
    fn read_max(&self) -> usize {
        self.state.lock().check.read_max()
    }

    /// Follows bytes for hyper. Stops at a head that is too large for the connection.
    fn read(&self, data: &[u8]) -> Option<HeadStop> {
        let mut state = self.state.lock();
        if let ConnState::Idle { .. } = state.conn_state {
            let since = Instant::now();
            state.conn_state = ConnState::Head { since };
            self.permit.expect_use();
        }
        state.read(data)
    }
}

/// Bytes of responses that the socket has not accepted.
#[derive(Debug)]
struct BlockedWrite {
    /// Time at which the writes became blocked, or the socket last accepted bytes.
    since: Instant,
    /// Bytes that the socket had accepted then.
    sent: u64,
    _in_use: InUseGuard,
}

/// A request in progress. See [`ConnTimeouts::request`].
#[derive(Debug)]
pub(crate) struct RequestGuard {
    timeouts: Arc<ConnTimeouts>,
    _in_use: InUseGuard,
}

impl RequestGuard {
    /// Records that the response is complete while the body of the request goes on. The end of the
    /// caller's direction is then the end of the body, and the caller is not gone.
    pub(crate) fn answered(&self) {
        self.timeouts.state.lock().is_answered = true;
    }

    /// Records that the response has ended. What happens to the target's connection does not concern
    /// the bytes of the response that the caller has not taken yet.
    pub(crate) fn end_response(&self) {
        self.timeouts.watch_target(None);
    }

    /// Returns whether the connection of the request has failed.
    pub(crate) fn has_conn_failed(&self) -> bool {
        self.timeouts.has_failed()
    }

    pub(crate) fn timeouts(&self) -> Arc<ConnTimeouts> {
        self.timeouts.clone()
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let is_awaited = {
            let mut state = self.timeouts.state.lock();
            state.end(Instant::now());
            std::mem::take(&mut state.is_end_awaited)
        };
        if is_awaited {
            self.timeouts.request_ended.notify_waiters();
        }
    }
}

/// A caller's connection that reports its reads and blocked writes to [`ConnTimeouts`], and does not
/// give hyper a head that is too large for the connection.
#[derive(Debug)]
pub(crate) struct TimedStream<S> {
    stream: Box<S>,
    timeouts: Arc<ConnTimeouts>,
    /// Bytes that were read and checked earlier. Reads return these bytes first.
    unread: UnreadBytes,
    /// The beginning of a head that is too large for hyper. Reads wait while it is there.
    withheld: Option<Bytes>,
    /// Bytes behind the others, which were read and not checked.
    unchecked: UnreadBytes,
}

impl<S> TimedStream<S> {
    pub(crate) fn new(stream: S, timeouts: Arc<ConnTimeouts>) -> Self {
        Self {
            stream: Box::new(stream),
            timeouts,
            unread: UnreadBytes::default(),
            withheld: None,
            unchecked: UnreadBytes::default(),
        }
    }

    /// Puts back bytes that were read but not used.
    pub(crate) fn put_back(&mut self, unread: Bytes) {
        self.unread.put_back(unread);
    }

    /// Puts back bytes that were read and not checked.
    pub(crate) fn put_back_unchecked(&mut self, unchecked: Bytes) {
        self.unchecked.put_back(unchecked);
    }

    /// Takes the part of a large head that was read and checked.
    pub(crate) fn take_large_head(&mut self) -> BytesMut {
        let mut head = BytesMut::from(self.unread.take());
        head.extend_from_slice(&self.withheld.take().unwrap_or_default());
        head
    }

    /// Makes all bytes available to reads, because they are no heads.
    pub(crate) fn release(&mut self) {
        let head = self.take_large_head();
        self.unread.put_back(head.freeze());
    }

    fn withhold(&mut self, data: &[u8], stop: HeadStop) {
        let (head, behind) = data.split_at(stop.checked);
        self.put_back_unchecked(Bytes::copy_from_slice(behind));
        let head = head.get(stop.head..).unwrap_or_default();
        self.withheld = Some(Bytes::copy_from_slice(head));
    }
}

impl<S: AsyncRead + Unpin> TimedStream<S> {
    /// Reads from the stream, at most what may be in memory ahead of hyper.
    fn poll_read_stream(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Each limit permits as much, and most buffers have no more room.
        if out.remaining() <= CONNECTION_HEAD_BYTES {
            return Pin::new(&mut self.stream).poll_read(cx, out);
        }
        let max = self.timeouts.read_max();
        if out.remaining() <= max {
            return Pin::new(&mut self.stream).poll_read(cx, out);
        }
        let mut few = ReadBuf::new(out.initialize_unfilled_to(max));
        ready!(Pin::new(&mut self.stream).poll_read(cx, &mut few))?;
        let count = few.filled().len();
        out.advance(count);
        Poll::Ready(Ok(()))
    }

    /// Reads some bytes that are not checked yet. Returns none at the end. Cancel-safe.
    ///
    /// # Errors
    /// The error of the stream.
    pub(crate) async fn read_unchecked(&mut self) -> io::Result<Bytes> {
        if self.unchecked.is_empty() {
            let mut data = BytesMut::with_capacity(READ_BYTES);
            self.stream.read_buf(&mut data).await?;
            return Ok(data.freeze());
        }
        Ok(self.unchecked.take())
    }
}

/// Bytes of a large head that are read at once.
const READ_BYTES: usize = 16 << 10;

impl<S: PollCut> PollCut for TimedStream<S> {
    fn below(&mut self) -> Option<&mut dyn PollCut> {
        Some(&mut self.stream)
    }
}

impl<S: PollCut> TimedStream<S> {
    fn record_write<T>(&mut self, written: &Poll<T>) {
        let blocked_at = written.is_pending().then(|| self.stream.bytes_sent());
        self.timeouts.record_write(blocked_at);
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.read(out) {
            return Poll::Ready(Ok(()));
        }
        if self.withheld.is_some() {
            // `ConnTimeouts::wait_for_large_head` goes on.
            return Poll::Pending;
        }
        let before = out.filled().len();
        if !self.unchecked.read(out) {
            ready!(self.poll_read_stream(cx, out))?;
        }
        let data = out.filled().get(before..).filter(|data| !data.is_empty());
        let Some(data) = data else {
            return Poll::Ready(Ok(()));
        };
        let Some(stop) = self.timeouts.read(data) else {
            return Poll::Ready(Ok(()));
        };
        self.withhold(data, stop);
        out.set_filled(before + stop.head);
        if stop.head == 0 {
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + PollCut + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, data);
        self.record_write(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, data);
        self.record_write(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.record_write(&flushed);
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use tunnel_process::conn_limiter::{ConnLimiter, ConnLimits};
    use tunnel_proto::relay::SlowFlush;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A caller takes some bytes every 900 ms, a number of times.
    #[tokio::test(start_paused = true)]
    async fn caller_that_takes_bytes_of_a_blocked_flush_is_not_stalled() {
        for (takes, expected) in [(0, 1000), (3, 3700), (10, 5000)] {
            let (timeouts, mut stream) = blocked_conn();
            flush_once(&mut stream).await;
            let began = Instant::now();
            let waiting = async {
                timeouts.flushed().await;
                began.elapsed().as_millis()
            };
            let taking = async {
                for _ in 0..takes {
                    sleep(Duration::from_millis(900)).await;
                    stream.stream.sent += 1;
                    flush_once(&mut stream).await;
                }
            };
            let (waited, ()) = tokio::join!(waiting, taking);
            // Each timer may be a millisecond late.
            let is_in_time = (expected..expected + 20).contains(&waited);
            assert!(is_in_time, "{takes} times: {waited} ms");
        }
    }

    fn blocked_conn() -> (Arc<ConnTimeouts>, TimedStream<SlowFlush>) {
        let timeout_config = TimeoutConfig {
            head: MINUTE,
            idle: MINUTE,
        };
        let limiter = ConnLimiter::new(ConnLimits {
            per_source: 1,
            total: 1,
        });
        let permit = limiter.acquire(Ipv4Addr::LOCALHOST.into()).unwrap();
        let head_limits = HeadLimits::of_connection(CONNECTION_HEAD_BYTES);
        let timeouts = ConnTimeouts::start(timeout_config, head_limits, Arc::new(permit));
        let stream = TimedStream::new(SlowFlush::new(u64::MAX, 0), timeouts.clone());
        (timeouts, stream)
    }

    async fn flush_once(stream: &mut TimedStream<SlowFlush>) {
        poll_fn(|cx| {
            assert!(Pin::new(&mut *stream).poll_flush(cx).is_pending());
            Poll::Ready(())
        })
        .await;
    }
}
