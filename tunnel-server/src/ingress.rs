//! Listeners: local sockets that accept callers. An accept loop only accepts. One task per
//! connection does the rest.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustls::ServerConnection;
use tokio::net::TcpListener;
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{Instrument, debug, info_span, warn};
use tunnel_process::accept::RetryingListener;
use tunnel_process::conn_limiter::{ConnPermit, LimitReached};
use tunnel_process::followed::Followed;
use tunnel_proto::identity::{caller_name, common_name};
use tunnel_proto::tcp;

use crate::config::Limit;
use crate::ingress::caller_addr::{CallerAddr, CallerIdentity};
use crate::ingress::caller_stream::{CallerSocket, CallerStream, CloseState};
use crate::ingress::client_auth::{ListenerTls, has_delegation};
use tunnel_routing::destination::TcpService;

pub mod caller_addr;
pub mod caller_stream;
pub mod client_auth;
pub mod connect;
mod context;
mod decide_again;
mod dispatch;
pub mod error;
#[cfg(feature = "test-util")]
pub mod fuzz;
pub mod head_memory;
pub mod http;
pub mod recent_requests;
pub mod request_record;
pub mod target_tls;
pub mod tcp_service;
mod tunnel;
mod unix_listener;
mod wrong_scheme;

use context::CallerConn;
pub use context::{ConnectProxy, HttpListener, IngressContext};
pub use unix_listener::SharedSocket;

#[derive(Debug, Clone)]
pub enum ListenerKind {
    /// HTTP, where the server routes each request.
    Http(Arc<HttpListener>),
    /// A TCP service, where the server forwards bytes to one target. Later connections have the
    /// target of their moment.
    TcpService(Followed<TcpService>),
}

impl ListenerKind {
    fn name(&self) -> &'static str {
        match self {
            Self::Http(http_listener) => http_listener.name,
            Self::TcpService(_) => "service",
        }
    }
}

/// A listener that accepts connections until this is dropped.
#[derive(Debug)]
pub struct ClosableListener {
    close: DropGuard,
    /// Cancelled when the socket has been closed.
    closed: CancellationToken,
}

impl ClosableListener {
    /// Closes the listeners in `open` that `is_kept` leaves out, and waits until their sockets are
    /// closed: the next address of one may be the same or overlap with it, as 0.0.0.0:443 and
    /// 127.0.0.1:443 do.
    pub async fn close_others<K: Ord, V: Into<Self>>(
        open: &mut BTreeMap<K, V>,
        is_kept: impl Fn(&K) -> bool,
    ) {
        let all = std::mem::take(open).into_iter();
        let (kept, closing): (_, BTreeMap<_, _>) = all.partition(|(key, _)| is_kept(key));
        *open = kept;
        for closing in closing.into_values() {
            let Self { close, closed } = closing.into();
            drop(close);
            closed.cancelled().await;
        }
    }
}

impl IngressContext {
    /// Accepts connections on a listener until the drain begins. Connections count as work, so a
    /// drain waits for them.
    pub fn start(self: &Arc<Self>, listener: TcpListener, kind: ListenerKind) {
        let ingress = self.clone();
        self.shutdown
            .spawn_listener(async move { ingress.accept(listener, kind).await });
    }

    /// Accepts connections like [`Self::start`] until the returned value is dropped. Connections go
    /// on.
    pub fn start_closable(
        self: &Arc<Self>,
        listener: TcpListener,
        kind: ListenerKind,
    ) -> ClosableListener {
        let (close, closed) = (CancellationToken::new(), CancellationToken::new());
        let (ingress, closing) = (self.clone(), close.clone());
        let closed_on_drop = closed.clone().drop_guard();
        self.shutdown.spawn_listener(async move {
            // Dropped behind the socket, also by a shutdown before the first poll.
            let _closed_on_drop = closed_on_drop;
            let accepting = ingress.accept(listener, kind);
            closing.run_until_cancelled(accepting).await;
        });
        ClosableListener {
            close: close.drop_guard(),
            closed,
        }
    }

