//! Cases 11, 12 and 17: a long path between agent and server. The path is the relay of the test
//! harness. The relay delays, queues and drops the datagrams of QUIC. The relay delays the bytes of
//! TCP and limits their rate, but TCP's own congestion control sees only the loopback interface. So
//! the results of QUIC include all that happens to packets, and the results of h2 do not include
//! TCP's part.

use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::time::timeout;
use tunnel_tests::link::{Impairment, Link, TrafficClass};
use tunnel_tests::stats::percentile;

use crate::bench::BenchRun;
use crate::client::{Caller, Endpoint};
use crate::load;
use crate::machine::CpuUsage;
use crate::metric::{
    FAILED, FAR_2M, FAR_200K, FAR_FIRST_2M, FAR_FIRST_200K, FAR_UP_2M, SESSIONS_LOST,
    WAN_BESIDE_P50, WAN_BESIDE_P99, WAN_BULK, WAN_NEW,
};
use crate::systems::{Culvert, DIRECT, H2, NODE, QUIC, Shape, plain};
use crate::target::Bound::{AtLeast, AtMost};
use crate::target::Of::{Itself, Ratio};
use crate::target::Target;

/// Payload rate of the link of 200 Mbit/s, without headers, in Mbit/s.
const LINK_MBIT: f64 = 185.0;

pub(super) const CLEAN: &[Target] = &[
    Target::new(QUIC, &WAN_BULK, Itself, AtLeast(LINK_MBIT * 0.99)),
    Target::new(QUIC, &WAN_NEW, Itself, AtMost(1.05)),
    Target::new(QUIC, &WAN_BESIDE_P50, Itself, AtMost(60.0)),
    Target::new(QUIC, &WAN_BESIDE_P99, Itself, AtMost(75.0)),
    Target::new(H2, &WAN_NEW, Itself, AtMost(1.05)),
    Target::new(H2, &WAN_BESIDE_P50, Itself, AtMost(150.0)),
    Target::new(QUIC, &SESSIONS_LOST, Itself, AtMost(0.0)),
];

pub(super) const LOSSY: &[Target] = &[
    Target::new(H2, &WAN_BULK, Ratio(DIRECT), AtLeast(0.9)),
    Target::new(QUIC, &WAN_BULK, Ratio(DIRECT), AtLeast(0.85)),
    Target::new(QUIC, &WAN_BESIDE_P50, Itself, AtMost(60.0)),
    Target::new(QUIC, &WAN_BESIDE_P99, Itself, AtMost(75.0)),
    Target::new(QUIC, &SESSIONS_LOST, Itself, AtMost(0.0)),
    Target::new(H2, &SESSIONS_LOST, Itself, AtMost(0.0)),
];

/// A round trip, and what a sender in slow start needs.
pub(super) const SHORT: &[Target] = &[
    Target::new(QUIC, &FAR_FIRST_200K, Itself, AtMost(220.0)),
    Target::new(QUIC, &FAR_200K, Itself, AtMost(220.0)),
    Target::new(H2, &FAR_200K, Itself, AtMost(220.0)),
    Target::new(QUIC, &FAILED, Itself, AtMost(0.0)),
    Target::new(H2, &FAILED, Itself, AtMost(0.0)),
];

const ONE_WAY: Duration = Duration::from_millis(25);
/// Rate in bytes per second (200 Mbit/s). The queue holds two bandwidth-delay products.
const RATE: u64 = 25_000_000;
const QUEUE: usize = 2_500_000;
const SMALL_RATE: u32 = 50;
/// Time after which the bulk stream has reached its rate.
const WARM: Duration = Duration::from_secs(1);

pub(super) async fn run(bench: &mut BenchRun, loss: f64) -> Result<()> {
    let path = Impairment::delayed(ONE_WAY)
        .with_loss(loss)
        .with_rate(RATE)
        .with_queue(QUEUE);
    let seed = u64::from(bench.round);
    {
        let link = Link::start(bench.systems.edge.plain_address, seed)?;
        link.set(TrafficClass::ALL, path.clone());
        measure(bench, DIRECT, plain(link.addr()), &[]).await?;
    }
    for (name, transport) in [(QUIC, "quic"), (H2, "h2")] {
        let mut stack = start(bench, transport, &path).await?;
        load::probe(&stack.endpoint(), Duration::from_secs(20)).await?;
        let session = session(&stack).await?;
        let own = processes(&mut stack);
        if let Err(error) = measure(bench, name, stack.endpoint(), &own).await {
            bench.record_error(name, &error);
        }
        let lost = self::session(&stack).await? != session;
        bench.record(name, &SESSIONS_LOST, f64::from(u8::from(lost)), 0.0);
    }
    Ok(())
}

/// Starts a server and an agent that connects over `path`.
async fn start(bench: &BenchRun, transport: &'static str, path: &Impairment) -> Result<Culvert> {
    let shape = Shape {
        transport,
        link: Some(u64::from(bench.round)),
        ..Shape::default()
    };
    let mut stack = Culvert::start(&bench.systems.edge, shape).await?;
    // The agent connects again over the long path, because BBR keeps the shortest round trip of
    // the last 10 s.
    if let Some(link) = &stack.link {
        link.set(TrafficClass::ALL, path.clone());
    }
    if let Some(agent) = stack.agent.take() {
        agent.stop(Duration::from_secs(5)).await?;
    }
    stack.agent = Some(stack.agent_setup.start()?);
    Ok(stack)
}

