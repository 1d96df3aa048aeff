//! Port 10262: accepts connections on UDP and TCP. Every handshake runs in its own task with a
//! deadline.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tracing::{Instrument, debug, error, info_span, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::conn_limiter::{ConnLimiter, LimitReached};
use tunnel_proto::tcp::configure_session;
use tunnel_proto::transport::quic::QuicAcceptor;

use super::Sessions;
use crate::config::Limit;

mod half_open;
mod tcp;

use half_open::HalfOpenConn;
pub use tcp::TcpHandler;

/// The listener for connections from agents, on UDP and TCP.
#[derive(Debug)]
pub struct AgentListener {
    pub quic: Arc<QuicAcceptor>,
    pub tcp_handler: Arc<TcpHandler>,
    pub sessions: Arc<Sessions>,
    pub pre_auth: Arc<ConnLimiter>,
    /// Permits for TCP connections. A connection holds its permit until it ends. The permits bound
    /// the file descriptors that agents use, because other parts of the server need some too.
    pub tcp_permits: Arc<Semaphore>,
}

impl AgentListener {
    /// Accepts connections on UDP and on this TCP listener until the server leaves. New connections
    /// are then refused, so that an agent looks for another server at once. The TCP listener is
    /// closed. Open sessions still need the QUIC socket, so new QUIC connections are answered with
    /// CONNECTION_REFUSED.
    pub fn start(self, listener: TcpListener) {
        if let Err(error) = configure_session(&listener) {
            warn!(%error, "cannot set options of a listener");
        }
        let tcp = RetryingListener::new(listener, "agents");
        let shutdown = self.sessions.shutdown.clone();
        let listener = Arc::new(self);
        let quic = listener.clone();
        shutdown.spawn_listener(async move { quic.accept_quic().await });
        shutdown.spawn_listener(async move { listener.accept_tcp(tcp).await });
    }

    async fn accept_quic(&self) {
        let leaving = self.sessions.shutdown.leaving();
        loop {
            let Some((peer, handshake)) = self.quic.accept().await else {
                if !leaving.is_cancelled() {
                    error!(
                        "the QUIC endpoint has stopped; agents stay connected over TCP; restart the server"
                    );
                }
                return;
            };
            if leaving.is_cancelled() {
                // Dropping the handshake refuses the connection.
                drop(handshake);
                continue;
            }
            let Some(half_open) = self.half_open(peer) else {
                continue;
            };
            let work = async move {
                let outcome = half_open.with_deadline(handshake).await;
                half_open.admit(outcome).await;
            };
            let work = work.instrument(info_span!("conn", %peer));
            self.sessions.shutdown.spawn_service(work);
        }
    }

    async fn accept_tcp(&self, mut tcp: RetryingListener<TcpListener>) {
        let leaving = self.sessions.shutdown.leaving();
        loop {
            let (socket, peer) = tokio::select! {
                biased;
                () = leaving.cancelled() => return,
                accepted = tcp.accept() => accepted,
            };
            let Ok(permit) = self.tcp_permits.clone().try_acquire_owned() else {
                self.sessions.metrics.handshake("overloaded");
                debug!(%peer, "cannot accept another agent over TCP: no file descriptor is left; raise the limit of open files");
                continue;
            };
            let Some(half_open) = self.half_open(peer) else {
                continue;
            };
            let handler = self.tcp_handler.clone();
            let work = async move {
                handler.serve(socket, peer, half_open).await;
                drop(permit);
            };
            let work = work.instrument(info_span!("conn", %peer));
            self.sessions.shutdown.spawn_service(work);
        }
    }

    /// Acquires a permit for a new connection. Without a permit the connection is refused: the
    /// server drops it.
    fn half_open(&self, peer: SocketAddr) -> Option<HalfOpenConn> {
        let acquired = self.pre_auth.acquire(peer.ip());
        let metrics = &self.sessions.metrics;
        let reached = match &acquired {
            Ok(permit) => permit.reached(),
            Err(reached) => Some(*reached),
        };
        match reached {
            Some(LimitReached::PerSource) => metrics.limit(Limit::PreAuthPerSource),
            Some(LimitReached::Total) => metrics.limit(Limit::PreAuthTotal),
            None => {}
        }
        let Ok(permit) = acquired else {
            metrics.handshake("overloaded");
            return None;
        };
        Some(HalfOpenConn {
            sessions: self.sessions.clone(),
            peer,
            deadline: Instant::now() + self.sessions.limits.load().handshake_timeout,
            permit,
        })
    }
}
