//! Settings of the listeners for agents and callers: addresses, ports of the nodes, TCP services.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tunnel_process::settings::{ConfigErrors, optional, parse_address, parse_quoted};
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_proto::wire::{PORT_AGENTS, PORT_HTTP, PORT_HTTPS};

use super::certificates::ClientAuth;
use super::kubernetes::KubernetesSettings;
use super::{RawConfig, RawTcpService};
use tunnel_routing::destination::{Destination, Scheme, TcpService};
use tunnel_routing::policy::PortPolicy;

/// Maximum number of extra ports. A mistyped range must not open thousands of sockets.
pub const EXTRA_PORTS_MAX: usize = 64;

#[derive(Debug, Clone)]
pub struct ListenerSettings {
    /// Addresses of port 10262, in order of preference.
    pub agents: Vec<SocketAddr>,
    /// Address of the HTTPS listener, port 10263.
    pub https: Option<SocketAddr>,
    /// Address of the HTTP listener, port 10264.
    pub http: Option<SocketAddr>,
    /// Addresses on which the extra ports are bound.
    pub proxy_ports: ProxyPortListen,
    pub services: Vec<(SocketAddr, TcpService)>,
}

/// The addresses on which extra proxy ports are bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyPortListen {
    /// Extra ports are not bound.
    Off,
    /// Each port is bound on the host of the listener with its scheme.
    WithListener,
    /// All ports are bound on this host.
    Host(IpAddr),
}

impl ListenerSettings {
    pub(super) fn check(
        raw: &RawConfig,
        ports: &PortPolicy,
        client_auth: Option<&ClientAuth>,
        kubernetes: Option<&KubernetesSettings>,
        errors: &mut ConfigErrors,
    ) -> Self {
        let requires_certificates = client_auth.is_some_and(|auth| auth.is_required);
        let in_cluster = kubernetes.is_some_and(|settings| settings.in_cluster);
        let https_default: SocketAddr = if requires_certificates || in_cluster {
            (Ipv6Addr::UNSPECIFIED, PORT_HTTPS).into()
        } else {
            loopback(PORT_HTTPS)
        };
        let settings = Self {
            agents: errors.parse_with(
                "--agent-listen",
                raw.agent_listen.as_deref(),
                vec![
                    (Ipv6Addr::UNSPECIFIED, PORT_AGENTS).into(),
                    (Ipv4Addr::UNSPECIFIED, PORT_AGENTS).into(),
                ],
                |text| parse_address(text).map(|address| vec![address]),
            ),
            https: errors.parse_with(
                "--https-listen",
                raw.https_listen.as_deref(),
                Some(https_default),
                optional("off", parse_address),
            ),
            http: errors.parse_with(
                "--http-listen",
                raw.http_listen.as_deref(),
                Some(loopback(PORT_HTTP)),
                optional("off", parse_address),
            ),
            proxy_ports: ProxyPortListen::check(raw, kubernetes.is_some(), errors),
            services: raw
                .services
                .iter()
                .filter_map(|service| check_tcp_service(service, ports, errors))
                .collect(),
        };
        settings.refuse_same_address(errors);
        let allows_unauthenticated = errors.parse(
            "--allow-unauthenticated",
            raw.allow_unauthenticated.as_deref(),
            false,
        );
        if !allows_unauthenticated && !in_cluster {
            let follows_lists = kubernetes.is_some();
            settings.refuse_unauthenticated(ports, requires_certificates, follows_lists, errors);
        }
        if settings.extra(ports).len() > EXTRA_PORTS_MAX {
            errors.add(
                "--proxy-port-listen",
                format!("would bind more than {EXTRA_PORTS_MAX} ports"),
            );
        }
        settings
    }

    /// Returns the extra ports on which the server listens, with their addresses and schemes.
    pub fn extra(&self, ports: &PortPolicy) -> Vec<(SocketAddr, Port, Scheme)> {
        if self.proxy_ports == ProxyPortListen::Off {
            return Vec::new();
        }
        let host = |scheme: Scheme| match self.proxy_ports {
            ProxyPortListen::Off => None,
            ProxyPortListen::Host(host) => Some(host),
            ProxyPortListen::WithListener => {
                let listener = match scheme {
                    Scheme::Http => self.http,
                    Scheme::Https => self.https,
                };
                listener.map(|address| address.ip())
            }
        };
        ports
            .extra_ports()
            .filter_map(|(port, scheme)| Some(((host(scheme)?, port.get()).into(), port, scheme)))
            .collect()
    }

    /// Returns a warning if the HTTPS listener is on the network and accepts callers without a
    /// certificate.
    pub(super) fn warning(
        &self,
        client_auth: Option<&ClientAuth>,
        kubernetes: Option<&KubernetesSettings>,
    ) -> Option<String> {
        // In a cluster, callers without a certificate have tokens that kubelets verify.
        let in_cluster = kubernetes.is_some_and(|settings| settings.in_cluster);
        let is_authenticated = client_auth.is_some_and(|auth| auth.is_required || in_cluster);
        let wide = self
            .https
            .filter(|address| !address.ip().to_canonical().is_loopback());
        wide.filter(|_| !is_authenticated).map(|address| {
            format!(
                "--https-listen {address} accepts callers without a certificate: any caller that can connect reaches the nodes' \
                 allowed ports; set --client-ca and --https-client-auth require"
            )
        })
    }

