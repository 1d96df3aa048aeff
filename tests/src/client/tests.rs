//! Tests of the client against peers that behave worse than any of the fake targets.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::server::TlsStream;

use super::*;
use crate::targets::{Exporter, TargetTls};

#[tokio::test]
async fn end_before_a_head_is_an_error_that_names_the_end() {
    let (addr, _peer) = peer(|mut tcp| async move {
        read_head(&mut tcp).await;
    })
    .await;
    let error = request(addr, &RawRequest::get("a", "/")).await.unwrap_err();
    assert_eq!(
        error.downcast_ref::<io::Error>().unwrap().kind(),
        ErrorKind::UnexpectedEof
    );

    let (addr, _peer) = peer(|mut tcp| async move {
        read_head(&mut tcp).await;
        tcp.set_zero_linger().unwrap();
    })
    .await;
    let error = request(addr, &RawRequest::get("a", "/")).await.unwrap_err();
    assert_eq!(
        error.downcast_ref::<io::Error>().unwrap().kind(),
        ErrorKind::ConnectionReset
    );
}

#[tokio::test]
async fn missing_last_chunk_is_truncated() {
    let (addr, _peer) = peer(|mut tcp| async move {
        read_head(&mut tcp).await;
        let answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n";
        tcp.write_all(answer).await.unwrap();
    })
    .await;
    let reply = request(addr, &RawRequest::get("a", "/")).await.unwrap();
    assert_eq!(
        (reply.text().as_str(), reply.ended),
        ("ab", BodyEnd::Truncated)
    );
}

#[tokio::test]
async fn tls_end_without_close_notify_is_no_clean_end() {
    for (polite, end) in [
        (true, BodyEnd::CleanClose),
        (false, BodyEnd::Reset(ErrorKind::UnexpectedEof)),
    ] {
        let (addr, _peer) = tls_peer(move |mut tls| async move {
            read_head(&mut tls).await;
            tls.write_all(b"HTTP/1.1 200 OK\r\n\r\nsome").await.unwrap();
            tls.flush().await.unwrap();
            if polite {
                tls.shutdown().await.unwrap();
            } else {
                tls.get_mut().0.shutdown().await.unwrap();
            }
        })
        .await;
        let endpoint = Endpoint::tls(addr, ClientTls::insecure("a", None).unwrap());
        let reply = request(endpoint, &RawRequest::get("a", "/")).await.unwrap();
        assert_eq!((reply.text().as_str(), reply.ended), ("some", end));
    }
}

#[tokio::test]
async fn early_answer_is_read_while_the_body_is_still_going_out() {
    let (addr, _peer) = peer(|mut tcp| async move {
        read_head(&mut tcp).await;
        tcp.write_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
            .await
            .unwrap();
        std::future::pending::<()>().await;
    })
    .await;
    let large = RawRequest::new("POST", "/", "a").body(vec![0; 64 << 20]);
    let reply = request(addr, &large).await.unwrap();
    assert_eq!((reply.status, reply.text().as_str()), (413, "no"));
}

#[tokio::test]
async fn body_stays_here_when_the_answer_comes_in_place_of_continue() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let asking = RawRequest::new("POST", "/status/403", "a")
        .expecting_continue()
        .body("secret");
    let reply = request(exporter.addr(), &asking).await.unwrap();
    assert_eq!((reply.status, reply.interim), (403, vec![]));
    assert_eq!(reply.headers.last().unwrap().1, "close");
}

#[tokio::test]
async fn bytes_in_the_packet_of_the_101_belong_to_the_stream() {
    let (addr, _peer) = peer(|mut tcp| async move {
        read_head(&mut tcp).await;
        let answer = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\nfirst";
        tcp.write_all(answer).await.unwrap();
    })
    .await;
    let mut stream = UpgradeClient::spdy("a", "/")
        .connect(addr)
        .await
        .unwrap()
        .switched()
        .unwrap();
    assert_eq!(stream.read_to_end().await.bytes, b"first");
}

#[tokio::test]
async fn idle_connection_is_closed_after_a_broken_answer() {
    let exporter = Exporter::start("node-a").await.unwrap();
    let mut client = KeepAliveClient::connect(exporter.addr()).await.unwrap();
    let reply = client
        .request(&RawRequest::new("GET", "/short", "a"))
        .await
        .unwrap();
    assert_eq!(reply.ended, BodyEnd::Truncated);
    assert!(
        client
            .request(&RawRequest::new("GET", "/", "a"))
            .await
            .is_err()
    );
}

/// Serves one connection; ends when the returned set is dropped.
async fn peer<F, Fut>(serve: F) -> (SocketAddr, JoinSet<()>)
where
    F: FnOnce(TcpStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let mut serving = JoinSet::new();
    serving.spawn(async move { serve(listener.accept().await.unwrap().0).await });
    (addr, serving)
}

async fn tls_peer<F, Fut>(serve: F) -> (SocketAddr, JoinSet<()>)
where
    F: FnOnce(TlsStream<TcpStream>) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send,
{
    let tls = Arc::new(TargetTls::self_signed(&["a"]).unwrap());
    peer(move |tcp| async move { serve(tls.acceptor().accept(tcp).await.unwrap()).await }).await
}

async fn read_head(stream: &mut (impl AsyncReadExt + Unpin)) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
}
