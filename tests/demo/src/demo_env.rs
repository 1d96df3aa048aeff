//! The environment of the tour: the server, two agents and their targets.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use tunnel_tests::fakes::{self, EXPORTER_PORT, KUBELET_PORT, site};
use tunnel_tests::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, Edge, NODES, Namespace, Topology};
use tunnel_tests::process::{AgentSetup, Listener, Process, Server, ServerSetup, Signal};
use tunnel_tests::tools::{Tool, require};

use super::folder::{Folder, binary, shell_line};
use super::terminal::Terminal;

/// All processes of the tour.
#[derive(Debug)]
pub(super) struct DemoEnv {
    agents: Vec<Process>,
    sites: Vec<Process>,
    server: Server,
    /// The address where the server answers DNS.
    pub(super) dns: SocketAddr,
    /// The address of the server's console.
    console: SocketAddr,
    network: Network,
    folder: Folder,
    curl: String,
    dig: String,
}

/// The network of the tour: namespaces with equal addresses for both edges, or a loopback address
/// for each edge.
#[derive(Debug)]
struct Network {
    /// A caller in the cloud whose `resolv.conf` names the server.
    caller: Option<Namespace>,
    topology: Option<Topology>,
    exporter_port: u16,
    kubelet_port: u16,
}

impl DemoEnv {
    /// Starts all processes and waits until both agents are connected. Prints its progress.
    pub(super) async fn start(terminal: &Terminal) -> Result<Self> {
        require(&[Tool::Curl, Tool::Dig])
            .map_err(|missing| anyhow!("cannot show the tour: {missing}; {INSTALL}"))?;
        let folder = Folder::new()?;
        let (curl, dig) = (folder.tool(Tool::Curl)?, folder.tool(Tool::Dig)?);
        let network = Network::new(terminal, &folder)?;
        terminal.heading("The server");
        let setup = network.server(Path::new(&folder.path("server")));
        let run = run_line("tunnel-server", setup.arguments());
        terminal.command(&folder.inside(network.cloud(), &run));
        let mut server = setup.start().await?;
        let dns = server
            .process()
            .wait_for_line("DNS", START, |line| Listener::Dns.opened(line))
            .await?;
        let console = server
            .process()
            .wait_for_line("console", START, |line| Listener::Status.opened(line))
            .await?;
        let mut demo_env = Self {
            agents: Vec::new(),
            sites: Vec::new(),
            server,
            dns,
            console,
            network,
            folder,
            curl,
            dig,
        };
        terminal.heading(
            "Two edges, each with a join token, an exporter, a stand-in kubelet and an agent",
        );
        for (index, node) in NODES.into_iter().enumerate() {
            demo_env.add_edge(terminal, index, node).await?;
        }
        demo_env.server.wait_until_connected(&NODES).await;
        Ok(demo_env)
    }

    async fn add_edge(&mut self, terminal: &Terminal, index: usize, node: &str) -> Result<()> {
        let file = self.file(&format!("{node}.token"));
        let address = EDGE_ADDRESS.to_string();
        let create = ["token", "create", "--node", node, "--ip", &address];
        terminal.command(&format!("{} >{file}", self.server_verb(&create)));
        let token = self.server.token(node, Some(EDGE_ADDRESS.into())).await?;
        fs::write(&file, token).with_context(|| format!("write {file}"))?;

        let (namespace, ip) = self.network.edge(index);
        let [exporter, kubelet] =
            [self.exporter_port(), self.kubelet_port()].map(|port| SocketAddr::new(ip, port));
        let targets = format!(
            "{} site {node} --exporter {exporter} --kubelet {kubelet}",
            binary(fakes::PROGRAM)
        );
        terminal.command(&self.folder.inside(namespace, &targets));
        self.sites
            .push(site(node, exporter, kubelet, namespace).await?);

        let server = self.address_at(CLOUD_ADDRESS, Listener::Agents);
        let data = self.file(node);
        let agent = AgentSetup::new(node, server, Path::new(&data), namespace)
            .args(&["--token-file", &file])
            .in_own_group();
        let agent = if self.has_equal_addresses() {
            agent
        } else {
            agent.args(&["--node-ip", &ip.to_string(), "--meta-listen", "127.0.0.1:0"])
        };
        let run = run_line("tunnel-agent", agent.arguments());
        terminal.command(&self.folder.inside(namespace, &run));
        self.agents.push(agent.start()?);
        Ok(())
    }

