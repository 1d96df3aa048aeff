//! The edge service: sends answers and reads bodies of any size over HTTP/1.1, with or without TLS.

use std::io::IoSlice;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tunnel_proto::tls;

use super::listening;

/// Serves until the process is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Edge {
    /// Certificate chain and key of a TLS service.
    #[arg(long)]
    tls: Vec<PathBuf>,
}

impl Edge {
    pub(crate) async fn run(self) -> Result<()> {
        let acceptor = match self.tls.as_slice() {
            [] => None,
            [chain, key] => {
                let chain = tls::files::chain(&std::fs::read(chain)?)?;
                let key = tls::files::private_key(&std::fs::read(key)?)?;
                Some(TlsAcceptor::from(tls_server(chain, key)?))
            }
            _ => bail!("--tls takes a chain and a key"),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        listening(listener.local_addr()?)?;
        let mut serving = JoinSet::new();
        loop {
            let (socket, _) = listener.accept().await?;
            while serving.try_join_next().is_some() {}
            socket.set_nodelay(true)?;
            let acceptor = acceptor.clone();
            serving.spawn(async move {
                let _caller_left = match acceptor {
                    None => serve(socket).await,
                    Some(acceptor) => match acceptor.accept(socket).await {
                        Ok(stream) => serve(stream).await,
                        Err(error) => Err(error.into()),
                    },
                };
            });
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a stand-in, not the product")]
fn tls_server(
    chain: Vec<rustls_pki_types::CertificateDer<'static>>,
    key: rustls_pki_types::PrivateKeyDer<'static>,
) -> Result<Arc<rustls::ServerConfig>> {
    let mut config = rustls::ServerConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    // Without tickets every caller does a full handshake.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

async fn serve<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) -> Result<()> {
    let mut input = Vec::with_capacity(4096);
    loop {
        let head = loop {
            if let Some(end) = input.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break end + 4;
            }
            if stream.read_buf(&mut input).await? == 0 {
                return Ok(());
            }
        };
        let text = std::str::from_utf8(input.get(..head).unwrap_or_default())?.to_owned();
        input.drain(..head);
        let mut to_args = text.split_whitespace();
        match (to_args.next(), to_args.next()) {
            (Some("GET"), Some(path)) => {
                let size = path
                    .strip_prefix("/size/")
                    .context("no such path")?
                    .parse()?;
                give(&mut stream, size).await?;
            }
            (Some("POST"), Some(_)) => {
                take(&mut stream, &mut input, length(&text)?).await?;
                stream
                    .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    .await?;
            }
            _ => bail!("not a request"),
        }
        stream.flush().await?;
    }
}

async fn give<S: AsyncWrite + Unpin>(stream: &mut S, size: u64) -> Result<()> {
    static PAGE: [u8; 256 * 1024] = [b'x'; 256 * 1024];
    let head =
        format!("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {size}\r\n\r\n");
    let mut left = size;
    let mut head = head.as_bytes();
    while left > 0 || !head.is_empty() {
        let piece = usize::try_from(left).unwrap_or(usize::MAX).min(PAGE.len());
        let body = PAGE.get(..piece).unwrap_or_default();
        let written = if stream.is_write_vectored() {
            stream
                .write_vectored(&[IoSlice::new(head), IoSlice::new(body)])
                .await?
        } else if head.is_empty() {
            stream.write(body).await?
        } else {
            stream.write(head).await?
        };
        if written == 0 {
            bail!("caller left");
        }
        let of_head = written.min(head.len());
        head = head.get(of_head..).unwrap_or_default();
        left -= (written - of_head) as u64;
    }
    Ok(())
}

async fn take<S: AsyncRead + Unpin>(stream: &mut S, input: &mut Vec<u8>, size: u64) -> Result<()> {
    let mut left = size.saturating_sub(input.len() as u64);
    input.clear();
    let mut scrap = vec![0; 256 * 1024];
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(scrap.len());
        let count = stream
            .read(scrap.get_mut(..most).unwrap_or_default())
            .await?;
        if count == 0 {
            bail!("caller left");
        }
        left -= count as u64;
    }
    Ok(())
}

/// Returns the value of Content-Length.
pub(crate) fn length(head: &str) -> Result<u64> {
    let mut fields = head.lines().filter_map(|line| line.split_once(':'));
    let field = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let (_, value) = field.context("no Content-Length")?;
    Ok(value.trim().parse()?)
}
