//! The node's own address, configured or derived from the route.

use std::net::{IpAddr, SocketAddr};

use tunnel_proto::process::host::{primary_address, source_address};

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

    #[test]
    fn loopback_is_the_last_resort() {
        let found = NodeIp::for_route_to(([127, 0, 0, 1], 10262).into()).unwrap();
        assert!(!found.is_configured);
        assert_eq!(
            found.ip,
            primary_address().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST))
        );
    }
}
