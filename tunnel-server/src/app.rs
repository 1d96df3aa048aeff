//! Builds all parts from a configuration, binds every socket, and ends them in order.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use prometheus_client::registry::Registry as MetricsRegistry;
use rustls::ServerConfig;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject as _;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};
use tunnel_proto::process::meta::{Meta, Readiness};
use tunnel_proto::process::shutdown::{DrainEnd, Shutdown};
use tunnel_proto::transport::Acceptor as _;
use tunnel_proto::transport::quic::{QuicAcceptor, QuicSettings};
use tunnel_proto::wire::code::CloseCode;
use tunnel_proto::wire::name::Port;
use tunnel_proto::{process::meta, tls};

use crate::acceptor::Acceptor;
use crate::admin::{self, AdminState};
use crate::config::Config;
use crate::data::DataDir;
use crate::enroll::Enrollment;
use crate::ingress::target::Scheme;
use crate::ingress::{Door, DoorLimits, Doors, Mode};
use crate::issuer::LocalCa;
use crate::metrics::Metrics;
use crate::nodes::KnownNodes;
use crate::registry::Registry;
use crate::routes::{RouteTable, Routes};
use crate::session::{SessionLimits, Sessions};
use crate::status;
use crate::tokens::TokenStore;

/// Tries to find a port number that is free for TCP and UDP when asked for port 0.
const SAME_PORT_TRIES: usize = 16;

/// The addresses really bound.
#[derive(Debug, Clone)]
pub struct Bound {
    /// Agents, UDP and TCP.
    pub agents: SocketAddr,
    /// The TLS door.
    pub https: Option<SocketAddr>,
    /// The plain door.
    pub http: Option<SocketAddr>,
    /// Meta.
    pub meta: SocketAddr,
    /// Extra proxy ports.
    pub proxy: Vec<SocketAddr>,
    /// TCP services by name.
    pub services: Vec<(String, SocketAddr)>,
}

/// A running server.
#[derive(Debug)]
pub struct App {
    bound: Bound,
    config: Config,
    shutdown: Shutdown,
    readiness: Readiness,
    registry: Arc<Registry>,
    quic: Arc<QuicAcceptor>,
    drivers: TaskTracker,
    ca: Arc<LocalCa>,
    tokens: Arc<TokenStore>,
    nodes: Arc<KnownNodes>,
    /// Held until the process ends: one server per data directory.
    _lock: std::fs::File,
}

/// What is bound before anything runs, so that a conflict is seen at start.
struct Sockets {
    tcp: TcpListener,
    quic: Arc<QuicAcceptor>,
    meta: TcpListener,
    doors: Vec<(TcpListener, Mode)>,
    bound: Bound,
}

