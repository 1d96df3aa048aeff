//! Flow control: a reader that stalls uses memory, but never blocks another stream.
//!
//! Each stream has its own window. The connection's window is the amount that stalled streams hold,
//! plus eight stream windows for the others. The window is updated within some 100 ms, so stalled
//! readers cannot exhaust it. The held bytes are charged to the session and to the process's pool.
//! The pool limits new streams and cuts no stream.
//!
//! A stream whose target is being dialed, or whose reply is not sent yet, does not count as
//! stalled. The data that its peer has already sent fits into the eight windows.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::sleep;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

mod growth;

/// Stream windows of a connection in addition to the bytes that stalled streams hold.
const SPARE_WINDOWS: u64 = 8;
/// Time between two samples of the readers.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// A reader that reads nothing for this many samples (100 ms) is stalled.
const SAMPLES_TO_STALL: u32 = 2;
/// A stalled reader stays charged until it has read for this many samples. Otherwise a slow reader
/// would make the window oscillate.
const SAMPLES_TO_RECOVER: u32 = 20;
/// One peer that holds more than the pool's size divided by this number gets no new streams.
const PEER_SHARE_DIVISOR: u64 = 4;

/// The stream window of a session, and the limits on its growth.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamWindow {
    initial: u64,
    max: u64,
    /// Bytes that all streams of the session may hold together.
    total: u64,
}

impl StreamWindow {
    /// Creates a window that does not grow.
    pub(super) fn fixed(bytes: u32) -> Self {
        Self {
            initial: bytes.into(),
            max: bytes.into(),
            total: u64::MAX,
        }
    }

    /// Creates a window that grows to `max` bytes, for a session of `streams` streams.
    pub(super) fn growing(bytes: u32, max: u32, streams: u32) -> Self {
        Self {
            initial: bytes.into(),
            max: max.max(bytes).into(),
            total: u64::from(bytes) * u64::from(streams),
        }
    }
}

/// The windows that a session grants to its peer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReceiveWindows {
    pub(super) stream: u64,
    pub(super) connection: u64,
}

/// The bytes that stalled streams of all sessions hold, with a limit.
#[derive(Debug)]
pub struct BufferPool {
    limit: u64,
    charged: AtomicU64,
    /// The sessions that have streams.
    sessions: Mutex<Vec<Weak<SessionFlow>>>,
    /// Notified when `sessions` is no longer empty.
    session_added: Arc<Notify>,
    sampler: OnceLock<AbortOnDropHandle<()>>,
}

impl BufferPool {
    /// Creates a pool of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            charged: AtomicU64::new(0),
            sessions: Mutex::default(),
            session_added: Arc::default(),
            sampler: OnceLock::new(),
        })
    }

    /// Returns the bytes that stalled streams currently hold.
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    /// Returns the size of the pool in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Registers a session. The pool calls `set_windows` when a window of the session changes. Must
    /// be called inside a tokio runtime.
    pub(super) fn session(
        self: &Arc<Self>,
        mut stream_window: StreamWindow,
        set_windows: impl Fn(ReceiveWindows) + Send + Sync + 'static,
    ) -> Arc<SessionFlow> {
        // Streams that stall at once and fill the spare windows must not use up the peer's share.
        let share = self.limit / PEER_SHARE_DIVISOR / SPARE_WINDOWS;
        stream_window.max = stream_window.max.min(share).max(stream_window.initial);
        self.sampler.get_or_init(|| {
            let sampling = sample_all(Arc::downgrade(self), self.session_added.clone());
            AbortOnDropHandle::new(TaskTracker::new().spawn(sampling))
        });
        Arc::new_cyclic(|this| SessionFlow {
            this: this.clone(),
            pool: self.clone(),
            stream_window,
            window: AtomicU64::new(stream_window.initial),
            granted: AtomicU64::new(stream_window.initial),
            monitors: Mutex::default(),
            charged: AtomicU64::new(0),
            set_windows: Mutex::new(Box::new(set_windows)),
        })
    }

    /// Samples the sessions that have streams. Returns whether any session still has one.
    fn sample(&self) -> bool {
        let sessions = std::mem::take(&mut *self.sessions.lock());
        let active = sessions
            .into_iter()
            .filter(|session| session.upgrade().is_some_and(|session| session.sample()))
            .collect::<Vec<_>>();
        let mut sessions = self.sessions.lock();
        sessions.extend(active);
        !sessions.is_empty()
    }
}

/// Samples the readers of a pool. Sleeps while no session has a stream, so that an idle process is
/// not woken.
async fn sample_all(pool: Weak<BufferPool>, session_added: Arc<Notify>) {
    loop {
        session_added.notified().await;
        loop {
            sleep(SAMPLE_INTERVAL).await;
            match pool.upgrade().map(|pool| pool.sample()) {
                Some(true) => {}
                Some(false) => break,
                None => return,
            }
        }
    }
}

