//! The systems that are compared: a direct connection, the floor (two plain relays in a row),
//! minimal relays over each transport, Culvert over each transport, and peers.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use rustls_pki_types::CertificateDer;
use serde_json::Value;
use tunnel_proto::tls;
use tunnel_tests::ca::{Leaf, TestCa};
use tunnel_tests::link::Link;
use tunnel_tests::process::{
    AgentSetup, Listener, Peering, Process, ScratchDir, Server, ServerSetup,
};

use crate::client::{Endpoint, TARGET_NAME};
use crate::components::{self, transport_relay};
use crate::nginx::Nginx;

mod relays;

use relays::{Peer, RelayPair};

/// Name of the node in every stack.
pub(crate) const NODE: &str = "worker-1";
const START: Duration = Duration::from_secs(15);

/// The services at the edge, and the TLS settings of callers that trust the service with TLS.
#[derive(Debug)]
pub(crate) struct Edge {
    plain: Process,
    secure: Process,
    pub(crate) plain_address: SocketAddr,
    pub(crate) secure_address: SocketAddr,
    pub(crate) tls: Arc<rustls::ClientConfig>,
    pub(crate) ca: TestCa,
    pub(crate) scratch: ScratchDir,
}

impl Edge {
    pub(crate) async fn start() -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let ca = TestCa::new("bench")?;
        let (chain, key) = pair(&ca, TARGET_NAME, scratch.path())?;
        let (plain, plain_address) = components::start(&to_args(&["edge"])).await?;
        let (secure, secure_address) =
            components::start(&to_args(&["edge", "--tls", &chain, "--tls", &key])).await?;
        Ok(Self {
            plain,
            secure,
            plain_address,
            secure_address,
            tls: client_tls([ca.root().clone()])?,
            ca,
            scratch,
        })
    }

    /// Returns the endpoint of the service with TLS at this or another address.
    pub(crate) fn secure_at(&self, address: SocketAddr) -> Endpoint {
        Endpoint {
            tls: Some(self.tls.clone()),
            ..plain(address)
        }
    }

    pub(crate) fn processes(&self) -> Vec<u32> {
        [&self.plain, &self.secure]
            .into_iter()
            .filter_map(Process::id)
            .collect()
    }
}

fn pair(ca: &TestCa, name: &str, folder: &Path) -> Result<(String, String)> {
    let leaf = Leaf {
        uri: None,
        dns: Some(name.to_owned()),
        ..Leaf::server()
    };
    let (chain, key) = ca.issue(&leaf)?.write(folder, name)?;
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    Ok((text(chain), text(key)))
}

#[expect(clippy::disallowed_methods, reason = "a caller, not the product")]
fn client_tls(
    roots: impl IntoIterator<Item = CertificateDer<'static>>,
) -> Result<Arc<rustls::ClientConfig>> {
    let mut config = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(tls::roots(roots)?)
        .with_no_client_auth();
    // Without resumption every caller does a full handshake.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

pub(crate) fn to_args(to_args: &[&str]) -> Vec<String> {
    to_args.iter().map(|word| (*word).to_owned()).collect()
}

/// A system under test, with its endpoints that lead to the edge services.
#[derive(Debug, Clone)]
pub(crate) struct System {
    pub(crate) name: &'static str,
    /// Endpoint that leads to the plain service.
    pub(crate) plain: Endpoint,
    /// Endpoint that leads to the service with TLS. The caller does TLS with that service.
    pub(crate) secure: Option<Endpoint>,
    pub(crate) server: Option<u32>,
    pub(crate) agent: Option<u32>,
    /// The server that accepts the callers, if the agent is at another one.
    pub(crate) hop: Option<u32>,
}

/// A server and one agent of Culvert, each in its own process.
#[derive(Debug)]
pub(crate) struct Culvert {
    pub(crate) server: Option<Server>,
    pub(crate) agent: Option<Process>,
    hop: Option<Hop>,
    pub(crate) service: SocketAddr,
    pub(crate) secure: SocketAddr,
    pub(crate) http: SocketAddr,
    https: SocketAddr,
    /// TLS settings of a caller of the HTTPS listener, whose certificate the server's CA issues.
    https_tls: Arc<rustls::ClientConfig>,
    connect: SocketAddr,
    /// Addresses of the agent's listeners for targets of the cloud, in the order of the targets.
    pub(crate) cloud: Vec<SocketAddr>,
    pub(crate) agent_setup: AgentSetup,
    pub(crate) data: PathBuf,
    pub(crate) link: Option<Link>,
    _scratch: ScratchDir,
}

/// A second server, to which no agent is connected.
#[derive(Debug)]
struct Hop {
    server: Server,
    /// Address of the TCP service that leads to the plain edge service.
    service: SocketAddr,
}

/// Settings in which stacks differ.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shape<'a> {
    pub(crate) transport: &'a str,
    /// Lines of the `limits:` section of both files.
    pub(crate) limits: &'a [&'a str],
    /// More lines of that section of the server's file.
    pub(crate) server_limits: &'a [&'a str],
    /// More lines of that section of the agent's file.
    pub(crate) agent_limits: &'a [&'a str],
    /// Names and addresses of targets of the cloud. The agent has a listener for each.
    pub(crate) cloud: &'a [(&'a str, SocketAddr)],
    /// Seed of a link between the agent and the server; `None` for a direct connection.
    pub(crate) link: Option<u64>,
    /// Whether there is a second server, to which the agent is not connected.
    pub(crate) has_hop: bool,
}

