//! Measures how many bytes arrive in one round trip. Stream windows follow from this number.

use std::time::Duration;

use tokio::time::Instant;

/// Received bytes between two measurements of the round trip. A session that receives less needs
/// none.
const BYTES_PER_SAMPLE: u64 = 256 * 1024;
/// Measurements after which the round trip counts as known. The shortest one counts, because a PING
/// waits behind data.
const SAMPLES_MIN: u32 = 4;
/// Shortest round trip for which bytes are counted. On a shorter path a window of 2 MiB carries
/// 1 Gbit/s, and a PING measures how busy the peer is.
const RTT_MIN: Duration = Duration::from_millis(10);

/// The round trip of a connection, and the bytes that arrive in it.
#[derive(Debug, Default)]
pub(super) struct PathMeter {
    shortest_rtt: Option<Duration>,
    samples: u32,
    /// The number of bytes received at the last measurement of the round trip.
    sampled_at: u64,
    /// The start of the current interval, and the number of bytes received before it.
    interval: Option<(Instant, u64)>,
}

impl PathMeter {
    /// Returns whether a PING must measure the round trip, after `received` bytes.
    pub(super) fn must_ping(&mut self, received: u64) -> bool {
        let is_due = self.samples < SAMPLES_MIN
            && received.saturating_sub(self.sampled_at) >= BYTES_PER_SAMPLE;
        if is_due {
            self.sampled_at = received;
        }
        is_due
    }

    /// Records the time in which a PING was answered.
    pub(super) fn record_rtt(&mut self, rtt: Duration) {
        self.samples = self.samples.saturating_add(1);
        self.shortest_rtt = Some(self.shortest_rtt.map_or(rtt, |shortest| shortest.min(rtt)));
    }

    /// Returns the bytes that arrived per round trip since the last result, if at least one round
    /// trip has passed and the path is long.
    pub(super) fn bytes_per_rtt(&mut self, received: u64) -> Option<u64> {
        let rtt = self
            .shortest_rtt
            .filter(|rtt| self.samples >= SAMPLES_MIN && *rtt >= RTT_MIN)?;
        let now = Instant::now();
        let (since, before) = *self.interval.get_or_insert((now, received));
        let elapsed = now.duration_since(since);
        if elapsed < rtt {
            return None;
        }
        self.interval = Some((now, received));
        let bytes = u128::from(received.saturating_sub(before));
        u64::try_from(bytes * rtt.as_micros() / elapsed.as_micros()).ok()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const RTT: Duration = Duration::from_millis(50);

    fn known(rtt: Duration) -> PathMeter {
        let mut path_meter = PathMeter::default();
        for sample in 0..SAMPLES_MIN {
            // The first PING finds the path empty, the others wait behind data.
            path_meter.record_rtt(rtt * (sample + 1));
        }
        path_meter
    }

    #[test]
    fn round_trip_is_measured_while_data_arrives_until_it_is_known() {
        let mut path_meter = PathMeter::default();
        assert!(!path_meter.must_ping(0));
        assert!(!path_meter.must_ping(BYTES_PER_SAMPLE - 1));
        for sample in 1..=u64::from(SAMPLES_MIN) {
            assert!(path_meter.must_ping(sample * BYTES_PER_SAMPLE));
            assert!(!path_meter.must_ping(sample * BYTES_PER_SAMPLE + 1));
            path_meter.record_rtt(RTT);
        }
        assert!(!path_meter.must_ping(1 << 30));
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_are_counted_per_shortest_round_trip() {
        let mut path_meter = known(RTT);
        assert_eq!(path_meter.bytes_per_rtt(1000), None);
        advance(RTT / 2).await;
        assert_eq!(path_meter.bytes_per_rtt(2000), None);
        advance(RTT / 2).await;
        assert_eq!(path_meter.bytes_per_rtt(3000), Some(2000));
        advance(RTT * 4).await;
        assert_eq!(path_meter.bytes_per_rtt(7000), Some(1000));
    }

    #[tokio::test(start_paused = true)]
    async fn short_or_unknown_path_gives_no_number() {
        let mut unknown = PathMeter::default();
        unknown.record_rtt(RTT);
        for mut path_meter in [unknown, known(RTT_MIN / 2)] {
            assert_eq!(path_meter.bytes_per_rtt(0), None);
            advance(RTT).await;
            assert_eq!(path_meter.bytes_per_rtt(1 << 30), None);
        }
    }
}
