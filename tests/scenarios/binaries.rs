//! Tests of the two binaries as processes: subcommands and exit codes, kills and restarts, and
//! shutdown without loss.

mod access_log;
mod bulk;
mod costs;
mod crowds;
mod doctor;
mod drain;
mod exhaustion;
mod handover;
mod hanging;
mod join;
mod killed_writes;
mod large;
mod logs;
mod many;
mod memory;
mod metrics;
mod planted;
mod raw_quic;
mod restart;
mod subcommands;
mod threads;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tokio::time::timeout;
use tunnel_tests::client::RawRequest;
use tunnel_tests::eventually::{eventually, scaled};
use tunnel_tests::process::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};
use tunnel_tests::targets::Exporter;

pub(crate) use memory::kib;

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
        Self::start_with_env(&[], server_arguments, agent_arguments).await
    }

    /// Like [`Stack::start`], with environment variables of the server.
    async fn start_with_env(
        environment: &[(&str, &str)],
        server_arguments: &[&str],
        agent_arguments: &[&str],
    ) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let exporter = Exporter::start(NODE).await?;
        let port = exporter.addr().port().to_string();
        // The exporter occupies the port on this host, so the server cannot listen on it.
        let ports = ["--http-proxy-ports", &port, "--proxy-port-listen", "off"];
        let setup = ServerSetup::on_loopback(&scratch.path().join("server"));
        let setup = setup.audited().args(&ports).args(server_arguments);
        let variables = environment.iter();
        let setup = variables.fold(setup, |setup, (name, value)| setup.env(name, value));
        let server = setup.start().await?;
        let folder = scratch.path().join("agent");
        let agent_setup = server.agent_setup(NODE, &folder).await?;
        let agent_setup = agent_setup.audited().args(agent_arguments);
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

    fn http(&self) -> SocketAddr {
        self.server.address(Listener::Http)
    }

    fn get(&self, path: &str) -> RawRequest {
        RawRequest::get(&self.host(), path)
    }

    async fn wait_for_traffic(&self, what: &str, patience: Duration) {
        let host = self.host();
        eventually(what, patience, async || {
            let asked = self.server.get_ok(&host, "/metrics");
            let reply = timeout(scaled(ATTEMPT), asked).await.context("no answer")?;
            reply.map_err(|error| anyhow!("{error}\n{}", self.agent))
        })
        .await;
    }
}

/// Enrolls an agent of `node` and stops it. Its credential stays in `folder`. The agents of
/// `others` are connected meanwhile.
async fn enroll(server: &Server, node: &str, folder: &Path, others: &[&str]) -> Result<()> {
    let agent = server.agent_setup(node, folder).await?.start()?;
    server
        .wait_until_connected(&[others, &[node]].concat())
        .await;
    agent.stop(CONNECT).await?;
    server.wait_until_connected(others).await;
    Ok(())
}

const NODE: &str = "worker-1";

/// Time limit of one request while parts of the tunnel are down.
const ATTEMPT: Duration = Duration::from_millis(500);

/// Time limit for enrollment, and for the longest pause of an agent between two attempts at the
/// beginning of an outage.
const CONNECT: Duration = Duration::from_secs(15);
