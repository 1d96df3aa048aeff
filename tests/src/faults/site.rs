//! A server and an agent in this process with a link between them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::Instant;
use tunnel_proto::transport::TransportKind;
use tunnel_proto::wire::name::SessionId;
use tunnel_server::config::RawTcpService;
use tunnel_server::routing::registry::AgentSession;

use super::node_client::{NODE, NodeClient, Targets};
use super::runs::Run;
use super::watch::{Measured, ensure_soon, until};
use crate::env::{Agent, TestEnv};
use crate::link::{Impairment, Link, TrafficClass};
use crate::metrics::metric;

/// A tunnel with a bad network in the middle.
#[derive(Debug)]
pub struct Site {
    pub link: Link,
    pub node_client: NodeClient,
    /// Declared before the environment for the drop order: the agent ends before the server.
    agent: Option<Agent>,
    pub env: TestEnv,
    run: Run,
}

impl Site {
    /// Creates everything except the agent.
    pub async fn prepare(run: Run) -> Result<Self> {
        let targets = Targets::start().await?;
        let port = targets.raw.local_addr()?.port();
        let env = TestEnv::start_with(|settings| {
            settings.services = vec![RawTcpService {
                name: "raw".into(),
                listen: "127.0.0.1:0".into(),
                node: NODE.into(),
                target: port.to_string(),
                protocol: None,
            }];
            settings.limits = TestEnv::limits(&run.limits.server_limits());
        })
        .await?;
        let endpoint = env.bound().http.context("no HTTP listener")?;
        let (_, service) = env.bound().services.first().context("no service")?;
        let node_client = NodeClient::new(endpoint, *service, targets, run.seed);
        Ok(Self {
            link: Link::start(env.bound().agents, run.seed)?,
            node_client,
            agent: None,
            env,
            run,
        })
    }

    /// Starts everything and waits until requests are served.
    pub async fn up(run: Run) -> Result<Self> {
        Self::up_over(run, Impairment::default()).await
    }

    /// Like [`Site::up`], over the given path from the start, since BBR uses the shortest round
    /// trip of the last 10 s.
    pub async fn up_over(run: Run, path: Impairment) -> Result<Self> {
        let mut site = Self::prepare(run).await?;
        site.link.set(TrafficClass::ALL, path);
        site.start_agent().await?;
        site.ready().await?;
        Ok(site)
    }

    /// Waits until requests are served, and until those that proved it have ended at both ends.
    pub async fn ready(&self) -> Result<()> {
        self.node_client.requester.ready().await?;
        let is_idle = async || {
            let sessions = self.sessions();
            let mut stats = sessions.iter().map(|session| session.session.stats());
            let agents = self.agent_metric("tunnel_agent_streams_open").await;
            stats.all(|stats| stats.streams == 0) && agents.is_ok_and(|open| open == 0)
        };
        ensure_soon("streams are open", IDLE, is_idle).await
    }

    /// Starts the agent, which dials the link.
    pub async fn start_agent(&mut self) -> Result<()> {
        self.start_agent_towards(self.link.addr()).await
    }

    /// Starts the agent with another address of the server.
    pub async fn start_agent_towards(&mut self, server: SocketAddr) -> Result<()> {
        let config = self.env.agent_config_with(NODE, |settings| {
            settings.server = vec![server.to_string()];
            settings.transport = Some(self.run.transport_mode.setting().into());
            settings.limits = TestEnv::agent_limits(self.run.limits.agent_limits());
            settings.meta_listen = Some("127.0.0.1:0".into());
        })?;
        self.agent = Some(Agent::start(config).await?);
        Ok(())
    }

    /// Returns the server's sessions with the agent, newest first.
    fn sessions(&self) -> Vec<Arc<AgentSession>> {
        NODE.parse()
            .map(|node| self.env.registry().of_node(&node))
            .unwrap_or_default()
    }

    /// Returns the IDs of the server's sessions with the agent, newest first.
    pub fn ids(&self) -> Vec<SessionId> {
        self.sessions().iter().map(|session| session.id).collect()
    }

    /// Returns the transport of the session that new streams use.
    pub fn transport(&self) -> Option<TransportKind> {
        let sessions = self.sessions();
        let active = sessions.iter().find(|session| session.is_routable())?;
        Some(active.session.transport())
    }

    /// Waits until new streams use that transport.
    pub async fn moved_to(
        &self,
        transport: TransportKind,
        since: Instant,
        give_up: Duration,
    ) -> Measured {
        until(since, give_up, async || self.transport() == Some(transport)).await
    }

    /// Waits until the server has no session that it does not suspect.
    pub async fn server_suspects(&self, since: Instant, give_up: Duration) -> Measured {
        let suspects = async || !self.sessions().iter().any(|session| session.is_routable());
        until(since, give_up, suspects).await
    }

    /// Waits until the server has closed a session.
    pub async fn server_lost(&self, id: SessionId, since: Instant, give_up: Duration) -> Measured {
        until(since, give_up, async || !self.ids().contains(&id)).await
    }

    /// Waits until the agent reports that it suspects its server or has no session.
    pub async fn agent_suspects(&self, since: Instant, give_up: Duration) -> Measured {
        let suspects = async || {
            let suspect = self.agent_metric("tunnel_agent_sessions_suspect").await;
            suspect.is_ok_and(|count| count > 0) || self.agent_is_alone().await
        };
        until(since, give_up, suspects).await
    }

    /// Waits until the agent has no session.
    pub async fn agent_lost(&self, since: Instant, give_up: Duration) -> Measured {
        until(since, give_up, async || self.agent_is_alone().await).await
    }

    async fn agent_is_alone(&self) -> bool {
        let connected = self.agent_metric("tunnel_agent_sessions_connected").await;
        connected.is_ok_and(|count| count == 0)
    }

    async fn agent_metric(&self, name: &str) -> Result<u64> {
        let meta = self.agent.as_ref().and_then(Agent::meta);
        metric(meta.context("no agent")?, name).await
    }
}

/// Time limit for the close of a request's connections.
const IDLE: Duration = Duration::from_secs(5);
