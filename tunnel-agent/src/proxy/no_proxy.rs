//! NO_PROXY: the servers that bypass the environment's proxy. Pure; names are compared, never
//! resolved.

use std::net::IpAddr;

use tunnel_process::networks::{Cidr, CidrError};
use tunnel_proto::wire::name::Port;

use crate::server_address::ServerAddress;

/// A list in the syntax of Go and curl, separated by commas or blanks. Unknown entries are not an
/// error, since other programs share the variable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NoProxy(Vec<NoProxyEntry>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct NoProxyEntry {
    pattern: HostPattern,
    /// Port of the entry; `None` matches any port.
    port: Option<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum HostPattern {
    /// `*` matches every server.
    All,
    /// `10.0.0.0/8`; an address is a network of one.
    Network(Cidr),
    /// `example.com`: the domain and its subdomains.
    Domain(String),
    /// `.example.com` or `*.example.com`: the subdomains only, stored with the dot.
    Subdomains(String),
}

impl NoProxy {
    /// Parses a list and skips entries that cannot be parsed.
    pub(crate) fn new(list: &str) -> Self {
        let items = list.split(|character: char| character == ',' || character.is_whitespace());
        Self(items.filter_map(entry).collect())
    }

    /// Returns whether `server` is dialed directly. This host always is.
    pub(crate) fn covers(&self, server: &ServerAddress) -> bool {
        let host = normalize(&server.host);
        let ip = address(&host);
        let is_this_host = host == "localhost" || ip.is_some_and(|ip| ip.is_loopback());
        is_this_host
            || self.0.iter().any(|entry| {
                let port_fits = entry.port.is_none_or(|port| port.get() == server.port);
                port_fits && entry.pattern.contains(&host, ip)
            })
    }
}

impl HostPattern {
    fn contains(&self, host: &str, ip: Option<IpAddr>) -> bool {
        match self {
            Self::All => true,
            Self::Network(network) => ip.is_some_and(|ip| network.contains(ip)),
            Self::Domain(_) | Self::Subdomains(_) if ip.is_some() => false,
            Self::Domain(domain) => host
                .strip_suffix(domain.as_str())
                .is_some_and(|front| front.is_empty() || front.ends_with('.')),
            Self::Subdomains(suffix) => {
                host.len() > suffix.len() && host.ends_with(suffix.as_str())
            }
        }
    }
}

fn entry(item: &str) -> Option<NoProxyEntry> {
    if item == "*" {
        return Some(NoProxyEntry {
            pattern: HostPattern::All,
            port: None,
        });
    }
    let (pattern, port) = match item.strip_prefix('[') {
        Some(rest) => {
            let (pattern, port) = rest.split_once(']')?;
            match port {
                "" => (pattern, None),
                port => (pattern, Some(port.strip_prefix(':')?)),
            }
        }
        None => match item.split_once(':') {
            // More than one colon belongs to an IPv6 address.
            Some((pattern, port)) if !port.contains(':') => (pattern, Some(port)),
            _ => (item, None),
        },
    };
    let port = port.map(str::parse).transpose().ok()?;
    let pattern = network(pattern).or_else(|| domain(pattern))?;
    Some(NoProxyEntry { pattern, port })
}

fn network(text: &str) -> Option<HostPattern> {
    match text.parse() {
        Ok(network) | Err(CidrError::HostBits(network)) => Some(HostPattern::Network(network)),
        Err(CidrError::Syntax | CidrError::Prefix(_)) => None,
    }
}

fn domain(text: &str) -> Option<HostPattern> {
    let name = normalize(text);
    let suffix = name.strip_prefix('*').unwrap_or(&name);
    let bare = suffix.strip_prefix('.').unwrap_or(suffix);
    if bare.is_empty() || bare.contains('/') {
        return None;
    }
    Some(if suffix.starts_with('.') {
        HostPattern::Subdomains(suffix.to_owned())
    } else {
        HostPattern::Domain(name)
    })
}

fn address(text: &str) -> Option<IpAddr> {
    let ip: IpAddr = text.parse().ok()?;
    Some(ip.to_canonical())
}

