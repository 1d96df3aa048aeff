//! Routing decision: maps the facts of a request to a node and port, or to an error. All functions
//! are pure (docs/reference/http.md describes the rules).

use std::net::{IpAddr, Ipv6Addr};

use http::header::{CONNECTION, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::{Authority, Scheme as UriScheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use tunnel_proto::wire::name::{NodeName, Port};

use crate::destination::{RequestedNode, Scheme};
use crate::dial_policy::ClaimConflict;
use crate::pod::Pod;
use crate::routes::{RouteError, RouteTable};

pub mod delegated;
pub mod proxy;

/// Header that selects the node, for callers that must dial the server by address.
pub const SELECT_HOST: HeaderName = HeaderName::from_static("x-tunnel-proxy-host");
/// Header that selects the host and the port.
pub const SELECT_DEST: HeaderName = HeaderName::from_static("x-tunnel-proxy-dest");

/// The facts of a request that determine its destination.
#[derive(Debug, Clone, Copy)]
pub struct RequestFacts<'a> {
    pub method: &'a Method,
    /// The request target, as received.
    pub uri: &'a Uri,
    /// All header fields of the request.
    pub headers: &'a HeaderMap,
    pub scheme: Scheme,
    /// Port of an additional proxy port. Applies when Host contains no port.
    pub implied_port: Option<Port>,
}

/// Reason why a request leads to no node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecisionError {
    /// The request is malformed, or contradicts itself.
    #[error("{0}")]
    BadRequest(String),
    /// The listener does not serve such requests.
    #[error("{0}")]
    Unsupported(&'static str),
    /// The name or address in the request has no route.
    #[error(transparent)]
    Route(#[from] RouteError),
    /// Objects of the cluster contain conflicting claims to the address in the request.
    #[error(transparent)]
    Conflicting(#[from] ClaimConflict),
    /// The node of the Pod in the path is unknown.
    #[error("cannot find the node of pod {0}: {1}")]
    Pod(Pod, String),
}

/// Returns the node and port of a request.
///
/// # Errors
/// Returns a [`DecisionError`] if the request leads to no node.
pub fn decide(
    facts: &RequestFacts<'_>,
    routes: &RouteTable,
) -> Result<RequestedNode, DecisionError> {
    check_form(facts)?;
    let host = single_value(facts.headers, &HOST)?
        .ok_or_else(|| bad_request("the request has no Host"))?;
    // The authority of an absolute-form request replaces Host (RFC 9112, section 3.2.2).
    let host = facts.uri.authority().map_or(host, Authority::as_str);
    let host = HostPort::parse(host)
        .ok_or_else(|| bad_request("Host is not a name or address with an optional port"))?;
    let select_host = single_value(facts.headers, &SELECT_HOST)?
        .map(|text| {
            text.parse::<NodeName>()
                .map_err(|error| bad_request(format!("{SELECT_HOST}: {error}")))
        })
        .transpose()?;
    let select_dest = single_value(facts.headers, &SELECT_DEST)?
        .map(|text| HostPort::parse(text).filter(|dest| dest.port.is_some()))
        .map(|parsed| parsed.ok_or_else(|| bad_request(format!("{SELECT_DEST} is not host:port"))))
        .transpose()?;

    let port = select_dest
        .as_ref()
        .and_then(|dest| dest.port)
        .or(host.port)
        .or(facts.implied_port);
    let port = port
        .or_else(|| Port::new(facts.scheme.default_port()))
        .ok_or_else(|| bad_request("no port"))?;
    let node = choose_node(
        &host.host,
        select_host.as_ref(),
        select_dest.as_ref().map(|dest| &dest.host),
        routes,
    )?;
    let port = routes.requested_port(&node, port);
    Ok(RequestedNode { node, port })
}

/// Rejects requests that are in neither origin form nor the absolute form of plain HTTP, because
/// these listeners are not a forward proxy.
fn check_form(facts: &RequestFacts<'_>) -> Result<(), DecisionError> {
    if *facts.method == Method::CONNECT {
        return Err(bad_request("CONNECT is not supported on this port"));
    }
    let is_plain = facts.scheme == Scheme::Http && facts.uri.scheme() == Some(&UriScheme::HTTP);
    let is_absolute = facts.uri.scheme().is_some() || facts.uri.authority().is_some();
    if is_absolute && !is_plain {
        return Err(bad_request(
            "this form of the request target is not supported on this port; send the path and put the node in Host",
        ));
    }
    check_path(facts.uri, facts.headers)
}

/// Checks that the request target is a path, and that the framing cannot hide a second request
/// after the head.
pub fn check_path(uri: &Uri, headers: &HeaderMap) -> Result<(), DecisionError> {
    if !has_supported_coding(headers) {
        return Err(bad_request(
            "Transfer-Encoding other than chunked is not supported",
        ));
    }
    if !uri.path().starts_with('/') {
        return Err(bad_request("the request target is not a path"));
    }
    let target = uri.path_and_query().map_or("", |target| target.as_str());
    if !target.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(bad_request(
            "the request target contains bytes that are invalid in a URI (RFC 3986); percent-encode them",
        ));
    }
    Ok(())
}

/// Returns whether a message has no Transfer-Encoding or only `chunked`. Other codings would be
/// lost, because the field is hop-by-hop.
pub fn has_supported_coding(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let first = codings.next();
    let chunked = |coding: &HeaderValue| {
        let coding = coding.as_bytes().trim_ascii();
        coding.eq_ignore_ascii_case(b"chunked")
    };
    codings.next().is_none() && first.is_none_or(chunked)
}

/// Returns whether anything behind this server may take a request for an upgrade: it has an Upgrade
/// field, or its Connection field contains "upgrade" anywhere, which is enough for kube-apiserver
/// (`IsUpgradeRequest` of `staging/src/k8s.io/apimachinery/pkg/util/httpstream`). This test matches
/// more requests than an HTTP server treats as upgrades, since what it matches is refused.
pub(crate) fn may_be_upgrade(headers: &HeaderMap) -> bool {
    let has_upgrade = |value: &[u8]| {
        let mut windows = value.windows(b"upgrade".len());
        windows.any(|window| window.eq_ignore_ascii_case(b"upgrade"))
    };
    let mut values = headers.get_all(CONNECTION).iter();
    headers.contains_key(UPGRADE) || values.any(|value| has_upgrade(value.as_bytes()))
}

fn choose_node(
    host: &Host,
    select_host: Option<&NodeName>,
    select_dest: Option<&Host>,
    routes: &RouteTable,
) -> Result<NodeName, DecisionError> {
    let contradiction = |header: &HeaderName, node: &NodeName| {
        bad_request(format!("{header} names another node than Host ({node})"))
    };
    let resolve = |host: &Host| match host {
        Host::Name(name) => routes.by_name(name),
        Host::Address(address) => routes.by_address(*address),
    };
    match (host, select_host, select_dest) {
        (Host::Name(name), select_host, select_dest) => {
            if select_host.is_some_and(|selected| selected != name) {
                return Err(contradiction(&SELECT_HOST, name));
            }
            // A Dest address names the same node only if exactly this node owns the address.
            let same = match select_dest {
                None => true,
                Some(Host::Name(dest)) => dest == name,
                Some(dest @ Host::Address(_)) => resolve(dest).is_ok_and(|node| node == *name),
            };
            if !same {
                return Err(contradiction(&SELECT_DEST, name));
            }
            Ok(routes.by_name(name)?)
        }
        (Host::Address(_), Some(selected), Some(Host::Name(dest))) if dest != selected => {
            Err(bad_request(format!(
                "{SELECT_HOST} and {SELECT_DEST} name different nodes"
            )))
        }
        // An address owned by exactly one node selects that node. Unknown and shared addresses
        // select none.
        (Host::Address(_), Some(selected), Some(dest))
            if resolve(dest).is_ok_and(|node| node != *selected) =>
        {
            Err(bad_request(format!(
                "{SELECT_HOST} and {SELECT_DEST} name different nodes"
            )))
        }
        (Host::Address(_), Some(selected), _) => Ok(routes.by_name(selected)?),
        (Host::Address(_), None, dest) => Ok(resolve(dest.unwrap_or(host))?),
    }
}

/// Returns the only value of a field, or `None` if the field is absent.
fn single_value<'a>(
    headers: &'a HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'a str>, DecisionError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(bad_request(format!("{name} is given more than once")));
    }
    first
        .map(|value| {
            value
                .to_str()
                .map_err(|_binary| bad_request(format!("{name} is not plain text")))
        })
        .transpose()
}