    /// Returns the shell line of an agent with these name and token, next to the agent of the first
    /// edge.
    pub(super) fn agent_with_token(&self, node: &str, token_file: &str) -> String {
        let (namespace, ip) = self.network.edge(0);
        let server = self.address_at(CLOUD_ADDRESS, Listener::Agents);
        let data = self.file("impostor");
        let agent = AgentSetup::new(node, server, Path::new(&data), namespace)
            .args(&["--token-file", token_file, "--node-ip", &ip.to_string()])
            .args(&["--meta-listen", "off"]);
        let run = run_line("tunnel-agent", agent.arguments());
        self.folder.inside(namespace, &run)
    }

    /// Drops the datagrams of agents, or no longer does.
    pub(super) fn drop_udp(&self, is_dropped: bool) -> Result<()> {
        let topology = self.network.topology.as_ref();
        let topology = topology.context("UDP is dropped in namespaces only")?;
        let port = self.server.address(Listener::Agents).port();
        let script = if is_dropped {
            format!(
                "$NFT add table inet demo\n\
                 $NFT add chain inet demo block '{{ type filter hook input priority 0; }}'\n\
                 $NFT add rule inet demo block udp dport {port} drop"
            )
        } else {
            "$NFT delete table inet demo".to_owned()
        };
        topology.cloud().script(&script)?;
        Ok(())
    }

    /// Sends SIGTERM to the server.
    pub(super) fn terminate_server(&mut self, terminal: &Terminal) -> Result<()> {
        let process = self.server.process();
        let id = process.id().context("the server has ended")?;
        terminal.command(&format!("kill -TERM {id}"));
        process.signal(Signal::Term)
    }

    /// Starts the server again once it has ended, and waits until both agents are connected.
    pub(super) async fn start_server_again(&mut self, terminal: &Terminal) -> Result<()> {
        self.server.process().end(STOP_TIMEOUT).await?;
        let setup = self.server.setup_for_restart();
        let run = run_line("tunnel-server", setup.arguments());
        terminal.command(&self.folder.inside(self.network.cloud(), &run));
        self.server = setup.start().await?;
        self.server.wait_until_connected(&NODES).await;
        Ok(())
    }

    /// Stops all processes, the agents first, as an operator would.
    pub(super) async fn stop(self) -> Result<()> {
        let server = self.server.into_process();
        for process in self.agents.into_iter().chain([server]).chain(self.sites) {
            process.stop(STOP_TIMEOUT).await?;
        }
        Ok(())
    }

    /// Returns whether both edges have equal addresses.
    pub(super) fn has_equal_addresses(&self) -> bool {
        self.network.topology.is_some()
    }

    /// Returns the shell line for a verb of the server.
    pub(super) fn server_verb(&self, args: &[&str]) -> String {
        let (server, data) = (binary("tunnel-server"), self.file("server"));
        shell_line([&[server.as_str()][..], args, &["--data-dir", &data]].concat())
    }

    /// Returns the shell line of a curl in the network of the server's callers.
    pub(super) fn curl(&self, args: &[&str]) -> String {
        let line = shell_line([&[self.curl.as_str()][..], args].concat());
        self.folder.inside(self.network.cloud(), &line)
    }

    /// Returns the shell line that asks the server's DNS for `name`.
    pub(super) fn dig(&self, name: &str) -> String {
        let (port, ip) = (self.dns.port(), self.dns.ip());
        let line = format!("{} +noall +answer -p {port} @{ip} {name}", self.dig);
        self.folder.inside(self.network.cloud(), &line)
    }

    /// Returns the shell lines that print a `resolv.conf` that names the server, and request `url`
    /// with it. Returns `None` without namespaces.
    pub(super) fn by_resolver(&self, url: &str) -> Option<[String; 2]> {
        let caller = self.network.caller.as_ref()?;
        let request = shell_line([self.curl.as_str(), "-sS", url]);
        let lines = ["cat /etc/resolv.conf", &request];
        Some(lines.map(|line| self.folder.inside(Some(caller), line)))
    }

    /// Returns the URL of the server's console.
    pub(super) fn console(&self) -> String {
        format!("http://{}/", self.console)
    }

    /// Returns the path of the file of that name.
    pub(super) fn file(&self, name: &str) -> String {
        self.folder.path(name)
    }

    /// Returns the address at which the server's callers reach a listener.
    pub(super) fn listener_addr(&self, listener: Listener) -> SocketAddr {
        self.address_at(Ipv4Addr::LOCALHOST, listener)
    }

    /// Returns the port of the exporters.
    pub(super) fn exporter_port(&self) -> u16 {
        self.network.exporter_port
    }

    pub(super) fn kubelet_port(&self) -> u16 {
        self.network.kubelet_port
    }

