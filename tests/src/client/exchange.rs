//! One request and its answer, complete or in pieces, on a new connection or a reused one.

use std::io;

use anyhow::{Context, Result};
use bytes::{Bytes, BytesMut};

use super::{BodyEnd, Endpoint, RawRequest};
use crate::targets::{BodyReader, ByteStream, Framing, Head, first_value, sha256_hex};

/// Sends `request` on a new connection and reads the answer to its end.
///
/// # Errors
/// Returns an error if there is no connection or no answer. In the latter case an [`io::Error`] is
/// the cause, `UnexpectedEof` if the connection ended cleanly before a head. The end of a body is
/// not an error but [`HttpReply::ended`].
pub async fn request(endpoint: impl Into<Endpoint>, request: &RawRequest) -> Result<HttpReply> {
    Ok(Exchange::start(endpoint, request).await?.into_reply().await)
}

/// An answer that was read to its end.
#[derive(Debug, Clone)]
pub struct HttpReply {
    pub status: u16,
    /// Headers in the received order and spelling.
    pub headers: Vec<(String, String)>,
    /// Received body without chunk framing.
    pub body: Vec<u8>,
    /// Trailer fields after the last chunk.
    pub trailers: Vec<(String, String)>,
    /// Status codes of the preceding 1xx answers.
    pub interim: Vec<u16>,
    /// How the body ended.
    pub ended: BodyEnd,
}

impl HttpReply {
    /// Returns the first value of header `name`, compared case-insensitively.
    pub fn header(&self, name: &str) -> Option<&str> {
        first_value(&self.headers, name)
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the SHA-256 of the body in lower-case hexadecimal.
    pub fn sha256(&self) -> String {
        sha256_hex(&self.body)
    }
}

/// An answer whose head was read and whose body arrives in pieces.
#[derive(Debug)]
pub struct Exchange {
    status: u16,
    head: Head,
    interim: Vec<u16>,
    body: BodyReader,
    /// Body bytes that [`Self::line`] has not used yet.
    partial: BytesMut,
    wire: ByteStream,
}

impl Exchange {
    /// Sends `request` on a new connection and reads the head of the answer.
    pub async fn start(endpoint: impl Into<Endpoint>, request: &RawRequest) -> Result<Self> {
        Self::on(endpoint.into().connect().await?, request).await
    }

    pub(crate) async fn on(mut wire: ByteStream, request: &RawRequest) -> Result<Self> {
        let mut interim = Vec::new();
        let head = send(&mut wire, request, &mut interim)
            .await
            .context("no answer")?;
        let status = head.status().context("answer is not HTTP")?;
        let body = BodyReader::new(Framing::of_reply(&head, status, request.is_head()));
        Ok(Self {
            status,
            head,
            interim,
            body,
            partial: BytesMut::new(),
            wire,
        })
    }

    pub fn status(&self) -> u16 {
        self.status
    }

    /// Returns the headers in the received order and spelling.
    pub fn headers(&self) -> &[(String, String)] {
        &self.head.headers
    }

    /// Returns the first value of header `name`, compared case-insensitively.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.first(name)
    }

    /// Returns the next bytes of the body, or `None` once the body has ended, see [`Self::ended`].
    /// Cancel-safe.
    pub async fn data(&mut self) -> Option<Bytes> {
        if self.partial.is_empty() {
            self.body.data(&mut self.wire).await
        } else {
            Some(self.partial.split().freeze())
        }
    }

