//! One HTTP exchange: a request of a caller is sent to a target, and the response is prepared for
//! the caller.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::header::{AUTHORIZATION, HOST};
use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use tunnel_proto::egress::TargetSocket;

use super::conn::{CallerUpgrade, HttpConn};
use super::headers::{
    can_reuse_connection, has_conflicting_framing, rewrite_request, rewrite_response, trace_parent,
    validate_response,
};
use super::request_body::{RequestBody, Upload, UploadHandle};
use super::upstream::{PoolKey, UpstreamBodyGuard, UpstreamRequest, exchange_direct};
use crate::ingress::error::ProxyError;
use crate::ingress::request_record::RequestRecord;
use crate::ingress::tunnel::Tunnel;
use crate::outcome::Outcome;
use crate::routing::registry::CallerKey;
use tunnel_routing::destination::AgentTarget;

/// The head of a response and the body or stream that follows it.
pub(in crate::ingress) struct TargetResponse {
    pub(in crate::ingress) head: Response<()>,
    pub(in crate::ingress) content: ResponseContent,
}

#[expect(
    clippy::large_enum_variant,
    reason = "a body is the usual case, and its guard would be one more allocation"
)]
pub(in crate::ingress) enum ResponseContent {
    Body(Incoming, UpstreamBodyGuard, Option<Arc<Upload>>),
    Upgraded {
        upgrade: CallerUpgrade,
        target: OnUpgrade,
    },
    /// A byte stream to the target of a CONNECT.
    Tunnel {
        upgrade: CallerUpgrade,
        tunnel: Box<Tunnel>,
    },
}

/// The parameters of an exchange with a target behind an agent.
pub(in crate::ingress) struct Exchange<'a> {
    pub(in crate::ingress) conn: &'a HttpConn,
    /// Key that counts the streams of the caller.
    pub(in crate::ingress) caller_key: &'a CallerKey,
    /// The request has client-certificate delegation.
    pub(in crate::ingress) has_delegation: bool,
    /// Protocols that the request asks to switch to.
    pub(in crate::ingress) upgrade: Option<&'a HeaderValue>,
}

impl Exchange<'_> {
    /// Sends a request to a target behind an agent.
    pub(in crate::ingress) async fn run(
        &self,
        mut request: Request<Incoming>,
        target: AgentTarget,
        record: &mut RequestRecord,
    ) -> Result<TargetResponse, ProxyError> {
        let conn = self.conn;
        let host = host_field(&target, &request);
        let destination = target.destination;
        record.destination(&destination);
        let is_reusable =
            can_reuse_connection(&request) && !conn.has_large_head.load(Ordering::Relaxed);
        rewrite_request(&mut request, host, self.upgrade, !is_reusable);
        let tls_profile = conn.ingress.targets.tls_profile(self.has_delegation);
        let pool_key = is_reusable.then(|| PoolKey {
            destination: destination.clone(),
            tls_profile: tls_profile.id,
            authorization: request.headers().get(AUTHORIZATION).cloned(),
            caller_key: self.caller_key.clone(),
        });
        let upstream_request = UpstreamRequest {
            ingress: &conn.ingress,
            scheme: conn.listener.scheme,
            tls_profile,
            destination: &destination,
            caller_key: self.caller_key,
            trace_parent: trace_parent(request.headers()),
            pool: pool_key.as_ref().map(|pool_key| (&*conn.pool, pool_key)),
        };
        let (request, upload) = with_upload(request);
        // Boxed, so that it is not copied with each of the futures that wait for it.
        let exchanged = Box::pin(upstream_request.exchange(request, record));
        let (mut response, mut upstream) = exchanged.await?;
        let upload = upload.map(|handle| upstream.outlast(handle));
        let switches = check_response(self.upgrade, &response, &destination)?;
        let switched = switches.then(|| hyper::upgrade::on(&mut response));
        let has_clear_framing = !has_conflicting_framing(response.headers());
        rewrite_response(&mut response, switched.is_some());
        let switched = switched.map(|target| (conn.take_upgrade(), target));
        let reuse = pool_key
            .filter(|_| has_clear_framing)
            .map(|pool_key| (conn.pool.clone(), pool_key));
        let (head, body) = response.into_parts();
        let content = match switched {
            Some((upgrade, target)) => ResponseContent::Upgraded { upgrade, target },
            None => ResponseContent::Body(
                body,
                UpstreamBodyGuard {
                    upstream,
                    ingress: conn.ingress.clone(),
                    reuse,
                },
                upload,
            ),
        };
        Ok(TargetResponse {
            head: Response::from_parts(head, ()),
            content,
        })
    }
}

/// Sends a plain HTTP request to a target that the server dialed.
pub(in crate::ingress) async fn run_direct(
    conn: &HttpConn,
    mut socket: TargetSocket,
    mut request: Request<Incoming>,
    target_label: &str,
    record: &mut RequestRecord,
) -> Result<TargetResponse, ProxyError> {
    rewrite_request(&mut request, Some(target_label.to_owned()), None, true);
    record.dialed(socket.bytes());
    // The framing of the request marks its end.
    socket.finish();
    let (request, upload) = with_upload(request);
    let exchanged = exchange_direct(&conn.ingress, socket, request, target_label);
    let (mut response, mut upstream) = exchanged.await?;
    let upload = upload.map(|handle| upstream.outlast(handle));
    check_response(None, &response, &target_label)?;
    rewrite_response(&mut response, false);
    let (head, body) = response.into_parts();
    let upstream_guard = UpstreamBodyGuard {
        upstream,
        ingress: conn.ingress.clone(),
        reuse: None,
    };
    Ok(TargetResponse {
        head: Response::from_parts(head, ()),
        content: ResponseContent::Body(body, upstream_guard, upload),
    })
}

fn with_upload(request: Request<Incoming>) -> (Request<RequestBody>, Option<UploadHandle>) {
    let (head, body) = request.into_parts();
    let (body, upload) = RequestBody::new(body);
    (Request::from_parts(head, body), upload)
}

/// Returns whether the response switches protocols. Fails if it does not match the request.
fn check_response(
    upgrade: Option<&HeaderValue>,
    response: &Response<Incoming>,
    target_label: &dyn std::fmt::Display,
) -> Result<bool, ProxyError> {
    validate_response(upgrade, response).map_err(|what| {
        let text = format!("{target_label}: the target {what}");
        ProxyError::new(Outcome::TargetBadResponse, text)
    })
}

/// Returns the Host field to set, or `None` if that of the request stays.
fn host_field(target: &AgentTarget, request: &Request<Incoming>) -> Option<String> {
    let mut fields = request.headers().get_all(HOST).iter();
    let own = fields.next().and_then(|host| host.to_str().ok());
    let own = own.filter(|host| target.keeps_host || target.destination.is_host_field(host));
    match (own, fields.next()) {
        (Some(_), None) => None,
        (Some(own), Some(_)) => Some(own.to_owned()),
        (None, _) => Some(target.destination.host_field()),
    }
}
