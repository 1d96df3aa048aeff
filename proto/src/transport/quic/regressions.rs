//! Regression tests for costly QUIC settings: disabled offload, credit for streams that are never
//! opened, a second of silence after a lost first packet, and silent peers and crowds that block
//! others.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::FutureExt;
use quinn::{Connection, Runtime};
use tokio::io::AsyncReadExt;
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{HANDSHAKES_MAX, INITIAL_STREAM_LIMIT, RETRY_THRESHOLD};
use super::{QuicAcceptor, QuicDialer, QuicKeys, udp_socket};
use crate::calibration::scaled;
use crate::identity::Role;
use crate::tcp::ServerAddr;
use crate::tls::{self, test_ca::TestCa};
use crate::transport::{BufferPool, ClosedBy, CongestionControl, Dialer, Session, SessionSettings};
use crate::wire::ALPN_SESSION;
use crate::wire::code::CloseCode;
use crate::wire::header::{StreamHeader, StreamKind, Target};
use crate::wire::name::Port;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Streams that a peer may open at once.
const LIMIT: u32 = 256;
const BULK: usize = 8 << 20;

/// Returns the two ends and the server's address.
fn dial_pair() -> (QuicAcceptor, QuicDialer, ServerAddr) {
    let settings = SessionSettings {
        stream_window: 2 << 20,
        streams: 1000,
        keep_alive: None,
        idle_timeout: Duration::from_secs(60),
        congestion: CongestionControl::default(),
        pool: BufferPool::new(64 << 20),
    };
    let ca = TestCa::new();
    let server = tls::session_server_of_roots(ca.resolver(&Role::Server), ca.roots(), ALPN_SESSION);
    let keys = QuicKeys::from_bytes(&[7; QuicKeys::LEN]);
    let any = (Ipv4Addr::LOCALHOST, 0).into();
    let acceptor = QuicAcceptor::bind(any, server.unwrap(), &keys, settings.clone()).unwrap();
    let address = acceptor.local_addr().unwrap();
    let role = Role::Agent("worker-1".parse().unwrap());
    let trust = tls::Trust::Roots(ca.roots());
    let client = tls::session_client(ca.key(&role), trust, ALPN_SESSION).unwrap();
    let dialer = QuicDialer::new(client, settings).unwrap();
    (acceptor, dialer, at(address))
}

fn at(address: SocketAddr) -> ServerAddr {
    ServerAddr {
        name: address.to_string(),
        address: Some(address),
    }
}

/// Returns the server's connection without a session, the agent's session, and the acceptor.
pub(super) async fn joined() -> (Connection, Arc<dyn Session>, QuicAcceptor) {
    let (acceptor, dialer, remote) = dial_pair();
    let accept = async { acceptor.incoming().await.unwrap().await.unwrap() };
    let (connection, session) = tokio::join!(accept, dialer.dial(&remote));
    (connection, session.unwrap(), acceptor)
}

pub(super) fn header() -> BytesMut {
    let mut header = BytesMut::new();
    let target = Target::Node(Port::new(9100).unwrap());
    StreamHeader::new(StreamKind::Target(target))
        .encode(&mut header)
        .unwrap();
    header
}

