//! Cases 13 and 14: the memory of several servers, and many agents at three servers of which one is
//! killed.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tunnel_tests::process::{Listener, Peering, Process, ScratchDir, Server};

use crate::bench::BenchRun;
use crate::client::Endpoint;
use crate::components::{
    self,
    agents::{ALL_READY, node_name},
};
use crate::load;
use crate::machine::{anonymous_kib, descriptors};
use crate::metric::{
    ENTRY_MEMORY, FAILED, HERD_DESCRIPTORS, HERD_MEMORY, HERD_READY, HERD_SLOWEST, Metric,
    PEER_MEMORY,
};
use crate::systems::{SERVERS, plain, to_args};
use crate::target::Bound::AtMost;
use crate::target::Of::Itself;
use crate::target::Target;

pub(super) const MEMORY: &[Target] = &[
    Target::new(SERVERS, &PEER_MEMORY, Itself, AtMost(128.0)),
    Target::new(SERVERS, &ENTRY_MEMORY, Itself, AtMost(120.0)),
];

pub(super) const HERD: &[Target] = &[Target::new(SERVERS, &FAILED, Itself, AtMost(0.0))];

/// Numbers of servers between which the memory of a further one is measured.
const FEW: usize = 2;
const MORE: usize = 5;
/// The server's allocator returns the memory of the handshakes within this time.
const SETTLE: Duration = Duration::from_secs(12);
/// Nodes of the directory whose memory is measured.
const ENTRIES: &str = "100000";

/// Servers of the herd. Each agent has a session with two of them.
const HERD_SERVERS: usize = 3;
const SESSIONS: usize = 2;
/// Agents in one process, which may open 20,000 files. A session over QUIC has a socket.
const AGENTS_EACH: usize = 4000;
/// Time limit for all agents: 20,000 handshakes on two busy processors.
const ALL_CONNECT: Duration = Duration::from_secs(300);
/// Time limit for the servers to announce the last nodes.
const ANNOUNCE: Duration = Duration::from_secs(15);
/// Requests a second while a server is killed, and the number of nodes that are asked.
const RATE: u32 = 100;
const SAMPLE: usize = 50;
/// Time before and after the kill.
const BEFORE_KILL: Duration = Duration::from_secs(3);
const AFTER_KILL: Duration = Duration::from_secs(12);

/// Measures idle servers, and a directory.
pub(super) async fn memory(bench: &mut BenchRun) -> Result<()> {
    match further_server_kib().await {
        Ok(kib) => bench.record(SERVERS, &PEER_MEMORY, kib, 0.0),
        Err(error) => bench.record_error(SERVERS, &error),
    }
    let filled = components::program(&to_args(&["fill-directory", ENTRIES]))?;
    let bytes: f64 = filled.run().await?.ok()?.trim().parse()?;
    bench.record(SERVERS, &ENTRY_MEMORY, bytes, 0.0);
    Ok(())
}

/// Returns the memory that a further idle server costs each of the first two.
#[expect(clippy::cast_precision_loss, reason = "a few servers")]
async fn further_server_kib() -> Result<f64> {
    let mut servers = Servers::new(MORE)?;
    servers.start(FEW, &[]).await?;
    let few = servers.anonymous_kib(FEW).await;
    servers.start(MORE, &[]).await?;
    let more = servers.anonymous_kib(FEW).await;
    Ok((more - few) / (FEW * (MORE - FEW)) as f64)
}

