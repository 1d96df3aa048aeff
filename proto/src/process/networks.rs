//! Networks as operators write them, and addresses that nobody dials for a caller whatever is written; pure.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// A network: an address and how many of its first bits count, as in `10.0.0.0/8`. A bare address is a network of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cidr {
    start: IpAddr,
    prefix: u32,
}

/// Why a text is no network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CidrError {
    /// Not an address with or without a prefix length.
    #[error("is not a network, as in 10.0.0.0/8 or fd00::/8")]
    Shape,
    /// The prefix is no number, or longer than the address.
    #[error("the prefix length must be 0 to {0}")]
    Prefix(u32),
    /// Bits behind the prefix are set; most likely one of the two is a slip.
    #[error("the network begins at {start}; write {0}", start = .0.start)]
    Start(Cidr),
}

impl Cidr {
    /// Whether an address is in it. An IPv4 address inside IPv6 counts as the IPv4 address.
    #[must_use]
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        ip.is_ipv4() == self.start.is_ipv4() && masked(ip, self.prefix) == self.start
    }

    /// Its first address.
    #[must_use]
    pub fn start(&self) -> IpAddr {
        self.start
    }
}

impl From<IpAddr> for Cidr {
    fn from(ip: IpAddr) -> Self {
        let start = ip.to_canonical();
        Self {
            start,
            prefix: bits(start),
        }
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let ip: IpAddr = address.parse().map_err(|_syntax| CidrError::Shape)?;
        let most = bits(ip);
        let prefix = prefix.map_or(Some(most), |text| text.parse().ok());
        let prefix = prefix
            .filter(|prefix| *prefix <= most)
            .ok_or(CidrError::Prefix(most))?;
        let start = masked(ip, prefix);
        let cidr = Self { start, prefix };
        if start != ip {
            return Err(CidrError::Start(cidr));
        }
        Ok(cidr)
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.start, self.prefix)
    }
}

fn bits(ip: IpAddr) -> u32 {
    if ip.is_ipv4() { 32 } else { 128 }
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

/// The address by which another spelling of it is judged: an IPv4 address inside IPv6 counts as the IPv4 address.
#[must_use]
pub fn judged(ip: IpAddr) -> IpAddr {
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

/// The kind of a [`judged`] address that no setting makes anybody dial for a caller.
#[must_use]
pub fn never_dialled(ip: IpAddr) -> Option<&'static str> {
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
        assert_eq!("fd00::/8".parse::<Cidr>().unwrap().to_string(), "fd00::/8");
    }

    #[test]
    fn slips_in_networks_are_told() {
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
