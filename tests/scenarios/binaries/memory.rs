//! What callers and targets that do not read cost in memory: F26 inside a memory cgroup, S14 and T11 by what is resident.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tunnel_tests::checks::ensure_contains;
use tunnel_tests::client::RawRequest;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::targets::{Exporter, HostileAction, HostileTarget, SilentTarget};
use tunnel_tests::tools::{Skip, or_skip};

use super::CONNECT;

/// A memory cgroup (v1) of the test's own, gone with it. What a process had before it came, some 20 MiB, is not charged.
pub(super) struct MemoryCgroup(PathBuf);

impl MemoryCgroup {
    pub(super) fn new(limit: u64) -> Result<Self, Skip> {
        let made = || -> Result<Self> {
            let own = fs::read_to_string("/proc/self/cgroup")?;
            let line = own.lines().find(|line| line.contains(":memory:"));
            let path = line.and_then(|line| line.rsplit(':').next());
            let path = path.context("no memory cgroup of version 1")?;
            let base = Path::new("/sys/fs/cgroup/memory").join(path.trim_start_matches('/'));
            let folder = base.join(format!("culvert-{}", std::process::id()));
            fs::create_dir(&folder)?;
            let cgroup = Self(folder);
            cgroup.set("memory.limit_in_bytes", limit)?;
            Ok(cgroup)
        };
        made().map_err(|error| Skip::because(format!("no memory cgroup can be made: {error:#}")))
    }

    fn set(&self, name: &str, value: u64) -> Result<()> {
        fs::write(self.0.join(name), value.to_string()).with_context(|| name.to_owned())
    }

    /// A process that writes its id there belongs to the cgroup.
    pub(super) fn procs(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }

