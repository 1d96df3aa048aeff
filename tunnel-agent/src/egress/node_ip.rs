//! The node's own address, given or found by the route.

use std::net::{IpAddr, SocketAddr};

use tunnel_proto::process::host::{primary_address, source_address};

/// The node's address, and whether the operator gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeIp {
    pub(crate) ip: IpAddr,
    pub(crate) given: bool,
}

impl NodeIp {
    /// The address from which this host reaches `remote`; when that is loopback, the one of the default route.
    pub(crate) fn towards(remote: SocketAddr) -> Option<Self> {
        let towards_server = source_address(remote);
        towards_server
            .filter(|ip| !ip.is_loopback())
            .or_else(primary_address)
            .or(towards_server)
            .map(|ip| Self { ip, given: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_the_last_resort() {
        let found = NodeIp::towards(([127, 0, 0, 1], 10262).into()).unwrap();
        assert!(!found.given);
        assert_eq!(
            found.ip,
            primary_address().unwrap_or(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST))
        );
    }
}
