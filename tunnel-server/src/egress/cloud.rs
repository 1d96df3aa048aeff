//! Which targets of the cloud the agent of a node may reach, and which addresses are dialed. Pure.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tunnel_process::networks::{effective_ip, forbidden_kind};
use tunnel_proto::dial::split_host_port;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::Refusal;
use tunnel_proto::wire::name::{CloudTarget, NodeName, Port};

use super::labeled_nodes::LabeledNodes;
use crate::config::{CloudNodes, CloudTargetSettings};

/// The targets of the cloud by name.
#[derive(Debug)]
pub(super) struct CloudTargets {
    targets: HashMap<CloudTarget, Arc<Target>>,
    labeled_nodes: LabeledNodes,
}

#[derive(Debug)]
pub(super) struct Target {
    settings: CloudTargetSettings,
    /// Ports of the addresses, for rules.
    ports: Vec<Port>,
    /// Index of the address that accepted a connection last.
    preferred: AtomicUsize,
}

impl CloudTargets {
    pub(super) fn new(targets: &[CloudTargetSettings], labeled_nodes: LabeledNodes) -> Self {
        let none = Self {
            targets: HashMap::new(),
            labeled_nodes,
        };
        none.with(targets)
    }

    /// Returns the targets of these settings. Those that do not change keep the address that worked
    /// last.
    pub(super) fn with(&self, targets: &[CloudTargetSettings]) -> Self {
        let targets = targets.iter().map(|settings| {
            let same = self.targets.get(&settings.name);
            let same = same.filter(|target| target.settings == *settings);
            let target = same.cloned().unwrap_or_else(|| {
                let addresses = settings.addresses.iter();
                let ports = addresses.filter_map(|address| split_host_port(address));
                Arc::new(Target {
                    ports: ports.filter_map(|(_host, port)| Port::new(port)).collect(),
                    settings: settings.clone(),
                    preferred: AtomicUsize::new(0),
                })
            });
            (settings.name.clone(), target)
        });
        Self {
            targets: targets.collect(),
            labeled_nodes: self.labeled_nodes.clone(),
        }
    }

    /// Returns whether the agent of a node may reach a target, now or with another label.
    pub(super) fn has_target(&self, node: &NodeName) -> bool {
        let mut targets = self.targets.values();
        targets.any(|target| match &target.settings.nodes {
            CloudNodes::All | CloudNodes::Labeled(_) => true,
            CloudNodes::Named(nodes) => nodes.contains(node),
        })
    }

    /// Returns the target that the agent of a node names.
    pub(super) fn find(&self, node: &NodeName, name: &CloudTarget) -> Result<Arc<Target>, Refusal> {
        let refusal = |code, detail| Refusal { code, detail };
        let target = self.targets.get(name).ok_or_else(|| {
            let detail = format!(
                "this server has no target {name}; --cloud-apiserver and the list \"cloud\" name them"
            );
            refusal(RefusalCode::UnknownTarget, detail)
        })?;
        let (is_allowed, setting) = match &target.settings.nodes {
            CloudNodes::All => (true, "nodes"),
            CloudNodes::Named(nodes) => (nodes.contains(node), "nodes"),
            CloudNodes::Labeled(label) => (self.labeled_nodes.has_label(node, label), "label"),
        };
        if is_allowed {
            Ok(target.clone())
        } else {
            let detail =
                format!("target {name} is not for {node} ({setting} of the list \"cloud\")");
            Err(refusal(RefusalCode::Policy, detail))
        }
    }
}

impl Target {
    /// Returns the ports of the addresses.
    pub(super) fn ports(&self) -> &[Port] {
        &self.ports
    }

    /// Returns the addresses with their indices, the one that worked last first.
    pub(super) fn addresses(&self) -> impl Iterator<Item = (usize, &str)> {
        let preferred = self.preferred.load(Ordering::Relaxed);
        let addresses = self.settings.addresses.iter().map(String::as_str);
        let first = addresses.clone().enumerate().skip(preferred).take(1);
        let others = addresses
            .enumerate()
            .filter(move |(index, _)| *index != preferred);
        first.chain(others)
    }

    /// Records the address that accepted a connection.
    pub(super) fn prefer(&self, index: usize) {
        self.preferred.store(index, Ordering::Relaxed);
    }
}

