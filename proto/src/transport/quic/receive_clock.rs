//! The time at which a connection last received frames. quinn counts the frames and reports no
//! time, so the task of the connection compares the count after its runs. The monitor of an idle
//! session can then check rarely.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use quinn::ConnectionStats;
use tokio::time::Instant;

use super::connection_id::CONNECTION_ID_BYTES;
use super::delivery::DeliveryClock;
use super::stateless_reset::source_connection_id;

/// Minimum time between two samples of a connection.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

tokio::task_local! {
    /// The sampler of the connection that is being created.
    static NEW_CONNECTION: Arc<SessionSampler>;
}

/// The link from the task of a connection to the session that uses the connection.
#[derive(Default)]
pub(super) struct SessionSampler {
    sample: OnceLock<Box<dyn Fn(Instant) + Send + Sync>>,
    connection_id: OnceLock<[u8; CONNECTION_ID_BYTES]>,
    delivery_clock: Arc<DeliveryClock>,
}

tunnel_process::partial_debug!(SessionSampler { connection_id });

impl SessionSampler {
    /// Calls `create`, which creates a connection. Returns the sampler of the connection's task and
    /// the result.
    pub(super) fn attach<T>(create: impl FnOnce() -> T) -> (Arc<Self>, T) {
        let sampler = Arc::<Self>::default();
        let created = NEW_CONNECTION.sync_scope(sampler.clone(), create);
        (sampler, created)
    }

    /// Returns the sampler of the connection that is being created. The endpoint's task has none.
    pub(super) fn of_new_connection() -> Option<Arc<Self>> {
        NEW_CONNECTION.try_with(Arc::clone).ok()
    }

    /// Sets the function that samples the session. Its argument is the time of the run that may
    /// have received frames.
    pub(super) fn start(&self, sample: impl Fn(Instant) + Send + Sync + 'static) {
        let _set_once = self.sample.set(Box::new(sample));
    }

    /// Records the server's connection id when the connection's task sends the first packets. The
    /// agent sends to that id as long as the connection lives, because it keeps its socket.
    pub(super) fn record_sent(&self, packets: &[u8]) {
        if self.connection_id.get().is_none()
            && let Some(id) = source_connection_id(packets)
        {
            let _set_once = self.connection_id.set(id);
        }
    }

    /// Returns the connection id of this end, if this end is the server.
    pub(super) fn connection_id(&self) -> Option<[u8; CONNECTION_ID_BYTES]> {
        self.connection_id.get().copied()
    }

    /// Returns the clock that the connection's congestion controllers set.
    pub(super) fn delivery_clock(&self) -> &Arc<DeliveryClock> {
        &self.delivery_clock
    }

    /// Samples the session, if it has started.
    pub(super) fn sample(&self, run_at: Instant) {
        if let Some(sample) = self.sample.get() {
            sample(run_at);
        }
    }
}

/// The runs of a connection's task that are sampled. A bulk transfer has thousands of runs a second.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SampleSchedule {
    /// Time of the next sample, after the first one.
    next: Option<Instant>,
    /// The last run since the last sample.
    skipped: Option<Instant>,
}

impl SampleSchedule {
    /// Begins a run. Returns the run to sample first: frames that are not counted yet arrived in
    /// that run or shortly before it.
    pub(super) fn begin_run(&mut self, now: Instant) -> Option<Instant> {
        self.is_due(now).then(|| self.skipped.take()).flatten()
    }

    /// Ends the run that began at `now`. Returns the run to sample.
    pub(super) fn end_run(&mut self, now: Instant) -> Option<Instant> {
        if !self.is_due(now) {
            self.skipped = Some(now);
            return None;
        }
        *self = Self {
            next: Some(now + SAMPLE_INTERVAL),
            skipped: None,
        };
        Some(now)
    }

    fn is_due(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| next <= now)
    }
}

