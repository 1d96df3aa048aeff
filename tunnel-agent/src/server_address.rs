//! The address of a server, as configured.

use std::fmt;
use std::str::FromStr;

use tunnel_proto::wire::name::Port;

/// A server's name or IP address, with its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    /// DNS name, or IP address without brackets.
    pub host: String,
    pub port: u16,
}

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = text.rsplit_once(':').ok_or_else(|| {
            format!(
                "{text:?} has no port; agents are usually accepted on 10262, as in {text}:10262"
            )
        })?;
        let port: Port = port.parse().map_err(|error| format!("{text:?}: {error}"))?;
        let bare = host
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        if bare.is_none() && host.contains(':') {
            return Err(format!(
                "{text:?}: write an IPv6 address in brackets, as in [2001:db8::1]:10262"
            ));
        }
        let host = bare.unwrap_or(host);
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%".contains(&byte);
        if host.is_empty() || !host.bytes().all(known) {
            return Err(format!("{text:?} is not HOST:PORT"));
        }
        Ok(Self {
            host: host.to_owned(),
            port: port.get(),
        })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(formatter, "[{}]:{}", self.host, self.port)
        } else {
            write!(formatter, "{}:{}", self.host, self.port)
        }
    }
}
