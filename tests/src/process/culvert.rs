//! The two binaries under test, as an operator would run them.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Log, Process, Program, next_loopback};
use crate::audit_events::AuditEvents;
use crate::checks::get_ok;
use crate::client::{HttpReply, RawRequest, request};
use crate::eventually::eventually;
use crate::metrics::metric;
use crate::netns::Namespace;

/// The command line of one of the two binaries. The program can be started again with the same
/// data, as after a crash.
#[derive(Debug, Clone)]
pub struct Setup<P> {
    program: &'static str,
    kind: PhantomData<P>,
    namespace: Option<Namespace>,
    data_dir: String,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    through: Vec<String>,
    own_group: bool,
}

/// The binary `tunnel-server`.
#[derive(Debug, Clone)]
pub enum TunnelServer {}

/// The binary `tunnel-agent`.
#[derive(Debug, Clone)]
pub enum TunnelAgent {}

pub type ServerSetup = Setup<TunnelServer>;
pub type AgentSetup = Setup<TunnelAgent>;

impl<P> Setup<P> {
    fn of(program: &'static str, data_dir: &Path, namespace: Option<&Namespace>) -> Self {
        let data_dir = data_dir.to_string_lossy().into_owned();
        Self {
            program,
            kind: PhantomData,
            namespace: namespace.cloned(),
            arguments: vec!["--data-dir".to_owned(), data_dir.clone()],
            environment: Vec::new(),
            through: Vec::new(),
            data_dir,
            own_group: false,
        }
    }

    /// Checks each audit event of the program, see [`AuditEvents`].
    pub fn audited(self) -> Self {
        self.args(&["--audit-log", "stdout"])
    }

    pub fn arguments(&self) -> &[String] {
        &self.arguments
    }

    /// Adds arguments of `run`.
    pub fn args(mut self, args_text: &[&str]) -> Self {
        self.arguments
            .extend(args_text.iter().map(|word| (*word).to_owned()));
        self
    }

    /// Sets an environment variable of `run`.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs the program by another one, see [`Program::through`]. That one must become the program,
    /// as `exec` of a shell does.
    pub fn through(mut self, args_text: &[&str]) -> Self {
        self.through = args_text.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    pub fn in_own_group(mut self) -> Self {
        self.own_group = true;
        self
    }

    fn run(&self) -> Result<Process> {
        let run = Program::ours(self.program)?.args(["run", "--log-format", "json"]);
        let environment = self.environment.iter();
        let run = environment.fold(run, |run, (name, value)| run.env(name, value));
        let run = run.args(&self.arguments).through(&self.through);
        let program = run.inside(self.namespace.as_ref());
        if self.own_group {
            program.in_own_group().start()
        } else {
            program.start()
        }
    }
}

impl ServerSetup {
    /// Creates a server with default settings, outside any cluster, inside `namespace` if given.
    pub fn new(data_dir: &Path, namespace: Option<&Namespace>) -> Self {
        Self::plain(data_dir, namespace).args(&["--kubernetes", "off"])
    }

    /// Creates a server on a loopback address of its own that watches the cluster of a kubeconfig.
    pub fn in_cluster(data_dir: &Path, kubeconfig: &Path) -> Self {
        let kubeconfig = kubeconfig.to_string_lossy();
        let cluster = ["--kubernetes", "on", "--kubeconfig", &kubeconfig];
        Self::plain(data_dir, None)
            .listening_on(next_loopback())
            .args(&cluster)
    }

    /// Creates a server with default settings, inside `namespace` if given.
    pub fn plain(data_dir: &Path, namespace: Option<&Namespace>) -> Self {
        Self::of("tunnel-server", data_dir, namespace)
    }

    /// Creates a server on a loopback address of its own. Between two starts with the same setup no
    /// other socket can take its ports, as it could those that Linux assigns.
    pub fn on_loopback(data_dir: &Path) -> Self {
        Self::on_address(data_dir, next_loopback())
    }

    /// Creates a server on fixed ports of a loopback address that no other server has.
    pub fn on_address(data_dir: &Path, address: Ipv4Addr) -> Self {
        Self::new(data_dir, None).listening_on(address)
    }

    fn listening_on(self, address: Ipv4Addr) -> Self {
        Listener::LISTENERS.iter().fold(self, |setup, listener| {
            let listen = listener.on(address).to_string();
            setup.args(&[listener.flag(), &listen])
        })
    }

