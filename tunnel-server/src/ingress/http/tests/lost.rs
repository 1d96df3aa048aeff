//! A request whose session is lost before an answer is sent once more over another session if its
//! method is safe. No other request is repeated.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::time::{Instant, sleep};
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::ResetCode;

use super::fixture::{Agent, Fixture, HI, assert_status, expect_hi, get, head};
use crate::routing::registry::SuspectReason;
use crate::testing::{assert_contains, eventually, node};

const GET: &str = "GET /a HTTP/1.1\r\nHost: worker-1:9100\r\nX-Own: 1\r\nConnection: close\r\n\r\n";
const AGENT_LOST: &str = "X-Tunnel-Error: agent_lost\r\n";
const RETRIED: &str = "tunnel_server_requests_retried_total";

/// Accepts a request, sends `answer` and loses the session.
async fn loses(agent: &Agent, answer: &str) {
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    stream.write_all(answer.as_bytes()).await.unwrap();
    // The paused clock advances when every task waits: the server has read the answer by then.
    sleep(Duration::from_millis(1)).await;
    stream.cut_behind(ResetCode::SessionLost);
}

/// Accepts a request over the node's oldest live session and sends `answer`. The session is then
/// suspect.
async fn becomes_suspect(fixture: &Fixture, agent: &Agent, answer: &str) -> Stream {
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    stream.write_all(answer.as_bytes()).await.unwrap();
    sleep(Duration::from_millis(1)).await;
    let sessions = fixture.registry.of_node(&node());
    let mut oldest_first = sessions.iter().rev();
    let live = oldest_first.find(|session| session.is_routable()).unwrap();
    live.set_suspect_reason(Some(SuspectReason::PeerHearsNothing));
    stream
}

