//! T10: a hostile agent that opens streams to a target of the cloud without end.

use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::{Instant, sleep};
use tunnel_proto::transport::TransportKind;
use tunnel_tests::checks::get_ok;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::faults::ProcessUsage;
use tunnel_tests::process::{Listener, ScratchDir};
use tunnel_tests::scripted::StreamFlood;
use tunnel_tests::targets::SilentTarget;

use super::{CONNECT, Edge, HOST};

tests_of! {
    fn t10_agent_that_opens_10000_cloud_streams_costs_others_nothing_over_quic() = flooded(TransportKind::Quic);
    fn t10_agent_that_opens_10000_cloud_streams_costs_others_nothing_over_h2() = flooded(TransportKind::H2);
}

/// Opens 10,000 streams that stay open, and then some that are reset as soon as the server has
/// accepted them. Requests of another node are served during both.
async fn flooded(transport: TransportKind) -> Result<()> {
    let (scratch, sink) = (ScratchDir::new()?, SilentTarget::start().await?);
    let target = sink.addr();
    let yaml = format!("cloud: [{{ name: sink, target: \"{target}\", nodes: [worker-2] }}]\n");
    let config = scratch.file("cloud.yaml", yaml)?;
    let config = config.to_string_lossy();
    let mut edge = Edge::start_with(transport.label(), &["--config", &config]).await?;
    let server = edge.server.process().id().context("no server")?;
    let before = ProcessUsage::sample_min(server).await?;
    let agents = edge.server.address(Listener::Agents);
    let data = Path::new(edge.server.data_dir());
    let began = Instant::now();
    let mut flood = StreamFlood::connect(agents, data, "worker-2", transport).await?;

    let slowest = edge.slowest_request(flood.open("sink", STREAMS)).await?;
    ensure!(slowest < scaled(SLOWEST), "a request took {slowest:?}");
    let after = ProcessUsage::sample_min(server).await?;
    let growth = after.memory_kib.saturating_sub(before.memory_kib);
    ensure!(growth < GROWTH_KIB, "{growth} KiB");
    let (accepted, refused) = (flood.accepted(), flood.refused());
    let figures = format!("{accepted} accepted, {refused} refused");
    ensure!(accepted > 0 && accepted + refused == STREAMS, "{figures}");
    edge.ensure_refused(refused).await;

    let traffic = sink.traffic();
    flood.release();
    // The target sees the end of a connection after the server has released its permit.
    eventually("the target sees the release", CONNECT, async || {
        let open = traffic.open();
        ensure!(open == 0, "{open} connections");
        anyhow::Ok(())
    })
    .await;
    let again = async {
        for _ in 0..RELEASES {
            flood.open("sink", BATCH).await?;
            flood.release();
        }
        anyhow::Ok(())
    };
    let slowest = edge.slowest_request(again).await?;
    ensure!(slowest < scaled(SLOWEST), "a request took {slowest:?}");
    edge.ensure_refused(flood.refused()).await;

    let (most, dialed) = (traffic.most_open(), traffic.accepted());
    let allowed = BURST + RATE * (began.elapsed().as_secs() + 1);
    ensure!(most <= STREAMS_PER_AGENT, "{most} connections at once");
    ensure!(dialed <= allowed, "{dialed} connections, {allowed} allowed");
    eventually("the streams are released", CONNECT, async || {
        let streams = edge.server.metric("tunnel_server_cloud_streams_open");
        let (streams, connections) = (streams.await?, traffic.open());
        ensure!(
            streams == 0 && connections == 0,
            "{streams} streams, {connections} connections"
        );
        anyhow::Ok(())
    })
    .await;
    Ok(())
}

impl Edge {
    /// Requests pages of the target until the future is ready. Returns the time of the slowest
    /// request. Each must be served.
    async fn slowest_request(&self, until: impl Future<Output = Result<()>>) -> Result<Duration> {
        let mut until = pin!(until);
        let mut slowest = Duration::ZERO;
        loop {
            let request = async {
                // A node may open 100 streams a second.
                sleep(PAUSE).await;
                let began = Instant::now();
                get_ok(self.local, HOST, "/metrics").await?;
                anyhow::Ok(began.elapsed())
            };
            tokio::select! {
                ended = &mut until => return ended.map(|()| slowest),
                took = request => slowest = slowest.max(took?),
            }
        }
    }

    /// Waits until the server has counted so many refused streams, by result and by limit.
    async fn ensure_refused(&self, refused: usize) {
        eventually("the count of refused streams", CONNECT, async || {
            let metric = async |series: &str| self.server.metric(series).await;
            let ended = "tunnel_server_cloud_streams_total{result=\"too_many_streams\"}";
            let ended = metric(ended).await?;
            let reached = "tunnel_server_limits_reached_total";
            let rate = format!("{reached}{{limit=\"cloudStreamRate\"}}");
            let per_agent = format!("{reached}{{limit=\"cloudStreamsPerAgent\"}}");
            let limits = metric(&rate).await? + metric(&per_agent).await?;
            let refused = u64::try_from(refused)?;
            ensure!(
                ended == refused && limits == refused,
                "{ended} by result, {limits} by limit, {refused} refused"
            );
            anyhow::Ok(())
        })
        .await;
    }
}

const STREAMS: usize = 10_000;
/// Streams that are opened before they are released together, and how often that is repeated.
const BATCH: usize = 100;
const RELEASES: usize = 20;
/// The defaults of `limits.cloudStreamsPerAgent` and `limits.cloudStreamRate`, and the burst.
const STREAMS_PER_AGENT: u64 = 256;
const RATE: u64 = 100;
const BURST: u64 = 200;
/// Growth of the server's resident memory while the accepted streams are open.
const GROWTH_KIB: u64 = 64 * 1024;
const PAUSE: Duration = Duration::from_millis(20);
/// Longest time of a request, some ten thousand times that of an idle machine.
const SLOWEST: Duration = Duration::from_secs(1);
