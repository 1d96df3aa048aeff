//! What this agent dials at most, whatever the server asks: pure checks of resolved addresses.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use tunnel_proto::process::settings::PortSet;
use tunnel_proto::wire::name::Port;

/// How the server asked for a target; each class has its own rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// The node's own address.
    Node,
    /// The loopback of the agent's host.
    Loopback,
    /// Another host.
    Host,
}

/// The operator's limits of what the cloud may reach through this agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ceiling {
    /// Ports of class [`Class::Loopback`].
    pub localhost_ports: PortSet,
    /// Ports that are dialled in no class.
    pub deny_ports: PortSet,
    /// Targets of class [`Class::Host`].
    pub allow_targets: AllowTargets,
}

/// Why an address is not dialled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("agent's {flag} {reason}")]
pub struct Denied {
    /// The setting that decided; [`NEVER`] when no setting allows it.
    pub flag: &'static str,
    /// The rest of the sentence.
    pub reason: String,
}

/// Stands in [`Denied::flag`] for rules that no flag changes.
pub const NEVER: &str = "built-in rule";

/// Whether `address`, to which a target of `class` resolved, may be dialled.
///
/// # Errors
/// [`Denied`], naming the flag.
pub fn check(class: Class, address: SocketAddr, ceiling: &Ceiling) -> Result<(), Denied> {
    let ip = judged(address.ip());
    if let Some(kind) = never_dialled(ip) {
        return denied(
            NEVER,
            format!("forbids {kind} addresses ({})", address.ip()),
        );
    }
    let Some(port) = Port::new(address.port()) else {
        return denied(NEVER, "forbids port 0".to_owned());
    };
    if ceiling.deny_ports.contains(port) {
        return denied("--deny-ports", format!("lists {port}"));
    }
    match class {
        Class::Node => Ok(()),
        Class::Loopback if !ip.is_loopback() => {
            denied(NEVER, format!("forbids {ip} as a loopback address"))
        }
        Class::Loopback if ceiling.localhost_ports.contains(port) => Ok(()),
        Class::Loopback => denied("--localhost-ports", format!("does not list {port}")),
        Class::Host if ip.is_loopback() => {
            denied(NEVER, format!("forbids {ip} as an address of another host"))
        }
        Class::Host if ceiling.allow_targets.contains(ip, port) => Ok(()),
        Class::Host => denied(
            "--allow-targets",
            format!("does not list {}", SocketAddr::new(ip, port.get())),
        ),
    }
}

fn denied(flag: &'static str, reason: String) -> Result<(), Denied> {
    Err(Denied { flag, reason })
}

/// Whether no setting makes this agent dial `ip`.
#[must_use]
pub fn is_never_dialled(ip: IpAddr) -> bool {
    never_dialled(judged(ip)).is_some()
}

/// The address by which another spelling of it is judged: an IPv4 address inside IPv6 counts as the IPv4 address.
fn judged(ip: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = ip else { return ip };
    match v6.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => ip,
        // ::ffff:0:0/96 and ::/96 (RFC 4291, 2.5.5), the NAT64 prefixes (RFC 6052, 2.1; RFC 8215), 6to4 (RFC 3056, 2).
        [0, 0, 0, 0, 0, 0xffff | 0, high, low]
        | [0x64, 0xff9b, 0, 0, 0, 0, high, low]
        | [0x64, 0xff9b, 1, _, _, _, high, low]
        | [0x2002, high, low, ..] => {
            let [[a, b], [c, d]] = [high.to_be_bytes(), low.to_be_bytes()];
            Ipv4Addr::new(a, b, c, d).into()
        }
        _ => ip,
    }
}

fn never_dialled(ip: IpAddr) -> Option<&'static str> {
    if METADATA.contains(&ip) {
        return Some("cloud metadata");
    }
    match ip {
        // 0.0.0.0/8 is "this host on this network" (RFC 1122, 3.2.1.3); Linux takes 0.0.0.0 for loopback.
        IpAddr::V4(v4) if v4.octets()[0] == 0 => Some("unspecified"),
        IpAddr::V4(v4) if v4.is_link_local() => Some("link-local"),
        IpAddr::V4(v4) if v4.is_multicast() => Some("multicast"),
        IpAddr::V4(v4) if v4.is_broadcast() => Some("broadcast"),
        IpAddr::V6(v6) if v6.is_unspecified() => Some("unspecified"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("link-local"),
        IpAddr::V6(v6) if v6.is_multicast() => Some("multicast"),
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    }
}

