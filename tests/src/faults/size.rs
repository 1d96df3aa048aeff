//! F13: datagrams above a size vanish, from the start or in the middle of a transfer.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep};

use super::Run;
use super::findings::Findings;
use super::flow::{Flow, Load};
use super::pipe::{Loads, Pipe};
use super::site::Site;
use crate::eventually::scaled;
use crate::link::{Impairment, Way};

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
    let mut found = Findings::default();
    let rate = run.clocks.pick(RATE_FULL, RATE_SHORT);
    let clean_path = Impairment::limited(rate).with_delay(DELAY);
    let mut site = Site::up_over(run, clean_path.clone()).await?;
    let mut pipe = site.reach.pipe(towards.loads()).await?;
    sleep(run.clocks.pick(GETTING_GOING, GETTING_GOING / 2)).await;
    let window = run.clocks.pick(WINDOW, WINDOW / 2);
    let clean = towards.goodput(&pipe, window).await;
    let path = clean_path.with_size_cap(cap);
    match since {
        Since::Start => {
            let ends = pipe.finish(scaled(FINISH)).await;
            found.equal("clean transfer: bytes equal", &ends);
            site.reach.conclude(&mut found);
            site = Site::up_over(run, path).await?;
            pipe = site.reach.pipe(towards.loads()).await?;
        }
        Since::Middle => site.link.set(Way::ALL, path),
    }
    let began = Instant::now();
    towards.flows(&pipe).for_each(Flow::forget_stalls);
    let measured_from = began + run.clocks.bound(Duration::from_secs(10));
    let slow = slow_for(&pipe, towards, clean * LEAST, measured_from).await;
    let share = towards.goodput(&pipe, window).await / clean;
    match towards {
        Towards::Edge | Towards::Cloud => {
            found.at_least("goodput from 10 s on, of the clean one", LEAST, share);
        }
        // With both ways full, a clean path is no steady measure.
        Towards::Both => found.told_share("goodput from 10 s on, of the clean one", share),
    }
    found.told("below half of the clean one up to", slow);
    let stalls = towards.flows(&pipe).map(Flow::stall).max();
    found.told("longest stall", Ok(stalls.unwrap_or_default()));
    let ends = pipe.finish(scaled(FINISH)).await;
    found.equal("transfer completes, bytes equal", &ends);
    let udp = site.link.counters().udp;
    let dropped = udp.up.too_big + udp.down.too_big;
    found.told_count("datagrams above the cap", dropped);
    site.reach.asker.served().await?;
    site.reach.conclude(&mut found);
    Ok(found)
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

/// When the last half second before `end` was over in which less than that arrived; `Err` when that was the very last.
async fn slow_for(
    pipe: &Pipe,
    towards: Towards,
    least: f64,
    end: Instant,
) -> Result<Duration, Duration> {
    let began = Instant::now();
    let mut slow = Ok(Duration::ZERO);
    while Instant::now() < end {
        let step = STEP.min(end - Instant::now());
        slow = match towards.goodput(pipe, step).await {
            goodput if goodput < least => Err(began.elapsed()),
            _ => Ok(slow.unwrap_or_else(|until| until)),
        };
    }
    slow
}

/// The share of the clean goodput that has to be there.
const LEAST: f64 = 0.5;
/// Slow enough that the machine is no part of the figure.
const RATE_FULL: u64 = 2_000_000;
const RATE_SHORT: u64 = 500_000;
const DELAY: Duration = Duration::from_millis(10);
const GETTING_GOING: Duration = Duration::from_secs(2);
const WINDOW: Duration = Duration::from_secs(4);
const STEP: Duration = Duration::from_millis(500);
/// For what the buffers on the way hold.
const FINISH: Duration = Duration::from_secs(40);
