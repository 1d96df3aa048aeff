//! CONNECT on the admin socket, for `tunnel-server connect` on the server's host. Targets are nodes
//! only.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::sync::Semaphore;

use super::super::caller_addr::{CallerAddr, CallerIdentity};
use super::super::context::{ConnectProxy, IngressContext};
use super::{DirectDialer, subject};
use crate::ingress::caller_stream::CloseState;
use crate::ingress::dispatch::{
    IngressRequest, IngressTarget, TunnelParams, grant_route, open_tunnel, relay_granted,
};
use crate::ingress::error::ProxyError;
use crate::ingress::http::headers::trace_parent;
use crate::ingress::request_record::{ExchangeGuard, RequestRecord};
use crate::ingress::tunnel::Tunnel;
use crate::outcome::Outcome;
use crate::routing::registry::CallerKey;
use tunnel_routing::decision::proxy::{ProxyRequest, RequestKind};
use tunnel_routing::dial_policy::{DialPolicy, LiveClusterNetworks};
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::UnreadToken;

/// Largest number of concurrent tunnels on the admin socket.
const TUNNELS_MAX: usize = 256;

/// Field of the answer to CONNECT on the admin socket: the other server that forwards the stream.
pub const VIA_HEADER: &str = "x-tunnel-via";

/// Opens tunnels for callers that have access to the admin socket.
#[derive(Debug, Clone)]
pub struct AdminTunnels {
    ingress: Arc<IngressContext>,
    proxy: ConnectProxy,
    permits: Arc<Semaphore>,
}

impl AdminTunnels {
    /// Creates a handler that opens tunnels through the agents of `ingress`. The server itself
    /// dials nothing.
    pub fn new(ingress: Arc<IngressContext>, target_dial_timeout: Duration) -> Self {
        let nothing = DialPolicy::Listed(Vec::new(), LiveClusterNetworks::default());
        Self {
            ingress,
            proxy: ConnectProxy {
                passwords: None,
                is_tls_optional: true,
                direct: Arc::new(DirectDialer::new(nothing, target_dial_timeout)),
            },
            permits: Arc::new(Semaphore::new(TUNNELS_MAX)),
        }
    }

    /// Ends the accesses in progress that the policy in force refuses. Returns their number.
    pub async fn end_refused(&self) -> usize {
        self.ingress.end_refused().await
    }

    /// Answers a CONNECT of the user with this uid. The response is a 200 followed by the byte
    /// stream, or an error with one line of text.
    pub async fn answer(
        &self,
        mut request: Request<Incoming>,
        user: Option<u32>,
    ) -> Response<Full<Bytes>> {
        let mut record = RequestRecord::start(
            "admin",
            CallerAddr::Unix,
            subject(&request),
            &self.ingress.metrics,
        );
        record.head(&request);
        let close_state = Arc::new(CloseState::default());
        let opened = Box::pin(self.open(&request, user, &close_state, &mut record)).await;
        let (tunnel, permit) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                record.fail(&failure);
                record.status(failure.outcome.status());
                let mut response = Response::new(Full::from(format!("{failure}\n")));
                *response.status_mut() = failure.outcome.status();
                return response;
            }
        };
        record.status(http::StatusCode::OK);
        let mut granted = Response::default();
        if let Some(replica) = record.via()
            && let Ok(name) = HeaderValue::from_str(replica.as_str())
        {
            granted.headers_mut().insert(VIA_HEADER, name);
        }
        let upgrade = hyper::upgrade::on(&mut request).map_ok(TokioIo::new);
        let exchange_guard = Box::new(ExchangeGuard {
            response_guard: close_state.start(),
            record,
        });
        self.ingress.shutdown.spawn_work(async move {
            let _permit = permit;
            relay_granted(upgrade, Box::new(tunnel), exchange_guard).await;
        });
        granted
    }

    async fn open(
        &self,
        request: &Request<Incoming>,
        user: Option<u32>,
        close_state: &CloseState,
        record: &mut RequestRecord,
    ) -> Result<(Tunnel, tokio::sync::OwnedSemaphorePermit), ProxyError> {
        let identity = user.map(CallerIdentity::Uid).unwrap_or_default();
        record.caller(&identity);
        let proxy_request = ProxyRequest::of(request.method(), request.uri(), request.headers())?;
        let permit = self.permits.clone().try_acquire_owned().map_err(|_full| {
            let text = format!("the limit of {TUNNELS_MAX} tunnels on the admin socket is reached; close one and retry");
            ProxyError::new(Outcome::TooManyStreams, text)
        })?;
        debug_assert_eq!(
            proxy_request.kind,
            RequestKind::Connect,
            "the admin socket accepts CONNECT only"
        );
        let ingress_request = IngressRequest {
            policy: &self.ingress.policy.load(),
            caller: self
                .proxy
                .access(&identity, CallerAddr::Unix, false, UnreadToken::None),
            target: IngressTarget::Proxy {
                request: &proxy_request,
                dialer: &self.proxy.direct,
            },
            cluster_user: None,
            claimed: None,
            end_signal: close_state.end_signal(),
            operation: RequestedOperation::Connect,
        };
        let route = grant_route(&self.ingress, ingress_request, record).await?;
        let params = TunnelParams {
            // A caller that has access to this socket can also stop the server, so it counts as a
            // caller with a certificate.
            caller_key: &CallerKey::Local(user),
            trace_parent: trace_parent(request.headers()),
            awaits_reply: true,
        };
        let tunnel = open_tunnel(&self.ingress, route, params, record).await?;
        Ok((tunnel, permit))
    }
}
