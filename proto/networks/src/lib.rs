//! Values of all crates: networks as operators write them, addresses that no setting allows to dial for a
//! caller, and enums whose values have names. All functions are pure.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

mod names;

pub use names::none_of;

/// A network: an address and the length of its prefix, as in `10.0.0.0/8`. A bare address is a
/// network with one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cidr(IpNet);

/// The reason why a text is not a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// The text is not an address with or without a prefix length.
    #[error("is not a network; write a CIDR such as 10.0.0.0/8 or fd00::/8")]
    Syntax,
    /// The prefix is not a number, or is longer than the address.
    #[error("the prefix length must be 0 to {0}")]
    Prefix(u8),
    /// Bits after the prefix are set. Most likely the address or the prefix is a typing error.
    #[error("the network begins at {start}; write {0}", start = .0.start())]
    HostBits(Cidr),
}

impl Cidr {
    /// Returns whether the network contains an address. An IPv4 address inside IPv6 counts as the
    /// IPv4 address.
    pub fn contains(&self, ip: IpAddr) -> bool {
        self.0.contains(&ip.to_canonical())
    }

    /// Returns the network's first address.
    pub fn start(&self) -> IpAddr {
        self.0.addr()
    }

    /// Returns whether the two networks have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.0.contains(&other.0) || other.0.contains(&self.0)
    }

    /// Checks a network that a cluster object claims. A hostile node may have written the object.
    ///
    /// # Errors
    /// [`ClaimedNetworkError`] when the network is wider than that of any cluster, or has an
    /// address that is never a Pod's or Service's.
    pub fn check_claimed(&self) -> Result<(), ClaimedNetworkError> {
        let min_prefix = match self.0 {
            IpNet::V4(_) => CLAIMED_MIN_V4,
            IpNet::V6(_) => CLAIMED_MIN_V6,
        };
        if self.0.prefix_len() < min_prefix {
            return Err(ClaimedNetworkError::TooWide(min_prefix));
        }
        let special = SPECIAL.iter().find(|(special, _)| self.overlaps(special));
        if let Some((_, kind)) = special {
            return Err(ClaimedNetworkError::Special(kind));
        }
        if METADATA.iter().any(|ip| self.contains(*ip)) {
            return Err(ClaimedNetworkError::Special("cloud metadata"));
        }
        Ok(())
    }
}

/// The reason why a network that a cluster object claims is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ClaimedNetworkError {
    /// The prefix is shorter than this minimum.
    #[error("the network is wider than /{0}")]
    TooWide(u8),
    /// The network contains addresses of this kind.
    #[error("the network contains {0} addresses")]
    Special(&'static str),
}

/// Shortest prefix of a claimed IPv4 network: the largest private one (RFC 1918) is a /8.
const CLAIMED_MIN_V4: u8 = 8;
/// Shortest prefix of a claimed IPv6 network: registries assign a /32 to a whole provider.
const CLAIMED_MIN_V6: u8 = 32;

impl From<IpAddr> for Cidr {
    fn from(ip: IpAddr) -> Self {
        Self(ip.to_canonical().into())
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let ip: IpAddr = address.parse().map_err(|_syntax| CidrError::Syntax)?;
        let max_prefix = IpNet::from(ip).max_prefix_len();
        let network = prefix
            .map_or(Some(max_prefix), |text| text.parse().ok())
            .and_then(|prefix| IpNet::new(ip, prefix).ok())
            .ok_or(CidrError::Prefix(max_prefix))?;
        if network.trunc() != network {
            return Err(CidrError::HostBits(Self(network.trunc())));
        }
        // Addresses are compared in this form.
        if let IpNet::V6(v6) = network
            && let Some(v4) = v6.addr().to_ipv4_mapped()
            && let Some(prefix) = v6.prefix_len().checked_sub(MAPPED_BITS)
            && let Ok(mapped) = Ipv4Net::new(v4, prefix)
        {
            return Ok(Self(mapped.into()));
        }
        Ok(Self(network))
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

/// Returns the address that policies apply to: an IPv4 address inside IPv6 becomes the IPv4
/// address.
pub fn effective_ip(ip: IpAddr) -> IpAddr {
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

/// Returns the kind of `ip`, as mapped by [`effective_ip`], if no setting allows dialing it for a
/// caller.
pub fn forbidden_kind(ip: IpAddr) -> Option<&'static str> {
    if METADATA.contains(&ip) {
        return Some("cloud metadata");
    }
    match ip {
        // 0.0.0.0/8 is "this host on this network" (RFC 1122, 3.2.1.3). Linux treats 0.0.0.0 as
        // loopback.
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

/// Bits before the IPv4 address in an IPv4-mapped IPv6 address (RFC 4291, 2.5.5.2).
const MAPPED_BITS: u8 = 96;

/// Networks with addresses that are never a Pod's or a Service's. Networks of the kind
/// "translated" are those that [`effective_ip`] maps.
const SPECIAL: [(Cidr, &str); 14] = [
    (v4([127, 0, 0, 0], 8), "loopback"),
    (v4([0, 0, 0, 0], 8), "unspecified"),
    (v4([169, 254, 0, 0], 16), "link-local"),
    (v4([224, 0, 0, 0], 4), "multicast"),
    (v4([255, 255, 255, 255], 32), "broadcast"),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), "loopback"),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), "unspecified"),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), "link-local"),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), "multicast"),
    (v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), "translated"),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 96), "translated"),
    (v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96), "translated"),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), "translated"),
    (v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), "translated"),
];

