//! Upgrades as requested by kubectl: SPDY and WebSocket.

use anyhow::{Context, Result, bail, ensure};

use super::{ByteStream, Endpoint, Exchange, HttpReply, RawRequest};
use crate::targets::{first_value, websocket_accept};

#[derive(Debug, Clone)]
pub struct UpgradeClient {
    request: RawRequest,
    protocol: Protocol,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Spdy,
    WebSocket,
}

#[derive(Debug)]
pub enum Upgraded {
    /// The peer answered 101 for the requested protocol.
    Switched {
        headers: Vec<(String, String)>,
        /// The stream after the 101, starting with its first byte.
        stream: ByteStream,
    },
    /// Any other answer, read to its end.
    Refused(HttpReply),
}

impl UpgradeClient {
    /// Creates `POST path` with `Upgrade: SPDY/3.1`, as older versions of `kubectl exec` send.
    pub fn spdy(host: &str, path: &str) -> Self {
        let request = RawRequest::new("POST", path, host)
            .header("Connection", "Upgrade")
            .header("Upgrade", "SPDY/3.1")
            .header("X-Stream-Protocol-Version", "v4.channel.k8s.io")
            .header("X-Stream-Protocol-Version", "channel.k8s.io");
        Self::asking_for_spdy(request)
    }

    /// Creates `GET path` with `Upgrade: websocket`, as `kubectl exec` sends.
    pub fn websocket(host: &str, path: &str) -> Self {
        let request = RawRequest::new("GET", path, host)
            .header("Upgrade", "websocket")
            .header("Connection", "Upgrade")
            .header("Sec-WebSocket-Key", WEBSOCKET_KEY)
            .header("Sec-WebSocket-Version", "13")
            .header("Sec-WebSocket-Protocol", "v5.channel.k8s.io");
        Self::asking_for_websocket(request)
    }

    /// Wraps a handwritten request for SPDY/3.1.
    pub fn asking_for_spdy(request: RawRequest) -> Self {
        Self {
            request,
            protocol: Protocol::Spdy,
        }
    }

    /// Wraps a handwritten request for a WebSocket, with [`WEBSOCKET_KEY`].
    pub fn asking_for_websocket(request: RawRequest) -> Self {
        Self {
            request,
            protocol: Protocol::WebSocket,
        }
    }

    /// Adds a header line.
    pub fn header(self, name: &str, value: &str) -> Self {
        Self {
            request: self.request.header(name, value),
            ..self
        }
    }

    /// Sends `bytes` together with the head, before any answer. They belong to the stream.
    pub fn followed_by(self, bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            request: self.request.followed_by(bytes),
            ..self
        }
    }

    /// Connects, sends the request and reads the head of the answer.
    ///
    /// # Errors
    /// Returns an error if there is no connection or no answer, or if a 101 does not match the
    /// request.
    pub async fn connect(&self, endpoint: impl Into<Endpoint>) -> Result<Upgraded> {
        let exchange = Exchange::start(endpoint, &self.request).await?;
        if exchange.status() != 101 {
            return Ok(Upgraded::Refused(exchange.into_reply().await));
        }
        let headers = exchange.headers().to_vec();
        self.check(&headers)?;
        Ok(Upgraded::Switched {
            headers,
            stream: exchange.into_stream(),
        })
    }

    fn check(&self, headers: &[(String, String)]) -> Result<()> {
        let wanted = match self.protocol {
            Protocol::Spdy => "SPDY/3.1",
            Protocol::WebSocket => "websocket",
        };
        let upgrade = first_value(headers, "upgrade").context("101 without Upgrade")?;
        ensure!(
            upgrade.eq_ignore_ascii_case(wanted),
            "101 for {upgrade:?} in place of {wanted}"
        );
        let connection = first_value(headers, "connection").context("101 without Connection")?;
        ensure!(
            connection.eq_ignore_ascii_case("upgrade"),
            "101 with Connection {connection:?}"
        );
        if self.protocol == Protocol::WebSocket {
            let accept = first_value(headers, "sec-websocket-accept");
            ensure!(
                accept == Some(&websocket_accept(WEBSOCKET_KEY)),
                "101 with Sec-WebSocket-Accept {accept:?}"
            );
        }
        Ok(())
    }
}

impl Upgraded {
    /// Returns the stream.
    ///
    /// # Errors
    /// Returns an error if the upgrade was refused.
    pub fn switched(self) -> Result<ByteStream> {
        match self {
            Self::Switched { stream, .. } => Ok(stream),
            Self::Refused(reply) => {
                bail!("upgrade refused with {}: {}", reply.status, reply.text())
            }
        }
    }

    /// Returns the refusal.
    ///
    /// # Errors
    /// Returns an error if the upgrade was granted.
    pub fn refused(self) -> Result<HttpReply> {
        match self {
            Self::Switched { headers, .. } => bail!("upgrade granted with {headers:?}"),
            Self::Refused(reply) => Ok(reply),
        }
    }
}

/// The key of RFC 6455, section 1.3. A client without concern for caches may always use one key.
pub const WEBSOCKET_KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