impl App {
    /// Starts every part; returns once all sockets are bound.
    ///
    /// # Errors
    /// When the data directory is in use or damaged, a file cannot be read, or an address cannot be bound.
    pub async fn start(config: Config, shutdown: Shutdown) -> anyhow::Result<Self> {
        for warning in &config.warnings {
            warn!("{warning}");
        }
        let data = DataDir::open(&config.data_dir)
            .with_context(|| config.data_dir.display().to_string())?;
        let Some(lock) = data.lock()? else {
            bail!(
                "another tunnel-server uses {}; give this one its own --data-dir",
                config.data_dir.display()
            );
        };
        let readiness = Readiness::default();
        let starting = readiness.block("listeners");
        let ca = Arc::new(LocalCa::load_or_create(&data)?);
        let tokens = Arc::new(TokenStore::open(&data)?);
        let nodes = Arc::new(KnownNodes::open(&data)?);
        let mut metrics_registry = MetricsRegistry::default();
        let metrics = Metrics::new(&mut metrics_registry);
        let registry = Arc::new(Registry::new(usize::try_from(
            config.limits.streams_per_agent,
        )?));
        let routes = Routes::default();
        nodes.start(&shutdown);
        follow_nodes(&nodes, &routes, &metrics, &shutdown);

        let server_credential = {
            let metrics = metrics.clone();
            ca.server_resolver(Box::new(move |not_after| metrics.certificate(not_after)))
        };
        let agent_roots = tls::roots([ca.root().clone()])?;
        let session_tls = tls::session_server(server_credential.clone(), agent_roots)?;
        let door_tls = door_tls(&config, &ca, &routes)?;
        let sockets = bind(&config, &data, session_tls, door_tls).await?;
        let Sockets {
            tcp,
            quic,
            meta: meta_listener,
            doors,
            bound,
        } = sockets;
        let advertised = advertised(&config, bound.agents);
        data.set_advertised(&advertised)?;

        let drivers = TaskTracker::new();
        let mut policy = config.ports.clone();
        policy.own = own_ports(&bound);
        let shared = Arc::new(Doors {
            routes,
            registry: registry.clone(),
            policy,
            target_tls: tls::target_client()?,
            limits: DoorLimits {
                handshake: config.limits.handshake_timeout,
                request_head_time: config.limits.request_head_timeout,
                request_head_bytes: config.limits.request_head_bytes,
                open: config.limits.open_timeout,
            },
            metrics: metrics.clone(),
            shutdown: shutdown.clone(),
            drivers: drivers.clone(),
        });
        for (listener, mode) in doors {
            shared.start(listener, mode);
        }
        Acceptor {
            quic: quic.clone(),
            tcp,
            enroll_tls: tls::enroll_server(server_credential)?,
            enrollment: Enrollment {
                ca: ca.clone(),
                tokens: tokens.clone(),
                nodes: nodes.clone(),
            },
            sessions: Sessions {
                registry: registry.clone(),
                nodes: nodes.clone(),
                metrics,
                shutdown: shutdown.clone(),
                advertised: advertised.clone(),
                limits: SessionLimits {
                    handshake: config.limits.handshake_timeout,
                    streams: config.limits.streams_per_agent,
                    target_dial: config.limits.target_dial_timeout,
                    drain: config.drain_timeout,
                },
            },
            handshake_limit: config.limits.handshake_timeout,
            pre_auth: Arc::new(Semaphore::new(config.limits.pre_auth_total)),
        }
        .start();
        let list = {
            let (nodes, registry) = (nodes.clone(), registry.clone());
            Arc::new(move || {
                let list = status::list(&nodes, &registry);
                // A structure of texts and numbers always has a JSON form.
                list.iter()
                    .filter_map(|node| serde_json::to_value(node).ok())
                    .collect::<Vec<_>>()
            })
        };
        let state = AdminState {
            ca: ca.clone(),
            tokens: tokens.clone(),
            nodes: nodes.clone(),
            status: list.clone(),
            advertised,
        };
        admin::start(state, &data, &shutdown)?;
        Meta::new(readiness.clone(), metrics_registry)
            .with("/nodes", Box::new(move |peer| nodes_endpoint(peer, list())))
            .start(meta_listener, &shutdown);
        drop(starting);
        Ok(Self {
            bound,
            config,
            shutdown,
            readiness,
            registry,
            quic,
            drivers,
            ca,
            tokens,
            nodes,
            _lock: lock,
        })
    }

    /// The addresses really bound.
    #[must_use]
    pub fn bound(&self) -> &Bound {
        &self.bound
    }

    /// Stopping: cancel its drain token to end the server in order.
    #[must_use]
    pub fn shutdown(&self) -> &Shutdown {
        &self.shutdown
    }

    /// The local CA.
    #[must_use]
    pub fn ca(&self) -> &Arc<LocalCa> {
        &self.ca
    }

    /// Join tokens.
    #[must_use]
    pub fn tokens(&self) -> &Arc<TokenStore> {
        &self.tokens
    }

    /// Known nodes.
    #[must_use]
    pub fn nodes(&self) -> &Arc<KnownNodes> {
        &self.nodes
    }

    /// Connected agents.
    #[must_use]
    pub fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Serves until the drain token is cancelled, then ends: no new work, running work within the drain timeout, sessions
    /// closed after everything sent has arrived.
    pub async fn run(self) {
        tokio::select! {
            () = self.shutdown.drain().cancelled() => {}
            () = self.shutdown.stop().cancelled() => {}
        }
        let _not_ready = self.readiness.block("draining");
        match self.shutdown.drain_within(self.config.drain_timeout).await {
            DrainEnd::Complete => info!("all requests have ended"),
            DrainEnd::Deadline => warn!(
                streams = self.shutdown.work_left(),
                "drain timeout is over, cutting the rest"
            ),
            DrainEnd::Stopped => debug!("stopping without waiting"),
        }
        let closing = TaskTracker::new();
        for agent in self.registry.all() {
            closing.spawn(async move {
                agent
                    .session
                    .close(CloseCode::Draining, "server is stopping")
                    .await
            });
        }
        closing.close();
        tokio::select! {
            () = closing.wait() => self.quic.wait_idle().await,
            () = self.shutdown.stop().cancelled() => {}
        }
        self.shutdown.finish().await;
        self.drivers.close();
        self.drivers.wait().await;
        if let Err(error) = self.nodes.save() {
            warn!(%error, "cannot keep the known nodes");
        }
        info!("stopped");
    }
}

