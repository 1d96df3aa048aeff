//! A fake metrics exporter, with an answer for every form of an HTTP/1.1 body.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use tokio::io::AsyncWriteExt;
use tokio::sync::watch;

use super::accept::{ANY_LOOPBACK_PORT, Listening, Traffic, target_methods};
use super::answers::{After, Request, chunk, last_chunk, segments, send_bytes, send_chunks};
use super::byte_stream::ByteStream;
use super::data::{ByteSource, Sha256, repeated_block};
use super::line_stream::{FollowOptions, LineStream};
use super::tls::TargetTls;

/// An HTTP/1.1 server with keep-alive.
///
/// | path | answer |
/// |---|---|
/// | `/`, `/metrics` | text that names the node |
/// | `/size/N`, `/chunked/N`, `/close-delimited/N` | N bytes of sequence 0 (`?seed=S`: of S), digest in `X-Sha256` |
/// | `/repeated/N` | N bytes: [`super::repeated_block`] over and over |
/// | `/echo` | the request's body in chunks, each as it arrives |
/// | `/follow` | endless chunked lines, from [`Self::emit`], with `?interval_ms=M` also from a timer |
/// | `/headers` | the request head exactly as received |
/// | `/upload` | `COUNT SHA256` of the request's body; sends 100 Continue where expected |
/// | `/status/CODE` | that status, with a body where it may have one |
/// | `/slow-head` | nothing until [`Self::release`] |
/// | `/reset-mid-body` | Content-Length of 1 MiB, 64 KiB of it, TCP reset |
/// | `/reset-chunked`, `/reset-close-delimited` | 64 KiB, TCP reset |
/// | `/short` | Content-Length of 1000, 500 bytes, FIN |
/// | `/garbage` | bytes that are not HTTP, FIN |
#[derive(Debug)]
pub struct Exporter {
    listening: Listening,
    site: Arc<Site>,
}

target_methods!(Exporter);

impl Exporter {
    /// Starts an exporter of `node` on a free loopback port.
    pub async fn start(node: &str) -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT, node, None).await
    }

    /// Starts an exporter of `node` on `bind`, over TLS if `tls` is set.
    pub async fn start_on(bind: SocketAddr, node: &str, tls: Option<TargetTls>) -> Result<Self> {
        let site = Arc::new(Site::new(node));
        let served = Arc::clone(&site);
        let listening = Listening::start(bind, tls, move |wire, traffic| {
            serve(Arc::clone(&served), wire, traffic)
        });
        Ok(Self {
            listening: listening.await?,
            site,
        })
    }

    /// Sends `line` (without line end) to all followers and returns their number.
    pub fn emit(&self, line: &str) -> usize {
        self.site.line_stream.emit(line)
    }

    /// Ends the answers of all followers cleanly and returns their number.
    pub fn end_follows(&self) -> usize {
        self.site.line_stream.end()
    }

    /// Returns the number of `/follow` requests in progress.
    pub fn followers(&self) -> usize {
        self.site.line_stream.followers()
    }

    /// Answers the `/slow-head` requests that currently wait.
    pub fn release(&self) {
        self.site.gate.send_modify(|released| *released += 1);
    }

    /// Returns the number of waiting `/slow-head` requests.
    pub fn waiting(&self) -> usize {
        self.site.gate.receiver_count()
    }
}

async fn serve(site: Arc<Site>, mut wire: ByteStream, traffic: Arc<Traffic>) -> io::Result<()> {
    while let Some(mut request) = Request::read(&mut wire, &traffic).await? {
        let after = site.answer(&mut wire, &mut request, &traffic).await?;
        match request.settle(wire, after).await? {
            Some(reusable) => wire = reusable,
            None => return Ok(()),
        }
    }
    wire.close().await
}

/// The content of an HTTP target.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) node: String,
    pub(crate) line_stream: LineStream,
    gate: watch::Sender<u64>,
}

impl Site {
    pub(crate) fn new(node: &str) -> Self {
        Self {
            node: node.to_owned(),
            line_stream: LineStream::new(),
            gate: watch::Sender::new(0),
        }
    }

    pub(crate) async fn answer(
        &self,
        wire: &mut ByteStream,
        request: &mut Request,
        traffic: &Traffic,
    ) -> io::Result<After> {
        let path = request.path().to_owned();
        match *segments(&path) {
            [] | ["metrics"] => request.answer(wire, 200, &self.metrics(traffic)).await,
            [framing @ ("size" | "chunked" | "close-delimited"), n] => {
                bytes(wire, request, n.parse().ok(), framing).await
            }
            ["repeated", n] => repeated(wire, request, n.parse().unwrap_or(0)).await,
            ["echo"] => echo(wire, request).await,
            ["follow"] => self.follow(wire, request).await,
            ["headers"] => {
                request
                    .answer(wire, 200, &String::from_utf8_lossy(&request.received.raw))
                    .await
            }
            ["upload"] => upload(wire, request).await,
            ["status", code] => status(wire, request, code.parse().ok()).await,
            ["slow-head"] => self.slow_head(wire, request).await,
            ["reset-mid-body"] => {
                let head = request.head(200, &[("Content-Length", "1048576")]);
                send_bytes(wire, head, 0, CUT_AFTER_BYTES).await?;
                Ok(After::Reset)
            }
            ["reset-chunked"] => {
                let head = request.head(200, &[("Transfer-Encoding", "chunked")]);
                send_chunks(wire, head, 0, CUT_AFTER_BYTES).await?;
                Ok(After::Reset)
            }
            ["reset-close-delimited"] => {
                send_bytes(wire, close_delimited_head(""), 0, CUT_AFTER_BYTES).await?;
                Ok(After::Reset)
            }
            ["short"] => {
                send_bytes(
                    wire,
                    request.head(200, &[("Content-Length", "1000")]),
                    0,
                    500,
                )
                .await?;
                Ok(After::Close)
            }
            ["garbage"] => {
                wire.write_all(b"\x00\x01 this is not HTTP\r\n\r\n").await?;
                Ok(After::Close)
            }
            _ => request.answer(wire, 404, "no such page\n").await,
        }
    }

