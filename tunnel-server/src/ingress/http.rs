//! Terminated mode: hyper towards the caller, one routed request at a time, hyper through the stream to the target.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::{Body as _, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tracing::debug;
use tunnel_proto::relay::{RelayEnd, relay};
use tunnel_proto::wire::header::TRACE_PARENT_MAX;

use super::answer::{ERROR_HEADER, Failure, Outcome};
use super::body::{DoorBody, Passing};
use super::record::Record;
use super::socket::{Fate, Unfinished, read_away};
use super::target::{Destination, Facts, SELECT_DEST, SELECT_HOST, decide};
use super::upstream::{self, Upstream};
use super::{Door, Doors};

/// Fields that concern one hop only (RFC 9110, section 7.6.1) and are not passed either way.
const HOP_BY_HOP: [HeaderName; 5] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Serves one caller's connection, plain or already decrypted, until it ends or the drain lets it.
pub(super) async fn serve<S>(
    doors: Arc<Doors>,
    door: Arc<Door>,
    stream: S,
    peer: SocketAddr,
    fate: Arc<Fate>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (metrics, drain) = (doors.metrics.clone(), doors.shutdown.drain().clone());
    let (name, idle_end) = (door.name, fate.clone());
    let caller = Caller {
        doors,
        door,
        peer,
        fate,
    };
    let limits = caller.doors.limits;
    let service = service_fn(move |request| {
        let caller = caller.clone();
        async move { Ok::<_, Infallible>(caller.answer(request).await) }
    });
    let mut server = hyper::server::conn::http1::Builder::new();
    server
        .timer(TokioTimer::new())
        .header_read_timeout(limits.request_head_time)
        .max_header_size(limits.request_head_bytes)
        .auto_date_header(false)
        .preserve_header_case(true)
        // Fields of our own, as people write them; those of targets keep their case.
        .title_case_headers(true);
    let mut connection = pin!(
        server
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades()
    );
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = drain.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        if error.is_timeout() {
            // No head came in time: the caller has its last answer, and an idle connection ends without a reset.
            idle_end.settle();
            debug!(%peer, "caller's connection was idle");
        } else if error.is_parse() {
            // hyper has answered 400, 414 or 431 by itself.
            let mut record = Record::begin(name, peer, "unparsable request", &metrics);
            record.fail(&Failure::new(Outcome::BadRequest, error.to_string()));
        } else {
            debug!(%error, %peer, "caller's connection ended");
        }
    }
}

/// One caller's connection, as its requests see it.
#[derive(Clone)]
struct Caller {
    doors: Arc<Doors>,
    door: Arc<Door>,
    peer: SocketAddr,
    fate: Arc<Fate>,
}

impl Caller {
    async fn answer(&self, request: Request<Incoming>) -> Response<DoorBody> {
        let subject = format!("{} {}", request.method(), request.uri().path());
        let mut record = Record::begin(self.door.name, self.peer, &subject, &self.doors.metrics);
        match self.forward(request, &mut record).await {
            Ok(Forwarded { response, rest }) => {
                record.status(response.status());
                rest.settle(response, record, self)
            }
            Err(failure) => {
                record.fail(&failure);
                record.status(failure.outcome.status());
                failure.response()
            }
        }
    }

    async fn forward(
        &self,
        mut request: Request<Incoming>,
        record: &mut Record,
    ) -> Result<Forwarded, Failure> {
        let destination = self.destination(&request)?;
        record.destination(&destination);
        let place = destination.to_string();
        let upgrade = requested_upgrade(request.version(), request.headers());
        let caller_side = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        let trace = trace_parent(request.headers());
        prepare(&mut request, &destination, upgrade.as_ref());
        let mut upstream =
            upstream::connect(&self.doors, self.door.scheme, &destination, trace, record).await?;
        let sent = upstream.sender.send_request(request).await;
        let mut response =
            sent.map_err(|error| Failure::from_stream(&error, &place, Outcome::TargetBadResponse))?;
        let status = response.status();
        let target_side = match (&upgrade, status) {
            (Some(wanted), StatusCode::SWITCHING_PROTOCOLS)
                if switches_to(response.headers(), wanted) =>
            {
                Some(hyper::upgrade::on(&mut response))
            }
            (_, StatusCode::SWITCHING_PROTOCOLS) => {
                let text =
                    format!("{place}: the target switched to a protocol that was not asked for");
                return Err(Failure::new(Outcome::TargetBadResponse, text));
            }
            // The lesson of CVE-2018-1002105: anything but a refusal would leave a connection to the target open.
            (Some(_), status) if status.as_u16() < 400 => {
                let text = format!("{place}: the target answered {status} to an upgrade request");
                return Err(Failure::new(Outcome::TargetBadResponse, text));
            }
            (Some(_) | None, _) => None,
        };
        clean_response(&mut response, target_side.is_some());
        let rest = match (caller_side, target_side) {
            (Some(caller), Some(target)) => Rest::Upgraded { caller, target },
            (Some(_) | None, _) => Rest::Body(upstream),
        };
        Ok(Forwarded { response, rest })
    }

