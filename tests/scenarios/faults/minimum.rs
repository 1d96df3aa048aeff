//! F13: the path of a running session passes small datagrams only, less than the 1,200 bytes that
//! QUIC needs.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::{Instant, sleep};
use tunnel_proto::transport::TransportKind;
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, Load, Loads, Run, Runs, Site, TransportMode, until};
use tunnel_tests::link::{Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f13_session_that_carries_small_packets_only_is_replaced_and_its_stalled_streams_end()
-> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    let (up, down) = (TrafficClass::UDP.up(), TrafficClass::UDP.down());
    for (case, class, loads) in [
        // All of it is under way at once, and the congestion window has room for small packets.
        ("download of 20 kB", up, to_cloud(Load::Exactly(SMALL))),
        ("upload of 20 kB", down, to_edge(Load::Exactly(SMALL))),
        // The sender always has more to send, so that each packet is a full one.
        ("download", up, to_cloud(Load::Bulk)),
        ("upload", down, to_edge(Load::Bulk)),
        ("both", TrafficClass::UDP, Loads::both(Load::Bulk)),
    ] {
        runs.start(TransportMode::Auto, case, move |run| {
            stalled(run, class, loads)
        });
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f13_idle_streams_and_small_requests_outlive_a_path_for_small_packets() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    runs.start(TransportMode::Auto, "idle", idle);
    runs.finish().await
}

/// Limits the size of datagrams in these directions, and transfers data there.
async fn stalled(run: Run, class: TrafficClass, loads: Loads) -> Result<()> {
    let site = Site::up(run).await?;
    let before = site.transport();
    ensure!(before == Some(TransportKind::Quic), "{before:?}");
    let began = Instant::now();
    site.link.set(class, Impairment::capped(CAP));
    let stalled = site.node_client.pipe(loads).await?;
    let moved = site.moved_to(TransportKind::H2, began, scaled(GIVE_UP));
    let bound = run.clocks.connect_bound(Duration::from_secs(20));
    run.within("new streams use h2", bound, moved.await)?;
    site.node_client.requester.served().await?;
    let ended = until(began, scaled(GIVE_UP), async || stalled.has_ended()).await;
    let bound = run.clocks.bound(Duration::from_secs(80));
    run.within("stalled stream ends", bound, ended)?;
    let ends = stalled.finish(scaled(FINISH)).await;
    run.equal_or_reset("stalled stream", &ends)?;
    site.node_client.requester.served().await?;
    site.node_client.ensure_equal(run)
}

/// Limits the size of datagrams for longer than a dead session lives, with an idle stream.
async fn idle(run: Run) -> Result<()> {
    let site = Site::up(run).await?;
    let (stream, before) = (site.node_client.pipe(IDLE).await?, site.ids());
    site.link.set(TrafficClass::UDP, Impairment::capped(CAP));
    sleep(run.clocks.time(LONG)).await;
    let after = site.ids();
    ensure!(before == after, "sessions {before:?}, then {after:?}");
    ensure!(!stream.has_ended(), "the idle stream was cut");
    run.equal("idle stream", &stream.finish(scaled(FINISH)).await)
}

fn to_edge(load: Load) -> Loads {
    Loads {
        to_edge: load,
        ..IDLE
    }
}

fn to_cloud(load: Load) -> Loads {
    Loads {
        to_cloud: load,
        ..IDLE
    }
}

const IDLE: Loads = Loads::both(Load::Quiet);
/// The largest payload that passes.
const CAP: usize = 1100;
const SMALL: u64 = 20_000;
/// Longer than `limits.deadAfter`.
const LONG: Duration = Duration::from_secs(90);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(120);
const FINISH: Duration = Duration::from_secs(40);
