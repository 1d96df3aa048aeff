//! Plain TCP targets: echo, reset, half-close and silence.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;

use super::accept::{ANY_LOOPBACK_PORT, Listening, Traffic, target_methods};
use super::answers::After;
use super::script::{Received, ReceivedLog, Script};
use super::wire::Wire;

/// A target that sends back received data until FIN, then FIN.
#[derive(Debug)]
pub struct EchoTarget {
    listening: Listening,
    log: Arc<ReceivedLog>,
}

/// A target that sends some bytes, then cuts with a TCP reset.
#[derive(Debug)]
pub struct ResetTarget {
    listening: Listening,
}

/// A target that reads to FIN, then sends some bytes and FIN; or in the opposite order.
#[derive(Debug)]
pub struct HalfCloseTarget {
    listening: Listening,
    log: Arc<ReceivedLog>,
}

/// A target that accepts, never sends a byte, and closes when its peer has.
#[derive(Debug)]
pub struct SilentTarget {
    listening: Listening,
}

target_methods!(EchoTarget);
target_methods!(ResetTarget);
target_methods!(HalfCloseTarget);
target_methods!(SilentTarget);

impl EchoTarget {
    /// Starts an echo target on a free loopback port.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start() -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT).await
    }

    /// Starts an echo target on `bind`.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn start_on(bind: SocketAddr) -> Result<Self> {
        let (listening, log) = start(bind, Script::Echo).await?;
        Ok(Self { listening, log })
    }

    /// Returns the data received by connections that ended cleanly.
    pub fn received(&self) -> Vec<Received> {
        self.log.all()
    }
}

impl ResetTarget {
    /// Starts a target that resets after the first `bytes` of sequence 0, sent at once.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start(bytes: u64) -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT, false, bytes).await
    }

    /// Like [`Self::start`], but only after the peer's first byte.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start_waiting(bytes: u64) -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT, true, bytes).await
    }

    /// Starts a target on `bind`, which waits for the peer's first byte if `waits` is set.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn start_on(bind: SocketAddr, waits: bool, bytes: u64) -> Result<Self> {
        let (listening, _log) = start(bind, Script::Reset { waits, bytes }).await?;
        Ok(Self { listening })
    }
}

impl HalfCloseTarget {
    /// Starts a target that reads to FIN, then sends the first `bytes` of sequence 0 and FIN.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start(bytes: u64) -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT, bytes).await
    }

    /// Like [`Self::start`], on `bind`.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn start_on(bind: SocketAddr, bytes: u64) -> Result<Self> {
        let (listening, log) = start(
            bind,
            Script::SinkThenSend {
                bytes,
                digest: false,
            },
        )
        .await?;
        Ok(Self { listening, log })
    }

    /// Starts a target that sends the first `bytes` of sequence 0 and FIN, then reads to FIN.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start_sending(bytes: u64) -> Result<Self> {
        let (listening, log) = start(ANY_LOOPBACK_PORT, Script::SendThenSink { bytes }).await?;
        Ok(Self { listening, log })
    }

    /// Returns the data received by connections that ended cleanly.
    pub fn received(&self) -> Vec<Received> {
        self.log.all()
    }
}

impl SilentTarget {
    /// Starts a target that reads all data, so that it notices its peer's end.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start() -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT).await
    }

    /// Like [`Self::start`], on `bind`.
    ///
    /// # Errors
    /// Returns an error if the address cannot be bound.
    pub async fn start_on(bind: SocketAddr) -> Result<Self> {
        let (listening, _log) = start(bind, Script::Silent).await?;
        Ok(Self { listening })
    }

    /// Starts a target that reads nothing, so that its peer's writes stall, and notices no end.
    ///
    /// # Errors
    /// Returns an error if the port cannot be bound.
    pub async fn start_deaf() -> Result<Self> {
        let (listening, _log) = start(ANY_LOOPBACK_PORT, Script::Deaf).await?;
        Ok(Self { listening })
    }
}

async fn start(bind: SocketAddr, script: Script) -> Result<(Listening, Arc<ReceivedLog>)> {
    let log = Arc::new(ReceivedLog::default());
    let shared_log = Arc::clone(&log);
    let listening = Listening::start(bind, None, move |wire, traffic| {
        run(script, wire, traffic, Arc::clone(&shared_log))
    });
    Ok((listening.await?, log))
}

async fn run(
    script: Script,
    mut wire: Wire,
    traffic: Arc<Traffic>,
    log: Arc<ReceivedLog>,
) -> io::Result<()> {
    match script.act(&mut wire, Vec::new(), &traffic, &log).await? {
        After::KeepAlive | After::Close => wire.close().await,
        After::Reset => wire.reset().await,
    }
}

#[cfg(test)]
mod tests;
