//! The decision whether a caller may do something at a destination: the ports of the nodes that callers may
//! reach through the listeners, and the rules. All functions are pure.

use std::net::IpAddr;
use std::sync::Arc;

use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::{NodeName, Port};

use crate::destination::{
    AgentTarget, Destination, RequestedDestination, RequestedNode, RequestedPort, Scheme,
};

use crate::operation::{Operation, RequestedOperation, UnclearPath};
use rules::{DestinationKind, Facts, RuleTable, Verdict};

mod caller;
mod defaults;
mod dry_run;
mod listener;
mod ports;
pub mod rules;
mod shared;

pub use caller::{CallerIdentity, CallerIdentityError, UnreadToken};
pub use defaults::DefaultPorts;
pub use dry_run::{Decided, Difference, Rules};
pub use listener::{Listener, ListenerSet};
pub use ports::{KUBELET_PORTS, PortEntry, PortLists, PortSettings, TargetClass, TargetClassError};
pub use shared::{DelegationPolicy, Policy, SharedPolicy};

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
        if !entry.listeners.contains(listener.of_port()) {
            return Err(PortPolicyError::OtherListener {
                port,
                listener,
                allowed: entry.listeners,
            });
        }
        Ok(entry.class.target(port))
    }

    /// Checks the port of an access that the settings of the ports have to open.
    ///
    /// # Errors
    /// Returns [`Denied`] if they do not on its listener.
    pub fn check(&self, access: &TargetAccess) -> Result<(), Denied> {
        let facts = &access.facts;
        match (&access.opened_by, &facts.node, facts.port) {
            (OpenedBy::Ports, Some(node), Some(port)) => {
                let target = self.target(port, facts.listener);
                let refused = |refusal| Denied::Port(node.clone(), port, refusal);
                target.map(drop).map_err(refused)
            }
            _ => Ok(()),
        }
    }

    /// Returns the target for a port, whatever opens it.
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

/// Reason why a caller may not reach a destination.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// The listener serves only callers with an identity.
    #[error("proxy authentication required; send a name and password of --connect-auth")]
    CredentialsRequired,
    /// The node's port is not one that callers may reach.
    #[error("{0} port {1}: {2}")]
    Port(NodeName, Port, PortPolicyError),
    /// The configuration has the TCP service no more.
    #[error("the configuration has no such TCP service any more")]
    NoService,
    /// The caller has lost the delegation with which the access began.
    #[error("the caller has client-certificate delegation no more")]
    NoDelegation,
    /// The path can be read in several ways.
    #[error(transparent)]
    UnclearPath(#[from] UnclearPath),
    /// A rule denies the operation.
    #[error("rule {rule} denies {operation} at {at}")]
    Rule {
        rule: Arc<str>,
        operation: Operation,
        at: String,
    },
    /// No rule allows the operation.
    #[error(
        "no rule allows {operation} at {at} for this caller on the {listener} listener; on the server, \
         'tunnel-server policy test' says what is allowed"
    )]
    NoRule {
        operation: Operation,
        at: String,
        listener: Listener,
    },
    /// The authorization of the cluster, which a rule asks, does not allow the operation.
    #[error("rule {rule} asks the cluster about {operation}: {reason}")]
    Cluster {
        rule: Arc<str>,
        operation: Operation,
        reason: String,
    },
}

impl Denied {
    /// Returns the rule that decided, if one did.
    pub fn rule(&self) -> Option<&Arc<str>> {
        match self {
            Self::Rule { rule, .. } | Self::Cluster { rule, .. } => Some(rule),
            Self::NoRule { .. }
            | Self::CredentialsRequired
            | Self::Port(..)
            | Self::NoService
            | Self::NoDelegation
            | Self::UnclearPath(_) => None,
        }
    }
}

