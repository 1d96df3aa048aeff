//! A caller: one connection that requests pages and sends bodies, with little CPU time of its own.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::components::edge::length;

/// Address, TLS settings and Host of a caller's requests.
#[derive(Debug, Clone)]
pub(crate) struct Endpoint {
    pub(crate) address: SocketAddr,
    /// TLS settings for a target that speaks TLS; `None` for plain TCP.
    pub(crate) tls: Option<Arc<rustls::ClientConfig>>,
    pub(crate) host: Arc<str>,
    /// Whether the address is a CONNECT listener. Its target is `host`.
    pub(crate) is_connect: bool,
}

/// DNS name in the certificate of the TLS target.
pub(crate) const TARGET_NAME: &str = "edge.bench";

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Sends a CONNECT and reads its answer. The target sends nothing before it has a request.
async fn open_tunnel(socket: &mut TcpStream, host: &str) -> Result<()> {
    let head = format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\n\r\n");
    socket.write_all(head.as_bytes()).await?;
    let mut answer = Vec::with_capacity(SMALL);
    while !answer.ends_with(b"\r\n\r\n") {
        ensure!(socket.read_buf(&mut answer).await? > 0, "no answer");
    }
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "CONNECT is refused");
    Ok(())
}

/// One connection of a caller.
pub(crate) struct Caller {
    stream: Box<dyn Io>,
    host: Arc<str>,
    buffer: Vec<u8>,
}

/// Sizes of the read buffer in bytes: `SMALL` for small pages, `LARGE` for bulk.
const SMALL: usize = 8 * 1024;
const LARGE: usize = 256 * 1024;

impl Caller {
    /// Connects to the endpoint, with TLS if the endpoint has TLS settings.
    ///
    /// # Errors
    /// The TCP connection or the TLS handshake fails.
    pub(crate) async fn connect(endpoint: &Endpoint) -> Result<Self> {
        let mut socket = TcpStream::connect(endpoint.address).await?;
        socket.set_nodelay(true)?;
        if endpoint.is_connect {
            open_tunnel(&mut socket, &endpoint.host).await?;
        }
        let stream: Box<dyn Io> = match &endpoint.tls {
            None => Box::new(socket),
            Some(tls) => {
                let name = ServerName::try_from(TARGET_NAME)?;
                Box::new(
                    TlsConnector::from(tls.clone())
                        .connect(name, socket)
                        .await?,
                )
            }
        };
        Ok(Self {
            stream,
            host: endpoint.host.clone(),
            buffer: vec![0; SMALL],
        })
    }

    /// Requests a page of `size` bytes and reads all of it.
    ///
    /// # Errors
    /// The answer is not 200, has another length, or is not complete.
    pub(crate) async fn get(&mut self, size: u64) -> Result<()> {
        self.ask(size).await?;
        let mut left = self.head(size).await?;
        if left > SMALL as u64 * 4 && self.buffer.len() < LARGE {
            self.buffer.resize(LARGE, 0);
        }
        while left > 0 {
            let count = self.stream.read(&mut self.buffer).await?;
            ensure!(count > 0, "cut, {left} bytes are missing");
            left = left
                .checked_sub(count as u64)
                .context("answer has more bytes")?;
        }
        Ok(())
    }

    /// Requests a page of `size` bytes and reads nothing.
    ///
    /// # Errors
    /// The connection is closed.
    pub(crate) async fn ask(&mut self, size: u64) -> Result<()> {
        let head = format!("GET /size/{size} HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
        self.stream.write_all(head.as_bytes()).await?;
        Ok(self.stream.flush().await?)
    }

    /// Sends a body of `size` bytes and reads the answer.
    ///
    /// # Errors
    /// The target does not read the whole body, or does not answer with an empty 200.
    pub(crate) async fn post(&mut self, size: u64) -> Result<()> {
        let head = format!(
            "POST /take HTTP/1.1\r\nHost: {}\r\nContent-Length: {size}\r\n\r\n",
            self.host
        );
        self.stream.write_all(head.as_bytes()).await?;
        self.buffer.resize(LARGE, 0);
        let mut left = size;
        while left > 0 {
            let piece = self.buffer.len().min(usize::try_from(left)?);
            let data = self.buffer.get(..piece).unwrap_or_default();
            self.stream.write_all(data).await?;
            left -= piece as u64;
        }
        self.stream.flush().await?;
        ensure!(self.head(0).await? == 0, "answer has a body");
        Ok(())
    }

    /// Reads the next bytes and returns their number, zero at the end.
    ///
    /// # Errors
    /// The connection was cut.
    pub(crate) async fn read(&mut self) -> Result<usize> {
        self.buffer.resize(LARGE, 0);
        Ok(self.stream.read(&mut self.buffer).await?)
    }

    /// Reads the head of an answer of `size` bytes. Returns how many bytes of the body are still to
    /// be read.
    async fn head(&mut self, size: u64) -> Result<u64> {
        let mut filled = 0;
        loop {
            let room = self.buffer.get_mut(filled..).unwrap_or_default();
            let count = self.stream.read(room).await?;
            ensure!(count > 0, "no answer");
            filled += count;
            let got = self.buffer.get(..filled).unwrap_or_default();
            let Some(end) = got.windows(4).position(|bytes| bytes == b"\r\n\r\n") else {
                continue;
            };
            let head = std::str::from_utf8(got.get(..end).unwrap_or_default())?;
            if !head.starts_with("HTTP/1.1 200") {
                bail!("{}", head.lines().next().unwrap_or_default());
            }
            ensure!(length(head)? == size, "answer has another length");
            let body = (filled - end - 4) as u64;
            return size.checked_sub(body).context("answer has more bytes");
        }
    }
}
