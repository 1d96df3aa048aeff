//! What callers and targets that do not read cost in memory: F26 inside a memory cgroup, S14 and T11 by what is resident.
//!
//! In the long run (`CULVERT_TEST_GEAR=full`) F26 has the limits of the manifests, and also checks the delays of others. Run it alone,
//! and with binaries of a release (`CULVERT_BIN_DIR`): `cargo nextest run --profile full -E 'test(f26_)' --success-output final`.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tunnel_store::data_dir::DataDir;
use tunnel_store::known_nodes::KnownNodes;
use tunnel_tests::client::RawRequest;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::stats::{millis, percentile};
use tunnel_tests::targets::{Exporter, HostileAction, HostileTarget, SilentTarget};
use tunnel_tests::tools::{Skip, or_skip};

use super::CONNECT;
use super::costs::LIVEZ_MAX;

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
            // Those of a process that has just been killed are not empty at once.
            static NUMBER: AtomicU64 = AtomicU64::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let folder = base.join(format!("culvert-{}-{number}", std::process::id()));
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

    /// A program that enters the cgroup and becomes the program in its last arguments.
    pub(super) fn enter(&self) -> Vec<String> {
        let script = format!("echo $$ > {}; exec \"$@\"", self.procs().display());
        ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec()
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

/// What a [`Site`] consists of.
pub(super) struct SiteShape<'a> {
    pub(super) nodes: &'a [&'a str],
    /// The section `limits:` of the server.
    pub(super) limits: &'a str,
    pub(super) transport: &'a str,
    /// Nodes without an agent that the server knows.
    pub(super) known_nodes: usize,
    /// Programs that start the server and the agents, see [`ServerSetup::through`].
    pub(super) through_server: Vec<String>,
    pub(super) through_agents: Vec<String>,
    /// The section `limits:` of the agents.
    pub(super) agent_limits: &'a str,
}

impl<'a> SiteShape<'a> {
    pub(super) fn new(nodes: &'a [&'a str], limits: &'a str) -> Self {
        Self {
            nodes,
            limits,
            transport: "auto",
            known_nodes: 0,
            through_server: Vec::new(),
            through_agents: Vec::new(),
            agent_limits: "{}",
        }
    }
}

fn as_strs(argv: &[String]) -> Vec<&str> {
    argv.iter().map(String::as_str).collect()
}

/// The binaries, with targets behind several agents.
pub(super) struct Site {
    pub(super) agents: Vec<Process>,
    pub(super) server: Server,
    pub(super) exporter: Exporter,
    /// Sends for as long as somebody takes it.
    flood: HostileTarget,
    /// Accepts connections and reads nothing.
    deaf: SilentTarget,
    _scratch: ScratchDir,
}

/// The address of the callers that do not read, and of those that upload what is not read. Others
/// have another one.
const ATTACKER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 66)), 0);
pub(super) const NODES: [&str; 4] = ["worker-1", "worker-2", "worker-3", "worker-4"];

impl Site {
    async fn start(nodes: &[&str], limits: &str) -> Result<Self> {
        Self::build(&SiteShape::new(nodes, limits)).await
    }

    pub(super) async fn build(shape: &SiteShape<'_>) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let exporter = Exporter::start("worker").await?;
        let head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n".to_vec();
        let steps = vec![
            HostileAction::ReadHead,
            HostileAction::Send(head),
            HostileAction::Flood(vec![7; 64 << 10]),
        ];
        let flood = HostileTarget::start(steps).await?;
        let deaf = SilentTarget::start_deaf()?;
        let file = scratch.file("server.yaml", format!("limits: {}\n", shape.limits))?;
        let data_dir = scratch.path().join("server");
        record_nodes(&data_dir, shape.known_nodes)?;
        let setup = ServerSetup::on_loopback(&data_dir)
            .args(&["--config", &file.to_string_lossy()])
            .args(&[
                "--http-proxy-ports",
                "1024-65535",
                "--compat",
                "yurt-tunnel",
            ])
            .args(&["--proxy-port-listen", "off"]);
        let server = setup
            .through(&as_strs(&shape.through_server))
            .start()
            .await?;
        let mut agents = Vec::new();
        let agent_file = scratch.file("agent.yaml", format!("limits: {}\n", shape.agent_limits))?;
        let agent_file = agent_file.to_string_lossy();
        for node in shape.nodes {
            let folder = scratch.path().join(node);
            let setup = server.agent_setup(node, &folder).await?;
            let setup = setup.args(&["--transport", shape.transport, "--config", &agent_file]);
            agents.push(setup.through(&as_strs(&shape.through_agents)).start()?);
        }
        let site = Self {
            agents,
            server,
            exporter,
            flood,
            deaf,
            _scratch: scratch,
        };
        for node in shape.nodes {
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

    /// Requests the flood with a small receive buffer, and reads nothing.
    async fn ask_for_flood(&self, node: &str) -> Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(ATTACKER)?;
        socket.set_recv_buffer_size(4096)?;
        let mut caller = socket.connect(self.server.address(Listener::Http)).await?;
        let host = format!("{node}:{}", self.flood.addr().port());
        let get = RawRequest::get(&host, "/").bytes();
        caller.write_all(&get).await?;
        Ok(caller)
    }

    /// Begins an upload to the target that reads nothing, with little in the kernel.
    async fn upload_to_deaf(&self, node: &str) -> Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(ATTACKER)?;
        socket.set_send_buffer_size(64 << 10)?;
        let mut caller = socket.connect(self.server.address(Listener::Http)).await?;
        let host = format!("{node}:{}", self.deaf.addr().port());
        let head =
            format!("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000000000000\r\n\r\n");
        caller.write_all(head.as_bytes()).await?;
        Ok(caller)
    }

