//! In-process sessions for tests: the semantics of a transport without a network.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Buf, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::{Mutex as AsyncMutex, mpsc, watch};

use super::stream::{IncomingStream, RawStream, Stream, StreamCut, Traffic};
use super::{CloseReason, ClosedBy, Health, Session, SessionError, TransportKind};
use crate::identity::PeerIdentity;
use crate::wire::code::{CloseCode, ResetCode};
use crate::wire::header::StreamHeader;

/// Bytes that one direction buffers unread before its writer waits.
const WINDOW_BYTES: usize = 256 * 1024;
/// Number of streams that wait for the peer to accept them.
const ACCEPT_BACKLOG: usize = 4096;

/// Returns two connected sessions. The peer of the first one has `second_identity`.
#[must_use]
pub fn pair(
    first_identity: PeerIdentity,
    second_identity: PeerIdentity,
) -> (Arc<dyn Session>, Arc<dyn Session>) {
    let (to_second, from_first) = mpsc::channel(ACCEPT_BACKLOG);
    let (to_first, from_second) = mpsc::channel(ACCEPT_BACKLOG);
    let (closed, closed_receiver) = watch::channel(None);
    let closed = Arc::new(closed);
    let session = |peer, outgoing, incoming, end| {
        Arc::new(MemorySession {
            peer,
            outgoing,
            incoming: AsyncMutex::new(incoming),
            end,
            closed: closed.clone(),
            closed_receiver: closed_receiver.clone(),
            opening: AtomicBool::new(true),
            probes: AtomicU64::new(0),
            traffic: Arc::default(),
        })
    };
    (
        session(second_identity, to_second, from_second, 0),
        session(first_identity, to_first, from_first, 1),
    )
}

#[derive(Debug)]
struct MemorySession {
    peer: PeerIdentity,
    outgoing: mpsc::Sender<MemoryStream>,
    incoming: AsyncMutex<mpsc::Receiver<MemoryStream>>,
    end: u8,
    closed: Arc<watch::Sender<Option<(u8, CloseCode, String)>>>,
    closed_receiver: watch::Receiver<Option<(u8, CloseCode, String)>>,
    opening: AtomicBool,
    probes: AtomicU64,
    traffic: Arc<Traffic>,
}

impl MemorySession {
    fn reason(&self, (end, code, reason): (u8, CloseCode, String)) -> CloseReason {
        let by = if end == self.end {
            ClosedBy::Local
        } else {
            ClosedBy::Peer
        };
        CloseReason { by, code, reason }
    }
}

#[async_trait]
impl Session for MemorySession {
    async fn open(
        &self,
        header: &StreamHeader,
        reply_timeout: Duration,
    ) -> Result<Stream, SessionError> {
        if !self.opening.load(Ordering::Relaxed) {
            return Err(SessionError::NotOpening);
        }
        let mut buffer = BytesMut::new();
        header
            .encode(&mut buffer)
            .map_err(|error| SessionError::Header(Arc::new(error)))?;
        if let Some(closed) = self.closed.borrow().clone() {
            return Err(self.reason(closed).into());
        }
        let (to_peer, from_peer) = (Arc::new(Pipe::default()), Arc::new(Pipe::default()));
        let mut ours = MemoryStream::new(
            from_peer.clone(),
            to_peer.clone(),
            self.closed_receiver.clone(),
        );
        let theirs = MemoryStream::new(to_peer, from_peer, self.closed_receiver.clone());
        let _within_window = ours.write_all(&buffer).await;
        if self.outgoing.send(theirs).await.is_err() {
            return Err(self.closed().await.into());
        }
        Ok(Stream::opened(
            Box::new(ours),
            self.traffic.clone(),
            Arc::default(),
            reply_timeout,
        ))
    }

    async fn accept(&self) -> Result<IncomingStream, SessionError> {
        let mut incoming = self.incoming.lock().await;
        tokio::select! {
            stream = incoming.recv() => match stream {
                Some(stream) => Ok(IncomingStream::new(Box::new(stream), self.traffic.clone(), Arc::default())),
                None => Err(self.closed().await.into()),
            },
            reason = self.closed() => Err(reason.into()),
        }
    }

    fn probe(&self) {
        self.probes.fetch_add(1, Ordering::Relaxed);
    }

