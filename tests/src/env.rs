//! A server and agents in one process, on free loopback ports, for scenarios that need no processes
//! of their own.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustls::RootCertStore;
use tokio_util::task::AbortOnDropHandle;
use tunnel_agent::config::{
    Config as AgentConfig, RawConfig as AgentRawConfig, RawLimits as AgentRawLimits, ServerAddress,
    TokenSource, TransportChoice,
};
use tunnel_ca::LocalCa;
use tunnel_ca::revocation::Revocations;
use tunnel_ca::tokens::TokenStore;
use tunnel_process::meta;
use tunnel_process::shutdown::Shutdown;
use tunnel_proto::tls;
use tunnel_proto::wire::enroll::JoinToken;
use tunnel_proto::wire::name::NodeName;
use tunnel_proto::wire::order::NodeOrder;
use tunnel_server::app::BoundAddrs;
use tunnel_server::config::{Config as ServerConfig, RawConfig, RawLimits, RawRule};
use tunnel_server::routing::registry::Registry;
use tunnel_store::known_nodes::KnownNodes;

use crate::audit_events::AuditEvents;
use crate::client::{ClientTls, Endpoint, HttpReply, RawRequest, request};
use crate::eventually::{eventually, scaled};
use crate::metrics::metric;
use crate::process::ScratchDir;
use crate::targets::Exporter;

/// Time limit for operations that take milliseconds on an idle machine.
pub const WAIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Validity of the environment's tokens.
const TOKEN_TTL: Duration = Duration::from_secs(3600);

/// A server with its data in a scratch directory.
#[derive(Debug)]
pub struct TestEnv {
    scratch: ScratchDir,
    server: Option<Server>,
    config: ServerConfig,
}

/// Components of the running server that tests inspect.
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

/// A server, a connected agent of `worker-1`, and an exporter that the agent reaches.
#[derive(Debug)]
pub struct NodeEnv {
    /// Declared first for the drop order: the agent ends before the server.
    pub agent: Agent,
    pub exporter: Exporter,
    /// The value of Host for the exporter.
    pub host: String,
    pub env: TestEnv,
}

/// A running agent. Dropping it acts as a crash: the server receives no message.
#[derive(Debug)]
pub struct Agent {
    shutdown: Shutdown,
    meta: Option<SocketAddr>,
    running: AbortOnDropHandle<Result<()>>,
}

impl TestEnv {
    /// Starts a server whose listeners allow everything at every port from 1024 up.
    pub async fn start() -> Result<Self> {
        Self::start_with(|_| {}).await
    }

    /// Like [`TestEnv::start`], with changed settings.
    pub async fn start_with(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let mut env = Self::prepare(change, None)?;
        env.start_server().await?;
        Ok(env)
    }

    /// Like [`TestEnv::start_with`], with a configuration file that has `yaml`. Lists of ports and rules
    /// are the file's alone.
    pub async fn start_with_file(yaml: &str, change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        let without_lists = |settings: &mut RawConfig| {
            (settings.http_proxy_ports, settings.rules) = (None, None);
            change(settings);
        };
        let mut env = Self::prepare(without_lists, Some(yaml))?;
        env.start_server().await?;
        Ok(env)
    }

    /// Like [`TestEnv::start_with_file`], with a file that exists.
    pub async fn start_at_file(path: &Path) -> Result<Self> {
        let without_lists = |settings: &mut RawConfig| {
            (settings.http_proxy_ports, settings.rules) = (None, None);
        };
        let mut env = Self::prepare(without_lists, None)?;
        env.config = tunnel_server::config::load_file(*env.config.raw.0, path)?;
        env.start_server().await?;
        Ok(env)
    }

    /// Returns the configuration file of [`TestEnv::start_with_file`].
    pub fn config_file(&self) -> PathBuf {
        self.scratch.path().join("server.yaml")
    }

    /// Returns the lines of `/readyz?verbose`.
    pub async fn conditions(&self) -> Result<Vec<String>> {
        let (_status, body) = meta::get(self.meta(), "/readyz?verbose").await?;
        Ok(body.lines().map(str::to_owned).collect())
    }

