//! The kinds of listeners, as rules and the table of ports name them.

use std::fmt;

use crate::destination::Scheme;

tunnel_networks::named! {
    /// A kind of listener on which a caller asks for a destination, in the order in which they are shown.
    pub enum Listener: ALL, Display, FromStr {
        /// The HTTP listener, and the extra ports with plain HTTP targets.
        Http = "http",
        /// The HTTPS listener, and the extra ports with https targets.
        Https = "https",
        /// The CONNECT listener over TCP.
        Connect = "connect",
        /// The CONNECT listener on a Unix socket.
        Unix = "unix",
        /// TCP services.
        Service = "service",
        /// The port of the agents, for targets of the cloud.
        Agent = "agent",
    }
}

/// A set of listeners.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct ListenerSet(u8);

impl Listener {
    /// Returns the listener as a port names it.
    pub(super) fn of_port(self) -> Self {
        match self {
            Self::Unix => Self::Connect,
            Self::Http | Self::Https | Self::Connect | Self::Service | Self::Agent => self,
        }
    }
}

impl From<Scheme> for Listener {
    fn from(scheme: Scheme) -> Self {
        match scheme {
            Scheme::Http => Self::Http,
            Scheme::Https => Self::Https,
        }
    }
}

impl ListenerSet {
    /// The listeners that a port can name. The Unix socket is a CONNECT listener to a port.
    pub const OF_PORTS: Self =
        Self(1 << Listener::Http as u8 | 1 << Listener::Https as u8 | 1 << Listener::Connect as u8);

    pub fn contains(self, listener: Listener) -> bool {
        self.0 & Self::from(listener).0 != 0
    }
}

impl From<Listener> for ListenerSet {
    fn from(listener: Listener) -> Self {
        Self(1 << listener as u8)
    }
}

impl FromIterator<Listener> for ListenerSet {
    fn from_iter<T: IntoIterator<Item = Listener>>(listeners: T) -> Self {
        let listeners = listeners.into_iter().map(Self::from);
        Self(listeners.fold(0, |bits, listener| bits | listener.0))
    }
}

impl fmt::Display for ListenerSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let listeners = Listener::ALL.into_iter();
        let listeners = listeners.filter(|listener| self.contains(*listener));
        for (index, listener) in listeners.enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(formatter, "{comma}{listener}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for ListenerSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{{{self}}}")
    }
}
