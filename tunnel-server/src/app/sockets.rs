//! The sockets of the server. All are bound before any component runs, so that a conflict is
//! detected at start.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use rustls::ServerConfig;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;
use tracing::info;
use tunnel_proto::process::host::{host_name, primary_address};
use tunnel_proto::transport::SessionSettings;
use tunnel_proto::transport::quic::{QuicAcceptor, QuicKeys};
use tunnel_proto::wire::name::Port;

use super::connect::ConnectSockets;
use super::identity::{CredentialWatcher, watch_pair};
use crate::ca::{LocalCa, ServingNames};
use crate::config::Config;
use crate::dns::{DnsSocket, DnsSockets};
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::{HttpListener, ListenerKind};
use crate::routing::decision::Scheme;
use crate::routing::routes::Routes;

/// Maximum number of attempts to find a port that is free for TCP and UDP, if port 0 is configured.
const SAME_PORT_TRIES: usize = 16;

/// The addresses to which the sockets are bound.
#[derive(Debug, Clone)]
pub struct BoundAddrs {
    /// Address for agents, UDP and TCP.
    pub agents: SocketAddr,
    /// Address of the HTTPS listener.
    pub https: Option<SocketAddr>,
    /// Address of the HTTP listener.
    pub http: Option<SocketAddr>,
    /// Address of the meta port.
    pub meta: SocketAddr,
    /// Addresses of the extra proxy ports.
    pub proxy: Vec<SocketAddr>,
    /// Addresses of TCP services, with their names.
    pub services: Vec<(String, SocketAddr)>,
    /// Address of the embedded DNS, UDP and TCP.
    pub dns: Option<SocketAddr>,
    /// Address of the CONNECT listener.
    pub connect: Option<SocketAddr>,
}

/// The bound sockets of the server.
pub(super) struct Sockets {
    pub(super) tcp: TcpListener,
    pub(super) quic: Arc<QuicAcceptor>,
    pub(super) meta: TcpListener,
    pub(super) listeners: Vec<(TcpListener, ListenerKind)>,
    pub(super) dns: Option<DnsSockets>,
    pub(super) connect: ConnectSockets,
    pub(super) bound: BoundAddrs,
}

pub(super) async fn bind(
    config: &Config,
    (quic_tls, keys, settings): (Arc<ServerConfig>, &QuicKeys, &SessionSettings),
    listener_tls: Arc<ListenerTls>,
    meta: TcpListener,
) -> anyhow::Result<Sockets> {
    let (tcp, quic) = bind_both(&config.listeners.agents, "--agent-listen", |address| {
        QuicAcceptor::bind(address, quic_tls.clone(), keys, settings.clone())
    })
    .await?;
    let mut bound = BoundAddrs {
        agents: tcp.local_addr()?,
        https: None,
        http: None,
        meta: meta.local_addr()?,
        proxy: Vec::new(),
        services: Vec::new(),
        dns: None,
        connect: None,
    };
    let http_listener = |name, https: bool, implied_port| {
        let (scheme, tls) = if https {
            (Scheme::Https, Some(listener_tls.clone()))
        } else {
            (Scheme::Http, None)
        };
        ListenerKind::Http(Arc::new(HttpListener {
            name,
            scheme,
            implied_port,
            tls,
            connect: None,
        }))
    };
    let mut listeners = Vec::new();
    if let Some(address) = config.listeners.https {
        let listener = listen(address, "--https-listen").await?;
        bound.https = Some(listener.local_addr()?);
        listeners.push((listener, http_listener("https", true, None)));
    }
    if let Some(address) = config.listeners.http {
        let listener = listen(address, "--http-listen").await?;
        bound.http = Some(listener.local_addr()?);
        listeners.push((listener, http_listener("http", false, None)));
    }
    for (address, port, https) in config.extra_listeners() {
        let listener = listen(address, "--proxy-port-listen").await?;
        bound.proxy.push(listener.local_addr()?);
        listeners.push((listener, http_listener("proxy", https, Some(port))));
    }
    for (address, service) in &config.listeners.services {
        let listener = listen(*address, "services").await?;
        bound
            .services
            .push((service.name.clone(), listener.local_addr()?));
        listeners.push((listener, ListenerKind::Service(Arc::new(service.clone()))));
    }
    let connect = ConnectSockets::bind(config.connect.as_ref()).await?;
    bound.connect = connect.address()?;
    let dns = match &config.dns {
        Some(settings) => {
            let (tcp, udp) = bind_both(&[settings.listen], "--dns-listen", DnsSocket::bind).await?;
            bound.dns = Some(tcp.local_addr()?);
            Some(DnsSockets { udp, tcp })
        }
        None => None,
    };
    Ok(Sockets {
        tcp,
        quic: Arc::new(quic),
        meta,
        listeners,
        dns,
        connect,
        bound,
    })
}

