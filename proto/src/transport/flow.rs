//! Flow control: what a peer may send unread is reserved from a pool before the peer may send it.
//!
//! A session's *credit* is the number of bytes that its peer may have sent and that this end has
//! not read (`flow/credit.rs`). The session reserves memory for the part of its credit that can
//! arrive: a peer sends on open streams only, and on each at most a stream window. So an idle
//! session reserves nothing, unless its peer opens streams. Received bytes pin more memory than
//! their number, and each transport has a measured factor for that.
//!
//! Invariants, which `flow/model.rs` checks with random sessions:
//! - The reservation of a session covers the bytes that its peer can have unread. While no stream is
//!   open, it does not cover the base window, nor what larger windows have left: a peer that opens
//!   streams can send that until its stream is accepted, and reserved for, or refused.
//! - The reservations of all sessions together never exceed the pool.
//!
//! A window becomes larger when a stream is opened, and while bytes are read: it is at least twice
//! what was read in the last second, which is ahead of a sender in slow start. It also covers what
//! stalled streams hold, so that they do not block others. Credit cannot be withdrawn. A smaller
//! window therefore takes effect as the peer uses its credit, and memory is released then, or when
//! streams end.
//!
//! The first stream of a session begins with a stream window, if half of the pool is free and the
//! sessions are few. When the pool is short, new windows are small first: a session may reserve a third of the free
//! part of the pool in total (or as much, if its peer opens streams), much less before its streams
//! are read, and nothing of the last eighth while it has stalled streams.
//!
//! Each stream has a *source*, who caused it (a caller). The sources with the most unread data are
//! the first that get no new streams: in a session whose window they hold, where they leave a
//! reserve to the others (`flow/shortage.rs`), and in all sessions when less than a quarter of the
//! pool is free. Streams are cut in one case only: when readers that have read nothing for 10 s hold
//! a window or the pool, and another stream waits, one of them ends (`flow/stalled.rs`).
//!
//! What this end has sent and the peer has not acknowledged is reserved, too
//! (`flow/send_window.rs`).

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::sleep;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

mod active_window;
mod credit;
mod growth;
#[cfg(test)]
mod model;
mod monitor;
mod permit;
mod pool_gauges;
mod send_growth;
mod send_window;
mod shortage;
mod shortage_state;
mod sources;
mod stalled;
#[cfg(test)]
pub(super) mod test_transport;
#[cfg(test)]
mod tests;
mod write_monitor;

use active_window::{ACTIVE_WINDOW_MIN, ActiveWindow};
use credit::Credit;
pub use monitor::ReadMonitor;
use monitor::{StreamActivity, StreamOwner, StreamUsage};
pub use permit::PoolPermit;
pub use pool_gauges::PoolGauges;
pub(super) use send_window::SEND_BASE_WINDOW;
use send_window::SendWindow;
use shortage_state::Shortage;
pub use sources::source_number;

/// Stream windows of a connection in addition to the bytes that stalled streams hold.
const SPARE_WINDOWS: u64 = 8;
/// The window of a session without streams. HTTP/2 begins with this window (RFC 9113, section
/// 6.9.2). It carries the control stream, which is always read, so its memory is not part of the
/// pool.
pub(super) const BASE_WINDOW: u64 = 65_535;
/// Credit that the peer must have for streams that do not stall. With less, the session gets no new
/// streams.
const SPARE_MIN: u64 = 32 << 10;
/// Smallest change of a window. Each one is a message to the peer.
const STEP_MIN: u64 = 16 << 10;
/// Fraction of the free part of the pool that one session may reserve: a quarter of the pool if
/// there is one such session.
const FREE_SHARE: u64 = 3;
/// The same for a session whose peer opens streams. A process has few of them.
const FREE_SHARE_OF_PEER: u64 = 1;
/// Fraction of the free part of the pool that one session may reserve for streams of which nothing
/// was read.
const UNREAD_SHARE: u64 = 256;
/// Fraction of the pool that the first windows of all sessions may reserve together. A session keeps
/// what is left of its credit, so that more would be reserved when all of them have a stream.
const FIRST_SHARE: u64 = 8;
/// First windows are small while less than this fraction of the pool is free.
const FIRST_FREE_SHARE: u64 = 2;
/// Fraction of the pool that sessions with stalled streams leave to others.
const OTHERS_SHARE: u64 = 8;
/// Fraction of the pool below which the sources that hold the most get no new streams.
const SHORT_SHARE: u64 = 4;
/// The pool counts as full when less than this is free: a new session gets no window for a stream.
const FULL_BYTES: u64 = 512 << 10;
/// Time between two samples of the readers.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// Samples after a refused stream in which the session counts as one for which streams wait: 10 s.
const REFUSED_SAMPLES: u32 = 200;

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

