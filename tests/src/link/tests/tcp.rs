//! Tests of TCP connections through a link.

use std::io::ErrorKind;
use std::sync::Arc;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::eventually::eventually;

#[tokio::test]
async fn clean_link_passes_both_ways_and_each_end() {
    let mut path = Path::new().await;
    path.agent.write_all(b"question").await.unwrap();
    path.agent.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut path.server).await.unwrap(), b"question");
    path.server.write_all(b"answer").await.unwrap();
    drop(path.server);
    assert_eq!(read_to_end(&mut path.agent).await.unwrap(), b"answer");

    eventually("no live connection", WAIT_TIMEOUT, || async {
        (path.link.counters().tcp_live == 0).then_some(())
    })
    .await;
    let counters = path.link.counters();
    let (up, down) = (counters.tcp.up, counters.tcp.down);
    assert_eq!((up.received.bytes, up.forwarded.bytes), (8, 8));
    assert_eq!((down.received.bytes, down.forwarded.bytes), (6, 6));
    assert_eq!(counters.tcp_total, 1);
}

#[tokio::test]
async fn server_may_end_first() {
    let mut path = Path::new().await;
    path.server.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut path.agent).await.unwrap(), b"");
    path.agent.write_all(b"still").await.unwrap();
    path.agent.shutdown().await.unwrap();
    assert_eq!(read_to_end(&mut path.server).await.unwrap(), b"still");
}

#[tokio::test]
async fn reset_of_either_side_reaches_the_other() {
    let mut path = Path::new().await;
    abort(path.agent);
    assert!(is_reset(read_to_end(&mut path.server).await));
    let mut path = Path::new().await;
    abort(path.server);
    assert!(is_reset(read_to_end(&mut path.agent).await));
}

