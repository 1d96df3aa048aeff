//! Terminated mode: hyper towards the caller, one routed request at a time, hyper through the stream to the target.

pub mod body;
pub(crate) mod head_check;
pub(crate) mod headers;
pub(crate) mod timeouts;
pub(crate) mod upstream;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use http::header::{AUTHORIZATION, HOST};
use http::{HeaderValue, Method, Request, Response};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1::{Builder, Parts};
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::debug;
use tunnel_proto::identity::CallerError;
use tunnel_proto::process::places::Place;
use tunnel_proto::process::telemetry::LineLimit;
use tunnel_proto::relay::{RelayEnd, relay};
use tunnel_proto::wire::name::NodeName;

use super::connect::{self, Tunnel};
use super::peer::{CallerName, Peer};
use super::{Door, DoorLimits, Doors, Line};
use crate::config::Limit;
use crate::ingress::access_log::Record;
use crate::ingress::caller_stream::{Fate, Hangup, Unfinished, read_away};
use crate::ingress::connect::basic_auth::Credentials;
use crate::ingress::error::{Failure, Outcome};
use crate::ingress::http::body::{DoorBody, Passing, RequestBody};
use crate::ingress::http::head_check::{Fault, Following};
use crate::ingress::http::headers::{
    clean_response, end_unless_switched, is_framed_twice, judge, may_share_connection, prepare,
    requested_upgrade, trace_parent,
};
use crate::ingress::http::timeouts::{Course, Followed, Overdue, Patience, Underway};
use crate::ingress::http::upstream::{Carrier, Kept, Purpose, Way};
use crate::routing::decision::delegated::{self, Addressed, Decision, DelegatedRequest};
use crate::routing::decision::{Facts, Scheme, decide};
use crate::routing::registry::CallerKey;

/// A connection that has been idle for this long gives hyper's buffers back, which are most of what it costs.
const RELEASE_BUFFERS_AFTER: Duration = Duration::from_secs(2);

/// Serves one caller's connection, plain or already decrypted, until it ends or the drain lets it.
pub(super) async fn serve<S>(doors: Arc<Doors>, door: Arc<Door>, stream: S, line: Line)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Line {
        peer,
        name,
        fate,
        hangup,
        permit,
        borrows,
        server_name,
        refused,
    } = line;
    let limits = doors.limits;
    let patience = Patience {
        head: limits.request_head_time,
        idle: limits.idle,
    };
    let course = Course::begin(patience, permit.clone());
    let mut stream = Followed::new(stream, course.clone());
    let caller = Arc::new(Caller {
        kept: Arc::new(Kept::new(doors.drivers.clone())),
        upgrade: Mutex::default(),
        course,
        permit,
        connecting: AtomicBool::new(false),
        doors,
        door,
        peer,
        name,
        fate,
        borrows,
        server_name,
        refused,
        credentials: Mutex::default(),
    });
    let ended = loop {
        // In a box of its own, which is freed while the connection is idle.
        match Box::pin(caller.clone().attend(stream, &hangup)).await {
            Ok(Some(idle)) => stream = idle,
            Ok(None) => break Ok(()),
            Err(end) => break Err(end),
        }
        match caller.wait(stream, &hangup).await {
            Ok(Some(readable)) => stream = readable,
            Ok(None) => break Ok(()),
            Err(end) => break Err(end),
        }
    };
    caller.kept.close();
    match ended {
        Ok(()) => {}
        Err(End::Http(error)) if error.is_parse() => {
            // hyper has answered 400, 414 or 431 by itself.
            let metrics = &caller.doors.metrics;
            let mut record = Record::begin(caller.door.name, peer, "unparsable request", metrics);
            record.limit_lines(&UNPARSABLE);
            let failure = Failure::new(Outcome::BadRequest, error.to_string());
            record.fail(&if error.is_parse_too_large() {
                failure.at(Limit::RequestHeadBytes)
            } else {
                failure
            });
        }
        Err(End::Http(error)) => debug!(%error, %peer, "caller's connection ended"),
        Err(End::Silent) => {}
        Err(End::Gone) => debug!(%peer, "caller went away"),
        Err(End::Evicted) => caller.doors.metrics.evicted_caller(),
    }
}

