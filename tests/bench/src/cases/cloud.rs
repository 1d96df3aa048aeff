//! Case 16: connections from the edge to targets of the cloud, through listeners of an agent.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tunnel_process::host::{Resources, raise_descriptor_limit};
use tunnel_tests::apiserver::{FakeApiServer, Setup};
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::process::{Listener, Program, ScratchDir};
use tunnel_tests::stats::percentile;
use tunnel_tests::tools::Tool;

use crate::bench::BenchRun;
use crate::client::Endpoint;
use crate::components;
use crate::load;
use crate::machine::anonymous_kib;
use crate::metric::{
    CLOUD_FLOODED, CLOUD_GET, CLOUD_KUBECTL, CLOUD_LIST, CLOUD_STREAM_AGENT, CLOUD_STREAM_SERVER,
    FAILED,
};
use crate::systems::{Culvert, DIRECT_TLS, H2, QUIC, Shape, plain, to_args};
use crate::target::Bound::{AtLeast, AtMost};
use crate::target::Of::{Itself, Ratio};
use crate::target::Target;

pub(super) const TARGETS: &[Target] = &[
    Target::new(H2, &FAILED, Itself, AtMost(0.0)),
    Target::new(H2, &CLOUD_GET, Ratio(DIRECT_TLS), AtMost(1.15)),
    Target::new(H2, &CLOUD_KUBECTL, Ratio(DIRECT_TLS), AtMost(1.15)),
    Target::new(H2, &CLOUD_STREAM_SERVER, Itself, AtMost(8.0)),
    Target::new(H2, &CLOUD_STREAM_AGENT, Itself, AtMost(8.0)),
    Target::new(H2, &CLOUD_LIST, Itself, AtLeast(0.85)),
    Target::new(H2, &CLOUD_FLOODED, Itself, AtMost(1.3)),
    Target::new(QUIC, &FAILED, Itself, AtMost(0.0)),
    Target::new(QUIC, &CLOUD_GET, Ratio(DIRECT_TLS), AtMost(1.15)),
    Target::new(QUIC, &CLOUD_KUBECTL, Ratio(DIRECT_TLS), AtMost(1.15)),
    Target::new(QUIC, &CLOUD_STREAM_SERVER, Itself, AtMost(8.0)),
    Target::new(QUIC, &CLOUD_STREAM_AGENT, Itself, AtMost(8.0)),
    Target::new(QUIC, &CLOUD_LIST, Itself, AtLeast(0.85)),
    Target::new(QUIC, &CLOUD_FLOODED, Itself, AtMost(1.3)),
];

/// Delay of the link in each direction, and its round trip.
const ONE_WAY: Duration = Duration::from_millis(25);
const ROUND_TRIP: Duration = Duration::from_millis(50);
/// New connections a second over the link. A node may open 100 streams a second.
const NEW_RATE: u32 = 20;
/// Runs of kubectl in a round, of which the median counts. The first run fills its caches.
const KUBECTLS: usize = 7;
/// Idle streams, if the server's share of the open files for one agent is that large.
const STREAMS: usize = 1000;
const STREAM_LIMITS: [&str; 1] = ["streamsPerAgent: 2048"];
const SERVER_LIMITS: [&str; 2] = ["cloudStreamsPerAgent: 2048", "cloudStreamRate: 60000"];
const AGENT_LIMITS: [&str; 1] = ["cloudStreams: 2048"];
/// Part of the open files of which one agent has streams to targets of the cloud.
const DESCRIPTORS_EACH: u64 = 64;
/// Time after which processes and streams are idle.
const SETTLE: Duration = Duration::from_secs(1);
const LIST: u64 = 10 << 20;
/// Lists that are read in turn through the agent's listener and through the TCP service.
const LISTS: usize = 40;
/// Requests a second of the node next to the hostile agent's.
const RATE: u32 = 200;
const REFUSED: &str = "tunnel_server_cloud_streams_total{result=\"too_many_streams\"}";
/// Fewest streams that the server refuses during a measurement of any length.
const FLOOD: u64 = 100;

pub(super) async fn run(bench: &mut BenchRun) -> Result<()> {
    let api = FakeApiServer::start(Setup::default())?;
    if let Err(error) = direct(bench, &api).await {
        bench.record_error(DIRECT_TLS, &error);
    }
    for (name, transport) in [(H2, "h2"), (QUIC, "quic")] {
        for done in [
            over_long_path(bench, name, transport, &api).await,
            idle_streams(bench, name, transport).await,
            lists(bench, name, transport).await,
            flooded(bench, name, transport).await,
        ] {
            if let Err(error) = done {
                bench.record_error(name, &error);
            }
        }
    }
    Ok(())
}