    async fn accept(self: Arc<Self>, listener: TcpListener, kind: ListenerKind) {
        if let Err(error) = tcp::configure(&listener) {
            warn!(%error, "cannot set options of a listener");
        }
        let mut accepting = RetryingListener::new(listener, kind.name());
        loop {
            let (socket, addr) = tokio::select! {
                biased;
                () = self.shutdown.drain().cancelled() => return,
                accepted = accepting.accept() => accepted,
            };
            let ingress = self.clone();
            let work: std::pin::Pin<Box<dyn Future<Output = ()> + Send>> = match &kind {
                ListenerKind::Http(http_listener) => {
                    let (listener, identity) = (http_listener.clone(), CallerIdentity::Anonymous);
                    Box::pin(ingress.serve(listener, socket.into(), addr.into(), identity))
                }
                ListenerKind::TcpService(service) => {
                    let service = service.load();
                    Box::pin(async move {
                        let Some(permit) = ingress.admit(addr.into()) else {
                            return;
                        };
                        // A connection to a TCP service carries a stream for its whole life.
                        let _in_use = permit.in_use();
                        tcp_service::serve(ingress, service, socket, addr).await;
                    })
                }
            };
            self.shutdown
                .spawn_work(work.instrument(info_span!("conn", peer = %addr)));
        }
    }

    /// Acquires a permit for a caller's connection. Without a permit the connection is refused: the
    /// server drops it.
    fn admit(&self, addr: CallerAddr) -> Option<Arc<ConnPermit>> {
        self.count_permit(self.callers.acquire(addr.source()))
    }

    /// Acquires a permit for a caller that can be verified. The returned flag says whether the
    /// permit is one that is reserved for verified callers.
    fn admit_verifiable(&self, addr: CallerAddr) -> Option<(Arc<ConnPermit>, bool)> {
        let acquired = self.callers.acquire(addr.source());
        let is_reserved = acquired.is_err();
        let acquired = acquired.or_else(|_full| self.verified_callers.acquire(addr.source()));
        self.count_permit(acquired)
            .map(|permit| (permit, is_reserved))
    }

    fn count_permit(&self, acquired: Result<ConnPermit, LimitReached>) -> Option<Arc<ConnPermit>> {
        let reached = match &acquired {
            Ok(permit) => permit.reached(),
            Err(reached) => Some(*reached),
        };
        match reached {
            Some(LimitReached::PerSource) => self.metrics.limit(Limit::CallersPerSource),
            Some(LimitReached::Total) => self.metrics.limit(Limit::CallersTotal),
            None => {}
        }
        if acquired.is_err() {
            self.metrics.refused_caller();
        }
        acquired.ok().map(Arc::new)
    }

    async fn serve(
        self: Arc<Self>,
        http_listener: Arc<HttpListener>,
        socket: CallerSocket,
        addr: CallerAddr,
        identity: CallerIdentity,
    ) {
        let acquired = match addr {
            CallerAddr::Tcp(_) if http_listener.tls.is_none() => {
                self.admit(addr).map(|permit| (permit, false))
            }
            CallerAddr::Tcp(_) | CallerAddr::Unix => self.admit_verifiable(addr),
        };
        let Some((permit, is_reserved)) = acquired else {
            return;
        };
        // The host controls which users can open a Unix socket.
        let must_verify = is_reserved && addr != CallerAddr::Unix;
        let deadline = Instant::now() + self.limits.load().handshake_timeout;
        let protocol = tokio::select! {
            biased;
            () = permit.evicted() => return self.metrics.evicted_caller(),
            protocol = timeout_at(deadline, select_protocol(&http_listener, &socket)) => protocol,
        };
        let Ok(protocol) = protocol else {
            self.metrics.limit(Limit::HandshakeTimeout);
            return debug!("caller sent no data in time (limits.handshakeTimeout)");
        };
        let close_state = Arc::new(CloseState::default());
        let socket = CallerStream::new(socket, close_state.clone());
        let mut conn = CallerConn {
            addr,
            identity,
            closed: socket.caller_closed(),
            close_state,
            permit,
            has_delegation: false,
            server_name: None,
            certificate_error: None,
            cluster_user: None,
        };
        let tls = match protocol {
            CallerProtocol::Tls(tls) => tls,
            CallerProtocol::Http | CallerProtocol::HttpToTlsPort if must_verify => {
                return self.metrics.refused_caller();
            }
            CallerProtocol::Http => {
                let _not_for_eviction = is_reserved.then(|| conn.permit.in_use());
                return http::serve(self, http_listener, socket, conn).await;
            }
            CallerProtocol::HttpToTlsPort => {
                let (name, metrics) = (http_listener.name, &self.metrics);
                return wrong_scheme::refuse_http(socket, name, addr, metrics).await;
            }
        };
        let handshake = TlsAcceptor::from(tls.config()).accept(socket);
        let handshake_result = tokio::select! {
            biased;
            () = conn.permit.evicted() => return self.metrics.evicted_caller(),
            handshake_result = timeout_at(deadline, handshake) => handshake_result,
        };
        match handshake_result {
            Ok(Ok(stream)) => {
                let is_verified = self.identify(&mut conn, stream.get_ref().1);
                if must_verify && !is_verified {
                    return self.metrics.refused_caller();
                }
                // Protects the reserved permit from eviction by callers that are not verified yet.
                let _not_for_eviction = is_reserved.then(|| conn.permit.in_use());
                http::serve(self, http_listener, stream, conn).await;
            }
            Ok(Err(error)) => debug!(%error, "TLS handshake with a caller failed"),
            Err(_elapsed) => {
                self.metrics.limit(Limit::HandshakeTimeout);
                debug!("TLS handshake with a caller timed out (limits.handshakeTimeout)");
            }
        }
    }

