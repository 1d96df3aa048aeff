//! `connect NODE PORT`: standard input and output as a connection to a port of a node, for ssh and ansible.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tunnel_proto::tls;
use tunnel_proto::tls::files::{FileError, KeyPairFiles, load_roots};
use tunnel_proto::wire::name::{NodeName, Port};

use super::{DataDirArg, VerbError};

/// Connect standard input and output to a port of a node.
#[derive(Debug, Clone, clap::Args)]
pub struct ConnectArgs {
    /// The node, by name
    pub node: NodeName,
    /// The port, which the server and the agent have to allow
    pub port: Port,
    /// A server's --connect-listen, HOST:PORT, from another machine; needs --cert-file and --ca-file
    /// [default: the server of this host]
    #[arg(long, value_name = "HOST:PORT", requires_all = ["cert_file", "ca_file"])]
    pub server: Option<String>,
    /// Own certificate chain of the server's --client-ca, PEM
    #[arg(long, value_name = "FILE", requires = "server")]
    pub cert_file: Option<PathBuf>,
    /// Its private key, PEM [default: the file of --cert-file]
    #[arg(long, value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,
    /// CA of the server's certificate, PEM: what 'tunnel-server ca' prints
    #[arg(long, value_name = "FILE", requires = "server")]
    pub ca_file: Option<PathBuf>,
    /// A server's --connect-uds on this host, in place of its admin socket
    #[arg(long, value_name = "PATH", conflicts_with = "server")]
    pub uds: Option<PathBuf>,
    /// The data directory.
    #[command(flatten)]
    pub data_dir: DataDirArg,
}

/// Why there is no connection, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The server cannot be reached.
    #[error("cannot reach the server at {0}: {1}")]
    Unreachable(String, io::Error),
    /// A file cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// TLS cannot be set up.
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    /// The server's address is not one.
    #[error("--server {0:?} is not HOST:PORT")]
    Address(String),
    /// The server did not answer as a CONNECT door does.
    #[error("the server gave no answer: {0}")]
    InvalidResponse(#[source] hyper::Error),
    /// It took too long.
    #[error("the server gave no answer in {} s", RESPONSE_TIMEOUT.as_secs())]
    Timeout,
    /// The server says no.
    #[error("{reason} ({status})")]
    Refused {
        /// Its status.
        status: StatusCode,
        /// Its line.
        reason: String,
    },
    /// The connection was cut.
    #[error("connection was reset: {0}")]
    Cut(#[source] io::Error),
}

impl ConnectArgs {
    /// Connects, and passes bytes until the node's side has ended.
    ///
    /// # Errors
    /// [`VerbError`].
    pub async fn run(self) -> Result<(), VerbError> {
        Ok(self.relay().await?)
    }

    async fn relay(&self) -> Result<(), ConnectError> {
        let Some(server) = &self.server else {
            let path = self.uds.clone();
            let path = path.unwrap_or_else(|| self.data_dir.data_dir.join(ADMIN_SOCKET));
            let socket = UnixStream::connect(&path).await;
            let socket = socket
                .map_err(|error| ConnectError::Unreachable(path.display().to_string(), error))?;
            return self.connect_over(socket).await;
        };
        let tls = self.tls()?;
        let host = server.rsplit_once(':').map(|(host, _port)| host);
        let host = host.map(|host| host.trim_matches(['[', ']']).to_owned());
        let name = host.and_then(|host| ServerName::try_from(host).ok());
        let name = name.ok_or_else(|| ConnectError::Address(server.clone()))?;
        let reach = |error| ConnectError::Unreachable(server.clone(), error);
        let dialing = async {
            let socket = TcpStream::connect(server.as_str()).await?;
            tunnel_proto::tcp::configure(&socket)?;
            TlsConnector::from(tls).connect(name, socket).await
        };
        match tokio::time::timeout(RESPONSE_TIMEOUT, dialing).await {
            Ok(connected) => self.connect_over(connected.map_err(reach)?).await,
            Err(_elapsed) => Err(ConnectError::Timeout),
        }
    }

    fn tls(&self) -> Result<Arc<rustls::ClientConfig>, ConnectError> {
        // clap requires both files beside --server.
        let certificate = self.cert_file.clone().unwrap_or_default();
        let pair = KeyPairFiles {
            key: self.key_file.clone().unwrap_or_else(|| certificate.clone()),
            certificate,
        };
        let roots = load_roots(self.ca_file.as_deref().unwrap_or_else(|| "".as_ref()))?;
        Ok(tls::caller_client(pair.load()?, tls::roots(roots)?)?)
    }

    /// Asks for the node over a connection to the server, and passes bytes.
    async fn connect_over<S>(&self, socket: S) -> Result<(), ConnectError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (mut sender, connection) = http1::handshake(TokioIo::new(socket))
            .await
            .map_err(ConnectError::InvalidResponse)?;
        let target = format!("{}:{}", self.node, self.port);
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.method_mut() = Method::CONNECT;
        // A name and a number are an authority.
        *request.uri_mut() = target.parse().unwrap_or_default();
        if let Ok(host) = target.parse() {
            request.headers_mut().insert(http::header::HOST, host);
        }
        let requesting = async {
            let response = sender.send_request(request).await;
            let mut response = response.map_err(ConnectError::InvalidResponse)?;
            let status = response.status();
            if status == StatusCode::OK {
                let upgraded = hyper::upgrade::on(&mut response).await;
                return upgraded.map_err(ConnectError::InvalidResponse);
            }
            let body = Limited::new(response.into_body(), REASON_MAX_BYTES);
            let reason = match body.collect().await {
                Ok(body) => String::from_utf8_lossy(&body.to_bytes()).trim().to_owned(),
                Err(_cut) => format!("the server refused {target}"),
            };
            Err(ConnectError::Refused { status, reason })
        };
        let driving = async {
            // Its end is told to whoever waits for the answer.
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
            Ok(tunnel) => relay_stdio(TokioIo::new(tunnel?)).await,
            Err(_elapsed) => Err(ConnectError::Timeout),
        }
    }
}

/// Standard input goes to the node until it ends, and what the node sends to standard output until that ends: then all is
/// said, whatever standard input still has.
async fn relay_stdio<S>(tunnel: S) -> Result<(), ConnectError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from_node, mut to_node) = tokio::io::split(tunnel);
    let mut input = stdio_file(io::stdin().as_fd()).map_err(ConnectError::Cut)?;
    let mut output = stdio_file(io::stdout().as_fd()).map_err(ConnectError::Cut)?;
    let sending = async {
        // A node that reads no more may still have something to say.
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
        received = receiving => received.map_err(ConnectError::Cut),
        () = sending => Ok(()),
    }
}

/// One of the process's standard files, read or written by threads that may block.
fn stdio_file(file: BorrowedFd<'_>) -> io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(File::from(
        file.try_clone_to_owned()?,
    )))
}

/// In the data directory.
const ADMIN_SOCKET: &str = "admin.sock";
/// Opening takes the server 8 s at most.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest line of a refusal.
const REASON_MAX_BYTES: usize = 4096;