pub(super) fn log_bound(bound: &BoundAddrs) {
    let log = |listener: &str, address: &SocketAddr| info!(listener, %address, "listening");
    log("agents", &bound.agents);
    bound.https.iter().for_each(|address| log("https", address));
    bound.http.iter().for_each(|address| log("http", address));
    log("meta", &bound.meta);
    bound.dns.iter().for_each(|address| log("dns", address));
    bound
        .connect
        .iter()
        .for_each(|address| log("connect", address));
    bound.proxy.iter().for_each(|address| log("proxy", address));
    for (name, address) in &bound.services {
        info!(listener = "service", service = name, %address, "listening");
    }
}

/// Binds TCP and UDP to the same port number, on the first address that can be bound.
async fn bind_both<U>(
    addresses: &[SocketAddr],
    setting: &str,
    bind_udp: impl Fn(SocketAddr) -> io::Result<U>,
) -> anyhow::Result<(TcpListener, U)> {
    let mut failures = Vec::new();
    for &address in addresses {
        for _ in 0..SAME_PORT_TRIES {
            let both = match TcpListener::bind(address).await {
                Ok(tcp) => tcp.local_addr().and_then(&bind_udp).map(|udp| (tcp, udp)),
                Err(error) => Err(error),
            };
            match both {
                Ok(both) => return Ok(both),
                // The port that the system chose for TCP may be in use for UDP. The next attempt
                // gets another one.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse && address.port() == 0 => {}
                Err(error) => {
                    failures.push(format!("{address}: {error}"));
                    break;
                }
            }
        }
    }
    bail!(
        "cannot listen on UDP and TCP ({setting}): {}",
        failures.join("; ")
    )
}

pub(super) async fn listen(
    address: SocketAddr,
    setting: &'static str,
) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address} ({setting})"))
}

/// Returns the names of the HTTPS listener: those of this host and those of the configuration.
pub(super) fn serving_names(config: &Config) -> ServingNames {
    let mut names = vec!["localhost".to_owned()];
    names.extend(
        host_name()
            .ok()
            .map(|name| name.to_ascii_lowercase())
            .filter(|name| !name.is_empty()),
    );
    let mut addresses: Vec<IpAddr> = vec![[127, 0, 0, 1].into(), Ipv6Addr::LOCALHOST.into()];
    addresses.extend(primary_address());
    let connect = config
        .connect
        .as_ref()
        .and_then(|http_listener| http_listener.listen);
    let listening = [config.listeners.https, connect]
        .into_iter()
        .flatten()
        .map(|address| address.ip());
    addresses
        .extend(listening.filter(|address| !address.is_unspecified() && !address.is_loopback()));
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
    names.extend(config.https_certificate.names.iter().cloned());
    addresses.extend(config.https_certificate.addresses.iter().copied());
    ServingNames::new(names, addresses)
}

/// Returns the resolver of the listeners' serving certificates.
pub(super) fn serving_certificates(
    config: &Config,
    (ca, names): (&Arc<LocalCa>, &ServingNames),
    routes: &Routes,
    watcher: &CredentialWatcher<'_>,
) -> anyhow::Result<Arc<dyn ResolvesServerCert>> {
    Ok(match &config.https_certificate.files {
        Some(pair) => watch_pair("https_certificate", pair, watcher, |_| {})
            .context("--https-cert-file, --https-key-file")?,
        None => {
            let routes = routes.clone();
            ca.serving_resolver(
                Arc::new(move |name| routes.load().knows(name)),
                names.clone(),
            )
        }
    })
}

pub(super) fn reserved_ports(bound: &BoundAddrs) -> Vec<Port> {
    let own = [
        Some(bound.agents),
        bound.https,
        bound.http,
        Some(bound.meta),
    ];
    own.iter()
        .flatten()
        .filter_map(|address| Port::new(address.port()))
        .collect()
}

/// Returns every TCP port that is bound.
pub(super) fn bound_ports(bound: &BoundAddrs) -> Vec<Port> {
    let single = [bound.https, bound.http, bound.dns, bound.connect];
    let many = bound.proxy.iter().copied();
    let many = many.chain(bound.services.iter().map(|(_, address)| *address));
    let all = [bound.agents, bound.meta].into_iter().chain(many);
    all.chain(single.into_iter().flatten())
        .filter_map(|address| Port::new(address.port()))
        .collect()
}

/// Returns the addresses that agents should dial: the configured ones, or else this host's address.
pub(super) fn advertised(config: &Config, agents: SocketAddr) -> Vec<String> {
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
            address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            agents.port(),
        )
        .to_string(),
    ]
}
