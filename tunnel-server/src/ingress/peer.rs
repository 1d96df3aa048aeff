//! The address and the identity of a caller.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tunnel_proto::process::conn_limiter::source;

use crate::routing::registry::CallerKey;

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
}

impl From<SocketAddr> for CallerAddr {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
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

/// The identity that a caller has proved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CallerIdentity {
    /// The caller has not proved an identity.
    #[default]
    Anonymous,
    /// The caller has a certificate of the callers' CA. The value is the common name of its
    /// subject, or empty if there is no single common name.
    Certificate(Arc<str>),
    /// The caller has sent a user name with its password.
    User(Arc<str>),
    /// The caller's process runs as this user at the other end of a Unix socket.
    Uid(u32),
}

impl CallerIdentity {
    /// Returns the key that counts the streams of this caller, which connects from `peer`.
    pub fn key(&self, peer: CallerAddr) -> CallerKey {
        match self {
            Self::Anonymous => CallerKey::Source(source(peer.source())),
            Self::Certificate(name) => CallerKey::Certificate(name.clone()),
            Self::User(name) => CallerKey::User(name.clone()),
            Self::Uid(uid) => CallerKey::Local(Some(*uid)),
        }
    }
}

impl fmt::Display for CallerIdentity {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous => Ok(()),
            Self::Certificate(name) => write!(formatter, "certificate:{name}"),
            Self::User(name) => write!(formatter, "user:{name}"),
            Self::Uid(uid) => write!(formatter, "uid:{uid}"),
        }
    }
}