/// How long TLS may take to hand its last bytes to the socket; then the connection is dropped.
const SHUT_DOWN_LIMIT: Duration = Duration::from_secs(30);

/// Ends this server's direction in order.
async fn shut_down<S: AsyncWrite + Unpin>(mut stream: S) {
    match timeout(SHUT_DOWN_LIMIT, stream.shutdown()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "cannot close a caller's connection in order"),
        Err(_elapsed) => debug!("caller does not take the end of its connection"),
    }
}

/// A caller can send such heads faster than a disk takes lines, and each line says the same.
static UNPARSABLE: LineLimit = LineLimit::new("requests whose head cannot be parsed");

/// How callers are heard.
pub(super) fn builder(limits: &DoorLimits) -> Builder {
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        // Silence is `Course`'s matter.
        .header_read_timeout(None)
        .max_header_size(limits.request_head_bytes)
        .auto_date_header(false)
        .preserve_header_case(true)
        // Fields of our own, as people write them; those of targets keep their case.
        .title_case_headers(true);
    builder
}

/// Why a caller's connection is dropped as it is.
enum End {
    Http(hyper::Error),
    /// No first head came in time.
    Silent,
    /// The caller ended its direction, or the connection, while a request was under way.
    Gone,
    /// The connection was idle, and a newer one needed its place.
    Evicted,
}

/// A caller's connection that carries a stream of bytes from here on, as after a 101.
pub(super) type UpgradedCaller = Box<dyn CallerIo>;

/// Resolves once hyper has written the head that grants the upgrade; fails when the connection ends before that.
pub(super) type CallerUpgrade = oneshot::Receiver<UpgradedCaller>;

/// What an upgraded connection is used for.
pub(super) trait CallerIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> CallerIo for S {}

/// One caller's connection, as its requests see it.
pub(super) struct Caller {
    pub(super) doors: Arc<Doors>,
    door: Arc<Door>,
    pub(super) peer: Peer,
    pub(super) name: CallerName,
    fate: Arc<Fate>,
    /// May borrow the server's identity towards targets.
    borrows: bool,
    /// The name that its TLS asked for, of a caller with delegation.
    server_name: Option<NodeName>,
    /// Why nothing of it is passed on.
    refused: Option<CallerError>,
    /// The name and password that were right last, where a CONNECT listener asks for them.
    pub(super) credentials: Mutex<Option<Credentials>>,
    /// A CONNECT is under way, so that the end of the caller's direction is the target's to hear.
    connecting: AtomicBool,
    course: Arc<Course>,
    /// The connection's place among all callers.
    permit: Arc<Place>,
    kept: Arc<Kept>,
    /// Receives the connection when hyper is done with it, if an upgrade was granted.
    upgrade: Mutex<Option<oneshot::Sender<UpgradedCaller>>>,
}

