//! The server restarts while 200 agents are connected. All agents reconnect soon, over either
//! transport.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokio::task::JoinSet;
use tunnel_agent::config::{Config, RawConfig as AgentRawConfig, TransportChoice};
use tunnel_tests::checks::get_ok;
use tunnel_tests::env::Agent;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{Listener, ScratchDir, Server, ServerSetup, Signal};
use tunnel_tests::targets::Exporter;

use crate::abuse::report_figure;

tests_of! {
    // An idle agent notices the restart at its next keep-alive (5 s +- 20 %), by a stateless reset.
    fn two_hundred_agents_are_back_after_a_restart_over_quic() =
        restarts(TransportChoice::Quic, Duration::from_secs(11));
    fn two_hundred_agents_are_back_after_a_restart_over_h2() =
        restarts(TransportChoice::H2, Duration::from_secs(5));
}

async fn restarts(transport: TransportChoice, bound: Duration) -> Result<()> {
    let scratch = ScratchDir::new()?;
    let exporter = Exporter::start("all").await?;
    let port = exporter.addr().port().to_string();
    let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
    let ports = ["--http-proxy-ports", &port, "--proxy-port-listen", "off"];
    let setup = setup.args(&ports).args(&["--drain-timeout", "1s"]);
    let mut server = setup.start().await?;
    let agents = start_agents(&server, scratch.path(), transport).await?;
    eventually("all agents serve", Duration::from_secs(60), async || {
        all_serve(&server, &port).await
    })
    .await;
    for signal in [Signal::Term, Signal::Kill] {
        let again = server.setup_for_restart();
        server.process().signal(signal)?;
        server.process().end(Duration::from_secs(10)).await?;
        server = again.start().await?;
        let back = Instant::now();
        eventually("all agents serve again", bound, async || {
            all_serve(&server, &port).await
        })
        .await;
        let took = back.elapsed();
        ensure!(took <= scaled(bound), "{signal:?}: {took:?}");
        let case = format!("{COUNT} agents over {transport:?}, {signal:?}");
        report_figure(&format!("{case}: all serving after {took:?}"));
    }
    drop(agents);
    Ok(())
}

async fn start_agents(
    server: &Server,
    dir: &Path,
    transport: TransportChoice,
) -> Result<Vec<Agent>> {
    let mut agents = Vec::new();
    for index in 0..COUNT {
        let node = node(index);
        let token = server.token(&node, None).await?;
        let settings = AgentRawConfig {
            server: vec![server.address(Listener::Agents).to_string()],
            node_ip: Some("127.0.0.1".into()),
            data_dir: Some(dir.join(&node)),
            node_name: Some(node),
            token: Some(token.as_str().into()),
            meta_listen: Some("off".into()),
            ..AgentRawConfig::default()
        };
        let mut config = Config::check(settings)?;
        config.transport = transport;
        agents.push(Agent::start(config).await?);
    }
    Ok(agents)
}

/// Sends one request to each node, [`AT_ONCE`] at a time. An error names the first node that fails.
async fn all_serve(server: &Server, port: &str) -> Result<()> {
    let endpoint = server.address(Listener::Http);
    let mut asked = JoinSet::new();
    for worker in 0..AT_ONCE {
        let port = port.to_owned();
        asked.spawn(async move {
            for index in (worker..COUNT).step_by(AT_ONCE) {
                let node = node(index);
                let asked = get_ok(endpoint, &format!("{node}:{port}"), "/metrics").await;
                asked.context(node)?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(worker) = asked.join_next().await {
        worker??;
    }
    Ok(())
}

fn node(index: usize) -> String {
    format!("worker-{index}")
}

const COUNT: usize = 200;
const AT_ONCE: usize = 8;
