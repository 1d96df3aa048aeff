//! TCP services: listeners whose connections are forwarded byte for byte to one target behind one
//! node.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;
use tracing::debug;
use tunnel_proto::relay::{RelayEnd, relay};

use super::context::IngressContext;
use super::peer::CallerIdentity;
use super::stream_opener::StreamOpener;
use crate::ingress::access_log::AccessLog;
use crate::ingress::caller_stream::{CallerStream, CloseMode, discard_input};
use crate::ingress::error::ProxyError;
use crate::ingress::outcome::Outcome;
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
    let mut caller = CallerStream::new(tcp, close_mode.clone());
    // Dropped before the socket, so that an end without `finish` is a reset.
    let response_guard = close_mode.start();
    let target_label = service.destination.to_string();
    let key = CallerIdentity::Anonymous.key(peer.into());
    let opener = StreamOpener::new(&ingress, &service.destination, &key, String::new());
    let mut opened = match opener.open(&mut access_log).await {
        Ok(opened) => opened,
        Err(failure) => return access_log.fail(&failure),
    };
    match relay(&mut caller, &mut opened.stream).await.end {
        RelayEnd::Clean => {
            access_log.set_outcome(Outcome::Ok);
            response_guard.finish();
        }
        RelayEnd::ReaderClosed(side) => {
            debug!(?side, "service stream ended with unread bytes");
            access_log.set_outcome(Outcome::Cut);
            discard_input(&mut caller).await;
            response_guard.finish();
        }
        RelayEnd::Cut(_, error) => {
            debug!(%error, "service stream was reset");
            access_log.fail(&ProxyError::from_stream(
                &error,
                &target_label,
                Outcome::Cut,
            ));
        }
    }
}
