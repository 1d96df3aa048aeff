//! One connection, plain or TLS, with a read-ahead buffer.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsStream;
use tokio_util::either::Either;

/// A connection of a target or of a test client, with uninterpreted bytes.
///
/// Both directions end separately: shutting down the write half sends FIN (over TLS close_notify
/// and FIN) and leaves the read half open. The end of a TLS stream without close_notify is an error
/// of kind `UnexpectedEof`. Dropping ends the connection with FIN, or with a reset if bytes are
/// unread.
#[derive(Debug)]
pub struct ByteStream {
    stream: Either<TcpStream, Box<TlsStream<TcpStream>>>,
    ahead: BytesMut,
    scratch: Box<[u8]>,
}

impl ByteStream {
    pub fn plain(stream: TcpStream) -> Self {
        Self::new(Either::Left(stream))
    }

    pub(crate) fn tls(stream: impl Into<TlsStream<TcpStream>>) -> Self {
        Self::new(Either::Right(Box::new(stream.into())))
    }

    fn new(stream: Either<TcpStream, Box<TlsStream<TcpStream>>>) -> Self {
        Self {
            stream,
            ahead: BytesMut::new(),
            scratch: vec![0; READ_BYTES].into(),
        }
    }

    /// Returns the certificate that the peer presented over TLS.
    pub fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        match &self.stream {
            Either::Left(_) => None,
            Either::Right(tls) => tls.get_ref().1.peer_certificates()?.first(),
        }
    }

    /// Returns the data that was read and not used yet.
    pub(crate) fn ahead(&mut self) -> &mut BytesMut {
        &mut self.ahead
    }

    /// Reads once into [`Self::ahead`]; 0 is the peer's clean end. Cancel-safe.
    pub(crate) async fn fill(&mut self) -> io::Result<usize> {
        std::future::poll_fn(|cx| self.poll_fill(cx)).await
    }

    /// Takes everything up to and including the next empty line, or returns `None` at a clean end
    /// before its first byte. Cancel-safe.
    pub(crate) async fn read_head(&mut self) -> io::Result<Option<Vec<u8>>> {
        loop {
            if let Some(end) = head_end(&self.ahead) {
                return Ok(Some(self.ahead.split_to(end).to_vec()));
            }
            if self.ahead.len() > HEAD_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "head is too long",
                ));
            }
            match self.fill().await {
                Ok(0) if self.ahead.is_empty() => return Ok(None),
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "end within the head",
                    ));
                }
                Ok(_) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits until the peer has ended its direction (`Ok`) or cut the connection. Cancel-safe; data
    /// that arrives in the meantime is buffered.
    pub(crate) async fn peer_gone(&mut self) -> io::Result<()> {
        while self.ahead.len() < HEAD_BYTES {
            if self.fill().await? == 0 {
                return Ok(());
            }
        }
        std::future::pending().await
    }

    /// Writes `data`, and reads ahead while the peer does not accept it. Stops early if `answered`
    /// reports that the read data makes the rest pointless, or if the peer ended.
    pub(crate) async fn write_unless(
        &mut self,
        mut data: &[u8],
        answered: impl Fn(&[u8]) -> bool,
    ) -> io::Result<()> {
        std::future::poll_fn(|cx| {
            while !data.is_empty() {
                if let Poll::Ready(written) = Pin::new(&mut self.stream).poll_write(cx, data) {
                    data = data.get(written?..).unwrap_or_default();
                } else if ready!(self.poll_fill(cx))? == 0 || answered(&self.ahead) {
                    return Poll::Ready(Ok(()));
                }
            }
            Pin::new(&mut self.stream).poll_flush(cx)
        })
        .await
    }

    /// Sends everything written so far and ends this direction: FIN, over TLS close_notify.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.stream.shutdown().await
    }

    /// Ends this direction and waits a while for the peer to end its own, so that unread bytes do
    /// not turn the end into a reset.
    pub(crate) async fn close(mut self) -> io::Result<()> {
        self.finish().await?;
        let to_the_end = async {
            while self.fill().await? > 0 {
                self.ahead.clear();
            }
            Ok(())
        };
        timeout(CLOSE_WAIT, to_the_end).await.unwrap_or(Ok(()))
    }

    /// Cuts the connection with a TCP reset, over TLS without close_notify.
    ///
    /// As with any reset, bytes that the peer's kernel has not accepted yet are lost.
    pub async fn reset(mut self) -> io::Result<()> {
        self.stream.flush().await?;
        self.tcp().set_zero_linger()
    }

    /// Ends the TCP connection with FIN, over TLS without close_notify.
    pub(crate) fn finish_below_tls(self) -> io::Result<()> {
        socket2::SockRef::from(self.tcp()).shutdown(std::net::Shutdown::Write)
    }

    /// Returns the TCP connection.
    pub fn tcp(&self) -> &TcpStream {
        match &self.stream {
            Either::Left(tcp) => tcp,
            Either::Right(tls) => tls.get_ref().0,
        }
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut buf = ReadBuf::new(&mut self.scratch);
        let end = ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf));
        let read = end.map(|()| buf.filled().len());
        self.ahead.extend_from_slice(buf.filled());
        Poll::Ready(read)
    }
}

impl AsyncRead for ByteStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if self.ahead.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let n = self.ahead.len().min(buf.remaining());
        self.ahead.copy_to_slice(buf.initialize_unfilled_to(n));
        buf.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ByteStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn head_end(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .map(|start| start + 4)
}

/// One TLS record; also the size of one read from a plain connection.
const READ_BYTES: usize = 16 * 1024;

/// Above the largest head that the tunnel allows (64 KiB), so that the harness is not the limit.
const HEAD_BYTES: usize = 256 * 1024;

/// A peer that does not close by then is left to the kernel.
const CLOSE_WAIT: Duration = Duration::from_secs(5);
