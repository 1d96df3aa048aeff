//! The dial policy of this agent, independent of the server's requests. Pure checks of resolved
//! addresses.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use tunnel_process::networks::{Cidr, CidrError, effective_ip, forbidden_kind};
use tunnel_proto::wire::name::Port;
use tunnel_proto::wire::ports::PortSet;

/// The form in which the server requested a target. Each class has its own rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetClass {
    /// The node's own address.
    Node,
    /// The loopback of the agent's host.
    Loopback,
    /// A host other than this one.
    Host,
}

/// The operator's limits on the targets that the cloud may reach through this agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DialPolicy {
    /// Allowed ports of class [`TargetClass::Loopback`].
    pub localhost_ports: PortSet,
    /// Ports that are not dialed in any class.
    pub deny_ports: PortSet,
    /// Allowed targets of class [`TargetClass::Host`].
    pub allow_targets: AllowTargets,
    /// Addresses of `--cloud-listen`, which are dialed in no class. All addresses of this host have
    /// a listener with an unspecified address.
    pub cloud_listeners: Vec<SocketAddr>,
}

/// The reason why an address is not dialed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("agent's {flag} {reason}")]
pub struct Denied {
    /// The setting that denies the address, or [`NEVER`] if no setting allows it.
    pub flag: &'static str,
    /// The rest of the error sentence.
    pub reason: String,
}

/// Value of [`Denied::flag`] for rules that no flag changes.
pub const NEVER: &str = "built-in rule";

/// Checks whether `address`, to which a target of `class` resolved, may be dialed.
///
/// # Errors
/// Returns [`Denied`] with the name of the flag.
pub fn check(
    class: TargetClass,
    address: SocketAddr,
    dial_policy: &DialPolicy,
) -> Result<(), Denied> {
    let ip = effective_ip(address.ip());
    if let Some(kind) = forbidden_kind(ip) {
        return denied(
            NEVER,
            format!("forbids {kind} addresses ({})", address.ip()),
        );
    }
    let Some(port) = Port::new(address.port()) else {
        return denied(NEVER, "forbids port 0".to_owned());
    };
    if dial_policy.deny_ports.contains(port) {
        return denied("--deny-ports", format!("lists {port}"));
    }
    match class {
        TargetClass::Node => Ok(()),
        TargetClass::Loopback if !ip.is_loopback() => {
            denied(NEVER, format!("forbids {ip} as a loopback address"))
        }
        TargetClass::Loopback if dial_policy.localhost_ports.contains(port) => Ok(()),
        TargetClass::Loopback => denied("--localhost-ports", format!("does not list {port}")),
        TargetClass::Host if ip.is_loopback() => {
            denied(NEVER, format!("forbids {ip} as an address of another host"))
        }
        TargetClass::Host if dial_policy.allow_targets.contains(ip, port) => Ok(()),
        TargetClass::Host => denied(
            "--allow-targets",
            format!("does not list {}", SocketAddr::new(ip, port.get())),
        ),
    }
}

/// Checks that no listener of `--cloud-listen` has `address`. Otherwise a caller in the cloud would
/// reach targets of the cloud as this node does, or a stream would return to its own server.
/// `is_own_address` says whether this host has an address.
///
/// # Errors
/// Returns [`Denied`] with the name of the flag.
pub fn check_cloud_listeners(
    address: SocketAddr,
    dial_policy: &DialPolicy,
    is_own_address: impl Fn(IpAddr) -> bool,
) -> Result<(), Denied> {
    let ip = effective_ip(address.ip());
    let is_listener = dial_policy.cloud_listeners.iter().any(|listener| {
        listener.port() == address.port()
            && (effective_ip(listener.ip()) == ip
                || (listener.ip().is_unspecified() && is_own_address(ip)))
    });
    if is_listener {
        return denied("--cloud-listen", format!("listens on {address}"));
    }
    Ok(())
}

fn denied(flag: &'static str, reason: String) -> Result<(), Denied> {
    Err(Denied { flag, reason })
}

/// Returns whether no setting makes this agent dial `ip`.
pub fn is_never_dialed(ip: IpAddr) -> bool {
    forbidden_kind(effective_ip(ip)).is_some()
}

/// Networks with ports, such as `10.0.0.0/8:5432, 192.168.1.5:80-90, [fd00::/8]:443`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowTargets(Vec<AllowTarget>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct AllowTarget {
    network: Cidr,
    ports: PortSet,
}