/// What a session tells the pool about its transport.
#[derive(Debug, Clone, Copy)]
pub(super) struct FlowSettings {
    pub(super) stream_window: StreamWindow,
    /// Memory that unread bytes pin, in percent of their number.
    pub(super) memory_percent: u64,
    /// Whether the peer opens streams at any time, as at an agent's end.
    pub(super) peer_opens: bool,
}

/// The windows that a session grants to its peer, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReceiveWindows {
    pub(super) stream: u64,
    pub(super) connection: u64,
}

/// What flow control asks of a session's transport. The functions are called while the flow is
/// locked, so that the last call has the last values.
pub(super) trait FlowTransport: Send + Sync {
    /// Sets what the peer may send.
    fn set_windows(&self, windows: ReceiveWindows);

    /// Returns how often the peer has reported that it used all of its credit, or `None` if the
    /// transport reports what is unread.
    fn times_blocked(&self) -> Option<u64>;

    /// Tells the peer that this end is short, see [`SessionFlow::set_peer_short`].
    fn report_shortage(&self);

    /// Tells the peer, which is short, that a stream waits, see [`SessionFlow::set_peer_waits`].
    fn report_waiting(&self);

    /// Returns the congestion window in bytes, if the transport keeps sent data until it is
    /// acknowledged.
    fn congestion_window(&self) -> Option<u64>;

    /// Sets how much may be sent without an acknowledgement.
    fn set_send_window(&self, bytes: u64);
}

/// The memory for data that peers may send unread, with a limit.
#[derive(Debug)]
pub struct BufferPool {
    limit: u64,
    reserved: AtomicU64,
    /// The number of all sessions.
    session_count: AtomicU64,
    /// The sessions that have streams.
    sessions: Mutex<Vec<Weak<SessionFlow>>>,
    /// Notified when `sessions` is no longer empty.
    session_added: Arc<Notify>,
    /// Samples for which streams of any session count as waiting for memory.
    refused: AtomicU32,
    /// The sources that get no new streams, because they hold the most and little is free.
    heavy_sources: Mutex<HashSet<u64>>,
    sampler: OnceLock<AbortOnDropHandle<()>>,
}

