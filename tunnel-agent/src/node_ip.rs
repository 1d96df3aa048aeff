//! The address of this node, where its own ports are dialed. A session outlives changes of the
//! host's addresses, so each dial looks the address up.

use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tracing::{info, warn};
use tunnel_process::host::{is_own_address, primary_address, source_address};
use tunnel_process::meta::Readiness;
use tunnel_proto::transport::{Session, TransportKind};
use tunnel_proto::wire::name::{NodeName, SessionId};

use crate::config::NodeIpSetting;
use crate::policy::is_never_dialed;

mod changes;

/// An address of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeIp {
    pub(crate) ip: IpAddr,
    pub(crate) origin: NodeIpOrigin,
    /// Whether this host has the address.
    pub(crate) is_own: bool,
}

/// The reason why an address is the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeIpOrigin {
    /// The operator set it.
    Fixed,
    /// It is that of the variable `NODE_IP`.
    Initial,
    /// The host has it.
    Routed,
}

impl NodeIp {
    /// Returns whether the operator, or the Pod, names the address.
    pub(crate) fn is_configured(self) -> bool {
        self.origin != NodeIpOrigin::Routed
    }

    /// Returns whether the node has no other address by the operator's word.
    pub(crate) fn is_fixed(self) -> bool {
        self.origin == NodeIpOrigin::Fixed
    }
}

/// Looks up the node's address, and reports a setting that this host contradicts.
#[derive(Debug)]
pub(crate) struct NodeIpLookup {
    node: NodeName,
    setting: NodeIpSetting,
    readiness: Readiness,
    has_condition: Mutex<bool>,
    /// The last change that was logged. All sessions see the same one.
    logged: Mutex<Option<(IpAddr, IpAddr)>>,
    changed: Notify,
}

impl NodeIpLookup {
    pub(crate) fn new(node: NodeName, setting: NodeIpSetting, readiness: Readiness) -> Arc<Self> {
        Arc::new(Self {
            node,
            setting,
            readiness,
            has_condition: Mutex::new(false),
            logged: Mutex::new(None),
            changed: Notify::new(),
        })
    }

    /// Returns the current address. Without a setting it is the one from which this host reaches
    /// `server`, or else that of the default route. `None` means that this host has none.
    pub(crate) fn current(&self, server: SocketAddr) -> Option<NodeIp> {
        let found = select(self.setting, is_own_address, || for_route_to(server));
        self.report(problem(self.setting, found));
        found
    }

    /// Reports changes of this host's addresses and routes until the future is dropped.
    pub(crate) async fn follow(&self) {
        changes::follow(|| self.changed.notify_waiters()).await;
    }

    /// Sets or removes the condition, and logs it when it appears.
    fn report(&self, problem: Option<String>) {
        let mut has_condition = self.has_condition.lock();
        if *has_condition == problem.is_some() {
            return;
        }
        *has_condition = problem.is_some();
        if let Some(problem) = &problem {
            warn!(node = %self.node, "{problem}");
        }
        self.readiness
            .set_conditions(CONDITION, problem.into_iter().collect());
    }

    /// Logs a change, unless another session has logged it.
    fn log_change(&self, session: SessionId, previous: IpAddr, node_ip: IpAddr) {
        let change = Some((previous, node_ip));
        if std::mem::replace(&mut *self.logged.lock(), change) != change {
            info!(node = %self.node, session = session.0, %previous, %node_ip, "address of the node has changed");
        }
    }
}

/// The node's address as one session finds it.
#[derive(Debug)]
pub(crate) struct SessionNodeIp {
    lookup: Arc<NodeIpLookup>,
    session: SessionId,
    server: SocketAddr,
    last: Mutex<Option<IpAddr>>,
}

impl SessionNodeIp {
    /// Creates the lookup of a session with the server at `server`, which began with the address
    /// `first`.
    pub(crate) fn new(
        lookup: Arc<NodeIpLookup>,
        session: SessionId,
        server: SocketAddr,
        first: Option<NodeIp>,
    ) -> Self {
        Self {
            lookup,
            session,
            server,
            last: Mutex::new(first.map(|first| first.ip)),
        }
    }

    /// Returns the current address, and logs whether it has changed.
    pub(crate) fn current(&self) -> Option<NodeIp> {
        let found = self.lookup.current(self.server);
        if let Some(NodeIp { ip, .. }) = found {
            let previous = self.last.lock().replace(ip).filter(|last| *last != ip);
            if let Some(previous) = previous {
                self.lookup.log_change(self.session, previous, ip);
            }
        }
        found
    }

    /// Follows the address from which this host reaches the server: a QUIC connection moves to a new
    /// address with its next packet, and a TCP connection ends with its address. Completes when the
    /// connection is lost. Cancel-safe.
    pub(crate) async fn follow(&self, session: &dyn Session) {
        let first = source_address(self.server);
        let mut known = first;
        let mut changed = pin!(self.lookup.changed.notified());
        loop {
            changed.as_mut().await;
            changed.set(self.lookup.changed.notified());
            let source = source_address(self.server);
            if std::mem::replace(&mut known, source) == source || source.is_none() {
                continue;
            }
            let _logged = self.current();
            let is_tcp = session.transport() == TransportKind::H2;
            if is_tcp && first.is_some_and(|first| !is_own_address(first)) {
                return;
            }
            // Until then the server sends to the old address.
            session.probe();
        }
    }
}

