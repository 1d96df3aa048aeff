//! F13: datagrams above a size vanish, from the start or in the middle of a transfer.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, Flow, FlowEnd, Load, Loads, Measured, Pipe, Run, Runs, Site, TransportMode,
};
use tunnel_tests::link::{Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f13_path_that_takes_small_datagrams_only_still_carries_half() -> Result<()> {
    let mut runs = Runs::throughput(Clocks::of_gear())?;
    for (case, cap, since, towards) in [
        ("1300 at start, edge", 1300, Since::Start, Towards::Edge),
        ("1300 at start, cloud", 1300, Since::Start, Towards::Cloud),
        ("1300 suddenly, edge", 1300, Since::Middle, Towards::Edge),
        ("1300 suddenly, cloud", 1300, Since::Middle, Towards::Cloud),
        ("1200 at start, edge", 1200, Since::Start, Towards::Edge),
        ("1200 at start, cloud", 1200, Since::Start, Towards::Cloud),
        ("1200 suddenly, edge", 1200, Since::Middle, Towards::Edge),
        ("1200 suddenly, cloud", 1200, Since::Middle, Towards::Cloud),
    ] {
        runs.start(TransportMode::Quic, case, |run| {
            capped(run, cap, since, towards)
        });
    }
    runs.finish().await
}

/// Runs with full clocks only, since QUIC needs up to a minute, which no setting shortens.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes 40 s with full clocks; make faults runs it"]
async fn f13_path_that_takes_small_datagrams_only_both_ways_still_carries_half() -> Result<()> {
    let mut runs = Runs::throughput(Clocks::Full)?;
    for (case, cap) in [("1300, both ways", 1300), ("1200, both ways", 1200)] {
        runs.start(TransportMode::Quic, case, |run| {
            capped(run, cap, Since::Middle, Towards::Both)
        });
    }
    runs.finish().await
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Towards {
    Edge,
    Cloud,
    /// Both directions at once: each direction's acknowledgements wait behind the other's data.
    Both,
}

/// The time from which larger datagrams vanish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Since {
    Start,
    /// From the middle of the transfer.
    Middle,
}

/// Runs a transfer over a path with a maximum payload and a rate limit per direction.
async fn capped(run: Run, cap: usize, since: Since, towards: Towards) -> Result<()> {
    let path = path(run)?;
    let small = path.clone().with_size_cap(cap);
    let (site, pipe, clean, curve) = match since {
        Since::Start => {
            let site = Site::up_over(run, small).await?;
            let pipe = site.node_client.pipe(towards.loads()).await?;
            let curve = GoodputCurve::record(&pipe, towards, run);
            let (clean, curve) = tokio::join!(clean(run, path, towards), curve);
            let (clean, ends) = clean?;
            run.equal("clean transfer: bytes equal", &ends)?;
            (site, pipe, clean, curve)
        }
        Since::Middle => {
            let site = Site::up_over(run, path).await?;
            let pipe = site.node_client.pipe(towards.loads()).await?;
            let clean = towards.clean_goodput(&pipe, run).await;
            site.link.set(TrafficClass::ALL, small);
            let curve = GoodputCurve::record(&pipe, towards, run).await;
            (site, pipe, clean, curve)
        }
    };
    let share = curve.after / clean;
    run.report(format_args!(
        "goodput after {:?}, of the clean one: {share:.2}, bound {LEAST}",
        curve.length
    ));
    let slow_up_to = curve.slow_up_to(clean * LEAST);
    run.observed("below half of the clean one up to", slow_up_to);
    run.observed("longest stall", Ok(curve.stall));
    ensure!(share >= LEAST, "goodput is {share:.2} of the clean one");
    // The rate has been measured; buffered data need not wait for it.
    site.link.set(TrafficClass::ALL, Impairment::capped(cap));
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal("transfer completes, bytes equal", &ends)?;
    let udp = site.link.counters().udp;
    let dropped = udp.up.too_big + udp.down.too_big;
    run.report(format_args!("datagrams above the cap: {dropped}"));
    site.node_client.requester.served().await?;
    site.node_client.ensure_equal(run)
}

/// Measures the goodput of an equal transfer without a cap, on a separate tunnel.
async fn clean(run: Run, path: Impairment, towards: Towards) -> Result<(f64, [FlowEnd; 2])> {
    let site = Site::up_over(run, path).await?;
    let pipe = site.node_client.pipe(towards.loads()).await?;
    let goodput = towards.clean_goodput(&pipe, run).await;
    site.link.heal();
    Ok((goodput, pipe.finish(scaled(FINISH)).await))
}

/// The goodput of a transfer over time, from one moment on.
struct GoodputCurve {
    /// Time by which the goodput must have recovered.
    length: Duration,
    /// Bytes per second in each half second up to then.
    samples: Vec<(Duration, f64)>,
    /// Bytes per second after that.
    after: f64,
    stall: Duration,
}

impl GoodputCurve {
    async fn record(pipe: &Pipe, towards: Towards, run: Run) -> Self {
        let began = Instant::now();
        towards.flows(pipe).for_each(Flow::forget_stalls);
        let length = run.clocks.pick(RECOVERED, RECOVERED_SHORT);
        let mut samples = Vec::new();
        while began.elapsed() < length {
            let sample = SIZE_INCREMENT.min(length.saturating_sub(began.elapsed()));
            let goodput = towards.goodput(pipe, sample).await;
            samples.push((began.elapsed(), goodput));
        }
        let after = towards.goodput(pipe, WINDOW).await;
        let stall = towards.flows(pipe).map(Flow::stall).max();
        Self {
            length,
            samples,
            after,
            stall: stall.unwrap_or_default(),
        }
    }

    /// Returns the end of the last half second below `least`, or `Err` if that was the very last
    /// one.
    fn slow_up_to(&self, least: f64) -> Measured {
        let mut samples = self.samples.iter();
        let slow = samples.rposition(|(_, goodput)| *goodput < least);
        match slow.and_then(|slow| Some((slow + 1, self.samples.get(slow)?.0))) {
            None => Ok(Duration::ZERO),
            Some((passed, end)) if passed < self.samples.len() => Ok(end),
            Some((_, end)) => Err(end),
        }
    }
}

fn path(run: Run) -> Result<Impairment> {
    let rate = run.clocks.pick(RATE_FULL, RATE_SHORT);
    let queue = usize::try_from(rate / QUEUED)?;
    let path = Impairment::limited(rate).with_delay(DELAY);
    Ok(path.with_queue(queue))
}

impl Towards {
    /// Returns loads in this direction only.
    fn loads(self) -> Loads {
        let (to_edge, to_cloud) = match self {
            Self::Edge => (Load::Bulk, Load::Quiet),
            Self::Cloud => (Load::Quiet, Load::Bulk),
            Self::Both => (Load::Bulk, Load::Bulk),
        };
        Loads { to_edge, to_cloud }
    }

    fn flows(self, pipe: &Pipe) -> impl Iterator<Item = &Flow> {
        let to_edge = (self != Self::Cloud).then_some(&pipe.to_edge);
        let to_cloud = (self != Self::Edge).then_some(&pipe.to_cloud);
        to_edge.into_iter().chain(to_cloud)
    }

    /// Returns the received bytes per second after the start phase.
    async fn clean_goodput(self, pipe: &Pipe, run: Run) -> f64 {
        sleep(run.clocks.pick(GETTING_GOING, GETTING_GOING / 2)).await;
        self.goodput(pipe, WINDOW).await
    }

    /// Returns the received bytes per second.
    async fn goodput(self, pipe: &Pipe, window: Duration) -> f64 {
        let received = || self.flows(pipe).map(Flow::received).sum::<u64>();
        let (before, began) = (received(), Instant::now());
        sleep(window).await;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
        let bytes = (received() - before) as f64;
        bytes / began.elapsed().as_secs_f64()
    }
}

/// Minimum share of the clean goodput.
const LEAST: f64 = 0.5;
/// Slow enough that the machine does not affect the result.
const RATE_FULL: u64 = 2_000_000;
const RATE_SHORT: u64 = 500_000;
const DELAY: Duration = Duration::from_millis(10);
/// Queue before the slow link: an eighth of a second.
const QUEUED: u64 = 8;
/// Time by which the goodput must have recovered.
const RECOVERED: Duration = Duration::from_secs(10);
/// QUIC detects the cap by losses, which no setting makes faster.
const RECOVERED_SHORT: Duration = Duration::from_secs(6);
const GETTING_GOING: Duration = Duration::from_secs(2);
/// Several of BBR's pauses long: every 10 s BBR sends next to nothing for a while to measure the
/// shortest round trip.
const WINDOW: Duration = Duration::from_secs(4);
const SIZE_INCREMENT: Duration = Duration::from_millis(500);
/// Time limit for the buffered data on the path and an unfinished stall.
const FINISH: Duration = Duration::from_secs(120);
