//! What a test sends and receives on a raw byte stream: of a TCP listener, or after a 101.

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{BodyEnd, ByteStream, Endpoint};
use crate::targets::sha256_hex;

/// All data up to the end of a direction.
#[derive(Debug, Clone)]
pub struct Reading {
    pub bytes: Vec<u8>,
    /// How the stream ended: `CleanClose` or `Reset`.
    pub ended: BodyEnd,
}

impl ByteStream {
    pub async fn connect(endpoint: impl Into<Endpoint>) -> Result<Self> {
        endpoint.into().connect().await
    }

    /// Writes all of `data` and flushes.
    pub async fn send(&mut self, data: &[u8]) -> Result<()> {
        self.write_all(data).await.context("send")?;
        self.flush().await.context("flush")
    }

    /// Reads exactly `n` bytes.
    pub async fn receive(&mut self, n: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; n];
        self.read_exact(&mut bytes)
            .await
            .with_context(|| format!("receive {n} bytes"))?;
        Ok(bytes)
    }

    /// Reads until the peer ends its direction.
    pub async fn read_to_end(&mut self) -> Reading {
        let mut bytes = Vec::new();
        let ended = match AsyncReadExt::read_to_end(self, &mut bytes).await {
            Ok(_) => BodyEnd::CleanClose,
            Err(error) => BodyEnd::Reset(error.kind()),
        };
        Reading { bytes, ended }
    }

    /// Sends `data` and ends the sending direction while it reads to the peer's end, so that
    /// neither waits for the other.
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
}

impl Reading {
    /// Returns the SHA-256 of the bytes in lower-case hexadecimal.
    pub fn sha256(&self) -> String {
        sha256_hex(&self.bytes)
    }
}
