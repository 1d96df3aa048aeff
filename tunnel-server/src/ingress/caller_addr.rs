//! The address of a caller, and the key that counts its streams.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use tunnel_process::conn_limiter::source;

use tunnel_proto::stream_record::RecordedPeer;

use crate::routing::registry::CallerKey;
pub use tunnel_routing::policy::CallerIdentity;

/// The address of a caller's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerAddr {
    /// A TCP connection from this address.
    Tcp(SocketAddr),
    /// A connection over a Unix socket of this host.
    Unix,
}

impl CallerAddr {
    /// Returns the source address for limits per source. All callers over Unix sockets count as one
    /// source.
    pub fn source(self) -> IpAddr {
        match self {
            Self::Tcp(address) => address.ip(),
            Self::Unix => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// Returns the source address of a TCP connection.
    pub fn tcp_source(self) -> Option<IpAddr> {
        match self {
            Self::Tcp(address) => Some(address.ip()),
            Self::Unix => None,
        }
    }

    /// Returns the key that counts the streams of the caller with this identity.
    pub fn key(self, identity: &CallerIdentity) -> CallerKey {
        match identity {
            CallerIdentity::Anonymous => CallerKey::Source(source(self.source())),
            CallerIdentity::Certificate(name) => CallerKey::Certificate(name.clone()),
            CallerIdentity::User(name) => CallerKey::User(name.clone()),
            CallerIdentity::ServiceAccount(name) => {
                CallerKey::User(format!("system:serviceaccount:{name}").into())
            }
            CallerIdentity::Uid(uid) => CallerKey::Local(Some(*uid)),
            CallerIdentity::Agent(node) => CallerKey::Certificate(node.as_str().into()),
        }
    }
}

impl From<SocketAddr> for CallerAddr {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl From<CallerAddr> for RecordedPeer {
    fn from(address: CallerAddr) -> Self {
        match address {
            CallerAddr::Tcp(address) => Self::Tcp(address),
            CallerAddr::Unix => Self::Unix,
        }
    }
}

impl fmt::Display for CallerAddr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(formatter),
            Self::Unix => formatter.write_str("unix"),
        }
    }
}
