//! One hop over quinn or h2 without the tunnel, to measure the cost of the libraries alone.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tunnel_proto::tls;

use super::listening;

const NAME: &str = "raw.bench";
const ALPN: &[u8] = b"raw";
/// Same window as in the product.
const STREAM_WINDOW: u32 = 2 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 8 * STREAM_WINDOW;
const PIECE: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Quic,
    H2,
}

/// Sends as many bytes as each stream requests, until the process is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Sender {
    kind: Kind,
    /// Path of the certificate chain.
    chain: PathBuf,
    /// Path of the private key.
    key: PathBuf,
}

impl Sender {
    pub(crate) async fn run(self) -> Result<()> {
        let chain = tls::files::chain(&std::fs::read(&self.chain)?)?;
        let key = tls::files::private_key(&std::fs::read(&self.key)?)?;
        let config = server_tls(chain, key)?;
        match self.kind {
            Kind::Quic => send_quic(config).await,
            Kind::H2 => send_h2(config).await,
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a stand-in, not the product")]
fn server_tls(
    chain: Vec<CertificateDer<'static>>,
    key: rustls_pki_types::PrivateKeyDer<'static>,
) -> Result<rustls::ServerConfig> {
    let mut config = rustls::ServerConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

#[expect(clippy::disallowed_methods, reason = "a stand-in, not the product")]
fn client_tls(root: &CertificateDer<'static>) -> Result<rustls::ClientConfig> {
    let mut config = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(tls::roots([root.clone()])?)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn quic_transport() -> Arc<quinn::TransportConfig> {
    let mut transport = quinn::TransportConfig::default();
    transport
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(CONNECTION_WINDOW.into())
        .send_window(CONNECTION_WINDOW.into());
    Arc::new(transport)
}

async fn send_quic(config: rustls::ServerConfig) -> Result<()> {
    let mut server =
        quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config)?));
    server.transport_config(quic_transport());
    let endpoint = quinn::Endpoint::server(server, "127.0.0.1:0".parse()?)?;
    listening(endpoint.local_addr()?)?;
    let mut connections = JoinSet::new();
    while let Some(incoming) = endpoint.accept().await {
        connections.spawn(async move {
            let connection = incoming.await?;
            while let Ok((mut send, mut recv)) = connection.accept_bi().await {
                let mut wanted = [0; 8];
                recv.read_exact(&mut wanted).await?;
                let mut left = u64::from_be_bytes(wanted);
                let piece = Bytes::from(vec![b'x'; PIECE]);
                while left > 0 {
                    let count = piece.len().min(usize::try_from(left)?);
                    send.write_chunk(piece.slice(..count)).await?;
                    left -= count as u64;
                }
                send.finish()?;
            }
            anyhow::Ok(())
        });
    }
    Ok(())
}

async fn send_h2(config: rustls::ServerConfig) -> Result<()> {
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    listening(listener.local_addr()?)?;
    let mut connections = JoinSet::new();
    loop {
        let (socket, _) = listener.accept().await?;
        socket.set_nodelay(true)?;
        let acceptor = acceptor.clone();
        connections.spawn(async move {
            let stream = acceptor.accept(socket).await?;
            let mut connection = h2::server::Builder::new()
                .initial_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .handshake::<_, Bytes>(stream)
                .await?;
            let mut streams = JoinSet::new();
            while let Some(accepted) = connection.accept().await {
                let (request, mut respond) = accepted?;
                let wanted = request.uri().path().trim_start_matches('/').parse()?;
                let body = respond.send_response(http::Response::new(()), false)?;
                streams.spawn(send_body(body, wanted));
            }
            anyhow::Ok(())
        });
    }
}

async fn send_body(mut body: h2::SendStream<Bytes>, mut left: u64) -> Result<()> {
    let piece = Bytes::from(vec![b'x'; PIECE]);
    while left > 0 {
        body.reserve_capacity(PIECE);
        let room = std::future::poll_fn(|cx| body.poll_capacity(cx)).await;
        let room = room.context("stream is closed")??;
        let count = piece.len().min(usize::try_from(left)?).min(room);
        left -= count as u64;
        body.send_data(piece.slice(..count), left == 0)?;
    }
    Ok(())
}

/// Reads `bytes` over one stream of a new connection. Returns the duration of the stream.
pub(crate) async fn receive(
    kind: Kind,
    from: SocketAddr,
    root: &CertificateDer<'static>,
    bytes: u64,
) -> Result<Duration> {
    let tls = client_tls(root)?;
    match kind {
        Kind::Quic => receive_quic(from, tls, bytes).await,
        Kind::H2 => receive_h2(from, tls, bytes).await,
    }
}

async fn receive_quic(from: SocketAddr, tls: rustls::ClientConfig, bytes: u64) -> Result<Duration> {
    let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse()?)?;
    let mut client = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
    client.transport_config(quic_transport());
    endpoint.set_default_client_config(client);
    let connection = endpoint.connect(from, NAME)?.await?;
    let began = std::time::Instant::now();
    let (mut send, mut recv) = connection.open_bi().await?;
    send.write_all(&bytes.to_be_bytes()).await?;
    let mut got = 0;
    while let Some(chunk) = recv.read_chunk(PIECE * 4, true).await? {
        got += chunk.bytes.len() as u64;
    }
    let took = began.elapsed();
    connection.close(0_u32.into(), b"");
    endpoint.wait_idle().await;
    whole(got, bytes)?;
    Ok(took)
}

async fn receive_h2(from: SocketAddr, tls: rustls::ClientConfig, bytes: u64) -> Result<Duration> {
    let socket = TcpStream::connect(from).await?;
    socket.set_nodelay(true)?;
    let name = ServerName::try_from(NAME)?;
    let stream = TlsConnector::from(Arc::new(tls))
        .connect(name, socket)
        .await?;
    let (mut client, connection) = h2::client::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .handshake::<_, Bytes>(stream)
        .await?;
    let mut driver = JoinSet::new();
    driver.spawn(connection);
    let began = std::time::Instant::now();
    let request = http::Request::get(format!("https://{NAME}/{bytes}")).body(())?;
    let (response, _) = client.send_request(request, true)?;
    let mut body = response.await?.into_body();
    let mut got = 0;
    while let Some(data) = body.data().await {
        let count = data?.len();
        body.flow_control().release_capacity(count)?;
        got += count as u64;
    }
    let took = began.elapsed();
    whole(got, bytes)?;
    Ok(took)
}

fn whole(got: u64, wanted: u64) -> Result<()> {
    if got != wanted {
        bail!("{got} of {wanted} bytes");
    }
    Ok(())
}

/// Returns the name that the sender's certificate must have.
pub(crate) const fn name() -> &'static str {
    NAME
}
