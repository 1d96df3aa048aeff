//! The two binaries as processes: one server or several, an agent, and a link between them.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::sleep;

use super::node_client::{NODE, NodeClient, Targets};
use super::replicas::{AgentPaths, Layout, Replicas};
use super::runs::Run;
use super::watch::node_status;
use crate::metrics::metric;
use crate::process::{Listener, Process};

/// A tunnel of processes.
#[derive(Debug)]
pub struct Stack {
    /// The callers of each server.
    pub node_clients: Vec<NodeClient>,
    pub agent: Process,
    agent_meta: SocketAddr,
    pub replicas: Replicas,
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
    /// Starts one server and the agent, and waits until requests are served.
    pub async fn up(run: Run) -> Result<Self> {
        Self::up_with(run, Layout::SINGLE).await
    }

    /// Starts the servers of a layout and the agent, and waits until requests at each server are
    /// served.
    pub async fn up_with(run: Run, layout: Layout) -> Result<Self> {
        let mut targets = Vec::new();
        for _ in 0..layout.servers {
            targets.push(Targets::start().await?);
        }
        let ports = targets.iter().map(|targets| {
            let address = targets.raw.local_addr();
            address.map(|address| address.port())
        });
        let ports: Vec<_> = ports.collect::<io::Result<_>>()?;
        let replicas = Replicas::start(run, layout, NODE, &ports).await?;
        let sessions = layout.sessions.to_string();
        let setup = replicas.agent_setup(NODE, 0).await?;
        let mut agent = setup
            .args(&["--transport", run.transport_mode.setting()])
            .args(&["--replicas", &sessions])
            .start()?;
        let agent_meta = agent.wait_for_line("meta", START, |line| Listener::Meta.opened(line));
        let agent_meta = agent_meta.await?;
        let servers = replicas.servers.iter().zip(&replicas.services);
        let node_clients = servers.zip(targets).map(|((server, service), targets)| {
            NodeClient::new(server.address(Listener::Http), *service, targets, run.seed)
        });
        let stack = Self {
            node_clients: node_clients.collect(),
            agent,
            agent_meta,
            replicas,
        };
        // Behind one address an agent may find few servers.
        if layout.paths == AgentPaths::Own {
            let sessions = layout.sessions as u64;
            stack.replicas.wait_for_sessions(sessions).await?;
        }
        stack.ready().await?;
        Ok(stack)
    }

    /// Waits until requests at each server are served.
    pub async fn ready(&self) -> Result<()> {
        for node_client in &self.node_clients {
            node_client.requester.ready().await?;
        }
        Ok(())
    }

    /// Returns the node's state in `/nodes` of the first server; `absent` without a session.
    pub async fn state(&self) -> Result<String> {
        let meta = self.replicas.servers[0].address(Listener::Meta);
        let node = node_status(meta, NODE).await?;
        Ok(node["state"].as_str().unwrap_or("absent").to_owned())
    }

    /// Returns a metric of the first server.
    pub async fn server_metric(&self, name: &str) -> Result<u64> {
        self.replicas.servers[0].metric(name).await
    }

    pub async fn agent_metric(&self, name: &str) -> Result<u64> {
        metric(self.agent_meta, name).await
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

/// Time limit for a start. A server generates its keys at its first start.
const START: Duration = Duration::from_secs(15);
/// All samples together take less than the shortest time for which a link is up.
const LOOKS: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_millis(10);