    fn destination(&self, request: &Request<Incoming>) -> Result<Destination, Failure> {
        let facts = Facts {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            scheme: self.door.scheme,
            implied_port: self.door.implied_port,
        };
        decide(&facts, &self.doors.routes.load(), &self.doors.policy)
    }
}

/// The caller's trace context (W3C Trace Context), for the agent's record; empty when there is none or it is odd.
fn trace_parent(headers: &HeaderMap) -> String {
    let field = headers
        .get("traceparent")
        .and_then(|value| value.to_str().ok());
    let plain = field.filter(|text| {
        text.len() <= TRACE_PARENT_MAX && text.bytes().all(|byte| byte.is_ascii_graphic())
    });
    plain.unwrap_or_default().to_owned()
}

/// A target's answer and what follows its head.
struct Forwarded {
    response: Response<Incoming>,
    rest: Rest,
}

enum Rest {
    Body(Upstream),
    Upgraded {
        caller: hyper::upgrade::OnUpgrade,
        target: hyper::upgrade::OnUpgrade,
    },
}

impl Rest {
    fn settle(
        self,
        response: Response<Incoming>,
        record: Record,
        caller: &Caller,
    ) -> Response<DoorBody> {
        let unfinished = caller.fate.begin();
        match self {
            Self::Body(upstream) => {
                let drivers = caller.doors.drivers.clone();
                let passing = Passing { unfinished, record };
                response.map(|body| DoorBody::target(body, passing, upstream.connection, drivers))
            }
            Self::Upgraded {
                caller: caller_side,
                target,
            } => {
                caller.fate.upgrade();
                caller.doors.shutdown.spawn_work(relay_upgraded(
                    caller_side,
                    target,
                    unfinished,
                    record,
                ));
                response.map(|_none_after_101| DoorBody::empty())
            }
        }
    }
}

/// Bytes both ways after a 101, half-closes kept, until both directions have ended or one is cut.
async fn relay_upgraded(
    caller: hyper::upgrade::OnUpgrade,
    target: hyper::upgrade::OnUpgrade,
    unfinished: Unfinished,
    mut record: Record,
) {
    let (caller, target) = match tokio::try_join!(caller, target) {
        Ok(both) => both,
        Err(error) => return debug!(%error, "upgrade did not happen"),
    };
    let (mut caller, mut target) = (TokioIo::new(caller), TokioIo::new(target));
    // Dropped before the caller's side: a relay that is stopped midway ends in a reset.
    let unfinished = unfinished;
    match relay(&mut caller, &mut target).await.end {
        RelayEnd::Clean => {
            record.set(Outcome::Ok);
            unfinished.finish();
        }
        RelayEnd::ReaderLeft(_) => {
            record.set(Outcome::Cut);
            read_away(&mut caller).await;
            unfinished.finish();
        }
        RelayEnd::Cut(side, error) => {
            debug!(?side, %error, "upgraded stream was cut");
            record.set(Outcome::Cut);
        }
    }
}

/// The protocol that a request wants to switch to. HTTP/1.0 cannot (RFC 9110, section 7.8).
fn requested_upgrade(version: Version, headers: &HeaderMap) -> Option<HeaderValue> {
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

/// Turns the caller's request into the target's: hop-by-hop and routing fields out, Host as the target expects it.
fn prepare(
    request: &mut Request<Incoming>,
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
fn clean_response(response: &mut Response<Incoming>, switched: bool) {
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
