use std::future::poll_fn;
use std::pin::pin;

use tokio::io::{AsyncReadExt, DuplexStream, duplex};
use tokio::time::Instant;

use super::*;
use crate::transport::BufferPool;
use crate::transport::flow::test_transport::TestTransport;
use crate::transport::flow::{FlowSettings, StreamWindow};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// A stream whose peer answers through the given pipe and reads nothing: the peer has stopped
/// reading, or (`is_full`) other streams send first.
struct NonReadingPeer {
    pipe: DuplexStream,
    is_full: bool,
}

impl NonReadingPeer {
    fn blocked_or_stopped<T>(&self) -> Poll<io::Result<T>> {
        if self.is_full {
            return Poll::Pending;
        }
        Poll::Ready(Err(StreamCut::Stopped(ResetCode::Refused).into()))
    }
}

impl RawStream for NonReadingPeer {
    fn cut_now(&mut self, _code: ResetCode) {}
    fn cut_behind(&mut self, _code: ResetCode) {}
    fn poll_cut(&mut self, _cx: &mut Context<'_>) -> Poll<io::Error> {
        Poll::Pending
    }
    fn poll_stopped(&mut self, _cx: &mut Context<'_>) -> Poll<io::Error> {
        Poll::Pending
    }
    fn stop(&mut self, _code: ResetCode) {}
    fn cut_signal(&self) -> Arc<dyn CutSignal> {
        Arc::new(NeverCut)
    }
}

#[derive(Debug)]
struct NeverCut;

impl CutSignal for NeverCut {
    fn is_cut(&self) -> bool {
        false
    }
}

impl AsyncRead for NonReadingPeer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_read(cx, out)
    }
}

impl AsyncWrite for NonReadingPeer {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
        self.blocked_or_stopped()
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.blocked_or_stopped()
    }
}

/// Returns the peer's end of the pipe, and a stream.
fn raw_stream(is_full: bool) -> (DuplexStream, Box<NonReadingPeer>) {
    let (far, pipe) = duplex(64 * 1024);
    (far, Box::new(NonReadingPeer { pipe, is_full }))
}

fn non_reading_peer() -> (DuplexStream, Stream) {
    let (far, peer) = raw_stream(false);
    let stream = Stream::opened(peer, Arc::default(), Arc::default(), TEST_TIMEOUT);
    (far, stream)
}

async fn is_pending<F: Future>(mut future: Pin<&mut F>) -> bool {
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
}

fn accepted() -> StreamReply {
    StreamReply::Accepted {
        dialed: String::new(),
    }
}

async fn reply(far: &mut DuplexStream, reply: StreamReply) {
    let mut buffer = BytesMut::new();
    reply.encode(&mut buffer).unwrap();
    far.write_all(&buffer).await.unwrap();
}

#[tokio::test]
async fn write_error_waits_for_the_refusal_that_explains_it() {
    let (mut far, mut stream) = non_reading_peer();
    let mut writing = pin!(stream.write_all(b"x"));
    // The reply is not known yet.
    assert!(is_pending(writing.as_mut()).await);
    reply(&mut far, StreamReply::refused(RefusalCode::Policy, "no")).await;
    let error = writing.await.unwrap_err();
    let refusal = find_cause::<Refusal>(&error).unwrap();
    assert_eq!(refusal.code, RefusalCode::Policy);
}

