//! A request that a draining agent refuses is sent over another session. No other failure has this
//! effect.

use tokio::io::AsyncReadExt;
use tunnel_proto::wire::code::RefusalCode;

use super::fixture::Fixture;

const GET: &str = "GET /a HTTP/1.1\r\nHost: worker-1:9100\r\nX-Own: 1\r\nConnection: close\r\n\r\n";
const POST: &str = "POST /a HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: 2\r\n\
                    Connection: close\r\n\r\nab";

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

/// kube-apiserver drops the text of a 503 for `kubectl logs`.
#[tokio::test(start_paused = true)]
async fn reason_of_a_refusal_reaches_the_callers_of_pods() {
    let requests = [
        (GET.to_owned(), "503"),
        (
            GET.replace("/a", "/containerLogs/default/web-0/app?follow=true"),
            "502",
        ),
        (GET.replace("/a", "/portForward/default/web-0"), "502"),
    ];
    for (request, status) in requests {
        let fixture = Fixture::new();
        let stopping = fixture.agent();
        let (answer, ()) = tokio::join!(
            fixture.ask(&request),
            stopping.refuses(RefusalCode::Draining)
        );
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{request}: {answer}");
        assert!(answer.contains("X-Tunnel-Error: draining\r\n"), "{answer}");
    }
}

/// Each server has a session with the agent that stops, and may have several.
#[tokio::test(start_paused = true)]
async fn request_leaves_each_session_of_a_stopping_agent_and_is_moved_once_after_other_refusals() {
    for (code, status) in [
        (RefusalCode::Draining, "200"),
        (RefusalCode::AgentLost, "502"),
    ] {
        let fixture = Fixture::new();
        let (first, second, third) = (fixture.agent(), fixture.agent(), fixture.agent());
        let others = async {
            tokio::join!(first.refuses(code), second.refuses(code));
            match status {
                "200" => drop(third.answers().await),
                _ => assert!(third.is_left_alone().await),
            }
        };
        let (answer, ()) = tokio::join!(fixture.ask(GET), others);
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{code:?}: {answer}");
    }
}

/// Nothing of a request is sent before the TLS handshake with its target.
#[tokio::test(start_paused = true)]
async fn request_with_a_body_for_an_https_target_goes_over_another_session() {
    let fixture = Fixture::new();
    let (stopping, staying) = (fixture.agent(), fixture.agent());
    let moves = async {
        stopping.refuses(RefusalCode::Draining).await;
        staying.stream().await
    };
    tokio::select! {
        answer = fixture.ask_secure(POST) => panic!("not moved: {answer}"),
        _moved = moves => {}
    }
}

#[tokio::test(start_paused = true)]
async fn request_with_a_body_and_other_refusals_are_not_moved() {
    for (request, code, label) in [
        (POST, RefusalCode::Draining, "draining"),
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
