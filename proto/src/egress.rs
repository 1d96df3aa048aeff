//! The socket to a target, and the relay between a stream and such a socket. The agent dials the
//! targets of its node, the server dials targets that have no agent. The agent's sockets to clients
//! of targets of the cloud have the same rules.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use crate::relay::{CutSide, PollCut, RelayEnd, RelaySide, Socket, end_cut, relay};
use crate::stream_record::{Relayed, StreamEnd};
use crate::tcp::{ConnError, Failed, abort_behind, abort_on_close, configure, failed, finish};
use crate::transport::{ByteCount, CUT_LIMIT, Stream};
use crate::wire::code::ResetCode;

/// A connection to a target. Dropping it resets the connection unless it was finished and shut
/// down, so that the target does not take a cut of the tunnel or of this process for a clean end.
#[derive(Debug)]
pub struct TargetSocket {
    /// Shared only with `failed`.
    tcp: Arc<TcpStream>,
    peer: SocketPeer,
    bytes: ByteCount,
    is_finished: bool,
    is_shut_down: bool,
    conn_error: ConnError,
    /// Awaited from the end of the input on.
    failed: Failed,
}

/// The other end of a [`TargetSocket`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketPeer {
    /// May be gone behind a complete answer, which a slow reader still gets.
    Target,
    /// Wants nothing more once it is gone.
    Client,
}

impl TargetSocket {
    /// Wraps a new connection, whose bytes advance `bytes`.
    pub fn new(tcp: TcpStream, bytes: ByteCount, peer: SocketPeer) -> Self {
        let _best_effort = configure(&tcp);
        Self {
            tcp: Arc::new(tcp),
            peer,
            bytes,
            is_finished: false,
            is_shut_down: false,
            conn_error: ConnError::default(),
            failed: Failed::default(),
        }
    }

    /// Returns the counters of the bytes that the connection has carried.
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

    fn record<T>(&mut self, passed: io::Result<T>) -> io::Result<T> {
        passed.inspect_err(|error| self.conn_error.record(error))
    }
}

impl Drop for TargetSocket {
    fn drop(&mut self) {
        if !(self.is_finished && self.is_shut_down) {
            let _gone_anyway = abort_on_close(&self.tcp);
        }
    }
}

impl CutSide for TargetSocket {
    async fn cut_for_peer(self, _code: ResetCode, takes_none: bool) {
        if !takes_none {
            self.abort().await;
        }
    }
}

impl PollCut for TargetSocket {
    fn poll_cut(&mut self, _cx: &mut Context<'_>) -> Poll<io::Error> {
        match self.conn_error.check(&self.tcp) {
            Some(error) if self.peer == SocketPeer::Client || is_cut(&error) => Poll::Ready(error),
            Some(_) | None => Poll::Pending,
        }
    }

    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let tcp = &self.tcp;
        ready!(self.failed.poll(cx, || {
            let tcp = tcp.clone();
            async move { failed(&tcp).await }
        }));
        let error = self.conn_error.check(&self.tcp);
        Poll::Ready(match (error, self.peer) {
            (Some(error), _) if is_cut(&error) => error,
            (_, SocketPeer::Client) => io::ErrorKind::ConnectionReset.into(),
            (_, SocketPeer::Target) => io::ErrorKind::BrokenPipe.into(),
        })
    }

    fn below(&mut self) -> Option<&mut dyn PollCut> {
        None
    }
}

/// Returns whether a connection has ended other than by a close behind a FIN.
fn is_cut(error: &io::Error) -> bool {
    error.kind() != io::ErrorKind::BrokenPipe
}