/// Measures requests over the long path without a tunnel.
async fn direct(bench: &mut BenchRun, api: &FakeApiServer) -> Result<()> {
    let seed = u64::from(bench.round);
    let delayed = |to| -> Result<Link> {
        let link = Link::start(to, seed)?;
        link.set(TrafficClass::ALL, Impairment::delayed(ONE_WAY));
        Ok(link)
    };
    let (service, at_api) = (
        delayed(bench.systems.edge.secure_address)?,
        delayed(api.addr())?,
    );
    let endpoint = bench.systems.edge.secure_at(service.addr());
    get(bench, DIRECT_TLS, &endpoint, Duration::ZERO).await?;
    let kubectl = Kubectl::new(api, at_api.addr())?;
    kubectl.measure(bench, DIRECT_TLS, Duration::ZERO).await
}

/// Measures the same requests through the tunnel, whose link is the long path.
async fn over_long_path(
    bench: &mut BenchRun,
    name: &'static str,
    transport: &str,
    api: &FakeApiServer,
) -> Result<()> {
    let secure = bench.systems.edge.secure_address;
    let shape = Shape {
        transport,
        link: Some(u64::from(bench.round)),
        cloud: &[("secure", secure), ("apiserver", api.addr())],
        ..Shape::default()
    };
    let stack = Culvert::start(&bench.systems.edge, shape).await?;
    let link = stack.link.as_ref().context("no link")?;
    link.set(TrafficClass::ALL, Impairment::delayed(ONE_WAY));
    let &[secure, apiserver] = stack.cloud.as_slice() else {
        anyhow::bail!("no listeners");
    };
    let endpoint = bench.systems.edge.secure_at(secure);
    get(bench, name, &endpoint, ROUND_TRIP).await?;
    let kubectl = Kubectl::new(api, apiserver)?;
    kubectl.measure(bench, name, ROUND_TRIP).await
}

