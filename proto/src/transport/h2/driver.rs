//! The driver is the only task that uses h2. It moves the bytes of streams, sends and answers PING,
//! and closes a session without losing sent data.
//!
//! ```text
//! Running      --close()-------------------------> Flushing
//! Flushing     --sent halves written, or 1 s-----> SendingClose
//! SendingClose --close message written, or 1 s---> ShuttingDown
//! ShuttingDown --FIN received, or 1 s------------> end
//! Running      --peer's close message------------> ShuttingDown
//! Running      --connection lost-----------------> end
//! Running      --GOAWAY--------------------------> Refused
//! Refused      --peer's close message, or 1 s----> ShuttingDown
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, Sleep, interval, sleep};
use tracing::debug;

use super::io::ConnIo;
use super::offers::{Offers, is_offer};
use super::path_meter::PathMeter;
use super::pump::{Input, Pump};
use super::session::{Commands, SessionShared, network};
use super::stream::{H2Stream, Output, StreamShared};
use super::wakeups::Wakeups;
use crate::tls;
use crate::transport::flow::SessionFlow;
use crate::transport::{CloseReason, ClosedBy, SessionSettings};
use crate::wire::close::SessionClose;
use crate::wire::code::CloseCode;

/// Time limit for each step of a close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for each step of a close when the peer is considered dead.
const CLOSE_TIMEOUT_DEAD: Duration = Duration::from_millis(50);
/// Rounds of h2 and streams in one poll, before other tasks run.
const ROUNDS_PER_POLL: usize = 8;

/// Either role of h2. The server's end of a session is h2's client, because it opens most streams.
pub(super) enum Connection<S> {
    Client(h2::client::Connection<ConnIo<S>, Bytes>),
    Server(h2::server::Connection<ConnIo<S>, Bytes>),
}

type Accepted = (http::Request<RecvStream>, h2::server::SendResponse<Bytes>);

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Polls the connection. Returns a request of the peer, or the end of the connection.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Accepted>, h2::Error>> {
        match self {
            Self::Client(client) => Pin::new(client).poll(cx).map_ok(|()| None),
            Self::Server(server) => server.poll_accept(cx).map(Option::transpose),
        }
    }

    fn set_window(&mut self, bytes: u64) {
        let bytes = window_size(bytes);
        match self {
            Self::Client(client) => client.set_target_window_size(bytes),
            Self::Server(server) => server.set_target_window_size(bytes),
        }
    }

    /// Sets the window of all streams, also of open ones.
    ///
    /// # Errors
    /// Until the peer has acknowledged the settings before.
    fn set_stream_window(&mut self, bytes: u32) -> Result<(), h2::Error> {
        match self {
            Self::Client(client) => client.set_initial_window_size(bytes),
            Self::Server(server) => server.set_initial_window_size(bytes),
        }
    }

    pub(super) fn ping_pong(&mut self) -> Option<PingPong> {
        match self {
            Self::Client(client) => client.ping_pong(),
            Self::Server(server) => server.ping_pong(),
        }
    }
}

/// The largest window of h2 (RFC 9113, section 6.9.1).
pub(super) const WINDOW_SIZE_MAX: u32 = (1 << 31) - 1;

fn window_size(bytes: u64) -> u32 {
    u32::try_from(bytes)
        .unwrap_or(WINDOW_SIZE_MAX)
        .min(WINDOW_SIZE_MAX)
}

/// A stream window of which it is not known that the peer uses it.
struct WindowUpdate {
    bytes: u32,
    is_sent: bool,
}