/// Connects many agents, and kills a server while their nodes are asked at the others.
pub(super) async fn herd(bench: &mut BenchRun) -> Result<()> {
    if let Err(error) = connect_and_kill(bench).await {
        bench.record_error(SERVERS, &error);
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
async fn connect_and_kill(bench: &mut BenchRun) -> Result<()> {
    let count = bench.options.agents;
    let target = bench.systems.edge.plain_address;
    let mut servers = Servers::new(HERD_SERVERS)?;
    let port = target.port().to_string();
    let arguments = ["--http-proxy-ports", port.as_str()];
    servers.start(HERD_SERVERS, &arguments).await?;
    let before = servers.anonymous_kib(HERD_SERVERS).await;
    let began = Instant::now();
    let _simulators = servers.simulate(count, target).await?;
    record(bench, &HERD_READY, began.elapsed().as_secs_f64());
    let memory = servers.anonymous_kib(HERD_SERVERS).await - before;
    record(bench, &HERD_MEMORY, memory / count as f64);
    let most = servers.processes().map(descriptors).max();
    record(bench, &HERD_DESCRIPTORS, most.unwrap_or_default() as f64);
    let killed = servers.running.pop().context("no server")?;
    let endpoints = servers.endpoints(count, target);
    let length = BEFORE_KILL + AFTER_KILL;
    let kill = async {
        tokio::time::sleep(BEFORE_KILL).await;
        killed.into_process().kill().await
    };
    let asking = load::open_each(&endpoints, RATE, length, true);
    let (asked, ended) = tokio::join!(asking, kill);
    ended?;
    let asked = asked?;
    record(bench, &FAILED, asked.failed as f64);
    let slowest = asked.times.last().copied().unwrap_or_default();
    record(bench, &HERD_SLOWEST, slowest.as_secs_f64() * 1e3);
    Ok(())
}

fn record(bench: &mut BenchRun, metric: &'static Metric, value: f64) {
    bench.record(SERVERS, metric, value, 0.0);
}

/// Servers of one installation, of which the first run.
struct Servers {
    running: Vec<Server>,
    peering: Peering,
    _scratch: ScratchDir,
}

impl Servers {
    fn new(count: usize) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        Ok(Self {
            running: Vec::new(),
            peering: Peering::new(count, scratch.path()),
            _scratch: scratch,
        })
    }

    /// Starts servers until `count` run, and waits until each is connected to all others.
    async fn start(&mut self, count: usize, arguments: &[&str]) -> Result<()> {
        for number in self.running.len()..count {
            let setup = self.peering.setup(number)?;
            let setup = setup.args(&["--proxy-port-listen", "off"]).args(arguments);
            self.running.push(setup.start().await?);
        }
        Peering::wait_until_connected(&self.running).await;
        Ok(())
    }

    /// Starts the agents, four of five over QUIC and the others over h2. Waits until they have all
    /// their sessions, and each server knows all nodes that the others hold.
    async fn simulate(&self, count: usize, target: SocketAddr) -> Result<Vec<Process>> {
        let over_quic = count * 4 / 5;
        let mut simulators = Vec::new();
        for (kind, mut first, end) in [("quic", 0, over_quic), ("h2", over_quic, count)] {
            while first < end {
                let agents = AGENTS_EACH.min(end - first);
                let arguments = self.arguments(kind, first, agents, target);
                simulators.push(components::start(&arguments).await?.0);
                first += agents;
            }
        }
        for simulator in &mut simulators {
            let all = |line: &str| line.starts_with(ALL_READY).then_some(());
            let ready = simulator.wait_for_line("all agents", ALL_CONNECT, all);
            ready.await?;
        }
        // Each node is at two of three servers, so at one other server at least.
        self.wait_for_nodes(count).await?;
        Ok(simulators)
    }

    /// Returns the arguments of a process with agents.
    fn arguments(
        &self,
        kind: &str,
        first: usize,
        agents: usize,
        target: SocketAddr,
    ) -> Vec<String> {
        let data = self.running.first().map_or("", Server::data_dir);
        let mut arguments = to_args(&["agents", kind, data, &agents.to_string()]);
        arguments.push(format!("--sessions={SESSIONS}"));
        arguments.push(format!("--first={first}"));
        arguments.push(format!("--target={target}"));
        for server in &self.running {
            arguments.push(format!("--server={}", server.address(Listener::Agents)));
        }
        arguments
    }

    /// Returns the HTTP listeners of all running servers, with a sample of the nodes each.
    fn endpoints(&self, count: usize, target: SocketAddr) -> Vec<Endpoint> {
        let every = (count / SAMPLE).max(1);
        let nodes = (0..count).step_by(every).map(node_name);
        let hosts = nodes.map(|node| format!("{node}:{}", target.port()));
        hosts
            .flat_map(|host| {
                self.running.iter().map(move |server| Endpoint {
                    host: host.as_str().into(),
                    ..plain(server.address(Listener::Http))
                })
            })
            .collect()
    }

    fn processes(&mut self) -> impl Iterator<Item = u32> {
        let running = self.running.iter_mut();
        running.filter_map(|server| server.process().id())
    }

    /// Returns the memory of the first servers together, after they had time to settle.
    async fn anonymous_kib(&mut self, count: usize) -> f64 {
        tokio::time::sleep(SETTLE).await;
        self.processes().take(count).map(anonymous_kib).sum()
    }

    /// Waits until the others of each running server hold `count` nodes.
    async fn wait_for_nodes(&self, count: usize) -> Result<()> {
        let began = Instant::now();
        for server in &self.running {
            loop {
                let nodes = server.metric("tunnel_server_directory_nodes").await?;
                if usize::try_from(nodes)? == count {
                    break;
                }
                if began.elapsed() > ANNOUNCE {
                    bail!("{nodes} nodes of {count}; {}", server.log());
                }
                tokio::time::sleep(POLL).await;
            }
        }
        Ok(())
    }
}

const POLL: Duration = Duration::from_millis(50);
