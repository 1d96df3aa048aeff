//! The environment of the tour: the server, two agents and their targets.

use std::fs;
use std::iter;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::net::TcpListener;

use super::folder::Folder;
use super::net_probe::site;
use super::terminal::Terminal;
use crate::netns::{CLOUD_ADDRESS, EDGE_ADDRESS, NODES, Namespace, Topology};
use crate::process::{AgentSetup, Listener, Process, Server, ServerSetup};

/// All processes of the tour.
#[derive(Debug)]
pub(super) struct DemoEnv {
    agents: Vec<Process>,
    sites: Vec<Process>,
    server: Server,
    dns: SocketAddr,
    /// A caller whose `resolv.conf` names the server. The namespace must live as long as its script
    /// is used.
    resolver: Option<Namespace>,
    network: Network,
    folder: Folder,
}

/// The network of the tour.
#[derive(Debug)]
enum Network {
    /// A namespace for each process, with equal addresses for both edges.
    Namespaces(Box<Topology>),
    /// A loopback address for each edge.
    Loopback(LoopbackPorts),
}

/// Target ports that are free on this machine.
#[derive(Debug)]
struct LoopbackPorts {
    exporter: u16,
    kubelet: u16,
}

impl DemoEnv {
    /// Starts all processes and waits until both agents are connected. Prints its progress.
    pub(super) async fn start(terminal: &Terminal) -> Result<Self> {
        let folder = Folder::new()?;
        let network = match Topology::new() {
            Ok(sites) => {
                terminal.message(&format!(
                    "A cloud and two edge sites, each in network namespaces of its own. Both edges are {EDGE_ADDRESS}, \
                     behind NAT, and can only dial out."
                ));
                folder.enter_by_script("cloud", sites.cloud())?;
                for (edge, name) in sites.edges().iter().zip(["edge-1", "edge-2"]) {
                    folder.enter_by_script(name, edge.node())?;
                }
                Network::Namespaces(Box::new(sites))
            }
            Err(skip) => {
                let ports = LoopbackPorts::choose().await?;
                terminal.message(&format!(
                    "NOTE: network namespaces cannot be used here ({skip}).\nThe two edges have the addresses 127.0.0.2 \
                     and 127.0.0.3: that edges with EQUAL addresses are told apart is NOT shown by this run."
                ));
                Network::Loopback(ports)
            }
        };
        terminal.heading("The server");
        let setup = network.server(&folder.path("server")).in_own_group();
        let run = iter::once("run".to_owned()).chain(setup.arguments().iter().cloned());
        terminal.command(&network.in_cloud(&folder, &folder.program("tunnel-server", run)));
        let mut server = setup.start().await?;
        let dns = server
            .process()
            .wait_for_line("DNS", START, |line| Listener::Dns.opened(line))
            .await?;
        let resolver = network.resolver(&folder)?;
        let mut demo_env = Self {
            agents: Vec::new(),
            sites: Vec::new(),
            server,
            dns,
            resolver,
            network,
            folder,
        };
        demo_env.add_edges(terminal).await?;
        Ok(demo_env)
    }

    async fn add_edges(&mut self, terminal: &Terminal) -> Result<()> {
        terminal.heading(
            "Two edges, each with a join token, an exporter, a stand-in kubelet and an agent",
        );
        for (number, node) in NODES.into_iter().enumerate() {
            self.add_edge(terminal, number, node).await?;
        }
        self.server.wait_until_connected(&NODES).await;
        Ok(())
    }

    async fn add_edge(&mut self, terminal: &Terminal, number: usize, node: &str) -> Result<()> {
        let file = self.file(&format!("{node}.token"));
        let address = EDGE_ADDRESS.to_string();
        let create = ["token", "create", "--node", node, "--ip", &address];
        terminal.command(&format!("{} >{file}", self.server_verb(&create)));
        let token = self.server.token(node, Some(EDGE_ADDRESS.into())).await?;
        fs::write(&file, token).with_context(|| format!("write {file}"))?;

        let script = format!("edge-{}", number + 1);
        let (namespace, ip) = match &self.network {
            Network::Namespaces(sites) => {
                let edge = sites.edges().get(number).map(|edge| edge.node());
                (edge, EDGE_ADDRESS.into())
            }
            Network::Loopback(_) => (None, loopback_of(number)),
        };
        let [exporter, kubelet] =
            [self.exporter_port(), self.kubelet_port()].map(|port| SocketAddr::new(ip, port));
        let (listen, serve) = (exporter.to_string(), kubelet.to_string());
        let targets = self.net_probe(&["site", node, "--exporter", &listen, "--kubelet", &serve]);
        terminal.command(&self.network.inside(&self.folder, &script, &targets));
        self.sites
            .push(site(node, Some(exporter), Some(kubelet), namespace).await?);

        let data = self.folder.path(node);
        let agent = AgentSetup::new(node, self.agents_address(), &data, namespace)
            .args(&["--token-file", &file])
            .in_own_group();
        let agent = match &self.network {
            Network::Namespaces(_) => agent,
            Network::Loopback(_) => {
                agent.args(&["--node-ip", &ip.to_string(), "--meta-listen", "127.0.0.1:0"])
            }
        };
        let args = iter::once("run".to_owned()).chain(agent.arguments().iter().cloned());
        let run = self.folder.program("tunnel-agent", args);
        terminal.command(&self.network.inside(&self.folder, &script, &run));
        self.agents.push(agent.start()?);
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
        matches!(self.network, Network::Namespaces(_))
    }

    /// Returns the shell line that runs `line` in the network of the server's callers.
    pub(super) fn in_cloud(&self, line: &str) -> String {
        self.network.in_cloud(&self.folder, line)
    }

