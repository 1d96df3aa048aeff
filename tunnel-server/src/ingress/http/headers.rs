//! Rewriting of header and trailer fields between caller and target. Hop-by-hop fields are removed,
//! and fields that the tunnel needs are set. All functions are pure.

use bytes::Bytes;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, HOST, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri, Version,
};
use hyper::body::{Body, Frame};
use tunnel_proto::wire::header::TRACE_PARENT_MAX;

use crate::routing::access_review::claimed_account;
use crate::routing::attempts::Replay;
use tunnel_routing::decision::{SELECT_DEST, SELECT_HOST, has_supported_coding};
use tunnel_routing::policy::{Rules, UnreadToken};

/// Header that carries the code of a response that the server generated. Responses of targets do
/// not have this header.
pub(crate) const ERROR_HEADER: HeaderName = HeaderName::from_static("x-tunnel-error");

/// Hop-by-hop fields (RFC 9110, section 7.6.1). The server does not forward them in either
/// direction.
static HOP_BY_HOP: [HeaderName; 9] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    TE,
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
];

/// Fields of requests that are for this server: the expectation, which hyper answers when the body is
/// needed, and the fields that route.
static FOR_SERVER: [HeaderName; 3] = [EXPECT, SELECT_HOST, SELECT_DEST];

/// Trailer fields that would have an effect in a head, besides hop-by-hop fields.
static NO_TRAILERS: [HeaderName; 6] = [
    HOST,
    CONTENT_LENGTH,
    TRAILER,
    SELECT_HOST,
    SELECT_DEST,
    ERROR_HEADER,
];

/// Returns the caller's trace context (W3C Trace Context) for the agent's access log. Returns an
/// empty string if the field is absent or malformed.
pub(crate) fn trace_parent(headers: &HeaderMap) -> String {
    let field = headers
        .get("traceparent")
        .and_then(|value| value.to_str().ok());
    let plain = field.filter(|text| {
        text.len() <= TRACE_PARENT_MAX && text.bytes().all(|byte| byte.is_ascii_graphic())
    });
    plain.unwrap_or_default().to_owned()
}

/// Returns the protocols that a request asks to switch to. HTTP/1.0 cannot switch (RFC 9110,
/// section 7.8).
pub(crate) fn requested_upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
    if version < Version::HTTP_11 || !list_contains(headers, &CONNECTION, "upgrade") {
        return None;
    }
    // Several field lines form one list. HTTP/2 is between the caller and its next hop.
    let lines = headers.get_all(UPGRADE).iter().map(HeaderValue::as_bytes);
    let protocols = lines.flat_map(|line| line.split(|byte| *byte == b','));
    let offered: Vec<_> = protocols
        .map(<[u8]>::trim_ascii)
        .filter(|protocol| !protocol.is_empty() && !protocol.eq_ignore_ascii_case(b"h2c"))
        .collect();
    if offered.is_empty() {
        return None;
    }
    HeaderValue::from_bytes(&offered.join(&b", "[..])).ok()
}

/// Returns whether a target's response switches to a protocol that the request asked for. Returns
/// the reason if the response does not match the request.
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
        // A target may ignore the offer (RFC 9110, section 7.8). Its answer is framed, and both
        // connections end with it, so that nothing is spliced (see CVE-2018-1002105).
        (Some(_) | None, _) => false,
    };
    if !has_supported_coding(headers) {
        return Err("answered in a transfer coding that was not requested".into());
    }
    Ok(switches)
}

/// Closes the caller's connection after the response, unless the response grants an upgrade.
pub(crate) fn close_unless_upgraded<B>(response: &mut Response<B>) {
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        let close = HeaderValue::from_static("close");
        response.headers_mut().insert(CONNECTION, close);
    }
}

/// Returns whether a message declares its length in two ways. Another recipient can choose the
/// other one.
pub(crate) fn has_conflicting_framing(headers: &HeaderMap) -> bool {
    headers.contains_key(TRANSFER_ENCODING) && headers.contains_key(CONTENT_LENGTH)
}

/// Returns whether a request can be sent a second time. The target may serve one twice whose method is
/// safe (RFC 9110, section 9.2.1), but an upgrade is not: `exec` of a kubelet is a GET.
pub(crate) fn replay_of(request: &Request<impl Body>) -> Replay {
    let has_upgrade = request.headers().contains_key(UPGRADE);
    if !request.body().is_end_stream() {
        Replay::Never
    } else if matches!(*request.method(), Method::GET | Method::HEAD) && !has_upgrade {
        Replay::Safe
    } else {
        Replay::Unserved
    }
}

