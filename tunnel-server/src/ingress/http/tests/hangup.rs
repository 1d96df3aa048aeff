//! The server detects that a caller has disconnected even if input is unread, and then closes the
//! target's side at once.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tunnel_proto::calibration::scaled;
use tunnel_proto::transport::Stream;

use super::fixture::{Fixture, HI, get, head};
use crate::testing::{eventually, within};

const GONE: &str = "tunnel_server_streams_total{result=\"caller_gone\"}";

async fn is_cut(stream: &mut Stream) {
    let mut rest = Vec::new();
    let end = within(stream.read_to_end(&mut rest)).await;
    assert!(end.is_err(), "{end:?}");
}

/// Returns a fixture, a caller that has sent these bytes, and the target's stream.
async fn asks(sent: &str) -> (Fixture, TcpStream, Stream) {
    let fixture = Fixture::new();
    let agent = fixture.agent();
    let mut caller = fixture.dial().await;
    caller.write_all(sent.as_bytes()).await.unwrap();
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    (fixture, caller, stream)
}

fn two_requests() -> String {
    format!("{0}\r\n{0}\r\n", get("/"))
}

#[tokio::test]
async fn fin_behind_pipelined_bytes_is_detected() {
    let (fixture, mut caller, mut stream) = asks(&two_requests()).await;
    caller.shutdown().await.unwrap();
    is_cut(&mut stream).await;
    eventually("record", || fixture.metric(GONE) == 1).await;
}

#[tokio::test]
async fn fin_in_the_middle_of_an_answer_behind_pipelined_bytes_is_detected() {
    let (_fixture, mut caller, mut stream) = asks(&format!("{0}\r\n{0}", get("/"))).await;
    let begun = b"HTTP/1.1 200 OK\r\n\r\nfirst";
    stream.write_all(begun).await.unwrap();
    head(&mut caller).await;
    caller.shutdown().await.unwrap();
    is_cut(&mut stream).await;
}

#[tokio::test]
async fn reset_behind_a_body_that_the_target_does_not_read_is_detected() {
    let long = "x".repeat(64 << 20);
    let post = get("/").replace("GET", "POST");
    let post = format!("{post}Content-Length: {}\r\n\r\n", long.len());
    let (fixture, mut caller, mut stream) = asks(&post).await;
    // Until the server reads no more. A FIN would wait behind this data in the caller's kernel.
    let fills = caller.write_all(long.as_bytes());
    let filled = timeout(scaled(Duration::from_millis(300)), fills);
    assert!(filled.await.is_err(), "all was taken");
    tunnel_proto::tcp::abort_on_close(&caller).unwrap();
    drop(caller);
    eventually("record", || fixture.metric(GONE) == 1).await;
    is_cut(&mut stream).await;
}

#[tokio::test]
async fn caller_that_closes_after_its_answer_leaves_in_order() {
    let (fixture, mut caller, mut stream) = asks(&format!("{}\r\n", get("/"))).await;
    stream.write_all(HI.as_bytes()).await.unwrap();
    head(&mut caller).await;
    let mut body = [0; 2];
    caller.read_exact(&mut body).await.unwrap();
    caller.shutdown().await.unwrap();
    assert_eq!(within(caller.read(&mut [0])).await.unwrap(), 0);
    let mut rest = Vec::new();
    within(stream.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(fixture.metric(GONE), 0);
}
