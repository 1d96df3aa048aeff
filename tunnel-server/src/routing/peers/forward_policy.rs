//! The targets that other servers reach through this one. The rules are those of the policy.

use tunnel_proto::wire::header::Target;
use tunnel_proto::wire::name::NodeName;
use tunnel_routing::destination::Destination;
use tunnel_routing::policy::{PortPolicyError, SharedPolicy};

use crate::routing::current_routes::Routes;

/// The targets to which this server forwards streams of other servers: those that its own callers
/// may reach. Otherwise the server with the widest lists would decide for all.
#[derive(Debug)]
pub struct ForwardPolicy {
    pub policy: SharedPolicy,
    pub routes: Routes,
}

impl ForwardPolicy {
    /// Checks the target of a forwarded stream.
    ///
    /// # Errors
    /// Returns the [`PortPolicyError`] of this server's listeners.
    pub(super) fn check(&self, node: &NodeName, target: &Target) -> Result<(), PortPolicyError> {
        let is_service = |service: &Destination| service.node == *node && service.target == *target;
        let policy = self.policy.load();
        if policy.services.iter().any(is_service) {
            return Ok(());
        }
        let kubelet = self.routes.load().kubelet_port(node);
        policy.ports.check_target(target, kubelet)
    }
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::name::Port;
    use tunnel_routing::policy::Policy;

    use super::*;

    #[test]
    fn service_leads_other_servers_to_its_own_node_and_target_alone() {
        let target = |port| Target::Node(Port::new(port).unwrap());
        let node = |name: &str| name.parse::<NodeName>().unwrap();
        let forward = ForwardPolicy {
            policy: SharedPolicy::default(),
            routes: Routes::default(),
        };
        forward.policy.replace(&Policy {
            services: vec![Destination {
                node: node("edge-1"),
                target: target(22),
            }],
            ..Policy::default()
        });
        assert_eq!(forward.check(&node("edge-1"), &target(22)), Ok(()));
        for (name, port) in [("edge-2", 22), ("edge-1", 23), ("edge-2", 23)] {
            let refused = forward.check(&node(name), &target(port));
            let expected = PortPolicyError::NotListed(Port::new(port).unwrap());
            assert_eq!(refused, Err(expected), "{name}");
        }
    }
}
