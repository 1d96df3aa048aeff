//! A request that a draining agent refuses is sent once more over another session. So is a GET or
//! HEAD whose session ended before the response. No other failure has this effect.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tunnel_proto::wire::code::{RefusalCode, ResetCode};

use super::fixture::{Agent, Fixture, head};

const GET: &str = "GET /a HTTP/1.1\r\nHost: worker-1:9100\r\nX-Own: 1\r\nConnection: close\r\n\r\n";

#[tokio::test(start_paused = true)]
async fn request_without_a_body_that_a_stopping_agent_refuses_goes_over_another_session() {
    let fixture = Fixture::new();
    let (stopping, staying) = (fixture.agent(), fixture.agent());
    let (answer, (), head) = tokio::join!(
        fixture.ask(GET),
        stopping.refuses(RefusalCode::Draining),
        staying.answers()
    );
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    assert!(head.starts_with("GET /a HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("X-Own: 1\r\n"), "{head}");
}

#[tokio::test(start_paused = true)]
async fn refusal_of_the_only_session_is_the_answer() {
    let fixture = Fixture::new();
    let stopping = fixture.agent();
    let (answer, ()) = tokio::join!(fixture.ask(GET), stopping.refuses(RefusalCode::Draining));
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(answer.contains("X-Tunnel-Error: draining\r\n"), "{answer}");
    assert!(answer.contains("as the agent says"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn request_is_moved_once_only() {
    let fixture = Fixture::new();
    let (first, second, third) = (fixture.agent(), fixture.agent(), fixture.agent());
    let (answer, (), ()) = tokio::join!(
        fixture.ask(GET),
        first.refuses(RefusalCode::Draining),
        second.refuses(RefusalCode::Draining)
    );
    assert!(answer.contains("X-Tunnel-Error: draining\r\n"), "{answer}");
    assert_eq!(third.far.stats().streams, 0);
}

#[tokio::test(start_paused = true)]
async fn request_with_a_body_and_other_refusals_are_not_moved() {
    let post = "POST /a HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab";
    for (request, code, label) in [
        (post, RefusalCode::Draining, "draining"),
        (GET, RefusalCode::TargetRefused, "target_refused"),
        (GET, RefusalCode::TooManyStreams, "too_many_streams"),
    ] {
        let fixture = Fixture::new();
        let (refusing, other) = (fixture.agent(), fixture.agent());
        let (answer, ()) = tokio::join!(fixture.ask(request), refusing.refuses(code));
        let expected = format!("X-Tunnel-Error: {label}\r\n");
        assert!(answer.contains(&expected), "{label}: {answer}");
        assert!(other.is_left_alone().await, "{label}");
    }
}

#[tokio::test(start_paused = true)]
async fn stream_that_is_cut_after_the_request_was_sent_is_not_moved() {
    let fixture = Fixture::new();
    let (dying, other) = (fixture.agent(), fixture.agent());
    let cut = async {
        let mut stream = dying.accepts().await;
        stream.read_u8().await.unwrap();
    };
    let (answer, ()) = tokio::join!(fixture.ask(GET), cut);
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(other.is_left_alone().await);
}

/// Accepts a request, sends the begin of an answer, and loses the session.
async fn leaves(agent: &Agent, answer: &str) {
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    stream.write_all(answer.as_bytes()).await.unwrap();
    // A reset discards what the server has not read.
    tokio::time::sleep(Duration::from_millis(1)).await;
    stream.reset(ResetCode::SessionLost);
}

#[tokio::test(start_paused = true)]
async fn get_whose_session_ends_before_the_answer_goes_over_another_session_once() {
    for request in [GET.to_owned(), GET.replace("GET", "HEAD")] {
        let fixture = Fixture::new();
        let (dying, staying) = (fixture.agent(), fixture.agent());
        let (answer, (), head) =
            tokio::join!(fixture.ask(&request), leaves(&dying, ""), staying.answers());
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert!(head.contains("X-Own: 1\r\n"), "{head}");
    }
    let fixture = Fixture::new();
    let (first, second, third) = (fixture.agent(), fixture.agent(), fixture.agent());
    let (answer, (), ()) = tokio::join!(fixture.ask(GET), leaves(&first, ""), leaves(&second, ""));
    assert!(
        answer.contains("X-Tunnel-Error: agent_lost\r\n"),
        "{answer}"
    );
    assert_eq!(third.far.stats().streams, 0);
}

#[tokio::test(start_paused = true)]
async fn request_that_may_have_had_an_effect_is_not_moved_when_its_session_ends() {
    let upgrade = GET.replace(
        "Connection: close",
        "Connection: upgrade\r\nUpgrade: SPDY/3.1",
    );
    let body = GET.replace("\r\n\r\n", "\r\nContent-Length: 2\r\n\r\nab");
    for (request, answered) in [
        (upgrade, ""),
        (body, ""),
        (GET.replace("GET", "OPTIONS"), ""),
        (GET.replace("GET", "POST"), ""),
        (GET.to_owned(), "HTTP/1.1 2"),
    ] {
        let fixture = Fixture::new();
        let (dying, other) = (fixture.agent(), fixture.agent());
        let (answer, ()) = tokio::join!(fixture.ask(&request), leaves(&dying, answered));
        assert!(answer.starts_with("HTTP/1.1 502"), "{request}: {answer}");
        assert!(
            answer.contains("X-Tunnel-Error: agent_lost\r\n"),
            "{answer}"
        );
        assert!(other.is_left_alone().await, "{request}");
    }
}
