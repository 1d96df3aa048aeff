//! Tests of the transport against peers that violate the rules, and of behavior that only frames
//! show.

use std::future::Future;
use std::io;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustls_pki_types::ServerName;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;
use crate::calibration::scaled;
use crate::identity::Role;
use crate::tcp::{Direct, ServerAddr, configure_session};
use crate::tls::{self, test_ca::TestCa};
use crate::transport::{
    BufferPool, ClosedBy, CongestionControl, Dialer as _, Stream, StreamCut, find_cause,
};
use crate::wire::ALPN_SESSION_TCP;
use crate::wire::code::ResetCode;
use crate::wire::header::{StreamHeader, StreamKind, StreamReply, Target};
use crate::wire::name::Port;

mod endings;
mod floods;
mod heads;
mod offers;
mod raw;
mod resets;
mod rules;

use raw::{
    ACK, DATA, END_STREAM, FloodOutcome, HEADERS, INITIAL_WINDOW_SIZE, PREFACE, RawPeer, SETTINGS,
};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
const WINDOW: u32 = 256 << 10;
/// The bytes that a stream accepts after its first message while the peer reads nothing.
const ALMOST_WINDOW: u64 = WINDOW as u64 - 1024;
const STREAMS: u32 = 256;
/// Windows with which a raw peer never makes our end wait.
const WIDE: Windows = Windows {
    stream: 1 << 30,
    connection: 1 << 30,
};
/// Maximum growth of the process's memory during an attack. The raw peer runs in the same process.
const GROWTH_MAX: u64 = 64 << 20;

/// The window that a raw peer grants: on each stream, and beyond the first 64 KiB on the
/// connection.
#[derive(Clone, Copy)]
struct Windows {
    stream: u32,
    connection: u32,
}

type Dialed = JoinSet<Result<Arc<dyn Session>, HandshakeError>>;

#[track_caller]
fn within<F: Future>(future: F) -> impl Future<Output = F::Output> {
    let here = Location::caller();
    async move {
        let done = timeout(scaled(TEST_TIMEOUT), future).await;
        done.unwrap_or_else(|_| panic!("timed out at {here}"))
    }
}

fn session_settings(streams: u32) -> SessionSettings {
    SessionSettings {
        stream_window: WINDOW,
        streams,
        keep_alive: None,
        idle_timeout: Duration::from_secs(60),
        congestion: CongestionControl::Cubic,
        pool: BufferPool::new(512 << 20),
    }
}

fn agent() -> Role {
    Role::Agent("worker-1".parse().unwrap())
}

/// Returns our server's end and a raw agent that has sent nothing yet.
async fn joined_by_agent() -> (Arc<dyn Session>, RawPeer) {
    let ca = TestCa::new();
    let server =
        tls::session_server_of_roots(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION_TCP);
    let trust = tls::Trust::Roots(ca.roots());
    let client = tls::session_client(ca.key(&agent()), trust, ALPN_SESSION_TCP).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let ours = Box::pin(async {
        let (socket, _) = listener.accept().await.unwrap();
        configure_session(&socket).unwrap();
        let socket = ReadAhead::new(socket);
        let tls = TlsAcceptor::from(server.unwrap()).accept(socket).await;
        accept(tls.unwrap(), &session_settings(STREAMS))
            .await
            .unwrap()
    });
    let theirs = Box::pin(async {
        let socket = TcpSocket::new_v4().unwrap();
        // The buffer limits the unread data between the two ends.
        socket.set_recv_buffer_size(64 << 10).unwrap();
        let socket = socket.connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        let name = ServerName::try_from(SERVER_NAME).unwrap();
        let tls = TlsConnector::from(client).connect(name, socket).await;
        RawPeer::new(tls.unwrap())
    });
    within(async { tokio::join!(ours, theirs) }).await
}

/// Returns our server's end and a raw agent that grants these windows.
async fn with_raw_agent(windows: Windows) -> (Arc<dyn Session>, RawPeer) {
    let (session, mut raw) = joined_by_agent().await;
    raw.reader.preface().await;
    exchange_settings(&mut raw, windows).await;
    assert_eq!(within(raw.reader.next_of_kind(HEADERS)).await.stream, 1);
    raw.send(&raw::response(1)).await;
    (session, raw)
}

/// Returns our agent's end, which is still dialing, and a raw server that has sent nothing yet.
async fn joined_by_server(streams: u32) -> (Dialed, RawPeer) {
    let ca = TestCa::new();
    let server =
        tls::session_server_of_roots(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION_TCP);
    let trust = tls::Trust::Roots(ca.roots());
    let client = tls::session_client(ca.key(&agent()), trust, ALPN_SESSION_TCP).unwrap();
    let listener = TcpSocket::new_v4().unwrap();
    listener.set_recv_buffer_size(64 << 10).unwrap();
    listener.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = listener.listen(1).unwrap();
    let remote = ServerAddr {
        name: "raw".to_owned(),
        address: Some(listener.local_addr().unwrap()),
    };
    let dialer = H2Dialer::new(client, session_settings(streams), Arc::new(Direct));
    let mut dialed = JoinSet::new();
    dialed.spawn(async move { dialer.dial(&remote).await });
    let (socket, _) = within(listener.accept()).await.unwrap();
    socket.set_nodelay(true).unwrap();
    let tls = within(TlsAcceptor::from(server.unwrap()).accept(socket)).await;
    (dialed, RawPeer::new(tls.unwrap()))
}