/// Returns the connection window for `charged` bytes held by stalled streams.
pub(super) fn connection_window(stream_window: u32, charged: u64) -> u64 {
    charged + SPARE_WINDOWS * u64::from(stream_window)
}

/// The bytes that the stalled streams of one session hold.
pub(super) struct SessionFlow {
    this: Weak<Self>,
    pool: Arc<BufferPool>,
    stream_window: StreamWindow,
    /// The stream window that was set last.
    window: AtomicU64,
    /// The largest stream window that the peer may still use.
    granted: AtomicU64,
    monitors: Mutex<Vec<StreamUsage>>,
    charged: AtomicU64,
    /// Locked while a call has the current values, so that the last call has the last ones.
    set_windows: Mutex<Box<dyn Fn(ReceiveWindows) + Send + Sync>>,
}

#[derive(Debug)]
struct StreamUsage {
    read_monitor: Arc<ReadMonitor>,
    reads: u32,
    idle_samples: u32,
    active_samples: u32,
}

impl SessionFlow {
    /// Returns the monitor of a new stream.
    pub(super) fn read_monitor(&self) -> Arc<ReadMonitor> {
        let read_monitor = Arc::<ReadMonitor>::default();
        let mut monitors = self.monitors.lock();
        if monitors.is_empty() {
            self.pool.sessions.lock().push(self.this.clone());
            self.pool.session_added.notify_one();
        }
        monitors.push(StreamUsage {
            read_monitor: read_monitor.clone(),
            reads: 0,
            idle_samples: 0,
            active_samples: SAMPLES_TO_RECOVER,
        });
        let streams = monitors.len() as u64;
        drop(monitors);
        self.narrow(streams);
        read_monitor
    }

    /// Returns whether the session may get new streams.
    pub(super) fn has_room(&self) -> bool {
        self.pool.charged() < self.pool.limit
            && self.charged.load(Ordering::Relaxed) <= self.pool.limit / PEER_SHARE_DIVISOR
            && self.has_room_for_granted_windows()
    }

    fn update_windows(&self) {
        let set_windows = self.set_windows.lock();
        let stream = self.window.load(Ordering::Relaxed);
        let connection = self.charged.load(Ordering::Relaxed) + SPARE_WINDOWS * stream;
        (*set_windows)(ReceiveWindows { stream, connection });
    }

    /// Charges the stalled streams. Returns whether the session has streams.
    fn sample(&self) -> bool {
        let mut monitors = self.monitors.lock();
        // The stream holds the other reference.
        monitors.retain(|usage| {
            Arc::strong_count(&usage.read_monitor) > 1
                && !usage.read_monitor.is_finished.load(Ordering::Relaxed)
        });
        let window = self.window.load(Ordering::Relaxed);
        let charged = monitors.iter_mut().map(|usage| usage.charge(window)).sum();
        let streams = monitors.len() as u64;
        drop(monitors);
        self.charge(charged);
        self.narrow(streams);
        streams > 0
    }

    fn charge(&self, charged: u64) {
        let before = self.charged.swap(charged, Ordering::Relaxed);
        if charged == before {
            return;
        }
        self.pool.charged.fetch_add(charged, Ordering::Relaxed);
        self.pool.charged.fetch_sub(before, Ordering::Relaxed);
        self.update_windows();
    }
}

impl std::fmt::Debug for SessionFlow {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("SessionFlow")
            .field("charged", &self.charged)
            .finish_non_exhaustive()
    }
}

impl Drop for SessionFlow {
    fn drop(&mut self) {
        let charged = self.charged.load(Ordering::Relaxed);
        self.pool.charged.fetch_sub(charged, Ordering::Relaxed);
    }
}

impl StreamUsage {
    fn charge(&mut self, stream_window: u64) -> u64 {
        let reads = self.read_monitor.reads.load(Ordering::Relaxed);
        if self.read_monitor.is_waiting.load(Ordering::Acquire) || reads != self.reads {
            (self.reads, self.idle_samples) = (reads, 0);
            self.active_samples = self.active_samples.saturating_add(1);
        } else {
            self.idle_samples = self.idle_samples.saturating_add(1);
            if self.idle_samples >= SAMPLES_TO_STALL {
                self.active_samples = 0;
            }
        }
        if self.active_samples >= SAMPLES_TO_RECOVER {
            return 0;
        }
        match self.read_monitor.unread.load(Ordering::Relaxed) {
            UNREAD_UNKNOWN => stream_window,
            // More than the window if the window was larger before.
            unread => unread,
        }
    }
}

/// The activity of a stream's reader.
#[derive(Debug)]
pub struct ReadMonitor {
    /// Counts reads that returned data. The value only has to differ between two samples.
    reads: AtomicU32,
    /// Set while the reader waits for bytes and none have arrived, so the reader is not stalled.
    /// Cleared when a reader is woken, even if it does not read (because its own writer is
    /// blocked).
    is_waiting: AtomicBool,
    reader: AtomicWaker,
    /// Number of bytes received and not read, if the transport reports it.
    unread: AtomicU64,
    is_finished: AtomicBool,
}

