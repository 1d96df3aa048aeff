//! Raw byte streams: of a TCP listener, or after a 101.

use std::io;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};

use anyhow::{Context, Result};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};

use super::{BodyEnd, Endpoint};
use crate::targets::{Wire, sha256_hex};

/// A connection with uninterpreted bytes. Both directions end separately. A TLS end without
/// close_notify is a read error of kind `UnexpectedEof`.
#[derive(Debug)]
pub struct ByteStream {
    wire: Wire,
}

/// All data up to the end of a direction.
#[derive(Debug, Clone)]
pub struct Reading {
    pub bytes: Vec<u8>,
    /// How the stream ended: `CleanClose` or `Reset`.
    pub ended: BodyEnd,
}

impl ByteStream {
    /// Connects to the endpoint.
    ///
    /// # Errors
    /// Returns an error if there is no connection or no TLS session.
    pub async fn connect(endpoint: impl Into<Endpoint>) -> Result<Self> {
        Ok(Self::new(endpoint.into().connect().await?))
    }

    pub(crate) fn new(wire: Wire) -> Self {
        Self { wire }
    }

    /// Writes all of `data` and flushes.
    ///
    /// # Errors
    /// Returns an error if the connection is broken.
    pub async fn send(&mut self, data: &[u8]) -> Result<()> {
        self.wire.write_all(data).await.context("send")?;
        self.wire.flush().await.context("flush")
    }

    /// Ends the sending direction: FIN, over TLS close_notify.
    ///
    /// # Errors
    /// Returns an error if the connection is broken.
    pub async fn finish(&mut self) -> Result<()> {
        self.wire.finish().await.context("end our direction")
    }

    /// Reads exactly `n` bytes.
    ///
    /// # Errors
    /// Returns an error if the stream ended before them.
    pub async fn receive(&mut self, n: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.wire
            .read_exact(&mut bytes)
            .await
            .with_context(|| format!("receive {n} bytes"))?;
        Ok(bytes)
    }

    /// Reads until the peer ends its direction.
    pub async fn read_to_end(&mut self) -> Reading {
        let mut bytes = Vec::new();
        let ended = match self.wire.read_to_end(&mut bytes).await {
            Ok(_) => BodyEnd::CleanClose,
            Err(error) => BodyEnd::Reset(error.kind()),
        };
        Reading { bytes, ended }
    }

    /// Sends `data` and ends the sending direction while it reads to the peer's end, so that
    /// neither waits for the other.
    ///
    /// # Errors
    /// Returns an error if the connection is broken for writing.
    pub async fn talk(self, data: &[u8]) -> Result<Reading> {
        let (mut reader, mut writer) = tokio::io::split(self);
        let mut bytes = Vec::new();
        let write = async {
            writer.write_all(data).await?;
            writer.shutdown().await
        };
        let (written, read) = tokio::join!(write, reader.read_to_end(&mut bytes));
        written.context("send")?;
        let ended = read.map_or_else(
            |error| BodyEnd::Reset(error.kind()),
            |_| BodyEnd::CleanClose,
        );
        Ok(Reading { bytes, ended })
    }

    /// Cuts the connection with a TCP reset. Dropping ends the connection with FIN, or with a reset
    /// if bytes are unread.
    ///
    /// # Errors
    /// Returns an error if the connection is broken.
    pub async fn reset(self) -> Result<()> {
        self.wire.reset().await.context("reset")
    }

    /// Returns the certificate that the peer presented over TLS.
    pub fn peer_certificate(&self) -> Option<&CertificateDer<'static>> {
        self.wire.peer_certificate()
    }
}

impl Reading {
    /// Returns the SHA-256 of the bytes in lower-case hexadecimal.
    pub fn sha256(&self) -> String {
        sha256_hex(&self.bytes)
    }
}

impl AsyncRead for ByteStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_read(cx, buf)
    }
}

impl AsyncWrite for ByteStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.wire).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut TaskContext<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.wire).poll_shutdown(cx)
    }
}
