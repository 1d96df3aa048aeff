//! The CONNECT doors: callers name any target, and get bytes to it or, for plain HTTP, an answer; what is no edge node is
//! dialled by the server itself, within bounds.
//!
//! Two kinds of callers are meant. kube-apiserver's egress selector sends `CONNECT HOST:PORT` and wants a status of exactly
//! 200 with not a byte behind the head. Prometheus' `proxy_url` sends the same for https targets, and the whole URL for http
//! ones. TLS inside a tunnel is between caller and target.

use std::sync::Arc;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tracing::debug;
use tunnel_proto::process::host::is_own_address;
use tunnel_proto::process::places::source;
use tunnel_proto::relay::{RelayEnd, relay};
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};

use super::Doors;
use super::http::{Caller, Forwarded, Rest};
use super::peer::CallerName;
use crate::ingress::access_log::Record;
use crate::ingress::caller_stream::read_away;
use crate::ingress::error::{Failure, Outcome};
use crate::ingress::http::body::{Passing, RequestBody};
use crate::ingress::http::headers::{clean_response, judge, prepare, trace_parent};
use crate::ingress::http::upstream::{Carrier, exchange_direct};
use crate::routing::decision::{Destination, Scheme};
use crate::routing::registry::CallerKey;

mod admin;
mod attempts;
pub mod basic_auth;
mod dial;
mod request;
#[cfg(test)]
#[cfg(feature = "kubernetes")]
pub(crate) mod table;

use crate::ingress::connect::basic_auth::{LivePasswords, PasswordRefusal};
use crate::ingress::connect::request::{Form, Goal, Place, Way};
use crate::routing::dial_policy::Claims;
pub use admin::Tunnels;
pub use dial::Direct;
use dial::DirectSocket;

/// What a CONNECT door asks of its callers, and lets them do.
#[derive(Debug, Clone)]
pub struct Gate {
    /// Whoever shows no certificate has to know one of these.
    pub passwords: Option<Arc<LivePasswords>>,
    /// Callers may come without TLS, too.
    pub also_plain: bool,
    /// Connections of the server's own.
    pub direct: Arc<Direct>,
}

/// An open way to a target.
#[derive(Debug)]
pub(super) enum Tunnel {
    /// Through an agent.
    Agent(Stream),
    /// By the server itself.
    Direct(DirectSocket),
}

impl Gate {
    /// Who the caller is.
    fn admit(&self, caller: &Caller, request: &Request<Incoming>) -> Result<CallerName, Failure> {
        let shown = &caller.name;
        let Some(passwords) = &self.passwords else {
            return Ok(shown.clone());
        };
        match shown {
            CallerName::Certificate(_) | CallerName::Uid(_) | CallerName::User(_) => {
                Ok(shown.clone())
            }
            CallerName::Unnamed => {
                let source = source(caller.peer.source());
                let admitted = passwords.admit(request.headers(), source, &caller.credentials);
                caller.doors.metrics.password(match admitted {
                    Ok(_) => "right",
                    Err(PasswordRefusal::Missing) => "missing",
                    Err(PasswordRefusal::Wrong) => "wrong",
                    Err(PasswordRefusal::Wait(_)) => "waiting",
                });
                admitted.map(CallerName::User).map_err(refused)
            }
        }
    }
}

fn refused(refusal: PasswordRefusal) -> Failure {
    let text = match refusal {
        PasswordRefusal::Missing | PasswordRefusal::Wrong => {
            "a name and a password of --connect-auth are needed".to_owned()
        }
        PasswordRefusal::Wait(left) => format!(
            "too many wrong ones came from this address: the next name and password of --connect-auth are judged in {} s",
            left.as_secs() + 1
        ),
    };
    Failure::new(Outcome::ProxyAuth, text)
}

/// What a request is called in its record: without a name and password that somebody put into the URL, and without its query.
pub(super) fn subject<B>(request: &Request<B>) -> String {
    let (method, uri) = (request.method(), request.uri());
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{method} {host}{}", uri.path())
}

