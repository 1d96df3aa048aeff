//! Header fields on their way between caller and target: what is one hop's stays, what the tunnel needs is set; pure.

use http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::body::Body;
use tunnel_proto::wire::header::TRACE_PARENT_MAX;

use crate::ingress::error::ERROR_HEADER;
use crate::routing::decision::{SELECT_DEST, SELECT_HOST};

/// Fields that concern one hop only (RFC 9110, section 7.6.1) and are not passed either way.
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    TE,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// The caller's trace context (W3C Trace Context), for the agent's record; empty when there is none or it is odd.
pub(crate) fn trace_parent(headers: &HeaderMap) -> String {
    let field = headers
        .get("traceparent")
        .and_then(|value| value.to_str().ok());
    let plain = field.filter(|text| {
        text.len() <= TRACE_PARENT_MAX && text.bytes().all(|byte| byte.is_ascii_graphic())
    });
    plain.unwrap_or_default().to_owned()
}

/// The protocols that a request wants to switch to. HTTP/1.0 cannot (RFC 9110, section 7.8).
pub(crate) fn requested_upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    if version < Version::HTTP_11 || !list_contains(headers, &CONNECTION, "upgrade") {
        return None;
    }
    let mut protocols = headers.get_all(UPGRADE).iter();
    let first = protocols.next()?;
    // Several lines are one list.
    let joined = protocols.fold(first.as_bytes().to_vec(), |mut list, more| {
        list.extend_from_slice(b", ");
        list.extend_from_slice(more.as_bytes());
        list
    });
    HeaderValue::from_bytes(&joined).ok()
}

/// Whether a target's answer switches protocols as the request asked for, or why it is no answer to it.
pub(crate) fn validate_response<B>(
    upgrade: Option<&HeaderValue>,
    response: &Response<B>,
) -> Result<bool, String> {
    let (status, headers) = (response.status(), response.headers());
    let switches = match (upgrade, status) {
        (Some(wanted), StatusCode::SWITCHING_PROTOCOLS) if switches_to(headers, wanted) => true,
        (_, StatusCode::SWITCHING_PROTOCOLS) => {
            return Err("switched to a protocol that was not requested".into());
        }
        // The lesson of CVE-2018-1002105: anything but a refusal would leave a connection to the target open.
        (Some(_), status) if status.as_u16() < 400 => {
            return Err(format!("answered {status} to an upgrade request"));
        }
        (Some(_) | None, _) => false,
    };
    if !has_supported_coding(headers) {
        return Err("answered in a transfer coding that was not requested".into());
    }
    Ok(switches)
}

/// Ends the caller's connection after an upgrade that was not granted: what follows such a request may be meant for the
/// other protocol.
pub(crate) fn close_unless_upgraded<B>(upgrade: Option<&HeaderValue>, response: &mut Response<B>) {
    if upgrade.is_some() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
}

/// Whether a message is delimited by its chunks or not at all by Transfer-Encoding. Other codings would be lost on the
/// way, since the field is one hop's.
pub(crate) fn has_supported_coding(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let first = codings.next();
    let chunked = |coding: &HeaderValue| {
        let coding = coding.as_bytes().trim_ascii();
        coding.eq_ignore_ascii_case(b"chunked")
    };
    codings.next().is_none() && first.is_none_or(chunked)
}

/// Whether a message says its length in two ways: somebody may have meant the other one.
pub(crate) fn has_conflicting_framing(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) && headers.contains_key(CONTENT_LENGTH)
}

/// Whether a request allows its connection to the target to be kept for a next one: it can be sent again without harm,
/// has nothing behind its head, and its caller means to go on.
pub(crate) fn can_reuse_connection(request: &Request<impl Body>) -> bool {
    matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS
    ) && request.version() == Version::HTTP_11
        && request.body().is_end_stream()
        && !request.headers().contains_key(UPGRADE)
        && !list_contains(request.headers(), &CONNECTION, "close")
}

/// Whether a list field has a member.
fn list_contains(headers: &HeaderMap, field: &HeaderName, member: &str) -> bool {
    let values = headers
        .get_all(field)
        .iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .any(|listed| listed.trim().eq_ignore_ascii_case(member))
}

/// Whether a 101 names a protocol of the request's list.
fn switches_to(headers: &HeaderMap, wanted: &HeaderValue) -> bool {
    let (Some(Ok(chosen)), Ok(wanted)) = (
        headers.get(UPGRADE).map(HeaderValue::to_str),
        wanted.to_str(),
    ) else {
        return false;
    };
    wanted
        .split(',')
        .any(|protocol| protocol.trim().eq_ignore_ascii_case(chosen.trim()))
}