impl Caller {
    /// Drives the connection until it ends, or has been idle for [`RELEASE_BUFFERS_AFTER`]: then the stream is returned.
    async fn attend<S>(
        self: Arc<Self>,
        stream: Followed<S>,
        hangup: &Hangup,
    ) -> Result<Option<Followed<S>>, End>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let answering = self.clone();
        let service = service_fn(move |request| {
            // Before hyper reads on.
            let (underway, fault) = answering.begin(&request);
            let caller = answering.clone();
            Box::pin(
                async move { Ok::<_, Infallible>(caller.answer(request, underway, fault).await) },
            )
        });
        let mut builder = builder(&self.doors.limits);
        // What follows a CONNECT is the target's, its end too; of other requests `Hangup` tells.
        builder.half_close(self.door.connect.is_some());
        let mut connection = builder.serve_connection(TokioIo::new(stream), service);
        let mut expire = pin!(self.kept.expire());
        let mut gone = pin!(async {
            hangup.come().await;
            // An end between requests is hyper's to see, after what was sent before it.
            self.course.in_request().await;
            if self.connecting.load(Ordering::Relaxed) {
                std::future::pending().await
            }
        });
        let drain = self.doors.shutdown.drain();
        let mut idle = pin!(self.course.idle_for(RELEASE_BUFFERS_AFTER));
        let mut stuck = pin!(self.course.stuck_for(self.doors.limits.idle));
        let (mut draining, mut waited, mut evicted) = (false, false, false);
        loop {
            tokio::select! {
                biased;
                ended = poll_fn(|cx| match connection.poll_without_shutdown(cx) {
                    // hyper is done, and has not flushed: it leaves that to a shutdown of its own.
                    Poll::Ready(Ok(())) if self.course.is_write_blocked() => Poll::Pending,
                    polled => polled,
                }) => {
                    let stream = into_stream(connection.into_parts());
                    match ended {
                        Ok(()) if evicted => return Err(self.evict(stream)),
                        Ok(()) => self.finish(stream).await,
                        Err(error) => {
                            // hyper has answered what it could not parse. What it did not get rid of is lost, visibly.
                            if self.course.is_write_blocked() {
                                self.fate.cut();
                            } else if error.is_parse() {
                                shut_down(stream).await;
                            }
                            return Err(End::Http(error));
                        }
                    }
                    return Ok(None);
                }
                () = self.permit.evicted(), if !evicted => {
                    if self.course.is_idle() {
                        return Err(self.evict(into_stream(connection.into_parts())));
                    }
                    evicted = true;
                }
                () = idle.as_mut(), if hangup.can_wait() && !draining && !waited && !evicted => {
                    return Ok(Some(into_stream(connection.into_parts())));
                }
                () = stuck.as_mut() => {
                    self.report_overdue(Overdue::Idle);
                    self.fate.cut();
                    return Err(End::Silent);
                }
                never = expire.as_mut() => match never {},
                () = gone.as_mut() => return Err(End::Gone),
                () = drain.cancelled(), if !draining => draining = true,
                overdue = self.course.overdue(), if !waited => {
                    waited = true;
                    self.report_overdue(overdue);
                    if overdue == Overdue::Opening {
                        return Err(End::Silent);
                    }
                }
            }
            Pin::new(&mut connection).graceful_shutdown();
        }
    }

    /// Waits without hyper until the caller sends something: then the stream is returned.
    async fn wait<S>(
        &self,
        stream: Followed<S>,
        hangup: &Hangup,
    ) -> Result<Option<Followed<S>>, End>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        tokio::select! {
            biased;
            () = self.permit.evicted() => return Err(self.evict(stream)),
            () = hangup.readable() => return Ok(Some(stream)),
            () = self.doors.shutdown.drain().cancelled() => {}
            overdue = self.course.overdue() => self.report_overdue(overdue),
        }
        shut_down(stream).await;
        Ok(None)
    }

    fn report_overdue(&self, overdue: Overdue) {
        let limit = match overdue {
            Overdue::Opening | Overdue::Next => Limit::RequestHeadTimeout,
            Overdue::Idle => Limit::CallerIdleTimeout,
        };
        self.doors.metrics.limit(limit);
        debug!(peer = %self.peer, limit = limit.name(), "caller was silent for too long");
    }

    /// Hands the connection over to the stream that it was upgraded for, or closes it in order.
    async fn finish<S>(&self, stream: Followed<S>)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let granted = self.upgrade_slot().take();
        match granted {
            // Where the receiver is gone, dropping the connection is its end.
            Some(granted) => drop(granted.send(Box::new(stream))),
            None => shut_down(stream).await,
        }
    }

    /// Ends a connection for a newer one: with a FIN, and without waiting for the caller's, since its descriptor is needed. An
    /// upgraded connection is in use and goes on.
    fn evict<S>(&self, mut stream: Followed<S>) -> End
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        if let Some(granted) = self.upgrade_slot().take() {
            drop(granted.send(Box::new(stream)));
        } else if let Some(Err(error)) = stream.shutdown().now_or_never() {
            debug!(%error, "cannot close a caller's connection in order");
        }
        End::Evicted
    }

    /// Asks for the connection once hyper has written the answer to the current request, which has to grant an upgrade.
    pub(super) fn take_upgrade(&self) -> CallerUpgrade {
        let (granted, upgrade) = oneshot::channel();
        *self.upgrade_slot() = Some(granted);
        upgrade
    }

    fn upgrade_slot(&self) -> MutexGuard<'_, Option<oneshot::Sender<UpgradedCaller>>> {
        self.upgrade.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that hyper has read a head, and says what is wrong with it.
    fn begin(&self, request: &Request<Incoming>) -> (Underway, Option<Fault>) {
        self.connecting
            .store(self.connects(request), Ordering::Relaxed);
        let has_body = !request.body().is_end_stream();
        self.course.request(has_body, Following::of(request))
    }

    fn connects(&self, request: &Request<Incoming>) -> bool {
        *request.method() == Method::CONNECT && self.door.connect.is_some()
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        underway: Underway,
        fault: Option<Fault>,
    ) -> Response<DoorBody> {
        let connects = self.connects(&request);
        let subject = match &self.door.connect {
            Some(_) => connect::subject(&request),
            None => format!("{} {}", request.method(), request.uri().path()),
        };
        let mut record = Record::begin(self.door.name, self.peer, &subject, &self.doors.metrics);
        record.caller(&self.name);
        let wanted = requested_upgrade(request.version(), request.headers());
        let wanted = wanted.filter(|_| !connects);
        let forwarded = match (self.refusal(fault), &self.door.connect) {
            (Some(failure), _) => Err(failure),
            (None, Some(gate)) => {
                Box::pin(connect::forward(gate, self, request, &mut record)).await
            }
            (None, None) => self.forward(request, wanted.as_ref(), &mut record).await,
        };
        let mut response = match forwarded {
            Ok(Forwarded { head, rest }) => {
                record.status(head.status());
                rest.settle(head, record, self)
            }
            Err(failure) => {
                record.fail(&failure);
                record.status(failure.outcome.status());
                if connects {
                    failure.connect_response()
                } else {
                    failure.response()
                }
            }
        };
        end_unless_switched(wanted.as_ref(), &mut response);
        response.map(|body| body.ending(underway))
    }

    /// Why a request is answered without a look at what it asks for.
    fn refusal(&self, fault: Option<Fault>) -> Option<Failure> {
        let bad = fault.map(|fault| Failure::new(Outcome::BadRequest, fault.to_string()));
        let refused = self
            .refused
            .map(|error| Failure::new(Outcome::RefusedByPolicy, error.to_string()));
        bad.or(refused)
    }

    async fn forward(
        &self,
        request: Request<Incoming>,
        upgrade: Option<&HeaderValue>,
        record: &mut Record,
    ) -> Result<Forwarded, Failure> {
        let addressed = self.destination(&request).await?;
        let (scheme, key) = (self.door.scheme, self.name.key(self.peer));
        self.pass_on(request, (addressed, scheme), &key, upgrade, record)
            .await
    }

    /// Passes a request on to its destination.
    pub(super) async fn pass_on(
        &self,
        mut request: Request<Incoming>,
        (addressed, scheme): (Addressed, Scheme),
        caller: &CallerKey,
        upgrade: Option<&HeaderValue>,
        record: &mut Record,
    ) -> Result<Forwarded, Failure> {
        let host = host_field(&addressed, &request);
        let destination = addressed.destination;
        record.destination(&destination);
        let place = destination.to_string();
        let shares = may_share_connection(&request);
        prepare(&mut request, &host, upgrade, !shares);
        let leg = self.doors.targets.leg(self.borrows);
        let purpose = shares.then(|| Purpose {
            destination: destination.clone(),
            leg: leg.id,
            authorization: request.headers().get(AUTHORIZATION).cloned(),
        });
        let way = Way {
            doors: &self.doors,
            scheme,
            leg,
            destination: &destination,
            caller,
            trace_parent: trace_parent(request.headers()),
            kept: purpose.as_ref().map(|purpose| (&*self.kept, purpose)),
        };
        let (mut response, upstream) = way.exchange(request.map(RequestBody), record).await?;
        let switches = judge(upgrade, &response).map_err(|what| {
            let text = format!("{place}: the target {what}");
            Failure::new(Outcome::TargetBadResponse, text)
        })?;
        let switched = switches.then(|| hyper::upgrade::on(&mut response));
        let clear = !is_framed_twice(response.headers());
        clean_response(&mut response, switched.is_some());
        let switched = switched.map(|target| (self.take_upgrade(), target));
        let keep = purpose
            .filter(|_| clear)
            .map(|purpose| (self.kept.clone(), purpose));
        let (head, body) = response.into_parts();
        let rest = match switched {
            Some((caller, target)) => Rest::Upgraded { caller, target },
            None => Rest::Body(
                body,
                Carrier {
                    upstream,
                    doors: self.doors.clone(),
                    keep,
                },
            ),
        };
        Ok(Forwarded {
            head: Response::from_parts(head, ()),
            rest,
        })
    }

    async fn destination(&self, request: &Request<Incoming>) -> Result<Addressed, Failure> {
        let facts = Facts {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            scheme: self.door.scheme,
            implied_port: self.door.implied_port,
        };
        let (routes, policy) = (&self.doors.routes, &self.doors.policy);
        if !self.borrows || self.door.scheme != Scheme::Https {
            return decide(&facts, &routes.load(), &policy.load()).map(Addressed::from);
        }
        let request = DelegatedRequest {
            facts,
            server_name: self.server_name.as_ref(),
        };
        let decision = delegated::decide(&request, &routes.load(), &policy.load())?;
        let pod = match decision {
            Decision::Forward(addressed) => return Ok(addressed),
            Decision::LookUp(pod) => pod,
        };
        let Some(pods) = &self.doors.pods else {
            return delegated::decide_by_host(&request, &routes.load(), &policy.load());
        };
        let found = pods.node_of(pod.clone()).await;
        delegated::decide_by_pod(&request, (&pod, found), &routes.load(), &policy.load())
    }
}

