//! Whether a peer floods: many small frames that move nothing, or connection ids that it retires without an end.

use std::time::Duration;

use tokio::time::Instant;

/// Frames in a second, from where on they have to be of use. A stream at a gigabit has two for each of some 100,000 packets,
/// and moves a kilobyte by each.
const FRAMES_PER_SECOND_MAX: u64 = 50_000;
/// Bytes of packets for each frame: below it the frames are small.
const BYTES_PER_FRAME_MIN: u64 = 32;
/// Bytes of streams for each frame, either way: below it the frames are of no use.
const STREAM_BYTES_PER_FRAME_MIN: u64 = 8;
/// Connection ids that a peer may retire in a second. It has no reason but a new path of ours.
const RETIRED_IDS_PER_SECOND_MAX: u64 = 100;
/// What is judged is at least as long.
const CHECK_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// What has come from the peer since the session began.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FrameCounts {
    /// Frames, padding apart.
    pub(super) frames: u64,
    /// Connection ids of ours that it has retired.
    pub(super) retired: u64,
    /// Bytes of packets.
    pub(super) received: u64,
    /// Bytes of streams that were moved, either way.
    pub(super) stream_bytes: u64,
}

/// Looks at the counts now and then.
#[derive(Debug)]
pub(super) struct FloodDetector {
    since: Instant,
    previous: FrameCounts,
}

impl FloodDetector {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            previous: FrameCounts::default(),
        }
    }

    /// Whether the peer has flooded since the last look, unless that was just now.
    pub(super) fn check(&mut self, counts: FrameCounts, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed < CHECK_INTERVAL_MIN {
            return false;
        }
        let previous = self.previous;
        *self = Self {
            since: now,
            previous: counts,
        };
        let seconds = elapsed.as_secs().saturating_add(1);
        let frames = counts.frames.saturating_sub(previous.frames);
        let received = counts.received.saturating_sub(previous.received);
        let stream_bytes = counts.stream_bytes.saturating_sub(previous.stream_bytes);
        let is_frame_flood = frames > FRAMES_PER_SECOND_MAX.saturating_mul(seconds)
            && received < frames.saturating_mul(BYTES_PER_FRAME_MIN)
            && stream_bytes < frames.saturating_mul(STREAM_BYTES_PER_FRAME_MIN);
        is_frame_flood
            || counts.retired.saturating_sub(previous.retired)
                > RETIRED_IDS_PER_SECOND_MAX.saturating_mul(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found two seconds after the beginning.
    fn is_flood(frames: u64, retired: u64, received: u64, stream_bytes: u64) -> bool {
        let began = Instant::now();
        let counts = FrameCounts {
            frames,
            retired,
            received,
            stream_bytes,
        };
        FloodDetector::new(began).check(counts, began + Duration::from_secs(2))
    }

    #[test]
    fn many_small_frames_that_move_nothing_are_a_flood() {
        assert!(is_flood(200_000, 0, 200_000, 0), "pings");
        assert!(
            is_flood(200_000, 0, 200_000 * 6, 100),
            "the same pieces again"
        );
        assert!(is_flood(1, 400, 8000, 0), "connection ids");
    }

    #[test]
    fn what_honest_peers_send_is_none() {
        assert!(
            !is_flood(200_000, 0, 240_000_000, 0),
            "windows that fill, unread"
        );
        assert!(
            !is_flood(200_000, 0, 4_000_000, 240_000_000),
            "acknowledgements"
        );
        assert!(
            !is_flood(100_000, 0, 3_000_000, 50_000),
            "a byte in each packet"
        );
        assert!(!is_flood(50, 50, 5000, 0), "new paths");
    }

    #[test]
    fn each_second_is_judged_by_itself_and_none_twice() {
        let began = Instant::now();
        let mut flood_detector = FloodDetector::new(began);
        let counts = FrameCounts {
            frames: 500_000,
            ..FrameCounts::default()
        };
        assert!(
            !flood_detector.check(counts, began + Duration::from_millis(900)),
            "too soon"
        );
        assert!(flood_detector.check(counts, began + Duration::from_secs(2)));
        assert!(
            !flood_detector.check(counts, began + Duration::from_secs(4)),
            "silent since"
        );
    }
}