impl TargetSocket {
    /// Writes while the socket is shared.
    fn poll_write_shared(
        &self,
        cx: &mut Context<'_>,
        mut write: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.tcp.poll_write_ready(cx))?;
            match write(&self.tcp) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
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
        match Arc::get_mut(&mut self.tcp) {
            Some(tcp) => {
                let read = ready!(Pin::new(tcp).poll_read(cx, out));
                self.record(read)?;
            }
            // The end of the input was read before the socket was shared.
            None => return Poll::Ready(self.conn_error.end_of_input()),
        }
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
        let written = match Arc::get_mut(&mut self.tcp) {
            Some(tcp) => Pin::new(tcp).poll_write(cx, data),
            None => self.poll_write_shared(cx, |tcp| tcp.try_write(data)),
        };
        let written = ready!(written);
        let count = self.record(written)?;
        self.bytes.add_sent(count);
        Poll::Ready(Ok(count))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = match Arc::get_mut(&mut self.tcp) {
            Some(tcp) => Pin::new(tcp).poll_write_vectored(cx, data),
            None => self.poll_write_shared(cx, |tcp| tcp.try_write_vectored(data)),
        };
        let written = ready!(written);
        let count = self.record(written)?;
        self.bytes.add_sent(count);
        Poll::Ready(Ok(count))
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    /// Returns at once, because a socket has no buffer to flush.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Arc::get_mut(&mut self.tcp) {
            Some(tcp) => ready!(Pin::new(tcp).poll_shutdown(cx))?,
            None => finish(&self.tcp)?,
        }
        self.is_shut_down = true;
        Poll::Ready(Ok(()))
    }
}

/// Like [`relay_socket`], until `stop` completes because the agent stops: then both the stream, with
/// `code`, and the socket are cut. The bytes of such a relay are those that the socket has carried.
pub async fn relay_socket_until(
    mut stream: Stream,
    mut socket: TargetSocket,
    stop: impl Future<Output = ()>,
    code: ResetCode,
) -> Relayed {
    let bytes = socket.bytes();
    let mut side = Socket(&mut socket);
    let relayed = tokio::select! {
        biased;
        relayed = relay(&mut stream, &mut side) => Some(relayed),
        () = stop => None,
    };
    let Some(relayed) = relayed else {
        stream.cut_behind(code);
        drop(socket);
        let (bytes_out, bytes_in) = bytes.read();
        return Relayed {
            end: StreamEnd::AgentStopping,
            bytes_in,
            bytes_out,
            detail: String::new(),
        };
    };
    let (end, detail) = match relayed.end {
        RelayEnd::Clean => {
            socket.finish();
            (StreamEnd::Ok, String::new())
        }
        RelayEnd::ReaderClosed(_) => {
            socket.finish();
            (StreamEnd::ReaderClosed, String::new())
        }
        RelayEnd::Cut(side, cut) => {
            let end = match (side, socket.peer) {
                (RelaySide::Left, _) if cut.is_for_memory() => StreamEnd::ReaderStalled,
                (RelaySide::Left, _) => StreamEnd::CutByPeer,
                (RelaySide::Right, SocketPeer::Target) => StreamEnd::CutByTarget,
                (RelaySide::Right, SocketPeer::Client) => StreamEnd::CutByCaller,
            };
            end_cut(stream, socket, side, &cut).await;
            (end, cut.error.to_string())
        }
    };
    Relayed {
        end,
        bytes_in: relayed.left_to_right,
        bytes_out: relayed.right_to_left,
        detail,
    }
}

