//! A connection to a target: an HTTP client on top of a stream or a socket.

use std::fmt;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::UPGRADE;
use http::{Request, Response};
use http_body_util::{Either, Empty};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, timeout};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use tracing::debug;
use tunnel_proto::transport::{ByteCount, StreamCut, StreamWatch, find_cause};
use tunnel_proto::wire::header::AuditId;

use super::sent_head::SentHead;
use super::target_io::{INTERIM_MAX, TargetConn, TargetIo, TargetTraffic};
use crate::ingress::context::IngressContext;
use crate::ingress::error::ProxyError;
use crate::ingress::http::head_check::size::FIELDS_MAX;
use crate::ingress::http::request_body::{RequestBody, Upload, UploadHandle};
use crate::ingress::http::upload_queue::UploadQueue;
use crate::outcome::Outcome;
use crate::routing::attempts::Replay;
use crate::routing::via::Via;

/// Time that a connection to a target has to close after a complete response.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);
/// Time for which a target that has answered may read nothing of the end of a body.
const STALLED_END_LIMIT: Duration = Duration::from_secs(180);

/// Largest head of a target's response, and largest size of its trailer fields. Go's clients accept
/// 1 MiB, but nothing that runs on nodes needs that much.
const ANSWER_HEAD_MAX_BYTES: usize = 256 * 1024;
/// Largest number of fields in such a head.
const ANSWER_FIELDS_MAX: usize = FIELDS_MAX;

/// Appended to the error for a target that answers plain HTTP with a TLS alert.
const HTTPS_HINT: &str = "; the target speaks TLS: move its port to --https-proxy-ports, and send \
                          requests for it to the HTTPS listener";

/// The caller's body, or an empty body for a request that is sent again.
pub(super) type SentBody = Either<RequestBody, Empty<Bytes>>;

/// Name of a target in errors. Most requests succeed, so the text is made only for an error.
pub(super) type TargetLabel<'a> = dyn fmt::Display + Sync + 'a;

/// What carries an HTTP connection to a target, without the stream.
#[derive(Debug)]
pub(crate) struct Carrier {
    /// `None` for a connection that the server dialed directly.
    pub(crate) via: Option<Via>,
    /// Counter of the bytes on the stream or socket.
    pub(crate) bytes: ByteCount,
    /// Observes the stream or socket.
    pub(crate) watch: StreamWatch,
    /// The audit id of the request that opened the stream.
    pub(crate) audit_id: Option<AuditId>,
}

/// Drives a connection until it ends.
type Driven = Pin<Box<dyn Future<Output = Option<hyper::Error>> + Send>>;

/// What drives a connection. Dropping it closes the target's side at once.
enum Driver {
    /// The task of the caller, while it waits for a response and takes its body: a request costs no
    /// wakeup of another task. `None` once the connection has ended.
    Caller(Option<Driven>),
    /// A task of its own, for a request that has a body or asks for an upgrade: both go on while the
    /// caller takes nothing of the response. The connection serves no further request.
    Task(AbortOnDropHandle<Option<hyper::Error>>),
}

impl fmt::Debug for Driver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Caller(Some(_)) => "Caller",
            Self::Caller(None) => "Ended",
            Self::Task(_) => "Task",
        })
    }
}

/// An HTTP connection to a target.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(super) sender: SendRequest<SentBody>,
    driver: Driver,
    pub(super) carrier: Carrier,
    pub(super) traffic: Arc<TargetTraffic>,
    /// The body of the request, if it has one.
    upload: Option<UploadHandle>,
}

/// What of a request can be sent again.
#[derive(Default)]
#[allow(
    clippy::large_enum_variant,
    reason = "a request is the usual case, and a box would be one more allocation"
)]
pub(super) enum Resend {
    /// The request, of which no byte was sent.
    Request(Request<SentBody>),
    /// The head of a request without a body, which was sent.
    Head(SentHead),
    #[default]
    Nothing,
}

impl Resend {
    fn of_unsent(request: Option<Request<SentBody>>) -> Self {
        request.map_or(Self::Nothing, Self::Request)
    }

    /// Returns whether a further attempt can send this. `replay` is that of the request.
    pub(super) fn replay(&self, replay: Replay) -> Replay {
        match (self, replay) {
            (Self::Request(_), Replay::Never) => Replay::Unserved,
            (Self::Request(_) | Self::Head(_), replay) => replay,
            (Self::Nothing, _) => Replay::Never,
        }
    }
}

