//! One request and its answer, whole or as it comes, on a connection of its own or one that is kept.

use std::io;

use anyhow::{Context, Result};
use bytes::{Bytes, BytesMut};

use super::{BodyEnd, Endpoint, RawRequest};
use crate::targets::{BodyReader, Framing, Head, Wire, first_value, sha256_hex};

/// Sends `request` on a new connection and reads the answer to its end.
///
/// # Errors
/// No connection, or no answer: then an [`io::Error`] is the cause, `UnexpectedEof` when the connection ended cleanly
/// before a head. How a body ended is no error but [`HttpReply::ended`].
pub async fn request(endpoint: impl Into<Endpoint>, request: &RawRequest) -> Result<HttpReply> {
    Ok(Exchange::start(endpoint, request).await?.into_reply().await)
}

/// An answer that was read to its end.
#[derive(Debug, Clone)]
pub struct HttpReply {
    /// Status code.
    pub status: u16,
    /// Headers in the order and spelling they came.
    pub headers: Vec<(String, String)>,
    /// What came of the body, without chunk framing.
    pub body: Vec<u8>,
    /// Fields behind the last chunk.
    pub trailers: Vec<(String, String)>,
    /// Status codes of the 1xx answers before this one.
    pub interim: Vec<u16>,
    /// How the body ended.
    pub ended: BodyEnd,
}

impl HttpReply {
    /// The first value of header `name`, compared without case.
    pub fn header(&self, name: &str) -> Option<&str> {
        first_value(&self.headers, name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// SHA-256 of the body in lower-case hexadecimal.
    pub fn sha256(&self) -> String {
        sha256_hex(&self.body)
    }
}

/// An answer whose head was read and whose body comes piece by piece.
#[derive(Debug)]
pub struct Exchange {
    status: u16,
    head: Head,
    interim: Vec<u16>,
    body: BodyReader,
    /// Body bytes that [`Self::line`] has not used yet.
    partial: BytesMut,
    wire: Wire,
}

impl Exchange {
    /// Sends `request` on a new connection and reads the head of the answer.
    ///
    /// # Errors
    /// As [`request`].
    pub async fn start(endpoint: impl Into<Endpoint>, request: &RawRequest) -> Result<Self> {
        Self::on(endpoint.into().connect().await?, request).await
    }

    pub(crate) async fn on(mut wire: Wire, request: &RawRequest) -> Result<Self> {
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

    /// Status code.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// Headers in the order and spelling they came.
    pub fn headers(&self) -> &[(String, String)] {
        &self.head.headers
    }

    /// The first value of header `name`, compared without case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.first(name)
    }

    /// The next bytes of the body as they come; `None` once it has ended, see [`Self::ended`]. Cancel-safe.
    pub async fn data(&mut self) -> Option<Bytes> {
        if self.partial.is_empty() {
            self.body.data(&mut self.wire).await
        } else {
            Some(self.partial.split().freeze())
        }
    }

    /// The next whole line of the body, without its end; `None` once the body has ended. Cancel-safe.
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

    /// How the body ended, once it has.
    pub fn ended(&self) -> Option<&BodyEnd> {
        self.body.ended()
    }

    /// Reads to the end of the body.
    pub async fn into_reply(self) -> HttpReply {
        self.complete().await.0
    }

    /// Ends our direction (FIN, over TLS close_notify) while the answer goes on.
    ///
    /// # Errors
    /// The connection is broken.
    pub async fn finish(&mut self) -> Result<()> {
        self.wire.finish().await.context("end our direction")
    }

    /// Cuts the connection with a TCP reset. Dropping ends it with FIN, or with a reset when bytes are unread.
    ///
    /// # Errors
    /// The connection is broken.
    pub async fn reset(self) -> Result<()> {
        self.wire.reset().await.context("reset")
    }

    pub(crate) async fn complete(mut self) -> (HttpReply, Wire) {
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

    pub(crate) fn into_wire(self) -> Wire {
        self.wire
    }
}

/// Several requests, one after the other, on one connection.
#[derive(Debug)]
pub struct KeepAliveClient {
    /// Absent after an exchange that broke.
    wire: Option<Wire>,
}

impl KeepAliveClient {
    /// Connects.
    ///
    /// # Errors
    /// No connection or no TLS session.
    pub async fn connect(endpoint: impl Into<Endpoint>) -> Result<Self> {
        Ok(Self {
            wire: Some(endpoint.into().connect().await?),
        })
    }

    /// Sends `request` and reads the answer to its end.
    ///
    /// # Errors
    /// As [`request`]; also when an earlier answer left the connection unusable.
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

/// Sends `request` and reads heads up to that of the final answer, or of a 101.
async fn send(wire: &mut Wire, request: &RawRequest, interim: &mut Vec<u16>) -> io::Result<Head> {
    let mut bytes = request.head_bytes();
    let mut waits = request.waits_for_continue();
    if !waits {
        bytes.extend_from_slice(request.body_bytes());
    }
    // A write fails when the peer answered early and closed; the answer is what counts then.
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

/// Whether `bytes` begin with the whole head of a final answer.
fn is_final_head(bytes: &[u8]) -> bool {
    bytes.starts_with(b"HTTP/1.")
        && bytes.get(9).is_some_and(|digit| *digit != b'1')
        && bytes.windows(4).any(|window| window == b"\r\n\r\n")
}
