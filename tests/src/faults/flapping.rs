//! F32: a link that is up for 3 s and down for 3 s, for 10 minutes. The two binaries run as
//! processes, so that their resource usage can be counted.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use tokio::time::{Instant, interval, sleep, sleep_until};
use tokio_util::task::AbortOnDropHandle;

use super::findings::Findings;
use super::node_client::{RequestOutcome, Requester, TimedOutcome};
use super::stack::{ProcessUsage, Stack};
use super::{Run, spawn};
use crate::eventually::scaled;
use crate::link::{Script, TrafficClass};

/// Runs the flapping link, with requests while it is up and a stream throughout.
pub(super) async fn flapping(run: Run) -> Result<Findings> {
    let clocks = run.clocks;
    let mut findings = Findings::default();
    let mut stack = Stack::up(run).await?;
    let half = clocks.time(HALF);
    // Not divided by ten: a tenth of the times would show little of any growth.
    let length = clocks.pick(LENGTH, LENGTH_SHORT);
    let pipe = stack.node_client.talk().await?;
    let rewrites = Rewrites::watch(stack.known_nodes());
    let logged = lines(&mut stack);
    let mut samples = Vec::new();
    let mut ups = Ups::default();
    let times = u32::try_from(length.as_millis() / (half * 2).as_millis())?;
    let began = Instant::now();
    stack
        .link
        .run(Script::flapping(TrafficClass::ALL, half, half, times));
    for round in 0..times {
        let up = began + half * 2 * round;
        sleep_until(up).await;
        ups.spend(&stack.node_client.requester, up, up + half).await;
        samples.push((began.elapsed(), Sample::take(&mut stack).await?));
    }
    sleep_until(began + half * 2 * times).await;
    let now = lines(&mut stack);
    ups.report(&mut findings);
    grown(&samples, length, &mut findings);
    let most = length.as_secs().div_ceil(10);
    findings.at_most("rewrites of the known nodes", most, rewrites.count());
    findings.at_most(
        "server's log lines without the access log",
        most,
        now[0] - logged[0],
    );
    findings.at_most("agent's log lines", most, now[1] - logged[1]);
    let made = stack
        .server_metric("tunnel_server_handshakes_total")
        .await?;
    findings.observed_count("sessions made in total", whole(made));
    let ends = pipe.finish(scaled(FINISH)).await;
    findings.equal_or_reset(
        "stream during all of it: bytes equal, or the reset reported",
        &ends,
    );
    stack.node_client.requester.ready().await?;
    stack.node_client.report(&mut findings);
    Ok(findings)
}

/// The times in which the link was up.
#[derive(Default)]
struct Ups {
    all: u64,
    served: u64,
    slowest: Duration,
    inside: u64,
    failed: Vec<String>,
    /// Requests that were not finished when the link went down.
    overtaken: u64,
}

impl Ups {
    /// Waits until the node serves. From then on every request must be served.
    async fn spend(&mut self, requester: &Requester, up: Instant, down: Instant) {
        self.all += 1;
        let last = down - (down - up) / 5;
        let Ok(served) = requester.serving(up, last - up).await else {
            return;
        };
        self.served += 1;
        self.slowest = self.slowest.max(served);
        let mut ticks = interval(ASK_EVERY);
        loop {
            ticks.tick().await;
            if Instant::now() >= last {
                return;
            }
            let TimedOutcome { outcome, took } = requester.ask(down - up).await;
            if Instant::now() >= down {
                self.overtaken += 1;
                return;
            }
            self.inside += 1;
            if outcome != RequestOutcome::Served {
                self.failed.push(format!("{outcome} after {took:?}"));
            }
        }
    }

    fn report(&self, findings: &mut Findings) {
        findings.observed_count("times the link was up", self.all);
        findings.observed_count("of these with a request served", self.served);
        findings.observed("slowest first answer in these", Ok(self.slowest));
        findings.observed_count("requests after the first answer", self.inside);
        findings.holds(
            "all of them served",
            self.inside > 0 && self.failed.is_empty(),
            || {
                let shown: Vec<_> = self.failed.iter().take(SHOWN).cloned().collect();
                let (failed, inside) = (self.failed.len(), self.inside);
                format!("{failed} of {inside} not: {}", shown.join(", "))
            },
        );
        findings.observed_count("further ones, overtaken by the next down", self.overtaken);
    }
}

