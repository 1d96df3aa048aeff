//! One caller's bytes and one target's bytes through the HTTP of the listeners, without sockets,
//! tasks or time.

use std::cell::RefCell;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::LazyLock;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Either;
use hyper::body::{Body, Frame, Incoming};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::service::service_fn;

use super::strict::{self, Head, Parsed};
use crate::ingress::error::ProxyError;
use crate::ingress::http::builder;
use crate::ingress::http::head_check::size::HeadLimits;
use crate::ingress::http::head_check::{BodyFraming, HeadCheck, HeadError};
use crate::ingress::http::headers::{
    can_reuse_connection, close_unless_upgraded, requested_upgrade, rewrite_request,
    rewrite_response, validate_response,
};
use crate::ingress::http::request_body::RequestBody;
use crate::ingress::http::response::ResponseBody;
use crate::ingress::http::upstream::connection::client;
use crate::outcome::Outcome;
use crate::routing::routes::RouteTable;
use tunnel_routing::decision::{RequestFacts, decide};
use tunnel_routing::destination::{Destination, RequestedDestination, RequestedNode, Scheme};
use tunnel_routing::operation::RequestedOperation;
use tunnel_routing::policy::{Access, AccessCaller, Denied, PortLists, PortPolicy, Route, locate};

/// The result of an exchange.
#[derive(Debug, Default)]
pub(super) struct Exchange {
    /// Number of requests that hyper read.
    pub(super) request_count: usize,
    /// Requests that were sent to a target.
    pub(super) routed: Vec<Routed>,
    /// The listener itself answered a request.
    pub(super) failed: bool,
    /// Number of ambiguous heads.
    pub(super) faults: usize,
    /// Bytes that the caller received.
    pub(super) output: Vec<u8>,
}

/// A request as it was sent to the target.
#[derive(Debug)]
pub(super) struct Routed {
    /// Number of the request on the caller's connection, from 1.
    pub(super) number: usize,
    host: String,
    selected: bool,
    destination: Destination,
    method: String,
    target: Vec<u8>,
    /// Protocols that the request asked to switch to.
    pub(super) wanted: Option<String>,
    bytes: Vec<u8>,
}

impl Routed {
    /// Checks that the bytes that were sent are one plain request for the node that the caller
    /// named.
    pub(super) fn check(&self) {
        let head = match strict::request(&self.bytes) {
            Parsed::Whole(head, length) => {
                assert_eq!(length, self.bytes.len(), "something follows");
                head
            }
            // The caller's body is incomplete, but the head is complete.
            Parsed::Begun => match strict::head_of(&self.bytes).map(strict::request) {
                Some(Parsed::Whole(head, _)) => head,
                Some(Parsed::Begun) | None => return,
                Some(Parsed::Wrong(why)) => panic!("{why}"),
            },
            Parsed::Wrong(why) => panic!("{why}: {:?}", String::from_utf8_lossy(&self.bytes)),
        };
        self.check_head(&head);
    }

    fn check_head(&self, head: &Head) {
        assert_eq!((&head.method, &head.target), (&self.method, &self.target));
        let hosts: Vec<_> = head.all("host").collect();
        assert_eq!(hosts, [self.destination.host_field()]);
        if !self.selected {
            let named = self.host.split(':').next().unwrap_or_default();
            let named = named.to_lowercase();
            let node = self.destination.node.to_string();
            assert!(
                named.trim_end_matches('.') == node || self.host.starts_with("192.0.2.1"),
                "{named} led to {node}"
            );
        }
        for gone in [
            "x-tunnel-proxy-host",
            "x-tunnel-proxy-dest",
            "expect",
            "keep-alive",
        ] {
            assert_eq!(head.all(gone).count(), 0, "{gone}");
        }
        assert!(head.all("te").all(|te| te == "trailers"));
        assert_eq!(head.all("upgrade").next().is_some(), self.wanted.is_some());
        let known = ["Upgrade", "close", "close, TE", "TE"];
        assert!(head.all("connection").all(|value| known.contains(&value)));
    }
}

