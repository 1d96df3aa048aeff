//! Checks of the TCP services in the section `services:` of the YAML file.

use std::net::{IpAddr, SocketAddr};

use tunnel_proto::process::settings::{ConfigErrors, parse_address, parse_quoted};
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

use super::RawService;
use crate::policy::PortPolicy;
use crate::routing::destination::Destination;
use crate::routing::destination::Service;

/// Returns the service and the address of its listener.
pub(super) fn check(
    raw: &RawService,
    ports: &PortPolicy,
    errors: &mut ConfigErrors,
) -> Option<(SocketAddr, Service)> {
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
    let target = errors.ok_or_record(&format!("{setting}: target"), target(&raw.target, ports));
    let service = Service {
        name: raw.name.clone(),
        destination: Destination {
            node: node?,
            target: target?,
        },
    };
    Some((listen?, service))
}

/// Parses the target of a service. A bare port is a port of the node, on its loopback if the port
/// is in that list. A host is another machine, or loopback.
pub(super) fn target(text: &str, ports: &PortPolicy) -> Result<Target, String> {
    let Some((host, port)) = text.rsplit_once(':') else {
        let port = parse_quoted::<Port>(text)?;
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