    /// Requests the flood. Returns the connection and the first bytes of the response.
    async fn asks_for_flood(&self, node: &str) -> Result<(TcpStream, Vec<u8>)> {
        let mut caller = self.ask_for_flood(node).await?;
        let mut first = vec![0; 12];
        timeout(scaled(CONNECT), caller.read_exact(&mut first)).await??;
        Ok((caller, first))
    }
}

/// Writes nodes that a server knows from its start on.
pub(super) fn record_nodes(data_dir: &Path, count: usize) -> Result<()> {
    let nodes = KnownNodes::open(&DataDir::open(data_dir)?)?;
    for number in 0..count {
        nodes.record(&format!("edge-{number:05}").parse()?, &[]);
    }
    Ok(nodes.save()?)
}

/// Resident memory of a process, bytes.
pub(super) fn resident(process: u32) -> Result<u64> {
    Ok(kib(process, "VmRSS:")? * 1024)
}

/// Returns a field of `/proc/PID/status` in KiB.
pub(crate) fn kib(process: u32, field: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let number = line.and_then(|line| line.split_whitespace().next());
    Ok(number.context("no such field")?.parse()?)
}

pub(super) const CAP: u64 = 128 << 20;
/// Largest share of the memory limit that a process may use, in percent.
const USED_MAX_PERCENT: u64 = 80;

tests_of! {
    fn f26_server_lives_and_sheds_by_503_while_nobody_reads_over_quic() = stalled_readers("quic");
    fn f26_server_lives_and_sheds_by_503_while_nobody_reads_over_h2() = stalled_readers("h2");
    fn f26_agent_lives_while_its_target_reads_nothing_over_quic() = stalled_target("quic");
    fn f26_agent_lives_while_its_target_reads_nothing_over_h2() = stalled_target("h2");
}

/// The memory limit of a process, and its buffer pool.
#[derive(Debug, Clone, Copy)]
struct MemoryCase {
    limit: u64,
    /// `auto`, or a size.
    pool: &'static str,
}

/// The first case is the one of the quick gear, and the others have the limits of the manifests.
const SERVER_CASES: [MemoryCase; 3] = [
    MemoryCase::new(192, "auto"),
    MemoryCase::new(1024, "auto"),
    MemoryCase::new(1024, "32MiB"),
];
const AGENT_CASES: [MemoryCase; 3] = [
    MemoryCase::new(64, "auto"),
    MemoryCase::new(256, "auto"),
    MemoryCase::new(256, "32MiB"),
];

impl MemoryCase {
    const fn new(limit_mib: u64, pool: &'static str) -> Self {
        Self {
            limit: limit_mib << 20,
            pool,
        }
    }
}

fn of_gear(cases: &[MemoryCase]) -> &[MemoryCase] {
    &cases[..Gear::current().pick(1, cases.len())]
}

/// F26: what callers do not read is reserved within the memory limit. A burst of readers of three
/// nodes is bounded, further streams of the same caller there are refused, and others are served at
/// the fourth node as before. After 10 s stalled readers end for those that wait.
async fn stalled_readers(transport: &str) -> Result<()> {
    for case in of_gear(&SERVER_CASES) {
        let Some(cgroup) = or_skip(MemoryCgroup::new(case.limit)) else {
            return Ok(());
        };
        let readers_of = stalled_readers_of(transport, case, &cgroup);
        Box::pin(readers_of)
            .await
            .with_context(|| format!("{case:?}"))?;
    }
    Ok(())
}