/// Takes the stream back from hyper, with what hyper read and did not use.
fn into_stream<S, F>(parts: Parts<TokioIo<Followed<S>>, F>) -> Followed<S> {
    let mut stream = parts.io.into_inner();
    stream.put_back(parts.read_buf);
    stream
}

/// The Host field of the request to the target.
fn host_field(addressed: &Addressed, request: &Request<Incoming>) -> String {
    let own = request
        .headers()
        .get(HOST)
        .filter(|_| addressed.keeps_host)
        .and_then(|host| host.to_str().ok());
    own.map_or_else(|| addressed.destination.host_field(), str::to_owned)
}

/// The head of an answer and what follows it.
pub(super) struct Forwarded {
    pub(super) head: Response<()>,
    pub(super) rest: Rest,
}

pub(super) enum Rest {
    Body(Incoming, Carrier),
    Upgraded {
        caller: CallerUpgrade,
        target: OnUpgrade,
    },
    /// Bytes from here on, as after a 101.
    Tunnel {
        caller: CallerUpgrade,
        tunnel: Box<Tunnel>,
    },
}

impl Rest {
    fn settle(self, head: Response<()>, record: Record, caller: &Caller) -> Response<DoorBody> {
        let unfinished = caller.fate.begin();
        let shutdown = &caller.doors.shutdown;
        let in_use = caller.permit.in_use();
        match self {
            Self::Body(body, carrier) => {
                let passing = Passing { unfinished, record };
                return head.map(|()| DoorBody::target(body, passing, carrier));
            }
            Self::Upgraded {
                caller: caller_side,
                target,
            } => {
                caller.fate.upgrade();
                shutdown.spawn_work(async move {
                    let _in_use = in_use;
                    relay_upgraded(caller_side, target, unfinished, record).await;
                });
            }
            Self::Tunnel {
                caller: caller_side,
                tunnel,
            } => {
                caller.fate.upgrade();
                let passing = Passing { unfinished, record };
                shutdown.spawn_work(async move {
                    let _in_use = in_use;
                    connect::pass(caller_side, *tunnel, passing).await;
                });
            }
        }
        head.map(|()| DoorBody::empty())
    }
}

/// Bytes both ways after a 101, half-closes kept, until both directions have ended or one is cut.
async fn relay_upgraded(
    caller: CallerUpgrade,
    target: OnUpgrade,
    unfinished: Unfinished,
    mut record: Record,
) {
    let (mut caller, target) = match tokio::join!(caller, target) {
        (Ok(caller), Ok(target)) => (caller, target),
        (Err(error), _) => return debug!(%error, "caller went away before its upgrade"),
        (Ok(_), Err(error)) => return debug!(%error, "upgrade of the target did not happen"),
    };
    let mut target = TokioIo::new(target);
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

#[cfg(test)]
pub(super) mod tests;
