//! The command `connect NODE PORT`: connects standard input and output to a port of a node, for ssh
//! and ansible.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tunnel_proto::dial::{dial_host, split_host_port};
use tunnel_proto::tls;
use tunnel_proto::tls::files::{FileError, KeyPairFiles, load_roots};
use tunnel_proto::wire::name::{NodeName, Port};

use super::args::DataDirArg;
use crate::ingress::connect::VIA_HEADER;

/// Connect standard input and output to a port of a node.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectArgs {
    /// Name of the node
    pub node: NodeName,
    /// Port of the node; the server and the agent must allow it
    pub port: Port,
    /// CONNECT listener (--connect-listen) of a server on another machine, HOST:PORT; needs
    /// --cert-file and --ca-file [default: the server of this host]
    #[arg(long, value_name = "HOST:PORT", requires_all = ["cert_file", "ca_file"])]
    pub server: Option<String>,
    /// Client certificate chain issued by the server's --client-ca, PEM
    #[arg(long, value_name = "FILE", requires = "server")]
    pub cert_file: Option<PathBuf>,
    /// Private key of the client certificate, PEM [default: the file of --cert-file]
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
    /// CA of the server's certificate, PEM, as printed by 'tunnel-server ca'
    #[arg(long, value_name = "FILE", requires = "server")]
    pub ca_file: Option<PathBuf>,
    /// CONNECT socket (--connect-uds) of a server on this host, instead of its admin socket
    #[arg(long, value_name = "PATH", conflicts_with = "server")]
    pub uds: Option<PathBuf>,
    /// Data directory of the server.
    #[command(flatten)]
    pub data_dir: DataDirArg,
}

/// The reason why a connection could not be opened or was lost.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The server cannot be reached.
    #[error("cannot reach the server at {0}: {1}")]
    Unreachable(String, io::Error),
    /// A certificate or key file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The value of `--server` is not `HOST:PORT`.
    #[error("--server {0:?} is not HOST:PORT")]
    Address(String),
    /// The server did not answer like a CONNECT listener.
    #[error("the server gave no answer: {0}")]
    InvalidResponse(#[source] hyper::Error),
    /// The server did not answer in time.
    #[error("the server gave no answer in {} s", RESPONSE_TIMEOUT.as_secs())]
    Timeout,
    #[error("{reason} ({status})")]
    Refused { status: StatusCode, reason: String },
    #[error("connection was reset: {0}")]
    Reset(#[source] io::Error),
}

impl ConnectArgs {
    /// Connects over the server of `data_dir`, or the one that the flags name.
    pub(super) async fn relay(&self, data_dir: &Path) -> Result<(), ConnectError> {
        let Some(server) = &self.server else {
            let path = self.uds.clone();
            let path = path.unwrap_or_else(|| data_dir.join(ADMIN_SOCKET));
            let socket = UnixStream::connect(&path).await;
            let socket = socket
                .map_err(|error| ConnectError::Unreachable(path.display().to_string(), error))?;
            return self.connect_over(socket).await;
        };
        let tls = self.tls()?;
        let name = split_host_port(server)
            .and_then(|(host, _port)| ServerName::try_from(host.to_owned()).ok());
        let name = name.ok_or_else(|| ConnectError::Address(server.clone()))?;
        let reach = |error| ConnectError::Unreachable(server.clone(), error);
        let dialing = async {
            let socket = dial_host(server, Instant::now() + RESPONSE_TIMEOUT).await?;
            tunnel_proto::tcp::configure(&socket)?;
            TlsConnector::from(tls).connect(name, socket).await
        };
        match tokio::time::timeout(RESPONSE_TIMEOUT, dialing).await {
            Ok(connected) => self.connect_over(connected.map_err(reach)?).await,
            Err(_elapsed) => Err(ConnectError::Timeout),
        }
    }

    fn tls(&self) -> Result<Arc<rustls::ClientConfig>, ConnectError> {
        // clap requires both files with --server.
        let certificate = self.cert_file.clone().unwrap_or_default();
        let pair = KeyPairFiles {
            key: self.key_file.clone().unwrap_or_else(|| certificate.clone()),
            certificate,
        };
        let roots = load_roots(self.ca_file.as_deref().unwrap_or_else(|| "".as_ref()))?;
        Ok(tls::caller_client(pair.load()?, tls::roots(roots)?)?)
    }

    /// Sends CONNECT for the node over a connection to the server, and copies bytes.
    async fn connect_over<S>(&self, socket: S) -> Result<(), ConnectError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        relay_stdio(open_tunnel(socket, &self.node, self.port).await?.io).await
    }
}

