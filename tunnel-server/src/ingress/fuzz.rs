//! Entry points of the fuzz target: heads of requests as callers send them.

use http::{HeaderMap, Method, Uri};
use tunnel_proto::wire::name::Port;

use super::connect::request::ProxyRequest;
use super::http::head_check::{BodyFraming, HeadCheck};

/// Returns why a head is rejected whose bytes arrive in pieces of this length.
pub fn head_error(bytes: &[u8], length: usize) -> Option<String> {
    let mut check = HeadCheck::default();
    for piece in bytes.chunks(length.max(1)) {
        check.read(piece);
    }
    let error = check.request(BodyFraming::Length(0));
    error.map(|error| error.to_string())
}

/// Returns host and port of a request on a CONNECT listener, or `None` if it is refused.
pub fn proxy_target(method: &Method, uri: &Uri, headers: &HeaderMap) -> Option<(String, Port)> {
    let request = ProxyRequest::of(method, uri, headers).ok()?;
    Some((request.host.to_string(), request.port))
}
