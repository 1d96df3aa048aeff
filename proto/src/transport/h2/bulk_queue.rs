//! The order in which streams with much unsent data hand it to h2. h2 sends what it has in turns of
//! one frame per stream, so a small message would wait for a frame of each busy stream. Only a few
//! streams with much data therefore have some in h2 at a time, and the others wait here.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::io::ConnState;
use super::stream::{BulkState, StreamShared, StreamState};
use crate::buffers::BUFFER_BYTES;

/// Unsent bytes above which a stream waits for the others. Less is sent at once.
pub(super) const BULK_MIN_BYTES: usize = 16 * 1024;
/// Bytes that streams with much data hand to h2 until the socket has accepted all: four frames.
const ROUND_BYTES: usize = 4 * BUFFER_BYTES;

/// The streams that wait, first come first served.
#[derive(Debug)]
pub(super) struct BulkQueue {
    round: Mutex<Round>,
    conn_state: Arc<ConnState>,
}

#[derive(Debug)]
struct Round {
    bytes_left: usize,
    waiting: VecDeque<Arc<StreamShared>>,
}

impl BulkQueue {
    pub(super) fn new(conn_state: Arc<ConnState>) -> Self {
        Self {
            round: Mutex::new(Round {
                bytes_left: ROUND_BYTES,
                waiting: VecDeque::new(),
            }),
            conn_state,
        }
    }

    /// Returns the time since which nothing waits for the path.
    pub(super) fn path_free_since(&self) -> Option<Instant> {
        self.conn_state.flushed_since()
    }

    /// Returns whether the stream may send its `bytes` unsent bytes. If not, its pump is woken as
    /// soon as it may.
    pub(super) fn acquire(
        &self,
        stream: &Arc<StreamShared>,
        state: &mut StreamState,
        bytes: usize,
    ) -> bool {
        match state.bulk {
            BulkState::Granted => {
                state.bulk = BulkState::Idle;
                true
            }
            BulkState::Waiting => false,
            BulkState::Idle => {
                let mut round = self.round.lock();
                if round.bytes_left > 0 && round.waiting.is_empty() {
                    round.bytes_left = round.bytes_left.saturating_sub(bytes);
                    return true;
                }
                round.waiting.push_back(stream.clone());
                state.bulk = BulkState::Waiting;
                false
            }
        }
    }

    /// Lets the next streams send, because the socket has accepted everything.
    pub(super) fn begin_round(&self) {
        let mut granted = Vec::new();
        let mut round = self.round.lock();
        round.bytes_left = ROUND_BYTES;
        while round.bytes_left > 0
            && let Some(stream) = round.waiting.pop_front()
        {
            round.bytes_left = round.bytes_left.saturating_sub(BUFFER_BYTES);
            granted.push(stream);
        }
        drop(round);
        for stream in granted {
            let mut state = stream.lock();
            state.bulk = BulkState::Granted;
            state.wake_pump();
        }
    }

    /// Returns whether streams wait.
    pub(super) fn is_waiting(&self) -> bool {
        !self.round.lock().waiting.is_empty()
    }

    /// Removes a stream that has ended.
    pub(super) fn leave(&self, stream: &Arc<StreamShared>) {
        let mut round = self.round.lock();
        round.waiting.retain(|other| !Arc::ptr_eq(other, stream));
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;

    fn streams(count: usize) -> Vec<Arc<StreamShared>> {
        (0..count)
            .map(|_| StreamShared::new(BytesMut::new(), Arc::default(), Arc::default()))
            .collect()
    }

    fn acquire(queue: &BulkQueue, stream: &Arc<StreamShared>) -> bool {
        queue.acquire(stream, &mut stream.lock(), BUFFER_BYTES)
    }

    #[test]
    fn four_streams_send_in_a_round_and_the_others_in_the_next_ones() {
        let queue = BulkQueue::new(Arc::new(ConnState::new()));
        let streams = streams(10);
        let acquire_all = |streams: &[Arc<StreamShared>]| -> Vec<bool> {
            streams
                .iter()
                .map(|stream| acquire(&queue, stream))
                .collect()
        };
        assert_eq!(acquire_all(&streams[..4]), [true; 4]);
        assert_eq!(acquire_all(&streams[4..]), [false; 6]);
        queue.begin_round();
        // The first ones have more to send, and wait behind the others.
        assert_eq!(acquire_all(&streams[..4]), [false; 4]);
        assert_eq!(acquire_all(&streams[4..8]), [true; 4]);
        assert_eq!(acquire_all(&streams[8..]), [false; 2]);
        queue.begin_round();
        assert_eq!(acquire_all(&streams[8..]), [true; 2]);
        assert_eq!(acquire_all(&streams[..4]), [true, true, false, false]);
        assert!(queue.is_waiting());
    }

    #[test]
    fn stream_that_has_ended_holds_no_grant() {
        let queue = BulkQueue::new(Arc::new(ConnState::new()));
        let streams = streams(6);
        for stream in &streams {
            acquire(&queue, stream);
        }
        queue.leave(&streams[4]);
        assert_eq!(Arc::strong_count(&streams[4]), 1);
        queue.begin_round();
        assert!(!queue.is_waiting());
        assert!(acquire(&queue, &streams[5]));
    }
}