async fn stalled_readers_of(
    transport: &str,
    case: &MemoryCase,
    cgroup: &MemoryCgroup,
) -> Result<()> {
    let limits = format!(
        "{{ callersPerSource: 1000, callersTotal: 2000, bufferPool: {} }}",
        case.pool
    );
    let shape = SiteShape {
        through_server: cgroup.enter(),
        transport,
        ..SiteShape::new(&NODES, &limits)
    };
    let mut site = Site::build(&shape).await?;
    let id = site.server.process().id().context("server's id")?;
    let before = site.scrapes_for(NODES[3], BASELINE).await;
    let readers = Mutex::new(Vec::new());
    for number in 0..3 * READERS_PER_NODE {
        let reader = site.ask_for_flood(NODES[number % 3]).await?;
        readers.lock().await.push(reader);
    }
    eventually("new streams are refused", CONNECT, async || {
        let reader = site.ask_for_flood(NODES[0]).await?;
        readers.lock().await.push(reader);
        ensure!(site.metric(REFUSED).await? > 0);
        anyhow::Ok(())
    })
    .await;
    let most = AtomicU64::new(0);
    let during = site.scrapes_under_attack(NODES[3], id, &most).await?;
    let ended = "tunnel_server_streams_total{result=\"reader_stalled\"}";
    eventually("stalled readers end", STALL_LIMIT, async || {
        // A stream of the attacked nodes waits.
        let reader = site.ask_for_flood(NODES[0]).await?;
        readers.lock().await.push(reader);
        site.scrape(NODES[3]).await?;
        most.fetch_max(kib(id, "RssAnon:")? << 10, Ordering::Relaxed);
        ensure!(site.metric(ended).await? > 0);
        anyhow::Ok(())
    })
    .await;
    let (most, count) = (most.into_inner(), readers.lock().await.len());
    let subject = format!("server, {transport}, pool {}, {count} readers", case.pool);
    report(&subject, most, case.limit);
    before.compare(&during, &subject)?;
    let pool = site.metric("tunnel_server_buffer_limit_bytes").await?;
    if case.pool == "auto" {
        let quarter = usize::try_from(case.limit / 4)?;
        ensure!(pool == quarter, "pool of {pool} bytes");
    }
    ensure!(
        most <= case.limit / 100 * USED_MAX_PERCENT,
        "{most} bytes of {}",
        case.limit
    );
    ensure!(cgroup.killed()? == 0 && site.server.process().id() == Some(id));
    // At once of use when the crowd goes.
    drop(readers);
    for node in NODES {
        eventually("room again", Duration::from_secs(2), async || {
            site.scrape(node).await
        })
        .await;
    }
    Ok(())
}

/// F26: the same at an agent whose target reads nothing of 500 uploads of one caller. Others are
/// served by the same agent before a stalled stream has ended.
async fn stalled_target(transport: &str) -> Result<()> {
    for case in of_gear(&AGENT_CASES) {
        let Some(cgroup) = or_skip(MemoryCgroup::new(case.limit)) else {
            return Ok(());
        };
        let target_of = stalled_target_of(transport, case, &cgroup);
        Box::pin(target_of)
            .await
            .with_context(|| format!("{case:?}"))?;
    }
    Ok(())
}

async fn stalled_target_of(
    transport: &str,
    case: &MemoryCase,
    cgroup: &MemoryCgroup,
) -> Result<()> {
    // One caller has half of an agent's streams, of which agent and server have as many.
    let streams = format!("streamsPerAgent: {}", 2 * UPLOADS);
    let limits = format!("{{ {streams}, callersPerSource: 1000, callersTotal: 2000 }}");
    let agent_limits = format!("{{ {streams}, bufferPool: {} }}", case.pool);
    let nodes = [NODES[0]];
    let node = nodes[0];
    let shape = SiteShape {
        through_agents: cgroup.enter(),
        transport,
        agent_limits: &agent_limits,
        ..SiteShape::new(&nodes, &limits)
    };
    let site = Site::build(&shape).await?;
    let id = site.agents[0].id().context("agent's id")?;
    let before = site.scrapes_for(node, BASELINE).await;
    let uploads = Mutex::new(JoinSet::new());
    let upload = async || {
        let mut caller = site.upload_to_deaf(node).await?;
        let uploading = async move { while caller.write_all(&[7; 64 << 10]).await.is_ok() {} };
        uploads.lock().await.spawn(uploading);
        anyhow::Ok(())
    };
    for _ in 0..UPLOADS {
        upload().await?;
    }
    let most = AtomicU64::new(0);
    eventually("uploads are refused", STALL_LIMIT, async || {
        most.fetch_max(kib(id, "RssAnon:")? << 10, Ordering::Relaxed);
        upload().await?;
        let refused = site.metric(REFUSED).await? + site.metric(REFUSED_OF_CALLER).await?;
        ensure!(refused > 0);
        anyhow::Ok(())
    })
    .await;
    let during = site.scrapes_under_attack(node, id, &most).await?;
    let most = most.into_inner();
    let subject = format!("agent, {transport}, pool {}, {UPLOADS} uploads", case.pool);
    report(&subject, most, case.limit);
    before.compare(&during, &subject)?;
    ensure!(
        most <= case.limit / 100 * USED_MAX_PERCENT,
        "{most} bytes of {}",
        case.limit
    );
    ensure!(cgroup.killed()? == 0, "the agent was killed");
    Ok(())
}

