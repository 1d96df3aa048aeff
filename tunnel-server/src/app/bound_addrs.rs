//! The addresses of the listeners, and what follows from them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tracing::info;
use tunnel_proto::process::host::primary_address;
use tunnel_proto::wire::name::Port;

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

impl BoundAddrs {
    pub(super) fn log(&self) {
        let log = |listener: &str, address: &SocketAddr| info!(listener, %address, "listening");
        log("agents", &self.agents);
        self.https.iter().for_each(|address| log("https", address));
        self.http.iter().for_each(|address| log("http", address));
        log("meta", &self.meta);
        self.dns.iter().for_each(|address| log("dns", address));
        self.connect
            .iter()
            .for_each(|address| log("connect", address));
        self.proxy.iter().for_each(|address| log("proxy", address));
        for (name, address) in &self.services {
            info!(listener = "service", service = name, %address, "listening");
        }
    }

    /// Returns the ports that callers never reach as ports of a node.
    pub(super) fn reserved_ports(&self) -> Vec<Port> {
        let own = [Some(self.agents), self.https, self.http, Some(self.meta)];
        own.iter()
            .flatten()
            .filter_map(|address| Port::new(address.port()))
            .collect()
    }

    /// Returns every TCP port that is bound.
    pub(super) fn tcp_ports(&self) -> Vec<Port> {
        let single = [self.https, self.http, self.dns, self.connect];
        let many = self.proxy.iter().copied();
        let many = many.chain(self.services.iter().map(|(_, address)| *address));
        let all = [self.agents, self.meta].into_iter().chain(many);
        all.chain(single.into_iter().flatten())
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