/// Returns our agent's end and a raw server that grants these windows.
async fn with_raw_server(streams: u32, windows: Windows) -> (Arc<dyn Session>, RawPeer) {
    let (mut dialed, mut raw) = joined_by_server(streams).await;
    raw.send(PREFACE).await;
    exchange_settings(&mut raw, windows).await;
    raw.send(&raw::request(1, "/session")).await;
    assert_eq!(within(raw.reader.next_of_kind(HEADERS)).await.stream, 1);
    let session = within(dialed.join_next()).await.unwrap().unwrap();
    (session.unwrap(), raw)
}

async fn exchange_settings(raw: &mut RawPeer, windows: Windows) {
    raw.send(&raw::settings(&[(INITIAL_WINDOW_SIZE, windows.stream)]))
        .await;
    if windows.connection > 0 {
        raw.send(&raw::window_update(0, windows.connection)).await;
    }
    within(raw.reader.next_of_kind(SETTINGS)).await;
    raw.send(&raw::frame(SETTINGS, ACK, 0, &[])).await;
}

fn header() -> StreamHeader {
    StreamHeader::new(StreamKind::Target(Target::Node(Port::new(9100).unwrap())))
}

fn header_bytes() -> Vec<u8> {
    let mut bytes = BytesMut::new();
    header().encode(&mut bytes).unwrap();
    bytes.to_vec()
}

fn reply_bytes(reply: &StreamReply) -> Vec<u8> {
    let mut bytes = BytesMut::new();
    reply.encode(&mut bytes).unwrap();
    bytes.to_vec()
}

fn accepted_reply(dialed: &str) -> StreamReply {
    StreamReply::Accepted {
        dialed: dialed.to_owned(),
    }
}

/// Returns a stream that our server's end opened and the raw agent accepted, and its id.
async fn opened(session: &Arc<dyn Session>, raw: &mut RawPeer) -> (Stream, u32) {
    let mut stream = within(session.open(&header(), TEST_TIMEOUT)).await.unwrap();
    let head = within(raw.reader.next_of_kind(HEADERS)).await;
    let first = within(raw.reader.next_of_kind(DATA)).await;
    assert!(first.stream == head.stream && first.payload[..] == header_bytes());
    let reply = accepted_reply("");
    raw.send(&raw::response(head.stream)).await;
    raw.send_data(head.stream, 0, &reply_bytes(&reply)).await;
    within(stream.accepted()).await.unwrap();
    (stream, head.stream)
}

/// Returns the frames that open a stream. The raw peer does not account for their bytes.
fn opening(stream: u32) -> Vec<u8> {
    let head = raw::request(stream, "/stream");
    [head, raw::frame(DATA, 0, stream, &header_bytes())].concat()
}

/// Opens a stream as the raw server.
async fn open_raw(raw: &mut RawPeer, stream: u32) {
    raw.send(&raw::request(stream, "/stream")).await;
    raw.send_data(stream, 0, &header_bytes()).await;
}

/// Returns the next stream at our agent's end that is not cut.
async fn accepted(session: &Arc<dyn Session>) -> Stream {
    loop {
        let incoming = within(session.accept()).await.unwrap();
        if let Ok((got, stream)) = incoming.header(Instant::now() + TEST_TIMEOUT).await {
            assert_eq!(got, header());
            return stream;
        }
    }
}

async fn read_all(stream: &mut Stream) -> io::Result<Vec<u8>> {
    let mut got = Vec::new();
    within(stream.read_to_end(&mut got)).await.map(|_| got)
}

/// Reads the stream to its end and returns the error.
async fn cut(stream: &mut Stream) -> StreamCut {
    let error = read_all(stream).await.unwrap_err();
    *find_cause::<StreamCut>(&error).unwrap()
}

/// Asserts that the session still works: a question and its answer pass between the session and the
/// raw agent.
async fn assert_serves_raw_agent(session: &Arc<dyn Session>, raw: &mut RawPeer) {
    let (mut stream, id) = opened(session, raw).await;
    raw.send(&raw::frame(DATA, END_STREAM, id, b"answer")).await;
    assert_eq!(read_all(&mut stream).await.unwrap(), b"answer");
}

/// Asserts that the session still works: a question of the raw server on `stream` is answered.
async fn assert_serves_raw_server(session: &Arc<dyn Session>, raw: &mut RawPeer, stream: u32) {
    open_raw(raw, stream).await;
    let mut served = accepted(session).await;
    served.accept("").await.unwrap();
    let answer = loop {
        let frame = within(raw.reader.next_of_kind(DATA)).await;
        if frame.stream == stream {
            break frame;
        }
    };
    assert!(!answer.payload.is_empty());
}

/// Asserts that the peer received GOAWAY with `code`, and that the session was closed for a
/// protocol violation without a panic.
async fn assert_protocol_close(
    session: &Arc<dyn Session>,
    raw: RawPeer,
    outcome: &FloodOutcome,
    code: u32,
) {
    assert_eq!(
        (outcome.go_away, outcome.closed),
        (Some(code), true),
        "{outcome:?}"
    );
    // Our end waits for the peer's end, at most 1 s.
    drop(raw);
    let reason = within(session.closed()).await;
    assert_eq!(
        (reason.by, reason.code),
        (ClosedBy::Network, CloseCode::Protocol),
        "{reason}"
    );
}

/// Returns the resident memory of this process in bytes, or 0 where the system does not report it.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0) * 4096
}

/// Fails when the process uses much more memory than `before`.
fn assert_bounded(before: u64) {
    let grown = resident().saturating_sub(before);
    assert!(grown < GROWTH_MAX, "grown by {grown} bytes");
}
