//! A server and agents in one process, on free loopback ports, for scenarios that need no process of their own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls::RootCertStore;
use tokio_util::task::AbortOnDropHandle;
use tunnel_agent::config::{
    Config as AgentConfig, RawLimits as AgentRawLimits, ServerAddress, Settings, TokenSource,
};
use tunnel_proto::process::shutdown::Shutdown;
use tunnel_proto::tls;
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::NodeName;
use tunnel_server::app::BoundAddrs;
use tunnel_server::ca::LocalCa;
use tunnel_server::ca::revocation::Revocations;
use tunnel_server::ca::tokens::TokenStore;
use tunnel_server::config::{Config as ServerConfig, RawConfig, RawLimits};
use tunnel_server::routing::known_nodes::KnownNodes;
use tunnel_server::routing::registry::Registry;

use crate::client::{ClientTls, Endpoint};
use crate::eventually::{eventually, scaled};
use crate::process::ScratchDir;

/// Patience for things that take milliseconds on an idle machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long tokens of a world are good for.
const TOKEN_TTL: Duration = Duration::from_secs(3600);

/// A server with its data in a scratch folder.
#[derive(Debug)]
pub struct TestEnv {
    scratch: ScratchDir,
    server: Option<Server>,
    config: ServerConfig,
}

/// The running server's parts that tests look at.
#[derive(Debug)]
struct Server {
    bound: BoundAddrs,
    shutdown: Shutdown,
    ca: Arc<LocalCa>,
    tokens: Arc<TokenStore>,
    nodes: Arc<KnownNodes>,
    registry: Arc<Registry>,
    revocations: Arc<Revocations>,
    running: AbortOnDropHandle<()>,
}

/// A running agent. Dropping it is a crash: nothing is said to the server.
#[derive(Debug)]
pub struct Agent {
    shutdown: Shutdown,
    meta: Option<SocketAddr>,
    running: AbortOnDropHandle<Result<()>>,
}