    /// Starts the server and waits until all its listeners are open.
    ///
    /// # Errors
    /// Returns an error with the server's log if the server ends or a listener does not open.
    pub async fn start(&self) -> Result<Server> {
        let mut process = self.run()?;
        let mut addresses = HashMap::new();
        for listener in Listener::LISTENERS {
            let address =
                process.wait_for_line(listener.name(), START, |line| listener.opened(line));
            addresses.insert(listener, address.await?);
        }
        let socket = Path::new(&self.data_dir).join("admin.sock");
        eventually("the admin socket", START, async || {
            socket.exists().then_some(())
        })
        .await;
        Ok(Server {
            setup: self.clone(),
            process,
            addresses,
        })
    }

    /// Returns a verb of the server's binary for the same data, not yet in the namespace.
    fn verb(&self, args_text: &[&str]) -> Result<Program> {
        Ok(Program::ours("tunnel-server")?
            .args(args_text)
            .arg("--data-dir")
            .arg(&self.data_dir))
    }
}

#[derive(Debug)]
pub struct Server {
    setup: ServerSetup,
    process: Process,
    addresses: HashMap<Listener, SocketAddr>,
}

impl Server {
    /// Returns the address of one of the [`Listener::LISTENERS`].
    ///
    /// # Panics
    /// Panics for any other listener.
    #[expect(clippy::expect_used, reason = "`start` has waited for each of them")]
    pub fn address(&self, listener: Listener) -> SocketAddr {
        *self.addresses.get(&listener).expect("one of the listeners")
    }

    pub fn setup_for_restart(&self) -> ServerSetup {
        self.setup.clone()
    }

    pub fn data_dir(&self) -> &str {
        &self.setup.data_dir
    }

    pub fn log(&self) -> &Log {
        self.process.log()
    }

    /// Returns the audit events that the server has written to its standard output.
    pub fn audit(&self) -> &AuditEvents {
        self.process.audit()
    }

    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Returns the process by value, to be stopped or killed.
    pub fn into_process(self) -> Process {
        self.process
    }

    /// Returns a verb for this server, as its operator would run it.
    pub fn verb(&self, args_text: &[&str]) -> Result<Program> {
        Ok(self
            .setup
            .verb(args_text)?
            .inside(self.setup.namespace.as_ref()))
    }

    /// Creates a join token for `node`, whose address is `ip`.
    pub async fn token(&self, node: &str, ip: Option<IpAddr>) -> Result<String> {
        let mut create = self.verb(&["token", "create", "--node", node])?;
        if let Some(ip) = ip {
            create = create.arg("--ip").arg(ip.to_string());
        }
        Ok(create.run().await?.ok()?.trim().to_owned())
    }

    /// Returns an agent of `node` on loopback with a new join token.
    pub async fn agent_setup(&self, node: &str, data_dir: &Path) -> Result<AgentSetup> {
        let token = self.token(node, None).await?;
        let agents = self.address(Listener::Agents);
        Ok(AgentSetup::on_loopback(node, agents, data_dir).args(&["--token", &token]))
    }

    pub async fn metric(&self, series: &str) -> Result<u64> {
        metric(self.address(Listener::Meta), series).await
    }

    /// Returns the number of sessions of other servers that this one knows. Needs `--status-listen`.
    pub async fn known_sessions(&self) -> Result<u64> {
        let page = self.log().find(|line| Listener::Status.opened(line)).await;
        let shown = RawRequest::get("localhost", "/servers").header("Accept", "application/json");
        let document: Value = serde_json::from_str(&request(page, &shown).await?.text())?;
        let servers = document["servers"].as_array().context("no servers")?;
        // The first one is this server.
        let others = servers.iter().skip(1);
        Ok(others.filter_map(|other| other["nodes"].as_u64()).sum())
    }

    /// Requests a page through the HTTP listener, which must be answered with 200.
    pub async fn get_ok(&self, host: &str, path: &str) -> Result<HttpReply> {
        get_ok(self.address(Listener::Http), host, path).await
    }

    /// Returns the nodes that `nodes -o json` lists.
    pub async fn nodes(&self) -> Result<Vec<Value>> {
        let printed = self.verb(&["nodes", "-o", "json"])?.run().await?.ok()?;
        let document: Value = serde_json::from_str(&printed).context("no JSON")?;
        let nodes = document["nodes"].as_array();
        nodes
            .cloned()
            .with_context(|| format!("nodes printed {printed}"))
    }

