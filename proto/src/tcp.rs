//! Options of the TCP sockets that feed the tunnel or are fed by it.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// A silent peer is asked for a sign of life after this long. Quiet streams (`logs -f`) live for days and must not be cut,
/// but a peer that lost power would hold its stream for ever.
const KEEPALIVE_AFTER: Duration = Duration::from_secs(60);
/// Then this often,
const KEEPALIVE_EVERY: Duration = Duration::from_secs(15);
/// and after so many unanswered questions it is gone.
const KEEPALIVE_TRIES: u32 = 4;

/// No Nagle delay (answers of several segments would wait 40 ms), and keepalive.
///
/// # Errors
/// When the system refuses an option; the socket works all the same.
pub fn prepare(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_AFTER)
        .with_interval(KEEPALIVE_EVERY)
        .with_retries(KEEPALIVE_TRIES);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

/// Makes the coming close a reset (RFC 9293, section 3.10.4) instead of a FIN, which would look like a clean end.
///
/// # Errors
/// When the system refuses the option.
pub fn abort_on_close(socket: &TcpStream) -> io::Result<()> {
    SockRef::from(socket).set_linger(Some(Duration::ZERO))
}
