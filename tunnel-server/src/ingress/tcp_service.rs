//! TCP services: listeners whose connections are forwarded byte for byte to one target behind one
//! node.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::Notify;

use super::caller_addr::CallerAddr;
use super::caller_stream::{CallerStream, CloseState};
use super::context::IngressContext;
use super::dispatch::{
    IngressRequest, IngressTarget, TunnelParams, grant_route, open_tunnel, relay_tunnel,
};
use super::error::ProxyError;
use super::request_record::{ExchangeGuard, RequestRecord};
use super::tunnel::Tunnel;
use tunnel_routing::destination::TcpService;
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::{AccessCaller, Listener};

/// Forwards one connection. If anything fails before or after the first byte, the caller receives a
/// TCP reset and never a clean end. The access log contains the reason.
pub async fn serve(
    ingress: Arc<IngressContext>,
    service: Arc<TcpService>,
    tcp: TcpStream,
    addr: SocketAddr,
) {
    let close_state = Arc::new(CloseState::default());
    close_state.upgrade();
    let caller_stream = CallerStream::new(tcp, close_state.clone());
    // Dropped before the socket, so that an end without `finish` is a reset.
    let mut exchange_guard = Box::new(ExchangeGuard {
        response_guard: close_state.start(),
        record: RequestRecord::start("service", addr, &*service.name, &ingress.metrics),
    });
    exchange_guard.record.ends_with(&ingress.shutdown);
    // The box is freed before the relay, which lasts as long as the connection.
    let opening = Box::pin(open(
        &ingress,
        &service,
        addr,
        close_state.end_signal(),
        &mut exchange_guard.record,
    ));
    match opening.await {
        Ok(tunnel) => {
            exchange_guard.record.started();
            relay_tunnel(caller_stream, Box::new(tunnel), exchange_guard).await;
        }
        Err(failure) => exchange_guard.record.fail(&failure),
    }
}

async fn open(
    ingress: &IngressContext,
    service: &TcpService,
    addr: SocketAddr,
    end_signal: &Arc<Notify>,
    record: &mut RequestRecord,
) -> Result<Tunnel, ProxyError> {
    let caller = AccessCaller {
        listener: Listener::Service,
        source: Some(addr.ip()),
        ..AccessCaller::ANONYMOUS
    };
    let request = IngressRequest {
        policy: &ingress.policy.load(),
        caller,
        target: IngressTarget::TcpService(&service.destination),
        cluster_user: None,
        claimed: None,
        end_signal,
        operation: RequestedOperation::Connect,
    };
    let route = grant_route(ingress, request, record).await?;
    let params = TunnelParams {
        caller_key: &CallerAddr::from(addr).key(caller.identity),
        trace_parent: String::new(),
        awaits_reply: false,
    };
    open_tunnel(ingress, route, params, record).await
}