const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> Cidr {
    let start = Ipv4Addr::new(a, b, c, d);
    Cidr(IpNet::V4(Ipv4Net::new_assert(start, prefix)))
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix: u8) -> Cidr {
    let start = Ipv6Addr::new(a, b, c, d, e, f, g, h);
    Cidr(IpNet::V6(Ipv6Net::new_assert(start, prefix)))
}

/// Addresses at which clouds provide credentials to any process on the machine.
const METADATA: [IpAddr; 7] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)), // Alibaba
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),     // Oracle
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),   // Azure
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)), // AWS
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x23)), // AWS, pod identity
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)), // Google
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_what_begins_with_their_bits() {
        let contains = |cidr: &str, ip: &str| {
            let cidr: Cidr = cidr.parse().unwrap();
            cidr.contains(ip.parse().unwrap())
        };
        assert!(contains("10.0.0.0/8", "10.255.0.1"));
        assert!(contains("10.0.0.0/8", "::ffff:10.1.2.3"));
        assert!(!contains("10.0.0.0/8", "11.0.0.1"));
        assert!(!contains("0.0.0.0/0", "::1"));
        assert!(contains("::/0", "fd00::1"));
        assert!(contains("192.0.2.7", "192.0.2.7") && !contains("192.0.2.7", "192.0.2.6"));
    }

    #[test]
    fn mapped_spellings_of_networks_are_ipv4_networks() {
        for (text, expected) in [
            ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
            ("::ffff:127.0.0.1", "127.0.0.1/32"),
            ("::ffff:0:0/96", "0.0.0.0/0"),
            ("::/0", "::/0"),
            ("fd00::/8", "fd00::/8"),
        ] {
            assert_eq!(text.parse::<Cidr>().unwrap().to_string(), expected);
        }
    }

    #[test]
    fn networks_overlap_when_one_is_within_the_other() {
        let overlap = |one: &str, other: &str| {
            let (one, other): (Cidr, Cidr) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(one.overlaps(&other), other.overlaps(&one));
            one.overlaps(&other)
        };
        assert!(overlap("10.0.0.0/8", "10.244.1.0/24") && overlap("10.0.0.0/8", "10.0.0.0/8"));
        assert!(overlap("0.0.0.0/0", "127.0.0.0/8") && overlap("::/0", "ff00::/8"));
        assert!(!overlap("10.244.1.0/24", "10.244.2.0/24") && !overlap("0.0.0.0/0", "::/0"));
    }

    #[test]
    fn claimed_networks_have_no_special_address_and_are_not_wide() {
        let check = |text: &str| {
            let network: Cidr = text.parse().unwrap();
            network.check_claimed().map_err(|error| error.to_string())
        };
        for text in [
            "10.0.0.0/8",
            "10.244.1.0/24",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/11",
            "::ffff:10.244.1.0/120",
            "fd00:10:244::/56",
            "2001:db8::/32",
        ] {
            assert_eq!(check(text), Ok(()), "{text}");
        }
        for (text, reason) in [
            ("0.0.0.0/0", "wider than /8"),
            ("126.0.0.0/7", "wider than /8"),
            ("::/0", "wider than /32"),
            ("fd00::/31", "wider than /32"),
            ("::ffff:0:0/96", "wider than /8"),
            ("127.0.0.0/8", "loopback"),
            ("127.0.0.1/32", "loopback"),
            ("::ffff:127.0.0.0/104", "loopback"),
            ("::1/128", "loopback"),
            ("::/96", "loopback"),
            ("0.0.0.0/8", "unspecified"),
            ("::/128", "unspecified"),
            ("169.254.0.0/16", "link-local"),
            ("169.0.0.0/8", "link-local"),
            ("169.254.169.254/32", "link-local"),
            ("fe80::/64", "link-local"),
            ("224.0.0.0/8", "multicast"),
            ("ff02::/32", "multicast"),
            ("255.0.0.0/8", "broadcast"),
            ("100.64.0.0/10", "cloud metadata"),
            ("168.63.129.16/32", "cloud metadata"),
            ("fd00:ec2::/32", "cloud metadata"),
            ("64:ff9b::a00:0/104", "translated"),
            ("2002:7f00::/32", "translated"),
            ("::a00:0/104", "translated"),
            ("::fffe:0:0/95", "translated"),
        ] {
            let error = check(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn malformed_networks_are_rejected_with_a_hint() {
        for (text, hint) in [
            ("10.1.0.0/8", "write 10.0.0.0/8"),
            ("10.0.0.0/33", "0 to 32"),
            ("fd00::/129", "0 to 128"),
            ("10.0.0.0/", "0 to 32"),
            ("example.com", "not a network"),
        ] {
            let error = text.parse::<Cidr>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