    /// Returns the shell line for a verb of the server.
    pub(super) fn server_verb(&self, args: &[&str]) -> String {
        let data = self.folder.path("server").display().to_string();
        let args = args
            .iter()
            .copied()
            .chain(["--data-dir", &data])
            .map(str::to_owned);
        self.folder.program("tunnel-server", args)
    }

    /// Returns the shell line for one of the probe programs.
    pub(super) fn net_probe(&self, args: &[&str]) -> String {
        self.folder
            .program("demo", args.iter().map(|arg| (*arg).to_owned()))
    }

    /// Returns the path for a file of that name.
    pub(super) fn file(&self, name: &str) -> String {
        self.folder.path(name).display().to_string()
    }

    /// Returns the address at which the server's callers reach a listener.
    pub(super) fn listener_addr(&self, listener: Listener) -> SocketAddr {
        let mut address = self.server.address(listener);
        if address.ip().is_unspecified() {
            address.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        address
    }

    /// Returns the address where the server answers DNS.
    pub(super) fn dns(&self) -> SocketAddr {
        self.dns
    }

    /// Returns the shell line that runs `line` with a `resolv.conf` that names the server, or
    /// `None` without namespaces.
    pub(super) fn by_resolver(&self, line: &str) -> Option<String> {
        let script = self.resolver.as_ref()?.name();
        Some(self.network.inside(&self.folder, script, line))
    }

    /// Returns the port of the exporters.
    pub(super) fn exporter_port(&self) -> u16 {
        match &self.network {
            Network::Namespaces(_) => EXPORTER_PORT,
            Network::Loopback(ports) => ports.exporter,
        }
    }

    /// Returns the port of the kubelets.
    pub(super) fn kubelet_port(&self) -> u16 {
        match &self.network {
            Network::Namespaces(_) => KUBELET_PORT,
            Network::Loopback(ports) => ports.kubelet,
        }
    }

    fn agents_address(&self) -> SocketAddr {
        match &self.network {
            Network::Namespaces(_) => SocketAddr::new(
                CLOUD_ADDRESS.into(),
                self.server.address(Listener::Agents).port(),
            ),
            Network::Loopback(_) => self.server.address(Listener::Agents),
        }
    }
}

impl Network {
    fn server(&self, data: &Path) -> ServerSetup {
        match self {
            // The extra port is bound on all addresses, since in the cloud the nodes' names resolve
            // to the server's.
            Self::Namespaces(sites) => ServerSetup::new(data, Some(sites.cloud()))
                .args(&["--advertise", &format!("{CLOUD_ADDRESS}:10262")])
                .args(&["--http-proxy-ports", &EXPORTER_PORT.to_string()])
                .args(&["--proxy-port-listen", "0.0.0.0", "--allow-unauthenticated"])
                .args(&["--dns-listen", &format!("{CLOUD_ADDRESS}:53")])
                .args(&["--dns-upstream", "off"]),
            Self::Loopback(ports) => ServerSetup::on_loopback(data)
                .args(&["--dns-listen", "127.0.0.1:0", "--dns-upstream", "off"])
                .args(&["--http-proxy-ports", &ports.exporter.to_string()])
                .args(&["--https-proxy-ports", &ports.kubelet.to_string()]),
        }
    }

    /// Creates the namespace of a caller in the cloud that resolves names only through the server.
    fn resolver(&self, folder: &Folder) -> Result<Option<Namespace>> {
        let Self::Namespaces(sites) = self else {
            return Ok(None);
        };
        let resolv_conf = format!("nameserver {CLOUD_ADDRESS}\noptions ndots:0\n");
        let cloud = sites.cloud();
        let caller = cloud.with_resolver("caller", folder.scratch(), &resolv_conf)?;
        folder.enter_by_script("caller", &caller)?;
        Ok(Some(caller))
    }

    fn in_cloud(&self, folder: &Folder, line: &str) -> String {
        self.inside(folder, "cloud", line)
    }

    fn inside(&self, folder: &Folder, script: &str, line: &str) -> String {
        match self {
            Self::Namespaces(_) => format!("{} {line}", folder.path(script).display()),
            Self::Loopback(_) => line.to_owned(),
        }
    }
}

impl LoopbackPorts {
    /// Chooses ports that the server and both edges can bind.
    async fn choose() -> Result<Self> {
        Ok(Self {
            exporter: free_port().await?,
            kubelet: free_port().await?,
        })
    }
}

/// Returns a port that is free on all three loopback addresses in use. If another program takes the
/// port first, the tour reports it and ends.
async fn free_port() -> Result<u16> {
    for _ in 0..PORT_TRIES {
        let first = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .await
            .context("bind a loopback port")?;
        let port = first.local_addr().context("loopback port")?.port();
        let others =
            [loopback_of(0), loopback_of(1)].map(|ip| std::net::TcpListener::bind((ip, port)));
        if others.iter().all(Result::is_ok) {
            return Ok(port);
        }
    }
    anyhow::bail!("no port is free on 127.0.0.1, 127.0.0.2 and 127.0.0.3")
}

fn loopback_of(edge: usize) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, if edge == 0 { 2 } else { 3 }).into()
}

/// Time limit for the first log line of a running server.
const START: Duration = Duration::from_secs(5);

/// Time limit for the end of the tour, when no request is in progress.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

const EXPORTER_PORT: u16 = 9100;
const KUBELET_PORT: u16 = 10250;

/// Number of tries; a port that is free on one address is nearly always free on the others.
const PORT_TRIES: usize = 20;