    fn prepare(change: impl FnOnce(&mut RawConfig), file: Option<&str>) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let free = || Some("127.0.0.1:0".into());
        let mut settings = RawConfig {
            data_dir: Some(scratch.path().join("server").to_string_lossy().into_owned()),
            agent_listen: free(),
            https_listen: free(),
            http_listen: free(),
            meta_listen: free(),
            http_proxy_ports: Some("1024-65535".into()),
            // Most tests are about bytes. Those about rules have their own.
            rules: Some(vec![RawRule {
                name: "everything".into(),
                ..RawRule::default()
            }]),
            proxy_port_listen: Some("off".into()),
            kubernetes: Some("off".into()),
            log_format: Some("text".into()),
            ..RawConfig::default()
        };
        change(&mut settings);
        let config = match file {
            Some(yaml) => {
                let path = scratch.path().join("server.yaml");
                std::fs::write(&path, yaml)?;
                tunnel_server::config::load_file(settings, &path)?
            }
            None => ServerConfig::try_from(settings)?,
        };
        Ok(Self {
            scratch,
            server: None,
            config,
        })
    }

    /// Parses limits from YAML, for [`TestEnv::start_with`].
    pub fn limits(yaml: &str) -> Option<RawLimits> {
        #[expect(clippy::expect_used, reason = "a literal of the test")]
        Some(serde_saphyr::from_str(yaml).expect("limits"))
    }

    /// Parses an agent's limits from YAML, for [`TestEnv::agent_config_with`].
    pub fn agent_limits(yaml: &str) -> Option<AgentRawLimits> {
        #[expect(clippy::expect_used, reason = "a literal of the test")]
        Some(serde_saphyr::from_str(yaml).expect("limits"))
    }

    async fn start_server(&mut self) -> Result<()> {
        AuditEvents::of_process()?;
        let shutdown = Shutdown::new();
        let starting = tunnel_server::app::App::start(self.config.clone(), shutdown.clone());
        let app = Box::pin(starting).await?;
        self.server = Some(Server {
            bound: app.bound().clone(),
            shutdown,
            ca: app.ca().clone(),
            tokens: app.tokens().clone(),
            nodes: app.nodes().clone(),
            registry: app.registry().clone(),
            revocations: app.revocations().clone(),
            running: spawn(app.run()),
        });
        Ok(())
    }

    fn server(&self) -> &Server {
        #[expect(clippy::expect_used, reason = "absent only inside restart")]
        self.server.as_ref().expect("server")
    }

    pub fn bound(&self) -> &BoundAddrs {
        &self.server().bound
    }

    pub fn meta(&self) -> SocketAddr {
        #[expect(clippy::expect_used, reason = "every server has a meta port")]
        self.bound().meta.expect("meta port")
    }

    pub fn http(&self) -> Endpoint {
        #[expect(clippy::expect_used, reason = "every server has an HTTP listener")]
        Endpoint::plain(self.bound().http.expect("HTTP listener"))
    }

    /// Returns the HTTPS listener for a caller that trusts the CA and addresses `node`.
    pub fn https(&self, node: &str) -> Result<Endpoint> {
        let address = self.bound().https.context("no HTTPS listener")?;
        let roots = RootCertStore::clone(&*self.roots()?);
        let tls = ClientTls::verifying(node, roots, None)?;
        Ok(Endpoint::tls(address, tls))
    }

    /// Returns the CA as trust anchor.
    pub fn roots(&self) -> Result<Arc<RootCertStore>> {
        Ok(tls::roots([self.server().ca.root().clone()])?)
    }

    pub fn tokens(&self) -> &TokenStore {
        &self.server().tokens
    }

    pub fn ca(&self) -> &LocalCa {
        &self.server().ca
    }

    pub fn nodes(&self) -> &KnownNodes {
        &self.server().nodes
    }

    /// Returns the connected agents.
    pub fn registry(&self) -> &Registry {
        &self.server().registry
    }

    /// Returns the revoked nodes.
    pub fn revocations(&self) -> &Revocations {
        &self.server().revocations
    }

    /// Returns a metric of the server, see [`metric`].
    pub async fn metric(&self, series: &str) -> Result<u64> {
        metric(self.meta(), series).await
    }

    /// Makes the server read its files again, as SIGHUP does.
    pub fn reload(&self) {
        self.server().shutdown.reload();
    }

    /// Returns a directory for the test's own files, which is deleted with the environment.
    pub fn path(&self) -> &Path {
        self.scratch.path()
    }

    pub fn token(&self, node: &str, addresses: &[IpAddr]) -> Result<JoinToken> {
        let name: NodeName = node.parse()?;
        self.nodes().record(&name, addresses);
        Ok(self.tokens().create(
            &NodeOrder::new(&name, self.revocations().of_node(&name)),
            TOKEN_TTL,
            addresses.to_vec(),
            self.ca().spki_sha256(),
            std::time::SystemTime::now(),
        )?)
    }

    /// Returns the configuration of an agent that is not started yet.
    pub fn agent_config(&self, node: &str) -> Result<AgentConfig> {
        self.agent_config_with(node, |_| {})
    }

    /// Like [`TestEnv::agent_config`], with changed settings.
    pub fn agent_config_with(
        &self,
        node: &str,
        change: impl FnOnce(&mut AgentRawConfig),
    ) -> Result<AgentConfig> {
        let mut settings = AgentRawConfig {
            server: vec![self.bound().agents.to_string()],
            node_name: Some(node.into()),
            node_ip: Some(Ipv4Addr::LOCALHOST.to_string()),
            data_dir: Some(self.agent_dir(node)),
            meta_listen: Some("off".into()),
            log_format: Some("text".into()),
            ..AgentRawConfig::default()
        };
        change(&mut settings);
        let mut config = AgentConfig::check(settings)?;
        config.token = Some(TokenSource::Inline(self.token(node, &[])?));
        Ok(config)
    }

    /// Like [`TestEnv::agent_config`], with a configuration file.
    pub fn agent_config_at_file(&self, node: &str, path: &Path) -> Result<AgentConfig> {
        let upper = *self.agent_config(node)?.raw.0;
        let mut config = tunnel_agent::config::load(upper, Some(path), |_| None)?;
        config.token = Some(TokenSource::Inline(self.token(node, &[])?));
        Ok(config)
    }

    fn agent_dir(&self, node: &str) -> PathBuf {
        self.scratch.path().join(format!("agent-{node}"))
    }

    /// Starts an agent and waits until the server routes to it.
    pub async fn agent(&self, node: &str) -> Result<Agent> {
        self.agent_with(node, |_| {}).await
    }

    /// Like [`TestEnv::agent`], with a changed configuration.
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
    pub async fn connected(&self, node: &str) {
        eventually(&format!("{node} connects"), WAIT_TIMEOUT, async || {
            let sessions = self.registry().of_node(&node.parse()?);
            let is_connected = sessions.iter().any(|session| !session.is_withdrawn());
            ensure!(is_connected, "no session");
            anyhow::Ok(())
        })
        .await;
    }

    /// Drains the server, without its drain delay, and waits until it has ended.
    pub async fn stop_server(&mut self) -> Result<()> {
        if let Some(server) = self.server.take() {
            server.shutdown.drain().cancel();
            server.running.await?;
        }
        Ok(())
    }

    /// Lets the server leave and drain, as SIGTERM does, without waiting for its end.
    pub fn drain_server(&self) {
        self.server().shutdown.leaving().cancel();
    }

    /// Starts the server again with its data and its port for agents. The listeners may change
    /// their ports, since another test may have taken them in the meantime.
    pub async fn restart_server(&mut self) -> Result<()> {
        let bound = self.bound().clone();
        self.stop_server().await?;
        self.start_server_at(bound.agents).await
    }

    /// Starts a stopped server with its data and the given port for agents.
    pub async fn start_server_at(&mut self, agents: SocketAddr) -> Result<()> {
        self.config.listeners.agents = vec![agents];
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

impl NodeEnv {
    pub async fn start() -> Result<Self> {
        Self::start_with(|_| {}).await
    }

    /// Like [`NodeEnv::start`], with changed settings of the server.
    pub async fn start_with(change: impl FnOnce(&mut RawConfig)) -> Result<Self> {
        Self::start_both(change, |_| {}).await
    }

    /// Like [`NodeEnv::start`], with sessions over this transport.
    pub async fn start_over(transport: TransportChoice) -> Result<Self> {
        Self::start_both(|_| {}, |config| config.transport = transport).await
    }

    async fn start_both(
        server: impl FnOnce(&mut RawConfig),
        agent: impl FnOnce(&mut AgentConfig),
    ) -> Result<Self> {
        let env = TestEnv::start_with(server).await?;
        let exporter = Exporter::start("worker-1").await?;
        Ok(Self {
            agent: env.agent_with("worker-1", agent).await?,
            host: format!("worker-1:{}", exporter.addr().port()),
            exporter,
            env,
        })
    }

    /// Requests a page of the exporter through the HTTP listener.
    pub async fn get(&self, path: &str) -> Result<HttpReply> {
        request(self.env.http(), &RawRequest::get(&self.host, path)).await
    }
}

impl Agent {
    /// Starts an agent without waiting for its session.
    pub async fn start(config: AgentConfig) -> Result<Self> {
        let app = tunnel_agent::app::App::start(config).await?;
        Ok(Self {
            shutdown: app.shutdown().clone(),
            meta: app.meta_addr(),
            running: spawn(app.run()),
        })
    }

    /// Returns the address of the agent's meta port, unless it is off.
    pub fn meta(&self) -> Option<SocketAddr> {
        self.meta
    }

    /// Makes the agent read its files again, as SIGHUP does.
    pub fn reload(&self) {
        self.shutdown.reload();
    }

    /// Begins the drain without waiting for its end.
    pub fn drain(&self) {
        self.shutdown.drain().cancel();
    }

    /// Waits until the agent has ended.
    pub async fn ended(self) -> Result<()> {
        self.running.await?
    }

    /// Drains the agent and waits for its end.
    pub async fn stop(self) -> Result<()> {
        self.drain();
        self.ended().await
    }
}

fn is_address_in_use(error: &anyhow::Error) -> bool {
    error.to_string().contains("Address already in use")
}

/// Converts the server's address to the form of the agent's configuration.
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
