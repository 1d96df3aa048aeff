//! Options of the TCP sockets that feed the tunnel or are fed by it.

use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use async_trait::async_trait;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// Where a server is: as configured, and as resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddr {
    /// `HOST:PORT`, for proxies and logs.
    pub name: String,
    /// The address to dial; a proxy resolves the name itself.
    pub address: Option<SocketAddr>,
}

impl ServerAddr {
    /// The address.
    ///
    /// # Errors
    /// When the name was not resolved here.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.address.ok_or_else(|| {
            let text = format!("{} was not resolved to an address", self.name);
            io::Error::new(io::ErrorKind::InvalidInput, text)
        })
    }
}

impl std::fmt::Display for ServerAddr {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.address {
            Some(address) => address.fmt(formatter),
            None => formatter.write_str(&self.name),
        }
    }
}

/// How a TCP connection to a server comes about: directly or through a proxy.
#[async_trait]
pub trait Connect: Send + Sync + std::fmt::Debug + 'static {
    /// Connects. Cancel-safe: dropped early, the attempt is abandoned.
    ///
    /// # Errors
    /// As the system or the proxy says.
    async fn connect(&self, remote: &ServerAddr) -> io::Result<TcpStream>;
}

/// Dials the address itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct Direct;

#[async_trait]
impl Connect for Direct {
    async fn connect(&self, remote: &ServerAddr) -> io::Result<TcpStream> {
        TcpStream::connect(remote.address()?).await
    }
}

/// A silent peer is asked for a sign of life after this long. Quiet streams (`logs -f`) live for days and must not be cut,
/// but a peer that lost power would hold its stream for ever.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
/// Then this often,
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// and after so many unanswered questions it is gone.
const KEEPALIVE_RETRIES: u32 = 4;

/// No Nagle delay (answers of several segments would wait 40 ms), and keepalive.
///
/// # Errors
/// When the system refuses an option; the socket works all the same.
pub fn configure(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    SockRef::from(socket).set_tcp_keepalive(&keepalive)
}

/// Bytes of a session that may wait in the kernel unsent. More would put a queue in front of every small request.
const NOTSENT_LOWAT_BYTES: u32 = 128 * 1024;

/// For the TCP connection of a session: no Nagle delay, and little unsent data in the kernel, so that the session decides
/// which stream goes next.
///
/// # Errors
/// When the system refuses an option; the socket works all the same.
pub fn configure_session(socket: &TcpStream) -> io::Result<()> {
    socket.set_nodelay(true)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    SockRef::from(socket).set_tcp_notsent_lowat(NOTSENT_LOWAT_BYTES)?;
    Ok(())
}

/// Ends the sending direction, of TCP with a FIN, for a socket that is shared.
///
/// # Errors
/// When the connection is gone.
pub fn finish(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).shutdown(Shutdown::Write)
}

/// Makes the coming close a reset (RFC 9293, section 3.10.4) instead of a FIN, which would look like a clean end.
///
/// # Errors
/// When the system refuses the option.
pub fn abort_on_close(socket: &TcpStream) -> io::Result<()> {
    SockRef::from(socket).set_linger(Some(Duration::ZERO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_socket_waits_for_acknowledgements_before_it_sends() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        for configure in [configure, configure_session] {
            let socket = TcpStream::connect(listener.local_addr().unwrap())
                .await
                .unwrap();
            assert!(!socket.nodelay().unwrap(), "the system's default");
            configure(&socket).unwrap();
            assert!(socket.nodelay().unwrap());
        }
    }
}
