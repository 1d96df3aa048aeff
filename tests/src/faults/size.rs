//! F13: datagrams above a size vanish, from the start or in the middle of a transfer.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep};

use super::Run;
use super::findings::Findings;
use super::flow::{Flow, FlowEnd, Load};
use super::pipe::{Loads, Pipe};
use super::site::Site;
use crate::eventually::scaled;
use crate::link::{Impairment, TrafficClass};

/// Where a transfer goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Towards {
    Edge,
    Cloud,
    /// Both ways at once: each direction's acknowledgements wait behind the other's data.
    Both,
}

/// Since when larger datagrams vanish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Since {
    Start,
    /// The middle of the transfer.
    Middle,
}

/// A transfer over a path with a largest payload, which takes so many bytes a second each way.
pub(super) async fn capped(
    run: Run,
    cap: usize,
    since: Since,
    towards: Towards,
) -> Result<Findings> {
    let mut findings = Findings::default();
    let path = path(run)?;
    let small = path.clone().with_size_cap(cap);
    let (site, pipe, clean, curve) = match since {
        Since::Start => {
            let site = Site::up_over(run, small).await?;
            let pipe = site.node_client.pipe(towards.loads()).await?;
            let curve = GoodputCurve::record(&pipe, towards, run);
            let (clean, curve) = tokio::join!(clean(run, path, towards), curve);
            let (clean, ends) = clean?;
            findings.equal("clean transfer: bytes equal", &ends);
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
    let what = format!(
        "goodput from {} s on, of the clean one",
        curve.length.as_secs()
    );
    let share = curve.after / clean;
    findings.at_least(what, LEAST, share);
    findings.observed(
        "below half of the clean one up to",
        curve.slow_up_to(clean * LEAST),
    );
    findings.observed("longest stall", Ok(curve.stall));
    // The rate has been measured; what the buffers hold need not wait for it.
    site.link.set(TrafficClass::ALL, Impairment::capped(cap));
    let ends = pipe.finish(scaled(FINISH)).await;
    findings.equal("transfer completes, bytes equal", &ends);
    let udp = site.link.counters().udp;
    let dropped = udp.up.too_big + udp.down.too_big;
    findings.observed_count("datagrams above the cap", dropped);
    site.node_client.requester.served().await?;
    site.node_client.report(&mut findings);
    Ok(findings)
}

/// The goodput of the same transfer without a cap, on a tunnel of its own.
async fn clean(run: Run, path: Impairment, towards: Towards) -> Result<(f64, [FlowEnd; 2])> {
    let site = Site::up_over(run, path).await?;
    let pipe = site.node_client.pipe(towards.loads()).await?;
    let goodput = towards.clean_goodput(&pipe, run).await;
    site.link.heal();
    Ok((goodput, pipe.finish(scaled(FINISH)).await))
}

/// What a transfer did from one moment on.
struct GoodputCurve {
    /// Up to the time at which it has to have recovered.
    length: Duration,
    /// Bytes a second in each half second up to then.
    samples: Vec<(Duration, f64)>,
    /// Bytes a second after that.
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

    /// The end of the last half second with less than that; `Err` when that was the very last.
    fn slow_up_to(&self, least: f64) -> Result<Duration, Duration> {
        let slow = self
            .samples
            .iter()
            .rposition(|(_, goodput)| *goodput < least);
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
    Ok(Impairment::limited(rate)
        .with_delay(DELAY)
        .with_queue(queue))
}

impl Towards {
    /// What runs in that direction, and nothing in the other.
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

    /// Bytes a second that arrive once it has got going.
    async fn clean_goodput(self, pipe: &Pipe, run: Run) -> f64 {
        sleep(run.clocks.pick(GETTING_GOING, GETTING_GOING / 2)).await;
        self.goodput(pipe, WINDOW).await
    }

    /// Bytes a second that arrive.
    async fn goodput(self, pipe: &Pipe, window: Duration) -> f64 {
        let received = || self.flows(pipe).map(Flow::received).sum::<u64>();
        let (before, began) = (received(), Instant::now());
        sleep(window).await;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
        let bytes = (received() - before) as f64;
        bytes / began.elapsed().as_secs_f64()
    }
}

/// The share of the clean goodput that has to be there.
const LEAST: f64 = 0.5;
/// Slow enough that the machine is no part of the figure.
const RATE_FULL: u64 = 2_000_000;
const RATE_SHORT: u64 = 500_000;
const DELAY: Duration = Duration::from_millis(10);
/// What waits before the slow link: an eighth of a second.
const QUEUED: u64 = 8;
/// When the goodput has to be back.
const RECOVERED: Duration = Duration::from_secs(10);
/// QUIC finds out by losses, which no setting makes faster.
const RECOVERED_SHORT: Duration = Duration::from_secs(6);
const GETTING_GOING: Duration = Duration::from_secs(2);
/// Some of BBR's pauses long: it asks for the shortest round trip every 10 s by sending next to nothing for a while.
const WINDOW: Duration = Duration::from_secs(4);
const SIZE_INCREMENT: Duration = Duration::from_millis(500);
/// For what the buffers on the way hold, and a stall that is not over.
const FINISH: Duration = Duration::from_secs(120);
