//! CONNECT listeners. Callers can name any target. The server returns a byte stream to the target
//! or, for plain HTTP, a response. The server itself dials targets that are not edge nodes, within
//! the dial policy.
//!
//! CONNECT listeners serve two kinds of callers. kube-apiserver's egress selector sends
//! `CONNECT HOST:PORT` and expects a status of exactly 200 and no byte after the head. Prometheus'
//! `proxy_url` sends CONNECT for https targets, and the whole URL for http targets. TLS inside a
//! tunnel is between the caller and the target.

use http::{Request, Response};
use hyper::body::Incoming;
use tunnel_proto::process::admission::source;
use tunnel_proto::process::host::is_own_address;
use tunnel_proto::transport::Stream;

use super::context::{ConnectProxy, IngressContext};
use super::http::caller::Caller;
use super::http::exchange::{Exchange, Forwarded, ForwardedBody, forward_direct};
use super::peer::CallerIdentity;
use super::stream_opener::StreamOpener;
use super::tunnel::Tunnel;
use crate::ingress::access_log::AccessLog;
use crate::ingress::error::ProxyError;
use crate::ingress::http::headers::trace_parent;
use crate::ingress::outcome::Outcome;
use crate::routing::destination::{Destination, Scheme};
use crate::routing::registry::CallerKey;

mod admin;
pub mod basic_auth;
pub(super) mod dial;
mod request;
#[cfg(test)]
pub(crate) mod table;
mod throttle;

use crate::ingress::connect::basic_auth::BasicAuthError;
use crate::ingress::connect::request::{DialTarget, ProxyRequest, RequestKind, Route};
use crate::routing::dial_policy::AddressClaims;
pub use admin::AdminTunnels;
pub use dial::Direct;
use dial::DirectSocket;

impl ConnectProxy {
    /// Returns the identity of the caller, after checking its credentials if the listener requires
    /// them.
    fn authenticate(
        &self,
        caller: &Caller,
        request: &Request<Incoming>,
    ) -> Result<CallerIdentity, ProxyError> {
        let identity = &caller.name;
        let Some(passwords) = &self.passwords else {
            return Ok(identity.clone());
        };
        match identity {
            CallerIdentity::Certificate(_) | CallerIdentity::Uid(_) | CallerIdentity::User(_) => {
                Ok(identity.clone())
            }
            CallerIdentity::Anonymous => {
                let source = source(caller.peer.source());
                let admitted =
                    passwords.authenticate(request.headers(), source, &caller.credentials);
                caller.ingress.metrics.password(match admitted {
                    Ok(_) => "right",
                    Err(BasicAuthError::Missing) => "missing",
                    Err(BasicAuthError::Wrong) => "wrong",
                    Err(BasicAuthError::Throttled(_)) => "waiting",
                });
                admitted.map(CallerIdentity::User).map_err(refused)
            }
        }
    }
}