/// Keeps the route table equal to the known nodes.
fn follow_nodes(nodes: &Arc<KnownNodes>, routes: &Routes, metrics: &Metrics, shutdown: &Shutdown) {
    let (nodes, routes, metrics) = (nodes.clone(), routes.clone(), metrics.clone());
    let mut changed = nodes.changed();
    let rebuild = move || {
        let known = nodes.snapshot();
        let table = RouteTable::new(
            known
                .iter()
                .map(|(name, node)| (name, node.addresses.as_slice())),
        );
        metrics.routes(known.len(), table.conflicts().len());
        routes.replace(table);
    };
    rebuild();
    shutdown.spawn_service(async move {
        while changed.changed().await.is_ok() {
            rebuild();
        }
    });
}

async fn bind(
    config: &Config,
    data: &DataDir,
    session_tls: Arc<ServerConfig>,
    door_tls: Arc<ServerConfig>,
) -> anyhow::Result<Sockets> {
    let keys = data.quic_keys()?;
    let limits = &config.limits;
    let settings = QuicSettings {
        stream_window: limits.stream_window,
        connection_window: u64::from(limits.streams_per_agent) * u64::from(limits.stream_window),
        keep_alive: None,
        idle_timeout: limits.idle_timeout(),
    };
    let (tcp, quic) = bind_agents(&config.agent_listen, |address| {
        QuicAcceptor::bind(address, session_tls.clone(), &keys, &settings)
    })
    .await?;
    let meta = listen(config.meta_listen, "--meta-listen").await?;
    let mut bound = Bound {
        agents: tcp.local_addr()?,
        https: None,
        http: None,
        meta: meta.local_addr()?,
        proxy: Vec::new(),
        services: Vec::new(),
    };
    let door = |name, https: bool, implied_port| {
        let (scheme, tls) = if https {
            (Scheme::Https, Some(door_tls.clone()))
        } else {
            (Scheme::Http, None)
        };
        Mode::Http(Arc::new(Door {
            name,
            scheme,
            implied_port,
            tls,
        }))
    };
    let mut doors = Vec::new();
    if let Some(address) = config.https_listen {
        let listener = listen(address, "--https-listen").await?;
        bound.https = Some(listener.local_addr()?);
        doors.push((listener, door("https", true, None)));
    }
    if let Some(address) = config.http_listen {
        let listener = listen(address, "--http-listen").await?;
        bound.http = Some(listener.local_addr()?);
        doors.push((listener, door("http", false, None)));
    }
    for (address, port, https) in config.extra_listeners() {
        let listener = listen(address, "--proxy-port-listen").await?;
        bound.proxy.push(listener.local_addr()?);
        doors.push((listener, door("proxy", https, Some(port))));
    }
    for (address, service) in &config.services {
        let listener = listen(*address, "services").await?;
        bound
            .services
            .push((service.name.clone(), listener.local_addr()?));
        doors.push((listener, Mode::Service(Arc::new(service.clone()))));
    }
    log_bound(&bound);
    Ok(Sockets {
        tcp,
        quic: Arc::new(quic),
        meta,
        doors,
        bound,
    })
}

fn log_bound(bound: &Bound) {
    let log = |listener: &str, address: &SocketAddr| info!(listener, %address, "listening");
    log("agents", &bound.agents);
    bound.https.iter().for_each(|address| log("https", address));
    bound.http.iter().for_each(|address| log("http", address));
    log("meta", &bound.meta);
    bound.proxy.iter().for_each(|address| log("proxy", address));
    for (name, address) in &bound.services {
        info!(listener = "service", service = name, %address, "listening");
    }
}