/// A byte stream to a port of a node.
#[derive(Debug)]
pub(in crate::admin) struct OpenTunnel {
    pub(in crate::admin) io: TokioIo<Upgraded>,
    /// The other server that forwards the stream, if one does and the admin socket was used.
    pub(in crate::admin) via: Option<String>,
}

/// Sends CONNECT for a port of a node over a connection to the server.
pub(in crate::admin) async fn open_tunnel<S>(
    socket: S,
    node: &NodeName,
    port: Port,
) -> Result<OpenTunnel, ConnectError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket))
        .await
        .map_err(ConnectError::InvalidResponse)?;
    let target = format!("{node}:{port}");
    let mut request = Request::new(Empty::<Bytes>::new());
    *request.method_mut() = Method::CONNECT;
    // A host name and a port always form a valid authority.
    *request.uri_mut() = target.parse().unwrap_or_default();
    if let Ok(host) = target.parse() {
        request.headers_mut().insert(http::header::HOST, host);
    }
    let requesting = async {
        let response = sender.send_request(request).await;
        let mut response = response.map_err(ConnectError::InvalidResponse)?;
        let status = response.status();
        if status == StatusCode::OK {
            let via = response.headers().get(VIA_HEADER);
            let via = via.and_then(|via| via.to_str().ok()).map(str::to_owned);
            let upgraded = hyper::upgrade::on(&mut response).await;
            let io = TokioIo::new(upgraded.map_err(ConnectError::InvalidResponse)?);
            return Ok(OpenTunnel { io, via });
        }
        let body = Limited::new(response.into_body(), REASON_MAX_BYTES);
        let reason = match body.collect().await {
            Ok(body) => String::from_utf8_lossy(&body.to_bytes()).trim().to_owned(),
            Err(_cut) => format!("the server refused {target}"),
        };
        Err(ConnectError::Refused { status, reason })
    };
    let driving = async {
        // The request or the upgrade reports the end of the connection.
        let _told = connection.with_upgrades().await;
        std::future::pending().await
    };
    let asked = async {
        tokio::select! {
            asked = requesting => asked,
            never = driving => never,
        }
    };
    match tokio::time::timeout(RESPONSE_TIMEOUT, asked).await {
        Ok(opened) => opened,
        Err(_elapsed) => Err(ConnectError::Timeout),
    }
}

/// Copies standard input to the node, and the node's data to standard output. Returns when the node
/// closes its side, even if standard input has more data.
async fn relay_stdio<S>(tunnel: S) -> Result<(), ConnectError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from_node, mut to_node) = tokio::io::split(tunnel);
    let mut input = stdio_file(io::stdin().as_fd()).map_err(ConnectError::Reset)?;
    let mut output = stdio_file(io::stdout().as_fd()).map_err(ConnectError::Reset)?;
    let sending = async {
        // A node that stops reading may still send data.
        if tokio::io::copy(&mut input, &mut to_node).await.is_ok() {
            let _gone = to_node.shutdown().await;
        }
        std::future::pending::<()>().await;
    };
    let receiving = async {
        tokio::io::copy(&mut from_node, &mut output).await?;
        output.flush().await
    };
    tokio::select! {
        received = receiving => received.map_err(ConnectError::Reset),
        () = sending => Ok(()),
    }
}

/// Returns an async handle to one of the process's standard files. Blocking threads read and write
/// it.
fn stdio_file(file: BorrowedFd<'_>) -> io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(File::from(
        file.try_clone_to_owned()?,
    )))
}

/// Name of the admin socket in the data directory.
const ADMIN_SOCKET: &str = "admin.sock";
/// Timeout for the server's answer. Opening a stream takes the server at most 8 s.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of the reason in a refusal.
const REASON_MAX_BYTES: usize = 4096;
