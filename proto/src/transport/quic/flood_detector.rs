//! Detection of floods: many small frames without stream data, or an endless sequence of retired
//! connection ids.

use std::time::Duration;

use tokio::time::Instant;

/// The close reason for a flood.
pub(super) const FLOOD_REASON: &str = "flood of frames without stream data";
/// Frames per second above which the frames must carry data. A stream at a gigabit has two frames
/// for each of some 100,000 packets, and moves a kilobyte with each.
const FRAMES_PER_SECOND_MAX: u64 = 50_000;
/// Packet bytes per frame. Below this value the frames are small.
const BYTES_PER_FRAME_MIN: u64 = 32;
/// Stream bytes per frame, in both directions. Below this value the frames have no use.
const STREAM_BYTES_PER_FRAME_MIN: u64 = 8;
/// Connection ids that a peer may retire per second. The only reason to retire one is a new path of
/// this end.
const RETIRED_IDS_PER_SECOND_MAX: u64 = 100;
/// Minimum length of a measured interval.
const CHECK_INTERVAL_MIN: Duration = Duration::from_secs(1);

/// Counts of data from the peer since the session began.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FrameCounts {
    /// Number of frames without padding.
    pub(super) frames: u64,
    /// Number of this end's connection ids that the peer has retired.
    pub(super) retired: u64,
    /// Bytes of received packets.
    pub(super) received: u64,
    /// Bytes of stream data, in both directions.
    pub(super) stream_bytes: u64,
}

/// A detector that checks the counts at intervals.
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

    /// Returns whether the peer has flooded the session since the last check. Returns `false` if
    /// the interval is too short.
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

    #[test]
    fn many_small_frames_that_move_nothing_are_a_flood() {
        for (what, frames, retired, received, stream_bytes, is_flood) in [
            ("pings", 200_000, 0, 200_000, 0, true),
            ("the same pieces again", 200_000, 0, 1_200_000, 100, true),
            ("connection ids", 1, 400, 8000, 0, true),
            ("full windows, unread", 200_000, 0, 240_000_000, 0, false),
            ("acks", 200_000, 0, 4_000_000, 240_000_000, false),
            ("a byte a packet", 100_000, 0, 3_000_000, 50_000, false),
            ("new paths", 50, 50, 5000, 0, false),
        ] {
            let began = Instant::now();
            let counts = FrameCounts {
                frames,
                retired,
                received,
                stream_bytes,
            };
            let second = began + Duration::from_secs(2);
            let found = FloodDetector::new(began).check(counts, second);
            assert_eq!(found, is_flood, "{what}");
        }
    }

    #[test]
    fn each_second_is_judged_by_itself_and_none_twice() {
        let began = Instant::now();
        let mut flood_detector = FloodDetector::new(began);
        let counts = FrameCounts {
            frames: 500_000,
            ..FrameCounts::default()
        };
        let mut is_flood = |millis| {
            let now = began + Duration::from_millis(millis);
            flood_detector.check(counts, now)
        };
        assert!(!is_flood(900), "too soon");
        assert!(is_flood(2000));
        assert!(!is_flood(4000), "silent since");
    }
}