/// A request that received no response on a connection.
pub(super) struct SendError {
    pub(super) failure: ProxyError,
    pub(super) resend: Resend,
    /// A byte of an answer arrived.
    pub(super) has_answer: bool,
}

impl SendError {
    /// Returns the error of a request that leaves a suspect session.
    pub(super) fn moved(target_label: &TargetLabel<'_>) -> Box<Self> {
        let lost = Outcome::AgentLost;
        ProxyError::from_stream(&StreamCut::SessionLost, target_label, lost).into()
    }
}

impl From<ProxyError> for Box<SendError> {
    /// Returns the error of a connection that could not be prepared.
    fn from(failure: ProxyError) -> Self {
        Self::new(SendError {
            failure,
            resend: Resend::Nothing,
            has_answer: false,
        })
    }
}

impl Upstream {
    /// Returns the observer of the stream or socket that carries the connection.
    pub(crate) fn watch(&self) -> &StreamWatch {
        &self.carrier.watch
    }

    /// Starts an HTTP connection on a stream.
    pub(super) async fn start(
        conn: TargetConn,
        carrier: Carrier,
        ingress: &IngressContext,
        target_label: &TargetLabel<'_>,
    ) -> Result<Self, ProxyError> {
        let upload_queue = UploadQueue::new(ingress.head_memory.pool_permit());
        let traffic = Arc::new(TargetTraffic::new(upload_queue));
        let target_io = TargetIo::new(conn, traffic.clone());
        let built = client().handshake(TokioIo::new(target_io)).await;
        let (sender, connection) = built.map_err(|error| {
            ProxyError::from_stream(&error, target_label, Outcome::TargetBadResponse)
        })?;
        let drive = async move {
            let error = connection.with_upgrades().await.err()?;
            debug!(%error, "connection to a target ended");
            Some(error)
        };
        Ok(Self {
            sender,
            driver: Driver::Caller(Some(Box::pin(drive))),
            carrier,
            traffic,
            upload: None,
        })
    }

    /// Drives the connection as far as it gets, unless a task does. Must be called whenever the
    /// caller's task waits for something of the connection. Returns whether the connection has ended.
    pub(crate) fn poll_driver(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Driver::Caller(driver) = &mut self.driver else {
            return Poll::Pending;
        };
        if let Some(driven) = driver {
            ready!(driven.as_mut().poll(cx));
        }
        *driver = None;
        Poll::Ready(())
    }

