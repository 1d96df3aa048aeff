//! Scripted behavior on a byte stream, for upgrades and for the raw targets.

use std::io;
use std::sync::{Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::accept::Traffic;
use super::answers::{After, Request, send_bytes};
use super::byte_stream::ByteStream;
use super::data::Sha256;

/// One script for a byte stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Script {
    /// Sends back received data until FIN, then FIN.
    Echo,
    /// Reads to FIN, then sends `bytes` of sequence 0 and FIN. With `digest` a line with the
    /// SHA-256 of the received data precedes them.
    SinkThenSend { bytes: u64, digest: bool },
    /// Sends `bytes` of sequence 0 and FIN, then reads to FIN.
    SendThenSink { bytes: u64 },
    /// Reads one byte, sends `bytes` of sequence 0, then resets.
    Reset { bytes: u64 },
    /// Reads to FIN and sends nothing.
    Silent,
    /// Neither reads nor sends.
    Deaf,
}

impl Script {
    /// Returns the script that `request` selects by `script` and `bytes` in its query;
    /// [`Script::Echo`] by default.
    pub(crate) fn asked_for(request: &Request) -> Option<Self> {
        let bytes = match request.query("bytes") {
            Some(bytes) => bytes.parse().ok()?,
            None => 0,
        };
        match request.query("script") {
            None | Some("echo") => Some(Self::Echo),
            Some("sink-then-send") => Some(Self::SinkThenSend {
                bytes,
                digest: true,
            }),
            Some("send-then-sink") => Some(Self::SendThenSink { bytes }),
            Some("reset") => Some(Self::Reset { bytes: 64 * 1024 }),
            Some(_) => None,
        }
    }

    /// Sends `head` and runs the script. Data that was read to its end is recorded in `log`.
    pub(crate) async fn act(
        self,
        wire: &mut ByteStream,
        head: Vec<u8>,
        traffic: &Traffic,
        log: &ReceivedLog,
    ) -> io::Result<After> {
        if let Self::SendThenSink { bytes } = self {
            send_bytes(wire, head, 0, bytes).await?;
            wire.finish().await?;
            log.push(receive(wire, traffic, false).await?);
            return Ok(After::Close);
        }
        wire.write_all(&head).await?;
        wire.flush().await?;
        match self {
            Self::Echo => {
                log.push(receive(wire, traffic, true).await?);
                Ok(After::Close)
            }
            Self::SinkThenSend { bytes, digest } => {
                let received = receive(wire, traffic, false).await?;
                let line = if digest {
                    format!("{}\n", received.sha256)
                } else {
                    String::new()
                };
                log.push(received);
                send_bytes(wire, line.into_bytes(), 0, bytes).await?;
                Ok(After::Close)
            }
            Self::Reset { bytes } => {
                if wire.read(&mut [0]).await? > 0 {
                    traffic.count_bytes_in(1);
                }
                send_bytes(wire, Vec::new(), 0, bytes).await?;
                Ok(After::Reset)
            }
            Self::SendThenSink { .. } | Self::Silent => {
                log.push(receive(wire, traffic, false).await?);
                Ok(After::Close)
            }
            Self::Deaf => std::future::pending().await,
        }
    }
}

/// The data that a target received up to its peer's clean end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    pub bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub sha256: String,
}

/// The data that the connections of a target received, in the order in which they ended.
#[derive(Debug, Default)]
pub(crate) struct ReceivedLog(Mutex<Vec<Received>>);

impl ReceivedLog {
    pub(crate) fn all(&self) -> Vec<Received> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn push(&self, received: Received) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(received);
    }
}

/// Reads to FIN, and sends the data back if the target `echoes`.
async fn receive(wire: &mut ByteStream, traffic: &Traffic, echoes: bool) -> io::Result<Received> {
    let mut digest = Sha256::new();
    let mut buf = vec![0; BUFFER_BYTES];
    loop {
        let n = wire.read(&mut buf).await?;
        let Some(data) = buf.get(..n).filter(|data| !data.is_empty()) else {
            break;
        };
        digest.update(data);
        traffic.count_bytes_in(n);
        if echoes {
            wire.write_all(data).await?;
            wire.flush().await?;
        }
    }
    Ok(Received {
        bytes: digest.bytes(),
        sha256: digest.finish(),
    })
}

const BUFFER_BYTES: usize = 16 * 1024;