impl Culvert {
    pub(crate) async fn start(edge: &Edge, shape: Shape<'_>) -> Result<Self> {
        let scratch = ScratchDir::new()?;
        let peering = Peering::new(1 + usize::from(shape.has_hop), scratch.path());
        let (file, agent_file) = (
            scratch.path().join("server.yaml"),
            scratch.path().join("agent.yaml"),
        );
        let agent_limits = limits(&[shape.limits, shape.agent_limits]);
        std::fs::write(&agent_file, agent_limits)?;
        let setup = peering.setup(0)?;
        let (server, [service, secure, connect]) = start_server(setup, edge, shape, &file).await?;
        let data = PathBuf::from(server.data_dir());
        // The file names the ports, so that a restarted server listens on them.
        std::fs::write(&file, server_yaml(edge, shape, [service, secure]))?;
        let token = server.token(NODE, None).await?;
        let agents = server.address(Listener::Agents);
        let link = shape
            .link
            .map(|seed| Link::start(agents, seed))
            .transpose()?;
        let towards = link.as_ref().map_or(agents, Link::addr);
        let agent_setup = AgentSetup::on_loopback(NODE, towards, &scratch.path().join("agent"))
            .args(&[
                "--token",
                &token,
                "--transport",
                shape.transport,
                "--config",
                &agent_file.to_string_lossy(),
                "--replicas",
                "1",
            ]);
        let targets = shape.cloud.iter();
        let agent_setup = targets.fold(agent_setup, |setup, (name, _)| {
            setup.args(&["--cloud-listen", &format!("{name}=127.0.0.1:0")])
        });
        let mut agent = agent_setup.start()?;
        let mut cloud = Vec::new();
        for (name, _) in shape.cloud {
            let find = |line: &str| opened(line, "name", name);
            cloud.push(agent.wait_for_line(name, START, find).await?);
        }
        server.wait_until_connected(&[NODE]).await;
        let hop = if shape.has_hop {
            let file = scratch.path().join("hop.yaml");
            Some(Hop::start(peering.setup(1)?, edge, shape, &file).await?)
        } else {
            None
        };
        Ok(Self {
            service,
            secure,
            http: server.address(Listener::Http),
            https: server.address(Listener::Https),
            https_tls: client_tls(tls::files::chain(&std::fs::read(data.join("ca.crt"))?)?)?,
            connect,
            cloud,
            server: Some(server),
            agent: Some(agent),
            hop,
            agent_setup,
            data,
            link,
            _scratch: scratch,
        })
    }

    pub(crate) fn server_process(&mut self) -> Option<u32> {
        self.server.as_mut()?.process().id()
    }

    pub(crate) fn agent_process(&self) -> Option<u32> {
        self.agent.as_ref()?.id()
    }