    /// Sends a request and waits for the final response head. Gives up when `moves` ends before a
    /// byte of an answer has arrived. A task of `drivers` drives the connection if the request has
    /// a body or asks for an upgrade.
    pub(super) async fn send(
        &mut self,
        mut request: Request<SentBody>,
        drivers: &TaskTracker,
        target_label: &TargetLabel<'_>,
        mut moves: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<Response<Incoming>, Box<SendError>> {
        let before = self.traffic.bytes_read();
        if let Either::Left(body) = request.body_mut() {
            body.queue_in(self.traffic.upload_queue.clone());
        }
        let traffic = self.traffic.clone();
        traffic.begin_request();
        let interim = traffic.clone();
        hyper::ext::on_informational(&mut request, move |_| interim.record_interim());
        let mut too_many = pin!(traffic.too_many_interim());
        let must_go_on = !request.body().is_end_stream() || request.headers().contains_key(UPGRADE);
        if must_go_on
            && let Driver::Caller(driven) = &mut self.driver
            && let Some(driven) = driven.take()
        {
            self.driver = Driver::Task(AbortOnDropHandle::new(drivers.spawn(driven)));
        }
        let mut can_move = true;
        let mut sending = pin!(self.sender.try_send_request(request));
        let sent = loop {
            tokio::select! {
                biased;
                sent = poll_fn(|cx| {
                    // The response, or the reason why there is none, comes from the connection.
                    let _ended = self.poll_driver(cx);
                    sending.as_mut().poll(cx)
                }) => break sent,
                () = too_many.as_mut() => {
                    let text = format!("{target_label}: the target sent more than {INTERIM_MAX} interim answers");
                    let failure = ProxyError::new(Outcome::TargetBadResponse, text);
                    return Err(Box::new(SendError {
                        failure,
                        resend: Resend::Nothing,
                        has_answer: true,
                    }));
                }
                () = &mut moves, if can_move => {
                    if self.traffic.bytes_read() == before {
                        // hyper returns a request of which it has written nothing when its
                        // connection is dropped.
                        self.driver = Driver::Caller(None);
                        let mut error = SendError::moved(target_label);
                        let unsent = sending.await.err().and_then(|mut error| error.take_message());
                        error.resend = Resend::of_unsent(unsent);
                        return Err(error);
                    }
                    can_move = false;
                }
            }
        };
        sent.map_err(|mut error| {
            let resend = Resend::of_unsent(error.take_message());
            let bad = Outcome::TargetBadResponse;
            let mut failure = ProxyError::from_stream(&error.into_error(), target_label, bad);
            if failure.outcome == bad && self.traffic.is_alert() {
                failure.text.push_str(HTTPS_HINT);
            }
            Box::new(SendError {
                failure,
                resend,
                has_answer: self.traffic.bytes_read() != before,
            })
        })
    }

    /// Keeps the connection after the response until the body of its request has ended.
    pub(crate) fn outlast(&mut self, handle: UploadHandle) -> Arc<Upload> {
        let upload = handle.upload.clone();
        self.upload = Some(handle);
        upload
    }

    /// Aborts the connection. `record` is dropped when nothing drives it any longer.
    pub(crate) fn abort(self, drivers: &TaskTracker, record: impl Send + 'static) {
        match self.driver {
            Driver::Caller(driven) => drop((driven, record)),
            Driver::Task(driver) => {
                driver.abort();
                drivers.spawn(async move {
                    let _aborted = driver.await;
                    drop(record);
                });
            }
        }
    }

    /// Closes the connection gracefully, so that the target receives an end and not a reset. A request
    /// body that is still under way goes on, until it ends, the caller is gone, or others wait for the
    /// memory of what the target has sent behind its response, however slowly the target reads. The
    /// connection is aborted if the target does not close within [`CLOSE_LIMIT`] after that.
    pub(crate) fn close(self, drivers: &TaskTracker) {
        let Self {
            sender,
            driver,
            upload,
            traffic,
            carrier,
        } = self;
        drop(sender);
        let mut driver = match driver {
            Driver::Task(driver) => driver,
            Driver::Caller(None) => return,
            Driver::Caller(Some(driven)) => {
                drivers.spawn(async move { drop(timeout(CLOSE_LIMIT, driven).await) });
                return;
            }
        };
        drivers.spawn(async move {
            let Some(UploadHandle { upload, ended }) = upload else {
                return drop(timeout(CLOSE_LIMIT, driver).await);
            };
            let is_blocked = || traffic.upload_queue.is_blocked();
            let uploaded = async {
                tokio::select! {
                    driven = &mut driver => Some(driven),
                    () = upload.idle(is_blocked) => None,
                    _dropped = ended => {
                        let queue = &traffic.upload_queue;
                        let mut progress = (queue.written(), Instant::now());
                        loop {
                            let driven = timeout(CLOSE_LIMIT, &mut driver).await;
                            if queue.written() != progress.0 {
                                progress = (queue.written(), Instant::now());
                            }
                            let stalled = progress.1.elapsed();
                            match driven {
                                Ok(driven) => break Some(driven),
                                // The end of the body waits for the target.
                                Err(_elapsed) if is_blocked() && stalled < STALLED_END_LIMIT => {}
                                Err(_elapsed) => break None,
                            }
                        }
                    }
                }
            };
            let driven = tokio::select! {
                driven = uploaded => driven,
                // hyper reads nothing behind a response while the body of the request goes on.
                () = poll_fn(|cx| carrier.watch.poll_stalled(cx)) => {
                    upload.cut();
                    None
                }
            };
            if let Some(Ok(Some(error))) = driven
                && find_cause(&error).is_some_and(StreamCut::is_session_lost)
            {
                upload.cut();
            }
            drop(driver);
            upload.close();
        });
    }
}

/// Returns the hyper builder with the settings for connections to targets.
pub(crate) fn client() -> Builder {
    let mut builder = Builder::new();
    builder
        .preserve_header_case(true)
        .max_headers(ANSWER_FIELDS_MAX)
        .max_header_size(ANSWER_HEAD_MAX_BYTES)
        .max_buf_size(ANSWER_HEAD_MAX_BYTES);
    builder
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::{pending, ready};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::sync::oneshot;
    use tokio::task::yield_now;
    use tunnel_proto::transport::{Session as _, Stream};
    use tunnel_proto::wire::code::ResetCode;

    use super::*;
    use crate::ingress::http::tests::fixture::{Agent, Fixture, head};
    use crate::testing::{WAIT_TIMEOUT, header, within};

    /// Its connection has not run, as when the caller's task has used up its budget.
    #[tokio::test]
    async fn request_that_moves_before_it_was_written_is_returned() {
        let (fixture, agent) = Fixture::with_agent();
        let (mut upstream, _target) = start(&fixture, &agent).await;
        let driven = driven(&mut upstream);
        upstream.driver = Driver::Caller(Some(Box::pin(async {
            yield_now().await;
            driven.await
        })));
        let moves = pin!(ready(()));
        let sent = upstream
            .send(request(), &fixture.ingress.drivers, &"worker-1", moves)
            .await;
        let resend = sent.err().unwrap().resend;
        assert!(matches!(&resend, Resend::Request(request) if request.uri() == "/a"));
    }

    #[tokio::test]
    async fn pieces_of_a_body_are_smaller_than_the_largest_head() {
        const BODY_BYTES: usize = 2 << 20;
        let (fixture, agent) = Fixture::with_agent();
        agent.near.script().next_window = Some(2 * BODY_BYTES);
        let (mut upstream, mut target) = start(&fixture, &agent).await;
        let answers = async {
            head(&mut target).await;
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
            target.write_all(answer.as_bytes()).await.unwrap();
            target.write_all(&vec![7; BODY_BYTES]).await.unwrap();
        };
        let moves = pin!(pending());
        let sends = upstream.send(request(), &fixture.ingress.drivers, &"worker-1", moves);
        let (sent, ()) = tokio::join!(sends, answers);
        let mut body = sent.ok().unwrap().into_body();
        let mut pieces = Vec::new();
        while let Some(frame) = within(poll_fn(|cx| {
            let _ended = upstream.poll_driver(cx);
            Pin::new(&mut body).poll_frame(cx)
        }))
        .await
        {
            pieces.push(frame.unwrap().into_data().unwrap().len());
        }
        assert_eq!(pieces.iter().sum::<usize>(), BODY_BYTES);
        assert_eq!(pieces.iter().max(), Some(&65_535), "{pieces:?}");
    }

    /// The target has sent more than its response, and reads nothing of the body, or of its end.
    #[tokio::test(start_paused = true)]
    async fn upload_behind_a_response_ends_when_others_wait_for_the_memory_of_its_stream() {
        for has_body_ended in [false, true] {
            let (fixture, agent) = Fixture::with_agent();
            let drivers = &fixture.ingress.drivers;
            let (mut upstream, mut target) = start(&fixture, &agent).await;
            let driven = driven(&mut upstream);
            // hyper reads nothing then.
            let task = drivers.spawn(async {
                let _unread = driven;
                pending::<Option<hyper::Error>>().await
            });
            upstream.driver = Driver::Task(AbortOnDropHandle::new(task));
            let blocked = Poll::<Result<usize, Infallible>>::Pending;
            upstream.traffic.upload_queue.record_write(&blocked);
            let (body, ended) = oneshot::channel::<Infallible>();
            let body = Some(body).filter(|_| !has_body_ended);
            let upload = Arc::default();
            upstream.outlast(UploadHandle { upload, ended });
            let watch = upstream.watch().clone();
            upstream.close(drivers);
            let mut byte = [0];
            let mut end = pin!(target.read(&mut byte));
            assert!(timeout(CLOSE_LIMIT * 10, end.as_mut()).await.is_err());
            watch.end_stalled();
            let error = timeout(CLOSE_LIMIT, end).await.unwrap().unwrap_err();
            let cut = find_cause::<StreamCut>(&error);
            assert_eq!(cut, Some(&StreamCut::Reset(ResetCode::ReaderStalled)));
            drop(body);
        }
    }

    /// Returns a connection over a new stream, and the target's end of the stream.
    async fn start(fixture: &Fixture, agent: &Agent) -> (Upstream, Stream) {
        let stream = agent.near.open(&header(), WAIT_TIMEOUT).await.unwrap();
        let carrier = Carrier {
            via: None,
            bytes: stream.bytes(),
            watch: stream.watch(),
            audit_id: None,
        };
        let (conn, ingress) = (TargetConn::Stream(stream), &fixture.ingress);
        let started = Upstream::start(conn, carrier, ingress, &"worker-1").await;
        (started.unwrap(), agent.accepts().await)
    }

    /// Takes what drives a new connection.
    fn driven(upstream: &mut Upstream) -> Driven {
        let Driver::Caller(driven) = &mut upstream.driver else {
            unreachable!("a new connection has no task")
        };
        driven.take().unwrap()
    }

    fn request() -> Request<SentBody> {
        let request = Request::get("/a").header("Host", "worker-1:9100");
        request.body(Either::Right(Empty::new())).unwrap()
    }
}
