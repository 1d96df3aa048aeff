//! A session over one h2 connection, as its users see it. The driver does the work.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use h2::SendStream;
use h2::client::SendRequest;
use http::{Request, Response};
use parking_lot::{Mutex, MutexGuard};
use rustls_pki_types::CertificateDer;
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::bulk_queue::BulkQueue;
use super::io::ConnState;
use super::offers::ReceivedOffers;
use super::pump::{Input, Pump, Queued};
use super::stream::{H2Stream, StreamShared};
use crate::identity::PeerIdentity;
use crate::transport::flow::{ReceiveWindows, SessionFlow};
use crate::transport::{
    CloseReason, IncomingStream, ReadMonitor, Session, SessionError, SessionStats, Stream, Traffic,
    TransportKind, encode_header, open_monitor,
};
use crate::wire::code::CloseCode;
use crate::wire::header::StreamHeader;

/// The state that the session's users and its driver share.
#[derive(Debug)]
pub(super) struct SessionShared {
    commands: Mutex<Commands>,
    pub(super) conn_state: Arc<ConnState>,
    pub(super) queued: Arc<Queued>,
    pub(super) bulk_queue: Arc<BulkQueue>,
    /// Number of halves that were shut down and are not written yet.
    pub(super) unflushed_halves: Arc<AtomicUsize>,
    pub(super) acknowledged: AtomicU64,
    pub(super) rtt_micros: AtomicU64,
    pub(super) closed: watch::Sender<Option<CloseReason>>,
    /// Canceled when the peer has opened the close stream.
    pub(super) established: CancellationToken,
    /// Canceled when the driver and its connection have ended.
    pub(super) terminated: CancellationToken,
    /// Opens streams. Set only at the server's end, and removed when the session closes.
    pub(super) opener: Mutex<Option<SendRequest<Bytes>>>,
    /// Set only at the agent's end, which opens streams by answering offers.
    pub(super) offers: Option<ReceivedOffers>,
}

/// Commands of users to the driver.
#[derive(Debug, Default)]
pub(super) struct Commands {
    pub(super) pumps: Vec<Pump>,
    pub(super) probe: bool,
    pub(super) close: Option<(CloseCode, String)>,
    pub(super) windows: Option<ReceiveWindows>,
    pub(super) report_shortage: bool,
    pub(super) report_waiting: bool,
    /// How many streams the peer may have open at once by answering offers.
    pub(super) stream_limit: Option<u32>,
    /// Requests offers from the peer.
    pub(super) request_offers: bool,
    /// The driver has ended and accepts no more commands.
    pub(super) terminated: bool,
    driver: Option<Waker>,
}

impl SessionShared {
    pub(super) fn new(conn_state: Arc<ConnState>, opener: Option<SendRequest<Bytes>>) -> Arc<Self> {
        Arc::new(Self {
            commands: Mutex::default(),
            queued: Arc::default(),
            bulk_queue: Arc::new(BulkQueue::new(conn_state.clone())),
            conn_state,
            unflushed_halves: Arc::default(),
            acknowledged: AtomicU64::new(0),
            rtt_micros: AtomicU64::new(0),
            closed: watch::Sender::new(None),
            established: CancellationToken::new(),
            terminated: CancellationToken::new(),
            offers: opener.is_none().then(ReceivedOffers::new),
            opener: Mutex::new(opener),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock()
    }

    /// Adds a command for the driver and wakes the driver.
    pub(super) fn send_command(&self, write: impl FnOnce(&mut Commands)) {
        let mut commands = self.lock();
        if commands.terminated {
            return;
        }
        write(&mut commands);
        if let Some(driver) = commands.driver.take() {
            driver.wake();
        }
    }

    /// Takes the commands since the last call. Later commands wake `driver`.
    pub(super) fn take_commands(&self, driver: &Waker) -> Commands {
        let mut commands = self.lock();
        let taken = std::mem::take(&mut *commands);
        commands.terminated = taken.terminated;
        commands.driver = Some(driver.clone());
        taken
    }

    /// Rejects further commands and drops the pending ones.
    pub(super) fn terminate(&self) {
        let mut commands = self.lock();
        commands.terminated = true;
        let discarded = std::mem::take(&mut commands.pumps);
        drop(commands);
        drop(discarded);
        self.set_closed(connection_lost());
        self.end_opening();
        self.terminated.cancel();
    }

    /// Sets the reason for the end of the session, unless it is already set.
    pub(super) fn set_closed(&self, reason: CloseReason) {
        self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            closed.get_or_insert(reason);
            first
        });
    }

