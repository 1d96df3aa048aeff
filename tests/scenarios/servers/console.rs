//! The consoles of several servers: each shows the nodes of all, and says which server is gone.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::Value;
use tokio::time::Instant;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, Signal};

use super::{NODE, Servers};

#[tokio::test(flavor = "multi_thread")]
async fn each_server_shows_the_rows_of_all_and_soon_that_one_is_gone() -> Result<()> {
    let mut servers = Servers::start(3, &[]).await?;
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
    // A frozen host: its connections stay open, and nothing answers.
    servers.servers[2].process().signal(Signal::Stop)?;
    let begin = Instant::now();
    eventually("word of the server that is gone", ROWS, async || {
        let conditions = document(&servers, 0, "/conditions").await?;
        let text = conditions["conditions"][0]["text"].as_str();
        ensure!(text == Some("s2 does not answer"), "{conditions:#}");
        Ok(())
    })
    .await;
    let elapsed = begin.elapsed();
    servers.servers[2].process().signal(Signal::Cont)?;
    ensure!(elapsed < scaled(SAID), "{elapsed:?}");
    Ok(())
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
