//! Options of the TCP sockets at the ends of the tunnel.

use std::io;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::io::Interest;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// The address of a server, as configured and as resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddr {
    /// `HOST:PORT`, for proxies and logs.
    pub name: String,
    /// The resolved address to dial. `None` if a proxy resolves the name.
    pub address: Option<SocketAddr>,
}

impl ServerAddr {
    /// Returns the resolved address.
    ///
    /// # Errors
    /// When this host did not resolve the name.
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

/// Opens TCP connections to a server, directly or through a proxy.
#[async_trait]
pub trait Connect: Send + Sync + std::fmt::Debug + 'static {
    /// Connects. Cancel-safe: if the future is dropped, the attempt is abandoned.
    ///
    /// # Errors
    /// The error of the system or of the proxy.
    async fn connect(&self, remote: &ServerAddr) -> io::Result<TcpStream>;
}

/// A connector that dials the server's address without a proxy.
#[derive(Debug, Clone, Copy, Default)]
pub struct Direct;

#[async_trait]
impl Connect for Direct {
    async fn connect(&self, remote: &ServerAddr) -> io::Result<TcpStream> {
        TcpStream::connect(remote.address()?).await
    }
}

/// TCP sends a keepalive probe to a silent peer after this time. Idle streams (`logs -f`) live for
/// days and must not be cut, but a peer that lost power would otherwise hold its stream forever.
const KEEPALIVE_TIME: Duration = Duration::from_secs(60);
/// Time between keepalive probes.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// Unanswered probes after which the connection fails.
const KEEPALIVE_RETRIES: u32 = 4;

/// Disables Nagle's delay (answers of several segments would wait 40 ms) and enables keepalive, on a
/// connection or on a listener, whose accepted sockets have its options.
///
/// # Errors
/// When the system refuses an option. The socket works nevertheless.
pub fn configure(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(KEEPALIVE_TIME)
        .with_interval(KEEPALIVE_INTERVAL)
        .with_retries(KEEPALIVE_RETRIES);
    socket.set_tcp_keepalive(&keepalive)
}

/// Connections that wait to be accepted. tokio's listeners have room for 128.
const BACKLOG: i32 = 1024;

/// Binds a listener. The host may get the address later (`IP_FREEBIND`).
///
/// # Errors
/// When the system refuses the address, for example because another process listens there.
///
/// # Panics
/// Outside a tokio runtime.
pub fn listen_freebind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    match address {
        SocketAddr::V4(_) => socket.set_freebind_v4(true)?,
        SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
    }
    // Connections of an earlier process may be in TIME_WAIT. A listener of another process still
    // conflicts.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Returns the address that the client of an accepted connection dialed. A rule of the host may have
/// redirected the connection to the local address (`SO_ORIGINAL_DST`).
///
/// # Errors
/// When the system does not return the local address.
pub fn original_destination(accepted: &TcpStream) -> io::Result<SocketAddr> {
    let local = accepted.local_addr()?;
    let socket = SockRef::from(accepted);
    let original = match local.ip().to_canonical() {
        IpAddr::V4(_) => socket.original_dst_v4(),
        IpAddr::V6(_) => socket.original_dst_v6(),
    };
    // The kernel has no answer if it does not track the connection.
    let original = original.ok().and_then(|address| address.as_socket());
    Ok(original.unwrap_or(local))
}

/// Unsent bytes of a session that may wait in the kernel. More would queue in front of every small
/// request.
const NOTSENT_LOWAT_BYTES: u32 = 128 * 1024;

/// Configures the TCP connection of a session, or a listener for sessions: no Nagle delay, and
/// little unsent data in the kernel, so that the session decides which stream sends next.
///
/// # Errors
/// When the system refuses an option. The socket works nevertheless.
pub fn configure_session(socket: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_notsent_lowat(NOTSENT_LOWAT_BYTES)
}

/// Shuts down the sending direction of a shared socket. TCP sends a FIN.
///
/// # Errors
/// When the connection is closed.
pub fn finish(socket: &impl AsFd) -> io::Result<()> {
    SockRef::from(socket).shutdown(Shutdown::Write)
}

/// Returns whether data has arrived on a socket that was not read.
pub fn has_unread(socket: &impl AsFd) -> bool {
    let mut byte = [MaybeUninit::uninit()];
    let peeked = SockRef::from(socket).peek(&mut byte);
    peeked.is_ok_and(|length| length > 0)
}

/// Makes the socket close with a reset (RFC 9293, section 3.10.4). A FIN would look like a clean
/// end.
///
/// # Errors
/// When the system refuses the option.
pub fn abort_on_close(socket: &TcpStream) -> io::Result<()> {
    SockRef::from(socket).set_linger(Some(Duration::ZERO))
}

