//! Header fields on their way between caller and target: what is one hop's stays, what the tunnel needs is set; pure.

use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Version};
use hyper::body::Body;
use tunnel_proto::wire::header::TRACE_PARENT_MAX;

use crate::ingress::answer::ERROR_HEADER;
use crate::ingress::target::{Destination, SELECT_DEST, SELECT_HOST};

/// Fields that concern one hop only (RFC 9110, section 7.6.1) and are not passed either way.
const HOP_BY_HOP: [HeaderName; 5] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// The caller's trace context (W3C Trace Context), for the agent's record; empty when there is none or it is odd.
pub(super) fn trace_parent(headers: &HeaderMap) -> String {
    let field = headers
        .get("traceparent")
        .and_then(|value| value.to_str().ok());
    let plain = field.filter(|text| {
        text.len() <= TRACE_PARENT_MAX && text.bytes().all(|byte| byte.is_ascii_graphic())
    });
    plain.unwrap_or_default().to_owned()
}

/// The protocol that a request wants to switch to. HTTP/1.0 cannot (RFC 9110, section 7.8).
pub(super) fn requested_upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    if version < Version::HTTP_11 {
        return None;
    }
    let connection = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let asks = connection
        .flat_map(|value| value.split(','))
        .any(|option| option.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| asks).cloned()
}

/// Whether a 101 names a protocol of the request's list.
pub(super) fn switches_to(headers: &HeaderMap, wanted: &HeaderValue) -> bool {
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

/// Turns the caller's request into the target's: hop-by-hop and routing fields out, Host as the target expects it.
pub(super) fn prepare(
    request: &mut Request<impl Body>,
    destination: &Destination,
    upgrade: Option<&HeaderValue>,
) {
    *request.version_mut() = Version::HTTP_11;
    let unknown_length =
        !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
    let headers = request.headers_mut();
    let wants_trailers = headers
        .get(TE)
        .is_some_and(|te| te.as_bytes().eq_ignore_ascii_case(b"trailers"));
    strip_hop_by_hop(headers);
    if unknown_length {
        // Without it hyper sends no body at all for methods that seldom have one.
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    // 100-continue is answered hop by hop: hyper tells the caller to go on when the body is wanted.
    for name in [TE, EXPECT, SELECT_HOST, SELECT_DEST] {
        headers.remove(name);
    }
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    // A destination's text is made of checked names and numbers, so it is a valid field.
    if let Ok(host) = HeaderValue::try_from(destination.host_field()) {
        headers.insert(HOST, host);
    }
    match upgrade {
        Some(protocol) => {
            headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.insert(UPGRADE, protocol.clone());
        }
        // One connection to the target for each request.
        None => {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

/// Turns the target's answer into the caller's; `switched` when it is the 101 that was asked for.
pub(super) fn clean_response(response: &mut Response<impl Body>, switched: bool) {
    *response.version_mut() = Version::HTTP_11;
    let headers = response.headers_mut();
    let protocol = headers.get(UPGRADE).cloned().filter(|_| switched);
    if headers.contains_key(TRANSFER_ENCODING) {
        // The chunks are what counts (RFC 9112, section 6.3), and hyper would frame by the length.
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(headers);
    // Marks answers of ours; a target must not forge it.
    headers.remove(ERROR_HEADER);
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
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