/// The scrapes of a caller, one after the other.
#[derive(Debug, Default)]
struct Scrapes {
    delays: Vec<Duration>,
    /// The longest time in which `/livez` of the server has answered.
    slowest_livez: Duration,
    /// The error of each scrape that failed.
    failures: Vec<anyhow::Error>,
}

impl Scrapes {
    fn p99(&self) -> Duration {
        let mut delays = self.delays.clone();
        delays.sort_unstable();
        percentile(&delays, 0.99)
    }

    /// Reports the scrapes before and during an attack. In the long run, which has the machine for
    /// itself, also checks the delays.
    fn compare(&self, during: &Self, subject: &str) -> Result<()> {
        let (before, p99) = (self.p99(), during.p99());
        let Self {
            delays,
            slowest_livez,
            failures,
        } = during;
        let failed = failures.len();
        let longest = delays.iter().max().copied().unwrap_or_default();
        crate::abuse::report_figure(&format!(
            "F26: {subject}: p99 of others {} ms before, {} ms of {} scrapes during, {} ms at most, {failed} failed; slowest /livez {} ms",
            millis(before),
            millis(p99),
            delays.len(),
            millis(longest),
            millis(*slowest_livez)
        ));
        let (bound, livez_max) = ((before * 3).max(scaled(P99_MAX)), scaled(LIVEZ_MAX));
        let is_checked = Gear::current().pick(false, true);
        ensure!(
            !is_checked || (failed == 0 && p99 <= bound && *slowest_livez <= livez_max),
            "{p99:?}, bound {bound:?}; /livez {slowest_livez:?}; {failed} failed, {:?}, {:?}",
            failures.first(),
            failures.last()
        );
        Ok(())
    }
}

impl Site {
    async fn scrapes_for(&self, node: &str, time: Duration) -> Scrapes {
        let (began, mut scrapes) = (Instant::now(), Scrapes::default());
        while began.elapsed() < time {
            let sent = Instant::now();
            scrapes.failures.extend(self.scrape(node).await.err());
            scrapes.delays.push(sent.elapsed());
            let sent = Instant::now();
            let livez = meta_page(self.server.address(Listener::Meta), "/livez").await;
            scrapes.failures.extend(livez.err());
            scrapes.slowest_livez = scrapes.slowest_livez.max(sent.elapsed());
        }
        scrapes
    }

    /// Scrapes while an attack goes on, at first until some scrapes succeed. Records the memory of a
    /// process.
    async fn scrapes_under_attack(
        &self,
        node: &str,
        process: u32,
        most: &AtomicU64,
    ) -> Result<Scrapes> {
        eventually("others are served", CONNECT, async || {
            for _ in 0..20 {
                self.scrape(node).await?;
                most.fetch_max(kib(process, "RssAnon:")? << 10, Ordering::Relaxed);
            }
            anyhow::Ok(())
        })
        .await;
        let mut all = Scrapes::default();
        for _ in 0..Gear::current().pick(2, 20) {
            let scrapes = self.scrapes_for(node, Duration::from_secs(1)).await;
            most.fetch_max(kib(process, "RssAnon:")? << 10, Ordering::Relaxed);
            all.delays.extend(scrapes.delays);
            all.slowest_livez = all.slowest_livez.max(scrapes.slowest_livez);
            all.failures.extend(scrapes.failures);
        }
        Ok(all)
    }
}

fn report(subject: &str, most: u64, limit: u64) {
    let text = format!(
        "F26: {subject}: {} MiB at most of {} MiB",
        most >> 20,
        limit >> 20
    );
    crate::abuse::report_figure(&text);
}

/// About as many as one caller may have.
const READERS_PER_NODE: usize = 120;
const UPLOADS: usize = 500;
/// Requests above the buffer pool.
const REFUSED: &str = "tunnel_server_limits_reached_total{limit=\"bufferPool\"}";
/// Requests above the share of one caller.
const REFUSED_OF_CALLER: &str = "tunnel_server_limits_reached_total{limit=\"streamsPerAgent\"}";
/// Time of the scrapes before an attack.
const BASELINE: Duration = Duration::from_secs(1);
/// Delay that others may have under an attack, if it is more than three times as before.
const P99_MAX: Duration = Duration::from_millis(50);
/// Time in which a stalled reader ends, with the 10 s that it may stall.
const STALL_LIMIT: Duration = Duration::from_secs(30);

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
        let mut caller = site.upload_to_deaf(node).await?;
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
