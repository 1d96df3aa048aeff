//! DNS over TCP (RFC 7766): length-prefixed messages, one after the other.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::debug;
use tunnel_process::accept::RetryingListener;

use super::answer::Transport;
use super::limiter::SourcePermit;
use super::server::{QueryAction, Server};

/// Accepts connections and answers queries until dropped. Beyond the limit, one connection waits
/// here and others wait in the queue of the system.
pub(super) async fn serve(server: Arc<Server>, listener: TcpListener, connections: usize) {
    let mut listener = RetryingListener::new(listener, "dns");
    let permits = Arc::new(Semaphore::new(connections));
    let mut tasks = JoinSet::new();
    loop {
        while tasks.try_join_next().is_some() {}
        let (stream, client) = listener.accept().await;
        let Some(connection_permit) = server.admit_connection(client) else {
            continue;
        };
        let permit = match permits.clone().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_none_left) => {
                debug!("limits.dnsConnections is reached; new DNS connections wait");
                server.metrics.connection_waited();
                // The semaphore is never closed.
                let Ok(permit) = permits.clone().acquire_owned().await else {
                    return;
                };
                permit
            }
        };
        let server = server.clone();
        tasks.spawn(async move {
            if let Err(error) = serve_connection(&server, stream, client, connection_permit).await {
                debug!(%client, %error, "DNS connection ended");
            }
            drop(permit);
        });
    }
}

async fn serve_connection(
    server: &Server,
    mut stream: TcpStream,
    client: SocketAddr,
    _connection_permit: SourcePermit,
) -> io::Result<()> {
    let mut message = Vec::new();
    loop {
        // Limits both the idle time between two queries and the time for a whole query. A client
        // that sends a byte now and then is disconnected, too.
        let reading = read_message(&mut stream, &mut message);
        let Ok(read) = timeout(IDLE, reading).await else {
            return Ok(());
        };
        if !read? {
            return Ok(());
        }
        let answer = match server.handle_query(&message, client, Transport::Tcp) {
            QueryAction::Ignore => return Ok(()),
            QueryAction::Reply(bytes) => bytes,
            QueryAction::Forward(forward) => server.forward(*forward).await,
        };
        let Ok(length) = u16::try_from(answer.len()) else {
            return Ok(());
        };
        let framed = [&length.to_be_bytes()[..], &answer].concat();
        timeout(IDLE, stream.write_all(&framed)).await??;
    }
}

/// Reads the next message. Returns `false` if there is none. Not cancel-safe: a partially read
/// message is lost.
async fn read_message(stream: &mut TcpStream, message: &mut Vec<u8>) -> io::Result<bool> {
    let length = match stream.read_u16().await {
        Ok(length) => usize::from(length),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        Err(error) => return Err(error),
    };
    message.resize(length, 0);
    stream.read_exact(message).await?;
    Ok(true)
}

/// Stub resolvers send their queries at once. Caches open a new connection when they need one.
const IDLE: Duration = Duration::from_secs(5);
