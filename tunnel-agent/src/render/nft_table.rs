//! The nft table that redirects the Service `kubernetes`, as `render` and `doctor` know it.

use std::net::IpAddr;

/// Returns nft's name of the address family.
pub(crate) fn family(ip: IpAddr) -> &'static str {
    match ip {
        IpAddr::V4(_) => "ip",
        IpAddr::V6(_) => "ip6",
    }
}

/// Name of the table, by which it is removed.
pub(crate) const TABLE: &str = "culvert_edge_apiserver";
/// File from which the unit loads the table.
pub(crate) const NFT_FILE: &str = "/etc/culvert/edge-apiserver.nft";
