//! A minimal relay over quinn or h2. It has the windows of the product, one connection and a fixed
//! target, and neither policies nor logs, so it costs what the libraries alone cost.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bytes::{Bytes, BytesMut};
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tunnel_proto::tls;

use super::listening;

/// Name in the certificate of the edge end.
pub(crate) const NAME: &str = "relay.bench";
const ALPN: &[u8] = b"relay";
/// Same window as in the product.
const STREAM_WINDOW: u32 = 2 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 8 * STREAM_WINDOW;
const STREAMS: u32 = 2048;
const PIECE: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Quic,
    H2,
}

/// Relays connections until the process is killed. The cloud end accepts callers and dials the edge
/// end, which dials the target.
#[derive(Debug, clap::Args)]
pub(crate) struct TransportRelay {
    kind: Kind,
    /// Address of the edge end, or of the target.
    to: SocketAddr,
    /// Root certificate for the cloud end, or certificate chain and private key of the edge end.
    #[arg(required = true)]
    tls: Vec<PathBuf>,
    /// Slowdown for tests: CPU time that each read of the edge end over h2 wastes.
    #[arg(long, default_value = "0s")]
    waste: humantime::Duration,
}

impl TransportRelay {
    pub(crate) async fn run(self) -> Result<()> {
        match self.tls.as_slice() {
            [root] => {
                let root = tls::files::chain(&std::fs::read(root)?)?;
                accept_callers(self.kind, self.to, client_tls(root)?).await
            }
            [chain, key] => {
                let chain = tls::files::chain(&std::fs::read(chain)?)?;
                let key = tls::files::private_key(&std::fs::read(key)?)?;
                let config = server_tls(chain, key)?;
                match self.kind {
                    Kind::Quic => accept_quic(config, self.to).await,
                    Kind::H2 => accept_h2(config, self.to, *self.waste).await,
                }
            }
            _ => bail!("the relay takes a root, or a chain and a key"),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a stand-in, not the product")]
fn server_tls(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<rustls::ServerConfig> {
    let mut config = rustls::ServerConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

#[expect(clippy::disallowed_methods, reason = "a stand-in, not the product")]
fn client_tls(roots: Vec<CertificateDer<'static>>) -> Result<rustls::ClientConfig> {
    let mut config = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(tls::roots(roots)?)
        .with_no_client_auth();
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(config)
}

fn quic_transport() -> Arc<quinn::TransportConfig> {
    let mut transport = quinn::TransportConfig::default();
    transport
        .stream_receive_window(STREAM_WINDOW.into())
        .receive_window(CONNECTION_WINDOW.into())
        .send_window(CONNECTION_WINDOW.into())
        .max_concurrent_bidi_streams(STREAMS.into())
        // The connection is idle while other systems are measured.
        .max_idle_timeout(None);
    Arc::new(transport)
}

/// Connection of the cloud end, which opens a stream for each caller.
#[derive(Clone)]
enum Opener {
    Quic(quinn::Connection),
    H2(h2::client::SendRequest<Bytes>),
}

impl Opener {
    async fn relay(self, caller: TcpStream) -> Result<()> {
        match self {
            Self::Quic(connection) => {
                let (send, recv) = connection.open_bi().await?;
                over_quic(caller, send, recv).await
            }
            Self::H2(client) => {
                let mut client = client.ready().await?;
                let request = http::Request::post(format!("https://{NAME}/")).body(())?;
                let (response, send) = client.send_request(request, false)?;
                let body = async { anyhow::Ok(response.await?.into_body()) };
                over_h2(caller, send, body, Duration::ZERO).await
            }
        }
    }
}

async fn accept_callers(kind: Kind, edge: SocketAddr, tls: rustls::ClientConfig) -> Result<()> {
    let mut relaying = JoinSet::new();
    let opener = match kind {
        Kind::Quic => {
            let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse()?)?;
            let mut client = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls)?));
            client.transport_config(quic_transport());
            endpoint.set_default_client_config(client);
            Opener::Quic(endpoint.connect(edge, NAME)?.await?)
        }
        Kind::H2 => {
            let connector = TlsConnector::from(Arc::new(tls));
            let name = ServerName::try_from(NAME)?;
            let stream = connector.connect(name, dial(edge).await?).await?;
            let (client, connection) = h2::client::Builder::new()
                .initial_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .handshake::<_, Bytes>(stream)
                .await?;
            relaying.spawn(async move { anyhow::Ok(connection.await?) });
            Opener::H2(client)
        }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    listening(listener.local_addr()?)?;
    loop {
        let (caller, _) = listener.accept().await?;
        while relaying.try_join_next().is_some() {}
        caller.set_nodelay(true)?;
        relaying.spawn(opener.clone().relay(caller));
    }
}

async fn accept_quic(config: rustls::ServerConfig, target: SocketAddr) -> Result<()> {
    let mut server =
        quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config)?));
    server.transport_config(quic_transport());
    let endpoint = quinn::Endpoint::server(server, "127.0.0.1:0".parse()?)?;
    listening(endpoint.local_addr()?)?;
    let incoming = endpoint.accept().await.context("no connection")?;
    let connection = incoming.await?;
    let mut relaying = JoinSet::new();
    loop {
        let (send, recv) = connection.accept_bi().await?;
        while relaying.try_join_next().is_some() {}
        relaying.spawn(async move { over_quic(dial(target).await?, send, recv).await });
    }
}

