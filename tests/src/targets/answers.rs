//! Requests as received by the HTTP targets, and the ways to answer.

use std::io;

use http::StatusCode;
use tokio::io::AsyncWriteExt;

use super::accept::Traffic;
use super::body::{BodyReader, Framing};
use super::byte_stream::ByteStream;
use super::data::ByteSource;
use super::head::Head;

/// The treatment of the connection after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Waits for the next request, unless this one asked for a close.
    KeepAlive,
    /// Sends FIN, over TLS close_notify.
    Close,
    /// Sends a TCP reset.
    Reset,
}

/// A request whose body has not been read yet.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) received: Head,
    pub(crate) body: BodyReader,
    method: String,
    path: String,
    query: String,
}

impl Request {
    /// Reads the next request, or returns `None` at the clean end of the connection.
    pub(crate) async fn read(wire: &mut ByteStream, traffic: &Traffic) -> io::Result<Option<Self>> {
        let Some(raw) = wire.read_head().await? else {
            return Ok(None);
        };
        traffic.count_request();
        let received = Head::parse(raw)?;
        let mut words = received.start_line.split(' ');
        let method = words.next().unwrap_or_default().to_owned();
        let target = words.next().unwrap_or_default();
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let (path, query) = (path.to_owned(), query.to_owned());
        let body = BodyReader::new(Framing::of_request(&received));
        Ok(Some(Self {
            received,
            body,
            method,
            path,
            query,
        }))
    }

    /// Applies `after`, and returns the wire if another request may follow.
    pub(crate) async fn settle(
        mut self,
        mut wire: ByteStream,
        after: After,
    ) -> io::Result<Option<ByteStream>> {
        match after {
            After::Reset => wire.reset().await.map(|()| None),
            After::Close => wire.close().await.map(|()| None),
            After::KeepAlive if self.ends_connection() => wire.close().await.map(|()| None),
            After::KeepAlive => {
                while self.body.data(&mut wire).await.is_some() {}
                Ok(self
                    .body
                    .ended()
                    .is_some_and(|end| end.is_clean())
                    .then_some(wire))
            }
        }
    }

    pub(crate) fn is_head(&self) -> bool {
        self.method == "HEAD"
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// Returns the raw value of `key` in the query.
    pub(crate) fn query(&self, key: &str) -> Option<&str> {
        let mut pairs = self
            .query
            .split('&')
            .filter_map(|pair| pair.split_once('='));
        pairs.find(|(name, _)| *name == key).map(|(_, value)| value)
    }

    pub(crate) fn expects_continue(&self) -> bool {
        self.received.lists("expect", "100-continue")
    }

    /// Returns whether the connection must end. A body that waits for a "100 Continue" that was
    /// never sent leaves the connection unusable.
    fn ends_connection(&self) -> bool {
        self.received.lists("connection", "close")
            || self.received.start_line.ends_with("HTTP/1.0")
            || (self.expects_continue() && self.body.ended().is_none())
    }

    /// Returns an HTTP/1.1 head with `fields`.
    pub(crate) fn head(&self, status: u16, fields: &[(&str, &str)]) -> Vec<u8> {
        let reason = StatusCode::from_u16(status)
            .ok()
            .and_then(|status| status.canonical_reason());
        let mut head = format!("HTTP/1.1 {status} {}\r\n", reason.unwrap_or("Unnamed"));
        for (name, value) in fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if self.ends_connection() {
            head.push_str("Connection: close\r\n");
        }
        head.push_str("\r\n");
        head.into_bytes()
    }

    /// Sends a complete answer with Content-Length.
    pub(crate) async fn answer(
        &self,
        wire: &mut ByteStream,
        status: u16,
        body: &str,
    ) -> io::Result<After> {
        let length = body.len().to_string();
        let mut fields = vec![("Content-Type", "text/plain; version=0.0.4; charset=utf-8")];
        let may_have_body = status != 204 && status != 304;
        if may_have_body {
            fields.push(("Content-Length", &length));
        }
        let mut answer = self.head(status, &fields);
        if may_have_body && !self.is_head() {
            answer.extend_from_slice(body.as_bytes());
        }
        wire.write_all(&answer).await?;
        wire.flush().await?;
        Ok(After::KeepAlive)
    }
}

pub(crate) fn segments(path: &str) -> Vec<&str> {
    path.split('/')
        .filter(|segment| !segment.is_empty())
        .collect()
}

/// Sends `head` followed by the first `n` bytes of sequence `seed`. The beginning of both is one
/// write.
pub(crate) async fn send_bytes(
    wire: &mut ByteStream,
    head: Vec<u8>,
    seed: u64,
    n: u64,
) -> io::Result<()> {
    send_pieces(wire, head, seed, n, |piece, out| {
        out.extend_from_slice(piece)
    })
    .await
}

/// Like [`send_bytes`], with each piece of 16 KiB as a chunk. The last chunk is not sent.
pub(crate) async fn send_chunks(
    wire: &mut ByteStream,
    head: Vec<u8>,
    seed: u64,
    n: u64,
) -> io::Result<()> {
    send_pieces(wire, head, seed, n, |piece, out| out.extend(chunk(piece))).await
}

async fn send_pieces(
    wire: &mut ByteStream,
    head: Vec<u8>,
    seed: u64,
    n: u64,
    wrap: impl Fn(&[u8], &mut Vec<u8>),
) -> io::Result<()> {
    let mut source = ByteSource::new(seed);
    let mut piece = vec![0; PIECE_BYTES];
    let mut out = head;
    let mut left = n;
    while left > 0 {
        piece.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        source.fill(&mut piece);
        left -= piece.len() as u64;
        wrap(&piece, &mut out);
        wire.write_all(&out).await?;
        out.clear();
    }
    wire.write_all(&out).await?;
    wire.flush().await
}

/// Encodes `data` as one chunk (RFC 9112, section 7.1).
pub(crate) fn chunk(data: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
    chunk.extend_from_slice(data);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

/// Returns the end of a chunked body without trailers.
pub(crate) fn last_chunk() -> &'static [u8] {
    b"0\r\n\r\n"
}

/// Large enough for throughput, and small enough that test bodies have many pieces.
const PIECE_BYTES: usize = 16 * 1024;
