//! The connection to a target: a stream of the node's agent, TLS in it for the TLS doors, and an HTTP client on top.

use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{Either, Empty};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;
use tracing::debug;
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::header::{StreamHeader, StreamKind};
use tunnel_proto::wire::name::SessionId;

use super::Doors;
use super::answer::{Failure, Outcome};
use super::record::Record;
use super::target::{Destination, Scheme};

/// The caller's body, or none for a request that is sent again.
type RequestBody = Either<Incoming, Empty<Bytes>>;

/// A connection to a target.
#[derive(Debug)]
pub(super) struct Upstream {
    /// Sends the request.
    sender: SendRequest<RequestBody>,
    /// Drives the connection; dropping it closes the target's side.
    pub(super) connection: AbortOnDropHandle<()>,
}

/// Where requests of one kind go, and how.
#[derive(Debug)]
pub(super) struct Way<'a> {
    /// What all doors share.
    pub(super) doors: &'a Arc<Doors>,
    /// Whether there is TLS in the stream.
    pub(super) scheme: Scheme,
    /// The node and its port.
    pub(super) destination: &'a Destination,
    /// For the agent's record.
    pub(super) trace_parent: String,
}

/// An exchange that failed, and the session that carried it, if one did.
struct Attempt {
    failure: Failure,
    session: Option<SessionId>,
}

impl Way<'_> {
    /// Sends a request and waits for the head of its answer. When the agent refuses because it is stopping, nothing was
    /// started at the target: a request that is complete with its head then goes over another session of the node, once.
    ///
    /// # Errors
    /// A [`Failure`] with the answer for the caller.
    pub(super) async fn exchange(
        &self,
        request: Request<Incoming>,
        record: &mut Record,
    ) -> Result<(Response<Incoming>, Upstream), Failure> {
        let (head, body) = request.into_parts();
        let again = body.is_end_stream().then(|| head.clone());
        let request = Request::from_parts(head, Either::Left(body));
        let refused = match self.attempt(request, None, record).await {
            Ok(answered) => return Ok(answered),
            Err(attempt) => attempt,
        };
        let stopping = refused.failure.outcome == Outcome::Draining && refused.session.is_some();
        let Some(head) = again.filter(|_| stopping) else {
            return Err(refused.failure);
        };
        let request = Request::from_parts(head, Either::Right(Empty::new()));
        let second = self.attempt(request, refused.session, record).await;
        second.map_err(|attempt| match attempt.session {
            Some(_) => attempt.failure,
            // There was no other way, so the refusal is the answer.
            None => refused.failure,
        })
    }

    async fn attempt(
        &self,
        request: Request<RequestBody>,
        except: Option<SessionId>,
        record: &mut Record,
    ) -> Result<(Response<Incoming>, Upstream), Attempt> {
        let place = self.destination.to_string();
        let kind = StreamKind::Target(self.destination.target.clone());
        let header = StreamHeader {
            kind,
            trace_parent: self.trace_parent.clone(),
        };
        let (node, limit) = (&self.destination.node, self.doors.limits.open);
        let began = Instant::now();
        let opened = self.doors.registry.open(node, &header, limit, except).await;
        let opened = opened.map_err(|error| Attempt {
            failure: Failure::from_open(&error, &place),
            session: None,
        })?;
        let session = Some(opened.session);
        record.opened(opened.session, opened.stream.bytes(), began.elapsed());
        let exchanged = async {
            let mut upstream = self.connect(opened.stream, &place).await?;
            let sent = upstream.sender.send_request(request).await;
            let response = sent.map_err(|error| {
                Failure::from_stream(&error, &place, Outcome::TargetBadResponse)
            })?;
            Ok((response, upstream))
        };
        exchanged
            .await
            .map_err(|failure| Attempt { failure, session })
    }

    /// Prepares a stream for a request. Does not wait for the agent's reply on plain doors: the request follows the
    /// header at once, and a refusal surfaces as the request's error.
    async fn connect(&self, stream: Stream, place: &str) -> Result<Upstream, Failure> {
        let doors = self.doors;
        match self.scheme {
            Scheme::Http => handshake(doors, stream, place).await,
            Scheme::Https => {
                // A name that ends in a number is no DNS name for TLS; the certificate is not judged by it here.
                let node = self.destination.node.to_string();
                let name = ServerName::try_from(node.clone())
                    .or_else(|_number| ServerName::try_from(format!("{node}.invalid")))
                    .map_err(|error| {
                        Failure::new(Outcome::TargetTls, format!("{place}: {error}"))
                    })?;
                let connecting = TlsConnector::from(doors.target_tls.clone()).connect(name, stream);
                // The agent's reply has its own limit inside the stream; this one is for a target that is silent in TLS.
                let limit = doors.limits.open + doors.limits.handshake;
                let stream = match timeout(limit, connecting).await {
                    Ok(Ok(stream)) => stream,
                    Ok(Err(error)) => return Err(tls_failure(&error, place)),
                    Err(_elapsed) => {
                        let text =
                            format!("{place}: the target did not finish the TLS handshake in time");
                        return Err(Failure::new(Outcome::TargetTimeout, text));
                    }
                };
                handshake(doors, stream, place).await
            }
        }
    }
}

fn tls_failure(error: &std::io::Error, place: &str) -> Failure {
    let failure = Failure::from_stream(error, place, Outcome::TargetTls);
    match failure.outcome {
        // A target that cuts or ends the connection in the handshake does not speak TLS.
        Outcome::TargetBadResponse | Outcome::TargetTls => Failure::new(
            Outcome::TargetTls,
            format!("{place}: TLS with the target failed: {error}"),
        ),
        _ => failure,
    }
}

async fn handshake<S>(doors: &Arc<Doors>, stream: S, place: &str) -> Result<Upstream, Failure>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let built = Builder::new()
        .preserve_header_case(true)
        .handshake(TokioIo::new(stream))
        .await;
    let (sender, connection) =
        built.map_err(|error| Failure::from_stream(&error, place, Outcome::TargetBadResponse))?;
    let drive = async move {
        if let Err(error) = connection.with_upgrades().await {
            debug!(%error, "connection to a target ended");
        }
    };
    let connection = AbortOnDropHandle::new(doors.drivers.spawn(drive));
    Ok(Upstream { sender, connection })
}
