//! F39: bulk data over h2 through a slow path with a long queue, in which everything waits behind it.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, Load, Loads, Run, Runs, Site, TransportMode};
use tunnel_tests::link::{Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f39_slow_path_with_a_long_queue_makes_no_session_suspect() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    let loads = Loads {
        to_edge: Load::Bulk,
        to_cloud: Load::Quiet,
    };
    runs.start(TransportMode::H2, "to the edge", move |run| {
        transfer(run, TrafficClass::TCP.down(), loads)
    });
    runs.finish().await
}

/// Transfers data while the queue of the path grows, as long as neither end suspects the other.
async fn transfer(run: Run, class: TrafficClass, loads: Loads) -> Result<()> {
    let site = Site::up(run).await?;
    let before = site.ids();
    let rate = run.clocks.pick(RATE / 10, RATE);
    let path = |queue| Impairment::limited(rate).with_queue(queue);
    site.link.set(class, path(GROWTH_BYTES));
    let pipe = site.node_client.pipe(loads).await?;
    let step = run.clocks.time(GROWS_EVERY);
    let growing = async {
        for steps in 2..=GROWTHS {
            sleep(step).await;
            site.link.set(class, path(GROWTH_BYTES * steps));
        }
    };
    let (began, length) = (Instant::now(), step * 2 * u32::try_from(GROWTHS)?);
    let (server, agent, ()) = tokio::join!(
        site.server_suspects(began, length),
        site.agent_suspects(began, length),
        growing
    );
    run.observed("server suspects the agent", server);
    run.observed("agent suspects the server", agent);
    ensure!(server.is_err() && agent.is_err(), "an end was suspect");
    run.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await)?;
    let after = site.ids();
    ensure!(before == after, "sessions {before:?}, then {after:?}");
    site.node_client.ensure_equal(run)
}

/// Bytes per second, with short timers. A stream of one window fills the queue.
const RATE: u64 = 500_000;
/// Time between two enlargements of the queue, each by half of the data that passes in that time. A
/// sender's congestion window grows gradually, too.
const GROWS_EVERY: Duration = Duration::from_secs(5);
const GROWTH_BYTES: usize = 125_000;
/// In the end the queue holds the data of 30 s, so that the answer to a PING takes much longer than
/// `suspectAfterIdle`.
const GROWTHS: usize = 12;
/// Time limit for the rest of the stream.
const FINISH: Duration = Duration::from_secs(120);
