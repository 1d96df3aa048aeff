//! One QUIC stream: combines quinn's two halves. The sent half ends with the peer's
//! acknowledgement.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use quinn::{ReadError, StoppedError, VarInt, WriteError};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::task::TaskTracker;

use crate::transport::{RawStream, StreamCut};
use crate::wire::code::ResetCode;

type Acknowledged =
    Pin<Box<dyn Future<Output = Result<Option<VarInt>, StoppedError>> + Send + Sync>>;

pub(super) struct QuicStream {
    send: quinn::SendStream,
    recv: quinn::RecvStream,
    /// Set when the sent half was finished. Resolves when the peer has received everything.
    acknowledged: Option<Acknowledged>,
    flushing: TaskTracker,
}

impl QuicStream {
    pub(super) fn new(
        send: quinn::SendStream,
        recv: quinn::RecvStream,
        flushing: TaskTracker,
    ) -> Self {
        Self {
            send,
            recv,
            acknowledged: None,
            flushing,
        }
    }
}

impl RawStream for QuicStream {
    fn reset(&mut self, code: ResetCode) {
        self.acknowledged = None;
        let _already_ended = self.send.reset(code.number().into());
        self.stop(code);
    }

    fn stop(&mut self, code: ResetCode) {
        let _already_ended = self.recv.stop(code.number().into());
    }

    fn poll_send(&mut self, cx: &mut Context<'_>, data: &mut Bytes) -> Poll<io::Result<usize>> {
        let written = ready!(pin!(self.send.write_chunks(std::slice::from_mut(data))).poll(cx));
        Poll::Ready(written.map(|written| written.bytes).map_err(write_error))
    }
}

impl AsyncRead for QuicStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.recv
            .poll_read_buf(cx, out)
            .map_err(|error| match error {
                ReadError::Reset(code) => StreamCut::Reset(reset_code(code)).into(),
                ReadError::ConnectionLost(_) => StreamCut::SessionLost.into(),
                ReadError::ClosedStream
                | ReadError::IllegalOrderedRead
                | ReadError::ZeroRttRejected => {
                    io::Error::from(StreamCut::Reset(ResetCode::Dropped))
                }
            })
    }
}

impl AsyncWrite for QuicStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.send)
            .poll_write(cx, data)
            .map_err(write_error)
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let acknowledged = this.acknowledged.get_or_insert_with(|| {
            // An error means that the half was already stopped or reset. The future below returns
            // the reason.
            let _already_ended = this.send.finish();
            Box::pin(this.send.stopped())
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
        if let Some(acknowledged) = self.acknowledged.take()
            && !self.flushing.is_closed()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            self.flushing.spawn(async move { drop(acknowledged.await) });
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
