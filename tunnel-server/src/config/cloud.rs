//! Targets of the cloud that agents may reach by name.

use std::collections::BTreeSet;
use std::net::IpAddr;

use tunnel_process::networks::{effective_ip, forbidden_kind};
use tunnel_process::settings::{ConfigErrors, parse_quoted};
use tunnel_proto::dial::split_host_port;
use tunnel_proto::wire::name::{CloudTarget, NodeName};

use super::listeners::host_and_port;
use super::node_label::NodeLabel;
use super::raw::IN_CLUSTER;
use super::{RawCloudTarget, RawConfig};

/// A target of the cloud. Agents name it; its addresses are the operator's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudTargetSettings {
    pub name: CloudTarget,
    /// Addresses HOST:PORT, of which one is dialed.
    pub addresses: Vec<String>,
    pub nodes: CloudNodes,
}

/// The nodes whose agents may reach a target of the cloud.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloudNodes {
    All,
    Named(BTreeSet<NodeName>),
    /// The nodes whose Node objects have the label, at each moment.
    Labeled(NodeLabel),
}

pub(super) fn check(
    raw: &RawConfig,
    has_cluster: bool,
    errors: &mut ConfigErrors,
) -> Vec<CloudTargetSettings> {
    let listed = raw.cloud.iter();
    let listed = listed.filter_map(|target| check_target(target, has_cluster, errors));
    let mut targets: Vec<_> = listed.collect();
    targets.extend(apiserver(raw, errors));
    let mut names = BTreeSet::new();
    for target in &targets {
        if !names.insert(&target.name) {
            errors.add(
                "cloud",
                format!(
                    "{} is named twice (--cloud-apiserver names apiserver)",
                    target.name
                ),
            );
        }
    }
    targets
}

/// Returns the target `apiserver` of `--cloud-apiserver`.
fn apiserver(raw: &RawConfig, errors: &mut ConfigErrors) -> Option<CloudTargetSettings> {
    let texts = raw.cloud_apiserver.iter().map(|text| text.trim());
    let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).collect();
    if texts.is_empty() {
        return None;
    }
    Some(CloudTargetSettings {
        name: errors.ok_or_record(APISERVER, APISERVER_TARGET.parse())?,
        addresses: errors.parse_list(APISERVER, texts, |text| match text {
            IN_CLUSTER => in_cluster_address(),
            text => address(text),
        }),
        nodes: CloudNodes::All,
    })
}

/// Returns the address of the cluster's own API server.
fn in_cluster_address() -> Result<String, String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (Some(host), Some(port)) = (
        variable("KUBERNETES_SERVICE_HOST"),
        variable("KUBERNETES_SERVICE_PORT"),
    ) else {
        return Err("without a value needs KUBERNETES_SERVICE_HOST, which containers of a cluster have; give HOST:PORT".to_owned());
    };
    let is_v6 = host.contains(':');
    address(&if is_v6 {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    })
}

fn check_target(
    raw: &RawCloudTarget,
    has_cluster: bool,
    errors: &mut ConfigErrors,
) -> Option<CloudTargetSettings> {
    let setting = format!("cloud: {}", raw.name);
    let name = errors.ok_or_record(&setting, raw.name.parse::<CloudTarget>());
    let service = raw.service.as_deref().map(service_address);
    let service =
        service.and_then(|parsed| errors.ok_or_record(&format!("{setting}: service"), parsed));
    let mut addresses = errors.parse_list(&format!("{setting}: target"), &raw.target, address);
    addresses.extend(service);
    if raw.target.is_empty() && raw.service.is_none() {
        errors.add(
            &setting,
            "needs target (HOST:PORT) or service (NAMESPACE/NAME:PORT)",
        );
    }
    let nodes = check_nodes(raw, &setting, has_cluster, errors);
    Some(CloudTargetSettings {
        name: name?,
        addresses,
        nodes: nodes?,
    })
}

