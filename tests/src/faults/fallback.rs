//! F10, F11, F12: UDP does not pass, from the start or later, and returns.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use tunnel_proto::transport::TransportKind;

use super::findings::Findings;
use super::node_client::{PendingRequests, RequestOutcome, TimedOutcome};
use super::site::Site;
use super::{Run, spawn};
use crate::eventually::scaled;
use crate::link::{Impairment, TrafficClass};

/// Runs F10: UDP vanishes from the start, or is refused.
pub(super) async fn blocked_from_start(run: Run, refused: bool) -> Result<Findings> {
    let mut findings = Findings::default();
    let mut site = Site::prepare(run).await?;
    let tcp_only = if refused {
        // Without a bound UDP socket the system answers with ICMP "port unreachable".
        Some(TcpOnly::start(site.link.addr()).await?)
    } else {
        site.link.set(TrafficClass::UDP, Impairment::black_hole());
        None
    };
    let server = tcp_only
        .as_ref()
        .map_or_else(|| site.link.addr(), |tcp_only| tcp_only.addr);
    let began = Instant::now();
    site.start_agent_towards(server).await?;
    let served = site
        .node_client
        .requester
        .serving(began, scaled(GIVE_UP))
        .await;
    let bound = run.clocks.connect_bound(Duration::from_secs(5));
    findings.within("served over h2 after the agent's start", bound, served);
    is_over(TransportKind::H2, &site, &mut findings);
    let pipe = site.node_client.talk().await?;
    findings.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await);
    site.node_client.report(&mut findings);
    Ok(findings)
}

/// Runs F11: UDP vanishes during a session, with or without an open stream, and returns.
pub(super) async fn blocked_later(run: Run, busy: bool) -> Result<Findings> {
    let clocks = run.clocks;
    let mut findings = Findings::default();
    let site = Site::up(run).await?;
    ensure!(
        site.transport() == Some(TransportKind::Quic),
        "does not begin over QUIC"
    );
    let old = match busy {
        true => Some(site.node_client.talk().await?),
        false => None,
    };
    let began = Instant::now();
    site.link.set(TrafficClass::UDP, Impairment::black_hole());
    if busy {
        let mut served = Err(Duration::ZERO);
        let requester = &site.node_client.requester;
        let serving = async { served = requester.serving(began, scaled(GIVE_UP)).await };
        let every = clocks.time(Duration::from_secs(1));
        let waiting =
            PendingRequests::during(requester, every, scaled(OUTCOME_LIMIT), serving).await;
        let bound = clocks.connect_bound(Duration::from_secs(10));
        findings.within("served over h2 after the block", bound, served);
        outcomes(&waiting.outcomes().await?, &mut findings);
    } else {
        // A request would make the session busy.
        let moved = site
            .moved_to(TransportKind::H2, began, scaled(GIVE_UP))
            .await;
        site.node_client.requester.served().await?;
        let bound = clocks.connect_bound(Duration::from_secs(20));
        findings.within("served over h2 after the block", bound, moved);
    }
    is_over(TransportKind::H2, &site, &mut findings);
    let upgrading = site.node_client.talk().await?;
    sleep(clocks.time(STAY)).await;
    site.link.heal();
    let healed = Instant::now();
    upgrading.forget_stalls();
    if let Some(old) = &old {
        old.mark();
    }
    let back = site
        .moved_to(TransportKind::Quic, healed, scaled(GIVE_UP_UPGRADE))
        .await;
    let bound = clocks.connect_bound(Duration::from_secs(60));
    findings.within("back on QUIC after UDP is", bound, back);
    site.node_client.requester.served().await?;
    sleep(clocks.time(AFTER_UPGRADE)).await;
    findings.observed(
        "longest stall of a stream through the upgrade",
        Ok(upgrading.stall()),
    );
    let ends = upgrading.finish(scaled(FINISH)).await;
    findings.equal("stream through the upgrade: bytes equal", &ends);
    if let Some(old) = old {
        findings.observed(
            "stream from before goes on after",
            old.resumed(scaled(GIVE_UP)).await,
        );
        let ends = old.finish(scaled(FINISH)).await;
        findings.equal_or_reset(
            "stream from before: bytes equal, or the reset reported",
            &ends,
        );
    }
    site.node_client.report(&mut findings);
    Ok(findings)
}

/// Runs F12: nothing passes for a while, then only UDP does. The run begins over h2 or over QUIC.
pub(super) async fn only_udp_heals(run: Run, begins_over_h2: bool) -> Result<Findings> {
    let mut findings = Findings::default();
    let mut site = Site::prepare(run).await?;
    let first = if begins_over_h2 {
        site.link.set(TrafficClass::UDP, Impairment::black_hole());
        TransportKind::H2
    } else {
        TransportKind::Quic
    };
    site.start_agent().await?;
    site.ready().await?;
    ensure!(
        site.transport() == Some(first),
        "does not begin over {first}"
    );
    site.link.set(TrafficClass::ALL, Impairment::black_hole());
    sleep(run.clocks.time(BOTH_BLOCKED)).await;
    site.link.set(TrafficClass::UDP, Impairment::default());
    let healed = Instant::now();
    let served = site
        .node_client
        .requester
        .serving(healed, scaled(GIVE_UP_UPGRADE))
        .await;
    let bound = run.clocks.connect_bound(Duration::from_secs(35));
    findings.within("served after UDP alone is back", bound, served);
    is_over(TransportKind::Quic, &site, &mut findings);
    let pipe = site.node_client.talk().await.context("after the heal")?;
    findings.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await);
    site.node_client.report(&mut findings);
    Ok(findings)
}

fn is_over(transport: TransportKind, site: &Site, findings: &mut Findings) {
    let actual = site.transport();
    findings.holds(
        format!("new streams go over {transport}"),
        actual == Some(transport),
        || actual.map_or_else(|| "over nothing".to_owned(), |kind| format!("over {kind}")),
    );
}

/// Checks that requests that waited during the blackout were answered or refused, and that none was
/// forgotten.
fn outcomes(asked: &[TimedOutcome], findings: &mut Findings) {
    let slowest = asked.iter().map(|asked| asked.took).max();
    findings.observed(
        format!("slowest of {} requests meanwhile", asked.len()),
        slowest.ok_or(Duration::ZERO),
    );
    let silent = asked.iter().filter(|asked| match &asked.outcome {
        RequestOutcome::Served | RequestOutcome::Refused(502..=504, _) => false,
        RequestOutcome::Refused(..)
        | RequestOutcome::Cut(_)
        | RequestOutcome::Silence
        | RequestOutcome::Unequal(_) => true,
    });
    let silent: Vec<_> = silent.map(|asked| asked.outcome.to_string()).collect();
    findings.holds("each was answered or refused", silent.is_empty(), || {
        silent.join(", ")
    });
}

/// A port that forwards TCP connections to another port and has no UDP socket.
struct TcpOnly {
    addr: SocketAddr,
    _accepting: AbortOnDropHandle<()>,
}

impl TcpOnly {
    async fn start(upstream: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        Ok(Self {
            addr: listener.local_addr()?,
            _accepting: spawn(forward(listener, upstream)),
        })
    }
}

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
