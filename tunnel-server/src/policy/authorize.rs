//! The decision whether a caller may reach a destination. All functions are pure.

use http::Method;

use super::PortPolicy;
use crate::ingress::error::ProxyError;
use crate::ingress::outcome::Outcome;
use crate::ingress::peer::CallerIdentity;
use crate::routing::destination::{
    AgentTarget, Destination, RequestedDestination, RequestedNode, RequestedPort,
};

/// Text of the error for a caller without an identity.
pub(crate) const CREDENTIALS_REQUIRED: &str =
    "proxy authentication required; send a name and password of --connect-auth";

/// The facts about a caller that authorization uses.
#[derive(Debug, Clone, Copy)]
pub struct AccessCaller<'a> {
    /// The identity that the caller has proved.
    pub identity: &'a CallerIdentity,
    /// The listener serves only callers with an identity.
    pub must_authenticate: bool,
    /// The caller has client-certificate delegation.
    pub has_delegation: bool,
}

impl AccessCaller<'_> {
    /// Returns whether the caller has to send credentials first.
    #[must_use]
    pub fn needs_credentials(&self) -> bool {
        self.must_authenticate && *self.identity == CallerIdentity::Anonymous
    }
}

/// The access that a request asks for. `D` is what the server needs to dial a target itself.
#[derive(Debug)]
pub struct Access<'a, D> {
    /// The caller of the request.
    pub caller: AccessCaller<'a>,
    /// The destination that the request asks for.
    pub destination: RequestedDestination<D>,
    /// Method of an HTTP request, or `None` for a byte stream. No rule depends on the method.
    pub verb: Option<&'a Method>,
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
/// Returns a [`ProxyError`] with the response for the caller.
pub fn authorize<D>(
    policy: &PortPolicy,
    access: Access<'_, D>,
) -> Result<Authorized<D>, ProxyError> {
    if access.caller.needs_credentials() {
        return Err(ProxyError::new(Outcome::ProxyAuth, CREDENTIALS_REQUIRED));
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

/// Returns the target on a node. The port lists decide. A caller with delegation also reaches the
/// kubelet on the port that the cluster says.
pub(crate) fn authorize_node(
    policy: &PortPolicy,
    has_delegation: bool,
    requested: RequestedNode,
) -> Result<AgentTarget, ProxyError> {
    let node = requested.node;
    let port = match requested.port {
        RequestedPort::Named(port) => port,
        RequestedPort::NamedOrKubelet { named, .. } if policy.target(named).is_ok() => named,
        RequestedPort::NamedOrKubelet { kubelet, .. } | RequestedPort::Kubelet(kubelet) => {
            if has_delegation {
                let target = policy.kubelet(kubelet);
                return Ok(AgentTarget {
                    destination: Destination { node, target },
                    keeps_host: true,
                });
            }
            kubelet
        }
    };
    let target = policy.target(port).map_err(|refusal| {
        let text = format!("{node} port {port}: {refusal}");
        ProxyError::new(Outcome::RefusedByPolicy, text)
    })?;
    Ok(AgentTarget {
        destination: Destination { node, target },
        keeps_host: false,
    })
}

/// Authorizes an anonymous caller.
#[cfg(test)]
pub(crate) fn authorize_anonymous<D>(
    policy: &PortPolicy,
    destination: RequestedDestination<D>,
) -> Result<Authorized<D>, ProxyError> {
    let access = Access {
        caller: AccessCaller {
            identity: &CallerIdentity::Anonymous,
            must_authenticate: false,
            has_delegation: false,
        },
        destination,
        verb: None,
    };
    authorize(policy, access)
}

#[cfg(test)]
mod tests {
    use tunnel_proto::wire::header::Target;
    use tunnel_proto::wire::name::Port;

    use super::*;

    fn port(number: u16) -> Port {
        Port::new(number).unwrap()
    }

    fn policy() -> PortPolicy {
        PortPolicy {
            http: "9100".parse().unwrap(),
            localhost: "10266".parse().unwrap(),
            own: vec![port(10264)],
            ..PortPolicy::default()
        }
    }

    /// Returns the target, `direct`, or the error code. `, Host` follows a target that keeps Host.
    fn answer(caller: AccessCaller<'_>, destination: RequestedDestination<()>) -> String {
        let access = Access {
            caller,
            destination,
            verb: Some(&Method::GET),
        };
        match authorize(&policy(), access) {
            Ok(Authorized::Agent(target)) if target.keeps_host => {
                format!("{}, Host", target.destination)
            }
            Ok(Authorized::Agent(target)) => target.destination.to_string(),
            Ok(Authorized::Direct(())) => "direct".to_owned(),
            Err(failure) => failure.outcome.to_string(),
        }
    }

    fn node(port: RequestedPort) -> RequestedDestination<()> {
        let node = "worker-1".parse().unwrap();
        RequestedDestination::Node(RequestedNode { node, port })
    }

    #[test]
    fn lists_decide_about_ports_and_delegation_about_the_kubelet() {
        let named = |number| RequestedPort::Named(port(number));
        let kubelet = |number| RequestedPort::Kubelet(port(number));
        let either = |number| RequestedPort::NamedOrKubelet {
            named: port(number),
            kubelet: port(10350),
        };
        for (requested, others, delegated) in [
            (named(9100), "worker-1 node:9100", "worker-1 node:9100"),
            (named(10250), "worker-1 node:10250", "worker-1 node:10250"),
            (
                named(10266),
                "worker-1 loopback:10266",
                "worker-1 loopback:10266",
            ),
            (named(22), "refused_by_policy", "refused_by_policy"),
            (named(10264), "refused_by_policy", "refused_by_policy"),
            (
                kubelet(10350),
                "refused_by_policy",
                "worker-1 node:10350, Host",
            ),
            (
                kubelet(10266),
                "worker-1 loopback:10266",
                "worker-1 loopback:10266, Host",
            ),
            (either(9100), "worker-1 node:9100", "worker-1 node:9100"),
            (
                either(6443),
                "refused_by_policy",
                "worker-1 node:10350, Host",
            ),
        ] {
            for (has_delegation, expected) in [(false, others), (true, delegated)] {
                let caller = AccessCaller {
                    identity: &CallerIdentity::Anonymous,
                    must_authenticate: false,
                    has_delegation,
                };
                assert_eq!(answer(caller, node(requested)), expected, "{requested:?}");
            }
        }
    }

    #[test]
    fn lists_are_not_asked_for_configured_and_direct_targets() {
        let caller = AccessCaller {
            identity: &CallerIdentity::Anonymous,
            must_authenticate: false,
            has_delegation: false,
        };
        let configured = RequestedDestination::Configured(Destination {
            node: "worker-1".parse().unwrap(),
            target: Target::Node(port(22)),
        });
        assert_eq!(answer(caller, configured), "worker-1 node:22");
        assert_eq!(answer(caller, RequestedDestination::Direct(())), "direct");
    }

    #[test]
    fn listener_with_authentication_serves_only_callers_with_an_identity() {
        let identities = [
            (CallerIdentity::Anonymous, "proxy_auth_required"),
            (CallerIdentity::User("scraper".into()), "worker-1 node:9100"),
            (CallerIdentity::Certificate("".into()), "worker-1 node:9100"),
            (CallerIdentity::Uid(0), "worker-1 node:9100"),
        ];
        for (identity, expected) in identities {
            let caller = AccessCaller {
                identity: &identity,
                must_authenticate: true,
                has_delegation: false,
            };
            let requested = node(RequestedPort::Named(port(9100)));
            assert_eq!(answer(caller, requested), expected, "{identity}");
        }
    }
}
