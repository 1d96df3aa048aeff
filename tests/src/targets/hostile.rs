//! A target that executes the steps of a test against its peer.

use std::io;
use std::sync::Arc;

use anyhow::Result;
use tokio::io::AsyncWriteExt;

use super::accept::{ANY_LOOPBACK_PORT, Listening, Traffic, target_methods};
use super::byte_stream::ByteStream;
use super::tls::TargetTls;

/// Executes its steps on each of its connections. After the last step it ends with FIN, over TLS
/// with close_notify.
#[derive(Debug)]
pub struct HostileTarget {
    listening: Listening,
}

/// One step of a [`HostileTarget`].
#[derive(Debug, Clone)]
pub enum HostileAction {
    ReadHead,
    Send(Vec<u8>),
    /// Sends bytes one by one, each in a separate write.
    Drip(Vec<u8>),
    /// Sends bytes repeatedly, for as long as the peer accepts them.
    Flood(Vec<u8>),
    /// Sends nothing more and waits for the peer's end. Data until then counts as bytes received.
    Hold,
    /// Starts again with the first step.
    Again,
    /// Cuts the connection with a TCP reset.
    Reset,
    /// Ends the TCP connection without TLS's close_notify.
    FinBelowTls,
}

target_methods!(HostileTarget);

impl HostileTarget {
    /// Starts a target with `actions` on a free loopback port.
    pub async fn start(actions: Vec<HostileAction>) -> Result<Self> {
        Self::start_on(None, actions).await
    }

    /// Like [`Self::start`], inside TLS with a self-signed certificate.
    pub async fn start_tls(actions: Vec<HostileAction>) -> Result<Self> {
        Self::start_on(Some(TargetTls::self_signed(&["localhost"])?), actions).await
    }

    async fn start_on(tls: Option<TargetTls>, actions: Vec<HostileAction>) -> Result<Self> {
        let actions: Arc<[HostileAction]> = actions.into();
        let listening = Listening::start(ANY_LOOPBACK_PORT, tls, move |wire, traffic| {
            act(wire, traffic, Arc::clone(&actions))
        });
        Ok(Self {
            listening: listening.await?,
        })
    }
}

async fn act(
    mut wire: ByteStream,
    traffic: Arc<Traffic>,
    actions: Arc<[HostileAction]>,
) -> io::Result<()> {
    let mut left = actions.iter();
    while let Some(action) = left.next() {
        match action {
            HostileAction::Again => left = actions.iter(),
            HostileAction::ReadHead => {
                if wire.read_head().await?.is_none() {
                    return wire.close().await;
                }
                traffic.count_request();
            }
            HostileAction::Send(bytes) => {
                wire.write_all(bytes).await?;
                wire.flush().await?;
            }
            HostileAction::Drip(bytes) => {
                for byte in bytes {
                    wire.write_all(&[*byte]).await?;
                    wire.flush().await?;
                }
            }
            HostileAction::Flood(bytes) => loop {
                wire.write_all(bytes).await?;
                wire.flush().await?;
            },
            HostileAction::Hold => {
                let gone = wire.peer_gone().await;
                traffic.count_bytes_in(wire.ahead().len());
                gone?;
                return wire.close().await;
            }
            HostileAction::Reset => return wire.reset().await,
            HostileAction::FinBelowTls => return wire.finish_below_tls(),
        }
    }
    wire.close().await
}
