//! Streams that the peer opens, before their header is read.

use std::io;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::Instant;

use super::{RawStream, ReplyState, Stream, Traffic, invalid};
use crate::transport::ReadMonitor;
use crate::wire::code::ResetCode;
use crate::wire::frame::{self, STREAM_MESSAGE_MAX};
use crate::wire::header::StreamHeader;

/// A stream of the peer whose header has not been read yet. Dropping it resets the stream.
#[derive(Debug)]
pub struct IncomingStream(Stream);

impl IncomingStream {
    /// Creates an incoming stream that a transport has accepted.
    pub fn new(
        raw: Box<dyn RawStream>,
        traffic: Arc<Traffic>,
        read_monitor: Arc<ReadMonitor>,
    ) -> Self {
        Self(Stream::new(raw, ReplyState::Local, traffic, read_monitor))
    }

    /// Reads the header. Not cancel-safe: if the future is dropped, the stream is reset.
    ///
    /// # Errors
    /// When the header is malformed, too large, cut or not complete by `deadline`. The stream is
    /// then reset.
    pub async fn header(mut self, deadline: Instant) -> io::Result<(StreamHeader, Stream)> {
        let read =
            tokio::time::timeout_at(deadline, read_frame(&mut self.0.raw, STREAM_MESSAGE_MAX))
                .await;
        let decoded = match read {
            Ok(Ok(frame)) => StreamHeader::decode(&frame).map_err(invalid),
            Ok(Err(error)) => Err(error),
            Err(_elapsed) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "stream header not received in time",
            )),
        };
        match decoded {
            Ok(header) => {
                self.0.set_source(header.source);
                Ok((header, self.0))
            }
            Err(error) => {
                self.0.cut_behind(ResetCode::Protocol);
                Err(error)
            }
        }
    }
}

/// Reads exactly one frame, and no byte beyond it. Not cancel-safe.
///
/// # Errors
/// The reader's error, or `InvalidData` around [`frame::FrameError`], or `UnexpectedEof` when the
/// input ends first.
pub async fn read_frame<R: AsyncRead + Unpin + ?Sized>(
    reader: &mut R,
    limit: usize,
) -> io::Result<bytes::Bytes> {
    let mut buffer = BytesMut::new();
    loop {
        if let Some(frame) = frame::take(&mut buffer, limit).map_err(invalid)? {
            return Ok(frame);
        }
        let bytes_needed = frame::bytes_needed(&buffer, limit).map_err(invalid)?;
        let count = reader
            .take(bytes_needed as u64)
            .read_buf(&mut buffer)
            .await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}
