//! F15, F16: the agent changes its port or its address.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use tokio::time::{Instant, sleep};
use tunnel_tests::eventually::scaled;
use tunnel_tests::faults::{
    Clocks, Load, Loads, NODE, Pipe, Run, Runs, Site, TransportMode, node_status, until,
};

tests_of! {
    fn f15_another_port_of_a_nat_is_a_short_stall() = over_both("another port", Shift::Port);
    fn f16_another_address_of_the_agent_is_followed() =
        over_both("another address", Shift::Address);
}

async fn over_both(case: &'static str, shift: Shift) -> Result<()> {
    let mut runs = Runs::timed(Clocks::of_gear())?;
    runs.start(TransportMode::Quic, case, |run| over_quic(run, shift));
    runs.start(TransportMode::H2, case, |run| over_tcp(run, shift));
    runs.finish().await
}

/// The change of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shift {
    /// F15: a NAT drops the mapping of the agent's port.
    Port,
    /// F16: the agent gets another address.
    Address,
}

/// Checks that the session continues.
async fn over_quic(run: Run, shift: Shift) -> Result<()> {
    let site = Site::up(run).await?;
    let pipe = site.node_client.talk().await?;
    let before = site.ids();
    let mut worst = Duration::ZERO;
    for round in 0..ROUNDS {
        pipe.forget_stalls();
        let address = shift.happen(&site, run.seed, round);
        settle(&pipe).await;
        worst = worst.max(pipe.stall());
        if let Some(address) = address {
            ensure_shown(&site, address).await?;
        }
    }
    let what = "stall of a stream with data from the agent";
    run.within(what, run.clocks.bound(STALL), Ok(worst))?;
    run.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await)?;
    let quiet = Loads {
        to_edge: Load::Paced,
        to_cloud: Load::Quiet,
    };
    let pipe = site.node_client.pipe(quiet).await?;
    until_received(&pipe).await?;
    pipe.to_edge.mark();
    shift.happen(&site, run.seed, ROUNDS);
    let resumed = until(Instant::now(), scaled(GIVE_UP), async || {
        pipe.to_edge.resumed().is_some() || pipe.has_ended()
    });
    let resumed = resumed
        .await
        .and_then(|_| pipe.to_edge.resumed().ok_or(GIVE_UP));
    run.observed("stall while the agent sends nothing", resumed);
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal("that stream's bytes equal", &ends)?;
    let after = site.ids();
    ensure!(before == after, "sessions {before:?}, then {after:?}");
    site.node_client.requester.served().await?;
    site.node_client.ensure_equal(run)
}

/// Checks that the connection is lost and a new one is made.
async fn over_tcp(run: Run, shift: Shift) -> Result<()> {
    let site = Site::up(run).await?;
    let pipe = site.node_client.talk().await?;
    let before = site.ids();
    let address = shift.happen(&site, run.seed, 0);
    let began = Instant::now();
    site.link.reset_tcp();
    // The server may not have noticed the reset when the first request arrives, so the run waits
    // for a new session.
    let renewed = async || site.ids().iter().any(|id| !before.contains(id));
    let requester = &site.node_client.requester;
    let served = match until(began, scaled(GIVE_UP), renewed).await {
        Ok(_) => requester.serving(began, scaled(GIVE_UP)).await,
        Err(waited) => Err(waited),
    };
    let bound = run.clocks.connect_bound(Duration::from_secs(3));
    run.within("reconnected and served", bound, served)?;
    if let Some(address) = address {
        ensure_shown(&site, address).await?;
    }
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal_or_reset("stream's bytes equal, or the cut reported", &ends)?;
    let pipe = site.node_client.talk().await.context("after the reset")?;
    let ends = pipe.finish(scaled(FINISH)).await;
    run.equal("next stream's bytes equal", &ends)?;
    site.node_client.ensure_equal(run)
}

impl Shift {
    /// Changes the path and returns the new address, if it differs.
    fn happen(self, site: &Site, seed: u64, round: u8) -> Option<IpAddr> {
        match self {
            Self::Port => {
                site.link.rebind();
                None
            }
            Self::Address => {
                let last = u8::try_from(seed % 50).unwrap_or(0) * 4 + round + 2;
                let address = IpAddr::from(Ipv4Addr::new(127, 0, 0, last));
                site.link.move_to(address);
                Some(address)
            }
        }
    }
}

/// Checks that `/nodes` contains the new address of the node.
async fn ensure_shown(site: &Site, address: IpAddr) -> Result<()> {
    let meta = site.env.meta();
    let observed = async || match node_status(meta, NODE).await {
        Ok(node) => node["address"].as_str().unwrap_or("nothing").to_owned(),
        Err(error) => error.to_string(),
    };
    let shows = async || {
        let shown: Option<SocketAddr> = observed().await.parse().ok();
        shown.is_some_and(|shown| shown.ip() == address)
    };
    let shown = until(Instant::now(), scaled(SHOWN), shows).await;
    let last = observed().await;
    ensure!(
        shown.is_ok(),
        "nodes shows {NODE} at {last}, not at {address}"
    );
    Ok(())
}

/// Waits until lost data has been sent again.
async fn settle(pipe: &Pipe) {
    pipe.mark();
    let _resumed = pipe.resumed(scaled(GIVE_UP)).await;
    sleep(BETWEEN).await;
}

async fn until_received(pipe: &Pipe) -> Result<()> {
    let runs = until(Instant::now(), scaled(GIVE_UP), async || {
        pipe.to_edge.received() > 0
    });
    runs.await
        .map(drop)
        .map_err(|waited| anyhow!("nothing came in {waited:?}"))
}

const ROUNDS: u8 = 3;
const STALL: Duration = Duration::from_secs(1);
/// Longer than a stall that is within its bound.
const BETWEEN: Duration = Duration::from_millis(1500);
/// Time limit for `/nodes`, which reads the current state of the session.
const SHOWN: Duration = Duration::from_secs(2);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(30);
/// Time limit for the rest of an active stream.
const FINISH: Duration = Duration::from_secs(15);
