//! Dials targets over TCP.

use std::io;
use std::net::SocketAddr;

#[cfg(any(target_os = "linux", target_os = "android"))]
use nix::sys::socket::{setsockopt, sockopt::IpBindAddressNoPort};
use tokio::net::{TcpSocket, TcpStream};

/// Where a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The address that the system chooses.
    Any,
    /// The dialed address, which this host must have. The system refuses the connection of a host
    /// that has lost the address, and sends nothing to the host that has it now.
    Target,
}

/// Connects to `address`. Cancel-safe.
///
/// # Errors
/// The error of the system. [`io::ErrorKind::AddrNotAvailable`] means that this host does not have
/// the address of [`Source::Target`].
pub async fn connect(address: SocketAddr, source: Source) -> io::Result<TcpStream> {
    socket(address, source)?.connect(address).await
}

fn socket(address: SocketAddr, source: Source) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if source == Source::Target {
        // Without the option the socket gets a port that no other connection of this host can have,
        // whatever its destination. There are 28,000 such ports.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        setsockopt(&socket, IpBindAddressNoPort, &true)?;
        socket.bind(SocketAddr::new(address.ip(), 0))?;
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn connection_comes_from_the_address_that_it_goes_to() {
        for address in ["127.0.0.77:0", "[::1]:0"] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind(address).await else {
                continue;
            };
            let address = listener.local_addr().unwrap();
            let socket = connect(address, Source::Target).await.unwrap();
            assert_eq!(socket.local_addr().unwrap().ip(), address.ip());
        }
    }

    #[tokio::test]
    async fn address_of_another_host_is_refused_before_it_is_dialed() {
        for address in ["203.0.113.9:9", "[2001:db8::9]:9"] {
            let error = connect(address.parse().unwrap(), Source::Target).await;
            let kind = error.unwrap_err().kind();
            // A host without IPv6 has no such sockets.
            let is_refused = kind == io::ErrorKind::AddrNotAvailable || address.starts_with('[');
            assert!(is_refused, "{address}: {kind:?}");
        }
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    #[tokio::test]
    async fn port_is_not_taken_before_the_destination_is_known() {
        for address in ["127.0.0.1:9", "[::1]:9"] {
            // A host without IPv6.
            if let Ok(socket) = socket(address.parse().unwrap(), Source::Target) {
                assert_eq!(socket.local_addr().unwrap().port(), 0, "{address}");
            }
        }
    }
}
