//! A stream through the tunnel whose two ends belong to the run: a caller at a TCP service, and the
//! target behind the agent.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

use super::flow::{Flow, FlowEnd, Load};
use super::watch::{Measured, ensure_soon, until};
use crate::eventually::scaled;

/// The loads of the two directions of a stream.
#[derive(Debug, Clone, Copy)]
pub struct Loads {
    /// From the caller through server and agent to the target.
    pub to_edge: Load,
    /// From the target to the caller.
    pub to_cloud: Load,
}

impl Loads {
    /// A little traffic in both directions all the time, as with `kubectl exec`.
    pub(super) const TALK: Self = Self::both(Load::Paced);

    /// Returns equal loads in both directions.
    pub const fn both(load: Load) -> Self {
        Self {
            to_edge: load,
            to_cloud: load,
        }
    }
}

/// A stream in progress.
#[derive(Debug)]
pub struct Pipe {
    pub to_edge: Flow,
    pub to_cloud: Flow,
}

impl Pipe {
    /// Opens a stream through the service at `endpoint` to the target.
    pub(super) async fn open(
        endpoint: SocketAddr,
        target: &TcpListener,
        seed: u64,
        loads: Loads,
    ) -> Result<Self> {
        let opened = timeout(scaled(OPEN), connect(endpoint, target, seed)).await;
        let (caller, target) = opened.context("no stream in time")??;
        let (from_caller, to_caller) = caller.into_split();
        let (from_target, to_target) = target.into_split();
        Ok(Self {
            to_edge: Flow::start(to_caller, from_target, seed, loads.to_edge),
            to_cloud: Flow::start(to_target, from_caller, !seed, loads.to_cloud),
        })
    }

    /// Waits until bytes flow in both directions.
    pub(super) async fn settled(&self) -> Result<()> {
        let goal = self.received().map(|bytes| bytes + SETTLED_BYTES);
        let runs = async || {
            let now = self.received();
            now[0] >= goal[0] && now[1] >= goal[1]
        };
        ensure_soon("the stream does not run", OPEN, runs).await
    }

    fn received(&self) -> [u64; 2] {
        [self.to_edge.received(), self.to_cloud.received()]
    }

    /// Restarts the measurement of the longest pause.
    pub fn forget_stalls(&self) {
        self.to_edge.forget_stalls();
        self.to_cloud.forget_stalls();
    }

    /// Returns the longer stall of the two directions.
    pub fn stall(&self) -> Duration {
        self.to_edge.stall().max(self.to_cloud.stall())
    }

    /// Makes [`Pipe::resumed`] wait for bytes that are not written yet.
    pub fn mark(&self) {
        self.to_edge.mark();
        self.to_cloud.mark();
    }

    /// Returns the time from [`Pipe::mark`] until bytes flow again in both directions. Returns
    /// `Err` if they do not within `give_up`, or if the stream was cut.
    pub async fn resumed(&self, give_up: Duration) -> Measured {
        let marked = Instant::now();
        let both = || Some(self.to_edge.resumed()?.max(self.to_cloud.resumed()?));
        let _found = until(marked, give_up, async || {
            both().is_some() || self.has_ended()
        })
        .await;
        both().ok_or_else(|| marked.elapsed())
    }

    /// Returns whether either reader has observed an end or a cut.
    pub fn has_ended(&self) -> bool {
        self.to_edge.has_ended() || self.to_cloud.has_ended()
    }

    /// Ends both directions and waits for both ends.
    pub async fn finish(self, limit: Duration) -> [FlowEnd; 2] {
        self.to_edge.stop();
        self.to_cloud.stop();
        let (to_edge, to_cloud) = tokio::join!(
            self.to_edge.finish("to the edge", limit),
            self.to_cloud.finish("to the cloud", limit)
        );
        FlowEnd::of_sockets(to_edge, to_cloud)
    }
}

async fn connect(
    endpoint: SocketAddr,
    target: &TcpListener,
    seed: u64,
) -> Result<(TcpStream, TcpStream)> {
    let mut caller = TcpStream::connect(endpoint).await.context("connect")?;
    prepare(&caller)?;
    // The target may still accept connections of abandoned streams.
    let mine = (seed ^ u64::from(caller.local_addr()?.port()).rotate_left(32)).to_be_bytes();
    caller.write_all(&mine).await.context("first bytes")?;
    loop {
        let accepted = async {
            let (mut stream, _agent) = target.accept().await.context("accept")?;
            prepare(&stream)?;
            let mut first = [0; 8];
            let is_mine = stream.read_exact(&mut first).await.is_ok() && first == mine;
            anyhow::Ok(is_mine.then_some(stream))
        };
        let mut byte = [0; 1];
        tokio::select! {
            accepted = accepted => if let Some(stream) = accepted? {
                return Ok((caller, stream));
            },
            refused = caller.peek(&mut byte) => {
                refused.context("the stream was cut at its beginning")?;
                anyhow::bail!("the stream ended at its beginning");
            }
        }
    }
}

fn prepare(stream: &TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    // Small buffers let a stopped flow drain soon.
    SockRef::from(stream).set_send_buffer_size(SEND_BUFFER)?;
    Ok(())
}

/// Time limit for opening a stream on a working tunnel.
const OPEN: Duration = Duration::from_secs(15);
/// Size of a few pieces of the flow.
const SETTLED_BYTES: u64 = 8 * 1024;
const SEND_BUFFER: usize = 64 * 1024;
