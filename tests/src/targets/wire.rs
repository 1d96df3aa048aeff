//! One connection, plain or TLS, with a read-ahead buffer.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsStream;

use super::Traffic;

/// A connection of a target or of a test client.
///
/// Both directions end separately: shutting down the write half sends FIN (over TLS close_notify
/// and FIN) and leaves the read half open. The end of a TLS stream without close_notify is an error
/// of kind `UnexpectedEof`.
#[derive(Debug)]
pub(crate) struct Wire {
    stream: Stream,
    ahead: BytesMut,
    scratch: Box<[u8]>,
    observer: Option<Observer>,
}

#[derive(Debug)]
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Reports once to a target's [`Traffic`] how its peer ended.
#[derive(Debug)]
struct Observer {
    traffic: Arc<Traffic>,
    is_counted: bool,
}

impl Wire {
    pub(crate) fn plain(stream: TcpStream) -> Self {
        Self::new(Stream::Plain(stream))
    }

    pub(crate) fn tls(stream: impl Into<TlsStream<TcpStream>>) -> Self {
        Self::new(Stream::Tls(Box::new(stream.into())))
    }

    pub(crate) fn observed_by(mut self, traffic: Arc<Traffic>) -> Self {
        self.observer = Some(Observer {
            traffic,
            is_counted: false,
        });
        self
    }

    fn new(stream: Stream) -> Self {
        Self {
            stream,
            ahead: BytesMut::new(),
            scratch: vec![0; READ_BYTES].into(),
            observer: None,
        }
    }

    /// Returns the certificate that the peer presented, if any.
    pub(crate) fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        match &self.stream {
            Stream::Plain(_) => None,
            Stream::Tls(tls) => tls.get_ref().1.peer_certificates()?.first(),
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

    /// Sends everything written so far and ends this direction.
    pub(crate) async fn finish(&mut self) -> io::Result<()> {
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
    pub(crate) async fn reset(mut self) -> io::Result<()> {
        self.stream.flush().await?;
        self.tcp().set_zero_linger()
    }

    /// Ends the TCP connection with FIN, over TLS without close_notify.
    pub(crate) fn finish_below_tls(self) -> io::Result<()> {
        socket2::SockRef::from(self.tcp()).shutdown(std::net::Shutdown::Write)
    }

    pub(crate) fn tcp(&self) -> &TcpStream {
        match &self.stream {
            Stream::Plain(tcp) => tcp,
            Stream::Tls(tls) => tls.get_ref().0,
        }
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut buf = ReadBuf::new(&mut self.scratch);
        let end = ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buf));
        let read = end.map(|()| buf.filled().len());
        self.ahead.extend_from_slice(buf.filled());
        observe(&mut self.observer, &read);
        Poll::Ready(read)
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if self.ahead.is_empty() {
            let before = buf.filled().len();
            let end = ready!(Pin::new(&mut self.stream).poll_read(cx, buf));
            let read = end.map(|()| buf.filled().len() - before);
            observe(&mut self.observer, &read);
            return Poll::Ready(read.map(drop));
        }
        let n = self.ahead.len().min(buf.remaining());
        self.ahead.copy_to_slice(buf.initialize_unfilled_to(n));
        buf.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
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

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, buf),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, data),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, data),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

fn observe(observer: &mut Option<Observer>, read: &io::Result<usize>) {
    let Some(Observer {
        traffic,
        is_counted,
    }) = observer
    else {
        return;
    };
    match read {
        _ if *is_counted => {}
        Ok(0) => {
            *is_counted = true;
            traffic.count_fin();
        }
        Ok(_) => {}
        Err(_) => {
            *is_counted = true;
            traffic.count_cut();
        }
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
