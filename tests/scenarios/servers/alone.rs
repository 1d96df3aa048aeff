//! A server without others, and agents that know nothing of several servers.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::Instant;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_tests::checks::{ensure_contains, ensure_refused};
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::process::{ScratchDir, ServerSetup};
use tunnel_tests::targets::Exporter;

use super::standalone::Pair;
use super::{AGENTS, NODE, wait_for_route};
use crate::scripted::ScriptedAgent;

#[tokio::test(flavor = "multi_thread")]
async fn server_without_others_listens_for_none_and_has_one_session_of_an_agent() -> Result<()> {
    let scratch = ScratchDir::new()?;
    let exporter = Exporter::start(NODE).await?;
    let port = exporter.addr().port().to_string();
    let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
    let ports = ["--http-proxy-ports", &port, "--proxy-port-listen", "off"];
    let server = setup.args(&ports).start().await?;
    let folder = scratch.path().join("agent");
    let _agent = server.agent_setup(NODE, &folder).await?.start()?;
    server.wait_until_connected(&[NODE]).await;
    let host = format!("{NODE}:{port}");
    let until = Instant::now() + SEARCH;
    while Instant::now() < until {
        server.get_ok(&host, "/metrics").await?;
    }
    // The agent would hold two sessions if there were two servers.
    let admitted = "tunnel_server_handshakes_total{result=\"ok\"}";
    ensure!(server.metric(admitted).await? == 1);
    ensure!(server.metric(AGENTS).await? == 1);
    ensure!(server.metric("tunnel_server_peers").await? == 0);
    ensure!(server.nodes().await?[0]["server"].is_null());
    ensure!(!server.log().contains("\"listener\":\"peers\""));
    ensure!(!server.log().contains("\"via\""));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_that_ignores_the_other_servers_is_reached_over_its_own() -> Result<()> {
    let pair = Pair::start().await?;
    let agent = ScriptedAgent::connect(&pair.a, NODE).await?;
    wait_for_route(pair.b.http()).await;
    let upload = RawRequest::new("POST", "/upload", &format!("{NODE}:9100"))
        .header("Connection", "close")
        .body(vec![7; 64 << 10]);
    for env in [&pair.a, &pair.b] {
        let (reply, refused) = tokio::join!(request(env.http(), &upload), async {
            let stream = agent.next_stream().await?;
            let detail = "agent's --deny-ports lists 9100";
            stream.refuse(RefusalCode::Policy, detail).await;
            anyhow::Ok(())
        });
        refused?;
        let reply = reply?;
        ensure_refused(&reply, 403, "refused_by_policy")?;
        ensure_contains(&reply.text(), &["agent's --deny-ports lists 9100"])?;
    }
    agent.leave().await;
    Ok(())
}

/// An agent that finds a second server connects to it within 2 s.
const SEARCH: Duration = Duration::from_secs(3);