/// Aborts a connection behind the bytes that were written to it: waits until the peer has
/// acknowledged nearly all of them (less than a segment may be under way), for at most `limit`. A
/// peer that takes nothing has all of this time, because what it takes meanwhile does not show. The
/// socket then closes with a reset, also if the future or the process ends before.
pub async fn abort_behind(socket: &impl AsFd, limit: Duration) {
    let _gone_anyway = SockRef::from(socket).set_linger(Some(Duration::ZERO));
    if let Ok(acknowledged) = acknowledged(socket) {
        let _elapsed_or_gone = timeout(limit, acknowledged).await;
    }
}

/// Returns a future that completes when the peer has acknowledged nearly all written bytes, or the
/// connection is closed. No more than some bytes should be written after this call, because it makes
/// the send buffer as small as possible: a socket is writable when a third of the buffer is free and
/// nothing is unsent.
fn acknowledged(
    socket: &impl AsFd,
) -> io::Result<impl Future<Output = io::Result<()>> + Send + 'static> {
    let options = SockRef::from(socket);
    options.set_send_buffer_size(1)?;
    options.set_tcp_notsent_lowat(1)?;
    // A registration of its own, because the one of the socket has another idea of what is writable.
    let shared = socket.as_fd().try_clone_to_owned()?;
    let registered = TcpStream::from_std(shared.into())?;
    Ok(async move { registered.writable().await })
}

/// What is known of a connection that its peer has reset. The kernel reports the error once, to
/// whichever call comes first, and an end of input from then on: without this, a reset that a write
/// has reported would be a clean end for the reader.
#[derive(Debug, Default)]
pub struct ConnError {
    reset: Option<io::ErrorKind>,
    /// The peer had ended its direction before it reset the connection, and no write has reported
    /// that.
    is_gone: bool,
}

impl ConnError {
    /// Records the error of a read or a write. `EPIPE` means that the peer has ended its direction
    /// before it closed, so that what it sent is complete.
    pub fn record(&mut self, error: &io::Error) {
        let kind = error.kind();
        if !matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::WouldBlock) {
            self.reset.get_or_insert(kind);
        }
    }

    /// Asks whether the peer has reset the connection, even if bytes before that are unread. A FIN is
    /// no reset. `EPIPE` means a reset behind a FIN: what the peer sent is complete, and reads return
    /// it and then a clean end.
    pub fn check(&mut self, socket: &impl AsFd) -> Option<io::Error> {
        if let Ok(Some(error)) = SockRef::from(socket).take_error() {
            self.is_gone |= error.kind() == io::ErrorKind::BrokenPipe;
            self.record(&error);
        }
        let gone = self.is_gone.then_some(io::ErrorKind::BrokenPipe);
        self.reset.or(gone).map(io::Error::from)
    }

    /// Returns the error in place of an end of input, if there is one.
    ///
    /// # Errors
    /// The recorded error.
    pub fn end_of_input(&self) -> io::Result<()> {
        self.reset.map_or(Ok(()), |kind| Err(kind.into()))
    }
}

/// Waits until a connection has failed: its peer has reset it, or its host does not answer. Unread
/// input and a FIN are no failures, even if all input was read. Cancel-safe.
pub async fn failed(socket: &TcpStream) {
    let _error = socket.ready(Interest::ERROR).await;
}

/// A wait for the failure of a connection that begins with the first poll.
#[derive(Default)]
pub enum Failed {
    /// No call of [`Failed::poll`] has been made.
    #[default]
    Idle,
    /// The future of the first poll.
    Waiting(Pin<Box<dyn Future<Output = ()> + Send + Sync>>),
    /// The connection has failed.
    Complete,
}

impl Failed {
    /// Completes with the future that `wait` returns at the first poll.
    pub fn poll<F: Future<Output = ()> + Send + Sync + 'static>(
        &mut self,
        cx: &mut Context<'_>,
        wait: impl FnOnce() -> F,
    ) -> Poll<()> {
        if matches!(self, Self::Idle) {
            *self = Self::Waiting(Box::pin(wait()));
        }
        if let Self::Waiting(waiting) = self {
            ready!(waiting.as_mut().poll(cx));
            *self = Self::Complete;
        }
        Poll::Ready(())
    }
}

