//! The two binaries as processes, with a link between them.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::time::sleep;

use super::clocks::Clocks;
use super::node_client::{NODE, NodeClient, Targets};
use super::runs::Run;
use super::watch::node_status;
use crate::link::Link;
use crate::metrics::metric;
use crate::process::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};

/// A tunnel of two processes.
#[derive(Debug)]
pub struct Stack {
    pub node_client: NodeClient,
    pub agent: Process,
    agent_meta: SocketAddr,
    pub server: Server,
    pub link: Link,
    scratch: ScratchDir,
}

/// The resource usage of a process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessUsage {
    pub descriptors: u64,
    pub threads: u64,
    /// Resident memory in KiB.
    pub memory_kib: u64,
}

impl Stack {
    /// Starts both processes and waits until requests are served.
    pub async fn up(run: Run) -> Result<Self> {
        let (seed, clocks) = (run.seed, run.limits);
        let scratch = ScratchDir::new()?;
        let targets = Targets::start().await?;
        let exporter = targets.exporter.addr().port().to_string();
        let yaml = server_yaml(clocks, targets.raw.local_addr()?.port());
        let server_file = scratch.file("server.yaml", yaml)?;
        let agent_file = scratch.file("agent.yaml", limits(clocks.agent_limits()))?;
        let setup = ServerSetup::on_loopback(&scratch.path().join("server"))
            .args(&["--http-proxy-ports", &exporter])
            .args(&["--proxy-port-listen", "off"])
            .args(&["--config", &server_file.to_string_lossy()]);
        let mut server = setup.start().await?;
        let opened = server
            .process()
            .wait_for_line("service", START, opened_service);
        let service = opened.await?;
        let token = server.token(NODE, None).await?;
        let link = Link::start(server.address(Listener::Agents), seed)?;
        let setup = AgentSetup::on_loopback(NODE, link.addr(), &scratch.path().join("agent"));
        let mut agent = setup
            .args(&[
                "--token",
                &token,
                "--transport",
                run.transport_mode.setting(),
            ])
            .args(&["--config", &agent_file.to_string_lossy()])
            .start()?;
        let agent_meta = agent.wait_for_line("meta", START, |line| Listener::Meta.opened(line));
        let agent_meta = agent_meta.await?;
        let node_client = NodeClient::new(server.address(Listener::Http), service, targets, seed);
        node_client.requester.ready().await?;
        Ok(Self {
            node_client,
            agent,
            agent_meta,
            server,
            link,
            scratch,
        })
    }

    /// Returns the node's state in `/nodes`; `absent` without a session.
    pub async fn state(&self) -> Result<String> {
        let node = node_status(self.server.address(Listener::Meta), NODE).await?;
        Ok(node["state"].as_str().unwrap_or("absent").to_owned())
    }

    pub async fn server_metric(&self, name: &str) -> Result<u64> {
        metric(self.server.address(Listener::Meta), name).await
    }

    pub async fn agent_metric(&self, name: &str) -> Result<u64> {
        metric(self.agent_meta, name).await
    }

    /// Returns the file of the known nodes.
    pub fn known_nodes(&self) -> PathBuf {
        self.scratch.path().join("server/nodes.json")
    }
}

impl ProcessUsage {
    /// Returns the minimum of several samples, since the resources of a request are released a
    /// moment later.
    pub async fn sample_min(process: u32) -> Result<Self> {
        let mut least = Self::now(process)?;
        for _ in 0..LOOKS {
            sleep(LOOK_EVERY).await;
            let now = Self::now(process)?;
            least = Self {
                descriptors: least.descriptors.min(now.descriptors),
                threads: least.threads.min(now.threads),
                memory_kib: least.memory_kib.min(now.memory_kib),
            };
        }
        Ok(least)
    }

    fn now(process: u32) -> Result<Self> {
        let folder = PathBuf::from(format!("/proc/{process}"));
        let status = fs::read_to_string(folder.join("status")).context("/proc/PID/status")?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number
                .and_then(|number| number.parse().ok())
                .with_context(|| format!("{name} in /proc/{process}/status"))
        };
        let descriptors = fs::read_dir(folder.join("fd")).context("/proc/PID/fd")?;
        Ok(Self {
            descriptors: descriptors.count() as u64,
            threads: field("Threads:")?,
            memory_kib: field("VmRSS:")?,
        })
    }
}

fn server_yaml(clocks: Clocks, target: u16) -> String {
    let limits = limits(clocks.server_limits());
    format!(
        "{limits}services:\n  - {{name: raw, listen: \"127.0.0.1:0\", node: {NODE}, target: \"{target}\"}}\n"
    )
}

/// Formats the limits as the section of a file.
fn limits(yaml: &str) -> String {
    let indented: String = yaml.lines().map(|line| format!("  {line}\n")).collect();
    format!("limits:\n{indented}")
}

fn opened_service(line: &str) -> Option<SocketAddr> {
    let line: Value = serde_json::from_str(line).ok()?;
    let fields = line.get("fields").unwrap_or(&line);
    let is_it = fields["message"] == "listening" && fields["listener"] == "service";
    fields["address"].as_str().filter(|_| is_it)?.parse().ok()
}

/// Time limit for a start. A server generates its keys at its first start.
const START: Duration = Duration::from_secs(15);
/// All samples together take less than the shortest time for which a link is up.
const LOOKS: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_millis(10);