impl TestEnv {
    /// A server whose doors allow every port from 1024 up.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start() -> Result<Self> {
        Self::start_with(|_| {}).await
    }

    /// As [`TestEnv::start`], with changed settings.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_with(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let mut env = Self::prepare(change)?;
        env.start_server().await?;
        Ok(env)
    }

    fn prepare(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let free = || Some("127.0.0.1:0".into());
        let mut settings = RawConfig {
            data_dir: Some(scratch.path().join("server").to_string_lossy().into_owned()),
            agent_listen: free(),
            https_listen: free(),
            http_listen: free(),
            meta_listen: free(),
            http_proxy_ports: Some("1024-65535".into()),
            proxy_port_listen: Some("off".into()),
            kubernetes: Some("off".into()),
            log_format: Some("text".into()),
            ..RawConfig::default()
        };
        change(&mut settings);
        let config = ServerConfig::try_from(settings)?;
        Ok(Self {
            scratch,
            server: None,
            config,
        })
    }

    /// Limits from YAML, for [`TestEnv::start_with`].
    ///
    /// # Panics
    /// When the text is no limits.
    #[must_use]
    pub fn limits(yaml: &str) -> Option<RawLimits> {
        #[expect(clippy::expect_used, reason = "a literal of the test")]
        Some(serde_saphyr::from_str(yaml).expect("limits"))
    }

    /// An agent's limits from YAML, for [`TestEnv::agent_config_with`].
    ///
    /// # Panics
    /// When the text is no limits.
    #[must_use]
    pub fn agent_limits(yaml: &str) -> Option<AgentRawLimits> {
        #[expect(clippy::expect_used, reason = "a literal of the test")]
        Some(serde_saphyr::from_str(yaml).expect("limits"))
    }

    async fn start_server(&mut self) -> Result<()> {
        let shutdown = Shutdown::new();
        let starting = tunnel_server::app::App::start(self.config.clone(), shutdown.clone());
        let app = Box::pin(starting).await?;
        let (bound, ca, tokens) = (app.bound().clone(), app.ca().clone(), app.tokens().clone());
        let (nodes, registry) = (app.nodes().clone(), app.registry().clone());
        let revocations = app.revocations().clone();
        let running = spawn(app.run());
        self.server = Some(Server {
            bound,
            shutdown,
            ca,
            tokens,
            nodes,
            registry,
            revocations,
            running,
        });
        Ok(())
    }

    fn server(&self) -> &Server {
        #[expect(clippy::expect_used, reason = "absent only inside restart")]
        self.server.as_ref().expect("server")
    }

    /// Where everything listens.
    #[must_use]
    pub fn bound(&self) -> &BoundAddrs {
        &self.server().bound
    }

    /// The plain door.
    #[must_use]
    pub fn http(&self) -> Endpoint {
        #[expect(clippy::expect_used, reason = "worlds have a plain door")]
        Endpoint::plain(self.bound().http.expect("plain door"))
    }

    /// The TLS door as seen by a caller that knows the CA and addresses `node`.
    ///
    /// # Errors
    /// When the CA cannot be used.
    pub fn https(&self, node: &str) -> Result<Endpoint> {
        let address = self.bound().https.context("no TLS door")?;
        Ok(Endpoint::tls(
            address,
            ClientTls::verifying(node, RootCertStore::clone(&*self.roots()?), None)?,
        ))
    }

    /// The CA as trust anchor.
    ///
    /// # Errors
    /// When the CA cannot be used.
    pub fn roots(&self) -> Result<Arc<RootCertStore>> {
        Ok(tls::roots([self.server().ca.root().clone()])?)
    }

    /// Join tokens.
    #[must_use]
    pub fn tokens(&self) -> &TokenStore {
        &self.server().tokens
    }

    /// The CA.
    #[must_use]
    pub fn ca(&self) -> &LocalCa {
        &self.server().ca
    }

    /// Known nodes.
    #[must_use]
    pub fn nodes(&self) -> &KnownNodes {
        &self.server().nodes
    }

    /// Connected agents.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.server().registry
    }

    /// Revoked nodes.
    #[must_use]
    pub fn revocations(&self) -> &Revocations {
        &self.server().revocations
    }

    /// Asks the server to read its files again, as SIGHUP does.
    pub fn reload(&self) {
        self.server().shutdown.reload();
    }

    /// A folder for the test's own files; gone with the world.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.scratch.path()
    }

    /// A join token for a node with addresses.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn token(&self, node: &str, addresses: &[IpAddr]) -> Result<JoinToken> {
        let name: NodeName = node.parse()?;
        self.nodes().record(&name, addresses);
        Ok(self.tokens().create(
            &name,
            TOKEN_TTL,
            addresses.to_vec(),
            self.ca().spki_sha256(),
            std::time::SystemTime::now(),
        )?)
    }

    /// What an agent of this world needs, before it is started.
    ///
    /// # Errors
    /// The token cannot be made.
    pub fn agent_config(&self, node: &str) -> Result<AgentConfig> {
        self.agent_config_with(node, |_| {})
    }

    /// As [`TestEnv::agent_config`], with changed settings.
    ///
    /// # Errors
    /// The settings contradict each other, or the token cannot be made.
    pub fn agent_config_with(
        &self,
        node: &str,
        change: impl FnOnce(&mut Settings),
    ) -> Result<AgentConfig> {
        let mut settings = Settings {
            server: vec![self.bound().agents.to_string()],
            node_name: Some(node.into()),
            node_ip: Some(Ipv4Addr::LOCALHOST.to_string()),
            data_dir: Some(self.agent_dir(node)),
            meta_listen: Some("off".into()),
            log_format: Some("text".into()),
            ..Settings::default()
        };
        change(&mut settings);
        let mut config = AgentConfig::check(settings)?;
        config.token = Some(TokenSource::Inline(self.token(node, &[])?));
        Ok(config)
    }

    fn agent_dir(&self, node: &str) -> PathBuf {
        self.scratch.path().join(format!("agent-{node}"))
    }

    /// Starts an agent and waits until the server routes to it.
    ///
    /// # Errors
    /// It does not start.
    ///
    /// # Panics
    /// When it does not connect in time.
    pub async fn agent(&self, node: &str) -> Result<Agent> {
        self.agent_with(node, |_| {}).await
    }

    /// As [`TestEnv::agent`], with a changed configuration.
    ///
    /// # Errors
    /// It does not start.
    ///
    /// # Panics
    /// When it does not connect in time.
    pub async fn agent_with(
        &self,
        node: &str,
        change: impl FnOnce(&mut AgentConfig),
    ) -> Result<Agent> {
        let mut config = self.agent_config(node)?;
        change(&mut config);
        let agent = Agent::start(config).await?;
        self.connected(node).await;
        Ok(agent)
    }

    /// Waits until the server routes to the node.
    ///
    /// # Panics
    /// When it does not connect in time.
    pub async fn connected(&self, node: &str) {
        eventually(&format!("{node} connects"), WAIT_TIMEOUT, async || {
            let sessions = self.registry().of_node(&node.parse()?);
            anyhow::ensure!(
                sessions.iter().any(|session| !session.is_withdrawn()),
                "no session"
            );
            anyhow::Ok(())
        })
        .await;
    }

    /// Asks the server to drain, and waits until it has ended.
    ///
    /// # Errors
    /// It panicked.
    pub async fn stop_server(&mut self) -> Result<()> {
        if let Some(server) = self.server.take() {
            server.shutdown.drain().cancel();
            server.running.await?;
        }
        Ok(())
    }

    /// Begins the drain without waiting for its end.
    pub fn drain_server(&self) {
        self.server().shutdown.drain().cancel();
    }

    /// Starts the server again with its data and its port for agents. The doors may move: another test may have taken their
    /// ports meanwhile.
    ///
    /// # Errors
    /// It does not start.
    pub async fn restart_server(&mut self) -> Result<()> {
        let bound = self.bound().clone();
        self.stop_server().await?;
        self.start_server_at(bound.agents).await
    }

    /// Starts a stopped server with its data and the given port for agents.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start_server_at(&mut self, agents: SocketAddr) -> Result<()> {
        self.config.agent_listen = vec![agents];
        // The endpoint's own task closes its socket a moment after the server has ended.
        let deadline = tokio::time::Instant::now() + scaled(WAIT_TIMEOUT);
        loop {
            match self.start_server().await {
                Err(error)
                    if is_address_in_use(&error) && tokio::time::Instant::now() < deadline =>
                {
                    tokio::task::yield_now().await;
                }
                started => return started,
            }
        }
    }
}