/// The reason why an address of a target is not dialed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum AddressRefusal {
    #[error("{1} is {0}, and such addresses are never dialed")]
    Never(&'static str, IpAddr),
    #[error("{0} is a loopback address, which is dialed only if it is configured itself")]
    Loopback(IpAddr),
    #[error("{0} is a listener of this server")]
    Own(SocketAddr),
}

/// Checks an address of a target. `host` is the configured host, and `own_ports` are those of this
/// server's listeners. Returns the address to dial.
pub(super) fn check(
    address: SocketAddr,
    host: &str,
    own_ports: &[Port],
    is_own: impl Fn(IpAddr) -> bool,
) -> Result<SocketAddr, AddressRefusal> {
    let ip = address.ip().to_canonical();
    if let Some(kind) = forbidden_kind(effective_ip(ip)) {
        return Err(AddressRefusal::Never(kind, ip));
    }
    if effective_ip(ip) != ip {
        return Err(AddressRefusal::Never("translated", ip));
    }
    if ip.is_loopback() && !is_loopback_host(host) {
        return Err(AddressRefusal::Loopback(ip));
    }
    let address = SocketAddr::new(ip, address.port());
    let is_own_port = own_ports.iter().any(|port| port.get() == address.port());
    if is_own_port && is_own(ip) {
        return Err(AddressRefusal::Own(address));
    }
    Ok(address)
}