/// The facts about a caller that authorization uses.
#[derive(Debug, Clone, Copy)]
pub struct AccessCaller<'a> {
    pub identity: &'a CallerIdentity,
    /// The listener of the caller's connection.
    pub listener: Listener,
    /// Source address of the caller's connection, unless it is over a Unix socket.
    pub source: Option<IpAddr>,
    /// The listener serves only callers with an identity.
    pub must_authenticate: bool,
    /// The caller has client-certificate delegation.
    pub has_delegation: bool,
    pub token: UnreadToken,
}

impl AccessCaller<'_> {
    /// A caller of the HTTP listener without an identity.
    pub const ANONYMOUS: Self = Self {
        identity: &CallerIdentity::Anonymous,
        listener: Listener::Http,
        source: None,
        must_authenticate: false,
        has_delegation: false,
        token: UnreadToken::None,
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
    pub operation: RequestedOperation<'a>,
}

/// How the server reaches a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route<D> {
    /// A target that the server reaches through the agent of a node.
    Agent(AgentTarget),
    /// A target that the server dials, if the dial policy allows one of its addresses.
    Direct(D),
}

/// An access to a target, with all that a decision about it needs: when it begins, and again after a change
/// of the policy.
#[derive(Debug, Clone)]
pub struct TargetAccess {
    pub facts: Facts,
    pub opened_by: OpenedBy,
}

/// The setting that opens a target, before the rules decide.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenedBy {
    /// The ports that callers may reach on the listener.
    Ports,
    /// The entry of a TCP service with this destination.
    Service(Destination),
    /// No setting of the policy: the cluster determines the port of a kubelet, the dial policy the targets
    /// without an agent, and the list `cloud:` those of the cloud.
    Other,
}

/// The route of an access, and the access for the decision about it.
#[derive(Debug, Clone)]
pub struct Located<D> {
    pub route: Route<D>,
    pub access: TargetAccess,
}

/// The decision of the rules that allows an access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Granted {
    /// The name of the rule that allows the access.
    pub rule: Arc<str>,
    /// The authorization of the cluster has to allow the access, too.
    pub asks_cluster: bool,
}

/// Returns the route of an access, about which [`Policy::admit`] and [`authorize`] decide.
///
/// # Errors
/// Returns [`Denied`] if the caller has to send credentials first, or the path is unclear.
pub fn locate<D>(ports: &PortPolicy, access: Access<'_, D>) -> Result<Located<D>, Denied> {
    let caller = access.caller;
    if caller.needs_credentials() {
        return Err(Denied::CredentialsRequired);
    }
    let (kind, kubelet, port, route, opened_by) = match access.destination {
        RequestedDestination::Node(requested) => {
            let kubelet = requested.port.kubelet();
            let (target, opened_by) = locate_node(ports, caller, requested);
            let port = target.destination.target.port();
            let route = Route::Agent(target);
            (DestinationKind::Node, kubelet, port, route, opened_by)
        }
        RequestedDestination::Configured(destination) => {
            let (port, opened_by) = (
                destination.target.port(),
                OpenedBy::Service(destination.clone()),
            );
            let route = Route::Agent(AgentTarget {
                destination,
                keeps_host: false,
            });
            (DestinationKind::Service, None, port, route, opened_by)
        }
        RequestedDestination::Direct(direct, port) => {
            let route = Route::Direct(direct);
            (DestinationKind::Direct, None, port, route, OpenedBy::Other)
        }
    };
    let node = match &route {
        Route::Agent(target) => Some(target.destination.node.clone()),
        Route::Direct(_) => None,
    };
    let is_kubelet = kubelet == Some(port) || is_kubelet_number(port);
    let operation = access.operation.at(is_kubelet)?;
    let without_upgrade = match operation {
        Operation::Upgrade => access.operation.without_upgrade().at(is_kubelet)?,
        other => other,
    };
    let facts = Facts {
        listener: caller.listener,
        identity: caller.identity.clone(),
        has_delegation: caller.has_delegation,
        token: caller.token,
        source: caller.source,
        kind,
        node,
        described: None,
        port: Some(port),
        is_kubelet,
        operation,
        without_upgrade,
    };
    let access = TargetAccess { facts, opened_by };
    Ok(Located { route, access })
}

