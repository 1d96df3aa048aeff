//! The throughput of sessions over the last minute, from samples of their byte counts.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::wire::name::{NodeName, SessionId};

use crate::routing::registry::{AgentSession, Registry};

/// Payload bytes in each second, on average over the last minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Throughput {
    /// Received from the agent.
    pub(super) bytes_in_per_second: u64,
    /// Sent to the agent.
    pub(super) bytes_out_per_second: u64,
}

/// The samples of all sessions: about 6 MB for 20,000 sessions.
#[derive(Debug)]
pub(super) struct ThroughputSampler {
    registry: Arc<Registry>,
    samples: Mutex<HashMap<SessionId, VecDeque<Sample>>>,
}

/// The byte counts of a session at one time.
#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    bytes_in: u64,
    bytes_out: u64,
}

impl ThroughputSampler {
    pub(super) fn new(registry: Arc<Registry>) -> Self {
        Self {
            registry,
            samples: Mutex::default(),
        }
    }

    /// Samples the sessions every 10 s until `stop`.
    pub(super) fn start(self: &Arc<Self>, shutdown: &Shutdown) {
        let sampler = self.clone();
        shutdown.spawn_service(async move {
            let mut ticks = interval(SAMPLE_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                ticks.tick().await;
                sampler.sample(Instant::now());
            }
        });
    }

    /// Adds a sample of each session, and drops those of sessions that have ended.
    fn sample(&self, now: Instant) {
        let sessions = self.registry.all();
        let current: Vec<_> = sessions
            .iter()
            .map(|session| (session.id, Sample::of(session, now)))
            .collect();
        let mut samples = self.samples.lock();
        let mut previous = std::mem::take(&mut *samples);
        *samples = current
            .into_iter()
            .map(|(session, sample)| {
                let mut own = previous.remove(&session).unwrap_or_default();
                if own.len() == SAMPLES_MAX {
                    own.pop_front();
                }
                own.push_back(sample);
                (session, own)
            })
            .collect();
    }

    /// Returns the throughput of all sessions with this server.
    pub(super) fn total(&self) -> Throughput {
        self.of_sessions(&self.registry.all()).unwrap_or_default()
    }

    /// Returns the throughput of all sessions of a node, or `None` without a session.
    pub(super) fn of_node(&self, node: &NodeName) -> Option<Throughput> {
        self.of_sessions(&self.registry.of_node(node))
    }

    fn of_sessions(&self, sessions: &[Arc<AgentSession>]) -> Option<Throughput> {
        let now = Instant::now();
        let samples = self.samples.lock();
        let of_session = |session: &Arc<AgentSession>| {
            let own = samples.get(&session.id);
            let oldest = own.filter(|own| own.len() == SAMPLES_MAX);
            let oldest = oldest.and_then(|own| own.front());
            throughput(oldest, Sample::of(session, now))
        };
        let total = |sum: Throughput, next: Throughput| Throughput {
            bytes_in_per_second: sum.bytes_in_per_second + next.bytes_in_per_second,
            bytes_out_per_second: sum.bytes_out_per_second + next.bytes_out_per_second,
        };
        sessions.iter().map(of_session).reduce(total)
    }
}

impl Sample {
    fn of(session: &AgentSession, at: Instant) -> Self {
        let stats = session.session.stats();
        Self {
            at,
            bytes_in: stats.bytes_in,
            bytes_out: stats.bytes_out,
        }
    }
}

/// Returns the throughput from the oldest sample to `current`. A session without an old sample
/// began within the last minute, with zero bytes.
fn throughput(oldest: Option<&Sample>, current: Sample) -> Throughput {
    let (bytes_in, bytes_out) = oldest.map_or((0, 0), |oldest| (oldest.bytes_in, oldest.bytes_out));
    let elapsed = oldest.map_or(WINDOW, |oldest| current.at - oldest.at);
    let seconds = elapsed.as_secs().max(1);
    Throughput {
        bytes_in_per_second: current.bytes_in.saturating_sub(bytes_in) / seconds,
        bytes_out_per_second: current.bytes_out.saturating_sub(bytes_out) / seconds,
    }
}

const WINDOW: Duration = Duration::from_secs(60);
const SAMPLE_INTERVAL: Duration = Duration::from_secs(10);
/// Number of samples of one session: those of the window, and the one at its begin.
const SAMPLES_MAX: usize = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn throughput_is_the_average_of_the_last_minute() {
        let begin = Instant::now();
        let sample = |seconds, bytes_in| Sample {
            at: begin + Duration::from_secs(seconds),
            bytes_in,
            bytes_out: 0,
        };
        for (oldest, current, expected) in [
            (None, sample(5, 600), 10),
            (Some(sample(0, 0)), sample(60, 600), 10),
            (Some(sample(0, 600)), sample(64, 6_600), 93),
            (Some(sample(0, 600)), sample(60, 600), 0),
            (Some(sample(0, 600)), sample(0, 700), 100),
        ] {
            let shown = throughput(oldest.as_ref(), current);
            assert_eq!(shown.bytes_in_per_second, expected);
            assert_eq!(shown.bytes_out_per_second, 0);
        }
    }
}
