//! The values in rendered texts: types with one constructor, and quoting for YAML and the shell.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;

use tunnel_routing::decision::HostPort;

/// An address with a host, which is a DNS name or an IP, and a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress(String);

/// The error for a text that is not a [`ServerAddress`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("use HOST:PORT, as in cloud.example.com:10262 or [2001:db8::1]:10262")]
pub struct ServerAddressError;

impl FromStr for ServerAddress {
    type Err = ServerAddressError;

    fn from_str(text: &str) -> Result<Self, ServerAddressError> {
        let address = HostPort::parse(text).ok_or(ServerAddressError)?;
        let port = address.port.ok_or(ServerAddressError)?;
        Ok(Self(format!("{}:{port}", address.host)))
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// The address of a resolver: an IP, with a port if that is not 53.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResolverAddress {
    ip: IpAddr,
    port: Option<u16>,
}

/// The error for a text that is not the address of a resolver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("use IP or IP:PORT, as in 10.77.0.1 or 10.77.0.1:5353")]
pub struct ResolverAddressError;

impl FromStr for ResolverAddress {
    type Err = ResolverAddressError;

    fn from_str(text: &str) -> Result<Self, ResolverAddressError> {
        if let Ok(ip) = text.parse() {
            return Ok(Self { ip, port: None });
        }
        match text.parse::<SocketAddr>() {
            // A zone, as in [fe80::1%2]:53, has no meaning on another host.
            Ok(SocketAddr::V6(address)) if address.scope_id() != 0 => Err(ResolverAddressError),
            Ok(address) if address.port() != 0 => Ok(Self {
                ip: address.ip(),
                port: Some(address.port()),
            }),
            Ok(_) | Err(_) => Err(ResolverAddressError),
        }
    }
}

impl ResolverAddress {
    pub(super) fn ip(self) -> IpAddr {
        self.ip
    }

    pub(super) fn socket_address(self) -> SocketAddr {
        SocketAddr::new(self.ip, self.port.unwrap_or(DNS_PORT))
    }
}

impl fmt::Display for ResolverAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => SocketAddr::new(self.ip, port).fmt(formatter),
            None => self.ip.fmt(formatter),
        }
    }
}

/// The resolver that CoreDNS asks when the server does not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpstreamResolver {
    /// The resolvers of the host's `/etc/resolv.conf`.
    Host,
    Address(ResolverAddress),
}

impl FromStr for UpstreamResolver {
    type Err = ResolverAddressError;

    fn from_str(text: &str) -> Result<Self, ResolverAddressError> {
        if text == RESOLV_CONF {
            return Ok(Self::Host);
        }
        text.parse().map(Self::Address)
    }
}

impl fmt::Display for UpstreamResolver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => formatter.write_str(RESOLV_CONF),
            Self::Address(address) => address.fmt(formatter),
        }
    }
}

/// An absolute path without characters that have a meaning in a Corefile, which cannot quote all of
/// them: a trailing backslash, and `{$NAME}`, a variable of the environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorefilePath(String);

/// The error for a text that is not a [`CorefilePath`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("use an absolute path of letters, digits, '.', '_', '-' and '/'")]
pub struct CorefilePathError;

impl FromStr for CorefilePath {
    type Err = CorefilePathError;

    fn from_str(text: &str) -> Result<Self, CorefilePathError> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
        if text.starts_with('/') && text.bytes().all(is_plain) {
            return Ok(Self(text.to_owned()));
        }
        Err(CorefilePathError)
    }
}

impl fmt::Display for CorefilePath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Returns a YAML scalar with the value `text`, for block and flow collections.
///
/// Text that YAML could read as anything else is between double quotes. These contain only
/// printable ASCII, so that no character changes how the line is shown.
pub(super) fn yaml(text: &str) -> String {
    if is_plain_yaml(text) {
        return text.to_owned();
    }
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            ' '..='~' => quoted.push(character),
            _ => {
                let code = u32::from(character);
                let escape = if code <= 0xffff {
                    format!("\\u{code:04x}")
                } else {
                    format!("\\U{code:08x}")
                };
                quoted.push_str(&escape);
            }
        }
    }
    quoted.push('"');
    quoted
}

/// Returns whether every YAML parser reads the text, without quotes, as a string of this value.
fn is_plain_yaml(text: &str) -> bool {
    if text.parse::<Ipv4Addr>().is_ok() {
        return true;
    }
    // A flag of a command.
    let body = text.strip_prefix("--").unwrap_or(text);
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./-:=?".contains(&byte);
    body.starts_with(|first: char| first.is_ascii_alphabetic() || "/_".contains(first))
        && body.bytes().all(is_plain)
        && !body.ends_with(':')
        && !YAML_WORDS.contains(&body.to_ascii_lowercase().as_str())
}

/// Returns a word of the shell with the value `text`.
pub(in crate::admin) fn shell(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_./:@%+,-".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Returns a YAML scalar with the URL of a CONNECT listener. With a name of its password file, the
/// reader replaces PASSWORD.
pub(super) fn proxy_url(listener: &ServerAddress, user: Option<&str>) -> String {
    let user = user.map(|user| format!("{}:PASSWORD@", url_user(user)));
    yaml(&format!("http://{}{listener}", user.unwrap_or_default()))
}

/// Returns `text` percent-encoded for the user part of a URL (RFC 3986, section 3.2.1).
fn url_user(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

const DNS_PORT: u16 = 53;
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Words that YAML 1.1 or 1.2 reads as other types than strings.
const YAML_WORDS: [&str; 12] = [
    "true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf", "infinity",
];
