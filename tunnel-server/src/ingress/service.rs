//! TCP services: listeners whose connections are forwarded byte for byte to one target behind one
//! node.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;

use super::access_log::{AccessLog, ExchangeGuard};
use super::caller_stream::{CallerStream, CloseMode};
use super::context::IngressContext;
use super::dispatch::relay_tunnel;
use super::peer::CallerIdentity;
use super::stream_opener::StreamOpener;
use super::tunnel::Tunnel;
use crate::routing::destination::Service;

/// Forwards one connection. If anything fails before or after the first byte, the caller receives a
/// TCP reset and never a clean end. The access log contains the reason.
pub async fn serve(
    ingress: Arc<IngressContext>,
    service: Arc<Service>,
    tcp: TcpStream,
    peer: SocketAddr,
) {
    let mut access_log = AccessLog::start("service", peer, &service.name, &ingress.metrics);
    access_log.destination(&service.destination);
    let close_mode = Arc::new(CloseMode::default());
    close_mode.upgrade();
    let caller = CallerStream::new(tcp, close_mode.clone());
    // Dropped before the socket, so that an end without `finish` is a reset.
    let mut exchange_guard = ExchangeGuard {
        response_guard: close_mode.start(),
        access_log,
    };
    let key = CallerIdentity::Anonymous.key(peer.into());
    let opener = StreamOpener::new(&ingress, &service.destination, &key, String::new());
    match opener.open(&mut exchange_guard.access_log).await {
        Ok(opened) => {
            let tunnel = Tunnel::Pending {
                stream: opened.stream,
                target_label: service.destination.to_string(),
            };
            relay_tunnel(caller, tunnel, exchange_guard).await;
        }
        Err(failure) => exchange_guard.access_log.fail(&failure),
    }
}
