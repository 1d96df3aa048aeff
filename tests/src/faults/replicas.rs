//! The servers of a run as processes, and the links on which agents reach them.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use super::runs::Run;
use super::watch::ensure_soon;
use crate::link::{Impairment, Link, TrafficClass};
use crate::process::{AgentSetup, Listener, Peering, ScratchDir, Server, Signal};

/// The servers of a run, and how agents reach them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub servers: usize,
    /// Number of servers that an agent holds a session with.
    pub sessions: usize,
    pub paths: AgentPaths,
}

/// The addresses that servers advertise to agents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentPaths {
    /// Each server has a link of its own.
    Own,
    /// All servers have one link, as behind a load balancer. [`Link::lead_to`] selects the server.
    Shared,
}

/// Servers that are connected to each other, with the links on which agents reach them.
#[derive(Debug)]
pub struct Replicas {
    pub servers: Vec<Server>,
    /// A link for each server, or one for all of them.
    pub links: Vec<Link>,
    /// The TCP service of each server.
    pub services: Vec<SocketAddr>,
    run: Run,
    scratch: ScratchDir,
}

impl Layout {
    /// One server.
    pub const SINGLE: Self = Self {
        servers: 1,
        sessions: 1,
        paths: AgentPaths::Own,
    };

    /// Returns three servers, of which an agent holds sessions with so many.
    pub const fn three(sessions: usize) -> Self {
        Self {
            servers: 3,
            sessions,
            paths: AgentPaths::Own,
        }
    }

    /// Changes the addresses that servers advertise.
    pub const fn with_paths(self, paths: AgentPaths) -> Self {
        Self { paths, ..self }
    }
}

impl Replicas {
    /// Starts servers that are connected to each other. Each has a TCP service for `node`, whose
    /// target is the port of the same number in `targets`.
    pub async fn start(run: Run, layout: Layout, node: &str, targets: &[u16]) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let peering = Peering::new(layout.servers, scratch.path());
        let links = match layout.paths {
            AgentPaths::Own => layout.servers,
            AgentPaths::Shared => 1,
        };
        let links = (0..links)
            .map(|number| Link::start(peering.address(number, Listener::Agents), run.seed))
            .collect::<io::Result<Vec<_>>>()?;
        let mut replicas = Self {
            servers: Vec::new(),
            links,
            services: Vec::new(),
            run,
            scratch,
        };
        let (delay, timeout) = run.limits.pick(("5s", "30s"), ("1s", "8s"));
        for (number, target) in (0..layout.servers).zip(targets) {
            let mut service = peering.address(number, Listener::Http);
            service.set_port(SERVICE_PORT);
            let limits = limits(&run.limits.server_limits());
            let yaml = format!(
                "{limits}services:\n  - {{name: raw, listen: \"{service}\", node: {node}, target: \"{target}\"}}\n"
            );
            let name = format!("{}.yaml", Peering::name(number));
            let file = replicas.scratch.file(&name, yaml)?;
            let advertised = replicas.link(number)?.addr().to_string();
            let setup = (peering.setup(number)?)
                .args(&["--http-proxy-ports", "1024-65535"])
                .args(&["--compat", "yurt-tunnel"])
                .args(&["--proxy-port-listen", "off", "--advertise", &advertised])
                .args(&["--drain-delay", delay, "--drain-timeout", timeout])
                .args(&["--config", &file.to_string_lossy()]);
            replicas.servers.push(setup.start().await?);
            replicas.services.push(service);
        }
        Peering::wait_until_connected(&replicas.servers).await;
        Ok(replicas)
    }

    /// Returns the setup of an agent that may dial all servers, and `first` before the others. Every
    /// server creates a token, so that each of them knows the node.
    pub async fn agent_setup(&self, node: &str, first: usize) -> Result<AgentSetup> {
        let mut token = String::new();
        for (number, server) in self.servers.iter().enumerate() {
            let created = server.token(node, None).await?;
            if number == first {
                token = created;
            }
        }
        let file = self
            .scratch
            .file("agent.yaml", limits(self.run.limits.agent_limits()))?;
        let folder = self.folder(&format!("agent-{node}"));
        let setup = AgentSetup::on_loopback(node, self.link(first)?.addr(), &folder)
            .args(&["--token", &token])
            .args(&["--config", &file.to_string_lossy()]);
        let others = self.links.iter().enumerate();
        let others = others.filter(|(number, _)| *number != first && self.links.len() > 1);
        Ok(others.fold(setup, |setup, (_, link)| {
            setup.args(&["--server", &link.addr().to_string()])
        }))
    }

    pub fn link(&self, server: usize) -> Result<&Link> {
        let own = self.links.get(server).or_else(|| self.links.first());
        own.context("no link")
    }

    /// Replaces the impairment of all links.
    pub fn set(&self, class: TrafficClass, impairment: &Impairment) {
        for link in &self.links {
            link.set(class, impairment.clone());
        }
    }

    /// Returns the number of sessions that a server has.
    pub async fn sessions(&self, server: usize) -> Result<u64> {
        self.servers[server].metric("tunnel_server_agents").await
    }

    /// Returns the servers that have sessions.
    pub async fn holders(&self) -> Result<Vec<usize>> {
        let mut holders = Vec::new();
        for server in 0..self.servers.len() {
            if self.sessions(server).await? > 0 {
                holders.push(server);
            }
        }
        Ok(holders)
    }

    /// Waits until the servers have so many sessions together.
    pub async fn wait_for_sessions(&self, sessions: u64) -> Result<()> {
        let what = format!("the servers do not have {sessions} sessions");
        ensure_soon(&what, SESSIONS, async || {
            let mut sum = 0;
            for server in 0..self.servers.len() {
                sum += self.sessions(server).await.unwrap_or(0);
            }
            sum == sessions
        })
        .await
    }

    pub async fn kill(&mut self, server: usize) -> Result<()> {
        let process = self.servers[server].process();
        process.signal(Signal::Kill)?;
        process.end(END).await.map(drop)
    }

    /// Starts a server that has ended, with its data and its addresses.
    pub async fn restart(&mut self, server: usize) -> Result<()> {
        let setup = self.servers[server].setup_for_restart();
        self.servers[server] = setup.start().await?;
        Ok(())
    }

    /// Returns the path of a file or folder of this run.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }
}

/// Formats the limits as the section of a file.
pub fn limits(yaml: &str) -> String {
    let indented: String = yaml.lines().map(|line| format!("  {line}\n")).collect();
    format!("limits:\n{indented}")
}

/// Port of the TCP service, on the address of its server.
const SERVICE_PORT: u16 = 21301;
/// Time limit for agents to have all of their sessions.
const SESSIONS: Duration = Duration::from_secs(30);
/// Time limit for the end of a killed process.
const END: Duration = Duration::from_secs(5);
