//! Dials a target: finds candidate addresses, checks the dial policy for each, and connects.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tunnel_process::host::{IpFamily, is_own_address, main_address};
use tunnel_proto::dial::{self, Candidate, DialError, Resolve as _, Source, SystemResolver};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, Target};
use tunnel_proto::wire::name::Port;

use crate::metrics::{DialResult, Metrics};
use crate::node_ip::NodeIp;
use crate::policy::{self, Denied, DialPolicy, TargetClass};

/// Context of a dial apart from the target.
#[derive(Debug)]
pub(crate) struct DialContext<'a> {
    pub(crate) node_ip: Option<NodeIp>,
    pub(crate) dial_policy: &'a DialPolicy,
    pub(crate) resolver: &'a SystemResolver,
    pub(crate) limit: Duration,
    pub(crate) metrics: &'a Metrics,
}

/// Connects to a target, or returns the refusal to send. A target with an address of the agent's own
/// listeners for the cloud is refused, whatever its other addresses are. Cancel-safe.
pub(crate) async fn dial(
    target: &Target,
    context: &DialContext<'_>,
) -> Result<(TcpStream, SocketAddr), Refusal> {
    let deadline = Instant::now() + context.limit;
    let addresses = addresses(target, context, deadline).await?;
    let dial_policy = context.dial_policy;
    for TargetAddress { candidate, .. } in &addresses {
        policy::check_cloud_listeners(candidate.address, dial_policy, is_own_address)
            .map_err(|own| refusal(RefusalCode::Policy, &own.to_string()))?;
    }
    let other_family = std::iter::once_with(|| other_family(target, context.node_ip, main_address));
    let candidates = addresses.into_iter().chain(other_family.flatten());
    let checked = candidates.map(|TargetAddress { class, candidate }| {
        policy::check_cloud_listeners(candidate.address, dial_policy, is_own_address)?;
        policy::check(class, candidate.address, dial_policy)?;
        Ok::<_, Denied>(candidate)
    });
    match dial::dial(checked, deadline).await {
        Ok(dialed) => {
            context.metrics.dialed(DialResult::Connected);
            Ok(dialed)
        }
        Err(error) => Err(explain_all(&error, context)),
    }
}

/// Returns the refusal after all candidates have failed.
fn explain_all(error: &DialError<Denied>, context: &DialContext<'_>) -> Refusal {
    let mut code = RefusalCode::TargetRefused;
    let mut details = Vec::new();
    for (address, error) in &error.failures {
        let (result, why) = explain(error, context.limit);
        context.metrics.dialed(result);
        let detail = format!("{address}: {why}");
        // The node's address may be loopback, too.
        if !details.contains(&detail) {
            details.push(detail);
        }
        code = match result {
            DialResult::Timeout => RefusalCode::TargetTimeout,
            DialResult::Failed => RefusalCode::Internal,
            DialResult::Refused | DialResult::Connected => RefusalCode::TargetRefused,
        };
    }
    match error.refusals.first() {
        Some(denied) if details.is_empty() => refusal(RefusalCode::Policy, &denied.to_string()),
        Some(_) | None => refusal(code, &details.join("; ")),
    }
}

/// An address at which a target may be, and the class in whose list it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TargetAddress {
    class: TargetClass,
    candidate: Candidate,
}

impl TargetAddress {
    fn of_this_host(class: TargetClass, address: SocketAddr) -> Self {
        let candidate = Candidate {
            address,
            source: Source::Target,
        };
        Self { class, candidate }
    }
}

async fn addresses(
    target: &Target,
    context: &DialContext<'_>,
    deadline: Instant,
) -> Result<Vec<TargetAddress>, Refusal> {
    let loopback = |address| TargetAddress::of_this_host(TargetClass::Loopback, address);
    match target {
        Target::Node(port) => {
            let node_ip = context.node_ip.ok_or_else(|| {
                let problem = "the node has no address; set --node-ip on the agent";
                refusal(RefusalCode::TargetRefused, problem)
            })?;
            let mut addresses = vec![of_node(node_ip, *port)];
            if KUBELET_PORTS.contains(&port.get()) {
                addresses.push(loopback(loopback_v4(*port)));
            }
            Ok(addresses)
        }
        Target::Loopback(port) => {
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port.get()));
            Ok([loopback_v4(*port), v6].map(loopback).into())
        }
        Target::Host(host, port) => {
            let resolved = timeout_at(deadline, resolve(host, *port, context.resolver)).await;
            resolved.unwrap_or_else(|_elapsed| {
                let problem = format!("{host}: was not resolved within {:?}", context.limit);
                Err(refusal(RefusalCode::TargetTimeout, &problem))
            })
        }
    }
}