/// Returns whether the connection to the target can be kept for another request after this one. The
/// request must be safe to send again, and the caller must not intend to close its connection.
pub(crate) fn can_reuse_connection(request: &Request<impl Body>) -> bool {
    let headers = request.headers();
    let is_safe = match replay_of(request) {
        Replay::Safe => true,
        Replay::Unserved => *request.method() == Method::OPTIONS && !headers.contains_key(UPGRADE),
        Replay::Never => false,
    };
    is_safe
        && request.version() == Version::HTTP_11
        && !list_contains(headers, &CONNECTION, "close")
}

fn list_contains(headers: &HeaderMap, field: &HeaderName, member: &str) -> bool {
    let values = headers
        .get_all(field)
        .iter()
        .filter_map(|value| value.to_str().ok());
    values
        .flat_map(|value| value.split(','))
        .any(|listed| listed.trim().eq_ignore_ascii_case(member))
}

/// Returns whether a 101 names a protocol from the request's list.
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

/// Rewrites the caller's request for the target. Hop-by-hop and routing fields are removed. `host`
/// replaces Host; `None` leaves it as it is. `last` is set if the connection to the target carries no
/// request after this one.
pub(crate) fn rewrite_request(
    request: &mut Request<impl Body>,
    host: Option<String>,
    upgrade: Option<&HeaderValue>,
    last: bool,
) {
    *request.version_mut() = Version::HTTP_11;
    if request.uri().authority().is_some() {
        // Targets expect the origin form (RFC 9112, section 3.2.1).
        let mut target = http::uri::Parts::default();
        target.path_and_query = request.uri().path_and_query().cloned();
        // A URI that consists of a path and a query only is always valid.
        if let Ok(target) = Uri::from_parts(target) {
            *request.uri_mut() = target;
        }
    }
    let body = request.body();
    let length = body.size_hint().exact();
    let unknown_length = !body.is_end_stream() && length.is_none();
    let headers = request.headers_mut();
    let wants_trailers = list_contains(headers, &TE, "trailers");
    strip_hop_by_hop(headers);
    if unknown_length {
        // Without this field, hyper sends no body for methods that rarely have one.
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    normalize_content_length(headers, length);
    remove_all(headers, &FOR_SERVER);
    // `host` consists of validated names and numbers, so it is a valid field value.
    if let Some(host) = host.and_then(|host| HeaderValue::try_from(host).ok()) {
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

/// Rewrites the target's response for the caller. `switched` is set if the response is a 101 that
/// the request asked for.
pub(crate) fn rewrite_response(response: &mut Response<impl Body>, switched: bool) {
    *response.version_mut() = Version::HTTP_11;
    let length = response.body().size_hint().exact();
    let length = length.filter(|_| !response.body().is_end_stream());
    let headers = response.headers_mut();
    let protocol = headers.get(UPGRADE).cloned().filter(|_| switched);
    if headers.contains_key(TRANSFER_ENCODING) {
        // The chunked coding takes precedence (RFC 9112, section 6.3), but hyper would frame the
        // response by Content-Length.
        headers.remove(CONTENT_LENGTH);
    }
    strip_hop_by_hop(headers);
    normalize_content_length(headers, length);
    // This field marks responses of the server. A target must not forge it.
    remove_all(headers, &[ERROR_HEADER]);
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

/// Reduces Content-Length to one value in plain digits. The value is the length of the body if
/// there is a body. Otherwise (HEAD, 304) the declared value remains if it is unambiguous.
fn normalize_content_length(headers: &mut HeaderMap, body: Option<u64>) {
    let mut content_lengths = headers.get_all(CONTENT_LENGTH).iter().peekable();
    if content_lengths.peek().is_none() {
        return;
    }
    let plain = |value: &HeaderValue| value.to_str().ok()?.trim().parse::<u64>().ok();
    let first = content_lengths.peek().and_then(|value| plain(value));
    let length =
        body.or_else(|| first.filter(|_| content_lengths.all(|value| plain(value) == first)));
    let mut content_lengths = headers.get_all(CONTENT_LENGTH).iter();
    let is_normal = |value: &HeaderValue| {
        let digits = value.as_bytes();
        let is_padded = digits.len() > 1 && digits.starts_with(b"0");
        digits.iter().all(u8::is_ascii_digit)
            && !is_padded
            && length.is_some_and(|length| plain(value) == Some(length))
    };
    // Nearly every message has one value like this, and a new one is two allocations.
    if content_lengths.next().is_some_and(is_normal) && content_lengths.next().is_none() {
        return;
    }
    match length {
        Some(length) => {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
        }
        None => {
            headers.remove(CONTENT_LENGTH);
        }
    }
}

/// Returns the frame of a body as it is forwarded: its trailers lose hop-by-hop fields and the
/// tunnel's fields.
pub(crate) fn rewrite_frame(mut frame: Frame<Bytes>) -> Frame<Bytes> {
    if let Some(trailers) = frame.trailers_mut() {
        strip_hop_by_hop(trailers);
        remove_all(trailers, &NO_TRAILERS);
    }
    frame
}

/// Returns whether a head has one of the names. Nearly every head has none, and a look at each of its
/// fields is cheaper than to look each name up.
fn contains_any(headers: &HeaderMap, names: &[HeaderName]) -> bool {
    headers.keys().any(|name| names.contains(name))
}

fn remove_all(headers: &mut HeaderMap, names: &[HeaderName]) {
    if contains_any(headers, names) {
        for name in names {
            headers.remove(name);
        }
    }
}

/// Removes hop-by-hop fields and the fields that Connection names.
fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if !contains_any(headers, &HOP_BY_HOP) {
        return;
    }
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::try_from(name.trim()).ok())
        // Connection cannot remove fields that frame or route the message.
        .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

/// Returns the bearer token of a request (RFC 6750). Of several fields there is none: targets differ in
/// which one they read.
pub(in crate::ingress) fn bearer_token(headers: &HeaderMap) -> Option<&str> {
    let mut fields = headers.get_all(AUTHORIZATION).iter();
    let (field, None) = (fields.next()?, fields.next()) else {
        return None;
    };
    let (scheme, token) = field.to_str().ok()?.split_once(' ')?;
    // A kubelet reads no token after two spaces.
    let is_token = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_graphic());
    (scheme.eq_ignore_ascii_case("bearer") && is_token).then_some(token)
}

/// Returns what a target may read as a token of the caller, of which this server has reviewed none.
pub(in crate::ingress) fn unread_token(headers: &HeaderMap, rules: &Rules) -> UnreadToken {
    let has_protocol = has_token_protocol(headers);
    let Some(token) = bearer_token(headers) else {
        let mut fields = headers.get_all(AUTHORIZATION).iter();
        let is_unclear = has_protocol || !fields.all(has_other_scheme);
        return match is_unclear {
            true => UnreadToken::Unclear,
            false => UnreadToken::None,
        };
    };
    let account = claimed_account(token).filter(|_| !has_protocol);
    match account {
        Some(account) if !rules.names_account(&account) => UnreadToken::OfOther,
        Some(_) | None => UnreadToken::OfAny,
    }
}

/// Returns the same for a caller whose bearer token was reviewed.
pub(in crate::ingress) fn reviewed_token(headers: &HeaderMap) -> UnreadToken {
    match has_token_protocol(headers) {
        true => UnreadToken::Unclear,
        false => UnreadToken::None,
    }
}

/// Returns whether a request has the token of a browser (Kubernetes
/// `apiserver/pkg/authentication/request/websocket/protocol.go`).
fn has_token_protocol(headers: &HeaderMap) -> bool {
    let fields = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter();
    let mut lower = fields.map(|field| field.as_bytes().to_ascii_lowercase());
    lower.any(|field| {
        field
            .windows(TOKEN_PROTOCOL.len())
            .any(|part| part == TOKEN_PROTOCOL)
    })
}

/// Returns whether a field of Authorization is clearly that of another scheme than Bearer. Targets differ in the
/// space around the scheme and in what may follow.
fn has_other_scheme(field: &HeaderValue) -> bool {
    let field = field.as_bytes().trim_ascii();
    let end = field
        .iter()
        .position(|byte| !byte.is_ascii_alphanumeric() && *byte != b'-');
    let (scheme, rest) = field.split_at(end.unwrap_or(field.len()));
    let ends_at_space = rest.first().is_none_or(|byte| *byte == b' ');
    ends_at_space && !scheme.is_empty() && !scheme.eq_ignore_ascii_case(b"bearer")
}

/// Subprotocol whose rest is a token.
const TOKEN_PROTOCOL: &[u8] = b"base64url.bearer.authorization.k8s.io.";

#[cfg(test)]
mod tests {
    use tunnel_routing::policy::rules::{CallerMatch, NamedCaller, RuleTable};

    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let fields = fields.iter().map(|(name, value)| {
            let name = HeaderName::from_static(name);
            (name, HeaderValue::from_static(value))
        });
        fields.collect()
    }

    #[test]
    fn token_that_a_target_may_read_is_none_to_no_deny() {
        // {"sub":"system:serviceaccount:m:other"} and the same of m:named, in base64url.
        const OTHER: &str = "Bearer e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6bTpvdGhlciJ9.c";
        const NAMED: &str = "Bearer e30.eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6bTpuYW1lZCJ9.c";
        const PROTOCOL: (&str, &str) = (
            "sec-websocket-protocol",
            "v5.channel.k8s.io, base64url.bearer.authorization.k8s.io.VA",
        );
        let table = RuleTable {
            callers: vec![NamedCaller {
                name: "named".into(),
                who: CallerMatch::ServiceAccount("m/named".into()),
            }],
            ..RuleTable::default()
        };
        let rules = Rules::from(table);
        let authorization = |value| ("authorization", value);
        for (fields, expected) in [
            (&[][..], UnreadToken::None),
            (&[authorization("Basic YTpi")], UnreadToken::None),
            (&[authorization("Negotiate")], UnreadToken::None),
            (&[authorization(OTHER)], UnreadToken::OfOther),
            (&[authorization(NAMED)], UnreadToken::OfAny),
            (&[authorization("bearer T")], UnreadToken::OfAny),
            (&[authorization(OTHER), PROTOCOL], UnreadToken::OfAny),
            (&[PROTOCOL], UnreadToken::Unclear),
            (
                &[authorization("Basic YTpi"), PROTOCOL],
                UnreadToken::Unclear,
            ),
            (&[authorization("Bearer T x")], UnreadToken::Unclear),
            (&[authorization("Bearer  T")], UnreadToken::Unclear),
            (&[authorization(" \tBearer\tT")], UnreadToken::Unclear),
            (&[authorization("Bearer")], UnreadToken::Unclear),
            (&[authorization("Bearer,T")], UnreadToken::Unclear),
            (&[authorization("")], UnreadToken::Unclear),
            (
                &[authorization(OTHER), authorization("Basic x")],
                UnreadToken::Unclear,
            ),
            (
                &[authorization("Basic x"), authorization("Basic y")],
                UnreadToken::None,
            ),
        ] {
            let read = unread_token(&headers(fields), &rules);
            assert_eq!(read, expected, "{fields:?}");
        }
        let reviewed = reviewed_token(&headers(&[authorization(NAMED), PROTOCOL]));
        assert_eq!(reviewed, UnreadToken::Unclear);
        assert_eq!(
            reviewed_token(&headers(&[authorization(NAMED)])),
            UnreadToken::None
        );
    }

    #[test]
    fn upgrade_needs_both_fields() {
        let asked = |fields: &[(&'static str, &'static str)]| {
            requested_upgrade(Version::HTTP_11, &headers(fields)).is_some()
        };
        let protocol = ("upgrade", "SPDY/3.1");
        assert!(asked(&[("connection", "keep-alive, Upgrade"), protocol]));
        assert!(!asked(&[("connection", "keep-alive"), protocol]));
        assert!(!asked(&[("connection", "upgrade")]));
        assert!(!asked(&[("connection", "upgrade"), ("upgrade", "h2c")]));
    }

    #[test]
    fn answer_must_switch_to_a_protocol_of_the_list() {
        let wanted = HeaderValue::from_static("websocket, SPDY/3.1");
        assert!(switches_to(&headers(&[("upgrade", "spdy/3.1")]), &wanted));
        assert!(!switches_to(&headers(&[("upgrade", "h2c")]), &wanted));
        assert!(!switches_to(&headers(&[]), &wanted));
    }

    #[test]
    fn content_length_is_one_value_in_plain_digits() {
        let length = |value| ("content-length", value);
        for (fields, body, expected) in [
            (&[length("3")][..], Some(3), Some("3")),
            (&[length("0")], None, Some("0")),
            (&[length("3"), length("3")], None, Some("3")),
            (&[length("3"), length("3")], Some(3), Some("3")),
            (&[length("3"), length("4")], None, None),
            (&[length("03")], None, Some("3")),
            (&[length("+3")], None, Some("3")),
            (&[length("3 ")], None, Some("3")),
            (&[length("7")], Some(3), Some("3")),
            (&[length("99999999999999999999")], None, None),
            (&[length("")], None, None),
            (&[], Some(3), None),
        ] {
            let mut map = headers(fields);
            normalize_content_length(&mut map, body);
            let values: Vec<_> = map.get_all(CONTENT_LENGTH).iter().collect();
            let expected: Vec<_> = expected.into_iter().collect();
            assert_eq!(values, expected, "{fields:?} {body:?}");
        }
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
