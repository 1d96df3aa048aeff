//! The TCP part of a link: accepts connections from agents, and opens one to the server for each.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::decide::PacketDecider;
use super::lock;
use super::pump::{End, Ended, TcpDirection, carry};

/// The TCP part of a link.
pub(super) struct Tcp {
    pub(super) up: TcpDirection,
    pub(super) down: TcpDirection,
    server: Mutex<Option<SocketAddr>>,
    source: Mutex<IpAddr>,
    resets: watch::Sender<()>,
    live: AtomicU64,
    total: AtomicU64,
}

impl Tcp {
    /// Relays from the listener to the server's address, in a task of `tasks`.
    pub(super) fn start(
        listener: TcpListener,
        server: SocketAddr,
        source: IpAddr,
        deciders: (PacketDecider, PacketDecider),
        tasks: &mut JoinSet<()>,
    ) -> Arc<Self> {
        let tcp = Arc::new(Self {
            up: TcpDirection::new(deciders.0),
            down: TcpDirection::new(deciders.1),
            server: Mutex::new(Some(server)),
            source: Mutex::new(source),
            resets: watch::Sender::new(()),
            live: AtomicU64::new(0),
            total: AtomicU64::new(0),
        });
        tasks.spawn(accept(listener, tcp.clone()));
        tcp
    }

    /// Sets the source address of future connections.
    pub(super) fn move_to(&self, source: IpAddr) {
        *lock(&self.source) = source;
    }

    /// Sends new connections to another server, or resets them.
    pub(super) fn lead_to(&self, server: Option<SocketAddr>) {
        *lock(&self.server) = server;
    }

    pub(super) fn reset(&self) {
        self.resets.send_replace(());
    }

    pub(super) fn live(&self) -> u64 {
        self.live.load(Ordering::SeqCst)
    }

    pub(super) fn total(&self) -> u64 {
        self.total.load(Ordering::SeqCst)
    }

    /// Relays one connection until its end.
    async fn serve(&self, agent: TcpStream) -> io::Result<()> {
        let agent = End::new(agent)?;
        let server = self.dial().await?;
        match carry(&agent, &server, &self.up, &self.down).await {
            Ended::Fin => agent.close().and_then(|()| server.close()),
            Ended::Reset => Ok(()),
        }
    }

    /// Opens the connection to the server. The outcome passes when neither direction is frozen.
    async fn dial(&self) -> io::Result<End> {
        self.up.thawed().await;
        self.down.thawed().await;
        let server = self.connect().await;
        self.down.thawed().await;
        server
    }

    async fn connect(&self) -> io::Result<End> {
        let server = *lock(&self.server);
        let server = server.ok_or(io::ErrorKind::HostUnreachable)?;
        let source = *lock(&self.source);
        let socket = socket(source)?;
        socket.set_zero_linger()?;
        socket.bind(SocketAddr::new(source, 0))?;
        End::new(socket.connect(server).await?)
    }
}

/// Creates a listener whose connections buffer few bytes in the kernel.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = socket(address.ip())?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn socket(family: IpAddr) -> io::Result<TcpSocket> {
    let socket = match family {
        IpAddr::V4(_) => TcpSocket::new_v4()?,
        IpAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.set_recv_buffer_size(BUFFER_BYTES)?;
    socket.set_send_buffer_size(BUFFER_BYTES)?;
    Ok(socket)
}

async fn accept(listener: TcpListener, tcp: Arc<Tcp>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((agent, _)) => {
                    let resets = tcp.resets.subscribe();
                    connections.spawn(connection(agent, Live::new(tcp.clone()), resets));
                }
                Err(_) => sleep(AFTER_ERROR).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(agent: TcpStream, live: Live, mut resets: watch::Receiver<()>) {
    // Every failure here resets the agent's connection.
    tokio::select! {
        _ = live.0.serve(agent) => {}
        _ = resets.changed() => {}
    }
}

/// Counts a connection as long as this value exists.
struct Live(Arc<Tcp>);

impl Live {
    fn new(tcp: Arc<Tcp>) -> Self {
        tcp.live.fetch_add(1, Ordering::SeqCst);
        tcp.total.fetch_add(1, Ordering::SeqCst);
        Self(tcp)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Room for many agents that connect at once.
const BACKLOG: u32 = 1024;
/// By default the kernel buffers megabytes, and a sender notices a slow link only after those.
const BUFFER_BYTES: u32 = 256 * 1024;
/// Without free descriptors, accepting fails until a connection ends.
const AFTER_ERROR: Duration = Duration::from_millis(10);