impl std::fmt::Debug for Failed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Idle => "Idle",
            Self::Waiting(_) => "Waiting",
            Self::Complete => "Complete",
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const CONFIGURES: [fn(&TcpStream) -> io::Result<()>; 2] = [configure, configure_session];

    #[tokio::test]
    async fn no_socket_waits_for_acknowledgements_before_it_sends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        for configure in CONFIGURES {
            let socket = TcpStream::connect(listener.local_addr().unwrap())
                .await
                .unwrap();
            assert!(!socket.nodelay().unwrap(), "the system's default");
            configure(&socket).unwrap();
            assert!(socket.nodelay().unwrap());
        }
    }

    #[tokio::test]
    async fn listener_may_have_an_address_that_the_host_does_not_have_yet() {
        for address in ["203.0.113.9:0", "[2001:db8::9]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            assert!(TcpListener::bind(address).await.is_err());
            match listen_freebind(address) {
                Ok(listener) => {
                    let bound = listener.local_addr().unwrap();
                    assert_eq!(bound.ip(), address.ip());
                }
                // A host without IPv6.
                Err(error) => assert!(address.is_ipv6(), "{address}: {error}"),
            }
        }
    }

    #[tokio::test]
    async fn destination_of_a_connection_that_no_rule_redirects_is_the_listener() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A host without IPv6.
            let Ok(listener) = TcpListener::bind(address).await else {
                continue;
            };
            let address = listener.local_addr().unwrap();
            let _client = TcpStream::connect(address).await.unwrap();
            let (accepted, _) = listener.accept().await.unwrap();
            assert_eq!(original_destination(&accepted).unwrap(), address);
        }
    }

    #[tokio::test]
    async fn listener_of_another_socket_is_not_shared() {
        let first = listen_freebind(([127, 0, 0, 1], 0).into()).unwrap();
        let second = listen_freebind(first.local_addr().unwrap());
        assert_eq!(second.unwrap_err().kind(), io::ErrorKind::AddrInUse);
    }

    async fn connected() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (connected, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        (connected.unwrap(), accepted.unwrap().0)
    }

    #[tokio::test]
    async fn abort_waits_for_the_reader_and_loses_nothing() {
        let (writer, mut reader) = connected().await;
        let mut sent = 0_u64;
        while let Ok(count) = writer.try_write(&[7; 64 << 10]) {
            sent += count as u64;
            tokio::task::yield_now().await;
        }
        let aborting = async {
            abort_behind(&writer, Duration::from_secs(60)).await;
            drop(writer);
        };
        let mut got = Vec::new();
        let ((), read) = tokio::join!(aborting, reader.read_to_end(&mut got));
        assert_eq!(got.len() as u64, sent);
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[tokio::test(start_paused = true)]
    async fn abort_does_not_wait_longer_than_its_limit() {
        let (writer, _reader) = connected().await;
        while writer.try_write(&[7; 64 << 10]).is_ok() {
            tokio::task::yield_now().await;
        }
        let began = tokio::time::Instant::now();
        abort_behind(&writer, Duration::from_secs(5)).await;
        assert!(began.elapsed() <= Duration::from_secs(6));
    }

    #[tokio::test]
    async fn reset_that_a_write_reports_is_no_end_of_input() {
        for must_write in [false, true] {
            let (mut socket, peer) = connected().await;
            let mut conn_error = ConnError::default();
            assert!(conn_error.check(&socket).is_none());
            abort_on_close(&peer).unwrap();
            drop(peer);
            if must_write {
                failed(&socket).await;
                conn_error.record(&socket.try_write(b"x").unwrap_err());
            } else {
                while conn_error.check(&socket).is_none() {
                    tokio::task::yield_now().await;
                }
            }
            assert_eq!(socket.read(&mut [0]).await.unwrap(), 0);
            let kind = conn_error.end_of_input().unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::ConnectionReset);
        }
    }

    #[tokio::test]
    async fn fin_is_no_reset() {
        let (mut socket, peer) = connected().await;
        drop(peer);
        assert_eq!(socket.read(&mut [0]).await.unwrap(), 0);
        let mut conn_error = ConnError::default();
        // The peer answers with a reset, since nobody reads there any more.
        while socket.try_write(b"x").is_ok() {
            tokio::task::yield_now().await;
        }
        assert!(conn_error.check(&socket).is_none() && conn_error.end_of_input().is_ok());
    }

    #[tokio::test]
    async fn reset_behind_a_fin_is_the_end_of_a_connection_whose_input_is_complete() {
        let (mut socket, mut peer) = connected().await;
        peer.write_all(b"all").await.unwrap();
        peer.shutdown().await.unwrap();
        abort_on_close(&peer).unwrap();
        drop(peer);
        failed(&socket).await;
        let mut conn_error = ConnError::default();
        for _ in 0..2 {
            let kind = conn_error.check(&socket).unwrap().kind();
            assert_eq!(kind, io::ErrorKind::BrokenPipe);
        }
        let mut got = Vec::new();
        socket.read_to_end(&mut got).await.unwrap();
        assert!(got == b"all" && conn_error.end_of_input().is_ok());
    }

    #[tokio::test]
    async fn accepted_sockets_have_the_options_of_their_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        configure(&listener).unwrap();
        configure_session(&listener).unwrap();
        let address = listener.local_addr().unwrap();
        let _caller = TcpStream::connect(address).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        let accepted = SockRef::from(&accepted);
        assert!(accepted.tcp_nodelay().unwrap() && accepted.keepalive().unwrap());
        assert_eq!(accepted.tcp_keepalive_time().unwrap(), KEEPALIVE_TIME);
        assert_eq!(
            accepted.tcp_keepalive_interval().unwrap(),
            KEEPALIVE_INTERVAL
        );
        assert_eq!(accepted.tcp_keepalive_retries().unwrap(), KEEPALIVE_RETRIES);
        assert_eq!(accepted.tcp_notsent_lowat().unwrap(), NOTSENT_LOWAT_BYTES);
    }
}