pub(in crate::ingress) static ROUTES: LazyLock<RouteTable> = LazyLock::new(|| {
    let (one, two) = ("worker-1".parse().unwrap(), "worker-2".parse().unwrap());
    let addresses = ["192.0.2.1".parse().unwrap()];
    RouteTable::new([(&one, &addresses[..]), (&two, &[][..])])
});
pub(in crate::ingress) static POLICY: LazyLock<PortPolicy> = LazyLock::new(|| {
    let lists = PortLists {
        http: "9100".parse().unwrap(),
        ..PortLists::default()
    };
    PortPolicy::of_lists(lists, Vec::new())
});
/// Sends `input` to a listener whose targets all answer with `answer`.
pub(super) fn exchange(input: &[u8], answer: &[u8]) -> Exchange {
    let exchanged = Rc::new(RefCell::new(Exchange::default()));
    let check = Rc::new(RefCell::new(HeadCheck::default()));
    let wire = Wire::new(input);
    wire.0.borrow_mut().check = Some(check.clone());
    let service = service_fn(|request| {
        let exchanged = exchanged.clone();
        let head_error = check.borrow_mut().request(BodyFraming::of(&request));
        async move { Ok::<_, Infallible>(serve(request, head_error, answer, &exchanged).await) }
    });
    let mut connection = pin!(
        builder(HeadLimits::of_connection(usize::MAX)).serve_connection(wire.clone(), service)
    );
    let mut cx = Context::from_waker(Waker::noop());
    // All bytes are available from the start, so the exchange is over when nothing makes progress.
    let mut before = (usize::MAX, 0, 0);
    loop {
        if connection.as_mut().poll(&mut cx).is_ready() {
            break;
        }
        let now = (
            wire.0.borrow().at,
            wire.0.borrow().output.len(),
            exchanged.borrow().request_count,
        );
        if std::mem::replace(&mut before, now) == now {
            break;
        }
    }
    let mut exchanged = exchanged.take();
    exchanged.output = std::mem::take(&mut wire.0.borrow_mut().output);
    exchanged
}

/// Returns the destination on a node, if the ports allow one.
fn target(requested: RequestedNode) -> Result<Destination, Denied> {
    let access = Access {
        caller: AccessCaller::ANONYMOUS,
        destination: RequestedDestination::<()>::Node(requested),
        operation: RequestedOperation::Connect,
    };
    let located = locate(&POLICY, access)?;
    POLICY.check(&located.access)?;
    match located.route {
        Route::Agent(target) => Ok(target.destination),
        Route::Direct(()) => unreachable!("a node has an agent"),
    }
}

type Sent = Either<TargetBody, ResponseBody>;

async fn serve(
    mut request: Request<Incoming>,
    head_error: Option<HeadError>,
    answer: &[u8],
    exchanged: &RefCell<Exchange>,
) -> Response<Sent> {
    exchanged.borrow_mut().request_count += 1;
    exchanged.borrow_mut().faults += usize::from(head_error.is_some());
    let facts = RequestFacts {
        method: request.method(),
        uri: request.uri(),
        headers: request.headers(),
        scheme: Scheme::Http,
        implied_port: None,
    };
    let wanted = requested_upgrade(request.version(), request.headers());
    let fail = |failure: ProxyError| {
        exchanged.borrow_mut().failed = true;
        failure.response().map(Either::Right)
    };
    let decided = match head_error {
        Some(head_error) => Err(ProxyError::new(Outcome::BadRequest, head_error.to_string())),
        None => decide(&facts, &ROUTES)
            .map_err(ProxyError::from)
            .and_then(|requested| Ok(target(requested)?)),
    };
    let mut response = match decided {
        Err(failure) => fail(failure),
        Ok(destination) => {
            let text = |name: &str| {
                let value = request.headers().get(name);
                value.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
            };
            let authority = request.uri().authority().map(ToString::to_string);
            let path = request.uri().path_and_query();
            let mut routed = Routed {
                number: exchanged.borrow().request_count,
                host: authority.or_else(|| text("host")).unwrap_or_default(),
                selected: text("x-tunnel-proxy-host").is_some()
                    || text("x-tunnel-proxy-dest").is_some(),
                method: request.method().to_string(),
                // The absolute form becomes the origin form.
                target: path
                    .map_or_else(|| request.uri().to_string(), |path| path.to_string())
                    .into_bytes(),
                wanted: wanted
                    .as_ref()
                    .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
                destination,
                bytes: Vec::new(),
            };
            let shares = can_reuse_connection(&request);
            let host = Some(routed.destination.host_field());
            rewrite_request(&mut request, host, wanted.as_ref(), !shares);
            let wire = Wire::new(&[]);
            let answered = ask(request, &wire, answer).await;
            routed.bytes.clone_from(&wire.0.borrow().output);
            exchanged.borrow_mut().routed.push(routed);
            let judged = answered
                .map_err(|error| error.to_string())
                .and_then(|response| {
                    validate_response(wanted.as_ref(), &response)
                        .map(|switched| (response, switched))
                });
            match judged {
                Ok((mut response, switched)) => {
                    rewrite_response(&mut response, switched);
                    response.map(Either::Left)
                }
                Err(text) => fail(ProxyError::new(Outcome::TargetBadResponse, text)),
            }
        }
    };
    if wanted.is_some() {
        close_unless_upgraded(&mut response);
    }
    response
}

