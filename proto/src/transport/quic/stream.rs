//! One QUIC stream: combines quinn's two halves. The sent half ends with the peer's
//! acknowledgement, or in a cut behind the bytes that were written (`cuts.rs`).

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use quinn::{Connection, ReadError, ResetError, StoppedError, VarInt, WriteError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::task::TaskTracker;

use super::cuts::{AnnouncedCut, AnnouncedCuts, cut_behind};
use crate::transport::{CutSignal, RawStream, StreamCut};
use crate::wire::code::ResetCode;

type Acknowledged =
    Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync>>;

pub(super) struct QuicStream {
    /// `None` once the stream was cut.
    send: Option<quinn::SendStream>,
    recv: quinn::RecvStream,
    /// Bytes written and read, headers and replies included.
    written: u64,
    read: u64,
    announced_cut: Arc<AnnouncedCut>,
    /// Why the received half ended other than by a clean end.
    input_cut: Option<StreamCut>,
    /// Set when the sent half was finished. Resolves when the peer has received everything.
    acknowledged: Option<Acknowledged>,
    /// Set while the peer's end of reading is awaited. Resolves with its code.
    stopped: Option<Acknowledged>,
    session: StreamSession,
}

/// What a stream shares with its session.
#[derive(Clone)]
pub(super) struct StreamSession {
    pub(super) connection: Connection,
    pub(super) announced_cuts: Arc<AnnouncedCuts>,
    /// Tasks that wait for what dropped streams had sent.
    pub(super) flushing: TaskTracker,
}

impl StreamSession {
    fn can_spawn(&self) -> bool {
        !self.flushing.is_closed() && tokio::runtime::Handle::try_current().is_ok()
    }
}

impl QuicStream {
    pub(super) fn new(
        send: quinn::SendStream,
        recv: quinn::RecvStream,
        announced_cut: Arc<AnnouncedCut>,
        session: StreamSession,
    ) -> Self {
        Self {
            send: Some(send),
            recv,
            written: 0,
            read: 0,
            announced_cut,
            input_cut: None,
            acknowledged: None,
            stopped: None,
            session,
        }
    }

    /// Ends the received half with a cut.
    fn end_input(&mut self, cut: StreamCut) -> io::Error {
        if let StreamCut::Reset(code) = cut {
            // The peer resets a half behind whose bytes it has announced a cut.
            self.stop(code);
        }
        self.input_cut.get_or_insert(cut);
        cut.into()
    }

    fn poll_write_with(
        &mut self,
        write: impl FnOnce(&mut quinn::SendStream) -> Poll<Result<usize, WriteError>>,
    ) -> Poll<io::Result<usize>> {
        let Some(send) = &mut self.send else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let count = ready!(write(send)).map_err(write_error)?;
        self.written += count as u64;
        Poll::Ready(Ok(count))
    }
}

impl RawStream for QuicStream {
    fn cut_now(&mut self, code: ResetCode) {
        self.acknowledged = None;
        if let Some(send) = &mut self.send {
            let _already_ended = send.reset(code.number().into());
        }
        self.stop(code);
    }

    fn cut_behind(&mut self, code: ResetCode) {
        // A peer that has cut the stream, or has received all of a finished half, waits for nothing.
        let is_open = self.acknowledged.is_none() && self.input_cut.is_none();
        if !is_open || !self.session.can_spawn() {
            return self.cut_now(code);
        }
        if let Some(send) = self.send.take() {
            let connection = self.session.connection.clone();
            let cutting = cut_behind(connection, send, self.written, code);
            self.session.flushing.spawn(cutting);
        }
        self.stop(code);
    }

    fn stop(&mut self, code: ResetCode) {
        let _already_ended = self.recv.stop(code.number().into());
    }

    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        self.announced_cut.register(cx);
        if let Some(code) = self.announced_cut.announced() {
            return Poll::Ready(StreamCut::Reset(code).into());
        }
        let reset = ready!(pin!(self.recv.received_reset()).poll(cx));
        match reset {
            // quinn reports a reset once.
            Ok(Some(code)) => Poll::Ready(self.end_input(StreamCut::Reset(reset_code(code)))),
            // Reads return what has arrived, and then the same.
            Err(ResetError::ConnectionLost(_)) => Poll::Ready(StreamCut::SessionLost.into()),
            // The half has ended, or this end has stopped it.
            Ok(None) | Err(ResetError::ZeroRttRejected) => Poll::Pending,
        }
    }

    fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let is_open = self.acknowledged.is_none();
        let Some(send) = self.send.as_ref().filter(|_| is_open) else {
            return Poll::Pending;
        };
        let stopped = self.stopped.get_or_insert_with(|| Box::pin(send.stopped()));
        let outcome = ready!(stopped.as_mut().poll(cx));
        self.stopped = None;
        match outcome {
            Ok(Some(code)) => Poll::Ready(StreamCut::Stopped(reset_code(code)).into()),
            Ok(None) => Poll::Pending,
            Err(_lost) => Poll::Ready(StreamCut::SessionLost.into()),
        }
    }

    fn cut_signal(&self) -> Arc<dyn CutSignal> {
        self.announced_cut.clone()
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        self.poll_write_with(|send| {
            pin!(send.write_chunks(std::slice::from_mut(data)))
                .poll(cx)
                .map_ok(|written| written.bytes)
        })
    }
}

