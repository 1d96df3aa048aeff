//! A connection to a target serves several requests of one caller's connection, but never if a
//! request could be lost or delivered twice.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::RefusalCode;

use super::fixture::{Agent, Fixture, HI, expect_hi, get, head};
use crate::config::CONNECTION_HEAD_BYTES;
use crate::testing::{STREAMS, eventually, within};

async fn serves(stream: &mut Stream, answer: &str) -> String {
    let head = head(stream).await;
    stream.write_all(answer.as_bytes()).await.unwrap();
    head
}

/// Accepts the next stream and answers one request over it. The stream stays open.
async fn serves_once(agent: &Agent) -> Stream {
    let mut stream = agent.accepts().await;
    serves(&mut stream, HI).await;
    stream
}

/// Checks that the stream ends cleanly in less than this time.
async fn ends_within(stream: &mut Stream, limit: Duration) {
    let began = Instant::now();
    assert_eq!(within(stream.read(&mut [0])).await.unwrap(), 0);
    let waited = began.elapsed();
    assert!(waited < limit, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn requests_to_one_target_share_a_connection_and_are_counted_one_by_one() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect();
    let target = async {
        let mut stream = agent.accepts().await;
        let mut bytes = 0;
        for number in 0..3 {
            let head = serves(&mut stream, HI).await;
            assert!(head.starts_with(&format!("GET /{number} ")), "{head}");
            assert!(!head.to_lowercase().contains("\r\nconnection:"), "{head}");
            bytes += head.len();
        }
        (stream, bytes)
    };
    let calls = async {
        for number in 0..3 {
            expect_hi(&mut caller, &format!("{}\r\n", get(&format!("/{number}")))).await;
        }
    };
    let ((mut stream, bytes), ()) = tokio::join!(target, calls);
    let count = |series: &str| fixture.metric(series);
    let ok_series = "tunnel_server_streams_total{result=\"ok\"}";
    eventually("records", || count(ok_series) == 3).await;
    let out = "tunnel_server_stream_bytes_total{direction=\"out\"}";
    assert_eq!(count(out), bytes as u64);
    assert_eq!(count(&out.replace("out", "in")), 3 * HI.len() as u64);
    assert!(agent.is_left_alone().await);
    // An idle connection is closed gracefully.
    ends_within(&mut stream, Duration::from_millis(1100)).await;
}

/// A task costs each request wakeups of another thread.
#[tokio::test(start_paused = true)]
async fn only_a_request_with_a_body_or_an_upgrade_gets_a_task() {
    let plain = format!("{}\r\n", get("/"));
    let body = plain.replace("\r\n\r\n", "\r\nContent-Length: 1\r\n\r\nx");
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect();
    let upgrade = plain.replace(
        "\r\n\r\n",
        "\r\nConnection: Upgrade\r\nUpgrade: a/1\r\n\r\n",
    );
    for (request, tasks) in [(&plain, 0), (&body, 1), (&plain, 0), (&upgrade, 1)] {
        let target = async {
            let mut stream = agent.accepts().await;
            head(&mut stream).await;
            let count = fixture.ingress.drivers.len();
            let closing = HI.replace("\r\n\r\nhi", "\r\nConnection: close\r\n\r\nhi");
            stream.write_all(closing.as_bytes()).await.unwrap();
            stream.shutdown().await.unwrap();
            count
        };
        let call = async {
            caller.write_all(request.as_bytes()).await.unwrap();
            head(&mut caller).await;
            within(caller.read_exact(&mut [0; 2])).await.unwrap();
        };
        let (count, ()) = within(async { tokio::join!(target, call) }).await;
        assert_eq!(count, tasks, "{request:?}");
        eventually("no task", || fixture.ingress.drivers.is_empty()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn other_targets_and_what_may_not_be_repeated_get_their_own() {
    let plain = format!("{}\r\n", get("/"));
    let elsewhere = plain.replace(":9100", ":9101");
    let post = "POST / HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 0\r\n\r\n".to_owned();
    let body = plain.replace("\r\n\r\n", "\r\nContent-Length: 1\r\n\r\nx");
    let chunked = "\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n";
    let both = HI.replace("\r\n\r\nhi", chunked);
    let closing = HI.replace("\r\n\r\nhi", "\r\nConnection: close\r\n\r\nhi");
    let old = HI.replace("HTTP/1.1", "HTTP/1.0");
    let more = format!("{HI}HTTP/1.1 200 OK\r\n");
    let twice = HI.repeat(2);
    for (first, answer, second) in [
        (&plain, HI, &elsewhere),
        (&plain, HI, &post),
        (&plain, HI, &body),
        (&post, HI, &plain),
        (&plain, &*closing, &plain),
        (&plain, &*old, &plain),
        (&plain, &*more, &plain),
        (&plain, &*twice, &plain),
        // Framed in two ways.
        (&plain, &*both, &plain),
    ] {
        let (fixture, agent) = Fixture::with_agent();
        let mut caller = fixture.connect();
        let case = format!("{first:?} {answer:?} {second:?}");
        let target = async {
            let mut one = agent.accepts().await;
            serves(&mut one, answer).await;
            let mut two = agent.accepts().await;
            let head = serves(&mut two, HI).await;
            (one, two, head)
        };
        let calls = async {
            caller.write_all(first.as_bytes()).await.unwrap();
            head(&mut caller).await;
            let chunked = answer.contains("chunked");
            let mut body = vec![0; if chunked { 12 } else { 2 }];
            within(caller.read_exact(&mut body)).await.unwrap();
            expect_hi(&mut caller, second).await;
        };
        let ((mut one, _two, _), ()) = within(async { tokio::join!(target, calls) }).await;
        // The first connection has been closed gracefully.
        let mut rest = Vec::new();
        let ended = within(one.read_to_end(&mut rest)).await;
        let has_bytes_behind = answer == more || answer == twice;
        assert!(ended.is_ok() || has_bytes_behind, "{case}: {ended:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn request_meets_a_target_that_has_closed_and_goes_over_a_new_connection() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect();
    let request = format!("{}\r\n", get("/"));
    for _ in 0..5 {
        let target = async {
            let mut stream = serves_once(&agent).await;
            stream.shutdown().await.unwrap();
            stream
        };
        let (mut stream, ()) = tokio::join!(target, expect_hi(&mut caller, &request));
        // No byte of another request arrived over this connection.
        let mut rest = Vec::new();
        let _closed_or_cut = within(stream.read_to_end(&mut rest)).await;
        assert!(rest.is_empty(), "{rest:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn request_lost_on_a_pooled_connection_is_retried_once() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect();
    let request = format!("{}\r\n", get("/"));
    let target = async {
        let mut stream = serves_once(&agent).await;
        head(&mut stream).await;
        drop(stream);
        let mut fresh = agent.accepts().await;
        head(&mut fresh).await;
    };
    let calls = async {
        expect_hi(&mut caller, &request).await;
        caller.write_all(request.as_bytes()).await.unwrap();
        head(&mut caller).await
    };
    let ((), answer) = tokio::join!(target, calls);
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(agent.is_left_alone().await);
}

#[tokio::test(start_paused = true)]
async fn newer_session_of_the_node_takes_the_next_request() {
    let fixture = Fixture::new();
    let old = fixture.agent();
    let mut caller = fixture.connect();
    let request = format!("{}\r\n", get("/"));
    let asks = expect_hi(&mut caller, &request);
    let (_stream, ()) = tokio::join!(serves_once(&old), asks);
    let new = fixture.agent();
    tokio::time::advance(Duration::from_secs(1)).await;
    tokio::join!(expect_hi(&mut caller, &request), new.answers());
}

#[tokio::test(start_paused = true)]
async fn no_idle_connection_is_pooled_when_the_agent_has_few_streams_left() {
    let (fixture, agent) = Fixture::with_agent();
    let request = format!("{}\r\n", get("/"));
    let mut waiting = Vec::new();
    for _ in 0..STREAMS / 4 {
        waiting.push((fixture.send(&request).await, agent.accepts().await));
    }
    let mut caller = fixture.connect();
    let asks = expect_hi(&mut caller, &request);
    let (mut stream, ()) = tokio::join!(serves_once(&agent), asks);
    ends_within(&mut stream, Duration::from_millis(100)).await;
}

#[tokio::test(start_paused = true)]
async fn idle_connection_is_closed_while_a_large_head_arrives() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.connect();
    let request = format!("{}\r\n", get("/"));
    let asks = expect_hi(&mut caller, &request);
    let (mut idle, ()) = tokio::join!(serves_once(&agent), asks);
    let begun = format!("{}X: {}", get("/"), "y".repeat(2 * CONNECTION_HEAD_BYTES));
    caller.write_all(begun.as_bytes()).await.unwrap();
    ends_within(&mut idle, Duration::from_millis(1100)).await;
}

#[tokio::test(start_paused = true)]
async fn idle_connection_to_another_target_is_reset_when_its_caller_needs_the_stream() {
    let (fixture, agent) = Fixture::with_agent();
    let request = format!("{}\r\n", get("/"));
    let mut caller = fixture.connect();
    let asks = expect_hi(&mut caller, &request);
    let (mut idle, ()) = tokio::join!(serves_once(&agent), asks);
    // With the idle stream, all that a caller without a certificate may have.
    let mut waiting = Vec::new();
    for _ in 1..STREAMS / 2 {
        waiting.push((fixture.send(&request).await, agent.accepts().await));
    }
    let elsewhere = request.replace(":9100", ":9101");
    let asks = expect_hi(&mut caller, &elsewhere);
    let (_stream, ()) = tokio::join!(serves_once(&agent), asks);
    within(idle.read(&mut [0])).await.unwrap_err();
}

/// An agent may take fewer streams at once than this server opens to it.
#[tokio::test(start_paused = true)]
async fn idle_connection_is_reset_for_a_stream_that_the_agent_refuses_for_its_own_limit() {
    let (fixture, agent) = Fixture::with_agent();
    let request = format!("{}\r\n", get("/"));
    let mut caller = fixture.connect();
    let asks = expect_hi(&mut caller, &request);
    let (mut idle, ()) = tokio::join!(serves_once(&agent), asks);
    let elsewhere = request.replace(":9100", ":9101");
    let began = Instant::now();
    let target = async {
        agent.refuses(RefusalCode::TooManyStreams).await;
        within(idle.read(&mut [0])).await.unwrap_err();
        serves_once(&agent).await
    };
    let (_stream, ()) = tokio::join!(target, expect_hi(&mut caller, &elsewhere));
    // The agent has the permit a moment after the reset.
    assert!(began.elapsed() >= Duration::from_millis(50));
}
