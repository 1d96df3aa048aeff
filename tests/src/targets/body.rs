//! Bodies of HTTP/1.1 messages, read with a record of how they ended.

use std::io;

use bytes::{Bytes, BytesMut};

use super::byte_stream::ByteStream;
use super::head::Head;

/// The end of a body or a byte stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyEnd {
    /// All of the Content-Length arrived, or the message may have no body.
    CleanLength,
    /// The last chunk arrived.
    CleanChunked,
    /// The body had no length and ended with FIN, over TLS with close_notify.
    CleanClose,
    /// The connection was cut: `ConnectionReset`, or `UnexpectedEof` for a TLS end without
    /// close_notify.
    Reset(io::ErrorKind),
    /// The connection ended cleanly before the length or the last chunk.
    Truncated,
    /// The chunks are not well-formed.
    Malformed(String),
}

impl BodyEnd {
    /// Returns whether the reader may treat the body as complete.
    pub fn is_clean(&self) -> bool {
        match self {
            Self::CleanLength | Self::CleanChunked | Self::CleanClose => true,
            Self::Reset(_) | Self::Truncated | Self::Malformed(_) => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    Length(u64),
    Chunked,
    UntilClose,
}

impl Framing {
    pub(crate) fn of_request(head: &Head) -> Self {
        match Self::declared(head) {
            Self::UntilClose => Self::Length(0),
            declared => declared,
        }
    }

    pub(crate) fn of_reply(head: &Head, status: u16, to_head_request: bool) -> Self {
        if to_head_request || status == 204 || status == 304 {
            Self::Length(0)
        } else {
            Self::declared(head)
        }
    }

    fn declared(head: &Head) -> Self {
        if head.lists("transfer-encoding", "chunked") {
            return Self::Chunked;
        }
        let length = head
            .first("content-length")
            .and_then(|length| length.parse().ok());
        length.map_or(Self::UntilClose, Self::Length)
    }
}

/// Reads one body from a [`ByteStream`].
#[derive(Debug)]
pub(crate) struct BodyReader {
    state: State,
    trailers: Vec<(String, String)>,
}

#[derive(Debug)]
enum State {
    Length { left: u64 },
    ChunkSize,
    ChunkData { left: u64 },
    ChunkEnd,
    Trailers,
    UntilClose,
    Ended(BodyEnd),
}

/// The progress that the buffered bytes allow.
enum Progress {
    Data(Bytes),
    Again,
    NeedMore,
}

impl BodyReader {
    pub(crate) fn new(framing: Framing) -> Self {
        let state = match framing {
            Framing::Length(0) => State::Ended(BodyEnd::CleanLength),
            Framing::Length(left) => State::Length { left },
            Framing::Chunked => State::ChunkSize,
            Framing::UntilClose => State::UntilClose,
        };
        Self {
            state,
            trailers: Vec::new(),
        }
    }

    /// Returns how the body ended, once it has.
    pub(crate) fn ended(&self) -> Option<&BodyEnd> {
        if let State::Ended(end) = &self.state {
            Some(end)
        } else {
            None
        }
    }

    pub(crate) fn trailers(&self) -> &[(String, String)] {
        &self.trailers
    }

    /// Returns the next bytes, or `None` once the body has ended. Cancel-safe.
    pub(crate) async fn data(&mut self, wire: &mut ByteStream) -> Option<Bytes> {
        while self.ended().is_none() {
            match self.advance(wire.ahead()) {
                Ok(Progress::Data(data)) => return Some(data),
                Ok(Progress::Again) => {}
                Ok(Progress::NeedMore) => match wire.fill().await {
                    Ok(0) => self.state = State::Ended(self.at_close()),
                    Ok(_) => {}
                    Err(error) => self.state = State::Ended(BodyEnd::Reset(error.kind())),
                },
                Err(malformed) => self.state = State::Ended(BodyEnd::Malformed(malformed)),
            }
        }
        None
    }

    fn advance(&mut self, ahead: &mut BytesMut) -> Result<Progress, String> {
        match &mut self.state {
            State::Length { left } => {
                let data = take(ahead, left);
                if *left == 0 {
                    self.state = State::Ended(BodyEnd::CleanLength);
                }
                Ok(some_data(data))
            }
            State::UntilClose => Ok(some_data(ahead.split().freeze())),
            State::ChunkSize => {
                let Some(line) = take_line(ahead)? else {
                    return Ok(Progress::NeedMore);
                };
                let digits = line.split(';').next().unwrap_or_default();
                let left = u64::from_str_radix(digits.trim(), 16);
                let left = left.map_err(|error| format!("chunk size {line:?}: {error}"))?;
                self.state = if left == 0 {
                    State::Trailers
                } else {
                    State::ChunkData { left }
                };
                Ok(Progress::Again)
            }
            State::ChunkData { left } => {
                let data = take(ahead, left);
                if *left == 0 {
                    self.state = State::ChunkEnd;
                }
                Ok(some_data(data))
            }
            State::ChunkEnd => {
                let Some(line) = take_line(ahead)? else {
                    return Ok(Progress::NeedMore);
                };
                if !line.is_empty() {
                    return Err(format!("chunk is longer than its size: {line:?}"));
                }
                self.state = State::ChunkSize;
                Ok(Progress::Again)
            }
            State::Trailers => {
                let Some(line) = take_line(ahead)? else {
                    return Ok(Progress::NeedMore);
                };
                if line.is_empty() {
                    self.state = State::Ended(BodyEnd::CleanChunked);
                } else if let Some((name, value)) = line.split_once(':') {
                    self.trailers
                        .push((name.to_owned(), value.trim().to_owned()));
                } else {
                    return Err(format!("trailer without a colon: {line:?}"));
                }
                Ok(Progress::Again)
            }
            State::Ended(_) => Ok(Progress::Again),
        }
    }

    fn at_close(&self) -> BodyEnd {
        match self.state {
            State::UntilClose => BodyEnd::CleanClose,
            State::Length { .. }
            | State::ChunkSize
            | State::ChunkData { .. }
            | State::ChunkEnd
            | State::Trailers
            | State::Ended(_) => BodyEnd::Truncated,
        }
    }
}

fn take(ahead: &mut BytesMut, left: &mut u64) -> Bytes {
    let n = usize::try_from(*left).map_or(ahead.len(), |left| left.min(ahead.len()));
    *left -= n as u64;
    ahead.split_to(n).freeze()
}

fn some_data(data: Bytes) -> Progress {
    if data.is_empty() {
        Progress::NeedMore
    } else {
        Progress::Data(data)
    }
}

fn take_line(ahead: &mut BytesMut) -> Result<Option<String>, String> {
    let Some(end) = ahead.windows(2).position(|window| window == b"\r\n") else {
        return if ahead.len() > LINE_BYTES {
            Err("line is too long".to_owned())
        } else {
            Ok(None)
        };
    };
    let line = ahead.split_to(end + 2);
    Ok(Some(
        String::from_utf8_lossy(line.get(..end).unwrap_or_default()).into_owned(),
    ))
}

/// Far above any chunk-size line or trailer in use.
const LINE_BYTES: usize = 16 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn read(framing: Framing, pieces: &[&str]) -> (String, BodyReader) {
        let mut reader = BodyReader::new(framing);
        let mut ahead = BytesMut::new();
        let mut text = String::new();
        for piece in pieces {
            ahead.extend_from_slice(piece.as_bytes());
            while reader.ended().is_none() {
                match reader.advance(&mut ahead) {
                    Ok(Progress::Data(data)) => text.push_str(&String::from_utf8_lossy(&data)),
                    Ok(Progress::Again) => {}
                    Ok(Progress::NeedMore) => break,
                    Err(malformed) => reader.state = State::Ended(BodyEnd::Malformed(malformed)),
                }
            }
        }
        (text, reader)
    }

    #[test]
    fn chunks_may_be_cut_anywhere() {
        let message = "5;x=y\r\nhello\r\nb\r\n, the world\r\n0\r\nX-End: yes\r\n\r\n";
        for cut in 0..message.len() {
            let (before, after) = message.split_at(cut);
            let (text, reader) = read(Framing::Chunked, &[before, after]);
            assert_eq!(text, "hello, the world", "cut at {cut}");
            assert_eq!(reader.ended(), Some(&BodyEnd::CleanChunked));
            assert_eq!(reader.trailers(), [("X-End".to_owned(), "yes".to_owned())]);
        }
    }

    #[test]
    fn length_ends_on_its_last_byte() {
        let (text, reader) = read(Framing::Length(5), &["he", "llo and more"]);
        assert_eq!(text, "hello");
        assert_eq!(reader.ended(), Some(&BodyEnd::CleanLength));
    }

    #[test]
    fn wrong_chunk_size_is_malformed() {
        let (_, reader) = read(Framing::Chunked, &["2\r\nabc\r\n"]);
        assert!(matches!(reader.ended(), Some(BodyEnd::Malformed(_))));
        let (_, reader) = read(Framing::Chunked, &["zz\r\n"]);
        assert!(matches!(reader.ended(), Some(BodyEnd::Malformed(_))));
    }
}