    pub(crate) fn hop_process(&mut self) -> Option<u32> {
        self.hop.as_mut()?.server.process().id()
    }

    /// Returns the endpoint of the TCP service that leads to the plain edge service.
    pub(crate) fn endpoint(&self) -> Endpoint {
        plain(self.service)
    }

    /// Returns the endpoint of the same service at the second server.
    pub(crate) fn hop_endpoint(&self) -> Option<Endpoint> {
        self.hop.as_ref().map(|hop| plain(hop.service))
    }

    pub(crate) fn server(&self) -> Result<&Server> {
        self.server.as_ref().context("the server is gone")
    }
}

impl Hop {
    /// Starts the second server and waits until it forwards connections to the first one.
    async fn start(setup: ServerSetup, edge: &Edge, shape: Shape<'_>, file: &Path) -> Result<Self> {
        let (server, [service, ..]) = start_server(setup, edge, shape, file).await?;
        crate::load::probe(&plain(service), START)
            .await
            .with_context(|| format!("the second server; {}", server.log()))?;
        Ok(Self { server, service })
    }
}

/// Starts a server with TCP services that lead to the edge services, and writes its configuration
/// to `file`. Returns the server, and the addresses of the plain service, of the service with TLS
/// and of the CONNECT listener.
async fn start_server(
    setup: ServerSetup,
    edge: &Edge,
    shape: Shape<'_>,
    file: &Path,
) -> Result<(Server, [SocketAddr; 3])> {
    let any: SocketAddr = "127.0.0.1:0".parse()?;
    std::fs::write(file, server_yaml(edge, shape, [any, any]))?;
    let setup = setup.args(&[
        "--config",
        &file.to_string_lossy(),
        "--http-proxy-ports",
        &edge.plain_address.port().to_string(),
        "--https-proxy-ports",
        &edge.secure_address.port().to_string(),
        "--https-name",
        TARGET_NAME,
        "--connect-listen",
        "127.0.0.1:0",
        "--proxy-port-listen",
        "off",
        "--compat",
        "yurt-tunnel",
    ]);
    let mut server = setup.start().await?;
    let process = server.process();
    let mut address = async |field: &str, name: &str| {
        let find = |line: &str| opened(line, field, name);
        process.wait_for_line(name, START, find).await
    };
    let addresses = [
        address("service", "edge").await?,
        address("service", "secure").await?,
        address("listener", "connect").await?,
    ];
    Ok((server, addresses))
}

pub(crate) fn plain(address: SocketAddr) -> Endpoint {
    Endpoint {
        address,
        tls: None,
        host: NODE.into(),
        is_connect: false,
    }
}

fn server_yaml(edge: &Edge, shape: Shape<'_>, listen: [SocketAddr; 2]) -> String {
    let mut yaml = "services:\n".to_owned();
    let targets = [
        ("edge", edge.plain_address),
        ("secure", edge.secure_address),
    ];
    for ((name, target), listen) in targets.into_iter().zip(listen) {
        let port = target.port();
        let _infallible = write!(
            yaml,
            "- name: {name}\n  listen: {listen}\n  node: {NODE}\n  target: \"{port}\"\n"
        );
    }
    if !shape.cloud.is_empty() {
        yaml += "cloud:\n";
    }
    for (name, target) in shape.cloud {
        let _infallible = write!(
            yaml,
            "- name: {name}\n  target: \"{target}\"\n  nodes: \"*\"\n"
        );
    }
    yaml + &limits(&[shape.limits, shape.server_limits])
}

/// Formats the lines as the section of a file.
fn limits(lines: &[&[&str]]) -> String {
    let lines = lines.concat();
    if lines.is_empty() {
        return String::new();
    }
    let lines: Vec<_> = lines.iter().map(|line| format!("  {line}\n")).collect();
    format!("limits:\n{}", lines.concat())
}

fn opened(line: &str, field: &str, name: &str) -> Option<SocketAddr> {
    let line: Value = serde_json::from_str(line).ok()?;
    let fields = line.get("fields").unwrap_or(&line);
    let is_it = fields["message"] == "listening" && fields[field] == name;
    is_it
        .then(|| fields["address"].as_str()?.parse().ok())
        .flatten()
}

