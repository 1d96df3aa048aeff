//! Where a client connects, and whether it speaks TLS there.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use tokio::net::TcpStream;

use super::ClientTls;
use crate::targets::Wire;

/// An address to connect to, plain or with TLS.
#[derive(Debug, Clone)]
pub struct Door {
    addr: SocketAddr,
    tls: Option<ClientTls>,
}

impl Door {
    /// Plain TCP to `addr`; a [`SocketAddr`] converts to the same.
    pub fn plain(addr: SocketAddr) -> Self {
        Self { addr, tls: None }
    }

    /// TLS to `addr`.
    pub fn tls(addr: SocketAddr, tls: ClientTls) -> Self {
        Self {
            addr,
            tls: Some(tls),
        }
    }

    pub(crate) async fn connect(&self) -> Result<Wire> {
        let addr = self.addr;
        let tcp = TcpStream::connect(addr)
            .await
            .with_context(|| format!("connect to {addr}"))?;
        tcp.set_nodelay(true).context("set TCP_NODELAY")?;
        let Some(tls) = &self.tls else {
            return Ok(Wire::plain(tcp));
        };
        let stream = tls.connector().connect(tls.server_name(), tcp).await;
        Ok(Wire::tls(
            stream.with_context(|| format!("TLS handshake with {addr}"))?,
        ))
    }
}

impl From<SocketAddr> for Door {
    fn from(addr: SocketAddr) -> Self {
        Self::plain(addr)
    }
}
