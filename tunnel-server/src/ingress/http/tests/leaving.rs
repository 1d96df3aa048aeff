//! A server that leaves accepts callers until the drain, and each response asks its caller to send
//! the next request over another connection.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::fixture::{Fixture, HI, expect_hi, get, head, http_listener};
use crate::testing::{assert_contains, eventually, within};

#[tokio::test]
async fn kept_alive_and_new_callers_are_answered_and_asked_to_close() {
    let (fixture, agent) = Fixture::with_agent();
    let address = fixture.listen(http_listener()).await;
    let request = format!("{}\r\n", get("/"));
    let mut kept_alive = TcpStream::connect(address).await.unwrap();
    tokio::join!(expect_hi(&mut kept_alive, &request), agent.answers());
    fixture.ingress.shutdown.leaving().cancel();
    let mut new = TcpStream::connect(address).await.unwrap();
    for caller in [&mut kept_alive, &mut new] {
        let exchange = async {
            caller.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            caller.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let (answer, _) = tokio::join!(within(exchange), agent.answers());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_contains(&answer.to_ascii_lowercase(), "connection: close\r\n");
        assert!(answer.ends_with("hi"), "{answer}");
    }
    fixture.ingress.shutdown.drain().cancel();
    let is_closed = async {
        while TcpStream::connect(address).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    within(is_closed).await;
}

#[tokio::test]
async fn idle_caller_keeps_its_connection_until_the_drain() {
    let (fixture, agent) = Fixture::with_agent();
    let address = fixture.listen(http_listener()).await;
    let mut idle = TcpStream::connect(address).await.unwrap();
    let request = format!("{}\r\n", get("/"));
    tokio::join!(expect_hi(&mut idle, &request), agent.answers());
    fixture.ingress.shutdown.leaving().cancel();
    let early = tokio::time::timeout(Duration::from_millis(50), idle.read_u8()).await;
    assert!(early.is_err(), "{early:?}");
    fixture.ingress.shutdown.drain().cancel();
    let mut rest = Vec::new();
    within(idle.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
}

#[tokio::test]
async fn granted_upgrade_goes_on() {
    let (fixture, agent) = Fixture::with_agent();
    let address = fixture.listen(http_listener()).await;
    fixture.ingress.shutdown.leaving().cancel();
    let mut caller = TcpStream::connect(address).await.unwrap();
    let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n";
    let request = format!("{}{upgrade}", get("/exec"));
    caller.write_all(request.as_bytes()).await.unwrap();
    let mut target = agent.accepts().await;
    head(&mut target).await;
    let answer = format!("HTTP/1.1 101 Switching Protocols\r\n{upgrade}");
    target.write_all(answer.as_bytes()).await.unwrap();
    let switched = head(&mut caller).await;
    assert_contains(&switched.to_ascii_lowercase(), "connection: upgrade\r\n");
    target.write_all(b"on").await.unwrap();
    let mut bytes = [0; 2];
    within(caller.read_exact(&mut bytes)).await.unwrap();
    assert_eq!(&bytes, b"on");
}

/// The drain begins within a body whose request has been answered. Then no other request follows.
#[tokio::test(start_paused = true)]
async fn upload_behind_its_answer_is_complete_before_its_connection_closes() {
    let request = format!("POST {}Content-Length: 8\r\n\r\n", &get("/")[4..]);
    for is_leaving in [true, false] {
        let (fixture, agent) = Fixture::with_agent();
        if is_leaving {
            fixture.ingress.shutdown.leaving().cancel();
        }
        let mut caller = fixture.send(&request).await;
        let mut target = agent.accepts().await;
        head(&mut target).await;
        target.write_all(HI.as_bytes()).await.unwrap();
        let answer = head(&mut caller).await.to_ascii_lowercase();
        assert_eq!(answer.contains("connection: close\r\n"), is_leaving);
        within(caller.read_exact(&mut [0; 2])).await.unwrap();
        fixture.ingress.shutdown.drain().cancel();
        for piece in [b"some", b"more"] {
            caller.write_all(piece).await.unwrap();
            let mut received = [0; 4];
            within(target.read_exact(&mut received)).await.unwrap();
            assert_eq!(&received, piece);
        }
        let mut rest = Vec::new();
        within(caller.read_to_end(&mut rest)).await.unwrap();
        assert!(rest.is_empty());
        let series = "tunnel_server_streams_total{result=\"ok\"}";
        eventually("complete", || fixture.metric(series) == 1).await;
    }
}
