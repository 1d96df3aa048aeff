//! Announcements of cuts from a hostile peer: they end no stream but the announced one, and cost a
//! bounded amount.

use std::time::Duration;

use bytes::BytesMut;
use futures_util::FutureExt;
use quinn::{Connection, Dir, RecvStream, SendStream, Side, StreamId, VarInt};
use tokio::io::AsyncReadExt;
use tokio::time::{Instant, timeout};

use super::cuts::ANNOUNCEMENTS_MAX;
use super::regressions::{header, joined};
use crate::transport::{Session, Stream, StreamCut, find_cause};
use crate::wire::code::ResetCode;
use crate::wire::cut::CutAnnouncement;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The largest number of QUIC, one more than the largest id of a stream.
const VARINT_END: u64 = 1 << 62;

/// A stream that the hostile peer has opened.
struct OpenStream {
    /// The peer's end.
    send: SendStream,
    _recv: RecvStream,
    stream: Stream,
}

impl OpenStream {
    async fn open(connection: &Connection, session: &dyn Session) -> Self {
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write_all(&header()).await.unwrap();
        let incoming = session.accept().await.unwrap();
        let received = incoming.header(Instant::now() + TEST_TIMEOUT).await;
        let (_, mut stream) = received.unwrap();
        stream.accept("").await.unwrap();
        Self {
            send,
            _recv: recv,
            stream,
        }
    }

    fn id(&self) -> u64 {
        VarInt::from(self.send.id()).into_inner()
    }

    async fn passes_bytes(&mut self) {
        self.send.write_all(b"still open").await.unwrap();
        let mut got = [0; 10];
        let read = self.stream.read_exact(&mut got);
        timeout(TEST_TIMEOUT, read).await.unwrap().unwrap();
        assert_eq!(&got, b"still open");
    }

    /// Reads `payload` and then the cut.
    async fn reads_to_cut(&mut self, payload: &[u8]) {
        let mut got = Vec::new();
        let read = self.stream.read_to_end(&mut got);
        let error = timeout(TEST_TIMEOUT, read).await.unwrap().unwrap_err();
        let cut = find_cause::<StreamCut>(&error);
        assert_eq!(cut, Some(&StreamCut::Reset(ResetCode::PeerCut)));
        assert_eq!(got, payload);
    }
}

fn announcement(stream: u64, offset: u64) -> BytesMut {
    let mut message = BytesMut::new();
    let cut = CutAnnouncement {
        stream,
        offset,
        code: ResetCode::PeerCut,
    };
    cut.encode(&mut message).unwrap();
    message
}

async fn announce(connection: &Connection, message: &[u8]) {
    let opened = timeout(TEST_TIMEOUT, connection.open_uni()).await;
    let mut send = opened.expect("earlier ones are read").unwrap();
    // What is no announcement may be stopped before it is complete.
    let _stopped = send.write_all(message).await;
    let _stopped = send.finish();
}

fn id(initiator: Side, dir: Dir, index: u64) -> u64 {
    VarInt::from(StreamId::new(initiator, dir, index)).into_inner()
}

#[tokio::test]
async fn hostile_announcements_end_no_other_stream() {
    let (connection, session, _acceptor) = joined().await;
    let mut other = OpenStream::open(&connection, &*session).await;
    let mut cut = OpenStream::open(&connection, &*session).await;
    for message in [&[][..], &[0xff; 64], &[9, 1, 2], &[0; 65], &[7; 1 << 20]] {
        announce(&connection, message).await;
    }
    // Streams that nobody has opened, and ids that no stream has.
    for index in 0..3 * u64::from(ANNOUNCEMENTS_MAX) {
        for unknown in [
            id(Side::Server, Dir::Bi, 2 + index),
            id(Side::Server, Dir::Bi, (1 << 59) + index),
            id(Side::Server, Dir::Uni, index),
            id(Side::Client, Dir::Bi, index),
            VARINT_END + index,
        ] {
            announce(&connection, &announcement(unknown, index)).await;
        }
    }
    // All of those have been accepted before this one.
    let offset = header().len() as u64;
    announce(&connection, &announcement(cut.id(), offset)).await;
    cut.reads_to_cut(b"").await;
    other.passes_bytes().await;
    OpenStream::open(&connection, &*session)
        .await
        .passes_bytes()
        .await;
}

