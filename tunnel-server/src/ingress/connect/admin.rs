//! CONNECT on the admin socket, for `tunnel-server connect` on the server's host: to nodes alone.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::sync::Semaphore;

use super::super::Doors;
use super::super::peer::{CallerName, Peer};
use super::{Direct, Gate, Tunnel, open, pass, subject, way};
use crate::ingress::access_log::Record;
use crate::ingress::caller_stream::Fate;
use crate::ingress::connect::request::{Form, Goal};
use crate::ingress::error::{Failure, Outcome};
use crate::ingress::http::body::Passing;
use crate::ingress::http::headers::trace_parent;
use crate::routing::dial_policy::{Allowed, LiveRanges};
use crate::routing::registry::CallerKey;

/// Tunnels of people at once.
const TUNNELS_MAX: usize = 256;

/// Opens tunnels for whoever may use the admin socket.
#[derive(Debug, Clone)]
pub struct Tunnels {
    doors: Arc<Doors>,
    gate: Gate,
    places: Arc<Semaphore>,
}

impl Tunnels {
    /// Through these doors' agents; nothing is dialled by the server itself.
    #[must_use]
    pub fn new(doors: Arc<Doors>, dial_limit: Duration) -> Self {
        let nothing = Allowed::Listed(Vec::new(), LiveRanges::default());
        Self {
            doors,
            gate: Gate {
                passwords: None,
                also_plain: true,
                direct: Arc::new(Direct::new(nothing, dial_limit)),
            },
            places: Arc::new(Semaphore::new(TUNNELS_MAX)),
        }
    }

    /// Answers a CONNECT of the user with this number: 200 and bytes from there on, or a line that says why not.
    pub async fn answer(
        &self,
        mut request: Request<Incoming>,
        user: Option<u32>,
    ) -> Response<Full<Bytes>> {
        let mut record =
            Record::begin("admin", Peer::Unix, &subject(&request), &self.doors.metrics);
        if let Some(user) = user {
            record.caller(&CallerName::Uid(user));
        }
        // Who may use this socket may stop the server: the operator counts as a caller with a certificate.
        let operator = CallerKey::Local(user);
        let opened = Box::pin(self.open(&request, &operator, &mut record)).await;
        let (tunnel, place) = match opened {
            Ok(opened) => opened,
            Err(failure) => {
                record.fail(&failure);
                record.status(failure.outcome.status());
                let mut response = Response::new(Full::from(format!("{failure}\n")));
                *response.status_mut() = failure.outcome.status();
                return response;
            }
        };
        record.status(http::StatusCode::OK);
        let caller = hyper::upgrade::on(&mut request).map_ok(TokioIo::new);
        let fate = Arc::new(Fate::default());
        let passing = Passing {
            unfinished: fate.begin(),
            record,
        };
        self.doors.shutdown.spawn_work(async move {
            let _place = place;
            pass(caller, tunnel, passing).await;
        });
        Response::default()
    }

    async fn open(
        &self,
        request: &Request<Incoming>,
        caller: &CallerKey,
        record: &mut Record,
    ) -> Result<(Tunnel, tokio::sync::OwnedSemaphorePermit), Failure> {
        let goal = Goal::of(request.method(), request.uri(), request.headers())?;
        let place = self.places.clone().try_acquire_owned().map_err(|_full| {
            let text = format!("{TUNNELS_MAX} tunnels of this socket are open already");
            Failure::new(Outcome::TooManyStreams, text)
        })?;
        debug_assert_eq!(
            goal.form,
            Form::Connect,
            "the admin socket passes no other on"
        );
        let way = way(&self.doors, &self.gate, &goal)?;
        let asked = (&goal, way, trace_parent(request.headers()));
        let tunnel = open(&self.doors, &self.gate, asked, caller, record).await?;
        Ok((tunnel, place))
    }
}