#[tokio::test]
async fn reset_behind_an_end_reaches_the_other_side() {
    let mut path = Path::new().await;
    path.agent.shutdown().await.unwrap();
    read_to_end(&mut path.server).await.unwrap();
    abort(path.agent);
    soon("the reset", async {
        while path.server.write_all(b"x").await.is_ok() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn reset_passes_a_side_that_reads_nothing() {
    let mut path = Path::new().await;
    path.link
        .set(TrafficClass::TCP, Impairment::default().with_queue(1000));
    let stuffed = soon("a full connection", async {
        loop {
            let write = path.agent.write_all(&[0; 65536]);
            if tokio::time::timeout(GLANCE * 3, write).await.is_err() {
                return path.link.counters().tcp.up;
            }
        }
    })
    .await;
    assert!(stuffed.received.bytes - stuffed.forwarded.bytes < 1000 + 65536);
    abort(path.agent);
    assert!(is_reset(read_to_end(&mut path.server).await));
}

#[tokio::test]
async fn order_is_preserved_under_delay_and_loss() {
    let path = Path::new().await;
    path.link.set(
        TrafficClass::TCP,
        Impairment::delayed(millis(20)).with_loss(0.001),
    );
    let sent: Vec<u8> = (0..251).cycle().take(1_000_000).collect();
    let start = Instant::now();
    let (mut agent, mut server) = (path.agent, path.server);
    let (written, got) = tokio::join!(
        async {
            agent.write_all(&sent).await?;
            agent.shutdown().await
        },
        read_to_end(&mut server)
    );
    written.unwrap();
    assert!(start.elapsed() >= millis(20));
    assert!(got.unwrap() == sent);
    let up = path.link.counters().tcp.up;
    assert_eq!(up.received, up.forwarded);
}

#[tokio::test]
async fn lost_segment_holds_up_its_connection() {
    let mut path = Path::new().await;
    path.link
        .set(TrafficClass::TCP.up(), Impairment::lossy(1.0));
    let start = Instant::now();
    path.agent.write_all(b"lost").await.unwrap();
    read(&mut path.server, b"lost").await;
    assert!(start.elapsed() >= Impairment::RETRANSMISSION);
    assert_eq!(path.link.counters().tcp.up.lost, 1);
}

#[tokio::test]
async fn frozen_direction_passes_its_bytes_after_it_is_healed() {
    let mut path = Path::new().await;
    path.link
        .set(TrafficClass::TCP.up(), Impairment::black_hole());
    path.agent.write_all(b"frozen").await.unwrap();
    path.server.write_all(b"down").await.unwrap();
    read(&mut path.agent, b"down").await;
    let mut byte = [0];
    assert!(hangs(path.server.read(&mut byte)).await);
    path.link.heal();
    read(&mut path.server, b"frozen").await;
}

#[tokio::test]
async fn frozen_direction_holds_what_was_in_flight() {
    let mut path = Path::new().await;
    path.link
        .set(TrafficClass::TCP, Impairment::delayed(millis(20)));
    path.agent.write_all(b"under way").await.unwrap();
    eventually("a piece", WAIT_TIMEOUT, || async {
        (path.link.counters().tcp.up.received.bytes == 9).then_some(())
    })
    .await;
    path.link.set(TrafficClass::TCP, Impairment::black_hole());
    let mut byte = [0];
    assert!(hangs(path.server.read(&mut byte)).await);
    path.link.heal();
    read(&mut path.server, b"under way").await;
}

#[tokio::test]
async fn frozen_link_hides_ends_and_resets() {
    let mut ended = Path::new().await;
    let mut reset = Path::new().await;
    for link in [&ended.link, &reset.link] {
        link.set(TrafficClass::TCP.down(), Impairment::black_hole());
    }
    drop(ended.server);
    abort(reset.server);
    // A write fails because of the reset, but only the frozen direction could report it.
    reset.agent.write_all(b"into the void").await.unwrap();
    let mut byte = [0];
    assert!(hangs(ended.agent.read(&mut byte)).await);
    assert!(hangs(reset.agent.read(&mut byte)).await);
    assert_eq!(reset.link.counters().tcp_live, 1);
    ended.link.heal();
    reset.link.heal();
    assert_eq!(read_to_end(&mut ended.agent).await.unwrap(), b"");
    assert!(is_reset(read_to_end(&mut reset.agent).await));
}

#[tokio::test]
async fn new_connection_hangs_while_a_direction_is_frozen() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let link = Link::start(listener.local_addr().unwrap(), SEED).unwrap();
    link.set(TrafficClass::TCP.down(), Impairment::black_hole());
    let mut agent = soon("the handshake", TcpStream::connect(link.addr()))
        .await
        .unwrap();
    agent.write_all(b"hello").await.unwrap();
    assert!(hangs(listener.accept()).await);
    assert_eq!(link.counters().tcp_live, 1);
    link.heal();
    let (mut server, _) = soon("the connection", listener.accept()).await.unwrap();
    read(&mut server, b"hello").await;
}

#[tokio::test]
async fn reset_tcp_resets_both_sides_of_all_connections() {
    let mut path = Path::new().await;
    path.link.set(TrafficClass::TCP, Impairment::black_hole());
    path.link.reset_tcp();
    assert!(is_reset(read_to_end(&mut path.agent).await));
    assert!(is_reset(read_to_end(&mut path.server).await));
    path.link.heal();
    let (_agent, _server) = path.connect().await;
    eventually("one live connection", WAIT_TIMEOUT, || async {
        let counters = path.link.counters();
        (counters.tcp_live == 1 && counters.tcp_total == 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn moving_changes_the_address_of_new_connections() {
    let path = Path::new().await;
    let elsewhere = IpAddr::from([127, 0, 0, 9]);
    path.link.move_to(elsewhere);
    let (_agent, server) = path.connect().await;
    assert_eq!(server.peer_addr().unwrap().ip(), elsewhere);
    let before = path.server.peer_addr().unwrap().ip();
    assert_eq!(before, IpAddr::from([127, 0, 0, 1]));
}

#[tokio::test]
async fn rate_bounds_what_passes_and_what_is_queued() {
    let path = Path::new().await;
    path.link.set(
        TrafficClass::TCP,
        Impairment::limited(1_000_000).with_queue(20_000),
    );
    let start = Instant::now();
    let link = Arc::new(path.link);
    let watched = link.clone();
    let (mut agent, mut server) = (path.agent, path.server);
    let sending = async {
        for _ in 0..30 {
            agent.write_all(&[7; 10_000]).await?;
            let up = watched.counters().tcp.up;
            // The queue, and the one piece of 20 ms that was accepted while there was still room.
            assert!(up.received.bytes - up.forwarded.bytes <= 40_000);
        }
        agent.shutdown().await
    };
    let (sent, got) = tokio::join!(sending, read_to_end(&mut server));
    sent.unwrap();
    assert_eq!(got.unwrap().len(), 300_000);
    assert!(start.elapsed() >= millis(300), "{:?}", start.elapsed());
}

/// A connection of an agent with a server through a link.
struct Path {
    agent: TcpStream,
    link: Link,
    listener: TcpListener,
    server: TcpStream,
}

impl Path {
    async fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Link::start(listener.local_addr().unwrap(), SEED).unwrap();
        let (agent, server) = connect(&link, &listener).await;
        Self {
            agent,
            link,
            listener,
            server,
        }
    }

    async fn connect(&self) -> (TcpStream, TcpStream) {
        connect(&self.link, &self.listener).await
    }
}

async fn connect(link: &Link, listener: &TcpListener) -> (TcpStream, TcpStream) {
    let both = async { tokio::join!(TcpStream::connect(link.addr()), listener.accept()) };
    let (agent, server) = soon("a connection", both).await;
    (agent.unwrap(), server.unwrap().0)
}

async fn read(stream: &mut TcpStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    soon("bytes", stream.read_exact(&mut got)).await.unwrap();
    assert_eq!(got, expected);
}

async fn read_to_end(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut got = Vec::new();
    soon("the end", stream.read_to_end(&mut got)).await?;
    Ok(got)
}

fn is_reset<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

fn abort(stream: TcpStream) {
    SockRef::from(&stream)
        .set_linger(Some(Duration::ZERO))
        .unwrap();
}
