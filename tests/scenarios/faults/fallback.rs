//! F10, F11, F12: UDP does not pass, from the start or later, and returns.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tunnel_proto::transport::TransportKind;
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{Clocks, RequestOutcome, Run, Runs, Site, TimedOutcome, TransportMode};
use tunnel_tests::link::{Impairment, TrafficClass};

#[tokio::test(flavor = "multi_thread")]
async fn f10_without_udp_from_the_start_h2_serves() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for (case, refused) in [("UDP vanishes", false), ("UDP refused", true)] {
        runs.start(TransportMode::Auto, case, |run| {
            blocked_from_start(run, refused)
        });
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f11_h2_takes_over_from_quic_and_gives_back() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for (case, busy) in [("stream open", true), ("idle", false)] {
        runs.start(TransportMode::Auto, case, |run| blocked_later(run, busy));
    }
    runs.finish().await
}

#[tokio::test(flavor = "multi_thread")]
async fn f12_agent_finds_back_when_only_udp_is_healed() -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    for (case, begins_over_h2) in [("from QUIC", false), ("from h2", true)] {
        runs.start(TransportMode::Auto, case, |run| {
            only_udp_heals(run, begins_over_h2)
        });
    }
    runs.finish().await
}

/// Starts the agent where UDP vanishes or is refused.
async fn blocked_from_start(run: Run, refused: bool) -> Result<()> {
    let mut site = Site::prepare(run).await?;
    let mut forwarding = JoinSet::new();
    let mut server = site.link.addr();
    if refused {
        // Without a bound UDP socket the system answers with ICMP "port unreachable".
        let tcp_only = TcpListener::bind("127.0.0.1:0").await?;
        let link = std::mem::replace(&mut server, tcp_only.local_addr()?);
        forwarding.spawn(forward(tcp_only, link));
    } else {
        site.link.set(TrafficClass::UDP, Impairment::black_hole());
    }
    let began = Instant::now();
    site.start_agent_towards(server).await?;
    let requester = &site.node_client.requester;
    let served = requester.serving(began, scaled(GIVE_UP)).await;
    let bound = run.clocks.connect_bound(Duration::from_secs(5));
    run.within("served over h2 after the agent's start", bound, served)?;
    ensure_over(TransportKind::H2, &site)?;
    let pipe = site.node_client.talk().await?;
    run.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await)?;
    site.node_client.ensure_equal(run)
}

/// Blocks UDP during a session, with or without an open stream, and heals it.
async fn blocked_later(run: Run, busy: bool) -> Result<()> {
    let clocks = run.clocks;
    let site = Site::up(run).await?;
    ensure_over(TransportKind::Quic, &site).context("at the beginning")?;
    let old = site.node_client.talk_if(busy).await?;
    let began = Instant::now();
    site.link.set(TrafficClass::UDP, Impairment::black_hole());
    if busy {
        let mut served = Err(Duration::ZERO);
        let requester = &site.node_client.requester;
        let serving = async { served = requester.serving(began, scaled(GIVE_UP)).await };
        let every = clocks.time(Duration::from_secs(1));
        let asked = requester.ask_during(every, scaled(OUTCOME_LIMIT), serving);
        let asked = asked.await?;
        let bound = clocks.connect_bound(Duration::from_secs(10));
        run.within("served over h2 after the block", bound, served)?;
        ensure_answered(run, &asked)?;
    } else {
        // A request would make the session busy.
        let moved = site.moved_to(TransportKind::H2, began, scaled(GIVE_UP));
        let moved = moved.await;
        site.node_client.requester.served().await?;
        let bound = clocks.connect_bound(Duration::from_secs(20));
        run.within("served over h2 after the block", bound, moved)?;
    }
    ensure_over(TransportKind::H2, &site)?;
    let upgrading = site.node_client.talk().await?;
    sleep(clocks.time(STAY)).await;
    site.link.heal();
    let healed = Instant::now();
    upgrading.forget_stalls();
    if let Some(old) = &old {
        old.mark();
    }
    let back = site.moved_to(TransportKind::Quic, healed, scaled(GIVE_UP_UPGRADE));
    let bound = clocks.connect_bound(Duration::from_secs(60));
    run.within("back on QUIC after UDP is", bound, back.await)?;
    site.node_client.requester.served().await?;
    sleep(clocks.time(AFTER_UPGRADE)).await;
    let stall = Ok(upgrading.stall());
    run.observed("longest stall of a stream through the upgrade", stall);
    let ends = upgrading.finish(scaled(FINISH)).await;
    run.equal("stream through the upgrade: bytes equal", &ends)?;
    if let Some(old) = old {
        let resumed = old.resumed(scaled(GIVE_UP)).await;
        run.observed("stream from before goes on after", resumed);
        let ends = old.finish(scaled(FINISH)).await;
        let what = "stream from before: bytes equal, or the reset reported";
        run.equal_or_reset(what, &ends)?;
    }
    site.node_client.ensure_equal(run)
}

