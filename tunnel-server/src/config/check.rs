//! Checks of single settings. Each check returns a value, or records an error that describes the
//! expected form.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tunnel_proto::process::settings::{ConfigErrors, PortSet, parse_duration};
use tunnel_proto::tls::files::KeyPairFiles;
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

use super::{AgentFiles, ProxyPortListen, RawConfig, RawService};
use crate::ingress::service::Service;
use crate::policy::PortPolicy;
use crate::routing::decision::Destination;

pub(super) fn loopback(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

pub(super) fn address(errors: &mut ConfigErrors, setting: &str, text: &str) -> Option<SocketAddr> {
    let parsed = text.parse();
    if parsed.is_err() {
        errors.add(
            setting,
            format!(
                "{:?} is not an address with a port, as in 127.0.0.1:10264 or [::]:10262",
                text
            ),
        );
    }
    parsed.ok()
}

pub(super) fn listener_address(
    errors: &mut ConfigErrors,
    setting: &str,
    text: Option<&str>,
    default: SocketAddr,
) -> Option<SocketAddr> {
    match text {
        None => Some(default),
        Some("off") => None,
        Some(text) => address(errors, setting, text),
    }
}

pub(super) fn port_list(
    errors: &mut ConfigErrors,
    setting: &str,
    text: Option<&str>,
    default: &str,
) -> PortSet {
    errors.unwrap_or_record(setting, text.unwrap_or(default).parse(), PortSet::default())
}

pub(super) fn duration(
    errors: &mut ConfigErrors,
    setting: &str,
    text: Option<&str>,
    default: Duration,
) -> Duration {
    text.map_or(default, |text| {
        errors.unwrap_or_record(setting, parse_duration(text), default)
    })
}

pub(super) fn parsed<T: std::str::FromStr>(
    errors: &mut ConfigErrors,
    setting: &str,
    text: Option<&str>,
    default: T,
) -> T
where
    T::Err: std::fmt::Display,
{
    match text.map(|text| text.parse()) {
        None => default,
        Some(parsed) => errors.unwrap_or_record(setting, parsed, default),
    }
}

pub(super) fn proxy_port_listen(
    errors: &mut ConfigErrors,
    text: Option<&str>,
    has_cluster: bool,
) -> ProxyPortListen {
    match text {
        None if has_cluster => ProxyPortListen::Off,
        None => ProxyPortListen::WithListener,
        Some("off") => ProxyPortListen::Off,
        Some(host) => match host.parse() {
            Ok(host) => ProxyPortListen::Host(host),
            Err(error) => {
                errors.add(
                    "--proxy-port-listen",
                    format!("{host:?}: {error}; give an address without a port, or off"),
                );
                ProxyPortListen::Off
            }
        },
    }
}

pub(super) fn https_certificate(
    errors: &mut ConfigErrors,
    raw: &RawConfig,
) -> Option<KeyPairFiles> {
    match (&raw.https_cert_file, &raw.https_key_file) {
        (Some(certificate), Some(key)) => Some(KeyPairFiles {
            certificate: certificate.into(),
            key: key.into(),
        }),
        (None, None) => None,
        (Some(_), None) => {
            errors.add("--https-cert-file", "needs --https-key-file too");
            None
        }
        (None, Some(_)) => {
            errors.add("--https-key-file", "needs --https-cert-file too");
            None
        }
    }
}

/// Returns the additional names and addresses of the HTTPS listener.
pub(super) fn https_names(
    errors: &mut ConfigErrors,
    raw: &RawConfig,
) -> (Vec<String>, Vec<IpAddr>) {
    let (mut names, mut addresses) = (Vec::new(), Vec::new());
    for text in &raw.https_name {
        match (text.parse(), text.parse::<NodeName>()) {
            (Ok(address), _) => addresses.push(address),
            (Err(_), Ok(name)) => names.push(name.to_string()),
            (Err(_), Err(_)) => {
                errors.add(
                    "--https-name",
                    format!("{text:?} is neither a DNS name nor an IP"),
                );
            }
        }
    }
    (names, addresses)
}

/// Returns the certificate files for port 10262. They must be complete or absent.
pub(super) fn agent_files(errors: &mut ConfigErrors, raw: &RawConfig) -> Option<AgentFiles> {
    match (&raw.agent_ca, &raw.agent_cert_file, &raw.agent_key_file) {
        (Some(ca), Some(certificate), key) => Some(AgentFiles {
            ca: ca.into(),
            pair: KeyPairFiles {
                certificate: certificate.into(),
                key: key.as_ref().unwrap_or(certificate).into(),
            },
        }),
        (None, None, None) => None,
        (Some(_), None, _) => {
            errors.add(
                "--agent-ca",
                "needs --agent-cert-file too: agents of another CA do not know the local one",
            );
            None
        }
        (None, Some(_), _) => {
            errors.add(
                "--agent-cert-file",
                "needs --agent-ca too: agents of the local CA do not know another one",
            );
            None
        }
        (None, None, Some(_)) => {
            errors.add("--agent-key-file", "needs --agent-cert-file too");
            None
        }
    }
}

pub(super) fn client_auth(errors: &mut ConfigErrors, raw: &RawConfig) -> Option<(PathBuf, bool)> {
    let ca = raw.client_ca.as_deref().map(PathBuf::from);
    match raw.https_client_auth.as_deref().unwrap_or("request") {
        "none" => None,
        "request" => ca.map(|path| (path, false)),
        "require" => {
            if ca.is_none() {
                errors.add("--https-client-auth", "require needs --client-ca");
            }
            ca.map(|path| (path, true))
        }
        other => {
            errors.add(
                "--https-client-auth",
                format!("{other:?} is not none, request or require"),
            );
            None
        }
    }
}

/// Checks an address that agents dial: `HOST:PORT` with a name or an IP address. A list may have
/// spaces after its commas, because agents accept them.
pub(super) fn advertised(errors: &mut ConfigErrors, text: &str) -> Option<String> {
    let text = text.trim();
    let host_and_port = text.rsplit_once(':').filter(|(host, port)| {
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let known = bare.map_or_else(
            || host.parse::<NodeName>().is_ok() || host.parse::<Ipv4Addr>().is_ok(),
            |address| address.parse::<Ipv6Addr>().is_ok(),
        );
        known && port.parse::<Port>().is_ok()
    });
    if host_and_port.is_none() {
        errors.add("--advertise", format!("{text:?} is not HOST:PORT"));
    }
    host_and_port.map(|_| text.to_owned())
}

pub(super) fn check_service(
    errors: &mut ConfigErrors,
    raw: &RawService,
    ports: &PortPolicy,
) -> Option<(SocketAddr, Service)> {
    let setting = format!("services: {}", raw.name);
    if raw
        .protocol
        .as_deref()
        .is_some_and(|protocol| protocol != "tcp")
    {
        errors.add(&setting, "protocol must be tcp");
    }
    let listen = address(errors, &format!("{setting}: listen"), &raw.listen);
    let node = raw
        .node
        .parse::<NodeName>()
        .map_err(|error| errors.add(&format!("{setting}: node"), error))
        .ok();
    let target = service_target(&raw.target, ports);
    let target = target
        .map_err(|problem| errors.add(&format!("{setting}: target"), problem))
        .ok();
    let destination = Destination {
        node: node?,
        target: target?,
    };
    Some((
        listen?,
        Service {
            name: raw.name.clone(),
            destination,
        },
    ))
}

/// Parses the target of a service. A bare port is a port of the node, on its loopback if the port
/// is in that list. A host is another machine, or loopback.
pub(super) fn service_target(text: &str, ports: &PortPolicy) -> Result<Target, String> {
    let Some((host, port)) = text.rsplit_once(':') else {
        let port = text
            .parse::<Port>()
            .map_err(|error| format!("{text:?}: {error}"))?;
        return Ok(if ports.localhost.contains(port) {
            Target::Loopback(port)
        } else {
            Target::Node(port)
        });
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
    if host.parse::<IpAddr>().is_err() && host.parse::<NodeName>().is_err() {
        return Err(format!("{text:?} is not PORT or HOST:PORT"));
    }
    Ok(Target::Host(host.into(), port))
}
