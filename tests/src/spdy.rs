//! SPDY/3.1 as used by client-go and the kubelet: streams over one upgraded connection.
//!
//! Upstream: `moby/spdystream` `connection.go`, `spdy/write.go`, `spdy/read.go`.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use headers::{HeaderDecoder, HeaderEncoder};

mod dictionary;
mod headers;

/// One end of a connection.
#[derive(Debug)]
pub struct Spdy<S> {
    stream: S,
    /// ID of the next stream that this end opens: odd for clients, even for servers.
    next_id: u32,
    encoder: HeaderEncoder,
    decoder: HeaderDecoder,
}

/// A frame from the peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// SYN_STREAM: a new stream with its fields, names in lower case.
    Open {
        id: u32,
        fields: Vec<(String, String)>,
        /// Whether the opener sends nothing on the stream.
        fin: bool,
    },
    /// SYN_REPLY: the peer accepted the stream.
    Reply(u32),
    /// Bytes of a stream, perhaps its last.
    Data {
        id: u32,
        bytes: Vec<u8>,
        /// Whether these are the last bytes.
        fin: bool,
    },
    /// RST_STREAM of the stream.
    Reset(u32),
    /// PING; the peer returns those of this end.
    Ping(u32),
    /// GOAWAY of the peer.
    GoAway,
    /// Any other control frame, by its type.
    Other(u16),
}

impl<S: AsyncRead + AsyncWrite + Unpin> Spdy<S> {
    /// Creates the end that requested the upgrade.
    pub fn client(stream: S) -> Self {
        Self::new(stream, 1)
    }

    /// Creates the end that granted the upgrade.
    pub fn server(stream: S) -> Self {
        Self::new(stream, 2)
    }

    fn new(stream: S, next_id: u32) -> Self {
        Self {
            stream,
            next_id,
            encoder: HeaderEncoder::new(),
            decoder: HeaderDecoder::new(),
        }
    }

    /// Returns the underlying connection.
    pub fn into_inner(self) -> S {
        self.stream
    }

    pub async fn open(&mut self, fields: &[(&str, &str)]) -> io::Result<u32> {
        let id = self.next_id;
        self.next_id += 2;
        let mut payload = id.to_be_bytes().to_vec();
        // No associated stream, highest priority, no credential slot.
        payload.extend_from_slice(&[0; 6]);
        payload.extend(self.encoder.encode(fields)?);
        self.control(SYN_STREAM, 0, &payload).await?;
        Ok(id)
    }

    /// Accepts the peer's stream.
    pub async fn reply(&mut self, id: u32) -> io::Result<()> {
        let mut payload = id.to_be_bytes().to_vec();
        payload.extend(self.encoder.encode(&[])?);
        self.control(SYN_REPLY, 0, &payload).await
    }

    /// Sends bytes of a stream; `fin` ends this end's half of it.
    pub async fn data(&mut self, id: u32, bytes: &[u8], fin: bool) -> io::Result<()> {
        let mut frame = id.to_be_bytes().to_vec();
        frame.extend_from_slice(&flags_and_length(u8::from(fin), bytes.len())?);
        frame.extend_from_slice(bytes);
        self.stream.write_all(&frame).await?;
        self.stream.flush().await
    }

    pub async fn ping(&mut self, id: u32) -> io::Result<()> {
        self.control(PING, 0, &id.to_be_bytes()).await
    }

    /// Sends GOAWAY: this end accepts no further streams.
    pub async fn go_away(&mut self) -> io::Result<()> {
        self.control(GOAWAY, 0, &[0; 8]).await
    }

    /// Returns the next frame, or `None` at a clean end between two frames.
    pub async fn next(&mut self) -> io::Result<Option<Frame>> {
        let mut head = [0; 8];
        if self.stream.read(&mut head[..1]).await? == 0 {
            return Ok(None);
        }
        self.stream.read_exact(&mut head[1..]).await?;
        let [a, b, c, d, flags, e, f, g] = head;
        let length = u32::from_be_bytes([0, e, f, g]);
        let mut payload = vec![0; length as usize];
        self.stream.read_exact(&mut payload).await?;
        let (fin, word) = (flags & 1 == 1, u32::from_be_bytes([a, b, c, d]));
        if word >> 31 == 0 {
            return Ok(Some(Frame::Data {
                id: word,
                bytes: payload,
                fin,
            }));
        }
        if (a & 0x7f, b) != (0, 3) {
            return Err(invalid(format!("version {}", word >> 16 & 0x7fff)));
        }
        let first = payload.first_chunk().copied().map(u32::from_be_bytes);
        let id = first.unwrap_or_default() & 0x7fff_ffff;
        Ok(Some(match u16::from_be_bytes([c, d]) {
            SYN_STREAM => Frame::Open {
                id,
                fields: self.decoder.decode(payload.get(10..).unwrap_or_default())?,
                fin,
            },
            SYN_REPLY => {
                self.decoder.decode(payload.get(4..).unwrap_or_default())?;
                Frame::Reply(id)
            }
            // The next block depends on this one.
            HEADERS => {
                self.decoder.decode(payload.get(4..).unwrap_or_default())?;
                Frame::Other(HEADERS)
            }
            RST_STREAM => Frame::Reset(id),
            PING => Frame::Ping(first.unwrap_or_default()),
            GOAWAY => Frame::GoAway,
            other => Frame::Other(other),
        }))
    }

    async fn control(&mut self, kind: u16, flags: u8, payload: &[u8]) -> io::Result<()> {
        let mut frame = vec![0x80, 3];
        frame.extend_from_slice(&kind.to_be_bytes());
        frame.extend_from_slice(&flags_and_length(flags, payload.len())?);
        frame.extend_from_slice(payload);
        self.stream.write_all(&frame).await?;
        self.stream.flush().await
    }
}

fn flags_and_length(flags: u8, length: usize) -> io::Result<[u8; 4]> {
    let length = u32::try_from(length)
        .ok()
        .filter(|length| *length < 1 << 24);
    let [_, a, b, c] = length
        .ok_or_else(|| invalid("frame is too long"))?
        .to_be_bytes();
    Ok([flags, a, b, c])
}

fn invalid(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

const SYN_STREAM: u16 = 1;
const SYN_REPLY: u16 = 2;
const RST_STREAM: u16 = 3;
const PING: u16 = 6;
const GOAWAY: u16 = 7;
const HEADERS: u16 = 8;

#[cfg(test)]
mod tests;
