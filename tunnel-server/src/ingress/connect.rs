//! CONNECT listeners. Callers can name any target. The server returns a byte stream to the target
//! or, for plain HTTP, a response. The server itself dials targets that are not edge nodes, within
//! the dial policy.
//!
//! CONNECT listeners serve two kinds of callers. kube-apiserver's egress selector sends
//! `CONNECT HOST:PORT` and expects a status of exactly 200 and no byte after the head. Prometheus'
//! `proxy_url` sends CONNECT for https targets, and the whole URL for http targets. TLS inside a
//! tunnel is between the caller and the target.

use http::header::PROXY_AUTHORIZATION;
use http::{Request, Response};
use hyper::body::Incoming;
use tunnel_process::conn_limiter::source;

use super::caller_addr::{CallerAddr, CallerIdentity};
use super::context::ConnectProxy;
use super::dispatch::{
    self, IngressRequest, IngressTarget, TunnelParams, grant_route, open_tunnel,
};
use super::error::ProxyError;
use super::http::conn::HttpConn;
use super::http::exchange::{Exchange, ResponseContent, TargetResponse};
use super::http::headers::{trace_parent, unread_token};
use super::request_record::RequestRecord;
use crate::outcome::Outcome;
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::{AccessCaller, Denied, Listener, UnreadToken};

mod admin;
pub mod basic_auth;
pub(super) mod dial;
#[cfg(test)]
pub(crate) mod table;
mod throttle;

pub use admin::{AdminTunnels, VIA_HEADER};
use basic_auth::BasicAuthError;
pub use dial::DirectDialer;
use tunnel_routing::decision::proxy::{ProxyRequest, RequestKind};

impl ConnectProxy {
    /// Returns the identity of the caller, after checking its credentials if the listener requires
    /// them.
    fn authenticate(
        &self,
        conn: &HttpConn,
        request: &Request<Incoming>,
        has_delegation: bool,
    ) -> Result<CallerIdentity, ProxyError> {
        let access = self.access(
            &conn.caller.identity,
            conn.caller.addr,
            has_delegation,
            UnreadToken::None,
        );
        let passwords = self.passwords.as_ref();
        let Some(passwords) = passwords.filter(|_| access.needs_credentials()) else {
            return Ok(conn.caller.identity.clone());
        };
        let source = source(conn.caller.addr.source());
        let admitted = passwords.authenticate(
            PROXY_AUTHORIZATION,
            request.headers(),
            source,
            &conn.credentials,
        );
        conn.ingress.metrics.password(match admitted {
            Ok(_) => "right",
            Err(BasicAuthError::Missing) => "missing",
            Err(BasicAuthError::Wrong) => "wrong",
            Err(BasicAuthError::Throttled(_)) => "waiting",
        });
        admitted.map(CallerIdentity::User).map_err(refused)
    }

    fn access<'a>(
        &self,
        identity: &'a CallerIdentity,
        addr: CallerAddr,
        has_delegation: bool,
        token: UnreadToken,
    ) -> AccessCaller<'a> {
        let source = addr.tcp_source();
        AccessCaller {
            identity,
            listener: source.map_or(Listener::Unix, |_| Listener::Connect),
            source,
            token,
            must_authenticate: self.passwords.is_some(),
            has_delegation,
        }
    }
}

fn refused(refusal: BasicAuthError) -> ProxyError {
    match refusal {
        BasicAuthError::Missing | BasicAuthError::Wrong => Denied::CredentialsRequired.into(),
        BasicAuthError::Throttled(left) => {
            let text = format!(
                "too many failed proxy authentication attempts from this address; retry in {} s",
                left.as_secs() + 1
            );
            ProxyError::new(Outcome::ProxyAuth, text)
        }
    }
}

/// Returns the subject of a request for the access log. Credentials in the URL and the query are
/// left out.
pub(super) fn subject<B>(request: &Request<B>) -> String {
    let (method, uri) = (request.method(), request.uri());
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{method} {host}{}", uri.path())
}

/// Answers one request on a CONNECT listener.
pub(super) async fn serve_request(
    proxy: &ConnectProxy,
    conn: &HttpConn,
    request: Request<Incoming>,
    record: &mut RequestRecord,
) -> Result<TargetResponse, ProxyError> {
    let policy = conn.ingress.policy.load();
    let has_delegation = conn.has_delegation(&policy);
    let name = proxy.authenticate(conn, &request, has_delegation)?;
    record.caller(&name);
    let caller_key = conn.caller.addr.key(&name);
    let proxy_request = ProxyRequest::of(request.method(), request.uri(), request.headers())?;
    // The fields of a CONNECT pass on to nobody.
    let token = match proxy_request.kind {
        RequestKind::Connect => UnreadToken::None,
        RequestKind::Read => unread_token(request.headers(), &policy.rules),
    };
    let ingress_request = IngressRequest {
        policy: &policy,
        caller: proxy.access(&name, conn.caller.addr, has_delegation, token),
        target: IngressTarget::Proxy {
            request: &proxy_request,
            dialer: &proxy.direct,
        },
        cluster_user: None,
        claimed: None,
        end_signal: conn.caller.close_state.end_signal(),
        operation: RequestedOperation::of(&request),
    };
    let route = grant_route(&conn.ingress, ingress_request, record).await?;
    match proxy_request.kind {
        RequestKind::Connect => {
            let params = TunnelParams {
                caller_key: &caller_key,
                trace_parent: trace_parent(request.headers()),
                awaits_reply: true,
            };
            let tunnel = open_tunnel(&conn.ingress, route, params, record).await?;
            Ok(TargetResponse {
                head: Response::new(()),
                content: ResponseContent::Tunnel {
                    upgrade: conn.take_upgrade(),
                    tunnel: Box::new(tunnel),
                },
            })
        }
        RequestKind::Read => {
            let exchange = Exchange {
                conn,
                caller_key: &caller_key,
                has_delegation,
                upgrade: None,
            };
            dispatch::exchange(&exchange, route, request, record).await
        }
    }
}

#[cfg(test)]
mod tests;