    /// Returns the next whole line of the body without its end, or `None` once the body has ended.
    /// Cancel-safe.
    pub async fn line(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.partial.iter().position(|byte| *byte == b'\n') {
                let line = self.partial.split_to(end + 1);
                return Some(String::from_utf8_lossy(&line).trim_end().to_owned());
            }
            let data = self.body.data(&mut self.wire).await?;
            self.partial.extend_from_slice(&data);
        }
    }

    /// Returns how the body ended, once it has.
    pub fn ended(&self) -> Option<&BodyEnd> {
        self.body.ended()
    }

    /// Reads to the end of the body.
    pub async fn into_reply(self) -> HttpReply {
        self.complete().await.0
    }

    /// Ends the sending direction (FIN, over TLS close_notify) while the answer continues.
    pub async fn finish(&mut self) -> Result<()> {
        self.wire.finish().await.context("end our direction")
    }

    /// Cuts the connection with a TCP reset. Dropping ends the connection with FIN, or with a reset
    /// if bytes are unread.
    pub async fn reset(self) -> Result<()> {
        self.wire.reset().await.context("reset")
    }

    pub(crate) async fn complete(mut self) -> (HttpReply, ByteStream) {
        let mut body = Vec::new();
        let ended = loop {
            while let Some(data) = self.data().await {
                body.extend_from_slice(&data);
            }
            if let Some(ended) = self.body.ended() {
                break ended.clone();
            }
        };
        let trailers = self.body.trailers().to_vec();
        let Self {
            status,
            head: Head { headers, .. },
            interim,
            wire,
            ..
        } = self;
        (
            HttpReply {
                status,
                headers,
                body,
                trailers,
                interim,
                ended,
            },
            wire,
        )
    }

    pub(crate) fn into_stream(self) -> ByteStream {
        self.wire
    }
}

/// A client that sends several requests sequentially on one connection.
#[derive(Debug)]
pub struct KeepAliveClient {
    /// `None` after an exchange that failed.
    wire: Option<ByteStream>,
}

impl KeepAliveClient {
    pub async fn connect(endpoint: impl Into<Endpoint>) -> Result<Self> {
        Ok(Self {
            wire: Some(endpoint.into().connect().await?),
        })
    }

    /// Sends `request` and reads the answer to its end.
    ///
    /// # Errors
    /// Returns the errors of [`request`], and an error if an earlier answer left the connection
    /// unusable.
    pub async fn request(&mut self, request: &RawRequest) -> Result<HttpReply> {
        let wire = self
            .wire
            .take()
            .context("an earlier answer ended this connection")?;
        let (reply, wire) = Exchange::on(wire, request).await?.complete().await;
        if matches!(reply.ended, BodyEnd::CleanLength | BodyEnd::CleanChunked) {
            self.wire = Some(wire);
        }
        Ok(reply)
    }

    /// Waits for the end of the connection: `CleanClose` or `Reset`. Cancel-safe.
    pub async fn closed(&mut self) -> BodyEnd {
        match &mut self.wire {
            None => BodyEnd::CleanClose,
            Some(wire) => match wire.peer_gone().await {
                Ok(()) => BodyEnd::CleanClose,
                Err(error) => BodyEnd::Reset(error.kind()),
            },
        }
    }
}

/// Sends `request` and reads heads until that of the final answer or of a 101.
async fn send(
    wire: &mut ByteStream,
    request: &RawRequest,
    interim: &mut Vec<u16>,
) -> io::Result<Head> {
    let mut bytes = request.head_bytes();
    let mut waits = request.waits_for_continue();
    if !waits {
        bytes.extend_from_slice(request.body_bytes());
    }
    // A write fails if the peer answered early and closed. The answer counts in that case.
    let mut written = wire.write_unless(&bytes, is_final_head).await;
    loop {
        let head = match (wire.read_head().await, written) {
            (Ok(Some(raw)), outcome) => {
                written = outcome;
                Head::parse(raw)?
            }
            (Ok(None), Ok(())) => {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "end before a head",
                ));
            }
            (Err(error), _) | (Ok(None), Err(error)) => return Err(error),
        };
        let status = head.status()?;
        if status >= 200 || status == 101 {
            return Ok(head);
        }
        interim.push(status);
        if status == 100 && std::mem::take(&mut waits) {
            written = wire.write_unless(request.body_bytes(), is_final_head).await;
        }
    }
}

/// Returns whether `bytes` begin with the complete head of a final answer.
fn is_final_head(bytes: &[u8]) -> bool {
    bytes.starts_with(b"HTTP/1.")
        && bytes.get(9).is_some_and(|digit| *digit != b'1')
        && bytes.windows(4).any(|window| window == b"\r\n\r\n")
}