impl BufferPool {
    /// Creates a pool of `limit` bytes.
    pub fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            limit,
            reserved: AtomicU64::new(0),
            session_count: AtomicU64::new(0),
            sessions: Mutex::default(),
            session_added: Arc::default(),
            refused: AtomicU32::new(0),
            heavy_sources: Mutex::default(),
            sampler: OnceLock::new(),
        })
    }

    /// Returns the bytes of memory that are reserved.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Returns the size of the pool in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    fn free(&self) -> u64 {
        self.limit.saturating_sub(self.reserved())
    }

    fn is_full(&self) -> bool {
        self.free() < FULL_BYTES
    }

    fn try_reserve(&self, bytes: u64) -> bool {
        let reserve = |reserved: u64| {
            let after = reserved.checked_add(bytes)?;
            (after <= self.limit).then_some(after)
        };
        self.reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .is_ok()
    }

    fn release(&self, bytes: u64) {
        self.reserved.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Registers a session, whose peer has the base window, and which has the base send window. Must
    /// be called inside a tokio runtime.
    pub(super) fn session(
        self: &Arc<Self>,
        settings: FlowSettings,
        transport: impl FlowTransport + 'static,
    ) -> Arc<SessionFlow> {
        self.sampler.get_or_init(|| {
            let sampling = sample_all(Arc::downgrade(self), self.session_added.clone());
            AbortOnDropHandle::new(TaskTracker::new().spawn(sampling))
        });
        self.session_count.fetch_add(1, Ordering::Relaxed);
        let initial = settings.stream_window.initial;
        let first_window = if settings.peer_opens {
            self.first_window(&settings)
        } else {
            ACTIVE_WINDOW_MIN
        };
        let flow = Arc::new_cyclic(|this| SessionFlow {
            this: this.clone(),
            pool: self.clone(),
            settings,
            state: Mutex::new(FlowState {
                credit: Credit::new(BASE_WINDOW),
                reserved: 0,
                streams: Vec::new(),
                open: 0,
                peer_opens: settings.peer_opens,
                stream_window: initial,
                largest_window: initial,
                active: ActiveWindow::new(SPARE_WINDOWS * initial),
                idle_window: first_window,
                stalled: Stalled::default(),
                refused: 0,
                times_blocked: 0,
                shortage: Shortage::default(),
                heavy_sources: None,
                send: SendWindow::new(),
                is_sampled: false,
            }),
            reads: AtomicU64::new(0),
            grow_at: AtomicU64::new(ACTIVE_WINDOW_MIN / 2),
            writes: AtomicU64::new(0),
            send_at: AtomicU64::new(SEND_BASE_WINDOW / 2),
            transport: Box::new(transport),
        });
        flow.grow(&mut flow.lock());
        flow
    }

    /// Returns the window with which the streams of a session begin: up to a stream window, so that
    /// the first transfer waits for no larger one. Each doubling would cost a round trip over TCP,
    /// whose congestion window may be large.
    fn first_window(&self, settings: &FlowSettings) -> u64 {
        if self.free() < self.limit / FIRST_FREE_SHARE {
            return ACTIVE_WINDOW_MIN;
        }
        let sessions = self.session_count.load(Ordering::Relaxed).max(1);
        let memory = self.limit / FIRST_SHARE / sessions;
        let bytes = memory / settings.memory_percent * 100;
        bytes
            .min(settings.stream_window.initial)
            .max(ACTIVE_WINDOW_MIN)
    }

    /// Samples the sessions that have streams. Returns whether any session still has one.
    fn sample(&self) -> bool {
        let sessions = std::mem::take(&mut *self.sessions.lock());
        let active = sessions
            .into_iter()
            .filter(|session| session.upgrade().is_some_and(|session| session.sample()))
            .collect::<Vec<_>>();
        self.find_heavy_sources(&active);
        self.end_stalled(&active);
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

/// The windows of one session, and what it has reserved for them.
pub(super) struct SessionFlow {
    this: Weak<Self>,
    pool: Arc<BufferPool>,
    settings: FlowSettings,
    state: Mutex<FlowState>,
    /// Bytes that the readers of all streams have read.
    reads: AtomicU64,
    /// The value of `reads` at which the window grows.
    grow_at: AtomicU64,
    /// Bytes that the writers of all streams have written.
    writes: AtomicU64,
    /// The value of `writes` at which the send window may grow.
    send_at: AtomicU64,
    transport: Box<dyn FlowTransport>,
}

struct FlowState {
    credit: Credit,
    /// Bytes of memory that the session has reserved from the pool.
    reserved: u64,
    streams: Vec<StreamUsage>,
    /// Number of streams on which the peer can send.
    open: u64,
    peer_opens: bool,
    /// The stream window that was set last.
    stream_window: u64,
    /// The largest stream window that was ever set.
    largest_window: u64,
    active: ActiveWindow,
    /// The active window while no stream is open. It is the same at all times, as is what an idle
    /// session reserves.
    idle_window: u64,
    stalled: Stalled,
    /// Samples for which streams of this session count as waiting for its window.
    refused: u32,
    /// How often the peer had used all of its credit at the last call.
    times_blocked: u64,
    shortage: Shortage,
    /// The sources that hold most of the window as of the last sample, if they were asked for.
    heavy_sources: Option<HashSet<u64>>,
    send: SendWindow,
    is_sampled: bool,
}

/// The streams whose readers are stalled, as of the last sample.
#[derive(Debug, Clone, Copy, Default)]
struct Stalled {
    streams: u64,
    /// Bytes that they hold.
    bytes: u64,
}

impl SessionFlow {
    fn lock(&self) -> MutexGuard<'_, FlowState> {
        self.state.lock()
    }

    /// Returns the monitor of a stream that this end opens because of `source` (0: unknown). Returns
    /// nothing if the pool has no memory for the stream, or the source must have no more.
    pub(super) fn open(&self, source: u64) -> Option<Arc<ReadMonitor>> {
        let state = &mut *self.lock();
        if source != 0 && self.is_refused(state, source) {
            let is_of_peer = state.shortage.is_held(source);
            self.record_refusal(state, is_of_peer);
            return None;
        }
        if source != 0 && state.open == 0 {
            self.begin_active(state, self.pool.first_window(&self.settings));
        }
        let read_monitor = self.add_stream(state)?;
        read_monitor.activity().set_source(source, false);
        Some(read_monitor)
    }

    fn begin_active(&self, state: &mut FlowState, bytes: u64) {
        state.active.begin(bytes);
        self.grow_at
            .store(state.active.grow_at(), Ordering::Relaxed);
    }

    /// Returns whether a source gets no new streams, because it holds the most of what is short.
    fn is_refused(&self, state: &mut FlowState, source: u64) -> bool {
        state.shortage.is_held(source)
            || self.pool.heavy_sources.lock().contains(&source)
            || (self.is_exhausted(state) && state.heavy_sources().contains(&source))
    }

    /// Returns the monitor of a stream that the peer has opened. If the pool has no memory for it,
    /// [`SessionFlow::has_room`] is false and the stream must be refused.
    pub(super) fn accept(&self) -> Arc<ReadMonitor> {
        let state = &mut *self.lock();
        if state.open == 0 {
            self.begin_active(state, state.idle_window);
        }
        self.add_stream(state).unwrap_or_default()
    }

    fn add_stream(&self, state: &mut FlowState) -> Option<Arc<ReadMonitor>> {
        let exposure = state.exposure(state.credit.total(), state.open + 1);
        if !self.reserve(state, exposure) {
            self.record_refusal(state, false);
            return None;
        }
        let read_monitor = Arc::new(ReadMonitor::of_session(
            self.this.upgrade().map(|session| session as _),
        ));
        state.open += 1;
        state
            .streams
            .push(StreamUsage::new(read_monitor.activity()));
        if !std::mem::replace(&mut state.is_sampled, true) {
            self.pool.sessions.lock().push(self.this.clone());
            self.pool.session_added.notify_one();
        }
        self.narrow(state);
        self.grow(state);
        Some(read_monitor)
    }

    /// Records that the peer may open streams from now on. Call this function before the session
    /// has streams.
    pub(super) fn set_peer_opens(&self) {
        let state = &mut *self.lock();
        state.peer_opens = true;
        self.settle(state);
    }

    /// Returns whether the session may get a new stream. If not, the stream is recorded as one that
    /// waits for memory.
    pub(super) fn has_room(&self) -> bool {
        let state = &mut *self.lock();
        // A stream of the peer has been added already, if there was memory.
        let opened = if state.peer_opens {
            state.open.max(1)
        } else {
            state.open + 1
        };
        let exposure = state.exposure(state.credit.total(), opened);
        let has_memory = self.memory(exposure) <= state.reserved + self.pool.free();
        let has_room = has_memory && (!self.is_exhausted(state) || self.has_reserve(state));
        if !has_room {
            self.record_refusal(state, false);
        }
        has_room
    }

    /// Records that a stream waits for memory of this end.
    fn record_waiting(&self, state: &mut FlowState) {
        state.refused = REFUSED_SAMPLES;
        self.pool.refused.store(REFUSED_SAMPLES, Ordering::Relaxed);
    }

    /// Records that a stream waits for memory: of this end unless the peer alone is short, and of the
    /// peer if that is short.
    fn record_refusal(&self, state: &mut FlowState, is_of_peer: bool) {
        if !is_of_peer {
            self.record_waiting(state);
        }
        if state.shortage.begin_waiting_report() {
            self.transport.report_waiting();
        }
    }

    /// Returns whether stalled streams hold the window, and it cannot grow.
    fn is_exhausted(&self, state: &FlowState) -> bool {
        state.spare() < SPARE_MIN && self.growth_max(state) < SPARE_MIN
    }

    #[cfg(test)]
    pub(in crate::transport) fn stalled_streams(&self) -> u64 {
        self.lock().stalled.streams
    }

    /// Samples the streams. Returns whether the session has any.
    fn sample(&self) -> bool {
        let state = &mut *self.lock();
        state.streams.retain(StreamUsage::is_open_or_release);
        let window = state.stream_window;
        (state.stalled, state.heavy_sources) = (Stalled::default(), None);
        for usage in &mut state.streams {
            if let Some(held) = usage.sample(window) {
                state.stalled.streams += 1;
                state.stalled.bytes += held;
            }
        }
        state.refused = state.refused.saturating_sub(1);
        let reads = self.reads.load(Ordering::Relaxed);
        state.credit.begin_sample(reads);
        if state.active.sample(reads) {
            self.grow_at
                .store(state.active.grow_at(), Ordering::Relaxed);
        }
        let is_unread = state.streams.iter().any(|usage| usage.is_unread);
        if is_unread && self.is_newly_blocked(state) {
            state.active.double();
            self.grow_at
                .store(state.active.grow_at(), Ordering::Relaxed);
        }
        self.narrow(state);
        self.shrink(state);
        self.grow(state);
        self.sample_shortage(state);
        self.sample_peer_shortage(state);
        self.sample_send_window(state);
        self.settle(state);
        state.is_sampled = !state.streams.is_empty();
        state.is_sampled
    }

    /// Returns whether the peer has reported, since the last call, that it used all of its credit.
    /// A transport that reports exactly what is unread does not need it.
    fn is_newly_blocked(&self, state: &mut FlowState) -> bool {
        let blocked = self.transport.times_blocked().unwrap_or_default();
        std::mem::replace(&mut state.times_blocked, blocked) != blocked
    }

    /// Returns the credit that the session should have.
    fn target(&self, state: &FlowState) -> u64 {
        let streams = match state.open {
            0 if self.settings.peer_opens => 1,
            open => open,
        };
        if streams == 0 {
            return BASE_WINDOW;
        }
        let mut active = match state.open {
            // What is left of a larger window carries the next stream, until its window grows.
            0 => state.idle_window,
            _ => state.active.bytes(),
        };
        if active <= ACTIVE_WINDOW_MIN {
            active = active.min(self.bytes(self.pool.free() / UNREAD_SHARE));
        }
        let readers = streams.saturating_sub(state.stalled.streams).max(1);
        let active = active.min(readers.saturating_mul(state.stream_window));
        BASE_WINDOW + active + with_announcements(state.stalled.bytes)
    }

    /// Makes the window larger, as far as memory permits.
    fn grow(&self, state: &mut FlowState) {
        let (target, credit) = (self.target(state), state.credit.total());
        let missing = target.saturating_sub(credit);
        if missing < STEP_MIN.min(target / 8) {
            return;
        }
        let step = missing.min(self.growth_max(state));
        if step < STEP_MIN {
            if state.open > state.stalled.streams && self.pool.is_full() {
                self.pool.refused.store(REFUSED_SAMPLES, Ordering::Relaxed);
            }
            return;
        }
        self.raise(state, step);
    }

    /// Makes the window larger. Returns whether the pool has the memory.
    fn raise(&self, state: &mut FlowState, bytes: u64) -> bool {
        let exposure = state.exposure(state.credit.total() + bytes, state.open);
        let is_reserved = self.reserve(state, exposure);
        if is_reserved {
            state.credit.raise(bytes);
            self.update_windows(state);
        }
        is_reserved
    }

    /// Makes the window smaller if it is much larger than it should be.
    fn shrink(&self, state: &mut FlowState) {
        let (target, window) = (self.target(state), state.credit.window());
        let is_idle = state.open == 0;
        if window > target && (is_idle || window / 2 >= target) {
            state.credit.lower(target, !is_idle);
            self.update_windows(state);
        }
    }

    /// Returns the bytes by which the window may grow: the session may reserve a fraction of
    /// what is free then.
    fn growth_max(&self, state: &FlowState) -> u64 {
        let divisor = if self.settings.peer_opens {
            FREE_SHARE_OF_PEER
        } else {
            FREE_SHARE
        };
        let of_others = match state.stalled.streams {
            0 => 0,
            _ => self.pool.limit / OTHERS_SHARE,
        };
        let free = self.pool.free().saturating_sub(of_others);
        let share = (free / divisor).saturating_sub(state.reserved);
        // Free memory becomes less as the session reserves.
        self.bytes(share - share / (divisor + 1))
    }

    /// Changes the reservation to what the peer can send.
    fn settle(&self, state: &mut FlowState) {
        let exposure = state.exposure(state.credit.total(), state.open);
        self.reserve(state, exposure);
    }

    /// Changes the reservation to `exposure` bytes. Returns whether the pool has the memory.
    fn reserve(&self, state: &mut FlowState, exposure: u64) -> bool {
        let memory = self.memory(exposure);
        let is_reserved = match memory.checked_sub(state.reserved) {
            Some(more) => more == 0 || self.pool.try_reserve(more),
            None => {
                self.pool.release(state.reserved - memory);
                true
            }
        };
        if is_reserved {
            state.reserved = memory;
        }
        is_reserved
    }

    /// Returns the memory that `bytes` pin when they are not read.
    fn memory(&self, bytes: u64) -> u64 {
        bytes
            .saturating_mul(self.settings.memory_percent)
            .div_ceil(100)
    }

    /// Returns the bytes that pin at most `memory`.
    fn bytes(&self, memory: u64) -> u64 {
        memory / self.settings.memory_percent * 100
    }

    fn update_windows(&self, state: &FlowState) {
        self.transport.set_windows(ReceiveWindows {
            stream: state.stream_window,
            connection: state.credit.window(),
        });
    }
}

impl FlowState {
    /// Returns the bytes that the peer can have unread if it has `credit` and `open` streams.
    fn exposure(&self, credit: u64, open: u64) -> u64 {
        match (self.peer_opens, open) {
            // The excess is reserved with the peer's next stream, or the stream is refused.
            (true, 0) => credit.saturating_sub(self.credit.excess() + BASE_WINDOW),
            (true, _) => credit,
            (false, _) => credit.min(open.saturating_mul(self.largest_window)),
        }
    }

    /// Returns the credit that is left for streams that are not stalled, without the reserve. The
    /// peer may not know of the last eighth of a window.
    fn spare(&self) -> u64 {
        let unannounced = self.credit.window() / 8;
        let used = (self.stalled.bytes)
            .saturating_add(unannounced)
            .saturating_add(self.shortage.reserve);
        self.credit.total().saturating_sub(used)
    }
}

/// Adds what a window needs so that bytes of other streams are announced, although `stalled` bytes
/// of it are never read: quinn announces credit after an eighth of the window has been read.
fn with_announcements(stalled: u64) -> u64 {
    stalled.saturating_add(stalled / 7)
}

impl StreamOwner for SessionFlow {
    fn count_read(&self, bytes: u64) {
        let reads = self.reads.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if reads >= self.grow_at.load(Ordering::Relaxed) {
            let state = &mut *self.lock();
            let reads = self.reads.load(Ordering::Relaxed);
            state.active.grow(reads);
            self.grow_at
                .store(state.active.grow_at(), Ordering::Relaxed);
            self.grow(state);
        }
    }

    fn count_written(&self, bytes: u64) {
        self.count_sent(bytes);
    }

    fn set_source(&self, source: u64, activity: &StreamActivity) {
        // The shortage can end after this only.
        let state = &mut *self.lock();
        let is_held = source != 0 && state.shortage.is_held(source);
        state.shortage.has_held_streams |= is_held;
        activity.set_source(source, is_held);
    }

    fn refuses(&self, source: u64) -> bool {
        let state = &mut *self.lock();
        source != 0 && self.is_refused(state, source)
    }

    fn finish_stream(&self) {
        let state = &mut *self.lock();
        state.open = state.open.saturating_sub(1);
        state.shortage.has_finished_streams = true;
        if state.open == 0 {
            state.stalled = Stalled::default();
        }
        self.settle(state);
    }
}

impl std::fmt::Debug for SessionFlow {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.lock();
        formatter
            .debug_struct("SessionFlow")
            .field("credit", &state.credit)
            .field("reserved", &state.reserved)
            .field("open", &state.open)
            .finish_non_exhaustive()
    }
}

impl Drop for SessionFlow {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        self.pool.session_count.fetch_sub(1, Ordering::Relaxed);
        self.pool.release(state.reserved + state.send.reserved);
    }
}
