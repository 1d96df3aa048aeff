//! Flow control: a reader that stalls costs memory, never another stream's progress.
//!
//! Each stream has its own window. The connection's window is what stalled streams hold plus eight stream windows for
//! the others, and follows within some 100 ms, so stalled readers cannot use it up. What they hold is charged to the
//! session and to the process's pool; the pool limits which new streams are admitted and cuts nothing. A stream whose
//! target is dialled, or whose reply waits to be sent, does not count as stalled: what its peer has sent ahead is in the eight.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::{Context, Wake, Waker};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// Stream windows that a connection has beyond what stalled streams hold.
const WINDOWS_FREE: u64 = 8;
/// Time between two looks at the readers.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// A reader that takes nothing for this many looks (100 ms) is stalled.
const LOOKS_TO_STALL: u32 = 2;
/// A stalled reader stays charged until it has read for this many looks: a slow one would have the window breathe.
const LOOKS_TO_CALM: u32 = 20;
/// The share of the pool that one peer may hold before it gets no new streams.
const SHARE_OF_ONE: u64 = 4;

/// What stalled streams of all sessions hold, against a limit.
#[derive(Debug)]
pub struct BufferPool {
    limit: u64,
    charged: AtomicU64,
    sessions: Mutex<Vec<Weak<SessionFlow>>>,
    looking: OnceLock<AbortOnDropHandle<()>>,
}

impl BufferPool {
    /// A pool of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            charged: AtomicU64::new(0),
            sessions: Mutex::default(),
            looking: OnceLock::new(),
        })
    }

    /// Bytes that stalled streams hold now.
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.charged.load(Ordering::Relaxed)
    }

    /// The size of the pool.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Accounts for a session; `set_window` is told its connection window when it changes. Must be called inside a tokio
    /// runtime.
    pub(super) fn session(
        self: &Arc<Self>,
        stream_window: u32,
        set_window: impl Fn(u64) + Send + Sync + 'static,
    ) -> Arc<SessionFlow> {
        let flow = Arc::new(SessionFlow {
            pool: self.clone(),
            stream_window: stream_window.into(),
            gauges: Mutex::default(),
            charged: AtomicU64::new(0),
            set_window: Box::new(set_window),
        });
        lock(&self.sessions).push(Arc::downgrade(&flow));
        self.looking.get_or_init(|| {
            let pool = Arc::downgrade(self);
            AbortOnDropHandle::new(TaskTracker::new().spawn(look_at_all(pool)))
        });
        flow
    }
}

async fn look_at_all(pool: Weak<BufferPool>) {
    let mut looks = interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let Some(pool) = pool.upgrade() else { return };
        let mut sessions = Vec::new();
        lock(&pool.sessions).retain(|session| {
            let session = session.upgrade();
            let alive = session.is_some();
            sessions.extend(session);
            alive
        });
        for session in sessions {
            session.look();
        }
    }
}

/// The connection window for `charged` bytes held by stalled streams.
pub(super) fn connection_window(stream_window: u32, charged: u64) -> u64 {
    charged + WINDOWS_FREE * u64::from(stream_window)
}

/// What the stalled streams of one session hold.
pub(super) struct SessionFlow {
    pool: Arc<BufferPool>,
    stream_window: u64,
    gauges: Mutex<Vec<Watched>>,
    charged: AtomicU64,
    set_window: Box<dyn Fn(u64) + Send + Sync>,
}

#[derive(Debug)]
struct Watched {
    gauge: Arc<Gauge>,
    reads: u32,
    still: u32,
    calm: u32,
}

impl SessionFlow {
    /// The gauge of a new stream.
    pub(super) fn gauge(&self) -> Arc<Gauge> {
        let gauge = Arc::<Gauge>::default();
        lock(&self.gauges).push(Watched {
            gauge: gauge.clone(),
            reads: 0,
            still: 0,
            calm: LOOKS_TO_CALM,
        });
        gauge
    }

    /// Whether the session may get new streams.
    pub(super) fn has_room(&self) -> bool {
        self.pool.charged() < self.pool.limit
            && self.charged.load(Ordering::Relaxed) <= self.pool.limit / SHARE_OF_ONE
    }

    fn look(&self) {
        let mut gauges = lock(&self.gauges);
        // The other owner is the stream.
        gauges.retain(|watched| {
            Arc::strong_count(&watched.gauge) > 1
                && !watched.gauge.uncounted.load(Ordering::Relaxed)
        });
        let charged = gauges
            .iter_mut()
            .map(|watched| watched.charge(self.stream_window))
            .sum();
        drop(gauges);
        self.charge(charged);
    }

