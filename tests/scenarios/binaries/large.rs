//! A standalone server that knows many nodes: its start, the verbs and documents that show all of them,
//! and the memory of that, which does not depend on the number of nodes beyond what a known node takes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::Instant;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::eventually;
use tunnel_tests::gear::Gear;
use tunnel_tests::metrics::meta_page;
use tunnel_tests::process::{Listener, ScratchDir, Server, ServerSetup};

use super::memory::{kib, record_nodes};
use crate::abuse::report_figure;

#[tokio::test(flavor = "multi_thread")]
async fn server_of_many_known_nodes_shows_and_forgets_them_without_holding_all() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let data = scratch.path().join("server");
    let count = Gear::current().pick(10_000, 100_000);
    record_nodes(&data, count)?;
    let status = ["--status-listen", "127.0.0.1:0"];
    let dns = ["--dns-listen", "127.0.0.1:0", "--dns-answer", "192.0.2.1"];
    let setup = ServerSetup::on_loopback(&data).args(&status).args(&dns);
    let began = Instant::now();
    let mut server = setup.start().await?;
    let meta = server.address(Listener::Meta);
    eventually("ready", START, async || meta_page(meta, "/readyz").await).await;
    let ready = began.elapsed();
    let opened = |line: &str| Listener::Status.opened(line);
    let status = server.process().wait_for_line("status", START, opened);
    let status = status.await?;
    let process = server.process().id().context("it has ended")?;
    let at_rest = kib(process, "VmHWM:")?;
    let mut figures = vec![format!("ready after {ready:?}, {} MiB", at_rest >> 10)];
    let mut done = |what: &str, began: Instant| -> Result<()> {
        let peak = kib(process, "VmHWM:")?;
        figures.push(format!("{what}: {:?}, {} MiB", began.elapsed(), peak >> 10));
        Ok(())
    };

    let began = Instant::now();
    ensure!(listed(&server).await? == count, "nodes");
    done("nodes", began)?;
    for (what, address, path) in [
        ("/nodes", meta, "/nodes"),
        ("/sd", meta, "/sd/prometheus?port=10250"),
    ] {
        let began = Instant::now();
        let reply = request(address, &RawRequest::get("meta", path)).await?;
        let nodes: Vec<serde_json::Value> = serde_json::from_str(&reply.text())?;
        ensure!(nodes.len() == count, "{what}: {}", nodes.len());
        done(what, began)?;
    }
    let began = Instant::now();
    let page = request(status, &RawRequest::get("127.0.0.1", "/nodes?page=20")).await?;
    let has_page = page.text().contains(",000 nodes, page 20");
    ensure!(has_page, "{}", page.text());
    done("console", began)?;
    let report = server.verb(&["doctor"])?.run().await?;
    ensure!(report.out.contains("nodes"), "{report}");

    let names = forgotten(&server).await?;
    let file = scratch.file("names", names.join("\n"))?;
    let began = Instant::now();
    let forget = ["nodes", "forget", "--file", &file.to_string_lossy()];
    let said = server.verb(&forget)?.run().await?.ok()?;
    ensure!(said.matches("forgotten").count() == FORGOTTEN, "{said}");
    done("forget", began)?;
    eventually("the nodes to be gone", START, async || {
        let left = listed(&server).await?;
        ensure!(left == count - FORGOTTEN, "{left}");
        anyhow::Ok(())
    })
    .await;

    let peak = kib(process, "VmHWM:")?;
    report_figure(&format!("{count} known nodes: {}", figures.join("; ")));
    ensure!(
        peak < at_rest + GROWTH_KIB,
        "{} MiB of {} MiB at rest",
        peak >> 10,
        at_rest >> 10
    );
    ensure!(peak < SERVER_MAX_KIB, "{} MiB", peak >> 10);
    Ok(())
}

/// Returns the number of nodes that the verb `nodes` lists.
async fn listed(server: &Server) -> Result<usize> {
    let printed = server.verb(&["nodes", "-o", "json"])?.run().await?.ok()?;
    Ok(printed.matches("\"node\":").count())
}

/// Returns the names of the first nodes of the server's data directory.
async fn forgotten(server: &Server) -> Result<Vec<String>> {
    let nodes = server.nodes().await?;
    let names = nodes.iter().take(FORGOTTEN);
    let names = names.map(|node| node["node"].as_str().map(str::to_owned));
    names
        .collect::<Option<_>>()
        .context("a node without a name")
}

const FORGOTTEN: usize = 5_000;
const START: Duration = Duration::from_secs(60);
/// What the documents and verbs may add to the memory of a server at rest, whatever the number of
/// nodes.
const GROWTH_KIB: u64 = 16 << 10;
const SERVER_MAX_KIB: u64 = 512 << 10;
