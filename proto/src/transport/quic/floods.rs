//! Whether a peer floods: many small frames that move nothing, or connection ids that it retires without an end.

use std::time::Duration;

use tokio::time::Instant;

/// Frames in a second, from where on they have to be of use. A stream at a gigabit has two for each of some 100,000 packets,
/// and moves a kilobyte by each.
const FRAMES: u64 = 50_000;
/// Bytes of packets for each frame: below it the frames are small.
const SMALL: u64 = 32;
/// Bytes of streams for each frame, either way: below it the frames are of no use.
const USE: u64 = 8;
/// Connection ids that a peer may retire in a second. It has no reason but a new path of ours.
const RETIRED: u64 = 100;
/// What is judged is at least as long.
const INTERVAL: Duration = Duration::from_secs(1);

/// What has come from the peer since the session began.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    /// Frames, padding apart.
    pub(super) frames: u64,
    /// Connection ids of ours that it has retired.
    pub(super) retired: u64,
    /// Bytes of packets.
    pub(super) received: u64,
    /// Bytes of streams that were moved, either way.
    pub(super) moved: u64,
}

/// Looks at the counts now and then.
#[derive(Debug)]
pub(super) struct Floods {
    since: Instant,
    then: Counts,
}

impl Floods {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            since: now,
            then: Counts::default(),
        }
    }

    /// Whether the peer has flooded since the last look, unless that was just now.
    pub(super) fn look(&mut self, counts: Counts, now: Instant) -> bool {
        let elapsed = now.saturating_duration_since(self.since);
        if elapsed < INTERVAL {
            return false;
        }
        let then = self.then;
        *self = Self {
            since: now,
            then: counts,
        };
        let seconds = elapsed.as_secs().saturating_add(1);
        let frames = counts.frames.saturating_sub(then.frames);
        let received = counts.received.saturating_sub(then.received);
        let moved = counts.moved.saturating_sub(then.moved);
        let of_no_use = frames > FRAMES.saturating_mul(seconds)
            && received < frames.saturating_mul(SMALL)
            && moved < frames.saturating_mul(USE);
        of_no_use || counts.retired.saturating_sub(then.retired) > RETIRED.saturating_mul(seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found two seconds after the beginning.
    fn found(frames: u64, retired: u64, received: u64, moved: u64) -> bool {
        let began = Instant::now();
        let counts = Counts {
            frames,
            retired,
            received,
            moved,
        };
        Floods::new(began).look(counts, began + Duration::from_secs(2))
    }

    #[test]
    fn many_small_frames_that_move_nothing_are_a_flood() {
        assert!(found(200_000, 0, 200_000, 0), "pings");
        assert!(found(200_000, 0, 200_000 * 6, 100), "the same pieces again");
        assert!(found(1, 400, 8000, 0), "connection ids");
    }

    #[test]
    fn what_honest_peers_send_is_none() {
        assert!(
            !found(200_000, 0, 240_000_000, 0),
            "windows that fill, unread"
        );
        assert!(
            !found(200_000, 0, 4_000_000, 240_000_000),
            "acknowledgements"
        );
        assert!(
            !found(100_000, 0, 3_000_000, 50_000),
            "a byte in each packet"
        );
        assert!(!found(50, 50, 5000, 0), "new paths");
    }

    #[test]
    fn each_second_is_judged_by_itself_and_none_twice() {
        let began = Instant::now();
        let mut floods = Floods::new(began);
        let counts = Counts {
            frames: 500_000,
            ..Counts::default()
        };
        assert!(
            !floods.look(counts, began + Duration::from_millis(900)),
            "too soon"
        );
        assert!(floods.look(counts, began + Duration::from_secs(2)));
        assert!(
            !floods.look(counts, began + Duration::from_secs(4)),
            "silent since"
        );
    }
}