impl AsyncRead for QuicStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if let Some(cut) = this.input_cut {
            return Poll::Ready(Err(cut.into()));
        }
        let before = out.filled().len();
        let error = match this.recv.poll_read_buf(cx, out) {
            Poll::Ready(Ok(())) => {
                this.read += (out.filled().len() - before) as u64;
                return Poll::Ready(Ok(()));
            }
            Poll::Ready(Err(error)) => error,
            Poll::Pending => {
                this.announced_cut.register(cx);
                return match this.announced_cut.after(this.read) {
                    Some(code) => Poll::Ready(Err(this.end_input(StreamCut::Reset(code)))),
                    None => Poll::Pending,
                };
            }
        };
        let cut = match error {
            ReadError::Reset(code) => StreamCut::Reset(reset_code(code)),
            ReadError::ConnectionLost(_) => StreamCut::SessionLost,
            ReadError::ClosedStream
            | ReadError::IllegalOrderedRead
            | ReadError::ZeroRttRejected => StreamCut::Reset(ResetCode::Dropped),
        };
        Poll::Ready(Err(this.end_input(cut)))
    }
}

impl AsyncWrite for QuicStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(|send| Pin::new(send).poll_write(cx, data))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let Some(send) = &mut this.send else {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        };
        let acknowledged = this.acknowledged.get_or_insert_with(|| {
            // An error means that the half was already stopped or reset. The future below returns
            // the reason.
            let _already_ended = send.finish();
            Box::pin(send.stopped())
        });
        let outcome = ready!(acknowledged.as_mut().poll(cx));
        // The future must not be polled again, and a finished half stays finished.
        this.acknowledged = Some(Box::pin(std::future::ready(outcome.clone())));
        Poll::Ready(match outcome {
            Ok(None) => Ok(()),
            Ok(Some(code)) => Err(StreamCut::Stopped(reset_code(code)).into()),
            Err(_lost) => Err(StreamCut::SessionLost.into()),
        })
    }
}

impl Drop for QuicStream {
    fn drop(&mut self) {
        self.session.announced_cuts.remove(self.recv.id());
        if let Some(acknowledged) = self.acknowledged.take()
            && self.session.can_spawn()
        {
            let flushing = async move { drop(acknowledged.await) };
            self.session.flushing.spawn(flushing);
        }
    }
}

fn write_error(error: WriteError) -> io::Error {
    match error {
        WriteError::Stopped(code) => StreamCut::Stopped(reset_code(code)).into(),
        WriteError::ConnectionLost(_) => StreamCut::SessionLost.into(),
        WriteError::ClosedStream | WriteError::ZeroRttRejected => io::ErrorKind::BrokenPipe.into(),
    }
}

fn reset_code(code: VarInt) -> ResetCode {
    ResetCode::from_number(u32::try_from(code.into_inner()).unwrap_or(u32::MAX))
}