impl AllowTargets {
    fn contains(&self, ip: IpAddr, port: Port) -> bool {
        self.0
            .iter()
            .any(|allowed| allowed.network.contains(ip) && allowed.ports.contains(port))
    }
}

impl FromStr for AllowTargets {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl FromStr for AllowTarget {
    type Err = String;

    fn from_str(item: &str) -> Result<Self, String> {
        let shape = || {
            format!(
                "{item:?} is not CIDR:PORT or CIDR:LOW-HIGH, as in 10.0.0.0/8:5432 or [fd00::/8]:443"
            )
        };
        let (network, ports) = match item.strip_prefix('[') {
            Some(rest) => rest.split_once("]:").ok_or_else(shape)?,
            None => item.rsplit_once(':').ok_or_else(shape)?,
        };
        if network.contains(':') && !item.starts_with('[') {
            return Err(format!(
                "{item:?}: write an IPv6 network in brackets, as in [fd00::/8]:443"
            ));
        }
        let network = network.parse().map_err(|error: CidrError| match error {
            CidrError::Syntax => shape(),
            CidrError::Prefix(_) | CidrError::HostBits(_) => format!("{item:?}: {error}"),
        })?;
        let ports: PortSet = ports.parse()?;
        if ports.ranges().next().is_none() {
            return Err(shape());
        }
        Ok(Self { network, ports })
    }
}

impl fmt::Display for AllowTargets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, AllowTarget { network, ports }) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            match network.start() {
                IpAddr::V4(_) => write!(formatter, "{comma}{network}:{ports}")?,
                IpAddr::V6(_) => write!(formatter, "{comma}[{network}]:{ports}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dial_policy() -> DialPolicy {
        DialPolicy {
            localhost_ports: "10250, 10255, 10266, 10267".parse().unwrap(),
            deny_ports: "2379-2381, 10248".parse().unwrap(),
            allow_targets:
                "10.0.0.0/8:5432, 192.168.1.5:80-90, [fd00::/8]:443, 0.0.0.0/0:9999, [::/0]:9999"
                    .parse()
                    .unwrap(),
            cloud_listeners: Vec::new(),
        }
    }

