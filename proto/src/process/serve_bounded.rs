//! The accept loop of the listeners for operators: a bounded number of connections, each in a task
//! of its own.

use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpStream};
use tracing::debug;

use super::accept::RetryingListener;
use super::conn_limiter::{ConnLimiter, ConnLimits};
use super::shutdown::Shutdown;

/// Serves the connections of `listener` until `stop`. At a limit, a newer connection evicts the
/// oldest one. Log lines name the listener `name`.
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