/// Returns the number of frames that show that the peer is alive.
pub(super) fn received_frames(connection_stats: &ConnectionStats) -> u64 {
    let rx = &connection_stats.frame_rx;
    rx.acks
        + rx.crypto
        + rx.datagram
        + rx.max_data
        + rx.max_stream_data
        + rx.max_streams_bidi
        + rx.ping
        + rx.reset_stream
        + rx.stop_sending
        + rx.stream
        + rx.path_challenge
        + rx.path_response
        + rx.new_connection_id
        + rx.retire_connection_id
        + rx.stream_data_blocked
        + rx.streams_blocked_bidi
}

/// The number of received frames at the last sample, and the time at which it last increased.
#[derive(Debug)]
pub(super) struct ReceiveClock {
    frames: u64,
    increased_at: Instant,
    sampled_at: Instant,
}

impl ReceiveClock {
    /// Creates a clock for a connection that has received `frames` at `now`.
    pub(super) fn new(frames: u64, now: Instant) -> Self {
        Self {
            frames,
            increased_at: now,
            sampled_at: now,
        }
    }

    /// Records the number of frames after a run of the connection's task.
    pub(super) fn record(&mut self, frames: u64, run_at: Instant) {
        if frames != self.frames {
            self.frames = frames;
            self.increased_at = self.increased_at.max(run_at);
        }
        self.sampled_at = self.sampled_at.max(run_at);
    }

    /// Returns the time at which the last one of `frames` was received.
    pub(super) fn received_at(&self, frames: u64, now: Instant) -> Instant {
        if frames == self.frames {
            self.increased_at
        } else {
            // Only runs within the interval are not sampled.
            (self.sampled_at + SAMPLE_INTERVAL).min(now)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Runs a connection's task at these times, with the number of frames after each run. Returns
    /// the clock and the number of samples.
    fn run(start: Instant, runs: &[(u64, u64)]) -> (ReceiveClock, usize) {
        let (mut schedule, mut clock) = (SampleSchedule::default(), ReceiveClock::new(0, start));
        let (mut frames_before, mut samples) = (0, 0);
        for &(at, frames) in runs {
            let at = start + millis(at);
            if let Some(skipped) = schedule.begin_run(at) {
                clock.record(frames_before, skipped);
                samples += 1;
            }
            if let Some(run_at) = schedule.end_run(at) {
                clock.record(frames, run_at);
                samples += 1;
            }
            frames_before = frames;
        }
        (clock, samples)
    }

    #[test]
    fn time_of_the_last_frame_is_at_most_an_interval_late() {
        let start = Instant::now();
        for (what, runs, received) in [
            (
                "server: keep-alive, then the timer of the ACK",
                &[(5000, 1), (5025, 1)][..],
                5000,
            ),
            (
                "agent: keep-alive, then the ACK",
                &[(5000, 0), (5040, 1)][..],
                5040,
            ),
            (
                "agent: the keep-alive after the last ACK",
                &[(5000, 0), (5040, 1), (10_000, 1)][..],
                5040,
            ),
            (
                "a frame in each run",
                &[(5000, 1), (10_000, 2), (15_000, 3)][..],
                15_000,
            ),
            (
                "retransmissions alone",
                &[(5000, 1), (5300, 1), (6000, 1), (9000, 1)][..],
                5000,
            ),
        ] {
            let (clock, _) = run(start, runs);
            let frames = runs.last().unwrap().1;
            let at = clock.received_at(frames, start + millis(20_000)) - start;
            let expected = millis(received)..=millis(received + 250);
            assert!(expected.contains(&at), "{what}: {at:?}");
        }
    }

    #[test]
    fn time_is_never_in_the_future() {
        let start = Instant::now();
        let (clock, _) = run(start, &[(0, 1), (10, 2)]);
        assert_eq!(clock.received_at(2, start + millis(20)), start + millis(20));
    }

    #[test]
    fn bulk_transfer_is_sampled_a_few_times_a_second() {
        let runs: Vec<_> = (0..1000).map(|number| (number, number)).collect();
        let (clock, samples) = run(Instant::now(), &runs);
        assert!((4..=8).contains(&samples), "{samples}");
        assert!(clock.frames >= 500);
    }
}