/// Answers one request of a CONNECT door.
pub(super) async fn forward(
    gate: &Gate,
    caller: &Caller,
    request: Request<Incoming>,
    record: &mut Record,
) -> Result<Forwarded, Failure> {
    let name = gate.admit(caller, &request)?;
    record.caller(&name);
    let key = name.key(caller.peer);
    let goal = Goal::of(request.method(), request.uri(), request.headers())?;
    let doors = &caller.doors;
    let way = way(doors, gate, &goal)?;
    match goal.form {
        Form::Connect => {
            let trace_parent = trace_parent(request.headers());
            let tunnel = open(doors, gate, (&goal, way, trace_parent), &key, record).await?;
            Ok(Forwarded {
                head: Response::new(()),
                rest: Rest::Tunnel {
                    caller: caller.take_upgrade(),
                    tunnel: Box::new(tunnel),
                },
            })
        }
        Form::Read => {
            let request = in_origin_form(request);
            match way {
                Way::Agent(destination) => {
                    let target = (destination.into(), Scheme::Http);
                    let passed = caller.pass_on(request, target, &key, None, record);
                    passed.await
                }
                Way::Direct(place) => {
                    let socket = dial(doors, gate, (&goal, &place), record).await?;
                    read_direct(doors, (socket, &goal.to_string()), request, record).await
                }
            }
        }
    }
}

fn way(doors: &Doors, gate: &Gate, goal: &Goal) -> Result<Way, Failure> {
    goal.way(
        &doors.routes.load(),
        &doors.policy.load(),
        &gate.direct.allowed().cluster(),
        |node| doors.registry.has(node),
    )
}

/// Opens the way, up to the target's having accepted the connection.
async fn open(
    doors: &Doors,
    gate: &Gate,
    (goal, way, trace_parent): (&Goal, Way, String),
    caller: &CallerKey,
    record: &mut Record,
) -> Result<Tunnel, Failure> {
    match way {
        Way::Agent(destination) => {
            record.destination(&destination);
            let stream = open_stream(doors, &destination, trace_parent, caller, record).await?;
            Ok(Tunnel::Agent(stream))
        }
        Way::Direct(place) => {
            let socket = dial(doors, gate, (goal, &place), record).await?;
            record.dialled(socket.bytes());
            Ok(Tunnel::Direct(socket))
        }
    }
}

/// Dials what the server may dial itself, by what is known of nodes at this moment.
async fn dial(
    doors: &Doors,
    gate: &Gate,
    (goal, place): (&Goal, &Place),
    record: &mut Record,
) -> Result<DirectSocket, Failure> {
    let text = goal.to_string();
    record.destination(&format!("direct {text}"));
    let routes = doors.routes.load();
    let claims = Claims {
        routes: &routes,
        has_agent: &|node| doors.registry.has(node),
        is_own: &is_own_address,
        own_ports: gate.direct.own_ports(),
    };
    gate.direct.dial(place, goal.port, &text, &claims).await
}

/// Opens a stream and waits for the agent's word that the target is connected. An agent that is stopping has started
/// nothing, so that another session of the node may be asked, once.
async fn open_stream(
    doors: &Doors,
    destination: &Destination,
    trace_parent: String,
    caller: &CallerKey,
    record: &mut Record,
) -> Result<Stream, Failure> {
    let place = destination.to_string();
    let header = StreamHeader {
        kind: StreamKind::Target(destination.target.clone()),
        trace_parent,
    };
    let (registry, limit) = (&doors.registry, doors.limits.open);
    let mut refused: Option<(Failure, _)> = None;
    loop {
        let except = refused.as_ref().map(|(_, session)| *session);
        let began = Instant::now();
        let opened = registry.open(&destination.node, &header, caller, limit, except);
        let mut opened = match (opened.await, refused.take()) {
            (Ok(opened), _) => opened,
            // There was no other way, so the refusal is the answer.
            (Err(_), Some((failure, _))) => return Err(failure),
            (Err(error), None) => return Err(Failure::from_open(&error, &place)),
        };
        record.opened(opened.session, opened.stream.bytes(), began.elapsed());
        let Err(error) = opened.stream.accepted().await else {
            return Ok(opened.stream);
        };
        let failure = Failure::from_stream(&error, &place, Outcome::AgentLost);
        if failure.outcome != Outcome::Draining || except.is_some() {
            return Err(failure);
        }
        refused = Some((failure, opened.session));
    }
}

