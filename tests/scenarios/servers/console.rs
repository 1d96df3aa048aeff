//! The consoles of several servers: each shows the nodes of all, and says which server is gone.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::stream::{self, StreamExt};
use serde_json::{Value, json};
use tokio::time::Instant;
use tunnel_proto::transport::TransportKind;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{Listener, Signal};

use super::{NODE, Servers};
use crate::abuse::report_figure;
use crate::scripted::ScriptedAgent;

#[tokio::test(flavor = "multi_thread")]
async fn each_server_shows_the_row_of_a_node_and_the_links_of_all() -> Result<()> {
    let servers = Servers::start(3, &[]).await?;
    let _agent = servers.agent_at(0).await?;
    servers.get_ok(1).await?;
    for number in 0..3 {
        eventually("the row of the node", ROWS, async || {
            let document = document(&servers, number, "/nodes").await?;
            let row = &document["nodes"][0];
            ensure!(row["node"] == NODE && row["server"] == "s0", "{document:#}");
            ensure!(
                row["state"] == "live" && row["version"].is_string(),
                "{document:#}"
            );
            ensure!(
                row["lastSeen"].is_string() && row["address"].is_string(),
                "{document:#}"
            );
            ensure!(row["traffic"]["trend"].is_array(), "{document:#}");
            Ok(())
        })
        .await;
        eventually("the links of the others", ROWS, async || {
            let document = document(&servers, number, "/servers").await?;
            for server in 0..3 {
                let linked = document["servers"][server]["linked"].as_array();
                ensure!(
                    linked.is_some_and(|linked| linked.len() == 2),
                    "{document:#}"
                );
            }
            Ok(())
        })
        .await;
        let conditions = document(&servers, number, "/conditions").await?;
        ensure!(
            conditions["conditions"] == Value::Array(Vec::new()),
            "{conditions:#}"
        );
    }
    Ok(())
}

/// Each of the servers has a third of the nodes.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_thousands_of_nodes_are_filled_at_each_server_and_a_frozen_one_is_said()
-> Result<()> {
    let third = Gear::current().pick(100, 1_000);
    let mut servers = Servers::start(3, &[]).await?;
    let _agents = agents(&servers, third).await?;
    for number in 0..3 {
        eventually("the rows of all nodes", ROWS, async || {
            let counts = document(&servers, number, "/nodes").await?["counts"].take();
            ensure!(counts["states"] == json!({ "live": 3 * third }), "{counts}");
            let of_each = json!({ "s0": third, "s1": third, "s2": third });
            ensure!(counts["servers"] == of_each, "{counts}");
            Ok(())
        })
        .await;
        let (mut page, mut pages, mut filled) = (0, 1, 0);
        while page < pages {
            page += 1;
            let target = format!("/nodes?sort=name&page={page}");
            let document = document(&servers, number, &target).await?;
            pages = document["pages"].as_u64().context("no pages")?;
            for row in document["nodes"].as_array().into_iter().flatten() {
                let fields = ["server", "transport", "version", "address", "lastSeen"];
                let later = [
                    "connectedSince",
                    "certificateNotAfter",
                    "rttMillis",
                    "traffic",
                ];
                let mut fields = fields.iter().chain(&later);
                ensure!(fields.all(|field| !row[*field].is_null()), "{row:#}");
                filled += 1;
            }
        }
        ensure!(filled == 3 * third, "{filled} rows at s{number}");
    }
    // A frozen host: its connections stay open, and nothing answers.
    servers.servers[2].process().signal(Signal::Stop)?;
    let begin = Instant::now();
    for number in 0..2 {
        eventually("word of the server that is gone", ROWS, async || {
            let conditions = document(&servers, number, "/conditions").await?;
            let text = conditions["conditions"][0]["text"].as_str();
            ensure!(text == Some("s2 does not answer"), "{conditions:#}");
            Ok(())
        })
        .await;
    }
    let elapsed = begin.elapsed();
    servers.servers[2].process().signal(Signal::Cont)?;
    report_figure(&format!("{} nodes: said after {elapsed:?}", 3 * third));
    ensure!(elapsed < scaled(SAID), "{elapsed:?}");
    Ok(())
}

/// Connects agents to each server, over either transport.
async fn agents(servers: &Servers, of_each: usize) -> Result<Vec<ScriptedAgent>> {
    let data = servers.scratch.path().join("s0");
    let numbers = (0..3).flat_map(|server| (0..of_each).map(move |number| (server, number)));
    let connecting = numbers.map(|(server, number)| {
        let address = servers.servers[server].address(Listener::Agents);
        let transport = [TransportKind::Quic, TransportKind::H2][number % 2];
        let data = &data;
        async move {
            let node = format!("node-{server}-{number:04}");
            ScriptedAgent::connect_to(address, data, &node, transport).await
        }
    });
    let mut connecting = stream::iter(connecting).buffer_unordered(AT_ONCE);
    let mut agents = Vec::new();
    while let Some(agent) = connecting.next().await {
        agents.push(agent?);
    }
    Ok(agents)
}

async fn document(servers: &Servers, number: usize, path: &str) -> Result<Value> {
    let page = servers.peering.address(number, Listener::Status);
    let wanted = RawRequest::get("127.0.0.1", path).header("Accept", "application/json");
    let reply = request(page, &wanted).await?;
    ensure!(reply.status == 200, "{reply:?}");
    Ok(serde_json::from_str(&reply.text())?)
}

/// Rows are up to 10 s old.
const ROWS: Duration = Duration::from_secs(40);
/// Time within which a server that is gone is shown.
const SAID: Duration = Duration::from_secs(10);
/// Handshakes at once.
const AT_ONCE: usize = 16;
