//! Entry points of the fuzz targets: requests as callers send them.

use http::{HeaderMap, Method, Uri};
use tunnel_proto::wire::name::Port;

use super::http::head_check::chunks::{ChunkState, ChunkStep};
use super::http::head_check::{BodyFraming, HeadCheck};
use tunnel_routing::decision::proxy::ProxyRequest;

/// Returns why a head is rejected whose bytes arrive in pieces of this length.
pub fn head_error(bytes: &[u8], length: usize) -> Option<String> {
    let mut check = HeadCheck::default();
    for piece in bytes.chunks(length.max(1)) {
        check.read(piece);
    }
    let error = check.request(BodyFraming::Length(0));
    error.map(|error| error.to_string())
}

/// The end of a body in chunked coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkedEnd {
    /// The body has this many bytes.
    At(usize),
    /// The body goes on.
    Within,
    Malformed,
}

/// Returns where a body in chunked coding ends whose bytes arrive in pieces of this length.
pub fn chunked_end(bytes: &[u8], length: usize) -> ChunkedEnd {
    let (mut chunks, mut at) = (ChunkState::default(), 0);
    for piece in bytes.chunks(length.max(1)) {
        let (consumed, step) = chunks.read(piece);
        at += consumed;
        match step {
            ChunkStep::Within => {}
            ChunkStep::End => return ChunkedEnd::At(at),
            ChunkStep::Malformed => return ChunkedEnd::Malformed,
        }
    }
    ChunkedEnd::Within
}

/// Returns the errors in the heads on one connection whose bytes arrive in pieces of this length,
/// if the check and the reader agree about the framing of each request.
pub fn head_errors(bytes: &[u8], length: usize) -> Vec<Option<String>> {
    let mut check = HeadCheck::default();
    for piece in bytes.chunks(length.max(1)) {
        check.read(piece);
    }
    let framings = check.framings().into_iter();
    framings
        .map(|framing| check.request(framing).map(|error| error.to_string()))
        .collect()
}

/// Returns host and port of a request on a CONNECT listener, or `None` if it is refused.
pub fn proxy_target(method: &Method, uri: &Uri, headers: &HeaderMap) -> Option<(String, Port)> {
    let request = ProxyRequest::of(method, uri, headers).ok()?;
    Some((request.host.to_string(), request.port))
}
