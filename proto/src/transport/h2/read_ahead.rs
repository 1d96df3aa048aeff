//! The socket below TLS. rustls reads 4 KiB at a time; this reads as much as the socket has.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Buf as _;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::io::poll_read_buf;

use crate::buffers::Buffer;

/// A TCP socket that fills a pooled buffer with each read. It holds the buffer only while the
/// buffer has unread bytes, so an idle connection has none.
#[derive(Debug)]
pub struct ReadAhead {
    socket: TcpStream,
    unread: Option<Buffer>,
}

impl ReadAhead {
    /// Wraps a socket from which nothing was read.
    pub fn new(socket: TcpStream) -> Self {
        Self {
            socket,
            unread: None,
        }
    }

    /// Returns the socket, for its addresses.
    pub(super) fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

impl AsyncRead for ReadAhead {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut buffer = match self.unread.take() {
            Some(buffer) => buffer,
            None => {
                // The buffer returns to the pool if the socket has nothing.
                let mut buffer = Buffer::take();
                ready!(poll_read_buf(Pin::new(&mut self.socket), cx, &mut buffer.0))?;
                buffer
            }
        };
        let count = buffer.0.len().min(out.remaining());
        out.put_slice(&buffer.0[..count]);
        buffer.0.advance(count);
        self.unread = (!buffer.0.is_empty()).then_some(buffer);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ReadAhead {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}
