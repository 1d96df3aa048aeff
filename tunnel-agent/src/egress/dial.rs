//! Dials a target: finds candidate addresses, checks the dial policy for each, and connects.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};
use tunnel_proto::dial::{Source, connect};
use tunnel_proto::process::host::is_own_address;
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, Target};
use tunnel_proto::wire::name::Port;

use crate::metrics::{DialResult, Metrics};
use crate::node_ip::NodeIp;
use crate::policy::{self, DialPolicy, TargetClass};

/// Context of a dial apart from the target.
#[derive(Debug)]
pub(crate) struct DialContext<'a> {
    pub(crate) node_ip: Option<NodeIp>,
    pub(crate) dial_policy: &'a DialPolicy,
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
    let candidates = candidates(target, context, deadline).await?;
    let mut allowed = Vec::new();
    let mut denied = None;
    for candidate in candidates {
        let Candidate { class, address, .. } = candidate;
        policy::check_cloud_listeners(address, context.dial_policy, is_own_address)
            .map_err(|own| refusal(RefusalCode::Policy, &own.to_string()))?;
        match policy::check(class, address, context.dial_policy) {
            Ok(()) => allowed.push(candidate),
            Err(reason) => denied = denied.or(Some(reason)),
        }
    }
    let mut code = RefusalCode::TargetRefused;
    let mut failures = Vec::new();
    for (index, candidate) in allowed.iter().enumerate() {
        let Candidate {
            address, source, ..
        } = *candidate;
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        // A silent address must leave time for those after it.
        let share = left / u32::try_from(allowed.len() - index).unwrap_or(u32::MAX);
        let error = match timeout_at(now + share, connect(address, source)).await {
            Ok(Ok(socket)) => {
                context.metrics.dialed(DialResult::Connected);
                return Ok((socket, address));
            }
            Ok(Err(error)) => error,
            Err(_elapsed) => io::ErrorKind::TimedOut.into(),
        };
        let (result, why) = explain(&error, context.limit);
        context.metrics.dialed(result);
        failures.push(format!("{address}: {why}"));
        code = match result {
            DialResult::Timeout => RefusalCode::TargetTimeout,
            DialResult::Failed => RefusalCode::Internal,
            DialResult::Refused | DialResult::Connected => RefusalCode::TargetRefused,
        };
    }
    match (failures.is_empty(), denied) {
        (true, Some(denied)) => Err(refusal(RefusalCode::Policy, &denied.to_string())),
        _ => Err(refusal(code, &failures.join("; "))),
    }
}

/// An address at which a target may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Candidate {
    class: TargetClass,
    address: SocketAddr,
    source: Source,
}

impl Candidate {
    fn loopback(address: SocketAddr) -> Self {
        Self {
            class: TargetClass::Loopback,
            address,
            source: Source::Target,
        }
    }
}

async fn candidates(
    target: &Target,
    context: &DialContext<'_>,
    deadline: Instant,
) -> Result<Vec<Candidate>, Refusal> {
    match target {
        Target::Node(port) => {
            let NodeIp {
                ip,
                is_configured,
                is_own,
            } = context.node_ip.ok_or_else(|| {
                let problem = "the node has no address; set --node-ip on the agent";
                refusal(RefusalCode::TargetRefused, problem)
            })?;
            // A host without a network has only loopback, and listeners on loopback are not meant
            // for the network.
            let class = if ip.is_loopback() && !is_configured {
                TargetClass::Loopback
            } else {
                TargetClass::Node
            };
            let mut candidates = vec![Candidate {
                class,
                address: SocketAddr::new(ip, port.get()),
                source: if is_own { Source::Target } else { Source::Any },
            }];
            if KUBELET_PORTS.contains(&port.get()) {
                candidates.push(Candidate::loopback(loopback_v4(*port)));
            }
            Ok(candidates)
        }
        Target::Loopback(port) => {
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port.get()));
            Ok([loopback_v4(*port), v6].map(Candidate::loopback).into())
        }
        Target::Host(host, port) => {
            let resolved = timeout_at(deadline, resolve(host, *port)).await;
            resolved.unwrap_or_else(|_elapsed| {
                let problem = format!("{host}: was not resolved within {:?}", context.limit);
                Err(refusal(RefusalCode::TargetTimeout, &problem))
            })
        }
    }
}