fn processes(stack: &mut Culvert) -> Vec<u32> {
    let server = stack.server_process().into_iter();
    server.chain(stack.agent_process()).collect()
}

const FAR_ONE_WAY: Duration = Duration::from_millis(50);
const FAR_RATE: u64 = 125_000_000;
const FAR_QUEUE: usize = 12_500_000;
const FAR_TRANSFERS: usize = 8;

/// Measures transfers of which windows, not the rate, could be the limit.
pub(super) async fn short(bench: &mut BenchRun) -> Result<()> {
    let path = Impairment::delayed(FAR_ONE_WAY)
        .with_rate(FAR_RATE)
        .with_queue(FAR_QUEUE);
    for (name, transport) in [(QUIC, "quic"), (H2, "h2")] {
        for (size, first, later) in [
            (200_000, &FAR_FIRST_200K, &FAR_200K),
            (2_000_000, &FAR_FIRST_2M, &FAR_2M),
        ] {
            let mut stack = start(bench, transport, &path).await?;
            let endpoint = stack.endpoint();
            load::probe(&endpoint, Duration::from_secs(20)).await?;
            let own = processes(&mut stack);
            let (times, usage) = bench.watch(&own, transfers(&endpoint, size, false)).await?;
            bench.record(name, first, millis(&times[..1]), usage.foreign);
            bench.record(name, later, millis(&times[1..]), usage.foreign);
            if later == &FAR_2M {
                let (times, usage) = bench.watch(&own, transfers(&endpoint, size, true)).await?;
                bench.record(name, &FAR_UP_2M, millis(&times[1..]), usage.foreign);
            }
        }
        bench.record(name, &FAILED, 0.0, 0.0);
    }
    Ok(())
}

/// Returns the times of transfers, one after the other.
async fn transfers(endpoint: &Endpoint, size: u64, is_up: bool) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for _ in 0..=FAR_TRANSFERS {
        let mut caller = Caller::connect(endpoint).await?;
        let began = Instant::now();
        if is_up {
            caller.post(size).await?;
        } else {
            caller.get(size).await?;
        }
        times.push(began.elapsed());
    }
    Ok(times)
}

fn millis(times: &[Duration]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    percentile(&sorted, 0.5).as_secs_f64() * 1e3
}

async fn measure(
    bench: &mut BenchRun,
    name: &'static str,
    endpoint: Endpoint,
    own: &[u32],
) -> Result<()> {
    let length = bench.length(4.0);
    let ((rate, fresh, beside), usage) = bench.watch(own, work(&endpoint, length)).await?;
    let CpuUsage { foreign, .. } = usage;
    bench.record(name, &WAN_BULK, rate, foreign);
    let trips = |asked: &load::LoadResult, share| percentile(&asked.times, share).as_secs_f64();
    let round_trip = ONE_WAY.as_secs_f64() * 2.0;
    bench.record(name, &WAN_NEW, trips(&fresh, 0.5) / round_trip, foreign);
    bench.record(name, &WAN_BESIDE_P50, trips(&beside, 0.5) * 1e3, foreign);
    bench.record(name, &WAN_BESIDE_P99, trips(&beside, 0.99) * 1e3, foreign);
    #[expect(clippy::cast_precision_loss, reason = "a count for people")]
    bench.record(
        name,
        &FAILED,
        (fresh.failed + beside.failed) as f64,
        foreign,
    );
    Ok(())
}

/// Measures new connections on the idle path, and then a bulk stream with small requests next to
/// it. Returns the rate of the bulk stream in Mbit/s and the results of both kinds of requests.
async fn work(
    endpoint: &Endpoint,
    length: Duration,
) -> Result<(f64, load::LoadResult, load::LoadResult)> {
    let fresh = load::open(endpoint, SMALL_RATE, length / 3, false).await?;
    let mut bulk = Caller::connect(endpoint).await?;
    bulk.ask(u64::MAX >> 1).await?;
    let began = Instant::now();
    let reading = async {
        let (mut bytes, mut since) = (0_usize, None);
        while began.elapsed() < WARM + length {
            let Ok(Ok(count)) = timeout(length, bulk.read()).await else {
                break;
            };
            if began.elapsed() >= WARM {
                since.get_or_insert_with(Instant::now);
                bytes += count;
            }
        }
        let seconds = since.map_or(f64::INFINITY, |since: Instant| {
            since.elapsed().as_secs_f64()
        });
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = bytes as f64 * 8.0 / seconds / 1e6;
        rate
    };
    let asking = async {
        tokio::time::sleep(WARM).await;
        load::open(endpoint, SMALL_RATE, length, true).await
    };
    let (rate, beside) = tokio::join!(reading, asking);
    Ok((rate, fresh, beside?))
}

/// Returns the time at which the node's session was established, which identifies the session.
async fn session(stack: &Culvert) -> Result<String> {
    let nodes = stack.server()?.nodes().await?;
    let node = nodes.iter().find(|node| node["node"] == NODE);
    Ok(node.map_or_else(String::new, |node| node["connectedSince"].to_string()))
}