fn check_nodes(
    raw: &RawCloudTarget,
    setting: &str,
    has_cluster: bool,
    errors: &mut ConfigErrors,
) -> Option<CloudNodes> {
    if let Some(label) = &raw.label {
        if !raw.nodes.is_empty() {
            errors.add(setting, "has nodes and label; set one of the two");
        }
        let setting = format!("{setting}: label");
        if !has_cluster {
            errors.add(
                &setting,
                "needs a cluster, whose Nodes have the label (--kubernetes); without one, list nodes",
            );
        }
        let label = errors.ok_or_record(&setting, label.parse::<NodeLabel>())?;
        let checked = label.check_restricted("get the target");
        errors.ok_or_record(&setting, checked);
        return Some(CloudNodes::Labeled(label));
    }
    if raw.nodes.is_empty() {
        errors.add(
            setting,
            "needs nodes (the names of those that may reach it, or \"*\" for all) or label \
             (KEY=VALUE of their Nodes)",
        );
        return None;
    }
    if raw.nodes.iter().any(|node| node == ALL_NODES) {
        return Some(CloudNodes::All);
    }
    let names = errors.parse_list(&format!("{setting}: nodes"), &raw.nodes, parse_quoted);
    Some(CloudNodes::Named(names.into_iter().collect()))
}

/// Returns the address of a Service of the cluster, by its DNS name.
fn service_address(text: &str) -> Result<String, String> {
    let parts = text
        .split_once('/')
        .and_then(|(namespace, rest)| Some((namespace, rest.rsplit_once(':')?)));
    let Some((namespace, (name, port))) = parts else {
        return Err(format!("{text:?} is not NAMESPACE/NAME:PORT"));
    };
    host_and_port(&format!("{name}.{namespace}.svc:{port}"))
        .map_err(|_syntax| format!("{text:?} is not NAMESPACE/NAME:PORT"))
}

fn address(text: &str) -> Result<String, String> {
    let address = host_and_port(text)?;
    if let Some((host, _port)) = split_host_port(&address)
        && let Ok(ip) = host.parse::<IpAddr>()
    {
        let kind = forbidden_kind(effective_ip(ip));
        if let Some(kind) = kind.or_else(|| (effective_ip(ip) != ip).then_some("translated")) {
            return Err(format!(
                "{text} is {kind}, and such addresses are never dialed"
            ));
        }
    }
    Ok(address)
}

const APISERVER: &str = "--cloud-apiserver";
/// Name of the target of `--cloud-apiserver`.
pub const APISERVER_TARGET: &str = "apiserver";
/// Entry of `nodes` for all nodes.
const ALL_NODES: &str = "*";

#[cfg(test)]
mod tests {
    use super::CloudNodes;
    use crate::config::tests::{raw, yaml};
    use crate::config::{Config, Environment};
    use crate::testing::assert_contains;

    #[test]
    fn targets_are_read() {
        let text = "cloudApiserver: ['10.0.0.1:6443', 'api.example:443']\n\
                    cloud: [{ name: registry, service: kube-system/registry:5000, nodes: [a, B] },\n\
                    { name: metrics, target: '127.0.0.1:9090', nodes: '*' }]";
        let targets = yaml(text).unwrap().cloud;
        let [registry, metrics, apiserver] = &targets[..] else {
            panic!("{targets:?}");
        };
        assert_eq!(registry.addresses, ["registry.kube-system.svc:5000"]);
        let CloudNodes::Named(nodes) = &registry.nodes else {
            panic!("{registry:?}");
        };
        assert_eq!(nodes.len(), 2);
        assert_eq!(metrics.addresses, ["127.0.0.1:9090"]);
        assert_eq!(metrics.nodes, CloudNodes::All);
        assert_eq!(apiserver.name.as_str(), "apiserver");
        assert_eq!(apiserver.addresses, ["10.0.0.1:6443", "api.example:443"]);
        assert_eq!(apiserver.nodes, CloudNodes::All);
        assert!(yaml("{}").unwrap().cloud.is_empty());
    }

