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
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use h2::{Ping, PingPong, Reason, RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, Sleep, interval_at, sleep};
use tracing::debug;

use super::connection::{Connection, window_size};
use super::offers::{Offers, is_offer};
use super::path_meter::PathMeter;
use super::pump::{Input, Pump};
use super::session::{Commands, SessionShared};
use super::stream::{H2Stream, StreamShared};
use crate::transport::SessionSettings;
use crate::transport::flow::SessionFlow;
use crate::wire::close::SessionMessage;
use crate::wire::code::CloseCode;
use tunnel_process::timers::{coalesced_period, current_slot};
use tunnel_process::wakeups::Wakeups;

mod close;

/// Time limit for each step of a close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for each step of a close when the peer is considered dead.
const CLOSE_TIMEOUT_DEAD: Duration = Duration::from_millis(50);
/// Rounds of h2 and streams in one poll, before other tasks run.
const ROUNDS_PER_POLL: usize = 8;

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
    /// A stream window that h2 has not accepted yet.
    window_update: Option<u32>,
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
        let mut ticks = interval_at(current_slot(), coalesced_period(every));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
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
                self.shared.conn_state.begin_h2_poll();
                match self.connection.poll(cx) {
                    Poll::Ready(Ok(Some((request, respond)))) => {
                        self.accept_request(request, respond)
                    }
                    Poll::Ready(Ok(None)) => return self.handle_end(None, cx),
                    Poll::Ready(Err(error)) => return self.handle_end(Some(&error), cx),
                    Poll::Pending if self.shared.conn_state.keep_writes() => {}
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
            self.read_close_stream(cx);
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
                self.window_update = Some(bytes);
            }
        }
        if commands.report_shortage {
            self.report(&SessionMessage::Short);
        }
        if commands.report_waiting {
            self.report(&SessionMessage::Waiting);
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
            stream.read_monitor().exclude();
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
            self.flow.accept(),
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
            crate::transport::RawStream::cut_now(
                &mut stream,
                crate::wire::code::ResetCode::Dropped,
            );
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
        // h2 accepts a value after the peer has acknowledged the settings before.
        if let Some(bytes) = self.window_update
            && self.connection.set_stream_window(bytes).is_ok()
        {
            self.window_update = None;
            // The next poll of h2 sends the setting.
            cx.waker().wake_by_ref();
        }
    }

    /// Takes all received data out of h2.
    fn drain(&mut self, cx: &mut Context<'_>) {
        self.accept_answered_offers(cx);
        for pump in self.pumps.iter_mut().chain(&mut self.close_pump) {
            pump.drain(cx);
        }
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