/// All systems, each in front of the same edge services.
#[derive(Debug)]
pub(crate) struct Systems {
    pub(crate) edge: Edge,
    relays: Vec<RelayPair>,
    quic: Option<Culvert>,
    h2: Option<Culvert>,
    nginx: Option<Nginx>,
    peer: Option<Peer>,
}

impl Systems {
    /// Starts all systems. `culvert` says whether the two Culvert stacks are needed. `waste` is the
    /// CPU time that the minimal relay over h2 wastes on each read of its edge end.
    pub(crate) async fn start(
        culvert: bool,
        waste: Duration,
        rathole: Option<&Path>,
    ) -> Result<Self> {
        let edge = Edge::start().await?;
        let waste = humantime::format_duration(waste).to_string();
        let (chain, key) = pair(&edge.ca, transport_relay::NAME, edge.scratch.path())?;
        let root = edge.scratch.file("root.crt", edge.ca.pem())?;
        let root = root.to_string_lossy().into_owned();
        let (chain, key, root) = (chain.as_str(), key.as_str(), root.as_str());
        let (over_h2, over_quic) = (["transport-relay", "h2"], ["transport-relay", "quic"]);
        let slow = [chain, key, "--waste", waste.as_str()];
        let target = edge.plain_address;
        let relays = vec![
            RelayPair::start(FLOOR, &["relay"], target, [&[], &[]]).await?,
            RelayPair::start(RELAY_H2, &over_h2, target, [&slow, &[root]]).await?,
            RelayPair::start(RELAY_QUIC, &over_quic, target, [&[chain, key], &[root]]).await?,
        ];
        let (mut quic, mut h2, mut nginx) = (None, None, None);
        if culvert {
            let shape = |transport, has_hop| Shape {
                transport,
                has_hop,
                ..Shape::default()
            };
            quic = Some(Culvert::start(&edge, shape("quic", true)).await?);
            let stack = Culvert::start(&edge, shape("h2", true)).await?;
            h2 = Some(stack);
            // A stack of its own, since idle connections of nginx use the agent's streams.
            if Nginx::is_installed()? {
                let stack = Culvert::start(&edge, shape("h2", false)).await?;
                nginx = Some(Nginx::start(stack).await?);
            }
        }
        let peer = match rathole {
            Some(binary) => Some(Peer::start(binary, &edge).await?),
            None => None,
        };
        Ok(Self {
            edge,
            relays,
            quic,
            h2,
            nginx,
            peer,
        })
    }

    /// Returns the ids of the processes of all systems.
    pub(crate) fn processes(&mut self) -> Vec<u32> {
        let mut all = self.edge.processes();
        for relay in &self.relays {
            all.extend(relay.server.id().into_iter().chain(relay.agent.id()));
        }
        let behind_nginx = self.nginx.as_mut().map(|nginx| &mut nginx.stack);
        let stacks = [self.quic.as_mut(), self.h2.as_mut(), behind_nginx];
        for stack in stacks.into_iter().flatten() {
            all.extend(stack.server_process());
            all.extend(stack.agent_process());
            all.extend(stack.hop_process());
        }
        all.extend(self.nginx.as_ref().and_then(|nginx| nginx.process.id()));
        if let Some(peer) = &self.peer {
            all.extend(peer.server.id().into_iter().chain(peer.agent.id()));
        }
        all
    }

