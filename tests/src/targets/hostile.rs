//! A target that does to its peer whatever a test says, step by step.

use std::io;
use std::sync::Arc;

use anyhow::Result;
use tokio::io::AsyncWriteExt;

use super::accept::{ANY_LOOPBACK_PORT, Listening, Traffic, target_methods};
use super::tls::TargetTls;
use super::wire::Wire;

/// Takes the same steps on each of its connections. Behind the last one it ends with FIN, over TLS with close_notify.
#[derive(Debug)]
pub struct HostileTarget {
    listening: Listening,
}

/// One thing that a [`HostileTarget`] does.
#[derive(Debug, Clone)]
pub enum Step {
    /// Reads a request's head.
    ReadHead,
    /// Sends bytes.
    Send(Vec<u8>),
    /// Sends bytes one by one, each in a write of its own.
    Drip(Vec<u8>),
    /// Sends bytes over and over, for as long as the peer takes them.
    Flood(Vec<u8>),
    /// Says nothing more and waits for the peer's end; what comes until then counts as bytes received.
    Hold,
    /// Begins again with the first step.
    Again,
    /// Cuts the connection with a TCP reset.
    Reset,
    /// Ends the TCP connection without TLS's close_notify.
    FinBelowTls,
}

target_methods!(HostileTarget);

impl HostileTarget {
    /// A target that takes `steps`, on a free loopback port.
    ///
    /// # Errors
    /// The port cannot be bound.
    pub async fn start(steps: Vec<Step>) -> Result<Self> {
        Self::start_on(None, steps).await
    }

    /// As [`Self::start`], inside TLS with a self-signed certificate.
    ///
    /// # Errors
    /// The certificate cannot be made or the port not be bound.
    pub async fn start_tls(steps: Vec<Step>) -> Result<Self> {
        Self::start_on(Some(TargetTls::self_signed(&["localhost"])?), steps).await
    }

    async fn start_on(tls: Option<TargetTls>, steps: Vec<Step>) -> Result<Self> {
        let steps: Arc<[Step]> = steps.into();
        let listening = Listening::start(ANY_LOOPBACK_PORT, tls, move |wire, traffic| {
            act(wire, traffic, Arc::clone(&steps))
        });
        Ok(Self {
            listening: listening.await?,
        })
    }
}

async fn act(mut wire: Wire, traffic: Arc<Traffic>, steps: Arc<[Step]>) -> io::Result<()> {
    let mut left = steps.iter();
    while let Some(step) = left.next() {
        match step {
            Step::Again => left = steps.iter(),
            Step::ReadHead => {
                if wire.read_head().await?.is_none() {
                    return wire.close().await;
                }
                traffic.count_request();
            }
            Step::Send(bytes) => {
                wire.write_all(bytes).await?;
                wire.flush().await?;
            }
            Step::Drip(bytes) => {
                for byte in bytes {
                    wire.write_all(&[*byte]).await?;
                    wire.flush().await?;
                }
            }
            Step::Flood(bytes) => loop {
                wire.write_all(bytes).await?;
                wire.flush().await?;
            },
            Step::Hold => {
                let gone = wire.peer_gone().await;
                traffic.count_bytes_in(wire.ahead().len());
                gone?;
                return wire.close().await;
            }
            Step::Reset => return wire.reset().await,
            Step::FinBelowTls => return wire.finish_below_tls(),
        }
    }
    wire.close().await
}
