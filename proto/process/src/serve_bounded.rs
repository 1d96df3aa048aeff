//! The accept loop of the listeners for operators: a bounded number of connections, each in a task
//! of its own.

use std::net::SocketAddr;

use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tracing::debug;

use super::accept::RetryingListener;
use super::conn_limiter::{ConnLimiter, ConnLimits};
use super::shutdown::Shutdown;

/// Bytes of a response that wait in the kernel for a caller who does not read. The system would let
/// the buffer grow to megabytes for each connection.
const SEND_BUFFER_BYTES: usize = 64 * 1024;

/// Serves the connections of `listener` until `stop`. `serve` limits the time of each. At a limit of
/// connections, a newer connection evicts the oldest one. Log lines name the listener `name`.
pub fn serve_bounded<F>(
    listener: TcpListener,
    name: &'static str,
    limits: ConnLimits,
    shutdown: &Shutdown,
    serve: impl Fn(TcpStream, SocketAddr) -> F + Send + 'static,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let limiter = ConnLimiter::new(limits);
    let tasks = shutdown.clone();
    shutdown.spawn_listener(async move {
        let mut accepting = RetryingListener::new(listener, name);
        loop {
            let (socket, peer) = accepting.accept().await;
            let Ok(permit) = limiter.acquire(peer.ip()) else {
                debug!(listener = name, %peer, "connection refused: too many connections");
                continue;
            };
            if let Err(error) = SockRef::from(&socket).set_send_buffer_size(SEND_BUFFER_BYTES) {
                debug!(listener = name, %peer, %error, "cannot limit the send buffer");
            }
            let connection = serve(socket, peer);
            tasks.spawn_service(async move {
                tokio::select! {
                    () = connection => {}
                    () = permit.evicted() => {
                        debug!(listener = name, %peer, "connection evicted by a newer one");
                    }
                }
            });
        }
    });
}
