//! T23, T25: who causes work, memory or log lines is the one who waits or is refused. Callers of a
//! node and of `/livez` are measured before and during each attack.
//!
//! In the full gear the figures have bounds, so it needs release binaries on an idle machine:
//! `cargo build --release --bins`, then
//! `CULVERT_TEST_GEAR=full cargo nextest run --release -E 'test(costs::)'`.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tunnel_tests::client::{ByteStream, ClientTls, Endpoint};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, Log};
use tunnel_tests::stats::{millis, percentile};
use tunnel_tests::tools::or_skip;

use super::CONNECT;
use super::memory::{CAP, MemoryCgroup, NODES, Site, SiteShape, kib};
use crate::abuse::report_figure;

/// Attacks on the meta port, where pages of the whole fleet are the most expensive.
#[derive(Debug, Clone, Copy)]
enum MetaAttack {
    /// Callers of one address ask for pages in ever other variants.
    Pages,
    /// Three connections send many requests at once, again and again.
    Pipelines,
    /// 64 callers of two addresses do not read.
    DeafReaders,
}

#[tokio::test(flavor = "multi_thread")]
async fn t25_callers_of_the_meta_port_delay_neither_probes_nor_requests() -> Result<()> {
    let shape = SiteShape {
        known_nodes: Gear::current().pick(1_000, 10_000),
        ..SiteShape::new(&NODES[..1], "{}")
    };
    let mut site = Site::build(&shape).await?;
    let before = Figures::measure(&site, window()).await?;
    let meta = site.server.address(Listener::Meta);
    for attack in [
        MetaAttack::Pages,
        MetaAttack::Pipelines,
        MetaAttack::DeafReaders,
    ] {
        let answers = AtomicUsize::new(0);
        let measured = async {
            let during = Figures::measure(&site, window()).await?;
            // A page of a busy machine may take longer than the window.
            let what = format!("{attack:?}: an answer");
            eventually(&what, CONNECT, async || {
                (answers.load(Ordering::Relaxed) > 0).then_some(())
            })
            .await;
            anyhow::Ok(during)
        };
        let during = tokio::select! {
            during = measured => during?,
            () = attack.run(meta, &answers) => unreachable!("the callers do not end"),
        };
        let answers = answers.into_inner();
        let nodes = shape.known_nodes;
        let subject = format!("T25: {attack:?}, {answers} requests for {nodes} nodes");
        during.compare(&subject, &before)?;
    }
    ensure!(site.server.process().id().is_some(), "the server ended");
    Ok(())
}

impl MetaAttack {
    /// Attacks until the future is dropped. Counts answers in `answers`.
    async fn run(self, meta: SocketAddr, answers: &AtomicUsize) {
        match self {
            Self::Pages => {
                let callers = (0..CALLERS).map(|caller| ask_for_targets(meta, caller, answers));
                futures_util::future::join_all(callers).await;
            }
            Self::Pipelines => {
                let callers = (0..PIPELINES).map(|_| pipeline(meta, answers));
                futures_util::future::join_all(callers).await;
            }
            Self::DeafReaders => {
                let mut readers = Vec::new();
                for round in 0.. {
                    for number in 0..64_u16 {
                        let port = 2048 + round % 900 * 64 + number;
                        readers.extend(deaf_reader(meta, number, port).await.ok());
                        answers.fetch_add(1, Ordering::Relaxed);
                    }
                    // Those of the last round stay, as far as the server lets them.
                    readers.drain(..readers.len().saturating_sub(64));
                    sleep(Duration::from_millis(250)).await;
                }
            }
        }
    }
}

/// Sends requests behind each other over one connection after the other, until the future is dropped.
async fn pipeline(meta: SocketAddr, answers: &AtomicUsize) {
    let request = "GET /sd/prometheus HTTP/1.1\r\nHost: meta\r\n\r\n".repeat(100);
    loop {
        let exchange = async {
            let mut caller = TcpStream::connect(meta).await?;
            // The server may close the connection before it has read all of it.
            let _closed = caller.write_all(request.as_bytes()).await;
            tokio::io::copy(&mut caller, &mut tokio::io::sink()).await
        };
        // Unread requests may reset the connection behind the answer.
        let _reset = exchange.await;
        answers.fetch_add(1, Ordering::Relaxed);
    }
}

