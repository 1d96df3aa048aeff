//! The ports of a node that callers may reach through the listeners, the kind of target for each
//! port, and the decision whether a caller may reach a destination. All functions are pure.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::destination::{
    AgentTarget, Destination, RequestedDestination, RequestedNode, RequestedPort, Scheme,
};

mod caller;
mod ports;

pub use caller::CallerIdentity;
pub use ports::{
    KUBELET_PORTS, Listener, ListenerError, ListenerSet, PortEntry, PortLists, PortSettings,
    TargetClass, TargetClassError,
};

/// The ports of the nodes that callers may reach.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortPolicy {
    settings: PortSettings,
    /// Ports of the tunnel itself, for a hint in the error message.
    own: Vec<Port>,
}

/// Reason why a port is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortPolicyError {
    /// The port belongs to the tunnel. The caller most likely left out the target's port.
    #[error("{0} is the tunnel's own port; put the target's port in Host")]
    OwnPort(Port),
    /// The settings do not open the port.
    #[error(
        "port {0} is not allowed; the server allows 10250, 10255, the ports of its settings ports and --connect-ports, and those of --http-proxy-ports, \
         --https-proxy-ports and --localhost-proxy-ports, which a ConfigMap of the cluster may replace. Add it there only \
         if something on the nodes listens on it: a kube-apiserver's own port, as 6443, is in Host because kube-apiserver \
         passes on the Host of its client"
    )]
    NotListed(Port),
    /// The port is open on other listeners.
    #[error(
        "port {port} is not allowed on the {listener} listener; the server allows it on: {allowed} (ports, --connect-ports)"
    )]
    OtherListener {
        port: Port,
        listener: Listener,
        allowed: ListenerSet,
    },
}

impl PortPolicy {
    /// Creates the policy of the settings. `own` are the ports of the tunnel itself.
    pub fn new(settings: PortSettings, own: Vec<Port>) -> Self {
        Self { settings, own }
    }

    /// Creates the policy of three lists.
    pub fn of_lists(lists: PortLists, own: Vec<Port>) -> Self {
        let settings = PortSettings {
            lists,
            ..PortSettings::default()
        };
        Self::new(settings, own)
    }

    /// Returns the entry of a port that callers may reach on some listener.
    ///
    /// # Errors
    /// Returns [`PortPolicyError`] if there is none.
    pub fn entry(&self, port: Port) -> Result<PortEntry, PortPolicyError> {
        self.settings.entry(port).ok_or_else(|| {
            if self.own.contains(&port) {
                PortPolicyError::OwnPort(port)
            } else {
                PortPolicyError::NotListed(port)
            }
        })
    }

    /// Returns the target for a port of a node that a caller names on a listener.
    ///
    /// # Errors
    /// Returns [`PortPolicyError`] if the port is not allowed.
    pub fn target(&self, port: Port, listener: Listener) -> Result<Target, PortPolicyError> {
        let entry = self.entry(port)?;
        if !entry.listeners.contains(listener) {
            return Err(PortPolicyError::OtherListener {
                port,
                listener,
                allowed: entry.listeners,
            });
        }
        Ok(entry.class.target(port))
    }

    /// Returns the target for a port that another setting opens: that of a TCP service, or that of the
    /// kubelet, which the cluster determines.
    pub fn unlisted_target(&self, port: Port) -> Target {
        let entry = self.settings.entry(port);
        let class = entry.map_or_else(TargetClass::default, |entry| entry.class);
        class.target(port)
    }

    /// Checks a target that another server has determined for a port of a node, of which `kubelet` is
    /// the port of the kubelet. The other server has checked the listener.
    ///
    /// # Errors
    /// Returns [`PortPolicyError`] if this policy does not lead to the target.
    pub fn check_target(
        &self,
        target: &Target,
        kubelet: Option<Port>,
    ) -> Result<(), PortPolicyError> {
        let port = target.port();
        let is_kubelet = kubelet == Some(port) && self.unlisted_target(port) == *target;
        match self.entry(port) {
            Ok(entry) if entry.class.target(port) == *target => Ok(()),
            _ if is_kubelet => Ok(()),
            Ok(_) => Err(PortPolicyError::NotListed(port)),
            Err(refusal) => Err(refusal),
        }
    }

    /// Returns the additional ports to bind next to the listeners, by number, with their schemes. The
    /// ports of the kubelet are left out, because they belong to the kubelet of the host or are
    /// mapped by a Service.
    pub fn extra_ports(&self) -> impl Iterator<Item = (Port, Scheme)> {
        self.settings.listen_ports().into_iter()
    }
}