fn of_node(node_ip: NodeIp, port: Port) -> TargetAddress {
    // A host without a network has only loopback, and listeners on loopback are not meant for the
    // network.
    let class = if node_ip.ip.is_loopback() && !node_ip.is_configured() {
        TargetClass::Loopback
    } else {
        TargetClass::Node
    };
    let address = SocketAddr::new(node_ip.ip, port.get());
    if node_ip.is_own {
        TargetAddress::of_this_host(class, address)
    } else {
        TargetAddress {
            class,
            candidate: address.into(),
        }
    }
}

/// Returns the address of a target of the node in the other family: a program may listen on that
/// alone. There is none where the operator set the address.
fn other_family(
    target: &Target,
    node_ip: Option<NodeIp>,
    main_address: impl Fn(IpFamily) -> Option<IpAddr>,
) -> Option<TargetAddress> {
    let (Target::Node(port), Some(node_ip)) = (target, node_ip) else {
        return None;
    };
    if node_ip.is_fixed() {
        return None;
    }
    let ip = main_address(IpFamily::of(node_ip.ip).other())?;
    let address = SocketAddr::new(ip, port.get());
    Some(TargetAddress::of_this_host(TargetClass::Node, address))
}

async fn resolve(
    host: &str,
    port: Port,
    resolver: &SystemResolver,
) -> Result<Vec<TargetAddress>, Refusal> {
    let problem = match resolver.resolve(host, port.get()).await {
        Ok(found) if found.is_empty() => "has no address".to_owned(),
        Ok(found) => {
            let found = found.into_iter().map(|address| TargetAddress {
                class: TargetClass::Host,
                candidate: address.into(),
            });
            return Ok(found.collect());
        }
        Err(error) => format!("cannot be resolved: {error}"),
    };
    let problem = format!("{host}: {problem}");
    Err(refusal(RefusalCode::TargetRefused, &problem))
}

fn loopback_v4(port: Port) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port.get()))
}

fn refusal(code: RefusalCode, problem: &str) -> Refusal {
    Refusal {
        code,
        detail: problem.to_owned(),
    }
}

/// Classifies a failed connect and describes it without the system's error numbers.
fn explain(error: &io::Error, limit: Duration) -> (DialResult, String) {
    use io::ErrorKind::{
        AddrNotAvailable, ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable,
        NetworkDown, NetworkUnreachable, PermissionDenied, TimedOut,
    };
    match error.kind() {
        TimedOut => (DialResult::Timeout, format!("no answer within {limit:?}")),
        AddrNotAvailable => (
            DialResult::Refused,
            "this host has no such address".to_owned(),
        ),
        kind @ (ConnectionRefused | HostUnreachable | NetworkUnreachable | NetworkDown
        | ConnectionReset | ConnectionAborted | PermissionDenied) => {
            (DialResult::Refused, kind.to_string())
        }
        _ => (DialResult::Failed, error.to_string()),
    }
}

/// Ports of the kubelet. Some kubelets listen on loopback only.
const KUBELET_PORTS: [u16; 2] = [10250, 10255];

#[cfg(test)]
mod tests {
    use tunnel_proto::calibration::scaled;

    use super::*;
    use crate::node_ip::NodeIpOrigin::{self, Fixed, Initial, Routed};

    /// The parts of a context apart from the node's address.
    struct Setup {
        dial_policy: DialPolicy,
        resolver: SystemResolver,
        metrics: Metrics,
    }

    impl Setup {
        fn new() -> Self {
            Self {
                dial_policy: DialPolicy::default(),
                resolver: SystemResolver::new(1),
                metrics: Metrics::default(),
            }
        }

        fn context(&self, node_ip: Option<NodeIp>) -> DialContext<'_> {
            DialContext {
                node_ip,
                dial_policy: &self.dial_policy,
                resolver: &self.resolver,
                limit: scaled(Duration::from_secs(1)),
                metrics: &self.metrics,
            }
        }

