//! The address that a client connects to, and its TLS configuration.

use std::io;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use tokio::net::{TcpSocket, TcpStream};

use super::ClientTls;
use crate::targets::ByteStream;

/// An address to connect to, plain or with TLS.
#[derive(Debug, Clone)]
pub struct Endpoint {
    addr: SocketAddr,
    tls: Option<ClientTls>,
    source: Option<IpAddr>,
}

impl Endpoint {
    /// Returns a plain TCP endpoint. A [`SocketAddr`] converts to the same endpoint.
    pub fn plain(addr: SocketAddr) -> Self {
        Self {
            addr,
            tls: None,
            source: None,
        }
    }

    pub fn tls(addr: SocketAddr, tls: ClientTls) -> Self {
        Self {
            addr,
            tls: Some(tls),
            source: None,
        }
    }

    /// Returns the endpoint for connections from `source`, which must be of the family of the
    /// address.
    pub fn from_source(self, source: impl Into<IpAddr>) -> Self {
        Self {
            source: Some(source.into()),
            ..self
        }
    }

    pub async fn connect(&self) -> Result<ByteStream> {
        let addr = self.addr;
        let tcp = connect(self.source, addr)
            .await
            .with_context(|| format!("connect to {addr}"))?;
        tcp.set_nodelay(true).context("set TCP_NODELAY")?;
        let Some(tls) = &self.tls else {
            return Ok(ByteStream::plain(tcp));
        };
        let stream = tls.connector().connect(tls.server_name(), tcp).await;
        Ok(ByteStream::tls(
            stream.with_context(|| format!("TLS handshake with {addr}"))?,
        ))
    }
}

async fn connect(source: Option<IpAddr>, addr: SocketAddr) -> io::Result<TcpStream> {
    let Some(source) = source else {
        return TcpStream::connect(addr).await;
    };
    let socket = match addr {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    socket.bind((source, 0).into())?;
    socket.connect(addr).await
}

impl From<SocketAddr> for Endpoint {
    fn from(addr: SocketAddr) -> Self {
        Self::plain(addr)
    }
}
