//! S24, T10, T22: floods at the agents' port, from unauthenticated peers and from an agent with a
//! credential. Others are served meanwhile.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use tunnel_proto::tls::{self, Trust};
use tunnel_proto::transport::Dialer as _;
use tunnel_proto::transport::quic::QuicDialer;
use tunnel_proto::wire::ALPN_SESSION;
use tunnel_proto::wire::header::{StreamHeader, StreamKind, Target};
use tunnel_proto::wire::name::Port;
use tunnel_tests::env::{NodeEnv, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::load::Load;
use tunnel_tests::targets::Exporter;

use super::super::scripted::{agent_key, dial, remote, settings};
use super::{report_figure, scrape};

/// A flood of datagrams, sent by a separate thread until this value is dropped.
struct Flood {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
}

impl Flood {
    /// Starts the flood. The thread sends the datagrams of `from` in turn, each from its socket, at
    /// a rate of about `per_second`.
    fn start(to: SocketAddr, from: Vec<(std::net::UdpSocket, Vec<u8>)>, per_second: u64) -> Self {
        let (stop, sent) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stopping, count) = (stop.clone(), sent.clone());
        let began = std::time::Instant::now();
        let _ends_by_itself = tokio::task::spawn_blocking(move || {
            for (socket, datagram) in from.iter().cycle() {
                if stopping.load(Ordering::Relaxed) {
                    return;
                }
                // The receiver's full queue is part of the attack.
                let _lost = socket.send_to(datagram, to);
                let sent = count.fetch_add(1, Ordering::Relaxed);
                let due = Duration::from_nanos(sent * 1_000_000_000 / per_second);
                if let Some(early) = due.checked_sub(began.elapsed()) {
                    std::thread::park_timeout(early);
                }
            }
        });
        Self { stop, sent }
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn socket(last: [u8; 2]) -> Result<std::net::UdpSocket> {
    let ip = Ipv4Addr::new(127, 1, last[0], last[1]);
    Ok(std::net::UdpSocket::bind((ip, 0))?)
}

/// S24: sends empty datagrams to the agents' port while a caller scrapes an agent. The 99th
/// percentile of the scrapes stays below 250 ms, and the session survives.
#[tokio::test(flavor = "multi_thread")]
async fn s24_empty_datagrams_at_the_agents_port_keep_nobody_waiting() -> Result<()> {
    let NodeEnv { env, host, .. } = &NodeEnv::start().await?;
    let endpoint = env.http();
    scrape(&endpoint, host, 20).await?;
    let before = scrape(&endpoint, host, 200).await?;
    let from = vec![(socket([0, 1])?, Vec::new())];
    let flood = Flood::start(env.bound().agents, from, 200_000);
    let began = Instant::now();
    let mut with = Duration::ZERO;
    let sent = || flood.sent.load(Ordering::Relaxed);
    let give_up = scaled(Duration::from_secs(10));
    while began.elapsed() < Duration::from_secs(1)
        || (sent() <= 10_000 && began.elapsed() < give_up)
    {
        with = with.max(scrape(&endpoint, host, 200).await?);
    }
    let sent = sent();
    drop(flood);
    report_figure(&format!(
        "S24: {sent} empty datagrams in {:?}; p99 of scrapes {before:?}, then {with:?}",
        began.elapsed()
    ));
    ensure!(sent > 10_000, "only {sent} were sent");
    // The flood keeps one of two processors busy.
    ensure!(with < scaled(Duration::from_millis(250)), "{with:?}");
    let sessions = env.registry().of_node(&"worker-1".parse()?);
    ensure!(sessions.len() == 1, "the session was lost");
    Ok(())
}

/// Collects `count` first datagrams of QUIC handshakes, each of a separate connection. No server
/// answers these handshakes.
async fn initials(env: &TestEnv, count: usize) -> Result<Vec<Vec<u8>>> {
    let socket = UdpSocket::bind("127.0.0.1:0").await?;
    let address = socket.local_addr()?;
    let key = agent_key(env, "worker-9")?;
    let mut taken = Vec::with_capacity(count);
    while taken.len() < count {
        let tls = tls::session_client(key.clone(), Trust::Roots(env.roots()?), ALPN_SESSION)?;
        let dialer = QuicDialer::new(tls, settings())?;
        let remote = remote(address);
        let dialing = dialer.dial(&remote);
        let mut datagram = vec![0; 2048];
        let replies = async {
            let length = socket.recv(&mut datagram).await?;
            datagram.truncate(length);
            anyhow::Ok(())
        };
        tokio::select! {
            replies = replies => replies?,
            dialed = dialing => ensure!(dialed.is_err(), "dialed without an answer"),
        }
        // A retransmission of an earlier handshake is a harmless duplicate in the list.
        taken.push(datagram);
    }
    Ok(taken)
}

/// T22: starts handshakes from 1,000 sources, at 10,000 a second, and never finishes one. An agent
/// still connects within 5 s.
#[tokio::test(flavor = "multi_thread")]
async fn t22_flood_of_handshakes_from_many_sources_keeps_no_agent_out() -> Result<()> {
    const SOURCES: usize = 1000;
    let site = NodeEnv::start().await?;
    let (env, host) = (&site.env, &site.host);
    let datagrams = initials(env, 200).await?;
    let mut from = Vec::with_capacity(SOURCES);
    for source in 0..SOURCES {
        let last = u16::try_from(source)?.to_be_bytes();
        from.push((socket(last)?, datagrams[source % datagrams.len()].clone()));
    }
    let flood = Flood::start(env.bound().agents, from, 10_000);
    // The agent reconnects during the flood.
    while flood.sent.load(Ordering::Relaxed) <= 2000 {
        scrape(&env.http(), host, 10).await?;
    }
    drop(site.agent);
    // Else the session that ends would count as that of the next agent.
    eventually("the server has lost the agent", WAIT_TIMEOUT, async || {
        ensure!(env.registry().of_node(&"worker-1".parse()?).is_empty());
        anyhow::Ok(())
    })
    .await;
    let began = Instant::now();
    let again = env.agent("worker-1");
    let again = timeout(scaled(Duration::from_secs(5)), again).await;
    let _agent = again.context("the agent did not get in")??;
    let took = began.elapsed();
    scrape(&env.http(), host, 50).await?;
    let sent = flood.sent.load(Ordering::Relaxed);
    report_figure(&format!(
        "T22: {sent} beginnings of handshakes; an agent got in after {took:?}"
    ));
    ensure!(sent > 2000, "only {sent} were sent");
    Ok(())
}

/// T10: an agent with a credential opens streams as fast as possible, although agents may open
/// none. Then the agent connects again and repeats the attack. No request of other callers fails.
#[tokio::test(flavor = "multi_thread")]
async fn t10_agent_that_floods_with_streams_costs_others_nothing() -> Result<()> {
    let env = Arc::new(TestEnv::start().await?);
    let exporter = Exporter::start("worker-1").await?;
    let _agent = env.agent("worker-1").await?;
    let hosts = [format!("worker-1:{}", exporter.addr().port())];
    let sessions = Arc::new(AtomicU64::new(0));
    let (flooded, counted) = (env.clone(), sessions.clone());
    #[expect(clippy::disallowed_methods, reason = "owned by the handle")]
    let hostile = AbortOnDropHandle::new(tokio::spawn(async move {
        let key = agent_key(&flooded, "worker-2")?;
        let target = Target::Node(Port::new(9100).context("a port")?);
        let header = StreamHeader::new(StreamKind::Target(target));
        loop {
            let Ok((session, _dialer)) = dial(&flooded, key.clone()).await else {
                continue;
            };
            counted.fetch_add(1, Ordering::Relaxed);
            let mut open_conns = Vec::new();
            // The loop ends when the server closes the session or grants no stream for 200 ms.
            let patience = scaled(Duration::from_millis(200));
            let opened = || session.open(&header, Duration::from_secs(5));
            while let Ok(Ok(stream)) = timeout(patience, opened()).await {
                open_conns.push(stream);
            }
        }
        #[expect(unreachable_code, reason = "declares the error type")]
        anyhow::Ok(())
    }));
    let load = Load::start(env.http(), &hosts, 4).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let outcome = load.end().await?;
    outcome.check()?;
    drop(hostile);
    let sessions = sessions.load(Ordering::Relaxed);
    report_figure(&format!("T10: {sessions} hostile sessions"));
    ensure!(sessions > 0, "no hostile session was opened");
    Ok(())
}
