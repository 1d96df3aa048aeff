//! Terminated mode: hyper towards the caller, one routed request at a time, hyper through the stream to the target.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tracing::debug;
use tunnel_proto::relay::{RelayEnd, relay};

use super::answer::{Failure, Outcome};
use super::body::{DoorBody, Passing};
use super::record::Record;
use super::socket::{Fate, Unfinished, read_away};
use super::target::{Destination, Facts, decide};
use super::upstream::{self, Upstream};
use super::{Door, Doors};

mod fields;

use fields::{clean_response, prepare, requested_upgrade, switches_to, trace_parent};

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
        let way = upstream::Way {
            doors: &self.doors,
            scheme: self.door.scheme,
            destination: &destination,
            trace_parent: trace,
        };
        let (mut response, upstream) = way.exchange(request, record).await?;
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

#[cfg(test)]
mod tests;
