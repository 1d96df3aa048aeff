//! *Late* streams: those that a source opens although it holds the most of what is short.
//!
//! A source can be a program with many users, such as kube-apiserver: its small requests must not
//! wait for its streams that are not read. So a few of its streams at a time may use the reserve that
//! is left to others, each up to [`LATE_BYTES`] while its reader stalls, and all of them at most half
//! of it. A stream counts until it has ended, and for a second at most, because by then its reader
//! has shown whether it reads.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::shortage::RESERVE_SHARE;
use super::{
    BufferPool, FlowState, OTHERS_SHARE, ReadMonitor, SAMPLE_INTERVAL, SHORT_SAMPLES, SessionFlow,
};

/// Bytes that a late stream may send before it is held like the others of its source.
pub(super) const LATE_BYTES: u64 = 64 << 10;
/// Late streams of one source at a time.
const LATE_STREAMS: u32 = 4;
/// Samples after which a late stream is not counted: 1 s.
pub(super) const LATE_SAMPLES: u32 = SHORT_SAMPLES;

/// Time that a stream waits for the permit of another one, which lasts half as long.
const LATE_WAIT: Duration = Duration::from_secs(2);

/// One of the late streams of a source. Dropping the permit admits the next one.
#[derive(Debug)]
pub(super) struct LatePermit {
    pool: Arc<BufferPool>,
    source: u64,
}

impl BufferPool {
    fn late_permit(self: &Arc<Self>, source: u64) -> Option<LatePermit> {
        let mut late = self.late.lock();
        let streams = late.entry(source).or_default();
        if *streams >= LATE_STREAMS {
            return None;
        }
        *streams += 1;
        Some(LatePermit {
            pool: self.clone(),
            source,
        })
    }
}

impl Drop for LatePermit {
    fn drop(&mut self) {
        let mut late = self.pool.late.lock();
        if let Some(streams) = late.get_mut(&self.source) {
            *streams -= 1;
            if *streams == 0 {
                late.remove(&self.source);
            }
        }
    }
}

impl SessionFlow {
    /// Like [`SessionFlow::open`], but waits up to [`LATE_WAIT`] for the permit of a late stream.
    /// Cancel-safe.
    pub(super) async fn open_or_wait(&self, source: u64) -> Option<Arc<ReadMonitor>> {
        let deadline = Instant::now() + LATE_WAIT;
        loop {
            let opened = self.open(source);
            if opened.is_some() || Instant::now() >= deadline || !self.is_late(source) {
                return opened;
            }
            sleep(SAMPLE_INTERVAL).await;
        }
    }

    fn is_late(&self, source: u64) -> bool {
        let state = &mut *self.lock();
        state.shortage.is_held(source) || self.is_refused(state, source)
    }

    /// Returns the permit of a stream that a source opens although it holds the most, unless late
    /// streams would use what is left to others.
    pub(super) fn permit_late(&self, state: &FlowState, source: u64) -> Option<LatePermit> {
        let free = self.pool.free();
        let reserve = self.memory(state.shortage.reserve + LATE_BYTES);
        let has_reserve = !self.is_exhausted(state) || 2 * reserve <= free / RESERVE_SHARE;
        if !has_reserve || free < self.pool.limit / OTHERS_SHARE {
            return None;
        }
        self.pool.late_permit(source)
    }
}