    #[test]
    fn label_needs_a_cluster_and_one_that_kubelets_can_set_is_refused() {
        let check = |label: &str, in_cluster| {
            let text = format!("cloud: [{{ name: a, target: 'x:1', label: '{label}' }}]");
            Config::check(&raw(&text).unwrap(), Environment { in_cluster })
        };
        let restricted = "node-restriction.kubernetes.io/a=true";
        let error = check(restricted, false).unwrap_err().to_string();
        assert_contains(&error, "cloud: a: label: needs a cluster");
        assert!(check("a b=c", true).is_err());
        let config = check(restricted, true).unwrap();
        assert!(
            matches!(&config.cloud[0].nodes, CloudNodes::Labeled(label) if label.value() == "true")
        );
        let error = check("zone=a", true).unwrap_err().to_string();
        assert_contains(
            &error,
            "cloud: a: label: a kubelet may be able to set zone on its own Node",
        );
        assert_contains(&error, "begins with node-restriction.kubernetes.io/");
    }

    #[test]
    fn mistakes_are_errors() {
        for (text, expected) in [
            ("cloudApiserver: x", "--cloud-apiserver: "),
            ("cloudApiserver: '169.254.169.254:80'", "cloud metadata"),
            ("cloudApiserver: '[fe80::1]:80'", "link-local"),
            ("cloudApiserver: '[::ffff:127.0.0.1]:80'", "translated"),
            ("cloudApiserver: '0.0.0.0:80'", "unspecified"),
            ("cloud: [{ name: a }]", "cloud: a: needs target"),
            (
                "cloud: [{ name: a, target: 'x:1' }]",
                "cloud: a: needs nodes",
            ),
            (
                "cloud: [{ name: a, target: 'x:1', nodes: '*', label: a=b }]",
                "set one of the two",
            ),
            ("cloud: [{ name: A, target: 'x:1' }]", "DNS label"),
            ("cloud: [{ name: a.b, target: 'x:1' }]", "DNS label"),
            ("cloud: [{ name: a, target: 'x:0' }]", "HOST:PORT"),
            (
                "cloud: [{ name: a, service: 'x:1' }]",
                "NAMESPACE/NAME:PORT",
            ),
            (
                "cloud: [{ name: a, service: 'n/x y:1' }]",
                "NAMESPACE/NAME:PORT",
            ),
            (
                "cloud: [{ name: a, target: 'x:1', nodes: ['a b'] }]",
                "cloud: a: nodes",
            ),
            (
                "cloud: [{ name: a, target: 'x:1', node: a }]",
                "did you mean nodes",
            ),
            (
                "cloudApiserver: 'a:1'\ncloud: [{ name: apiserver, target: 'x:1', nodes: '*' }]",
                "named twice",
            ),
        ] {
            assert_contains(&yaml(text).unwrap_err(), expected);
        }
    }

    #[test]
    fn hostile_targets_are_errors() {
        for host in [
            ":",
            ":443",
            "a",
            "a:",
            "a:0",
            "a:65536",
            "a:+80",
            "a b:80",
            "a_b:80",
            "10.0.0.1",
            "[10.0.0.1]:80",
            "::1:80",
            "[::1%eth0]:80",
            "[::1:80",
            "0.0.0.0:80",
            "0.1.2.3:80",
            "[::]:80",
            "169.254.169.254:80",
            "169.254.2.1:80",
            "[fe80::1]:80",
            "224.0.0.1:80",
            "[ff02::1]:80",
            "255.255.255.255:80",
            "100.100.100.200:80",
            "[::ffff:169.254.169.254]:80",
            "[64:ff9b::7f00:1]:80",
            "[2002:7f00:1::]:80",
            "[fd00:ec2::254]:80",
            "127.1:80",
            "0x7f.0.0.1:80",
            "user@a:80",
            "http://a:80",
            "a:80/b",
            "a..b:80",
            "-a:80",
            "a-:80",
            "*:80",
            "a:80,b:80",
            "a%2e:80",
            "../a:80",
            "168.63.129.16:80",
            "192.0.0.192:80",
            "[::127.0.0.1]:80",
            "[64:ff9b:1::a9fe:a9fe]:80",
            "[fe80::1%25eth0]:80",
            "a:٨٠",
            "a:80?b",
            "a:80#b",
            "ä:80",
        ] {
            let text = format!("cloud: [{{ name: a, nodes: '*', target: '{host}' }}]");
            assert!(yaml(&text).is_err(), "{host:?}");
        }
    }
}
