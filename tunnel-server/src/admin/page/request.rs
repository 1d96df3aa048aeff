//! Requests for the console: which page, in which form, and which requests are refused. All
//! functions are pure.

use std::net::IpAddr;

use http::header::{ACCEPT, ALLOW, HOST, RETRY_AFTER, WWW_AUTHENTICATE};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use tunnel_proto::identity::CallerError;
use tunnel_proto::wire::name::NodeName;

use super::query::{NodesQuery, QueryError};

/// How a caller has reached the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageAccess {
    /// Without TLS, on a loopback address.
    Loopback,
    /// With the certificate of a caller.
    Certificate,
    /// Over TLS without a certificate: each request has a name and a password.
    Password,
    /// With a certificate that is none of a caller.
    NoCaller(CallerError),
}

/// A request for one page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PageRequest {
    pub(super) view: View,
    pub(super) format: Format,
}

/// A page and its parameters.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum View {
    Overview,
    Nodes(NodesQuery),
    Node(NodeName),
    Servers,
    Conditions,
    Style,
    Script,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Html,
    Json,
}

/// The reason why a request is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PageRefusal {
    #[error("only GET and HEAD are supported")]
    Method,
    /// A name that resolves to a loopback address would let a page of another site read this one.
    #[error("open the page by an IP address or as localhost")]
    Host,
    #[error("{0}")]
    Caller(CallerError),
    #[error("send a name and password of --status-auth")]
    Password,
    /// Number of seconds until the next attempt is checked.
    #[error("too many wrong passwords from this address; retry in {0} s")]
    Throttled(u64),
    #[error("not found; use /, /nodes, /node/NAME, /servers or /conditions")]
    NotFound,
    #[error("no node has this name")]
    UnknownNode,
    #[error("{0}")]
    Query(QueryError),
    #[error("the page cannot be rendered")]
    Render,
}

impl PageRefusal {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::Host => StatusCode::MISDIRECTED_REQUEST,
            Self::Caller(_) => StatusCode::FORBIDDEN,
            Self::Password => StatusCode::UNAUTHORIZED,
            Self::Throttled(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::NotFound | Self::UnknownNode => StatusCode::NOT_FOUND,
            Self::Query(_) => StatusCode::BAD_REQUEST,
            Self::Render => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the header field that the status requires.
    pub(super) fn header(&self) -> Option<(HeaderName, HeaderValue)> {
        match self {
            Self::Method => Some((ALLOW, HeaderValue::from_static("GET, HEAD"))),
            Self::Password => Some((WWW_AUTHENTICATE, HeaderValue::from_static(CHALLENGE))),
            Self::Throttled(seconds) => Some((RETRY_AFTER, HeaderValue::from(*seconds))),
            Self::Host
            | Self::Caller(_)
            | Self::NotFound
            | Self::UnknownNode
            | Self::Query(_)
            | Self::Render => None,
        }
    }
}

impl PageRequest {
    /// Parses the head of a request.
    ///
    /// # Errors
    /// Returns the [`PageRefusal`] of a request that is not answered.
    pub(super) fn parse(head: &Parts, access: PageAccess) -> Result<Self, PageRefusal> {
        match access {
            PageAccess::Loopback if !is_local(head) => return Err(PageRefusal::Host),
            PageAccess::NoCaller(error) => return Err(PageRefusal::Caller(error)),
            PageAccess::Loopback | PageAccess::Certificate | PageAccess::Password => {}
        }
        if head.method != Method::GET && head.method != Method::HEAD {
            return Err(PageRefusal::Method);
        }
        let view = match head.uri.path() {
            "/" => View::Overview,
            "/nodes" => {
                let query = NodesQuery::parse(head.uri.query().unwrap_or_default());
                View::Nodes(query.map_err(PageRefusal::Query)?)
            }
            "/servers" => View::Servers,
            "/conditions" => View::Conditions,
            "/style.css" => View::Style,
            "/script.js" => View::Script,
            path => {
                let name = path.strip_prefix("/node/").ok_or(PageRefusal::NotFound)?;
                let name = name.parse::<NodeName>();
                View::Node(name.map_err(|_invalid| PageRefusal::UnknownNode)?)
            }
        };
        Ok(Self {
            view,
            format: Format::of(head),
        })
    }
}

impl Format {
    /// Returns JSON if the caller prefers it to HTML (RFC 9110, section 12.5.1). Ranges with
    /// wildcards select HTML.
    fn of(head: &Parts) -> Self {
        let accepted = head.headers.get_all(ACCEPT).iter();
        let accepted = accepted.filter_map(|value| value.to_str().ok());
        let (mut json, mut html) = (0.0, 0.0);
        for range in accepted.flat_map(|value| value.split(',')) {
            let mut parameters = range.split(';').map(str::trim);
            let media_type = parameters.next().unwrap_or_default();
            let quality = parameters.find_map(|parameter| parameter.strip_prefix("q="));
            let quality = quality.map_or(1.0, |text| text.parse::<f32>().unwrap_or(0.0));
            if media_type.eq_ignore_ascii_case("application/json") {
                json = quality;
            } else if media_type.eq_ignore_ascii_case("text/html") {
                html = quality;
            }
        }
        if json > html { Self::Json } else { Self::Html }
    }
}

/// Returns whether the caller names this host by an IP address or as `localhost`. A caller without
/// Host is no browser.
fn is_local(head: &Parts) -> bool {
    let named = head.uri.authority().cloned();
    let authority = match (named, head.headers.get(HOST)) {
        (Some(authority), _) => Some(authority),
        (None, None) => return true,
        (None, Some(host)) => host.to_str().ok().and_then(|host| host.parse().ok()),
    };
    authority.is_some_and(|authority: Authority| {
        let host = authority.host();
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
        address.is_ok() || host.eq_ignore_ascii_case("localhost")
    })
}

/// Browsers then ask for a name and a password (RFC 7617, section 2).
const CHALLENGE: &str = "Basic realm=\"tunnel-server\", charset=\"UTF-8\"";

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn parse(method: &str, target: &str, host: &str) -> Result<PageRequest, PageRefusal> {
        let request = Request::builder().method(method).uri(target);
        let (head, ()) = request.header(HOST, host).body(()).unwrap().into_parts();
        PageRequest::parse(&head, PageAccess::Loopback)
    }