/// Binds TCP and UDP to one port number, at the first of the addresses that can be bound.
async fn bind_agents(
    addresses: &[SocketAddr],
    quic: impl Fn(SocketAddr) -> io::Result<QuicAcceptor>,
) -> anyhow::Result<(TcpListener, QuicAcceptor)> {
    let mut failures = Vec::new();
    for &address in addresses {
        for _ in 0..SAME_PORT_TRIES {
            let both = match TcpListener::bind(address).await {
                Ok(tcp) => tcp.local_addr().and_then(&quic).map(|quic| (tcp, quic)),
                Err(error) => Err(error),
            };
            match both {
                Ok(both) => return Ok(both),
                // A number that the system picked for TCP may be taken for UDP; it picks another.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && address.port() == 0 => {}
                Err(error) => {
                    failures.push(format!("{address}: {error}"));
                    break;
                }
            }
        }
    }
    bail!(
        "cannot listen for agents (--agent-listen): {}",
        failures.join("; ")
    )
}

async fn listen(address: SocketAddr, setting: &'static str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} ({setting})"))
}

fn door_tls(
    config: &Config,
    ca: &Arc<LocalCa>,
    routes: &Routes,
) -> anyhow::Result<Arc<ServerConfig>> {
    let resolver = match &config.https_certificate {
        Some((chain, key)) => crate::issuer::file_resolver(chain, key)?,
        None => {
            let routes = routes.clone();
            let mut names = vec!["localhost".to_owned()];
            names.extend(host_name());
            let mut addresses: Vec<IpAddr> =
                vec![[127, 0, 0, 1].into(), std::net::Ipv6Addr::LOCALHOST.into()];
            addresses.extend(primary_address());
            let listening = [config.https_listen]
                .into_iter()
                .flatten()
                .map(|address| address.ip());
            addresses.extend(
                listening.filter(|address| !address.is_unspecified() && !address.is_loopback()),
            );
            for host in config
                .advertise
                .iter()
                .filter_map(|advertised| advertised.rsplit_once(':'))
                .map(|(host, _)| host)
            {
                match host.trim_matches(['[', ']']).parse() {
                    Ok(address) => addresses.push(address),
                    Err(_name) => names.push(host.to_owned()),
                }
            }
            ca.door_resolver(
                Arc::new(move |name| routes.load().knows(name)),
                names,
                addresses,
            )
        }
    };
    let client_roots = match &config.client_auth {
        Some((path, required)) => {
            let context = || format!("--client-ca {}", path.display());
            let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(path)
                .and_then(Iterator::collect)
                .with_context(context)?;
            Some((tls::roots(certificates).with_context(context)?, *required))
        }
        None => None,
    };
    Ok(tls::door_server(resolver, client_roots)?)
}

fn own_ports(bound: &Bound) -> Vec<(Port, &'static str)> {
    let own = [
        (Some(bound.agents), "agents"),
        (bound.https, "https"),
        (bound.http, "http"),
        (Some(bound.meta), "meta"),
    ];
    own.iter()
        .filter_map(|(address, name)| Some((Port::new((*address)?.port())?, *name)))
        .collect()
}

/// What agents are told to dial: as configured, else this host's address.
fn advertised(config: &Config, agents: SocketAddr) -> Vec<String> {
    if !config.advertise.is_empty() {
        return config.advertise.clone();
    }
    let address = if agents.ip().is_unspecified() {
        primary_address()
    } else {
        Some(agents.ip())
    };
    vec![
        SocketAddr::new(
            address.unwrap_or(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)),
            agents.port(),
        )
        .to_string(),
    ]
}

/// The address of the default route: a connected UDP socket knows it without sending anything.
#[must_use]
pub fn primary_address() -> Option<IpAddr> {
    let probe = |from: &str, to: &str| {
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    // Documentation addresses (RFC 5737, RFC 3849): routed like any other.
    probe("0.0.0.0:0", "192.0.2.1:9").or_else(|| probe("[::]:0", "[2001:db8::1]:9"))
}

fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    Some(name.trim().to_ascii_lowercase()).filter(|name| !name.is_empty())
}

fn nodes_endpoint(peer: SocketAddr, nodes: Vec<serde_json::Value>) -> meta::Answer {
    if !peer.ip().to_canonical().is_loopback() {
        return meta::text(
            http::StatusCode::FORBIDDEN,
            "only for callers on this host\n",
        );
    }
    meta::json(http::StatusCode::OK, &nodes.into())
}