    /// Waits until exactly the named `nodes` are connected.
    pub async fn wait_until_connected(&self, nodes: &[&str]) {
        let what = format!("{nodes:?} to be connected");
        eventually(&what, CONNECT, async || {
            let listed = self.nodes().await?;
            let connected = listed.iter().filter(|node| node["connected"] == true);
            let connected: Vec<_> = connected.filter_map(|node| node["node"].as_str()).collect();
            ensure!(
                connected == nodes,
                "nodes lists {listed:?}; {}",
                self.process
            );
            Ok(())
        })
        .await;
    }
}

impl AgentSetup {
    /// Creates an agent of `node` for the server at `server`, inside `namespace` if given.
    pub fn new(
        node: &str,
        server: SocketAddr,
        data_dir: &Path,
        namespace: Option<&Namespace>,
    ) -> Self {
        let server = server.to_string();
        Self::of("tunnel-agent", data_dir, namespace).args(&[
            "--server",
            &server,
            "--node-name",
            node,
        ])
    }

    /// Creates an agent on free loopback ports, whose targets of class `node` are on loopback.
    pub fn on_loopback(node: &str, server: SocketAddr, data_dir: &Path) -> Self {
        let loopback = ["--node-ip", "127.0.0.1", "--meta-listen", "127.0.0.1:0"];
        Self::new(node, server, data_dir, None).args(&loopback)
    }

    /// Creates an agent like [`Self::on_loopback`], whose meta port is [`Listener::Meta`] on a
    /// loopback address of its own, so that the agent has the same port after a restart.
    pub fn on_address(node: &str, server: SocketAddr, data_dir: &Path, address: Ipv4Addr) -> Self {
        let meta = Listener::Meta.on(address).to_string();
        let loopback = ["--node-ip", "127.0.0.1", "--meta-listen", &meta];
        Self::new(node, server, data_dir, None).args(&loopback)
    }

    /// Starts the agent. The server reports whether the agent gets a session.
    pub fn start(&self) -> Result<Process> {
        self.run()
    }
}

/// The listeners of a server and of an agent, by the word in their logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Listener {
    /// Agents, over UDP and TCP.
    Agents,
    Https,
    Http,
    /// The meta port, with health and metrics.
    Meta,
    /// The embedded DNS, over UDP and TCP.
    Dns,
    /// Other servers of the installation.
    Peers,
    /// The status page.
    Status,
    /// A target of the cloud, at an agent.
    Cloud,
}

impl Listener {
    /// The listeners that every server has.
    pub const LISTENERS: [Self; 4] = [Self::Agents, Self::Https, Self::Http, Self::Meta];

    fn name(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Https => "https",
            Self::Http => "http",
            Self::Meta => "meta",
            Self::Dns => "dns",
            Self::Peers => "peers",
            Self::Status => "status",
            Self::Cloud => "cloud",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Agents => "--agent-listen",
            Self::Https => "--https-listen",
            Self::Http => "--http-listen",
            Self::Meta => "--meta-listen",
            Self::Dns => "--dns-listen",
            Self::Peers => "--peer-listen",
            Self::Status => "--status-listen",
            Self::Cloud => "--cloud-listen",
        }
    }

    /// Returns the address of this listener of a server that has a loopback address of its own. The
    /// ports are neither those of an installed server nor those that Linux assigns.
    pub fn on(self, address: Ipv4Addr) -> SocketAddr {
        let port = match self {
            Self::Agents => 21262,
            Self::Https => 21263,
            Self::Http => 21264,
            Self::Meta => 21265,
            Self::Dns => 21253,
            Self::Peers => 21269,
            Self::Status => 21266,
            Self::Cloud => 21268,
        };
        SocketAddr::from((address, port))
    }

    /// Returns the address in `line` if the line reports that this listener is open.
    pub fn opened(self, line: &str) -> Option<SocketAddr> {
        let line: Value = serde_json::from_str(line).ok()?;
        let fields = line.get("fields").unwrap_or(&line);
        if fields["message"] != "listening" || fields["listener"] != self.name() {
            return None;
        }
        fields["address"].as_str()?.parse().ok()
    }
}

/// Time limit for a start. A server generates its keys at its first start.
const START: Duration = Duration::from_secs(15);

/// Time limit for stopping a process without requests in progress.
pub(super) const STOP: Duration = Duration::from_secs(5);

/// Longer than the longest pause of an agent between two tries at the beginning of an outage.
pub(super) const CONNECT: Duration = Duration::from_secs(15);
