//! A dialer through a CONNECT listener that behaves like kube-apiserver's egress selector:
//! HTTPConnect over a Unix socket or over TCP. This dialer reads nothing but the status line, and
//! accepts no byte after the head before it has sent data (`egressselector.tunnelHTTPConnect`).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_rustls::client::TlsStream;

use super::{ClientTls, Endpoint};

/// A bidirectional byte stream.
pub trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

pub type Tunnel = Box<dyn Bytes>;

/// Dials targets through a CONNECT listener, with one connection per target.
#[derive(Clone)]
pub struct EgressDialer(Transport);

#[derive(Clone)]
enum Transport {
    Unix(PathBuf),
    Tcp(Endpoint),
}

impl fmt::Debug for EgressDialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Transport::Unix(path) => write!(f, "EgressDialer({})", path.display()),
            Transport::Tcp(endpoint) => write!(f, "EgressDialer({endpoint:?})"),
        }
    }
}

impl EgressDialer {
    /// Creates the dialer of `transport: { uds: { udsName } }`.
    pub fn uds(path: &Path) -> Self {
        Self(Transport::Unix(path.to_owned()))
    }

    /// Creates the dialer of `transport: { tcp: { url, tlsConfig } }`.
    pub fn tcp(endpoint: impl Into<Endpoint>) -> Self {
        Self(Transport::Tcp(endpoint.into()))
    }

    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// Returns an error with the message of kube-apiserver.
    pub async fn dial(&self, target: &str) -> Result<Tunnel> {
        let mut tunnel: Tunnel = match &self.0 {
            Transport::Unix(path) => Box::new(
                UnixStream::connect(path)
                    .await
                    .with_context(|| format!("failed to dial to {}", path.display()))?,
            ),
            Transport::Tcp(endpoint) => Box::new(endpoint.connect().await?),
        };
        let request = format!("CONNECT {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
        tunnel.write_all(request.as_bytes()).await?;
        tunnel.flush().await?;
        // Like bufio.NewReader: one read returns all available bytes.
        let (mut read, mut piece) = (Vec::new(), [0; 4096]);
        let head_end = loop {
            if let Some(at) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            let count = tunnel.read(&mut piece).await?;
            ensure!(
                count > 0,
                "reading HTTP response from CONNECT to {target} failed: unexpected EOF"
            );
            read.extend_from_slice(&piece[..count]);
        };
        let head = String::from_utf8_lossy(&read[..head_end]).into_owned();
        let line = head.lines().next().unwrap_or_default();
        let status = line.split_once(' ').map_or("", |(_, status)| status);
        let code = status.get(..3).unwrap_or_default();
        if code != "200" {
            bail!("proxy error while dialing {target}, code {code}: {status}");
        }
        let buffered = read.len() - head_end;
        ensure!(
            buffered == 0,
            "unexpected {buffered} bytes of buffered data from CONNECT proxy"
        );
        Ok(tunnel)
    }
}

/// Starts TLS with the target inside the tunnel.
pub async fn over_tls(tunnel: Tunnel, tls: &ClientTls) -> io::Result<TlsStream<Tunnel>> {
    tls.connector().connect(tls.server_name(), tunnel).await
}

/// Sends a request and reads to the end of the connection.
pub async fn ask_through(mut tunnel: impl Bytes, request: &str) -> io::Result<String> {
    tunnel.write_all(request.as_bytes()).await?;
    tunnel.flush().await?;
    let mut answer = Vec::new();
    tunnel.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
