//! DNS over UDP: one task reads queries and answers from the records. Each forwarded query gets a
//! task of its own.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use quinn_udp::{RecvMeta, Transmit, UdpSocketState};
use tokio::io::Interest;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tracing::{debug, warn};
use tunnel_process::panics::catch_panic;
use tunnel_process::telemetry::LogRateLimit;

use super::answer::Transport;
use super::server::{QueryAction, Server};

/// A UDP socket that answers from the address that received the query. On a wildcard socket of a
/// host with several addresses the system may choose another one, and clients drop such answers.
#[derive(Debug)]
pub struct DnsSocket {
    socket: UdpSocket,
    state: UdpSocketState,
}

/// Address of the client, and the local address that received the query.
#[derive(Debug, Clone, Copy)]
struct ReplyPath {
    client: SocketAddr,
    local_addr: Option<IpAddr>,
}

impl DnsSocket {
    /// Binds a socket. Requires a runtime.
    ///
    /// # Errors
    /// Returns the error of the system.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let socket = std::net::UdpSocket::bind(address)?;
        let state = UdpSocketState::new((&socket).into())?;
        if let Err(error) = state.set_recv_buffer_size((&socket).into(), RECEIVE_BUFFER) {
            debug!(%error, "cannot enlarge the receive buffer");
        }
        socket.set_nonblocking(true)?;
        let socket = UdpSocket::from_std(socket)?;
        Ok(Self { socket, state })
    }

    async fn receive(&self, buffer: &mut [u8]) -> io::Result<RecvMeta> {
        let mut meta = [RecvMeta::default()];
        self.socket
            .async_io(Interest::READABLE, || {
                let mut buffers = [IoSliceMut::new(buffer)];
                self.state
                    .recv((&self.socket).into(), &mut buffers, &mut meta)
            })
            .await?;
        let [meta] = meta;
        Ok(meta)
    }

    async fn send(&self, reply_path: ReplyPath, contents: &[u8]) {
        let transmit = Transmit {
            destination: reply_path.client,
            ecn: None,
            contents,
            segment_size: None,
            src_ip: reply_path.local_addr,
        };
        let sent = self.socket.async_io(Interest::WRITABLE, || {
            self.state.try_send((&self.socket).into(), &transmit)
        });
        if let Err(error) = sent.await {
            debug!(client = %reply_path.client, %error, "cannot send a DNS answer");
        }
    }
}

/// Answers queries until dropped.
pub(super) async fn serve(server: Arc<Server>, socket: DnsSocket) {
    let socket = Arc::new(socket);
    let mut buffer = vec![0; BUFFER].into_boxed_slice();
    let mut forwards = JoinSet::new();
    loop {
        let received = tokio::select! {
            received = socket.receive(&mut buffer) => received,
            Some(_ended) = forwards.join_next() => continue,
        };
        let meta = match received {
            Ok(meta) => meta,
            Err(error) => {
                static FAILED: LogRateLimit = LogRateLimit::new("DNS queries cannot be received");
                if FAILED.admit() {
                    warn!(%error, "cannot receive DNS queries");
                }
                tokio::time::sleep(ERROR_PAUSE).await;
                continue;
            }
        };
        let reply_path = ReplyPath {
            client: meta.addr,
            local_addr: meta.dst_ip,
        };
        let Some(datagrams) = buffer.get(..meta.len) else {
            continue;
        };
        // The system may deliver several datagrams of one client in one buffer.
        for datagram in datagrams.chunks(meta.stride.max(1)) {
            let handle_query = || server.handle_query(datagram, reply_path.client, Transport::Udp);
            match catch_panic(handle_query).unwrap_or(QueryAction::Ignore) {
                QueryAction::Ignore => {}
                QueryAction::Reply(bytes) => socket.send(reply_path, &bytes).await,
                QueryAction::Forward(forward) => {
                    let (server, socket) = (server.clone(), socket.clone());
                    forwards.spawn(async move {
                        let bytes = server.forward(*forward).await;
                        socket.send(reply_path, &bytes).await;
                    });
                }
            }
        }
    }
}

/// Largest buffer that the system delivers.
const BUFFER: usize = 1 << 16;
/// Buffer for bursts of queries while this task waits to run.
const RECEIVE_BUFFER: usize = 1 << 20;
/// A persistent error must not keep a core busy.
const ERROR_PAUSE: Duration = Duration::from_millis(100);