    /// Records what a TLS handshake says about a caller. Returns whether the caller has a
    /// certificate that is a caller certificate.
    fn identify(&self, conn: &mut CallerConn, tls: &ServerConnection) -> bool {
        let chain = tls.peer_certificates();
        conn.has_delegation = has_delegation(&self.policy.load().delegation, chain);
        if conn.has_delegation {
            conn.server_name = tls.server_name().and_then(|name| name.parse().ok());
        }
        if let Some(leaf) = chain.and_then(<[_]>::first) {
            let name = common_name(leaf).unwrap_or_default();
            conn.identity = CallerIdentity::Certificate(name.into());
            conn.certificate_error = caller_name(leaf).err();
            let reviewer = self.reviewer.as_ref();
            conn.cluster_user = reviewer.and_then(|reviewer| reviewer.certificate_user(chain?));
        }
        chain.is_some() && conn.certificate_error.is_none()
    }
}

/// First byte of a TLS handshake (RFC 8446, section 5.1). No request begins with this byte.
const TLS_HANDSHAKE: u8 = 22;

/// The protocol with which a caller's connection begins.
enum CallerProtocol {
    Tls(Arc<ListenerTls>),
    Http,
    /// Plain HTTP on a port that requires TLS.
    HttpToTlsPort,
}

/// Returns the protocol of a connection. On ports with TLS, the first byte of the connection
/// decides.
async fn select_protocol(http_listener: &HttpListener, socket: &CallerSocket) -> CallerProtocol {
    let Some(tls) = http_listener.tls.clone() else {
        return CallerProtocol::Http;
    };
    let CallerSocket::Tcp(socket) = socket else {
        return CallerProtocol::Tls(tls);
    };
    let mut first = [0];
    let is_tls = socket.peek(&mut first).await.is_ok() && first == [TLS_HANDSHAKE];
    let connect = http_listener.connect.as_ref();
    if !is_tls && connect.is_some_and(|proxy| proxy.is_tls_optional) {
        CallerProtocol::Http
    } else if first.iter().all(u8::is_ascii_uppercase) {
        // The first byte of a method. No TLS record begins with a letter.
        CallerProtocol::HttpToTlsPort
    } else {
        CallerProtocol::Tls(tls)
    }
}

#[cfg(test)]
mod tests {
    use super::http::tests::fixture::{Fixture, http_listener};
    use super::*;

    #[tokio::test]
    async fn address_of_a_closed_listener_can_be_bound_at_once() {
        let fixture = Fixture::new();
        let bind = async |address: &str| TcpListener::bind(address).await.unwrap();
        let start = |listener| {
            let kind = ListenerKind::Http(http_listener());
            fixture.ingress.start_closable(listener, kind)
        };
        let (kept, closing) = (bind("127.0.0.1:0").await, bind("127.0.0.1:0").await);
        let [kept_at, closed_at] = [&kept, &closing].map(|bound| bound.local_addr().unwrap());
        let mut open = BTreeMap::from([(kept_at, start(kept)), (closed_at, start(closing))]);
        // Its task has the socket.
        tokio::task::yield_now().await;
        ClosableListener::close_others(&mut open, |address| *address == kept_at).await;
        assert!(open.into_keys().eq([kept_at]));
        TcpListener::bind(closed_at).await.unwrap();
    }
}