/// Blocks everything for a while, then heals only UDP. The run begins over h2 or over QUIC.
async fn only_udp_heals(run: Run, begins_over_h2: bool) -> Result<()> {
    let mut site = Site::prepare(run).await?;
    let first = if begins_over_h2 {
        site.link.set(TrafficClass::UDP, Impairment::black_hole());
        TransportKind::H2
    } else {
        TransportKind::Quic
    };
    site.start_agent().await?;
    site.ready().await?;
    ensure_over(first, &site).context("at the beginning")?;
    site.link.set(TrafficClass::ALL, Impairment::black_hole());
    sleep(run.clocks.time(BOTH_BLOCKED)).await;
    site.link.set(TrafficClass::UDP, Impairment::default());
    let healed = Instant::now();
    let requester = &site.node_client.requester;
    let served = requester.serving(healed, scaled(GIVE_UP_UPGRADE)).await;
    let bound = run.clocks.connect_bound(Duration::from_secs(35));
    run.within("served after UDP alone is back", bound, served)?;
    ensure_over(TransportKind::Quic, &site)?;
    let pipe = site.node_client.talk().await.context("after the heal")?;
    run.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await)?;
    site.node_client.ensure_equal(run)
}

fn ensure_over(transport: TransportKind, site: &Site) -> Result<()> {
    let actual = site.transport();
    ensure!(
        actual == Some(transport),
        "new streams go over {actual:?}, not over {transport}"
    );
    Ok(())
}

/// Checks that requests that waited during the blackout were answered or refused, and that none was
/// forgotten.
fn ensure_answered(run: Run, asked: &[TimedOutcome]) -> Result<()> {
    let slowest = asked.iter().map(|asked| asked.took).max();
    let what = format!("slowest of {} requests meanwhile", asked.len());
    run.observed(&what, slowest.ok_or(Duration::ZERO));
    let is_answer = |outcome: &RequestOutcome| {
        matches!(
            outcome,
            RequestOutcome::Served | RequestOutcome::Refused(502..=504, _)
        )
    };
    let outcomes = asked.iter().map(|asked| &asked.outcome);
    let silent = outcomes.filter(|&outcome| !is_answer(outcome));
    let silent: Vec<_> = silent.map(ToString::to_string).collect();
    ensure!(silent.is_empty(), "not answered or refused: {silent:?}");
    Ok(())
}

/// Forwards TCP connections to another port.
async fn forward(listener: TcpListener, upstream: SocketAddr) {
    let mut connections = JoinSet::new();
    while let Ok((mut from, _)) = listener.accept().await {
        connections.spawn(async move {
            let mut to = TcpStream::connect(upstream).await?;
            copy_bidirectional(&mut from, &mut to).await
        });
    }
}

/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(45);
/// Like `GIVE_UP`, for longer bounds.
const GIVE_UP_UPGRADE: Duration = Duration::from_secs(120);
/// Longer than any time limit of the server. An outcome not reported by then is never reported.
const OUTCOME_LIMIT: Duration = Duration::from_secs(30);
/// Time without UDP after h2 has taken over.
const STAY: Duration = Duration::from_secs(5);
/// Time in which the upgrade might still affect a stream of the retiring session.
const AFTER_UPGRADE: Duration = Duration::from_secs(5);
/// Longer than it takes to suspect a session and to give up several dials.
const BOTH_BLOCKED: Duration = Duration::from_secs(25);
/// Time limit for the rest of a stream, which may still wait for a retransmission.
const FINISH: Duration = Duration::from_secs(40);