/// Records the median time of a new connection with TLS and a small GET over it, less `opening`.
async fn get(
    bench: &mut BenchRun,
    name: &'static str,
    endpoint: &Endpoint,
    opening: Duration,
) -> Result<()> {
    let length = bench.length(4.0);
    let asked = load::open(endpoint, NEW_RATE, length, false).await?;
    let median = percentile(&asked.times, 0.5);
    let took = millis(median.saturating_sub(opening));
    bench.record(name, &CLOUD_GET, took, 0.0);
    record_failed(bench, name, asked.failed);
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "a count for people")]
fn record_failed(bench: &mut BenchRun, name: &'static str, failed: usize) {
    bench.record(name, &FAILED, failed as f64, 0.0);
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A kubectl with caches of its own, if the machine has the program.
struct Kubectl(Option<(Program, ScratchDir)>);

impl Kubectl {
    /// Creates a kubectl that reaches the API server at `address`.
    fn new(api: &FakeApiServer, address: SocketAddr) -> Result<Self> {
        let Some(file) = Tool::Kubectl.find() else {
            return Ok(Self(None));
        };
        let scratch = ScratchDir::new()?;
        let kubeconfig = std::fs::read(api.admin_kubeconfig()?)?;
        let mut kubeconfig: Value = serde_json::from_slice(&kubeconfig)?;
        let cluster = &mut kubeconfig["clusters"][0]["cluster"];
        cluster["server"] = format!("https://{address}").into();
        cluster["tls-server-name"] = "kubernetes.default.svc".into();
        let kubeconfig = scratch.file("kubeconfig", kubeconfig.to_string())?;
        let program = Program::at(&file)
            .env("KUBECONFIG", kubeconfig)
            .env("HOME", scratch.path())
            .args(["get", "nodes"]);
        Ok(Self(Some((program, scratch))))
    }

    /// Records the median time of `kubectl get`, less `opening`.
    async fn measure(
        &self,
        bench: &mut BenchRun,
        name: &'static str,
        opening: Duration,
    ) -> Result<()> {
        let Some((program, _scratch)) = &self.0 else {
            return Ok(());
        };
        program.clone().run().await?.ok()?;
        let mut times = Vec::new();
        for _ in 0..KUBECTLS {
            let began = Instant::now();
            program.clone().run().await?.ok()?;
            times.push(began.elapsed());
        }
        times.sort_unstable();
        let took = percentile(&times, 0.5).saturating_sub(opening);
        bench.record(name, &CLOUD_KUBECTL, millis(took), 0.0);
        Ok(())
    }
}

/// Measures the memory of open streams without traffic.
#[expect(clippy::cast_precision_loss, reason = "a thousand")]
async fn idle_streams(bench: &mut BenchRun, name: &'static str, transport: &str) -> Result<()> {
    let shape = Shape {
        transport,
        limits: &STREAM_LIMITS,
        server_limits: &SERVER_LIMITS,
        agent_limits: &AGENT_LIMITS,
        cloud: &[("edge", bench.systems.edge.plain_address)],
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let server = stack.server_process().context("no server")?;
    let agent = stack.agent_process().context("no agent")?;
    let count = stream_count()?;
    tokio::time::sleep(SETTLE).await;
    let before = (anonymous_kib(server), anonymous_kib(agent));
    let _idle_callers = load::hold(&first_listener(&stack)?, count).await?;
    tokio::time::sleep(SETTLE).await;
    let each = |with: f64, before: f64| (with - before) / count as f64;
    let of_server = each(anonymous_kib(server), before.0);
    let of_agent = each(anonymous_kib(agent), before.1);
    bench.record(name, &CLOUD_STREAM_SERVER, of_server, 0.0);
    bench.record(name, &CLOUD_STREAM_AGENT, of_agent, 0.0);
    Ok(())
}

/// Returns how many idle streams one agent may have. The server has the same limit of open files as
/// this process.
fn stream_count() -> Result<usize> {
    raise_descriptor_limit()?;
    let descriptors = Resources::of_process().descriptors.unwrap_or(u64::MAX);
    let most = usize::try_from(descriptors / DESCRIPTORS_EACH).unwrap_or(usize::MAX);
    Ok(STREAMS.min(most.saturating_sub(1)))
}

fn first_listener(stack: &Culvert) -> Result<Endpoint> {
    let listener = stack.cloud.first().context("no listener")?;
    Ok(plain(*listener))
}

/// Measures the rate of answers of 10 MiB to the edge, relative to that of the TCP service through
/// the same server and agent.
async fn lists(bench: &mut BenchRun, name: &'static str, transport: &str) -> Result<()> {
    let shape = Shape {
        transport,
        cloud: &[("edge", bench.systems.edge.plain_address)],
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let own = stack.server_process().into_iter();
    let own: Vec<u32> = own.chain(stack.agent_process()).collect();
    let (listener, service) = (first_listener(&stack)?, stack.endpoint());
    let reading = async {
        let (mut through_listener, mut through_service) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..LISTS {
            through_listener += load::down(&listener, LIST).await?;
            through_service += load::down(&service, LIST).await?;
        }
        anyhow::Ok(through_service.as_secs_f64() / through_listener.as_secs_f64())
    };
    let (ratio, usage) = bench.watch(&own, reading).await?;
    bench.record(name, &CLOUD_LIST, ratio, usage.foreign);
    Ok(())
}

/// Measures the requests of a node without and next to another node whose agent opens streams as
/// fast as it can.
async fn flooded(bench: &mut BenchRun, name: &'static str, transport: &str) -> Result<()> {
    let shape = Shape {
        transport,
        cloud: &[("edge", bench.systems.edge.plain_address)],
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    let own = stack.server_process().into_iter();
    let mut own: Vec<u32> = own.chain(stack.agent_process()).collect();
    let (endpoint, length) = (first_listener(&stack)?, bench.length(4.0));
    let asking = load::open(&endpoint, RATE, length, true);
    let (without, before) = bench.watch(&own, asking).await?;

    let server = stack.server()?;
    let agents = server.address(Listener::Agents).to_string();
    let arguments = [
        "hostile-agent",
        transport,
        server.data_dir(),
        &agents,
        "edge",
    ];
    let (hostile, _) = components::start(&to_args(&arguments)).await?;
    own.extend(hostile.id());
    let refused = async || server.metric(REFUSED).await;
    let earlier = refused().await?;
    let asking = load::open(&endpoint, RATE, length, true);
    let (with, during) = bench.watch(&own, asking).await?;
    let count = refused().await? - earlier;
    ensure!(count >= FLOOD, "{count} streams were refused; {hostile}");

    let p99 = |asked: &load::LoadResult| percentile(&asked.times, 0.99).as_secs_f64();
    let foreign = before.foreign.max(during.foreign);
    bench.record(name, &CLOUD_FLOODED, p99(&with) / p99(&without), foreign);
    record_failed(bench, name, without.failed + with.failed);
    Ok(())
}
