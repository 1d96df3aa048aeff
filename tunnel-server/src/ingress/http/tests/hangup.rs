//! The server detects that a caller has disconnected even if input is unread, and then closes the
//! target's side at once.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_proto::transport::Stream;

use super::fixture::{Fixture, get, head};
use crate::testing::{eventually, within};

const GONE: &str = "tunnel_server_streams_total{result=\"caller_gone\"}";

async fn is_cut(stream: &mut Stream) {
    let mut rest = Vec::new();
    let end = within(stream.read_to_end(&mut rest)).await;
    assert!(end.is_err(), "{end:?}");
}

/// Returns a caller that has sent these bytes, and the target's stream.
async fn asks(fixture: &Fixture, sent: &str) -> (TcpStream, Stream) {
    let agent = fixture.agent();
    let mut caller = fixture.dial().await;
    caller.write_all(sent.as_bytes()).await.unwrap();
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    (caller, stream)
}

#[tokio::test]
async fn fin_behind_pipelined_bytes_is_detected() {
    let fixture = Fixture::new();
    let (mut caller, mut stream) = asks(&fixture, &format!("{0}\r\n{0}\r\n", get("/"))).await;
    caller.shutdown().await.unwrap();
    is_cut(&mut stream).await;
    eventually("record", || fixture.metric(GONE) == 1).await;
}

#[tokio::test]
async fn fin_in_the_middle_of_an_answer_behind_pipelined_bytes_is_detected() {
    let fixture = Fixture::new();
    let (mut caller, mut stream) = asks(&fixture, &format!("{0}\r\n{0}", get("/"))).await;
    stream
        .write_all(b"HTTP/1.1 200 OK\r\n\r\nfirst")
        .await
        .unwrap();
    head(&mut caller).await;
    caller.shutdown().await.unwrap();
    is_cut(&mut stream).await;
}

#[tokio::test]
async fn reset_behind_a_body_that_the_target_does_not_read_is_detected() {
    let fixture = Fixture::new();
    let long = "x".repeat(64 << 20);
    let length = long.len();
    let post =
        format!("POST / HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: {length}\r\n\r\n");
    let (mut caller, mut stream) = asks(&fixture, &post).await;
    // Until the server reads no more. A FIN would wait behind this data in the caller's kernel.
    let filled = timeout(
        Duration::from_millis(300),
        caller.write_all(long.as_bytes()),
    );
    assert!(filled.await.is_err(), "all was taken");
    tunnel_proto::tcp::abort_on_close(&caller).unwrap();
    drop(caller);
    eventually("record", || fixture.metric(GONE) == 1).await;
    is_cut(&mut stream).await;
}

#[tokio::test]
async fn reset_behind_pipelined_bytes_is_detected() {
    let fixture = Fixture::new();
    let (caller, mut stream) = asks(&fixture, &format!("{0}\r\n{0}\r\n", get("/"))).await;
    tunnel_proto::tcp::abort_on_close(&caller).unwrap();
    drop(caller);
    is_cut(&mut stream).await;
}

#[tokio::test]
async fn caller_that_closes_after_its_answer_leaves_in_order() {
    let fixture = Fixture::new();
    let (mut caller, mut stream) = asks(&fixture, &format!("{}\r\n", get("/"))).await;
    stream
        .write_all(super::fixture::HI.as_bytes())
        .await
        .unwrap();
    head(&mut caller).await;
    let mut body = [0; 2];
    caller.read_exact(&mut body).await.unwrap();
    caller.shutdown().await.unwrap();
    assert_eq!(within(caller.read(&mut [0])).await.unwrap(), 0);
    let mut rest = Vec::new();
    within(stream.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(fixture.metric(GONE), 0);
}