async fn accept_h2(
    config: rustls::ServerConfig,
    target: SocketAddr,
    waste: Duration,
) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    listening(listener.local_addr()?)?;
    let (socket, _) = listener.accept().await?;
    socket.set_nodelay(true)?;
    let stream = TlsAcceptor::from(Arc::new(config)).accept(socket).await?;
    let mut connection = h2::server::Builder::new()
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS)
        .handshake::<_, Bytes>(stream)
        .await?;
    let mut relaying = JoinSet::new();
    while let Some(accepted) = connection.accept().await {
        while relaying.try_join_next().is_some() {}
        let (request, mut respond) = accepted?;
        let send = respond.send_response(http::Response::new(()), false)?;
        let body = async { anyhow::Ok(request.into_body()) };
        relaying.spawn(async move { over_h2(dial(target).await?, send, body, waste).await });
    }
    Ok(())
}

async fn dial(address: SocketAddr) -> Result<TcpStream> {
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    Ok(socket)
}

async fn over_quic(
    mut socket: TcpStream,
    send: quinn::SendStream,
    recv: quinn::RecvStream,
) -> Result<()> {
    let mut stream = tokio::io::join(recv, send);
    copy_bidirectional_with_sizes(&mut socket, &mut stream, PIECE, PIECE).await?;
    Ok(())
}

async fn over_h2(
    mut socket: TcpStream,
    mut send: h2::SendStream<Bytes>,
    body: impl Future<Output = Result<h2::RecvStream>>,
    waste: Duration,
) -> Result<()> {
    let (mut reader, mut writer) = socket.split();
    let sending = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(PIECE);
            let count = reader.read_buf(&mut buffer).await?;
            burn(waste);
            let mut data = buffer.split().freeze();
            if count == 0 {
                return anyhow::Ok(send.send_data(data, true)?);
            }
            while !data.is_empty() {
                send.reserve_capacity(data.len());
                let room = match send.capacity() {
                    0 => {
                        let room = poll_fn(|cx| send.poll_capacity(cx)).await;
                        room.context("stream is closed")??
                    }
                    room => room,
                };
                send.send_data(data.split_to(room.min(data.len())), false)?;
            }
        }
    };
    let receiving = async {
        let mut body = body.await?;
        while let Some(data) = body.data().await {
            let data = data?;
            writer.write_all(&data).await?;
            body.flow_control().release_capacity(data.len())?;
        }
        anyhow::Ok(writer.shutdown().await?)
    };
    tokio::try_join!(sending, receiving)?;
    Ok(())
}

fn burn(time: Duration) {
    if time.is_zero() {
        return;
    }
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}
