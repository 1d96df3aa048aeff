//! The one task that talks to h2: moves streams' bytes, answers and asks PING, and closes without losing what was sent.
//!
//! ```text
//! running --close()--> flushing --sent halves written, 1 s--> telling --reason written, 1 s--> leaving --FIN seen, 1 s--> over
//!    +------- reason of the peer, or connection lost --------------------------------------------^
//!    +------- GOAWAY --> refused --reason of the peer, 1 s---------------------------------------^
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use h2::{Ping, PingPong, Reason, RecvStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior, Sleep, interval, sleep};
use tracing::debug;

use super::io::Io;
use super::pump::{Input, Pump};
use super::session::{Hub, Mail};
use super::stream::{H2Stream, Output, Shared};
use crate::tls;
use crate::transport::flow::SessionFlow;
use crate::transport::{CloseReason, ClosedBy, SessionSettings};
use crate::wire::close::SessionClose;
use crate::wire::code::CloseCode;

/// How long each step of a close may take.
const CLOSE_STEP: Duration = Duration::from_secs(1);
/// The same when the peer is taken for dead.
const CLOSE_STEP_DEAD: Duration = Duration::from_millis(50);
/// Rounds of h2 and streams in one poll, before others get their turn.
const ROUNDS: usize = 8;

/// Either role of h2: the server's end of a session opens the streams, so it is h2's client.
pub(super) enum Connection<S> {
    Client(h2::client::Connection<Io<S>, Bytes>),
    Server(h2::server::Connection<Io<S>, Bytes>),
}

