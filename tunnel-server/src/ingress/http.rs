//! Terminated mode: hyper towards the caller, one routed request at a time, hyper through the stream to the target.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::header::AUTHORIZATION;
use http::{HeaderValue, Method, Request, Response};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tracing::debug;
use tunnel_proto::process::places::Place;
use tunnel_proto::relay::{RelayEnd, relay};

use super::answer::{Failure, Outcome};
use super::body::{DoorBody, Passing, RequestBody};
use super::connect::{self, Tunnel};
use super::course::{Course, Followed, Overdue, Patience};
use super::fields::{
    clean_response, end_unless_switched, is_framed_twice, judge, may_share_connection, prepare,
    requested_upgrade, trace_parent,
};
use super::peer::{CallerName, Peer};
use super::record::Record;
use super::socket::{Fate, Hangup, Unfinished, read_away};
use super::target::{Destination, Facts, Scheme, decide};
use super::upstream::{Carrier, Kept, Purpose, Way};
use super::{Door, DoorLimits, Doors, Line};
use crate::config::Limit;
use crate::pods::Pod;

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
        place,
        borrows,
    } = line;
    let limits = doors.limits;
    let course = Course::begin(Patience {
        head: limits.request_head_time,
        idle: limits.idle,
    });
    let caller = Arc::new(Caller {
        kept: Arc::new(Kept::new(doors.drivers.clone())),
        upgrade: Mutex::default(),
        course: course.clone(),
        connecting: AtomicBool::new(false),
        doors,
        door,
        peer,
        name,
        fate,
        borrows,
    });
    let answering = caller.clone();
    let service = service_fn(move |request| {
        let caller = answering.clone();
        async move { Ok::<_, Infallible>(caller.answer(request).await) }
    });
    let stream = TokioIo::new(Followed { stream, course });
    let mut builder = builder(&limits);
    // What follows a CONNECT is the target's, its end too; of other requests `Hangup` tells.
    builder.half_close(caller.door.connect.is_some());
    let connection = builder.serve_connection(stream, service).with_upgrades();
    let ended = caller.attend(connection, &hangup, place).await;
    caller.kept.close();
    match ended {
        Ok(()) => caller.shut_down_unswitched().await,
        Err(End::Http(error)) if error.is_parse() => {
            // hyper has answered 400, 414 or 431 by itself.
            let metrics = &caller.doors.metrics;
            let mut record = Record::begin(caller.door.name, peer, "unparsable request", metrics);
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
    /// It sent no head yet, and a newer one needed its place.
    Evicted,
}

type Connection<S, F> = hyper::server::conn::http1::UpgradeableConnection<TokioIo<Followed<S>>, F>;

/// One caller's connection, as its requests see it.
pub(super) struct Caller {
    pub(super) doors: Arc<Doors>,
    door: Arc<Door>,
    peer: Peer,
    pub(super) name: CallerName,
    fate: Arc<Fate>,
    /// May borrow the server's identity towards targets.
    borrows: bool,
    /// A CONNECT is under way, so that the end of the caller's direction is the target's to hear.
    connecting: AtomicBool,
    course: Arc<Course>,
    kept: Arc<Kept>,
    /// What hyper gives the socket back through when a request had an Upgrade field, whether it was granted or not.
    upgrade: Mutex<Option<OnUpgrade>>,
}

impl Caller {
    /// Drives the connection and watches over it.
    async fn attend<S, F>(
        &self,
        connection: Connection<S, F>,
        hangup: &Hangup,
        place: Place,
    ) -> Result<(), End>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
        F: hyper::service::HttpService<Incoming, ResBody = DoorBody>,
        F::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let mut connection = pin!(connection);
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
        let mut opening = pin!(async {
            tokio::select! {
                biased;
                () = self.course.opened() => true,
                () = place.evicted() => false,
            }
        });
        let (mut draining, mut waited, mut opened) = (false, false, false);
        loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => return ended.map_err(End::Http),
                has_head = opening.as_mut(), if !opened => match has_head {
                    true => {
                        opened = true;
                        place.leave();
                        continue;
                    }
                    false => return Err(End::Evicted),
                },
                never = expire.as_mut() => match never {},
                () = gone.as_mut() => return Err(End::Gone),
                () = drain.cancelled(), if !draining => draining = true,
                overdue = self.course.overdue(), if !waited => {
                    waited = true;
                    let limit = match overdue {
                        Overdue::Opening | Overdue::Next => Limit::RequestHeadTimeout,
                        Overdue::Idle => Limit::CallerIdleTimeout,
                    };
                    self.doors.metrics.limit(limit);
                    debug!(peer = %self.peer, limit = limit.name(), "caller was silent for too long");
                    if overdue == Overdue::Opening {
                        return Err(End::Silent);
                    }
                }
            }
            connection.as_mut().graceful_shutdown();
        }
    }

    /// Closes the connection in order when hyper gave it back for an upgrade that was not granted.
    async fn shut_down_unswitched(&self) {
        let pending = self.take_upgrade();
        if let Some(pending) = pending
            && let Ok(upgraded) = pending.await
            && let Err(error) = TokioIo::new(upgraded).shutdown().await
        {
            debug!(%error, "cannot close a caller's connection in order");
        }
    }

    pub(super) fn take_upgrade(&self) -> Option<OnUpgrade> {
        let mut upgrade = self.upgrade.lock().unwrap_or_else(PoisonError::into_inner);
        upgrade.take()
    }

    async fn answer(&self, mut request: Request<Incoming>) -> Response<DoorBody> {
        let connects = *request.method() == Method::CONNECT && self.door.connect.is_some();
        self.connecting.store(connects, Ordering::Relaxed);
        let underway = self.course.request(!request.body().is_end_stream());
        let pending = hyper::upgrade::on(&mut request);
        *self.upgrade.lock().unwrap_or_else(PoisonError::into_inner) = Some(pending);
        let subject = match &self.door.connect {
            Some(_) => connect::subject(&request),
            None => format!("{} {}", request.method(), request.uri().path()),
        };
        let mut record = Record::begin(self.door.name, self.peer, &subject, &self.doors.metrics);
        record.caller(&self.name);
        let wanted = requested_upgrade(request.version(), request.headers());
        let wanted = wanted.filter(|_| !connects);
        let forwarded = match &self.door.connect {
            Some(gate) => Box::pin(connect::forward(gate, self, request, &mut record)).await,
            None => self.forward(request, wanted.as_ref(), &mut record).await,
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

    async fn forward(
        &self,
        request: Request<Incoming>,
        upgrade: Option<&HeaderValue>,
        record: &mut Record,
    ) -> Result<Forwarded, Failure> {
        let destination = self.destination(&request).await?;
        let scheme = self.door.scheme;
        self.pass_on(request, (destination, scheme), upgrade, record)
            .await
    }

    /// Passes a request on to its destination.
    pub(super) async fn pass_on(
        &self,
        mut request: Request<Incoming>,
        (destination, scheme): (Destination, Scheme),
        upgrade: Option<&HeaderValue>,
        record: &mut Record,
    ) -> Result<Forwarded, Failure> {
        record.destination(&destination);
        let place = destination.to_string();
        let shares = may_share_connection(&request);
        prepare(&mut request, &destination.host_field(), upgrade, !shares);
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
        let switched = switched.and_then(|target| Some((self.take_upgrade()?, target)));
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

    async fn destination(&self, request: &Request<Incoming>) -> Result<Destination, Failure> {
        let facts = Facts {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            scheme: self.door.scheme,
            implied_port: self.door.implied_port,
        };
        let policy = self.doors.policy.load();
        let failure = match decide(&facts, &self.doors.routes.load(), &policy) {
            Ok(destination) => return Ok(destination),
            Err(failure) => failure,
        };
        // Old kube-apiservers dial the kubelet by an address that says nothing here; the pod in the path does.
        let leads_nowhere = matches!(
            failure.outcome,
            Outcome::UnknownNode | Outcome::AmbiguousAddress
        );
        // Kubelets stream over TLS only, and nobody on the plain door is to make the cluster work.
        let may_ask = leads_nowhere && self.door.scheme == Scheme::Https;
        let pod = Pod::of_path(request.uri().path()).filter(|_| may_ask);
        let (Some(pods), Some(pod)) = (&self.doors.pods, pod) else {
            return Err(failure);
        };
        match pods.kubelet_of(pod).await {
            Some(kubelet) => Ok(Destination {
                target: policy.kubelet(kubelet.port),
                node: kubelet.node,
            }),
            None => Err(failure),
        }
    }
}

/// The head of an answer and what follows it.
pub(super) struct Forwarded {
    pub(super) head: Response<()>,
    pub(super) rest: Rest,
}

pub(super) enum Rest {
    Body(Incoming, Carrier),
    Upgraded {
        caller: OnUpgrade,
        target: OnUpgrade,
    },
    /// Bytes from here on, as after a 101.
    Tunnel {
        caller: OnUpgrade,
        tunnel: Box<Tunnel>,
    },
}

impl Rest {
    fn settle(self, head: Response<()>, record: Record, caller: &Caller) -> Response<DoorBody> {
        let unfinished = caller.fate.begin();
        let shutdown = &caller.doors.shutdown;
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
                shutdown.spawn_work(relay_upgraded(caller_side, target, unfinished, record));
            }
            Self::Tunnel {
                caller: caller_side,
                tunnel,
            } => {
                caller.fate.upgrade();
                let passing = Passing { unfinished, record };
                shutdown.spawn_work(connect::pass(caller_side, *tunnel, passing));
            }
        }
        head.map(|()| DoorBody::empty())
    }
}

/// Bytes both ways after a 101, half-closes kept, until both directions have ended or one is cut.
async fn relay_upgraded(
    caller: OnUpgrade,
    target: OnUpgrade,
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

#[cfg(test)]
pub(super) mod tests;