async fn resolve(host: &str, port: Port) -> Result<Vec<Candidate>, Refusal> {
    let problem = match lookup_host((host, port.get())).await {
        Ok(addresses) => {
            let found: Vec<_> = addresses
                .take(ADDRESSES_MAX)
                .map(|address| Candidate {
                    class: TargetClass::Host,
                    address,
                    source: Source::Any,
                })
                .collect();
            if !found.is_empty() {
                return Ok(found);
            }
            "has no address".to_owned()
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
/// Maximum number of addresses tried for one name.
const ADDRESSES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns class, address and source of each candidate of a port of the node.
    async fn of_node(node_ip: NodeIp, port: u16) -> Vec<(TargetClass, String, Source)> {
        let (dial_policy, metrics) = (DialPolicy::default(), Metrics::default());
        let context = DialContext {
            node_ip: Some(node_ip),
            dial_policy: &dial_policy,
            limit: Duration::from_secs(1),
            metrics: &metrics,
        };
        let target = Target::Node(Port::new(port).unwrap());
        let found = candidates(&target, &context, Instant::now()).await;
        let found = found.unwrap().into_iter();
        found
            .map(|at| (at.class, at.address.to_string(), at.source))
            .collect()
    }

    fn node_ip(ip: &str, is_configured: bool) -> NodeIp {
        NodeIp {
            ip: ip.parse().unwrap(),
            is_configured,
            is_own: true,
        }
    }

    #[tokio::test]
    async fn kubelet_is_tried_at_the_node_address_and_then_at_loopback() {
        let node_ip = node_ip("192.168.33.221", true);
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
                ..node_ip("192.168.33.221", true)
            };
            assert_eq!(of_node(node_ip, 9100).await[0].2, source);
        }
    }

    #[tokio::test]
    async fn loopback_counts_as_the_node_address_only_when_it_was_given() {
        let given = of_node(node_ip("127.0.0.2", true), 9100).await;
        assert_eq!(given[0].0, TargetClass::Node);
        let found = of_node(node_ip("127.0.0.1", false), 9100).await;
        assert_eq!(found[0].0, TargetClass::Loopback);
    }

    #[tokio::test]
    async fn node_without_an_address_is_explained() {
        let (dial_policy, metrics) = (DialPolicy::default(), Metrics::default());
        let context = DialContext {
            node_ip: None,
            dial_policy: &dial_policy,
            limit: Duration::from_secs(1),
            metrics: &metrics,
        };
        let target = Target::Node(Port::new(9100).unwrap());
        let refusal = dial(&target, &context).await.unwrap_err();
        assert_eq!(refusal.code, RefusalCode::TargetRefused);
        assert!(refusal.detail.contains("--node-ip"), "{}", refusal.detail);
    }

    /// The host loses its address between the lookup and the dial.
    #[tokio::test]
    async fn address_that_is_gone_is_refused_and_not_dialed() {
        let (dial_policy, metrics) = (DialPolicy::default(), Metrics::default());
        let context = DialContext {
            node_ip: Some(node_ip("203.0.113.9", false)),
            dial_policy: &dial_policy,
            limit: Duration::from_secs(1),
            metrics: &metrics,
        };
        let target = Target::Node(Port::new(9100).unwrap());
        let refusal = dial(&target, &context).await.unwrap_err();
        assert_eq!(refusal.code, RefusalCode::TargetRefused);
        let detail = "203.0.113.9:9100: this host has no such address";
        assert_eq!(refusal.detail, detail);
    }
}