    #[test]
    fn pages_are_parsed_and_others_refused() {
        for (target, expected) in [
            ("/", Ok(View::Overview)),
            ("/?", Ok(View::Overview)),
            ("/nodes", Ok(View::Nodes(NodesQuery::default()))),
            (
                "/node/worker-1",
                Ok(View::Node("worker-1".parse().unwrap())),
            ),
            ("/node/%3Cb%3E", Err(PageRefusal::UnknownNode)),
            ("/servers", Ok(View::Servers)),
            ("/conditions", Ok(View::Conditions)),
            ("/style.css", Ok(View::Style)),
            ("/script.js", Ok(View::Script)),
            ("/nodes?page=0", Err(PageRefusal::Query(QueryError::Page))),
            ("/nodes/", Err(PageRefusal::NotFound)),
        ] {
            let view = parse("GET", target, "127.0.0.1:1").map(|request| request.view);
            assert_eq!(view, expected, "{target}");
        }
    }

    #[test]
    fn other_methods_and_names_of_this_host_are_refused() {
        for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
            assert_eq!(parse(method, "/", "localhost"), Err(PageRefusal::Method));
        }
        assert!(parse("HEAD", "/", "LOCALHOST:10270").is_ok());
        for host in [
            "tunnel.example",
            "localhost.example:80",
            "",
            "127.0.0.1.nip.io",
        ] {
            assert_eq!(parse("GET", "/", host), Err(PageRefusal::Host), "{host}");
        }
        let (head, ()) = Request::new(()).into_parts();
        let kubelet = PageAccess::NoCaller(CallerError::Kubelet);
        assert_eq!(
            PageRequest::parse(&head, kubelet),
            Err(PageRefusal::Caller(CallerError::Kubelet))
        );
        assert!(PageRequest::parse(&head, PageAccess::Certificate).is_ok());
    }

    #[test]
    fn json_is_sent_to_callers_that_prefer_it() {
        for (accept, expected) in [
            ("*/*", Format::Html),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Format::Html),
            ("application/json", Format::Json),
            ("text/html;q=0.5, Application/JSON", Format::Json),
            ("application/json;q=0", Format::Html),
            ("application/json, text/html", Format::Html),
        ] {
            let request = Request::builder().header(ACCEPT, accept).body(()).unwrap();
            let (head, ()) = request.into_parts();
            assert_eq!(Format::of(&head), expected, "{accept}");
        }
    }
}
