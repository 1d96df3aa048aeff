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

use super::bind::{PROXY_PORT_LISTEN, bind_both, listen};
use super::connect::ConnectSockets;
use super::context::ServerContext;
use crate::config::Config;
use crate::ingress::client_auth::ListenerTls;
use crate::ingress::{HttpListener, ListenerKind};
use tunnel_dns::{DnsSocket, DnsSockets};
use tunnel_routing::destination::Scheme;

pub(super) struct Sockets {
    pub(super) tcp: TcpListener,
    pub(super) quic: Arc<QuicAcceptor>,
    pub(super) listeners: Vec<(TcpListener, ListenerKind)>,
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
    meta: SocketAddr,
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
        dns,
        connect,
        peers,
        status,
        bound,
    })
}

/// Binds the HTTP and HTTPS listeners and those of TCP services. Adds their addresses to `bound`.
async fn bind_listeners(
    config: &Config,
    tls: &Arc<ListenerTls>,
    bound: &mut BoundAddrs,
) -> anyhow::Result<Vec<(TcpListener, ListenerKind)>> {
    let http_listener = |name, https: bool, implied_port| {
        let (scheme, tls) = if https {
            (Scheme::Https, Some(tls.clone()))
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
        let listener = listen(address, PROXY_PORT_LISTEN).await?;
        bound.proxy.push(listener.local_addr()?);
        listeners.push((listener, http_listener("proxy", https, Some(port))));
    }
    for (address, service) in &config.listeners.services {
        let listener = listen(*address, "services").await?;
        bound
            .services
            .push((service.name.clone(), listener.local_addr()?));
        listeners.push((
            listener,
            ListenerKind::TcpService(Arc::new(service.clone())),
        ));
    }
    Ok(listeners)
}

#[derive(Debug, Clone)]
pub struct BoundAddrs {
    /// Address for agents, UDP and TCP.
    pub agents: SocketAddr,
    /// Address for other servers.
    pub peers: Option<SocketAddr>,
    pub https: Option<SocketAddr>,
    pub http: Option<SocketAddr>,
    pub meta: SocketAddr,
    /// Address of the status page.
    pub status: Option<SocketAddr>,
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

    /// Returns the listeners that are no TCP services.
    fn listeners(&self) -> impl Iterator<Item = (&'static str, SocketAddr)> {
        let single = [
            ("agents", Some(self.agents)),
            ("peers", self.peers),
            ("https", self.https),
            ("http", self.http),
            ("meta", Some(self.meta)),
            ("status", self.status),
            ("dns", self.dns),
            ("connect", self.connect),
        ];
        let bound = single
            .into_iter()
            .filter_map(|(listener, address)| Some((listener, address?)));
        bound.chain(self.proxy.iter().map(|address| ("proxy", *address)))
    }

    /// Returns the ports that callers never reach as ports of a node.
    pub(super) fn reserved_ports(&self) -> Vec<Port> {
        let (agents, meta) = (Some(self.agents), Some(self.meta));
        let own = [agents, self.https, self.http, meta, self.peers, self.status];
        own.iter()
            .flatten()
            .filter_map(|address| Port::new(address.port()))
            .collect()
    }

    pub(super) fn tcp_ports(&self) -> Vec<Port> {
        let services = self.services.iter().map(|(_, address)| *address);
        let listeners = self.listeners().map(|(_, address)| address);
        let all = listeners.chain(services);
        all.filter_map(|address| Port::new(address.port()))
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
