//! The node's own address, given or found by the route.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// The node's address, and whether the operator gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeIp {
    pub(crate) ip: IpAddr,
    pub(crate) given: bool,
}

impl NodeIp {
    /// The address from which this host reaches `remote`; when that is loopback, the one of the default route.
    pub(crate) fn towards(remote: SocketAddr) -> Option<Self> {
        let towards_server = source(remote);
        towards_server
            .filter(|ip| !ip.is_loopback())
            .or_else(|| source(DEFAULT_ROUTE.into()))
            .or(towards_server)
            .map(|ip| Self { ip, given: false })
    }
}

/// Connecting a UDP socket sends nothing; it only asks the routing table.
fn source(remote: SocketAddr) -> Option<IpAddr> {
    let any = if remote.is_ipv4() {
        SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))
    } else {
        SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(remote).ok()?;
    Some(socket.local_addr().ok()?.ip().to_canonical())
}

/// An address of TEST-NET-1 (RFC 5737): only the default route leads there.
const DEFAULT_ROUTE: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_last_resort() {
        let found = NodeIp::towards(([127, 0, 0, 1], 10262).into()).unwrap();
        assert!(!found.given);
        let default = source(DEFAULT_ROUTE.into());
        assert_eq!(found.ip, default.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    }
}