/// Sends a request, and feeds the response once the request has arrived. An incomplete request
/// receives the response too.
async fn ask(
    request: Request<Incoming>,
    wire: &Wire,
    answer: &[u8],
) -> Result<Response<TargetBody>, hyper::Error> {
    let (mut sender, connection) = client().handshake(wire.clone()).await?;
    let mut driver: Driver = Box::pin(connection);
    let mut sent = pin!(sender.send_request(request.map(|body| RequestBody::new(body).0)));
    let mut fed = false;
    let mut ended = false;
    let response = std::future::poll_fn(|cx| {
        for _ in 0..3 {
            if !ended {
                ended = driver.as_mut().poll(cx).is_ready();
            }
            if let Poll::Ready(response) = sent.as_mut().poll(cx) {
                return Poll::Ready(response);
            }
            let head_is_there = strict::head_of(&wire.0.borrow().output).is_some();
            if head_is_there && !std::mem::replace(&mut fed, true) {
                wire.feed(answer);
            }
        }
        Poll::Pending
    });
    let response = response.await?;
    let driver = (!ended).then_some(driver);
    Ok(response.map(|body| TargetBody { body, driver }))
}

type Driver = Pin<Box<dyn Future<Output = hyper::Result<()>>>>;

/// A response body that drives the connection it comes from.
struct TargetBody {
    body: Incoming,
    driver: Option<Driver>,
}

impl Body for TargetBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(cx).is_ready()
        {
            self.driver = None;
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

/// A connection in memory. Reads return the input and then nothing. Writes are stored.
#[derive(Clone)]
pub(in crate::ingress) struct Wire(Rc<RefCell<Ends>>);

struct Ends {
    input: Vec<u8>,
    at: usize,
    output: Vec<u8>,
    /// Receives the bytes that are read.
    check: Option<Rc<RefCell<HeadCheck>>>,
}

impl Wire {
    pub(in crate::ingress) fn new(input: &[u8]) -> Self {
        Self(Rc::new(RefCell::new(Ends {
            input: input.to_vec(),
            at: 0,
            output: Vec::new(),
            check: None,
        })))
    }

    /// Returns a number that changes with every read or write.
    pub(in crate::ingress) fn progress(&self) -> usize {
        let ends = self.0.borrow();
        ends.at + ends.output.len()
    }

    /// Returns the bytes that were written.
    pub(in crate::ingress) fn output(&self) -> Vec<u8> {
        self.0.borrow().output.clone()
    }

    /// Returns the input that was not read.
    pub(in crate::ingress) fn unread(&self) -> Vec<u8> {
        let ends = self.0.borrow();
        ends.input[ends.at..].to_vec()
    }

    fn feed(&self, bytes: &[u8]) {
        self.0.borrow_mut().input.extend_from_slice(bytes);
    }
}

impl Read for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        mut out: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        let mut ends = self.0.borrow_mut();
        let rest = &ends.input[ends.at..];
        if rest.is_empty() {
            return Poll::Pending;
        }
        let count = rest.len().min(out.remaining());
        out.put_slice(&rest[..count]);
        if let Some(check) = &ends.check {
            check.borrow_mut().read(&rest[..count]);
        }
        ends.at += count;
        Poll::Ready(Ok(()))
    }
}

impl Write for Wire {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.borrow_mut().output.extend_from_slice(data);
        Poll::Ready(Ok(data.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