    fn health(&self) -> Health {
        let (bytes_in, bytes_out, streams) = self.traffic.read();
        let answered = self.probes.load(Ordering::Relaxed);
        Health {
            received: answered,
            acknowledged: answered,
            rtt: Duration::ZERO,
            remote: SocketAddr::from(([127, 0, 0, 1], 0)),
            streams,
            bytes_in,
            bytes_out,
        }
    }

    fn stop_opening(&self) {
        self.opening.store(false, Ordering::Relaxed);
    }

    fn set_max_concurrent_streams(&self, _count: u32) {}

    fn has_room(&self) -> bool {
        true
    }

    async fn close(&self, code: CloseCode, reason: &str) {
        self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            if first {
                *closed = Some((self.end, code, reason.to_owned()));
            }
            first
        });
    }

    async fn closed(&self) -> CloseReason {
        let mut watch = self.closed_receiver.clone();
        let ended = watch
            .wait_for(Option::is_some)
            .await
            .ok()
            .and_then(|reason| reason.clone());
        self.reason(ended.unwrap_or_else(|| (2, CloseCode::Dead, "gone".into())))
    }

    fn peer(&self) -> &PeerIdentity {
        &self.peer
    }

    fn transport(&self) -> TransportKind {
        TransportKind::Memory
    }
}

/// One direction of a stream.
#[derive(Debug, Default)]
struct Pipe(Mutex<PipeState>);

#[derive(Debug, Default)]
struct PipeState {
    bytes: VecDeque<u8>,
    finished: bool,
    drained: bool,
    reset: Option<ResetCode>,
    stopped: Option<ResetCode>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, PipeState> {
        self.0.lock()
    }
}

impl PipeState {
    fn wake(&mut self) {
        for waker in [self.reader.take(), self.writer.take()]
            .into_iter()
            .flatten()
        {
            waker.wake();
        }
    }
}

#[derive(Debug)]
struct MemoryStream {
    inbound: Arc<Pipe>,
    outbound: Arc<Pipe>,
    closed: watch::Receiver<Option<(u8, CloseCode, String)>>,
}

impl MemoryStream {
    fn new(
        inbound: Arc<Pipe>,
        outbound: Arc<Pipe>,
        closed: watch::Receiver<Option<(u8, CloseCode, String)>>,
    ) -> Self {
        Self {
            inbound,
            outbound,
            closed,
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.borrow().is_some()
    }
}

impl RawStream for MemoryStream {
    fn reset(&mut self, code: ResetCode) {
        let mut outbound = self.outbound.lock();
        if !outbound.drained {
            outbound.reset.get_or_insert(code);
            outbound.bytes.clear();
        }
        outbound.wake();
        drop(outbound);
        self.stop(code);
    }

    fn stop(&mut self, code: ResetCode) {
        let mut inbound = self.inbound.lock();
        if !inbound.drained {
            inbound.stopped.get_or_insert(code);
        }
        inbound.wake();
    }
}

impl AsyncRead for MemoryStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut pipe = self.inbound.lock();
        if let Some(code) = pipe.reset {
            return Poll::Ready(Err(StreamCut::Reset(code).into()));
        }
        if pipe.bytes.is_empty() {
            if pipe.finished {
                pipe.drained = true;
                pipe.wake();
                return Poll::Ready(Ok(()));
            }
            if self.is_closed() {
                return Poll::Ready(Err(StreamCut::SessionLost.into()));
            }
            pipe.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let (front, _) = pipe.bytes.as_slices();
        let count = front.len().min(out.remaining());
        out.put_slice(&front[..count]);
        pipe.bytes.advance(count);
        pipe.wake();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MemoryStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut pipe = self.outbound.lock();
        if let Some(code) = pipe.stopped {
            return Poll::Ready(Err(StreamCut::Stopped(code).into()));
        }
        if self.is_closed() {
            return Poll::Ready(Err(StreamCut::SessionLost.into()));
        }
        if pipe.finished || pipe.reset.is_some() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = data
            .len()
            .min(WINDOW_BYTES.saturating_sub(pipe.bytes.len()));
        if count == 0 && !data.is_empty() {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        pipe.bytes.extend(&data[..count]);
        pipe.wake();
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut pipe = self.outbound.lock();
        if let Some(code) = pipe.stopped.filter(|_| !pipe.drained) {
            return Poll::Ready(Err(StreamCut::Stopped(code).into()));
        }
        pipe.finished = true;
        pipe.wake();
        Poll::Ready(Ok(()))
    }
}