    /// Returns the deciding flag, or "" if the address is allowed.
    fn verdict(class: TargetClass, address: &str) -> &'static str {
        match check(class, address.parse().unwrap(), &dial_policy()) {
            Ok(()) => "",
            Err(denied) => denied.flag,
        }
    }

    #[test]
    fn addresses_that_no_flag_opens_are_denied_in_every_class() {
        for ip in [
            "169.254.0.1",
            "169.254.169.254",
            "169.254.170.2",
            "169.254.255.255",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
            "0.0.0.0",
            "0.1.2.3",
            "224.0.0.1",
            "239.255.255.255",
            "255.255.255.255",
            "[::]",
            "[fe80::1]",
            "[febf:ffff::1]",
            "[ff02::1]",
            "[fd00:ec2::254]",
            "[fd00:ec2::23]",
            "[fd20:ce::254]",
            "[::ffff:169.254.169.254]",
            "[::ffff:100.100.100.200]",
            "[::ffff:0.0.0.0]",
            "[::ffff:224.0.0.1]",
            "[64:ff9b::169.254.169.254]",
            "[64:ff9b::a83f:8110]",
        ] {
            for class in [TargetClass::Node, TargetClass::Loopback, TargetClass::Host] {
                let flag = verdict(class, &format!("{ip}:9999"));
                assert_eq!(flag, NEVER, "{class:?} {ip}");
            }
        }
    }

    #[test]
    fn each_class_has_its_own_rule() {
        use TargetClass::{Host, Loopback, Node};
        for (class, address, expected) in [
            (Node, "192.168.33.221:9100", ""),
            (Node, "192.168.33.221:10250", ""),
            (Node, "127.0.0.2:9100", ""),
            (Node, "[2001:db8::1]:9100", ""),
            (Node, "192.168.33.221:2380", "--deny-ports"),
            (Node, "192.168.33.221:10248", "--deny-ports"),
            (Node, "192.168.33.221:2382", ""),
            (Loopback, "127.0.0.1:10250", ""),
            (Loopback, "127.8.8.8:10267", ""),
            (Loopback, "[::1]:10266", ""),
            (Loopback, "[::ffff:127.0.0.1]:10250", ""),
            (Loopback, "127.0.0.1:9999", "--localhost-ports"),
            (Loopback, "[::1]:9100", "--localhost-ports"),
            (Loopback, "127.0.0.1:2379", "--deny-ports"),
            (Loopback, "192.168.1.5:10250", NEVER),
            (Loopback, "[::2]:10250", NEVER),
            (Host, "10.1.2.3:5432", ""),
            (Host, "[::ffff:10.1.2.3]:5432", ""),
            (Host, "10.1.2.3:5433", "--allow-targets"),
            (Host, "11.1.2.3:5432", "--allow-targets"),
            (Host, "192.168.1.5:85", ""),
            (Host, "192.168.1.6:85", "--allow-targets"),
            (Host, "192.168.1.5:91", "--allow-targets"),
            (Host, "[fd12::1]:443", ""),
            (Host, "[fe00::1]:443", "--allow-targets"),
            (Host, "8.8.8.8:9999", ""),
            (Host, "[2001:db8::1]:9999", ""),
            (Host, "8.8.8.8:2379", "--deny-ports"),
            (Host, "127.0.0.1:9999", NEVER),
            (Host, "127.1.1.1:9999", NEVER),
            (Host, "[::1]:9999", NEVER),
            (Host, "[::ffff:127.0.0.1]:9999", NEVER),
            (Host, "8.8.8.8:0", NEVER),
        ] {
            assert_eq!(verdict(class, address), expected, "{class:?} {address}");
        }
    }

    #[test]
    fn listeners_for_targets_of_the_cloud_are_denied_whatever_the_port_lists_say() {
        let dial_policy = DialPolicy {
            localhost_ports: "1-65535".parse().unwrap(),
            cloud_listeners: [
                "127.0.0.1:10268",
                "169.254.2.1:10268",
                "0.0.0.0:443",
                "[::]:444",
            ]
            .map(|listener| listener.parse::<SocketAddr>().unwrap())
            .to_vec(),
            ..DialPolicy::default()
        };
        let own = |ip: IpAddr| ip.is_loopback() || ip == IpAddr::from([192, 0, 2, 1]);
        for (address, is_denied) in [
            ("127.0.0.1:10268", true),
            ("[::ffff:127.0.0.1]:10268", true),
            ("169.254.2.1:10268", true),
            ("192.0.2.1:443", true),
            ("127.0.0.1:444", true),
            ("[::1]:444", true),
            ("127.0.0.1:10267", false),
            ("127.0.0.2:10268", false),
            ("192.0.2.1:10268", false),
            ("192.0.2.9:443", false),
        ] {
            let checked = check_cloud_listeners(address.parse().unwrap(), &dial_policy, own);
            assert_eq!(checked.is_err(), is_denied, "{address}");
        }
        let address = "127.0.0.1:10268".parse().unwrap();
        let denied = check_cloud_listeners(address, &dial_policy, own).unwrap_err();
        let text = "agent's --cloud-listen listens on 127.0.0.1:10268";
        assert_eq!(denied.to_string(), text);
    }

    #[test]
    fn denial_names_the_flag_in_one_sentence() {
        use TargetClass::{Host, Loopback, Node};
        let port = "--localhost-ports does not list 9999";
        let target = "--allow-targets does not list 10.0.0.1:1";
        let link_local = "built-in rule forbids link-local addresses (169.254.1.1)";
        for (class, address, text) in [
            (Loopback, "127.0.0.1:9999", port),
            (Host, "[::ffff:10.0.0.1]:1", target),
            (Node, "169.254.1.1:80", link_local),
        ] {
            let denied = check(class, address.parse().unwrap(), &dial_policy()).unwrap_err();
            assert_eq!(denied.to_string(), format!("agent's {text}"));
        }
    }

    #[test]
    fn allow_targets_round_trip_and_mistakes_are_explained() {
        let text = "10.0.0.0/8:5432, 192.168.1.5/32:80-90, [fd00::/8]:443";
        assert_eq!(text.parse::<AllowTargets>().unwrap().to_string(), text);
        for (bad, hint) in [
            ("10.0.0.0/8", "CIDR:PORT"),
            ("10.0.0.0/8:", "CIDR:PORT"),
            ("10.1.0.0/8:1", "write 10.0.0.0/8"),
            ("10.0.0.0/33:1", "0 to 32"),
            ("fd00::/8:443", "brackets"),
            ("[fd00::/129]:443", "0 to 128"),
            ("[fd00::/8]443", "CIDR:PORT"),
            ("example.com:443", "CIDR:PORT"),
            ("10.0.0.1:0", "port"),
            ("10.0.0.1:9-1", "reversed"),
        ] {
            let error = bad.parse::<AllowTargets>().unwrap_err();
            assert!(error.contains(hint), "{bad}: {error}");
        }
    }
}