    /// How many processes the kernel has killed for want of memory.
    pub(super) fn killed(&self) -> Result<u64> {
        let text = fs::read_to_string(self.0.join("memory.oom_control"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        Ok(line.context("no oom_kill")?.trim().parse()?)
    }

    pub(super) fn most(&self) -> Result<u64> {
        let text = fs::read_to_string(self.0.join("memory.max_usage_in_bytes"))?;
        Ok(text.trim().parse()?)
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        // Only empty ones go; what is left is empty soon, and harmless.
        let _left = fs::remove_dir(&self.0);
    }
}

/// The binaries, with targets behind several agents.
pub(super) struct Site {
    agents: Vec<Process>,
    pub(super) server: Server,
    pub(super) exporter: Exporter,
    /// Sends for as long as somebody takes it.
    flood: HostileTarget,
    /// Accepts connections and reads nothing.
    deaf: SilentTarget,
    _scratch: ScratchDir,
}

pub(super) const NODES: [&str; 4] = ["worker-1", "worker-2", "worker-3", "worker-4"];

impl Site {
    async fn start(nodes: &[&str], limits: &str) -> Result<Self> {
        Self::start_through(&[], nodes, limits).await
    }

    /// The same with a server that is started by another program, see [`ServerSetup::through`].
    pub(super) async fn start_through(
        through: &[&str],
        nodes: &[&str],
        limits: &str,
    ) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let exporter = Exporter::start("worker").await?;
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n".to_vec();
        let steps = vec![
            HostileAction::ReadHead,
            HostileAction::Send(head),
            HostileAction::Flood(vec![7; 64 << 10]),
        ];
        let flood = HostileTarget::start(steps).await?;
        let deaf = SilentTarget::start_deaf().await?;
        let file = scratch.file("server.yaml", format!("limits: {limits}\n"))?;
        let setup = ServerSetup::on_loopback(&scratch.path().join("server"))
            .args(&["--config", &file.to_string_lossy()])
            .args(&["--http-proxy-ports", "1024-65535"])
            .args(&["--proxy-port-listen", "off"]);
        let server = setup.through(through).start().await?;
        let mut agents = Vec::new();
        for node in nodes {
            let folder = scratch.path().join(node);
            agents.push(server.agent_setup(node, &folder).await?.start()?);
        }
        let site = Self {
            agents,
            server,
            exporter,
            flood,
            deaf,
            _scratch: scratch,
        };
        for node in nodes {
            eventually(node, CONNECT, async || site.scrape(node).await).await;
        }
        Ok(site)
    }

    pub(super) async fn scrape(&self, node: &str) -> Result<()> {
        let host = format!("{node}:{}", self.exporter.addr().port());
        self.server.get_ok(&host, "/metrics").await?;
        Ok(())
    }

    /// Returns a metric of the server.
    async fn metric(&self, name: &str) -> Result<usize> {
        Ok(self.server.metric(name).await?.try_into()?)
    }

    /// Requests the flood with a small receive buffer. Returns the connection and the first bytes
    /// of the response.
    async fn asks_for_flood(&self, node: &str) -> Result<(TcpStream, Vec<u8>)> {
        let socket = TcpSocket::new_v4()?;
        socket.set_recv_buffer_size(4096)?;
        let mut caller = socket.connect(self.server.address(Listener::Http)).await?;
        let host = format!("{node}:{}", self.flood.addr().port());
        let get = RawRequest::get(&host, "/").bytes();
        caller.write_all(&get).await?;
        let mut first = vec![0; 12];
        timeout(scaled(CONNECT), caller.read_exact(&mut first)).await??;
        Ok((caller, first))
    }
}

/// Resident memory of a process, bytes.
pub(super) fn resident(process: u32) -> Result<u64> {
    Ok(kib(process, "VmRSS:")? * 1024)
}

/// Returns a field of `/proc/PID/status` in KiB.
pub(super) fn kib(process: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no such field")?.parse()?)
}

pub(super) const CAP: u64 = 128 << 20;
const POOL: usize = 16;
/// Four times the pool, in windows of 1 MiB. They come in waves, because a stall is detected after
/// 100 ms.
const OFFERED: usize = 4 * POOL;

/// F26: memory for what is not read is bounded: new streams are refused; the server lives, and
/// serves as soon as there is room.
#[tokio::test(flavor = "multi_thread")]
async fn f26_full_pool_sheds_by_503_and_the_server_lives_in_its_memory_cgroup() -> Result<()> {
    let Some(cgroup) = or_skip(MemoryCgroup::new(CAP)) else {
        return Ok(());
    };
    let limits = format!("{{ bufferPool: {POOL}MiB, streamWindow: 1MiB }}");
    let mut site = Site::start(&NODES, &limits).await?;
    let id = site.server.process().id().context("server's id")?;
    cgroup.set("cgroup.procs", id.into())?;
    let (mut readers, mut shed, mut slowest) = (Vec::new(), 0, Duration::ZERO);
    for wave in 0..OFFERED / 8 {
        let mut callers = Vec::new();
        for number in 0..8 {
            callers.push(site.asks_for_flood(NODES[(wave + number) % NODES.len()]));
        }
        for answered in futures_util::future::join_all(callers).await {
            let (mut caller, first) = answered?;
            match first.as_slice() {
                b"HTTP/1.1 200" => readers.push(caller),
                b"HTTP/1.1 503" => {
                    let mut rest = vec![0; 4096];
                    let length = caller.read(&mut rest).await?;
                    let text = String::from_utf8_lossy(&rest[..length]);
                    ensure_contains(&text, &["too_many_streams", "Retry-After"])?;
                    shed += 1;
                }
                other => anyhow::bail!("{}", String::from_utf8_lossy(other)),
            }
        }
        let began_wait = Instant::now();
        eventually("stalls are charged", CONNECT, async || {
            let charged = site.metric("tunnel_server_buffer_bytes").await?;
            ensure!(charged >= (readers.len() << 20).min(POOL << 20));
            Ok::<_, anyhow::Error>(())
        })
        .await;
        slowest = slowest.max(began_wait.elapsed());
    }
    let (most, held) = (cgroup.most()?, readers.len());
    crate::abuse::report_figure(&format!(
        "F26: {OFFERED} offered, {held} taken, {shed} answered 503; {} MiB at most of {} MiB; a \
         wave's stalls were charged after {slowest:?} at most",
        most >> 20,
        CAP >> 20
    ));
    ensure!(shed >= OFFERED / 2, "{shed} answered 503, {held} taken");
    ensure!(held >= 8, "only {held} were taken");
    ensure!(most <= CAP, "{most} bytes");
    // Still there, and at once of use when the crowd goes.
    drop(readers);
    let began = Instant::now();
    for node in NODES {
        eventually("room again", Duration::from_secs(2), async || {
            site.scrape(node).await
        })
        .await;
    }
    ensure!(began.elapsed() < scaled(Duration::from_secs(4)));
    let same = site.server.process().id();
    ensure!(same == Some(id), "the server has ended");
    let reached = "tunnel_server_limits_reached_total{limit=\"bufferPool\"}";
    let counted = site.metric(reached).await?;
    ensure!(counted >= shed, "{counted} counted");
    Ok(())
}

/// Half an hour in the long run: `CULVERT_STALL_SECONDS`.
const SECONDS: u64 = 4;
const READERS: usize = 32;
const WRITERS: usize = 8;

/// S14, T11: callers that read nothing or a byte a second, and targets that read nothing: memory is flat, and others are
/// served by the same agent.
#[tokio::test(flavor = "multi_thread")]
async fn s14_t11_stalled_and_slow_readers_cost_a_fixed_amount() -> Result<()> {
    let seconds = std::env::var("CULVERT_STALL_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or(SECONDS);
    let node = NODES[0];
    let mut site = Site::start(&[node], "{ streamWindow: 256KiB }").await?;
    let without = scrapes(&site, node, Duration::from_secs(1)).await?;
    let mut slow = JoinSet::new();
    let mut stalled = Vec::new();
    for number in 0..READERS {
        let (mut caller, first) = site.asks_for_flood(node).await?;
        ensure!(first == b"HTTP/1.1 200");
        if number % 2 == 0 {
            stalled.push(caller);
        } else {
            slow.spawn(async move {
                while caller.read_u8().await.is_ok() {
                    sleep(Duration::from_secs(1)).await;
                }
            });
        }
    }
    for _ in 0..WRITERS {
        let mut caller = TcpStream::connect(site.server.address(Listener::Http)).await?;
        let host = format!("{node}:{}", site.deaf.addr().port());
        let head =
            format!("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000000000\r\n\r\n");
        caller.write_all(head.as_bytes()).await?;
        slow.spawn(async move { while caller.write_all(&[7; 64 << 10]).await.is_ok() {} });
    }
    let ids = [
        site.server.process().id().context("server's id")?,
        site.agents[0].id().context("agent's id")?,
    ];
    let memory = || Ok::<_, anyhow::Error>([resident(ids[0])?, resident(ids[1])?]);
    // All windows are full by then.
    sleep(scaled(Duration::from_secs(1))).await;
    let before = memory()?;
    let with = scrapes(&site, node, Duration::from_secs(seconds)).await?;
    let after = memory()?;
    crate::abuse::report_figure(&format!(
        "S14: resident {} and {} MiB, then {} and {} MiB after {seconds} s; {without:.0} scrapes a second, then {with:.0}",
        before[0] >> 20,
        before[1] >> 20,
        after[0] >> 20,
        after[1] >> 20
    ));
    for (before, after) in before.into_iter().zip(after) {
        // Two in a hundred, and what an allocator keeps of the scrapes.
        let most = before + before / 50 + (4 << 20);
        ensure!(after <= most, "{before} bytes, then {after}");
    }
    ensure!(slow.len() == READERS / 2 + WRITERS, "some were cut");
    drop(stalled);
    Ok(())
}

/// Scrapes that were answered in a second, one after the other.
async fn scrapes(site: &Site, node: &str, time: Duration) -> Result<f64> {
    let (began, mut count) = (Instant::now(), 0_u32);
    while began.elapsed() < time {
        site.scrape(node).await?;
        count += 1;
    }
    Ok(f64::from(count) / began.elapsed().as_secs_f64())
}
