//! The sockets of the server and their addresses. All are bound before any component runs, so that
//! a conflict is detected at start.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::net::TcpListener;
use tracing::info;
use tunnel_process::host::primary_address;
use tunnel_proto::transport::quic::{QuicAcceptor, QuicKeys};
use tunnel_proto::wire::name::Port;

use super::bind::{bind_both, listen};
use super::connect::ConnectSockets;
use super::context::ServerContext;
use crate::config::Config;
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::{HttpListener, ListenerKind};
use tunnel_dns::{DnsSocket, DnsSockets};
use tunnel_routing::destination::{Scheme, TcpService};

pub(super) struct Sockets {
    pub(super) tcp: TcpListener,
    pub(super) quic: Arc<QuicAcceptor>,
    pub(super) listeners: Vec<(TcpListener, ListenerKind)>,
    pub(super) services: Vec<ServiceSocket>,
    pub(super) dns: Option<DnsSockets>,
    pub(super) connect: ConnectSockets,
    pub(super) peers: Option<TcpListener>,
    pub(super) status: Option<TcpListener>,
    pub(super) bound: BoundAddrs,
}

pub(super) async fn bind(
    quic_tls: Arc<ServerConfig>,
    quic_keys: &QuicKeys,
    listener_tls: &Arc<ListenerTls>,
    meta: Option<SocketAddr>,
    context: &ServerContext,
) -> anyhow::Result<Sockets> {
    let (config, settings) = (&context.config, &context.session_settings);
    let (tcp, quic) = bind_both(&config.listeners.agents, "--agent-listen", |address| {
        QuicAcceptor::bind(address, quic_tls.clone(), quic_keys, settings.clone())
    })
    .await?;
    let peers = match config.peers.listen {
        Some(address) => Some(listen(address, "--peer-listen").await?),
        None => None,
    };
    let status = match &config.status_page {
        Some(settings) => Some(listen(settings.listen, "--status-listen").await?),
        None => None,
    };
    let mut bound = BoundAddrs {
        agents: tcp.local_addr()?,
        peers: peers.as_ref().map(TcpListener::local_addr).transpose()?,
        https: None,
        http: None,
        meta,
        status: status.as_ref().map(TcpListener::local_addr).transpose()?,
        proxy: Vec::new(),
        services: Vec::new(),
        dns: None,
        connect: None,
    };
    let listeners = bind_listeners(config, listener_tls, &mut bound).await?;
    let services = bind_services(config, &mut bound).await?;
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
        listeners,
        services,
        dns,
        connect,
        peers,
        status,
        bound,
    })
}

/// Binds the HTTP and HTTPS listeners. Adds their addresses to `bound`.
async fn bind_listeners(
    config: &Config,
    tls: &Arc<ListenerTls>,
    bound: &mut BoundAddrs,
) -> anyhow::Result<Vec<(TcpListener, ListenerKind)>> {
    let mut listeners = Vec::new();
    if let Some(address) = config.listeners.https {
        let listener = listen(address, "--https-listen").await?;
        bound.https = Some(listener.local_addr()?);
        listeners.push((listener, http_listener("https", Scheme::Https, None, tls)));
    }
    if let Some(address) = config.listeners.http {
        let listener = listen(address, "--http-listen").await?;
        bound.http = Some(listener.local_addr()?);
        listeners.push((listener, http_listener("http", Scheme::Http, None, tls)));
    }
    Ok(listeners)
}

/// The socket of a TCP service, with its configured address.
pub(super) struct ServiceSocket {
    pub(super) listener: TcpListener,
    pub(super) address: SocketAddr,
    pub(super) service: TcpService,
}

/// Binds the listeners of the TCP services. Adds their addresses to `bound`.
async fn bind_services(
    config: &Config,
    bound: &mut BoundAddrs,
) -> anyhow::Result<Vec<ServiceSocket>> {
    let mut sockets = Vec::new();
    for (address, service) in &config.listeners.services {
        let listener = listen(*address, "services").await?;
        let local = listener.local_addr()?;
        bound.services.push((service.name.clone(), local));
        sockets.push(ServiceSocket {
            listener,
            address: *address,
            service: service.clone(),
        });
    }
    Ok(sockets)
}

/// Returns a listener that routes requests with the scheme to https or http targets. `implied_port`
/// is the port of the target if Host contains none.
pub(super) fn http_listener(
    name: &'static str,
    scheme: Scheme,
    implied_port: Option<Port>,
    tls: &Arc<ListenerTls>,
) -> ListenerKind {
    ListenerKind::Http(Arc::new(HttpListener {
        name,
        scheme,
        implied_port,
        tls: (scheme == Scheme::Https).then(|| tls.clone()),
        connect: None,
    }))
}

#[derive(Debug, Clone)]
pub struct BoundAddrs {
    /// Address for agents, UDP and TCP.
    pub agents: SocketAddr,
    /// Address for other servers.
    pub peers: Option<SocketAddr>,
    pub https: Option<SocketAddr>,
    pub http: Option<SocketAddr>,
    pub meta: Option<SocketAddr>,
    /// Address of the console.
    pub status: Option<SocketAddr>,
    /// Addresses of the extra ports that were bound at start.
    pub proxy: Vec<SocketAddr>,
    pub services: Vec<(String, SocketAddr)>,
    /// Address of the embedded DNS, UDP and TCP.
    pub dns: Option<SocketAddr>,
    pub connect: Option<SocketAddr>,
}

impl BoundAddrs {
    pub(super) fn log(&self) {
        for (listener, address) in self.listeners() {
            info!(listener, %address, "listening");
        }
        for (name, address) in &self.services {
            info!(listener = "service", service = name, %address, "listening");
        }
    }

    /// Returns the listeners that are neither extra ports nor TCP services.
    fn listeners(&self) -> impl Iterator<Item = (&'static str, SocketAddr)> {
        let single = [
            ("agents", Some(self.agents)),
            ("peers", self.peers),
            ("https", self.https),
            ("http", self.http),
            ("meta", self.meta),
            ("status", self.status),
            ("dns", self.dns),
            ("connect", self.connect),
        ];
        single
            .into_iter()
            .filter_map(|(listener, address)| Some((listener, address?)))
    }

    /// Returns the ports that callers never reach as ports of a node.
    pub(super) fn reserved_ports(&self) -> Vec<Port> {
        let agents = Some(self.agents);
        let own = [
            agents,
            self.https,
            self.http,
            self.meta,
            self.peers,
            self.status,
        ];
        own.iter()
            .flatten()
            .filter_map(|address| Port::new(address.port()))
            .collect()
    }

    /// Returns the ports of all listeners over TCP but those of TCP services.
    pub(super) fn tcp_ports(&self) -> Vec<Port> {
        let listeners = self.listeners().map(|(_, address)| address);
        listeners
            .filter_map(|address| Port::new(address.port()))
            .collect()
    }

    /// Returns the addresses that agents should dial: the configured ones, or else this host's
    /// address.
    pub(super) fn advertised(&self, configured: &[String]) -> Vec<String> {
        if !configured.is_empty() {
            return configured.to_vec();
        }
        let address = if self.agents.ip().is_unspecified() {
            primary_address()
        } else {
            Some(self.agents.ip())
        };
        let address = address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        vec![SocketAddr::new(address, self.agents.port()).to_string()]
    }
}
