//! F39: bulk data over h2 through a slow path with a long queue, behind which everything waits.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, Load, Loads, Run, Runs, Site, TransportMode, until};
use tunnel_tests::link::{Count, DirectionCounts, Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f39_slow_path_with_a_long_queue_makes_no_session_suspect() -> Result<()> {
    let mut runs = Runs::throughput(Clocks::of_gear())?;
    let (up, down) = (TrafficClass::TCP.up(), TrafficClass::TCP.down());
    let loads = |to_edge, to_cloud| Loads { to_edge, to_cloud };
    for (case, grown_case, class, loads) in [
        (
            "upload",
            "upload, grown windows",
            up,
            loads(Load::Quiet, Load::Bulk),
        ),
        (
            "download",
            "download, grown windows",
            down,
            loads(Load::Bulk, Load::Quiet),
        ),
        (
            "both",
            "both, grown windows",
            TrafficClass::TCP,
            Loads::both(Load::Bulk),
        ),
    ] {
        for (case, has_grown) in [(case, false), (grown_case, true)] {
            runs.start(TransportMode::H2, case, move |run| {
                transfer(run, class, loads, has_grown)
            });
        }
    }
    runs.finish().await
}

/// Transfers data through a full queue, after `has_grown` windows were filled over a fast path. Neither
/// end suspects the other.
async fn transfer(run: Run, class: TrafficClass, loads: Loads, has_grown: bool) -> Result<()> {
    let site = Site::up(run).await?;
    let before = site.ids();
    let slow = Impairment::limited(RATE).with_queue(QUEUE_BYTES);
    let pipe = if has_grown {
        let pipe = site.node_client.pipe(loads).await?;
        let wanted = [loads.to_edge, loads.to_cloud].map(|load| match load {
            Load::Bulk => GROWN_BYTES,
            _none => 0,
        });
        let is_grown =
            async || pipe.to_edge.received() >= wanted[0] && pipe.to_cloud.received() >= wanted[1];
        let grown = until(Instant::now(), scaled(FILL_LIMIT), is_grown).await;
        run.observed("the windows have grown", grown);
        ensure!(grown.is_ok(), "the windows are small");
        site.link.set(class, slow);
        pipe
    } else {
        site.link.set(class, slow);
        site.node_client.pipe(loads).await?
    };
    let (began, length) = (Instant::now(), run.clocks.pick(LENGTH * 4, LENGTH));
    let is_queued = async || {
        let DirectionCounts { up, down } = site.link.counters().tcp;
        let queued = |count: Count| count.received.bytes - count.forwarded.bytes;
        queued(up).max(queued(down)) >= RATE * PROBE_LIMIT.as_secs()
    };
    let filled = until(began, scaled(FILL_LIMIT), is_queued).await;
    run.observed("the queue is long", filled);
    ensure!(filled.is_ok(), "the queue is short");
    let (server, agent) = tokio::join!(
        site.server_suspects(began, length),
        site.agent_suspects(began, length)
    );
    run.observed("server suspects the agent", server);
    run.observed("agent suspects the server", agent);
    ensure!(server.is_err() && agent.is_err(), "an end was suspect");
    let after = site.ids();
    ensure!(before == after, "sessions {before:?}, then {after:?}");
    ensure!(!pipe.has_ended(), "the stream has ended");
    Ok(())
}

/// Transferred bytes after which the windows are as large as they become.
const GROWN_BYTES: u64 = 32 << 20;
/// Bytes per second. The smallest window of a session holds the data of 26 s.
const RATE: u64 = 10_000;
const QUEUE_BYTES: usize = 1_000_000;
/// Time without an answer after which an end is suspect over h2, and the queue is longer.
const PROBE_LIMIT: Duration = Duration::from_secs(15);
/// The sender's buffers are full at once.
const FILL_LIMIT: Duration = Duration::from_secs(10);
/// Each end has waited for longer by then, and has probed before.
const LENGTH: Duration = Duration::from_secs(30);