/// Turns the caller's request into the target's: hop-by-hop and routing fields out, `host` as the target expects it. `last`
/// when the connection to the target serves no request after this one.
pub(crate) fn rewrite_request(
    request: &mut Request<impl Body>,
    host: &str,
    upgrade: Option<&HeaderValue>,
    last: bool,
) {
    *request.version_mut() = Version::HTTP_11;
    let body = request.body();
    let length = body.size_hint().exact();
    let unknown_length = !body.is_end_stream() && length.is_none();
    let headers = request.headers_mut();
    let wants_trailers = list_contains(headers, &TE, "trailers");
    strip_hop_by_hop(headers);
    if unknown_length {
        // Without it hyper sends no body at all for methods that seldom have one.
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    normalize_content_length(headers, length);
    // 100-continue is answered hop by hop: hyper tells the caller to go on when the body is wanted.
    for name in [EXPECT, SELECT_HOST, SELECT_DEST] {
        headers.remove(name);
    }
    // It is made of checked names and numbers, so it is a valid field.
    if let Ok(host) = HeaderValue::try_from(host) {
        headers.insert(HOST, host);
    }
    let connection = match (upgrade, last, wants_trailers) {
        (Some(_), _, _) => Some("Upgrade"),
        (None, true, true) => Some("close, TE"),
        (None, true, false) => Some("close"),
        (None, false, true) => Some("TE"),
        (None, false, false) => None,
    };
    if let Some(options) = connection {
        headers.insert(CONNECTION, HeaderValue::from_static(options));
    }
    if let Some(protocols) = upgrade {
        headers.insert(UPGRADE, protocols.clone());
    } else if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// Turns the target's answer into the caller's; `switched` when it is the 101 that was asked for.
pub(crate) fn rewrite_response(response: &mut Response<impl Body>, switched: bool) {
    *response.version_mut() = Version::HTTP_11;
    let length = response.body().size_hint().exact();
    let length = length.filter(|_| !response.body().is_end_stream());
    let headers = response.headers_mut();
    let protocol = headers.get(UPGRADE).cloned().filter(|_| switched);
    if headers.contains_key(TRANSFER_ENCODING) {
        // The chunks are what counts (RFC 9112, section 6.3), and hyper would frame by the length.
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(headers);
    normalize_content_length(headers, length);
    // Marks answers of ours; a target must not forge it.
    headers.remove(ERROR_HEADER);
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// Leaves one Content-Length in plain digits: that of the body where there is one, else (HEAD, 304) what was said if it can
/// only mean one thing.
fn normalize_content_length(headers: &mut HeaderMap, body: Option<u64>) {
    let mut content_lengths = headers.get_all(CONTENT_LENGTH).iter().peekable();
    if content_lengths.peek().is_none() {
        return;
    }
    let plain = |value: &HeaderValue| value.to_str().ok()?.trim().parse::<u64>().ok();
    let first = content_lengths.peek().and_then(|value| plain(value));
    let length =
        body.or_else(|| first.filter(|_| content_lengths.all(|value| plain(value) == first)));
    match length {
        Some(length) => {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        None => {
            headers.remove(CONTENT_LENGTH);
        }
    }
}

/// Removes from trailer fields what would count in a head: one hop's fields, the tunnel's, and Host and length.
pub(crate) fn strip_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    for name in [
        HOST,
        CONTENT_LENGTH,
        TRAILER,
        SELECT_HOST,
        SELECT_DEST,
        ERROR_HEADER,
    ] {
        trailers.remove(name);
    }
}

/// Removes hop-by-hop fields and those that Connection names.
fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::try_from(name.trim()).ok())
        // Fields that frame or route the message are not the sender's to remove.
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let field = |(name, value): &(&'static str, &'static str)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        };
        HeaderMap::from_iter(fields.iter().map(field))
    }

    #[test]
    fn upgrade_needs_both_fields() {
        let asked = |fields: &[(&'static str, &'static str)]| {
            requested_upgrade(Version::HTTP_11, &headers(fields)).is_some()
        };
        assert!(asked(&[
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "SPDY/3.1")
        ]));
        assert!(!asked(&[
            ("connection", "keep-alive"),
            ("upgrade", "SPDY/3.1")
        ]));
        assert!(!asked(&[("connection", "upgrade")]));
    }

    #[test]
    fn answer_must_switch_to_a_protocol_of_the_list() {
        let wanted = HeaderValue::from_static("websocket, SPDY/3.1");
        assert!(switches_to(&headers(&[("upgrade", "spdy/3.1")]), &wanted));
        assert!(!switches_to(&headers(&[("upgrade", "h2c")]), &wanted));
        assert!(!switches_to(&headers(&[]), &wanted));
    }

    #[test]
    fn fields_named_by_connection_go_but_never_host_or_length() {
        let mut map = headers(&[
            ("connection", "x-secret, host, content-length, close"),
            ("x-secret", "1"),
            ("host", "a"),
            ("content-length", "3"),
            ("transfer-encoding", "chunked"),
            ("keep-alive", "5"),
            ("x-kept", "2"),
        ]);
        strip_hop_by_hop(&mut map);
        let mut left: Vec<_> = map.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["content-length", "host", "x-kept"]);
    }
}
