//! F10, F11, F12: UDP does not pass, from the start or later, and comes back.

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
use super::reach::{Asked, Fate, Waiting};
use super::site::Site;
use super::{Run, spawn};
use crate::eventually::scaled;
use crate::link::{Impairment, Way};

/// F10: UDP vanishes from the start, or nobody listens there.
pub(super) async fn blocked_from_start(run: Run, refused: bool) -> Result<Findings> {
    let mut found = Findings::default();
    let mut site = Site::prepare(run).await?;
    let way = if refused {
        // Where no socket is bound for UDP, the system answers with ICMP "port unreachable".
        Some(TcpOnly::start(site.link.addr()).await?)
    } else {
        site.link.set(Way::UDP, Impairment::black_hole());
        None
    };
    let server = way
        .as_ref()
        .map_or_else(|| site.link.addr(), |way| way.addr);
    let began = Instant::now();
    site.start_agent_towards(server).await?;
    let served = site.reach.asker.serving(began, scaled(GIVE_UP)).await;
    let bound = run.clocks.connect_bound(Duration::from_secs(5));
    found.within("served over h2 after the agent's start", bound, served);
    is_over(TransportKind::H2, &site, &mut found);
    let pipe = site.reach.talk().await?;
    found.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await);
    site.reach.conclude(&mut found);
    Ok(found)
}

/// F11: UDP vanishes under a session, with a stream open or without, and comes back.
pub(super) async fn blocked_later(run: Run, busy: bool) -> Result<Findings> {
    let clocks = run.clocks;
    let mut found = Findings::default();
    let site = Site::up(run).await?;
    ensure!(
        site.transport() == Some(TransportKind::Quic),
        "does not begin over QUIC"
    );
    let old = match busy {
        true => Some(site.reach.talk().await?),
        false => None,
    };
    let began = Instant::now();
    site.link.set(Way::UDP, Impairment::black_hole());
    if busy {
        let mut served = Err(Duration::ZERO);
        let asker = &site.reach.asker;
        let serving = async { served = asker.serving(began, scaled(GIVE_UP)).await };
        let every = clocks.time(Duration::from_secs(1));
        let waiting = Waiting::during(asker, every, scaled(TOLD), serving).await;
        let bound = clocks.connect_bound(Duration::from_secs(10));
        found.within("served over h2 after the block", bound, served);
        fates(&waiting.fates().await?, &mut found);
    } else {
        // A request would make the session a busy one.
        let moved = site
            .moved_to(TransportKind::H2, began, scaled(GIVE_UP))
            .await;
        site.reach.asker.served().await?;
        let bound = clocks.connect_bound(Duration::from_secs(20));
        found.within("served over h2 after the block", bound, moved);
    }
    is_over(TransportKind::H2, &site, &mut found);
    let climbing = site.reach.talk().await?;
    sleep(clocks.time(STAY)).await;
    site.link.heal();
    let healed = Instant::now();
    climbing.forget_stalls();
    if let Some(old) = &old {
        old.mark();
    }
    let back = site
        .moved_to(TransportKind::Quic, healed, scaled(GIVE_UP_CLIMB))
        .await;
    let bound = clocks.connect_bound(Duration::from_secs(60));
    found.within("back on QUIC after UDP is", bound, back);
    site.reach.asker.served().await?;
    sleep(clocks.time(AFTER_CLIMB)).await;
    found.told(
        "longest stall of a stream through the climb",
        Ok(climbing.stall()),
    );
    let ends = climbing.finish(scaled(FINISH)).await;
    found.equal("stream through the climb: bytes equal", &ends);
    if let Some(old) = old {
        found.told(
            "stream from before goes on after",
            old.resumed(scaled(GIVE_UP)).await,
        );
        let ends = old.finish(scaled(FINISH)).await;
        found.equal_or_told("stream from before: bytes equal, or the cut told", &ends);
    }
    site.reach.conclude(&mut found);
    Ok(found)
}

/// F12: nothing passes for a while, then only UDP does; begins over h2, or over QUIC.
pub(super) async fn only_udp_heals(run: Run, begins_over_h2: bool) -> Result<Findings> {
    let mut found = Findings::default();
    let mut site = Site::prepare(run).await?;
    let first = if begins_over_h2 {
        site.link.set(Way::UDP, Impairment::black_hole());
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
    site.link.set(Way::ALL, Impairment::black_hole());
    sleep(run.clocks.time(BOTH_BLOCKED)).await;
    site.link.set(Way::UDP, Impairment::default());
    let healed = Instant::now();
    let served = site
        .reach
        .asker
        .serving(healed, scaled(GIVE_UP_CLIMB))
        .await;
    let bound = run.clocks.connect_bound(Duration::from_secs(35));
    found.within("served after UDP alone is back", bound, served);
    is_over(TransportKind::Quic, &site, &mut found);
    let pipe = site.reach.talk().await.context("after the heal")?;
    found.equal("stream's bytes equal", &pipe.finish(scaled(FINISH)).await);
    site.reach.conclude(&mut found);
    Ok(found)
}

fn is_over(transport: TransportKind, site: &Site, found: &mut Findings) {
    let actual = site.transport();
    found.holds(
        format!("new streams go over {transport}"),
        actual == Some(transport),
        || actual.map_or_else(|| "over nothing".to_owned(), |kind| format!("over {kind}")),
    );
}

/// Requests that waited while nothing passed were answered or refused; none was forgotten.
fn fates(asked: &[Asked], found: &mut Findings) {
    let slowest = asked.iter().map(|asked| asked.took).max();
    found.told(
        format!("slowest of {} requests meanwhile", asked.len()),
        slowest.ok_or(Duration::ZERO),
    );
    let silent = asked.iter().filter(|asked| match &asked.fate {
        Fate::Served | Fate::Refused(502..=504, _) => false,
        Fate::Refused(..) | Fate::Cut(_) | Fate::Silence | Fate::Unequal(_) => true,
    });
    let silent: Vec<_> = silent.map(|asked| asked.fate.to_string()).collect();
    found.holds("each was answered or refused", silent.is_empty(), || {
        silent.join(", ")
    });
}

/// A port that takes TCP connections for another one, and has no UDP socket.
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

/// When what is measured has missed any bound by far.
const GIVE_UP: Duration = Duration::from_secs(45);
/// The same, where the bound is longer.
const GIVE_UP_CLIMB: Duration = Duration::from_secs(120);
/// Longer than any time limit of the server: what has not been told by then is not told.
const TOLD: Duration = Duration::from_secs(30);
/// How long UDP stays away after h2 has taken over.
const STAY: Duration = Duration::from_secs(5);
/// For what the climb might still do to a stream of the session that retires.
const AFTER_CLIMB: Duration = Duration::from_secs(5);
/// Longer than it takes to suspect a session, and to give up several dials.
const BOTH_BLOCKED: Duration = Duration::from_secs(25);
/// For what is left of a stream, which may still wait for a retransmission.
const FINISH: Duration = Duration::from_secs(40);
