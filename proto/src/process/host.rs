//! What a process knows of its host: its name and the addresses it uses towards others.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

const HOST_NAME_FILE: &str = "/proc/sys/kernel/hostname";
/// Addresses of documentation (RFC 5737, RFC 3849): only the default route leads there.
const BEHIND_DEFAULT_ROUTE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// The host's name, without white space around it.
///
/// # Errors
/// When the system does not tell.
pub fn host_name() -> io::Result<String> {
    Ok(std::fs::read_to_string(HOST_NAME_FILE)?.trim().to_owned())
}

/// The address from which this host reaches `remote`. Connecting a UDP socket sends nothing; it only asks the routing
/// table.
#[must_use]
pub fn source_address(remote: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = if remote.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(remote).ok()?;
    let address = socket.local_addr().ok()?.ip().to_canonical();
    (!address.is_unspecified()).then_some(address)
}

/// The address of the default route, IPv4 first.
#[must_use]
pub fn primary_address() -> Option<IpAddr> {
    let sources = BEHIND_DEFAULT_ROUTE
        .iter()
        .filter_map(|remote| source_address((*remote, 9).into()));
    sources.into_iter().find(|address| !address.is_loopback())
}