pub fn bad_request(text: impl Into<String>) -> DecisionError {
    DecisionError::BadRequest(text.into())
}

/// The host part of an address that a caller sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    Name(NodeName),
    Address(IpAddr),
}

impl std::fmt::Display for Host {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Name(name) => name.fmt(formatter),
            Self::Address(IpAddr::V4(address)) => address.fmt(formatter),
            Self::Address(IpAddr::V6(address)) => write!(formatter, "[{address}]"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    pub host: Host,
    pub port: Option<Port>,
}

impl HostPort {
    /// Parses `name`, `name:port`, `1.2.3.4`, `1.2.3.4:port`, `[v6]` or `[v6]:port` (RFC 9110,
    /// section 7.2). An empty port is none (RFC 3986, section 3.2.3).
    pub fn parse(text: &str) -> Option<Self> {
        if let Some(rest) = text.strip_prefix('[') {
            let (address, rest) = rest.split_once(']')?;
            let address: Ipv6Addr = address.parse().ok()?;
            let port = match rest {
                "" | ":" => None,
                rest => Some(rest.strip_prefix(':')?.parse().ok()?),
            };
            return Some(Self {
                host: Host::Address(IpAddr::V6(address).to_canonical()),
                port,
            });
        }
        let (host, port) = match text.split_once(':') {
            Some((host, "")) => (host, None),
            Some((host, port)) => (host, Some(port.parse().ok()?)),
            None => (text, None),
        };
        let host = match host.parse::<IpAddr>() {
            Ok(address) => Host::Address(address),
            Err(_name) => Host::Name(host.parse().ok()?),
        };
        Some(Self { host, port })
    }
}

#[cfg(test)]
impl DecisionError {
    /// Returns the kind of the error, for test tables.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::BadRequest(_) => "bad_request",
            Self::Unsupported(_) => "unsupported",
            Self::Route(error) if !error.is_ambiguous() => "unknown_node",
            Self::Route(_) | Self::Conflicting(_) => "ambiguous_address",
            Self::Pod(..) => "unknown_pod",
        }
    }
}

#[cfg(test)]
mod tests;
