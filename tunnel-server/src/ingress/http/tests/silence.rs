//! Timeouts of a caller's connection: for its first head, between requests, and within a head.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::time::{Instant, timeout};

use super::fixture::{Fixture, HI, expect_hi, get};

/// Timeouts of the fixture.
const HEAD: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_secs(180);
const POST: &str = "POST / HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 2\r\n\r\nab";

/// Returns the time until the connection is closed.
async fn lasts(caller: &mut DuplexStream) -> Duration {
    let began = Instant::now();
    let ended = timeout(Duration::from_secs(3600), caller.read_u8()).await;
    assert!(ended.expect("still open").is_err(), "a byte came");
    began.elapsed()
}

#[track_caller]
fn about(took: Duration, limit: Duration) {
    let slack = Duration::from_millis(50);
    assert!(took >= limit && took < limit + slack, "{took:?}");
}

/// Returns a caller whose request has been answered.
async fn answered(fixture: &Fixture, request: &str) -> DuplexStream {
    let agent = fixture.agent();
    let mut caller = fixture.connect();
    tokio::join!(expect_hi(&mut caller, request), agent.answers());
    caller
}

#[tokio::test(start_paused = true)]
async fn first_head_that_does_not_end_is_cut() {
    let fixture = Fixture::new();
    for begun in ["", "GET / HT"] {
        let mut caller = fixture.send(begun).await;
        about(lasts(&mut caller).await, HEAD);
    }
    // One byte per second does not extend the timeout.
    let mut caller = fixture.connect();
    let began = Instant::now();
    while caller.write_all(b"G").await.is_ok() {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(began.elapsed() < HEAD * 2);
    }
    assert!(began.elapsed() >= HEAD);
}

#[tokio::test(start_paused = true)]
async fn idle_caller_stays_between_requests() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect();
    let request = format!("{}\r\n", get("/metrics"));
    for _ in 0..4 {
        tokio::join!(expect_hi(&mut caller, &request), agent.answers());
        tokio::time::sleep(Duration::from_secs(60)).await;
    }
    about(lasts(&mut caller).await, IDLE - Duration::from_secs(60));
}

#[tokio::test(start_paused = true)]
async fn next_head_that_does_not_end_is_cut() {
    let fixture = Fixture::new();
    let mut caller = answered(&fixture, &format!("{}\r\n", get("/"))).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    caller.write_all(b"GET / HT").await.unwrap();
    about(lasts(&mut caller).await, HEAD);
}

#[tokio::test(start_paused = true)]
async fn next_head_that_began_in_the_packet_of_the_request_is_cut() {
    for request in [format!("{}\r\n", get("/")), POST.to_owned()] {
        let fixture = Fixture::new();
        let mut caller = answered(&fixture, &format!("{request}GET / HT")).await;
        about(lasts(&mut caller).await, HEAD);
    }
}

#[tokio::test(start_paused = true)]
async fn idle_caller_stays_after_a_body() {
    let fixture = Fixture::new();
    let mut caller = answered(&fixture, POST).await;
    about(lasts(&mut caller).await, IDLE);
}

#[tokio::test(start_paused = true)]
async fn request_that_waits_is_never_too_long() {
    let (fixture, agent) = Fixture::with_agent();
    let slow = async {
        let mut stream = agent.accepts().await;
        tokio::time::sleep(Duration::from_secs(86_400)).await;
        stream.write_all(HI.as_bytes()).await.unwrap();
        stream
    };
    let request = format!("{}\r\n", get("/"));
    let asks = async {
        let mut caller = fixture.send(&request).await;
        let mut first = [0; 12];
        caller.read_exact(&mut first).await.unwrap();
        assert_eq!(&first, b"HTTP/1.1 200");
    };
    tokio::join!(asks, slow);
}
