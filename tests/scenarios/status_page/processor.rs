//! What a page of 20,000 nodes costs the process of the server. `CULVERT_BIN_DIR` selects the binaries, as
//! those of a release.

use std::fs;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use tunnel_proto::transport::TransportKind;
use tunnel_proto::wire::name::NodeName;
use tunnel_store::data_dir::DataDir;
use tunnel_store::known_nodes::KnownNodes;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::env::WAIT_TIMEOUT;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{Listener, Peering, ScratchDir};

use crate::abuse::report_figure;
use crate::scripted::ScriptedAgent;

#[tokio::test(flavor = "multi_thread")]
async fn page_of_twenty_thousand_nodes_costs_the_servers_process_a_bounded_time() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let peering = Peering::new(1, scratch.path());
    let data = scratch.path().join(Peering::name(0));
    let known = KnownNodes::open(&DataDir::open(&data)?)?;
    let seen = SystemTime::now() - Duration::from_secs(3600);
    for number in 0..NODES {
        let node: NodeName = name(number).parse()?;
        known.record(&node, &[]);
        known.record_last_seen(&node, seen);
    }
    known.save()?;
    drop(known);
    let page = peering.address(0, Listener::Status);
    let setup = peering.setup(0)?;
    let mut server = setup
        .args(&["--status-listen", &page.to_string()])
        .start()
        .await?;
    let mut agents = Vec::new();
    for number in 0..LIVE {
        let (to, node) = (server.address(Listener::Agents), name(number * 10));
        agents.push(ScriptedAgent::connect_to(to, &data, &node, TransportKind::Quic).await?);
    }
    eventually("the agents", WAIT_TIMEOUT, async || {
        let reply = request(page, &RawRequest::get("127.0.0.1", "/")).await?;
        ensure!(reply.text().contains(REACHABLE), "{}", reply.text());
        anyhow::Ok(())
    })
    .await;
    // Without optimization a page takes 13 times as long.
    let limit = Gear::current().pick(Duration::from_millis(300), Duration::from_millis(100));
    let limit = scaled(limit);
    let process = server.process().id().context("the server ended")?;
    for (path, text) in [
        ("/", REACHABLE),
        ("/nodes?page=500", "20,000 nodes, page 500 of 500"),
        ("/nodes?sort=-version&search=edge", "20,000 nodes, page 1"),
        ("/nodes?sort=seen&state=away", "19,900 nodes, page 1"),
        ("/node/edge-00000", "edge-00000"),
    ] {
        let before = processor_time(process)?;
        for _ in 0..TIMES {
            let reply = request(page, &RawRequest::get("127.0.0.1", path)).await?;
            ensure!(reply.text().contains(text), "{path}: {}", reply.text());
        }
        let each = (processor_time(process)? - before) / TIMES;
        report_figure(&format!("{path}: {each:?} of a processor"));
        ensure!(each < limit, "{path}: {each:?}");
    }
    Ok(())
}

fn name(number: usize) -> String {
    format!("edge-{number:05}")
}

/// Returns the processor time of all threads of a process so far (proc(5), schedstat).
fn processor_time(process: u32) -> Result<Duration> {
    let mut sum = Duration::ZERO;
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let times = fs::read_to_string(thread?.path().join("schedstat"))?;
        let nanoseconds = times.split(' ').next().context("no time")?;
        sum += Duration::from_nanos(nanoseconds.parse()?);
    }
    Ok(sum)
}

const NODES: usize = 20_000;
/// Those of them with an agent.
const LIVE: usize = 100;
const REACHABLE: &str = "100 <small>of 20,000 reachable";
/// Requests of one measurement.
const TIMES: u32 = 10;
