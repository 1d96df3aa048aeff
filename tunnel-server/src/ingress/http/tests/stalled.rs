//! Callers that take nothing of a response for a while.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, sleep, timeout};
use tunnel_proto::wire::code::{CloseCode, ResetCode};

use super::fixture::{Fixture, get, head};
use crate::testing::{assert_contains, eventually, within};

/// More than the caller's connection holds without a reader.
const BODY_BYTES: usize = 96 << 10;

#[tokio::test(start_paused = true)]
async fn complete_response_is_not_cut_with_the_idle_connection_to_its_target() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.send(&format!("{}\r\n", get("/"))).await;
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
    stream.write_all(answer.as_bytes()).await.unwrap();
    let body = vec![7; BODY_BYTES];
    let (first, rest) = body.split_at(BODY_BYTES * 4 / 5);
    stream.write_all(first).await.unwrap();
    // The caller's connection is full before the response is complete.
    sleep(Duration::from_millis(500)).await;
    stream.write_all(rest).await.unwrap();
    let complete = "tunnel_server_streams_total{result=\"ok\"}";
    eventually("record", || fixture.metric(complete) == 1).await;
    agent.far.close(CloseCode::Dead, "lost").await;
    sleep(Duration::from_secs(3)).await;
    head(&mut caller).await;
    let mut got = vec![0; BODY_BYTES];
    within(caller.read_exact(&mut got)).await.unwrap();
    assert!(got == body);
}

/// Its caller holds the most of what the agent has no memory for.
#[tokio::test(start_paused = true)]
async fn request_of_which_nothing_can_be_sent_for_5_s_is_refused_with_the_reason() {
    for body in ["", "Content-Length: 5\r\n"] {
        let (fixture, agent) = Fixture::with_agent();
        agent.near.script().is_peer_short = true;
        let began = Instant::now();
        let answer = fixture
            .ask(&format!("{}Connection: close\r\n{body}\r\n", get("/")))
            .await;
        let waited = began.elapsed().as_secs_f64();
        assert!((5.0..6.0).contains(&waited), "{waited} s");
        assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
        assert_contains(&answer, "too_many_streams");
        assert_contains(&answer, "limits.bufferPool");
        // The stream that was opened has ended.
        let opened = within(agent.far.accept()).await.unwrap();
        let header = opened.header(Instant::now() + Duration::from_secs(5));
        assert!(header.await.is_err());
    }
}

/// A reader that takes some bytes gets those before a cut, but not for longer than 5 s.
#[tokio::test(start_paused = true)]
async fn caller_that_takes_a_byte_now_and_then_hides_no_cut() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.send(&format!("{}\r\n", get("/"))).await;
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    let answer = "HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n";
    stream.write_all(answer.as_bytes()).await.unwrap();
    let piece = vec![7; BODY_BYTES];
    while let Ok(written) = timeout(Duration::from_secs(2), stream.write_all(&piece)).await {
        written.unwrap();
    }
    within(caller.read_u8()).await.unwrap();
    stream.cut_behind(ResetCode::PeerCut);
    let cut = "tunnel_server_streams_total{result=\"cut\"}";
    assert_eq!(fixture.metric(cut), 0);
    for _ in 0..8 {
        sleep(Duration::from_millis(900)).await;
        within(caller.read_u8()).await.unwrap();
    }
    assert_eq!(fixture.metric(cut), 1);
}
