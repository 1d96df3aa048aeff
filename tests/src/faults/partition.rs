//! F05, F06, F08, F09: nothing passes, for a second, for half a minute, in one direction only, or
//! until the end.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::{Instant, sleep, sleep_until};

use super::findings::Findings;
use super::site::Site;
use super::watch::until;
use super::{Run, TransportMode};
use crate::eventually::scaled;
use crate::link::{Impairment, TrafficClass};

/// Runs F05: everything is lost for a second during a stream.
pub(super) async fn brief(run: Run) -> Result<Findings> {
    let mut findings = Findings::default();
    let site = Site::up(run).await?;
    let pipe = site.node_client.talk().await?;
    let before = site.ids();
    pipe.forget_stalls();
    site.link.set(TrafficClass::ALL, Impairment::black_hole());
    sleep(run.clocks.time(BRIEF)).await;
    site.link.heal();
    pipe.mark();
    let _resumed = pipe.resumed(scaled(GIVE_UP)).await;
    // A second session would be dialed within that time, if at all.
    sleep(run.clocks.time(BRIEF)).await;
    let bound = run.clocks.bound(Duration::from_millis(1500));
    findings.within("stall of a stream", bound, Ok(pipe.stall()));
    let after = site.ids();
    findings.holds("same session before and after", before == after, || {
        format!("sessions {before:?}, then {after:?}")
    });
    findings.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await);
    site.node_client.requester.served().await?;
    site.node_client.report(&mut findings);
    Ok(findings)
}

/// Runs F06: everything is lost for 30 s, with or without an open stream.
pub(super) async fn long(run: Run, busy: bool) -> Result<Findings> {
    let clocks = run.clocks;
    let mut findings = Findings::default();
    let site = Site::up(run).await?;
    let pipe = match busy {
        true => Some(site.node_client.talk().await?),
        false => None,
    };
    let began = Instant::now();
    site.link.set(TrafficClass::ALL, Impairment::black_hole());
    let heals = began + clocks.time(LONG);
    let suspect_after = if busy { SUSPECT_BUSY } else { SUSPECT_IDLE };
    let suspected = site.server_suspects(began, heals - began).await;
    findings.within(
        "server suspects the agent",
        clocks.bound(suspect_after),
        suspected,
    );
    let every = clocks.time(ASK_EVERY);
    site.node_client
        .requester
        .refused(heals, every, &mut findings)
        .await;
    sleep_until(heals).await;
    site.link.heal();
    let healed = Instant::now();
    let streams = async {
        let pipe = pipe.as_ref()?;
        pipe.mark();
        Some(pipe.resumed(scaled(GIVE_UP)).await)
    };
    let (served, resumed) = tokio::join!(
        site.node_client
            .requester
            .serving_on(healed, scaled(GIVE_UP)),
        streams
    );
    let bound = clocks.connect_bound(Duration::from_secs(3));
    findings.within("new requests served for good after the heal", bound, served);
    if let (Some(resumed), Some(pipe)) = (resumed, pipe) {
        let bound = clocks.bound(Duration::from_secs(35));
        findings.within("streams go on after the heal", bound, resumed);
        findings.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await);
    }
    site.node_client.report(&mut findings);
    Ok(findings)
}

/// Runs F08: everything is lost in one direction, without streams.
pub(super) async fn one_way(run: Run, class: TrafficClass) -> Result<Findings> {
    silence(run, class, false).await
}

/// Runs F09: packets of a connection no longer arrive, with or without an open stream.
pub(super) async fn half_open(run: Run, busy: bool) -> Result<Findings> {
    let class = match run.transport_mode {
        TransportMode::Quic => TrafficClass::UDP,
        TransportMode::H2 => TrafficClass::TCP,
        TransportMode::Auto => TrafficClass::ALL,
    };
    silence(run, class, busy).await
}

/// Checks that both ends mark each other suspect, then dead.
async fn silence(run: Run, class: TrafficClass, busy: bool) -> Result<Findings> {
    let clocks = run.clocks;
    let mut findings = Findings::default();
    let site = Site::up(run).await?;
    let pipe = match busy {
        true => Some(site.node_client.talk().await?),
        false => None,
    };
    let old = *site.ids().first().context("no session")?;
    let began = Instant::now();
    site.link.set(class, Impairment::black_hole());
    let (suspect, dead) = (
        clocks.bound(if busy { SUSPECT_BUSY } else { SUSPECT_IDLE }),
        clocks.bound(DEAD),
    );
    let patience = scaled(dead) + GIVE_UP;
    let (server_suspects, agent_suspects, server_lost, agent_lost) = tokio::join!(
        site.server_suspects(began, patience),
        site.agent_suspects(began, patience),
        site.server_lost(old, began, patience),
        site.agent_lost(began, patience),
    );
    findings.within("server suspects the agent", suspect, server_suspects);
    findings.within("agent suspects the server", suspect, agent_suspects);
    findings.within("server closes the dead session", dead, server_lost);
    findings.within("agent closes the dead session", dead, agent_lost);
    if let Some(pipe) = pipe {
        let observed = until(Instant::now(), scaled(FINISH), async || pipe.has_ended()).await;
        findings.observed("stream's reset reported after that", observed);
        let ends = pipe.finish(scaled(FINISH)).await;
        findings.equal_or_reset("stream's bytes equal, or the cut reported", &ends);
    }
    site.link.heal();
    let healed = Instant::now();
    let served = site
        .node_client
        .requester
        .serving(healed, scaled(GIVE_UP))
        .await;
    findings.observed("served after the heal", served);
    site.node_client.report(&mut findings);
    Ok(findings)
}

const BRIEF: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(30);
const SUSPECT_BUSY: Duration = Duration::from_secs(5);
const SUSPECT_IDLE: Duration = Duration::from_secs(15);
const DEAD: Duration = Duration::from_secs(60);
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Far beyond any bound of the measured values.
const GIVE_UP: Duration = Duration::from_secs(45);
/// Time limit for the rest of a stream, which may still wait for a retransmission.
const FINISH: Duration = Duration::from_secs(40);