fn is_loopback_host(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::config::NodeLabel;

    fn target(name: &str, nodes: Option<&[&str]>) -> CloudTargetSettings {
        CloudTargetSettings {
            name: name.parse().unwrap(),
            addresses: vec!["a:1".into(), "b:2".into(), "c:3".into()],
            nodes: nodes.map_or(CloudNodes::All, |nodes| {
                CloudNodes::Named(nodes.iter().map(|node| node.parse().unwrap()).collect())
            }),
        }
    }

    fn listed(targets: &[CloudTargetSettings]) -> CloudTargets {
        CloudTargets::new(targets, LabeledNodes::new(targets))
    }

    #[test]
    fn agent_reaches_the_targets_for_its_node_by_their_names_alone() {
        let targets = listed(&[
            target("apiserver", None),
            target("registry", Some(&["worker-1"])),
        ]);
        let code = |node: &str, name: &str| {
            let found = targets.find(&node.parse().unwrap(), &name.parse().unwrap());
            found.map(|_| ()).map_err(|refusal| refusal.code)
        };
        assert_eq!(code("worker-1", "apiserver"), Ok(()));
        assert_eq!(code("worker-1", "registry"), Ok(()));
        assert_eq!(code("worker-2", "registry"), Err(RefusalCode::Policy));
        for name in [
            "a",
            "api",
            "apiserver-1",
            "localhost",
            "127",
            "10262",
            "metadata",
        ] {
            assert_eq!(
                code("worker-1", name),
                Err(RefusalCode::UnknownTarget),
                "{name}"
            );
        }
        let only = listed(&[target("registry", Some(&["worker-1"]))]);
        assert!(only.has_target(&"worker-1".parse().unwrap()));
        assert!(!only.has_target(&"worker-2".parse().unwrap()));
    }

    #[test]
    fn label_of_the_node_decides_at_each_stream() {
        let label: NodeLabel = "example.com/registry=true".parse().unwrap();
        let labeled = CloudTargetSettings {
            nodes: CloudNodes::Labeled(label.clone()),
            ..target("registry", None)
        };
        let labeled_nodes = LabeledNodes::new(&[labeled.clone(), labeled.clone()]);
        assert_eq!(labeled_nodes.labels(), std::slice::from_ref(&label));
        let targets = CloudTargets::new(&[labeled], labeled_nodes.clone());
        let code = |node: &str| {
            let found = targets.find(&node.parse().unwrap(), &"registry".parse().unwrap());
            found.map(|_| ()).map_err(|refusal| refusal.code)
        };
        assert_eq!(code("worker-1"), Err(RefusalCode::Policy));
        // The agent may ask again when its Node has the label.
        assert!(targets.has_target(&"worker-1".parse().unwrap()));
        let node = "worker-1".parse().unwrap();
        labeled_nodes.update(false, [(&node, vec![&label])]);
        assert_eq!(code("worker-1"), Ok(()));
        assert_eq!(code("worker-2"), Err(RefusalCode::Policy));
        labeled_nodes.update(false, [(&node, Vec::new())]);
        assert_eq!(code("worker-1"), Err(RefusalCode::Policy));
        labeled_nodes.update(false, [(&node, vec![&label])]);
        labeled_nodes.update(true, []);
        assert_eq!(code("worker-1"), Err(RefusalCode::Policy));
    }

    #[test]
    fn names_that_are_no_labels_are_not_parsed() {
        let long = "a".repeat(64);
        for name in [
            "",
            ".",
            "-",
            "A",
            "APISERVER",
            "Apiserver",
            "a b",
            " a",
            "a ",
            "a_b",
            "a.b",
            "a:1",
            "a/b",
            "-a",
            "a-",
            "10.0.0.1",
            "127.0.0.1",
            "127.0.0.1:80",
            "[::1]",
            "::1",
            "a\n",
            "a\0",
            "a\t",
            "../a",
            "/a",
            "a\\b",
            "apiserver.",
            "*",
            "a*",
            "a%00",
            "a%2e",
            "ä",
            "ａ",
            "kubernetes.default.svc",
            "http://a",
            "a@b",
            "a,b",
            "a;b",
            "a=b",
            "\u{202e}a",
            "a\u{200b}",
            "\u{feff}apiserver",
            "\u{430}piserver",
            "apise\u{301}rver",
            "apiserver\r",
            "\u{1b}[31ma",
            "a\u{7f}",
            "$(reboot)",
            "`a`",
            "a'b",
            "\"a\"",
            "a#b",
            "a?b",
            "a+b",
            "<a>",
            &long,
        ] {
            assert!(name.parse::<CloudTarget>().is_err(), "{name:?}");
        }
    }

    #[test]
    fn address_that_worked_last_is_tried_first() {
        let targets = listed(&[target("x", None)]);
        let node = "n".parse().unwrap();
        let found = targets.find(&node, &"x".parse().unwrap()).unwrap();
        let order = || found.addresses().map(|(_, text)| text).collect::<Vec<_>>();
        assert_eq!(order(), ["a:1", "b:2", "c:3"]);
        found.prefer(2);
        assert_eq!(order(), ["c:3", "a:1", "b:2"]);
        let mut changed = target("x", None);
        let first = |targets: CloudTargets| {
            let target = targets.find(&node, &"x".parse().unwrap()).unwrap();
            target.addresses().next().map(|(_, text)| text.to_owned())
        };
        let same = targets.with(std::slice::from_ref(&changed));
        assert_eq!(first(same).as_deref(), Some("c:3"));
        changed.addresses.push("d:4".into());
        assert_eq!(first(targets.with(&[changed])).as_deref(), Some("a:1"));
    }

    #[test]
    fn addresses_that_lead_to_this_host_or_nowhere_are_refused() {
        let own_ports = [Port::new(10262).unwrap()];
        let own: IpAddr = "10.0.0.1".parse().unwrap();
        let is_allowed = |address: &str, host: &str| {
            let is_own = |ip: IpAddr| ip == own || ip.is_loopback();
            check(address.parse().unwrap(), host, &own_ports, is_own).is_ok()
        };
        for address in [
            "0.0.0.0:1",
            "0.1.2.3:1",
            "[::]:1",
            "169.254.169.254:80",
            "169.254.2.1:1",
            "[fe80::1]:1",
            "224.0.0.1:1",
            "255.255.255.255:1",
            "[ff02::1]:1",
            "100.100.100.200:80",
            "[::ffff:169.254.169.254]:80",
            "[64:ff9b::a9fe:a9fe]:80",
            "[64:ff9b::a00:1]:1",
            "[2002:a00:1::]:1",
            "127.0.0.1:1",
            "127.9.9.9:1",
            "[::1]:1",
            "[::ffff:127.0.0.1]:1",
            "10.0.0.1:10262",
        ] {
            assert!(!is_allowed(address, "api.example"), "{address}");
        }
        for (address, host) in [
            ("10.0.0.2:10262", "10.0.0.2"),
            ("10.0.0.1:6443", "api.example"),
            ("127.0.0.1:6443", "127.0.0.1"),
            ("[::1]:6443", "localhost"),
            ("[2001:db8::1]:443", "api.example"),
        ] {
            assert!(is_allowed(address, host), "{address}");
        }
        assert!(!is_allowed("127.0.0.1:10262", "127.0.0.1"));
    }
}