    /// Waits until the server has opened the close stream. Only then has the server accepted the
    /// agent's certificate (RFC 8446, section 4.4.2.4).
    pub(super) async fn established(&self) -> Result<(), CloseReason> {
        tokio::select! {
            biased;
            () = self.established.cancelled() => Ok(()),
            reason = self.closed() => Err(reason),
        }
    }

    /// Waits for the reason for the end of the session.
    async fn closed(&self) -> CloseReason {
        let mut closed = self.closed.subscribe();
        let ended = closed
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|reason| reason.clone());
        ended.unwrap_or_else(connection_lost)
    }

    /// Returns the error if no more streams can be opened: the peer sent GOAWAY, or the stream ids
    /// are used up.
    pub(super) fn refused(&self, cx: &mut Context<'_>) -> Option<h2::Error> {
        let mut opener = self.opener.lock();
        match opener.as_mut()?.poll_ready(cx) {
            Poll::Ready(Err(error)) => Some(error),
            Poll::Ready(Ok(())) | Poll::Pending => None,
        }
    }

    /// Makes every running and later [`SessionShared::open`] fail.
    pub(super) fn end_opening(&self) {
        let opener = self.opener.lock().take();
        drop(opener);
        if let Some(offers) = &self.offers {
            offers.close();
        }
    }

    fn opener(&self) -> Option<SendRequest<Bytes>> {
        self.opener.lock().clone()
    }

    /// Opens a stream and sends `first` as its first bytes. Cancel-safe.
    async fn open(
        &self,
        first: BytesMut,
        read_monitor: Arc<ReadMonitor>,
    ) -> Result<Arc<StreamShared>, h2::Error> {
        let Some(offers) = &self.offers else {
            return self.request(STREAM_URI, first, read_monitor).await;
        };
        if offers.begin_request() {
            self.send_command(|commands| commands.request_offers = true);
        }
        while let Some((mut respond, body)) = offers.take().await {
            // An error means that the offer was withdrawn.
            if let Ok(send) = respond.send_response(Response::new(()), false) {
                return Ok(self.start(first, read_monitor, send, Input::Body(body)));
            }
        }
        Err(h2::Error::from(h2::Reason::REFUSED_STREAM))
    }

    /// Opens an h2 stream on `path` and sends `first` as its first bytes.
    pub(super) async fn request(
        &self,
        path: &'static str,
        first: BytesMut,
        read_monitor: Arc<ReadMonitor>,
    ) -> Result<Arc<StreamShared>, h2::Error> {
        let Some(opener) = self.opener() else {
            return Err(h2::Error::from(h2::Reason::REFUSED_STREAM));
        };
        let mut opener = opener.ready().await?;
        let mut request = Request::new(());
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = http::Uri::from_static(path);
        let (response, send) = opener.send_request(request, false)?;
        Ok(self.start(first, read_monitor, send, Input::Response(response)))
    }

    /// Starts a stream that this end has opened.
    fn start(
        &self,
        first: BytesMut,
        read_monitor: Arc<ReadMonitor>,
        send: SendStream<Bytes>,
        input: Input,
    ) -> Arc<StreamShared> {
        let stream = StreamShared::new(first, read_monitor, self.unflushed_halves.clone());
        let (queued, bulk_queue) = (self.queued.clone(), self.bulk_queue.clone());
        let mut pump = Some(Pump::new(stream.clone(), send, input, queued, bulk_queue));
        self.send_command(|commands| commands.pumps.extend(pump.take()));
        stream
    }
}