#[tokio::test(start_paused = true)]
async fn get_is_sent_once_more_and_counted_once() {
    let fixture = Fixture::new();
    let (dying, other) = (fixture.agent(), fixture.agent());
    let (answer, (), head) = tokio::join!(fixture.ask(GET), loses(&dying, ""), other.answers());
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(head.starts_with("GET /a HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("X-Own: 1\r\n"), "{head}");
    let ok_series = "tunnel_server_streams_total{result=\"ok\"}";
    eventually("records", || fixture.metric(ok_series) == 1).await;
    let lost_series = "tunnel_server_streams_total{result=\"agent_lost\"}";
    assert_eq!(fixture.metric(lost_series), 0);
    assert_eq!(fixture.metric(RETRIED), 1);
}

#[tokio::test(start_paused = true)]
async fn loss_of_the_only_session_is_the_answer() {
    let (fixture, dying) = Fixture::with_agent();
    let (answer, ()) = tokio::join!(fixture.ask(GET), loses(&dying, ""));
    assert_status(&answer, 502);
    for text in [AGENT_LOST, "worker-1", "9100"] {
        assert_contains(&answer, text);
    }
    assert_eq!(fixture.metric(RETRIED), 0);
}

#[tokio::test(start_paused = true)]
async fn second_loss_is_the_answer() {
    let fixture = Fixture::new();
    let (first, second, third) = (fixture.agent(), fixture.agent(), fixture.agent());
    let (answer, (), ()) = tokio::join!(fixture.ask(GET), loses(&first, ""), loses(&second, ""));
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(third.is_left_alone().await);
    assert_eq!(fixture.metric(RETRIED), 1);
}

#[tokio::test(start_paused = true)]
async fn other_requests_and_begun_answers_are_not_repeated() {
    let upgrade = GET.replace(
        "Connection: close",
        "Connection: Upgrade\r\nUpgrade: SPDY/3.1",
    );
    let post = GET.replace("GET", "POST");
    let body = post.replace("\r\n\r\n", "\r\nContent-Length: 2\r\n\r\nab");
    let get_body = GET.replace("\r\n\r\n", "\r\nContent-Length: 2\r\n\r\nab");
    for (request, answer) in [
        (&*upgrade, ""),
        (&*post, ""),
        (&*body, ""),
        (&*get_body, ""),
        (GET, "HTTP/1.1 2"),
        (GET, "HTTP/1.1 100 Continue\r\n\r\n"),
    ] {
        let fixture = Fixture::new();
        let (dying, other) = (fixture.agent(), fixture.agent());
        let (got, ()) = tokio::join!(fixture.ask(request), loses(&dying, answer));
        assert!(got.starts_with("HTTP/1.1 502"), "{request:?}: {got}");
        if answer.is_empty() {
            assert_contains(&got, AGENT_LOST);
        }
        assert!(other.is_left_alone().await, "{request:?}");
        assert_eq!(fixture.metric(RETRIED), 0, "{request:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn request_on_a_pooled_connection_is_sent_once_more() {
    let fixture = Fixture::new();
    let (dying, other) = (fixture.agent(), fixture.agent());
    let mut caller = fixture.connect();
    let request = format!("{}\r\n", get("/"));
    let target = async {
        let mut stream = dying.accepts().await;
        head(&mut stream).await;
        stream.write_all(HI.as_bytes()).await.unwrap();
        head(&mut stream).await;
        stream.cut_behind(ResetCode::SessionLost);
        other.answers().await
    };
    let calls = async {
        expect_hi(&mut caller, &request).await;
        expect_hi(&mut caller, &request).await;
    };
    let (repeated, ()) = tokio::join!(target, calls);
    assert!(repeated.starts_with("GET / "), "{repeated}");
    assert_eq!(fixture.metric(RETRIED), 1);
}

#[tokio::test(start_paused = true)]
async fn timeout_is_repeated_only_if_the_session_is_suspect() {
    for is_suspect in [true, false] {
        let fixture = Fixture::new();
        let (silent, other) = (fixture.agent(), fixture.agent());
        let waits = async {
            let stream = silent.stream().await;
            let sessions = fixture.registry.of_node(&node());
            let reason = is_suspect.then_some(SuspectReason::PeerHearsNothing);
            for session in sessions.iter().skip(1) {
                session.set_suspect_reason(reason);
            }
            stream
        };
        let asked = async { tokio::join!(fixture.ask(GET), waits) };
        if is_suspect {
            let ((answer, _stream), _head) = tokio::join!(asked, other.answers());
            assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        } else {
            let (answer, _stream) = asked.await;
            let code = "X-Tunnel-Error: agent_timeout\r\n";
            assert!(answer.contains(code), "{answer}");
            assert!(other.is_left_alone().await);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_get_leaves_a_suspect_session_when_there_is_another() {
    let (fixture, silent) = Fixture::with_agent();
    let began = Instant::now();
    let target = async {
        let stream = becomes_suspect(&fixture, &silent, "").await;
        sleep(Duration::from_secs(2)).await;
        let other = fixture.agent();
        let head = other.answers().await;
        (stream, other, head)
    };
    let (answer, (_stream, _other, head)) = tokio::join!(fixture.ask(GET), target);
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(head.starts_with("GET /a HTTP/1.1\r\n"), "{head}");
    assert!(began.elapsed() < Duration::from_secs(3));
    assert_eq!(fixture.metric(RETRIED), 1);
}

#[tokio::test(start_paused = true)]
async fn request_leaves_one_suspect_session_and_no_second_one() {
    let fixture = Fixture::new();
    let (first, second, third) = (fixture.agent(), fixture.agent(), fixture.agent());
    let targets = async {
        let left = becomes_suspect(&fixture, &first, "").await;
        let mut waits = becomes_suspect(&fixture, &second, "").await;
        assert!(third.is_left_alone().await);
        waits.write_all(HI.as_bytes()).await.unwrap();
        waits.shutdown().await.unwrap();
        (left, waits)
    };
    let (answer, _streams) = tokio::join!(fixture.ask(GET), targets);
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert_eq!(fixture.metric(RETRIED), 1);
}

#[tokio::test(start_paused = true)]
async fn other_requests_and_begun_answers_stay_with_a_suspect_session() {
    let upgrade = GET.replace(
        "Connection: close",
        "Connection: Upgrade\r\nUpgrade: SPDY/3.1",
    );
    let post = GET.replace("GET", "POST");
    let get_body = GET.replace("\r\n\r\n", "\r\nContent-Length: 2\r\n\r\nab");
    for (request, answer) in [
        (&*upgrade, ""),
        (&*post, ""),
        (&*get_body, ""),
        (GET, "HTTP/1.1 2"),
        (GET, "HTTP/1.1 100 Continue\r\n\r\n"),
    ] {
        let fixture = Fixture::new();
        let (silent, other) = (fixture.agent(), fixture.agent());
        let target = async {
            let mut stream = becomes_suspect(&fixture, &silent, answer).await;
            assert!(other.is_left_alone().await, "{request:?}");
            stream.cut_behind(ResetCode::SessionLost);
        };
        let (got, ()) = tokio::join!(fixture.ask(request), target);
        assert!(got.starts_with("HTTP/1.1 502"), "{request:?}: {got}");
        assert_eq!(fixture.metric(RETRIED), 0, "{request:?}");
    }
}