/// The usage of both processes at a moment without requests.
#[derive(Debug, Clone, Copy)]
struct Sample {
    sessions: u64,
    streams: u64,
    server: ProcessUsage,
    agent: ProcessUsage,
}

impl Sample {
    async fn take(stack: &mut Stack) -> Result<Self> {
        let agent = stack.agent.id().context("the agent has ended")?;
        let server = stack.server.process().id();
        Ok(Self {
            sessions: whole(stack.server_metric("tunnel_server_agents").await?),
            streams: whole(stack.server_metric("tunnel_server_streams_open").await?),
            server: ProcessUsage::sample_min(server.context("the server has ended")?).await?,
            agent: ProcessUsage::sample_min(agent).await?,
        })
    }
}

/// Compares the maximum of the first half with the minimum of the end. A leak continues to grow,
/// while sessions that are being dialed or retired come and go with the link, and an allocator
/// needs a minute or two to fill its arenas.
fn grown(samples: &[(Duration, Sample)], length: Duration, findings: &mut Findings) {
    let mut compare = |what: &str, factor: f64, of: fn(&Sample) -> u64| {
        let values = |within: fn(Duration, Duration) -> bool| {
            let samples = samples.iter().filter(move |(at, _)| within(*at, length));
            samples.map(|(_, sample)| of(sample))
        };
        let before = values(|at, length| at < length / 2).max();
        let last = values(|at, length| at + (length / CHUNKS).max(PART_LEAST) >= length).min();
        findings.growth(what, factor, (before.unwrap_or(0), last.unwrap_or(0)));
    };
    compare("sessions, first half and last minute", 1.0, |sample| {
        sample.sessions
    });
    compare("streams", 1.0, |sample| sample.streams);
    compare("server's descriptors", 1.0, |sample| {
        sample.server.descriptors
    });
    compare("agent's descriptors", 1.0, |sample| {
        sample.agent.descriptors
    });
    compare("server's threads", 1.0, |sample| sample.server.threads);
    compare("agent's threads", 1.0, |sample| sample.agent.threads);
    compare("server's memory, KiB", MEMORY_NOISE, |sample| {
        sample.server.memory_kib
    });
    compare("agent's memory, KiB", MEMORY_NOISE, |sample| {
        sample.agent.memory_kib
    });
}

/// Counts how often a file was replaced.
struct Rewrites {
    byte_count: Arc<AtomicU64>,
    _watching: AbortOnDropHandle<()>,
}

impl Rewrites {
    fn watch(file: PathBuf) -> Self {
        let byte_count: Arc<AtomicU64> = Arc::default();
        let counted = byte_count.clone();
        let watching = spawn(async move {
            let mut last = changed(&file);
            loop {
                sleep(LOOK_EVERY).await;
                let now = changed(&file);
                if now != last {
                    counted.fetch_add(1, Ordering::Relaxed);
                    last = now;
                }
            }
        });
        Self {
            byte_count,
            _watching: watching,
        }
    }

    fn count(&self) -> u64 {
        self.byte_count.load(Ordering::Relaxed)
    }
}

fn changed(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).ok()?.modified().ok()
}

/// Returns the number of lines in the server's log, without the access log, and in the agent's.
fn lines(stack: &mut Stack) -> [u64; 2] {
    let count = |lines: Vec<String>| {
        let lines = lines.iter();
        let others = lines.filter(|line| !line.contains(r#""message":"access""#));
        others.count() as u64
    };
    let server = stack.server.process().log().lines();
    [count(server), count(stack.agent.log().lines())]
}

/// Returns a counter from the metrics.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a count, far below 2^52"
)]
fn whole(count: f64) -> u64 {
    count as u64
}

const HALF: Duration = Duration::from_secs(3);
const LENGTH: Duration = Duration::from_secs(600);
const LENGTH_SHORT: Duration = Duration::from_secs(20);
/// The last tenth counts as the end: a minute, with full timers.
const CHUNKS: u32 = 10;
const PART_LEAST: Duration = Duration::from_secs(5);
/// The memory that an allocator retains varies.
const MEMORY_NOISE: f64 = 1.1;
const ASK_EVERY: Duration = Duration::from_millis(50);
/// Longer than the timestamp granularity of a file system.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const SHOWN: usize = 5;
/// Time limit for the rest of a stream after the last time the link was down.
const FINISH: Duration = Duration::from_secs(60);
