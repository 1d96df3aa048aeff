//! The accept loop that all targets share, and its counters.

use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use anyhow::{Context, Result};
use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::byte_stream::ByteStream;
use super::tls::TargetTls;

/// Counters of a target's connections.
#[derive(Debug, Default)]
pub struct Traffic {
    accepted: AtomicU64,
    open: AtomicU64,
    most_open: AtomicU64,
    requests: AtomicU64,
    bytes_in: AtomicU64,
}

impl Traffic {
    /// Returns the number of accepted connections.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(SeqCst)
    }

    /// Returns the number of open connections.
    pub fn open(&self) -> u64 {
        self.open.load(SeqCst)
    }

    /// Returns the largest number of connections that were open at once.
    pub fn most_open(&self) -> u64 {
        self.most_open.load(SeqCst)
    }

    /// Returns the number of request heads read (HTTP targets only).
    pub fn requests(&self) -> u64 {
        self.requests.load(SeqCst)
    }

    /// Returns the number of received bytes (raw targets; hostile ones during `Hold`).
    pub fn bytes_in(&self) -> u64 {
        self.bytes_in.load(SeqCst)
    }

    pub(crate) fn count_request(&self) {
        self.requests.fetch_add(1, SeqCst);
    }

    pub(crate) fn count_bytes_in(&self, n: usize) {
        self.bytes_in.fetch_add(n as u64, SeqCst);
    }
}

/// A bound listener and its accept task. Both end on drop.
#[derive(Debug)]
pub(crate) struct Listening {
    addr: SocketAddr,
    traffic: Arc<Traffic>,
    stop: CancellationToken,
    accepting: JoinSet<()>,
}

impl Listening {
    /// Binds `bind` and passes each connection to `serve`, after its TLS handshake if `tls` is set.
    pub(crate) async fn start<S, Fut>(
        bind: SocketAddr,
        tls: Option<TargetTls>,
        serve: S,
    ) -> Result<Self>
    where
        S: Fn(ByteStream, Arc<Traffic>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = io::Result<()>> + Send + 'static,
    {
        let listener = TcpListener::bind(bind)
            .await
            .with_context(|| format!("bind target on {bind}"))?;
        // tokio's listeners have room for 128 connections that are not yet accepted.
        SockRef::from(&listener).listen(BACKLOG.into())?;
        Self::start_on(listener, tls, serve)
    }

    /// Like [`Listening::start`], with a listener that is bound already.
    pub(crate) fn start_on<S, Fut>(
        listener: TcpListener,
        tls: Option<TargetTls>,
        serve: S,
    ) -> Result<Self>
    where
        S: Fn(ByteStream, Arc<Traffic>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = io::Result<()>> + Send + 'static,
    {
        let addr = listener.local_addr().context("address of target")?;
        let traffic = Arc::new(Traffic::default());
        let stop = CancellationToken::new();
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(
            listener,
            stop.clone(),
            Arc::clone(&traffic),
            move |tcp, traffic| {
                let (serve, tls) = (serve.clone(), tls.clone());
                async move {
                    // Set as in every HTTP server; otherwise small writes wait for the peer's
                    // delayed ACKs.
                    tcp.set_nodelay(true)?;
                    let wire = match tls {
                        Some(tls) => ByteStream::tls(tls.acceptor().accept(tcp).await?),
                        None => ByteStream::plain(tcp),
                    };
                    serve(wire, traffic).await
                }
            },
        ));
        Ok(Self {
            addr,
            traffic,
            stop,
            accepting,
        })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    /// Closes the listener and all connections, and returns when that is done.
    pub(crate) async fn stop(mut self) {
        self.stop.cancel();
        while self.accepting.join_next().await.is_some() {}
    }
}

async fn accept<S, Fut>(
    listener: TcpListener,
    stop: CancellationToken,
    traffic: Arc<Traffic>,
    serve: S,
) where
    S: Fn(TcpStream, Arc<Traffic>) -> Fut,
    Fut: Future<Output = io::Result<()>> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((tcp, _peer)) => {
                    let open = Open::count(&traffic);
                    let serving = serve(tcp, Arc::clone(&traffic));
                    connections.spawn(async move {
                        // How a connection ended is visible in the counters; the test decides
                        // whether that is a failure.
                        let _end = serving.await;
                        drop(open);
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(_) => break,
            },
            // The panic hook has printed the panic. The test fails because there is no answer.
            Some(_end) = connections.join_next() => {}
        }
    }
    drop(listener);
    connections.shutdown().await;
}

/// Counts a connection as open while the value lives.
#[derive(Debug)]
struct Open(Arc<Traffic>);

impl Open {
    fn count(traffic: &Arc<Traffic>) -> Self {
        traffic.accepted.fetch_add(1, SeqCst);
        let open = traffic.open.fetch_add(1, SeqCst) + 1;
        traffic.most_open.fetch_max(open, SeqCst);
        Self(Arc::clone(traffic))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, SeqCst);
    }
}

/// Implements the common methods of all targets for a target with a field `listening`.
macro_rules! target_methods {
    ($target:ty) => {
        impl $target {
            pub fn addr(&self) -> std::net::SocketAddr {
                self.listening.addr()
            }

            /// Returns the counters of this target's connections.
            pub fn traffic(&self) -> &crate::targets::Traffic {
                self.listening.traffic()
            }

            /// Closes the listener and all connections, and returns when that is done. Dropping the
            /// target does this without waiting.
            pub async fn stop(self) {
                self.listening.stop().await;
            }
        }
    };
}
pub(crate) use target_methods;

/// Connections that wait to be accepted.
pub(super) const BACKLOG: u16 = 1024;

/// A free port of the loopback interface.
pub(crate) const ANY_LOOPBACK_PORT: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