/// Decides about an access by the rules.
///
/// # Errors
/// Returns [`Denied`] if a rule denies the access, or no rule allows it.
pub fn authorize(rules: &RuleTable, facts: &Facts) -> Result<Granted, Denied> {
    let decision = rules.decide(facts);
    let (operation, rule) = (facts.operation, decision.rule.map(|rule| rule.name.clone()));
    match (decision.verdict, rule) {
        (Verdict::Allow, Some(rule)) => Ok(Granted {
            rule,
            asks_cluster: false,
        }),
        (Verdict::AskCluster, Some(rule)) => Ok(Granted {
            rule,
            asks_cluster: true,
        }),
        (Verdict::Deny, Some(rule)) => Err(Denied::Rule {
            rule,
            operation,
            at: facts.at(),
        }),
        (Verdict::Allow | Verdict::AskCluster | Verdict::Deny, None) => Err(Denied::NoRule {
            operation,
            at: facts.at(),
            listener: facts.listener,
        }),
    }
}

/// Returns the access of a stream that the agent of a node opens to a target of the cloud, with these ports
/// of its addresses.
pub fn access_of_agent(node: &NodeName, ports: &[Port]) -> TargetAccess {
    let same = |port: &&Port| ports.iter().all(|other| other == *port);
    let facts = Facts {
        listener: Listener::Agent,
        identity: CallerIdentity::Agent(node.clone()),
        has_delegation: false,
        token: UnreadToken::None,
        source: None,
        kind: DestinationKind::Target,
        node: None,
        described: None,
        port: ports.first().filter(same).copied(),
        is_kubelet: ports.iter().any(|port| is_kubelet_number(*port)),
        operation: Operation::Connect,
        without_upgrade: Operation::Connect,
    };
    TargetAccess {
        facts,
        opened_by: OpenedBy::Other,
    }
}

fn is_kubelet_number(port: Port) -> bool {
    KUBELET_PORTS
        .iter()
        .any(|(kubelet, _)| *kubelet == port.get())
}

/// Returns the target on a node, and what opens it: the settings of the ports, except for the kubelet's port,
/// which the cluster determines. A caller with delegation also reaches the kubelet by another port.
pub fn locate_node(
    ports: &PortPolicy,
    caller: AccessCaller<'_>,
    requested: RequestedNode,
) -> (AgentTarget, OpenedBy) {
    let (listener, has_delegation) = (caller.listener, caller.has_delegation);
    let (port, opened_by) = match requested.port {
        RequestedPort::Named(port) => (port, OpenedBy::Ports),
        RequestedPort::NamedOrKubelet { named, .. }
            if !has_delegation || ports.target(named, listener).is_ok() =>
        {
            (named, OpenedBy::Ports)
        }
        RequestedPort::NamedOrKubelet { kubelet, .. } | RequestedPort::Kubelet(kubelet) => {
            (kubelet, OpenedBy::Other)
        }
    };
    let target = AgentTarget {
        destination: Destination {
            node: requested.node,
            target: ports.unlisted_target(port),
        },
        keeps_host: has_delegation && opened_by == OpenedBy::Other,
    };
    (target, opened_by)
}

#[cfg(test)]
impl Denied {
    /// Returns the kind of the denial, for test tables.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::CredentialsRequired => "credentials_required",
            Self::Port(..) => "port_denied",
            Self::NoService | Self::NoDelegation => "not_open",
            Self::UnclearPath(_) => "unclear_path",
            Self::Rule { .. } | Self::NoRule { .. } | Self::Cluster { .. } => "rule_denied",
        }
    }
}

#[cfg(test)]
mod tests;