/// The transport does not report the number of unread bytes.
const UNREAD_UNKNOWN: u64 = u64::MAX;

impl Default for ReadMonitor {
    fn default() -> Self {
        Self {
            reads: AtomicU32::new(0),
            // No reader is expected before the first read: the target is being dialed, or the reply
            // is pending.
            is_waiting: AtomicBool::new(true),
            reader: AtomicWaker::new(),
            unread: AtomicU64::new(UNREAD_UNKNOWN),
            is_finished: AtomicBool::new(false),
        }
    }
}

impl ReadMonitor {
    /// Registers the reader before a read. Returns the waker that the transport must wake instead
    /// of the reader's.
    pub(super) fn begin_read(self: &Arc<Self>, cx: &Context<'_>) -> Waker {
        self.reader.register(cx.waker());
        self.is_waiting.store(true, Ordering::Release);
        Waker::from(self.clone())
    }

    /// Records that a read returned data, or that the reader is expected to read.
    pub(super) fn end_read(&self) {
        self.is_waiting.store(false, Ordering::Release);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_unread(&self, bytes: usize) {
        self.unread.store(bytes as u64, Ordering::Relaxed);
    }

    /// Stops the monitoring, for streams that are not requests and for ended ones.
    pub(super) fn finish(&self) {
        self.is_finished.store(true, Ordering::Relaxed);
    }
}

impl Wake for ReadMonitor {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_waiting.store(false, Ordering::Release);
        self.reader.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u32 = 1000;

    fn session(limit: u64) -> (Arc<BufferPool>, Arc<SessionFlow>, Arc<AtomicU64>) {
        let pool = BufferPool::new(limit);
        let window = Arc::new(AtomicU64::new(0));
        let observed = window.clone();
        let flow = pool.session(StreamWindow::fixed(WINDOW), move |windows| {
            observed.store(windows.connection, Ordering::Relaxed)
        });
        (pool, flow, window)
    }

    fn sample(flow: &SessionFlow, times: u32) {
        for _ in 0..times {
            flow.sample();
        }
    }

    #[tokio::test]
    async fn stalled_stream_is_charged_and_the_window_grows_by_it() {
        let (pool, flow, window) = session(1 << 20);
        let monitors: Vec<_> = (0..3).map(|_| flow.read_monitor()).collect();
        monitors[0].end_read();
        let waker = monitors[1].begin_read(&Context::from_waker(Waker::noop()));
        monitors[2].end_read();
        monitors[2].set_unread(300);
        sample(&flow, 1);
        assert_eq!(pool.charged(), 0, "100 ms have not passed");
        sample(&flow, 2);
        assert_eq!(pool.charged(), 1300);
        assert_eq!(window.load(Ordering::Relaxed), 8 * 1000 + 1300);
        // Bytes arrived for the waiting reader, which does not read them.
        waker.wake();
        sample(&flow, 3);
        assert_eq!(pool.charged(), 2300);
    }

    #[tokio::test]
    async fn charge_goes_when_the_reader_is_steady_or_the_stream_is_gone() {
        let (pool, flow, window) = session(1 << 20);
        let (slow, dropped) = (flow.read_monitor(), flow.read_monitor());
        slow.end_read();
        dropped.end_read();
        sample(&flow, 3);
        assert_eq!(pool.charged(), 2000);
        drop(dropped);
        sample(&flow, 1);
        assert_eq!(pool.charged(), 1000);
        for _ in 0..SAMPLES_TO_RECOVER {
            assert_eq!(pool.charged(), 1000, "a few reads do not make it steady");
            slow.end_read();
            sample(&flow, 1);
        }
        assert_eq!(pool.charged(), 0);
        assert_eq!(window.load(Ordering::Relaxed), 8000);
    }

    #[tokio::test]
    async fn full_pool_or_a_quarter_of_it_stops_new_streams() {
        let (pool, greedy, _window) = session(8000);
        let modest = pool.session(StreamWindow::fixed(WINDOW), |_| {});
        let stalled = |flow: &SessionFlow| {
            let read_monitor = flow.read_monitor();
            read_monitor.end_read();
            read_monitor
        };
        let greedy_streams: Vec<_> = (0..3).map(|_| stalled(&greedy)).collect();
        sample(&greedy, 3);
        assert!(!greedy.has_room() && modest.has_room());
        let others: Vec<_> = (0..5)
            .map(|_| {
                let flow = pool.session(StreamWindow::fixed(WINDOW), |_| {});
                let read_monitor = stalled(&flow);
                sample(&flow, 3);
                (flow, read_monitor)
            })
            .collect();
        assert_eq!(pool.charged(), 8000);
        assert!(!modest.has_room(), "the pool is full");
        drop(others);
        assert!(modest.has_room());
        drop(greedy_streams);
        sample(&greedy, 1);
        assert!(greedy.has_room());
    }
}