type Accepted = (http::Request<RecvStream>, h2::server::SendResponse<Bytes>);

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    /// Runs the connection; a request of the peer, or its end.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Accepted>, h2::Error>> {
        match self {
            Self::Client(client) => Pin::new(client).poll(cx).map_ok(|()| None),
            Self::Server(server) => server.poll_accept(cx).map(Option::transpose),
        }
    }

    fn set_window(&mut self, bytes: u64) {
        let bytes = u32::try_from(bytes).unwrap_or(WINDOW_MOST).min(WINDOW_MOST);
        match self {
            Self::Client(client) => client.set_target_window_size(bytes),
            Self::Server(server) => server.set_target_window_size(bytes),
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
pub(super) const WINDOW_MOST: u32 = (1 << 31) - 1;

pub(super) struct Driver<S> {
    connection: Connection<S>,
    hub: Arc<Hub>,
    pumps: FuturesUnordered<Pump>,
    incoming: mpsc::Sender<H2Stream>,
    flow: Arc<SessionFlow>,
    pings: Option<PingPong>,
    asked: Option<Instant>,
    ticks: Interval,
    keep_alive: bool,
    /// What was heard, and when that was last more than before.
    heard: (u64, Instant),
    idle_timeout: Duration,
    /// The stream that carries what ends the session.
    farewell: Option<Arc<Shared>>,
    farewell_text: BytesMut,
    stage: Stage,
    close_step: Duration,
}

enum Stage {
    Running,
    /// The peer takes no more streams, and may still say why.
    Refused(h2::Error, Pin<Box<Sleep>>),
    Flushing(CloseCode, String, Pin<Box<Sleep>>),
    Telling(Pin<Box<Sleep>>),
    Leaving(Pin<Box<Sleep>>),
}

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    pub(super) fn new(
        mut connection: Connection<S>,
        hub: Arc<Hub>,
        flow: Arc<SessionFlow>,
        incoming: mpsc::Sender<H2Stream>,
        settings: &SessionSettings,
    ) -> Self {
        let every = match settings.keep_alive {
            // +- 20 %, so that agents of one start do not beat in step.
            Some(every) => every.mul_f64(rand::random_range(0.8..1.2)),
            None => settings.idle_timeout / 4,
        };
        let mut ticks = interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        hub.line.hold_end();
        Self {
            pings: connection.ping_pong(),
            connection,
            hub,
            pumps: FuturesUnordered::new(),
            incoming,
            flow,
            asked: None,
            ticks,
            keep_alive: settings.keep_alive.is_some(),
            heard: (0, Instant::now()),
            idle_timeout: settings.idle_timeout,
            farewell: None,
            farewell_text: BytesMut::new(),
            stage: Stage::Running,
            close_step: CLOSE_STEP,
        }
    }

    /// For the server's end, which opens the stream that carries what ends the session.
    pub(super) fn with_farewell(mut self, farewell: Option<Arc<Shared>>) -> Self {
        self.farewell = farewell;
        self
    }

    fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.hub.line.begin_turn();
        if self.hub.line.is_ending() {
            self.drain(cx);
            self.hub.line.permit_end();
        }
        for _ in 0..ROUNDS {
            let mail = self.hub.collect(cx.waker());
            self.take(mail);
            let queued = self.hub.queued.take();
            let before = self.hub.line.received();
            loop {
                match self.connection.poll(cx) {
                    Poll::Ready(Ok(Some((request, respond)))) => self.admit(request, respond),
                    Poll::Ready(Ok(None)) => return self.ended(None, cx),
                    Poll::Ready(Err(error)) => return self.ended(Some(&error), cx),
                    Poll::Pending => break,
                }
            }
            if self.hub.line.is_flushed() {
                queued.iter().for_each(|stream| stream.flushed());
            } else {
                self.hub.queued.put_back(queued);
            }
            let mut moved = self.hub.line.received() != before;
            while let Poll::Ready(Some(())) = self.pumps.poll_next_unpin(cx) {
                moved = true;
            }
            self.exchange_pings(cx);
            self.read_farewell(cx);
            if self.advance(cx).is_ready() {
                return Poll::Ready(());
            }
            if !moved && self.hub.queued.is_empty() {
                break;
            }
        }
        Poll::Pending
    }

    fn take(&mut self, mail: Mail) {
        if !matches!(self.stage, Stage::Leaving(_)) {
            self.pumps.extend(mail.pumps);
        }
        if let Some(bytes) = mail.window {
            self.connection.set_window(bytes);
        }
        if mail.probe {
            self.ask();
        }
        if let Some((code, reason)) = mail.close
            && matches!(self.stage, Stage::Running | Stage::Refused(..))
        {
            // A peer that is not there acknowledges nothing: it is told, and not waited for.
            if code == CloseCode::Dead {
                self.close_step = CLOSE_STEP_DEAD;
            }
            self.stage = Stage::Flushing(code, reason, Box::pin(sleep(self.close_step)));
        }
    }

    /// A stream that the peer opened.
    fn admit(
        &mut self,
        request: http::Request<RecvStream>,
        mut respond: h2::server::SendResponse<Bytes>,
    ) {
        let is_session = request.uri().path() == "/session";
        if is_session && self.farewell.is_some() {
            return respond.send_reset(Reason::PROTOCOL_ERROR);
        }
        let Ok(send) = respond.send_response(http::Response::new(()), false) else {
            return;
        };
        let gauge = self.flow.gauge();
        if is_session {
            gauge.leave();
        }
        let shared = Shared::new(BytesMut::new(), gauge, self.hub.finishing.clone());
        self.pumps.push(Pump::new(
            shared.clone(),
            send,
            Input::Body(request.into_body()),
            self.hub.queued.clone(),
        ));
        if is_session {
            self.farewell.get_or_insert(shared);
            self.hub.established.cancel();
        } else if let Err(unwanted) = self.incoming.try_send(H2Stream(shared)) {
            debug!("stream dropped: {unwanted}");
            let mut stream = unwanted.into_inner();
            crate::transport::RawStream::reset(&mut stream, crate::wire::code::ResetCode::Dropped);
        }
    }

    fn ask(&mut self) {
        if self.asked.is_none()
            && let Some(pings) = &mut self.pings
            && pings.send_ping(Ping::opaque()).is_ok()
        {
            self.asked = Some(Instant::now());
        }
    }

    fn exchange_pings(&mut self, cx: &mut Context<'_>) {
        while self.ticks.poll_tick(cx).is_ready() {
            let received = self.hub.line.received();
            if received != self.heard.0 {
                self.heard = (received, Instant::now());
            }
            if self.keep_alive {
                self.ask();
            }
        }
        let answered = self
            .pings
            .as_mut()
            .is_some_and(|pings| matches!(pings.poll_pong(cx), Poll::Ready(Ok(_))));
        if answered && let Some(asked) = self.asked.take() {
            self.hub.acknowledged.fetch_add(1, Ordering::Relaxed);
            let now = u64::try_from(asked.elapsed().as_micros()).unwrap_or(u64::MAX);
            let smooth = match self.hub.rtt_micros.load(Ordering::Relaxed) {
                0 => now,
                before => (before * 7 + now) / 8,
            };
            self.hub.rtt_micros.store(smooth, Ordering::Relaxed);
        }
    }

    /// Takes everything out of h2 that it has received.
    fn drain(&mut self, cx: &mut Context<'_>) {
        for pump in self.pumps.iter_mut() {
            pump.drain(cx);
        }
    }

    /// Looks whether the peer said why it leaves.
    fn read_farewell(&mut self, cx: &mut Context<'_>) {
        let Some(farewell) = &self.farewell else {
            return;
        };
        farewell.lock().take_all(&mut self.farewell_text);
        if let Some(close) = SessionClose::take(&mut self.farewell_text) {
            self.hub.set_closed(CloseReason {
                by: ClosedBy::Peer,
                code: close.code,
                reason: close.reason,
            });
            // What came before the reason counts; polling the set stops early, so each is asked.
            self.drain(cx);
            self.leave();
        }
    }

    /// The steps of a close.
    fn advance(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            match &mut self.stage {
                Stage::Running => {
                    if let Some(refused) = self.hub.refused(cx) {
                        self.stage = Stage::Refused(refused, Box::pin(sleep(CLOSE_STEP)));
                        continue;
                    }
                    let silent = self.heard.1.elapsed() >= self.idle_timeout;
                    if silent && self.hub.line.received() == self.heard.0 {
                        self.hub.set_closed(network(CloseCode::Dead, "timed out"));
                        return Poll::Ready(());
                    }
                    return Poll::Pending;
                }
                Stage::Refused(error, limit) => {
                    ready!(limit.as_mut().poll(cx));
                    let reason = network(CloseCode::Protocol, &error.to_string());
                    self.hub.set_closed(reason);
                    self.leave();
                }
                Stage::Flushing(code, reason, limit) => {
                    let waiting = self.hub.finishing.load(Ordering::Acquire) > 0;
                    if waiting && limit.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    let (code, reason) = (*code, std::mem::take(reason));
                    self.tell(code, reason);
                }
                Stage::Telling(limit) => {
                    let told = self.farewell.as_ref().is_none_or(|farewell| {
                        matches!(farewell.lock().output, Output::Flushed | Output::Cut(_))
                    });
                    if !told && limit.as_mut().poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    self.leave();
                }
                // The connection's own end is what `turn` waits for.
                Stage::Leaving(limit) => return limit.as_mut().poll(cx),
            }
        }
    }

    fn tell(&mut self, code: CloseCode, reason: String) {
        let close = SessionClose { code, reason };
        if let Some(farewell) = &self.farewell {
            let mut state = farewell.lock();
            close.encode(&mut state.outbox);
            farewell.set_output(&mut state, Output::Finishing);
            state.call_pump();
        }
        self.hub.set_closed(CloseReason {
            by: ClosedBy::Local,
            code: close.code,
            reason: close.reason,
        });
        self.stage = Stage::Telling(Box::pin(sleep(self.close_step)));
    }

    /// GOAWAY, close_notify and FIN; whatever has not ended is cut.
    fn leave(&mut self) {
        if matches!(self.stage, Stage::Leaving(_)) {
            return;
        }
        self.hub.take_opener();
        self.farewell = None;
        self.pumps.clear();
        if let Connection::Server(server) = &mut self.connection {
            server.abrupt_shutdown(Reason::NO_ERROR);
        }
        self.stage = Stage::Leaving(Box::pin(sleep(self.close_step * 2)));
    }

    fn ended(&mut self, error: Option<&h2::Error>, cx: &mut Context<'_>) -> Poll<()> {
        // What came in the same breath as the end counts, and may say why.
        self.drain(cx);
        self.read_farewell(cx);
        let verdict = tls::verdict(self.hub.line.alert());
        let reason = match error {
            None => network(CloseCode::Dead, "connection was closed without a reason"),
            Some(error) => match error.get_io() {
                // A TLS alert, or bytes that are not TLS.
                Some(io) if io.kind() == std::io::ErrorKind::InvalidData => {
                    network(CloseCode::Protocol, &io.to_string())
                }
                Some(io) => network(CloseCode::Dead, &io.to_string()),
                None => network(CloseCode::Protocol, &error.to_string()),
            },
        };
        let reason = verdict.map_or(reason, |(code, reason)| network(code, reason));
        self.hub.set_closed(reason);
        Poll::Ready(())
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> Future for Driver<S> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.get_mut().turn(cx)
    }
}

impl<S> Drop for Driver<S> {
    fn drop(&mut self) {
        self.pumps.clear();
        self.hub.end();
    }
}

pub(super) fn network(code: CloseCode, reason: &str) -> CloseReason {
    CloseReason {
        by: ClosedBy::Network,
        code,
        reason: reason.to_owned(),
    }
}
