//! The ports of a node that callers may reach through the listeners, and the kind of target for
//! each port. All functions are pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tunnel_proto::process::settings::PortSet;
use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::Port;

pub mod authorize;

/// Ports of the kubelet, TLS and plain read-only. Both are always allowed.
pub const KUBELET_PORTS: [u16; 2] = [10250, 10255];

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
    #[must_use]
    pub fn kubelet(&self, port: Port) -> Target {
        if self.localhost.contains(port) {
            Target::Loopback(port)
        } else {
            Target::Node(port)
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
    /// Returns the current policy.
    #[must_use]
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

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> PortPolicy {
        PortPolicy {
            http: "9100, 9200".parse().unwrap(),
            https: "9200, 9443, 10250".parse().unwrap(),
            localhost: "10266, 10267".parse().unwrap(),
            own: vec![port(10264), port(9100)],
        }
    }

    fn port(number: u16) -> Port {
        Port::new(number).unwrap()
    }

    #[test]
    fn listed_ports_get_their_class_and_others_a_reason() {
        let policy = policy();
        assert_eq!(policy.target(port(10250)), Ok(Target::Node(port(10250))));
        assert_eq!(policy.target(port(10255)), Ok(Target::Node(port(10255))));
        assert_eq!(
            policy.target(port(9100)),
            Ok(Target::Node(port(9100))),
            "a list beats the hint"
        );
        assert_eq!(
            policy.target(port(10266)),
            Ok(Target::Loopback(port(10266)))
        );
        assert_eq!(
            policy.target(port(10264)),
            Err(PortPolicyError::OwnPort(port(10264)))
        );
        assert_eq!(
            policy.target(port(22)),
            Err(PortPolicyError::NotListed(port(22)))
        );
    }

    #[test]
    fn https_wins_where_both_lists_have_a_port() {
        let extra: Vec<_> = policy().extra_ports().collect();
        assert_eq!(
            extra,
            [(port(9200), true), (port(9443), true), (port(9100), false)]
        );
    }
}