/// Selects the address by the setting. `routed` returns an address of this host.
fn select(
    setting: NodeIpSetting,
    is_own: impl FnOnce(IpAddr) -> bool,
    routed: impl FnOnce() -> Option<IpAddr>,
) -> Option<NodeIp> {
    let node_ip = |ip, origin, is_own| NodeIp { ip, origin, is_own };
    match setting {
        NodeIpSetting::Fixed(ip) => Some(node_ip(ip, NodeIpOrigin::Fixed, is_own(ip))),
        NodeIpSetting::Initial(ip) if is_own(ip) => Some(node_ip(ip, NodeIpOrigin::Initial, true)),
        NodeIpSetting::Initial(_) | NodeIpSetting::Unset => {
            routed().map(|ip| node_ip(ip, NodeIpOrigin::Routed, true))
        }
    }
}

/// Returns the condition of an address that is set and is not this host's.
fn problem(setting: NodeIpSetting, found: Option<NodeIp>) -> Option<String> {
    match setting {
        NodeIpSetting::Fixed(ip) if found.is_some_and(|node| !node.is_own) => Some(format!(
            "--node-ip {ip} is not an address of this host, so requests for the node's own ports \
             leave the host; set one of its addresses, or none"
        )),
        NodeIpSetting::Initial(ip) if !found.is_some_and(NodeIp::is_configured) => Some(format!(
            "NODE_IP {ip} is not an address of this host, which uses another one for the \
                 node's own ports; restart the Pod, or set TUNNEL_AGENT_NODE_IP"
        )),
        NodeIpSetting::Fixed(_) | NodeIpSetting::Initial(_) | NodeIpSetting::Unset => None,
    }
}

/// Returns the address from which this host reaches `remote`. If that is loopback, link-local or
/// similar, returns another address of the host.
fn for_route_to(remote: SocketAddr) -> Option<IpAddr> {
    preferred(source_address(remote), primary_address)
}

fn preferred(source: Option<IpAddr>, primary: impl FnOnce() -> Option<IpAddr>) -> Option<IpAddr> {
    let is_dialed = |ip: &IpAddr| !ip.is_loopback() && !is_never_dialed(*ip);
    source.filter(is_dialed).or_else(primary).or(source)
}

/// Name of the condition of an address that is not this host's.
const CONDITION: &str = "node-ip";

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const SET: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
    const ROUTED: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 3));

    #[test]
    fn setting_holds_as_long_as_it_should() {
        use NodeIpSetting::{Fixed, Initial, Unset};
        let node = |ip, origin, is_own| Some(NodeIp { ip, origin, is_own });
        let routed = node(ROUTED, NodeIpOrigin::Routed, true);
        let initial = node(SET, NodeIpOrigin::Initial, true);
        let fixed = |is_own| node(SET, NodeIpOrigin::Fixed, is_own);
        let replaced = "NODE_IP 10.77.0.2 is not";
        let elsewhere = "--node-ip 10.77.0.2 is not";
        for (setting, own, route, found, condition) in [
            (Fixed(SET), vec![SET], Some(ROUTED), fixed(true), ""),
            (Fixed(SET), vec![], Some(ROUTED), fixed(false), elsewhere),
            (Initial(SET), vec![SET], Some(ROUTED), initial, ""),
            (Initial(SET), vec![], Some(ROUTED), routed, replaced),
            (Initial(SET), vec![], None, None, replaced),
            (Unset, vec![SET], Some(ROUTED), routed, ""),
            (Unset, vec![SET], None, None, ""),
        ] {
            let selected = select(setting, |ip| own.contains(&ip), || route);
            assert_eq!(selected, found, "{setting:?} {own:?}");
            let problem = problem(setting, selected).unwrap_or_default();
            assert_eq!(problem.is_empty(), condition.is_empty(), "{problem}");
            assert!(problem.starts_with(condition), "{problem}");
        }
    }

    #[test]
    fn condition_ends_with_its_cause() {
        let readiness = Readiness::default();
        let lookup =
            |setting| NodeIpLookup::new("worker-1".parse().unwrap(), setting, readiness.clone());
        let server = SocketAddr::from(([127, 0, 0, 1], 10262));
        let elsewhere = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 9));
        let fixed = lookup(NodeIpSetting::Fixed(elsewhere));
        assert_eq!(readiness.conditions(), []);
        let found = fixed.current(server).unwrap();
        assert_eq!((found.ip, found.is_own), (elsewhere, false));
        fixed.current(server);
        let (name, line) = readiness.conditions().pop().unwrap();
        assert!(name == CONDITION && line.contains("203.0.113.9"), "{line}");
        fixed.report(None);
        assert_eq!(readiness.conditions(), []);
    }

    #[test]
    fn loopback_and_link_local_addresses_are_the_last_resort() {
        for (source, primary, found) in [
            ("10.0.0.1", "10.0.0.2", "10.0.0.1"),
            ("127.0.0.1", "10.0.0.2", "10.0.0.2"),
            ("fe80::1", "10.0.0.2", "10.0.0.2"),
            ("127.0.0.1", "", "127.0.0.1"),
            ("", "", ""),
        ] {
            let [source, primary, found] = [source, primary, found].map(|ip| ip.parse().ok());
            assert_eq!(preferred(source, || primary), found, "{source:?}");
        }
        let found = for_route_to(([127, 0, 0, 1], 10262).into()).unwrap();
        let fallback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        assert_eq!(found, primary_address().unwrap_or(fallback));
    }
}