impl Agent {
    /// Starts an agent without waiting for its session.
    ///
    /// # Errors
    /// It does not start.
    pub async fn start(config: AgentConfig) -> Result<Self> {
        let app = tunnel_agent::app::App::start(config).await?;
        Ok(Self {
            shutdown: app.shutdown().clone(),
            meta: app.meta_addr(),
            running: spawn(app.run()),
        })
    }

    /// Its meta port, unless that is off.
    #[must_use]
    pub fn meta(&self) -> Option<SocketAddr> {
        self.meta
    }

    /// Asks it to read its files again, as SIGHUP does.
    pub fn reload(&self) {
        self.shutdown.reload();
    }

    /// Begins the drain without waiting for its end.
    pub fn drain(&self) {
        self.shutdown.drain().cancel();
    }

    /// Waits until the agent has ended.
    ///
    /// # Errors
    /// What ended it.
    pub async fn ended(self) -> Result<()> {
        self.running.await?
    }

    /// Drains and waits for the end.
    ///
    /// # Errors
    /// What ended it.
    pub async fn stop(self) -> Result<()> {
        self.drain();
        self.ended().await
    }
}

fn is_address_in_use(error: &anyhow::Error) -> bool {
    error.to_string().contains("Address already in use")
}

/// The address of an agent's server as its configuration has it.
#[must_use]
pub fn server_address(address: SocketAddr) -> ServerAddress {
    ServerAddress {
        host: address.ip().to_string(),
        port: address.port(),
    }
}

#[expect(clippy::disallowed_methods, reason = "owned by the returned handle")]
fn spawn<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> AbortOnDropHandle<T> {
    AbortOnDropHandle::new(tokio::spawn(future))
}