#[tokio::test]
async fn bulk_leaves_in_batches_of_segments() {
    let socket = udp_socket((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let socket = quinn::TokioRuntime.wrap_udp_socket(socket).unwrap();
    if socket.max_transmit_segments() == 1 {
        // This kernel has no UDP segmentation offload.
        return;
    }
    let (connection, session, _acceptor) = joined().await;
    let (mut send, _recv) = connection.open_bi().await.unwrap();
    send.write_all(&header()).await.unwrap();
    let (sent, received) = tokio::join!(
        async {
            send.write_all(&vec![7; BULK]).await.unwrap();
            send.finish().unwrap();
            connection.stats().udp_tx
        },
        async {
            let incoming = session.accept().await.unwrap();
            let received = incoming.header(Instant::now() + TEST_TIMEOUT).await;
            let (_, mut stream) = received.unwrap();
            stream.accept("").await.unwrap();
            let mut got = Vec::new();
            stream.read_to_end(&mut got).await.unwrap();
            got.len()
        }
    );
    assert_eq!(received, BULK);
    // Without segmentation the value is 1. Here every second datagram is acknowledged, and each
    // acknowledgement releases about three.
    let (datagrams, calls) = (sent.datagrams, sent.ios);
    assert!(datagrams > 2 * calls, "{datagrams} in {calls} system calls");
}

/// quinn uses some 80 bytes for each stream that the peer may open.
#[tokio::test]
async fn peer_may_open_few_streams_until_more_are_in_use() {
    let (connection, session, _acceptor) = joined().await;
    let mut streams = Vec::new();
    for number in 0..INITIAL_STREAM_LIMIT {
        let opened = connection.open_bi().now_or_never();
        let (mut send, recv) = opened.unwrap_or_else(|| panic!("only {number}")).unwrap();
        send.write_all(&header()).await.unwrap();
        streams.push((send, recv));
    }
    assert!(connection.open_bi().now_or_never().is_none());
    session.set_max_concurrent_streams(1000);
    let mut accepted = Vec::new();
    for _ in 0..INITIAL_STREAM_LIMIT {
        accepted.push(session.accept().await.unwrap());
    }
    let more = tokio::time::timeout(scaled(TEST_TIMEOUT), connection.open_bi());
    more.await.unwrap().unwrap();
}

/// A peer that keeps all streams but one open can open and close the last one again and again.
#[tokio::test]
async fn last_stream_of_a_peer_becomes_free_again() {
    let (connection, session, _acceptor) = joined().await;
    session.set_max_concurrent_streams(LIMIT);
    let open = async || {
        let opened = tokio::time::timeout(scaled(TEST_TIMEOUT), connection.open_bi());
        let (mut send, recv) = opened.await.expect("a free stream").unwrap();
        send.write_all(&header()).await.unwrap();
        (send, recv, session.accept().await.unwrap())
    };
    let mut kept = Vec::new();
    for _ in 1..LIMIT {
        kept.push(open().await);
    }
    for _ in 0..LIMIT {
        drop(open().await);
    }
}

/// Returns the time from the first packet of a dial to its next packet when nothing answers.
async fn sends_again_after(dialer: &QuicDialer) -> Duration {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let remote = at(socket.local_addr().unwrap());
    let packets = async {
        let mut packet = [0; 2048];
        socket.recv(&mut packet).await.unwrap();
        let first = Instant::now();
        // The ClientHello takes two packets, which are sent together.
        while first.elapsed() < Duration::from_millis(10) {
            socket.recv(&mut packet).await.unwrap();
        }
        first.elapsed()
    };
    tokio::select! {
        after = packets => after,
        dialed = dialer.dial(&remote) => panic!("{dialed:?}"),
    }
}

/// A restarted server misses the packets that agents send while it is down. By default their next
/// packets follow a second later.
#[tokio::test]
async fn first_packet_is_soon_sent_again_to_a_server_that_was_there() {
    let (acceptor, dialer, remote) = dial_pair();
    tokio::time::pause();
    let unknown = sends_again_after(&dialer).await;
    assert!(unknown >= Duration::from_millis(995), "{unknown:?}");
    tokio::time::resume();
    let address = remote.address.unwrap();
    // On a busy machine a round trip over loopback may take long, but not always.
    for _ in 0..20 {
        let accept = async { acceptor.incoming().await.unwrap().await.unwrap() };
        let (connection, session) = tokio::join!(accept, dialer.dial(&remote));
        connection.close(0u8.into(), b"");
        session.unwrap().closed().await;
        if dialer.rtt_cache.initial_rtt(address) < unknown / 7 {
            break;
        }
    }
    tokio::time::pause();
    let known = sends_again_after(&dialer).await;
    // The expected time is three round trips, at least 150 ms.
    assert!(known < unknown / 2, "{known:?} and not {unknown:?}");
}

/// A server that was killed sends nothing more to its agents. The next server resets them.
#[tokio::test]
async fn peer_of_an_earlier_process_is_reset_at_once() {
    let (acceptor, dialer, remote) = dial_pair();
    let accept = async {
        let (_, handshake) = acceptor.accept().await.unwrap();
        handshake.await.unwrap()
    };
    let (server, agent) = tokio::join!(accept, dialer.dial(&remote));
    let agent = agent.unwrap();
    assert_eq!(agent.reset_target(), None);
    let target = server.reset_target().unwrap();
    let mut other = target;
    other.connection_id[0] ^= 1;
    acceptor.reset(&[other]).await;
    assert!(agent.closed().now_or_never().is_none(), "another token");
    acceptor.reset(&[other, target]).await;
    let soon = scaled(Duration::from_secs(1));
    let closed = tokio::time::timeout(soon, agent.closed()).await;
    let reason = closed.unwrap();
    assert_eq!(
        (reason.by, reason.code),
        (ClosedBy::Network, CloseCode::Dead)
    );
}

/// The monitor of an idle session checks rarely. It must know when the peer was last received.
#[tokio::test]
async fn time_of_the_last_received_frame_is_known_later() {
    let (acceptor, dialer, remote) = dial_pair();
    let accept = async {
        let (_, handshake) = acceptor.accept().await.unwrap();
        handshake.await.unwrap()
    };
    let (server, agent) = tokio::join!(accept, dialer.dial(&remote));
    let agent = agent.unwrap();
    let second = scaled(Duration::from_secs(1));
    tokio::time::sleep(second).await;
    let (before, sent) = (server.stats().received, Instant::now());
    agent.probe();
    while server.stats().received == before {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let received = Instant::now();
    tokio::time::sleep(second).await;
    for session in [server, agent] {
        let at = session.stats().received_at;
        assert!(sent <= at && at < received + second / 2, "{:?}", at - sent);
    }
}

/// Peers that begin a handshake and then stay silent delay others only briefly, and not until their
/// handshake times out.
#[tokio::test]
async fn silent_peers_do_not_block_other_handshakes() {
    let (acceptor, dialer, remote) = dial_pair();
    let handshake_permits = u32::try_from(HANDSHAKES_MAX).unwrap();
    let _others = acceptor
        .handshake_permits
        .acquire_many(handshake_permits - 1)
        .await
        .unwrap();
    let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let silent_server = at(silent.local_addr().unwrap());
    let hello = async {
        let mut packet = [0; 2048];
        for _ in 0..2 {
            let length = silent.recv(&mut packet).await.unwrap();
            let server = remote.address.unwrap();
            silent.send_to(&packet[..length], server).await.unwrap();
        }
    };
    tokio::select! {
        () = hello => {}
        dialed = dialer.dial(&silent_server) => panic!("{dialed:?}"),
    }
    let (_, handshake) = acceptor.accept().await.unwrap();
    let mut stalled = JoinSet::new();
    stalled.spawn(handshake);
    permits_exhausted(&acceptor).await;
    let accept = async {
        let (_, handshake) = acceptor.accept().await.unwrap();
        handshake.await.unwrap()
    };
    let both = async { tokio::join!(accept, dialer.dial(&remote)) };
    let both = tokio::time::timeout(scaled(TEST_TIMEOUT), both).await;
    let (_accepted, dialed) = both.unwrap();
    dialed.unwrap();
    assert!(stalled.try_join_next().is_none());
}

/// Waits until the last permit is in use.
async fn permits_exhausted(acceptor: &QuicAcceptor) {
    while acceptor.handshake_permits.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
}

/// S26: a new peer is asked for a token exactly when many handshakes are unfinished.
#[tokio::test]
async fn s26_crowd_has_new_peers_prove_their_address() {
    let (acceptor, dialer, remote) = dial_pair();
    let mut guards = vec![acceptor.half_open.clone(); RETRY_THRESHOLD - 1];
    for proves in [false, true] {
        let accept = async {
            let incoming = acceptor.incoming().await.unwrap();
            let proven = incoming.remote_address_validated();
            (proven, incoming.await.unwrap())
        };
        let ((proven, _connection), dialed) = tokio::join!(accept, dialer.dial(&remote));
        dialed.unwrap();
        assert_eq!(proven, proves, "with {} handshakes under way", guards.len());
        guards.push(acceptor.half_open.clone());
    }
}