/// Addresses at which clouds hand credentials to whoever asks from the machine.
const METADATA: [IpAddr; 7] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)), // Alibaba
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),     // Oracle
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),   // Azure
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)), // AWS
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)), // AWS, pod identity
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)), // Google
];

/// Networks with ports, as in `10.0.0.0/8:5432, 192.168.1.5:80-90, [fd00::/8]:443`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowTargets(Vec<AllowTarget>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct AllowTarget {
    network: IpAddr,
    prefix: u32,
    ports: PortSet,
}

impl AllowTargets {
    fn contains(&self, ip: IpAddr, port: Port) -> bool {
        self.0
            .iter()
            .any(|allowed| allowed.covers(ip) && allowed.ports.contains(port))
    }
}

impl AllowTarget {
    fn covers(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.network.is_ipv4() && masked(ip, self.prefix) == self.network
    }
}

/// `ip` with all bits after the first `prefix` cleared.
fn masked(ip: IpAddr, prefix: u32) -> IpAddr {
    match ip {
        IpAddr::V4(v4) => {
            let mask = u32::MAX.checked_shl(32 - prefix).unwrap_or(0);
            Ipv4Addr::from_bits(v4.to_bits() & mask).into()
        }
        IpAddr::V6(v6) => {
            let mask = u128::MAX.checked_shl(128 - prefix).unwrap_or(0);
            Ipv6Addr::from_bits(v6.to_bits() & mask).into()
        }
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
        let (address, prefix) = match network.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (network, None),
        };
        let ip: IpAddr = address.parse().map_err(|_syntax| shape())?;
        let most = if ip.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            None => most,
            Some(text) => text
                .parse()
                .ok()
                .filter(|prefix| *prefix <= most)
                .ok_or_else(|| format!("{item:?}: the prefix length must be 0 to {most}"))?,
        };
        let start = masked(ip, prefix);
        if start != ip {
            return Err(format!(
                "{item:?}: the network begins at {start}; write {start}/{prefix}"
            ));
        }
        let ports: PortSet = ports.parse()?;
        if ports.ranges().next().is_none() {
            return Err(shape());
        }
        Ok(Self {
            network: ip,
            prefix,
            ports,
        })
    }
}

impl fmt::Display for AllowTargets {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (
            index,
            AllowTarget {
                network,
                prefix,
                ports,
            },
        ) in self.0.iter().enumerate()
        {
            let comma = if index == 0 { "" } else { ", " };
            match network {
                IpAddr::V4(v4) => write!(formatter, "{comma}{v4}/{prefix}:{ports}")?,
                IpAddr::V6(v6) => write!(formatter, "{comma}[{v6}/{prefix}]:{ports}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ceiling() -> Ceiling {
        Ceiling {
            localhost_ports: "10250, 10255, 10266, 10267".parse().unwrap(),
            deny_ports: "2379-2381, 10248".parse().unwrap(),
            allow_targets:
                "10.0.0.0/8:5432, 192.168.1.5:80-90, [fd00::/8]:443, 0.0.0.0/0:9999, [::/0]:9999"
                    .parse()
                    .unwrap(),
        }
    }

    /// What decided: "" for allowed, else the flag.
    fn verdict(class: Class, address: &str) -> &'static str {
        match check(class, address.parse().unwrap(), &ceiling()) {
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
            for class in [Class::Node, Class::Loopback, Class::Host] {
                assert_eq!(
                    verdict(class, &format!("{ip}:9999")),
                    NEVER,
                    "{class:?} {ip}"
                );
            }
        }
    }

    #[test]
    fn each_class_has_its_own_rule() {
        use Class::{Host, Loopback, Node};
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
    fn denial_names_the_flag_in_one_sentence() {
        let text = |class, address: &str| {
            check(class, address.parse().unwrap(), &ceiling())
                .unwrap_err()
                .to_string()
        };
        assert_eq!(
            text(Class::Loopback, "127.0.0.1:9999"),
            "agent's --localhost-ports does not list 9999"
        );
        assert_eq!(
            text(Class::Host, "[::ffff:10.0.0.1]:1"),
            "agent's --allow-targets does not list 10.0.0.1:1"
        );
        assert_eq!(
            text(Class::Node, "169.254.1.1:80"),
            "agent's built-in rule forbids link-local addresses (169.254.1.1)"
        );
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
            ("10.0.0.1:9-1", "wrong way"),
        ] {
            let error = bad.parse::<AllowTargets>().unwrap_err();
            assert!(error.contains(hint), "{bad}: {error}");
        }
    }
}
