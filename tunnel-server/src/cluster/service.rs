//! Pure functions on the Service of the listeners: its addresses for the records, and its extra
//! ports.
//!
//! The Service is read and written as JSON, so that fields unknown to this build survive an update.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use serde_json::{Value, json};
use tunnel_proto::wire::name::Port;

use super::objects::EXTRA_PORT_PREFIX;
use tunnel_routing::destination::Scheme;
use tunnel_routing::policy::PortPolicy;

/// Port numbers of the listeners that the Service targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenerPorts {
    pub http: u16,
    pub https: u16,
}

/// Returns the addresses of the Service, at most one per family. A headless Service and a Service
/// without an address have none.
pub(super) fn addresses(service: &Value) -> Vec<IpAddr> {
    let spec = &service["spec"];
    let all = spec["clusterIPs"].as_array();
    let all = all.map_or_else(|| std::slice::from_ref(&spec["clusterIP"]), Vec::as_slice);
    all.iter()
        .filter_map(|address| address.as_str()?.parse().ok())
        .collect()
}

/// Returns the desired extra ports of the Service, each with the listener port that it targets.
pub(super) fn desired_ports(
    policy: &PortPolicy,
    listener_ports: ListenerPorts,
) -> BTreeMap<Port, u16> {
    let ports = policy.extra_ports();
    ports
        .map(|(port, scheme)| match scheme {
            Scheme::Http => (port, listener_ports.http),
            Scheme::Https => (port, listener_ports.https),
        })
        .collect()
}

/// Returns the updated ports of the Service, or `None` if they are up to date. Desired TCP ports
/// receive their target and keep their name. Extra ports of this server that are not desired are
/// removed. Missing ports are appended by number. All other ports stay unchanged.
pub(super) fn plan(ports: &[Value], desired_ports: &BTreeMap<Port, u16>) -> Option<Vec<Value>> {
    let mut missing = desired_ports.clone();
    let mut planned = Vec::with_capacity(ports.len());
    for port in ports {
        let is_tcp = port["protocol"].as_str().is_none_or(|name| name == "TCP");
        let is_ours = name(port).is_some_and(|name| name.starts_with(EXTRA_PORT_PREFIX));
        let number = port["port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        let target = number
            .and_then(Port::new)
            .filter(|_| is_tcp)
            .and_then(|number| missing.remove(&number));
        match target {
            Some(target) if port["targetPort"] != target => {
                let mut changed = port.clone();
                changed["targetPort"] = target.into();
                planned.push(changed);
            }
            None if is_tcp && is_ours => {}
            Some(_) | None => planned.push(port.clone()),
        }
    }
    // There may be 65,535 of both.
    let names: BTreeSet<_> = planned.iter().filter_map(name).map(str::to_owned).collect();
    for (port, target) in missing {
        let mut own = format!("{EXTRA_PORT_PREFIX}{port}");
        if names.contains(&own) {
            // A foreign port has this name, most likely a UDP port. The API server rejects
            // duplicate names.
            own.push_str("-tcp");
        }
        planned.push(json!({
            "name": own,
            "protocol": "TCP",
            "port": port.get(),
            "targetPort": target,
        }));
    }
    (planned != ports).then_some(planned)
}

fn name(port: &Value) -> Option<&str> {
    port["name"].as_str()
}

#[cfg(test)]
mod tests {
    use tunnel_routing::policy::PortLists;

    use super::*;

    const LISTENER_PORTS: ListenerPorts = ListenerPorts {
        http: 10264,
        https: 10263,
    };

    fn base() -> Vec<Value> {
        vec![
            json!({"name": "http", "port": 10255, "protocol": "TCP", "targetPort": 10264}),
            json!({"name": "https", "port": 10250, "protocol": "TCP", "targetPort": 10263}),
        ]
    }

    fn extra(port: u16, target: u16) -> Value {
        json!({"name": format!("dnat-{port}"), "port": port, "protocol": "TCP", "targetPort": target})
    }

    fn lists(http: &str, https: &str) -> BTreeMap<Port, u16> {
        let lists = PortLists {
            http: http.parse().unwrap(),
            https: https.parse().unwrap(),
            ..PortLists::default()
        };
        desired_ports(&PortPolicy::of_lists(lists, Vec::new()), LISTENER_PORTS)
    }

    /// The writing half of DNS-3, and the Service of guide 000.
    #[test]
    fn extra_ports_come_and_go_and_others_stay() {
        let mut ports = base();
        ports.push(json!({"name": "custom", "port": 8443, "protocol": "TCP", "targetPort": "web", "nodePort": 31000}));
        let mut udp = extra(9100, 9100);
        udp["protocol"] = "UDP".into();
        ports.push(udp);
        let with = plan(&ports, &lists("", "9100, 9100, 10250")).unwrap();
        assert_eq!(with[..4], ports[..]);
        let added =
            json!({"name": "dnat-9100-tcp", "port": 9100, "protocol": "TCP", "targetPort": 10263});
        assert_eq!(with[4..], [added]);
        assert_eq!(plan(&with, &lists("", "9100")), None);
        assert_eq!(plan(&with, &lists("", "")).unwrap(), ports);
        let added = plan(&base(), &lists("", "9100")).unwrap();
        assert_eq!(added[2], extra(9100, 10263));
    }

    /// DNS-4: https takes precedence over http.
    #[test]
    fn https_wins_and_a_changed_target_keeps_the_name() {
        let mut ports = base();
        ports.push(json!({"name": "mine", "port": 9100, "targetPort": 9100, "appProtocol": "x"}));
        let both = plan(&ports, &lists("9100", "9100")).unwrap();
        let of_https =
            json!({"name": "mine", "port": 9100, "targetPort": 10263, "appProtocol": "x"});
        assert_eq!(both[2], of_https);
        let http = plan(&both, &lists("9100", "")).unwrap();
        assert_eq!(http[2]["targetPort"], 10264);
        assert_eq!(http[2]["name"], "mine");
        assert_eq!(plan(&http, &lists("", "")), None, "not ours to remove");
    }

    #[test]
    fn order_is_kept_and_new_ports_are_sorted() {
        let mut ports = base();
        ports.push(extra(9300, 10264));
        let planned = plan(&ports, &lists("9300, 9200, 80", "9250")).unwrap();
        let numbers: Vec<_> = planned.iter().map(|port| port["port"].clone()).collect();
        assert_eq!(numbers, [10255, 10250, 9300, 80, 9200, 9250]);
    }

    #[test]
    fn addresses_are_of_both_families_and_none_of_a_headless_service() {
        let both = json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"]});
        for (spec, expected) in [
            (both, 2),
            (json!({"clusterIP": "10.0.0.1"}), 1),
            (json!({"clusterIP": "None", "clusterIPs": ["None"]}), 0),
            (json!({"clusterIP": ""}), 0),
            (json!({}), 0),
        ] {
            let service = json!({"spec": spec});
            assert_eq!(addresses(&service).len(), expected, "{service}");
        }
    }
}