/// Asks for the targets of ever other ports until the future is dropped.
async fn ask_for_targets(meta: SocketAddr, caller: usize, made: &AtomicUsize) {
    for number in 0_usize.. {
        let port = 1024 + (number * CALLERS + caller) % 60_000;
        let path = format!("/sd/prometheus?port={port}");
        // An evicted connection is tried again.
        if read_all(meta, &path).await.is_ok() {
            made.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn read_all(meta: SocketAddr, path: &str) -> Result<()> {
    let mut caller = TcpStream::connect(meta).await?;
    caller.write_all(get(path).as_bytes()).await?;
    let mut piece = vec![0; 64 << 10];
    let mut received = 0;
    loop {
        match caller.read(&mut piece).await? {
            0 => break,
            length => received += length,
        }
    }
    ensure!(received > 1024, "{received} bytes");
    Ok(())
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: meta\r\nConnection: close\r\n\r\n")
}

/// 64 callers of two addresses ask for pages of the whole fleet and never read, at a server with
/// 128 MiB.
#[tokio::test(flavor = "multi_thread")]
async fn t25_server_with_128_mib_lives_while_64_callers_of_the_meta_port_never_read() -> Result<()>
{
    let Some(cgroup) = or_skip(MemoryCgroup::new(CAP)) else {
        return Ok(());
    };
    let shape = SiteShape {
        known_nodes: 20_000,
        through_server: cgroup.enter(),
        ..SiteShape::new(&NODES[..1], "{}")
    };
    let mut site = Site::build(&shape).await?;
    let id = site.server.process().id().context("server's id")?;
    let meta = site.server.address(Listener::Meta);
    read_all(meta, "/sd/prometheus?port=9100").await?;
    let memory = || anyhow::Ok(kib(id, "RssAnon:")? << 10);
    let (before, began, mut most) = (memory()?, Instant::now(), 0);
    let mut readers = Vec::new();
    for round in 0.. {
        if began.elapsed() > Gear::current().pick(Duration::from_secs(5), READERS_STAY) {
            break;
        }
        for number in 0..64_u16 {
            let port = 2048 + round % 900 * 64 + number;
            readers.push(deaf_reader(meta, number, port).await?);
        }
        // Those of the last round stay, as far as the server lets them.
        readers.drain(..readers.len().saturating_sub(64));
        site.scrape(NODES[0]).await?;
        most = most.max(memory()?);
        sleep(Duration::from_millis(250)).await;
    }
    ensure!(cgroup.killed()? == 0, "the server was killed");
    drop(readers);
    let after = eventually("the memory is back", MEMORY_BACK, async || {
        site.scrape(NODES[0]).await?;
        let after = memory()?;
        ensure!(after <= before + MEMORY_MARGIN, "{before}, then {after}");
        anyhow::Ok(after)
    })
    .await;
    report_figure(&format!(
        "T25: 64 readers that never read: {} MiB before, {} MiB at most of {}, {} MiB after",
        before >> 20,
        most >> 20,
        CAP >> 20,
        after >> 20,
    ));
    ensure!(site.server.process().id() == Some(id), "the server ended");
    Ok(())
}

/// Connects from one of two addresses, asks for targets and does not read.
async fn deaf_reader(meta: SocketAddr, number: u16, port: u16) -> Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(4096)?;
    let source = Ipv4Addr::new(127, 0, 64, if number.is_multiple_of(2) { 1 } else { 2 });
    socket.bind((source, 0).into())?;
    let mut reader = socket.connect(meta).await?;
    let request = get(&format!("/sd/prometheus?port={port}"));
    // The connection may be evicted at once.
    let _evicted = reader.write_all(request.as_bytes()).await;
    Ok(reader)
}

/// A caller floods the listeners with requests that reach no node, and with requests that the node's
/// agent refuses.
#[tokio::test(flavor = "multi_thread")]
async fn t23_refused_requests_of_a_caller_fill_no_log_and_delay_nobody() -> Result<()> {
    let mut site = Site::build(&SiteShape::new(&NODES[..1], "{}")).await?;
    let before = Figures::measure(&site, window()).await?;
    let http = Endpoint::plain(site.server.address(Listener::Http));
    let https = site.server.address(Listener::Https);
    let https = Endpoint::tls(https, ClientTls::insecure("localhost", None)?);
    for (subject, endpoint, host) in [
        ("server", &http, "nobody:9100".to_owned()),
        ("server over TLS", &https, "nobody:9100".to_owned()),
        ("agent", &http, format!("{}:10249", NODES[0])),
    ] {
        let (log, result) = if subject == "agent" {
            (site.agents[0].log().clone(), "refused_by_policy")
        } else {
            (site.server.log().clone(), "unknown_node")
        };
        let series = format!("tunnel_server_streams_total{{result=\"{result}\"}}");
        let (first, began) = (log.lines().len(), Instant::now());
        let refused = site.server.metric(&series).await?;
        let during = tokio::select! {
            during = Figures::measure(&site, window()) => during?,
            failed = flood(endpoint, &host) => return Err(failed),
        };
        let seconds = began.elapsed().as_secs() + 2;
        let refused = usize::try_from(site.server.metric(&series).await? - refused)?;
        let budget = 50 * usize::try_from(seconds)?;
        let is_flood = Gear::current() == Gear::Quick || refused > 2 * budget;
        ensure!(is_flood, "only {refused} requests were refused");
        let (lines, bytes) = refused_lines(&log, first, &host);
        during.compare(
            &format!(
                "T23: {subject}: {refused} refused requests, {} bytes of log a second",
                bytes as u64 / seconds
            ),
            &before,
        )?;
        ensure!(lines <= budget, "{lines} lines for {refused} requests");
    }
    ensure!(site.server.process().id().is_some(), "the server ended");
    Ok(())
}

/// Callers send heads that two parsers may read differently, behind a chunked request.
#[tokio::test(flavor = "multi_thread")]
async fn t23_heads_with_two_framings_fill_no_log_and_delay_nobody() -> Result<()> {
    let site = Site::build(&SiteShape::new(&NODES[..1], "{}")).await?;
    let before = Figures::measure(&site, window()).await?;
    let http = site.server.address(Listener::Http);
    let log = site.server.log().clone();
    let (first, began, refused) = (log.lines().len(), Instant::now(), AtomicUsize::new(0));
    let callers = futures_util::future::join_all((0..FLOODING).map(|_| ambiguous(http, &refused)));
    let during = tokio::select! {
        during = Figures::measure(&site, window()) => during?,
        _ = callers => unreachable!("the callers do not end"),
    };
    let refused = refused.into_inner();
    ensure!(refused > 0, "no head was refused");
    let lines = log.lines();
    let lines = lines.iter().skip(first);
    let lines = lines
        .filter(|line| line.contains("\"bad_request\""))
        .count();
    let budget = 50 * usize::try_from(began.elapsed().as_secs() + 2)?;
    during.compare(&format!("T23: {refused} heads with two framings"), &before)?;
    ensure!(lines <= budget, "{lines} lines for {refused} heads");
    Ok(())
}

/// Sends such a head on one connection after the other, and counts those that are refused.
async fn ambiguous(http: SocketAddr, refused: &AtomicUsize) {
    const BOTH: &str = "POST / HTTP/1.1\r\nHost: nobody:9100\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n\
                        POST / HTTP/1.1\r\nHost: nobody:9100\r\nTransfer-Encoding: chunked\r\n\
                        Content-Length: 5\r\n\r\n0\r\n\r\n";
    loop {
        let mut answers = Vec::new();
        let asked = async {
            let mut caller = TcpStream::connect(http).await?;
            caller.write_all(BOTH.as_bytes()).await?;
            caller.read_to_end(&mut answers).await
        };
        // A reset may follow the answers.
        let _ended = asked.await;
        let answers = String::from_utf8_lossy(&answers);
        let count = answers.matches("HTTP/1.1 400 ").count();
        refused.fetch_add(usize::from(count == 2), Ordering::Relaxed);
    }
}

/// Sends requests over a few connections until the future is dropped, or one fails.
async fn flood(endpoint: &Endpoint, host: &str) -> anyhow::Error {
    let mut callers = JoinSet::new();
    for _ in 0..FLOODING {
        let endpoint = endpoint.clone();
        callers.spawn(async move { endpoint.connect().await });
    }
    let request = format!("GET /refused HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let mut sockets = Vec::new();
    while let Some(connected) = callers.join_next().await {
        match connected {
            Ok(Ok(socket)) => sockets.push(socket),
            Ok(Err(error)) => return error,
            Err(panic) => return panic.into(),
        }
    }
    let flooding = sockets.into_iter();
    let flooding = flooding.map(|socket| Box::pin(flood_connection(socket, &request)));
    futures_util::future::select_all(flooding).await.0
}

/// Sends a request again and again, and reads the answers without a look at them.
async fn flood_connection(socket: ByteStream, request: &str) -> anyhow::Error {
    let (mut reader, mut writer) = tokio::io::split(socket);
    let sending = async {
        let requests = request.repeat(64);
        loop {
            if let Err(error) = writer.write_all(requests.as_bytes()).await {
                return anyhow::Error::from(error);
            }
        }
    };
    let reading = async {
        let mut piece = vec![0; 64 << 10];
        loop {
            match reader.read(&mut piece).await {
                Ok(0) => return anyhow::Error::msg("the connection ended"),
                Ok(_length) => {}
                Err(error) => return error.into(),
            }
        }
    };
    tokio::select! {
        error = sending => error,
        error = reading => error,
    }
}

/// Returns the number of access log lines about refused requests since line `first`, and the bytes
/// of all lines since then except those of requests that were answered.
fn refused_lines(log: &Log, first: usize, host: &str) -> (usize, usize) {
    let port = host.rsplit(':').next().and_then(|port| port.parse().ok());
    let lines = log.lines();
    let (mut count, mut bytes) = (0, 0);
    for line in lines.iter().skip(first) {
        let fields: Value = serde_json::from_str(line).unwrap_or_default();
        let is_refused = fields["message"] == "access" && fields["code"] != "ok";
        // At the agent the request is not known.
        let is_of_flood = fields["request"] == "GET /refused" || fields["port"].as_u64() == port;
        count += usize::from(is_refused && is_of_flood);
        if fields["code"] != "ok" {
            bytes += line.len() + 1;
        }
    }
    (count, bytes)
}

/// What others observe.
struct Figures {
    scrapes: usize,
    p99: Duration,
    slowest_livez: Duration,
}

impl Figures {
    /// Requests metrics of the node and `/livez` for a time. Each request must succeed.
    async fn measure(site: &Site, time: Duration) -> Result<Self> {
        let (began, meta) = (Instant::now(), site.server.address(Listener::Meta));
        let took = Mutex::new(Vec::new());
        let scrapes = async {
            while began.elapsed() < time {
                let asked = Instant::now();
                site.scrape(NODES[0]).await?;
                took.lock().await.push(asked.elapsed());
            }
            anyhow::Ok(())
        };
        let probes = async {
            let mut slowest = Duration::ZERO;
            while began.elapsed() < time {
                let asked = Instant::now();
                meta_page(meta, "/livez").await.context("/livez")?;
                slowest = slowest.max(asked.elapsed());
                sleep(Duration::from_millis(20)).await;
            }
            anyhow::Ok(slowest)
        };
        let ((), slowest_livez) = tokio::try_join!(scrapes, probes)?;
        let mut took = took.into_inner();
        took.sort_unstable();
        Ok(Self {
            scrapes: took.len(),
            p99: percentile(&took, 0.99),
            slowest_livez,
        })
    }

    /// Reports the figures of an attack next to those before it, and compares them in the full gear.
    fn compare(&self, subject: &str, before: &Self) -> Result<()> {
        report_figure(&format!(
            "{subject}: p99 of {} scrapes {} ms, {} ms before; slowest /livez {} ms, {} ms before",
            self.scrapes,
            millis(self.p99),
            millis(before.p99),
            millis(self.slowest_livez),
            millis(before.slowest_livez),
        ));
        if Gear::current() == Gear::Full {
            let most = (before.p99 * 3).max(scaled(P99_FREE));
            ensure!(self.p99 <= most, "p99 of {:?}, allowed {most:?}", self.p99);
            let livez = self.slowest_livez;
            ensure!(livez <= scaled(LIVEZ_MAX), "/livez took {livez:?}");
        }
        Ok(())
    }
}

/// How long others are measured.
fn window() -> Duration {
    Gear::current().pick(scaled(Duration::from_secs(2)), Duration::from_secs(15))
}

/// Callers of the meta port at once, fewer than one address may have.
const CALLERS: usize = 24;
/// Connections that send requests behind each other.
const PIPELINES: usize = 3;
/// Connections of a flood of requests.
const FLOODING: usize = 4;
/// Longer than a connection to the meta port may last.
const READERS_STAY: Duration = Duration::from_secs(45);
/// An allocator returns memory some time after its use.
const MEMORY_BACK: Duration = Duration::from_secs(45);
const MEMORY_MARGIN: u64 = 32 << 20;
/// The 99th percentile of others may be three times as high as before, or this.
const P99_FREE: Duration = Duration::from_millis(50);
pub(super) const LIVEZ_MAX: Duration = Duration::from_secs(1);