    fn metrics(&self, traffic: &Traffic) -> String {
        let Self { node, .. } = self;
        format!(
            "# node {node}\n\
             culvert_demo_info{{node=\"{node}\"}} 1\n\
             culvert_demo_requests_total{{node=\"{node}\"}} {}\n",
            traffic.requests()
        )
    }

    async fn follow(&self, wire: &mut ByteStream, request: &Request) -> io::Result<After> {
        let every = request
            .query("interval_ms")
            .and_then(|millis| millis.parse().ok());
        let every = every
            .filter(|millis| *millis > 0)
            .map(Duration::from_millis);
        let following = FollowOptions {
            first_line: None,
            every,
            node: self.node.clone(),
        };
        self.line_stream.follow(wire, request, following).await
    }

    async fn slow_head(&self, wire: &mut ByteStream, request: &Request) -> io::Result<After> {
        let mut gate = self.gate.subscribe();
        tokio::select! {
            _ = gate.changed() => {}
            gone = wire.peer_gone() => return gone.map(|()| After::Close),
        }
        request
            .answer(wire, 200, &format!("{} at last\n", self.node))
            .await
    }
}

async fn bytes(
    wire: &mut ByteStream,
    request: &Request,
    n: Option<u64>,
    framing: &str,
) -> io::Result<After> {
    let seed = request.query("seed").map_or(Ok(0), str::parse);
    let (Some(n), Ok(seed)) = (n, seed) else {
        return request
            .answer(wire, 400, "the size or the seed is not a number\n")
            .await;
    };
    let (length, digest) = (n.to_string(), digest_of_sequence(seed, n));
    let sent = if request.is_head() { 0 } else { n };
    let mut fields = vec![
        ("Content-Type", "application/octet-stream"),
        ("X-Sha256", &digest),
    ];
    match framing {
        "size" => {
            fields.push(("Content-Length", &length));
            send_bytes(wire, request.head(200, &fields), seed, sent).await?;
        }
        "chunked" => {
            fields.push(("Transfer-Encoding", "chunked"));
            send_chunks(wire, request.head(200, &fields), seed, sent).await?;
            if !request.is_head() {
                wire.write_all(last_chunk()).await?;
                wire.flush().await?;
            }
        }
        _ => {
            let head = close_delimited_head(&format!("X-Sha256: {digest}\r\n"));
            send_bytes(wire, head, seed, sent).await?;
            return Ok(After::Close);
        }
    }
    Ok(After::KeepAlive)
}

async fn upload(wire: &mut ByteStream, request: &mut Request) -> io::Result<After> {
    if request.expects_continue() {
        wire.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
        wire.flush().await?;
    }
    let mut digest = Sha256::new();
    while let Some(data) = request.body.data(wire).await {
        digest.update(&data);
    }
    if !request.body.ended().is_some_and(|end| end.is_clean()) {
        return Ok(After::Close);
    }
    let answer = format!("{} {}\n", digest.bytes(), digest.finish());
    request.answer(wire, 200, &answer).await
}

async fn repeated(wire: &mut ByteStream, request: &Request, n: u64) -> io::Result<After> {
    let length = n.to_string();
    let head = request.head(200, &[("Content-Length", &length)]);
    wire.write_all(&head).await?;
    let block = repeated_block();
    let mut left = n;
    while left > 0 {
        let piece = usize::try_from(left).map_or(block.len(), |left| left.min(block.len()));
        wire.write_all(block.get(..piece).unwrap_or_default())
            .await?;
        left -= piece as u64;
    }
    wire.flush().await?;
    Ok(After::KeepAlive)
}

async fn echo(wire: &mut ByteStream, request: &mut Request) -> io::Result<After> {
    let head = request.head(200, &[("Transfer-Encoding", "chunked")]);
    wire.write_all(&head).await?;
    wire.flush().await?;
    while let Some(data) = request.body.data(wire).await {
        wire.write_all(&chunk(&data)).await?;
        wire.flush().await?;
    }
    wire.write_all(last_chunk()).await?;
    wire.flush().await?;
    Ok(After::KeepAlive)
}

async fn status(wire: &mut ByteStream, request: &Request, code: Option<u16>) -> io::Result<After> {
    match code.filter(|code| (200..=999).contains(code)) {
        Some(code) => {
            request
                .answer(wire, code, &format!("status {code} as ordered\n"))
                .await
        }
        None => request.answer(wire, 400, "not a final status\n").await,
    }
}

fn close_delimited_head(fields: &str) -> Vec<u8> {
    format!("HTTP/1.0 200 OK\r\nContent-Type: application/octet-stream\r\n{fields}\r\n")
        .into_bytes()
}

fn digest_of_sequence(seed: u64, n: u64) -> String {
    let (mut source, mut digest) = (ByteSource::new(seed), Sha256::new());
    let mut piece = vec![0; 64 * 1024];
    while digest.bytes() < n {
        piece.truncate(usize::try_from(n - digest.bytes()).unwrap_or(usize::MAX));
        source.fill(&mut piece);
        digest.update(&piece);
    }
    digest.finish()
}

/// Small enough for the buffers of a loopback connection, so that most of it arrives before the
/// reset.
const CUT_AFTER_BYTES: u64 = 64 * 1024;

#[cfg(test)]
mod tests;
