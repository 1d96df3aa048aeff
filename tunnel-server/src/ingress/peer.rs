//! Who a caller is: where its connection comes from, and what it has shown of itself.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tunnel_proto::process::admission::source;

use crate::routing::registry::CallerKey;

/// The other end of a caller's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerAddr {
    /// Over TCP.
    Tcp(SocketAddr),
    /// Over a Unix socket of this host.
    Unix,
}

impl CallerAddr {
    /// What places for strangers are counted by: Unix callers are one source.
    #[must_use]
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

/// What a caller has proved.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum CallerIdentity {
    /// Nothing.
    #[default]
    Anonymous,
    /// A certificate of the callers' CA, with the common name of its subject (empty when it has no single one).
    Certificate(Arc<str>),
    /// A name and its password.
    User(Arc<str>),
    /// The user whose process is at the other end of a Unix socket.
    Uid(u32),
}

impl CallerIdentity {
    /// What the streams of a caller that comes from `peer` are counted by.
    #[must_use]
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
