//! Plain TCP targets: echo, reset, half-close and silence.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use socket2::SockRef;
use tokio::net::TcpSocket;

use super::accept::{ANY_LOOPBACK_PORT, BACKLOG, Listening, Traffic, target_methods};
use super::answers::After;
use super::byte_stream::ByteStream;
use super::script::{ReceivedLog, Script};

/// A target that sends back received data until FIN, then FIN.
#[derive(Debug)]
pub struct EchoTarget {
    listening: Listening,
}

/// A target that waits for its peer's first byte, sends some bytes, then cuts with a TCP reset.
#[derive(Debug)]
pub struct ResetTarget {
    listening: Listening,
}

/// A target that reads to FIN, then sends some bytes and FIN.
#[derive(Debug)]
pub struct HalfCloseTarget {
    listening: Listening,
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
    pub async fn start() -> Result<Self> {
        Self::start_on(ANY_LOOPBACK_PORT).await
    }

    pub async fn start_on(bind: SocketAddr) -> Result<Self> {
        let listening = start(bind, Script::Echo).await?;
        Ok(Self { listening })
    }
}

impl ResetTarget {
    /// Starts a target on a free loopback port that resets after the first `bytes` of sequence 0.
    pub async fn start_waiting(bytes: u64) -> Result<Self> {
        let listening = start(ANY_LOOPBACK_PORT, Script::Reset { bytes }).await?;
        Ok(Self { listening })
    }
}

impl HalfCloseTarget {
    /// Starts a target on a free loopback port that answers with the first `bytes` of sequence 0.
    pub async fn start(bytes: u64) -> Result<Self> {
        let digest = false;
        let script = Script::SinkThenSend { bytes, digest };
        let listening = start(ANY_LOOPBACK_PORT, script).await?;
        Ok(Self { listening })
    }
}

impl SilentTarget {
    /// Starts a target that reads all data, so that it notices its peer's end.
    pub async fn start() -> Result<Self> {
        let listening = start(ANY_LOOPBACK_PORT, Script::Silent).await?;
        Ok(Self { listening })
    }

    /// Starts a target that reads nothing, so that its peer's writes stall, and notices no end. Its
    /// connections hold little in the kernel: with the segments and buffers of loopback it would be
    /// 4 MB each, and hundreds of them would exhaust the TCP memory of the host.
    pub fn start_deaf() -> Result<Self> {
        let socket = TcpSocket::new_v4()?;
        SockRef::from(&socket).set_tcp_mss(ETHERNET_SEGMENT_BYTES)?;
        socket.set_recv_buffer_size(DEAF_BUFFER_BYTES)?;
        socket.bind(ANY_LOOPBACK_PORT)?;
        let run_deaf = |wire, traffic| run(Script::Deaf, wire, traffic);
        let listening = Listening::start_on(socket.listen(BACKLOG.into())?, None, run_deaf)?;
        Ok(Self { listening })
    }
}

async fn start(bind: SocketAddr, script: Script) -> Result<Listening> {
    Listening::start(bind, None, move |wire, traffic| run(script, wire, traffic)).await
}

async fn run(script: Script, mut wire: ByteStream, traffic: Arc<Traffic>) -> io::Result<()> {
    let log = ReceivedLog::default();
    match script.act(&mut wire, Vec::new(), &traffic, &log).await? {
        After::KeepAlive | After::Close => wire.close().await,
        After::Reset => wire.reset().await,
    }
}

/// Payload of a full TCP segment on Ethernet.
const ETHERNET_SEGMENT_BYTES: u32 = 1460;
const DEAF_BUFFER_BYTES: u32 = 4096;