/// Returns the name in lower case, without the dot of the root.
fn normalize(name: &str) -> String {
    let name = name.strip_suffix('.').unwrap_or(name);
    name.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_understood_as_by_go_and_curl() {
        for (list, server, direct) in [
            ("", "cloud.example.com:10262", false),
            ("*", "cloud.example.com:10262", true),
            ("other, *", "10.0.0.1:1", true),
            ("cloud.example.com", "cloud.example.com:10262", true),
            ("Cloud.Example.COM", "cloud.example.com:10262", true),
            ("cloud.example.com", "CLOUD.example.com.:10262", true),
            ("cloud.example.com.", "cloud.example.com:10262", true),
            ("example.com", "cloud.example.com:10262", true),
            ("example.com", "a.b.example.com:10262", true),
            ("example.com", "example.com:10262", true),
            ("example.com", "badexample.com:10262", false),
            ("example.com", "example.com.evil:10262", false),
            (".example.com", "cloud.example.com:10262", true),
            (".example.com", "example.com:10262", false),
            (".example.com", "badexample.com:10262", false),
            ("*.example.com", "cloud.example.com:10262", true),
            ("*.example.com", "example.com:10262", false),
            ("a.com,b.com", "x.b.com:1", true),
            ("a.com b.com", "b.com:1", true),
            (" a.com ,\tb.com , ", "b.com:1", true),
            ("example.com:10262", "cloud.example.com:10262", true),
            ("example.com:443", "cloud.example.com:10262", false),
            (".example.com:10262", "cloud.example.com:10262", true),
            ("example.com:443,example.com", "example.com:10262", true),
            ("10.1.2.3", "10.1.2.3:10262", true),
            ("10.1.2.3", "10.1.2.30:10262", false),
            ("10.1.2.3:10262", "10.1.2.3:10262", true),
            ("10.1.2.3:443", "10.1.2.3:10262", false),
            ("10.1.2.3", "[::ffff:10.1.2.3]:10262", true),
            ("10.0.0.0/8", "10.255.0.1:10262", true),
            ("10.1.2.3/8", "10.255.0.1:10262", true),
            ("10.0.0.0/8", "11.0.0.1:10262", false),
            ("10.0.0.0/31", "10.0.0.2:10262", false),
            ("10.0.0.0/8:10262", "10.0.0.1:10262", true),
            ("10.0.0.0/8:443", "10.0.0.1:10262", false),
            ("0.0.0.0/0", "203.0.113.1:1", true),
            ("0.0.0.0/0", "[2001:db8::1]:1", false),
            ("10.0.0.0/33", "10.0.0.1:1", false),
            ("10.0.0.0/8", "10.example.com:1", false),
            ("10", "10.0.0.1:1", false),
            ("0.1", "10.0.0.1:1", false),
            ("2001:db8::1", "[2001:db8::1]:10262", true),
            ("2001:db8:0::1", "[2001:db8::1]:10262", true),
            ("[2001:db8::1]", "[2001:db8::1]:10262", true),
            ("[2001:db8::1]:10262", "[2001:db8::1]:10262", true),
            ("[2001:db8::1]:443", "[2001:db8::1]:10262", false),
            ("2001:db8::/32", "[2001:db8:1::1]:10262", true),
            ("[2001:db8::]/32", "[2001:db8:1::1]:10262", false),
            ("2001:db8::/32", "[2001:db9::1]:10262", false),
            ("::/0", "[2001:db8::1]:1", true),
            ("example.com:x", "example.com:1", false),
            (".", "example.com:1", false),
            ("*com", "example.com:1", false),
            // This host is covered by every list.
            ("", "localhost:10262", true),
            ("", "LOCALHOST.:10262", true),
            ("", "127.0.0.1:10262", true),
            ("", "127.8.8.8:10262", true),
            ("", "[::1]:10262", true),
            ("", "[::ffff:127.0.0.1]:10262", true),
            ("", "localhost.example.com:10262", false),
            ("", "notlocalhost:10262", false),
        ] {
            let address: ServerAddress = server.parse().unwrap();
            let found = NoProxy::new(list).covers(&address);
            assert_eq!(found, direct, "NO_PROXY={list:?}, server {server}");
        }
    }
}
