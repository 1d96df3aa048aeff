//! Checks of the settings that say which ports of the nodes callers may reach.

use std::collections::BTreeMap;

use tunnel_process::settings::{ConfigErrors, parse_quoted};
use tunnel_proto::wire::name::Port;

use super::{RawConfig, RawPort};
use tunnel_routing::destination::Scheme;
use tunnel_routing::operation::{Operation, OperationSet};
use tunnel_routing::policy::{Listener, ListenerSet, PortEntry, PortLists, PortSettings};

/// Default ports that agents dial on their loopback.
pub const LOCALHOST_PORTS: &str = "10266, 10267";

pub(super) fn check(raw: &RawConfig, errors: &mut ConfigErrors) -> PortSettings {
    let lists = PortLists {
        http: errors.parse_or("--http-proxy-ports", raw.http_proxy_ports.as_deref(), ""),
        https: errors.parse_or("--https-proxy-ports", raw.https_proxy_ports.as_deref(), ""),
        localhost: errors.parse_or(
            "--localhost-proxy-ports",
            raw.localhost_proxy_ports.as_deref(),
            LOCALHOST_PORTS,
        ),
    };
    let mut settings = PortSettings {
        lists,
        connect: errors.parse_or("--connect-ports", raw.connect_ports.as_deref(), ""),
        named: BTreeMap::new(),
    };
    for port in &raw.ports {
        let setting = format!("ports: {}", port.number);
        let number = errors.ok_or_record("ports: number", parse_quoted::<Port>(&port.number));
        let entry = check_entry(&setting, port, errors);
        let Some((number, entry)) = number.zip(entry) else {
            continue;
        };
        if settings.named.insert(number, entry).is_some() {
            errors.add(&setting, "is in the list twice");
        }
        if settings.connect.contains(number) {
            errors.add(
                &setting,
                "is in --connect-ports too; leave it out of one of them",
            );
        }
    }
    settings
}

/// Checks what an entry of `ports:` says about its port.
fn check_entry(setting: &str, raw: &RawPort, errors: &mut ConfigErrors) -> Option<PortEntry> {
    let key = |key: &str| format!("{setting}: {key}");
    let scheme = raw.scheme.as_deref().map(parse_scheme).transpose();
    let scheme = errors.ok_or_record(&key("scheme"), scheme);
    let class = raw.class.as_deref().map(str::parse).transpose();
    let class = errors.ok_or_record(&key("class"), class);
    let listeners = raw.listeners.as_ref().map(|names| {
        let listeners = errors.parse_list(&key("listeners"), names, parse_listener);
        if names.is_empty() {
            errors.add(
                &key("listeners"),
                "names no listener; leave the port out instead",
            );
        }
        listeners.into_iter().collect()
    });
    let operations = raw.operations.as_ref().map(|names| {
        let parse = |name: &str| {
            let parsed: Result<OperationSet, _> = name.parse();
            parsed.map_err(|error| format!("{name:?} {error}"))
        };
        let sets = errors.parse_list(&key("operations"), names, parse);
        let operations = sets
            .into_iter()
            .fold(OperationSet::default(), OperationSet::union);
        if operations.contains(Operation::Connect) {
            errors.add(
                &key("operations"),
                "connect is not one; name the listener connect (listeners)",
            );
        }
        operations
    });
    Some(PortEntry {
        scheme: scheme?,
        class: class?.unwrap_or_default(),
        names_connect: listeners.is_some_and(|set: ListenerSet| set.contains(Listener::Connect)),
        listeners: listeners.unwrap_or(ListenerSet::OF_PORTS),
        operations,
    })
}

fn parse_listener(text: &str) -> Result<Listener, String> {
    let listener = text.parse().ok();
    let listener = listener.filter(|listener| ListenerSet::OF_PORTS.contains(*listener));
    listener.ok_or_else(|| format!("{text:?} is not a listener; use {}", ListenerSet::OF_PORTS))
}

fn parse_scheme(text: &str) -> Result<Scheme, String> {
    match text {
        "http" => Ok(Scheme::Http),
        "https" => Ok(Scheme::Https),
        _ => Err(format!("{text:?} is not a scheme; use http or https")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::yaml;
    use tunnel_routing::policy::PortPolicy;

    /// Returns `SCHEME CLASS:PORT LISTENERS` of a port, or `-`.
    fn entry(text: &str, number: u16) -> String {
        let policy = PortPolicy::new(yaml(text).unwrap().ports, Vec::new());
        let port = Port::new(number).unwrap();
        policy.entry(port).map_or_else(
            |_| "-".to_owned(),
            |entry| {
                let target = entry.class.target(port);
                format!("{:?} {target} {}", entry.scheme, entry.listeners)
            },
        )
    }

    #[test]
    fn ports_add_to_the_lists_and_win_for_a_port_in_both() {
        let every = "http, https, connect";
        for (text, number, expected) in [
            ("{}", 10266, format!("None loopback:10266 {every}")),
            (
                "httpProxyPorts: 9100",
                9100,
                format!("Some(Http) node:9100 {every}"),
            ),
            ("connectPorts: 22", 22, "None node:22 connect".into()),
            (
                "{ connectPorts: '22, 2222', localhostProxyPorts: 22 }",
                22,
                "None loopback:22 connect".into(),
            ),
            (
                "{ httpProxyPorts: 22, connectPorts: 22 }",
                22,
                "Some(Http) node:22 connect".into(),
            ),
            (
                "ports: [{ number: 8080 }]",
                8080,
                format!("None node:8080 {every}"),
            ),
            (
                "{ httpsProxyPorts: 9100, ports: [{ number: 9100, scheme: http, listeners: [http] }] }",
                9100,
                "Some(Http) node:9100 http".into(),
            ),
            (
                "ports: [{ number: 5432, class: loopback, listeners: [connect] }]",
                5432,
                "None loopback:5432 connect".into(),
            ),
            ("ports: [{ number: 8080 }]", 9100, "-".into()),
        ] {
            assert_eq!(entry(text, number), expected, "{text}");
        }
    }

    #[test]
    fn every_mistake_in_the_ports_is_reported() {
        let text = "ports:\n- { number: 0 }\n- { number: 22, scheme: ssh, class: host, listeners: [udp, http] }\n\
                    - { number: 9100 }\n- { number: 9100 }\n- { number: 5432, listeners: [] }\n\
                    - { number: 2222 }\nconnectPorts: 2222";
        let error = yaml(text).unwrap_err();
        for expected in [
            "ports: number: \"0\"",
            "ports: 22: scheme: \"ssh\"",
            "ports: 22: class: \"host\"",
            "ports: 22: listeners: \"udp\"",
            "ports: 9100: is in the list twice",
            "ports: 5432: listeners: names no listener",
            "ports: 2222: is in --connect-ports too",
        ] {
            assert!(error.contains(expected), "{expected}: {error}");
        }
        assert!(error.contains("7 error(s)"), "{error}");
    }
}