    /// Returns the address of a listener, with `ip` for one that is bound to all addresses.
    fn address_at(&self, ip: Ipv4Addr, listener: Listener) -> SocketAddr {
        let mut address = self.server.address(listener);
        if address.ip().is_unspecified() {
            address.set_ip(ip.into());
        }
        address
    }
}

impl Network {
    /// Creates the namespaces and their scripts, or chooses ports on loopback.
    fn new(terminal: &Terminal, folder: &Folder) -> Result<Self> {
        match Topology::new() {
            Ok(topology) => {
                terminal.message(&format!(
                    "A cloud and two edge sites, each in network namespaces of its own. Both edges are {EDGE_ADDRESS}, \
                     behind NAT, and can only dial out. The first word of a line says where it runs: {} in the cloud, {} \
                     on the first edge.",
                    folder.path("cloud"),
                    folder.path("edge-1"),
                ));
                let resolv_conf = format!("nameserver {CLOUD_ADDRESS}\noptions ndots:0\n");
                let cloud = topology.cloud();
                let caller = cloud.with_resolver("caller", folder.scratch(), &resolv_conf)?;
                let edges = topology.edges().iter().map(Edge::node);
                for namespace in [cloud, &caller].into_iter().chain(edges) {
                    folder.enter_by_script(namespace)?;
                }
                Ok(Self {
                    caller: Some(caller),
                    topology: Some(topology),
                    exporter_port: EXPORTER_PORT,
                    kubelet_port: KUBELET_PORT,
                })
            }
            Err(skip) => {
                let (exporter_port, kubelet_port) = (free_port()?, free_port()?);
                terminal.message(&format!(
                    "NOTE: network namespaces cannot be used here ({skip}).\nThe two edges have the addresses 127.0.0.2 \
                     and 127.0.0.3: that edges with EQUAL addresses are distinguished is NOT shown by this run."
                ));
                Ok(Self {
                    caller: None,
                    topology: None,
                    exporter_port,
                    kubelet_port,
                })
            }
        }
    }

    fn server(&self, data: &Path) -> ServerSetup {
        let setup = match &self.topology {
            // The extra port is bound on all addresses, since in the cloud the nodes' names resolve
            // to the server's.
            Some(topology) => ServerSetup::new(data, Some(topology.cloud()))
                .args(&["--advertise", &format!("{CLOUD_ADDRESS}:10262")])
                .args(&["--proxy-port-listen", "0.0.0.0", "--allow-unauthenticated"])
                .args(&["--dns-listen", &format!("{CLOUD_ADDRESS}:53")])
                .args(&["--status-listen", CONSOLE]),
            None => ServerSetup::on_loopback(data)
                .args(&["--https-proxy-ports", &self.kubelet_port.to_string()])
                .args(&[
                    "--dns-listen",
                    "127.0.0.1:0",
                    "--status-listen",
                    "127.0.0.1:0",
                ]),
        };
        setup
            .args(&["--http-proxy-ports", &self.exporter_port.to_string()])
            .args(&["--dns-upstream", "off"])
            // The tour shows exec without a certificate.
            .args(&["--compat", "yurt-tunnel"])
            .in_own_group()
    }

    fn cloud(&self) -> Option<&Namespace> {
        self.topology.as_ref().map(Topology::cloud)
    }

    /// Returns the namespace and the address of an edge, given by its index in [`NODES`].
    fn edge(&self, index: usize) -> (Option<&Namespace>, IpAddr) {
        match &self.topology {
            Some(topology) => {
                let edge = topology.edges().get(index);
                (edge.map(Edge::node), EDGE_ADDRESS.into())
            }
            None => (None, loopback_of(index)),
        }
    }
}

/// Returns the shell line that runs the server or an agent.
fn run_line(name: &str, arguments: &[String]) -> String {
    let program = [binary(name), "run".to_owned()];
    shell_line(program.iter().chain(arguments))
}

/// Returns a port that is free on all addresses. If another program takes the port first, the tour
/// reports it and ends.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("bind a free port")?;
    Ok(listener.local_addr().context("free port")?.port())
}

fn loopback_of(edge: usize) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, if edge == 0 { 2 } else { 3 }).into()
}

/// Address of the console in the namespace of the cloud.
const CONSOLE: &str = "127.0.0.1:10270";

/// The fix for a machine where `tests/tools.sh` cannot install the tools.
const INSTALL: &str = "install curl and dig, on Debian with `apt-get install curl bind9-dnsutils`, \
                       then run `make demo` again";

/// Time limit for the first log line of a running server.
const START: Duration = Duration::from_secs(5);

/// Time limit for the end of the tour, when no request is in progress.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