fn refused(refusal: BasicAuthError) -> ProxyError {
    let text = match refusal {
        BasicAuthError::Missing | BasicAuthError::Wrong => {
            "proxy authentication required; send a name and password of --connect-auth".to_owned()
        }
        BasicAuthError::Throttled(left) => format!(
            "too many failed proxy authentication attempts from this address; retry in {} s",
            left.as_secs() + 1
        ),
    };
    ProxyError::new(Outcome::ProxyAuth, text)
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
pub(super) async fn forward(
    proxy: &ConnectProxy,
    caller: &Caller,
    request: Request<Incoming>,
    access_log: &mut AccessLog,
) -> Result<Forwarded, ProxyError> {
    let name = proxy.authenticate(caller, &request)?;
    access_log.caller(&name);
    let key = name.key(caller.peer);
    let proxy_request = ProxyRequest::of(request.method(), request.uri(), request.headers())?;
    let ingress = &caller.ingress;
    let route = route(ingress, proxy, &proxy_request)?;
    match proxy_request.kind {
        RequestKind::Connect => {
            let trace_parent = trace_parent(request.headers());
            let tunnel = open(
                ingress,
                proxy,
                (&proxy_request, route, trace_parent),
                &key,
                access_log,
            )
            .await?;
            Ok(Forwarded {
                head: Response::new(()),
                forwarded_body: ForwardedBody::Tunnel {
                    caller: caller.take_upgrade(),
                    tunnel: Box::new(tunnel),
                },
            })
        }
        RequestKind::Read => {
            let request = in_origin_form(request);
            match route {
                Route::Agent(destination) => {
                    let exchange = Exchange {
                        caller,
                        key: &key,
                        scheme: Scheme::Http,
                        upgrade: None,
                    };
                    exchange
                        .forward(request, destination.into(), access_log)
                        .await
                }
                Route::Direct(target) => {
                    let socket =
                        dial(ingress, proxy, (&proxy_request, &target), access_log).await?;
                    let target_label = proxy_request.to_string();
                    forward_direct(caller, socket, request, &target_label, access_log).await
                }
            }
        }
    }
}

fn route(
    ingress: &IngressContext,
    proxy: &ConnectProxy,
    proxy_request: &ProxyRequest,
) -> Result<Route, ProxyError> {
    proxy_request.route(
        &ingress.routes.load(),
        &ingress.policy.load(),
        &proxy.direct.dial_policy().cluster(),
        |node| ingress.registry.has(node),
    )
}

/// Opens a connection to the target and waits until the target has accepted it.
async fn open(
    ingress: &IngressContext,
    proxy: &ConnectProxy,
    (proxy_request, route, trace_parent): (&ProxyRequest, Route, String),
    caller: &CallerKey,
    access_log: &mut AccessLog,
) -> Result<Tunnel, ProxyError> {
    match route {
        Route::Agent(destination) => {
            access_log.destination(&destination);
            let stream =
                open_stream(ingress, &destination, trace_parent, caller, access_log).await?;
            Ok(Tunnel::Agent(stream))
        }
        Route::Direct(target) => {
            let socket = dial(ingress, proxy, (proxy_request, &target), access_log).await?;
            access_log.dialed(socket.bytes());
            Ok(Tunnel::Direct(socket))
        }
    }
}

/// Dials a target directly, with the routes and sessions that are known at this moment.
async fn dial(
    ingress: &IngressContext,
    proxy: &ConnectProxy,
    (proxy_request, target): (&ProxyRequest, &DialTarget),
    access_log: &mut AccessLog,
) -> Result<DirectSocket, ProxyError> {
    let text = proxy_request.to_string();
    access_log.destination(&format!("direct {text}"));
    let routes = ingress.routes.load();
    let claims = AddressClaims {
        routes: &routes,
        has_agent: &|node| ingress.registry.has(node),
        is_own: &is_own_address,
        own_ports: proxy.direct.own_ports(),
    };
    proxy
        .direct
        .dial(target, proxy_request.port, &text, &claims)
        .await
}

/// Opens a stream and waits until the agent reports that the target is connected.
async fn open_stream(
    ingress: &IngressContext,
    destination: &Destination,
    trace_parent: String,
    caller: &CallerKey,
    access_log: &mut AccessLog,
) -> Result<Stream, ProxyError> {
    let mut opener = StreamOpener::new(ingress, destination, caller, trace_parent);
    loop {
        let mut opened = opener.open(access_log).await?;
        let Err(error) = opened.stream.accepted().await else {
            return Ok(opened.stream);
        };
        let target_label = destination.to_string();
        let failure = ProxyError::from_stream(&error, &target_label, Outcome::AgentLost);
        opener.retry_after(failure, opened.via)?;
    }
}

/// Rewrites the request target to the origin form that targets expect (RFC 9112, section 3.2.1).
fn in_origin_form(mut request: Request<Incoming>) -> Request<Incoming> {
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = request.uri().path_and_query().cloned();
    // A URI that consists of a path and a query only is always valid.
    if let Ok(uri) = http::Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

#[cfg(test)]
mod tests;