#[tokio::test]
async fn answer_that_came_first_is_read_before_a_write_error_is_reported() {
    let (mut far, stream) = non_reading_peer();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut writing = pin!(writer.write_all(b"x"));
    reply(&mut far, accepted()).await;
    far.write_all(b"answer").await.unwrap();
    assert!(is_pending(writing.as_mut()).await, "the answer goes first");
    drop(far);
    let mut answer = Vec::new();
    reader.read_to_end(&mut answer).await.unwrap();
    assert_eq!(answer, b"answer");
    assert_eq!(writing.await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[tokio::test]
async fn shutdown_fails_at_once_when_the_peer_stopped_reading() {
    let (mut far, mut stream) = non_reading_peer();
    reply(&mut far, accepted()).await;
    let error = stream.shutdown().await.unwrap_err();
    let cut = find_cause::<StreamCut>(&error);
    assert!(matches!(cut, Some(StreamCut::Stopped(_))), "{cut:?}");
}

#[tokio::test]
async fn missing_or_damaged_reply_is_a_cut() {
    let (far, mut stream) = non_reading_peer();
    drop(far);
    let error = stream.accepted().await.unwrap_err();
    assert_eq!(find_cause::<StreamCut>(&error), Some(&StreamCut::NoReply));
    let (mut far, mut stream) = non_reading_peer();
    far.write_all(&[0xff; 8]).await.unwrap();
    assert!(stream.accepted().await.is_err());
}

#[tokio::test]
async fn failed_shutdown_waits_for_the_refusal_that_explains_it() {
    let (mut far, mut stream) = non_reading_peer();
    let mut ending = pin!(stream.shutdown());
    // The reply is not known yet.
    assert!(is_pending(ending.as_mut()).await);
    reply(&mut far, StreamReply::refused(RefusalCode::Draining, "")).await;
    let error = ending.await.unwrap_err();
    let refusal = find_cause::<Refusal>(&error).unwrap();
    assert_eq!(refusal.code, RefusalCode::Draining);
}

/// Returns a stream of the peer that begins with the bytes `first` and then stays silent.
async fn incoming(first: &[u8]) -> (DuplexStream, IncomingStream) {
    let (mut far, peer) = raw_stream(false);
    far.write_all(first).await.unwrap();
    let stream = IncomingStream::new(peer, Arc::default(), Arc::default());
    (far, stream)
}

#[tokio::test(start_paused = true)]
async fn header_that_does_not_come_in_time_is_given_up() {
    for first in [&b""[..], &[20], &[20, 1, 2, 3]] {
        let (_far, stream) = incoming(first).await;
        let began = Instant::now();
        let header = stream.header(began + Duration::from_secs(10)).await;
        let error = header.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{first:?}");
        assert_eq!(began.elapsed().as_secs(), 10);
    }
}

#[tokio::test]
async fn oversize_damaged_or_cut_header_is_refused_at_once() {
    for first in [&[0xff, 0xff, 0x7f][..], &[0xff; 8], &[2, 0xff, 0xff], &[0]] {
        let (_far, stream) = incoming(first).await;
        let header = stream.header(Instant::now() + TEST_TIMEOUT).await;
        let error = header.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{first:?}");
    }
    let (far, stream) = incoming(&[20, 1]).await;
    drop(far);
    let header = stream.header(Instant::now() + TEST_TIMEOUT).await;
    let error = header.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
}

/// A reader with the bytes that a peer sent. After these bytes every read is pending. The reader
/// records the largest read that was requested.
struct AnnouncedLength {
    sent: Vec<u8>,
    largest: usize,
    taken: usize,
}

impl AsyncRead for AnnouncedLength {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.largest = self.largest.max(out.remaining());
        if self.sent.is_empty() {
            return Poll::Pending;
        }
        let count = out.remaining().min(self.sent.len());
        self.taken += count;
        out.put_slice(&self.sent.drain(..count).collect::<Vec<_>>());
        Poll::Ready(Ok(()))
    }
}

/// S02: a length is checked before memory is reserved for it, and the reserved memory grows with
/// the received bytes.
#[tokio::test(start_paused = true)]
async fn s02_announced_lengths_reserve_nothing_that_has_not_come() {
    use crate::wire::frame::{CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX, encode_length_prefix};

    const RESERVED_MAX: usize = 64 << 10;
    for limit in [STREAM_MESSAGE_MAX, CONTROL_MESSAGE_MAX, ENROLL_MESSAGE_MAX] {
        let at = limit as u64;
        for (length, is_refused) in [
            (at - 1, false),
            (at, false),
            (at + 1, true),
            (u64::from(u32::MAX), true),
            (1 << 32, true),
            (u64::MAX, true),
        ] {
            let mut prefix = BytesMut::new();
            encode_length_prefix(length, &mut prefix);
            let mut reader = AnnouncedLength {
                sent: prefix.to_vec(),
                largest: 0,
                taken: 0,
            };
            let reading = read_frame(&mut reader, limit);
            let read = tokio::time::timeout(Duration::from_secs(1), reading).await;
            assert_eq!(read.is_ok_and(|read| read.is_err()), is_refused, "{length}");
            let AnnouncedLength { taken, largest, .. } = reader;
            assert!(taken <= 10, "{length}: {taken} bytes");
            assert!(largest <= RESERVED_MAX, "{length}: {largest} bytes");
        }
    }
}

/// With 500 busy streams ahead, a reply waits for longer than a reader may stall, and there is
/// nothing to read yet.
#[tokio::test(start_paused = true)]
async fn stream_whose_reply_waits_to_be_sent_is_not_taken_for_stalled() {
    let pool = BufferPool::new(1 << 20);
    let settings = FlowSettings {
        stream_window: StreamWindow::fixed(1000),
        memory_percent: 100,
        peer_opens: false,
    };
    let flow = pool.session(settings, TestTransport::new(|_| {}));
    let (_far, peer) = raw_stream(true);
    let reply = ReplyState::Local;
    let mut stream = Stream::new(peer, reply, Arc::default(), flow.open(0).unwrap());
    let accepting = tokio::time::timeout(Duration::from_secs(1), stream.accept(""));
    assert!(accepting.await.is_err());
    assert_eq!(flow.stalled_streams(), 0);
}