    fn charge(&self, charged: u64) {
        let before = self.charged.swap(charged, Ordering::Relaxed);
        if charged == before {
            return;
        }
        self.pool.charged.fetch_add(charged, Ordering::Relaxed);
        self.pool.charged.fetch_sub(before, Ordering::Relaxed);
        (self.set_window)(charged + WINDOWS_FREE * self.stream_window);
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

impl Watched {
    fn charge(&mut self, stream_window: u64) -> u64 {
        let reads = self.gauge.reads.load(Ordering::Relaxed);
        if self.gauge.waiting.load(Ordering::Acquire) || reads != self.reads {
            (self.reads, self.still) = (reads, 0);
            self.calm = self.calm.saturating_add(1);
        } else {
            self.still = self.still.saturating_add(1);
            if self.still >= LOOKS_TO_STALL {
                self.calm = 0;
            }
        }
        if self.calm >= LOOKS_TO_CALM {
            return 0;
        }
        match self.gauge.unread.load(Ordering::Relaxed) {
            UNKNOWN => stream_window,
            unread => unread.min(stream_window),
        }
    }
}

/// What a stream shows of its reader.
#[derive(Debug)]
pub struct Gauge {
    /// Reads that gave something; it only has to differ between two looks.
    reads: AtomicU32,
    /// The reader waits for bytes and none have come since, so it is not the one that stalls. A reader that was woken and
    /// does not come back (its own writer is blocked) waits no more.
    waiting: AtomicBool,
    reader: AtomicWaker,
    /// Bytes received and not read, where the transport tells.
    unread: AtomicU64,
    uncounted: AtomicBool,
}

/// The transport does not tell how much is unread.
const UNKNOWN: u64 = u64::MAX;

impl Default for Gauge {
    fn default() -> Self {
        Self {
            reads: AtomicU32::new(0),
            // Nobody has to read before the first read: the target is being dialled, or the reply is awaited.
            waiting: AtomicBool::new(true),
            reader: AtomicWaker::new(),
            unread: AtomicU64::new(UNKNOWN),
            uncounted: AtomicBool::new(false),
        }
    }
}

impl Gauge {
    /// Before a read: what the transport has to wake instead of the reader itself.
    pub(super) fn begin_read(self: &Arc<Self>, cx: &Context<'_>) -> Waker {
        self.reader.register(cx.waker());
        self.waiting.store(true, Ordering::Release);
        Waker::from(self.clone())
    }

    /// A read gave something, or it is the reader's turn.
    pub(super) fn end_read(&self) {
        self.waiting.store(false, Ordering::Release);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn set_unread(&self, bytes: usize) {
        self.unread.store(bytes as u64, Ordering::Relaxed);
    }

    /// For streams that are not requests.
    pub(super) fn leave(&self) {
        self.uncounted.store(true, Ordering::Relaxed);
    }
}

impl Wake for Gauge {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.waiting.store(false, Ordering::Release);
        self.reader.wake();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u32 = 1000;

    fn session(limit: u64) -> (Arc<BufferPool>, Arc<SessionFlow>, Arc<AtomicU64>) {
        let pool = BufferPool::new(limit);
        let window = Arc::new(AtomicU64::new(0));
        let seen = window.clone();
        let flow = pool.session(WINDOW, move |window| seen.store(window, Ordering::Relaxed));
        (pool, flow, window)
    }

    fn look(flow: &SessionFlow, times: u32) {
        (0..times).for_each(|_| flow.look());
    }

    #[tokio::test]
    async fn stalled_stream_is_charged_and_the_window_grows_by_it() {
        let (pool, flow, window) = session(1 << 20);
        let gauges: Vec<_> = (0..3).map(|_| flow.gauge()).collect();
        gauges[0].end_read();
        let waker = gauges[1].begin_read(&Context::from_waker(Waker::noop()));
        gauges[2].end_read();
        gauges[2].set_unread(300);
        look(&flow, 1);
        assert_eq!(pool.charged(), 0, "100 ms have not passed");
        look(&flow, 2);
        assert_eq!(pool.charged(), 1300);
        assert_eq!(window.load(Ordering::Relaxed), 8 * 1000 + 1300);
        // Bytes came for the one that waits, and it does not fetch them.
        waker.wake();
        look(&flow, 3);
        assert_eq!(pool.charged(), 2300);
    }

    #[tokio::test]
    async fn charge_goes_when_the_reader_is_steady_or_the_stream_is_gone() {
        let (pool, flow, window) = session(1 << 20);
        let (slow, gone) = (flow.gauge(), flow.gauge());
        slow.end_read();
        gone.end_read();
        look(&flow, 3);
        assert_eq!(pool.charged(), 2000);
        drop(gone);
        look(&flow, 1);
        assert_eq!(pool.charged(), 1000);
        for _ in 0..LOOKS_TO_CALM {
            assert_eq!(pool.charged(), 1000, "a few reads do not make it steady");
            slow.end_read();
            look(&flow, 1);
        }
        assert_eq!(pool.charged(), 0);
        assert_eq!(window.load(Ordering::Relaxed), 8000);
    }

    #[tokio::test]
    async fn full_pool_or_a_quarter_of_it_stops_new_streams() {
        let (pool, greedy, _window) = session(8000);
        let modest = pool.session(WINDOW, |_| {});
        let stalled = |flow: &SessionFlow| {
            let gauge = flow.gauge();
            gauge.end_read();
            gauge
        };
        let held: Vec<_> = (0..3).map(|_| stalled(&greedy)).collect();
        look(&greedy, 3);
        assert!(!greedy.has_room() && modest.has_room());
        let others: Vec<_> = (0..5)
            .map(|_| {
                let flow = pool.session(WINDOW, |_| {});
                let gauge = stalled(&flow);
                look(&flow, 3);
                (flow, gauge)
            })
            .collect();
        assert_eq!(pool.charged(), 8000);
        assert!(!modest.has_room(), "the pool is full");
        drop(others);
        assert!(modest.has_room());
        drop(held);
        look(&greedy, 1);
        assert!(greedy.has_room());
    }
}
