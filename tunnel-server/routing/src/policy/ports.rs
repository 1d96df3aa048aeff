//! The table of the nodes' ports that callers may reach: the scheme of each port, the address at which
//! agents dial it, and the listeners on which callers may name it.

use std::collections::BTreeMap;
use std::str::FromStr;

use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::Port;
use tunnel_proto::wire::ports::PortSet;

use super::defaults::DefaultPorts;
use super::listener::{Listener, ListenerSet};
use crate::destination::Scheme;
use crate::operation::OperationSet;

/// Ports of the kubelet, TLS and plain read-only. Both are in every table.
pub const KUBELET_PORTS: [(u16, Scheme); 2] = [(10250, Scheme::Https), (10255, Scheme::Http)];

/// The address of a node at which agents dial a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TargetClass {
    /// The node's own address.
    #[default]
    Node,
    /// The loopback address of the node.
    Loopback,
}

/// Reason why a text is not the name of a class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a class; use node or loopback")]
pub struct TargetClassError(String);

/// What callers may do with one port of the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortEntry {
    /// Scheme of the target. With a scheme, the server may listen on the port too, and in a cluster
    /// the Service of the listeners has it. The scheme of a request is that of its listener.
    pub scheme: Option<Scheme>,
    pub class: TargetClass,
    /// The listeners on which callers may name the port.
    pub listeners: ListenerSet,
    /// The settings name the CONNECT listener for the port, so that bytes may pass without a rule.
    pub names_connect: bool,
    /// What callers may do at the port without a rule, in addition to reading.
    pub operations: Option<OperationSet>,
}

/// The lists of ports, as of the flags or of the ConfigMap that replaces them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortLists {
    /// Ports of plain HTTP targets.
    pub http: PortSet,
    /// Ports of https targets. A port in both lists is https.
    pub https: PortSet,
    /// Ports that the agent dials on its loopback address.
    pub localhost: PortSet,
}

/// The settings from which the table of ports follows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortSettings {
    pub lists: PortLists,
    /// Ports that only CONNECT listeners accept, whatever the lists say. The list of loopback ports
    /// applies to them too.
    pub connect: PortSet,
    /// Ports of `ports:`, which take precedence over the lists.
    pub named: BTreeMap<Port, PortEntry>,
}

impl PortSettings {
    /// Returns the entry of a port, or `None` if callers may not reach it.
    pub(super) fn entry(&self, port: Port) -> Option<PortEntry> {
        if let Some(named) = self.named.get(&port) {
            return Some(*named);
        }
        let kubelet = KUBELET_PORTS
            .iter()
            .find(|(kubelet, _)| *kubelet == port.get());
        let scheme = if self.lists.https.contains(port) {
            Some(Scheme::Https)
        } else if self.lists.http.contains(port) {
            Some(Scheme::Http)
        } else {
            kubelet.map(|(_, scheme)| *scheme)
        };
        let class = if self.lists.localhost.contains(port) {
            TargetClass::Loopback
        } else {
            TargetClass::Node
        };
        let is_connect_only = self.connect.contains(port);
        let is_listed = scheme.is_some() || class == TargetClass::Loopback || is_connect_only;
        is_listed.then_some(PortEntry {
            scheme,
            class,
            listeners: if is_connect_only {
                Listener::Connect.into()
            } else {
                ListenerSet::OF_PORTS
            },
            names_connect: is_connect_only,
            operations: None,
        })
    }

    /// Returns what the settings add to the rules that hold without a file.
    pub fn default_ports(&self, has_direct_list: bool) -> DefaultPorts {
        let named = self.named.iter();
        let connect = named.clone().filter(|(_, entry)| entry.names_connect);
        let connect = PortSet::of(connect.map(|(port, _)| *port));
        let operations = named.filter_map(|(port, entry)| Some((*port, entry.operations?)));
        DefaultPorts {
            connect: connect.union(&self.connect),
            operations: operations.collect(),
            has_direct_list,
        }
    }

    /// Returns the ports on which the server may listen, without those of the kubelet, by number.
    pub(super) fn listen_ports(&self) -> BTreeMap<Port, Scheme> {
        let lists = self.lists.http.ports().chain(self.lists.https.ports());
        let ports = lists.chain(self.named.keys().copied());
        let ports = ports.filter(|port| {
            KUBELET_PORTS
                .iter()
                .all(|(kubelet, _)| *kubelet != port.get())
        });
        ports
            .filter_map(|port| Some((port, self.entry(port)?.listen_scheme()?)))
            .collect()
    }
}

impl PortEntry {
    /// Returns the scheme with which the server may listen on the port: the listener with that scheme
    /// accepts the port.
    fn listen_scheme(&self) -> Option<Scheme> {
        self.scheme
            .filter(|scheme| self.listeners.contains((*scheme).into()))
    }
}

impl TargetClass {
    /// Returns the target for a port of this class.
    pub fn target(self, port: Port) -> Target {
        match self {
            Self::Node => Target::Node(port),
            Self::Loopback => Target::Loopback(port),
        }
    }
}

impl FromStr for TargetClass {
    type Err = TargetClassError;

    fn from_str(text: &str) -> Result<Self, TargetClassError> {
        match text {
            "node" => Ok(Self::Node),
            "loopback" => Ok(Self::Loopback),
            _ => Err(TargetClassError(text.to_owned())),
        }
    }
}
