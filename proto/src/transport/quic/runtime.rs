//! tokio for quinn, with a send buffer that grows only for connections that have much to send.
//!
//! quinn makes room for a whole batch of datagrams (13 KiB) when a connection first sends two at once, as every handshake
//! does, and keeps it as long as the connection. An idle session never fills it again.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};

/// Datagrams that a connection gives to the system one by one before it may send batches. A handshake's bursts are among
/// them; bulk pays for a few system calls more.
const SINGLES: u32 = 16;

tokio::task_local! {
    /// How many of these the connection that this task drives has left.
    static LEFT: Cell<u32>;
}

/// [`TokioRuntime`], except for the size of a young connection's batches.
#[derive(Debug)]
pub(super) struct Tokio;

impl Runtime for Tokio {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(at)
    }

    /// quinn has one task for each connection, and one for each endpoint, which asks for no batches.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        TokioRuntime.spawn(Box::pin(LEFT.scope(Cell::new(SINGLES), future)));
    }

    fn wrap_udp_socket(&self, socket: std::net::UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(Socket(TokioRuntime.wrap_udp_socket(socket)?)))
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

#[derive(Debug)]
struct Socket(Arc<dyn AsyncUdpSocket>);

impl AsyncUdpSocket for Socket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.0.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        // Fails outside of quinn's tasks, where nothing is counted.
        let _counted = LEFT.try_with(|left| left.set(left.get().saturating_sub(1)));
        self.0.try_send(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_recv(cx, buffers, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// quinn asks before each round of sending, which has 20 datagrams at most.
    fn max_transmit_segments(&self) -> usize {
        if LEFT.try_with(Cell::get).is_ok_and(|left| left > 0) {
            1
        } else {
            self.0.max_transmit_segments()
        }
    }

    fn max_receive_segments(&self) -> usize {
        self.0.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.0.may_fragment()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use tokio::sync::oneshot;

    use super::*;

    /// Each connection counts for itself, and gets the system's batches in the end.
    #[tokio::test]
    async fn only_the_first_datagrams_of_a_connection_go_singly() {
        let bound = || {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.set_nonblocking(true).unwrap();
            socket
        };
        let system = TokioRuntime.wrap_udp_socket(bound()).unwrap();
        let socket = Tokio.wrap_udp_socket(bound()).unwrap();
        for _connection in 0..2 {
            let (tell, told) = oneshot::channel();
            let socket = socket.clone();
            Tokio.spawn(Box::pin(async move {
                let mut segments = Vec::new();
                for _ in 0..=SINGLES {
                    segments.push(socket.max_transmit_segments());
                    let datagram = Transmit {
                        destination: socket.local_addr().unwrap(),
                        ecn: None,
                        contents: &[0],
                        segment_size: None,
                        src_ip: None,
                    };
                    let _full = socket.try_send(&datagram);
                    tokio::task::yield_now().await;
                }
                tell.send(segments).unwrap();
            }));
            let mut segments = told.await.unwrap();
            assert_eq!(segments.pop(), Some(system.max_transmit_segments()));
            assert!(segments.iter().all(|&count| count == 1), "{segments:?}");
        }
    }
}
