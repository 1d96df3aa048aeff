//! Requests for the status page: which page, in which form, and which requests are refused. All
//! functions are pure.

use std::net::IpAddr;

use http::header::{ACCEPT, ALLOW, HOST, RETRY_AFTER, WWW_AUTHENTICATE};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderName, HeaderValue, Method, StatusCode};
use tunnel_proto::identity::CallerError;
use tunnel_proto::wire::name::NodeName;

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
    Nodes(NodesQuery),
    Node(NodeName),
    Servers,
    Conditions,
    Style,
}

/// The part of the list of nodes that a caller asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodesQuery {
    /// Text that the names contain, in lower case; empty for all.
    pub(super) search: String,
    /// Number of the page, from 1; 0 if the caller names none.
    pub(super) page: usize,
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
    #[error("not found; use /, /node/NAME, /servers or /conditions")]
    NotFound,
    #[error("no node has this name")]
    UnknownNode,
    #[error("unknown parameter; use search and page")]
    Parameter,
    #[error("page is not a number from 1")]
    PageNumber,
    #[error("search is longer than the name of a node")]
    Search,
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
            Self::Parameter | Self::PageNumber | Self::Search => StatusCode::BAD_REQUEST,
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
            | Self::Parameter
            | Self::PageNumber
            | Self::Search
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
            "/" => View::Nodes(NodesQuery::parse(head.uri.query().unwrap_or_default())?),
            "/servers" => View::Servers,
            "/conditions" => View::Conditions,
            "/style.css" => View::Style,
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

impl NodesQuery {
    fn parse(query: &str) -> Result<Self, PageRefusal> {
        let mut parsed = Self::default();
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "search" if value.len() > SEARCH_MAX_BYTES => return Err(PageRefusal::Search),
                "search" => parsed.search = value.trim().to_lowercase(),
                "page" => {
                    let number = value.parse::<usize>().ok().filter(|number| *number > 0);
                    parsed.page = number.ok_or(PageRefusal::PageNumber)?;
                }
                _ => return Err(PageRefusal::Parameter),
            }
        }
        Ok(parsed)
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
/// Maximum length of a node's name (RFC 1035, section 2.3.4).
const SEARCH_MAX_BYTES: usize = 253;

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
    fn pages_and_parameters_are_parsed_and_others_refused() {
        let nodes = |search: &str, page| {
            let search = search.to_owned();
            Ok(View::Nodes(NodesQuery { search, page }))
        };
        for (target, expected) in [
            ("/", nodes("", 0)),
            ("/?", nodes("", 0)),
            ("/?search=Worker%2D1+&page=3", nodes("worker-1", 3)),
            ("/?search=%3Cb%3E", nodes("<b>", 0)),
            (
                "/node/worker-1",
                Ok(View::Node("worker-1".parse().unwrap())),
            ),
            ("/node/%3Cb%3E", Err(PageRefusal::UnknownNode)),
            ("/servers", Ok(View::Servers)),
            ("/conditions", Ok(View::Conditions)),
            ("/style.css", Ok(View::Style)),
            ("/?page=0", Err(PageRefusal::PageNumber)),
            ("/?page=x", Err(PageRefusal::PageNumber)),
            ("/?job=a", Err(PageRefusal::Parameter)),
            ("/nodes", Err(PageRefusal::NotFound)),
        ] {
            let view = parse("GET", target, "127.0.0.1:1").map(|request| request.view);
            assert_eq!(view, expected, "{target}");
        }
        let long = format!("/?search={}", "a".repeat(254));
        assert_eq!(parse("GET", &long, "[::1]"), Err(PageRefusal::Search));
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
