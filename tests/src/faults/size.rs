//! F13: datagrams above a size vanish, from the start or in the middle of a transfer.

use std::time::Duration;

use anyhow::Result;
use tokio::time::{Instant, sleep, sleep_until};

use super::Run;
use super::findings::Findings;
use super::flow::Load;
use super::pipe::{Loads, Pipe};
use super::site::Site;
use super::watch::until;
use crate::eventually::scaled;
use crate::link::{Impairment, Way};

/// A path with a largest payload, which takes so many bytes a second each way.
pub(super) async fn capped(run: Run, cap: usize, from_start: bool) -> Result<Findings> {
    let mut found = Findings::default();
    let rate = run.clocks.pick(RATE_FULL, RATE_SHORT);
    let path = Impairment::limited(rate).with_delay(DELAY);
    let mut site = Site::up_over(run, path.clone()).await?;
    let mut pipe = site.reach.pipe(BULK).await?;
    let clean = goodput(&pipe, run).await;
    let mut began = Instant::now();
    let path = path.with_size_cap(cap);
    if from_start {
        let ends = pipe.finish(scaled(FINISH)).await;
        found.equal("clean transfer: bytes equal", &ends);
        site.reach.conclude(&mut found);
        site = Site::up_over(run, path).await?;
        began = Instant::now();
        pipe = site.reach.pipe(BULK).await?;
    } else {
        site.link.set(Way::ALL, path);
    }
    let half = clean.map(|rate| rate * LEAST);
    let mut series = String::new();
    let t0 = Instant::now();
    use std::fmt::Write as _;
    while t0.elapsed() < Duration::from_secs(24) {
        let r = count(&pipe, STEP).await;
        let h = site.sessions()[0].session.health();
        let _ = write!(
            series,
            " {:.0}/{:.0}({})",
            r[0] / 1000.0,
            r[1] / 1000.0,
            h.rtt.as_millis()
        );
    }
    #[allow(clippy::print_stderr)]
    {
        eprintln!(
            "seed {} cap {cap} start {from_start} clean {:.0}/{:.0}:{series}",
            run.seed,
            clean[0] / 1000.0,
            clean[1] / 1000.0
        );
    }
    let back = regained(&pipe, half, began).await;
    found.told("half of the clean goodput after", back);
    sleep_until(began + run.clocks.bound(Duration::from_secs(10))).await;
    let capped = count(&pipe, run.clocks.pick(WINDOW, WINDOW / 2)).await;
    let share = [capped[0] / clean[0], capped[1] / clean[1]];
    found.at_least("goodput to the edge, of the clean one", LEAST, share[0]);
    found.at_least("goodput to the cloud, of the clean one", LEAST, share[1]);
    let ends = pipe.finish(scaled(FINISH)).await;
    found.equal("transfer completes, bytes equal", &ends);
    let udp = site.link.counters().udp;
    let dropped = udp.up.too_big + udp.down.too_big;
    found.told_count("datagrams above the cap", dropped);
    site.reach.asker.served().await?;
    site.reach.conclude(&mut found);
    Ok(found)
}

/// Bytes a second that arrive, to the edge and to the cloud, once the transfer has got going.
async fn goodput(pipe: &Pipe, run: Run) -> [f64; 2] {
    sleep(run.clocks.time(GETTING_GOING)).await;
    count(pipe, run.clocks.pick(WINDOW, WINDOW / 2)).await
}

async fn count(pipe: &Pipe, window: Duration) -> [f64; 2] {
    let before = [pipe.to_edge.received(), pipe.to_cloud.received()];
    let began = Instant::now();
    sleep(window).await;
    let after = [pipe.to_edge.received(), pipe.to_cloud.received()];
    let took = began.elapsed().as_secs_f64();
    [0, 1].map(|n| {
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
        let bytes = (after[n] - before[n]) as f64;
        bytes / took
    })
}

/// When both directions first had that much within half a second.
async fn regained(pipe: &Pipe, least: [f64; 2], began: Instant) -> Result<Duration, Duration> {
    until(began, scaled(GIVE_UP), async || {
        let now = count(pipe, STEP).await;
        now[0] >= least[0] && now[1] >= least[1]
    })
    .await
}

const BULK: Loads = Loads::both(Load::Bulk);
/// The share of the clean goodput that has to be there.
const LEAST: f64 = 0.5;
/// Slow enough that the machine is no part of the figure.
const RATE_FULL: u64 = 2_000_000;
const RATE_SHORT: u64 = 500_000;
const DELAY: Duration = Duration::from_millis(10);
const GETTING_GOING: Duration = Duration::from_secs(2);
const WINDOW: Duration = Duration::from_secs(4);
const STEP: Duration = Duration::from_millis(500);
/// When what is measured has missed any bound by far.
const GIVE_UP: Duration = Duration::from_secs(30);
/// For what the buffers on the way hold.
const FINISH: Duration = Duration::from_secs(40);