    /// Refuses two services with one address, of which one could not listen.
    fn refuse_same_address(&self, errors: &mut ConfigErrors) {
        let fixed = self
            .services
            .iter()
            .filter(|(address, _)| address.port() != 0);
        let mut names = BTreeMap::new();
        for (address, service) in fixed {
            if let Some(first) = names.insert(address, &service.name) {
                errors.add(
                    &format!("services: {}", service.name),
                    format!("has the address {address} of the service {first}"),
                );
            }
        }
    }

    /// Requires an explicit setting for listeners that anyone on the network could use. With
    /// `follows_lists`, a ConfigMap may name ports of plain HTTP at any time.
    fn refuse_unauthenticated(
        &self,
        ports: &PortPolicy,
        requires_certificates: bool,
        follows_lists: bool,
        errors: &mut ConfigErrors,
    ) {
        let mut refuse = |setting: &str, address: SocketAddr| {
            if !address.ip().to_canonical().is_loopback() {
                errors.add(
                    setting,
                    format!(
                        "{address} would let anyone on the network reach the nodes; listen on loopback, require \
                         client certificates (--client-ca and --https-client-auth require, HTTPS listener only), or set \
                         --allow-unauthenticated"
                    ),
                );
            }
        };
        if let Some(address) = self.http {
            refuse("--http-listen", address);
        }
        if let Some(address) = self.https.filter(|_| !requires_certificates) {
            refuse("--https-listen", address);
        }
        let extra: Vec<(SocketAddr, Scheme)> = match self.proxy_ports {
            ProxyPortListen::Host(host) if follows_lists => {
                vec![((host, PORT_HTTP).into(), Scheme::Http)]
            }
            ProxyPortListen::Off | ProxyPortListen::WithListener | ProxyPortListen::Host(_) => {
                let extra = self.extra(ports).into_iter();
                extra
                    .map(|(address, _, scheme)| (address, scheme))
                    .collect()
            }
        };
        for (address, scheme) in extra {
            if scheme == Scheme::Http || !requires_certificates {
                refuse("--proxy-port-listen", address);
            }
        }
        for (address, service) in &self.services {
            refuse(&format!("services: {}", service.name), *address);
        }
    }
}

impl ProxyPortListen {
    fn check(raw: &RawConfig, has_cluster: bool, errors: &mut ConfigErrors) -> Self {
        let default = if has_cluster {
            Self::Off
        } else {
            Self::WithListener
        };
        errors.parse_with(
            "--proxy-port-listen",
            raw.proxy_port_listen.as_deref(),
            default,
            |text| match text {
                "off" => Ok(Self::Off),
                host => host.parse::<IpAddr>().map(Self::Host).map_err(|error| {
                    format!("{host:?}: {error}; give an address without a port, or off")
                }),
            },
        )
    }
}

/// Returns the addresses that agents dial.
pub(super) fn advertised(raw: &RawConfig, errors: &mut ConfigErrors) -> Vec<String> {
    let texts = raw.advertise.iter().filter(|text| !text.trim().is_empty());
    errors.parse_list("--advertise", texts, host_and_port)
}

/// Returns whether the text is the name of a host in DNS.
fn is_host_name(text: &str) -> bool {
    let name = text.parse::<NodeName>();
    name.is_ok_and(|name| name.is_host_name())
}

/// Checks an address that agents or servers dial: `HOST:PORT` with a name or an IP address. A list
/// may have spaces after its commas, because agents accept them.
pub(super) fn host_and_port(text: &str) -> Result<String, String> {
    let text = text.trim();
    let is_valid = text.rsplit_once(':').is_some_and(|(host, port)| {
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let is_host = bare.map_or_else(
            || is_host_name(host) || host.parse::<Ipv4Addr>().is_ok(),
            |address| address.parse::<Ipv6Addr>().is_ok(),
        );
        is_host && port.parse::<Port>().is_ok()
    });
    if !is_valid {
        return Err(format!("{text:?} is not HOST:PORT"));
    }
    Ok(text.to_owned())
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Returns the service and the address of its listener.
fn check_tcp_service(
    raw: &RawTcpService,
    ports: &PortPolicy,
    errors: &mut ConfigErrors,
) -> Option<(SocketAddr, TcpService)> {
    let setting = format!("services: {}", raw.name);
    if raw
        .protocol
        .as_deref()
        .is_some_and(|protocol| protocol != "tcp")
    {
        errors.add(&setting, "protocol must be tcp");
    }
    let listen = errors.ok_or_record(&format!("{setting}: listen"), parse_address(&raw.listen));
    let node = errors.ok_or_record(&format!("{setting}: node"), raw.node.parse::<NodeName>());
    let target = tcp_service_target(&raw.target, ports);
    let target = errors.ok_or_record(&format!("{setting}: target"), target);
    let service = TcpService {
        name: raw.name.clone(),
        destination: Destination {
            node: node?,
            target: target?,
        },
    };
    Some((listen?, service))
}

/// Parses the target of a service. A bare port is a port of the node, on its loopback if the ports
/// say so. A host is another machine, or loopback.
pub(super) fn tcp_service_target(text: &str, ports: &PortPolicy) -> Result<Target, String> {
    let Some((host, port)) = text.rsplit_once(':') else {
        let port = parse_quoted::<Port>(text)?;
        return Ok(ports.unlisted_target(port));
    };
    let port = port
        .parse::<Port>()
        .map_err(|error| format!("{text:?}: {error}"))?;
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    if host == "localhost"
        || host
            .parse::<IpAddr>()
            .is_ok_and(|address| address.is_loopback())
    {
        return Ok(Target::Loopback(port));
    }
    if host.parse::<IpAddr>().is_err() && !is_host_name(host) {
        return Err(format!("{text:?} is not PORT or HOST:PORT"));
    }
    Ok(Target::Host(host.into(), port))
}