    /// Returns the systems that carry bytes for callers.
    pub(crate) fn all(&mut self) -> Vec<System> {
        let edge = &self.edge;
        let secure = |address| edge.secure_at(address);
        let mut systems = vec![
            System {
                name: DIRECT,
                plain: plain(edge.plain_address),
                secure: Some(secure(edge.secure_address)),
                server: None,
                agent: None,
                hop: None,
            },
            System {
                name: DIRECT_TLS,
                plain: secure(edge.secure_address),
                secure: None,
                server: None,
                agent: None,
                hop: None,
            },
        ];
        systems.extend(self.relays.iter().map(|relay| System {
            name: relay.name,
            plain: plain(relay.address),
            secure: None,
            server: relay.server.id(),
            agent: relay.agent.id(),
            hop: None,
        }));
        let names = [(QUIC, QUIC_HTTP, QUIC_HOP), (H2, H2_HTTP, H2_HOP)];
        let stacks = [&mut self.quic, &mut self.h2];
        for (stack, (bytes, http, one_hop)) in stacks.into_iter().zip(names) {
            let Some(stack) = stack else { continue };
            let (server, agent) = (stack.server_process(), stack.agent_process());
            let hop = stack.hop_process();
            systems.push(System {
                name: bytes,
                plain: stack.endpoint(),
                secure: Some(secure(stack.secure)),
                server,
                agent,
                hop: None,
            });
            systems.push(System {
                name: http,
                plain: Endpoint {
                    host: format!("{NODE}:{}", edge.plain_address.port()).into(),
                    ..plain(stack.http)
                },
                secure: None,
                server,
                agent,
                hop: None,
            });
            systems.extend(stack.hop_endpoint().map(|plain| System {
                name: one_hop,
                plain,
                secure: None,
                server,
                agent,
                hop,
            }));
        }
        let host = |target: SocketAddr| -> Arc<str> { format!("{NODE}:{}", target.port()).into() };
        if let Some(stack) = &mut self.h2 {
            let (server, agent) = (stack.server_process(), stack.agent_process());
            let endpoints = [
                (
                    H2_HTTPS,
                    Endpoint {
                        tls: Some(stack.https_tls.clone()),
                        host: host(edge.secure_address),
                        ..plain(stack.https)
                    },
                ),
                (
                    H2_CONNECT,
                    Endpoint {
                        host: host(edge.plain_address),
                        is_connect: true,
                        ..plain(stack.connect)
                    },
                ),
            ];
            systems.extend(endpoints.map(|(name, plain)| System {
                name,
                plain,
                secure: None,
                server,
                agent,
                hop: None,
            }));
        }
        // CPU time of three processes does not fit server and agent.
        systems.extend(self.nginx.as_ref().map(|nginx| System {
            name: NGINX,
            plain: plain(nginx.address),
            secure: None,
            server: None,
            agent: None,
            hop: None,
        }));
        if let Some(peer) = &self.peer {
            systems.push(System {
                name: RATHOLE,
                plain: plain(peer.endpoint),
                secure: None,
                server: peer.server.id(),
                agent: peer.agent.id(),
                hop: None,
            });
        }
        systems
    }
}

/// Returns a loopback address on which no program listens.
pub(crate) fn free_address() -> Result<SocketAddr> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

pub(crate) const DIRECT: &str = "direct";
pub(crate) const DIRECT_TLS: &str = "direct-tls";
pub(crate) const FLOOR: &str = "floor";
pub(crate) const QUIC: &str = "culvert-quic";
pub(crate) const H2: &str = "culvert-h2";
pub(crate) const QUIC_HTTP: &str = "culvert-quic-http";
pub(crate) const H2_HTTP: &str = "culvert-h2-http";
pub(crate) const H2_HTTPS: &str = "culvert-h2-https";
pub(crate) const H2_CONNECT: &str = "culvert-h2-connect";
/// Callers at one server, and the agent at another one.
pub(crate) const QUIC_HOP: &str = "culvert-quic-hop";
pub(crate) const H2_HOP: &str = "culvert-h2-hop";
/// Several servers without callers, or with many agents.
pub(crate) const SERVERS: &str = "culvert-servers";
pub(crate) const RELAY_QUIC: &str = "relay-quic";
pub(crate) const RELAY_H2: &str = "relay-h2";
pub(crate) const NGINX: &str = "nginx";
pub(crate) const RATHOLE: &str = "rathole";

/// Names of all systems, in the order of reports.
pub(crate) const NAMES: [&str; 16] = [
    DIRECT, DIRECT_TLS, FLOOR, RELAY_H2, RELAY_QUIC, H2, QUIC, H2_HOP, QUIC_HOP, H2_HTTP,
    QUIC_HTTP, H2_HTTPS, H2_CONNECT, SERVERS, NGINX, RATHOLE,
];