/// Relays between a stream and a socket until both sides have ended or one was cut. The other side
/// of a cut gets the bytes before the cut, as far as it takes them in time, and then sees a reset.
/// Dropping the future resets both.
pub async fn relay_socket(stream: Stream, socket: TargetSocket) -> Relayed {
    relay_socket_until(stream, socket, std::future::pending(), ResetCode::Dropped).await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
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

    #[tokio::test]
    async fn reset_that_a_read_reports_is_a_cut() {
        let (mut socket, target) = connected().await;
        abort_on_close(&target).unwrap();
        drop(target);
        socket.read(&mut [0]).await.unwrap_err();
        let cx = &mut Context::from_waker(std::task::Waker::noop());
        assert!(socket.poll_cut(cx).is_ready());
    }

    /// A peer that ends its direction and then resets, while the other end is silent.
    #[tokio::test(start_paused = true)]
    async fn reset_behind_a_fin_ends_a_relay_whose_other_end_is_silent() {
        for socket_peer in [SocketPeer::Target, SocketPeer::Client] {
            let (mut socket, mut peer) = connected_to(socket_peer).await;
            let (mut near, mut silent) = duplex(64);
            let (mut left, mut right) = (Socket(&mut near), Socket(&mut socket));
            let peers = async {
                peer.write_all(b"all").await.unwrap();
                peer.shutdown().await.unwrap();
                let mut got = Vec::new();
                silent.read_to_end(&mut got).await.unwrap();
                assert_eq!(got, b"all");
                // Far longer than any limit of a cut.
                tokio::time::sleep(Duration::from_secs(3600)).await;
                abort_on_close(&peer).unwrap();
                drop(peer);
                silent
            };
            let (relayed, _silent) = tokio::join!(relay(&mut left, &mut right), peers);
            let is_right = match (socket_peer, &relayed.end) {
                (SocketPeer::Target, RelayEnd::ReaderClosed(RelaySide::Right)) => true,
                (SocketPeer::Client, RelayEnd::Cut(RelaySide::Right, cut)) => !cut.has_lost_bytes,
                _ => false,
            };
            assert!(is_right, "{socket_peer:?}: {relayed:?}");
        }
    }

    /// The FIN is unread, because the other end takes no bytes.
    #[tokio::test(start_paused = true)]
    async fn reset_of_a_client_behind_a_fin_ends_a_relay_whose_other_end_is_stalled() {
        let (mut socket, mut peer) = connected_to(SocketPeer::Client).await;
        let (mut near, _stalled) = duplex(1);
        let (mut left, mut right) = (Socket(&mut near), Socket(&mut socket));
        peer.write_all(b"all").await.unwrap();
        peer.shutdown().await.unwrap();
        abort_on_close(&peer).unwrap();
        drop(peer);
        let relayed = relay(&mut left, &mut right).await;
        let RelayEnd::Cut(RelaySide::Right, cut) = relayed.end else {
            panic!("{relayed:?}");
        };
        assert!(cut.has_lost_bytes);
    }

    #[tokio::test(start_paused = true)]
    async fn half_closed_peer_that_reads_on_gets_the_whole_answer() {
        for socket_peer in [SocketPeer::Target, SocketPeer::Client] {
            let (mut socket, mut peer) = connected_to(socket_peer).await;
            let (mut near, mut far) = duplex(64);
            let (mut left, mut right) = (Socket(&mut near), Socket(&mut socket));
            let question = async {
                peer.write_all(b"question").await.unwrap();
                peer.shutdown().await.unwrap();
                let mut answer = Vec::new();
                peer.read_to_end(&mut answer).await.unwrap();
                answer
            };
            let answer = async {
                let mut question = Vec::new();
                far.read_to_end(&mut question).await.unwrap();
                tokio::time::sleep(Duration::from_secs(3600)).await;
                far.write_all(&[7; 300_000]).await.unwrap();
                far.shutdown().await.unwrap();
                question
            };
            let (relayed, answer, question) =
                tokio::join!(relay(&mut left, &mut right), question, answer);
            assert!(matches!(relayed.end, RelayEnd::Clean), "{relayed:?}");
            assert_eq!(
                (question.as_slice(), answer.len()),
                (&b"question"[..], 300_000)
            );
        }
    }

    async fn connected() -> (TargetSocket, TcpStream) {
        connected_to(SocketPeer::Target).await
    }

    async fn connected_to(peer: SocketPeer) -> (TargetSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let tcp = TcpStream::connect(address).await.unwrap();
        let (target, _) = listener.accept().await.unwrap();
        (TargetSocket::new(tcp, ByteCount::default(), peer), target)
    }
}