#[tokio::test]
async fn announcements_that_are_not_complete_delay_only_their_peer() {
    let (connection, session, _acceptor) = joined().await;
    let mut other = OpenStream::open(&connection, &*session).await;
    let mut incomplete = Vec::new();
    for number in 0..ANNOUNCEMENTS_MAX {
        let opened = connection.open_uni().now_or_never();
        let mut send = opened.unwrap_or_else(|| panic!("only {number}")).unwrap();
        send.write_all(&[8]).await.unwrap();
        incomplete.push(send);
    }
    other.passes_bytes().await;
    assert!(connection.open_uni().now_or_never().is_none());
}

#[tokio::test]
async fn announced_offset_that_is_wrong_loses_no_byte_and_adds_no_end() {
    let (connection, session, _acceptor) = joined().await;
    let header_bytes = header().len() as u64;
    let payload = [7; 100];
    // Before the bytes that were sent: the reader gets what has arrived, and the cut.
    let mut early = OpenStream::open(&connection, &*session).await;
    early.send.write_all(&payload).await.unwrap();
    early.stream.read_exact(&mut [0; 60]).await.unwrap();
    announce(&connection, &announcement(early.id(), header_bytes + 1)).await;
    early.reads_to_cut(&payload[60..]).await;
    // Beyond them: the reader waits as on a stream that is open, until the peer resets it.
    let mut beyond = OpenStream::open(&connection, &*session).await;
    beyond.send.write_all(&payload).await.unwrap();
    announce(&connection, &announcement(beyond.id(), VARINT_END)).await;
    let watch = beyond.stream.watch();
    let announced = async {
        while !watch.is_cut() {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_TIMEOUT, announced).await.unwrap();
    beyond.stream.read_exact(&mut [0; 100]).await.unwrap();
    assert!(beyond.stream.read_u8().now_or_never().is_none());
    let code = ResetCode::PeerCut.number();
    beyond.send.reset(code.into()).unwrap();
    beyond.reads_to_cut(b"").await;
}

#[tokio::test]
async fn announcement_after_the_end_of_its_stream_changes_nothing() {
    let (connection, session, _acceptor) = joined().await;
    let mut ended = OpenStream::open(&connection, &*session).await;
    ended.send.write_all(b"whole").await.unwrap();
    ended.send.finish().unwrap();
    let received = timeout(TEST_TIMEOUT, ended.send.stopped()).await;
    assert_eq!(received.unwrap().unwrap(), None);
    let cut = announcement(ended.id(), 0);
    announce(&connection, &cut).await;
    let mut marker = OpenStream::open(&connection, &*session).await;
    let offset = header().len() as u64;
    announce(&connection, &announcement(marker.id(), offset)).await;
    marker.reads_to_cut(b"").await;
    let mut got = Vec::new();
    ended.stream.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, b"whole");
    drop(ended);
    announce(&connection, &cut).await;
    OpenStream::open(&connection, &*session)
        .await
        .passes_bytes()
        .await;
}

#[tokio::test]
async fn incomplete_announcement_lets_no_other_stream_hold_bytes() {
    let (connection, _session, _acceptor) = joined().await;
    let mut incomplete = connection.open_uni().await.unwrap();
    incomplete.write_all(&[9]).await.unwrap();
    for _ in 1..ANNOUNCEMENTS_MAX {
        let mut oversize = connection.open_uni().await.unwrap();
        let _stopped = oversize.write_all(&[7; 4096]).await;
        let stopped = timeout(TEST_TIMEOUT, oversize.stopped()).await;
        assert!(matches!(stopped, Ok(Ok(Some(_code)))), "{stopped:?}");
    }
}