        async fn refusal(&self, node_ip: Option<NodeIp>) -> Refusal {
            let target = Target::Node(port(9100));
            let dialed = dial(&target, &self.context(node_ip)).await;
            dialed.unwrap_err()
        }
    }

    fn port(number: u16) -> Port {
        Port::new(number).unwrap()
    }

    fn node_ip(ip: &str, origin: NodeIpOrigin) -> NodeIp {
        NodeIp {
            ip: ip.parse().unwrap(),
            origin,
            is_own: true,
        }
    }

    /// Returns class, address and source of each address of a port of the node.
    async fn of_node(node_ip: NodeIp, number: u16) -> Vec<(TargetClass, String, Source)> {
        let setup = Setup::new();
        let (target, context) = (Target::Node(port(number)), setup.context(Some(node_ip)));
        let found = addresses(&target, &context, Instant::now()).await;
        let found = found.unwrap().into_iter();
        found
            .map(|TargetAddress { class, candidate }| {
                (class, candidate.address.to_string(), candidate.source)
            })
            .collect()
    }

    #[tokio::test]
    async fn kubelet_is_tried_at_the_node_address_and_then_at_loopback() {
        let node_ip = node_ip("192.168.33.221", Fixed);
        let node = |port: u16| {
            let address = format!("192.168.33.221:{port}");
            (TargetClass::Node, address, Source::Target)
        };
        for port in KUBELET_PORTS {
            let address = format!("127.0.0.1:{port}");
            let loopback = (TargetClass::Loopback, address, Source::Target);
            assert_eq!(of_node(node_ip, port).await, [node(port), loopback]);
        }
        assert_eq!(of_node(node_ip, 9100).await, [node(9100)]);
    }

    #[tokio::test]
    async fn address_of_this_host_is_dialed_from_itself_and_another_one_from_anywhere() {
        for (is_own, source) in [(true, Source::Target), (false, Source::Any)] {
            let node_ip = NodeIp {
                is_own,
                ..node_ip("192.168.33.221", Fixed)
            };
            assert_eq!(of_node(node_ip, 9100).await[0].2, source);
        }
    }

    #[tokio::test]
    async fn loopback_counts_as_the_node_address_only_when_it_was_given() {
        let given = of_node(node_ip("127.0.0.2", Fixed), 9100).await;
        assert_eq!(given[0].0, TargetClass::Node);
        let found = of_node(node_ip("127.0.0.1", Routed), 9100).await;
        assert_eq!(found[0].0, TargetClass::Loopback);
    }

    #[test]
    fn port_of_the_node_is_also_tried_at_the_other_family_unless_the_operator_set_the_address() {
        let main_address = |family| match family {
            IpFamily::V4 => Some(IpAddr::from([10, 0, 0, 1])),
            IpFamily::V6 => "2001:db8::1".parse().ok(),
        };
        let node = Target::Node(port(9100));
        let loopback = Target::Loopback(port(9100));
        for (target, ip, origin, expected) in [
            (&node, "10.0.0.9", Routed, "[2001:db8::1]:9100"),
            (&node, "2001:db8::9", Routed, "10.0.0.1:9100"),
            (&node, "10.0.0.9", Initial, "[2001:db8::1]:9100"),
            (&node, "10.0.0.9", Fixed, ""),
            (&loopback, "10.0.0.9", Routed, ""),
        ] {
            let found = other_family(target, Some(node_ip(ip, origin)), main_address);
            let found = found.map(|found| {
                assert_eq!(found.class, TargetClass::Node);
                assert_eq!(found.candidate.source, Source::Target);
                found.candidate.address.to_string()
            });
            assert_eq!(
                found.unwrap_or_default(),
                expected,
                "{target} {ip} {origin:?}"
            );
        }
    }

    #[tokio::test]
    async fn node_without_an_address_is_explained() {
        let refusal = Setup::new().refusal(None).await;
        assert_eq!(refusal.code, RefusalCode::TargetRefused);
        assert!(refusal.detail.contains("--node-ip"), "{}", refusal.detail);
    }

    /// The host loses its address between the lookup and the dial.
    #[tokio::test]
    async fn address_that_is_gone_is_refused_and_not_dialed() {
        let refusal = Setup::new()
            .refusal(Some(node_ip("203.0.113.9", Fixed)))
            .await;
        assert_eq!(refusal.code, RefusalCode::TargetRefused);
        let detail = "203.0.113.9:9100: this host has no such address";
        assert_eq!(refusal.detail, detail);
    }
}
