//! Dials a target: finds candidate addresses, checks the dial policy for each, and connects. The
//! node's own address is configured or derived from the route.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};
use tunnel_proto::process::host::{is_own_address, primary_address, source_address};
use tunnel_proto::wire::code::RefusalCode;
use tunnel_proto::wire::header::{Refusal, Target};
use tunnel_proto::wire::name::Port;

use crate::metrics::{DialResult, Metrics};
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
    for (class, address) in candidates {
        policy::check_cloud_listeners(address, context.dial_policy, is_own_address)
            .map_err(|own| refusal(RefusalCode::Policy, &own.to_string()))?;
        match policy::check(class, address, context.dial_policy) {
            Ok(()) => allowed.push(address),
            Err(reason) => denied = denied.or(Some(reason)),
        }
    }
    let mut code = RefusalCode::TargetRefused;
    let mut failures = Vec::new();
    for (index, address) in allowed.iter().enumerate() {
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        // A silent address must leave time for those after it.
        let share = left / u32::try_from(allowed.len() - index).unwrap_or(u32::MAX);
        let error = match timeout_at(now + share, TcpStream::connect(address)).await {
            Ok(Ok(socket)) => {
                context.metrics.dialed(DialResult::Connected);
                return Ok((socket, *address));
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

async fn candidates(
    target: &Target,
    context: &DialContext<'_>,
    deadline: Instant,
) -> Result<Vec<(TargetClass, SocketAddr)>, Refusal> {
    match target {
        Target::Node(port) => {
            let NodeIp { ip, is_configured } = context.node_ip.ok_or_else(|| {
                let problem = "address of the node is unknown; set --node-ip on the agent";
                refusal(RefusalCode::TargetRefused, problem)
            })?;
            // A host without a network has only loopback, and listeners on loopback are not meant
            // for the network.
            let class = if ip.is_loopback() && !is_configured {
                TargetClass::Loopback
            } else {
                TargetClass::Node
            };
            let mut candidates = vec![(class, SocketAddr::new(ip, port.get()))];
            if KUBELET_PORTS.contains(&port.get()) {
                candidates.push((TargetClass::Loopback, loopback_v4(*port)));
            }
            Ok(candidates)
        }
        Target::Loopback(port) => {
            let v6 = SocketAddr::from((Ipv6Addr::LOCALHOST, port.get()));
            Ok(vec![
                (TargetClass::Loopback, loopback_v4(*port)),
                (TargetClass::Loopback, v6),
            ])
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

async fn resolve(host: &str, port: Port) -> Result<Vec<(TargetClass, SocketAddr)>, Refusal> {
    let problem = match lookup_host((host, port.get())).await {
        Ok(addresses) => {
            let found: Vec<_> = addresses
                .take(ADDRESSES_MAX)
                .map(|address| (TargetClass::Host, address))
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
        kind @ (ConnectionRefused | HostUnreachable | NetworkUnreachable | NetworkDown
        | ConnectionReset | ConnectionAborted | AddrNotAvailable | PermissionDenied) => {
            (DialResult::Refused, kind.to_string())
        }
        _ => (DialResult::Failed, error.to_string()),
    }
}

/// Ports of the kubelet. Some kubelets listen on loopback only.
const KUBELET_PORTS: [u16; 2] = [10250, 10255];
/// Maximum number of addresses tried for one name.
const ADDRESSES_MAX: usize = 8;

/// The node's address, and whether the operator configured it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeIp {
    pub(crate) ip: IpAddr,
    pub(crate) is_configured: bool,
}

impl NodeIp {
    /// Returns the address from which this host reaches `remote`. If that is loopback, returns the
    /// address of the default route.
    pub(crate) fn for_route_to(remote: SocketAddr) -> Option<Self> {
        let towards_server = source_address(remote);
        towards_server
            .filter(|ip| !ip.is_loopback())
            .or_else(primary_address)
            .or(towards_server)
            .map(|ip| Self {
                ip,
                is_configured: false,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn of_node(ip: &str, is_configured: bool, port: u16) -> Vec<(TargetClass, String)> {
        let (dial_policy, metrics) = (DialPolicy::default(), Metrics::default());
        let context = DialContext {
            node_ip: Some(NodeIp {
                ip: ip.parse().unwrap(),
                is_configured,
            }),
            dial_policy: &dial_policy,
            limit: Duration::from_secs(1),
            metrics: &metrics,
        };
        let target = Target::Node(Port::new(port).unwrap());
        let found = candidates(&target, &context, Instant::now()).await;
        let found = found.unwrap().into_iter();
        found.map(|(class, at)| (class, at.to_string())).collect()
    }

    #[tokio::test]
    async fn kubelet_is_tried_at_the_node_address_and_then_at_loopback() {
        for port in KUBELET_PORTS {
            let node = (TargetClass::Node, format!("192.168.33.221:{port}"));
            let loopback = (TargetClass::Loopback, format!("127.0.0.1:{port}"));
            let found = of_node("192.168.33.221", true, port).await;
            assert_eq!(found, [node, loopback]);
        }
        let found = of_node("192.168.33.221", true, 9100).await;
        let node = (TargetClass::Node, "192.168.33.221:9100".to_owned());
        assert_eq!(found, [node]);
    }

    #[tokio::test]
    async fn loopback_counts_as_the_node_address_only_when_it_was_given() {
        let given = of_node("127.0.0.2", true, 9100).await;
        assert_eq!(given[0].0, TargetClass::Node);
        let found = of_node("127.0.0.1", false, 9100).await;
        assert_eq!(found[0].0, TargetClass::Loopback);
    }

    #[test]
    fn loopback_is_the_last_resort() {
        let found = NodeIp::for_route_to(([127, 0, 0, 1], 10262).into()).unwrap();
        assert!(!found.is_configured);
        assert_eq!(
            found.ip,
            primary_address().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
        );
    }
}