pub(super) struct H2Session {
    pub(super) shared: Arc<SessionShared>,
    pub(super) peer: PeerIdentity,
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) remote: SocketAddr,
    pub(super) traffic: Arc<Traffic>,
    pub(super) flow: Arc<SessionFlow>,
    pub(super) opening: AtomicBool,
    pub(super) incoming: AsyncMutex<mpsc::Receiver<H2Stream>>,
    pub(super) _driver: AbortOnDropHandle<()>,
}

tunnel_process::partial_debug!(H2Session { peer, remote });

/// URI of the requests that carry streams.
pub(super) const STREAM_URI: &str = "https://culvert/stream";
/// URI of the request that carries the close message.
pub(super) const CLOSE_STREAM_URI: &str = "https://culvert/session";

#[async_trait]
impl Session for H2Session {
    async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<Stream, SessionError> {
        let first = encode_header(&self.opening, header)?;
        if let Some(reason) = self.shared.closed.borrow().clone() {
            return Err(reason.into());
        }
        let read_monitor = open_monitor(&self.flow, header)?;
        match self.shared.open(first, read_monitor.clone()).await {
            Ok(stream) => Ok(Stream::opened(
                Box::new(H2Stream(stream)),
                self.traffic.clone(),
                read_monitor,
                reply_timeout,
            )),
            Err(_ended) => Err(self.closed().await.into()),
        }
    }

    async fn accept(&self) -> Result<IncomingStream, SessionError> {
        let mut incoming = self.incoming.lock().await;
        tokio::select! {
            biased;
            stream = incoming.recv() => match stream {
                Some(stream) => {
                    let read_monitor = stream.0.read_monitor();
                    Ok(IncomingStream::new(Box::new(stream), self.traffic.clone(), read_monitor))
                }
                None => Err(self.closed().await.into()),
            },
            reason = self.closed() => Err(reason.into()),
        }
    }

    fn probe(&self) {
        self.shared.send_command(|commands| commands.probe = true);
    }

    fn stats(&self) -> SessionStats {
        let (bytes_in, bytes_out, streams) = self.traffic.read();
        SessionStats {
            received: self.shared.conn_state.received(),
            received_at: self.shared.conn_state.received_at(),
            acknowledged: self.shared.acknowledged.load(Ordering::Relaxed),
            // TCP passes all bytes in order, so that a PING waits behind lost data.
            undelivered: None,
            rtt: Duration::from_micros(self.shared.rtt_micros.load(Ordering::Relaxed)),
            remote: self.remote,
            streams,
            bytes_in,
            bytes_out,
        }
    }

    fn stop_opening(&self) {
        self.opening.store(false, Ordering::Relaxed);
    }

    /// Limits the streams that the agent opens. At the agent's end this function has no effect,
    /// because the connection's initial settings determine the limit.
    fn set_max_concurrent_streams(&self, count: u32) {
        if count > 0 {
            self.flow.set_peer_opens();
        }
        self.shared
            .send_command(|commands| commands.stream_limit = Some(count));
    }

    fn has_room(&self) -> bool {
        self.flow.has_room()
    }

    async fn close(&self, code: CloseCode, reason: &str) {
        self.stop_opening();
        self.shared
            .send_command(|commands| commands.close = Some((code, reason.to_owned())));
        // The driver bounds the wait: one second each for the sent data, the close message and the
        // last bytes.
        self.shared.terminated.cancelled().await;
    }

    async fn closed(&self) -> CloseReason {
        self.shared.closed().await
    }

    fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    fn peer_chain(&self) -> Vec<CertificateDer<'static>> {
        self.chain.clone()
    }

    fn transport(&self) -> TransportKind {
        TransportKind::H2
    }
}

/// Returns the reason for a session that was lost without a close message.
fn connection_lost() -> CloseReason {
    CloseReason::network(CloseCode::Dead, "connection was lost")
}
