//! A plain TCP relay without crypto. Two relays in a row have the least cost that a tunnel in user
//! space can have.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::listening;

/// Buffer size in bytes. A large buffer keeps the number of system calls for bulk low.
const BUFFER: usize = 256 * 1024;

/// Relays connections until the process is killed.
#[derive(Debug, clap::Args)]
pub(crate) struct Relay {
    /// Address to which connections are relayed.
    #[arg(long)]
    to: SocketAddr,
    /// Slowdown for tests: CPU time that each read wastes.
    #[arg(long, default_value = "0s")]
    waste: humantime::Duration,
}

impl Relay {
    pub(crate) async fn run(self) -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        listening(listener.local_addr()?)?;
        let waste = *self.waste;
        let mut relaying = JoinSet::new();
        loop {
            let (socket, _) = listener.accept().await?;
            while relaying.try_join_next().is_some() {}
            relaying.spawn(async move {
                let _one_side_left = pass(socket, self.to, waste).await;
            });
        }
    }
}

async fn pass(caller: TcpStream, to: SocketAddr, waste: Duration) -> std::io::Result<()> {
    caller.set_nodelay(true)?;
    let target = TcpStream::connect(to).await?;
    target.set_nodelay(true)?;
    let mut caller = Wasteful {
        inner: caller,
        waste,
    };
    let mut target = Wasteful {
        inner: target,
        waste,
    };
    copy_bidirectional_with_sizes(&mut caller, &mut target, BUFFER, BUFFER).await?;
    Ok(())
}

/// A connection that burns CPU time on each read.
struct Wasteful {
    inner: TcpStream,
    waste: Duration,
}

impl AsyncRead for Wasteful {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let read = ready!(Pin::new(&mut self.inner).poll_read(cx, out));
        if !self.waste.is_zero() {
            let until = Instant::now() + self.waste;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        Poll::Ready(read)
    }
}

impl AsyncWrite for Wasteful {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}
