//! The close of a session, step by step, and what else the close stream carries.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use h2::Reason;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::sleep;

use super::{CLOSE_TIMEOUT, Driver, DriverState};
use crate::tls;
use crate::transport::CloseReason;
use crate::transport::h2::connection::Connection;
use crate::transport::h2::stream::Output;
use crate::wire::close::{SessionClose, SessionMessage};
use crate::wire::code::CloseCode;

impl<S: AsyncRead + AsyncWrite + Unpin> Driver<S> {
    /// Handles the peer's messages on the close stream: reports about memory, and the close
    /// message.
    pub(super) fn read_close_stream(&mut self, cx: &mut Context<'_>) {
        let Some(close_stream) = &self.close_stream else {
            return;
        };
        close_stream.lock().drain_into(&mut self.close_message);
        while let Some(message) = SessionMessage::take(&mut self.close_message) {
            match message {
                SessionMessage::Short => self.flow.set_peer_short(),
                SessionMessage::Waiting => self.flow.set_peer_waits(),
                SessionMessage::Close(close) => {
                    self.shared
                        .set_closed(CloseReason::peer(close.code, close.reason));
                    // Data that arrived before the close message counts. Polling the set stops
                    // early, so poll each pump.
                    self.drain(cx);
                    return self.finish();
                }
            }
        }
    }

    /// Sends a report about memory, unless one is still to be sent: reports are repeated.
    pub(super) fn report(&mut self, report: &SessionMessage) {
        if let Some(close_stream) = &self.close_stream
            && matches!(self.state, DriverState::Running)
        {
            let mut state = close_stream.lock();
            if state.unsent() == 0 {
                report.encode(&mut state.write_buffer);
                state.wake_pump();
            }
        }
    }

    /// Performs the steps of a close.
    pub(super) fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<()> {
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
                            .set_closed(CloseReason::network(CloseCode::Dead, "timed out"));
                        return Poll::Ready(());
                    }
                    return Poll::Pending;
                }
                DriverState::Refused(error, limit) => {
                    ready!(limit.as_mut().poll(cx));
                    let reason = CloseReason::network(CloseCode::Protocol, error.to_string());
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
        let message = SessionMessage::Close(close.clone());
        if let Some(close_stream) = &self.close_stream {
            let mut state = close_stream.lock();
            message.encode(&mut state.write_buffer);
            close_stream.set_output(&mut state, Output::Finishing);
            state.wake_pump();
        }
        self.shared
            .set_closed(CloseReason::local(close.code, close.reason));
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

    pub(super) fn handle_end(
        &mut self,
        error: Option<&h2::Error>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        // Data that arrived together with the end counts, and may include the close message.
        self.drain(cx);
        self.read_close_stream(cx);
        let verdict = tls::alert_meaning(self.shared.conn_state.alert());
        let reason = match error {
            None => CloseReason::network(CloseCode::Dead, "connection was closed without a reason"),
            Some(error) => match error.get_io() {
                // The cause is a TLS alert, or bytes that are not TLS.
                Some(io) if io.kind() == std::io::ErrorKind::InvalidData => {
                    CloseReason::network(CloseCode::Protocol, io.to_string())
                }
                Some(io) => CloseReason::network(CloseCode::Dead, io.to_string()),
                None => CloseReason::network(CloseCode::Protocol, error.to_string()),
            },
        };
        let reason = verdict.map_or(reason, |(code, reason)| CloseReason::network(code, reason));
        self.shared.set_closed(reason);
        Poll::Ready(())
    }
}
