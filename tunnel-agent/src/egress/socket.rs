//! The socket to a target. Counts its bytes, and resets the connection unless the relay ended
//! cleanly.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tunnel_proto::transport::ByteCount;

use crate::metrics::Metrics;

/// A connection to a target. The connection is reset if the value is dropped before
/// [`TargetSocket::close`], so that the target does not take a cut of the tunnel or of this process
/// for a clean end.
#[derive(Debug)]
pub(crate) struct TargetSocket {
    tcp: TcpStream,
    bytes: ByteCount,
    reset_on_drop: bool,
}

impl TargetSocket {
    /// Takes a new connection.
    pub(crate) fn new(tcp: TcpStream, metrics: &Metrics) -> Self {
        let _best_effort = tunnel_proto::tcp::configure(&tcp);
        Self {
            tcp,
            bytes: metrics.bytes(),
            reset_on_drop: true,
        }
    }

    /// Closes the connection without a reset.
    pub(crate) fn close(mut self) {
        self.reset_on_drop = false;
    }
}

impl Drop for TargetSocket {
    fn drop(&mut self) {
        if self.reset_on_drop {
            let _gone_anyway = tunnel_proto::tcp::abort_on_close(&self.tcp);
        }
    }
}

impl AsyncRead for TargetSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(Pin::new(&mut self.tcp).poll_read(cx, out))?;
        self.bytes.add_received(out.filled().len() - before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TargetSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let count = ready!(Pin::new(&mut self.tcp).poll_write(cx, data))?;
        self.bytes.add_sent(count);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn targets_get_small_requests_at_once() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap())
            .await
            .unwrap();
        let socket = TargetSocket::new(tcp, &Metrics::default());
        assert!(socket.tcp.nodelay().unwrap());
    }
}
