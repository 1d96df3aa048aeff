//! Tests of the two binaries as processes: subcommands and exit codes, kills and restarts, and
//! shutdown without loss.

mod bulk;
mod crowds;
mod drain;
mod exhaustion;
mod logs;
mod many;
mod memory;
mod raw_quic;
mod restart;
mod subcommands;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::time::timeout;
use tunnel_tests::client::{RawRequest, request};
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::targets::Exporter;

/// A server and one agent on loopback, with an exporter behind the agent.
struct Stack {
    agent_setup: AgentSetup,
    agent: Process,
    server: Server,
    exporter: Exporter,
    _scratch: ScratchDir,
}

impl Stack {
    /// Starts the server, the agent and the exporter, and waits for the first successful request.
    /// The arguments are added to those of `run`.
    async fn start(server_arguments: &[&str], agent_arguments: &[&str]) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let exporter = Exporter::start(NODE).await?;
        let port = exporter.addr().port().to_string();
        // The exporter occupies the port on this host, so the server cannot listen on it.
        let ports = ["--http-proxy-ports", &port, "--proxy-port-listen", "off"];
        let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
        let server = setup.args(&ports).args(server_arguments).start().await?;
        let token = server.token(NODE, None).await?;
        let agents = server.address(Listener::Agents);
        let agent_setup = AgentSetup::on_loopback(NODE, agents, &scratch.path().join("agent"));
        let agent_setup = agent_setup.args(&["--token", &token]).args(agent_arguments);
        let agent = agent_setup.start()?;
        let stack = Self {
            agent_setup,
            agent,
            server,
            exporter,
            _scratch: scratch,
        };
        stack.wait_for_traffic("first traffic", CONNECT).await;
        Ok(stack)
    }

    /// Returns the Host value of the exporter behind the agent.
    fn host(&self) -> String {
        format!("{NODE}:{}", self.exporter.addr().port())
    }

    fn get(&self, path: &str) -> RawRequest {
        RawRequest::get(&self.host(), path)
    }

    async fn wait_for_traffic(&self, what: &str, patience: Duration) {
        let endpoint = self.server.address(Listener::Http);
        eventually(what, patience, async || {
            let reply = timeout(scaled(ATTEMPT), request(endpoint, &self.get("/metrics"))).await;
            let reply = reply.context("no answer")??;
            ensure!(
                reply.status == 200,
                "{}: {}\n{}",
                reply.status,
                reply.text(),
                self.agent
            );
            Ok(())
        })
        .await;
    }
}

const NODE: &str = "worker-1";

/// Time limit of one request while parts of the tunnel are down.
const ATTEMPT: Duration = Duration::from_millis(500);

/// Time limit for enrollment, and for the longest pause of an agent between two attempts at the
/// beginning of an outage.
const CONNECT: Duration = Duration::from_secs(15);
