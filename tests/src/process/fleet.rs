//! The two binaries on a [`Topology`].

use std::net::SocketAddr;

use anyhow::{Context, Result};

use super::culvert::STOP;
use super::{AgentSetup, Listener, Process, ScratchDir, Server, ServerSetup};
use crate::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, NODES, Topology};

/// A server in the cloud and an agent at each edge, all connected. The only address of each node is
/// the one in its join token.
#[derive(Debug)]
pub struct Fleet {
    agents: Vec<Option<Process>>,
    server: Server,
    _scratch: ScratchDir,
}

impl Fleet {
    /// Starts the server and the agents; `server_arguments` are further arguments of the server's
    /// `run`.
    ///
    /// # Errors
    /// Returns an error with the log of a process that does not start.
    pub async fn start(sites: &Topology, server_arguments: &[&str]) -> Result<Self> {
        let scratch = ScratchDir::new().context("folder for the parts")?;
        let setup = ServerSetup::new(&scratch.path().join("server"), Some(sites.cloud()));
        let server = setup.args(server_arguments).start().await?;
        let agents_port = server.address(Listener::Agents).port();
        let endpoint = SocketAddr::new(CLOUD_ADDRESS.into(), agents_port);
        let mut agents = Vec::new();
        for edge in sites.edges() {
            let node = edge.node_name();
            let token = server.token(node, Some(EDGE_ADDRESS.into())).await?;
            let folder = scratch.path().join(node);
            let agent = AgentSetup::new(node, endpoint, &folder, Some(edge.node()));
            agents.push(Some(agent.args(&["--token", &token]).start()?));
        }
        server.wait_until_connected(&NODES).await;
        Ok(Self {
            agents,
            server,
            _scratch: scratch,
        })
    }

    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Stops the agent of one edge, given by its index in [`NODES`], and waits until the server has
    /// noticed.
    pub async fn stop_agent(&mut self, edge: usize) -> Result<()> {
        let agent = self.agents.get_mut(edge).and_then(Option::take);
        agent.context("no such agent")?.stop(STOP).await?;
        let others = self.agents.iter().zip(NODES);
        let others = others.filter_map(|(agent, node)| agent.as_ref().map(|_| node));
        let others: Vec<_> = others.collect();
        self.server.wait_until_connected(&others).await;
        Ok(())
    }
}