pub(super) struct Driver<S> {
    connection: Connection<S>,
    shared: Arc<SessionShared>,
    pumps: FuturesUnordered<Pump>,
    incoming: mpsc::Sender<H2Stream>,
    flow: Arc<SessionFlow>,
    /// The offers of the server's end.
    offers: Offers,
    /// Whether the agent's end has yet to request offers.
    must_request_offers: bool,
    pings: Option<PingPong>,
    ping_sent_at: Option<Instant>,
    ticks: Interval,
    keep_alive: bool,
    /// The number of bytes received, and the time when it last increased.
    last_received: (u64, Instant),
    idle_timeout: Duration,
    /// The stream that carries the close message.
    close_stream: Option<Arc<StreamShared>>,
    /// Polled before the other pumps, because the peer resets its streams right after the message.
    close_pump: Option<Pump>,
    close_message: BytesMut,
    state: DriverState,
    close_timeout: Duration,
    wakeups: Arc<Wakeups>,
    path_meter: PathMeter,
    /// The stream window that was set last.
    stream_window: u32,
    window_update: Option<WindowUpdate>,
}

enum DriverState {
    Running,
    /// The peer accepts no more streams. It may still send a close message.
    Refused(h2::Error, Pin<Box<Sleep>>),
    Flushing(CloseCode, String, Pin<Box<Sleep>>),
    SendingClose(Pin<Box<Sleep>>),
    ShuttingDown(Pin<Box<Sleep>>),
}

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    pub(super) fn new(
        mut connection: Connection<S>,
        shared: Arc<SessionShared>,
        flow: Arc<SessionFlow>,
        incoming: mpsc::Sender<H2Stream>,
        settings: &SessionSettings,
    ) -> Self {
        let every = match settings.keep_alive {
            // +- 20 %, so that agents that start together do not send in step.
            Some(every) => every.mul_f64(rand::random_range(0.8..1.2)),
            None => settings.idle_timeout / 4,
        };
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        shared.conn_state.defer_eof();
        Self {
            pings: connection.ping_pong(),
            connection,
            shared,
            pumps: FuturesUnordered::new(),
            incoming,
            flow,
            offers: Offers::new(),
            must_request_offers: false,
            ping_sent_at: None,
            ticks,
            keep_alive: settings.keep_alive.is_some(),
            last_received: (0, Instant::now()),
            idle_timeout: settings.idle_timeout,
            close_stream: None,
            close_pump: None,
            close_message: BytesMut::new(),
            state: DriverState::Running,
            close_timeout: CLOSE_TIMEOUT,
            wakeups: Arc::default(),
            path_meter: PathMeter::default(),
            stream_window: settings.stream_window,
            window_update: None,
        }
    }

    /// Sets the close stream. For the server's end, which opens that stream.
    pub(super) fn with_close_stream(mut self, close_stream: Option<Arc<StreamShared>>) -> Self {
        self.close_stream = close_stream;
        self
    }

    fn drive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shared.conn_state.begin_poll();
        if self.shared.conn_state.has_eof() {
            self.drain(cx);
            self.shared.conn_state.release_eof();
        }
        for _ in 0..ROUNDS_PER_POLL {
            self.wakeups.begin_round();
            let commands = self.shared.take_commands(cx.waker());
            self.take(commands);
            let queued = self.shared.queued.take();
            loop {
                match self.connection.poll(cx) {
                    Poll::Ready(Ok(Some((request, respond)))) => {
                        self.accept_request(request, respond)
                    }
                    Poll::Ready(Ok(None)) => return self.handle_end(None, cx),
                    Poll::Ready(Err(error)) => return self.handle_end(Some(&error), cx),
                    Poll::Pending => break,
                }
            }
            if self.shared.conn_state.is_flushed() {
                queued.iter().for_each(|stream| stream.flushed());
                self.shared.bulk_queue.begin_round();
            } else {
                self.shared.queued.put_back(queued);
            }
            if let Some(pump) = &mut self.close_pump
                && Pin::new(pump).poll(cx).is_ready()
            {
                self.close_pump = None;
            }
            self.read_close_message(cx);
            self.accept_answered_offers(cx);
            while let Poll::Ready(Some(())) = self.pumps.poll_next_unpin(cx) {}
            self.exchange_offers(cx);
            self.exchange_pings(cx);
            self.update_stream_window(cx);
            if self.shared.conn_state.is_flushed() && self.shared.bulk_queue.is_waiting() {
                cx.waker().wake_by_ref();
            }
            if self.poll_close(cx).is_ready() {
                return Poll::Ready(());
            }
            let is_pending = self.wakeups.is_pending();
            // Further rounds would read nothing. The readers of what was read come first.
            let must_yield = is_pending && self.shared.conn_state.is_read_limited();
            if must_yield || (!is_pending && self.shared.queued.is_empty()) {
                break;
            }
        }
        Poll::Pending
    }

    fn take(&mut self, commands: Commands) {
        if !matches!(self.state, DriverState::ShuttingDown(_)) {
            for pump in commands.pumps {
                self.start_pump(pump);
            }
        }
        if let Some(windows) = commands.windows {
            self.connection.set_window(windows.connection);
            let bytes = window_size(windows.stream);
            if bytes != self.stream_window {
                self.stream_window = bytes;
                self.window_update = Some(WindowUpdate {
                    bytes,
                    is_sent: false,
                });
            }
        }
        if let Some(count) = commands.stream_limit {
            self.offers.set_limit(count);
        }
        self.must_request_offers |= commands.request_offers;
        if commands.probe {
            self.send_ping();
        }
        if let Some((code, reason)) = commands.close
            && matches!(self.state, DriverState::Running | DriverState::Refused(..))
        {
            // A dead peer acknowledges nothing. The driver sends the close message and does not
            // wait.
            if code == CloseCode::Dead {
                self.close_timeout = CLOSE_TIMEOUT_DEAD;
            }
            self.state = DriverState::Flushing(code, reason, Box::pin(sleep(self.close_timeout)));
        }
    }

    fn start_pump(&mut self, pump: Pump) {
        match &self.close_stream {
            Some(close_stream) if pump.carries(close_stream) => self.close_pump = Some(pump),
            Some(_) | None => self.pumps.push(pump),
        }
    }

    /// Accepts a request of the server's end: a stream, an offer or the close stream.
    fn accept_request(
        &mut self,
        request: http::Request<RecvStream>,
        mut respond: h2::server::SendResponse<Bytes>,
    ) {
        if let Some(offers) = &self.shared.offers
            && is_offer(&request)
        {
            return offers.push(respond, request.into_body());
        }
        let is_session = request.uri().path() == "/session";
        if is_session && self.close_stream.is_some() {
            return respond.send_reset(Reason::PROTOCOL_ERROR);
        }
        let Ok(send) = respond.send_response(http::Response::new(()), false) else {
            return;
        };
        let (stream, pump) = self.stream(send, request.into_body());
        if is_session {
            stream.read_monitor().finish();
            self.close_stream = Some(stream);
            self.close_pump = Some(pump);
            self.shared.established.cancel();
        } else {
            self.pumps.push(pump);
            self.deliver(stream);
        }
    }

    /// Accepts the streams that the agent's end opened by answering offers.
    fn accept_answered_offers(&mut self, cx: &mut Context<'_>) {
        while let Some(((send, body), permit)) = self.offers.take_answered(cx) {
            let (stream, pump) = self.stream(send, body);
            self.pumps.push(pump.with_permit(permit));
            self.deliver(stream);
        }
    }

    /// Creates a stream that the peer opened.
    fn stream(&self, send: SendStream<Bytes>, body: RecvStream) -> (Arc<StreamShared>, Pump) {
        let shared = &self.shared;
        let stream = StreamShared::new(
            BytesMut::new(),
            self.flow.read_monitor(),
            shared.unflushed_halves.clone(),
        );
        let input = Input::Body(body);
        let (queued, bulk_queue) = (shared.queued.clone(), shared.bulk_queue.clone());
        let pump = Pump::new(stream.clone(), send, input, queued, bulk_queue);
        (stream, pump)
    }

    /// Queues a stream for [`accept`](crate::transport::Session::accept), or resets it if the queue
    /// is full.
    fn deliver(&self, stream: Arc<StreamShared>) {
        if let Err(rejected) = self.incoming.try_send(H2Stream(stream)) {
            debug!("stream dropped: {rejected}");
            let mut stream = rejected.into_inner();
            crate::transport::RawStream::reset(&mut stream, crate::wire::code::ResetCode::Dropped);
        }
    }

    /// Offers streams at the server's end. Requests offers at the agent's end.
    fn exchange_offers(&mut self, cx: &mut Context<'_>) {
        match (&mut self.connection, &self.state) {
            (Connection::Client(_), DriverState::Running) => {
                self.offers.replenish(&self.shared.opener, cx);
            }
            (Connection::Server(server), DriverState::Running) => {
                // h2 returns an error until the peer has acknowledged the initial settings.
                if self.must_request_offers && server.enable_connect_protocol().is_ok() {
                    self.must_request_offers = false;
                    // The next poll of h2 sends the setting.
                    cx.waker().wake_by_ref();
                }
            }
            (Connection::Client(_) | Connection::Server(_), _closing) => {}
        }
    }

    fn send_ping(&mut self) {
        if self.ping_sent_at.is_none()
            && let Some(pings) = &mut self.pings
            && pings.send_ping(Ping::opaque()).is_ok()
        {
            self.ping_sent_at = Some(Instant::now());
        }
    }

    fn exchange_pings(&mut self, cx: &mut Context<'_>) {
        while self.ticks.poll_tick(cx).is_ready() {
            let received = self.shared.conn_state.received();
            if received != self.last_received.0 {
                self.last_received = (received, Instant::now());
            }
            if self.keep_alive {
                self.send_ping();
            }
        }
        let answered = self
            .pings
            .as_mut()
            .is_some_and(|pings| matches!(pings.poll_pong(cx), Poll::Ready(Ok(_))));
        if answered && let Some(ping_sent_at) = self.ping_sent_at.take() {
            self.shared.acknowledged.fetch_add(1, Ordering::Relaxed);
            let rtt = ping_sent_at.elapsed();
            self.path_meter.record_rtt(rtt);
            let now = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX);
            let smooth = match self.shared.rtt_micros.load(Ordering::Relaxed) {
                0 => now,
                before => (before * 7 + now) / 8,
            };
            self.shared.rtt_micros.store(smooth, Ordering::Relaxed);
        }
    }

    /// Measures the path while data arrives, and sends the stream window that follows.
    fn update_stream_window(&mut self, cx: &Context<'_>) {
        let received = self.shared.conn_state.received();
        if self.path_meter.must_ping(received) {
            self.send_ping();
        }
        if let Some(bytes) = self.path_meter.bytes_per_rtt(received) {
            self.flow.widen(bytes);
        }
        let Some(update) = &mut self.window_update else {
            return;
        };
        // h2 accepts a value after the peer has acknowledged the settings before. So a value that
        // h2 accepts twice is in use.
        if self.connection.set_stream_window(update.bytes).is_err() {
            return;
        }
        // The next poll of h2 sends the setting.
        cx.waker().wake_by_ref();
        if update.is_sent {
            self.flow.stream_window_acknowledged(update.bytes.into());
            self.window_update = None;
        } else {
            update.is_sent = true;
        }
    }

    /// Takes all received data out of h2.
    fn drain(&mut self, cx: &mut Context<'_>) {
        self.accept_answered_offers(cx);
        for pump in self.pumps.iter_mut().chain(&mut self.close_pump) {
            pump.drain(cx);
        }
    }

    /// Handles the peer's close message, if it has arrived.
    fn read_close_message(&mut self, cx: &mut Context<'_>) {
        let Some(close_stream) = &self.close_stream else {
            return;
        };
        close_stream.lock().drain_into(&mut self.close_message);
        if let Some(close) = SessionClose::take(&mut self.close_message) {
            self.shared.set_closed(CloseReason {
                by: ClosedBy::Peer,
                code: close.code,
                reason: close.reason,
            });
            // Data that arrived before the close message counts. Polling the set stops early, so
            // poll each pump.
            self.drain(cx);
            self.finish();
        }
    }

    /// Performs the steps of a close.
    fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.state {
                DriverState::Running => {
                    if let Some(refused) = self.shared.refused(cx) {
                        self.state = DriverState::Refused(refused, Box::pin(sleep(CLOSE_TIMEOUT)));
                        continue;
                    }
                    let silent = self.last_received.1.elapsed() >= self.idle_timeout;
                    if silent && self.shared.conn_state.received() == self.last_received.0 {
                        self.shared
                            .set_closed(network(CloseCode::Dead, "timed out"));
                        return Poll::Ready(());
                    }
                    return Poll::Pending;
                }
                DriverState::Refused(error, limit) => {
                    ready!(limit.as_mut().poll(cx));
                    let reason = network(CloseCode::Protocol, &error.to_string());
                    self.shared.set_closed(reason);
                    self.finish();
                }
                DriverState::Flushing(code, reason, limit) => {
                    let waiting = self.shared.unflushed_halves.load(Ordering::Acquire) > 0;
                    if waiting && limit.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    let (code, reason) = (*code, std::mem::take(reason));
                    self.send_close(code, reason);
                }
                DriverState::SendingClose(limit) => {
                    let is_sent = self.close_stream.as_ref().is_none_or(|close_stream| {
                        matches!(close_stream.lock().output, Output::Flushed | Output::Cut(_))
                    });
                    if !is_sent && limit.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    self.finish();
                }
                // `drive` waits for the end of the connection.
                DriverState::ShuttingDown(limit) => return limit.as_mut().poll(cx),
            }
        }
    }

    fn send_close(&mut self, code: CloseCode, reason: String) {
        let close = SessionClose { code, reason };
        if let Some(close_stream) = &self.close_stream {
            let mut state = close_stream.lock();
            close.encode(&mut state.write_buffer);
            close_stream.set_output(&mut state, Output::Finishing);
            state.wake_pump();
        }
        self.shared.set_closed(CloseReason {
            by: ClosedBy::Local,
            code: close.code,
            reason: close.reason,
        });
        self.state = DriverState::SendingClose(Box::pin(sleep(self.close_timeout)));
    }

    /// Sends GOAWAY, close_notify and FIN. Streams that have not ended are cut.
    fn finish(&mut self) {
        if matches!(self.state, DriverState::ShuttingDown(_)) {
            return;
        }
        self.shared.end_opening();
        self.offers.clear();
        self.close_stream = None;
        self.close_pump = None;
        self.pumps.clear();
        if let Connection::Server(server) = &mut self.connection {
            server.abrupt_shutdown(Reason::NO_ERROR);
        }
        self.state = DriverState::ShuttingDown(Box::pin(sleep(self.close_timeout * 2)));
    }

    fn handle_end(&mut self, error: Option<&h2::Error>, cx: &mut Context<'_>) -> Poll<()> {
        // Data that arrived together with the end counts, and may include the close message.
        self.drain(cx);
        self.read_close_message(cx);
        let verdict = tls::alert_meaning(self.shared.conn_state.alert());
        let reason = match error {
            None => network(CloseCode::Dead, "connection was closed without a reason"),
            Some(error) => match error.get_io() {
                // The cause is a TLS alert, or bytes that are not TLS.
                Some(io) if io.kind() == std::io::ErrorKind::InvalidData => {
                    network(CloseCode::Protocol, &io.to_string())
                }
                Some(io) => network(CloseCode::Dead, &io.to_string()),
                None => network(CloseCode::Protocol, &error.to_string()),
            },
        };
        let reason = verdict.map_or(reason, |(code, reason)| network(code, reason));
        self.shared.set_closed(reason);
        Poll::Ready(())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for Driver<S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let wakeups = this.wakeups.clone();
        wakeups.begin_poll(cx.waker());
        let driven = this.drive(&mut Context::from_waker(&Waker::from(wakeups.clone())));
        wakeups.end_poll();
        driven
    }
}

impl<S> Drop for Driver<S> {
    fn drop(&mut self) {
        self.close_pump = None;
        self.pumps.clear();
        self.offers.clear();
        self.shared.terminate();
    }
}
