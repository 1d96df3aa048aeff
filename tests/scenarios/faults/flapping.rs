//! F32: a link that is up for 3 s and down for 3 s, for 10 minutes. The two binaries run as
//! processes, so that their resource usage can be counted.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, interval, sleep_until};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, ProcessUsage, RequestOutcome, Requester, Run, Runs, Stack, TimedOutcome, TransportMode,
};
use tunnel_tests::link::TrafficClass;

#[tokio::test(flavor = "multi_thread")]
async fn f32_flapping_link_leaves_nothing_behind() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for transport_mode in [TransportMode::Quic, TransportMode::H2, TransportMode::Auto] {
        runs.start(transport_mode, "3 s up, 3 s down", flapping);
    }
    runs.finish().await
}

/// Runs the flapping link, with requests while it is up and a stream throughout.
async fn flapping(run: Run) -> Result<()> {
    let clocks = run.clocks;
    let mut stack = Stack::up(run).await?;
    let half = clocks.time(HALF);
    // Not divided by ten: a tenth of the times would show little of any growth.
    let length = clocks.pick(LENGTH, LENGTH_SHORT);
    let pipe = stack.node_clients[0].talk().await?;
    let logged = lines(&mut stack);
    let mut samples = Vec::new();
    let mut ups = Ups::default();
    let times = u32::try_from(length.as_millis() / (half * 2).as_millis())?;
    let began = Instant::now();
    let link = stack.replicas.link(0)?;
    link.flap(TrafficClass::ALL, half, half, times);
    for round in 0..times {
        let up = began + half * 2 * round;
        sleep_until(up).await;
        let requester = &stack.node_clients[0].requester;
        ups.spend(requester, up, up + half).await;
        samples.push((began.elapsed(), Sample::take(&mut stack).await?));
    }
    sleep_until(began + half * 2 * times).await;
    let now = lines(&mut stack);
    ups.ensure_served(run)?;
    ensure_no_growth(run, &samples, length)?;
    let most = length.as_secs().div_ceil(10);
    for (what, count) in [
        ("server's log lines, no access log", now[0] - logged[0]),
        ("agent's log lines", now[1] - logged[1]),
    ] {
        run.report(format_args!("{what}: {count}, bound {most}"));
        ensure!(count <= most, "{what}: {count}, bound {most}");
    }
    let made = stack
        .server_metric("tunnel_server_handshakes_total")
        .await?;
    run.report(format_args!("sessions made in total: {made}"));
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal_or_reset(
        "stream during all of it: bytes equal, or the reset reported",
        &ends,
    )?;
    stack.ready().await?;
    stack.node_clients[0].ensure_equal(run)
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

    /// Checks that all requests after the first answer of an up-time were served.
    fn ensure_served(&self, run: Run) -> Result<()> {
        let Self {
            all,
            served,
            slowest,
            inside,
            failed,
            overtaken,
        } = self;
        run.report(format_args!(
            "the link was up {all} times, {served} with a request served, the slowest first answer \
             after {slowest:.2?}; of {inside} requests after the first answer {} failed, and \
             {overtaken} were overtaken by the next down",
            failed.len()
        ));
        ensure!(
            *inside > 0 && failed.is_empty(),
            "{} of {inside} requests not served: {}",
            failed.len(),
            failed[..failed.len().min(SHOWN)].join(", ")
        );
        Ok(())
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
        let server = stack.replicas.servers[0].process().id();
        Ok(Self {
            sessions: stack.server_metric("tunnel_server_agents").await?,
            streams: stack.server_metric("tunnel_server_streams_open").await?,
            server: ProcessUsage::sample_min(server.context("the server has ended")?).await?,
            agent: ProcessUsage::sample_min(agent).await?,
        })
    }
}

/// The name of a figure, the factor by which it may grow, and the figure of a sample.
type Compared = (&'static str, f64, fn(&Sample) -> u64);

/// Compares the maximum of the first half with the minimum of the end. A leak continues to grow,
/// while sessions that are being dialed or retired come and go with the link, and an allocator
/// needs a minute or two to fill its arenas.
fn ensure_no_growth(run: Run, samples: &[(Duration, Sample)], length: Duration) -> Result<()> {
    let compared: [Compared; 8] = [
        ("sessions", 1.0, |sample| sample.sessions),
        ("streams", 1.0, |sample| sample.streams),
        ("server's descriptors", 1.0, |sample| {
            sample.server.descriptors
        }),
        ("agent's descriptors", 1.0, |sample| {
            sample.agent.descriptors
        }),
        ("server's threads", POOL_NOISE, |sample| {
            sample.server.threads
        }),
        ("agent's threads", 1.0, |sample| sample.agent.threads),
        ("server's memory, KiB", MEMORY_NOISE, |sample| {
            sample.server.memory_kib
        }),
        ("agent's memory, KiB", MEMORY_NOISE, |sample| {
            sample.agent.memory_kib
        }),
    ];
    let end = length.saturating_sub((length / CHUNKS).max(PART_LEAST));
    for (what, factor, value) in compared {
        let first = samples
            .iter()
            .filter(|(at, _)| *at < length / 2)
            .map(|(_, sample)| value(sample))
            .max()
            .unwrap_or(0);
        let last = samples
            .iter()
            .filter(|(at, _)| *at >= end)
            .map(|(_, sample)| value(sample))
            .min()
            .unwrap_or(0);
        let figure = format!("{what}: {first} in the first half, {last} at the end");
        run.report(format_args!("{figure}, bound x {factor}"));
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let has_grown = last as f64 > first as f64 * factor;
        ensure!(!has_grown, "{figure}, bound x {factor}");
    }
    Ok(())
}

/// Returns the number of lines in the server's log, without the access log, and in the agent's.
fn lines(stack: &mut Stack) -> [u64; 2] {
    let count = |lines: Vec<String>| {
        let lines = lines.iter();
        let others = lines.filter(|line| !line.contains(r#""message":"access""#));
        others.count() as u64
    };
    let server = stack.replicas.servers[0].log().lines();
    [count(server), count(stack.agent.log().lines())]
}

const HALF: Duration = Duration::from_secs(3);
const LENGTH: Duration = Duration::from_secs(600);
const LENGTH_SHORT: Duration = Duration::from_secs(20);
/// The last tenth counts as the end: a minute, with full timers.
const CHUNKS: u32 = 10;
const PART_LEAST: Duration = Duration::from_secs(5);
/// Work that begins at its own times, as the check of the disk, may meet other such work and begin a
/// thread of the blocking pool, which lasts 10 s: one of 8 or 9 threads. A leak grows with each flap.
const POOL_NOISE: f64 = 1.2;
/// The memory that an allocator retains varies.
const MEMORY_NOISE: f64 = 1.1;
const ASK_EVERY: Duration = Duration::from_millis(50);
const SHOWN: usize = 5;
/// Time limit for the rest of a stream after the last time the link was down.
const FINISH: Duration = Duration::from_secs(60);