/// Asks a target that the server dialled.
async fn read_direct(
    doors: &Arc<Doors>,
    (mut socket, goal): (DirectSocket, &str),
    mut request: Request<Incoming>,
    record: &mut Record,
) -> Result<Forwarded, Failure> {
    prepare(&mut request, goal, None, true);
    let bytes = socket.bytes();
    record.dialled(bytes.clone());
    // How a request ends is told by its framing.
    socket.finish();
    let exchanged = exchange_direct(doors, (socket, bytes), request.map(RequestBody), goal);
    let (mut response, upstream) = exchanged.await?;
    judge(None::<&HeaderValue>, &response).map_err(|what| {
        let text = format!("{goal}: the target {what}");
        Failure::new(Outcome::TargetBadResponse, text)
    })?;
    clean_response(&mut response, false);
    let (head, body) = response.into_parts();
    let carrier = Carrier {
        upstream,
        doors: doors.clone(),
        keep: None,
    };
    Ok(Forwarded {
        head: Response::from_parts(head, ()),
        rest: Rest::Body(body, carrier),
    })
}

/// What a target expects in place of the URL (RFC 9112, section 3.2.1).
fn in_origin_form(mut request: Request<Incoming>) -> Request<Incoming> {
    let mut parts = http::uri::Parts::default();
    parts.path_and_query = request.uri().path_and_query().cloned();
    // A URI of a path and a query alone has nothing to contradict.
    if let Ok(uri) = http::Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

/// Passes bytes both ways once the caller has its 200.
pub(super) async fn pass<S, E>(
    caller: impl Future<Output = Result<S, E>>,
    tunnel: Tunnel,
    passing: Passing,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin,
    E: std::fmt::Display,
{
    match caller.await {
        Ok(caller) => pass_bytes(caller, tunnel, passing).await,
        Err(error) => debug!(%error, "caller went away before its tunnel began"),
    }
}

/// Half-closes are kept; a cut on one side is one on the other.
async fn pass_bytes<S>(mut caller: S, mut tunnel: Tunnel, passing: Passing)
where
    S: AsyncRead + AsyncWrite + Send + Unpin,
{
    // Dropped before the caller's side: a relay that is stopped midway ends in a reset.
    let mut passing = passing;
    let end = match &mut tunnel {
        Tunnel::Agent(stream) => relay(&mut caller, stream).await.end,
        Tunnel::Direct(socket) => relay(&mut caller, socket).await.end,
    };
    match end {
        RelayEnd::Clean => {
            finish(&mut tunnel);
            passing.finish();
        }
        RelayEnd::ReaderLeft(side) => {
            debug!(?side, "tunnel ended with unread bytes");
            passing.record.set(Outcome::Cut);
            finish(&mut tunnel);
            read_away(&mut caller).await;
            passing.unfinished.finish();
        }
        RelayEnd::Cut(side, error) => {
            debug!(?side, %error, "tunnel was cut");
            passing.record.set(Outcome::Cut);
        }
    }
}

fn finish(tunnel: &mut Tunnel) {
    match tunnel {
        // A stream whose halves have ended is finished.
        Tunnel::Agent(_) => {}
        Tunnel::Direct(socket) => socket.finish(),
    }
}

#[cfg(test)]
mod tests;