/// The current policy. In a cluster it follows a ConfigMap. Clones share the policy.
#[derive(Debug, Clone, Default)]
pub struct SharedPortPolicy(Arc<ArcSwap<PortPolicy>>);

impl SharedPortPolicy {
    pub fn load(&self) -> Arc<PortPolicy> {
        self.0.load_full()
    }

    /// Replaces the policy for later requests. Returns `true` if the new policy differs from the
    /// old one.
    pub fn replace(&self, policy: PortPolicy) -> bool {
        let is_other = *self.load() != policy;
        if is_other {
            self.0.store(Arc::new(policy));
        }
        is_other
    }
}

/// Reason why a caller may not reach a destination.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The listener serves only callers with an identity.
    #[error("proxy authentication required; send a name and password of --connect-auth")]
    CredentialsRequired,
    /// The node's port is not one that callers may reach.
    #[error("{0} port {1}: {2}")]
    Port(NodeName, Port, PortPolicyError),
}

/// The facts about a caller that authorization uses.
#[derive(Debug, Clone, Copy)]
pub struct AccessCaller<'a> {
    pub identity: &'a CallerIdentity,
    /// The listener of the caller's connection.
    pub listener: Listener,
    /// The listener serves only callers with an identity.
    pub must_authenticate: bool,
    /// The caller has client-certificate delegation.
    pub has_delegation: bool,
}

impl AccessCaller<'_> {
    /// A caller of the HTTP listener without an identity.
    pub const ANONYMOUS: Self = Self {
        identity: &CallerIdentity::Anonymous,
        listener: Listener::Http,
        must_authenticate: false,
        has_delegation: false,
    };

    /// Returns whether the caller has to send credentials first.
    pub fn needs_credentials(&self) -> bool {
        self.must_authenticate && *self.identity == CallerIdentity::Anonymous
    }
}

/// The access that a request asks for. `D` is what the server needs to dial a target itself.
#[derive(Debug)]
pub struct Access<'a, D> {
    pub caller: AccessCaller<'a>,
    pub destination: RequestedDestination<D>,
}

/// A destination that the policy allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authorized<D> {
    /// A target that the server reaches through the agent of a node.
    Agent(AgentTarget),
    /// A target that the server dials, if the dial policy allows one of its addresses.
    Direct(D),
}

/// Returns the target of an access.
///
/// # Errors
/// Returns [`Denied`] if the caller may not reach the destination.
pub fn authorize<D>(policy: &PortPolicy, access: Access<'_, D>) -> Result<Authorized<D>, Denied> {
    if access.caller.needs_credentials() {
        return Err(Denied::CredentialsRequired);
    }
    match access.destination {
        RequestedDestination::Node(requested) => {
            authorize_node(policy, access.caller, requested).map(Authorized::Agent)
        }
        // The operator has chosen the target.
        RequestedDestination::Configured(destination) => Ok(Authorized::Agent(AgentTarget {
            destination,
            keeps_host: false,
        })),
        RequestedDestination::Direct(direct) => Ok(Authorized::Direct(direct)),
    }
}

/// Returns the target on a node. The settings of the ports decide, except for the kubelet's port, which the
/// cluster determines. A caller with delegation also reaches the kubelet by another port.
pub fn authorize_node(
    policy: &PortPolicy,
    caller: AccessCaller<'_>,
    requested: RequestedNode,
) -> Result<AgentTarget, Denied> {
    let node = requested.node;
    let (listener, has_delegation) = (caller.listener, caller.has_delegation);
    let port = match requested.port {
        RequestedPort::Named(port) => port,
        RequestedPort::NamedOrKubelet { named, .. }
            if !has_delegation || policy.target(named, listener).is_ok() =>
        {
            named
        }
        RequestedPort::NamedOrKubelet { kubelet, .. } | RequestedPort::Kubelet(kubelet) => {
            let target = policy.unlisted_target(kubelet);
            return Ok(AgentTarget {
                destination: Destination { node, target },
                keeps_host: has_delegation,
            });
        }
    };
    match policy.target(port, listener) {
        Ok(target) => Ok(AgentTarget {
            destination: Destination { node, target },
            keeps_host: false,
        }),
        Err(refusal) => Err(Denied::Port(node, port, refusal)),
    }
}

#[cfg(test)]
impl Denied {
    /// Returns the kind of the denial, for test tables.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::CredentialsRequired => "credentials_required",
            Self::Port(..) => "port_denied",
        }
    }
}

#[cfg(test)]
mod tests;
