//! The ports of a node that callers may reach through the listeners, the kind of target for each
//! port, and the decision whether a caller may reach a destination. All functions are pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};
use tunnel_proto::wire::ports::PortSet;

use crate::destination::{
    AgentTarget, Destination, RequestedDestination, RequestedNode, RequestedPort,
};

/// Ports of the kubelet, TLS and plain read-only. Both are always allowed.
pub const KUBELET_PORTS: [u16; 2] = [10250, 10255];

mod caller;

pub use caller::CallerIdentity;

/// The ports that the listeners accept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PortPolicy {
    /// Additional ports of plain HTTP targets.
    pub http: PortSet,
    /// Additional ports of https targets. A port in both lists is https.
    pub https: PortSet,
    /// Ports that the agent dials on its loopback address.
    pub localhost: PortSet,
    /// Ports of the tunnel itself, for a hint in the error message.
    pub own: Vec<Port>,
}

/// Reason why a port is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortPolicyError {
    /// The port belongs to the tunnel. The caller most likely left out the target's port.
    #[error("{0} is the tunnel's own port; put the target's port in Host")]
    OwnPort(Port),
    /// The port is in none of the lists.
    #[error(
        "port {0} is not allowed; the server allows 10250, 10255 and those of --http-proxy-ports, \
         --https-proxy-ports and --localhost-proxy-ports, which a ConfigMap of the cluster may replace. Add it there only \
         if something on the nodes listens on it: a kube-apiserver's own port, as 6443, is in Host because kube-apiserver \
         passes on the Host of its client"
    )]
    NotListed(Port),
}

impl PortPolicy {
    /// Returns the target for a port of a node.
    ///
    /// # Errors
    /// Returns [`PortPolicyError`] if the port is not allowed.
    pub fn target(&self, port: Port) -> Result<Target, PortPolicyError> {
        if self.localhost.contains(port) {
            return Ok(Target::Loopback(port));
        }
        if KUBELET_PORTS.contains(&port.get())
            || self.http.contains(port)
            || self.https.contains(port)
        {
            return Ok(Target::Node(port));
        }
        match self.own.iter().find(|own| **own == port) {
            Some(_) => Err(PortPolicyError::OwnPort(port)),
            None => Err(PortPolicyError::NotListed(port)),
        }
    }

    /// Returns the target for the kubelet of a node. The cluster determines the kubelet's port.
    pub fn kubelet(&self, port: Port) -> Target {
        if self.localhost.contains(port) {
            Target::Loopback(port)
        } else {
            Target::Node(port)
        }
    }

    /// Checks a target that another server has determined for a port of a node, of which `kubelet` is
    /// the port of the kubelet.
    ///
    /// # Errors
    /// Returns [`PortPolicyError`] if this policy does not lead to the target.
    pub fn check_target(
        &self,
        target: &Target,
        kubelet: Option<Port>,
    ) -> Result<(), PortPolicyError> {
        let port = target.port();
        let is_kubelet = kubelet == Some(port) && self.kubelet(port) == *target;
        match self.target(port) {
            Ok(own) if own == *target => Ok(()),
            _ if is_kubelet => Ok(()),
            Ok(_) => Err(PortPolicyError::NotListed(port)),
            Err(refusal) => Err(refusal),
        }
    }

    /// Returns the additional ports to bind next to the listeners, and whether each is https. The
    /// ports of the kubelet are left out, because they belong to the kubelet of the host or are
    /// mapped by a Service.
    pub fn extra_ports(&self) -> impl Iterator<Item = (Port, bool)> + '_ {
        let https: BTreeSet<Port> = self.https.ports().collect();
        let http: BTreeSet<Port> = self
            .http
            .ports()
            .filter(|port| !https.contains(port))
            .collect();
        let both = https
            .into_iter()
            .map(|port| (port, true))
            .chain(http.into_iter().map(|port| (port, false)));
        both.filter(|(port, _)| !KUBELET_PORTS.contains(&port.get()))
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
    /// The listener serves only callers with an identity.
    pub must_authenticate: bool,
    /// The caller has client-certificate delegation.
    pub has_delegation: bool,
}

impl AccessCaller<'_> {
    /// A caller without an identity, at a listener that requires none.
    pub const ANONYMOUS: Self = Self {
        identity: &CallerIdentity::Anonymous,
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
            let has_delegation = access.caller.has_delegation;
            authorize_node(policy, has_delegation, requested).map(Authorized::Agent)
        }
        // The operator has chosen the target.
        RequestedDestination::Configured(destination) => Ok(Authorized::Agent(AgentTarget {
            destination,
            keeps_host: false,
        })),
        RequestedDestination::Direct(direct) => Ok(Authorized::Direct(direct)),
    }
}

/// Returns the target on a node. The port lists decide, except for the kubelet's port, which the
/// cluster determines. A caller with delegation also reaches the kubelet by another port.
pub fn authorize_node(
    policy: &PortPolicy,
    has_delegation: bool,
    requested: RequestedNode,
) -> Result<AgentTarget, Denied> {
    let node = requested.node;
    let port = match requested.port {
        RequestedPort::Named(port) => port,
        RequestedPort::NamedOrKubelet { named, .. }
            if !has_delegation || policy.target(named).is_ok() =>
        {
            named
        }
        RequestedPort::NamedOrKubelet { kubelet, .. } | RequestedPort::Kubelet(kubelet) => {
            let target = policy.kubelet(kubelet);
            return Ok(AgentTarget {
                destination: Destination { node, target },
                keeps_host: has_delegation,
            });
        }
    };
    match policy.target(port) {
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
