//! The socket to a target, and the relay between a stream and such a socket. The agent dials the
//! targets of its node, the server dials targets that have no agent. The agent's sockets to clients
//! of targets of the cloud have the same rules.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::relay::{PollCut, RelayEnd, RelaySide, Socket, relay};
use crate::tcp::{ConnError, abort_behind, abort_on_close, configure};
use crate::transport::{ByteCount, CUT_LIMIT, Stream, StreamCut, find_cause};
use crate::wire::code::ResetCode;

/// A connection to a target. Dropping it resets the connection unless it was finished and shut
/// down, so that the target does not take a cut of the tunnel or of this process for a clean end.
#[derive(Debug)]
pub struct TargetSocket {
    tcp: TcpStream,
    bytes: ByteCount,
    is_finished: bool,
    is_shut_down: bool,
    conn_error: ConnError,
}

impl TargetSocket {
    /// Wraps a new connection, whose bytes advance `bytes`.
    #[must_use]
    pub fn new(tcp: TcpStream, bytes: ByteCount) -> Self {
        let _best_effort = configure(&tcp);
        Self {
            tcp,
            bytes,
            is_finished: false,
            is_shut_down: false,
            conn_error: ConnError::default(),
        }
    }

    /// Returns the counters of the bytes that the connection has carried.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        self.bytes.clone()
    }

    /// Marks the data as complete. After `shutdown`, a drop is then a clean end.
    pub fn finish(&mut self) {
        self.is_finished = true;
    }

    /// Resets the connection behind the bytes that were written to it, as far as the peer takes them
    /// in time.
    pub async fn abort(self) {
        abort_behind(&self.tcp, CUT_LIMIT).await;
    }

    fn record<T>(&mut self, written: io::Result<T>) -> io::Result<T> {
        written.inspect_err(|error| self.conn_error.record(error))
    }
}

impl Drop for TargetSocket {
    fn drop(&mut self) {
        if !(self.is_finished && self.is_shut_down) {
            let _gone_anyway = abort_on_close(&self.tcp);
        }
    }
}

impl PollCut for TargetSocket {
    fn poll_cut(&mut self, _cx: &mut Context<'_>) -> Poll<io::Error> {
        match self.conn_error.check(&self.tcp) {
            Some(error) => Poll::Ready(error),
            None => Poll::Pending,
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
        let count = out.filled().len() - before;
        self.bytes.add_received(count);
        if count == 0 && out.remaining() > 0 {
            self.conn_error.end_of_input()?;
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TargetSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.tcp).poll_write(cx, data));
        let count = self.record(written)?;
        self.bytes.add_sent(count);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.tcp).poll_write_vectored(cx, data));
        let count = self.record(written)?;
        self.bytes.add_sent(count);
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.tcp).poll_shutdown(cx))?;
        self.is_shut_down = true;
        Poll::Ready(Ok(()))
    }
}

/// The totals and the end of a relay between a stream and a socket.
#[derive(Debug)]
pub struct SocketRelay {
    /// How the relay ended.
    pub end: SocketRelayEnd,
    /// Bytes from the stream to the socket.
    pub from_tunnel: u64,
    /// Bytes from the socket to the stream.
    pub to_tunnel: u64,
    /// The error of a cut; empty without one.
    pub detail: String,
}

/// The end of a relay between a stream and a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketRelayEnd {
    /// Both sides ended without a cut.
    Clean,
    /// One side was complete, and its reader closed.
    ReaderClosed,
    /// The stream was cut.
    StreamCut,
    /// The socket's reader, or the stream's, was stalled for so long that the stream had to end.
    ReaderStalled,
    /// The socket was cut.
    SocketCut,
}

/// Relays between a stream and a socket until both sides have ended or one was cut. The other side
/// of a cut gets the bytes before the cut, as far as it takes them in time, and then sees a reset.
/// Dropping the future resets both.
pub async fn relay_socket(mut stream: Stream, mut socket: TargetSocket) -> SocketRelay {
    let relayed = relay(&mut stream, &mut Socket(&mut socket)).await;
    let (end, detail) = match relayed.end {
        RelayEnd::Clean => {
            socket.finish();
            (SocketRelayEnd::Clean, String::new())
        }
        RelayEnd::ReaderClosed(_) => {
            socket.finish();
            (SocketRelayEnd::ReaderClosed, String::new())
        }
        RelayEnd::Cut(RelaySide::Left, cut) => {
            drop(stream);
            if !cut.is_reader_stalled {
                socket.abort().await;
            }
            let is_stalled = find_cause(&cut.error).is_some_and(StreamCut::is_reader_stalled);
            let end = if is_stalled {
                SocketRelayEnd::ReaderStalled
            } else {
                SocketRelayEnd::StreamCut
            };
            (end, cut.error.to_string())
        }
        RelayEnd::Cut(RelaySide::Right, cut) => {
            stream.reset(ResetCode::PeerCut);
            (SocketRelayEnd::SocketCut, cut.error.to_string())
        }
    };
    SocketRelay {
        end,
        from_tunnel: relayed.left_to_right,
        to_tunnel: relayed.right_to_left,
        detail,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn targets_get_small_requests_at_once() {
        let (socket, _target) = connected().await;
        assert!(socket.tcp.nodelay().unwrap());
    }

    #[tokio::test]
    async fn only_a_socket_that_is_finished_and_shut_down_ends_cleanly() {
        let reset = Err(io::ErrorKind::ConnectionReset);
        for (is_finished, is_shut_down, expected) in [
            (false, false, reset),
            (true, false, reset),
            (true, true, Ok(0)),
        ] {
            let (mut socket, mut target) = connected().await;
            if is_finished {
                socket.finish();
            }
            if is_shut_down {
                socket.shutdown().await.unwrap();
            }
            drop(socket);
            let end = target.read(&mut [0]).await.map_err(|error| error.kind());
            assert_eq!(end, expected, "{is_finished} {is_shut_down}");
        }
    }

    #[tokio::test]
    async fn bytes_of_both_directions_are_counted() {
        let (mut socket, mut target) = connected().await;
        socket.write_all(b"quest").await.unwrap();
        let pieces = [io::IoSlice::new(b"i"), io::IoSlice::new(b"on")];
        assert_eq!(socket.write_vectored(&pieces).await.unwrap(), 3);
        target.write_all(b"answer").await.unwrap();
        socket.read_exact(&mut [0; 6]).await.unwrap();
        assert_eq!(socket.bytes().read(), (6, 8));
    }

    async fn connected() -> (TargetSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let tcp = TcpStream::connect(address).await.unwrap();
        let (target, _) = listener.accept().await.unwrap();
        (TargetSocket::new(tcp, ByteCount::default()), target)
    }
}
