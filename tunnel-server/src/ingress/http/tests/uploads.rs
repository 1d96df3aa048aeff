//! Request bodies that go on after a complete answer, and the codes of their ends.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};
use tunnel_proto::tcp::abort_on_close;
use tunnel_proto::transport::Stream;
use tunnel_proto::wire::code::ResetCode;

use super::fixture::{Agent, Fixture, head};
use crate::testing::{eventually, within};

/// More than the server and the memory transport hold.
const BODY_BYTES: usize = 3 << 20;
/// Bytes that a stream with a narrow window holds.
const WINDOW_BYTES: usize = 1 << 10;
/// Bytes of a body that the server takes for a target that reads none.
const QUEUE_BYTES: usize = 64 << 10;
/// Longer than any limit of a body without progress.
const LONG: Duration = Duration::from_secs(120);

fn post() -> String {
    format!("POST /a HTTP/1.1\r\nHost: worker-1:9100\r\nContent-Length: {BODY_BYTES}\r\n\r\n")
}

/// Sends a complete answer to a request whose body has not ended.
async fn answers_early(agent: &Agent) -> Stream {
    let mut stream = agent.accepts().await;
    head(&mut stream).await;
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    stream.write_all(answer).await.unwrap();
    stream
}

/// Returns a caller that has the answer to a request, and the target's stream.
async fn answered(fixture: &Fixture, agent: &Agent) -> (DuplexStream, Stream) {
    let mut caller = fixture.send(&post()).await;
    let stream = answers_early(agent).await;
    head(&mut caller).await;
    within(caller.read_exact(&mut [0; 2])).await.unwrap();
    (caller, stream)
}

/// Checks that the only record has this code.
async fn expect_code(fixture: &Fixture, code: &str) {
    let series = format!("tunnel_server_streams_total{{result=\"{code}\"}}");
    eventually(code, || fixture.metric(&series) == 1).await;
}

/// Writes until the target's slowness blocks the writer.
async fn fill(caller: &mut TcpStream) {
    let piece = vec![7; 64 << 10];
    while let Ok(written) = timeout(Duration::from_secs(5), caller.write_all(&piece)).await {
        written.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn upload_whose_session_is_lost_is_cut() {
    let (fixture, agent) = Fixture::with_agent();
    let (mut caller, mut stream) = answered(&fixture, &agent).await;
    caller.write_all(b"some").await.unwrap();
    within(stream.read_exact(&mut [0; 4])).await.unwrap();
    // As if the session had been lost.
    stream.cut_behind(ResetCode::SessionLost);
    expect_code(&fixture, "cut").await;
}

/// Uploads to a target that reads the body in two parts, and waits for these times before each.
async fn uploads_in_parts(first_bytes: usize, waits: [Duration; 2]) {
    let (fixture, agent) = Fixture::with_agent();
    let (mut caller, mut stream) = answered(&fixture, &agent).await;
    let body = vec![7; BODY_BYTES];
    let target = async {
        let mut got = vec![0; BODY_BYTES];
        let (first, rest) = got.split_at_mut(first_bytes);
        for (wait, part) in waits.into_iter().zip([first, rest]) {
            sleep(wait).await;
            stream.read_exact(part).await.unwrap();
        }
        got
    };
    let (sent, got) = tokio::join!(caller.write_all(&body), target);
    sent.unwrap();
    assert!(got == body);
    expect_code(&fixture, "ok").await;
}

#[tokio::test(start_paused = true)]
async fn upload_to_a_target_that_pauses_is_complete() {
    uploads_in_parts(BODY_BYTES / 2, [LONG; 2]).await;
}

#[tokio::test(start_paused = true)]
async fn end_of_an_upload_waits_for_a_target_that_pauses() {
    // More than the window: the server holds the end when the caller has sent everything.
    uploads_in_parts(BODY_BYTES - (300 << 10), [Duration::ZERO, LONG]).await;
}

#[tokio::test(start_paused = true)]
async fn upload_whose_caller_sends_nothing_is_cut() {
    let (fixture, agent) = Fixture::with_agent();
    let (mut caller, mut stream) = answered(&fixture, &agent).await;
    caller.write_all(b"some").await.unwrap();
    within(stream.read_exact(&mut [0; 4])).await.unwrap();
    sleep(LONG).await;
    expect_code(&fixture, "cut").await;
}

#[tokio::test(start_paused = true)]
async fn caller_that_leaves_its_upload_is_gone() {
    let (fixture, agent) = Fixture::with_agent();
    let (caller, _stream) = answered(&fixture, &agent).await;
    drop(caller);
    expect_code(&fixture, "caller_gone").await;
}

#[tokio::test(start_paused = true)]
async fn caller_that_leaves_its_upload_to_a_stalled_target_is_gone() {
    let (fixture, agent) = Fixture::with_agent();
    let mut caller = fixture.dial().await;
    let long = post().replace(&BODY_BYTES.to_string(), "100000000");
    caller.write_all(long.as_bytes()).await.unwrap();
    let _stalled = answers_early(&agent).await;
    head(&mut caller).await;
    within(caller.read_exact(&mut [0; 2])).await.unwrap();
    fill(&mut caller).await;
    abort_on_close(&caller).unwrap();
    drop(caller);
    sleep(LONG).await;
    expect_code(&fixture, "caller_gone").await;
}

/// The server has taken all that the caller has sent, and sees the end behind it.
#[tokio::test(start_paused = true)]
async fn caller_that_ends_within_its_upload_to_a_stalled_target_is_gone() {
    let (fixture, agent) = Fixture::with_agent();
    agent.near.script().next_window = Some(WINDOW_BYTES);
    let (mut caller, _stalled) = answered(&fixture, &agent).await;
    let sent = vec![7; WINDOW_BYTES + QUEUE_BYTES];
    caller.write_all(&sent).await.unwrap();
    drop(caller);
    sleep(LONG).await;
    expect_code(&fixture, "caller_gone").await;
}
